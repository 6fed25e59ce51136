"""Attention of one new position whose keys are split among CTAs, TileLang: the schedule, the softmax and the sum of the parts.

``causal_tilelang`` and others have copies of these functions. Their files stay as they were measured.
"""

import functools
import math

import tilelang
import tilelang.language as T
import torch

LEAST_SCORE = -3.4028234663852886e38  # where the largest score starts: finite, so that no difference of two is NaN
MASSIVE = 2.0**28  # scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0


@T.macro
def weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys):
    """Take one step of the running softmax: unscaled scores become weights; `shrink` is what earlier sums are worth now.

    `offset` is the largest score so far, scaled. The difference of a score to it is one instruction, which does not round the
    product, so that the largest weight is 2**e with e the rounding error of the offset. That factor is in the sums too. It is
    small unless scores are massive. Two massive ones that differ are so far apart that one weighs nothing: any slope will do for
    them, and by `power`, a power of two, the offset is exact. The scale must be above 0, and `power` at least as large.
    """
    T.copy(offset, shrink)
    T.reduce_max(scores, largest, dim=1, clear=True)
    for i in T.Parallel(rows):
        steep[i] = T.if_then_else(T.abs(largest[i]) * scale > MASSIVE, power, scale)
    for i in T.Parallel(rows):
        offset[i] = T.max(shrink[i], largest[i] * steep[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2(scores[i, j] * steep[i] - offset[i])
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2(shrink[i] - offset[i])
    for i in T.Parallel(rows):
        sums[i] = sums[i] * shrink[i] + added[i]


@T.macro
def weigh_differences(scores, largest, shrink, sums, added, scale, rows, keys):
    """Take one step of the running softmax, with `largest` unscaled: scores become weights; `shrink` is as in `weigh`.

    Scores are scaled after the largest one is subtracted: that one gives 0, however large it is. The scale must be above 0.
    """
    T.copy(largest, shrink)
    T.reduce_max(scores, largest, dim=1, clear=True)
    for i in T.Parallel(rows):
        largest[i] = T.max(shrink[i], largest[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2((shrink[i] - largest[i]) * scale)
    for i in T.Parallel(rows):
        sums[i] = sums[i] * shrink[i] + added[i]


def one_warp_fetches(warps, pipelines, fetch, multiply, registers=0):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, as far ahead as there are buffers.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    `pipelines` gives the buffers and the depth of each name. `fetch` and `multiply` list what is done in each scope, "wait NAME"
    and the like among it. With `registers` a thread that multiplies has so many, and one that fetches 24.
    """
    sync = {}
    for name in pipelines:
        sync[f"wait {name}"] = T.WSSync.consumer_wait(name)
        sync[f"release {name}"] = T.WSSync.consumer_release(name)
        sync[f"acquire {name}"] = T.WSSync.producer_acquire(name)
        sync[f"commit {name}"] = T.WSSync.producer_commit(name)
    bodies = {"fetcher": fetch, "multiplier": multiply}
    return T.WSSchedule(
        num_warps=-(-(warps + 1) // 4) * 4,
        roles=[
            T.WSRole("multiplier", warps_lo=0, warps_hi=warps, max_nreg=registers),
            T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1, max_nreg=24 if registers else 0),
        ],
        pipelines=[T.WSPipeline(name, buffers, depth=depth) for name, (buffers, depth) in pipelines.items()],
        scopes=[
            T.WSScope(scope, {role: [sync.get(name, name) for name in body[scope]] for role, body in bodies.items()})
            for scope in fetch
        ],
    )


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def join_kernel(D, dtype):
    """Compile out = the parts of each head, joined in the order of the spans: a thread a column, zeros without any weight."""
    B, Hq, splits, heads = T.dynamic("B Hq splits heads")
    out_b, out_h = T.dynamic("out_b out_h", "int64")
    loads = 16  # of a thread in flight

    @T.prim_func
    def join(
        parts: T.Tensor((heads, splits, D + 2), "float32"),
        out: T.StridedTensor((B, Hq, D), (out_b, out_h, 1), dtype),
    ):
        with T.Kernel(heads, threads=-(-D // 32) * 32) as row:
            batch, head = T.truncdiv(row, Hq), T.truncmod(row, Hq)
            column = T.get_thread_binding(0)
            scores = T.alloc_local((loads,), "float32")
            weights = T.alloc_local((loads,), "float32")
            values = T.alloc_local((loads,), "float32")
            largest = T.alloc_var("float32", init=LEAST_SCORE)
            share = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            acc = T.alloc_var("float32", init=0.0)

            for turn in T.serial(T.ceildiv(splits, loads)):
                for u in T.unroll(loads):
                    largest = T.max(largest, parts[row, T.min(turn * loads + u, splits - 1), D])
            for turn in T.serial(T.ceildiv(splits, loads)):
                for u in T.unroll(loads):
                    scores[u] = parts[row, T.min(turn * loads + u, splits - 1), D]
                    weights[u] = parts[row, T.min(turn * loads + u, splits - 1), D + 1]
                    values[u] = parts[row, T.min(turn * loads + u, splits - 1), T.min(column, D - 1)]
                for u in T.unroll(loads):
                    share = T.if_then_else(turn * loads + u < splits, T.exp2(scores[u] - largest), 0.0)
                    total += share * weights[u]
                    acc += share * values[u]
            if column < D:
                out[batch, head, column] = T.cast(acc / T.if_then_else(total > 0.0, total, 1.0), dtype)

    return join


def for_tma(*tensors):
    """Return True if the copy engine can address all of them: rows apart, and at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:-1]) for t in tensors
    )


@functools.lru_cache(maxsize=256)
def power_of_two(scale):
    """Return the least power of two that is no smaller than a scale above 0."""
    return 2.0 ** math.ceil(math.log2(scale))


def sign_and_size(scale):
    """Return the sign of a scale, and its size. A size of 0 is kept from it: a hidden score of -inf would become NaN."""
    return (-1.0 if scale < 0 else 1.0), max(abs(scale), 1e-30)


@functools.cache
def multiprocessor_count(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132
