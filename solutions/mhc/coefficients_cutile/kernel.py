"""The coefficients of hyper-connections, cuTile: gates and Sinkhorn steps, a handful of float32 values a token."""

import cuda.tile as ct
import torch

Int = ct.Constant[int]
LOWEST = float("-inf")


@ct.kernel
def _sinkhorn(z: ct.Array, out: ct.Array, repeat: int, eps: float, STREAMS: Int, TILE: Int, SIDE: Int):
    """z and out [M * STREAMS, STREAMS]; a block has TILE matrices in registers, as tiles of SIDE x SIDE."""
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None, None]
    row = ct.arange(SIDE, dtype=ct.int32)[None, :, None]
    column = ct.arange(SIDE, dtype=ct.int32)[None, None, :]
    inside = (row < STREAMS) & (column < STREAMS)
    here = inside & (token * STREAMS < z.shape[0])
    values = ct.gather(z, (token * STREAMS + row, column), mask=here, padding_value=0.0, check_bounds=False)
    values = ct.where(inside, values, LOWEST)
    exps = ct.exp(values - ct.max(values, axis=2, keepdims=True))
    mixing = ct.where(inside, exps / ct.sum(exps, axis=2, keepdims=True) + eps, 0.0)
    row_eps, column_eps = ct.where(row < STREAMS, eps, 1.0), ct.where(column < STREAMS, eps, 1.0)  # not 0 / 0 outside
    mixing = mixing / (ct.sum(mixing, axis=1, keepdims=True) + column_eps)
    for _ in range(1, repeat):
        mixing = mixing / (ct.sum(mixing, axis=2, keepdims=True) + row_eps)
        mixing = mixing / (ct.sum(mixing, axis=1, keepdims=True) + column_eps)
    ct.scatter(out, (token * STREAMS + row, column), mixing, mask=here, check_bounds=False)


def run_sinkhorn(z: torch.Tensor, repeat: int, eps: float, out: torch.Tensor, *, TILE: int = 32) -> None:
    """out = z's row softmax + eps, divided by columns, then repeat - 1 times by rows and by columns (sums + eps); float32.

    z, out: [M, C, C], contiguous, C <= 8. All steps run in registers, in one launch.
    """
    M, C = z.shape[:2]
    if M == 0:
        return
    side = 1 << (C - 1).bit_length()
    args = (z.view(M * C, C), out.view(M * C, C), repeat, eps, C, TILE, side)
    ct.launch(torch.cuda.current_stream(), (-(-M // TILE), 1, 1), _sinkhorn, args)


@ct.kernel
def _split_mixes(
    mixes: ct.Array,
    scale: ct.Array,
    base: ct.Array,
    pre: ct.Array,
    post: ct.Array,
    comb: ct.Array,
    post_mult: float,
    pre_eps: float,
    STREAMS: Int,
    TILE: Int,
    WIDTH: Int,
):
    m, width = mixes.shape
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    j = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    inside = (token < m) & (j < width)
    part = ct.where(j < STREAMS, 0, ct.where(j < 2 * STREAMS, 1, 2))
    values = ct.gather(mixes, (token, j), mask=inside, check_bounds=False)
    shift = ct.gather(base, j, mask=j < width, check_bounds=False)
    z = values * ct.gather(scale, part, check_bounds=False) + shift
    gate = 1.0 / (1.0 + ct.exp(-z))
    ct.scatter(pre, (token, j), gate + pre_eps, mask=inside & (j < STREAMS), check_bounds=False)
    second = inside & (j >= STREAMS) & (j < 2 * STREAMS)
    ct.scatter(post, (token, j - STREAMS), gate * post_mult, mask=second, check_bounds=False)
    ct.scatter(comb, (token, j - 2 * STREAMS), z, mask=inside & (j >= 2 * STREAMS), check_bounds=False)


def run_pre_split_mixes(
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    post_mult: float,
    pre_eps: float,
    pre: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    TILE: int = 16,
) -> None:
    """z = mixes * scale of its part + base; pre = sigmoid(z) + pre_eps, post = post_mult * sigmoid(z), comb = z; float32.

    Shapes: mixes [M, C * (C + 2)], base of one row, scale [3], pre and post [M, C], comb [M, C, C]; contiguous, C = streams <= 8.
    """
    M, width = mixes.shape
    if M == 0:
        return
    args = (mixes, scale, base, pre, post, comb.view(M, streams * streams), post_mult, pre_eps, streams, TILE)
    args = (*args, 1 << (width - 1).bit_length())
    ct.launch(torch.cuda.current_stream(), (-(-M // TILE), 1, 1), _split_mixes, args)


@ct.kernel
def _head_mix(mix: ct.Array, scale: ct.Array, base: ct.Array, out: ct.Array, eps: float, TILE: Int, WIDTH: Int):
    m, width = mix.shape
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    j = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    inside = (token < m) & (j < width)
    z = ct.gather(mix, (token, j), mask=inside, check_bounds=False) * ct.gather(scale, 0, check_bounds=False)
    z = z + ct.gather(base, j, mask=j < width, check_bounds=False)
    ct.scatter(out, (token, j), 1.0 / (1.0 + ct.exp(-z)) + eps, mask=inside, check_bounds=False)


def run_head_compute_mix(
    mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, out: torch.Tensor, *, TILE: int = 64
) -> None:
    """out[M, C] = sigmoid(mix * scale + base) + eps; scale [1], base [C], all float32 and contiguous, C <= 64."""
    M, C = mix.shape
    if M:
        args = (mix, scale, base, out, eps, TILE, 1 << (C - 1).bit_length())
        ct.launch(torch.cuda.current_stream(), (-(-M // TILE), 1, 1), _head_mix, args)
