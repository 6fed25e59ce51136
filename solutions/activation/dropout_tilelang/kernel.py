"""Dropout with the mask of a seed and an offset, TileLang: one read and one write, and no mask in memory."""

import functools

import tilelang
import tilelang.language as T
import torch


@T.macro
def philox(block, seed, offset, wide, key, bits):
    """Leave in bits the four numbers of Philox 4x32-10 for a block: the key is the seed, the counter the block and the offset."""
    bits[0] = T.cast(block & 0xFFFFFFFF, "uint32")
    bits[1] = T.cast((block >> 32) & 0xFFFFFFFF, "uint32")
    bits[2] = T.cast(offset & 0xFFFFFFFF, "uint32")
    bits[3] = T.cast((offset >> 32) & 0xFFFFFFFF, "uint32")
    key[0] = T.cast(seed & 0xFFFFFFFF, "uint32")
    key[1] = T.cast((seed >> 32) & 0xFFFFFFFF, "uint32")
    for _ in T.unroll(10):
        wide[0] = T.cast(bits[0], "uint64") * T.uint64(0xD2511F53)
        wide[1] = T.cast(bits[2], "uint64") * T.uint64(0xCD9E8D57)
        bits[0] = T.cast(wide[1] >> T.uint64(32), "uint32") ^ bits[1] ^ key[0]
        bits[1] = T.cast(wide[1] & T.uint64(0xFFFFFFFF), "uint32")
        bits[2] = T.cast(wide[0] >> T.uint64(32), "uint32") ^ bits[3] ^ key[1]
        bits[3] = T.cast(wide[0] & T.uint64(0xFFFFFFFF), "uint32")
        key[0] = key[0] + T.uint32(0x9E3779B9)
        key[1] = key[1] + T.uint32(0xBB67AE85)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def dropout_kernel(dtype, vec, threads):
    """Compile for vectors of `vec` elements: a thread has 16 bytes, which are one or two blocks of Philox."""
    N = T.dynamic("N", "int64")
    own = 16 // dtype.itemsize

    @T.prim_func
    def dropout(
        x: T.Tensor((N,), dtype),
        state: T.Tensor((2,), "int64"),
        out: T.Tensor((N,), dtype),
        least: T.int64,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(N, threads * own), threads=threads) as block:
            first = (T.cast(block, "int64") * threads + T.get_thread_binding(0)) * own
            loaded = T.alloc_local((own,), dtype)
            result = T.alloc_local((own,), dtype)
            bits = T.alloc_local((4,), "uint32")
            key = T.alloc_local((2,), "uint32")
            wide = T.alloc_local((2,), "uint64")
            seed = T.alloc_var("int64", init=0)
            offset = T.alloc_var("int64", init=0)

            seed = state[0]
            offset = state[1]
            for i in T.unroll(own // vec):
                for v in T.vectorized(vec):
                    loaded[i * vec + v] = T.cast(0.0, dtype)
                if first + i * vec < N:
                    for v in T.vectorized(vec):
                        loaded[i * vec + v] = x[first + i * vec + v]
            for part in T.unroll(own // 4):
                philox(first // 4 + part, seed, offset, wide, key, bits)
                for v in T.unroll(4):
                    result[part * 4 + v] = T.cast(0.0, dtype)
                    if T.cast(bits[v], "int64") >= least:
                        result[part * 4 + v] = T.cast(T.cast(loaded[part * 4 + v], "float32") * scale, dtype)
            for i in T.unroll(own // vec):
                if first + i * vec < N:
                    for v in T.vectorized(vec):
                        out[first + i * vec + v] = result[i * vec + v]

    return dropout


def run(x: torch.Tensor, state: torch.Tensor, p: float, out: torch.Tensor, *, threads: int = 256) -> None:
    """Write out [N] = T(x / (1 - p)), or 0 for an element whose random bits are less than p * 2**32.

    x in bfloat16, float16 or float32; state [2] int64, the seed and the offset. The bits of element i are number i % 4 of
    block i // 4 of Philox 4x32-10.
    """
    N, itemsize = x.shape[0], x.dtype.itemsize
    if N == 0:
        return
    # The widest power of two, at most 16 bytes, that divides the elements and both addresses.
    bits = N | 16 // itemsize | (x.data_ptr() | out.data_ptr()) // itemsize
    dropout_kernel(x.dtype, bits & -bits, threads)(x, state, out, int(p * 2**32), 1 / (1 - p))
