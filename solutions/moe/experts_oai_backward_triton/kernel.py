"""Gradients of the experts of gpt-oss, Triton: slots sorted by expert, products over their rows and over their slots.

Routing and products are those of ``experts_backward_triton``, whose file stays as it was measured. Here both products have a
bias, weights lie by column, gate and up alternate and are clamped.
"""

import torch
import triton
import triton.language as tl

COUNTED = 1024  # ids that are read at a time


@triton.jit
def _rounded(value, T: tl.constexpr):
    return value.to(T).to(tl.float32)


@triton.jit(do_not_specialize=["pairs"])
def _count_ids(ids_ptr, counts_ptr, pairs, BLOCK: tl.constexpr):
    """counts[e] = how many ids are e."""
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
        count += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["pairs"])
def _place_ids(
    ids_ptr, counts_ptr, starts_ptr, order_ptr, pairs, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """order[slot] = pair of token and choice, stably sorted by expert; starts[e] = first slot of e, starts[E] = their number."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, mask=bins < E, other=0)
    start = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == E - 1:
        tl.store(starts_ptr + E, tl.sum(counts, axis=0))
    for first in range(0, pairs, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
        own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(own, axis=0) - 1, places, mask=own > 0)
        start += tl.sum(own, axis=0)


@triton.jit
def _row_tile(starts_ptr, tile, E: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of slots, its first slot and the end of the expert's; E where no tile is left."""
    bins = tl.arange(0, BINS)
    begin = tl.load(starts_ptr + bins, mask=bins < E, other=0)
    end = tl.load(starts_ptr + bins + 1, mask=bins < E, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((tile_ends <= tile) & (bins < E)).to(tl.int32), axis=0)
    own = bins == expert
    first = tl.sum(tl.where(own, begin + (tile - tile_ends + tiles) * ROWS, 0), axis=0)
    return expert, first, tl.sum(tl.where(own, end, 0), axis=0)


@triton.jit
def _rows_times_weights(
    a_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    starts_ptr,
    order_ptr,
    a_stride,
    w_stride,
    k_stride,
    n_stride,
    DEPTH,
    N,
    E: tl.constexpr,
    K: tl.constexpr,
    BINS: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TO_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[slot] = a[slot] w[expert of the slot], with w [DEPTH, N] in any order of its axes, plus bias[expert].

    OF_TOKENS: a has a row for each token, not for each slot. TO_PAIRS: rows go to the place of their pair, not of their slot.
    """
    n_tiles = tl.cdiv(N, BLOCK_N)
    expert, first, end = _row_tile(starts_ptr, tl.program_id(0) // n_tiles, E, BINS, BLOCK_M)
    if expert >= E:
        return
    slots = first + tl.arange(0, BLOCK_M)
    # Rows past the end are read from the last one and not stored.
    held = tl.minimum(slots, end - 1)
    source = tl.load(order_ptr + held) // K if OF_TOKENS else held
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + source.to(tl.int64)[:, None] * a_stride + k[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride + k.to(tl.int64)[:, None] * k_stride + n[None, :] * n_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        inside = k < DEPTH - start
        a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, w, acc)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * tl.cast(k_stride, tl.int64)
    if HAS_BIAS:  # the model's code rounds the product first
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)
        acc = _rounded(acc, out_ptr.dtype.element_ty) + bias.to(tl.float32)[None, :]
    target = (tl.load(order_ptr + held) if TO_PAIRS else slots).to(tl.int64)
    tl.store(
        out_ptr + target[:, None] * N + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(slots < end)[:, None] & (n < N)[None, :],
    )


@triton.jit(do_not_specialize=["pairs"])
def _between_products(
    both_ptr,
    passed_ptr,
    inner_ptr,
    grad_out_ptr,
    down_bias_ptr,
    ids_ptr,
    weights_ptr,
    grad_weights_ptr,
    starts_ptr,
    order_ptr,
    grad_out_stride,
    pairs,
    H,
    I,
    alpha,
    limit,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS slots: gate and up in place to their gradients, inner rows times their routing weights, and these weights' gradients.

    passed = the gradient of the sum times the second weights, before the routing weight.
    """
    T: tl.constexpr = both_ptr.dtype.element_ty
    slots = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.load(ids_ptr + slots, mask=slots < pairs, other=0)
    # A pair of no expert has no slot, and its weight has no gradient.
    tl.store(
        grad_weights_ptr + slots, tl.zeros([ROWS], tl.float32).to(T), mask=(slots < pairs) & ((own < 0) | (own >= E))
    )
    used = tl.load(starts_ptr + E)
    if tl.program_id(0) * ROWS >= used:
        return
    there = (slots < used)[:, None]
    pair = tl.load(order_ptr + slots, mask=slots < used, other=0)
    share = tl.load(weights_ptr + pair).to(tl.float32)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    alternate = tl.arange(0, 2 * BLOCK)
    for start in range(0, I, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = there & (columns < I)[None, :]
        both_ptrs = both_ptr + slots[:, None] * 2 * I + (2 * start + alternate)[None, :]
        both_inside = there & (alternate < 2 * (I - start))[None, :]
        both = tl.load(both_ptrs, mask=both_inside, other=0.0).to(tl.float32)
        gate_given, up_given = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
        gate = _rounded(tl.minimum(gate_given, limit), T)
        up = _rounded(tl.minimum(tl.maximum(up_given, -limit), limit), T)
        sigmoid = _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, T))), T)
        opened = _rounded(gate * sigmoid, T)
        more = _rounded(up + 1.0, T)
        inner = _rounded(more * opened, T)
        passed = tl.load(passed_ptr + slots[:, None] * I + columns[None, :], mask=inside, other=0.0)
        sums += passed * inner
        grad_inner = _rounded(passed * share, T)
        grad_opened = _rounded(grad_inner * more, T)
        grad_scaled = _rounded(_rounded(grad_opened * gate, T) * (1.0 - sigmoid) * sigmoid, T)
        grad_gate = _rounded(grad_opened * sigmoid, T) + _rounded(grad_scaled * alpha, T)
        grad_gate = tl.where(gate_given < limit, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(up_given) < limit, grad_inner * opened, 0.0)
        tl.store(both_ptrs, tl.interleave(grad_gate, grad_up).to(T), mask=both_inside)
        tl.store(inner_ptr + slots[:, None] * I + columns[None, :], (inner * share).to(T), mask=inside)
    # The second bias of the row's expert is part of what the routing weight multiplies.
    expert = tl.load(ids_ptr + pair, mask=slots < used, other=0)
    given_ptrs = grad_out_ptr + (pair // K).to(tl.int64)[:, None] * grad_out_stride
    for start in range(0, H, BLOCK):
        columns = (start + tl.arange(0, BLOCK))[None, :]
        inside = there & (columns < H)
        given = tl.load(given_ptrs + columns, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(down_bias_ptr + expert[:, None] * H + columns, mask=inside, other=0.0).to(tl.float32)
        sums += given * bias
    tl.store(grad_weights_ptr + pair, tl.sum(sums, axis=1).to(T), mask=slots < used)


@triton.jit
def _sums_of_experts(
    rows_ptr,
    weights_ptr,
    out_ptr,
    starts_ptr,
    order_ptr,
    row_stride,
    N,
    K: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[e] = sum over the slots of e of their rows; zeros where e has none. One block of columns of one expert.

    OF_TOKENS: there is a row for each token, and it is multiplied by the routing weight of the slot.
    """
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    total = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        held = tl.minimum(slots, end - 1)
        pair = tl.load(order_ptr + held)
        source = (pair // K if OF_TOKENS else held).to(tl.int64)
        inside = (slots < end)[:, None] & (n < N)[None, :]
        rows = tl.load(rows_ptr + source[:, None] * row_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
        if OF_TOKENS:
            share = tl.load(weights_ptr + pair).to(tl.float32)
            # What is past the end is zero, but the routing weight that it was read with may be infinite.
            rows = tl.where(inside, _rounded(rows * share[:, None], rows_ptr.dtype.element_ty), 0.0)
        total += rows
    found = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert.to(tl.int64) * N + n, found, mask=n < N)


@triton.jit
def _slots_of_experts(
    a_ptr,
    b_ptr,
    out_ptr,
    starts_ptr,
    order_ptr,
    a_stride,
    b_stride,
    N_A,
    N_B,
    K: tl.constexpr,
    A_OF_TOKENS: tl.constexpr,
    B_OF_TOKENS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """out[e] [N_A, N_B] = sum over the slots of e of a[slot] b[slot]^T; zeros where e has none. One tile of one expert."""
    a_tiles, b_tiles = tl.cdiv(N_A, BLOCK_A), tl.cdiv(N_B, BLOCK_B)
    expert = tl.program_id(0) // (a_tiles * b_tiles)
    tile = tl.program_id(0) % (a_tiles * b_tiles)
    a = tile // b_tiles * BLOCK_A + tl.arange(0, BLOCK_A)
    b = tile % b_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    acc = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for start in range(begin, end, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        held = tl.minimum(slots, end - 1)
        token = tl.load(order_ptr + held) // K
        a_rows = (token if A_OF_TOKENS else held).to(tl.int64)
        b_rows = (token if B_OF_TOKENS else held).to(tl.int64)
        # Slots past the end are zero on both sides: what is read there may be infinite.
        there = slots < end
        left = tl.load(
            a_ptr + a_rows[None, :] * a_stride + a[:, None], mask=there[None, :] & (a < N_A)[:, None], other=0.0
        )
        right = tl.load(
            b_ptr + b_rows[:, None] * b_stride + b[None, :], mask=there[:, None] & (b < N_B)[None, :], other=0.0
        )
        acc = tl.dot(left, right, acc)
    places = expert.to(tl.int64) * N_A * N_B + a.to(tl.int64)[:, None] * N_B + b[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=(a < N_A)[:, None] & (b < N_B)[None, :])


@triton.jit
def _sum_choices(rows_ptr, ids_ptr, out_ptr, out_stride, H, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = sum over its choices, in order, of their rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        pair = token * K + choice
        expert = tl.load(ids_ptr + pair)
        width = tl.where((expert >= 0) & (expert < E), H, 0)
        total += tl.load(rows_ptr + pair * H + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _rows_by_default(pairs: int, experts: int) -> int:
    rows = pairs / experts
    return 16 if rows <= 16 else 64 if rows <= 96 else 128


def run(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
    grad_out: torch.Tensor,
    grad_x: torch.Tensor,
    grad_weights: torch.Tensor,
    grad_gate_up: torch.Tensor,
    grad_gate_up_bias: torch.Tensor,
    grad_down: torch.Tensor,
    grad_down_bias: torch.Tensor,
    *,
    BLOCK_M=None,
    BLOCK_N=128,
    BLOCK_S=64,
    num_warps=None,
):
    """Gradients of out[t] = sum over choices of weights[t, k] * (a down + down_bias) of expert ids[t, k].

    a = (up + 1) * gate * sigmoid(alpha * gate), where gate, the even columns of x gate_up + gate_up_bias, is cut at limit from
    above, and up, the odd ones, on both sides.
    Shapes: x, grad_out and grad_x [M, H] with unit last stride and any row stride, ids int64 and weights [M, K], gate_up
    [E, H, 2 I], down [E, I, H], biases [E, 2 I] and [E, H]; bfloat16. Ids outside of 0..E-1 take no part. Sums are in fp32 and
    in a fixed order: without atomics.
    Mapping: pairs of token and choice are sorted by expert on the device, and nothing is read back: launches have the size of a
    bound. Gate and up are computed again for each slot. The gradient of the sum goes through the second weights; times the inner
    row, and with the second bias, it gives the gradient of the routing weight, so the second product of the forward is not
    needed. Products over slots give the gradients of both weights, sums over slots those of both biases, and a product over
    columns and a sum over choices that of x.
    BLOCK_M = None: by the slots that an expert gets on average. BLOCK_S: slots at a time in the gradients of weights.
    """
    M, H = x.shape
    K, E, I = ids.shape[1], down.shape[0], down.shape[1]
    pairs = M * K
    if pairs == 0:
        grad_gate_up.zero_()
        grad_gate_up_bias.zero_()
        grad_down.zero_()
        grad_down_bias.zero_()
        return
    bins = max(32, 1 << E.bit_length())
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    starts = torch.empty(E + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    _count_ids[(E,)](ids, counts, pairs, COUNTED, num_warps=4)
    _place_ids[(E,)](ids, counts, starts, order, pairs, E, bins, COUNTED, num_warps=4)

    block_m = BLOCK_M or _rows_by_default(pairs, E)
    warps = num_warps or (8 if block_m * BLOCK_N >= 128 * 128 else 4)
    tiles = (pairs + min(E, pairs) * (block_m - 1)) // block_m
    shape = (block_m, BLOCK_N, 64)
    both = torch.empty((pairs, 2 * I), dtype=x.dtype, device=x.device)
    passed = torch.empty((pairs, I), dtype=torch.float32, device=x.device)
    inner = torch.empty((pairs, I), dtype=x.dtype, device=x.device)
    _rows_times_weights[(tiles * _cdiv(2 * I, BLOCK_N),)](
        x, gate_up, gate_up_bias, both, starts, order, x.stride(0), 2 * I * H, 2 * I, 1, H, 2 * I, E, K, bins,
        True, True, False, *shape, num_warps=warps, num_stages=3,
    )  # fmt: skip
    _rows_times_weights[(tiles * _cdiv(I, BLOCK_N),)](
        grad_out, down, down, passed, starts, order, grad_out.stride(0), H * I, 1, H, H, I, E, K, bins,
        True, False, False, *shape, num_warps=warps, num_stages=3,
    )  # fmt: skip
    block = min(1024, max(32, 1 << (I - 1).bit_length()))
    at_once = 1024 // block
    # Without contraction: a fused multiply-add of T would skip the rounding of a product.
    _between_products[(_cdiv(pairs, at_once),)](
        both, passed, inner, grad_out, down_bias, ids, weights, grad_weights, starts, order, grad_out.stride(0),
        pairs, H, I, alpha, limit, E, K, at_once, block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    columns = 64
    _sums_of_experts[(E, _cdiv(2 * I, columns))](
        both, weights, grad_gate_up_bias, starts, order, 2 * I, 2 * I, K, False, 64, columns, num_warps=4
    )
    _sums_of_experts[(E, _cdiv(H, columns))](
        grad_out, weights, grad_down_bias, starts, order, grad_out.stride(0), H, K, True, 64, columns, num_warps=4
    )
    side = BLOCK_N, 128, BLOCK_S
    _slots_of_experts[(E * _cdiv(H, BLOCK_N) * _cdiv(2 * I, 128),)](
        x, both, grad_gate_up, starts, order, x.stride(0), 2 * I, H, 2 * I, K, True, False, *side,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    _slots_of_experts[(E * _cdiv(I, BLOCK_N) * _cdiv(H, 128),)](
        inner, grad_out, grad_down, starts, order, I, grad_out.stride(0), I, H, K, False, True, *side,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    rows = torch.empty((pairs, H), dtype=x.dtype, device=x.device)
    _rows_times_weights[(tiles * _cdiv(H, BLOCK_N),)](
        both, gate_up, gate_up, rows, starts, order, 2 * I, 2 * I * H, 1, 2 * I, 2 * I, H, E, K, bins,
        False, False, True, *shape, num_warps=warps, num_stages=3,
    )  # fmt: skip
    block = min(1024, max(32, 1 << (H - 1).bit_length()))
    _sum_choices[(M, _cdiv(H, block))](
        rows, ids, grad_x, grad_x.stride(0), H, E, K, block, num_warps=max(1, block // 256)
    )
