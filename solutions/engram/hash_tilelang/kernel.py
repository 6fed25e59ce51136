"""From token ids to rows of n-gram embedding tables, TileLang: a thread makes one value, neighbours in memory beside it."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def hash_kernel(N, E, threads):
    """Compile for n-grams of up to N ids and E tables of each size."""
    M, L = T.dynamic("M L")
    width = (N - 1) * E

    @T.prim_func
    def engram_hash(
        ids: T.Tensor((M, N), "int32"),
        multipliers: T.Tensor((L, N), "int64"),
        sizes: T.Tensor((L, width), "int32"),
        offsets: T.Tensor((L, width), "int32"),
        out: T.Tensor((L, M, width), "int32"),
    ):
        with T.Kernel(T.ceildiv(M * width, threads), L, threads=threads) as (block, layer):
            mixed = T.alloc_local((1,), "uint64")  # wraps around by definition, as a signed product does not
            row = T.alloc_local((1,), "int64")
            place = block * threads + T.get_thread_binding(0)
            if place < M * width:
                token = place // width
                column = place % width
                mixed[0] = 0
                for p in T.unroll(N):
                    if p <= column // E + 1:  # the first tables are those of two ids
                        number = T.cast(T.cast(ids[token, p], "int64"), "uint64")
                        mixed[0] = mixed[0] ^ (number * T.cast(multipliers[layer, p], "uint64"))
                size = T.cast(sizes[layer, column], "int64")
                row[0] = T.truncmod(T.cast(mixed[0], "int64"), size)
                if row[0] < 0:  # the remainder has the sign of the hash; tables begin at 0
                    row[0] += size
                out[layer, token, column] = T.cast(row[0] + T.cast(offsets[layer, column], "int64"), "int32")

    return engram_hash


def run_hash(ids, multipliers, vocab_sizes, offsets, out, *, threads=128):
    """out[l, m, n - 1, e] = offsets + (ids[m, 0] * multipliers[l, 0] ^ ... ^ ids[m, n] * multipliers[l, n]) mod vocab_sizes.

    Shapes: ids [M, N] int32, multipliers [L, N] int64, vocab_sizes [L, N - 1, E] int32, offsets [L, (N - 1) * E] int32, out
    [L, M, (N - 1) * E] int32; contiguous. Products wrap around in 64 bits; the remainder is never negative.
    """
    M, N = ids.shape
    L, _, E = vocab_sizes.shape
    if M and out.numel():
        hash_kernel(N, E, threads)(ids, multipliers, vocab_sizes.view(L, (N - 1) * E), offsets, out)


@functools.cache
@tilelang.jit
def shift_kernel(N, dtype, threads):
    """Compile for n-grams of N ids of one dtype."""
    total = T.dynamic("total")  # positions of all sequences

    @T.prim_func
    def ngram_shift(tokens: T.Tensor((total,), dtype), length: T.int32, eos: T.int64, out: T.Tensor((total, N), dtype)):
        with T.Kernel(T.ceildiv(total * N, threads), threads=threads) as block:
            token = T.alloc_local((1,), dtype)
            ended = T.alloc_local((1,), "bool")
            at = T.alloc_local((1,), "int32")
            place = block * threads + T.get_thread_binding(0)
            if place < total * N:
                n = place % N
                at[0] = T.truncmod(place // N, length)
                token[0] = T.cast(eos, dtype)
                ended[0] = at[0] < n
                # A shifted token counts only if no token that it was shifted across, nor it itself, ends a text.
                for m in T.unroll(N):
                    if m <= n and m <= at[0]:
                        token[0] = tokens[place // N - m]
                        if m > 0 and token[0] == T.cast(eos, dtype):
                            ended[0] = True
                out[place // N, n] = T.Select(ended[0], T.cast(eos, dtype), token[0])

    return ngram_shift


def run_ngram_shift(tokens, eos, shifts, out, *, threads=128):
    """out[b, s, n] = tokens[b, s - n], or eos where the text of position s begins later; tokens [B, S], out [B, S, shifts].

    int64 or int32, contiguous; shifts <= 16.
    """
    if out.numel():
        kernel = shift_kernel(shifts, tokens.dtype, threads)
        kernel(tokens.view(-1), tokens.shape[1], eos, out.view(-1, shifts))
