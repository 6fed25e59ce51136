"""What hyper-connections do with residual streams, Triton: expand, collapse, write back.

A token's streams are C rows of H values. They are read once, in 16-byte accesses, by programs that own a block of columns of one
token, so that its coefficients are scalars; all loads of a program are in flight before the first is used.
"""

# ruff: noqa: RUF005
# A kernel gathers the streams of a token in a tuple by sums of tuples: Triton has no starred expressions.

import torch
import triton
import triton.language as tl


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _column_block(H: int, block: int | None, most: int) -> int:
    """Columns a program: the widest power of two up to `most` that leaves no tail, and at least 512 where H has them."""
    if block is None:
        divisor = H & -H
        block = min(most, max(divisor, 512))
    return min(block, _pow2(H))


@triton.jit
def _expand(x_ptr, out_ptr, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * H + cols, mask=cols < H)
    for c in tl.static_range(C):
        tl.store(out_ptr + (token * C + c) * H + cols, x, mask=cols < H)


def run_expand(x: torch.Tensor, streams: int, out: torch.Tensor, *, BLOCK=None, num_warps=4) -> None:
    """out[m, c, :] = x[m, :], bits as they are; x [M, H], out [M, streams, H], contiguous."""
    M, H = x.shape
    if M == 0 or H == 0:
        return
    block = _column_block(H, BLOCK, 2048)
    _expand[(M * _cdiv(H, block),)](x, out, streams, H, block, num_warps=num_warps)


@triton.jit
def _apply_mix(residual_ptr, mix_ptr, out_ptr, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    streams = ()
    for c in tl.static_range(C):  # all loads before the first use
        where = residual_ptr + (token * C + c) * H + cols
        streams = streams + (tl.load(where, mask=cols < H, other=0.0, eviction_policy="evict_last"),)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(C):
        total += tl.load(mix_ptr + token * C + c) * streams[c].to(tl.float32)
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


def run_pre_apply_mix(residual: torch.Tensor, mix: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=4) -> None:
    """out[M, H] = T(sum over c of mix[M, c] * residual[M, c, H]), the sum in float32; contiguous, T bfloat16 or float32."""
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    block = _column_block(H, BLOCK, 1024)
    _apply_mix[(M * _cdiv(H, block),)](residual, mix, out, C, H, block, num_warps=num_warps)


@triton.jit
def _post(
    y_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    C: tl.constexpr,
    H: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One rounding, or with ROUNDED those of transformers: the coefficients, both terms, and their sum."""
    dtype = out_ptr.dtype.element_ty
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    y = tl.load(y_ptr + token * H + cols, mask=inside, other=0.0, eviction_policy="evict_last")
    streams = ()
    for i in tl.static_range(C):
        where = residual_ptr + (token * C + i) * H + cols
        streams = streams + (tl.load(where, mask=inside, other=0.0, eviction_policy="evict_last"),)
    for o in tl.static_range(C):
        gain = tl.load(post_ptr + token * C + o)
        mixed = tl.zeros([BLOCK], dtype=tl.float32)
        for i in tl.static_range(C):
            weight = tl.load(comb_ptr + (token * C + i) * C + o)
            if ROUNDED:
                weight = weight.to(dtype).to(tl.float32)
            mixed += weight * streams[i].to(tl.float32)
        if ROUNDED:
            added = (gain.to(dtype).to(tl.float32) * y.to(tl.float32)).to(dtype).to(tl.float32)
            mixed = mixed.to(dtype).to(tl.float32)
        else:
            added = gain * y.to(tl.float32)
        tl.store(out_ptr + (token * C + o) * H + cols, (added + mixed).to(dtype), mask=inside)


def _run_post(y, residual, post, comb, out, rounded, block, num_warps):
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    block = _column_block(H, block, 1024)
    _post[(M * _cdiv(H, block),)](y, residual, post, comb, out, C, H, rounded, block, num_warps=num_warps)


def run_post(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=4,
) -> None:
    """out[:, o] = T(post[:, o] * y + sum over i of comb[:, i, o] * residual[:, i]), float32 inside, one rounding.

    Shapes: y [M, H], residual and out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32; contiguous.
    """
    _run_post(y, residual, post, comb, out, False, BLOCK, num_warps)


def run_post_hf(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=4,
) -> None:
    """As run_post, with the roundings of transformers: T(T(T(post) * y) + T(sum of T(comb) * residual))."""
    _run_post(y, residual, post, comb, out, True, BLOCK, num_warps)


@triton.jit(do_not_specialize=["M"])
def _recompute(
    residual_ptr,
    pre_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    layer_inputs_ptr,
    residuals_ptr,
    M,
    L: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All layers of a block of columns of one token: the streams stay in registers from the first to the last."""
    dtype = residuals_ptr.dtype.element_ty
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    streams = ()
    for c in tl.static_range(C):
        streams = streams + (tl.load(residual_ptr + (token * C + c) * H + cols, mask=inside, other=0.0).to(tl.float32),)
    for layer in tl.static_range(L):
        here = layer * tl.cast(M, tl.int64) + token
        collapsed = tl.zeros([BLOCK], dtype=tl.float32)
        for c in tl.static_range(C):
            collapsed += tl.load(pre_ptr + here * C + c) * streams[c]
        tl.store(layer_inputs_ptr + here * H + cols, collapsed.to(dtype), mask=inside)
        if layer < N:
            y = tl.load(y_ptr + here * H + cols, mask=inside, other=0.0).to(tl.float32)
            written = ()
            for o in tl.static_range(C):
                mixed = tl.load(post_ptr + here * C + o) * y
                for i in tl.static_range(C):
                    mixed += tl.load(comb_ptr + (here * C + i) * C + o) * streams[i]
                rounded = mixed.to(dtype)
                tl.store(residuals_ptr + (here * C + o) * H + cols, rounded, mask=inside)
                written = written + (rounded.to(tl.float32),)
            streams = written


def run_recompute(
    residual: torch.Tensor,
    pre: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    layer_inputs: torch.Tensor,
    residuals: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=4,
) -> None:
    """layer_inputs[l] = run_pre_apply_mix of the streams and pre[l]; residuals[l] = run_post of them with y[l], post[l], comb[l].

    Shapes: residual [M, C, H], pre [L, M, C], y [N, M, H], post [N, M, C], comb [N, M, C, C] for N = L or L - 1 sublayers that
    are written back; layer_inputs [L, M, H], residuals [N, M, C, H]; y and streams in T (bfloat16 or float32), the rest
    float32; contiguous. The streams are rounded to T after every sublayer, as the operators one by one do. One launch.
    """
    L, M, C = pre.shape
    H = residual.shape[2]
    if M == 0 or H == 0:
        return
    block = _column_block(H, BLOCK, 1024)
    _recompute[(M * _cdiv(H, block),)](
        residual, pre, y, post, comb, layer_inputs, residuals, M, L, len(y), C, H, block, num_warps=num_warps
    )
