"""Softmax over the last axis, Triton."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers (32 fp32 values a thread at 32 warps); longer rows are read twice.
MAX_REGISTER_COLUMNS = 32768
# Up to this many such rows, about one a multiprocessor would leave the machine idle: they are cut into pieces.
FEW_ROWS = 128
PIECE_COLUMNS = 4096


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


def run(x: torch.Tensor, out: torch.Tensor, *, BLOCK_M=None, LOOP_BLOCK=16384, num_warps=None):
    """out = T(exp(x - max(x)) / sum(exp(x - max(x)))) over the last axis, in fp32, rounded to nearest even.

    Shapes: x, out [M, N], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so x is read once. Rows longer than
    MAX_REGISTER_COLUMNS (vocabularies):
    - few rows: each row in pieces of PIECE_COLUMNS over many programs, one kernel for the statistics of the pieces and
      one for the result; BLOCK_M, LOOP_BLOCK and num_warps do not apply.
    - else one program a row loops over blocks of LOOP_BLOCK: an online maximum and sum, then the result. In both, the
      second read of the row comes mostly from L2.
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
