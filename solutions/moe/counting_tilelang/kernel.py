"""Expert ids counted, and sorted by their counts, in TileLang: counters of a block in shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

ONE_BLOCK = 8  # up to this many rounds of ids a thread block counts them all, in one launch
FEW_IDS = 1024  # up to this many, one thread block counts and places them all, in one launch
MOST_BLOCKS = 128


@functools.cache
@tilelang.jit
def count_kernel(E, threads, frequency):
    """Compile for E groups: each block's counts, or `frequency` where one block counts all ids: counts * experts / choices."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def count_part(
        ids: T.Tensor((N,), "int64"),
        out: T.Tensor((P, E), "float32" if frequency else "int32"),
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
                        if frequency
                        else histogram[g * threads + thread]
                    )

    return count_part


@functools.cache
@tilelang.jit
def sum_parts_kernel(E, threads, frequency):
    """Compile the sum of the blocks' counts over E groups, or their frequencies, a thread a group."""
    P = T.dynamic("P")

    @T.prim_func
    def sum_parts(
        parts: T.Tensor((P, E), "int32"),
        out: T.Tensor((E,), "float32" if frequency else "int32"),
        experts: T.float32,
        choices: T.float32,
    ):
        with T.Kernel(T.ceildiv(E, threads), threads=threads) as block:
            group = block * threads + T.get_thread_binding(0)
            total = T.alloc_var("int32", init=0)
            if group < E:
                for p in T.serial(P):
                    total += parts[p, group]
                out[group] = T.cast(total, "float32") * experts / choices if frequency else total

    return sum_parts


@functools.cache
@tilelang.jit
def place_kernel(E, threads, alone):
    """Compile the placing of each part's ids; `alone` where one block has all ids, and counts them itself."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def place_parts(
        ids: T.Tensor((N,), "int64"),
        parts: T.Tensor((P, E), "int32"),
        perm: T.Tensor((N,), "int64"),
        offs: T.Tensor((E,), "int32"),
        inverse: T.Tensor((N,), "int64"),
        count: T.int32,
        rounds: T.int32,
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((E,), "int32")
            before = T.alloc_shared((E,), "int32")
            following = T.alloc_shared((E + 1,), "int32")  # the next slot of each expert; the last is for ids of none
            keys = T.alloc_shared((threads,), "int32")
            key = T.alloc_var("int32", init=0)
            rank = T.alloc_var("int32", init=0)
            slot = T.alloc_var("int32", init=0)
            below = T.alloc_var("int32", init=0)
            earlier = T.alloc_var("int32", init=0)
            known = T.alloc_var("int32", init=0)

            # Ids of each expert in all parts, and in those before this one.
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    below = 0
                    earlier = 0
                    if not alone:
                        for p in T.serial(P):
                            below += parts[p, g * threads + thread]
                            if p < block:
                                earlier += parts[p, g * threads + thread]
                    total[g * threads + thread] = below
                    before[g * threads + thread] = earlier
            T.sync_threads()
            if alone:
                for r in T.serial(rounds):
                    if r * threads + thread < count:
                        expert = ids[r * threads + thread]
                        if expert >= 0 and expert < E:
                            T.atomic_add(total[T.cast(expert, "int32")], 1)
                T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                below = 0
                earlier = 0
                known = 0
                for e in T.serial(E):  # all threads read the same counter: no bank conflicts
                    known += total[e]
                    earlier += before[e]
                    if e < g * threads + thread:
                        below += total[e]
                if g * threads + thread < E:
                    following[g * threads + thread] = below + before[g * threads + thread]
                    if block == 0:
                        offs[g * threads + thread] = below + total[g * threads + thread]
                if g == 0 and thread == 0:
                    following[E] = known + block * rounds * threads - earlier
            T.sync_threads()
            for r in T.serial(rounds):
                place = (block * rounds + r) * threads + thread
                key = -1  # beyond the ids: equal to no key that counts
                if place < count:
                    expert = ids[place]
                    key = E
                    if expert >= 0 and expert < E:
                        key = T.cast(expert, "int32")
                keys[thread] = key
                T.sync_threads()
                rank = 0
                for j in T.serial(threads):
                    if j < thread and keys[j] == key:
                        rank += 1
                if key >= 0:
                    slot = following[key] + rank
                    perm[slot] = T.cast(place, "int64")
                    inverse[place] = T.cast(slot, "int64")
                T.sync_threads()  # every thread has read the counters
                if key >= 0:
                    T.atomic_add(following[key], 1)
                T.sync_threads()

    return place_parts


def _count(ids, E, experts, choices, out, frequency, threads):
    """Counts of E experts, or `frequency`: counts times `experts` over `choices`.

    Few ids are counted by one block. Many are shared out to at most MOST_BLOCKS blocks, whose counts a second kernel adds up: two
    launches, no atomic operation on global memory, nothing that must be zero before.
    """
    count = ids.numel()
    tiles = -(-count // threads)
    flat = ids.view(-1) if count else torch.empty(1, dtype=torch.int64, device=ids.device)
    if tiles <= ONE_BLOCK:
        count_kernel(E, threads, frequency)(flat, out.view(1, E), count, tiles, experts, choices)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    count_kernel(E, threads, False)(flat, parts, count, rounds, experts, choices)
    sum_parts_kernel(E, 32, frequency)(parts, out, experts, choices)


def run_group_count(ids, num_groups, counts, *, threads=256):
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    ids: [M, K] int64, contiguous, fewer than 2**31; counts: [E] int32.
    """
    _count(ids, num_groups, 0.0, 1.0, counts, False, threads)


def run_aux_fi(ids, num_experts, num_aux_topk, frequency, *, threads=256):
    """frequency[e] = float(count of e) * E / (M * num_aux_topk), E = num_experts; other ids count nowhere; zeros without tokens.

    ids: [M, K] int64, contiguous, fewer than 2**31; frequency: [E] float32.
    """
    choices = float(max(ids.shape[0] * num_aux_topk, 1))
    _count(ids, num_experts, float(num_experts), choices, frequency, True, threads)


def run_moe_offsets(ids, num_experts, perm, offs, inverse, *, threads=128):
    """perm = flat indices of ids, sorted stably by expert; offs = where each expert's slots end; inverse = slot of each index.

    ids: [M, K] int64, contiguous, fewer than 2**31; perm, inverse: [M * K] int64, offs: [E] int32, E = num_experts. Ids outside
    of 0..E-1 come last, in order. Few ids are counted and placed by one block. Many are shared out in order to at most
    MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all counts where its ids belong. A block places as
    many ids at a time as it has threads.
    """
    E = num_experts
    count = ids.numel()
    tiles = -(-count // threads)
    if count <= FEW_IDS:
        place = place_kernel(E, threads, True)
        if count == 0:
            nothing = torch.empty(1, dtype=torch.int64, device=ids.device)
            place(nothing, offs.view(1, E), nothing, offs, nothing, 0, 0)
        else:
            place(ids.view(-1), offs.view(1, E), perm, offs, inverse, count, tiles)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    count_kernel(E, threads, False)(ids.view(-1), parts, count, rounds, 0.0, 1.0)
    place_kernel(E, threads, False)(ids.view(-1), parts, perm, offs, inverse, count, rounds)
