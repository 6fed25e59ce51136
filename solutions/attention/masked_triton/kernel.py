"""Attention with a mask of flags, Triton: only tiles in which some key is seen are read, whatever made the mask.

A prompt is computed in blocks of queries. A single position has its keys dealt out among programs.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)
"""The largest score of a row that has seen no key: finite, so that a tile of which it sees nothing leaves it as it is."""
LEAST_ROWS = 16
"""Of a product on tensor cores."""
MOST_SPLITS = 64
TILE_BYTES = 1 << 14
"""Of the keys in a step of decoding: three steps of keys and values leave room for two programs on a multiprocessor."""
FLAGS_AT_ONCE = 1 << 11
"""Flags that a program of decoding reads at once to find the tiles that it needs."""
SHARED_BYTES = 200 << 10
"""Shared memory that a block of queries with its steps of keys and values may take."""


@triton.jit
def _normalised(acc, sums):
    """Return acc [R, D] / sums [R]; zeros in rows that have seen no key."""
    return tl.where(sums[:, None] > 0, acc / tl.where(sums > 0, sums, 1.0)[:, None], 0.0)


# ---- one position ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["L", "tiles", "heads", "splits"])
def _attend_to_tiles(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, parts_ptr,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_s, out_b, out_h,
    scale, L, tiles, heads, Hkv, splits, group,
    D: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hkv).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    split = tl.program_id(1)
    mask_ptr += batch * mask_b
    places = tl.arange(0, BLOCK_N)
    # 1. Rows are the query heads that share the key head, filled up with zeros: each key is read once for all of them.
    members = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    inside = (members[:, None] < group) & (cols[None, :] < D)
    query_heads = head * group + members
    q = tl.load(q_ptr + batch * q_b + query_heads[:, None] * q_h + cols[None, :], mask=inside, other=0.0)
    # 2. Of the program's tiles (split, split + splits, ...), the first and the last with a key that is seen.
    first, last = tiles, 0
    for base in range(0, tiles, BLOCK_T):
        own = base + tl.arange(0, BLOCK_T)
        keys = (split + own * splits).to(tl.int64)[:, None] * BLOCK_N + places[None, :]
        flags = tl.load(mask_ptr + keys * mask_s, mask=keys < L, other=0).to(tl.int32)
        is_seen = tl.max(flags, 1) > 0
        first = tl.minimum(first, tl.min(tl.where(is_seen, own, tiles), 0))
        last = tl.maximum(last, tl.max(tl.where(is_seen, own + 1, 0), 0))
    # 3. The tiles in between.
    k_ptr += batch * k_b + head * k_h
    v_ptr += batch * v_b + head * v_h
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_G], dtype=tl.float32)
    largest = tl.full([BLOCK_G], NOTHING, dtype=tl.float32)
    for tile in range(first, last):
        keys = (split + tile * splits) * BLOCK_N + places
        offsets = keys.to(tl.int64)
        seen = tl.load(mask_ptr + offsets * mask_s, mask=keys < L, other=0).to(tl.int32) > 0
        k = tl.load(
            k_ptr + offsets[None, :] * k_s + cols[:, None], mask=(keys[None, :] < L) & (cols[:, None] < D), other=0.0
        )
        v = tl.load(
            v_ptr + offsets[:, None] * v_s + cols[None, :], mask=(keys[:, None] < L) & (cols[None, :] < D), other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        sums = sums * shrink + tl.sum(weights, 1)
        largest = new_largest
    # 4. The result, or a part of it that is not yet divided by its sum.
    if IS_WHOLE:
        out_ptrs = out_ptr + batch * out_b + query_heads[:, None] * out_h + cols[None, :]
        tl.store(out_ptrs, _normalised(acc, sums).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (batch * Hkv * group + query_heads) * splits + split
        if first < last:  # a part that has seen no key is not read
            tl.store(parts_ptr + part[:, None] * D + cols[None, :], acc, mask=inside)
        statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
        tl.store(statistics, largest, mask=members < group)
        tl.store(statistics + 1, sums, mask=members < group)


@triton.jit(do_not_specialize=["heads", "splits"])
def _join_parts(
    parts_ptr, out_ptr, out_b, out_h, heads, Hq, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    part = row * splits + parts
    statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
    largest = tl.load(statistics, mask=parts < splits, other=NOTHING)
    sums = tl.load(statistics + 1, mask=parts < splits, other=0.0)
    shares = tl.exp2(largest - tl.max(largest, 0))
    # A part that has seen no key is not there.
    inside = (sums[:, None] > 0) & (cols[None, :] < D)
    accs = tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=inside, other=0.0)
    total = tl.sum(sums * shares, 0)
    out = tl.sum(accs * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + row // Hq * out_b + row % Hq * out_h + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cols < D)


def run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=512,
    BLOCK_N=64,
    num_warps=4,
):
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros without such a key.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D], unit last strides, any others; mask [B, 1, 1, L] bool, any strides;
    T in bfloat16, float16, float32. Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns a key head, all query heads that share it, and each n-th tile of keys, so that the keys that are seen
    spread evenly over programs wherever they lie. Their number depends on shapes alone. Parts are kept in fp32 and joined by one
    program a head.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    block_d = max(16, 1 << (D - 1).bit_length())
    block_n = max(16, min(BLOCK_N, TILE_BYTES // (block_d * q.element_size())))
    all_tiles = (L + block_n - 1) // block_n
    splits = max(1, min(all_tiles, PROGRAMS // (B * Hkv), MOST_SPLITS))
    tiles = (all_tiles + splits - 1) // splits
    group, heads = Hq // Hkv, B * Hq
    # Sums of values, then the largest score and the sum of weights, of every head and split.
    parts = out if splits == 1 else torch.empty(heads * splits * (D + 2), dtype=torch.float32, device=q.device)
    _attend_to_tiles[(B * Hkv, splits)](
        q, k, v, mask, out, parts,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], mask.stride(0), mask.stride(3), out.stride(0), out.stride(1),
        scale * LOG2_E.value, L, tiles, heads, Hkv, splits, group,
        D, splits == 1, max(LEAST_ROWS, 1 << (group - 1).bit_length()), block_n, block_d,
        min(1 << (tiles - 1).bit_length(), FLAGS_AT_ONCE // block_n),
        num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(heads,)](
            parts, out, out.stride(0), out.stride(1), heads, Hq, splits,
            D, 1 << (splits - 1).bit_length(), block_d, num_warps=4,
        )  # fmt: skip


# ---- a prompt -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S", "L"])
def _sort_tiles(
    mask_ptr, kinds_ptr, mask_b, mask_q, mask_k, S, L, blocks, tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Note the kind of a tile of the mask: 2 if each of its queries sees each of its keys, 1 if some flag is set, else 0."""
    index = tl.program_id(0).to(tl.int64)
    rows = index // tiles % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = index % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    flags_ptr = mask_ptr + index // (tiles * blocks) * mask_b
    inside = (rows[:, None] < S) & (keys[None, :] < L)
    flags = tl.load(flags_ptr + rows[:, None] * mask_q + keys[None, :] * mask_k, mask=inside, other=0).to(tl.int32)
    some = tl.max(tl.max(flags, 1), 0)
    # Rows behind the last query do not count; keys behind the last one are never seen.
    every = tl.min(tl.min(tl.where(rows[:, None] < S, flags, 1), 1), 0)
    tl.store(kinds_ptr + index, (some + every).to(tl.int8))


@triton.jit
def _add_keys(q, acc, sums, largest, k_ptr, v_ptr, mask_ptr, rows, start, S, L, k_s, v_s, mask_q, mask_k, scale,
              D: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running softmax."""
    keys = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    k_ptrs = k_ptr + keys[None, :] * k_s + cols[:, None]
    v_ptrs = v_ptr + keys[:, None] * v_s + cols[None, :]
    if MASKED:
        inside = (rows[:, None] < S) & (keys[None, :] < L)
        flags = tl.load(mask_ptr + rows.to(tl.int64)[:, None] * mask_q + keys[None, :] * mask_k, mask=inside, other=0)
        k = tl.load(k_ptrs, mask=(keys[None, :] < L) & (cols[:, None] < D), other=0.0)
    elif D < BLOCK_D:
        k = tl.load(k_ptrs, mask=cols[:, None] < D, other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k) * scale
    if MASKED:
        scores = tl.where(flags.to(tl.int32) > 0, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    if MASKED:
        v = tl.load(v_ptrs, mask=(keys[:, None] < L) & (cols[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        v = tl.load(v_ptrs, mask=cols[None, :] < D, other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, sums * shrink + tl.sum(weights, 1), new_largest


@triton.jit(do_not_specialize=["S", "L"])
def _masked_attention(
    q_ptr, k_ptr, v_ptr, mask_ptr, kinds_ptr, out_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_q, mask_k, kinds_b, out_b, out_h, out_s,
    scale, S, L, Hq, group, tiles,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # The last block of queries mostly sees the most keys: it starts first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    # 1. Tiles from ``low`` to ``high`` have keys that are seen; those from ``whole`` to ``edge`` are seen by every query.
    index = tl.arange(0, BLOCK_T)
    kinds = tl.load(kinds_ptr + batch * kinds_b + block.to(tl.int64) * tiles + index, mask=index < tiles, other=0)
    kinds = kinds.to(tl.int32)
    low = tl.min(tl.where(kinds > 0, index, tiles), 0)
    high = tl.max(tl.where(kinds > 0, index + 1, 0), 0)
    whole = tl.min(tl.where(kinds == 2, index, high), 0)
    edge = tl.min(tl.where((index >= whole) & (kinds != 2), index, high), 0)
    # 2. The queries.
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    mask_ptr += batch * mask_b
    inside = (rows[:, None] < S) & (cols[None, :] < D)
    offsets = rows.to(tl.int64)[:, None]
    q = tl.load(q_ptr + batch * q_b + head * q_h + offsets * q_s + cols[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    # 3. Tiles that are seen by all need no mask; the others lie before and behind them.
    for tile in range(whole, edge):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptr, v_ptr, mask_ptr, rows, tile * BLOCK_N, S, L, k_s, v_s, mask_q, mask_k, scale,
            D, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for number in range(low, high - (edge - whole)):
        tile = tl.where(number < whole, number, number + edge - whole)
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptr, v_ptr, mask_ptr, rows, tile * BLOCK_N, S, L, k_s, v_s, mask_q, mask_k, scale,
            D, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    out = _normalised(acc, sums).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch * out_b + head * out_h + offsets * out_s + cols[None, :], out, mask=inside)


def run_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=128,
    BLOCK_N=64,
    num_stages=3,
):
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros in rows without such a key.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D], unit last strides, any others; mask [B, 1, S, L] bool, any strides;
    T in bfloat16, float16. Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a first kernel reads the mask once and notes for each tile of it if all, some or none of its flags are set. Then a
    program owns BLOCK_M queries of a head and streams the tiles of keys that one of them sees. It reads the mask again for those
    that are seen in part, and for all behind a gap. A mask that all sequences share (stride 0) is sorted once.
    """
    B, Hq, S, D = q.shape
    L = k.shape[2]
    if q.numel() == 0:
        return
    block_d = max(16, 1 << (D - 1).bit_length())
    block_m = BLOCK_M if S > 64 else 64
    block_n = min(BLOCK_N, 64) if block_d > 128 else BLOCK_N
    blocks, tiles = (S + block_m - 1) // block_m, (L + block_n - 1) // block_n
    step_bytes = 2 * block_n * block_d * q.element_size()
    stages = max(1, min(num_stages, (SHARED_BYTES - block_m * block_d * q.element_size()) // step_bytes))
    masks = B if mask.stride(0) else 1
    kinds = torch.empty(masks * blocks * tiles, dtype=torch.int8, device=q.device)
    _sort_tiles[(masks * blocks * tiles,)](
        mask, kinds, mask.stride(0), mask.stride(2), mask.stride(3), S, L, blocks, tiles, block_m, block_n, num_warps=4
    )
    _masked_attention[(B * Hq, blocks)](
        q, k, v, mask, kinds, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask.stride(0), mask.stride(2), mask.stride(3),
        blocks * tiles if masks > 1 else 0, *out.stride()[:3],
        scale * LOG2_E.value, S, L, Hq, Hq // k.shape[1], tiles,
        D, block_m, block_n, block_d, 1 << (tiles - 1).bit_length(),
        num_warps=8 if block_m > 64 else 4, num_stages=stages,
        # A product and a difference as one instruction would not give 0 for the largest score, however large it is.
        enable_fp_fusion=False,
    )  # fmt: skip
