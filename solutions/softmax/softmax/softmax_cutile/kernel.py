"""Softmax over the last axis: rows in registers, longer ones cut into pieces that many blocks share."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # values that one block keeps in registers
# Columns of a row that is cut: few registers a thread, so that several blocks a multiprocessor keep loads in flight.
PIECE_N = 4096
FEW_ROWS = 128  # of which pieces fill the GPU better
LOWEST = -3.4028234663852886e38
MAX_SHARED_N = 131072  # values that the eight blocks of a cluster keep in registers
LOG2E = 1.4426950408889634


@ct.kernel
def _softmax_rows(x: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False, padding_value=-float("inf")).astype(ct.float32)
    # A row of -inf only, or with +inf or NaN in it, becomes NaN through inf - inf, as in PyTorch.
    exps = ct.exp(values - ct.max(values, axis=1, keepdims=True))
    inverse = 1.0 / ct.sum(exps, axis=1, keepdims=True)
    ct.scatter(out, (rows, cols), (exps * inverse).astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _piece_stats(x: Rows, stats, TILE_N: Int, PIECES: Int):
    n = x.shape[1]
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    cols = piece * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    values = ct.gather(x, (row, cols), mask=cols < n, check_bounds=False, padding_value=-float("inf"))
    values = values.astype(ct.float32)
    top = ct.maximum(ct.max(values), LOWEST)  # finite for a piece of -inf, whose sum is then 0
    ct.scatter(stats, (0, row, piece), top)
    ct.scatter(stats, (1, row, piece), ct.sum(ct.exp(values - top)))


@ct.kernel
def _piece(x: Rows, stats, out: Rows, TILE_N: Int, PIECES: Int, TILE_PIECES: Int):
    n = x.shape[1]
    index = ct.num_blocks(0) - 1 - ct.bid(0)  # backwards: the rows that were read last are still in L2
    row = index // PIECES
    cols = index % PIECES * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = cols < n
    values = ct.gather(x, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    # Every block of a row combines the statistics of all its pieces, in the same order.
    pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
    known = pieces < PIECES
    tops = ct.gather(stats, (0, row, pieces), mask=known, check_bounds=False, padding_value=LOWEST)
    totals = ct.gather(stats, (1, row, pieces), mask=known, check_bounds=False, padding_value=0.0)
    row_top = ct.max(tops)
    inverse = 1.0 / ct.sum(totals * ct.exp(tops - row_top))
    result = (ct.exp(values - row_top) * inverse).astype(out.dtype)
    ct.scatter(out, (row, cols), result, mask=inside, check_bounds=False)


@ct.function
def _exp2(values):
    return ct.exp2(values, flush_to_zero=True)


@ct.function
def _base(top):
    """slope and offset: 2 ** (slope * x - offset) is a safe exp(x - top), up to a power of two, in one multiply-add.

    A whole offset is exact, so values of several offsets can be put together. From 2 ** 20 on all smaller 16-bit values
    are at least 4096 smaller: any base gives 0 and 1, and 1 cannot overflow. Nothing is subtracted while all is -inf.
    """
    safe = ct.where(top == -float("inf"), 0.0, top)
    small = ct.abs(safe) < 1048576.0
    return ct.where(small, LOG2E, 1.0), ct.where(small, ct.floor(safe * LOG2E), safe)


@ct.function
def _rescale(top, new_top):
    """What turns exponentials in the base of top into those in the base of new_top, which is not smaller."""
    _slope, offset = _base(top)
    _new_slope, new_offset = _base(new_top)
    # The second term matters where new_top alone is beyond 2 ** 20: there the first may be positive. Where both tops are
    # -inf it is NaN, which minimum ignores.
    return _exp2(ct.minimum(offset - new_offset, top - new_top + 1.0))


@ct.function
def _join(top_a, total_a, top_b, total_b):
    """Maximum and sum of two parts of a row. NaN and +inf need only reach a total: a row whose sum is NaN is NaN."""
    top = ct.maximum(top_a, top_b)
    return top, total_a * _rescale(top_a, top) + total_b * _rescale(top_b, top)


@ct.function
def _widen(folded, LANES, FOLD):
    """Each of [LANES // FOLD] for the FOLD lanes that it stands for, as [LANES, 1]."""
    return ct.reshape(ct.broadcast_to(folded[:, None], (LANES // FOLD, FOLD)), (LANES, 1))


@ct.kernel
def _softmax_cluster(x: Rows, out: Rows, LANES: Int, VALUES: Int, FOLD: Int):
    """A row in the registers of a cluster: [LANES, VALUES], of which a block has LANES / 8 lanes.

    FOLD neighbouring lanes, of which a thread has 8, share a maximum.
    """
    n = x.shape[1]
    row = ct.bid(0)
    cols = ct.arange(VALUES, dtype=ct.int32)[None, :] * LANES + ct.arange(LANES, dtype=ct.int32)[:, None]
    inside = cols < n
    loaded = ct.gather(x, (row, cols), mask=inside, check_bounds=False, padding_value=-float("inf"))
    # Exponentials are computed once, relative to the maximum of their lanes, so that blocks, whose meetings are what
    # takes long, meet once: for the maximum and the sum of the row together.
    own = ct.max(ct.reshape(ct.max(loaded, axis=1), (LANES // FOLD, FOLD)), axis=1).astype(ct.float32)
    slope, offset = _base(own)
    exps = _exp2(loaded.astype(ct.float32) * _widen(slope, LANES, FOLD) - _widen(offset, LANES, FOLD))
    total = ct.sum(ct.reshape(ct.sum(exps, axis=1), (LANES // FOLD, FOLD)), axis=1)
    top, row_total = ct.reduce((own, total), 0, _join, (-float("inf"), 0.0))
    factor = _rescale(own, top) * (1.0 / row_total)
    result = (exps * _widen(factor, LANES, FOLD)).astype(out.dtype)
    ct.scatter(out, (row, cols), result, mask=inside, check_bounds=False)


# CLUSTER blocks on neighbouring multiprocessors share one tile, so a row of up to CLUSTER * MAX_TILE_N values fits.
_ROWS = {
    (warps, cluster): _softmax_rows.replace_hints(num_worker_warps=warps, num_ctas=cluster)
    for warps in (4, 8)
    for cluster in (1, 2, 4, 8)
}
_STATS = {warps: _piece_stats.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_PIECE = {warps: _piece.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
# Three blocks a multiprocessor: 4 warps of 128 values a thread, or 8 of 64.
_SHARED = {warps: _softmax_cluster.replace_hints(num_worker_warps=warps, num_ctas=8, occupancy=3) for warps in (4, 8)}


def _is_wide(x: torch.Tensor, out: torch.Tensor) -> bool:
    """True where all rows of a 16-bit T can be read and written 16 bytes at a time, on a GPU with clusters."""
    size = x.element_size()
    odd = x.shape[1] | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // size
    return size == 2 and odd % 8 == 0 and torch.cuda.get_device_capability(x.device)[0] >= 9


def run(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
    CLUSTER: int = 1,
    PIECE: int = PIECE_N,
    SHARED: int = 4,
    FOLD: int = 8,
) -> None:
    """out[M, N] = T(softmax(x, dim=-1)) for x[M, N] in T = bf16, fp16 or fp32; fp32 inside, maximum subtracted.

    Rows may be further apart than N elements. Up to 16384 columns (CLUSTER times as many with CLUSTER blocks a row) a
    row is read once and kept in registers, TILE_M rows a block of WARPS (4 or 8) warps. So is a longer row of a 16-bit
    T that fills at least three quarters of the registers of a cluster of eight blocks of SHARED (4 or 8; 0: never)
    warps, FOLD (1 or 8) lanes to a maximum, when there are more than FEW_ROWS. Others are cut into pieces of PIECE columns
    and read twice: one kernel leaves the maximum and the sum of each piece, a second one the result.

    None chooses by shape: TILE_M so that a block has at least 16 bytes a thread to load; 8 warps for long rows, and
    for any row that fills them when there are too few rows to fill the GPU; CLUSTER = 1.
    """
    m, n = x.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    if WARPS is None:
        WARPS = 8 if tile_n > 4096 or (m <= 256 and tile_n >= 2048) else 4
    stream = torch.cuda.current_stream()
    if tile_n <= MAX_TILE_N * CLUSTER:
        TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, MAX_TILE_N // tile_n))
        ct.launch(stream, (-(-m // TILE_M), 1, 1), _ROWS[WARPS, CLUSTER], (x, out, TILE_M, tile_n))
        return
    if SHARED and m > FEW_ROWS and 3 * MAX_SHARED_N // 4 < n <= MAX_SHARED_N and _is_wide(x, out):
        lanes = MAX_SHARED_N * SHARED // 64
        ct.launch(stream, (m, 1, 1), _SHARED[SHARED], (x, out, lanes, 64 // SHARED, FOLD))
        return
    pieces = -(-n // PIECE)
    stats = torch.empty((2, m, pieces), dtype=torch.float32, device=x.device)
    ct.launch(stream, (m * pieces, 1, 1), _STATS[WARPS], (x, stats, PIECE, pieces))
    tile_pieces = 1 << (pieces - 1).bit_length()
    ct.launch(stream, (m * pieces, 1, 1), _PIECE[WARPS], (x, stats, out, PIECE, pieces, tile_pieces))
