"""Linear layers of FP8 codes with a scale a block, Triton: sums go to float32 after each block of 128 channels.

The dynamic ones are given bfloat16 and cast it first: few rows where they are multiplied, many in a kernel of its own.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = tl.constexpr(128)  # channels that share a scale, and rows of b


@functools.cache
def _sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; those of an H200 where there is no GPU (compile-only machines)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


@triton.jit
def _tile_coordinates(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, down a column first: neighbours in time share a and b in L2."""
    group_size = GROUP_M * n_tiles
    first_m = tile // group_size * GROUP_M
    rows = tl.minimum(m_tiles - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def _cast_block(x):
    """Codes of a block of 128 channels a row, and what they are multiplied by. Both divisions round as IEEE asks."""
    x = x.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    most = tl.zeros_like(amax) + 448.0
    codes = (x * tl.div_rn(most, amax)[:, None]).to(tl.float8e4nv)  # saturates
    return codes, tl.div_rn(amax, most)


@triton.jit(do_not_specialize=["M"])
def _cast_rows(x_ptr, codes_ptr, scale_ptr, x_stride, codes_stride, M, K, BLOCK_M: tl.constexpr):
    """Codes [M, codes_stride] and scales, a column of M for each block of 128 channels. One block of BLOCK_M rows a program."""
    row = (tl.program_id(0) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    k = block * GROUP + tl.arange(0, GROUP)
    inside = (row < M)[:, None] & (k < K)[None, :]
    codes, scale = _cast_block(tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=inside, other=0.0))
    tl.store(codes_ptr + row[:, None] * codes_stride + k[None, :], codes, mask=inside)
    tl.store(scale_ptr + block.to(tl.int64) * M + row, scale, mask=row < M)


@triton.jit
def _store(out_ptr, partial_ptr, acc, m, n, split, M, N, out_stride, SPLIT: tl.constexpr):
    inside = (m < M)[:, None] & (n < N)[None, :]
    if SPLIT:
        offsets = (split.to(tl.int64) * M + m)[:, None] * N + n[None, :]
        tl.store(partial_ptr + offsets, acc, mask=inside)
    else:
        tl.store(out_ptr + m[:, None] * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gemv(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, out_ptr, b_stride, scale_a_column, scale_b_row, scale_b_column, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """One row of a, in one launch. Without tensor cores b goes straight from memory to registers, in loads of 16 bytes.

    A thread adds 16 products at a time in float32 and scales them then; it keeps a sum a row of b, and sums meet at the end.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    piece = tl.arange(0, BLOCK_K // 16) * 16
    b_ptrs = b_ptr + n[:, None] * b_stride + k[None, :]
    scale_b_row_ptr = scale_b_ptr + (tl.program_id(0) * BLOCK_N // GROUP).to(tl.int64) * scale_b_row
    acc = tl.zeros([BLOCK_N, BLOCK_K // 16], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            b = tl.load(b_ptrs, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
            a = tl.load(a_ptr + start + k)
            block = (start + piece) // GROUP
        else:
            b = tl.load(
                b_ptrs,
                mask=(n < N)[:, None] & (k < K - start)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            a = tl.load(a_ptr + start + k, mask=k < K - start, other=0.0)
            block = tl.minimum(start + piece, K - 1) // GROUP
        scale = tl.load(scale_b_row_ptr + block * scale_b_column)
        if DYNAMIC:
            codes, scale_a = _cast_block(tl.reshape(a, [BLOCK_K // GROUP, GROUP]))
            a = tl.reshape(codes, [BLOCK_K])
            scale *= tl.reshape(tl.broadcast_to(scale_a[:, None], [BLOCK_K // GROUP, GROUP // 16]), [BLOCK_K // 16])
        else:
            scale *= tl.load(scale_a_ptr + block * scale_a_column)
        products = b.to(tl.float32) * a.to(tl.float32)[None, :]
        acc += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 16, 16]), axis=2) * scale[None, :]
        b_ptrs += BLOCK_K
    tl.store(out_ptr + n, tl.sum(acc, axis=1).to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M", "k_blocks_per_split"])
def _gemm_few(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, out_ptr, partial_ptr, scale_a_row, scale_a_column, scale_b_row,
    scale_b_column, out_stride, M, N, K, k_blocks_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of a: b @ a.T, so that b's rows fill the asynchronous tensor cores and no thread touches b.

    The copy engine fetches both. A thread has little to do a block, so that the memory alone sets the time.
    """
    n_tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    n = (n_tile * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    first = split * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, tl.cdiv(K, GROUP))
    scale_a_ptrs = scale_a_ptr + m * scale_a_row
    scale_b_row_ptr = scale_b_ptr + (n_tile * BLOCK_N // GROUP).to(tl.int64) * scale_b_row
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(first, last):
        b = b_desc.load([n_tile * BLOCK_N, block * GROUP])
        a = a_desc.load([0, block * GROUP])
        scale = tl.load(scale_a_ptrs + block * scale_a_column, mask=m < M, other=0.0)
        scale *= tl.load(scale_b_row_ptr + block * scale_b_column)
        acc += tl.dot(b, a.T) * scale[None, :]
    _store(out_ptr, partial_ptr, tl.trans(acc), m, n, split, M, N, out_stride, SPLIT)


@triton.jit(do_not_specialize=["M", "k_blocks_per_split"])
def _gemm_pointers(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, out_ptr, partial_ptr, a_stride, b_stride, scale_a_row, scale_a_column,
    scale_b_row, scale_b_column, out_stride, M, N, K, k_blocks_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """Any stride and alignment. For few rows, where reading b is all that counts, and what the copy engine cannot read.

    DYNAMIC: a is bfloat16 and cast here, by each program anew, which costs less than a launch; there is no scale_a.
    """
    m_tile, n_tile = _tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    split = tl.program_id(1)
    m = (m_tile * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = (n_tile * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    first = split * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, tl.cdiv(K, GROUP))
    a_ptrs = a_ptr + m[:, None] * a_stride + k[None, :] + first * GROUP
    b_ptrs = b_ptr + n[None, :] * b_stride + k[:, None] + first * GROUP
    scale_a_ptrs = scale_a_ptr + m * scale_a_row
    # A tile of b does not cross a block, so its scale is one number.
    scale_b_row_ptr = scale_b_ptr + (n_tile * BLOCK_N // GROUP).to(tl.int64) * scale_b_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for block in range(first, last):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=(n < N)[None, :], other=0.0)
        else:
            left = K - block * GROUP
            a = tl.load(a_ptrs, mask=(m < M)[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(n < N)[None, :] & (k < left)[:, None], other=0.0)
        if DYNAMIC:
            a, scale = _cast_block(a)
        else:
            scale = tl.load(scale_a_ptrs + block * scale_a_column, mask=m < M, other=0.0)
        scale *= tl.load(scale_b_row_ptr + block * scale_b_column)
        acc += tl.dot(a, b) * scale[:, None]
        a_ptrs += GROUP
        b_ptrs += GROUP
    _store(out_ptr, partial_ptr, acc, m, n, split, M, N, out_stride, SPLIT)


@triton.jit(do_not_specialize=["M", "splits", "k_blocks_per_split"])
def _gemm_descriptors(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, out_ptr, partial_ptr, scale_a_row, scale_a_column, scale_b_row,
    scale_b_column, out_stride, M, N, K, splits, k_blocks_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tensor copy engine and asynchronous tensor cores. A program works off tiles pid, pid + programs, ...: flattened
    with the loop over K, the loads of the next tile run while this one is stored. The engine zero-fills and clips."""
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, GROUP)
    tiles = m_tiles * n_tiles
    for work in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), flatten=FLATTEN):
        m_tile, n_tile = _tile_coordinates(work % tiles, m_tiles, n_tiles, GROUP_M)
        m = (m_tile * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
        scale_a_ptrs = scale_a_ptr + m * scale_a_row
        scale_b_row_ptr = scale_b_ptr + (n_tile * BLOCK_N // GROUP).to(tl.int64) * scale_b_row
        if SPLIT:
            first = work // tiles * k_blocks_per_split
            last = tl.minimum(k_blocks, first + k_blocks_per_split)
        else:
            first = 0
            last = k_blocks
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for block in range(first, last):
            a = a_desc.load([m_tile * BLOCK_M, block * GROUP])
            b = b_desc.load([n_tile * BLOCK_N, block * GROUP])
            scale = tl.load(scale_a_ptrs + block * scale_a_column, mask=m < M, other=0.0)
            scale *= tl.load(scale_b_row_ptr + block * scale_b_column)
            acc += tl.dot(a, b.T) * scale[:, None]
        n = (n_tile * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
        _store(out_ptr, partial_ptr, acc, m, n, work // tiles, M, N, out_stride, SPLIT)


@triton.jit(do_not_specialize=["M"])
def _sum_splits(partial_ptr, out_ptr, out_stride, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the splits of K in a fixed order (deterministic), one row piece a program."""
    column_blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    cols = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + (row + split * tl.cast(M, tl.int64)) * N + cols, mask=cols < N, other=0.0)
    tl.store(out_ptr + row * out_stride + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


# Launch configurations of each kernel, by index VARIANT.
# BLOCK_N, num_warps, num_stages; BLOCK_M is 16, 32 or 64 by the number of rows
_POINTERS = ((32, 4, 5), (64, 4, 4), (16, 2, 6), (32, 2, 6), (128, 4, 4))
# most of BLOCK_K, 16-byte loads a thread for a step, num_warps
_GEMV = ((2048, 8, 4), (2048, 4, 4), (4096, 8, 8), (4096, 4, 8), (1024, 8, 4), (1024, 8, 2))
# BLOCK_N, num_warps, num_stages
_FEW = ((64, 4, 6), (128, 4, 4), (64, 4, 4), (128, 4, 6), (64, 4, 8))
# BLOCK_M, BLOCK_N, num_warps, num_stages
_TILES = ((128, 128, 8, 4), (128, 128, 8, 5), (64, 128, 4, 4), (128, 64, 4, 5), (128, 128, 4, 3))
_MOST_SPLITS = 16
FEW = 64  # rows: up to this many, reading b is all that counts


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


@functools.lru_cache(maxsize=4096)
def _default_split(tiles: int, k_blocks: int, programs: int) -> int:
    """As many parts of K as `programs` leave room for, of four blocks or more."""
    return max(1, min(programs // tiles, k_blocks // 4, _MOST_SPLITS))


def _copy_engine_reads(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 16 == 0


def _cast(x):
    """x [M, K] in bfloat16 -> codes [M, K], rows on multiples of 16 bytes, and scales [M, ceil(K / 128)], column by column."""
    M, K = x.shape
    codes = torch.empty((M, _cdiv(K, 16) * 16), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((_cdiv(K, 128), M), dtype=torch.float32, device=x.device)
    _cast_rows[(_cdiv(M, 16), scale.shape[0])](x, codes, scale, x.stride(0), codes.stride(0), M, K, 16, num_warps=4)
    return codes[:, :K], scale.T


def _choose(wanted, M, aligned, dynamic):
    """The kernel for a shape: the one that is wanted, where it can be."""
    if not aligned:
        return "pointers"
    if M == 1 and wanted in (None, "gemv"):
        return "gemv"
    if M <= FEW:
        return "pointers" if dynamic or wanted == "pointers" else "few"
    return "pointers" if wanted == "pointers" else "tiles"


def _multiply(a, b, scale_a, scale_b, out, KERNEL, VARIANT, SPLIT, GROUP_M, PERSISTENT):
    """Choose a kernel by shape and launch it. Without scale_a, a is bfloat16; more than FEW rows of it are cast first."""
    M, N = out.shape
    K = a.shape[1]
    if M == 0 or N == 0:
        return
    sms = _sm_count(out.device)
    if scale_a is None and (M > FEW or KERNEL == "few"):
        a, scale_a = _cast(a)
    dynamic = scale_a is None
    aligned = _copy_engine_reads(a) and _copy_engine_reads(b)
    kernel = _choose(KERNEL, M, aligned, dynamic)
    block_m = 16 if M <= 16 else 32 if M <= 32 else 64
    scale_strides = (0, 0) if dynamic else (scale_a.stride(0), scale_a.stride(1))
    strides = (*scale_strides, scale_b.stride(0), scale_b.stride(1), out.stride(0))
    if kernel == "gemv":
        most, loads, warps = _GEMV[VARIANT or 0]
        block_k = most
        while block_k > 128 and block_k >= 2 * K:
            block_k //= 2
        block_n = min(128, loads * 512 * warps // block_k)
        _gemv[(_cdiv(N, block_n),)](
            a, b, scale_b if dynamic else scale_a, scale_b, out, b.stride(0), *strides[1:4], N, K, block_n, block_k,
            K % block_k == 0, dynamic, num_warps=warps,
        )  # fmt: skip
        return
    programs = sms
    if kernel == "few":
        block_n, warps, stages = _FEW[VARIANT or 0]
        programs *= 220 * 1024 // (stages * (block_m + block_n) * 128)  # those that fit: none is to start late
    elif kernel == "tiles":
        block_m, block_n, warps, stages = _TILES[VARIANT or 0]
    elif M <= FEW:
        block_n, warps, stages = _POINTERS[VARIANT if VARIANT is not None else 0 if M <= 32 else 1]
        programs *= 6
    else:
        block_n, warps, stages = 128, 4, 3
    tiles = _cdiv(M, block_m) * _cdiv(N, block_n)
    k_blocks = _cdiv(K, 128)
    splits = SPLIT or _default_split(tiles, k_blocks, programs)
    k_blocks_per_split = _cdiv(k_blocks, min(splits, k_blocks))
    splits = _cdiv(k_blocks, k_blocks_per_split)  # no split may be empty
    partial = torch.empty((splits, M, N), dtype=torch.float32, device=out.device) if splits > 1 else out
    if kernel == "few":
        _gemm_few[(tiles, splits)](
            TensorDescriptor(a, [M, K], [a.stride(0), 1], [block_m, 128]),
            TensorDescriptor(b, [N, K], [b.stride(0), 1], [block_n, 128]), scale_a, scale_b, out, partial, *strides,
            M, N, K, k_blocks_per_split, block_m, block_n, splits > 1, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    elif kernel == "tiles":
        work = tiles * splits
        _gemm_descriptors[(min(sms, work) if PERSISTENT else work,)](
            TensorDescriptor(a, [M, K], [a.stride(0), 1], [block_m, 128]),
            TensorDescriptor(b, [N, K], [b.stride(0), 1], [block_n, 128]), scale_a, scale_b, out, partial, *strides,
            M, N, K, splits, k_blocks_per_split, block_m, block_n, GROUP_M, splits > 1, PERSISTENT and work > sms,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _gemm_pointers[(tiles, splits)](
            a, b, scale_b if dynamic else scale_a, scale_b, out, partial, a.stride(0), b.stride(0), *strides, M, N,
            K, k_blocks_per_split, block_m, block_n, K % 128 == 0, GROUP_M, splits > 1, dynamic, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    if splits > 1:
        _sum_splits[(M * _cdiv(N, 1024),)](partial, out, out.stride(0), M, N, splits, 1024, num_warps=4)


def run(a, b, scale_a, scale_b, out, *, KERNEL=None, VARIANT=None, SPLIT=None, GROUP_M=8, PERSISTENT=True):
    """out = bfloat16(sum over blocks of scale_a * scale_b * (products of the block)), in float32.

    Shapes: a [M, K] and b [N, K] in float8_e4m3fn and out [M, N] in bfloat16 with unit last stride, any row stride; scale_a
    [M, ceil(K / 128)] and scale_b [ceil(N / 128), ceil(K / 128)] float32 of any strides.
    Mapping, by shape (KERNEL names another, which is taken where it can be):
    - gemv, M = 1: float32 arithmetic, all of K in one program.
    - few, M <= 64: b @ a.T on asynchronous tensor cores, as many programs as fit; K is split among them.
    - tiles: tensor copy engine, persistent programs (PERSISTENT); K is split where tiles are few.
    - pointers: what is not aligned to 16 bytes.
    VARIANT picks a row of the table of the kernel (None: by shape). SPLIT = None or 0: by shape.
    """
    _multiply(a, b, scale_a, scale_b, out, KERNEL, VARIANT, SPLIT, GROUP_M, PERSISTENT)


def run_dynamic(x, b, scale_b, out, *, KERNEL=None, VARIANT=None, SPLIT=None, GROUP_M=8, PERSISTENT=True):
    """As `run`, for x [M, K] in bfloat16 with unit last stride, any row stride: each 128 channels of a row are cast first.

    scale = max(|x|, 1e-4) / 448 and code = x * (448 / max(|x|, 1e-4)), rounded to nearest even. Up to 64 rows are cast by
    each program that multiplies them, in the same launch; more in a launch of their own, to a workspace.
    """
    _multiply(x, b, None, scale_b, out, KERNEL, VARIANT, SPLIT, GROUP_M, PERSISTENT)
