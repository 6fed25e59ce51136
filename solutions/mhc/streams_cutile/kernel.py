"""What hyper-connections do with residual streams, cuTile: expand, collapse, write back, and both again for a gradient.

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


@ct.function
def _collapsed(pre, streams, layer_token, STREAMS: Int, TILE: Int):
    total = ct.zeros((TILE,), dtype=ct.float32)
    for c in ct.static_iter(range(STREAMS)):
        total = total + ct.gather(pre, (layer_token, c), check_bounds=False) * streams[c]
    return total


@ct.kernel
def _recompute(
    residual: Rows,
    pre: ct.Array,
    y: Rows,
    post: ct.Array,
    comb: ct.Array,
    layer_inputs: Rows,
    residuals: Rows,
    m: int,
    layers: int,
    STREAMS: Int,
    TILE: Int,
    TAIL: Flag,
):
    """All layers of a block of columns of one token: the streams stay in registers from the first to the last.

    `layers` of them are written back; TAIL: one more has an input.
    """
    blocks = ct.cdiv(y.shape[1], TILE)
    token, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    cols = block * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < y.shape[1]
    streams = ()
    for c in ct.static_iter(range(STREAMS)):
        row = ct.gather(residual, (token * STREAMS + c, cols), mask=inside, check_bounds=False)
        streams += (row.astype(ct.float32),)
    for layer in range(layers):
        here = layer * m + token
        output = ct.gather(y, (here, cols), mask=inside, check_bounds=False).astype(ct.float32)
        entering = _collapsed(pre, streams, here, STREAMS, TILE).astype(y.dtype)
        ct.scatter(layer_inputs, (here, cols), entering, mask=inside, check_bounds=False)
        written = ()
        for o in ct.static_iter(range(STREAMS)):
            mixed = ct.gather(post, (here, o), check_bounds=False) * output
            for i in ct.static_iter(range(STREAMS)):
                mixed = mixed + ct.gather(comb, (here * STREAMS + i, o), check_bounds=False) * streams[i]
            rounded = mixed.astype(y.dtype)
            ct.scatter(residuals, (here * STREAMS + o, cols), rounded, mask=inside, check_bounds=False)
            written += (rounded.astype(ct.float32),)
        streams = written
    if TAIL:
        here = layers * m + token
        entering = _collapsed(pre, streams, here, STREAMS, TILE).astype(y.dtype)
        ct.scatter(layer_inputs, (here, cols), entering, mask=inside, check_bounds=False)


_EXPAND, _APPLY, _POST, _RECOMPUTE = (
    {warps: kernel.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
    for kernel in (_expand, _apply_mix, _post, _recompute)
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


def run_recompute(
    residual: torch.Tensor,
    pre: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    layer_inputs: torch.Tensor,
    residuals: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """layer_inputs[l] = run_pre_apply_mix of the streams and pre[l]; residuals[l] = run_post of them with y[l], post[l], comb[l].

    Shapes: residual [M, C, H], pre [L, M, C], y [N, M, H], post [N, M, C], comb [N, M, C, C] for N = L or L - 1 sublayers that
    are written back; layer_inputs [L, M, H], residuals [N, M, C, H]; y and streams in T (bfloat16 or float32), the rest
    float32; contiguous. The streams are rounded to T after every sublayer, as the operators one by one do. One launch.
    """
    L, M, C = pre.shape
    N, H = len(y), residual.shape[2]
    if M == 0 or H == 0:
        return
    tile = _tile(H, TILE)
    given = residual.view(M * C, H), pre.view(L * M, C), y.view(N * M, H), post.view(N * M, C), comb.view(N * M * C, C)
    args = (*given, layer_inputs.view(L * M, H), residuals.view(N * M * C, H), M, N, C, tile, L > N)
    ct.launch(torch.cuda.current_stream(), (M * -(-H // tile), 1, 1), _RECOMPUTE[WARPS], args)
