"""The coefficients of hyper-connections, Triton: the projection of all streams of a token, gates, Sinkhorn steps.

The projection reads all streams and is bound by memory; the rest is a handful of float32 values a token and bound by latency.
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
def _normalised(z, inside, real_row, real_column, repeat, eps):
    """Sinkhorn of matrices [BLOCK_M, P, P]; z is -inf outside of the matrix, where the result is zero.

    real_row [1, P, 1] and real_column [1, 1, P] say what belongs to the matrix.
    """
    exps = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    mixing = tl.where(inside, exps / tl.sum(exps, axis=2, keep_dims=True) + eps, 0.0)
    row_eps, column_eps = tl.where(real_row, eps, 1.0), tl.where(real_column, eps, 1.0)  # not 0 / 0 outside
    mixing = mixing / (tl.sum(mixing, axis=1, keep_dims=True) + column_eps)
    for _ in range(1, repeat):
        mixing = mixing / (tl.sum(mixing, axis=2, keep_dims=True) + row_eps)
        mixing = mixing / (tl.sum(mixing, axis=1, keep_dims=True) + column_eps)
    return mixing


@triton.jit(do_not_specialize=["M", "repeat"])
def _sinkhorn(z_ptr, out_ptr, repeat, eps, M, C: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None, None]
    row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    inside = (row < C) & (column < C)
    where = (token * C + row) * C + column
    z = tl.load(z_ptr + where, mask=inside & (token < M), other=0.0)
    mixing = _normalised(tl.where(inside, z, float("-inf")), inside, row < C, column < C, repeat, eps)
    tl.store(out_ptr + where, mixing, mask=inside & (token < M))


def run_sinkhorn(z: torch.Tensor, repeat: int, eps: float, out: torch.Tensor, *, BLOCK_M=None, num_warps=1) -> None:
    """out = z's row softmax + eps, divided by columns, then repeat - 1 times by rows and by columns (sums + eps); float32.

    z, out: [M, C, C], contiguous, C <= 8. All steps run in registers, in one launch.
    BLOCK_M = None: 8 matrices a warp while there are few, else 32.
    """
    M, C = z.shape[:2]
    if M == 0:
        return
    block_m = BLOCK_M or (8 if M <= 4096 else 32)
    _sinkhorn[(_cdiv(M, block_m),)](z, out, repeat, eps, M, C, _pow2(C), block_m, num_warps=num_warps)


@triton.jit(do_not_specialize=["M"])
def _split_mixes(
    mixes_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, post_mult, pre_eps, M,
    C: tl.constexpr, J: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, P)[None, :]
    inside = (token < M) & (j < J)
    part = tl.where(j < C, 0, tl.where(j < 2 * C, 1, 2))
    mixes = tl.load(mixes_ptr + token * J + j, mask=inside, other=0.0)
    z = mixes * tl.load(scale_ptr + part) + tl.load(base_ptr + j, mask=j < J, other=0.0)
    gate = tl.sigmoid(z)
    tl.store(pre_ptr + token * C + j, gate + pre_eps, mask=inside & (j < C))
    tl.store(post_ptr + token * C + (j - C), gate * post_mult, mask=inside & (j >= C) & (j < 2 * C))
    tl.store(comb_ptr + token * (C * C) + (j - 2 * C), z, mask=inside & (j >= 2 * C))


def run_pre_split_mixes(mixes, scale, base, streams, post_mult, pre_eps, pre, post, comb, *, BLOCK_M=None, num_warps=4):
    """z = mixes * scale of its part + base; pre = sigmoid(z) + pre_eps, post = post_mult * sigmoid(z), comb = z; float32.

    Shapes: mixes [M, C * (C + 2)], base of one row, scale [3], pre and post [M, C], comb [M, C, C]; contiguous, C = streams.
    BLOCK_M = None: 4 tokens a program while there are few, else 32.
    """
    M, J = mixes.shape
    if M == 0:
        return
    block_m = BLOCK_M or (4 if M <= 2048 else 32)
    _split_mixes[(_cdiv(M, block_m),)](
        mixes, scale, base, pre, post, comb, post_mult, pre_eps, M, streams, J, _pow2(J), block_m, num_warps=num_warps
    )


@triton.jit(do_not_specialize=["total"])
def _head_mix(mix_ptr, scale_ptr, base_ptr, out_ptr, eps, total, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    z = tl.load(mix_ptr + at, mask=inside, other=0.0) * tl.load(scale_ptr) + tl.load(base_ptr + at % C)
    tl.store(out_ptr + at, tl.sigmoid(z) + eps, mask=inside)


def run_head_compute_mix(
    mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, out: torch.Tensor, *, BLOCK=256, num_warps=4
) -> None:
    """out[M, C] = sigmoid(mix * scale + base) + eps; scale [1], base [C], all float32 and contiguous."""
    M, C = mix.shape
    if M:
        _head_mix[(_cdiv(M * C, BLOCK),)](mix, scale, base, out, eps, M * C, C, BLOCK, num_warps=num_warps)


# -- the projection of all streams of a token ----------------------------------------------------------------------------

# Up to this many tokens the matrix of the projection is what is read, and is multiplied without tensor cores.
FEW_TOKENS = 8
FEW_COLUMNS = 256


@triton.jit(do_not_specialize=["M"])
def _partial_few(
    residual_ptr, fn_ptr, partial_ptr, M, K: tl.constexpr, J: tl.constexpr, P: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The products of a block of columns for every token, and its sum of squares in column J."""
    split = tl.program_id(0)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    j = tl.arange(0, P)
    fn = tl.load(
        fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < J) & (k[None, :] < K), other=0.0
    )  # asked for once, used for each token
    for token in range(M):
        x = tl.load(residual_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        factors = tl.where(j[:, None] == J, x[None, :], fn)
        products = tl.sum(factors * x[None, :], axis=1)
        tl.store(partial_ptr + (split * M + token) * P + j, products)


@triton.jit
def _block_products(x, fn):
    """x [BLOCK_M, BLOCK] times fn [P, BLOCK] transposed, in float32.

    bfloat16 streams meet float32 weights on tensor cores without loss: a weight is the sum of three bfloat16 numbers, and each
    product of two bfloat16 numbers is exact in float32. Each block of columns starts from zero and is added in float32, so
    that the truncation of long sums in tensor cores does not add up.
    """
    if x.dtype == tl.bfloat16:
        first = fn.to(tl.bfloat16)
        rest = fn - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        block = tl.dot(x, tl.trans(third))
        block = tl.dot(x, tl.trans(second), block)
        block = tl.dot(x, tl.trans(first), block)
    else:
        block = tl.dot(x, tl.trans(fn), input_precision="ieee")
    return block


@triton.jit
def _parts_products(x, parts_ptr, j, k, J: tl.constexpr, K: tl.constexpr):
    """As _block_products, with the three parts of each weight from memory: tiles go straight to the tensor cores."""
    of_part = parts_ptr + j[:, None] * K + k[None, :]
    there = (j[:, None] < J) & (k[None, :] < K)
    first = tl.load(of_part, mask=there, other=0.0)
    second = tl.load(of_part + J * K, mask=there, other=0.0)
    third = tl.load(of_part + 2 * J * K, mask=there, other=0.0)
    block = tl.dot(x, tl.trans(third))
    block = tl.dot(x, tl.trans(second), block)
    return tl.dot(x, tl.trans(first), block)


@triton.jit(do_not_specialize=["M"])
def _partial_tile(
    residual_ptr, fn_ptr, partial_ptr, M, K: tl.constexpr, J: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of a run of columns for a tile of tokens, and their sums of squares in column J.

    PARTS: the weights were split by _split_fn.
    """
    split = tl.program_id(0) % SPLITS
    token = (tl.program_id(0) // SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, P)
    lanes = tl.arange(0, BLOCK_K)
    products = tl.zeros([BLOCK_M, P], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, SPLIT_K, BLOCK_K, num_stages=STAGES):
        k = split * SPLIT_K + start + lanes
        here = (token[:, None] < M) & (k[None, :] < K)
        x = tl.load(residual_ptr + token[:, None] * K + k[None, :], mask=here, other=0.0)
        if PARTS:
            block = _parts_products(x, fn_ptr, j, k, J, K)
        else:
            fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < J) & (k[None, :] < K), other=0.0)
            block = _block_products(x, fn)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        products += block
    products = tl.where(j[None, :] == J, squares[:, None], products)
    tl.store(
        partial_ptr + (split * M + token[:, None]) * P + j[None, :],
        products,
        mask=(token[:, None] < M) & (j[None, :] <= J),
    )


@triton.jit(do_not_specialize=["total"])
def _split_fn(fn_ptr, parts_ptr, total, BLOCK: tl.constexpr):
    """parts [3, J, K] in bfloat16, whose sum is fn to the last bit."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fn = tl.load(fn_ptr + at, mask=at < total, other=0.0)
    first = fn.to(tl.bfloat16)
    rest = fn - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    tl.store(parts_ptr + at, first, mask=at < total)
    tl.store(parts_ptr + total + at, second, mask=at < total)
    tl.store(parts_ptr + 2 * total + at, third, mask=at < total)


# From this many values of all streams of all tokens on, splitting the weights in a launch of their own pays: each
# tile of tokens would split them again, and conversions to bfloat16 run at an eighth of the rate of other instructions.
MANY_VALUES = 1 << 24


def _parts(fn):
    """The three bfloat16 parts of the weights, [3, J, K]: a few MB, which stay in the L2."""
    parts = torch.empty((3, *fn.shape), dtype=torch.bfloat16, device=fn.device)
    _split_fn[(_cdiv(fn.numel(), 1024),)](fn, parts, fn.numel(), 1024, num_warps=4)
    return parts


def _partials(residual, fn, tile_tokens, splits, stages, tile_columns=None):
    """float32 [splits, M, P]: products in the first J columns, sums of squares in the next."""
    M, K, J = residual.shape[0], residual.shape[1] * residual.shape[2], fn.shape[0]
    P = max(16, _pow2(J + 1))
    if M <= FEW_TOKENS:
        splits = _cdiv(K, FEW_COLUMNS)
        partial = torch.empty((splits, M, P), dtype=torch.float32, device=residual.device)
        _partial_few[(splits,)](residual, fn, partial, M, K, J, P, FEW_COLUMNS, num_warps=8)
        return partial
    parts = residual.dtype == torch.bfloat16 and P <= 32 and M >= 1024 and M * K >= MANY_VALUES
    block_m = tile_tokens or (128 if parts else 64 if M >= 1024 else 16)
    block_k = tile_columns or (64 if parts or residual.dtype == torch.float32 or P > 64 else 128)
    tiles = _cdiv(M, block_m)
    # About four programs a multiprocessor of an H200, two of the larger ones, and at least two blocks of columns each.
    splits = splits or max(1, min(_cdiv(K, 2 * block_k), (264 if parts else 512) // tiles))
    split_k = _cdiv(_cdiv(K, splits), block_k) * block_k
    splits = _cdiv(K, split_k)
    partial = torch.empty((splits, M, P), dtype=torch.float32, device=residual.device)
    stages = stages or (4 if parts else 3)
    weights, warps = (_parts(fn), 8 if block_m > 64 else 4) if parts else (fn, 4)
    _partial_tile[(tiles * splits,)](
        residual, weights, partial, M, K, J, P, splits, split_k, block_m, block_k, parts, stages, num_warps=warps
    )
    return partial


@triton.jit(do_not_specialize=["M", "splits"])
def _norm_finish(
    partial_ptr, mixes_ptr, rstd_ptr, eps, M, splits,
    K: tl.constexpr, J: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, P)[None, :]
    products = tl.zeros([BLOCK_M, P], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(splits):
        row = partial_ptr + (split * M + token) * P
        products += tl.load(row[:, None] + j, mask=(token[:, None] < M) & (j < J), other=0.0)
        squares += tl.load(row + J, mask=token < M, other=0.0)
    rstd = tl.rsqrt(squares / K + eps)
    tl.store(rstd_ptr + token, rstd, mask=token < M)
    tl.store(mixes_ptr + token[:, None] * J + j, products * rstd[:, None], mask=(token[:, None] < M) & (j < J))


def run_norm_fn(residual, fn, eps, mixes, rstd, *, BLOCK_M=None, SPLITS=None, STAGES=None):
    """mixes[M, J] = (x @ fn.T) * rstd, rstd[M] = rsqrt(mean(x^2) + eps), for x = residual [M, C, H] with a token's streams flat.

    fn [J, C * H] in float32, residual in bfloat16 or float32; contiguous, J <= 127. Products are those of float32.
    Two launches: partial sums over runs of columns, and their sum in a fixed order. Where much is to be read, one before them
    splits fn for the tensor cores.
    BLOCK_M = None: 128 or 64 tokens a tile where there are many, else 16; SPLITS = None: by how many tiles there are.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial = _partials(residual, fn, BLOCK_M, SPLITS, STAGES)
    splits, _, P = partial.shape
    block_m = 1 if M <= 1024 else 4
    _norm_finish[(_cdiv(M, block_m),)](
        partial, mixes, rstd, eps, M, splits, C * H, fn.shape[0], P, block_m, num_warps=1
    )


@triton.jit
def _coefficients_of_tokens(
    partial_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, rms_eps, sinkhorn_eps, post_mult, repeat, M, splits,
    C: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PC: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """post and comb of BLOCK_M tokens; CHUNK partial sums are added at once."""
    J: tl.constexpr = C * (C + 2)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, PC)
    row, column = c[None, :, None], c[None, None, :]
    at = row * C + column
    post = tl.zeros([BLOCK_M, PC], dtype=tl.float32)
    comb = tl.zeros([BLOCK_M, PC, PC], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    here = token < M
    inside = (row < C) & (column < C)
    for start in range(0, splits, CHUNK):  # many loads at once: a load a time is a wait each
        split = start + tl.arange(0, CHUNK)
        there = (split < splits)[:, None] & here[None, :]
        of_token = partial_ptr + (split[:, None] * M + token[None, :]) * P
        squares += tl.sum(tl.load(of_token + J, mask=there, other=0.0), axis=0)
        of_gate = of_token[:, :, None] + C + c[None, None, :]
        post += tl.sum(tl.load(of_gate, mask=there[:, :, None] & (c[None, None, :] < C), other=0.0), axis=0)
        of_matrix = of_token[:, :, None, None] + 2 * C + at[None, :, :, :]
        comb += tl.sum(tl.load(of_matrix, mask=there[:, :, None, None] & inside[None, :, :, :], other=0.0), axis=0)
    rstd = tl.rsqrt(squares / K + rms_eps)
    post_base = tl.load(base_ptr + C + c, mask=c < C, other=0.0)
    gate = tl.sigmoid(post * rstd[:, None] * tl.load(scale_ptr + 1) + post_base[None, :])
    tl.store(post_ptr + token[:, None] * C + c[None, :], gate * post_mult, mask=here[:, None] & (c[None, :] < C))
    z = comb * rstd[:, None, None] * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * C + at, mask=inside, other=0.0)
    mixing = _normalised(tl.where(inside, z, float("-inf")), inside, row < C, column < C, repeat, sinkhorn_eps)
    tl.store(comb_ptr + token[:, None, None] * (C * C) + at, mixing, mask=here[:, None, None] & inside)


@triton.jit
def _collapse_columns(
    pid, partial_ptr, residual_ptr, scale_ptr, base_ptr, layer_input_ptr, rms_eps, pre_eps, M, splits,
    C: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of the input of the sublayer; the gates of its token are computed here once more."""
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (M - 1 - pid // blocks).to(tl.int64)
    cols = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    streams = ()
    for c in tl.static_range(C):
        streams = streams + (tl.load(residual_ptr + (token * C + c) * H + cols, mask=cols < H, other=0.0),)
    s = tl.arange(0, SPLITS)
    of_token = partial_ptr + (s * M + token) * P
    squares = tl.sum(tl.load(of_token + C * (C + 2), mask=s < splits, other=0.0), axis=0)
    rstd = tl.rsqrt(squares / (C * H) + rms_eps)
    scale = tl.load(scale_ptr)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(C):
        product = tl.sum(tl.load(of_token + c, mask=s < splits, other=0.0), axis=0)
        gate = tl.sigmoid(product * rstd * scale + tl.load(base_ptr + c)) + pre_eps
        total += gate * streams[c].to(tl.float32)
    tl.store(layer_input_ptr + token * H + cols, total.to(layer_input_ptr.dtype.element_ty), mask=cols < H)


@triton.jit(do_not_specialize=["M", "splits", "programs", "repeat"])
def _pre_finish(
    partial_ptr, residual_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, layer_input_ptr, rms_eps, pre_eps,
    sinkhorn_eps, post_mult, repeat, M, splits, programs,
    C: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PC: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs: post and comb of BLOCK_M tokens each. All others: a block of columns of one token.

    So the steps of Sinkhorn, all latency, run beside the reading of the streams. Tokens go backwards there: the last ones
    that the projection has read are still in the L2.
    """
    pid = tl.program_id(0)
    if pid < programs:
        _coefficients_of_tokens(
            partial_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, rms_eps, sinkhorn_eps, post_mult, repeat, M, splits,
            C, C * H, P, PC, BLOCK_M, CHUNK,
        )  # fmt: skip
    else:
        _collapse_columns(
            pid - programs, partial_ptr, residual_ptr, scale_ptr, base_ptr, layer_input_ptr, rms_eps, pre_eps, M, splits,
            C, H, P, SPLITS, BLOCK,
        )  # fmt: skip


def run_pre_fused(
    residual, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat, post, comb, layer_input, *,
    BLOCK_M=None, BLOCK_K=None, SPLITS=None, STAGES=None, BLOCK=None, num_warps=4
):  # fmt: skip
    """norm_fn, split_mixes, Sinkhorn and apply_mix of one sublayer: post [M, C], comb [M, C, C], layer_input [M, H].

    Shapes: residual [M, C, H] and layer_input in bfloat16 or float32, fn [C * (C + 2), C * H], scale [3], base [C * (C + 2)],
    post and comb in float32; contiguous, C <= 8. Products are those of float32.
    Two launches: partial sums of the projection, and everything else; where much is to be read, one before them splits fn
    for the tensor cores. The streams are read twice, the second time in part from the L2.
    BLOCK_M, SPLITS, STAGES: as in run_norm_fn; BLOCK_K: columns of a tile. BLOCK, num_warps: columns and warps of a program
    that collapses streams.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial = _partials(residual, fn, BLOCK_M, SPLITS, STAGES, BLOCK_K)
    splits, _, P = partial.shape
    block = _column_block(H, BLOCK, 1024)
    tokens, side = (1 if M <= 64 else 8), _pow2(C)
    chunk = min(_pow2(splits), max(1, 2048 // (tokens * side * side)))
    programs = _cdiv(M, tokens)
    _pre_finish[(programs + M * _cdiv(H, block),)](
        partial, residual, scale, base, post, comb, layer_input, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat,
        M, splits, programs, C, H, P, side, _pow2(splits), tokens, chunk, block, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _placed_value(n, C: tl.constexpr, PC: tl.constexpr, HALF: tl.constexpr):
    """The projected value in place n of 2 * HALF, or -1: a matrix of PC * PC in the first half, pre and post in the second."""
    row, column, gate = n // PC, n % PC, n - HALF
    matrix = tl.where((row < C) & (column < C), 2 * C + row * C + column, -1)
    gates = tl.where((gate < 2 * PC) & (column < C), gate // PC * C + column, -1)
    return tl.where(n < HALF, matrix, gates)


@triton.jit
def _pre_store_coefficients(
    products, squares, token, M, scale_ptr, base_ptr, post_ptr, comb_ptr, rms_eps, sinkhorn_eps, post_mult, repeat,
    C: tl.constexpr, K: tl.constexpr, PC: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes post and comb of BLOCK_M tokens; returns their gates before pre_eps [BLOCK_M, HALF], those of pre first."""
    n = tl.arange(0, 2 * HALF)
    j = _placed_value(n, C, PC, HALF)
    part = tl.where(n < HALF, 2, tl.where(n < HALF + PC, 0, 1))
    rstd = tl.rsqrt(squares / K + rms_eps)
    scale = tl.load(scale_ptr + part)
    base = tl.load(base_ptr + j, mask=j >= 0, other=0.0)
    z = products * rstd[:, None] * scale[None, :] + base[None, :]
    scores, gates = tl.split(tl.permute(tl.reshape(z, [BLOCK_M, 2, HALF]), (0, 2, 1)))
    # One matrix a token: where PC * PC < HALF, what lies behind it belongs to none and is zero.
    matrices = tl.sum(tl.reshape(scores, [BLOCK_M, HALF // (PC * PC), PC * PC]), axis=1)
    c = tl.arange(0, PC)
    row, column = c[None, :, None], c[None, None, :]
    inside = (row < C) & (column < C)
    matrices = tl.where(inside, tl.reshape(matrices, [BLOCK_M, PC, PC]), float("-inf"))
    mixing = _normalised(matrices, inside, row < C, column < C, repeat, sinkhorn_eps)
    here = (token < M)[:, None, None] & inside
    tl.store(comb_ptr + token[:, None, None] * (C * C) + row * C + column, mixing, mask=here)
    gates = tl.sigmoid(gates)
    of_post = tl.arange(0, HALF) - PC
    there = (token < M)[:, None] & (of_post >= 0)[None, :] & (of_post < C)[None, :]
    tl.store(post_ptr + token[:, None] * C + of_post[None, :], gates * post_mult, mask=there)
    return gates


@triton.jit(do_not_specialize=["M", "repeat"])
def _pre_once(
    residual_ptr, fn_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, layer_input_ptr, rms_eps, pre_eps, sinkhorn_eps,
    post_mult, repeat, M,
    C: tl.constexpr, H: tl.constexpr, PC: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Everything for BLOCK_M tokens: all streams of a block of columns at a time, then the blocks backwards for their sum.

    So the columns that are read first the second time are those that were read last, and still in the L2.
    """
    K: tl.constexpr = C * H
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = _placed_value(tl.arange(0, 2 * HALF), C, PC, HALF)
    lanes = tl.arange(0, BLOCK)
    if BLOCK_M < 16:  # no tile for tensor cores: a lane adds up its own products to the end
        lane_products = tl.zeros([BLOCK_M, 2 * HALF, BLOCK], dtype=tl.float32)
        lane_squares = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
    else:
        products = tl.zeros([BLOCK_M, 2 * HALF], dtype=tl.float32)
        squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for step in tl.range(0, blocks * C, num_stages=STAGES):
        cols = step // C * BLOCK + lanes
        k = step % C * H + cols
        x = tl.load(
            residual_ptr + token[:, None] * K + k[None, :], mask=(token[:, None] < M) & (cols[None, :] < H), other=0.0
        )
        fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] >= 0) & (cols[None, :] < H), other=0.0)
        wide = x.to(tl.float32)
        if BLOCK_M < 16:
            lane_squares += wide * wide
            lane_products += wide[:, None, :] * fn[None, :, :]
        else:
            squares += tl.sum(wide * wide, axis=1)
            products += _block_products(x, fn)
    if BLOCK_M < 16:
        products = tl.sum(lane_products, axis=2)
        squares = tl.sum(lane_squares, axis=1)
    gates = _pre_store_coefficients(
        products, squares, token, M, scale_ptr, base_ptr, post_ptr, comb_ptr, rms_eps, sinkhorn_eps, post_mult, repeat,
        C, K, PC, HALF, BLOCK_M,
    )  # fmt: skip
    weights = ()
    for c in tl.static_range(C):
        weights = weights + (tl.sum(tl.where(tl.arange(0, HALF)[None, :] == c, gates, 0.0), axis=1) + pre_eps,)
    for back in range(blocks):
        cols = (blocks - 1 - back) * BLOCK + lanes
        here = (token[:, None] < M) & (cols[None, :] < H)
        total = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
        for c in tl.static_range(C):
            x = tl.load(residual_ptr + token[:, None] * K + c * H + cols[None, :], mask=here, other=0.0)
            total += weights[c][:, None] * x.to(tl.float32)
        tl.store(
            layer_input_ptr + token[:, None] * H + cols[None, :],
            total.to(layer_input_ptr.dtype.element_ty),
            mask=here,
        )


def run_pre_fused_once(
    residual, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat, post, comb, layer_input, *,
    BLOCK_M=None, BLOCK=None, STAGES=3, num_warps=None
):  # fmt: skip
    """As run_pre_fused, in one launch: a program has BLOCK_M tokens, and their coefficients never leave its registers.

    A program reads all of fn, which many programs share in the L2.
    BLOCK_M = None: 1 where there are few tokens, else 16 or 32, so that every multiprocessor has some.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    side = _pow2(C)
    half = max(8, 2 * side, side * side)
    block_m = BLOCK_M or (1 if M <= 16 else 16 if M < 4096 else 32)
    wide = residual.dtype == torch.float32 or half > 16
    block = min(BLOCK or (256 if block_m == 1 else 64 if wide else 128), max(16, _pow2(H)))
    warps = num_warps or (8 if block_m == 1 or block_m == 32 else 4)
    _pre_once[(_cdiv(M, block_m),)](
        residual, fn, scale, base, post, comb, layer_input, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat, M, C,
        H, side, half, block_m, block, STAGES, num_warps=warps,
    )  # fmt: skip
