"""What hyper-connections do with residual streams, TileLang: expand, collapse, write back, and both again for a gradient.

A thread has some neighbouring columns of one token, 16 bytes of each stream, in registers; the token's coefficients are read by
all threads of a CTA alike.
"""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def expand_kernel(C, H, dtype, vec, threads):
    """Compile for C streams of H elements, of which a thread moves `vec` at a time."""
    M = T.dynamic("M")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def expand(x: T.Tensor((M, H), dtype), out: T.Tensor((M, C, H), dtype)):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            values = T.alloc_local((vec,), dtype)
            if full or column < H:
                for v in T.vectorized(vec):
                    values[v] = x[token, column + v]
                for c in T.unroll(C):
                    for v in T.vectorized(vec):
                        out[token, c, column + v] = values[v]

    return expand


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def apply_kernel(C, H, dtype, vec, threads):
    """Compile for C streams of H elements, of which a thread reads `vec` at a time."""
    M = T.dynamic("M")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def apply_mix(residual: T.Tensor((M, C, H), dtype), mix: T.Tensor((M, C), "float32"), out: T.Tensor((M, H), dtype)):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            streams = T.alloc_local((C, vec), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            if full or column < H:
                for c in T.unroll(C):
                    for v in T.vectorized(vec):
                        streams[c, v] = residual[token, c, column + v]
                for v in T.unroll(vec):
                    total[v] = 0.0
                for c in T.unroll(C):
                    for v in T.unroll(vec):
                        total[v] += mix[token, c] * T.cast(streams[c, v], "float32")
                for v in T.unroll(vec):
                    result[v] = T.cast(total[v], dtype)
                for v in T.vectorized(vec):
                    out[token, column + v] = result[v]

    return apply_mix


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def post_kernel(C, H, dtype, vec, threads, rounded):
    """Compile for C streams of H elements; `rounded` rounds the coefficients and both terms as transformers does."""
    M = T.dynamic("M")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def post_streams(
        y: T.Tensor((M, H), dtype),
        residual: T.Tensor((M, C, H), dtype),
        post: T.Tensor((M, C), "float32"),
        comb: T.Tensor((M, C, C), "float32"),
        out: T.Tensor((M, C, H), dtype),
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            output = T.alloc_local((vec,), dtype)
            streams = T.alloc_local((C, vec), dtype)
            added = T.alloc_local((vec,), "float32")
            mixed = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            if full or column < H:
                for v in T.vectorized(vec):
                    output[v] = y[token, column + v]
                for i in T.unroll(C):
                    for v in T.vectorized(vec):
                        streams[i, v] = residual[token, i, column + v]
                for o in T.unroll(C):
                    for v in T.unroll(vec):
                        mixed[v] = 0.0
                    if rounded:
                        for v in T.unroll(vec):
                            gain = T.cast(T.cast(post[token, o], dtype), "float32")
                            added[v] = T.cast(T.cast(gain * T.cast(output[v], "float32"), dtype), "float32")
                        for i in T.unroll(C):
                            for v in T.unroll(vec):
                                weight = T.cast(T.cast(comb[token, i, o], dtype), "float32")
                                mixed[v] += weight * T.cast(streams[i, v], "float32")
                        for v in T.unroll(vec):
                            mixed[v] = T.cast(T.cast(mixed[v], dtype), "float32")
                    else:
                        for v in T.unroll(vec):
                            added[v] = post[token, o] * T.cast(output[v], "float32")
                        for i in T.unroll(C):
                            for v in T.unroll(vec):
                                mixed[v] += comb[token, i, o] * T.cast(streams[i, v], "float32")
                    for v in T.unroll(vec):
                        result[v] = T.cast(added[v] + mixed[v], dtype)
                    for v in T.vectorized(vec):
                        out[token, o, column + v] = result[v]

    return post_streams


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def recompute_kernel(C, H, dtype, vec, threads, tail):
    """Compile for C streams of H elements, in registers over all layers; `tail`: the last layer is not written back."""
    M, rows, written_rows = T.dynamic("M rows written_rows")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.macro
    def collapse(streams, pre, row, column, total, result, layer_inputs):
        for v in T.unroll(vec):
            total[v] = 0.0
        for c in T.unroll(C):
            for v in T.unroll(vec):
                total[v] += pre[row, c] * streams[c, v]
        for v in T.unroll(vec):
            result[v] = T.cast(total[v], dtype)
        for v in T.vectorized(vec):
            layer_inputs[row, column + v] = result[v]

    @T.prim_func
    def recompute(
        residual: T.Tensor((M, C, H), dtype),
        pre: T.Tensor((rows, C), "float32"),
        y: T.Tensor((written_rows, H), dtype),
        post: T.Tensor((written_rows, C), "float32"),
        comb: T.Tensor((written_rows, C, C), "float32"),
        layers: T.int32,
        layer_inputs: T.Tensor((rows, H), dtype),
        residuals: T.Tensor((written_rows, C, H), dtype),
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            loaded = T.alloc_local((vec,), dtype)
            output = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)
            total = T.alloc_local((vec,), "float32")
            streams = T.alloc_local((C, vec), "float32")
            written = T.alloc_local((C, vec), "float32")
            if full or column < H:
                for c in T.unroll(C):
                    for v in T.vectorized(vec):
                        loaded[v] = residual[token, c, column + v]
                    for v in T.unroll(vec):
                        streams[c, v] = T.cast(loaded[v], "float32")
                for layer in T.serial(layers):
                    row = layer * M + token
                    for v in T.vectorized(vec):
                        output[v] = y[row, column + v]
                    collapse(streams, pre, row, column, total, result, layer_inputs)
                    for o in T.unroll(C):
                        for v in T.unroll(vec):
                            total[v] = post[row, o] * T.cast(output[v], "float32")
                        for i in T.unroll(C):
                            for v in T.unroll(vec):
                                total[v] += comb[row, i, o] * streams[i, v]
                        for v in T.unroll(vec):
                            result[v] = T.cast(total[v], dtype)
                            written[o, v] = T.cast(result[v], "float32")
                        for v in T.vectorized(vec):
                            residuals[row, o, column + v] = result[v]
                    for c in T.unroll(C):
                        for v in T.unroll(vec):
                            streams[c, v] = written[c, v]
                if tail:
                    collapse(streams, pre, layers * M + token, column, total, result, layer_inputs)

    return recompute


def _vector(H, *tensors):
    """The widest power of two of elements, at most 16 bytes, that divides a row and all addresses."""
    itemsize = tensors[0].element_size()
    bits = H | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
    return bits & -bits


def run_expand(x, streams, out, *, threads=128):
    """out[m, c, :] = x[m, :], bits as they are; x [M, H], out [M, streams, H], contiguous."""
    M, H = x.shape
    if M and H:
        expand_kernel(streams, H, x.dtype, _vector(H, x, out), threads)(x, out)


def run_pre_apply_mix(residual, mix, out, *, threads=128):
    """out[M, H] = T(sum over c of mix[M, c] * residual[M, c, H]), the sum in float32; contiguous, T bfloat16 or float32."""
    M, C, H = residual.shape
    if M and H:
        apply_kernel(C, H, out.dtype, _vector(H, residual, out), threads)(residual, mix, out)


def run_post(y, residual, post, comb, out, *, threads=128):
    """out[:, o] = T(post[:, o] * y + sum over i of comb[:, i, o] * residual[:, i]), float32 inside, one rounding.

    Shapes: y [M, H], residual and out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32; contiguous.
    """
    M, C, H = residual.shape
    if M and H:
        vec = _vector(H, y, residual, out)
        post_kernel(C, H, out.dtype, vec, threads, False)(y, residual, post, comb, out)


def run_post_hf(y, residual, post, comb, out, *, threads=128):
    """As run_post, with the roundings of transformers: T(T(T(post) * y) + T(sum of T(comb) * residual))."""
    M, C, H = residual.shape
    if M and H:
        vec = _vector(H, y, residual, out)
        post_kernel(C, H, out.dtype, vec, threads, True)(y, residual, post, comb, out)


def run_recompute(residual, pre, y, post, comb, layer_inputs, residuals, *, threads=128):
    """layer_inputs[l] = run_pre_apply_mix of the streams and pre[l]; residuals[l] = run_post of them with y[l], post[l], comb[l].

    Shapes: residual [M, C, H], pre [L, M, C], y [N, M, H], post [N, M, C], comb [N, M, C, C] for N = L or L - 1 sublayers that
    are written back; layer_inputs [L, M, H], residuals [N, M, C, H]; y and streams in T (bfloat16 or float32), the rest
    float32; contiguous. The streams are rounded to T after every sublayer, as the operators one by one do. One launch.
    """
    L, M, C = pre.shape
    N, H = len(y), residual.shape[2]
    if M and H:
        kernel = recompute_kernel(C, H, y.dtype, _vector(H, residual, y, layer_inputs, residuals), threads, L > N)
        given = residual, pre.view(L * M, C), y.view(N * M, H), post.view(N * M, C), comb.view(N * M, C, C)
        kernel(*given, N, layer_inputs.view(L * M, H), residuals.view(N * M, C, H))
