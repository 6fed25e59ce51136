"""The first of equal ids of each row, in place; Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _unique_tile(ids_ptr, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    places = rows * K + cols
    mask = (rows < M) & (cols < K)
    ids = tl.load(ids_ptr + places, mask=mask, other=-1)
    # Every id against every earlier one, from registers: nothing is read again that another thread may have overwritten.
    earlier = tl.arange(0, BLOCK_K)[None, None, :] < tl.arange(0, BLOCK_K)[None, :, None]
    equal = (ids[:, :, None] == ids[:, None, :]) & earlier
    repeated = tl.max(equal.to(tl.int32), axis=2) > 0
    tl.store(ids_ptr + places, tl.where(repeated, -1, ids), mask=mask)


def run(ids: torch.Tensor, *, BLOCK=4096, num_warps=4):
    """In each row of ids the first of equal ids stays and the others become -1, in place.

    Shapes: ids [M, K], int64, contiguous; K <= 32.
    Mapping: a program owns whole rows, as many as give about BLOCK comparisons.
    """
    M, K = ids.shape
    if M == 0:
        return
    block_k = 1 << (K - 1).bit_length()
    block_m = max(1, BLOCK // (block_k * block_k))
    _unique_tile[((M + block_m - 1) // block_m,)](ids, M, K, block_m, block_k, num_warps=num_warps)
