"""Rows of a table of embeddings and its gradient, Triton: tokens are sorted by id, so each row is added up in order."""

import torch
import triton
import triton.language as tl

SORTED = 32  # tokens of a program that sorts
COMPARED = 128  # ids that each of them is compared with at a time


@triton.jit
def _rows(ids_ptr, weight_ptr, out_ptr, V, H, blocks, BLOCK: tl.constexpr):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    is_row = (row >= 0) & (row < V)
    values = tl.load(weight_ptr + tl.where(is_row, row, 0) * H + columns, mask=columns < H)
    values = tl.where(is_row, values, float("nan"))  # an id that is no row is an error
    tl.store(out_ptr + token * H + columns, values, mask=columns < H)


@triton.jit(do_not_specialize=["M"])
def _sort_tokens(ids_ptr, order_ptr, counts_ptr, M, SORTED: tl.constexpr, COMPARED: tl.constexpr):
    """order[slot] = token, stably sorted by id; counts[slot] = tokens of its id in the first slot of an id, and 0 in others.

    Each token is compared with all: for the tokens of a training step this is less than the zeros of a large table.
    """
    tokens = tl.program_id(0) * SORTED + tl.arange(0, SORTED)
    ids = tl.load(ids_ptr + tokens, mask=tokens < M, other=0)
    smaller = tl.zeros([SORTED, COMPARED], tl.int32)
    equal = tl.zeros([SORTED, COMPARED], tl.int32)
    before = tl.zeros([SORTED, COMPARED], tl.int32)
    for start in range(0, M, COMPARED):
        others = start + tl.arange(0, COMPARED)
        other_ids = tl.load(ids_ptr + others, mask=others < M, other=0)
        is_there = (others < M)[None, :]
        is_equal = is_there & (other_ids[None, :] == ids[:, None])
        smaller += (is_there & (other_ids[None, :] < ids[:, None])).to(tl.int32)
        equal += is_equal.to(tl.int32)
        before += (is_equal & (others[None, :] < tokens[:, None])).to(tl.int32)
    rank = tl.sum(before, axis=1)
    slots = tl.sum(smaller, axis=1) + rank
    tl.store(order_ptr + slots, tokens, mask=tokens < M)
    tl.store(counts_ptr + slots, tl.where(rank == 0, tl.sum(equal, axis=1), 0), mask=tokens < M)


@triton.jit(do_not_specialize=["padding_idx"])
def _add_tokens(
    ids_ptr,
    grad_out_ptr,
    grad_weight_ptr,
    order_ptr,
    counts_ptr,
    V,
    H,
    padding_idx,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_weight[id] = sum of the gradients of its tokens, in order; a program has a block of columns of one slot."""
    slot = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + slot)
    row = tl.load(ids_ptr + tl.load(order_ptr + slot))
    if (count > 0) & (row != padding_idx) & (row >= 0) & (row < V):
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, ROWS):
            which = start + tl.arange(0, ROWS)
            tokens = tl.load(order_ptr + slot + which, mask=which < count, other=0).to(tl.int64)
            inside = (which < count)[:, None] & (columns < H)[None, :]
            grads = tl.load(grad_out_ptr + tokens[:, None] * H + columns[None, :], mask=inside, other=0.0)
            total += tl.sum(grads.to(tl.float32), axis=0)
        tl.store(grad_weight_ptr + row * H + columns, total.to(grad_weight_ptr.dtype.element_ty), mask=columns < H)


def run(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int,
    out: torch.Tensor,
    *,
    BLOCK: int = 2048,
    num_warps: int = 4,
) -> None:
    """Write out [M, H] = the rows of weight [V, H] that ids [M] name. A program copies BLOCK columns of a row."""
    (M, H), V = out.shape, weight.shape[0]
    if M == 0:
        return
    BLOCK = min(BLOCK, max(32, 1 << (H - 1).bit_length()))
    blocks = -(-H // BLOCK)
    _rows[(M * blocks,)](ids, weight, out, V, H, blocks, BLOCK, num_warps=num_warps)


def run_backward(
    ids: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    padding_idx: int,
    grad_weight: torch.Tensor,
    *,
    ROWS: int = 4,
    BLOCK: int = 1024,
    num_warps: int = 4,
) -> None:
    """Write grad_weight [V, H] = the sum of grad_out [M, H] over the tokens of each row, in float32 and rounded once.

    Rows without tokens and the row padding_idx are 0. Tokens of a row are added in their order, ROWS of them at a time, so the
    bits are the same in every run.
    """
    (M, H), V = grad_out.shape, grad_weight.shape[0]
    grad_weight.zero_()
    if M == 0:
        return
    order, counts = torch.empty((2, M), dtype=torch.int32, device=ids.device)
    _sort_tokens[(-(-M // SORTED),)](ids, order, counts, M, SORTED, COMPARED, num_warps=4)
    BLOCK = min(BLOCK, max(32, 1 << (H - 1).bit_length()))
    blocks = -(-H // BLOCK)
    _add_tokens[(M * blocks,)](
        ids, grad_out, grad_weight, order, counts, V, H, padding_idx, blocks, ROWS, BLOCK, num_warps=num_warps
    )
