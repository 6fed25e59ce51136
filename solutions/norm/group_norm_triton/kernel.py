"""Group norm and its gradients, Triton: pieces of channels leave moments, and each piece joins those of its group; no atomics."""

import torch
import triton
import triton.language as tl

# Parts of a group whose moments or sums are joined at once.
JOINED = tl.constexpr(128)
# A group's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
# digits, and a group of equal values gives exactly zero.


@triton.jit
def _own_piece(pieces, D, BLOCK: tl.constexpr):
    """Return the channel row of a program (one of B * C), its group's first channel row, its number and the columns."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    return row, row // D * D, tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=["pieces"])
def _moments(x_ptr, moments_ptr, pieces, S, D, BLOCK: tl.constexpr):
    """Store the mean of a piece, less the group's first value, and the sum of squares around it."""
    row, first_row, cols = _own_piece(pieces, D, BLOCK)
    first = tl.load(x_ptr + first_row * S).to(tl.float32)
    inside = cols < S
    shifted = tl.where(inside, tl.load(x_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32) - first, 0.0)
    count = tl.minimum(S - tl.program_id(0) % pieces * BLOCK, BLOCK)
    mean = tl.sum(shifted, axis=0) / count
    centred = tl.where(inside, shifted - mean, 0.0)
    moments_ptr += 2 * tl.program_id(0).to(tl.int64)
    tl.store(moments_ptr, mean)
    tl.store(moments_ptr + 1, tl.sum(centred * centred, axis=0))


@triton.jit
def _join(moments_ptr, first_row, pieces, S, D, eps, BLOCK: tl.constexpr):
    """Return the mean of a group, less its first value, and the reciprocal of its deviation."""
    moments_ptr += 2 * first_row * pieces
    parts, size = D * pieces, tl.cast(D, tl.float32) * S
    sums = tl.zeros([JOINED], dtype=tl.float32)
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        count = tl.minimum(S - part % pieces * BLOCK, BLOCK).to(tl.float32)
        sums += count * tl.load(moments_ptr + 2 * part, mask=part < parts, other=0.0)
    mean = tl.sum(sums, axis=0) / size
    squares = tl.zeros([JOINED], dtype=tl.float32)
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        count = tl.minimum(S - part % pieces * BLOCK, BLOCK).to(tl.float32)
        off = tl.where(part < parts, tl.load(moments_ptr + 2 * part, mask=part < parts, other=0.0) - mean, 0.0)
        squares += tl.load(moments_ptr + 2 * part + 1, mask=part < parts, other=0.0) + count * off * off
    return mean, tl.rsqrt(tl.sum(squares, axis=0) / size + eps)


@triton.jit(do_not_specialize=["pieces"])
def _normalise(
    x_ptr, weight_ptr, bias_ptr, moments_ptr, out_ptr, eps, pieces, S, D, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise a piece of a channel."""
    row, first_row, cols = _own_piece(pieces, D, BLOCK)
    inside = cols < S
    value = tl.load(x_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x_ptr + first_row * S).to(tl.float32)
    scale = tl.load(weight_ptr + row % C).to(tl.float32)
    shift = tl.load(bias_ptr + row % C).to(tl.float32)
    mean, rstd = _join(moments_ptr, first_row, pieces, S, D, eps, BLOCK)
    result = (value - first - mean) * rstd * scale + shift
    tl.store(out_ptr + row * S + cols, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pieces"])
def _gradient_sums(x_ptr, grad_out_ptr, moments_ptr, sums_ptr, eps, pieces, S, D, BLOCK: tl.constexpr):
    """Store the sum of a piece of the incoming gradient, and of its product with the normalised piece."""
    row, first_row, cols = _own_piece(pieces, D, BLOCK)
    inside = cols < S
    value = tl.load(x_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x_ptr + first_row * S).to(tl.float32)
    mean, rstd = _join(moments_ptr, first_row, pieces, S, D, eps, BLOCK)
    normed = tl.where(inside, (value - first - mean) * rstd, 0.0)
    sums_ptr += 2 * tl.program_id(0).to(tl.int64)
    tl.store(sums_ptr, tl.sum(grad, axis=0))
    tl.store(sums_ptr + 1, tl.sum(grad * normed, axis=0))


@triton.jit(do_not_specialize=["pieces"])
def _gradient_of_x(
    x_ptr, weight_ptr, grad_out_ptr, moments_ptr, sums_ptr, grad_x_ptr, eps, pieces, S, D, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a piece from the sums of its group."""
    row, first_row, cols = _own_piece(pieces, D, BLOCK)
    inside = cols < S
    value = tl.load(x_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out_ptr + row * S + cols, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x_ptr + first_row * S).to(tl.float32)
    scale = tl.load(weight_ptr + row % C).to(tl.float32)
    mean, rstd = _join(moments_ptr, first_row, pieces, S, D, eps, BLOCK)
    parts, size = D * pieces, tl.cast(D, tl.float32) * S
    shared = tl.zeros([JOINED], dtype=tl.float32)
    along = tl.zeros([JOINED], dtype=tl.float32)
    sums_ptr += 2 * first_row * pieces
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        of_channel = tl.load(weight_ptr + first_row % C + part // pieces, mask=part < parts, other=0.0).to(tl.float32)
        shared += of_channel * tl.load(sums_ptr + 2 * part, mask=part < parts, other=0.0)
        along += of_channel * tl.load(sums_ptr + 2 * part + 1, mask=part < parts, other=0.0)
    normed = (value - first - mean) * rstd
    result = rstd * (grad * scale - tl.sum(shared, axis=0) / size - normed * (tl.sum(along, axis=0) / size))
    tl.store(grad_x_ptr + row * S + cols, result.to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "pieces"])
def _sum_parts(sums_ptr, grad_weight_ptr, grad_bias_ptr, B, pieces, C):
    """Add up a channel's sums over images and pieces in a fixed order; zeros if there are none."""
    channel = tl.program_id(0)
    parts = B * pieces
    scale_sums = tl.zeros([JOINED], dtype=tl.float32)
    shift_sums = tl.zeros([JOINED], dtype=tl.float32)
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        ptrs = sums_ptr + 2 * (((part // pieces).to(tl.int64) * C + channel) * pieces + part % pieces)
        shift_sums += tl.load(ptrs, mask=part < parts, other=0.0)
        scale_sums += tl.load(ptrs + 1, mask=part < parts, other=0.0)
    dtype = grad_weight_ptr.dtype.element_ty
    tl.store(grad_weight_ptr + channel, tl.sum(scale_sums, axis=0).to(dtype))
    tl.store(grad_bias_ptr + channel, tl.sum(shift_sums, axis=0).to(dtype))


def _pieces(x, BLOCK):
    """Return the columns of a piece, a power of two that is not far beyond the row, and the pieces of a channel."""
    S = x.shape[3]
    block = min(BLOCK, max(32, 1 << (S - 1).bit_length()))
    return block, -(-S // block)


def _launch_moments(x, block, pieces, num_warps):
    B, G, D, S = x.shape
    moments = torch.empty((B * G * D * pieces, 2), dtype=torch.float32, device=x.device)
    _moments[(B * G * D * pieces,)](x, moments, pieces, S, D, block, num_warps=num_warps)
    return moments


def run_group_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor,
    *, BLOCK: int = 4096, num_warps: int = 4,
) -> None:  # fmt: skip
    """out[B, G, D, S] = T((x - mean) * rsqrt(var + eps) * weight[G, D] + bias[G, D]), moments of each [D, S]; fp32 inside.

    All tensors are contiguous and of one dtype T in bfloat16, float16, float32. A program has up to BLOCK places of one
    channel. The first kernel leaves a mean and a sum of squares for each piece. The second joins those of its group, which takes
    a read of D * S / BLOCK pairs from the cache, and reads its piece again.
    """
    B, G, D, S = x.shape
    if x.numel() == 0:
        return
    block, pieces = _pieces(x, BLOCK)
    moments = _launch_moments(x, block, pieces, num_warps)
    grid = (B * G * D * pieces,)
    _normalise[grid](x, weight, bias, moments, out, eps, pieces, S, D, G * D, block, num_warps=num_warps)


def run_group_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float, grad_x: torch.Tensor, grad_weight: torch.Tensor,
    grad_bias: torch.Tensor, *, BLOCK: int = 4096, num_warps: int = 4,
) -> None:  # fmt: skip
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))); grad_weight and grad_bias are the sums of grad_out * n and grad_out.

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight, means of each [D, S]; fp32 inside and in the sums, one
    rounding to T. Shapes and pieces as run_group_norm. Both sums of a piece serve the gradients of scale and shift, and with
    the weights of the group's channels that of x. The order of all sums depends on the shape only.
    """
    B, G, D, S = x.shape
    block, pieces = _pieces(x, BLOCK) if x.numel() else (32, 0)
    sums = torch.empty((max(B * G * D * pieces, 1), 2), dtype=torch.float32, device=x.device)
    if x.numel():
        grid = (B * G * D * pieces,)
        moments = _launch_moments(x, block, pieces, num_warps)
        _gradient_sums[grid](x, grad_out, moments, sums, eps, pieces, S, D, block, num_warps=num_warps)
        tensors = (x, weight, grad_out, moments, sums, grad_x)
        _gradient_of_x[grid](*tensors, eps, pieces, S, D, G * D, block, num_warps=num_warps)
    if weight.numel():
        _sum_parts[(G * D,)](sums, grad_weight, grad_bias, B if pieces else 0, max(pieces, 1), G * D, num_warps=1)
