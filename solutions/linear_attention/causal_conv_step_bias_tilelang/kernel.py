"""One step of a depthwise causal convolution of width 4 with a bias and SiLU, in TileLang; the state is shifted in place."""

import functools

import tilelang
import tilelang.language as T
import torch

WIDTH = 4


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def update_kernel(D, dtype, vec, aligned, threads):
    """Compile for D channels, of which a thread has `vec`; `aligned` if whole states and weights may be accessed at once."""
    of_states = T.vectorized if aligned else T.unroll
    N = T.dynamic("N", "int64")
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    def silu(value):
        divisor = 1.0 + (T.exp(-value) if exact else T.__exp(-value))
        return value / divisor if exact else value * T.fast_rcp(divisor)

    @T.prim_func
    def causal_conv1d_update_bias(
        x: T.Tensor((N,), dtype),
        state: T.Tensor((N * WIDTH,), dtype),
        weight: T.Tensor((D * WIDTH,), dtype),
        bias: T.Tensor((D,), dtype),
        out: T.Tensor((N,), dtype),
    ):
        with T.Kernel(T.ceildiv(N, threads * vec), threads=threads) as block:
            T.assume(N % vec == 0)  # run() chose vec so
            first = T.cast(block, "int64") * (threads * vec) + T.get_thread_binding(0) * vec
            inputs = T.alloc_local((vec * WIDTH,), dtype)
            shifted = T.alloc_local((vec * WIDTH,), dtype)
            weights = T.alloc_local((vec * WIDTH,), dtype)
            biases = T.alloc_local((vec,), dtype)
            newest = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)
            total = T.alloc_local((vec,), "float32")

            if first < N:
                for v in of_states(vec * WIDTH):
                    inputs[v] = state[first * WIDTH + v]
                for v in T.vectorized(vec):
                    newest[v] = x[first + v]
                for v in of_states(vec * WIDTH):
                    weights[v] = weight[first % D * WIDTH + v]
                for v in T.vectorized(vec):
                    biases[v] = bias[first % D + v]
                for v in T.unroll(vec):
                    for j in T.unroll(WIDTH - 1):
                        shifted[v * WIDTH + j] = inputs[v * WIDTH + j + 1]
                    shifted[v * WIDTH + WIDTH - 1] = newest[v]
                for v in of_states(vec * WIDTH):
                    state[first * WIDTH + v] = shifted[v]
                for v in T.unroll(vec):
                    total[v] = 0.0
                    for j in T.unroll(WIDTH):
                        total[v] += T.cast(shifted[v * WIDTH + j], "float32") * T.cast(
                            weights[v * WIDTH + j], "float32"
                        )
                    total[v] += T.cast(biases[v], "float32")
                    total[v] = T.cast(T.cast(total[v], dtype), "float32")
                    result[v] = T.cast(silu(total[v]), dtype)
                for v in T.vectorized(vec):
                    out[first + v] = result[v]

    return causal_conv1d_update_bias


def run(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    *,
    threads=64,
):
    """conv_state = its last three inputs and x; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j] + bias[d]))).

    x, out: [B, D, 1], conv_state: [B, D, 4], weight: [D, 4], bias: [D], contiguous; T is bfloat16, float16 or float32. A thread
    has as many channels as states fit into 16 bytes: two in half precision.
    """
    _, D, _ = out.shape
    if out.numel() == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two that divides the channels and all addresses, of x and of the states.
    bits = D | 16 // (itemsize * WIDTH) | (x.data_ptr() | out.data_ptr() | bias.data_ptr()) // itemsize
    bits |= (conv_state.data_ptr() | weight.data_ptr()) // (itemsize * WIDTH)
    aligned = (conv_state.data_ptr() | weight.data_ptr()) % 16 == 0
    vec = bits & -bits if aligned else 1
    kernel = update_kernel(D, dtype, vec, aligned, threads)
    kernel(x.view(-1), conv_state.view(-1), weight.view(-1), bias, out.view(-1))
