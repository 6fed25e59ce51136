"""Rows of a table of embeddings and its gradient, cuTile: tokens are sorted by id, so each row is added up in order."""

from typing import Annotated

import cuda.tile as ct
import torch

# The hidden size is a compile-time constant, so that aligned rows are read 16 bytes at a time; a table may have 2^31 elements.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,), index_dtype=ct.int64)]
Int = ct.Constant[int]

SORTED = 32  # tokens of a block that sorts
COMPARED = 128  # ids that each of them is compared with at a time


@ct.kernel
def _rows(ids, weight: Rows, out: Rows, BLOCKS: Int, TILE_N: Int):
    token = ct.bid(0) // BLOCKS
    columns = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = columns < weight.shape[1]
    row = ct.gather(ids, token)
    is_row = (row >= 0) & (row < weight.shape[0])
    values = ct.gather(weight, (ct.where(is_row, row, 0), columns), mask=inside, check_bounds=False)
    values = ct.where(
        is_row, values, ct.full((TILE_N,), float("nan"), dtype=weight.dtype)
    )  # an id that is no row is an error
    ct.scatter(out, (token, columns), values, mask=inside, check_bounds=False)


@ct.kernel
def _sort_tokens(ids, order, counts, steps: int):
    """order[slot] = token, stably sorted by id; counts[slot] = tokens of its id in the first slot of an id, and 0 in others.

    Each token is compared with all: for the tokens of a training step this is less than the zeros of a large table.
    """
    M = ids.shape[0]
    tokens = ct.bid(0) * SORTED + ct.arange(SORTED, dtype=ct.int32)
    own = ct.gather(ids, tokens, mask=tokens < M, check_bounds=False, padding_value=0)[:, None]
    smaller = ct.zeros((SORTED, COMPARED), dtype=ct.int32)
    equal = ct.zeros((SORTED, COMPARED), dtype=ct.int32)
    before = ct.zeros((SORTED, COMPARED), dtype=ct.int32)
    for step in range(steps):
        others = step * COMPARED + ct.arange(COMPARED, dtype=ct.int32)
        is_there = (others < M)[None, :]
        other = ct.gather(ids, others, mask=others < M, check_bounds=False, padding_value=0)[None, :]
        is_equal = is_there & (other == own)
        smaller = smaller + (is_there & (other < own)).astype(ct.int32)
        equal = equal + is_equal.astype(ct.int32)
        before = before + (is_equal & (others[None, :] < tokens[:, None])).astype(ct.int32)
    rank = ct.sum(before, axis=1)
    slots = ct.sum(smaller, axis=1) + rank
    ct.scatter(order, slots, tokens, mask=tokens < M, check_bounds=False)
    ct.scatter(counts, slots, ct.where(rank == 0, ct.sum(equal, axis=1), 0), mask=tokens < M, check_bounds=False)


@ct.kernel
def _add_tokens(
    ids, grad_out: Rows, grad_weight: Rows, order, counts, padding_idx: int, BLOCKS: Int, ROWS: Int, TILE_N: Int
):
    """grad_weight[id] = sum of the gradients of its tokens, in order; a block has a tile of columns of one slot."""
    slot = ct.bid(0) // BLOCKS
    columns = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = columns < grad_weight.shape[1]
    count = ct.gather(counts, slot)
    row = ct.gather(ids, ct.gather(order, slot))
    if (count > 0) & (row != padding_idx) & (row >= 0) & (row < grad_weight.shape[0]):
        total = ct.zeros((TILE_N,), dtype=ct.float32)
        for step in range(ct.cdiv(count, ROWS)):
            which = step * ROWS + ct.arange(ROWS, dtype=ct.int32)
            known = which < count
            tokens = ct.gather(order, slot + which, mask=known, check_bounds=False, padding_value=0)
            places = (tokens[:, None], columns[None, :])
            mask = known[:, None] & inside[None, :]
            grads = ct.gather(grad_out, places, mask=mask, check_bounds=False, padding_value=0.0)
            total = total + ct.sum(grads.astype(ct.float32), axis=0)
        ct.scatter(grad_weight, (row, columns), total.astype(grad_weight.dtype), mask=inside, check_bounds=False)


_COPIES = {warps: _rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_SUMS = {warps: _add_tokens.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _blocks(H: int, tile: int) -> tuple[int, int]:
    """Return the blocks of a row of H columns, and the columns of each, at most ``tile``."""
    tile = min(tile, max(32, 1 << (H - 1).bit_length()))
    return -(-H // tile), tile


def run(
    ids: torch.Tensor, weight: torch.Tensor, padding_idx: int, out: torch.Tensor, *, TILE_N: int = 2048, WARPS: int = 4
) -> None:
    """Write out [M, H] = the rows of weight [V, H] that ids [M] name. A block of WARPS (4 or 8) warps copies TILE_N columns."""
    M, H = out.shape
    if M == 0:
        return
    blocks, tile = _blocks(H, TILE_N)
    ct.launch(torch.cuda.current_stream(), (M * blocks, 1, 1), _COPIES[WARPS], (ids, weight, out, blocks, tile))


def run_backward(
    ids: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, padding_idx: int, grad_weight: torch.Tensor,
    *, ROWS: int = 4, TILE_N: int = 1024, WARPS: int = 4,
) -> None:  # fmt: skip
    """Write grad_weight [V, H] = the sum of grad_out [M, H] over the tokens of each row, in float32 and rounded once.

    Rows without tokens and the row padding_idx are 0. Tokens of a row are added in their order, ROWS of them at a time, so the
    bits are the same in every run.
    """
    M, H = grad_out.shape
    grad_weight.zero_()
    if M == 0:
        return
    stream = torch.cuda.current_stream()
    order, counts = torch.empty((2, M), dtype=torch.int32, device=ids.device)
    ct.launch(stream, (-(-M // SORTED), 1, 1), _sort_tokens, (ids, order, counts, -(-M // COMPARED)))
    blocks, tile = _blocks(H, TILE_N)
    arguments = (ids, grad_out, grad_weight, order, counts, padding_idx, blocks, ROWS, tile)
    ct.launch(stream, (M * blocks, 1, 1), _SUMS[WARPS], arguments)
