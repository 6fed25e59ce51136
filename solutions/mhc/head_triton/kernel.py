"""The end of hyper-connections, Triton: weights from all streams of a token, and their weighted sum."""

# ruff: noqa: RUF005, SIM108
# A kernel gathers tiles in a tuple by sums of tuples, and chooses at compile time: Triton has no starred expressions.

import functools

import torch
import triton
import triton.language as tl

# Up to this many tokens there are processors to share out a token: several programs a token, in two launches.
FEW_TOKENS = 128
FEW_COLUMNS = 256
# Up to this many (padded) values a token's streams stay in the registers of one program, with the rows of the projection
# in registers and in the L1: a token is read once. Longer ones are read twice.
MAX_REGISTER_VALUES = 16384
# Up to this many (unpadded) values of a token two rows of the projection stay in registers, else one.
MOST_KEPT_VALUES = 12288
TOKENS = 4


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _stacked(values, COUNT: tl.constexpr, P: tl.constexpr):
    """[N, P] of COUNT tensors [N], zero beyond them: one sum over N for all of them; P in 2, 4, 8, 16."""
    padded = values
    for _ in tl.static_range(P - COUNT):
        padded = padded + (tl.zeros_like(values[0]),)
    # Pairs of places that lie half of all apart, so that the last axis counts up.
    if P == 2:
        stack = tl.join(padded[0], padded[1])
    elif P == 4:
        stack = tl.join(tl.join(padded[0], padded[2]), tl.join(padded[1], padded[3]))
    elif P == 8:
        even = tl.join(tl.join(padded[0], padded[4]), tl.join(padded[2], padded[6]))
        odd = tl.join(tl.join(padded[1], padded[5]), tl.join(padded[3], padded[7]))
        stack = tl.join(even, odd)
    else:
        first = tl.join(tl.join(padded[0], padded[8]), tl.join(padded[4], padded[12]))
        third = tl.join(tl.join(padded[2], padded[10]), tl.join(padded[6], padded[14]))
        second = tl.join(tl.join(padded[1], padded[9]), tl.join(padded[5], padded[13]))
        fourth = tl.join(tl.join(padded[3], padded[11]), tl.join(padded[7], padded[15]))
        stack = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(stack, [values[0].shape[0], P])


@triton.jit
def _of_a_thread(products, W: tl.constexpr):
    """Sums over streams and neighbouring columns, which one thread has: [PC, W] -> [W / 8]."""
    PC: tl.constexpr = products.shape[0]
    parts = tl.permute(tl.reshape(products, [PC, W // 8, 8]), (1, 0, 2))
    return tl.sum(tl.reshape(parts, [W // 8, PC * 8]), axis=1)


@triton.jit(do_not_specialize=["M"])
def _head_rows(
    residual_ptr, fn_ptr, scale_ptr, base_ptr, out_ptr, rms_eps, eps, M,
    C: tl.constexpr, H: tl.constexpr, PC: tl.constexpr, W: tl.constexpr, P: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A program a multiprocessor, a token at a time in its registers; the next one is on its way meanwhile.

    KEEP rows of the projection stay in registers. The others come from the L1 each time, which the streams pass by.
    """
    K: tl.constexpr = C * H
    first = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PC)[:, None]
    at = c * H + tl.arange(0, W)[None, :]
    real = (c < C) & (tl.arange(0, W)[None, :] < H)
    rows = ()
    for j in tl.static_range(KEEP):
        rows = rows + (tl.load(fn_ptr + j * K + at, mask=real, other=0.0, eviction_policy="evict_last"),)
    scale = tl.load(scale_ptr)
    place = tl.arange(0, P)
    cols = tl.arange(0, W)
    following = tl.load(residual_ptr + first * K + at, mask=real, other=0.0, cache_modifier=".cg")
    token = first
    for _ in range(tl.program_id(0), M, tl.num_programs(0)):
        x = following
        after = token + tl.num_programs(0)
        there = real & (cols[None, :] < tl.where(after < M, W, 0))
        following = tl.load(residual_ptr + after * K + at, mask=there, other=0.0, cache_modifier=".cg")
        wide = x.to(tl.float32)
        sums = (_of_a_thread(wide * wide, W),)
        for j in tl.static_range(C):
            if j < KEEP:
                row = rows[j]
            else:
                row = tl.load(fn_ptr + j * K + at, mask=real, other=0.0, eviction_policy="evict_last")
            sums = sums + (_of_a_thread(wide * row, W),)
        totals = tl.sum(_stacked(sums, C + 1, P), axis=0)
        rstd = tl.rsqrt(tl.sum(tl.where(place == 0, totals, 0.0), axis=0) / K + rms_eps)
        gates = tl.zeros([PC], dtype=tl.float32)
        for j in tl.static_range(C):
            product = tl.sum(tl.where(place == j + 1, totals, 0.0), axis=0)
            gate = tl.sigmoid(product * rstd * scale + tl.load(base_ptr + j)) + eps
            gates = tl.where(tl.arange(0, PC) == j, gate, gates)
        total = tl.sum(gates[:, None] * x.to(tl.float32), axis=0)
        tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)
        token = after


@triton.jit
def _head_partial(
    residual_ptr, fn_ptr, partial_ptr,
    C: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of a token: its products with the projection, and its sum of squares in column C."""
    token = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, P)
    x = tl.load(residual_ptr + token * K + k, mask=k < K, other=0.0)
    fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < C) & (k[None, :] < K), other=0.0)
    wide = x.to(tl.float32)
    products = tl.sum(tl.where(j[:, None] == C, wide[None, :], fn) * wide[None, :], axis=1)
    tl.store(partial_ptr + (token * tl.num_programs(0) + tl.program_id(0)) * P + j, products)


@triton.jit
def _head_finish(
    partial_ptr, residual_ptr, scale_ptr, base_ptr, out_ptr, rms_eps, eps,
    C: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, PSPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of a token's sum; the gates of the token are computed in each."""
    token = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    streams = ()
    for c in tl.static_range(C):
        streams = streams + (tl.load(residual_ptr + (token * C + c) * H + cols, mask=cols < H, other=0.0),)
    j = tl.arange(0, P)
    s = tl.arange(0, PSPLITS)
    partial = tl.load(partial_ptr + (token * SPLITS + s[:, None]) * P + j[None, :], mask=s[:, None] < SPLITS, other=0.0)
    totals = tl.sum(partial, axis=0)
    rstd = tl.rsqrt(tl.sum(tl.where(j == C, totals, 0.0), axis=0) / (C * H) + rms_eps)
    base = tl.load(base_ptr + j, mask=j < C, other=0.0)
    gates = tl.sigmoid(totals * rstd * tl.load(scale_ptr) + base) + eps
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(C):
        total += tl.sum(tl.where(j == c, gates, 0.0), axis=0) * streams[c].to(tl.float32)
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


@triton.jit(do_not_specialize=["M"])
def _head(
    residual_ptr, fn_ptr, scale_ptr, base_ptr, out_ptr, rms_eps, eps, M,
    C: tl.constexpr, H: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens share what is read of the projection; their streams are read again, from the cache, for the sum."""
    K: tl.constexpr = C * H
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, P)
    lanes = tl.arange(0, BLOCK)
    inside = token[:, None] < M
    products = tl.zeros([TOKENS, P], dtype=tl.float32)
    squares = tl.zeros([TOKENS], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + lanes
        x = tl.load(residual_ptr + token[:, None] * K + k[None, :], mask=inside & (k[None, :] < K), other=0.0)
        fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < C) & (k[None, :] < K), other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        products += tl.sum(wide[:, None, :] * fn[None, :, :], axis=2)
    rstd = tl.rsqrt(squares / K + rms_eps)
    base = tl.load(base_ptr + j, mask=j < C, other=0.0)
    gates = tl.sigmoid(products * rstd[:, None] * tl.load(scale_ptr) + base[None, :]) + eps
    for start in range(0, H, BLOCK):
        cols = start + lanes
        real = inside & (cols[None, :] < H)
        total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for c in tl.static_range(C):
            x = tl.load(residual_ptr + (token[:, None] * C + c) * H + cols[None, :], mask=real, other=0.0)
            gate = tl.sum(tl.where(j[None, :] == c, gates, 0.0), axis=1)
            total += gate[:, None] * x.to(tl.float32)
        tl.store(out_ptr + token[:, None] * H + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=real)


def run_head_fused(residual, fn, scale, base, rms_eps, eps, out, *, BLOCK=None, KEEP=None, num_warps=None):
    """out[M, H] = T(sum over c of w[M, c] * residual[M, c, H]), w = sigmoid(scale * fn of the normalised streams + base) + eps.

    Shapes: residual [M, C, H] and out in bfloat16 or float32; fn [C, C * H], scale [1], base [C] in float32; contiguous, C <= 8.
    Products are those of float32.
    Few tokens: a block of columns a program, and a second launch for the sum. Else, where a token fits in the registers of
    one program, as many programs as multiprocessors, each of which reads its part of fn once and every token once; KEEP rows
    of fn stay in registers, the others in the L1; None: as many as leave a thread of 16 warps its registers. Longer tokens
    are read twice, BLOCK columns at a time.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    if M <= FEW_TOKENS:
        P, splits = _pow2(C + 1), _cdiv(C * H, FEW_COLUMNS)
        partial = torch.empty((M, splits, P), dtype=torch.float32, device=residual.device)
        _head_partial[(splits, M)](residual, fn, partial, C, C * H, P, FEW_COLUMNS, num_warps=4)
        block = min(512, _pow2(H))
        _head_finish[(_cdiv(H, block), M)](
            partial, residual, scale, base, out, rms_eps, eps, C, H, P, splits, _pow2(splits), block,
            num_warps=2,
        )  # fmt: skip
        return
    side, width = _pow2(C), max(8, _pow2(H))
    if residual.element_size() == 2 and side * width <= MAX_REGISTER_VALUES:
        keep = KEEP or (1 if side * H > MOST_KEPT_VALUES else 2)
        programs = min(M, _processors(residual.get_device()) if residual.is_cuda else M)
        _head_rows[(programs,)](
            residual, fn, scale, base, out, rms_eps, eps, M, C, H, side, width, _pow2(C + 1), min(keep, C),
            num_warps=num_warps or (16 if side * width == MAX_REGISTER_VALUES else 8),
        )  # fmt: skip
        return
    block = min(BLOCK or 1024 // TOKENS, _pow2(C * H))
    _head[(_cdiv(M, TOKENS),)](
        residual, fn, scale, base, out, rms_eps, eps, M, C, H, _pow2(C), TOKENS, block, num_warps=8
    )
