"""How often each group occurs, in TileLang: histograms in shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

ONE_BLOCK = 8  # up to this many rounds of ids a thread block counts them all, in one launch
MOST_BLOCKS = 128


@functools.cache
@tilelang.jit
def group_count_kernel(E, threads):
    """Compile for E groups."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def group_count(ids: T.Tensor((N,), "int64"), out: T.Tensor((P, E), "int32"), count: T.int32, rounds: T.int32):
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
                    out[block, g * threads + thread] = histogram[g * threads + thread]

    return group_count


@functools.cache
@tilelang.jit
def sum_parts_kernel(E, threads):
    """Compile the sum of the blocks' counts over E groups, a thread a group."""
    P = T.dynamic("P")

    @T.prim_func
    def sum_parts(parts: T.Tensor((P, E), "int32"), out: T.Tensor((E,), "int32")):
        with T.Kernel(T.ceildiv(E, threads), threads=threads) as block:
            group = block * threads + T.get_thread_binding(0)
            total = T.alloc_var("int32", init=0)
            if group < E:
                for p in T.serial(P):
                    total += parts[p, group]
                out[group] = total

    return sum_parts


def run(ids, num_groups, counts, *, threads=256):
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    ids: [M, K] int64, contiguous, fewer than 2**31; counts: [E] int32. Few ids are counted by one
    block. Many are shared out to at most MOST_BLOCKS blocks, whose counts a second kernel adds up: two launches, no atomic
    operation on global memory, nothing that must be zero before.
    """
    E = num_groups
    count = ids.numel()
    tiles = -(-count // threads)
    flat = ids.view(-1) if count else torch.empty(1, dtype=torch.int64, device=ids.device)
    if tiles <= ONE_BLOCK:
        group_count_kernel(E, threads)(flat, counts.view(1, E), count, tiles)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    group_count_kernel(E, threads)(flat, parts, count, rounds)
    sum_parts_kernel(E, 32)(parts, counts)
