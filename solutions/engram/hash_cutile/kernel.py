"""From token ids to rows of n-gram embedding tables, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# The length of a row is a compile-time constant: of n-grams and tables there are as many as the model has.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


@ct.kernel
def _hash(
    ids: Rows, multipliers: Rows, sizes: Rows, offsets: Rows, out: Rows, N: Int, TABLES: Int, TILE: Int, SIDE: Int
):
    m = ids.shape[0]
    blocks = ct.cdiv(m, TILE)
    layer, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    token = block * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    table = ct.arange(SIDE, dtype=ct.int32)[None, :]
    here, in_table = token < m, table < TABLES
    mixed = ct.gather(ids, (token, 0), mask=here, check_bounds=False).astype(ct.int64)
    mixed = mixed * ct.gather(multipliers, (layer, 0), check_bounds=False)
    for n in ct.static_iter(range(1, N)):
        product = ct.gather(ids, (token, n), mask=here, check_bounds=False).astype(ct.int64)
        mixed = mixed ^ (product * ct.gather(multipliers, (layer, n), check_bounds=False))
        column = (n - 1) * TABLES + table
        size = ct.gather(sizes, (layer, column), mask=in_table, padding_value=1, check_bounds=False).astype(ct.int64)
        row = mixed % size  # as in Python: never negative, since sizes are not
        row = row + ct.gather(offsets, (layer, column), mask=in_table, check_bounds=False).astype(ct.int64)
        ct.scatter(out, (layer * m + token, column), row.astype(ct.int32), mask=here & in_table, check_bounds=False)


_HASH = {warps: _hash.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_hash(
    ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE: int = 32,
    WARPS: int = 4,
) -> None:
    """out[l, m, n - 1, e] = offsets + (ids[m, 0] * multipliers[l, 0] ^ ... ^ ids[m, n] * multipliers[l, n]) mod vocab_sizes.

    Shapes: ids [M, N] int32, multipliers [L, N] int64, vocab_sizes [L, N - 1, E] int32, offsets [L, (N - 1) * E] int32, out
    [L, M, (N - 1) * E] int32; contiguous. Products wrap around in 64 bits; the remainder is never negative.
    Mapping: a block has TILE tokens of one layer; a row of table sizes is divided by at once.
    """
    M, N = ids.shape
    L, _, E = vocab_sizes.shape
    if M == 0 or out.numel() == 0:
        return
    width = (N - 1) * E
    side = 1 << (E - 1).bit_length()
    args = (ids, multipliers, vocab_sizes.view(L, width), offsets, out.view(L * M, width), N, E, TILE, side)
    ct.launch(torch.cuda.current_stream(), (L * -(-M // TILE), 1, 1), _HASH[WARPS], args)


@ct.kernel
def _shift(tokens: ct.Array, out: Rows, eos: ct.ScalarInt64, N: Int, TILE: Int, SIDE: Int):
    length = tokens.shape[1]
    blocks = ct.cdiv(length, TILE)
    row, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    at = block * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    n = ct.arange(SIDE, dtype=ct.int32)[None, :]
    inside = (at < length) & (n < N)
    values = ct.gather(tokens, (row, at - n), mask=inside & (at >= n), padding_value=0, check_bounds=False)
    end = ct.astype(eos, tokens.dtype)
    # A shifted token counts only if no token that it was shifted across, nor it itself, ends a text.
    stops = ct.where((n > 0) & ((at < n) | (values == end)), n, SIDE)
    first = ct.min(stops, axis=1, keepdims=True)
    shifted = ct.where(n < first, values, end)
    ct.scatter(out, (row * length + at, n), shifted, mask=inside, check_bounds=False)


_SHIFT = {warps: _shift.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_ngram_shift(
    tokens: torch.Tensor, eos: int, shifts: int, out: torch.Tensor, *, TILE: int = 128, WARPS: int = 4
) -> None:
    """out[b, s, n] = tokens[b, s - n], or eos where the text of position s begins later; tokens [B, S], out [B, S, shifts].

    int64 or int32, contiguous; shifts <= 16. A block has TILE positions of one sequence.
    """
    B, S = tokens.shape
    if out.numel() == 0:
        return
    side = 1 << (shifts - 1).bit_length()
    args = (tokens, out.view(B * S, shifts), eos, shifts, TILE, side)
    ct.launch(torch.cuda.current_stream(), (B * -(-S // TILE), 1, 1), _SHIFT[WARPS], args)
