"""The gradients of hyper-connections, Triton.

Streams are read once, and a token's coefficients get their gradients, dot products over its columns, in the same pass. Sums over
tokens are partial sums in a fixed order and their sum: no atomics, so that results repeat bit for bit.
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


# -- streams -------------------------------------------------------------------------------------------------------------


@triton.jit
def _expand_backward(grad_out_ptr, grad_x_ptr, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(C):
        where = grad_out_ptr + (token * C + c) * H + cols
        total += tl.load(where, mask=cols < H, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(grad_x_ptr + token * H + cols, total.to(grad_x_ptr.dtype.element_ty), mask=cols < H)


def run_expand_backward(grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK=1024, num_warps=4) -> None:
    """grad_x[M, H] = T(sum over c of grad_out[M, c, H]), the sum in float32; contiguous."""
    M, C, H = grad_out.shape
    if M == 0 or H == 0:
        return
    block = min(BLOCK, _pow2(H))
    _expand_backward[(M * _cdiv(H, block),)](grad_out, grad_x, C, H, block, num_warps=num_warps)


@triton.jit
def _placed(packed, sums, n):
    """A column of sums [LANES] put into column n of packed [LANES, P], where it is zero: one reduction for all columns."""
    column = tl.arange(0, packed.shape[1])[None, :]
    return packed + tl.where(column == n, sums[:, None], 0.0)


@triton.jit
def _apply_backward(
    residual_ptr,
    mix_ptr,
    grad_out_ptr,
    grad_residual_ptr,
    grad_mix_ptr,
    C: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    dtype = grad_residual_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    packed = tl.zeros([LANES, P], dtype=tl.float32)
    for start in tl.static_range(0, H, LANES * VEC):
        cols = start + lanes
        inside = cols < H
        grad = tl.load(grad_out_ptr + token * H + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        grad = grad.to(tl.float32)
        streams = ()
        for c in tl.static_range(C):
            where = residual_ptr + (token * C + c) * H + cols
            streams = streams + (tl.load(where, mask=inside, other=0.0, eviction_policy="evict_last"),)
        for c in tl.static_range(C):
            packed = _placed(packed, tl.sum(streams[c].to(tl.float32) * grad, axis=1), c)
            mixed = tl.load(mix_ptr + token * C + c) * grad
            tl.store(grad_residual_ptr + (token * C + c) * H + cols, mixed.to(dtype), mask=inside)
    column = tl.arange(0, P)
    tl.store(grad_mix_ptr + token * C + column, tl.sum(packed, axis=0), mask=column < C)


def run_pre_apply_mix_backward(
    residual: torch.Tensor,
    mix: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual: torch.Tensor,
    grad_mix: torch.Tensor,
    *,
    LANES=128,
    num_warps=4,
) -> None:
    """grad_residual[m, c] = T(mix[m, c] * grad_out[m]), grad_mix[m, c] = the dot product of residual[m, c] and grad_out[m].

    Shapes: residual and its gradient [M, C, H], grad_out [M, H] in T (bfloat16 or float32), mix and its gradient [M, C] in
    float32; contiguous, C <= 8. A program has one token, whose columns its lanes walk through 16 bytes at a time.
    """
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    _apply_backward[(M,)](
        residual,
        mix,
        grad_out,
        grad_residual,
        grad_mix,
        C,
        H,
        _pow2(C),
        LANES,
        16 // residual.element_size(),
        num_warps=num_warps,
    )


@triton.jit
def _post_backward(
    y_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    grad_out_ptr,
    grad_y_ptr,
    grad_residual_ptr,
    grad_post_ptr,
    grad_comb_ptr,
    C: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    dtype = grad_y_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    # Running dot products, one a lane: of every incoming gradient with y and with every stream.
    dots = ()
    for _ in tl.static_range(C + C * C):
        dots = dots + (tl.zeros([LANES], dtype=tl.float32),)
    for start in tl.static_range(0, H, LANES * VEC):
        cols = start + lanes
        inside = cols < H
        y = tl.load(y_ptr + token * H + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        grads, streams = (), ()
        for c in tl.static_range(C):
            where = (token * C + c) * H + cols
            grads = grads + (tl.load(grad_out_ptr + where, mask=inside, other=0.0, eviction_policy="evict_last"),)
            streams = streams + (tl.load(residual_ptr + where, mask=inside, other=0.0, eviction_policy="evict_last"),)
        grad_y = tl.zeros([LANES, VEC], dtype=tl.float32)
        updated = ()
        for o in tl.static_range(C):
            grad = grads[o].to(tl.float32)
            grad_y += tl.load(post_ptr + token * C + o) * grad
            updated = updated + (dots[o] + tl.sum(grad * y, axis=1),)
        tl.store(grad_y_ptr + token * H + cols, grad_y.to(dtype), mask=inside)
        for i in tl.static_range(C):
            stream = streams[i].to(tl.float32)
            grad_stream = tl.zeros([LANES, VEC], dtype=tl.float32)
            for o in tl.static_range(C):
                grad = grads[o].to(tl.float32)
                grad_stream += tl.load(comb_ptr + (token * C + i) * C + o) * grad
                updated = updated + (dots[C + i * C + o] + tl.sum(stream * grad, axis=1),)
            tl.store(grad_residual_ptr + (token * C + i) * H + cols, grad_stream.to(dtype), mask=inside)
        dots = updated
    packed = tl.zeros([LANES, P], dtype=tl.float32)
    for n in tl.static_range(C + C * C):
        packed = _placed(packed, dots[n], n)
    totals = tl.sum(packed, axis=0)
    n = tl.arange(0, P)
    tl.store(grad_post_ptr + token * C + n, totals, mask=n < C)
    tl.store(grad_comb_ptr + token * (C * C) + n - C, totals, mask=(n >= C) & (n < C + C * C))


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
    LANES=128,
    num_warps=4,
) -> None:
    """The four gradients of mhc_post; sums in float32, each rounded once.

    grad_y = sum over o of post[o] * grad_out[o], grad_residual[i] = sum over o of comb[i, o] * grad_out[o],
    grad_post[o] = <grad_out[o], y>, grad_comb[i, o] = <residual[i], grad_out[o]>.
    Shapes: y [M, H], residual and grad_out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32;
    contiguous, C <= 4. A program has one token, whose columns its lanes walk through 16 bytes at a time.
    """
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    _post_backward[(M,)](
        y,
        residual,
        post,
        comb,
        grad_out,
        grad_y,
        grad_residual,
        grad_post,
        grad_comb,
        C,
        H,
        _pow2(C + C * C),
        LANES,
        16 // residual.element_size(),
        num_warps=num_warps,
    )


# -- coefficients --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _sinkhorn_backward(
    z_ptr,
    grad_out_ptr,
    grad_z_ptr,
    eps,
    M,
    REPEAT: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """All steps again, keeping what each divided by; then back, where a matrix times that is the one before it."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None, None]
    row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    inside = (row < C) & (column < C)
    where = (token * C + row) * C + column
    z = tl.load(z_ptr + where, mask=inside & (token < M), other=0.0)
    grad = tl.load(grad_out_ptr + where, mask=inside & (token < M), other=0.0)
    z = tl.where(inside, z, float("-inf"))
    row_eps, column_eps = tl.where(row < C, eps, 1.0), tl.where(column < C, eps, 1.0)  # not 0 / 0 outside
    exps = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    soft = tl.where(inside, exps / tl.sum(exps, axis=2, keep_dims=True), 0.0)
    mixing = tl.where(inside, soft + eps, 0.0)
    divisors = ()
    for step in tl.static_range(2 * REPEAT - 1):
        if step % 2 == 0:
            divisor = tl.sum(mixing, axis=1, keep_dims=True) + column_eps
        else:
            divisor = tl.sum(mixing, axis=2, keep_dims=True) + row_eps
        mixing = mixing / divisor
        divisors = divisors + (divisor,)
    for step in tl.static_range(2 * REPEAT - 2, -1, -1):
        along = tl.sum(grad * mixing, axis=1 + step % 2, keep_dims=True)
        grad = (grad - along) / divisors[step]
        mixing = mixing * divisors[step]
    grad_z = soft * (grad - tl.sum(grad * soft, axis=2, keep_dims=True))
    tl.store(grad_z_ptr + where, grad_z, mask=inside & (token < M))


def run_sinkhorn_backward(
    z: torch.Tensor,
    grad_out: torch.Tensor,
    repeat: int,
    eps: float,
    grad_z: torch.Tensor,
    *,
    BLOCK_M=8,
    num_warps=1,
) -> None:
    """grad_z of mhc_sinkhorn through all of its steps, in registers.

    z, grad_out, grad_z: [M, C, C] in float32, contiguous, C <= 8. A kernel is compiled for each repeat.
    """
    M, C = z.shape[:2]
    if M == 0:
        return
    _sinkhorn_backward[(_cdiv(M, BLOCK_M),)](
        z, grad_out, grad_z, eps, M, repeat, C, _pow2(C), BLOCK_M, num_warps=num_warps
    )


@triton.jit(do_not_specialize=["M", "tokens_per_run"])
def _split_backward(
    mixes_ptr,
    scale_ptr,
    base_ptr,
    grad_pre_ptr,
    grad_post_ptr,
    grad_comb_ptr,
    grad_mixes_ptr,
    partial_ptr,
    post_mult,
    M,
    tokens_per_run,
    C: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A run of tokens: gradients of the projected values, and their sums with and without these values as factors.

    J = C is the gate of the final collapse, which has the first part alone.
    """
    first = tl.program_id(0).to(tl.int64) * tokens_per_run
    last = tl.minimum(first + tokens_per_run, M)
    j = tl.arange(0, P)[None, :]
    part = tl.where(j < C, 0, tl.where(j < 2 * C, 1, 2))
    scale = tl.load(scale_ptr + part, mask=j < J, other=0.0)
    base = tl.load(base_ptr + j, mask=j < J, other=0.0)
    base_sums = tl.zeros([BLOCK_M, P], dtype=tl.float32)
    scale_sums = tl.zeros([BLOCK_M, P], dtype=tl.float32)
    for start in range(first, last, BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)[:, None]
        here = (token < last) & (j < J)
        mixes = tl.load(mixes_ptr + token * J + j, mask=here, other=0.0)
        z = mixes * scale + base
        slope = tl.sigmoid(z) * tl.sigmoid(-z)  # 1 - sigmoid(z) has no digits left where z is large
        grad = slope * tl.load(grad_pre_ptr + token * C + j, mask=here & (j < C), other=0.0)
        if J > C:
            second = here & (j >= C) & (j < 2 * C)
            grad += slope * post_mult * tl.load(grad_post_ptr + token * C + j - C, mask=second, other=0.0)
            third = here & (j >= 2 * C)
            grad += tl.load(grad_comb_ptr + token * (C * C) + j - 2 * C, mask=third, other=0.0)
        tl.store(grad_mixes_ptr + token * J + j, grad * scale, mask=here)
        base_sums += grad
        scale_sums += grad * mixes
    out = partial_ptr + tl.program_id(0) * 2 * P + j
    tl.store(out, tl.sum(base_sums, axis=0, keep_dims=True))
    tl.store(out + P, tl.sum(scale_sums, axis=0, keep_dims=True))


@triton.jit(do_not_specialize=["runs"])
def _split_backward_sums(
    partial_ptr,
    grad_scale_ptr,
    grad_base_ptr,
    runs,
    C: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    j = tl.arange(0, P)
    base_sums = tl.zeros([BLOCK_R, P], dtype=tl.float32)
    scale_sums = tl.zeros([BLOCK_R, P], dtype=tl.float32)
    for start in range(0, runs, BLOCK_R):
        run = start + tl.arange(0, BLOCK_R)[:, None]
        where = partial_ptr + run * 2 * P + j[None, :]
        base_sums += tl.load(where, mask=run < runs, other=0.0)
        scale_sums += tl.load(where + P, mask=run < runs, other=0.0)
    tl.store(grad_base_ptr + j, tl.sum(base_sums, axis=0), mask=j < J)
    columns = tl.sum(scale_sums, axis=0)
    tl.store(grad_scale_ptr, tl.sum(tl.where(j < C, columns, 0.0), axis=0))
    if J > C:
        tl.store(grad_scale_ptr + 1, tl.sum(tl.where((j >= C) & (j < 2 * C), columns, 0.0), axis=0))
        tl.store(grad_scale_ptr + 2, tl.sum(tl.where(j >= 2 * C, columns, 0.0), axis=0))


def _run_split_backward(inputs, grads, grad_mixes, grad_scale, grad_base, post_mult, streams, block_m):
    mixes = inputs[0]
    M, J = mixes.shape
    P = _pow2(J)
    tokens = max(block_m, _cdiv(_cdiv(M, 256), block_m) * block_m)
    runs = _cdiv(M, tokens)
    partial = torch.empty((max(runs, 1), 2, P), dtype=torch.float32, device=mixes.device)
    if M:
        _split_backward[(runs,)](
            *inputs, *grads, grad_mixes, partial, post_mult, M, tokens, streams, J, P, block_m, num_warps=2
        )
    _split_backward_sums[(1,)](partial, grad_scale, grad_base, runs, streams, J, P, 32, num_warps=4)


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
    BLOCK_M=8,
) -> None:
    """The gradients of mhc_pre_split_mixes; those of scale [3] and base [C * (C + 2)] are sums over tokens, zero without any.

    Shapes: mixes and its gradient [M, C * (C + 2)], gradients of pre and post [M, C], of comb [M, C, C]; float32, contiguous.
    """
    grads = grad_pre, grad_post, grad_comb
    _run_split_backward((mixes, scale, base), grads, grad_mixes, grad_scale, grad_base, post_mult, streams, BLOCK_M)


def run_head_compute_mix_backward(
    mix: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    grad_out: torch.Tensor,
    grad_mix: torch.Tensor,
    grad_scale: torch.Tensor,
    grad_base: torch.Tensor,
    *,
    BLOCK_M=8,
) -> None:
    """The gradients of mhc_head_compute_mix; those of scale [1] and base [C] are sums over tokens, zero without any."""
    grads = grad_out, grad_out, grad_out  # the gate of the final collapse has one part
    _run_split_backward((mix, scale, base), grads, grad_mix, grad_scale, grad_base, 1.0, mix.shape[1], BLOCK_M)


# -- the projection of all streams of a token ----------------------------------------------------------------------------


@triton.jit
def _in_three(x):
    """Three bfloat16 numbers whose sum is x to the last bit."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["M", "tokens_per_run"])
def _norm_backward(
    residual_ptr,
    fn_ptr,
    mixes_ptr,
    rstd_ptr,
    grad_mixes_ptr,
    grad_residual_ptr,
    partial_ptr,
    M,
    tokens_per_run,
    K: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of columns of a run of tokens: their gradient, and a partial sum of that of the projection.

    bfloat16 streams meet the gradients of the products, float32, as sums of three bfloat16 numbers: nothing is lost. Both
    factors of the streams' own gradient take all three parts as well, though it is rounded to bfloat16: with two of each, a
    row whose terms cancel is off by more than that.
    """
    dtype = grad_residual_ptr.dtype.element_ty
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    run = (tl.program_id(0) // blocks).to(tl.int64)
    k = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    j = tl.arange(0, P)
    first, last = run * tokens_per_run, tl.minimum((run + 1) * tokens_per_run, M)
    fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < J) & (k[None, :] < K), other=0.0)
    grad_fn = tl.zeros([BLOCK_K, P], dtype=tl.float32)
    for start in range(first, last, BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)
        here = (token[:, None] < last) & (k[None, :] < K)
        of_token = (token[:, None] < last) & (j[None, :] < J)
        x = tl.load(residual_ptr + token[:, None] * K + k[None, :], mask=here, other=0.0)
        rstd = tl.load(rstd_ptr + token, mask=token < last, other=0.0)
        grad = tl.load(grad_mixes_ptr + token[:, None] * J + j[None, :], mask=of_token, other=0.0)
        mixes = tl.load(mixes_ptr + token[:, None] * J + j[None, :], mask=of_token, other=0.0)
        along = tl.sum(grad * mixes, axis=1) * rstd * rstd * (1.0 / K)
        grad = grad * rstd[:, None]
        if x.dtype == tl.bfloat16:
            high, middle, low = _in_three(grad)
            fn_high, fn_middle, fn_low = _in_three(fn)
            grad_x = tl.dot(low, fn_high)
            grad_x = tl.dot(middle, fn_middle, grad_x)
            grad_x = tl.dot(high, fn_low, grad_x)
            grad_x = tl.dot(middle, fn_high, grad_x)
            grad_x = tl.dot(high, fn_middle, grad_x)
            grad_x = tl.dot(high, fn_high, grad_x)
            block = tl.dot(tl.trans(x), low)
            block = tl.dot(tl.trans(x), middle, block)
            block = tl.dot(tl.trans(x), high, block)
        else:
            grad_x = tl.dot(grad, fn, input_precision="ieee")
            block = tl.dot(tl.trans(x), grad, input_precision="ieee")
        grad_fn += block
        grad_x -= x.to(tl.float32) * along[:, None]
        tl.store(grad_residual_ptr + token[:, None] * K + k[None, :], grad_x.to(dtype), mask=here)
    out = partial_ptr + run * (J * K) + j[None, :] * K + k[:, None]
    tl.store(out, grad_fn, mask=(j[None, :] < J) & (k[:, None] < K))


@triton.jit(do_not_specialize=["runs", "total"])
def _sum_runs(partial_ptr, out_ptr, runs, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for run in range(runs):
        sums += tl.load(partial_ptr + run * total.to(tl.int64) + at, mask=at < total, other=0.0)
    tl.store(out_ptr + at, sums, mask=at < total)


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
    BLOCK_M=None,
    RUNS=None,
    num_warps=8,
) -> None:
    """The gradients of mhc_norm_fn for the streams and the projection, from what the forward gave; eps is in rstd already.

    With p = grad_mixes * rstd: grad_residual = T(p @ fn - x * rstd^2 * sum(grad_mixes * mixes) / K), grad_fn = p.T @ x, for x =
    residual [M, C, H] with a token's K = C * H values flat.
    Shapes: residual and its gradient in bfloat16 or float32; fn and its gradient [J, K], mixes and its gradient [M, J], rstd
    [M] in float32; contiguous, J <= 128. The streams are read once; two launches.
    RUNS = None: as many runs of tokens as make two programs a multiprocessor of an H200.
    """
    M = residual.shape[0]
    J, K = fn.shape
    P = max(16, _pow2(J))
    wide = residual.element_size() == 4
    block_m = BLOCK_M or (32 if wide or M < 512 else 64)
    block_k = 64 if wide or P > 64 else 128
    blocks = _cdiv(K, block_k)
    tiles = _cdiv(M, block_m)
    tokens = _cdiv(tiles, min(tiles, RUNS or max(1, 264 // blocks))) * block_m if M else block_m
    runs = _cdiv(M, tokens)
    partial = torch.empty((max(runs, 1), J, K), dtype=torch.float32, device=residual.device)
    if M:
        _norm_backward[(runs * blocks,)](
            residual,
            fn,
            mixes,
            rstd,
            grad_mixes,
            grad_residual,
            partial,
            M,
            tokens,
            K,
            J,
            P,
            block_m,
            block_k,
            num_warps=num_warps,
        )
    _sum_runs[(_cdiv(J * K, 1024),)](partial, grad_fn, runs, J * K, 1024, num_warps=4)
