"""Attention of one position for many sequences, Triton: as many programs as the GPU has places, each with a stream of tiles.

A program goes through its heads' tiles of keys and values in one loop, so that the copies of the next head's tiles are under way
while the last of this one are multiplied. Keys lie along rows of the products, of which the fast instructions have 64, and the
query heads that share a key head along columns. Spans of positions are joined by a second kernel.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1.0e30)
"""The largest score of a head that has seen no key: finite, so that no difference of two is NaN."""
LEAST_COLUMNS = 16
"""Of a product on tensor cores."""
MOST_SPLITS = 64
TILE_BYTES = 1 << 14
"""Of the keys in a step: three steps of keys and values leave room for two programs on a multiprocessor."""
SHARED_BYTES = 216 << 10
"""Shared memory that the steps of a program may take."""
LEAST_STEPS = 4
"""Least steps of a span: parts of shorter ones would be many beside the keys that they are made of."""


def _is_addressable(x: torch.Tensor) -> bool:
    """Return True if the tensor memory accelerator can address a tensor: rows apart, of whole 16 bytes and aligned to them."""
    sizes = [x.shape[-1], *(stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)]
    return x.data_ptr() % 16 == 0 and all(size > 0 and size * x.element_size() % 16 == 0 for size in sizes)


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of [1, 1, rows, columns]; a dimension of one has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])


@triton.jit(do_not_specialize=["rows", "H", "L", "D", "b_stride", "h_stride", "row_stride"])
def _copy_rows(x, to, b_stride, h_stride, row_stride, rows, H, L, D, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Copy rows of D elements side by side, each with zeros up to WIDTH."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    here = (row < rows)[:, None]
    starts = row // L // H * b_stride + row // L % H * h_stride + row % L * row_stride
    values = tl.load(x + starts[:, None] + cols[None, :], mask=here & (cols < D)[None, :], other=0.0)
    tl.store(to + row[:, None] * WIDTH + cols[None, :], values, mask=here)


def _addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, H, L, D], or a copy with rows of a power of two: few callers have other strides than models' caches."""
    if _is_addressable(x):
        return x
    B, H, L, D = x.shape
    width = max(16, 1 << (D - 1).bit_length())
    copy = torch.empty(B, H, L, width, dtype=x.dtype, device=x.device)
    rows = B * H * L
    _copy_rows[(triton.cdiv(rows, 32),)](x, copy, *x.stride()[:3], rows, H, L, D, width, 32, num_warps=4)
    return copy


@triton.jit
def _tile(x, batch, head, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows from ``start`` on; zeros past the end of either."""
    return x.load([batch, head, start, 0]).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["L", "D", "heads", "units", "Hkv", "group", "splits", "steps", "out_b", "out_h"])
def _attend(
    q, k, v, out_ptr, parts_ptr, out_b, out_h,
    scale, L, D, heads, units, Hkv, group, splits, steps,
    IS_WHOLE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    members = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    places = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_D, BLOCK_G], dtype=tl.float32)
    sums = tl.zeros([BLOCK_G], dtype=tl.float32)
    largest = tl.full([BLOCK_G], NOTHING, dtype=tl.float32)
    programs = tl.num_programs(0)
    own = (units - tl.program_id(0) + programs - 1) // programs
    for number in tl.range(0, own * steps, num_stages=STAGES):
        # A unit is a key head and a span of ``steps`` tiles. Tiles past the last key of the last span are zeros, read nowhere.
        unit = tl.program_id(0) + number // steps * programs
        step = number % steps
        row, split = unit // splits, unit % splits
        batch, head = row // Hkv, row % Hkv
        start = (split * steps + step) * BLOCK_N
        queries = _tile(q, batch, head, 0, BLOCK_G, BLOCK_D).T
        keys = _tile(k, batch, head, start, BLOCK_N, BLOCK_D)
        values = _tile(v, batch, head, start, BLOCK_N, BLOCK_D).T
        # What earlier tiles of the unit before would add is worth nothing at the first step.
        kept = tl.where(step == 0, 0.0, 1.0)
        largest = tl.where(step == 0, NOTHING, largest)
        scores = tl.dot(keys, queries) * scale
        scores = tl.where((start + places)[:, None] < L, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest) * kept
        acc = tl.dot(values, weights.to(values.dtype), acc * shrink[None, :])
        sums = sums * shrink + tl.sum(weights, 0)
        largest = new_largest
        if step == steps - 1:
            query_heads = head * group + members
            inside = (members[:, None] < group) & (cols[None, :] < D)
            if IS_WHOLE:
                out_ptrs = out_ptr + tl.cast(batch, tl.int64) * out_b + query_heads.to(tl.int64)[:, None] * out_h
                found = tl.trans(acc) / sums[:, None]
                tl.store(out_ptrs + cols[None, :], found.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                # Not yet divided by their sums.
                part = (tl.cast(row, tl.int64) * group + members) * splits + split
                tl.store(parts_ptr + part[:, None] * D + cols[None, :], tl.trans(acc), mask=inside)
                statistics = parts_ptr + tl.cast(heads, tl.int64) * splits * D + part * 2
                tl.store(statistics, largest, mask=members < group)
                tl.store(statistics + 1, sums, mask=members < group)


@triton.jit(do_not_specialize=["heads", "Hq", "splits", "D", "out_b", "out_h"])
def _join_parts(parts_ptr, out_ptr, out_b, out_h, heads, Hq, splits, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add the parts of a head, each at the scale of the largest score among them."""
    number = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    part = number * splits + spans
    statistics = parts_ptr + tl.cast(heads, tl.int64) * splits * D + part * 2
    largest = tl.load(statistics, mask=spans < splits, other=NOTHING)
    sums = tl.load(statistics + 1, mask=spans < splits, other=0.0)
    inside = (spans[:, None] < splits) & (cols[None, :] < D)
    accs = tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=inside, other=0.0)
    shares = tl.exp2(largest - tl.max(largest, 0))
    found = tl.sum(accs * shares[:, None], 0) / tl.sum(sums * shares, 0)
    out_ptrs = out_ptr + number // Hq * out_b + number % Hq * out_h + cols
    tl.store(out_ptrs, found.to(out_ptr.dtype.element_ty), mask=cols < D)


def _spans(rows: int, tiles: int, wanted: int) -> tuple[int, int]:
    """Return (spans, tiles of a span) of each of ``rows`` heads: about ``wanted`` units, none without a key."""
    most = max(1, min(tiles // LEAST_STEPS, wanted // rows, MOST_SPLITS))
    each = -(-tiles // most)
    return -(-tiles // each), each


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    PROGRAMS=None,
    UNITS=1,
    BLOCK_N=None,
    num_warps=4,
):
    """out = T(softmax(scale * q k^T) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D], unit last strides, any others; T in bfloat16, float16. Tensors
    whose rows are not of whole 16 bytes, or not aligned to them, are copied first.
    Mapping: a program owns key heads, with all query heads that share one, or spans of their positions. Spans are as many as
    give each program UNITS of them, which is one a key head where there are many.
    PROGRAMS = None: 264, two a multiprocessor of an H200, or 132 where two do not fit. BLOCK_N = None: 16 KB of keys a step.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    group, heads = Hq // Hkv, B * Hq
    block_d = max(16, 1 << (D - 1).bit_length())
    block_g = max(LEAST_COLUMNS, 1 << (group - 1).bit_length())
    block_n = BLOCK_N or max(64, min(128, TILE_BYTES // (2 * block_d)))
    step_bytes = 2 * block_d * (2 * block_n + block_g)
    stages = 3 if 3 * step_bytes <= SHARED_BYTES else 2
    programs = PROGRAMS or (264 if 2 * stages * step_bytes <= SHARED_BYTES else 132)
    splits, steps = _spans(B * Hkv, -(-L // block_n), UNITS * programs)
    units = B * Hkv * splits
    by_group = q.view(B, Hkv, group, D)  # splitting the heads and dropping the position keeps any strides
    # Triton 3.6 multiplies tiles wrongly that were loaded by pointers in a loop like this, so all go by descriptors.
    queries, keys, values = (_addressable(x) for x in (by_group, k, v))
    tensors = _tiles(queries, block_g, block_d), _tiles(keys, block_n, block_d), _tiles(values, block_n, block_d)
    # Sums of values, then the largest score and the sum of weights, of every head and span.
    parts = out if splits == 1 else torch.empty(heads * splits * (D + 2), dtype=torch.float32, device=q.device)
    _attend[(min(programs, units),)](
        *tensors, out, parts, *out.stride()[:2],
        scale * LOG2_E, L, D, heads, units, Hkv, group, splits, steps,
        splits == 1, block_g, block_n, block_d, stages,
        num_warps=num_warps,
        # A product and a difference as one instruction would not give 0 for the largest score, however large it is.
        enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(heads,)](
            parts, out, *out.stride()[:2], heads, Hq, splits, D, 1 << (splits - 1).bit_length(), block_d, num_warps=4
        )
