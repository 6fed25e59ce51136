"""Experts with FP8 weights, TileLang: ids are sorted by expert on the device; casts, two grouped products and a sum follow."""

import functools

import tilelang
import tilelang.language as T
import torch
from kernel import run_grouped

GROUP = 128  # channels that share a scale
CODE = "float8_e4m3fn"
ROUTING_THREADS = 256
FEW_PAIRS = 1024  # up to this many pairs of token and choice every thread block counts all ids itself, in one launch
MOST_PARTS = 128
LANES, VALUES, ROWS = 8, 16, 8  # threads of a block of 128 channels, channels of a thread, rows of a thread block


@functools.cache
@tilelang.jit
def count_ids_kernel(bins, threads):
    """Compile counts[part, e] = how many of the part's ids are e, for up to `bins` experts."""
    P, N = T.dynamic("P N")

    @T.prim_func
    def count_ids(
        ids: T.Tensor((N,), "int64"), counts: T.Tensor((P, bins), "int32"), experts: T.int32, rounds: T.int32
    ):
        with T.Kernel(P, threads=threads) as part:
            thread = T.get_thread_binding(0)
            histogram = T.alloc_shared((bins,), "int32")

            for g in T.serial(bins // threads):
                histogram[g * threads + thread] = 0
            T.sync_threads()
            for r in T.serial(rounds):
                place = (part * rounds + r) * threads + thread
                if place < N:
                    expert = ids[place]
                    if expert >= 0 and expert < experts:
                        T.atomic_add(histogram[T.cast(expert, "int32")], 1)
            T.sync_threads()
            for g in T.serial(bins // threads):
                counts[part, g * threads + thread] = histogram[g * threads + thread]

    return count_ids


@T.macro
def scan(ends, thread, bins):
    """Running sums along ends, in place by one warp."""
    value = T.alloc_var("int32", init=0)
    other = T.alloc_var("int32", init=0)
    carry = T.alloc_var("int32", init=0)
    if thread < 32:
        for part in T.serial(bins // 32):
            value = ends[part * 32 + thread]
            for step in T.unroll(5):
                other = T.shfl_up(value, 1 << step)
                if thread >= 1 << step:
                    value += other
            value += carry
            ends[part * 32 + thread] = value
            carry = T.shfl_sync(value, 31)


@functools.cache
@tilelang.jit
def place_ids_kernel(bins, threads, counted):
    """Compile the slots of each part's ids, -1 for those of no expert, and where the slots of each expert end.

    Slots are places among the pairs sorted stably by expert. Without `counted` each part counts all ids itself.
    """
    P, N, E = T.dynamic("P N E")

    @T.prim_func
    def place_ids(
        ids: T.Tensor((N,), "int64"),
        counts: T.Tensor((P, bins), "int32"),
        slots: T.Tensor((N,), "int32"),
        offs: T.Tensor((E,), "int32"),
        rounds: T.int32,
    ):
        with T.Kernel(P, threads=threads) as part:
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((bins,), "int32")
            before = T.alloc_shared((bins,), "int32")  # of each expert in earlier parts; later its next slot
            ends = T.alloc_shared((bins,), "int32")
            keys = T.alloc_shared((threads,), "int32")
            key = T.alloc_var("int32", init=0)
            rank = T.alloc_var("int32", init=0)
            all_of = T.alloc_var("int32", init=0)
            earlier = T.alloc_var("int32", init=0)

            for g in T.serial(bins // threads):
                all_of = 0
                earlier = 0
                if counted:
                    for p in T.serial(P):
                        all_of += counts[p, g * threads + thread]
                        if p < part:
                            earlier += counts[p, g * threads + thread]
                total[g * threads + thread] = all_of
                before[g * threads + thread] = earlier
            T.sync_threads()
            if not counted:
                for r in T.serial(T.ceildiv(N, threads)):
                    place = r * threads + thread
                    if place < N:
                        expert = ids[place]
                        if expert >= 0 and expert < E:
                            T.atomic_add(total[T.cast(expert, "int32")], 1)
                            if place < part * rounds * threads:
                                T.atomic_add(before[T.cast(expert, "int32")], 1)
                T.sync_threads()
            for g in T.serial(bins // threads):
                ends[g * threads + thread] = total[g * threads + thread]
            T.sync_threads()
            scan(ends, thread, bins)
            T.sync_threads()
            for g in T.serial(bins // threads):
                if part == 0 and g * threads + thread < E:
                    offs[g * threads + thread] = ends[g * threads + thread]
                before[g * threads + thread] += ends[g * threads + thread] - total[g * threads + thread]
            T.sync_threads()

            for r in T.serial(rounds):
                place = (part * rounds + r) * threads + thread
                key = -1
                if place < N:
                    expert = ids[place]
                    if expert >= 0 and expert < E:
                        key = T.cast(expert, "int32")
                keys[thread] = key
                T.sync_threads()
                rank = 0
                for j in T.serial(threads):
                    if j < thread and keys[j] == key:
                        rank += 1
                if key >= 0:
                    rank += before[key]
                if place < N:
                    slots[place] = T.if_then_else(key >= 0, rank, -1)
                T.sync_threads()  # every thread has read the counters
                if key >= 0:
                    T.atomic_add(before[key], 1)
                T.sync_threads()

    return place_ids


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_into_slots_kernel(H, K, vec):
    """Compile codes and scales of a token's row into the slots of its K choices. A thread has 16 channels of a token."""
    M, P = T.dynamic("M P")
    x_stride = T.dynamic("x_stride", "int64")
    blocks = -(-H // GROUP)
    units = -(-blocks // 2)  # pairs of blocks: two of them and eight rows are 128 threads
    whole = H % VALUES == 0

    @T.prim_func
    def cast_into_slots(
        x: T.StridedTensor((M, H), (x_stride, 1), "bfloat16"),
        slots: T.Tensor((M, K), "int32"),
        codes: T.Tensor((P, H), CODE),
        scale: T.Tensor((blocks, P), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, ROWS) * units, threads=(2 * LANES, ROWS)) as unit:
            T.assume(x_stride % vec == 0)  # run_experts() chose vec so
            row = unit // units * ROWS + T.get_thread_binding(1)
            block = unit % units * 2 + T.get_thread_binding(0) // LANES
            column = block * GROUP + T.get_thread_binding(0) % LANES * VALUES
            loaded = T.alloc_local((VALUES,), "bfloat16")
            made = T.alloc_local((VALUES,), CODE)
            amax = T.alloc_var("float32", init=1e-4)
            inverse = T.alloc_var("float32")
            slot = T.alloc_var("int32", init=0)

            for c in T.unroll(VALUES // vec):
                for v in T.vectorized(vec):
                    loaded[c * vec + v] = 0
                if row < M and column + c * vec < H:
                    for v in T.vectorized(vec):
                        loaded[c * vec + v] = x[row, column + c * vec + v]
            for v in T.unroll(VALUES):
                amax = T.max(amax, T.abs(T.cast(loaded[v], "float32")))
            for step in T.unroll(3):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            inverse = T.float32(448.0) / amax
            for v in T.vectorized(VALUES):  # the cast saturates
                made[v] = T.cast(T.cast(loaded[v], "float32") * inverse, CODE)
            if row < M and block < blocks:
                for choice in T.serial(K):
                    slot = slots[row, choice]
                    if slot >= 0:
                        if whole:
                            if column < H:
                                for v in T.vectorized(VALUES):
                                    codes[slot, column + v] = made[v]
                        else:
                            for v in T.unroll(VALUES):
                                if column + v < H:
                                    codes[slot, column + v] = made[v]
                        if T.get_thread_binding(0) % LANES == 0:
                            scale[block, slot] = amax / T.float32(448.0)

    return cast_into_slots


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def activate_and_cast_kernel(I, vec):
    """Compile codes and scales of silu(gate) * up, each step rounded to bfloat16; both [rows, 2 I] has gate first."""
    P = T.dynamic("P")
    blocks = -(-I // GROUP)
    units = -(-blocks // 2)
    whole = I % VALUES == 0

    @T.prim_func
    def activate_and_cast(
        both: T.Tensor((P, 2 * I), "bfloat16"),
        codes: T.Tensor((P, I), CODE),
        scale: T.Tensor((blocks, P), "float32"),
    ):
        with T.Kernel(T.ceildiv(P, ROWS) * units, threads=(2 * LANES, ROWS)) as unit:
            row = unit // units * ROWS + T.get_thread_binding(1)
            block = unit % units * 2 + T.get_thread_binding(0) // LANES
            column = block * GROUP + T.get_thread_binding(0) % LANES * VALUES
            gate = T.alloc_local((VALUES,), "bfloat16")
            up = T.alloc_local((VALUES,), "bfloat16")
            made = T.alloc_local((VALUES,), CODE)
            amax = T.alloc_var("float32", init=1e-4)
            inverse = T.alloc_var("float32")
            wide = T.alloc_var("float32")

            for c in T.unroll(VALUES // vec):
                for v in T.vectorized(vec):
                    gate[c * vec + v] = 0
                for v in T.vectorized(vec):
                    up[c * vec + v] = 0
                if row < P and column + c * vec < I:
                    for v in T.vectorized(vec):
                        gate[c * vec + v] = both[row, column + c * vec + v]
                    for v in T.vectorized(vec):
                        up[c * vec + v] = both[row, I + column + c * vec + v]
            for v in T.unroll(VALUES):
                wide = T.cast(gate[v], "float32")
                wide = T.cast(T.cast(wide / (1.0 + T.exp(-wide)), "bfloat16"), "float32")
                gate[v] = T.cast(wide * T.cast(up[v], "float32"), "bfloat16")
                amax = T.max(amax, T.abs(T.cast(gate[v], "float32")))
            for step in T.unroll(3):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            inverse = T.float32(448.0) / amax
            for v in T.vectorized(VALUES):  # the cast saturates
                made[v] = T.cast(T.cast(gate[v], "float32") * inverse, CODE)
            if row < P and block < blocks:
                if whole:
                    if column < I:
                        for v in T.vectorized(VALUES):
                            codes[row, column + v] = made[v]
                else:
                    for v in T.unroll(VALUES):
                        if column + v < I:
                            codes[row, column + v] = made[v]
                if T.get_thread_binding(0) % LANES == 0:
                    scale[block, row] = amax / T.float32(448.0)

    return activate_and_cast


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def sum_choices_kernel(K, weight_dtype, vec, threads):
    """Compile out[token] = sum over its K choices, in order, of weight times row, each rounded to bfloat16: a CTA a token."""
    M, P = T.dynamic("M P")
    H, out_stride = T.dynamic("H out_stride", "int64")

    @T.prim_func
    def sum_choices(
        rows: T.Tensor((P, H), "bfloat16"),
        slots: T.Tensor((M, K), "int32"),
        weights: T.Tensor((M, K), weight_dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(M, threads=threads) as token:
            T.assume(H % vec == 0)  # run_experts() chose vec so
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = T.alloc_local((vec,), "bfloat16")
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), "bfloat16")
            slot = T.alloc_var("int32", init=0)
            share = T.alloc_var("float32", init=0.0)

            for c in T.serial(T.ceildiv(H, threads * vec)):
                column = (c * threads + thread) * vec
                if column < H:
                    for v in T.unroll(vec):
                        total[v] = 0.0
                    for k in T.serial(K):
                        slot = slots[token, k]
                        share = T.cast(T.cast(weights[token, k], "bfloat16"), "float32")
                        if slot >= 0:
                            for v in T.vectorized(vec):
                                row[v] = rows[slot, column + v]
                            for v in T.unroll(vec):
                                product = T.cast(row[v], "float32") * share
                                total[v] += T.cast(T.cast(product, "bfloat16"), "float32")
                    for v in T.unroll(vec):
                        result[v] = T.cast(total[v], "bfloat16")
                    for v in T.vectorized(vec):
                        out[token, column + v] = result[v]

    return sum_choices


def _cdiv(value, divisor):
    return -(-value // divisor)


def _vector(sizes, tensors=()):
    """The widest power of two, at most 8, that divides all sizes and the addresses of all tensors, in elements of bfloat16."""
    bits = 8
    for size in sizes:
        bits |= size
    for tensor in tensors:
        bits |= tensor.data_ptr() // 2
    return bits & -bits


def _route(ids, experts):
    """Slots of the pairs of token and choice, and where those of each expert end."""
    pairs = ids.numel()
    bins = max(ROUTING_THREADS, 1 << (experts - 1).bit_length())  # few different numbers, each of which is compiled
    tiles = _cdiv(pairs, ROUTING_THREADS)
    rounds = _cdiv(tiles, MOST_PARTS)
    parts = _cdiv(tiles, rounds)
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    offs = torch.empty(experts, dtype=torch.int32, device=ids.device)
    counts = torch.empty((parts, bins), dtype=torch.int32, device=ids.device)
    flat = ids.view(-1)
    if pairs > FEW_PAIRS:
        count_ids_kernel(bins, ROUTING_THREADS)(flat, counts, experts, rounds)
    place_ids_kernel(bins, ROUTING_THREADS, pairs > FEW_PAIRS)(flat, counts, slots.view(-1), offs, rounds)
    return slots, offs


def _codes(rows, columns, device):
    """Room for codes [rows, columns], and for their scales a column of them for each block of 128 channels."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((_cdiv(columns, GROUP), rows), dtype=torch.float32, device=device)


def run_experts(
    x, ids, weights, gate_up, gate_up_scale, down, down_scale, out, *, block_M=None, block_N=None, stages=None
):
    """out[t] = sum over choices of weights[t, k] * (silu(x gate^T) * (x up^T)) down^T of expert ids[t, k], activations cast.

    Shapes: x and out [M, H] in bfloat16 with unit last stride, any row stride; ids [M, K] int64, weights [M, K]; gate_up
    [E, 2 I, H] with gate rows first and down [E, H, I] in float8_e4m3fn, scales of blocks of 128 x 128 in float32, contiguous.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    Pairs of token and choice are sorted by expert on the device, and nothing is read back. A token is cast once and written
    to the slots of its choices. block_M, block_N and stages are those of `run_grouped`, for both products.
    """
    M, H = out.shape
    if M == 0:
        return
    K, I = ids.shape[1], down.shape[2]
    tiles = {"block_M": block_M, "block_N": block_N, "stages": stages}
    slots, offs = _route(ids, down.shape[0])
    codes, scale = _codes(M * K, H, x.device)
    cast_into_slots_kernel(H, K, _vector((H, x.stride(0)), (x,)))(x, slots, codes, scale)
    both = torch.empty((M * K, 2 * I), dtype=torch.bfloat16, device=x.device)
    run_grouped(codes, gate_up, scale.T, gate_up_scale, offs, both, **tiles)
    inner, inner_scale = _codes(M * K, I, x.device)
    activate_and_cast_kernel(I, _vector((I,)))(both, inner, inner_scale)
    rows = torch.empty((M * K, H), dtype=torch.bfloat16, device=x.device)
    run_grouped(inner, down, inner_scale.T, down_scale, offs, rows, **tiles)
    vec = _vector((H, out.stride(0)), (out,))
    sum_choices_kernel(K, weights.dtype, vec, min(256, 32 * _cdiv(H, 32 * vec)))(rows, slots, weights, out)
