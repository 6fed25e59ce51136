"""The shared expert added to the routed ones in one pass."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]


@ct.kernel
def _add(routed: ct.Array, shared: ct.Array, out: ct.Array, TILE: Int):
    places = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = places < out.shape[0]
    a = ct.gather(routed, places, mask=inside, check_bounds=False).astype(ct.float32)
    b = ct.gather(shared, places, mask=inside, check_bounds=False).astype(ct.float32)
    ct.scatter(out, places, (a + b).astype(out.dtype), mask=inside, check_bounds=False)


_ADD = {warps: _add.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_shared_expert_add(
    routed: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, N] = T(routed + shared), T = bf16, fp16 or fp32, added in fp32 and rounded once; contiguous, fewer than 2**31
    values.

    A block adds TILE values; None chooses 2048 (1024 in fp32), or half of it while that would leave multiprocessors idle.
    """
    count = out.numel()
    if count == 0:
        return
    if TILE is None:
        TILE = 4096 // out.element_size()
        if count < 256 * TILE:
            TILE //= 2
    args = (routed.view(-1), shared.view(-1), out.view(-1), TILE)
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), _ADD[WARPS], args)


@ct.kernel
def _shared_expert_gate(routed: Rows, x: Rows, weight: Vector, shared: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    # The four gathers are independent, so all are in flight before the reduction waits.
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    scale = ct.gather(weight, cols, mask=cols < n, check_bounds=False).astype(ct.float32)
    gated = ct.gather(shared, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    added = ct.gather(routed, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    logit = ct.sum(values * scale, axis=1, keepdims=True).astype(out.dtype).astype(ct.float32)
    gate = (1.0 / (1.0 + ct.exp(-logit))).astype(out.dtype).astype(ct.float32)
    product = (gate * gated).astype(out.dtype).astype(ct.float32)
    ct.scatter(out, (rows, cols), (added + product).astype(out.dtype), mask=inside, check_bounds=False)


_GATE = {warps: _shared_expert_gate.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_shared_expert_gate(
    routed: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """out[M, N] = T(routed + T(g * shared)), g = T(sigmoid(T(x . weight))), T = bf16, fp16 or fp32; sums in fp32.

    routed, x, shared and weight[1, N] are contiguous, N <= 16384. A block handles TILE_M whole rows with WARPS (4 or 8)
    warps. None chooses by shape: TILE_M so that a block has at least 16 bytes a thread to load; 8 warps for long rows.
    """
    m, n = x.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    if WARPS is None:
        WARPS = 8 if tile_n >= 2048 else 4
    TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, 16384 // tile_n))
    args = (routed, x, weight.view(-1), shared, out, TILE_M, tile_n)
    ct.launch(torch.cuda.current_stream(), (-(-m // TILE_M), 1, 1), _GATE[WARPS], args)
