"""out = a @ b.T for a linear layer: tensor-core tiles fed by TMA, persistent blocks, split K where tiles are few."""

import functools
import math
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

Int = ct.Constant[int]
Flag = ct.Constant[bool]
Columns = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
ZERO = ct.PaddingMode.ZERO

SUM_TILE = 1024


@ct.function
def _dot_transposed(x, y, i, j, first, last, TILE_I: Int, TILE_J: Int, TILE_K: Int):
    """Tile (i, j) of x @ y.T over the K tiles first..last - 1; the compiler pipelines the loads through TMA."""
    acc = ct.zeros((TILE_I, TILE_J), dtype=ct.float32)
    for k in range(first, last):
        x_tile = ct.load(x, (i, k), (TILE_I, TILE_K), padding_mode=ZERO)
        y_tile = ct.load(y, (k, j), (TILE_K, TILE_J), order=(1, 0), padding_mode=ZERO)
        acc = ct.mma(x_tile, y_tile, acc)
    return acc


@ct.kernel
def _gemm(a, b, out, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, SPLIT_K: Int, SWAP: Flag):
    tiles_m = ct.cdiv(a.shape[0], TILE_M)
    tiles_n = ct.cdiv(b.shape[0], TILE_N)
    tiles_k = ct.cdiv(a.shape[1], TILE_K)
    for work in range(ct.bid(0), tiles_m * tiles_n * SPLIT_K, ct.num_blocks(0)):
        # Tiles in bands of GROUP_M rows, column by column, so that those in flight together share operands in L2.
        tile = work // SPLIT_K
        band = tile // (GROUP_M * tiles_n)
        band_rows = ct.minimum(tiles_m - band * GROUP_M, GROUP_M)
        tile_m = band * GROUP_M + tile % (GROUP_M * tiles_n) % band_rows
        tile_n = tile % (GROUP_M * tiles_n) // band_rows
        split = work % SPLIT_K
        first, last = 0, tiles_k
        if SPLIT_K > 1:
            share = ct.cdiv(tiles_k, SPLIT_K)
            first = split * share
            last = ct.minimum(first + share, tiles_k)
        if SWAP:  # out.T = b @ a.T, see run
            acc = _dot_transposed(b, a, tile_n, tile_m, first, last, TILE_N, TILE_M, TILE_K)
            if SPLIT_K > 1:
                acc = acc.reshape((1, TILE_N, TILE_M))
                ct.store(out, (split, tile_n, tile_m), acc, order=(0, 2, 1))
            else:
                ct.store(out, (tile_n, tile_m), acc.astype(out.dtype), order=(1, 0))
        else:
            acc = _dot_transposed(a, b, tile_m, tile_n, first, last, TILE_M, TILE_N, TILE_K)
            if SPLIT_K > 1:
                ct.store(out, (split, tile_m, tile_n), acc.reshape((1, TILE_M, TILE_N)))
            else:
                ct.store(out, (tile_m, tile_n), acc.astype(out.dtype))


@ct.kernel
def _sum_splits(partial, out: Columns, SPLIT_K: Int, TILE: Int):
    n = out.shape[1]
    tiles_n = ct.cdiv(n, TILE)
    row = ct.bid(0) // tiles_n
    cols = ct.bid(0) % tiles_n * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < n
    total = ct.zeros((TILE,), dtype=ct.float32)
    for split in ct.static_iter(range(SPLIT_K)):  # always in this order: the result is deterministic
        total = total + ct.gather(partial, (split, row, cols), mask=inside, check_bounds=False)
    ct.scatter(out, (row, cols), total.astype(out.dtype), mask=inside, check_bounds=False)


class Config(NamedTuple):
    """Tile sizes, blocks of a cluster that share one tile (and its operands), warps that compute, blocks per SM."""

    tile_m: int
    tile_n: int
    tile_k: int
    cluster: int
    warps: int
    occupancy: int
    swap: bool


CONFIGS = {
    "m16_n32": Config(16, 32, 128, 1, 4, 3, True),
    "m16_n64": Config(16, 64, 128, 1, 4, 3, True),
    "m16_n64_deep": Config(16, 64, 256, 1, 8, 1, True),
    "m32_n32": Config(32, 32, 128, 1, 4, 3, True),
    "m32_n64": Config(32, 64, 128, 1, 4, 2, True),
    "m64_n64": Config(64, 64, 64, 1, 4, 2, True),
    "m64_n64_deep": Config(64, 64, 128, 1, 4, 2, True),
    "m64_n128_deep": Config(64, 128, 128, 1, 4, 1, True),
    "m128_n128": Config(128, 128, 64, 1, 8, 1, False),
    "m128_n128_deep": Config(128, 128, 128, 1, 8, 1, False),
    "m128_n256": Config(128, 256, 64, 1, 8, 1, False),
    "m256_n128_pair": Config(256, 128, 64, 2, 8, 1, True),
    "m256_n256_pair": Config(256, 256, 64, 2, 8, 1, True),
}
UNALIGNED = Config(64, 64, 32, 1, 4, 2, False)


@functools.lru_cache
def _kernel(cluster: int, warps: int, occupancy: int) -> ct.kernel:
    return _gemm.replace_hints(num_ctas=cluster, num_worker_warps=warps, occupancy=occupancy)


@functools.lru_cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def _busy(tiles: int, slots: int) -> float:
    """Share of the time that all slots work, when tiles of equal length are dealt to them in waves."""
    return tiles / (slots * math.ceil(tiles / slots))


def _split(tiles: int, k: int, sms: int) -> int:
    """Into how many parts to cut K, for tiles of 128 x 128 of which each block has one at a time.

    In steps of 64 along K: a part's float32 sums take about 11 to write and read, the second kernel 9 to start.
    """
    parts = range(1, max(1, min(16, k // 512)) + 1)
    return min(
        parts, key=lambda part: math.ceil(tiles * part / sms) * (k / 64 / part + 11 * (part > 1)) + 9 * (part > 1)
    )


@functools.lru_cache(maxsize=4096)
def _choose(m: int, n: int, k: int) -> tuple[str, int]:
    """A CONFIGS name and a number of K splits."""
    sms = _multiprocessors()
    if m <= 32:  # memory bound on b: about as many blocks as multiprocessors, each with a deep pipeline of loads
        rows = 16 if m <= 16 else 32
        return f"m{rows}_n{64 if n >= 64 * sms else 32}", 1
    if m <= 64:
        tiles = math.ceil(n / 64)
        return "m64_n64_deep", max(1, min(2 * sms // tiles, k // 1024, 4))
    tiles_128 = math.ceil(m / 128) * math.ceil(n / 128)
    split = _split(tiles_128, k, sms)
    if m <= 128:  # memory bound on b: 256 bytes of a row at a time
        return "m128_n128_deep", split
    if split > 1 or tiles_128 <= sms:
        return "m128_n128", split
    tiles_256 = math.ceil(m / 256) * math.ceil(n / 256)
    # A 256 x 256 tile moves half of the bytes through L2 per product, but fills the last wave less evenly.
    if _busy(tiles_256, sms // 2) > 0.85 * _busy(tiles_128, sms):
        return "m256_n256_pair", 1
    return "m128_n128", 1


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    CONFIG: str | None = None,
    SPLIT_K: int | None = None,
) -> None:
    """out[M, N] = T(a[M, K] @ b[N, K].T) for T = bf16 or fp16, accumulated in fp32, one rounding.

    Rows may be further apart than their length. Where base addresses and row strides are multiples of 16 bytes, TMA
    feeds the tensor cores; where they are not, UNALIGNED replaces CONFIG and loads element by element (correct, slow).

    CONFIG names an entry of CONFIGS. With `swap` the product is computed as out.T = b @ a.T: the 64 rows of a
    tensor-core instruction then lie along N, and a small M costs only its own columns. SPLIT_K blocks share the K axis
    of a tile; they write fp32 partial sums to a workspace, which a second kernel adds in a fixed order. None chooses
    both by shape: small tiles for few rows, split K while tiles are fewer than multiprocessors, else large tiles.
    """
    m, k = a.shape
    n = b.shape[0]
    if m == 0 or n == 0:
        return
    if CONFIG is None:
        CONFIG, split = _choose(m, n, k)
        SPLIT_K = split if SPLIT_K is None else SPLIT_K
    elif SPLIT_K is None:
        SPLIT_K = 1
    # TMA needs multiples of 16 bytes, which are 8 elements.
    unaligned = (a.data_ptr() | b.data_ptr()) % 16 or (a.stride(0) | b.stride(0)) % 8
    config = UNALIGNED if unaligned else CONFIGS[CONFIG]
    if out.data_ptr() % 16 or out.stride(0) % 8 or n % 8:
        # By way of the workspace, and from there element by element: where rows begin aligned, a last vector that is not
        # full is stored whole, past the last column.
        SPLIT_K = max(SPLIT_K, 2)
    work = -(-m // config.tile_m) * -(-n // config.tile_n) * SPLIT_K
    blocks = min(work, _multiprocessors() // config.cluster * config.occupancy)
    stream = torch.cuda.current_stream()
    target = out if SPLIT_K == 1 else torch.empty((SPLIT_K, m, n), dtype=torch.float32, device=out.device)
    group_m = max(1, 2048 // config.tile_m)
    args = (a, b, target, config.tile_m, config.tile_n, config.tile_k, group_m, SPLIT_K, config.swap)
    ct.launch(stream, (blocks, 1, 1), _kernel(config.cluster, config.warps, config.occupancy), args)
    if SPLIT_K > 1:
        ct.launch(stream, (m * -(-n // SUM_TILE), 1, 1), _sum_splits, (target, out, SPLIT_K, SUM_TILE))
