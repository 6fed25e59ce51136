"""Latent attention with a mask of flags, Triton: keys wider than values, and only tiles between the first and last seen key.

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
"""The largest score of a row that has seen no key: the least finite one, so that a tile of which it sees nothing leaves it as it
is, and any score replaces it."""
SHARED_BYTES = 200 << 10
"""Shared memory that a block of queries with its steps of keys and values may take."""
FEW_ROWS = 16
"""Of a product on tensor cores; queries of a step of decoding are filled up to it."""


def _widths(size: int) -> tuple[int, int]:
    """Return the widths of the two tiles that hold ``size`` elements, powers of two: the second is 0 if the first holds all."""
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of [1, 1, rows, columns]; a dimension of one has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])


@triton.jit
def _tile(x, batch, head, start, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows from ``start`` and columns from ``column`` on; zeros past the end of either."""
    return x.load([batch, head, start, column]).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["S", "L", "tiles"])
def _attend(
    q_ptr, keys_of, keys_rest, values, mask_ptr, out_ptr,
    q_b, q_h, q_s, mask_b, mask_q, mask_k, out_b, out_h, out_s,
    scale, S, L, H, tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # The last block of queries mostly sees the most keys: it starts first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = tl.program_id(0) // H
    head = tl.program_id(0) % H
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = rows.to(tl.int64)[:, None]
    places = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    rest = BLOCK_D + tl.arange(0, REST_D if REST_D > 0 else 16)
    value_cols = tl.arange(0, BLOCK_V)
    mask_ptr += tl.cast(batch, tl.int64) * mask_b
    # 1. The first and the last tile with a key that is seen.
    first, last = tiles, 0
    for tile in range(0, tiles):
        keys = tile * BLOCK_N + places
        inside = (rows[:, None] < S) & (keys[None, :] < L)
        flags = tl.load(mask_ptr + offsets * mask_q + keys.to(tl.int64)[None, :] * mask_k, mask=inside, other=0)
        is_seen = tl.max(tl.max(tl.where(inside, flags.to(tl.int32), 0), 1), 0) > 0
        first = tl.where(is_seen, tl.minimum(first, tile), first)
        last = tl.where(is_seen, tile + 1, last)
    # 2. The queries.
    q_ptr += tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h
    q = tl.load(q_ptr + offsets * q_s + cols[None, :], mask=(rows[:, None] < S) & (cols[None, :] < D), other=0.0)
    q_rest = q
    if REST_D > 0:
        q_rest = tl.load(
            q_ptr + offsets * q_s + rest[None, :], mask=(rows[:, None] < S) & (rest[None, :] < D), other=0.0
        )
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    # 3. The tiles in between.
    for tile in range(first, last):
        keys = tile * BLOCK_N + places
        at = keys.to(tl.int64)
        inside = (rows[:, None] < S) & (keys[None, :] < L)
        flags = tl.load(mask_ptr + offsets * mask_q + at[None, :] * mask_k, mask=inside, other=0)
        scores = tl.dot(q, _tile(keys_of, batch, head, tile * BLOCK_N, 0, BLOCK_N, BLOCK_D).T)
        if REST_D > 0:
            scores = tl.dot(q_rest, _tile(keys_rest, batch, head, tile * BLOCK_N, BLOCK_D, BLOCK_N, REST_D).T, scores)
        scores = tl.where(inside & (flags.to(tl.int32) > 0), scores * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        v = _tile(values, batch, head, tile * BLOCK_N, 0, BLOCK_N, BLOCK_V)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        sums = sums * shrink + tl.sum(weights, 1)
        largest = new_largest
    out = tl.where(sums[:, None] > 0, acc / tl.where(sums > 0, sums, 1.0)[:, None], 0.0)
    out_ptr += tl.cast(batch, tl.int64) * out_b + tl.cast(head, tl.int64) * out_h
    inside = (rows[:, None] < S) & (value_cols[None, :] < DV)
    tl.store(out_ptr + offsets * out_s + value_cols[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def run(
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

    Shapes: q [B, H, S, D], k [B, H, L, D], v [B, H, L, Dv], out [B, H, S, Dv], unit last strides, any others; mask [B, 1, S, L]
    bool, any strides; T in bfloat16, float16. Scores, softmax and sums are in fp32, weights are rounded to T for the second
    product.
    Mapping: a program owns BLOCK_M queries of a head. It reads their flags to find the first and the last tile of keys that one
    of them sees, and streams the tiles in between. A step of decoding has one block of queries, of which one counts. Keys and
    values whose rows do not begin at multiples of 16 bytes are copied first.
    """
    B, H, S, D = q.shape
    L, DV = v.shape[2], v.shape[3]
    if out.numel() == 0:
        return
    block_d, rest_d = _widths(D)
    block_v = max(16, 1 << (DV - 1).bit_length())
    block_m = FEW_ROWS if S <= FEW_ROWS else BLOCK_M if S > 64 else 64
    block_n = BLOCK_N if block_d + rest_d + block_v <= 320 else min(BLOCK_N, 64)
    width = (block_d + rest_d) * q.element_size()
    step_bytes = block_n * (width + block_v * q.element_size())
    stages = max(1, min(num_stages, (SHARED_BYTES - block_m * width) // step_bytes))
    blocks, tiles = (S + block_m - 1) // block_m, (L + block_n - 1) // block_n
    # Triton 3.6 reads past the end of tiles that a loop like this loads by pointers, so keys and values go by descriptors, and a
    # flag counts only inside of the mask.
    k, v = addressable(k), addressable(v)
    _attend[(B * H, blocks)](
        q, _tiles(k, block_n, block_d), _tiles(k, block_n, rest_d or block_d), _tiles(v, block_n, block_v), mask, out,
        *q.stride()[:3], mask.stride(0), mask.stride(2), mask.stride(3), *out.stride()[:3],
        scale * LOG2_E, S, L, H, tiles,
        D, DV, block_m, block_n, block_d, rest_d, block_v,
        num_warps=8 if block_m > 64 else 4, num_stages=stages,
        # A product and a difference as one instruction would not give 0 for the largest score, however large it is.
        enable_fp_fusion=False,
    )  # fmt: skip
