"""Gradients of attention without a mask, with shared key heads, Triton, without atomics: queries first, then keys and values.

The log-sum-exp of each row is no input. The kernel of the queries finds it in a first pass over the keys, and keeps it for the
other kernel.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_PROGRAMS = 2 * 132
"""With fewer of them for keys and values, the query heads of a key head are dealt out to several, and their sums added."""

# A value of a specialised argument that is 1 or a multiple of 16 costs a compilation. Strides and D count UNIT elements, 8 or 1,
# which says enough about alignment.
_NUMBERS_OF_QUERIES = [
    *(f"{name}_{axis}" for name in ("q", "k", "v", "out", "go", "gq") for axis in "bhs"), "S", "L", "Hq", "group", "D",
]  # fmt: skip
_NUMBERS_OF_KEYS = [
    *(f"{name}_{axis}" for name in ("q", "k", "v", "go") for axis in "bhs"),
    *(f"{name}_{axis}" for name in ("gk", "gv") for axis in "pbhs"), "S", "L", "Hkv", "parts", "members", "D",
]  # fmt: skip
_NUMBERS_OF_PARTS = [*(f"{name}_{axis}" for name in ("gk", "gv") for axis in "bhs"), "L", "Hkv", "tokens", "parts", "D"]


@triton.jit
def _rows(base_ptr, rows, stride, cols, S, D, MASKED: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):
    """Load rows of D * UNIT elements, ``stride`` * UNIT apart; zeros past them unless WHOLE, and past S if MASKED."""
    ptrs = base_ptr + rows.to(tl.int64)[:, None] * stride * UNIT + cols[None, :]
    if MASKED:
        if WHOLE:
            return tl.load(ptrs, mask=rows[:, None] < S, other=0.0)
        else:
            return tl.load(ptrs, mask=(rows[:, None] < S) & (cols[None, :] < D * UNIT), other=0.0)
    elif WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=cols[None, :] < D * UNIT, other=0.0)


@triton.jit
def _columns(base_ptr, rows, stride, cols, S, D, MASKED: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):
    """Load the transpose of `_rows`: a tile of `_rows` that is transposed is multiplied wrongly (Triton 3.6)."""
    ptrs = base_ptr + rows.to(tl.int64)[None, :] * stride * UNIT + cols[:, None]
    if MASKED:
        if WHOLE:
            return tl.load(ptrs, mask=rows[None, :] < S, other=0.0)
        else:
            return tl.load(ptrs, mask=(rows[None, :] < S) & (cols[:, None] < D * UNIT), other=0.0)
    elif WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=cols[:, None] < D * UNIT, other=0.0)


# ---- queries --------------------------------------------------------------------------------------


@triton.jit
def _add_to_sums(q, sums, largest, k_ptr, start, cols, L, k_s, scale, D, MASKED: tl.constexpr,
                 BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running sum of weights."""
    keys = start + tl.arange(0, BLOCK_N)
    scores = tl.dot(q, _columns(k_ptr, keys, k_s, cols, L, D, MASKED, WHOLE, UNIT)) * scale
    if MASKED:
        scores = tl.where(keys[None, :] < L, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    sums = sums * tl.exp2(largest - new_largest) + tl.sum(tl.exp2(scores - new_largest[:, None]), 1)
    return sums, new_largest


@triton.jit
def _add_to_queries(q, grad_out, acc, sums, along, k_ptr, v_ptr, start, cols, L, k_s, v_s, scale, D,
                    MASKED: tl.constexpr,
                    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Add what BLOCK_N keys from ``start`` on give to the gradient of the queries."""
    keys = start + tl.arange(0, BLOCK_N)
    k = _rows(k_ptr, keys, k_s, cols, L, D, MASKED, WHOLE, UNIT)
    k_columns = _columns(k_ptr, keys, k_s, cols, L, D, MASKED, WHOLE, UNIT)
    v_columns = _columns(v_ptr, keys, v_s, cols, L, D, MASKED, WHOLE, UNIT)
    weights = tl.exp2(tl.dot(q, k_columns) * scale - sums[:, None])
    if MASKED:
        weights = tl.where(keys[None, :] < L, weights, 0.0)
    grad_scores = weights * (tl.dot(grad_out, v_columns) - along[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, acc)


@triton.jit(do_not_specialize=_NUMBERS_OF_QUERIES)
def _grad_queries(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, grad_q_ptr, sums_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s, go_b, go_h, go_s, gq_b, gq_h, gq_s,
    scale, S, L, Hq, group, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    k_ptr += (batch * k_b + head // group * k_h) * UNIT
    v_ptr += (batch * v_b + head // group * v_h) * UNIT
    q = _rows(q_ptr + (batch * q_b + head * q_h) * UNIT, rows, q_s, cols, S, D, True, WHOLE, UNIT)
    # Key 0 is seen by every query, so that no maximum stays infinite.
    whole = L // BLOCK_N * BLOCK_N
    # 1. The log-sum-exp of each row, in base 2.
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for start in range(0, whole, BLOCK_N):
        sums, largest = _add_to_sums(
            q, sums, largest, k_ptr, start, cols, L, k_s, scale * 1.4426950408889634,
            D, False, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    for start in range(whole, L, BLOCK_N):
        sums, largest = _add_to_sums(
            q, sums, largest, k_ptr, start, cols, L, k_s, scale * 1.4426950408889634,
            D, True, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    sums = largest + tl.log2(sums)
    # 2. The part of each row that the softmax takes away.
    grad_out = _rows(grad_out_ptr + (batch * go_b + head * go_h) * UNIT, rows, go_s, cols, S, D, True, WHOLE, UNIT)
    out = _rows(out_ptr + (batch * out_b + head * out_h) * UNIT, rows, out_s, cols, S, D, True, WHOLE, UNIT)
    along = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    sums_ptr += tl.program_id(0).to(tl.int64) * 2 * S
    tl.store(sums_ptr + rows, sums, mask=rows < S)
    tl.store(sums_ptr + S + rows, along, mask=rows < S)
    # 3. The gradient.
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, whole, BLOCK_N):
        acc = _add_to_queries(
            q, grad_out, acc, sums, along, k_ptr, v_ptr, start, cols, L, k_s, v_s,
            scale * 1.4426950408889634, D, False, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    for start in range(whole, L, BLOCK_N):
        acc = _add_to_queries(
            q, grad_out, acc, sums, along, k_ptr, v_ptr, start, cols, L, k_s, v_s,
            scale * 1.4426950408889634, D, True, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    ptrs = grad_q_ptr + (batch * gq_b + head * gq_h + rows.to(tl.int64)[:, None] * gq_s) * UNIT + cols[None, :]
    inside = (rows[:, None] < S) & (cols[None, :] < D * UNIT)
    tl.store(ptrs, (acc * scale).to(grad_q_ptr.dtype.element_ty), mask=inside)


# ---- keys and values ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS_OF_KEYS)
def _grad_keys(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, grad_k_ptr, grad_v_ptr, sums_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, go_b, go_h, go_s, gk_p, gk_b, gk_h, gk_s, gv_p, gv_b, gv_h, gv_s,
    scale, S, L, Hkv, parts, members, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    part = tl.program_id(0) % parts
    batch = (tl.program_id(0) // parts // Hkv).to(tl.int64)
    head = (tl.program_id(0) // parts % Hkv).to(tl.int64)
    keys = first + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    k = _rows(k_ptr + (batch * k_b + head * k_h) * UNIT, keys, k_s, cols, L, D, True, WHOLE, UNIT)
    v = _rows(v_ptr + (batch * v_b + head * v_h) * UNIT, keys, v_s, cols, L, D, True, WHOLE, UNIT)
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    # One loop over the blocks of queries of all members, so that loads never pause.
    blocks = (S + BLOCK_M - 1) // BLOCK_M
    for turn in range(0, members * blocks):
        query_head = (head * parts + part) * members + turn // blocks
        rows = turn % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        own_q = q_ptr + (batch * q_b + query_head * q_h) * UNIT
        own_grad = grad_out_ptr + (batch * go_b + query_head * go_h) * UNIT
        q = _rows(own_q, rows, q_s, cols, S, D, True, WHOLE, UNIT)
        q_columns = _columns(own_q, rows, q_s, cols, S, D, True, WHOLE, UNIT)
        grad_out = _rows(own_grad, rows, go_s, cols, S, D, True, WHOLE, UNIT)
        grad_columns = _columns(own_grad, rows, go_s, cols, S, D, True, WHOLE, UNIT)
        # Rows past S have no weight.
        own_sums = sums_ptr + (batch * Hkv * parts * members + query_head) * 2 * S
        sums = tl.load(own_sums + rows, mask=rows < S, other=float("inf"))
        along = tl.load(own_sums + S + rows, mask=rows < S, other=0.0)
        # Keys lie along rows; those past L are zero, and their gradients are not stored.
        weights = tl.exp2(tl.dot(k, q_columns) * (scale * 1.4426950408889634) - sums[None, :])
        grad_v = tl.dot(weights.to(grad_out.dtype), grad_out, grad_v)
        grad_scores = weights * (tl.dot(v, grad_columns) - along[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k)
    inside = (keys[:, None] < L) & (cols[None, :] < D * UNIT)
    offsets = keys.to(tl.int64)[:, None] * UNIT
    part_k = grad_k_ptr + (part.to(tl.int64) * gk_p + batch * gk_b + head * gk_h) * UNIT
    part_v = grad_v_ptr + (part.to(tl.int64) * gv_p + batch * gv_b + head * gv_h) * UNIT
    tl.store(part_k + offsets * gk_s + cols[None, :], (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=inside)
    tl.store(part_v + offsets * gv_s + cols[None, :], grad_v.to(grad_v_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS_OF_PARTS)
def _add_parts(
    parts_ptr, grad_k_ptr, grad_v_ptr, gk_b, gk_h, gk_s, gv_b, gv_h, gv_s, L, Hkv, tokens, parts, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the parts [2, parts, B, Hkv, L, D] of the gradients of keys and of values; tokens is B * Hkv * L."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    inside = (token[:, None] < tokens) & (cols[None, :] < D * UNIT)
    of_values = tl.program_id(1)
    ptrs = parts_ptr + (of_values.to(tl.int64) * parts * tokens + token[:, None]) * D * UNIT + cols[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for _ in range(0, parts):
        total += tl.load(ptrs, mask=inside, other=0.0)
        ptrs += tl.cast(tokens, tl.int64) * D * UNIT
    place = token % L
    head = token // L % Hkv
    batch = token // L // Hkv
    found = total.to(grad_k_ptr.dtype.element_ty)
    if of_values > 0:
        offsets = batch * gv_b + head * gv_h + place * gv_s
        tl.store(grad_v_ptr + offsets[:, None] * UNIT + cols[None, :], found, mask=inside)
    else:
        offsets = batch * gk_b + head * gk_h + place * gk_s
        tl.store(grad_k_ptr + offsets[:, None] * UNIT + cols[None, :], found, mask=inside)


# ---- launch ---------------------------------------------------------------------------------------


def _parts(programs: int, group: int) -> int:
    """Return into how many parts the query heads of a key head are dealt: the fewest that give enough programs."""
    wanted = (MIN_PROGRAMS + programs - 1) // programs
    return next((count for count in range(1, group + 1) if group % count == 0 and count >= wanted), group)


def _is_aligned(x: torch.Tensor) -> bool:
    """Return True if rows begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:3])


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    grad_out: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    *,
    KEYS=128,
    STEP=64,
    num_stages=2,
):
    """Write the gradients of q, k and v of out = softmax(scale * q k^T) v.

    Shapes: q, out, grad_out, grad_q [B, Hq, S, D], k, v, grad_k, grad_v [B, Hkv, L, D]; unit last strides, any others; T in
    bfloat16, float16. Scores, weights and sums are in fp32, weights and gradients of scores are rounded to T.
    Mapping: a program owns some queries of a head and streams all keys, twice. Then a program owns KEYS keys of a key head and
    streams the queries, STEP at a time, of all query heads that share it or of some of them. No two programs add to one sum.
    Rows that do not begin at multiples of 16 bytes are loaded element by element (correct, slow).
    """
    B, Hq, S, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        grad_k.zero_()
        grad_v.zero_()
        return
    tensors = (q, k, v, out, grad_out, grad_q, grad_k, grad_v)
    unit = 8 if D % 8 == 0 and all(_is_aligned(x) for x in tensors) else 1
    block_d = 64 if D <= 64 and unit == 8 else 128 if D <= 128 else 256
    is_whole = unit == 8 and block_d == D
    rows, step, keys, queries = 128, 64, KEYS, STEP
    if block_d > 128:  # the sums of a block fill the registers
        rows, step, keys, queries = 64, 32, 64, 32
    sums = torch.empty(B * Hq * 2 * S, dtype=torch.float32, device=q.device)
    blocks = (L + keys - 1) // keys
    parts = _parts(B * Hkv * blocks, Hq // Hkv)
    strides = [[stride // unit for stride in x.stride()[:3]] for x in tensors]
    _grad_queries[(B * Hq, (S + rows - 1) // rows)](
        q, k, v, out, grad_out, grad_q, sums, *(stride for own in strides[:6] for stride in own),
        scale, S, L, Hq, Hq // Hkv, D // unit, rows, step, block_d, is_whole, unit, num_warps=8, num_stages=num_stages,
    )  # fmt: skip
    to_k, to_v, places = grad_k, grad_v, (0, *strides[6], 0, *strides[7])
    if parts > 1:
        workspace = torch.empty((2, parts, B, Hkv, L, D), dtype=torch.float32, device=q.device)
        to_k, to_v = workspace[0], workspace[1]
        places = tuple(stride // unit for x in (to_k, to_v) for stride in x.stride()[:4])
    _grad_keys[(B * Hkv * parts, blocks)](
        q, k, v, grad_out, to_k, to_v, sums,
        *(stride for number in (0, 1, 2, 4) for stride in strides[number]), *places,
        scale, S, L, Hkv, parts, Hq // Hkv // parts, D // unit, queries, keys, block_d, is_whole, unit,
        num_warps=8 if block_d > 128 or keys > 64 else 4, num_stages=num_stages,
    )  # fmt: skip
    if parts > 1:
        tokens = B * Hkv * L
        _add_parts[((tokens + 15) // 16, 2)](
            workspace, grad_k, grad_v, *strides[6], *strides[7], L, Hkv, tokens, parts, D // unit,
            16, block_d, unit, num_warps=4,
        )  # fmt: skip
