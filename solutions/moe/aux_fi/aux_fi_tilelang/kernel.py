"""Relative frequency of each expert, in TileLang: histograms in shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

ONE_BLOCK = 8  # up to this many rounds of ids a thread block counts them all, in one launch
MOST_BLOCKS = 128


@functools.cache
@tilelang.jit
def aux_fi_kernel(E, threads, final):
    """Compile for E groups; `final` where one block counts all ids and writes the frequencies, else counts."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def aux_fi(
        ids: T.Tensor((N,), "int64"),
        out: T.Tensor((P, E), "float32" if final else "int32"),
        count: T.int32,
        rounds: T.int32,
        experts: T.float32,
        choices: T.float32,
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            histogram = T.alloc_shared((E,), "int32")

            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    histogram[g * threads + thread] = 0
            T.sync_threads()
            for r in T.serial(rounds):
                place = (block * rounds + r) * threads + thread
                if place < count:
                    group = ids[place]
                    if group >= 0 and group < E:
                        T.atomic_add(histogram[T.cast(group, "int32")], 1)
            T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    out[block, g * threads + thread] = (
                        T.cast(histogram[g * threads + thread], "float32") * experts / choices
                        if final
                        else histogram[g * threads + thread]
                    )

    return aux_fi


@functools.cache
@tilelang.jit
def sum_parts_kernel(E, threads):
    """Compile the sum of the blocks' counts over E groups, a thread a group."""
    P = T.dynamic("P")

    @T.prim_func
    def sum_parts(
        parts: T.Tensor((P, E), "int32"), out: T.Tensor((E,), "float32"), experts: T.float32, choices: T.float32
    ):
        with T.Kernel(T.ceildiv(E, threads), threads=threads) as block:
            group = block * threads + T.get_thread_binding(0)
            total = T.alloc_var("int32", init=0)
            if group < E:
                for p in T.serial(P):
                    total += parts[p, group]
                out[group] = T.cast(total, "float32") * experts / choices

    return sum_parts


def run(ids, num_experts, num_aux_topk, frequency, *, threads=256):
    """frequency[e] = float(count of e) * E / (M * num_aux_topk), E = num_experts; other ids count nowhere; zeros without tokens.

    ids: [M, K] int64, contiguous, fewer than 2**31; frequency: [E] float32. Few ids are counted by one
    block. Many are shared out to at most MOST_BLOCKS blocks, whose counts a second kernel adds up: two launches, no atomic
    operation on global memory, nothing that must be zero before.
    """
    E = num_experts
    count = ids.numel()
    tiles = -(-count // threads)
    flat = ids.view(-1) if count else torch.empty(1, dtype=torch.int64, device=ids.device)
    experts, choices = float(E), float(max(ids.shape[0] * num_aux_topk, 1))
    if tiles <= ONE_BLOCK:
        aux_fi_kernel(E, threads, True)(flat, frequency.view(1, E), count, tiles, experts, choices)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    aux_fi_kernel(E, threads, False)(flat, parts, count, rounds, experts, choices)
    sum_parts_kernel(E, 32)(parts, frequency, experts, choices)
