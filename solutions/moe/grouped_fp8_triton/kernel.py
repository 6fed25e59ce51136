"""Products of FP8 codes for each group of rows, Triton: sums go to float32 after each block of 128 columns."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = tl.constexpr(128)  # columns that share a scale, and rows of b


@triton.jit
def _tile_coordinates(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, down a column first: neighbours in time share rows and weights in L2."""
    group_size = GROUP_M * n_tiles
    first_m = tile // group_size * GROUP_M
    rows = tl.minimum(m_tiles - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def _rows_of_tile(offs_ptr, tile, S, E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of the expert's rows of a tile of groups that end at offs.

    Each program counts the tiles of all groups anew, which costs less than a launch that lists them. The rows after the last
    group are those of expert E, which has no weights. Of a tile past the last one, first and end are 0.
    """
    group = tl.arange(0, BINS)
    ends = tl.where(group < E, tl.load(offs_ptr + group, mask=group < E, other=0), S)
    starts = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= E), other=0)
    starts = tl.where(group <= E, starts, S)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    chosen = group == expert
    first = tl.sum(tl.where(chosen, starts + (tile - tile_ends + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(chosen, ends, 0), axis=0)


@triton.jit(do_not_specialize=["S", "rows_a_group", "m_tiles"])
def _grouped(
    a,
    b,
    scale_a_ptr,
    scale_b_ptr,
    offs_ptr,
    out_ptr,
    scale_a_row,
    scale_a_column,
    S,
    N,
    K,
    rows_a_group,
    m_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of the product. MASKED: all groups have rows_a_group rows, of which the first offs[e] count."""
    m_tile, n_tile = _tile_coordinates(tl.program_id(0), m_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    # Rows below `used` are multiplied, those from there to below `end` are zeros.
    if MASKED:
        tiles_a_group = tl.cdiv(rows_a_group, BLOCK_M)
        expert = m_tile // tiles_a_group
        end = (expert + 1) * rows_a_group
        first = expert * rows_a_group + m_tile % tiles_a_group * BLOCK_M
        used = expert * rows_a_group + tl.load(offs_ptr + expert)
    else:
        expert, first, end = _rows_of_tile(offs_ptr, m_tile, S, E, BINS, BLOCK_M)
        used = tl.where(expert < E, end, first)
    if first >= end:
        return
    k_blocks = tl.cdiv(K, GROUP)
    row = first + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    scale_a_ptrs = scale_a_ptr + row.to(tl.int64) * scale_a_row
    # A tile of b does not cross a block, so its scale is one number.
    b_block = expert.to(tl.int64) * tl.cdiv(N, GROUP) + n_tile * BLOCK_N // GROUP
    scale_b_row_ptr = scale_b_ptr + b_block * k_blocks
    if not COPY_ENGINE:
        a_ptrs = a + row.to(tl.int64)[:, None] * K + k[None, :]
        b_ptrs = b + (expert.to(tl.int64) * N + n)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for block in range(0, tl.where(first < used, k_blocks, 0)):
        if COPY_ENGINE:  # what it reads past the end, of the next group, is not stored
            codes_a = a.load([first, block * GROUP])
            codes_b = b.load([expert * N + n_tile * BLOCK_N, block * GROUP]).T
        else:
            inside_a = (row < used)[:, None]
            inside_b = (n < N)[None, :]
            if not EVEN_K:
                inside_a = inside_a & (k < K - block * GROUP)[None, :]
                inside_b = inside_b & (k < K - block * GROUP)[:, None]
            codes_a = tl.load(a_ptrs, mask=inside_a, other=0.0)
            codes_b = tl.load(b_ptrs, mask=inside_b, other=0.0)
            a_ptrs += GROUP
            b_ptrs += GROUP
        scale = tl.load(scale_a_ptrs + block * scale_a_column, mask=row < used, other=0.0)
        scale *= tl.load(scale_b_row_ptr + block)
        acc += tl.dot(codes_a, codes_b) * scale[:, None]
    acc = tl.where((row < used)[:, None], acc, 0.0)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (n < N)[None, :])


# BLOCK_M -> BLOCK_N, num_warps, num_stages of each VARIANT
_CONFIGS = {
    16: ((64, 4, 4), (32, 4, 6), (128, 4, 4)),
    32: ((64, 4, 4), (32, 4, 6), (128, 4, 4)),
    64: ((128, 4, 4), (64, 4, 5), (128, 4, 3)),
    128: ((128, 8, 4), (128, 8, 3), (128, 4, 4)),
}


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _default_rows(rows: int) -> int:
    """The smallest tile that holds the rows that a group has on average, or 128."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


def _launch(a, b, scale_a, scale_b, offs, out, scale_a_strides, rows_a_group, block_m, m_tiles, VARIANT, GROUP_M):
    """a [rows, K] and out [rows, N]; rows_a_group: 0 where groups end at offs."""
    S, K = a.shape
    E, N = b.shape[:2]
    block_n, warps, stages = _CONFIGS[block_m][VARIANT or 0]
    engine = block_m >= 64 and K % 16 == 0 and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
    _grouped[(m_tiles * _cdiv(N, block_n),)](
        TensorDescriptor(a, [S, K], [K, 1], [block_m, 128]) if engine else a,
        TensorDescriptor(b, [E * N, K], [K, 1], [block_n, 128]) if engine else b,
        scale_a,
        scale_b,
        offs,
        out,
        *scale_a_strides,
        S,
        N,
        K,
        rows_a_group,
        m_tiles,
        E,
        max(16, 1 << E.bit_length()),  # more than E
        rows_a_group > 0,
        block_m,
        block_n,
        K % 128 == 0,
        engine,
        GROUP_M,
        num_warps=warps,
        num_stages=stages,
    )


def run_grouped(a, b, scale_a, scale_b, offs, out, *, BLOCK_M=None, VARIANT=None, GROUP_M=8):
    """out[s] = bfloat16(sum over blocks of scale_a[s] * scale_b[e] * (products of the block)), rows s of group e, in float32.

    Shapes: a [S, K] and b [E, N, K] in float8_e4m3fn, scale_a [S, ceil(K / 128)] of any strides and scale_b
    [E, ceil(N / 128), ceil(K / 128)] in float32, offs [E] int32, ascending, out [S, N] in bfloat16; all but scale_a contiguous.
    Group e has the rows from offs[e - 1] to below offs[e]; rows from the last offset on are zeros.
    Mapping: rows of each group are cut into tiles of BLOCK_M; the grid is a bound of their number, so nothing is read back.
    BLOCK_M = None: by the rows that a group has on average. VARIANT picks a row of the table of BLOCK_M; None: the first.
    Tiles of 64 rows and more go through the tensor copy engine where rows are aligned to 16 bytes.
    """
    S, N = out.shape
    E = b.shape[0]
    if S == 0 or N == 0:
        return
    block_m = BLOCK_M or _default_rows(_cdiv(S, E))
    m_tiles = (S + min(E + 1, S) * (block_m - 1)) // block_m
    strides = (scale_a.stride(0), scale_a.stride(1))
    _launch(a, b, scale_a, scale_b, offs, out, strides, 0, block_m, m_tiles, VARIANT, GROUP_M)


def run_masked(a, b, scale_a, scale_b, counts, out, *, BLOCK_M=None, VARIANT=None, GROUP_M=8):
    """As `run_grouped`, for a [E, M, K], scale_a [E, M, ceil(K / 128)] and out [E, M, N], contiguous, and counts [E] int32.

    The first counts[e] rows of a group are multiplied; the others are zeros, and what a has there is not read for them.
    """
    E, M, N = out.shape
    if M == 0 or N == 0 or E == 0:
        return
    block_m = BLOCK_M or _default_rows(M)
    strides = (scale_a.shape[2], 1)
    rows = a.view(E * M, a.shape[2])
    _launch(rows, b, scale_a, scale_b, counts, out, strides, M, block_m, E * _cdiv(M, block_m), VARIANT, GROUP_M)
