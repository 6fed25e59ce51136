"""Matrices out of place, rows and columns exchanged, in TileLang: a tile of 128 bytes a side goes through shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

ROW_BYTES = 128  # of a row of the tile: all 32 banks of shared memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def transpose_kernel(dtype, vec, out_vec, threads):
    """Compile for elements of an integer type; loads take `vec` of them, stores `out_vec`."""
    B, M, N = T.dynamic("B M N")
    x_batch, x_row, out_batch, out_row = T.dynamic("x_batch x_row out_batch out_row", "int64")
    tile = ROW_BYTES // dtype.itemsize
    wide = 16 // dtype.itemsize  # elements of 16 bytes, eight of which are a row of the tile
    lanes, out_lanes = tile // vec, tile // out_vec

    @T.prim_func
    def transpose(
        x: T.StridedTensor((B, M, N), (x_batch, x_row, 1), dtype),
        out: T.StridedTensor((B, N, M), (out_batch, out_row, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(N, tile), T.ceildiv(M, tile), B, threads=threads) as (strip, down, batch):
            T.assume(x_row % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(x_batch % vec == 0)
            T.assume(out_row % out_vec == 0)
            T.assume(out_batch % out_vec == 0)
            T.assume(N % vec == 0)
            T.assume(M % out_vec == 0)
            thread = T.get_thread_binding(0)
            # Element (row, column) of x lies in row `column`, in the 16 bytes row // wide ^ column // wide: neighbouring threads,
            # which have neighbouring columns, write to different banks, and 16 bytes stay together for whoever reads them.
            turned = T.alloc_shared((tile, tile), dtype)
            values = T.alloc_local((vec,), dtype)
            result = T.alloc_local((out_vec,), dtype)

            for i in T.unroll(tile * lanes // threads):
                row = (i * threads + thread) // lanes
                column = (i * threads + thread) % lanes * vec
                if down * tile + row < M and strip * tile + column < N:
                    for v in T.vectorized(vec):
                        values[v] = x[batch, down * tile + row, strip * tile + column + v]
                    for v in T.unroll(vec):
                        place = (row // wide ^ ((column + v) // wide % 8)) * wide + row % wide
                        turned[column + v, place] = values[v]
            T.sync_threads()
            for i in T.unroll(tile * out_lanes // threads):
                column = (i * threads + thread) // out_lanes
                row = (i * threads + thread) % out_lanes * out_vec
                if strip * tile + column < N and down * tile + row < M:
                    for v in T.vectorized(out_vec):
                        place = (row // wide ^ (column // wide % 8)) * wide + row % wide + v
                        result[v] = turned[column, place]
                    for v in T.vectorized(out_vec):
                        out[batch, strip * tile + column, down * tile + row + v] = result[v]

    return transpose


def _width(tensor, columns):
    """Elements that one access of at most 16 bytes may take: the widest power of two that divides all of these."""
    size = tensor.element_size()
    bits = columns | tensor.stride(0) | tensor.stride(1) | tensor.data_ptr() // size | 16 // size
    return bits & -bits


def run(x, out, *, threads=None):
    """out[b, n, m] = x[b, m, n], bits and not values: floats are moved as integers of their width.

    x: [B, M, N] with last stride 1 and any others, out: [B, N, M] likewise; B at most 65535. threads None: four loads of 16 bytes
    a thread, two of four-byte elements.
    """
    _, M, N = x.shape
    if x.numel() == 0:
        return
    kind = _INTEGERS[x.element_size()]
    threads = threads or {1: 256, 2: 128, 4: 128}[x.element_size()]
    transpose_kernel(kind, _width(x, N), _width(out, M), threads)(x.view(kind), out.view(kind))
