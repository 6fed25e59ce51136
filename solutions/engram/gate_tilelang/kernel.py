"""The gate of n-gram memory, forward and backward, TileLang.

A row is one copy of the residual stream of one token: H values each of hidden and key, which stay in registers of a CTA between
the sums over the row and what is written. A CTA has a run of tokens of one copy, so that the weights of that copy are read once a
run; the copies of a token are neighbours in the grid and share its value row through the L2.
"""

import functools

import tilelang
import tilelang.language as T
import torch

SUM_COLUMNS = 32  # columns of a CTA that adds up partial sums of weight gradients


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def fused_weight_kernel(total, dtype, vec, threads):
    """Compile for so many values, of which a thread multiplies `vec`."""

    @T.prim_func
    def fused_weight(
        hidden: T.Tensor((total,), dtype), embed: T.Tensor((total,), dtype), out: T.Tensor((total,), "float32")
    ):
        with T.Kernel(T.ceildiv(total, threads * vec), threads=threads) as block:
            at = (block * threads + T.get_thread_binding(0)) * vec
            first = T.alloc_local((vec,), dtype)
            second = T.alloc_local((vec,), dtype)
            product = T.alloc_local((vec,), "float32")
            if at < total:
                for v in T.vectorized(vec):
                    first[v] = hidden[at + v]
                for v in T.vectorized(vec):
                    second[v] = embed[at + v]
                for v in T.unroll(vec):
                    product[v] = T.cast(first[v], "float32") * T.cast(second[v], "float32")
                for v in T.vectorized(vec):
                    out[at + v] = product[v]

    return fused_weight


def _vector(H, width, *tensors):
    """The widest power of two of elements, at most `width` of them, that divides a row and all addresses."""
    bits = H | width
    for tensor in tensors:
        bits |= tensor.data_ptr() // tensor.element_size()
    return bits & -bits


def run_fused_weight(weight_hidden, weight_embed, out, *, threads=128):
    """out = float32(weight_hidden) * float32(weight_embed), which is exact for bfloat16; all [C, H] and contiguous."""
    total = out.numel()
    if total:
        vec = _vector(total, 4, weight_hidden, weight_embed, out)
        kernel = fused_weight_kernel(total, weight_hidden.dtype, vec, threads)
        kernel(weight_hidden.view(-1), weight_embed.view(-1), out.view(-1))


@functools.cache
@tilelang.jit
def grad_w_reduce_kernel(total, dtype, groups, add):
    """Compile for so many columns: `groups` groups of threads add every groups-th part, then one of them their sums.

    add: the gradients have a value already.
    """
    parts = T.dynamic("parts")

    @T.prim_func
    def grad_w_reduce(
        partial: T.Tensor((parts, total), "float32"),
        used: T.int32,
        weight_hidden: T.Tensor((total,), dtype),
        weight_embed: T.Tensor((total,), dtype),
        grad_hidden: T.Tensor((total,), "float32"),
        grad_embed: T.Tensor((total,), "float32"),
    ):
        with T.Kernel(T.ceildiv(total, SUM_COLUMNS), threads=(SUM_COLUMNS, groups)) as block:
            lane, group = T.get_thread_binding(0), T.get_thread_binding(1)
            column = block * SUM_COLUMNS + lane
            shared = T.alloc_shared((groups, SUM_COLUMNS), "float32")
            summed = T.alloc_local((1,), "float32")
            summed[0] = 0.0
            for step in T.serial(T.ceildiv(used, groups)):
                if step * groups + group < used and column < total:
                    summed[0] += partial[step * groups + group, column]
            shared[group, lane] = summed[0]
            T.sync_threads()
            if group == 0 and column < total:
                summed[0] = 0.0
                for g in T.unroll(groups):
                    summed[0] += shared[g, lane]
                # The product rule: each weight has the other one as its factor.
                if add:
                    grad_hidden[column] += summed[0] * T.cast(weight_embed[column], "float32")
                    grad_embed[column] += summed[0] * T.cast(weight_hidden[column], "float32")
                else:
                    grad_hidden[column] = summed[0] * T.cast(weight_embed[column], "float32")
                    grad_embed[column] = summed[0] * T.cast(weight_hidden[column], "float32")

    return grad_w_reduce


def _add_parts(partial, used, weights, add, groups):
    """Both weights and their gradients, of which `add` says whether they have a value already."""
    kernel = grad_w_reduce_kernel(partial.shape[1], weights[0].dtype, groups, add)
    kernel(partial, used, *(tensor.view(-1) for tensor in weights))


def run_grad_w_reduce(grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed, *, groups=16):
    """grad_weight_hidden += sum of the parts * weight_embed, and the other way round, in place.

    Shapes: grad_w_partial [B, C, H] and both gradients [C, H] in float32, weights [C, H] in bfloat16; contiguous.
    """
    parts, total = grad_w_partial.shape[0], grad_weight_hidden.numel()
    if total:
        weights = weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed
        _add_parts(grad_w_partial.view(parts, total), parts, weights, True, groups)


def _rows(C, H, dtype, vec, threads, value_only):
    """What both kernels of the gate do with the run of tokens of a CTA, as a macro."""
    warps = threads // 32
    chunks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0  # then no access needs a bounds check

    @T.macro
    def load(source, first, second, values, thread):
        """values = source[first, second, :], zeros beyond the row."""
        for c in T.unroll(chunks):
            column = (c * threads + thread) * vec
            for v in T.vectorized(vec):
                values[c, v] = 0
            if full or column < H:
                for v in T.vectorized(vec):
                    values[c, v] = source[first, second, column + v]

    @T.macro
    def multiply_weights(weight_hidden, weight_embed, values, weight, copy, thread):
        """weight = both weights of a copy, multiplied in float32."""
        load(weight_hidden, 0, copy, values, thread)
        for c, v in T.grid(chunks, vec):
            weight[c, v] = T.cast(values[c, v], "float32") + (1.0 if value_only else 0.0)
        load(weight_embed, 0, copy, values, thread)
        for c, v in T.grid(chunks, vec):
            weight[c, v] *= T.cast(values[c, v], "float32") + (1.0 if value_only else 0.0)

    @T.macro
    def add_threads(sums, first, count, shared, parity, thread):
        """The sums of all threads of a row, in a fixed order, for all of them."""
        for s in T.unroll(count):
            sums[first + s] = T.warp_reduce_sum(sums[first + s])
        if warps > 1:
            if thread % 32 == 0:
                for s in T.unroll(count):
                    shared[parity, first + s, thread // 32] = sums[first + s]
            T.sync_threads()
            for s in T.unroll(count):
                sums[first + s] = 0.0
                for w in T.unroll(warps):
                    sums[first + s] += shared[parity, first + s, w]

    @T.macro
    def add_up(hidden, key, weight, sums, shared, parity, eps, thread):
        """sums = the factors of both norms, and the weighted product of the rows (value_only: of the normalised rows).

        Normalised first where the operator does so: the product of two rows may be out of range where that of their norms is not.
        """
        for s in T.unroll(3):
            sums[s] = 0.0
        for c, v in T.grid(chunks, vec):
            x = T.cast(hidden[c, v], "float32")
            y = T.cast(key[c, v], "float32")
            sums[0] += x * x
            sums[1] += y * y
            if not value_only:
                sums[2] += x * y * weight[c, v]
        add_threads(sums, 0, 2 if value_only else 3, shared, parity, thread)
        sums[0] = T.rsqrt(sums[0] * (1.0 / H) + eps)
        sums[1] = T.rsqrt(sums[1] * (1.0 / H) + eps)
        if value_only:
            for c, v in T.grid(chunks, vec):
                x = T.cast(hidden[c, v], "float32") * sums[0]
                y = T.cast(key[c, v], "float32") * sums[1]
                sums[2] += x * y * weight[c, v]
            add_threads(sums, 2, 1, shared, parity, thread)

    @T.macro
    def make_gate(sums, gate, clamp):
        """A score of 0 has no sign and a gate of one half."""
        gate[0] = sums[2] * (H**-0.5) if value_only else sums[2] * sums[0] * sums[1] * (H**-0.5)
        root = T.sqrt(T.max(T.abs(gate[0]), clamp))
        gate[0] = T.Select(gate[0] > 0.0, root, T.Select(gate[0] < 0.0, -root, gate[0]))  # NaN stays
        gate[0] = 1.0 / (1.0 + T.exp(-gate[0]))

    @T.macro
    def store(hidden, values, gate, result, out, token, copy, thread):
        for c in T.unroll(chunks):
            column = (c * threads + thread) * vec
            if full or column < H:
                for v in T.unroll(vec):
                    added = gate[0] * T.cast(values[c, v], "float32")
                    result[v] = T.cast(added if value_only else T.cast(hidden[c, v], "float32") + added, dtype)
                for v in T.vectorized(vec):
                    out[token, copy, column + v] = result[v]

    return warps, chunks, load, multiply_weights, add_threads, add_up, make_gate, store


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gate_kernel(C, H, dtype, vec, threads, save, value_only):
    """Compile for C copies of H elements: `threads` threads a row, moving `vec` elements at a time.

    save: what the gradient needs is written. value_only: weights are about zero, and the stream is not added.
    """
    M = T.dynamic("M")
    warps, chunks, load, multiply_weights, _, add_up, make_gate, store = _rows(C, H, dtype, vec, threads, value_only)

    @T.macro
    def gate_run(hidden, key, value, weight_hidden, weight_embed, clamp, eps, tokens, out, saved, block):
        thread = T.get_thread_binding(0)
        copy = block % C
        first = block // C * tokens
        x = T.alloc_local((chunks, vec), dtype)
        y = T.alloc_local((chunks, vec), dtype)
        values = T.alloc_local((chunks, vec), dtype)
        weight = T.alloc_local((chunks, vec), "float32")
        sums = T.alloc_local((3,), "float32")
        gate = T.alloc_local((1,), "float32")
        result = T.alloc_local((vec,), dtype)
        # Two sets in turn: a warp that is ahead may write the next row's sums while others read this one's.
        shared = T.alloc_shared((2, 3, warps), "float32")
        multiply_weights(weight_hidden, weight_embed, values, weight, copy, thread)
        for step in T.serial(T.min(tokens, M - first)):
            token = first + step
            load(hidden, token, copy, x, thread)
            load(key, token, copy, y, thread)
            load(value, 0, token, values, thread)
            add_up(x, y, weight, sums, shared, step % 2, eps, thread)
            make_gate(sums, gate, clamp)
            store(x, values, gate, result, out, token, copy, thread)
            if save and thread == 0:
                saved[0][token, copy] = sums[2]
                saved[1][token, copy] = gate[0]
                saved[2][token, copy] = sums[0]
                saved[3][token, copy] = sums[1]

    if save:

        @T.prim_func
        def engram_gate_save(
            hidden: T.Tensor((M, C, H), dtype),
            key: T.Tensor((M, C, H), dtype),
            value: T.Tensor((1, M, H), dtype),
            weight_hidden: T.Tensor((1, C, H), dtype),
            weight_embed: T.Tensor((1, C, H), dtype),
            clamp: T.float32,
            eps: T.float32,
            tokens: T.int32,
            out: T.Tensor((M, C, H), dtype),
            dot: T.Tensor((M, C), "float32"),
            gate: T.Tensor((M, C), "float32"),
            rstd_hidden: T.Tensor((M, C), "float32"),
            rstd_key: T.Tensor((M, C), "float32"),
        ):
            with T.Kernel(T.ceildiv(M, tokens) * C, threads=threads) as block:
                saved = (dot, gate, rstd_hidden, rstd_key)
                gate_run(hidden, key, value, weight_hidden, weight_embed, clamp, eps, tokens, out, saved, block)

        return engram_gate_save

    @T.prim_func
    def engram_gate(
        hidden: T.Tensor((M, C, H), dtype),
        key: T.Tensor((M, C, H), dtype),
        value: T.Tensor((1, M, H), dtype),
        weight_hidden: T.Tensor((1, C, H), dtype),
        weight_embed: T.Tensor((1, C, H), dtype),
        clamp: T.float32,
        eps: T.float32,
        tokens: T.int32,
        out: T.Tensor((M, C, H), dtype),
    ):
        with T.Kernel(T.ceildiv(M, tokens) * C, threads=threads) as block:
            gate_run(hidden, key, value, weight_hidden, weight_embed, clamp, eps, tokens, out, (), block)

    return engram_gate


def _run_gate(tensors, saved, clamp, eps, value_only, tokens, threads):
    hidden, key, value, weight_hidden, weight_embed, out = tensors
    M, C, H = hidden.shape
    if M == 0:
        return
    vec = _vector(H, 16 // hidden.element_size(), *tensors)
    threads = threads or min(1024, 32 * -(-H // (2 * vec * 32)))  # two vectors a thread
    tokens = tokens or max(1, min(16, M * C // 1024))
    inputs = hidden, key, value[None], weight_hidden[None], weight_embed[None]
    kernel = gate_kernel(C, H, hidden.dtype, vec, threads, bool(saved), value_only)
    kernel(*inputs, clamp, eps, tokens, out, *saved)


def run_gate_fwd(hidden, k, v, weight_hidden, weight_embed, clamp, eps, out, *, tokens=None, threads=None):
    """out = T(hidden + gate * v), gate = sigmoid(signed root of the score), one per token and copy; float32 inside.

    score = sum(hidden * weight_hidden * k * weight_embed) * rstd(hidden) * rstd(k) / sqrt(H), of magnitude clamp at least.
    Shapes: hidden, k and out [M, C, H], v [M, H], weights [C, H], all bfloat16 and contiguous; H <= 16384.
    A CTA has `threads` threads (a multiple of 32) and `tokens` tokens; None: two vectors a thread, and as many tokens as leave
    eight CTAs a multiprocessor, at most 16.
    """
    _run_gate((hidden, k, v, weight_hidden, weight_embed, out), (), clamp, eps, False, tokens, threads)


def run_gate_fwd_save(
    hidden,
    k,
    v,
    weight_hidden,
    weight_embed,
    clamp,
    eps,
    out,
    dot,
    gate,
    rstd_hidden,
    rstd_key,
    *,
    tokens=None,
    threads=None,
):
    """As run_gate_fwd; the weighted dot product, the gate and both factors of the norms are kept: float32 [M, C] each."""
    tensors = hidden, k, v, weight_hidden, weight_embed, out
    _run_gate(tensors, (dot, gate, rstd_hidden, rstd_key), clamp, eps, False, tokens, threads)


def run_gate_hf(hidden, k, v, weight_hidden, weight_embed, clamp, eps, out, *, tokens=None, threads=None):
    """out = T(gate * v), with weights of 1 + weight_hidden and 1 + weight_embed in the score; float32 inside, rounded once.

    Shapes as above; T is bfloat16 or float32.
    """
    _run_gate((hidden, k, v, weight_hidden, weight_embed, out), (), clamp, eps, True, tokens, threads)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gate_backward_kernel(C, H, dtype, vec, threads, saved):
    """Compile for a run of tokens of one copy: both gradients of its rows, and a row of partial sums for the weights.

    The gates are read (saved), or computed again and written for the gradient of the values.
    """
    M, runs = T.dynamic("M runs")
    warps, chunks, load, multiply_weights, add_threads, add_up, make_gate, _ = _rows(C, H, dtype, vec, threads, False)
    full = H % (threads * vec) == 0

    @T.prim_func
    def engram_gate_backward(
        grad_out: T.Tensor((M, C, H), dtype),
        hidden: T.Tensor((M, C, H), dtype),
        key: T.Tensor((M, C, H), dtype),
        value: T.Tensor((1, M, H), dtype),
        weight_hidden: T.Tensor((1, C, H), dtype),
        weight_embed: T.Tensor((1, C, H), dtype),
        dots: T.Tensor((M, C), "float32"),
        gates: T.Tensor((M, C), "float32"),
        rstds_hidden: T.Tensor((M, C), "float32"),
        rstds_key: T.Tensor((M, C), "float32"),
        clamp: T.float32,
        eps: T.float32,
        tokens: T.int32,
        grad_hidden: T.Tensor((M, C, H), dtype),
        grad_key: T.Tensor((M, C, H), dtype),
        partial: T.Tensor((runs, C, H), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, tokens) * C, threads=threads) as block:
            thread = T.get_thread_binding(0)
            copy = block % C
            first = block // C * tokens
            x = T.alloc_local((chunks, vec), dtype)
            y = T.alloc_local((chunks, vec), dtype)
            grad = T.alloc_local((chunks, vec), dtype)
            values = T.alloc_local((chunks, vec), dtype)
            weight = T.alloc_local((chunks, vec), "float32")
            to_weight = T.alloc_local((chunks, vec), "float32")
            sums = T.alloc_local((3,), "float32")  # the norms' factors and the weighted product
            of_gate = T.alloc_local((1,), "float32")
            gate = T.alloc_local((1,), "float32")
            slope = T.alloc_local((1,), "float32")
            along = T.alloc_local((2,), "float32")
            result = T.alloc_local((vec,), dtype)
            second = T.alloc_local((vec,), dtype)
            # Two sets in turn: a warp that is ahead may write the next row's sums while others read this one's.
            shared = T.alloc_shared((2, 3, warps), "float32")
            shared_gate = T.alloc_shared((2, 1, warps), "float32")
            multiply_weights(weight_hidden, weight_embed, values, weight, copy, thread)
            for c, v in T.grid(chunks, vec):
                to_weight[c, v] = 0.0
            for step in T.serial(T.min(tokens, M - first)):
                token = first + step
                load(grad_out, token, copy, grad, thread)
                load(hidden, token, copy, x, thread)
                load(key, token, copy, y, thread)
                load(value, 0, token, values, thread)
                of_gate[0] = 0.0
                for c, v in T.grid(chunks, vec):
                    of_gate[0] += T.cast(grad[c, v], "float32") * T.cast(values[c, v], "float32")
                add_threads(of_gate, 0, 1, shared_gate, step % 2, thread)
                if saved:
                    sums[0] = rstds_hidden[token, copy]
                    sums[1] = rstds_key[token, copy]
                    sums[2] = dots[token, copy]
                    gate[0] = gates[token, copy]
                else:
                    add_up(x, y, weight, sums, shared, step % 2, eps, thread)
                    make_gate(sums, gate, clamp)
                    if thread == 0:
                        gates[token, copy] = gate[0]
                # Rounded in the order of the Definition, so that a score next to clamp falls on the same side of it.
                factor = sums[0] * sums[1] * (H**-0.5)
                size = T.abs(sums[2] * factor)
                slope[0] = of_gate[0] * gate[0] * (1.0 - gate[0]) * factor * 0.5 / T.sqrt(size)
                if size < clamp:
                    slope[0] = 0.0  # where the score is held at clamp, whatever the gradient
                along[0] = sums[2] * sums[0] * sums[0] * (1.0 / H)
                along[1] = sums[2] * sums[1] * sums[1] * (1.0 / H)
                for c in T.unroll(chunks):
                    column = (c * threads + thread) * vec
                    for v in T.unroll(vec):
                        wide_x = T.cast(x[c, v], "float32")
                        wide_y = T.cast(y[c, v], "float32")
                        result[v] = T.cast(
                            T.cast(grad[c, v], "float32") + slope[0] * (wide_y * weight[c, v] - wide_x * along[0]),
                            dtype,
                        )
                        second[v] = T.cast(slope[0] * (wide_x * weight[c, v] - wide_y * along[1]), dtype)
                        to_weight[c, v] += slope[0] * wide_x * wide_y
                    if full or column < H:
                        for v in T.vectorized(vec):
                            grad_hidden[token, copy, column + v] = result[v]
                        for v in T.vectorized(vec):
                            grad_key[token, copy, column + v] = second[v]
            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if full or column < H:
                    for v in T.vectorized(vec):
                        partial[block // C, copy, column + v] = to_weight[c, v]

    return engram_gate_backward


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gate_backward_value_kernel(C, H, dtype, vec, threads):
    """Compile the gradient of the values, which the copies share; tokens backwards, since the last were read last."""
    M = T.dynamic("M")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def engram_gate_backward_value(
        grad_out: T.Tensor((M, C, H), dtype), gates: T.Tensor((M, C), "float32"), grad_value: T.Tensor((M, H), dtype)
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = M - 1 - block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            grads = T.alloc_local((C, vec), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            if full or column < H:
                for c in T.unroll(C):
                    for v in T.vectorized(vec):
                        grads[c, v] = grad_out[token, c, column + v]
                for v in T.unroll(vec):
                    total[v] = 0.0
                for c in T.unroll(C):
                    for v in T.unroll(vec):
                        total[v] += gates[token, c] * T.cast(grads[c, v], "float32")
                for v in T.unroll(vec):
                    result[v] = T.cast(total[v], dtype)
                for v in T.vectorized(vec):
                    grad_value[token, column + v] = result[v]

    return engram_gate_backward_value


def _run_gate_backward(inputs, saved, clamp, eps, outputs, tokens, threads):
    grad_out, hidden, key, value, weight_hidden, weight_embed = inputs
    grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed = outputs
    M, C, H = hidden.shape
    dtype = hidden.dtype
    # A run leaves a float32 row for 5 of bfloat16 a token: long runs, two CTAs a multiprocessor of an H200 at least.
    tokens = tokens or max(1, min(64, M * C // 528))
    runs = -(-M // tokens)
    partial = torch.empty((max(runs, 1), C, H), dtype=torch.float32, device=hidden.device)
    if M:
        vec = _vector(H, 16 // hidden.element_size(), *inputs, grad_hidden, grad_k, grad_v)
        threads = threads or min(1024, 32 * -(-H // (2 * vec * 32)))  # two vectors a thread
        factors = saved or (torch.empty((M, C), dtype=torch.float32, device=hidden.device),) * 4
        rows = grad_out, hidden, key, value[None], weight_hidden[None], weight_embed[None]
        kernel = gate_backward_kernel(C, H, dtype, vec, threads, bool(saved))
        kernel(*rows, *factors, clamp, eps, tokens, grad_hidden, grad_k, partial)
        gate_backward_value_kernel(C, H, dtype, vec, 128)(grad_out, factors[1], grad_v)
    weights = weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed
    _add_parts(partial.view(-1, C * H), runs, weights, False, 16)


def run_gate_backward(
    grad_out,
    hidden,
    k,
    v,
    weight_hidden,
    weight_embed,
    clamp,
    eps,
    grad_hidden,
    grad_k,
    grad_v,
    grad_weight_hidden,
    grad_weight_embed,
    *,
    tokens=None,
    threads=None,
):
    """All gradients of the gate from the inputs of its forward; gates and norms are computed again.

    Shapes: grad_out, hidden, k and their gradients [M, C, H], v and its gradient [M, H], weights [C, H] in bfloat16, gradients of
    the weights [C, H] in float32, zero where there are no tokens; contiguous, H <= 16384. No atomics: the order of every sum
    depends on the shape only. Three launches: rows, values (which read grad_out again), weights.
    """
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (), clamp, eps, outputs, tokens, threads)


def run_gate_backward_saved(
    grad_out,
    hidden,
    k,
    v,
    weight_hidden,
    weight_embed,
    dot,
    gate,
    rstd_hidden,
    rstd_key,
    clamp,
    grad_hidden,
    grad_k,
    grad_v,
    grad_weight_hidden,
    grad_weight_embed,
    *,
    tokens=None,
    threads=None,
):
    """As run_gate_backward, with what run_gate_fwd_save kept: float32 [M, C] each."""
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (dot, gate, rstd_hidden, rstd_key), clamp, 0.0, outputs, tokens, threads)
