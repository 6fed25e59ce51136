"""Tables of a buffer of rows by expert, in TileLang: a stable counting sort with counters of a block in shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_IDS = 1024  # up to this many, each thread block counts all ids itself, in one launch
MOST_BLOCKS = 128
ROWS_OF_A_BLOCK = 1024  # rows of padding for which another block is started, where ids are few


@functools.cache
@tilelang.jit
def count_kernel(E, threads):
    """Compile the counts of E experts in each block's share of the ids."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def count_part(ids: T.Tensor((N,), "int64"), parts: T.Tensor((P, E), "int32"), count: T.int32, rounds: T.int32):
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
                    expert = ids[place]
                    if expert >= 0 and expert < E:
                        T.atomic_add(histogram[T.cast(expert, "int32")], 1)
            T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    parts[block, g * threads + thread] = histogram[g * threads + thread]

    return count_part


@functools.cache
@tilelang.jit
def map_kernel(E, K, threads, alone):
    """Compile the tables. `alone`: every block counts all ids itself, and the first one places them all."""
    P, N, R = T.dynamic("P"), T.dynamic("N"), T.dynamic("R")
    steps = (E - 1).bit_length()

    @T.prim_func
    def map_ids(
        ids: T.Tensor((N,), "int64"),
        parts: T.Tensor((P, E), "int32"),
        to_expert: T.Tensor((R,), "int32"),
        to_token: T.Tensor((R,), "int32"),
        to_choice: T.Tensor((R,), "int32"),
        by_choice: T.Tensor((N,), "int32"),
        starts: T.Tensor((E,), "int32"),
        ends: T.Tensor((E,), "int32"),
        sizes: T.Tensor((E,), "int32"),
        count: T.int32,
        rows: T.int32,
        rounds: T.int32,
        alignment: T.int32,
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((E,), "int32")
            following = T.alloc_shared((E,), "int32")  # the next row of each expert
            sums = T.alloc_shared((2, E), "int32")  # of aligned counts, from one step of the scan to the next
            keys = T.alloc_shared((threads,), "int32")
            whole = T.alloc_var("int32", init=0)
            earlier = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            last = T.alloc_var("int32", init=0)
            size = T.alloc_var("int32", init=0)
            key = T.alloc_var("int32", init=0)
            rank = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            turns = T.alloc_var("int32", init=0)

            # Ids of each expert in all parts, and in those before this one.
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    whole = 0
                    earlier = 0
                    if not alone:
                        for p in T.serial(P):
                            whole += parts[p, g * threads + thread]
                            if p < block:
                                earlier += parts[p, g * threads + thread]
                    total[g * threads + thread] = whole
                    following[g * threads + thread] = earlier
            T.sync_threads()
            if alone:
                for r in T.serial(rounds):
                    if r * threads + thread < count:
                        expert = ids[r * threads + thread]
                        if expert >= 0 and expert < E:
                            T.atomic_add(total[T.cast(expert, "int32")], 1)
                T.sync_threads()

            # Where each expert's rows end: a sum over twice as many experts in each step.
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    sums[0, g * threads + thread] = (
                        T.truncdiv(total[g * threads + thread] + alignment - 1, alignment) * alignment
                    )
            T.sync_threads()
            for s in T.unroll(steps):
                for g in T.serial(T.ceildiv(E, threads)):
                    if g * threads + thread < E:
                        if g * threads + thread >= (1 << s):
                            sums[(s + 1) % 2, g * threads + thread] = (
                                sums[s % 2, g * threads + thread] + sums[s % 2, g * threads + thread - (1 << s)]
                            )
                        else:
                            sums[(s + 1) % 2, g * threads + thread] = sums[s % 2, g * threads + thread]
                T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    last = sums[steps % 2, g * threads + thread]
                    size = T.truncdiv(total[g * threads + thread] + alignment - 1, alignment) * alignment
                    following[g * threads + thread] += last - size
                    if block == 0:
                        starts[g * threads + thread] = last - size
                        ends[g * threads + thread] = last
                        sizes[g * threads + thread] = size
            T.sync_threads()

            # Padding: that of every P-th expert, and a share of what lies behind the last one.
            for i in T.serial(T.ceildiv(E, P)):
                if i * P + block < E:
                    last = sums[steps % 2, i * P + block]
                    size = T.truncdiv(total[i * P + block] + alignment - 1, alignment) * alignment
                    first = last - size + total[i * P + block]
                    for j in T.serial(T.ceildiv(last - first, threads)):
                        if first + j * threads + thread < last:
                            to_expert[first + j * threads + thread] = -1
                            to_token[first + j * threads + thread] = -1
                            to_choice[first + j * threads + thread] = -1
            first = sums[steps % 2, E - 1]
            for j in T.serial(T.ceildiv(rows - first, P * threads)):
                if first + (j * P + block) * threads + thread < rows:
                    to_expert[first + (j * P + block) * threads + thread] = -1
                    to_token[first + (j * P + block) * threads + thread] = -1
                    to_choice[first + (j * P + block) * threads + thread] = -1

            turns = rounds
            if alone and block > 0:
                turns = 0
            for r in T.serial(turns):
                place = (block * rounds + r) * threads + thread
                key = -1  # an id of no expert, or beyond the ids
                if place < count:
                    expert = ids[place]
                    if expert >= 0 and expert < E:
                        key = T.cast(expert, "int32")
                keys[thread] = key
                T.sync_threads()
                rank = 0
                for j in T.serial(threads):
                    if j < thread and keys[j] == key:
                        rank += 1
                row = -1
                if key >= 0:
                    row = following[key] + rank
                    to_expert[row] = key
                    to_token[row] = T.truncdiv(place, K)
                    to_choice[row] = place
                if place < count:
                    by_choice[place] = row
                T.sync_threads()  # every thread has read the counters
                if key >= 0:
                    T.atomic_add(following[key], 1)
                T.sync_threads()

    return map_ids


def run_get_fused_mapping(
    ids,
    num_experts,
    alignment,
    pos_to_expert,
    pos_to_token,
    pos_to_token_topk,
    token_topk_to_pos,
    expert_start,
    expert_end,
    num_tokens_per_expert,
    *,
    threads=128,
):
    """Tables of a buffer whose rows lie by expert, each expert's first row at a multiple of `alignment`, and their inverse.

    ids: [M, K] int64, contiguous; pos_to_*: [P], token_topk_to_pos: [M, K], the others [E], int32; E = num_experts at most 1024,
    P = floor((M K + (alignment - 1) E) / alignment) * alignment. Ids outside of 0..E-1 have no row. Ids are shared out in order
    to at most MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all counts where its ids belong, and
    writes a share of the padding. Few ids are counted by every block and placed by the first, in one launch.
    """
    E, K = num_experts, ids.shape[1]
    count, rows = ids.numel(), pos_to_expert.shape[0]
    tables = (pos_to_expert, pos_to_token, pos_to_token_topk)
    experts = (expert_start, expert_end, num_tokens_per_expert)
    flat, by_choice = ids.view(-1), token_topk_to_pos.view(-1)
    if count == 0:  # no tensor may be empty
        flat = torch.empty(1, dtype=torch.int64, device=ids.device)
        by_choice = torch.empty(1, dtype=torch.int32, device=ids.device)
    if rows == 0:
        tables = (by_choice, by_choice, by_choice)
    tiles = -(-count // threads)
    if count <= FEW_IDS:
        blocks = max(1, min(MOST_BLOCKS, -(-rows // ROWS_OF_A_BLOCK)))
        parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)  # its size is the grid's
        kernel = map_kernel(E, K, threads, True)
        kernel(flat, parts, *tables, by_choice, *experts, count, rows, tiles, alignment)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    parts = torch.empty(-(-tiles // rounds), E, dtype=torch.int32, device=ids.device)
    count_kernel(E, threads)(flat, parts, count, rounds)
    map_kernel(E, K, threads, False)(flat, parts, *tables, by_choice, *experts, count, rows, rounds, alignment)
