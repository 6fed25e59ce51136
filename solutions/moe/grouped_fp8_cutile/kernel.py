"""Products of FP8 codes for each group of rows, cuTile: sums go to float32 after each block of 128 columns."""

import functools
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

Int = ct.Constant[int]
Flag = ct.Constant[bool]
Columns = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
ZERO = ct.PaddingMode.ZERO

GROUP = 128  # columns that share a scale, and rows of b


@ct.function
def _rows_of_tile(offs, tile, rows, BINS: Int, TILE_M: Int):
    """Expert, first row and end of the expert's rows of a tile of groups that end at offs.

    Each block counts the tiles of all groups anew, which costs less than a launch that lists them. The rows after the last
    group are those of expert E, which has no weights. Of a tile past the last one, first and end are 0.
    """
    experts = offs.shape[0]
    group = ct.arange(BINS, dtype=ct.int32)
    ends = ct.where(group < experts, ct.gather(offs, group), rows)
    starts = ct.where(group <= experts, ct.gather(offs, group - 1), rows)  # before the first one there is nothing: zero
    tiles = (ends - starts + (TILE_M - 1)) // TILE_M
    tile_ends = ct.cumsum(tiles, axis=0)
    expert = ct.sum((tile_ends <= tile).astype(ct.int32))
    chosen = group == expert
    first = ct.sum(ct.where(chosen, starts + (tile - tile_ends + tiles) * TILE_M, 0))
    return expert, first, ct.sum(ct.where(chosen, ends, 0))


@ct.kernel
def _grouped(
    a,
    b,
    scale_a,
    scale_b,
    offs,
    out: Columns,
    tiles_m: int,
    rows_a_group: int,
    MASKED: Flag,
    BINS: Int,
    TILE_M: Int,
    TILE_N: Int,
    GROUP_M: Int,
    SWAP: Flag,
):
    """One tile of the product. MASKED: all groups have rows_a_group rows, of which the first offs[e] count.

    SWAP: the product is computed as out.T = b @ a.T, so that few rows cost only their own columns of a tensor-core product.
    """
    columns = out.shape[1]
    tiles_n = ct.cdiv(columns, TILE_N)
    # Tiles in bands of GROUP_M rows, column by column, so that those in flight together share operands in L2.
    band = ct.bid(0) // (GROUP_M * tiles_n)
    band_rows = ct.minimum(tiles_m - band * GROUP_M, GROUP_M)
    tile_m = band * GROUP_M + ct.bid(0) % (GROUP_M * tiles_n) % band_rows
    tile_n = ct.bid(0) % (GROUP_M * tiles_n) // band_rows
    # Rows below `used` are multiplied, those from there to below `end` are zeros.
    if MASKED:
        tiles_a_group = ct.cdiv(rows_a_group, TILE_M)
        expert = tile_m // tiles_a_group
        end = (expert + 1) * rows_a_group
        first = expert * rows_a_group + tile_m % tiles_a_group * TILE_M
        used = expert * rows_a_group + ct.gather(offs, expert)
    else:
        expert, first, end = _rows_of_tile(offs, tile_m, a.shape[0], BINS, TILE_M)
        used = ct.where(expert < offs.shape[0], end, first)
    if first < end:
        tiles_k = ct.where(first < used, ct.cdiv(a.shape[1], GROUP), 0)
        rows = first + ct.arange(TILE_M, dtype=ct.int32)
        cols = tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        lanes = ct.arange(GROUP, dtype=ct.int32)
        # A tile of b does not cross a block, so its scale is one number.
        b_block = tile_n * TILE_N // GROUP
        if SWAP:
            acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
            for k in range(tiles_k):
                b_tile = ct.load(b, (expert, tile_n, k), (1, TILE_N, GROUP), padding_mode=ZERO)
                a_tile = ct.gather(a, (rows[None, :], k * GROUP + lanes[:, None]))
                part = ct.mma(b_tile.reshape((TILE_N, GROUP)), a_tile, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
                scale = ct.gather(scale_a, (rows, k)) * ct.gather(scale_b, (expert, b_block, k))
                acc = acc + part * scale[None, :]
            acc = ct.where((rows < used)[None, :], acc, 0.0).astype(out.dtype)
            inside = (rows < end)[None, :] & (cols < columns)[:, None]
            ct.scatter(out, (rows[None, :], cols[:, None]), acc, mask=inside, check_bounds=False)
        else:
            acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
            for k in range(tiles_k):
                a_tile = ct.gather(a, (rows[:, None], k * GROUP + lanes[None, :]))
                b_tile = ct.load(b, (expert, k, tile_n), (1, GROUP, TILE_N), order=(0, 2, 1), padding_mode=ZERO)
                part = ct.mma(a_tile, b_tile.reshape((GROUP, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
                scale = ct.gather(scale_a, (rows, k)) * ct.gather(scale_b, (expert, b_block, k))
                acc = acc + part * scale[:, None]
            acc = ct.where((rows < used)[:, None], acc, 0.0).astype(out.dtype)
            inside = (rows < end)[:, None] & (cols < columns)[None, :]
            ct.scatter(out, (rows[:, None], cols[None, :]), acc, mask=inside, check_bounds=False)


class Config(NamedTuple):
    """Tile sizes, warps that compute, blocks per SM; swap: rows of b are the rows of the tensor-core product."""

    tile_m: int
    tile_n: int
    warps: int
    occupancy: int
    swap: bool


CONFIGS = {
    "m16_n64": Config(16, 64, 4, 3, True),
    "m16_n128": Config(16, 128, 8, 2, True),
    "m32_n64": Config(32, 64, 4, 3, True),
    "m64_n64": Config(64, 64, 4, 2, False),
    "m64_n128": Config(64, 128, 8, 1, True),
    "m128_n64": Config(128, 64, 8, 1, False),
    "m128_n128": Config(128, 128, 8, 1, False),
}


@functools.lru_cache
def _kernel(warps: int, occupancy: int) -> ct.kernel:
    return _grouped.replace_hints(num_worker_warps=warps, occupancy=occupancy)


def _choose(rows: int) -> str:
    """A CONFIGS name: the smallest tile that holds the rows that a group has on average, or 128."""
    return "m16_n64" if rows <= 16 else "m32_n64" if rows <= 32 else "m64_n64" if rows <= 64 else "m128_n128"


def _launch(a, b, scale_a, scale_b, offs, out, rows_a_group: int, tiles_m: int, config: Config, GROUP_M: int) -> None:
    """a [rows, K], scale_a [rows, blocks] and out [rows, N]; rows_a_group: 0 where groups end at offs."""
    experts, n = b.shape[:2]
    bins = 1 << experts.bit_length()  # more than there are experts
    args = (
        a,
        b,
        scale_a,
        scale_b,
        offs,
        out,
        tiles_m,
        rows_a_group,
        rows_a_group > 0,
        bins,
        config.tile_m,
        config.tile_n,
        GROUP_M,
        config.swap,
    )
    grid = (tiles_m * -(-n // config.tile_n), 1, 1)
    ct.launch(torch.cuda.current_stream(), grid, _kernel(config.warps, config.occupancy), args)


def run_grouped(a, b, scale_a, scale_b, offs, out, *, CONFIG: str | None = None, GROUP_M: int = 8) -> None:
    """out[s] = bfloat16(sum over blocks of scale_a[s] * scale_b[e] * (products of the block)), rows s of group e, in float32.

    a: [S, K] and b: [E, N, K] in float8_e4m3fn, scale_a: [S, ceil(K / 128)] of any strides and scale_b:
    [E, ceil(N / 128), ceil(K / 128)] in float32, offs: [E] int32, ascending, out: [S, N] in bf16; all but scale_a contiguous.
    Group e has the rows from offs[e - 1] to below offs[e]; rows from the last offset on are zeros. Rows of each group are cut
    into tiles; the grid is a bound of their number, so nothing is read back.

    CONFIG names an entry of CONFIGS; None chooses by the rows that a group has on average. GROUP_M row tiles share weights.
    """
    s = a.shape[0]
    experts = b.shape[0]
    if not out.numel():
        return
    config = CONFIGS[CONFIG or _choose(-(-s // experts))]
    tiles_m = (s + min(experts + 1, s) * (config.tile_m - 1)) // config.tile_m
    _launch(a, b, scale_a, scale_b, offs, out, 0, tiles_m, config, GROUP_M)


def run_masked(a, b, scale_a, scale_b, counts, out, *, CONFIG: str | None = None, GROUP_M: int = 8) -> None:
    """As `run_grouped`, for a: [E, M, K], scale_a: [E, M, ceil(K / 128)] and out: [E, M, N], contiguous, and counts: [E] int32.

    The first counts[e] rows of a group are multiplied; the others are zeros, whatever a has there.
    """
    if not out.numel():
        return
    experts, m, n = out.shape
    config = CONFIGS[CONFIG or _choose(m)]
    flat = a.view(experts * m, -1), b, scale_a.view(experts * m, -1), scale_b, counts, out.view(experts * m, n)
    _launch(*flat, m, experts * -(-m // config.tile_m), config, GROUP_M)
