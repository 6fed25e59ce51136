"""The gradient of softmax over the last axis from its saved output."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # longer rows do not fit in the registers of a block and are read twice
CHUNK_N = 4096


@ct.kernel
def _softmax_backward_rows(out: Rows, grad_out: Rows, grad_x: Rows, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    values = ct.gather(out, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    along = ct.sum(values * grad, axis=1, keepdims=True)
    result = values * (grad - along)
    ct.scatter(grad_x, (rows, cols), result.astype(grad_x.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _softmax_backward_long_row(out: Rows, grad_out: Rows, grad_x: Rows, TILE_N: Int):
    n = out.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE_N, dtype=ct.int32)
    products = ct.zeros((TILE_N,), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        values = ct.gather(out, (row, cols), mask=cols < n, check_bounds=False).astype(ct.float32)
        grad = ct.gather(grad_out, (row, cols), mask=cols < n, check_bounds=False).astype(ct.float32)
        products = products + values * grad
    along = ct.sum(products)
    for chunk in range(ct.cdiv(n, TILE_N)):  # the second read of the row comes from L2
        cols = chunk * TILE_N + lanes
        inside = cols < n
        values = ct.gather(out, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        grad = ct.gather(grad_out, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        result = values * (grad - along)
        ct.scatter(grad_x, (row, cols), result.astype(grad_x.dtype), mask=inside, check_bounds=False)


_ROWS = {warps: _softmax_backward_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_LONG_ROW = {warps: _softmax_backward_long_row.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    out: torch.Tensor,
    grad_out: torch.Tensor,
    grad_x: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """grad_x = T(out * (grad_out - sum(out * grad_out))), float32 inside, rounded once; T is bf16, fp16 or fp32.

    All [M, N]; rows may be further apart than N elements. A block has TILE_M whole rows and WARPS (4 or 8) warps. None
    chooses by the row length: about 2048 values a block, 8 warps for long rows.
    """
    m, n = out.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    warps = WARPS or (8 if tile_n >= 4096 else 4)
    stream = torch.cuda.current_stream()
    if tile_n > MAX_TILE_N:
        ct.launch(stream, (m, 1, 1), _LONG_ROW[warps], (out, grad_out, grad_x, CHUNK_N))
        return
    tile_m = max(1, min(TILE_M or 2048 // tile_n, MAX_TILE_N // tile_n))
    ct.launch(stream, (-(-m // tile_m), 1, 1), _ROWS[warps], (out, grad_out, grad_x, tile_m, tile_n))
