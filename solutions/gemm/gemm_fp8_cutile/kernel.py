"""Linear layers of FP8 codes with a scale a block, cuTile: sums go to float32 after each block of 128 channels."""

import functools
import math
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

Int = ct.Constant[int]
Flag = ct.Constant[bool]
Columns = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
ZERO = ct.PaddingMode.ZERO

GROUP = 128  # channels that share a scale, and rows of b
SUM_TILE = 1024


@ct.function
def _cast_block(x):
    """Codes of a block of 128 channels a row, and what they are multiplied by."""
    x = x.astype(ct.float32)
    amax = ct.maximum(ct.max(ct.abs(x), axis=1), 1e-4)
    # Tile by tile and not by a number: a division by a constant might become a product with its rounded reciprocal.
    most = ct.full(amax.shape, 448.0, dtype=ct.float32)
    scaled = x * ct.truediv(most, amax)[:, None]
    codes = ct.minimum(ct.maximum(scaled, -448.0), 448.0).astype(ct.float8_e4m3fn)
    return codes, ct.truediv(amax, most)


@ct.function
def _block_product(x, y, TILE_I: Int, TILE_J: Int):
    """x @ y of one block. Tensor cores keep about 14 bits of a sum: the caller adds blocks, each of which starts at zero."""
    return ct.mma(x, y, ct.zeros((TILE_I, TILE_J), dtype=ct.float32))


@ct.kernel
def _gemm(
    a,
    b,
    scale_a,
    scale_b,
    out,
    TILE_M: Int,
    TILE_N: Int,
    GROUP_M: Int,
    SPLIT_K: Int,
    SWAP: Flag,
):
    tiles_m = ct.cdiv(a.shape[0], TILE_M)
    tiles_n = ct.cdiv(b.shape[0], TILE_N)
    tiles_k = ct.cdiv(a.shape[1], GROUP)
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
        rows = tile_m * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
        # A tile of b does not cross a block, so its scale is one number.
        b_block = tile_n * TILE_N // GROUP
        if SWAP:  # out.T = b @ a.T, see run
            acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
            for k in range(first, last):
                b_tile = ct.load(b, (tile_n, k), (TILE_N, GROUP), padding_mode=ZERO)
                a_tile = ct.load(a, (k, tile_m), (GROUP, TILE_M), order=(1, 0), padding_mode=ZERO)
                scale = ct.gather(scale_a, (rows, k)) * ct.gather(scale_b, (b_block, k))
                acc = acc + _block_product(b_tile, a_tile, TILE_N, TILE_M) * scale[None, :]
            if SPLIT_K > 1:
                ct.store(out, (split, tile_n, tile_m), acc.reshape((1, TILE_N, TILE_M)), order=(0, 2, 1))
            else:
                ct.store(out, (tile_n, tile_m), acc.astype(out.dtype), order=(1, 0))
        else:
            acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
            for k in range(first, last):
                a_tile = ct.load(a, (tile_m, k), (TILE_M, GROUP), padding_mode=ZERO)
                b_tile = ct.load(b, (k, tile_n), (GROUP, TILE_N), order=(1, 0), padding_mode=ZERO)
                scale = ct.gather(scale_a, (rows, k)) * ct.gather(scale_b, (b_block, k))
                acc = acc + _block_product(a_tile, b_tile, TILE_M, TILE_N) * scale[:, None]
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


@ct.kernel
def _cast_rows(x: Columns, codes, scale_out, TILE: Int):
    """One block of TILE rows. codes: bytes, whose rows are padded to whole blocks; scale_out: [blocks, M]."""
    k = ct.bid(1)
    rows = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    cols = k * GROUP + ct.arange(GROUP, dtype=ct.int32)
    made, scale = _cast_block(ct.gather(x, (rows[:, None], cols[None, :])))
    ct.scatter(codes, (rows[:, None], cols[None, :]), ct.bitcast(made, ct.uint8))
    ct.scatter(scale_out, (k, rows), scale)


class Config(NamedTuple):
    """Tile sizes, blocks of a cluster that share a tile, warps that compute, blocks per SM.

    swap: rows of b are the rows of the tensor-core product.
    """

    tile_m: int
    tile_n: int
    cluster: int
    warps: int
    occupancy: int
    swap: bool


CONFIGS = {
    "m16_n64": Config(16, 64, 1, 4, 3, True),
    "m16_n32": Config(16, 32, 1, 4, 4, True),
    "m16_n128": Config(16, 128, 1, 8, 2, True),
    "m32_n64": Config(32, 64, 1, 4, 3, True),
    "m64_n64": Config(64, 64, 1, 4, 2, True),
    "m64_n128": Config(64, 128, 1, 8, 1, True),
    "m128_n128": Config(128, 128, 1, 8, 1, False),
    "m128_n128_swap": Config(128, 128, 1, 8, 1, True),
    "m128_n64": Config(128, 64, 1, 8, 1, False),
    "m256_n128_pair": Config(256, 128, 2, 8, 1, True),
}
UNALIGNED = Config(64, 64, 1, 4, 2, False)
FEW = 64  # rows: up to this many, reading b is all that counts


@functools.lru_cache
def _kernel(cluster: int, warps: int, occupancy: int) -> ct.kernel:
    return _gemm.replace_hints(num_ctas=cluster, num_worker_warps=warps, occupancy=occupancy)


@functools.lru_cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def _split(tiles: int, blocks: int, sms: int) -> int:
    """Into how many parts to cut K, for tiles of 128 x 128 of which each multiprocessor has one at a time.

    In blocks of 128 along K: a part's float32 sums take about 8 to write and read, the second kernel 9 to start.
    """
    parts = range(1, max(1, min(8, blocks // 4)) + 1)
    return min(
        parts, key=lambda part: math.ceil(tiles * part / sms) * (blocks / part + 8 * (part > 1)) + 9 * (part > 1)
    )


@functools.lru_cache(maxsize=4096)
def _choose(m: int, n: int, k: int) -> tuple[str, int]:
    """A CONFIGS name and a number of K splits."""
    sms, blocks = _multiprocessors(), math.ceil(k / GROUP)
    if m <= FEW:  # memory bound on b: three blocks a multiprocessor keep it busy
        rows = 16 if m <= 16 else 32 if m <= 32 else 64
        return f"m{rows}_n64", max(1, min(3 * sms // math.ceil(n / 64), blocks // 4, 16))
    return "m128_n128", _split(math.ceil(m / 128) * math.ceil(n / 128), blocks, sms)


def _is_unaligned(tensor: torch.Tensor) -> bool:
    """Whether rows begin where TMA cannot read them: it wants multiples of 16 bytes."""
    return bool(tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16)


def _multiply(a, b, scale_a, scale_b, out, CONFIG, SPLIT_K) -> None:
    """Choose a kernel by shape and alignment, and launch it."""
    m, k = a.shape
    n = b.shape[0]
    name, split = _choose(m, n, k)
    SPLIT_K = SPLIT_K or (split if CONFIG is None else 1)
    config = UNALIGNED if _is_unaligned(a) or _is_unaligned(b) else CONFIGS[CONFIG or name]
    if out.data_ptr() % 16 or out.stride(0) % 8 or n % 8:
        # By way of the workspace, and from there element by element: where rows begin aligned, a last vector that is not
        # full is stored whole, past the last column.
        SPLIT_K = max(SPLIT_K, 2)
    work = -(-m // config.tile_m) * -(-n // config.tile_n) * SPLIT_K
    blocks = min(work, _multiprocessors() // config.cluster * config.occupancy)
    stream = torch.cuda.current_stream()
    target = out if SPLIT_K == 1 else torch.empty((SPLIT_K, m, n), dtype=torch.float32, device=out.device)
    group_m = max(1, 1024 // config.tile_m)
    args = (
        a,
        b,
        scale_a,
        scale_b,
        target,
        config.tile_m,
        config.tile_n,
        group_m,
        SPLIT_K,
        config.swap,
    )
    ct.launch(stream, (blocks, 1, 1), _kernel(config.cluster, config.warps, config.occupancy), args)
    if SPLIT_K > 1:
        ct.launch(stream, (m * -(-n // SUM_TILE), 1, 1), _sum_splits, (target, out, SPLIT_K, SUM_TILE))


def run(a, b, scale_a, scale_b, out, *, CONFIG: str | None = None, SPLIT_K: int | None = None) -> None:
    """out = bfloat16(sum over blocks of scale_a * scale_b * (products of the block)), in float32.

    a: [M, K] and b: [N, K] in float8_e4m3fn, out: [M, N] in bf16, all with unit last stride, any row stride; scale_a:
    [M, ceil(K / 128)] and scale_b: [ceil(N / 128), ceil(K / 128)] in float32, any strides. Where base addresses and row strides
    are multiples of 16 bytes, TMA feeds the tensor cores; where they are not, UNALIGNED replaces CONFIG (correct, slow).

    CONFIG names an entry of CONFIGS. With `swap` the product is computed as out.T = b @ a.T: the 64 rows of a tensor-core
    instruction then lie along N, and a small M costs only its own columns. SPLIT_K blocks share the K axis of a tile; they
    write fp32 partial sums to a workspace, which a second kernel adds in a fixed order. None chooses both by shape.
    """
    if out.numel():
        _multiply(a, b, scale_a, scale_b, out, CONFIG, SPLIT_K)


def run_dynamic(x, b, scale_b, out, *, CONFIG: str | None = None, SPLIT_K: int | None = None) -> None:
    """As `run`, for x: [M, K] in bf16 with unit last stride, any row stride: each 128 channels of a row are cast first.

    scale = max(|x|, 1e-4) / 448 and code = x * (448 / max(|x|, 1e-4)), rounded to nearest even, by a kernel of their own.
    """
    if not out.numel():
        return
    m, k = x.shape
    blocks = -(-k // GROUP)
    codes = torch.empty((m, blocks * GROUP), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((blocks, m), dtype=torch.float32, device=x.device)
    ct.launch(
        torch.cuda.current_stream(), (-(-m // 16), blocks, 1), _cast_rows, (x, codes.view(torch.uint8), scale, 16)
    )
    _multiply(codes[:, :k], b, scale.T, scale_b, out, CONFIG, SPLIT_K)
