"""The gradients of causal attention with shared key heads, Triton, without atomics: queries first, then keys and values.

The log-sum-exp of each row is no input. The kernel of the queries finds it in a first pass over the keys, and keeps it for the
other kernels. With SINKS, a row sees the W last positions alone, and a score of its head without a value has part of its weight.
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
    *(f"{name}_{axis}" for name in ("q", "k", "v", "out", "go", "gq") for axis in "bhs"), "S", "W", "Hq", "group", "D",
]  # fmt: skip
_NUMBERS_OF_KEYS = [
    *(f"{name}_{axis}" for name in ("q", "k", "v", "go") for axis in "bhs"),
    *(f"{name}_{axis}" for name in ("gk", "gv") for axis in "pbhs"), "S", "W", "Hkv", "parts", "members", "D",
]  # fmt: skip
_NUMBERS_OF_SINKS = ["S", "B"]
_NUMBERS_OF_PARTS = [*(f"{name}_{axis}" for name in ("gk", "gv") for axis in "bhs"), "S", "Hkv", "tokens", "parts", "D"]


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
def _add_to_sums(q, sums, largest, k_ptr, rows, start, cols, S, W, k_s, scale, D, MASKED: tl.constexpr,
                 SINKS: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running sum of weights."""
    keys = start + tl.arange(0, BLOCK_N)
    scores = tl.dot(q, _columns(k_ptr, keys, k_s, cols, S, D, MASKED, WHOLE, UNIT)) * scale
    if MASKED:
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
        if SINKS:
            scores = tl.where(rows[:, None] - keys[None, :] < W, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = new_largest
    if SINKS:  # a sink of -inf, and no key of the block in the window
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    sums = sums * tl.exp2(largest - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
    return sums, new_largest


@triton.jit
def _add_to_queries(q, grad_out, acc, sums, along, k_ptr, v_ptr, rows, start, cols, S, W, k_s, v_s, scale, D,
                    MASKED: tl.constexpr, SINKS: tl.constexpr,
                    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Add what BLOCK_N keys from ``start`` on give to the gradient of the queries."""
    keys = start + tl.arange(0, BLOCK_N)
    k = _rows(k_ptr, keys, k_s, cols, S, D, MASKED, WHOLE, UNIT)
    k_columns = _columns(k_ptr, keys, k_s, cols, S, D, MASKED, WHOLE, UNIT)
    v_columns = _columns(v_ptr, keys, v_s, cols, S, D, MASKED, WHOLE, UNIT)
    weights = tl.exp2(tl.dot(q, k_columns) * scale - sums[:, None])
    if MASKED:
        weights = tl.where(keys[None, :] <= rows[:, None], weights, 0.0)
        if SINKS:
            weights = tl.where(rows[:, None] - keys[None, :] < W, weights, 0.0)
    grad_scores = weights * (tl.dot(grad_out, v_columns) - along[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, acc)


@triton.jit(do_not_specialize=_NUMBERS_OF_QUERIES)
def _grad_queries(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, grad_out_ptr, grad_q_ptr, sums_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s, go_b, go_h, go_s, gq_b, gq_h, gq_s,
    scale, S, W, Hq, group, D, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # The last block of queries sees the most keys: it starts first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    k_ptr += (batch * k_b + head // group * k_h) * UNIT
    v_ptr += (batch * v_b + head // group * v_h) * UNIT
    q = _rows(q_ptr + (batch * q_b + head * q_h) * UNIT, rows, q_s, cols, S, D, True, WHOLE, UNIT)
    # Keys before the block are seen by all of its queries; key 0 is seen by every query, so that no maximum stays infinite.
    # With a window, keys before ``low`` are seen by none of them, and keys before ``inner`` not by all.
    common = first // BLOCK_N * BLOCK_N
    end = tl.minimum(first + BLOCK_M, S)
    low = 0
    inner = 0
    # 1. The log-sum-exp of each row, in base 2.
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if SINKS:
        low = tl.maximum(first - W + 1, 0) // BLOCK_N * BLOCK_N
        seen_by_all = tl.maximum(first + BLOCK_M - W, 0)
        inner = tl.minimum((seen_by_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N, common)
        sums += 1.0
        largest = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        for start in range(low, inner, BLOCK_N):
            sums, largest = _add_to_sums(
                q, sums, largest, k_ptr, rows, start, cols, S, W, k_s, scale * 1.4426950408889634,
                D, True, SINKS, BLOCK_N, WHOLE, UNIT,
            )  # fmt: skip
    for start in range(inner, common, BLOCK_N):
        sums, largest = _add_to_sums(
            q, sums, largest, k_ptr, rows, start, cols, S, W, k_s, scale * 1.4426950408889634,
            D, False, SINKS, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    for start in range(common, end, BLOCK_N):
        sums, largest = _add_to_sums(
            q, sums, largest, k_ptr, rows, start, cols, S, W, k_s, scale * 1.4426950408889634,
            D, True, SINKS, BLOCK_N, WHOLE, UNIT,
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
    if SINKS:
        for start in range(low, inner, BLOCK_N):
            acc = _add_to_queries(
                q, grad_out, acc, sums, along, k_ptr, v_ptr, rows, start, cols, S, W, k_s, v_s,
                scale * 1.4426950408889634, D, True, SINKS, BLOCK_N, WHOLE, UNIT,
            )  # fmt: skip
    for start in range(inner, common, BLOCK_N):
        acc = _add_to_queries(
            q, grad_out, acc, sums, along, k_ptr, v_ptr, rows, start, cols, S, W, k_s, v_s,
            scale * 1.4426950408889634, D, False, SINKS, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    for start in range(common, end, BLOCK_N):
        acc = _add_to_queries(
            q, grad_out, acc, sums, along, k_ptr, v_ptr, rows, start, cols, S, W, k_s, v_s,
            scale * 1.4426950408889634, D, True, SINKS, BLOCK_N, WHOLE, UNIT,
        )  # fmt: skip
    ptrs = grad_q_ptr + (batch * gq_b + head * gq_h + rows.to(tl.int64)[:, None] * gq_s) * UNIT + cols[None, :]
    inside = (rows[:, None] < S) & (cols[None, :] < D * UNIT)
    tl.store(ptrs, (acc * scale).to(grad_q_ptr.dtype.element_ty), mask=inside)


# ---- keys and values ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS_OF_KEYS)
def _grad_keys(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, grad_k_ptr, grad_v_ptr, sums_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, go_b, go_h, go_s, gk_p, gk_b, gk_h, gk_s, gv_p, gv_b, gv_h, gv_s,
    scale, S, W, Hkv, parts, members, D, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # The first block of keys is seen by the most queries, and starts first.
    first = tl.program_id(1) * BLOCK_N
    part = tl.program_id(0) % parts
    batch = (tl.program_id(0) // parts // Hkv).to(tl.int64)
    head = (tl.program_id(0) // parts % Hkv).to(tl.int64)
    keys = first + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    k = _rows(k_ptr + (batch * k_b + head * k_h) * UNIT, keys, k_s, cols, S, D, True, WHOLE, UNIT)
    v = _rows(v_ptr + (batch * v_b + head * v_h) * UNIT, keys, v_s, cols, S, D, True, WHOLE, UNIT)
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    # One loop over the blocks of queries that see some key of the block, of all members, so that loads never pause.
    low = first // BLOCK_M
    end = S
    if SINKS:
        end = tl.minimum(S, first + BLOCK_N - 1 + W)
    blocks = (end + BLOCK_M - 1) // BLOCK_M - low
    for turn in range(0, members * blocks):
        query_head = (head * parts + part) * members + turn // blocks
        rows = (low + turn % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
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
        # Keys lie along rows.
        weights = tl.exp2(tl.dot(k, q_columns) * (scale * 1.4426950408889634) - sums[None, :])
        weights = tl.where(keys[:, None] <= rows[None, :], weights, 0.0)
        if SINKS:
            weights = tl.where(rows[None, :] - keys[:, None] < W, weights, 0.0)
        grad_v = tl.dot(weights.to(grad_out.dtype), grad_out, grad_v)
        grad_scores = weights * (tl.dot(v, grad_columns) - along[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k)
    inside = (keys[:, None] < S) & (cols[None, :] < D * UNIT)
    offsets = keys.to(tl.int64)[:, None] * UNIT
    part_k = grad_k_ptr + (part.to(tl.int64) * gk_p + batch * gk_b + head * gk_h) * UNIT
    part_v = grad_v_ptr + (part.to(tl.int64) * gv_p + batch * gv_b + head * gv_h) * UNIT
    tl.store(part_k + offsets * gk_s + cols[None, :], (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=inside)
    tl.store(part_v + offsets * gv_s + cols[None, :], grad_v.to(grad_v_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS_OF_PARTS)
def _add_parts(
    parts_ptr, grad_k_ptr, grad_v_ptr, gk_b, gk_h, gk_s, gv_b, gv_h, gv_s, S, Hkv, tokens, parts, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the parts [2, parts, B, Hkv, S, D] of the gradients of keys and of values; tokens is B * Hkv * S."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    inside = (token[:, None] < tokens) & (cols[None, :] < D * UNIT)
    of_values = tl.program_id(1)
    ptrs = parts_ptr + (of_values.to(tl.int64) * parts * tokens + token[:, None]) * D * UNIT + cols[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for _ in range(0, parts):
        total += tl.load(ptrs, mask=inside, other=0.0)
        ptrs += tl.cast(tokens, tl.int64) * D * UNIT
    place = token % S
    head = token // S % Hkv
    batch = token // S // Hkv
    found = total.to(grad_k_ptr.dtype.element_ty)
    if of_values > 0:
        offsets = batch * gv_b + head * gv_h + place * gv_s
        tl.store(grad_v_ptr + offsets[:, None] * UNIT + cols[None, :], found, mask=inside)
    else:
        offsets = batch * gk_b + head * gk_h + place * gk_s
        tl.store(grad_k_ptr + offsets[:, None] * UNIT + cols[None, :], found, mask=inside)


@triton.jit(do_not_specialize=_NUMBERS_OF_SINKS)
def _grad_sinks(sinks_ptr, sums_ptr, grad_sinks_ptr, S, B, BLOCK: tl.constexpr):
    """Add up the gradient of the sink of a head: its weight in every row, whose value is 0."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for batch in range(0, B):
        own_sums = sums_ptr + (batch * tl.num_programs(0) + head).to(tl.int64) * 2 * S
        for start in range(0, S, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            sums = tl.load(own_sums + rows, mask=rows < S, other=float("inf"))
            along = tl.load(own_sums + S + rows, mask=rows < S, other=0.0)
            total -= tl.exp2(sink - sums) * along
    tl.store(grad_sinks_ptr + head, tl.sum(total, 0).to(grad_sinks_ptr.dtype.element_ty))


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
    """Write the gradients of q, k and v of out = softmax(scale * q k^T, causal) v.

    Shapes: q, out, grad_out, grad_q [B, Hq, S, D], k, v, grad_k, grad_v [B, Hkv, S, D]; unit last strides, any others; T in
    bfloat16, float16. Scores, weights and sums are in fp32, weights and gradients of scores are rounded to T.
    Mapping: a program owns some queries of a head and streams the keys that they see, twice. Then a program owns KEYS keys of a
    key head and streams the queries that see them, STEP at a time, of all query heads that share it or of some of them. No two
    programs add to one sum. Rows that do not begin at multiples of 16 bytes are loaded element by element (correct, slow).
    """
    _launch(q, k, v, None, q.shape[2], scale, out, grad_out, grad_q, grad_k, grad_v, None, KEYS, STEP, num_stages)


def run_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    out: torch.Tensor,
    grad_out: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    grad_sinks: torch.Tensor,
    *,
    KEYS=128,
    STEP=64,
    num_stages=2,
):
    """Write the gradients of q, k, v and sinks [Hq], where a row sees the last ``window`` positions up to its own.

    As :func:`run`. Blocks of keys outside of the window are not read. A last kernel adds up the gradient of each sink in the
    order of the rows.
    """
    _launch(
        q, k, v, sinks, min(window, q.shape[2]), scale, out, grad_out, grad_q, grad_k, grad_v, grad_sinks,
        KEYS, STEP, num_stages,
    )  # fmt: skip


def _launch(q, k, v, sinks, window, scale, out, grad_out, grad_q, grad_k, grad_v, grad_sinks, KEYS, STEP, num_stages):
    B, Hq, S, D = q.shape
    Hkv = k.shape[1]
    if q.numel() == 0:
        if sinks is not None:
            grad_sinks.zero_()
        return
    tensors = (q, k, v, out, grad_out, grad_q, grad_k, grad_v)
    unit = 8 if D % 8 == 0 and all(_is_aligned(x) for x in tensors) else 1
    block_d = 64 if D <= 64 and unit == 8 else 128 if D <= 128 else 256
    is_whole = unit == 8 and block_d == D
    rows, step, keys, queries = 128, 64, KEYS, STEP
    if block_d > 128:  # the sums of a block fill the registers
        rows, step, keys, queries = 64, 32, 64, 32
    sums = torch.empty(B * Hq * 2 * S, dtype=torch.float32, device=q.device)
    blocks = (S + keys - 1) // keys
    parts = _parts(B * Hkv * blocks, Hq // Hkv)
    strides = [[stride // unit for stride in x.stride()[:3]] for x in tensors]
    has_sinks = sinks is not None
    _grad_queries[(B * Hq, (S + rows - 1) // rows)](
        q, k, v, sinks if has_sinks else sums, out, grad_out, grad_q, sums,
        *(stride for own in strides[:6] for stride in own),
        scale, S, window, Hq, Hq // Hkv, D // unit, has_sinks,
        rows, step, block_d, is_whole, unit, num_warps=8, num_stages=num_stages,
    )  # fmt: skip
    if has_sinks:
        _grad_sinks[(Hq,)](sinks, sums, grad_sinks, S, B, 1024, num_warps=4)
    to_k, to_v, places = grad_k, grad_v, (0, *strides[6], 0, *strides[7])
    if parts > 1:
        workspace = torch.empty((2, parts, B, Hkv, S, D), dtype=torch.float32, device=q.device)
        to_k, to_v = workspace[0], workspace[1]
        places = tuple(stride // unit for x in (to_k, to_v) for stride in x.stride()[:4])
    _grad_keys[(B * Hkv * parts, blocks)](
        q, k, v, grad_out, to_k, to_v, sums,
        *(stride for number in (0, 1, 2, 4) for stride in strides[number]), *places,
        scale, S, window, Hkv, parts, Hq // Hkv // parts, D // unit, has_sinks,
        queries, keys, block_d, is_whole, unit, num_warps=8 if block_d > 128 or keys > 64 else 4, num_stages=num_stages,
    )  # fmt: skip
    if parts > 1:
        tokens = B * Hkv * S
        _add_parts[((tokens + 15) // 16, 2)](
            workspace, grad_k, grad_v, *strides[6], *strides[7], S, Hkv, tokens, parts, D // unit,
            16, block_d, unit, num_warps=4,
        )  # fmt: skip
