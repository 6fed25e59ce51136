"""Rows of a grouped product in whole tiles of one expert each, in TileLang: counters of a block in shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_IDS = 1024  # up to this many, every thread block counts them all, in one launch
MOST_BLOCKS = 128
ROWS = 8  # of a thread in one launch: how many blocks share the filling up


@functools.cache
@tilelang.jit
def count_kernel(E, threads):
    """Compile for E experts: how often each is among the ids of each block."""
    P, N = T.dynamic("P"), T.dynamic("N")

    @T.prim_func
    def count_part(ids: T.Tensor((N,), "int32"), parts: T.Tensor((P, E), "int32"), rounds: T.int32):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            histogram = T.alloc_shared((E,), "int32")

            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    histogram[g * threads + thread] = 0
            T.sync_threads()
            for r in T.serial(rounds):
                place = (block * rounds + r) * threads + thread
                if place < N:
                    expert = ids[place]
                    if expert >= 0 and expert < E:
                        T.atomic_add(histogram[expert], 1)
            T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    parts[block, g * threads + thread] = histogram[g * threads + thread]

    return count_part


@functools.cache
@tilelang.jit
def align_kernel(E, threads, alone):
    """Compile for E experts: rows are placed, and filled up to whole tiles; `alone` where each block counts all ids itself."""
    P, N, S, B = T.dynamic("P"), T.dynamic("N"), T.dynamic("S"), T.dynamic("B")
    steps = E.bit_length()  # of a search among E experts

    @T.prim_func
    def align(
        ids: T.Tensor((N,), "int32"),
        parts: T.Tensor((P, E), "int32"),
        rows: T.Tensor((S,), "int32"),
        owners: T.Tensor((B,), "int32"),
        end: T.Tensor((1,), "int32"),
        count: T.int32,
        size: T.int32,
        block_size: T.int32,
        blocks: T.int32,
        rounds: T.int32,
        row_rounds: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as block:
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((E + 1,), "int32")
            before = T.alloc_shared((E,), "int32")
            following = T.alloc_shared((E,), "int32")  # the next row of each expert
            padded = T.alloc_shared((E + 1,), "int32")
            ends = T.alloc_shared((E + 1,), "int32")
            keys = T.alloc_shared((threads,), "int32")
            below = T.alloc_var("int32", init=0)
            earlier = T.alloc_var("int32", init=0)
            key = T.alloc_var("int32", init=0)
            rank = T.alloc_var("int32", init=0)
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=0)
            middle = T.alloc_var("int32", init=0)

            if thread == 0:  # what lies beyond all experts has no rows
                total[E] = 0
                padded[E] = 0
                ends[E] = 0
            # Ids of each expert in all parts, and in those before this one. Alone, the first block has all of them to place.
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    below = 0
                    earlier = 0
                    if not alone:
                        for p in T.serial(blocks):
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
                            T.atomic_add(total[expert], 1)
                T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                if g * threads + thread < E:
                    below = total[g * threads + thread]
                    padded[g * threads + thread] = T.truncdiv(below + block_size - 1, block_size) * block_size
            T.sync_threads()
            for g in T.serial(T.ceildiv(E, threads)):
                below = 0
                for e in T.serial(E):  # all threads read the same counter: no bank conflicts
                    if e < g * threads + thread:
                        below += padded[e]
                if g * threads + thread < E:
                    following[g * threads + thread] = below + before[g * threads + thread]
                    ends[g * threads + thread] = below + padded[g * threads + thread]
            T.sync_threads()
            if block == 0 and thread == 0:
                end[0] = ends[E - 1]

            # This block's share of all rows: those that no id has, and the owner of each tile that begins there.
            for r in T.serial(row_rounds):
                slot = (block * row_rounds + r) * threads + thread
                if slot < size:
                    low = 0  # the first expert whose rows end beyond the slot, E where none does
                    high = E
                    for _ in T.serial(steps):
                        if low < high:
                            middle = (low + high) >> 1
                            if ends[middle] <= slot:
                                low = middle + 1
                            else:
                                high = middle
                    key = -1
                    if slot < ends[low] - padded[low] + total[low]:
                        key = low
                    if key < 0:
                        rows[slot] = count
                    if T.truncmod(slot, block_size) == 0:
                        key = low
                        if low == E:
                            key = -1
                        owners[T.truncdiv(slot, block_size)] = key

            for r in T.serial(T.if_then_else(block == 0, rounds, 0) if alone else rounds):
                place = (block * rounds + r) * threads + thread
                key = -1
                if place < count:
                    key = ids[place]
                    if key >= E:
                        key = -1
                keys[thread] = key
                T.sync_threads()
                rank = 0
                for j in T.serial(threads):
                    if j < thread and keys[j] == key:
                        rank += 1
                if key >= 0:
                    rows[following[key] + rank] = place
                T.sync_threads()  # every thread has read the counters
                if key >= 0:
                    T.atomic_add(following[key], 1)
                T.sync_threads()

    return align


def run(topk_ids, block_size, num_experts, sorted_token_ids, expert_ids, num_tokens_post_padded, *, threads=128):
    """Rows = flat indices of the ids, sorted stably by expert, each expert's filled up with M * K to tiles of one expert each.

    topk_ids: [M, K] int32, contiguous; sorted_token_ids: [P], expert_ids: [P / B], num_tokens_post_padded: [1], all int32,
    P = (M * K + (B - 1) * min(E, M * K)) rounded down to whole tiles of B = block_size rows. Ids outside of 0..E-1 have no row.
    Many ids are shared out in order to at most MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all
    counts where its ids belong, and fills up its share of the rows. Of few ids, each block counts them all and fills up its
    share, and the first one places them. A block places as many ids at a time as it has threads.
    """
    E = num_experts
    count, size = topk_ids.numel(), sorted_token_ids.numel()
    ids, rows, owners = topk_ids.view(-1), sorted_token_ids, expert_ids
    if count == 0:
        ids = rows = owners = torch.empty(1, dtype=torch.int32, device=ids.device)
    tiles = -(-count // threads)
    outputs = rows, owners, num_tokens_post_padded, count, size, block_size
    if count <= FEW_IDS:
        blocks = max(1, min(-(-size // (threads * ROWS)), MOST_BLOCKS))
        row_rounds = -(-size // (blocks * threads))
        nothing = torch.empty(1, E, dtype=torch.int32, device=ids.device)
        align_kernel(E, threads, True)(ids, nothing, *outputs, blocks, tiles, row_rounds)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    row_rounds = -(-size // (blocks * threads))
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    count_kernel(E, threads)(ids, parts, rounds)
    align_kernel(E, threads, False)(ids, parts, *outputs, blocks, rounds, row_rounds)
