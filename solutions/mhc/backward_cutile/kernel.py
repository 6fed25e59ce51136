"""The gradients of hyper-connections, cuTile.

Streams are read once, and a token's coefficients get their gradients, dot products over its columns, in the same pass. Sums over
tokens are partial sums in a fixed order and their sum: no atomics, so that results repeat bit for bit.
"""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
LOWEST = float("-inf")

RUNS = 264  # runs of tokens whose sums are added up at the end: two for each multiprocessor of an H200
SUM_RUNS = 32  # of these, how many are added at once


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()


# -- streams -------------------------------------------------------------------------------------------------------------


@ct.kernel
def _expand_backward(grad_out: Rows, grad_x: Rows, STREAMS: Int, TILE: Int):
    blocks = ct.cdiv(grad_x.shape[1], TILE)
    token, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    cols = block * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < grad_x.shape[1]
    grads = ()
    for c in ct.static_iter(range(STREAMS)):  # all loads before the first use
        grads += (ct.gather(grad_out, (token * STREAMS + c, cols), mask=inside, check_bounds=False),)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for c in ct.static_iter(range(STREAMS)):
        total = total + grads[c].astype(ct.float32)
    ct.scatter(grad_x, (token, cols), total.astype(grad_x.dtype), mask=inside, check_bounds=False)


@ct.function
def _placed(packed, sums, n):
    """A column of sums (LANES,) put into column n of packed (LANES, P), where it is zero: one reduction for all columns."""
    column = ct.arange(packed.shape[1], dtype=ct.int32)[None, :]
    return packed + ct.where(column == n, sums[:, None], 0.0)


@ct.kernel
def _apply_backward(
    residual: Rows,
    mix: ct.Array,
    grad_out: Rows,
    grad_residual: Rows,
    grad_mix: ct.Array,
    STREAMS: Int,
    STEPS: Int,
    SIDE: Int,
    LANES: Int,
    VEC: Int,
):
    """STEPS blocks of LANES * VEC columns of one token; a lane adds up its columns' products."""
    token = ct.bid(0)
    lanes = ct.arange(LANES, dtype=ct.int32)[:, None] * VEC + ct.arange(VEC, dtype=ct.int32)[None, :]
    dots = ()
    for _ in ct.static_iter(range(STREAMS)):
        dots += (ct.zeros((LANES,), dtype=ct.float32),)
    for step in range(STEPS):
        cols = step * (LANES * VEC) + lanes
        inside = cols < grad_out.shape[1]
        grad = ct.gather(grad_out, (token, cols), mask=inside, padding_value=0.0, check_bounds=False)
        grad = grad.astype(ct.float32)
        streams = ()
        for c in ct.static_iter(range(STREAMS)):
            row = token * STREAMS + c
            streams += (ct.gather(residual, (row, cols), mask=inside, padding_value=0.0, check_bounds=False),)
        updated = ()
        for c in ct.static_iter(range(STREAMS)):
            updated += (dots[c] + ct.sum(streams[c].astype(ct.float32) * grad, axis=1),)
            mixed = (ct.gather(mix, (token, c), check_bounds=False) * grad).astype(grad_residual.dtype)
            ct.scatter(grad_residual, (token * STREAMS + c, cols), mixed, mask=inside, check_bounds=False)
        dots = updated
    packed = ct.zeros((LANES, SIDE), dtype=ct.float32)
    for c in ct.static_iter(range(STREAMS)):
        packed = _placed(packed, dots[c], c)
    column = ct.arange(SIDE, dtype=ct.int32)
    ct.scatter(grad_mix, (token, column), ct.sum(packed, axis=0), mask=column < STREAMS, check_bounds=False)


@ct.kernel
def _post_backward(
    y: Rows,
    residual: Rows,
    post: ct.Array,
    comb: ct.Array,
    grad_out: Rows,
    grad_y: Rows,
    grad_residual: Rows,
    grad_post: ct.Array,
    grad_comb: ct.Array,
    STREAMS: Int,
    STEPS: Int,
    WIDTH: Int,
    LANES: Int,
    VEC: Int,
):
    """As above; a token's dot products are those of post and then those of comb [M * STREAMS, STREAMS], input stream first.

    grad_comb is [M, STREAMS * STREAMS].
    """
    token = ct.bid(0)
    lanes = ct.arange(LANES, dtype=ct.int32)[:, None] * VEC + ct.arange(VEC, dtype=ct.int32)[None, :]
    dots = ()
    for _ in ct.static_iter(range(STREAMS + STREAMS * STREAMS)):
        dots += (ct.zeros((LANES,), dtype=ct.float32),)
    for step in range(STEPS):
        cols = step * (LANES * VEC) + lanes
        inside = cols < y.shape[1]
        output = ct.gather(y, (token, cols), mask=inside, padding_value=0.0, check_bounds=False).astype(ct.float32)
        grads = ()
        streams = ()
        for c in ct.static_iter(range(STREAMS)):
            row = token * STREAMS + c
            grad = ct.gather(grad_out, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
            stream = ct.gather(residual, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
            grads += (grad.astype(ct.float32),)
            streams += (stream.astype(ct.float32),)
        updated = ()
        total = ct.zeros((LANES, VEC), dtype=ct.float32)
        for o in ct.static_iter(range(STREAMS)):
            total = total + ct.gather(post, (token, o), check_bounds=False) * grads[o]
            updated += (dots[o] + ct.sum(grads[o] * output, axis=1),)
        ct.scatter(grad_y, (token, cols), total.astype(grad_y.dtype), mask=inside, check_bounds=False)
        for i in ct.static_iter(range(STREAMS)):
            total = ct.zeros((LANES, VEC), dtype=ct.float32)
            for o in ct.static_iter(range(STREAMS)):
                total = total + ct.gather(comb, (token * STREAMS + i, o), check_bounds=False) * grads[o]
                updated += (dots[STREAMS + i * STREAMS + o] + ct.sum(streams[i] * grads[o], axis=1),)
            row = token * STREAMS + i
            ct.scatter(grad_residual, (row, cols), total.astype(grad_y.dtype), mask=inside, check_bounds=False)
        dots = updated
    packed = ct.zeros((LANES, WIDTH), dtype=ct.float32)
    for dot in ct.static_iter(range(STREAMS + STREAMS * STREAMS)):
        packed = _placed(packed, dots[dot], dot)
    totals = ct.sum(packed, axis=0)
    n = ct.arange(WIDTH, dtype=ct.int32)
    ct.scatter(grad_post, (token, n), totals, mask=n < STREAMS, check_bounds=False)
    of_comb = (n >= STREAMS) & (n < STREAMS + STREAMS * STREAMS)
    ct.scatter(grad_comb, (token, n - STREAMS), totals, mask=of_comb, check_bounds=False)


def run_expand_backward(grad_out: torch.Tensor, grad_x: torch.Tensor, *, TILE: int = 1024) -> None:
    """grad_x[M, H] = T(sum over c of grad_out[M, c, H]), the sum in float32; contiguous, T bfloat16 or float32."""
    M, C, H = grad_out.shape
    if M == 0:
        return
    tile = min(TILE, _pow2(H))
    args = (grad_out.view(M * C, H), grad_x, C, tile)
    ct.launch(torch.cuda.current_stream(), (M * _cdiv(H, tile), 1, 1), _expand_backward, args)


def _steps(tensor: torch.Tensor, lanes: int) -> tuple[int, int]:
    """How often `lanes` lanes of 16 bytes go over a row, and the elements of a lane."""
    vec = 16 // tensor.element_size()
    return _cdiv(tensor.shape[-1], lanes * vec), vec


def run_pre_apply_mix_backward(
    residual: torch.Tensor,
    mix: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual: torch.Tensor,
    grad_mix: torch.Tensor,
    *,
    LANES: int = 128,
) -> None:
    """grad_residual[m, c] = T(mix[m, c] * grad_out[m]), grad_mix[m, c] = the dot product of residual[m, c] and grad_out[m].

    Shapes: residual and its gradient [M, C, H], grad_out [M, H] in T (bfloat16 or float32), mix and its gradient [M, C] in
    float32; contiguous, C <= 8. A block has one token, whose columns its lanes walk through 16 bytes at a time.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    steps, vec = _steps(residual, LANES)
    written = grad_residual.view(M * C, H)
    args = (residual.view(M * C, H), mix, grad_out, written, grad_mix, C, steps, _pow2(C), LANES, vec)
    ct.launch(torch.cuda.current_stream(), (M, 1, 1), _apply_backward, args)


def run_post_backward(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    grad_out: torch.Tensor,
    grad_y: torch.Tensor,
    grad_residual: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
    *,
    LANES: int = 128,
) -> None:
    """The four gradients of mhc_post; sums in float32, each rounded once.

    grad_y = sum over o of post[o] * grad_out[o], grad_residual[i] = sum over o of comb[i, o] * grad_out[o],
    grad_post[o] = <grad_out[o], y>, grad_comb[i, o] = <residual[i], grad_out[o]>.
    Shapes: y [M, H], residual and grad_out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32;
    contiguous, C <= 4. A block has one token, whose columns its lanes walk through 16 bytes at a time.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    steps, vec = _steps(residual, LANES)
    given = (y, residual.view(M * C, H), post, comb.view(M * C, C), grad_out.view(M * C, H))
    written = (grad_y, grad_residual.view(M * C, H), grad_post, grad_comb.view(M, C * C))
    args = (*given, *written, C, steps, _pow2(C + C * C), LANES, vec)
    ct.launch(torch.cuda.current_stream(), (M, 1, 1), _post_backward, args)


# -- coefficients --------------------------------------------------------------------------------------------------------


@ct.kernel
def _sinkhorn_backward(
    z: ct.Array, grad_out: ct.Array, grad_z: ct.Array, eps: float, REPEAT: Int, STREAMS: Int, TILE: Int, SIDE: Int
):
    """All steps again, keeping what each divided by; then back, where a matrix times that is the one before it.

    z and both gradients are [M * STREAMS, STREAMS]; a block has TILE matrices, as tiles of SIDE x SIDE.
    """
    token = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[:, None, None]
    row = ct.arange(SIDE, dtype=ct.int32)[None, :, None]
    column = ct.arange(SIDE, dtype=ct.int32)[None, None, :]
    inside = (row < STREAMS) & (column < STREAMS)
    here = inside & (token * STREAMS < z.shape[0])
    values = ct.gather(z, (token * STREAMS + row, column), mask=here, padding_value=0.0, check_bounds=False)
    grad = ct.gather(grad_out, (token * STREAMS + row, column), mask=here, padding_value=0.0, check_bounds=False)
    values = ct.where(column < STREAMS, values, LOWEST)
    row_eps, column_eps = ct.where(row < STREAMS, eps, 1.0), ct.where(column < STREAMS, eps, 1.0)  # not 0 / 0 outside
    exps = ct.exp(values - ct.max(values, axis=2, keepdims=True))
    soft = ct.where(inside, exps / ct.sum(exps, axis=2, keepdims=True), 0.0)
    mixing = ct.where(inside, soft + eps, 0.0)
    divisors = ()
    for step in ct.static_iter(range(2 * REPEAT - 1)):
        added = column_eps if step % 2 == 0 else row_eps
        divisor = ct.sum(mixing, axis=1 + step % 2, keepdims=True) + added
        mixing = mixing / divisor
        divisors += (divisor,)
    for step in ct.static_iter(range(2 * REPEAT - 2, -1, -1)):
        along = ct.sum(grad * mixing, axis=1 + step % 2, keepdims=True)
        grad = (grad - along) / divisors[step]
        mixing = mixing * divisors[step]
    result = soft * (grad - ct.sum(grad * soft, axis=2, keepdims=True))
    ct.scatter(grad_z, (token * STREAMS + row, column), result, mask=here, check_bounds=False)


def run_sinkhorn_backward(
    z: torch.Tensor, grad_out: torch.Tensor, repeat: int, eps: float, grad_z: torch.Tensor, *, TILE: int = 32
) -> None:
    """grad_z of mhc_sinkhorn through all of its steps, in registers.

    z, grad_out, grad_z: [M, C, C] in float32, contiguous, C <= 8. A kernel is compiled for each repeat.
    """
    M, C = z.shape[:2]
    if M == 0:
        return
    tensors = (tensor.view(M * C, C) for tensor in (z, grad_out, grad_z))
    args = (*tensors, eps, repeat, C, TILE, _pow2(C))
    ct.launch(torch.cuda.current_stream(), (_cdiv(M, TILE), 1, 1), _sinkhorn_backward, args)


@ct.kernel
def _split_backward(
    mixes: Rows,
    scale: ct.Array,
    base: ct.Array,
    grad_pre: ct.Array,
    grad_post: ct.Array,
    grad_comb: ct.Array,
    grad_mixes: Rows,
    partial: ct.Array,
    post_mult: float,
    per_run: int,
    STREAMS: Int,
    HEAD: Flag,
    TILE: Int,
    WIDTH: Int,
):
    """A run of tokens: gradients of the projected values, and their sums with and without these values as factors.

    partial is [2 * runs, WIDTH]: a run's sums of the gradients, then those of their products. HEAD is the gate of the final
    collapse, which has the first part alone.
    """
    m, width = mixes.shape
    run = ct.bid(0)
    first = run * per_run
    last = ct.minimum(first + per_run, m)
    j = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    if HEAD:
        factor = ct.gather(scale, 0, check_bounds=False)
    else:
        part = ct.where(j < STREAMS, 0, ct.where(j < 2 * STREAMS, 1, 2))
        factor = ct.gather(scale, part, check_bounds=False)
    shift = ct.gather(base, j, mask=j < width, padding_value=0.0, check_bounds=False)
    base_sums = ct.zeros((TILE, WIDTH), dtype=ct.float32)
    scale_sums = ct.zeros((TILE, WIDTH), dtype=ct.float32)
    for tile in range(ct.cdiv(last - first, TILE)):
        token = first + tile * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
        here = (token < last) & (j < width)
        values = ct.gather(mixes, (token, j), mask=here, padding_value=0.0, check_bounds=False)
        score = values * factor + shift
        # sigmoid(z) * sigmoid(-z): 1 - sigmoid(z) has no digits left where z is large.
        slope = (1.0 / (1.0 + ct.exp(-score))) * (1.0 / (1.0 + ct.exp(score)))
        of_pre = here & (j < STREAMS)
        grad = slope * ct.gather(grad_pre, (token, j), mask=of_pre, padding_value=0.0, check_bounds=False)
        if not HEAD:
            of_post = here & (j >= STREAMS) & (j < 2 * STREAMS)
            second = ct.gather(grad_post, (token, j - STREAMS), mask=of_post, padding_value=0.0, check_bounds=False)
            of_comb = here & (j >= 2 * STREAMS)
            third = ct.gather(grad_comb, (token, j - 2 * STREAMS), mask=of_comb, padding_value=0.0, check_bounds=False)
            # Chosen, not added: a NaN in the value of one part has no place in the gradient of another.
            grad = ct.where(j < STREAMS, grad, ct.where(j < 2 * STREAMS, slope * post_mult * second, third))
        ct.scatter(grad_mixes, (token, j), grad * factor, mask=here, check_bounds=False)
        base_sums = base_sums + ct.where(here, grad, 0.0)
        scale_sums = scale_sums + ct.where(here, grad * values, 0.0)
    ct.scatter(partial, (2 * run, j), ct.sum(base_sums, axis=0, keepdims=True), check_bounds=False)
    ct.scatter(partial, (2 * run + 1, j), ct.sum(scale_sums, axis=0, keepdims=True), check_bounds=False)


@ct.kernel
def _split_sums(
    partial: ct.Array,
    grad_scale: ct.Array,
    grad_base: ct.Array,
    runs: int,
    STREAMS: Int,
    HEAD: Flag,
    TILE: Int,
    WIDTH: Int,
):
    """Adds up the sums of all runs in a fixed order; zeros where there are none."""
    j = ct.arange(WIDTH, dtype=ct.int32)
    base_sums = ct.zeros((TILE, WIDTH), dtype=ct.float32)
    scale_sums = ct.zeros((TILE, WIDTH), dtype=ct.float32)
    for tile in range(ct.cdiv(runs, TILE)):
        run = tile * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
        there = run < runs
        at = j[None, :]
        base_sums = base_sums + ct.gather(partial, (2 * run, at), mask=there, padding_value=0.0, check_bounds=False)
        of_run = ct.gather(partial, (2 * run + 1, at), mask=there, padding_value=0.0, check_bounds=False)
        scale_sums = scale_sums + of_run
    ct.scatter(grad_base, j, ct.sum(base_sums, axis=0), mask=j < grad_base.shape[0], check_bounds=False)
    columns = ct.sum(scale_sums, axis=0)
    ct.scatter(grad_scale, 0, ct.sum(ct.where(j < STREAMS, columns, 0.0)), check_bounds=False)
    if not HEAD:
        of_post = (j >= STREAMS) & (j < 2 * STREAMS)
        ct.scatter(grad_scale, 1, ct.sum(ct.where(of_post, columns, 0.0)), check_bounds=False)
        ct.scatter(grad_scale, 2, ct.sum(ct.where(j >= 2 * STREAMS, columns, 0.0)), check_bounds=False)


def _run_split_backward(inputs, grads, grad_mixes, grad_scale, grad_base, post_mult, streams, head, tile):
    M, J = grad_mixes.shape
    width = _pow2(J)
    per_run = max(1, _cdiv(_cdiv(M, tile), RUNS)) * tile  # whole tiles of tokens, as even as they go
    runs = _cdiv(M, per_run)  # no run may be empty
    partial = torch.empty((2 * max(runs, 1), width), dtype=torch.float32, device=grad_mixes.device)
    stream = torch.cuda.current_stream()
    if runs:
        args = (*inputs, *grads, grad_mixes, partial, post_mult, per_run, streams, head, tile, width)
        ct.launch(stream, (runs, 1, 1), _split_backward, args)
    args = (partial, grad_scale, grad_base, runs, streams, head, SUM_RUNS, width)
    ct.launch(stream, (1, 1, 1), _split_sums, args)


def run_pre_split_mixes_backward(
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    post_mult: float,
    grad_pre: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
    grad_mixes: torch.Tensor,
    grad_scale: torch.Tensor,
    grad_base: torch.Tensor,
    *,
    TILE: int = 8,
) -> None:
    """The gradients of mhc_pre_split_mixes; those of scale [3] and base [C * (C + 2)] are sums over tokens, zero without any.

    Shapes: mixes and its gradient [M, C * (C + 2)], gradients of pre and post [M, C], of comb [M, C, C]; float32, contiguous,
    C <= 8. A block has a run of tokens, TILE at a time, whose sums a second kernel adds up.
    """
    grads = grad_pre, grad_post, grad_comb.view(-1, streams * streams)
    outputs = grad_mixes, grad_scale, grad_base
    _run_split_backward((mixes, scale, base), grads, *outputs, post_mult, streams, False, TILE)


def run_head_compute_mix_backward(
    mix: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    grad_out: torch.Tensor,
    grad_mix: torch.Tensor,
    grad_scale: torch.Tensor,
    grad_base: torch.Tensor,
    *,
    TILE: int = 32,
) -> None:
    """The gradients of mhc_head_compute_mix; those of scale [1] and base [C] are sums over tokens, zero without any."""
    grads = grad_out, grad_out, grad_out  # the gate of the final collapse has one part
    outputs = grad_mix, grad_scale, grad_base
    _run_split_backward((mix, scale, base), grads, *outputs, 1.0, mix.shape[1], True, TILE)


# -- projection ----------------------------------------------------------------------------------------------------------


@ct.function
def _in_three(values):
    """Three bfloat16 numbers whose sum is a float32 one to the last bit."""
    first = values.astype(ct.bfloat16)
    rest = values - first.astype(ct.float32)
    second = rest.astype(ct.bfloat16)
    return first, second, (rest - second.astype(ct.float32)).astype(ct.bfloat16)


@ct.function
def _products(left, right, ROWS: Int, COLUMNS: Int):
    """Two float32 matrices multiplied on tensor cores as sums of three bfloat16 ones, without products below the last bit."""
    high, middle, low = _in_three(left)
    first, second, third = _in_three(right)
    block = ct.zeros((ROWS, COLUMNS), dtype=ct.float32)
    block = ct.mma(low, first, block)
    block = ct.mma(middle, second, block)
    block = ct.mma(high, third, block)
    block = ct.mma(middle, first, block)
    block = ct.mma(high, second, block)
    return ct.mma(high, first, block)


@ct.kernel
def _norm_backward(
    residual: Rows,
    fn: Rows,
    mixes: Rows,
    rstd: ct.Array,
    grad_mixes: Rows,
    grad_residual: Rows,
    partial: ct.Array,
    tiles: int,
    per_value: float,
    TILE_M: Int,
    TILE_K: Int,
    WIDTH: Int,
):
    """A tile of columns of a run of `tiles` tiles of tokens: their gradient, and a sum of that of the projection.

    bfloat16 streams meet the gradients of the products, float32, as sums of three bfloat16 numbers: nothing is lost. Both
    factors of the streams' own gradient take all three parts as well, though it is rounded to bfloat16: with two of each, a row
    whose terms cancel is off by more than that. residual [M, K]; partial [runs, J, K].
    """
    m, width = residual.shape
    blocks = ct.cdiv(width, TILE_K)
    run, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    factors = ct.load(fn, (0, block), (WIDTH, TILE_K), padding_mode=ct.PaddingMode.ZERO)
    grad_fn = ct.zeros((WIDTH, TILE_K), dtype=ct.float32)
    for tile in range(run * tiles, ct.minimum((run + 1) * tiles, ct.cdiv(m, TILE_M))):
        x = ct.load(residual, (tile, block), (TILE_M, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        grad = ct.load(grad_mixes, (tile, 0), (TILE_M, WIDTH), padding_mode=ct.PaddingMode.ZERO)
        values = ct.load(mixes, (tile, 0), (TILE_M, WIDTH), padding_mode=ct.PaddingMode.ZERO)
        token = tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        factor = ct.gather(rstd, token, mask=token < m, padding_value=0.0, check_bounds=False)
        along = ct.sum(grad * values, axis=1, keepdims=True) * factor * factor * per_value
        grad = grad * factor
        grad_x = _products(grad, factors, TILE_M, TILE_K)
        if residual.dtype == ct.bfloat16:
            high, middle, low = _in_three(grad)
            added = ct.mma(ct.transpose(low), x, ct.zeros((WIDTH, TILE_K), dtype=ct.float32))
            added = ct.mma(ct.transpose(middle), x, added)
            added = ct.mma(ct.transpose(high), x, added)
        else:
            added = _products(ct.transpose(grad), x, WIDTH, TILE_K)
        grad_fn = grad_fn + added
        grad_x = grad_x - x.astype(ct.float32) * along
        ct.store(grad_residual, (tile, block), grad_x.astype(grad_residual.dtype))
    ct.store(partial, (run, 0, block), ct.reshape(grad_fn, (1, WIDTH, TILE_K)))


@ct.kernel
def _sum_runs(partial: ct.Array, out: ct.Array, runs: int, TILE: Int):
    """Adds up the sums of all runs in a fixed order; zeros where there are none."""
    at = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = at < out.shape[0]
    total = ct.zeros((TILE,), dtype=ct.float32)
    for run in range(runs):
        total = total + ct.gather(partial, (run, at), mask=inside, padding_value=0.0, check_bounds=False)
    ct.scatter(out, at, total, mask=inside, check_bounds=False)


def run_norm_fn_backward(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mixes: torch.Tensor,
    rstd: torch.Tensor,
    grad_mixes: torch.Tensor,
    eps: float,
    grad_residual: torch.Tensor,
    grad_fn: torch.Tensor,
    *,
    TILE_M: int | None = None,
    RUNS_OF_TOKENS: int | None = None,
) -> None:
    """The gradients of mhc_norm_fn for the streams and the projection, from what the forward gave; eps is in rstd already.

    With p = grad_mixes * rstd: grad_residual = T(p @ fn - x * rstd^2 * sum(grad_mixes * mixes) / K), grad_fn = p.T @ x, for x =
    residual [M, C, H] with a token's K = C * H values flat.
    Shapes: residual and its gradient in bfloat16 or float32; fn and its gradient [J, K], mixes and its gradient [M, J], rstd
    [M] in float32; contiguous, J <= 128. The streams are read once; one launch, and one that adds up runs of tokens where
    there are several.
    RUNS_OF_TOKENS = None: as many as make two blocks a multiprocessor of an H200.
    """
    M = residual.shape[0]
    J, K = fn.shape
    width = max(16, _pow2(J))
    wide = residual.element_size() == 4
    tile_m = TILE_M or (32 if wide or M < 512 else 64)
    tile_k = 64 if wide or width > 64 else 128
    blocks, tiles = _cdiv(K, tile_k), _cdiv(M, tile_m)
    per_run = _cdiv(tiles, min(tiles, RUNS_OF_TOKENS or max(1, RUNS // blocks))) if M else 1
    runs = _cdiv(tiles, per_run)
    stream = torch.cuda.current_stream()
    partial = grad_fn if runs == 1 else torch.empty((max(runs, 1), J, K), dtype=torch.float32, device=residual.device)
    if runs:
        given = (residual.view(M, K), fn, mixes, rstd, grad_mixes, grad_residual.view(M, K), partial.view(runs, J, K))
        args = (*given, per_run, 1.0 / K, tile_m, tile_k, width)
        ct.launch(stream, (runs * blocks, 1, 1), _norm_backward, args)
    if runs != 1:
        args = (partial.view(-1, J * K), grad_fn.view(J * K), runs, 1024)
        ct.launch(stream, (_cdiv(J * K, 1024), 1, 1), _sum_runs, args)
