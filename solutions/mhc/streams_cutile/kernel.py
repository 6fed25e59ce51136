"""What hyper-connections do with residual streams, cuTile: expand, collapse, write back.

A block has some columns of one token: all streams of these are read once, and the token's coefficients are scalars.
"""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@ct.kernel
def _expand(x: Rows, out: Rows, STREAMS: Int, TILE: Int):
    blocks = ct.cdiv(x.shape[1], TILE)
    token, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    cols = block * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < x.shape[1]
    values = ct.gather(x, (token, cols), mask=inside, check_bounds=False)
    for c in ct.static_iter(range(STREAMS)):
        ct.scatter(out, (token * STREAMS + c, cols), values, mask=inside, check_bounds=False)


@ct.kernel
def _apply_mix(residual: Rows, mix: ct.Array, out: Rows, STREAMS: Int, TILE: Int):
    blocks = ct.cdiv(out.shape[1], TILE)
    token, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    cols = block * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < out.shape[1]
    streams = ()
    for c in ct.static_iter(range(STREAMS)):  # all loads before the first use
        streams += (ct.gather(residual, (token * STREAMS + c, cols), mask=inside, check_bounds=False),)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for c in ct.static_iter(range(STREAMS)):
        weight = ct.gather(mix, (token, c), check_bounds=False)
        total = total + weight * streams[c].astype(ct.float32)
    ct.scatter(out, (token, cols), total.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _post(y: Rows, residual: Rows, post: ct.Array, comb: ct.Array, out: Rows, STREAMS: Int, TILE: Int, ROUNDED: Flag):
    """One rounding, or with ROUNDED those of transformers: the coefficients, both terms, and their sum."""
    blocks = ct.cdiv(y.shape[1], TILE)
    token, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    cols = block * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < y.shape[1]
    output = ct.gather(y, (token, cols), mask=inside, check_bounds=False).astype(ct.float32)
    streams = ()
    for i in ct.static_iter(range(STREAMS)):
        row = ct.gather(residual, (token * STREAMS + i, cols), mask=inside, check_bounds=False)
        streams += (row.astype(ct.float32),)
    for o in ct.static_iter(range(STREAMS)):
        gain = ct.gather(post, (token, o), check_bounds=False)
        mixed = ct.zeros((TILE,), dtype=ct.float32)
        for i in ct.static_iter(range(STREAMS)):
            weight = ct.gather(comb, (token * STREAMS + i, o), check_bounds=False)
            if ROUNDED:
                weight = weight.astype(out.dtype).astype(ct.float32)
            mixed = mixed + weight * streams[i]
        if ROUNDED:
            added = (gain.astype(out.dtype).astype(ct.float32) * output).astype(out.dtype).astype(ct.float32)
            mixed = mixed.astype(out.dtype).astype(ct.float32)
        else:
            added = gain * output
        result = (added + mixed).astype(out.dtype)
        ct.scatter(out, (token * STREAMS + o, cols), result, mask=inside, check_bounds=False)


_EXPAND, _APPLY, _POST = (
    {warps: kernel.replace_hints(num_worker_warps=warps) for warps in (4, 8)} for kernel in (_expand, _apply_mix, _post)
)


def _tile(H: int, tile: int | None) -> int:
    """Columns a block: the widest power of two up to 1024 that leaves no tail, and at least 512 where H has them."""
    return min(tile or min(1024, max(H & -H, 512)), 1 << (H - 1).bit_length())


def run_expand(x: torch.Tensor, streams: int, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[m, c, :] = x[m, :], bits as they are; x [M, H], out [M, streams, H], contiguous."""
    M, H = x.shape
    if M == 0 or H == 0:
        return
    tile = _tile(H, TILE)
    grid = (M * -(-H // tile), 1, 1)
    ct.launch(torch.cuda.current_stream(), grid, _EXPAND[WARPS], (x, out.view(M * streams, H), streams, tile))


def run_pre_apply_mix(
    residual: torch.Tensor, mix: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, H] = T(sum over c of mix[M, c] * residual[M, c, H]), the sum in float32; contiguous, T bfloat16 or float32."""
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    tile = _tile(H, TILE)
    grid = (M * -(-H // tile), 1, 1)
    ct.launch(torch.cuda.current_stream(), grid, _APPLY[WARPS], (residual.view(M * C, H), mix, out, C, tile))


def _run_post(y, residual, post, comb, out, rounded, tile, warps):
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    tile = _tile(H, tile)
    grid = (M * -(-H // tile), 1, 1)
    streams, matrices, written = residual.view(M * C, H), comb.view(M * C, C), out.view(M * C, H)
    args = (y, streams, post, matrices, written, C, tile, rounded)
    ct.launch(torch.cuda.current_stream(), grid, _POST[warps], args)


def run_post(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """out[:, o] = T(post[:, o] * y + sum over i of comb[:, i, o] * residual[:, i]), float32 inside, one rounding.

    Shapes: y [M, H], residual and out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32; contiguous.
    """
    _run_post(y, residual, post, comb, out, False, TILE, WARPS)


def run_post_hf(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """As run_post, with the roundings of transformers: T(T(T(post) * y) + T(sum of T(comb) * residual))."""
    _run_post(y, residual, post, comb, out, True, TILE, WARPS)
