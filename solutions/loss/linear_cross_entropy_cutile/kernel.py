"""The head of a language model, its loss and both gradients in chunks of tokens, cuTile: four kernels a chunk."""

import functools
from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

GROUP_M = 8  # rows of tiles that share columns of the other factor in L2
TILE_K = 64
# Name -> rows and columns of a tile, blocks of a cluster that share it.
TILES = {"wide": (128, 256, 1), "pair": (256, 256, 2), "square": (128, 128, 1)}


@ct.kernel
def _product(
    a,
    b,
    out,
    partial,
    m: int,
    n: int,
    k: int,
    A_ROWS: Flag,
    B_ROWS: Flag,
    ADDS: Flag,
    KEEPS: Flag,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP: Int,
):
    """out [M, N] = a @ b; a is [M, K] in memory with A_ROWS, else [K, M], and b is [N, K] with B_ROWS, else [K, N].

    With ADDS, partial is added to the sums. With KEEPS, these are stored there and not in out.
    """
    tiles_m = ct.cdiv(m, TILE_M)
    tiles_n = ct.cdiv(n, TILE_N)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        band = tile // (GROUP * tiles_n)
        band_rows = ct.minimum(tiles_m - band * GROUP, GROUP)
        i = band * GROUP + tile % (GROUP * tiles_n) % band_rows
        j = tile % (GROUP * tiles_n) // band_rows
        acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
        for step in range(ct.cdiv(k, TILE_K)):
            if A_ROWS:
                x = ct.load(a, (i, step), (TILE_M, TILE_K), padding_mode=ZERO)
            else:
                x = ct.load(a, (i, step), (TILE_M, TILE_K), order=(1, 0), padding_mode=ZERO)
            if B_ROWS:
                y = ct.load(b, (step, j), (TILE_K, TILE_N), order=(1, 0), padding_mode=ZERO)
            else:
                y = ct.load(b, (step, j), (TILE_K, TILE_N), padding_mode=ZERO)
            acc = ct.mma(x, y, acc)
        if ADDS:
            acc = acc + ct.load(partial, (i, j), (TILE_M, TILE_N), padding_mode=ZERO)
        if KEEPS:
            ct.store(partial, (i, j), acc)
        else:
            ct.store(out, (i, j), acc.astype(out.dtype))


@ct.function
def _base(top):
    """Return what to subtract: 0 while all is -inf, as -inf - -inf would make a sum NaN before the row is known."""
    return ct.where(top == -float("inf"), 0.0, top)


@ct.function
def _expm1(x):
    """Return exp(x) - 1 for x <= 0, near 0 by its series: the difference would have no correct digit there."""
    series = x * (1 / 8) + 1.0
    series = x * (1 / 7) * series + 1.0
    series = x * (1 / 6) * series + 1.0
    series = x * (1 / 5) * series + 1.0
    series = x * (1 / 4) * series + 1.0
    series = x * (1 / 3) * series + 1.0
    series = x * (1 / 2) * series + 1.0
    return ct.where(x > -0.4, x * series, ct.exp(x) - 1.0)


@ct.kernel
def _logits_to_gradients(
    logits: Rows, labels, grad_loss, loss, first: int, ignore_index: int, STEPS: Int, REPEAT: Int, LANES: Int
):
    """Store the loss of a row and write the gradient of its logits over them; its label is that of token first + row."""
    n = logits.shape[1]
    row = ct.bid(0)
    label = ct.gather(labels, first + row)
    offsets = ct.arange(REPEAT, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    if label == ignore_index:
        ct.scatter(loss, first + row, 0.0)
        zeros = ct.zeros((REPEAT, LANES), dtype=logits.dtype)
        for step in range(STEPS):
            cols = step * (REPEAT * LANES) + offsets
            ct.scatter(logits, (row, cols), zeros, mask=cols < n, check_bounds=False)
    else:
        inside = (label >= 0) & (label < n)  # a label that is neither a column nor ignored is an error: NaN
        of_label = ct.gather(logits, (row, ct.where(inside, label, 0).astype(ct.int32))).astype(ct.float32)
        of_label = ct.where(inside, of_label, float("nan"))
        factor = ct.gather(grad_loss, first + row)
        top = ct.full((LANES,), -float("inf"), dtype=ct.float32)
        total = ct.zeros((LANES,), dtype=ct.float32)
        for step in range(STEPS):
            cols = step * (REPEAT * LANES) + offsets
            x = ct.gather(logits, (row, cols), mask=cols < n, check_bounds=False, padding_value=-float("inf"))
            x = x.astype(ct.float32)
            new_top = ct.maximum(top, ct.max(x, axis=0))
            base = _base(new_top)
            total = total * ct.exp(top - base) + ct.sum(ct.exp(x - base[None, :]), axis=0)
            top = new_top
        row_top = ct.max(top)
        log_sum = ct.log(ct.sum(total * ct.exp(top - row_top)))  # NaN for a row of -inf
        ct.scatter(loss, first + row, log_sum + (row_top - of_label))
        at_label = _expm1((of_label - row_top) - log_sum)
        for back in range(STEPS):  # backwards: the end of the row was read last and is still in cache
            cols = (STEPS - 1 - back) * (REPEAT * LANES) + offsets
            x = ct.gather(logits, (row, cols), mask=cols < n, check_bounds=False).astype(ct.float32)
            off = ct.where(cols == label, at_label, ct.exp((x - row_top) - log_sum))
            grad = (off * factor).astype(logits.dtype)
            ct.scatter(logits, (row, cols), grad, mask=cols < n, check_bounds=False)


@functools.lru_cache
def _kernel(cluster: int) -> ct.kernel:
    return _product.replace_hints(num_ctas=cluster, num_worker_warps=8, occupancy=1)


_GRADIENTS = _logits_to_gradients.replace_hints(num_worker_warps=8)


@functools.lru_cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if TMA takes a tensor: its rows begin at multiples of 16 bytes and end there."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0 and tensor.shape[1] % 8 == 0


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the same shape for TMA, its rows filled up to whole 16 bytes."""
    rows, columns = tensor.shape
    return torch.empty((rows, -(-columns // 8) * 8), dtype=tensor.dtype, device=tensor.device)[:, :columns]


def _multiply(tile, a, b, out, partial, m, n, k, *, a_rows, b_rows, adds=False, keeps=False):
    tile_m, tile_n, cluster = TILES[tile]
    tiles = -(-m // tile_m) * -(-n // tile_n)
    blocks = min(tiles, _multiprocessors() // cluster)
    constants = (a_rows, b_rows, adds, keeps, tile_m, tile_n, TILE_K, GROUP_M)
    arguments = (a, b, out, partial, m, n, k, *constants)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _kernel(cluster), arguments)


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    loss: torch.Tensor,
    grad_hidden: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    CHUNK: int = 2048,
    TILE: str = "wide",
) -> None:
    """Write the loss of each token and the gradients of sum(loss * grad_loss).

    hidden, grad_hidden [M, H] and weight, grad_weight [V, H] in T (bfloat16, float16); labels [M] int64; grad_loss, loss
    [M] float32. CHUNK tokens at a time: their logits in T, the losses and the gradient of the logits in their place, then
    both products with it. With several chunks, the gradient of the weight is added up in a float32 tensor of its size.
    TILE names an entry of TILES. Tensors that TMA cannot address are copied, which is slow.
    """
    m, h = hidden.shape
    v = weight.shape[0]
    if m == 0:
        grad_weight.zero_()
        return
    outputs = (grad_hidden, grad_weight)
    targets = [tensor if _is_aligned(tensor) else _padded(tensor) for tensor in outputs]
    given = [tensor if _is_aligned(tensor) else _padded(tensor).copy_(tensor) for tensor in (hidden, weight)]
    chunks = -(-m // CHUNK)
    rows = -(-m // chunks)
    logits = torch.empty((rows, -(-v // 8) * 8), dtype=hidden.dtype, device=hidden.device)[:, :v]
    partial = targets[1]
    if chunks > 1:
        partial = torch.empty((v, -(-h // 4) * 4), dtype=torch.float32, device=hidden.device)[:, :h]
    repeat, lanes = 8, 2048
    while lanes > 64 and repeat * lanes > 2 * v:
        repeat, lanes = (repeat // 2, lanes) if repeat > 1 else (1, lanes // 2)
    steps = -(-v // (repeat * lanes))
    for start in range(0, m, rows):
        stop = min(m, start + rows)
        count, part = stop - start, given[0][start:stop]
        chunk = logits[:count]
        _multiply(TILE, part, given[1], chunk, partial, count, v, h, a_rows=True, b_rows=True)
        arguments = (chunk, labels, grad_loss, loss, start, ignore_index, steps, repeat, lanes)
        ct.launch(torch.cuda.current_stream(), (count, 1, 1), _GRADIENTS, arguments)
        out = targets[0][start:stop]
        _multiply(TILE, chunk, given[1], out, partial, count, h, v, a_rows=True, b_rows=False)
        sums = {"adds": start > 0, "keeps": stop < m}
        _multiply(TILE, chunk, part, targets[1], partial, v, h, count, a_rows=False, b_rows=False, **sums)
    for tensor, target in zip(outputs, targets, strict=True):
        if target is not tensor:
            tensor.copy_(target)
