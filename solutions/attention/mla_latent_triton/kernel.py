"""Latent attention of one position, Triton: each latent is read once for up to 64 heads, as key and as value.

Few heads are columns of the products, whose rows are keys: the fast instructions have 64 rows and as few as 8 columns. Many heads
are rows. So are few heads if the rows of latents do not begin at multiples of 16 bytes. Positions are split among programs, and a
second kernel joins the parts.
"""

import torch
import triton
import triton.language as tl
from _lib.triton.addressable_rows import addressable
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1.0e30)
"""The largest score of a head that has seen no key: finite, so that no difference of two is NaN."""
FEW_HEADS = 32
"""Up to so many heads of a program are columns."""
MOST_HEADS = 64
MOST_SPLITS = 64


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of [1, rows, columns]; a dimension of one has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, columns])


@triton.jit
def _tile(x, batch, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows from ``start`` on; zeros past the end of either."""
    return x.load([batch, start, 0]).reshape(ROWS, COLUMNS)


@triton.jit
def _heads(x, batch, start, batch_stride, row_stride, H, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           TRANSPOSED: tl.constexpr):  # fmt: skip
    """Load the rows of some heads, or their transpose; zeros past H and past SIZE."""
    # A tile that is transposed after it was loaded by pointers is multiplied wrongly (Triton 3.6).
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, COLUMNS)
    x += tl.cast(batch, tl.int64) * batch_stride
    if TRANSPOSED:
        inside = (rows[None, :] < H) & (cols[:, None] < SIZE)
        tile = tl.load(x + rows.to(tl.int64)[None, :] * row_stride + cols[:, None], mask=inside, other=0.0)
    else:
        inside = (rows[:, None] < H) & (cols[None, :] < SIZE)
        tile = tl.load(x + rows.to(tl.int64)[:, None] * row_stride + cols[None, :], mask=inside, other=0.0)
    return tile


@triton.jit(do_not_specialize=["L", "tiles", "heads", "splits"])
def _attend_to_latents(
    q_ptr, q_rot_ptr, latents, rotated, out_ptr, parts_ptr,
    q_b, q_h, q_rot_b, q_rot_h, out_b, out_h,
    scale, L, tiles, H, groups, heads, splits,
    R: tl.constexpr, E: tl.constexpr, IS_WHOLE: tl.constexpr, BY_KEYS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0) // groups
    split = tl.program_id(1)
    members = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_R)
    inside = (members[:, None] < H) & (cols[None, :] < R)
    # 1. The queries of the program's heads.
    first_head = tl.program_id(0) % groups * BLOCK_H
    q = _heads(q_ptr, batch, first_head, q_b, q_h, H, R, BLOCK_H, BLOCK_R, BY_KEYS)
    q_rot = _heads(q_rot_ptr, batch, first_head, q_rot_b, q_rot_h, H, E, BLOCK_H, BLOCK_E, BY_KEYS)
    # 2. A tile of latents is the keys of one product and the values of the other.
    sums = tl.zeros([BLOCK_H], dtype=tl.float32)
    largest = tl.full([BLOCK_H], NOTHING, dtype=tl.float32)
    first = split * tiles * BLOCK_N
    end = tl.minimum(first + tiles * BLOCK_N, L)
    if BY_KEYS:
        acc = tl.zeros([BLOCK_R, BLOCK_H], dtype=tl.float32)
        for start in range(first, end, BLOCK_N):
            keys = _tile(latents, batch, start, BLOCK_N, BLOCK_R)
            rot = _tile(rotated, batch, start, BLOCK_N, BLOCK_E)
            scores = tl.dot(keys, q)
            scores = tl.dot(rot, q_rot, scores) * scale
            places = start + tl.arange(0, BLOCK_N)
            scores = tl.where(places[:, None] < L, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 0))
            weights = tl.exp2(scores - new_largest[None, :])
            shrink = tl.exp2(largest - new_largest)
            acc = tl.dot(keys.T, weights.to(keys.dtype), acc * shrink[None, :])
            sums = sums * shrink + tl.sum(weights, 0)
            largest = new_largest
        found = tl.trans(acc)
    else:
        found = tl.zeros([BLOCK_H, BLOCK_R], dtype=tl.float32)
        for start in range(first, end, BLOCK_N):
            keys = _tile(latents, batch, start, BLOCK_N, BLOCK_R)
            rot = _tile(rotated, batch, start, BLOCK_N, BLOCK_E)
            scores = tl.dot(q, keys.T)
            scores = tl.dot(q_rot, rot.T, scores) * scale
            places = start + tl.arange(0, BLOCK_N)
            scores = tl.where(places[None, :] < L, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            found = tl.dot(weights.to(keys.dtype), keys, found * shrink[:, None])
            sums = sums * shrink + tl.sum(weights, 1)
            largest = new_largest
    # 3. The result, or a part of it that is not yet divided by its sum.
    if IS_WHOLE:
        out_ptrs = out_ptr + tl.cast(batch, tl.int64) * out_b + members.to(tl.int64)[:, None] * out_h + cols[None, :]
        tl.store(out_ptrs, (found / sums[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (tl.cast(batch, tl.int64) * H + members) * splits + split
        tl.store(parts_ptr + part[:, None] * R + cols[None, :], found, mask=inside)
        statistics = parts_ptr + heads.to(tl.int64) * splits * R + part * 2
        tl.store(statistics, largest, mask=members < H)
        tl.store(statistics + 1, sums, mask=members < H)


@triton.jit(do_not_specialize=["heads", "splits"])
def _join_parts(
    parts_ptr, out_ptr, out_b, out_h, heads, H, splits, R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Add the parts of a head for some columns, each at the scale of the largest score among them."""
    number = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, BLOCK_S)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = number * splits + spans
    statistics = parts_ptr + heads.to(tl.int64) * splits * R + part * 2
    largest = tl.load(statistics, mask=spans < splits, other=NOTHING)
    sums = tl.load(statistics + 1, mask=spans < splits, other=0.0)
    inside = (spans[:, None] < splits) & (cols[None, :] < R)
    accs = tl.load(parts_ptr + part[:, None] * R + cols[None, :], mask=inside, other=0.0)
    shares = tl.exp2(largest - tl.max(largest, 0))
    out = tl.sum(accs * shares[:, None], 0) / tl.sum(sums * shares, 0)
    out_ptrs = out_ptr + number // H * out_b + number % H * out_h + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cols < R)


def _spans(programs: int, tiles: int, wanted: int) -> tuple[int, int]:
    """Return (spans, tiles of a span): as many spans as are ``wanted`` among all programs, none of them empty."""
    most = max(1, min(tiles, wanted // programs, MOST_SPLITS))
    each = -(-tiles // most)
    return -(-tiles // each), each


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_nope: torch.Tensor,
    k_rot: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=132,
    num_warps=4,
):
    """out = T(w kv_nope), w = softmax(scale * (q_nope kv_nope^T + q_pe k_rot^T)), scores, softmax and sums in fp32.

    Shapes: q_nope and out [B, H, R], q_pe [B, H, E], kv_nope [B, L, R], k_rot [B, L, E], unit last strides, any others; T in
    bfloat16, float16. Weights are rounded to T for the second product. Latents whose rows do not begin at multiples of 16
    bytes are copied first.
    Mapping: a program owns up to 64 heads of a sequence and one of several spans of positions. There are about PROGRAMS of
    them, one a multiprocessor. Parts are kept in fp32 and joined by one program a head and 128 columns. ``num_warps`` is for
    up to 32 heads.
    """
    B, H, R = q_nope.shape
    L, E = k_rot.shape[1], k_rot.shape[2]
    if out.numel() == 0:
        return
    block_h = max(16, min(MOST_HEADS, 1 << (H - 1).bit_length()))
    groups = -(-H // block_h)
    by_keys = block_h <= FEW_HEADS
    block_r, block_e = max(16, 1 << (R - 1).bit_length()), max(16, 1 << (E - 1).bit_length())
    block_n = 64
    heads = B * H
    splits, tiles = _spans(B * groups, -(-L // block_n), PROGRAMS)
    # Triton 3.6 reads past the end of tiles that a loop like this loads by pointers, so all go by descriptors.
    latents, rotated = (addressable(x[:, None])[:, 0] for x in (kv_nope, k_rot))
    tiles_of = _tiles(latents, block_n, block_r), _tiles(rotated, block_n, block_e)
    # Sums of latents, then the largest score and the sum of weights, of every head and span.
    parts = out if splits == 1 else torch.empty(heads * splits * (R + 2), dtype=torch.float32, device=out.device)
    _attend_to_latents[(B * groups, splits)](
        q_nope, q_pe, *tiles_of, out, parts, *q_nope.stride()[:2], *q_pe.stride()[:2], *out.stride()[:2],
        scale * LOG2_E, L, tiles, H, groups, heads, splits,
        R, E, splits == 1, by_keys, block_h, block_n, block_r, block_e,
        num_warps=num_warps if by_keys else 8, num_stages=2,
        # A product and a difference as one instruction would not give 0 for the largest score, however large it is.
        enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(heads, -(-R // 128))](
            parts, out, *out.stride()[:2], heads, H, splits, R, 1 << (splits - 1).bit_length(), 128, num_warps=4
        )
