"""Linear layer without bias: out = a @ b.T, Triton. Four kernels, chosen by shape and alignment in `run`."""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@functools.cache
def _sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; those of an H200 where there is no GPU (compile-only machines)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


@triton.jit
def _gemv(a_ptr, b_ptr, out_ptr, b_stride, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row of a. Bound by reading b: no tensor cores, b goes straight from memory to registers in 16-byte loads."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    lanes = tl.arange(0, BLOCK_K)[None, :]
    b_ptrs = b_ptr + n * b_stride + lanes
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        in_row = lanes < K - k
        a = tl.load(a_ptr + k + lanes, mask=in_row, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs + k, mask=(n < N) & in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc += a * b
    result = tl.sum(acc, axis=1, keep_dims=True)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _tile_coordinates(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, down a column first: neighbours in time share a and b in L2."""
    group_size = GROUP_M * n_tiles
    first_m = tile // group_size * GROUP_M
    rows = tl.minimum(m_tiles - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit(do_not_specialize=["M"])
def _gemm_pointers(
    a_ptr,
    b_ptr,
    out_ptr,
    a_stride,
    b_stride,
    out_stride,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Any stride and alignment: used for few rows, for float32, and where the tensor copy engine cannot be."""
    m_tile, n_tile = _tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = (m_tile * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = (n_tile * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m[:, None] * a_stride + k[None, :]
    b_ptrs = b_ptr + n[None, :] * b_stride + k[:, None]
    in_m = m[:, None] < M
    in_n = n[None, :] < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m, other=0.0)
            b = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=in_m & (k[None, :] < K - start), other=0.0)
            b = tl.load(b_ptrs, mask=in_n & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)


@triton.jit(do_not_specialize=["M", "splits", "k_tiles_per_split"])
def _gemm_descriptors(
    a_desc,
    b_desc,
    out_desc,
    partial_ptr,
    M,
    N,
    K,
    splits,
    k_tiles_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Tensor copy engine and asynchronous tensor cores. A program works off tiles pid, pid + programs, ...: flattened
    with the loop over K, the loads of the next tile run while this one is stored. The engine zero-fills and clips."""
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    tiles = m_tiles * n_tiles
    for work in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), flatten=FLATTEN):
        m_tile, n_tile = _tile_coordinates(work % tiles, m_tiles, n_tiles, GROUP_M)
        m_start = m_tile * BLOCK_M
        n_start = n_tile * BLOCK_N
        if SPLIT_K:
            first_k = work // tiles * k_tiles_per_split
            last_k = tl.minimum(k_tiles, first_k + k_tiles_per_split)
        else:
            first_k = 0
            last_k = k_tiles
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k_tile in range(first_k, last_k):
            a = a_desc.load([m_start, k_tile * BLOCK_K])
            b = b_desc.load([n_start, k_tile * BLOCK_K])
            acc = tl.dot(a, b.T, acc)
        if SPLIT_K:
            m = m_start + tl.arange(0, BLOCK_M)[:, None]
            n = n_start + tl.arange(0, BLOCK_N)[None, :]
            offsets = (work // tiles * M + m).to(tl.int64) * N + n
            tl.store(partial_ptr + offsets, acc, mask=(m < M) & (n < N))
        elif SUBTILES == 2:
            # Half a tile at a time: half the shared memory for the result leaves room for another stage of loads.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            out_desc.store([m_start, n_start], left.to(out_desc.dtype))
            out_desc.store([m_start, n_start + BLOCK_N // 2], right.to(out_desc.dtype))
        else:
            out_desc.store([m_start, n_start], acc.to(out_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def _sum_splits(partial_ptr, out_ptr, out_stride, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the splits of K in a fixed order (deterministic), one row piece a program."""
    column_blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    cols = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLIT):
        acc += tl.load(partial_ptr + (row + split * M.to(tl.int64)) * N + cols, mask=cols < N, other=0.0)
    tl.store(out_ptr + row * out_stride + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


# Launch configurations of each kernel, by index VARIANT.
# BLOCK_N, BLOCK_K, num_warps
_GEMV = (
    (4, 1024, 4), (8, 512, 4), (2, 2048, 4), (1, 4096, 4), (8, 1024, 8), (16, 256, 4),
    (2, 1024, 4), (4, 2048, 8), (16, 512, 8),
)  # fmt: skip
# BLOCK_N, BLOCK_K, num_warps, num_stages
_NARROW = (
    (16, 256, 2, 4), (32, 256, 4, 4), (32, 128, 4, 6), (16, 128, 2, 6), (16, 512, 2, 3), (64, 128, 4, 5),
    (16, 256, 4, 8), (16, 512, 4, 5), (64, 256, 8, 3),
)  # fmt: skip
# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages, SUBTILES
_TILES = (
    (128, 256, 64, 8, 4, 2),
    (128, 128, 64, 8, 5, 1),
    (64, 128, 64, 4, 6, 1),
    (128, 256, 64, 8, 3, 1),
    (128, 128, 64, 4, 3, 2),
    (64, 256, 64, 4, 4, 1),
    (64, 128, 128, 4, 4, 1),
    (128, 128, 128, 8, 3, 2),
    (64, 64, 256, 4, 3, 1),
)


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _default_narrow(N: int, sms: int) -> int:
    """Deep enough that a multiprocessor has some 64 KB of b in flight, alone or with several programs."""
    return 6 if 16 * sms >= N else 0 if 64 * sms > N else 1


@functools.lru_cache(maxsize=4096)
def _default_split(tiles: int, steps: int, sms: int) -> int:
    """Into how many parts to cut K, of `steps` times 64.

    In steps of a tile of 128 x 128: a part's float32 sums take about 11 to write and read, the second kernel 9 to start.
    """
    parts = range(1, max(1, min(16, steps // 8)) + 1)
    return min(parts, key=lambda part: _cdiv(tiles * part, sms) * (steps / part + 11 * (part > 1)) + 9 * (part > 1))


def _default_tile(M: int, N: int, sms: int) -> int:
    if M <= 128:  # bound by reading b: 256 bytes of a row at a time
        return 6 if M <= 64 else 7
    # Rounds of tiles over the machine times the cost of a tile; two small tiles take about 1.15 times one large one.
    rounds_large = _cdiv(_cdiv(M, 128) * _cdiv(N, 256), sms)
    rounds_small = _cdiv(_cdiv(M, 128) * _cdiv(N, 128), sms)
    return 0 if 2 * rounds_large <= 1.15 * rounds_small else 1


def _copy_engine_reads(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def _copy_engine_writes(tensor: torch.Tensor) -> bool:
    """It writes whole 16 bytes, and so beyond the last column of a row that ends elsewhere."""
    return _copy_engine_reads(tensor) and tensor.shape[1] * tensor.element_size() % 16 == 0


def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, VARIANT=None, SPLIT=None, GROUP_M=8, PERSISTENT=True):
    """out = T(sum over k of a[m, k] * b[n, k]), fp32 accumulation, rounded once to nearest even.

    Shapes: a [M, K], b [N, K], out [M, N], unit last stride, any row stride; T bfloat16, float16 or float32 (IEEE
    products, without tensor cores).
    Mapping, by shape:
    - M = 1: a program per few rows of b, dot products in registers.
    - M <= 16: narrow tiles of b, pipelined pointer loads. float32 and rows that are not 16-byte aligned go the same
      way with larger tiles.
    - else: tensor copy engine, as many programs as multiprocessors (PERSISTENT) with tiles up to 128 x 256. Where tiles
      are few or fill the last round badly, K is split SPLIT ways into fp32 partial sums, added by a second kernel.
    VARIANT picks a row of the table of the kernel that the shape selects (None: by shape), so each value is valid for
    every shape. SPLIT = None or 0: by shape. GROUP_M: rows of tiles that share columns of b in L2.
    """
    M, N = out.shape
    K = a.shape[1]
    if M == 0 or N == 0:
        return
    if M == 1:
        block_n, block_k, warps = _GEMV[VARIANT or 0]
        _gemv[(_cdiv(N, block_n),)](a, b, out, b.stride(0), N, K, block_n, block_k, num_warps=warps)
        return
    sms = _sm_count(out.device)
    fp32 = a.dtype == torch.float32
    if M <= 16 or fp32 or not (_copy_engine_reads(a) and _copy_engine_reads(b) and _copy_engine_writes(out)):
        if fp32:
            block_m, block_n, block_k, warps, stages = (16, 32, 64, 4, 3) if M <= 16 else (64, 64, 16, 4, 3)
        elif M <= 16:  # bound by reading b: narrow tiles, so that every multiprocessor streams its own part of b
            variant = VARIANT if VARIANT is not None else _default_narrow(N, sms)
            block_m, (block_n, block_k, warps, stages) = 16, _NARROW[variant]
        else:
            block_m, block_n, block_k, warps, stages = 128, 128, 32, 8, 4
        grid = _cdiv(M, block_m) * _cdiv(N, block_n)
        _gemm_pointers[(grid,)](
            a,
            b,
            out,
            a.stride(0),
            b.stride(0),
            out.stride(0),
            M,
            N,
            K,
            block_m,
            block_n,
            block_k,
            K % block_k == 0,
            GROUP_M,
            num_warps=warps,
            num_stages=stages,
        )
        return

    variant = VARIANT if VARIANT is not None else _default_tile(M, N, sms)
    block_m, block_n, block_k, warps, stages, subtiles = _TILES[variant]
    tiles = _cdiv(M, block_m) * _cdiv(N, block_n)
    k_tiles = _cdiv(K, block_k)
    splits = SPLIT or _default_split(tiles, _cdiv(K, 64), sms)
    k_tiles_per_split = _cdiv(k_tiles, splits)
    splits = _cdiv(k_tiles, k_tiles_per_split)  # no split may be empty
    partial = torch.empty((splits, M, N), dtype=torch.float32, device=out.device) if splits > 1 else out
    work = tiles * splits
    _gemm_descriptors[(min(sms, work) if PERSISTENT else work,)](
        TensorDescriptor(a, [M, K], [a.stride(0), 1], [block_m, block_k]),
        TensorDescriptor(b, [N, K], [b.stride(0), 1], [block_n, block_k]),
        TensorDescriptor(out, [M, N], [out.stride(0), 1], [block_m, block_n // subtiles]),
        partial,
        M,
        N,
        K,
        splits,
        k_tiles_per_split,
        block_m,
        block_n,
        block_k,
        GROUP_M,
        splits > 1,
        subtiles,
        PERSISTENT and work > sms,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _sum_splits[(M * _cdiv(N, 1024),)](partial, out, out.stride(0), M, N, splits, 1024, num_warps=4)
