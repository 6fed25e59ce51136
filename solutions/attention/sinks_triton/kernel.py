"""Attention with a sink, Triton: a prompt in blocks of queries, or one position whose keys are split among programs.

The sink is one score more in each row's sum. It comes in at the end, so that weights are relative to the largest score of a key.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)
"""The largest score of a row that has seen no key: finite, so that a block of which it sees none leaves it as it is."""
LEAST_ROWS = 16
"""Of a product on tensor cores."""
MOST_SPLITS = 128


@triton.jit
def _with_sink(acc, sums, largest, sink):
    """acc [R, D] / sums [R], relative to ``largest``, where the sums take in a sink as well; all of them in base 2."""
    top = tl.maximum(largest, sink)
    share = tl.exp2(largest - top)
    return acc * (share / (sums * share + tl.exp2(sink - top)))[:, None]


@triton.jit
def _add_keys(q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, W, scale, D: tl.constexpr, MASKED: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One step of the running softmax: BLOCK_N keys from ``start`` on."""
    keys = start + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    if MASKED:
        k = tl.load(k_ptrs, mask=(keys[None, :] < S) & (cols[:, None] < D), other=0.0)
    elif D < BLOCK_D:
        k = tl.load(k_ptrs, mask=cols[:, None] < D, other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k) * scale
    if MASKED:
        behind = rows[:, None] - keys[None, :]
        scores = tl.where((behind >= 0) & (behind < W) & (keys[None, :] < S), scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    if MASKED:
        v = tl.load(v_ptrs, mask=(keys[:, None] < S) & (cols[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        v = tl.load(v_ptrs, mask=cols[None, :] < D, other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, sums * shrink + tl.sum(weights, 1), new_largest


@triton.jit(do_not_specialize=["S", "W"])
def _window_attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s,
    scale, S, W, Hq, group,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The last block of queries sees the most keys: it starts first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    # Some query sees the keys from ``low`` on, all see those from ``edge`` on; from ``common`` on, some keys come after a query.
    low = tl.maximum(first - W + 1, 0) // BLOCK_N * BLOCK_N
    common = first // BLOCK_N * BLOCK_N
    edge = tl.minimum((tl.maximum(first + BLOCK_M - W, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, common)
    keys = low + tl.arange(0, BLOCK_N).to(tl.int64)
    k_ptrs = k_ptr + batch * k_b + head // group * k_h + keys[None, :] * k_s + cols[:, None]
    v_ptrs = v_ptr + batch * v_b + head // group * v_h + keys[:, None] * v_s + cols[None, :]
    k_step = BLOCK_N * tl.cast(k_s, tl.int64)
    v_step = BLOCK_N * tl.cast(v_s, tl.int64)
    inside = (rows[:, None] < S) & (cols[None, :] < D)
    offsets = rows.to(tl.int64)[:, None]
    q = tl.load(q_ptr + batch * q_b + head * q_h + offsets * q_s + cols[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for start in range(low, edge, BLOCK_N):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, W, scale, D, True, BLOCK_N, BLOCK_D
        )
        k_ptrs += k_step
        v_ptrs += v_step
    for start in range(edge, common, BLOCK_N):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, W, scale, D, False, BLOCK_N, BLOCK_D
        )
        k_ptrs += k_step
        v_ptrs += v_step
    for start in range(common, tl.minimum(first + BLOCK_M, S), BLOCK_N):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, W, scale, D, True, BLOCK_N, BLOCK_D
        )
        k_ptrs += k_step
        v_ptrs += v_step
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    out = _with_sink(acc, sums, largest, sink).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch * out_b + head * out_h + offsets * out_s + cols[None, :], out, mask=inside)


def run_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    BLOCK_N=None,
    num_warps=None,
    num_stages=None,
):
    """out = T(w v), w = softmax of scale * q k^T and the sink over the last ``window`` positions, without the sink's own weight.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, S, D], unit last strides, any others; sinks [Hq]; T in bfloat16, float16.
    Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns BLOCK_M queries of a head and streams the keys that one of them sees. Blocks that all of them see need
    no mask.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    is_local = window < 4 * 128  # few keys a block: smaller blocks waste fewer of them
    block_m = BLOCK_M or (128 if S > 64 and not is_local else 64)
    block_n = BLOCK_N or 64
    _window_attention[(B * Hq, (S + block_m - 1) // block_m)](
        q, k, v, sinks, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        scale * LOG2_E.value, S, min(window, S), Hq, Hq // k.shape[1],
        D, block_m, block_n, max(16, 1 << (D - 1).bit_length()),
        num_warps=num_warps or (8 if block_m > 64 else 4), num_stages=num_stages or 3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["L", "chunk", "heads"])
def _attend_to_chunk(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, parts_ptr,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h,
    scale, L, chunk, heads, Hkv, splits, group,
    D: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hkv).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    split = tl.program_id(1)
    members = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    # Rows are the query heads that share the key head, filled up with zeros: each key is read once for all of them.
    inside = (members[:, None] < group) & (cols[None, :] < D)
    query_heads = head * group + members
    q = tl.load(q_ptr + batch * q_b + query_heads[:, None] * q_h + cols[None, :], mask=inside, other=0.0)
    k_ptr += batch * k_b + head * k_h
    v_ptr += batch * v_b + head * v_h
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_G], dtype=tl.float32)
    largest = tl.full([BLOCK_G], NOTHING, dtype=tl.float32)
    end = tl.minimum((split + 1) * chunk, L)
    for start in range(split * chunk, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        offsets = keys.to(tl.int64)
        in_k = (keys[None, :] < end) & (cols[:, None] < D)
        in_v = (keys[:, None] < end) & (cols[None, :] < D)
        k = tl.load(k_ptr + offsets[None, :] * k_s + cols[:, None], mask=in_k, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_ptr + offsets[:, None] * v_s + cols[None, :], mask=in_v, other=0.0, eviction_policy="evict_first")
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        sums = sums * shrink + tl.sum(weights, 1)
        largest = new_largest
    if IS_WHOLE:
        sink = tl.load(sinks_ptr + query_heads, mask=members < group, other=0.0).to(tl.float32) * LOG2_E
        out_ptrs = out_ptr + batch * out_b + query_heads[:, None] * out_h + cols[None, :]
        tl.store(out_ptrs, _with_sink(acc, sums, largest, sink).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # Not yet divided by their sums: what has no keys stays zero.
        part = (batch * Hkv * group + query_heads) * splits + split
        tl.store(parts_ptr + part[:, None] * D + cols[None, :], acc, mask=inside)
        statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
        tl.store(statistics, largest, mask=members < group)
        tl.store(statistics + 1, sums, mask=members < group)


@triton.jit(do_not_specialize=["heads"])
def _join_chunks(
    parts_ptr, sinks_ptr, out_ptr, out_b, out_h, heads, Hq, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    part = row * splits + parts
    statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
    largest = tl.load(statistics, mask=parts < splits, other=NOTHING)
    sums = tl.load(statistics + 1, mask=parts < splits, other=0.0)
    sink = tl.load(sinks_ptr + row % Hq).to(tl.float32) * LOG2_E
    top = tl.maximum(tl.max(largest, 0), sink)
    shares = tl.exp2(largest - top)
    inside = (parts[:, None] < splits) & (cols[None, :] < D)
    accs = tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=inside, other=0.0)
    out = tl.sum(accs * shares[:, None], 0) / (tl.sum(sums * shares, 0) + tl.exp2(sink - top))
    out_ptrs = out_ptr + row // Hq * out_b + row % Hq * out_h + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cols < D)


def _splits(programs: int, length: int, wanted: int, least: int) -> int:
    """A power of two, so that a growing cache compiles few kernels: as many as are ``wanted`` if each has ``least`` positions."""
    most = min((length + least - 1) // least, max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=512,
    LEAST=128,
    BLOCK_N=None,
    num_warps=4,
):
    """out = T(w v), w = softmax of scale * q k^T and the sink, without the sink's own weight.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D], unit last strides, any others; sinks [Hq]; T in bfloat16, float16,
    float32. Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns a key head, all query heads that share it, and one of several spans of positions; there are PROGRAMS
    of them, or fewer where a span would get under LEAST positions. Parts are kept in fp32 and joined by one program a head.
    BLOCK_N = None: 64 positions a step, 32 in float32.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    splits = _splits(B * Hkv, L, PROGRAMS, LEAST)
    chunk = (L + splits - 1) // splits
    group, heads = Hq // Hkv, B * Hq
    block_n = BLOCK_N or 128 // q.element_size()
    block_d = max(16, 1 << (D - 1).bit_length())
    # Sums of values, then the largest score and the sum of weights, of every head and split.
    parts = out if splits == 1 else torch.empty(heads * splits * (D + 2), dtype=torch.float32, device=q.device)
    _attend_to_chunk[(B * Hkv, splits)](
        q, k, v, sinks, out, parts,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], out.stride(0), out.stride(1),
        scale * LOG2_E.value, L, chunk, heads, Hkv, splits, group,
        D, splits == 1, max(LEAST_ROWS, 1 << (group - 1).bit_length()), block_n, block_d,
        num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_chunks[(heads,)](
            parts, sinks, out, out.stride(0), out.stride(1), heads, Hq, splits, D, splits, block_d, num_warps=num_warps
        )
