"""Softmax over the last axis, Triton."""

import os

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers (32 fp32 values a thread at 32 warps); longer rows are read twice.
MAX_REGISTER_COLUMNS = 32768
# Up to this many such rows, about one a multiprocessor would leave the machine idle: they are cut into pieces.
FEW_ROWS = 128
PIECE_COLUMNS = 4096
CLUSTER = 8  # blocks that share a long row and meet at the cluster's barrier
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["M"])
def _softmax_tile(
    x_ptr, out_ptr, x_stride, out_stride, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first").to(
        tl.float32
    )
    # A row of -inf gives -inf - -inf = NaN and a +inf gives inf - inf = NaN, as in PyTorch: no special case.
    exps = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    result = exps / tl.sum(exps, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_long_row(x_ptr, out_ptr, x_stride, out_stride, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    lanes = tl.arange(0, BLOCK_N)
    row_max = float("-inf")
    row_sum = 0.0
    # Online maximum and sum. The next block is asked for before this one is reduced, to keep memory busy.
    following = tl.load(x_ptr + lanes, mask=lanes < N, other=float("-inf"))
    for start in range(0, N, BLOCK_N):
        x = following.to(tl.float32)
        cols = start + BLOCK_N + lanes
        following = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # While everything seen is -inf subtract 0: -inf - -inf would make the sum NaN before the row is known.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max
    # Backwards: the end of the row was read last and is still in cache.
    for back in range(0, N, BLOCK_N):
        cols = (N - 1) // BLOCK_N * BLOCK_N - back + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        tl.store(out_ptr + cols, (tl.exp(x - row_max) / row_sum).to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _softmax_piece_stats(x_ptr, stats_ptr, x_stride, N: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr):
    pid = tl.program_id(0)
    cols = pid % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (pid // PIECES).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    piece_max = tl.max(x, axis=0)
    shift = tl.where(piece_max == float("-inf"), 0.0, piece_max)
    tl.store(stats_ptr + 2 * pid, piece_max)
    tl.store(stats_ptr + 2 * pid + 1, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def _softmax_piece(
    x_ptr,
    stats_ptr,
    out_ptr,
    x_stride,
    out_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    pid = tl.program_id(0)
    cols = pid % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (pid // PIECES).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    # Every program of a row combines the statistics of all pieces, in the same order.
    pieces = tl.arange(0, BLOCK_PIECES)
    stats_ptrs = stats_ptr + 2 * (row * PIECES + pieces)
    maxima = tl.load(stats_ptrs, mask=pieces < PIECES, other=float("-inf"))
    sums = tl.load(stats_ptrs + 1, mask=pieces < PIECES, other=0.0)
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    result = tl.exp(x - row_max) / row_sum
    tl.store(out_ptr + row * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _exp2(x):
    """2 ** x; results below 2 ** -126 become 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softmax_cluster(
    x_ptr,
    stats_ptr,
    out_ptr,
    x_stride,
    out_stride,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """One row in the registers of a cluster of BLOCKS blocks of LANES threads, 8 * REPEAT values a thread."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    cols = (
        blocks[:, None, None, None] * (LANES * REPEAT * 8)
        + tl.arange(0, LANES)[None, :, None, None] * 8
        + tl.arange(0, REPEAT)[None, None, :, None] * (LANES * 8)
        + tl.arange(0, 8)[None, None, None, :]
    )
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_first")
    # Each thread subtracts its own maximum, so that nobody waits before the exponentials, which are computed once.
    own = tl.max(tl.max(x, axis=3), axis=2).to(tl.float32)
    safe = tl.where(own == float("-inf"), 0.0, own)  # -inf - -inf would make the sum NaN before the row is known
    # exp(x - own) = 2 ** (slope * x - offset), one multiply-add. From 2 ** 20 on it would lose all precision, or
    # overflow; but there all smaller 16-bit values are at least 4096 smaller, and any base gives 0 and 1.
    slope = tl.where(tl.abs(safe) < 1048576.0, LOG2E, 1.0)
    offset = safe * slope
    undo = _exp2(-tl.fma(safe, slope, -offset))  # what the rounding of offset did
    slopes = tl.broadcast_to(slope[:, :, None, None], x.shape)
    offsets = tl.broadcast_to(-offset[:, :, None, None], x.shape)
    exps = _exp2(tl.fma(x.to(tl.float32), slopes, offsets))
    total = tl.sum(tl.sum(exps, axis=3), axis=2) * undo
    top = tl.max(own, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * _exp2((own - shift[:, None]) * LOG2E), axis=1)
    stats_ptr += row * (2 * BLOCKS)
    tl.store(stats_ptr + blocks, top)
    tl.store(stats_ptr + BLOCKS + blocks, total)
    # All threads of the blocks of the row meet: what they stored before is visible after.
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    row_top = tl.load(stats_ptr, volatile=True)
    for i in tl.static_range(1, BLOCKS):
        row_top = tl.maximum(row_top, tl.load(stats_ptr + i, volatile=True))
    row_sum = 0.0
    for i in tl.static_range(BLOCKS):
        block_top = tl.load(stats_ptr + i, volatile=True)
        row_sum += tl.load(stats_ptr + BLOCKS + i, volatile=True) * _exp2((block_top - row_top) * LOG2E)
    factor = undo * _exp2((own - row_top) * LOG2E) * (1.0 / row_sum)
    result = (exps * factor[:, :, None, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + cols, result, mask=cols < N, eviction_policy="evict_first")


def _cluster_repeat(x: torch.Tensor, out: torch.Tensor, warps: int) -> int:
    """REPEAT of _softmax_cluster for these rows, or 0 where another kernel is right for them."""
    N = x.shape[1]
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.get_device_capability(x.device)[0] < 9:
        return 0  # no clusters
    vectors = N | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // x.element_size()
    if x.element_size() != 2 or vectors % 8 != 0:
        return 0
    width = CLUSTER * warps * 32 * 8
    repeat = 1 << ((N + width - 1) // width - 1).bit_length()
    # At most 128 values a thread fit in registers; a cluster that is a quarter empty does not pay.
    return repeat if repeat * 8 <= 128 and 3 * width * repeat < 4 * N else 0


def run(x: torch.Tensor, out: torch.Tensor, *, BLOCK_M=None, LOOP_BLOCK=16384, num_warps=None, CLUSTER_WARPS=4):
    """out = T(exp(x - max(x)) / sum(exp(x - max(x)))) over the last axis, in fp32, rounded to nearest even.

    Shapes: x, out [M, N], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so x is read once. Rows longer than
    MAX_REGISTER_COLUMNS (vocabularies):
    - few rows: each row in pieces of PIECE_COLUMNS over many programs, one kernel for the statistics of the pieces and
      one for the result; BLOCK_M, LOOP_BLOCK and num_warps do not apply.
    - else, where it fits (compute capability 9, 16-bit T, whole aligned vectors), a row stays in the registers of
      CLUSTER blocks of CLUSTER_WARPS warps (0: never), which exchange their maxima and sums; x is read once.
    - else one program a row loops over blocks of LOOP_BLOCK: an online maximum and sum, then the result. Here and
      with pieces, the second read of the row comes mostly from L2.
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 16 values a thread.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    if N > MAX_REGISTER_COLUMNS and M <= FEW_ROWS:
        pieces = (N + PIECE_COLUMNS - 1) // PIECE_COLUMNS
        stats = torch.empty((M, pieces, 2), dtype=torch.float32, device=x.device)
        _softmax_piece_stats[(M * pieces,)](x, stats, x.stride(0), N, PIECE_COLUMNS, pieces, num_warps=8)
        _softmax_piece[(M * pieces,)](
            x,
            stats,
            out,
            x.stride(0),
            out.stride(0),
            N,
            PIECE_COLUMNS,
            pieces,
            1 << (pieces - 1).bit_length(),
            num_warps=8,
        )
        return
    repeat = _cluster_repeat(x, out, CLUSTER_WARPS) if N > MAX_REGISTER_COLUMNS and CLUSTER_WARPS else 0
    if repeat:
        stats = torch.empty((M, 2, CLUSTER), dtype=torch.float32, device=x.device)
        _softmax_cluster[(M,)](
            x,
            stats,
            out,
            x.stride(0),
            out.stride(0),
            N,
            CLUSTER,
            CLUSTER_WARPS * 32,
            repeat,
            num_warps=CLUSTER_WARPS,
            num_ctas=CLUSTER,
            maxnreg={4: 168, 8: 80}[CLUSTER_WARPS],
        )
        return
    if N > MAX_REGISTER_COLUMNS:
        _softmax_long_row[(M,)](
            x, out, x.stride(0), out.stride(0), N, LOOP_BLOCK, num_warps=num_warps or min(32, max(4, LOOP_BLOCK // 512))
        )
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    warps = num_warps or min(32, max(1, block_m * block_n // 512))
    _softmax_tile[((M + block_m - 1) // block_m,)](
        x, out, x.stride(0), out.stride(0), M, N, block_m, block_n, num_warps=warps
    )
