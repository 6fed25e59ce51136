"""Decays of Kimi Delta Attention, in TileLang: x is read once, and decays are written once."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def decays_kernel(H, K, dtype, kept_dtype, vec, threads, rows):
    """Compile for heads of K: a thread computes `vec` neighbouring values of one head, of `rows` tokens."""
    M = T.dynamic("M")
    width = H * K
    wide = min(vec, 4)  # numbers of float32 in 16 bytes

    @T.prim_func
    def decays(
        x: T.Tensor((M, width), dtype),
        A_log: T.Tensor((H,), kept_dtype),
        dt_bias: T.Tensor((width,), kept_dtype),
        out: T.Tensor((M, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, threads * vec), T.ceildiv(M, rows), threads=threads) as (block, part):
            column = (block * threads + T.get_thread_binding(0)) * vec
            given = T.alloc_local((rows, vec), dtype)
            biases = T.alloc_local((vec,), kept_dtype)
            found = T.alloc_local((rows, vec), "float32")
            rate = T.alloc_var("float32")
            step = T.alloc_var("float32")
            s = T.alloc_var("float32")
            q = T.alloc_var("float32")
            series = T.alloc_var("float32")

            if column < width:
                for r in T.unroll(rows):  # all loads first: they overlap
                    if part * rows + r < M:
                        for v in T.vectorized(vec):
                            given[r, v] = x[part * rows + r, column + v]
                for c in T.unroll(vec // wide):
                    for v in T.vectorized(wide):
                        biases[c * wide + v] = dt_bias[column + c * wide + v]
                rate = -T.exp(T.cast(A_log[column // K], "float32"))
                for r in T.unroll(rows):
                    if part * rows + r < M:
                        for v in T.unroll(vec):
                            # softplus(step) = max(step, 0) + log(1 + e) with e = exp(-|step|), which is step itself from 17 on.
                            # The logarithm is 2 atanh(s) by its series, s = e / (2 + e) <= 1/3: log(1 + e) loses all digits of
                            # a small e.
                            step = T.cast(given[r, v], "float32") + T.cast(biases[v], "float32")
                            s = T.exp(-T.abs(step))
                            s = s * T.fast_rcp(2.0 + s)
                            q = s * s
                            series = 1.0 / 13 + q * (1.0 / 15)
                            series = 1.0 / 9 + q * (1.0 / 11 + q * series)
                            series = 1.0 / 5 + q * (1.0 / 7 + q * series)
                            series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))
                            found[r, v] = rate * (T.if_then_else(step > 0.0, step, 0.0) + series)
                        for c in T.unroll(vec // wide):
                            for v in T.vectorized(wide):
                                out[part * rows + r, column + c * wide + v] = found[r, c * wide + v]

    return decays


def run(x: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, out: torch.Tensor, *, threads=128, rows=1):
    """out = -exp(A_log) * softplus(x + dt_bias) in float32.

    x, out: [M, H, K]; A_log: [H] and dt_bias: [H, K] of dtype P; contiguous; T and P are bfloat16, float16 or float32. A thread
    computes up to 16 bytes of x of one head, of `rows` tokens.
    """
    M, H, K = out.shape
    if out.numel() == 0:
        return
    # The widest power of two, at most 16 bytes of x, that divides a head and all addresses.
    bits = K | 16 // x.element_size() | x.data_ptr() // x.element_size() | out.data_ptr() // 4
    bits |= dt_bias.data_ptr() // dt_bias.element_size()
    width = H * K
    kernel = decays_kernel(H, K, x.dtype, A_log.dtype, bits & -bits, threads, rows)
    kernel(x.view(M, width), A_log, dt_bias.view(width), out.view(M, width))
