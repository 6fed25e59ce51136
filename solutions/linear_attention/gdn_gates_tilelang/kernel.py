"""Decay and writing strength of a Gated DeltaNet layer, in TileLang: a few heads of a token a thread."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gdn_gates_kernel(H, dtype, kept_dtype, vec, threads):
    """Compile for H heads: a thread computes `vec` of them, of one token."""
    M = T.dynamic("M")
    a_stride, b_stride = T.dynamic("a_stride b_stride", "int64")
    vectors = H // vec

    @T.prim_func
    def gdn_gates(
        a: T.StridedTensor((M, H), (a_stride, 1), dtype),
        b: T.StridedTensor((M, H), (b_stride, 1), dtype),
        A_log: T.Tensor((H,), kept_dtype),
        dt_bias: T.Tensor((H,), kept_dtype),
        g: T.Tensor((M, H), "float32"),
        beta: T.Tensor((M, H), dtype),
    ):
        with T.Kernel(T.ceildiv(M * vectors, threads), threads=threads) as block:
            T.assume(a_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(b_stride % vec == 0)
            place = block * threads + T.get_thread_binding(0)
            token = place // vectors
            head = place % vectors * vec
            steps = T.alloc_local((vec,), dtype)
            strengths = T.alloc_local((vec,), dtype)
            rates = T.alloc_local((vec,), kept_dtype)
            biases = T.alloc_local((vec,), kept_dtype)
            decays = T.alloc_local((vec,), "float32")
            written = T.alloc_local((vec,), dtype)
            step = T.alloc_var("float32")
            s = T.alloc_var("float32")
            q = T.alloc_var("float32")
            series = T.alloc_var("float32")

            if token < M:
                for v in T.vectorized(vec):
                    steps[v] = a[token, head + v]
                for v in T.vectorized(vec):
                    strengths[v] = b[token, head + v]
                for v in T.vectorized(vec):
                    rates[v] = A_log[head + v]
                for v in T.vectorized(vec):
                    biases[v] = dt_bias[head + v]
                for v in T.unroll(vec):
                    # softplus(step) = max(step, 0) + log(1 + e) with e = exp(-|step|), which is step itself from 17 on. The
                    # logarithm is 2 atanh(s) by its series, s = e / (2 + e) <= 1/3: log(1 + e) loses all digits of a small e.
                    step = T.cast(steps[v], "float32") + T.cast(biases[v], "float32")
                    s = T.exp(-T.abs(step))
                    s = s * T.fast_rcp(2.0 + s)
                    q = s * s
                    series = 1.0 / 13 + q * (1.0 / 15)
                    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
                    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
                    series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))
                    decays[v] = -T.exp(T.cast(rates[v], "float32")) * (T.if_then_else(step > 0.0, step, 0.0) + series)
                    written[v] = T.cast(T.fast_rcp(1.0 + T.exp(-T.cast(strengths[v], "float32"))), dtype)
                for v in T.vectorized(vec):
                    g[token, head + v] = decays[v]
                for v in T.vectorized(vec):
                    beta[token, head + v] = written[v]

    return gdn_gates


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    threads=128,
    vec=None,
):
    """g = -exp(A_log) * softplus(a + dt_bias) in float32, beta = T(sigmoid(b)).

    a, b: [M, H] with last stride 1 (any row stride); A_log, dt_bias: [H] of dtype P; g, beta: [M, H] contiguous; T and P are
    bfloat16, float16 or float32; fewer than 2**31 values. A thread computes `vec` heads of a token; None: 4 if there are
    many, else 1.
    """
    M, H = beta.shape
    if M == 0:
        return
    most = vec or (4 if M * H >= 1 << 16 else 1)
    # The widest power of two, at most `most`, that divides the heads, the strides and all addresses.
    bits = H | a.stride(0) | b.stride(0) | most
    bits |= (a.data_ptr() | b.data_ptr() | beta.data_ptr()) // beta.element_size() | g.data_ptr() // 4
    bits |= (A_log.data_ptr() | dt_bias.data_ptr()) // A_log.element_size()
    gdn_gates_kernel(H, beta.dtype, A_log.dtype, bits & -bits, threads)(a, b, A_log, dt_bias, g, beta)
