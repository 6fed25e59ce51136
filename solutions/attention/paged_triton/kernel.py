"""Attention over pages of a common cache, Triton: positions are split among programs, and a second kernel joins the parts."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1.0e30)
"""The largest score of a row that has seen no key: finite, so that no difference of two is NaN."""
LEAST_ROWS = 16
"""Of a product on tensor cores."""
MOST_SPLITS = 64


@triton.jit(do_not_specialize=["heads", "splits"])
def _attend_to_pages(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, parts_ptr,
    q_b, q_h, k_n, k_p, k_h, v_n, v_p, v_h, table_b, out_b, out_h,
    scale, heads, Hkv, splits, group,
    P: tl.constexpr, IS_WITHIN: tl.constexpr, D: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hkv).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    split = tl.program_id(1)
    # 1. Rows are the query heads that share the key head, filled up with zeros: each key is read once for all of them.
    members = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    inside = (members[:, None] < group) & (cols[None, :] < D)
    query_heads = head * group + members
    q = tl.load(q_ptr + batch * q_b + query_heads[:, None] * q_h + cols[None, :], mask=inside, other=0.0)
    # 2. The span of tiles, by the length of the sequence.
    length = tl.load(lengths_ptr + batch)
    tiles = tl.cdiv(length, BLOCK_N)
    each = tl.cdiv(tiles, splits)
    first = split * each * BLOCK_N
    end = tl.minimum(first + each * BLOCK_N, length)
    k_ptr += head * k_h
    v_ptr += head * v_h
    table_ptr += batch * table_b
    places = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_G], dtype=tl.float32)
    largest = tl.full([BLOCK_G], NOTHING, dtype=tl.float32)
    # 3. Pages are looked up a step ahead, so that loads of keys wait for no other load. A step within a page looks up one.
    ahead = first if IS_WITHIN else first + places
    pages = tl.load(table_ptr + ahead // P, mask=ahead < end, other=0)
    for start in range(first, end, BLOCK_N):
        keys = start + places
        slots = pages.to(tl.int64)
        if IS_WITHIN:
            within = (start % P + places).to(tl.int64)
            ahead = start + BLOCK_N
        else:
            within = (keys % P).to(tl.int64)
            ahead = keys + BLOCK_N
        k_places = slots * k_n + within * k_p
        v_places = slots * v_n + within * v_p
        pages = tl.load(table_ptr + ahead // P, mask=ahead < end, other=0)
        in_k = (keys[None, :] < end) & (cols[:, None] < D)
        in_v = (keys[:, None] < end) & (cols[None, :] < D)
        k = tl.load(k_ptr + k_places[None, :] + cols[:, None], mask=in_k, other=0.0)
        v = tl.load(v_ptr + v_places[:, None] + cols[None, :], mask=in_v, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        sums = sums * shrink + tl.sum(weights, 1)
        largest = new_largest
    # 4. The result, or a part of it that is not yet divided by its sum.
    if IS_WHOLE:
        out = tl.where(sums[:, None] > 0, acc / tl.where(sums > 0, sums, 1.0)[:, None], 0.0)
        out_ptrs = out_ptr + batch * out_b + query_heads[:, None] * out_h + cols[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (batch * Hkv * group + query_heads) * splits + split
        if first < end:  # a part without positions is not read
            tl.store(parts_ptr + part[:, None] * D + cols[None, :], acc, mask=inside)
        statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
        tl.store(statistics, largest, mask=members < group)
        tl.store(statistics + 1, sums, mask=members < group)


@triton.jit(do_not_specialize=["heads", "splits"])
def _join_parts(
    parts_ptr, out_ptr, out_b, out_h, heads, Hq, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Add the parts of a head, each at the scale of the largest score among them; zeros without any position."""
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    part = row * splits + spans
    statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
    largest = tl.load(statistics, mask=spans < splits, other=NOTHING)
    sums = tl.load(statistics + 1, mask=spans < splits, other=0.0)
    shares = tl.exp2(largest - tl.max(largest, 0))
    inside = (sums[:, None] > 0) & (cols[None, :] < D)
    accs = tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=inside, other=0.0)
    total = tl.sum(sums * shares, 0)
    out = tl.sum(accs * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + row // Hq * out_b + row % Hq * out_h + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cols < D)


def run_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=528,
    BLOCK_N=64,
    num_warps=4,
):
    """out = T(softmax(scale * q k^T) v) over the pages of each sequence, zeros for a sequence without positions.

    Shapes: q and out [B, Hq, D], caches [N, P, Hkv, D], table [B, M], unit last strides, any others; lengths [B];
    T in bfloat16, float16, float32. Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns a key head, all query heads that share it, and one of several spans of positions of a sequence. Their
    number depends on shapes alone: no length is read on the host. A sequence is split evenly by its own length. Parts are kept in
    fp32 and joined by one program a head.
    """
    B, Hq, D = q.shape
    size, Hkv = k_cache.shape[1], k_cache.shape[2]
    if q.numel() == 0:
        return
    block_d = max(16, 1 << (D - 1).bit_length())
    block_n = min(BLOCK_N, 64 if block_d <= 128 else 32) if q.element_size() == 2 else 16
    group, heads = Hq // Hkv, B * Hq
    tiles = -(-table.shape[1] * size // block_n)
    splits = max(1, min(tiles, PROGRAMS // (B * Hkv), MOST_SPLITS))
    # Sums of values, then the largest score and the sum of weights, of every head and span.
    parts = out if splits == 1 else torch.empty(heads * splits * (D + 2), dtype=torch.float32, device=q.device)
    _attend_to_pages[(B * Hkv, splits)](
        q, k_cache, v_cache, table, lengths, out, parts,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], table.stride(0), out.stride(0), out.stride(1),
        scale * LOG2_E, heads, Hkv, splits, group,
        size, size % block_n == 0, D, splits == 1, max(LEAST_ROWS, 1 << (group - 1).bit_length()), block_n, block_d,
        num_warps=num_warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(heads,)](
            parts,
            out,
            out.stride(0),
            out.stride(1),
            heads,
            Hq,
            splits,
            D,
            1 << (splits - 1).bit_length(),
            block_d,
            num_warps=4,
        )
