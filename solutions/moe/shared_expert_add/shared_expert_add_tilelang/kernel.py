"""The sum of two tensors, rounded once, in TileLang: 16 bytes a thread and load."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def shared_expert_add_kernel(dtype, vec, threads, repeat):
    """Compile for `repeat` vectors of `vec` values a thread."""
    N = T.dynamic("N", "int64")

    @T.prim_func
    def shared_expert_add(routed: T.Tensor((N,), dtype), shared: T.Tensor((N,), dtype), out: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, threads * vec * repeat), threads=threads) as block:
            T.assume(N % vec == 0)  # run() chose vec so
            first = T.cast(block, "int64") * (threads * vec * repeat) + T.get_thread_binding(0) * vec
            a = T.alloc_local((repeat, vec), dtype)
            b = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)

            for i in T.unroll(repeat):  # all loads first: they overlap
                if first + i * (threads * vec) < N:
                    for v in T.vectorized(vec):
                        a[i, v] = routed[first + i * (threads * vec) + v]
                    for v in T.vectorized(vec):
                        b[i, v] = shared[first + i * (threads * vec) + v]
            for i in T.unroll(repeat):
                if first + i * (threads * vec) < N:
                    for v in T.unroll(vec):
                        result[v] = T.cast(T.cast(a[i, v], "float32") + T.cast(b[i, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[first + i * (threads * vec) + v] = result[v]

    return shared_expert_add


def run(routed, shared, out, *, threads=256, repeat=1):
    """out = T(routed + shared), added in float32 and rounded once.

    routed, shared, out: [M, N], contiguous; T is bfloat16, float16 or float32. A thread makes `repeat` vectors of at most
    16 bytes.
    """
    count = out.numel()
    if count == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the number of values and all addresses.
    bits = count | (routed.data_ptr() | shared.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    shared_expert_add_kernel(dtype, bits & -bits, threads, repeat)(routed.view(-1), shared.view(-1), out.view(-1))
