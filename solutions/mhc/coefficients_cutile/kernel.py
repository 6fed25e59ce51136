"""The coefficients of hyper-connections, cuTile: the projection of all streams of a token, gates, Sinkhorn steps.

The projection reads all streams and is bound by memory; the rest is a handful of float32 values a token and bound by latency.
"""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO
LOWEST = float("-inf")
FEW_TOKENS = 64  # up to this many a block of the last step has one token's coefficients, else several


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()


@ct.function
def _normalised(values, inside, row, column, repeat, eps, STREAMS: Int):
    """Sinkhorn of matrices (TILE, SIDE, SIDE), which are STREAMS x STREAMS; zeros outside."""
    values = ct.where(inside, values, LOWEST)
    exps = ct.exp(values - ct.max(values, axis=2, keepdims=True))
    mixing = ct.where(inside, exps / ct.sum(exps, axis=2, keepdims=True) + eps, 0.0)
    row_eps, column_eps = ct.where(row < STREAMS, eps, 1.0), ct.where(column < STREAMS, eps, 1.0)  # not 0 / 0 outside
    mixing = mixing / (ct.sum(mixing, axis=1, keepdims=True) + column_eps)
    for _ in range(1, repeat):
        mixing = mixing / (ct.sum(mixing, axis=2, keepdims=True) + row_eps)
        mixing = mixing / (ct.sum(mixing, axis=1, keepdims=True) + column_eps)
    return mixing


@ct.kernel
def _sinkhorn(z: ct.Array, out: ct.Array, repeat: int, eps: float, STREAMS: Int, TILE: Int, SIDE: Int):
    """z and out [M * STREAMS, STREAMS]; a block has TILE matrices in registers, as tiles of SIDE x SIDE."""
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None, None]
    row = ct.arange(SIDE, dtype=ct.int32)[None, :, None]
    column = ct.arange(SIDE, dtype=ct.int32)[None, None, :]
    inside = (row < STREAMS) & (column < STREAMS)
    here = inside & (token * STREAMS < z.shape[0])
    values = ct.gather(z, (token * STREAMS + row, column), mask=here, padding_value=0.0, check_bounds=False)
    mixing = _normalised(values, inside, row, column, repeat, eps, STREAMS)
    ct.scatter(out, (token * STREAMS + row, column), mixing, mask=here, check_bounds=False)


def run_sinkhorn(z: torch.Tensor, repeat: int, eps: float, out: torch.Tensor, *, TILE: int = 32) -> None:
    """out = z's row softmax + eps, divided by columns, then repeat - 1 times by rows and by columns (sums + eps); float32.

    z, out: [M, C, C], contiguous, C <= 8. All steps run in registers, in one launch.
    """
    M, C = z.shape[:2]
    if M == 0:
        return
    side = _pow2(C)
    args = (z.view(M * C, C), out.view(M * C, C), repeat, eps, C, TILE, side)
    ct.launch(torch.cuda.current_stream(), (_cdiv(M, TILE), 1, 1), _sinkhorn, args)


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
    args = (*args, _pow2(width))
    ct.launch(torch.cuda.current_stream(), (_cdiv(M, TILE), 1, 1), _split_mixes, args)


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
        args = (mix, scale, base, out, eps, TILE, _pow2(C))
        ct.launch(torch.cuda.current_stream(), (_cdiv(M, TILE), 1, 1), _head_mix, args)


@ct.function
def _in_three(values):
    """Three bfloat16 numbers whose sum is a float32 one to the last bit."""
    first = values.astype(ct.bfloat16)
    rest = values - first.astype(ct.float32)
    second = rest.astype(ct.bfloat16)
    return first, second, (rest - second.astype(ct.float32)).astype(ct.bfloat16)


@ct.function
def _block_products(x, factors, TILE_M: Int, WIDTH: Int):
    """x (TILE_M, TILE_K) times float32 factors (TILE_K, WIDTH), on tensor cores and yet with float32 products.

    A float32 number is the sum of three bfloat16 numbers, and a product of two of these is exact in float32. Of the products of
    two float32 numbers those below their last bit are left out. Smallest first; the sum starts from zero here, so that the
    truncation of long sums in tensor cores does not add up.
    """
    first, second, third = _in_three(factors)
    block = ct.zeros((TILE_M, WIDTH), dtype=ct.float32)
    if x.dtype == ct.bfloat16:
        block = ct.mma(x, third, block)
        block = ct.mma(x, second, block)
        return ct.mma(x, first, block)
    high, middle, low = _in_three(x)
    block = ct.mma(low, first, block)
    block = ct.mma(middle, second, block)
    block = ct.mma(high, third, block)
    block = ct.mma(middle, first, block)
    block = ct.mma(high, second, block)
    return ct.mma(high, first, block)


@ct.kernel
def _partial(
    residual: Rows, fn: Rows, partial: ct.Array, steps: int, SPLITS: Int, TILE_M: Int, TILE_K: Int, WIDTH: Int
):
    """The products of a run of `steps` tiles of columns for a tile of tokens, and their sums of squares in column J.

    residual [M, K], fn [J, K]; partial [SPLITS * M, WIDTH].
    """
    m, width = residual.shape
    values = fn.shape[0]
    split, tile = ct.bid(0) % SPLITS, ct.bid(0) // SPLITS
    products = ct.zeros((TILE_M, WIDTH), dtype=ct.float32)
    squares = ct.zeros((TILE_M, 1), dtype=ct.float32)
    for step in range(split * steps, ct.minimum((split + 1) * steps, ct.cdiv(width, TILE_K))):
        x = ct.load(residual, (tile, step), (TILE_M, TILE_K), padding_mode=ZERO)
        factors = ct.load(fn, (step, 0), (TILE_K, WIDTH), order=(1, 0), padding_mode=ZERO)
        wide = x.astype(ct.float32)
        squares = squares + ct.sum(wide * wide, axis=1, keepdims=True)
        products = products + _block_products(x, factors, TILE_M, WIDTH)
    token = tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    j = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    result = ct.where(j == values, squares, products)
    ct.scatter(partial, (split * m + token, j), result, mask=(token < m) & (j <= values), check_bounds=False)


def _partials(residual, fn, tile_m, splits):
    """float32 [splits * M, WIDTH]: products in the first J columns, sums of squares in the next; and splits."""
    M, C, H = residual.shape
    J, K = fn.shape
    width = max(16, _pow2(J + 1))
    tile_m = tile_m or (64 if M >= 1024 else 16)
    tile_k = 64 if residual.element_size() == 4 or width > 64 else 128
    tiles, steps = _cdiv(M, tile_m), _cdiv(K, tile_k)
    # About four blocks a multiprocessor of an H200, and two tiles of columns each where that leaves enough of them.
    splits = splits or max(1, min(_cdiv(steps, 1 if tiles == 1 else 2), 512 // tiles, 128))
    per_split = _cdiv(steps, min(splits, steps))
    splits = _cdiv(steps, per_split)
    partial = torch.empty((splits * M, width), dtype=torch.float32, device=residual.device)
    args = (residual.view(M, K), fn, partial, per_split, splits, tile_m, tile_k, width)
    ct.launch(torch.cuda.current_stream(), (tiles * splits, 1, 1), _partial, args)
    return partial, splits


@ct.kernel
def _norm_finish(
    partial: ct.Array, mixes: Rows, rstd: ct.Array, eps: float, scale: float, SPLITS: Int, TILE: Int, WIDTH: Int
):
    m, values = mixes.shape
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    j = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    here = token < m
    products = ct.zeros((TILE, WIDTH), dtype=ct.float32)
    squares = ct.zeros((TILE, 1), dtype=ct.float32)
    for split in range(SPLITS):
        row = split * m + token
        products = products + ct.gather(
            partial, (row, j), mask=here & (j < values), padding_value=0.0, check_bounds=False
        )
        squares = squares + ct.gather(partial, (row, values), mask=here, padding_value=0.0, check_bounds=False)
    factor = ct.rsqrt(squares * scale + eps)
    ct.scatter(rstd, token, factor, mask=here, check_bounds=False)
    ct.scatter(mixes, (token, j), products * factor, mask=here & (j < values), check_bounds=False)


def run_norm_fn(
    residual: torch.Tensor,
    fn: torch.Tensor,
    eps: float,
    mixes: torch.Tensor,
    rstd: torch.Tensor,
    *,
    TILE_M: int | None = None,
    SPLITS: int | None = None,
) -> None:
    """mixes[M, J] = (x @ fn.T) * rstd, rstd[M] = rsqrt(mean(x^2) + eps), for x = residual [M, C, H] with a token's streams flat.

    fn [J, C * H] in float32, residual in bfloat16 or float32; contiguous, J <= 127. Products are those of float32.
    Two launches: partial sums over runs of columns, and their sum in a fixed order.
    TILE_M = None: 64 tokens a tile where there are many, else 16; SPLITS = None: by how many tiles there are.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial, splits = _partials(residual, fn, TILE_M, SPLITS)
    tile = 1 if M <= 1024 else 4
    args = (partial, mixes, rstd, eps, 1.0 / (C * H), splits, tile, partial.shape[1])
    ct.launch(torch.cuda.current_stream(), (_cdiv(M, tile), 1, 1), _norm_finish, args)


@ct.function
def _store_coefficients(
    block, partial, scale, base, post, comb, rms_eps, sinkhorn_eps, post_mult, repeat, per_value,
    SPLITS: Int, STREAMS: Int, SIDE: Int, TILE: Int, CHUNK: Int,
):  # fmt: skip
    """post [M, STREAMS] and comb [M * STREAMS, STREAMS] of TILE tokens; CHUNK partial sums are added at once."""
    m = post.shape[0]
    token = block * TILE + ct.arange(TILE, dtype=ct.int32)
    row = ct.arange(SIDE, dtype=ct.int32)[None, :, None]
    column = ct.arange(SIDE, dtype=ct.int32)[None, None, :]
    inside = (row < STREAMS) & (column < STREAMS)
    at = row * STREAMS + column
    gate = ct.arange(SIDE, dtype=ct.int32)[None, :]
    squares = ct.zeros((TILE,), dtype=ct.float32)
    gates = ct.zeros((TILE, SIDE), dtype=ct.float32)
    scores = ct.zeros((TILE, SIDE, SIDE), dtype=ct.float32)
    for chunk in range(ct.cdiv(SPLITS, CHUNK)):
        split = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)[:, None]
        there = (split < SPLITS) & (token < m)[None, :]
        of_token = split * m + token[None, :]
        found = ct.gather(
            partial, (of_token, STREAMS * (STREAMS + 2)), mask=there, padding_value=0.0, check_bounds=False
        )
        squares = squares + ct.sum(found, axis=0)
        found = ct.gather(
            partial,
            (of_token[:, :, None], STREAMS + gate[None, :, :]),
            mask=there[:, :, None] & (gate < STREAMS)[None, :, :],
            padding_value=0.0,
            check_bounds=False,
        )
        gates = gates + ct.sum(found, axis=0)
        found = ct.gather(
            partial,
            (of_token[:, :, None, None], 2 * STREAMS + at[None, :, :, :]),
            mask=there[:, :, None, None] & inside[None, :, :, :],
            padding_value=0.0,
            check_bounds=False,
        )
        scores = scores + ct.sum(found, axis=0)
    rstd = ct.rsqrt(squares * per_value + rms_eps)
    shift = ct.gather(base, STREAMS + gate, mask=gate < STREAMS, padding_value=0.0, check_bounds=False)
    z = gates * rstd[:, None] * ct.gather(scale, 1, check_bounds=False) + shift
    here = (token < m)[:, None] & (gate < STREAMS)
    ct.scatter(post, (token[:, None], gate), post_mult / (1.0 + ct.exp(-z)), mask=here, check_bounds=False)
    shift = ct.gather(base, 2 * STREAMS + at, mask=inside, padding_value=0.0, check_bounds=False)
    z = scores * rstd[:, None, None] * ct.gather(scale, 2, check_bounds=False) + shift
    mixing = _normalised(z, inside, row, column, repeat, sinkhorn_eps, STREAMS)
    here = (token < m)[:, None, None] & inside
    ct.scatter(comb, (token[:, None, None] * STREAMS + row, column), mixing, mask=here, check_bounds=False)


@ct.function
def _collapse(
    place, partial, residual, scale, base, out, rms_eps, gate_eps, per_value,
    VALUES: Int, SPLITS: Int, STREAMS: Int, TILE: Int, CHUNK: Int,
):  # fmt: skip
    """A block of columns of the weighted sum of a token's streams; its gates are computed here once more.

    Tokens go backwards: the last ones that the projection has read are still in the L2.
    """
    m, width = out.shape
    blocks = ct.cdiv(width, TILE)
    token = m - 1 - place // blocks
    cols = place % blocks * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < width
    streams = ()
    for c in ct.static_iter(range(STREAMS)):  # all loads before the first use
        streams += (ct.gather(residual, (token * STREAMS + c, cols), mask=inside, check_bounds=False),)
    split = ct.arange(CHUNK, dtype=ct.int32)
    there = split < SPLITS
    of_token = split * m + token
    found = ct.gather(partial, (of_token, VALUES), mask=there, padding_value=0.0, check_bounds=False)
    rstd = ct.rsqrt(ct.sum(found) * per_value + rms_eps)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for c in ct.static_iter(range(STREAMS)):
        found = ct.gather(partial, (of_token, c), mask=there, padding_value=0.0, check_bounds=False)
        z = ct.sum(found) * rstd * ct.gather(scale, 0, check_bounds=False) + ct.gather(base, c, check_bounds=False)
        total = total + (1.0 / (1.0 + ct.exp(-z)) + gate_eps) * streams[c].astype(ct.float32)
    ct.scatter(out, (token, cols), total.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _pre_finish(
    partial: ct.Array,
    residual: Rows,
    scale: ct.Array,
    base: ct.Array,
    post: ct.Array,
    comb: ct.Array,
    layer_input: Rows,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
    programs: int,
    per_value: float,
    SPLITS: Int,
    STREAMS: Int,
    SIDE: Int,
    TOKENS: Int,
    TOKEN_SPLITS: Int,
    TILE: Int,
    CHUNK: Int,
):
    """The first `programs` blocks: post and comb of TOKENS tokens each. All others: some columns of one token's sum of streams.

    So the steps of Sinkhorn, all latency, run beside the reading of the streams.
    """
    if ct.bid(0) < programs:
        _store_coefficients(
            ct.bid(0), partial, scale, base, post, comb, rms_eps, sinkhorn_eps, post_mult, repeat, per_value,
            SPLITS, STREAMS, SIDE, TOKENS, TOKEN_SPLITS,
        )  # fmt: skip
    else:
        _collapse(
            ct.bid(0) - programs, partial, residual, scale, base, layer_input, rms_eps, pre_eps, per_value,
            STREAMS * (STREAMS + 2), SPLITS, STREAMS, TILE, CHUNK,
        )  # fmt: skip


@ct.kernel
def _head_finish(
    partial: ct.Array,
    residual: Rows,
    scale: ct.Array,
    base: ct.Array,
    out: Rows,
    rms_eps: float,
    eps: float,
    per_value: float,
    SPLITS: Int,
    STREAMS: Int,
    TILE: Int,
    CHUNK: Int,
):
    _collapse(
        ct.bid(0), partial, residual, scale, base, out, rms_eps, eps, per_value,
        STREAMS, SPLITS, STREAMS, TILE, CHUNK,
    )  # fmt: skip


def _tile(H: int, tile: int | None) -> int:
    """Columns a block: the widest power of two up to 1024 that leaves no tail, and at least 512 where H has them."""
    return min(tile or min(1024, max(H & -H, 512)), _pow2(H))


def run_pre_fused(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
    post: torch.Tensor,
    comb: torch.Tensor,
    layer_input: torch.Tensor,
    *,
    TILE_M: int | None = None,
    SPLITS: int | None = None,
    TILE: int | None = None,
) -> None:
    """norm_fn, split_mixes, Sinkhorn and apply_mix of one sublayer: post [M, C], comb [M, C, C], layer_input [M, H].

    Shapes: residual [M, C, H] and layer_input in bfloat16 or float32, fn [C * (C + 2), C * H], scale [3], base [C * (C + 2)],
    post and comb in float32; contiguous, C <= 8. Products are those of float32.
    Two launches: partial sums of the projection, and everything else. The streams are read twice, the second time in part
    from the L2.
    TILE_M, SPLITS: as in run_norm_fn. TILE: columns of a block that collapses streams.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial, splits = _partials(residual, fn, TILE_M, SPLITS)
    tile = _tile(H, TILE)
    tokens, side = (1 if M <= FEW_TOKENS else 8), _pow2(C)
    programs = _cdiv(M, tokens)
    chunk = min(_pow2(splits), max(1, 1024 // (tokens * side * side)))  # values of a matrix's partial sums at once
    scalars = (rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat, programs, 1.0 / (C * H))
    tensors = (partial, residual.view(M * C, H), scale, base, post, comb.view(M * C, C), layer_input)
    args = (*tensors, *scalars, splits, C, side, tokens, chunk, tile, _pow2(splits))
    ct.launch(torch.cuda.current_stream(), (programs + M * _cdiv(H, tile), 1, 1), _pre_finish, args)


def run_head_fused(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    eps: float,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    SPLITS: int | None = None,
    TILE: int | None = None,
) -> None:
    """out[M, H] = T(sum over c of w[M, c] * residual[M, c, H]), w = sigmoid(scale * fn of the normalised streams + base) + eps.

    Shapes: residual [M, C, H] and out in bfloat16 or float32; fn [C, C * H], scale [1], base [C] in float32; contiguous, C <= 8.
    Products are those of float32. Two launches, as run_pre_fused, whose tunables these are.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial, splits = _partials(residual, fn, TILE_M, SPLITS)
    tile = _tile(H, TILE)
    tensors = (partial, residual.view(M * C, H), scale, base, out)
    args = (*tensors, rms_eps, eps, 1.0 / (C * H), splits, C, tile, _pow2(splits))
    ct.launch(torch.cuda.current_stream(), (M * _cdiv(H, tile), 1, 1), _head_finish, args)
