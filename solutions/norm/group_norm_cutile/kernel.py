"""Group norm and its gradients, cuTile: pieces of channels leave moments, and each piece joins those of its group; no atomics."""

from typing import Annotated

import cuda.tile as ct
import torch

# The length of a channel is a compile-time constant, so that aligned channels are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

JOINED = 128  # parts of a group whose moments or sums are joined at once
# A group's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
# digits, and a group of equal values gives exactly zero.


@ct.function
def _own(rows, row, cols):
    """Return columns of a channel in float32, zeros behind its end."""
    inside = cols < rows.shape[1]
    return ct.where(inside, ct.gather(rows, (row, cols), mask=inside, check_bounds=False).astype(ct.float32), 0.0)


@ct.function
def _first(x, row):
    """Return the first value of a group."""
    return ct.gather(x, (row, ct.zeros((1,), dtype=ct.int32)), check_bounds=False).astype(ct.float32)


@ct.function
def _parts(values, start, cols, parts):
    """Return numbers of a group's parts, zeros behind the last."""
    inside = cols < parts
    return ct.where(inside, ct.gather(values, start + cols, mask=inside, check_bounds=False), 0.0)


@ct.function
def _counts(cols, parts, pieces, n, TILE):
    """Return the places of each part, zeros behind the last."""
    return ct.where(cols < parts, ct.minimum(n - cols % pieces * TILE, TILE), 0).astype(ct.float32)


@ct.function
def _join(means, squares, start, parts, pieces, n, size, eps, TILE, JOINED):
    """Return the mean of a group, less its first value, and the reciprocal of its deviation."""
    sums = ct.zeros((JOINED,), dtype=ct.float32)
    for step in range(ct.cdiv(parts, JOINED)):
        cols = step * JOINED + ct.arange(JOINED, dtype=ct.int32)
        sums = sums + _counts(cols, parts, pieces, n, TILE) * _parts(means, start, cols, parts)
    mean = ct.sum(sums) / size
    totals = ct.zeros((JOINED,), dtype=ct.float32)
    for step in range(ct.cdiv(parts, JOINED)):
        cols = step * JOINED + ct.arange(JOINED, dtype=ct.int32)
        off = _parts(means, start, cols, parts) - mean
        off = _counts(cols, parts, pieces, n, TILE) * off * off
        totals = totals + _parts(squares, start, cols, parts) + ct.where(cols < parts, off, 0.0)
    return mean, ct.rsqrt(ct.sum(totals) / size + eps)


@ct.kernel
def _moments(x: Rows, means, squares, pieces: int, d: int, TILE: Int):
    """Store the mean of a piece, less the group's first value, and the sum of squares around it."""
    n = x.shape[1]
    row, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
    shifted = ct.where(cols < n, _own(x, row, cols) - _first(x, row // d * d), 0.0)
    mean = ct.sum(shifted) / ct.minimum(n - piece * TILE, TILE)
    centred = ct.where(cols < n, shifted - mean, 0.0)
    ct.scatter(means, ct.bid(0), mean)
    ct.scatter(squares, ct.bid(0), ct.sum(centred * centred))


@ct.kernel
def _normalise(
    x: Rows, weight, bias, means, squares, out: Rows, eps: float, pieces: int, d: int, c: int, size: float, TILE: Int,
    JOINED: Int,
):  # fmt: skip
    """Normalise a piece of a channel."""
    n = x.shape[1]
    row, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
    first_row = row // d * d
    shifted = _own(x, row, cols) - _first(x, first_row)
    scale = ct.gather(weight, row % c, check_bounds=False).astype(ct.float32)
    shift = ct.gather(bias, row % c, check_bounds=False).astype(ct.float32)
    mean, rstd = _join(means, squares, first_row * pieces, d * pieces, pieces, n, size, eps, TILE, JOINED)
    result = (shifted - mean) * rstd * scale + shift
    ct.scatter(out, (row, cols), result.astype(out.dtype), mask=cols < n, check_bounds=False)


@ct.kernel
def _gradient_sums(
    x: Rows, grad_out: Rows, means, squares, shift_sums, scale_sums, eps: float, pieces: int, d: int, size: float, TILE: Int,
    JOINED: Int,
):  # fmt: skip
    """Store the sum of a piece of the incoming gradient, and of its product with the normalised piece."""
    n = x.shape[1]
    row, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
    first_row = row // d * d
    shifted = _own(x, row, cols) - _first(x, first_row)
    grad = _own(grad_out, row, cols)
    mean, rstd = _join(means, squares, first_row * pieces, d * pieces, pieces, n, size, eps, TILE, JOINED)
    normed = ct.where(cols < n, (shifted - mean) * rstd, 0.0)
    ct.scatter(shift_sums, ct.bid(0), ct.sum(grad))
    ct.scatter(scale_sums, ct.bid(0), ct.sum(grad * normed))


@ct.kernel
def _gradient_of_x(
    x: Rows, weight, grad_out: Rows, means, squares, shift_sums, scale_sums, grad_x: Rows, eps: float, pieces: int, d: int,
    c: int, size: float, TILE: Int, JOINED: Int,
):  # fmt: skip
    """Compute the gradient of a piece from the sums of its group."""
    n = x.shape[1]
    row, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
    first_row = row // d * d
    start, parts = first_row * pieces, d * pieces
    shifted = _own(x, row, cols) - _first(x, first_row)
    grad = _own(grad_out, row, cols)
    scale = ct.gather(weight, row % c, check_bounds=False).astype(ct.float32)
    mean, rstd = _join(means, squares, start, parts, pieces, n, size, eps, TILE, JOINED)
    shared = ct.zeros((JOINED,), dtype=ct.float32)
    along = ct.zeros((JOINED,), dtype=ct.float32)
    for step in range(ct.cdiv(parts, JOINED)):
        which = step * JOINED + ct.arange(JOINED, dtype=ct.int32)
        channels = first_row % c + which // pieces
        scales = ct.gather(weight, channels, mask=which < parts, check_bounds=False).astype(ct.float32)
        scales = ct.where(which < parts, scales, 0.0)
        shared = shared + scales * _parts(shift_sums, start, which, parts)
        along = along + scales * _parts(scale_sums, start, which, parts)
    normed = (shifted - mean) * rstd
    result = rstd * (grad * scale - ct.sum(shared) / size - normed * (ct.sum(along) / size))
    ct.scatter(grad_x, (row, cols), result.astype(grad_x.dtype), mask=cols < n, check_bounds=False)


@ct.kernel
def _sum_parts(shift_sums, scale_sums, grad_weight, grad_bias, parts: int, pieces: int, c: int, JOINED: Int):
    """Add up a channel's sums over images and pieces in a fixed order; zeros if there are none."""
    channel = ct.bid(0)
    shifts = ct.zeros((JOINED,), dtype=ct.float32)
    scales = ct.zeros((JOINED,), dtype=ct.float32)
    for step in range(ct.cdiv(parts, JOINED)):
        part = step * JOINED + ct.arange(JOINED, dtype=ct.int32)
        place = (part // pieces * c + channel) * pieces + part % pieces
        inside = part < parts
        shifts = shifts + ct.where(inside, ct.gather(shift_sums, place, mask=inside, check_bounds=False), 0.0)
        scales = scales + ct.where(inside, ct.gather(scale_sums, place, mask=inside, check_bounds=False), 0.0)
    ct.scatter(grad_bias, channel, ct.sum(shifts).astype(grad_bias.dtype))
    ct.scatter(grad_weight, channel, ct.sum(scales).astype(grad_weight.dtype))


def _pieces(x, TILE):
    """Return the channels as rows, the columns of a piece, and the pieces of a channel."""
    b, g, d, s = x.shape
    tile = min(TILE, max(32, 1 << (s - 1).bit_length()))
    return b * g * d, tile, -(-s // tile)


def _launch_moments(x, pieces, d, tile):
    blocks = x.shape[0] * pieces
    means, squares = torch.empty((2, blocks), dtype=torch.float32, device=x.device).unbind(0)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _moments, (x, means, squares, pieces, d, tile))
    return means, squares


def run_group_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor, *, TILE: int = 4096
) -> None:
    """out[B, G, D, S] = T((x - mean) * rsqrt(var + eps) * weight[G, D] + bias[G, D]), moments of each [D, S]; fp32 inside.

    All tensors are contiguous and of one dtype T in bf16, fp16, fp32. A block has up to TILE places of one channel. The first
    kernel leaves a mean and a sum of squares for each piece. The second joins those of its group, and reads its piece again.
    """
    if x.numel() == 0:
        return
    _, g, d, s = x.shape
    rows, tile, pieces = _pieces(x, TILE)
    of_rows = x.view(rows, s)
    moments = _launch_moments(of_rows, pieces, d, tile)
    arguments = (
        of_rows,
        weight.view(-1),
        bias.view(-1),
        *moments,
        out.view(rows, s),
        eps,
        pieces,
        d,
        g * d,
        float(d * s),
    )
    ct.launch(torch.cuda.current_stream(), (rows * pieces, 1, 1), _normalise, (*arguments, tile, JOINED))


def run_group_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float, grad_x: torch.Tensor, grad_weight: torch.Tensor,
    grad_bias: torch.Tensor, *, TILE: int = 4096,
) -> None:  # fmt: skip
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))); grad_weight and grad_bias are the sums of grad_out * n and grad_out.

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight, means of each [D, S]; fp32 inside and in the sums, one
    rounding to T. Shapes and pieces as run_group_norm. Both sums of a piece serve the gradients of scale and shift, and with
    the weights of the group's channels that of x. The order of all sums depends on the shape only.
    """
    b, g, d, s = x.shape
    stream, size, scales = torch.cuda.current_stream(), float(d * s), weight.view(-1)
    rows, tile, pieces = _pieces(x, TILE) if x.numel() else (0, 32, 0)
    blocks = rows * pieces
    sums = torch.empty((2, max(blocks, 1)), dtype=torch.float32, device=x.device).unbind(0)
    if blocks:
        of_rows, grads = x.view(rows, s), grad_out.view(rows, s)
        moments = _launch_moments(of_rows, pieces, d, tile)
        arguments = (of_rows, grads, *moments, *sums, eps, pieces, d, size, tile, JOINED)
        ct.launch(stream, (blocks, 1, 1), _gradient_sums, arguments)
        tensors = (of_rows, scales, grads, *moments, *sums, grad_x.view(rows, s))
        ct.launch(stream, (blocks, 1, 1), _gradient_of_x, (*tensors, eps, pieces, d, g * d, size, tile, JOINED))
    if g * d:
        arguments = (*sums, grad_weight.view(-1), grad_bias.view(-1), b * pieces, max(pieces, 1), g * d, JOINED)
        ct.launch(stream, (g * d, 1, 1), _sum_parts, arguments)
