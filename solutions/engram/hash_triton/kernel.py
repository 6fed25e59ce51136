"""From token ids to rows of n-gram embedding tables, Triton."""

import torch
import triton
import triton.language as tl


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


@triton.jit(do_not_specialize=["M"])
def _hash(
    ids_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    layer = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = token < M
    table = tl.arange(0, P)[None, :]
    in_table = table < E
    mixed = tl.load(ids_ptr + token * N, mask=here, other=0).to(tl.int64) * tl.load(multipliers_ptr + layer * N)
    for n in tl.static_range(1, N):
        ids = tl.load(ids_ptr + token * N + n, mask=here, other=0).to(tl.int64)
        mixed = mixed ^ (ids * tl.load(multipliers_ptr + layer * N + n))
        column = (layer * (N - 1) + n - 1) * E + table
        size = tl.load(sizes_ptr + column, mask=in_table, other=1).to(tl.int64)
        row = mixed[:, None] % size
        row = tl.where(row < 0, row + size, row)  # the remainder has the sign of the hash; tables begin at 0
        row += tl.load(offsets_ptr + column, mask=in_table, other=0)
        where = (layer.to(tl.int64) * M + token[:, None]) * ((N - 1) * E) + (n - 1) * E + table
        tl.store(out_ptr + where, row.to(tl.int32), mask=here[:, None] & in_table)


def run_hash(
    ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=32,
    num_warps=4,
) -> None:
    """out[l, m, n - 1, e] = offsets + (ids[m, 0] * multipliers[l, 0] ^ ... ^ ids[m, n] * multipliers[l, n]) mod vocab_sizes.

    Shapes: ids [M, N] int32, multipliers [L, N] int64, vocab_sizes [L, N - 1, E] int32, offsets [L, (N - 1) * E] int32, out
    [L, M, (N - 1) * E] int32; contiguous. Products wrap around in 64 bits; the remainder is never negative.
    Mapping: a program has BLOCK_M tokens of one layer; a row of table sizes is divided by at once.
    """
    M, N = ids.shape
    L, _, E = vocab_sizes.shape
    if M == 0 or out.numel() == 0:
        return
    P = 1 << (E - 1).bit_length()
    _hash[(_cdiv(M, BLOCK_M), L)](ids, multipliers, vocab_sizes, offsets, out, M, N, E, P, BLOCK_M, num_warps=num_warps)


@triton.jit(do_not_specialize=["S", "blocks", "eos"])
def _shift(tokens_ptr, out_ptr, eos, S, blocks, N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.arange(0, P)[None, :]
    tokens = tl.load(tokens_ptr + row * S + at - n, mask=(at < S) & (n < N) & (at >= n), other=0)
    # A shifted token counts only if no token that it was shifted across, nor it itself, ends a text.
    stops = tl.where((n > 0) & (n < N) & ((at < n) | (tokens == eos)), n, P)
    first = tl.min(stops, axis=1, keep_dims=True)
    shifted = tl.where(n < first, tokens, tl.full([1, 1], eos, tokens.dtype))
    tl.store(out_ptr + (row * S + at) * N + n, shifted, mask=(at < S) & (n < N))


def run_ngram_shift(tokens: torch.Tensor, eos: int, shifts: int, out: torch.Tensor, *, BLOCK=128, num_warps=4) -> None:
    """out[b, s, n] = tokens[b, s - n], or eos where the text of position s begins later; tokens [B, S], out [B, S, shifts].

    int64 or int32, contiguous; shifts <= 16.
    """
    B, S = tokens.shape
    if out.numel() == 0:
        return
    blocks = _cdiv(S, BLOCK)
    P = 1 << (shifts - 1).bit_length()
    _shift[(B * blocks,)](tokens, out, eos, S, blocks, shifts, P, BLOCK, num_warps=num_warps)
