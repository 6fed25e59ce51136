"""Attention of one position, Triton: positions are split among programs, and a second kernel joins the parts."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LEAST_ROWS = 16
"""Of a product on tensor cores."""
MOST_SPLITS = 128


@triton.jit(do_not_specialize=["L", "chunk", "heads"])
def _attend_to_chunk(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr,
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
    largest = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
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
        new_largest = tl.maximum(largest, tl.max(scores, 1))  # finite: the first key of a step is always one of its own
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        sums = sums * shrink + tl.sum(weights, 1)
        largest = new_largest
    if IS_WHOLE:
        out_ptrs = out_ptr + batch * out_b + query_heads[:, None] * out_h + cols[None, :]
        tl.store(out_ptrs, (acc / sums[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # Not yet divided by their sums: what has no keys stays zero, with a logarithm of minus infinity.
        part = (batch * Hkv * group + query_heads) * splits + split
        tl.store(parts_ptr + part[:, None] * D + cols[None, :], acc, mask=inside)
        statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
        tl.store(statistics, largest, mask=members < group)
        tl.store(statistics + 1, sums, mask=members < group)


@triton.jit(do_not_specialize=["heads"])
def _join_chunks(
    parts_ptr, out_ptr, out_b, out_h, heads, Hq, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    part = row * splits + parts
    statistics = parts_ptr + heads.to(tl.int64) * splits * D + part * 2
    largest = tl.load(statistics, mask=parts < splits, other=float("-inf"))
    sums = tl.load(statistics + 1, mask=parts < splits, other=0.0)
    shares = tl.exp2(largest - tl.max(largest, 0))
    inside = (parts[:, None] < splits) & (cols[None, :] < D)
    accs = tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=inside, other=0.0)
    out = tl.sum(accs * shares[:, None], 0) / tl.sum(sums * shares, 0)
    out_ptrs = out_ptr + row // Hq * out_b + row % Hq * out_h + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cols < D)


def _splits(programs: int, length: int, wanted: int, least: int) -> int:
    """A power of two, so that a growing cache compiles few kernels: as many as are ``wanted`` if each has ``least`` positions."""
    most = min((length + least - 1) // least, max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=512,
    LEAST=128,
    BLOCK_N=None,
    num_warps=4,
):
    """out = T(softmax(scale * q k^T) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D], unit last strides, any others; T in bfloat16, float16, float32.
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
        q, k, v, out, parts,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], out.stride(0), out.stride(1),
        scale * LOG2_E, L, chunk, heads, Hkv, splits, group,
        D, splits == 1, max(LEAST_ROWS, 1 << (group - 1).bit_length()), block_n, block_d,
        num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_chunks[(heads,)](
            parts, out, out.stride(0), out.stride(1), heads, Hq, splits, D, splits, block_d, num_warps=num_warps
        )
