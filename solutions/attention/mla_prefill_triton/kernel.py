"""Multi-head latent attention of whole sequences, Triton: keys wider than values.

A head of 192 elements is no power of two. Its queries and keys are two tiles each, of 128 and 64 elements, and scores are the
sum of two products.
"""

import torch
import triton
import triton.language as tl
from _lib.triton.addressable_rows import addressable
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-3.4028234663852886e38)
"""The largest score of a row that has seen no key: the least finite one, so that no difference of two is NaN and any score
replaces it."""
SHARED_BYTES = 220 << 10
"""Shared memory that a block of queries with its steps of keys and values may take."""
CACHE_BYTES = 30 << 20
"""Keys and values of the heads that run at the same time: they should stay in the L2, of 50 MiB on an H100 or H200."""


def _widths(size: int) -> tuple[int, int]:
    """Return the widths of the two tiles that hold ``size`` elements, powers of two: the second is 0 if the first holds all."""
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def _columns(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of [1, 1, rows, columns]; a dimension of one has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])


@triton.jit
def _tile(x, batch, head, start, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows from ``start`` and columns from ``column`` on; zeros past the end of either."""
    return x.load([batch, head, start, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _add_keys(
    q, q_rest, acc, sums, largest, k, k_rest, v, batch, head, start, rows,
    scale, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running softmax."""
    scores = tl.dot(q, _tile(k, batch, head, start, 0, BLOCK_N, BLOCK_D).T)
    if REST_D > 0:
        scores = tl.dot(q_rest, _tile(k_rest, batch, head, start, BLOCK_D, BLOCK_N, REST_D).T, scores)
    scores *= scale
    if MASKED:  # keys past S are later than every position that is stored
        places = start + tl.arange(0, BLOCK_N)
        scores = tl.where(places[None, :] <= rows[:, None], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    values = _tile(v, batch, head, start, 0, BLOCK_N, BLOCK_V)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return acc, sums * shrink + tl.sum(weights, 1), new_largest


@triton.jit(do_not_specialize=["S", "heads"])
def _causal_attention(
    q, q_rest, k, k_rest, v, out_ptr, out_b, out_h, out_s,
    scale, S, H, blocks, heads,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # 1. Some heads run at a time, so that their keys stay in the L2. The last block of queries sees the most keys: it starts
    # first, so that the short ones fill the gaps at the end.
    index = tl.program_id(0)
    turn = index % (blocks * heads)
    number = index // (blocks * heads) * heads + turn % heads
    batch = number // H
    head = number % H
    first = (blocks - 1 - turn // heads) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    # 2. The queries.
    queries = _tile(q, batch, head, first, 0, BLOCK_M, BLOCK_D)
    queries_rest = queries
    if REST_D > 0:
        queries_rest = _tile(q_rest, batch, head, first, BLOCK_D, BLOCK_M, REST_D)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    # 3. Keys before the block are seen by all of its queries.
    common = first // BLOCK_N * BLOCK_N
    for start in range(0, common, BLOCK_N):
        acc, sums, largest = _add_keys(
            queries, queries_rest, acc, sums, largest, k, k_rest, v, batch, head, start, rows,
            scale, False, BLOCK_N, BLOCK_D, REST_D, BLOCK_V,
        )  # fmt: skip
    for start in range(common, tl.minimum(first + BLOCK_M, S), BLOCK_N):
        acc, sums, largest = _add_keys(
            queries, queries_rest, acc, sums, largest, k, k_rest, v, batch, head, start, rows,
            scale, True, BLOCK_N, BLOCK_D, REST_D, BLOCK_V,
        )  # fmt: skip
    out = (acc / sums[:, None]).to(out_ptr.dtype.element_ty)
    cols = tl.arange(0, BLOCK_V)
    out_ptr += tl.cast(batch, tl.int64) * out_b + tl.cast(head, tl.int64) * out_h
    inside = (rows[:, None] < S) & (cols[None, :] < DV)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_s + cols[None, :], out, mask=inside)


def _heads_at_once(heads: int, bytes_of_one: int) -> int:
    """Return the largest divisor of ``heads`` whose keys and values fit into the L2."""
    most = max(1, min(heads, CACHE_BYTES // max(1, bytes_of_one)))
    return next(count for count in range(most, 0, -1) if heads % count == 0)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=128,
    BLOCK_N=128,
    num_stages=3,
):
    """out = T(softmax(scale * q k^T, causal) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and k [B, H, S, D], v and out [B, H, S, Dv], unit last strides, any others; T in bfloat16, float16.
    Mapping: a program owns BLOCK_M queries of a head and streams the keys that they see. Blocks before the diagonal need no mask.
    Tensors whose rows do not begin at multiples of 16 bytes are copied first.
    """
    B, H, S, D = q.shape
    DV = v.shape[3]
    if out.numel() == 0:
        return
    block_d, rest_d = _widths(D)
    block_v = _columns(DV)
    block_m = BLOCK_M if S > 64 else 64
    block_n = BLOCK_N if block_d + rest_d + block_v <= 320 else min(BLOCK_N, 64)
    width = (block_d + rest_d) * q.element_size()
    step_bytes = block_n * (width + block_v * q.element_size())
    stages = max(1, min(num_stages, (SHARED_BYTES - block_m * width) // step_bytes))
    # Triton 3.6 reads past the end of tiles that a loop like this loads by pointers, so all go by descriptors.
    q, k, v = addressable(q), addressable(k), addressable(v)
    tiles = (
        _tiles(q, block_m, block_d), _tiles(q, block_m, rest_d or block_d),
        _tiles(k, block_n, block_d), _tiles(k, block_n, rest_d or block_d), _tiles(v, block_n, block_v),
    )  # fmt: skip
    blocks = (S + block_m - 1) // block_m
    _causal_attention[(B * H * blocks,)](
        *tiles, out, *out.stride()[:3],
        scale * LOG2_E, S, H, blocks, _heads_at_once(B * H, S * (D + DV) * q.element_size()),
        DV, block_m, block_n, block_d, rest_d, block_v,
        num_warps=8 if block_m > 64 else 4, num_stages=stages,
        # A product and a difference as one instruction would not give 0 for the largest score, however large it is.
        enable_fp_fusion=False,
    )  # fmt: skip
