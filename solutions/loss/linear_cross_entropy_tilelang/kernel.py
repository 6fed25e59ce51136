"""The head of a language model, its loss and both gradients in chunks of tokens, TileLang: four kernels a chunk."""

import functools

import tilelang
import tilelang.language as T
import torch

BLOCK_M, BLOCK_K = 128, 64
GROUP = 8  # rows of tiles that share columns of the other factor in L2


def one_warp_fetches(tiles, stages):
    """Return a schedule in which eight warps multiply and one more fetches by TMA, `stages` tiles ahead.

    By default four warps wait for room and one of them fetches. Nothing waits for the other three, so one of them can miss
    two turns of its barrier and wait for ever.
    """
    steps = T.WSScope(
        "steps",
        {
            "fetcher": [T.WSSync.producer_acquire("tiles"), "fetch_a", "fetch_b", T.WSSync.producer_commit("tiles")],
            "multiplier": [T.WSSync.consumer_wait("tiles"), "multiply", T.WSSync.consumer_release("tiles")],
        },
    )
    waves = T.WSScope("waves", {"fetcher": ["place", "steps"], "multiplier": ["place", "clear", "steps", "store"]})
    root = T.WSScope(T.WSScope.ROOT, {"fetcher": ["waves"], "multiplier": ["waves"]})
    roles = [T.WSRole("multiplier", warps_lo=0, warps_hi=8), T.WSRole("fetcher", warps_lo=8, warps_hi=9)]
    pipelines = [T.WSPipeline("tiles", tiles, depth=stages)]
    return T.WSSchedule(num_warps=12, roles=roles, pipelines=pipelines, scopes=[steps, waves, root])


@functools.cache
@tilelang.jit
def product_kernel(M, N, K, dtype, a_rows, b_rows, adds, keeps, block_N, stages, multiprocessors):
    """Compile out [M, N] = a @ b: one CTA a multiprocessor walks over the output tiles.

    a is [M, K] in memory with `a_rows`, else [K, M]; b is [N, K] with `b_rows`, else [K, N]. M may be None: dynamic. With
    `adds`, partial is added to the sums. With `keeps`, these are stored there and not in out.
    """
    M = T.dynamic("M") if M is None else M
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    steps = -(-K // BLOCK_K)
    a_shape, b_shape = (M, K) if a_rows else (K, M), (N, K) if b_rows else (K, N)
    a_block, b_block = (
        (BLOCK_M, BLOCK_K) if a_rows else (BLOCK_K, BLOCK_M),
        (block_N, BLOCK_K) if b_rows else (BLOCK_K, block_N),
    )
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def product(
        a: T.StridedTensor(a_shape, (a_stride, 1), dtype),
        b: T.StridedTensor(b_shape, (b_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
        partial: T.Tensor((M, N) if adds or keeps else (1, 1), "float32"),
    ):
        with T.Kernel(multiprocessors, threads=256) as block:
            T.assume(a_stride % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() sees to it
            T.assume(b_stride % 8 == 0)
            a_tile = T.alloc_shared(a_block, dtype)
            b_tile = T.alloc_shared(b_block, dtype)
            sums = T.alloc_fragment((BLOCK_M, block_N), "float32")
            m = T.alloc_var("int32")  # variables, or every step of the loop over K would compute them again
            n = T.alloc_var("int32")
            tiles_M, tiles_N = T.ceildiv(M, BLOCK_M), T.ceildiv(N, block_N)

            T.annotate_ws_schedule(one_warp_fetches([a_tile, b_tile], stages))
            for wave in T.serial(T.ceildiv(tiles_M * tiles_N - block, multiprocessors), annotations={T.WSID: "waves"}):
                tile = wave * multiprocessors + block
                band = tile // (GROUP * tiles_N)
                rows = T.min(GROUP, tiles_M - band * GROUP)
                with T.ws_op("place"):
                    m = (band * GROUP + tile % (GROUP * tiles_N) % rows) * BLOCK_M
                    n = tile % (GROUP * tiles_N) // rows * block_N
                T.clear(sums, annotations={T.WSID: "clear"})
                for k in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                    if a_rows:
                        T.copy(a[m, k * BLOCK_K], a_tile, annotations={T.WSID: "fetch_a"})
                    else:
                        T.copy(a[k * BLOCK_K, m], a_tile, annotations={T.WSID: "fetch_a"})
                    if b_rows:
                        T.copy(b[n, k * BLOCK_K], b_tile, annotations={T.WSID: "fetch_b"})
                    else:
                        T.copy(b[k * BLOCK_K, n], b_tile, annotations={T.WSID: "fetch_b"})
                    T.gemm(
                        a_tile,
                        b_tile,
                        sums,
                        transpose_A=not a_rows,
                        transpose_B=b_rows,
                        policy=policy,
                        annotations={T.WSID: "multiply"},
                    )
                for i, j in T.Parallel(BLOCK_M, block_N, annotations={T.WSID: "store"}):
                    if m + i < M and n + j < N:
                        if adds and keeps:
                            partial[m + i, n + j] = sums[i, j] + partial[m + i, n + j]
                        elif keeps:
                            partial[m + i, n + j] = sums[i, j]
                        elif adds:
                            out[m + i, n + j] = sums[i, j] + partial[m + i, n + j]
                        else:
                            out[m + i, n + j] = sums[i, j]

    return product


@T.macro
def reduce_block(kind, thread, warps, value, partial):
    """Leave in value[0] the max or the sum over the warps of a CTA."""
    value[0] = T.warp_reduce_max(value[0]) if kind == "max" else T.warp_reduce_sum(value[0])
    if thread % 32 == 0:
        partial[thread // 32] = value[0]
    T.sync_threads()
    value[0] = partial[0]
    for w in T.unroll(1, warps):
        value[0] = T.max(value[0], partial[w]) if kind == "max" else value[0] + partial[w]


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def logits_to_gradients_kernel(V, dtype, vec, threads, repeat):
    """Compile for V columns: store the loss of a row, and write the gradient of its logits over them."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * repeat))

    @T.prim_func
    def logits_to_gradients(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        grad_loss: T.Tensor((M,), "float32"),
        loss: T.Tensor((M,), "float32"),
        ignore_index: T.int64,
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(stride % vec == 0)
            thread = T.get_thread_binding(0)
            loaded = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            partial_max = T.alloc_shared((warps,), "float32")
            partial_sum = T.alloc_shared((warps,), "float32")
            own_top = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)
            of_label = T.alloc_var("float32", init=0.0)
            at_label = T.alloc_var("float32", init=0.0)
            series = T.alloc_var("float32", init=0.0)
            factor = T.alloc_var("float32", init=0.0)
            off = T.alloc_var("float32", init=0.0)
            label = T.alloc_var("int64", init=0)
            active = T.alloc_var("int32", init=0)

            label = labels[row]
            active = T.if_then_else(label == ignore_index, 0, steps)  # an ignored row is not read
            of_label = T.float32(float("nan"))  # a label that is neither a column nor ignored is an error
            if label >= 0 and label < V:
                of_label = T.cast(logits[row, label], "float32")
            own_top[0] = -T.infinity("float32")
            top[0] = -T.infinity("float32")
            total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(repeat):
                    column = ((step * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        loaded[i, v] = -T.infinity(dtype)
                    if column < V:
                        for v in T.vectorized(vec):
                            loaded[i, v] = logits[row, column + v]
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        top[0] = T.max(top[0], T.cast(loaded[i, v], "float32"))
                safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                total[0] = total[0] * T.__exp(own_top[0] - safe)
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        total[0] += T.__exp(T.cast(loaded[i, v], "float32") - safe)
                own_top[0] = top[0]
            reduce_block("max", thread, warps, top, partial_max)
            total[0] = total[0] * T.__exp(own_top[0] - top[0])
            reduce_block("sum", thread, warps, total, partial_sum)
            total[0] = T.log(total[0])
            if thread == 0:
                loss[row] = T.if_then_else(label == ignore_index, 0.0, total[0] + (top[0] - of_label))
            # exp(score) - 1; near 0 by its series, as the difference would have no correct digit
            of_label = (of_label - top[0]) - total[0]
            series = of_label / 8.0 + 1.0
            for divisor in T.unroll(6):
                series = of_label / T.cast(7 - divisor, "float32") * series + 1.0
            at_label = T.if_then_else(of_label > -0.4, of_label * series, T.exp(of_label) - 1.0)
            factor = grad_loss[row]
            for back in T.serial(steps):  # backwards: the end of the row was read last and is still in cache
                for i in T.unroll(repeat):
                    column = (((steps - 1 - back) * repeat + i) * threads + thread) * vec
                    if column < V:
                        if label == ignore_index:
                            for v in T.unroll(vec):
                                result[v] = T.cast(0.0, dtype)
                        else:
                            for v in T.vectorized(vec):
                                loaded[i, v] = logits[row, column + v]
                            for v in T.unroll(vec):
                                off = T.__exp((T.cast(loaded[i, v], "float32") - top[0]) - total[0])
                                off = T.if_then_else(label == column + v, at_label, off)
                                result[v] = T.cast(off * factor, dtype)
                        for v in T.vectorized(vec):
                            logits[row, column + v] = result[v]

    return logits_to_gradients


@functools.cache
def multiprocessor_count(index):
    """Return the multiprocessors of a GPU; on a machine without one, which only compiles, those of an H200."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


def _is_aligned(tensor):
    """Return True if TMA takes a tensor: its rows begin at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0


def _padded(tensor):
    """Return an empty tensor of the same shape for TMA, its rows filled up to whole 16 bytes."""
    rows, columns = tensor.shape
    return torch.empty((rows, -(-columns // 8) * 8), dtype=tensor.dtype, device=tensor.device)[:, :columns]


def run(
    hidden,
    weight,
    labels,
    grad_loss,
    ignore_index,
    loss,
    grad_hidden,
    grad_weight,
    *,
    CHUNK=2048,
    block_N=256,
    threads=512,
):
    """Write the loss of each token and the gradients of sum(loss * grad_loss).

    hidden, grad_hidden [M, H] and weight, grad_weight [V, H] in T (bfloat16, float16); labels [M] int64; grad_loss, loss
    [M] float32. CHUNK tokens at a time: their logits in T, the losses and the gradient of the logits in their place, then
    both products with it. With several chunks, the gradient of the weight is added up in a float32 tensor of its size.
    Inputs that TMA cannot address are copied, which is slow.
    """
    M, H = hidden.shape
    V = weight.shape[0]
    if M == 0:
        grad_weight.zero_()
        return
    dtype, multiprocessors = hidden.dtype, multiprocessor_count(hidden.device.index)
    hidden, weight = (one if _is_aligned(one) else _padded(one).copy_(one) for one in (hidden, weight))
    stages = 192 * 1024 // ((BLOCK_M + block_N) * BLOCK_K * 2)
    chunks = -(-M // CHUNK)
    rows = -(-M // chunks)
    logits = torch.empty((rows, -(-V // 8) * 8), dtype=dtype, device=hidden.device)[:, :V]
    none = torch.empty((1, 1), dtype=torch.float32, device=hidden.device)
    partial = torch.empty((V, H), dtype=torch.float32, device=hidden.device) if chunks > 1 else none
    vec = 8 if V % 8 == 0 else V & -V
    threads = max(64, min(threads, 32 * -(-V // (128 * vec))))
    common = (False, False, block_N, stages, multiprocessors)
    to_logits = product_kernel(None, V, H, dtype, True, True, *common)
    to_hidden = product_kernel(None, H, V, dtype, True, False, *common)
    to_gradients = logits_to_gradients_kernel(V, dtype, vec, threads, 4)
    for start in range(0, M, rows):
        stop = min(M, start + rows)
        chunk, part = logits[: stop - start], hidden[start:stop]
        to_logits(part, weight, chunk, none)
        to_gradients(chunk, labels[start:stop], grad_loss[start:stop], loss[start:stop], ignore_index)
        to_hidden(chunk, weight, grad_hidden[start:stop], none)
        adds, keeps = start > 0, stop < M
        shape = (V, H, stop - start, dtype, False, False)
        to_weight = product_kernel(*shape, adds, keeps, block_N, stages, multiprocessors)
        to_weight(chunk, part, grad_weight, partial if adds or keeps else none)
