"""Depthwise causal convolutions of width 4 with SiLU, in TileLang: over a whole sequence, or one step with a state."""

import functools

import tilelang
import tilelang.language as T
import torch

WIDTH = 4


def _silu(value, exact):
    """Build SiLU of a float32 expression; not `exact`, its last bits are hidden by the cast to a 16-bit dtype."""
    divisor = 1.0 + (T.exp(-value) if exact else T.__exp(-value))
    return value / divisor if exact else value * T.fast_rcp(divisor)


# ---- whole sequences ------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def convolution_kernel(D, dtype, vec, with_bias, together, threads, steps):
    """Compile for D channels: a thread has `vec` of them and walks along `steps` positions, with its inputs in registers.

    `together` if channels are next to each other in x and out, as whole vectors need; if not, `vec` is 1.
    """
    B, S = T.dynamic("B"), T.dynamic("S")
    x_b, x_s, out_b, out_s = T.dynamic("x_b x_s out_b out_s", "int64")
    x_d, out_d = (1, 1) if together else T.dynamic("x_d out_d", "int64")
    vectors = D // vec
    blocks = -(-vectors // threads)
    exact = dtype == torch.float32

    @T.macro
    def convolve(x, weight, bias, out, block):
        # Blocks of channels vary fastest, so neighbouring CTAs read neighbouring memory.
        channel = (block % blocks * threads + T.get_thread_binding(0)) * vec
        first = block // blocks % T.ceildiv(S, steps) * steps
        batch = block // blocks // T.ceildiv(S, steps)
        rows = T.alloc_local((steps + WIDTH - 1, vec), dtype)
        packed = T.alloc_local((WIDTH, vec), dtype)
        biases = T.alloc_local((vec,), dtype)
        weights = T.alloc_local((WIDTH, vec), "float32")
        window = T.alloc_local((WIDTH, vec), "float32")  # the inputs of a position, number s in row s % 4
        total = T.alloc_local((vec,), "float32")
        rounded = T.alloc_local((vec,), dtype)
        result = T.alloc_local((vec,), dtype)

        if channel < D:
            # All loads first: they overlap. A bounds check of each would make it wait for the one before.
            if first >= WIDTH - 1 and first + steps <= S:
                for i in T.unroll(steps + WIDTH - 1):
                    for v in T.vectorized(vec):
                        rows[i, v] = x[batch, first + i - (WIDTH - 1), channel + v]
            else:
                for i in T.unroll(steps + WIDTH - 1):
                    for v in T.vectorized(vec):
                        rows[i, v] = 0
                    if first + i >= WIDTH - 1 and first + i - (WIDTH - 1) < S:
                        for v in T.vectorized(vec):
                            rows[i, v] = x[batch, first + i - (WIDTH - 1), channel + v]
            for i in T.unroll(WIDTH):  # the weights of a channel lie together: the j-th of channel v is number 4 v + j
                for v in T.vectorized(vec):
                    packed[i, v] = weight[channel * WIDTH + i * vec + v]
            if with_bias:
                for v in T.vectorized(vec):
                    biases[v] = bias[channel + v]
            for j, v in T.grid(WIDTH, vec):
                weights[j, v] = T.cast(packed[(v * WIDTH + j) // vec, (v * WIDTH + j) % vec], "float32")
            for j, v in T.grid(WIDTH - 1, vec):
                window[j, v] = T.cast(rows[j, v], "float32")
            for i in T.unroll(steps):
                for v in T.unroll(vec):
                    window[(i + WIDTH - 1) % WIDTH, v] = T.cast(rows[i + WIDTH - 1, v], "float32")
                    total[v] = window[i % WIDTH, v] * weights[0, v]
                    for j in T.unroll(1, WIDTH):
                        total[v] += window[(i + j) % WIDTH, v] * weights[j, v]
                    if with_bias:
                        total[v] += T.cast(biases[v], "float32")
                for v in T.vectorized(vec):
                    rounded[v] = T.cast(total[v], dtype)
                for v in T.unroll(vec):
                    total[v] = T.cast(rounded[v], "float32")
                    total[v] = _silu(total[v], exact)
                for v in T.vectorized(vec):
                    result[v] = T.cast(total[v], dtype)
                if first + i < S:
                    for v in T.vectorized(vec):
                        out[batch, first + i, channel + v] = result[v]

    if with_bias:

        @T.prim_func
        def causal_conv1d_bias(
            x: T.StridedTensor((B, S, D), (x_b, x_s, x_d), dtype),
            weight: T.Tensor((D * WIDTH,), dtype),
            bias: T.Tensor((D,), dtype),
            out: T.StridedTensor((B, S, D), (out_b, out_s, out_d), dtype),
        ):
            with T.Kernel(B * T.ceildiv(S, steps) * blocks, threads=threads) as block:
                T.assume(x_b % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
                T.assume(x_s % vec == 0)
                T.assume(out_b % vec == 0)
                T.assume(out_s % vec == 0)
                convolve(x, weight, bias, out, block)

        return causal_conv1d_bias

    @T.prim_func
    def causal_conv1d(
        x: T.StridedTensor((B, S, D), (x_b, x_s, x_d), dtype),
        weight: T.Tensor((D * WIDTH,), dtype),
        out: T.StridedTensor((B, S, D), (out_b, out_s, out_d), dtype),
    ):
        with T.Kernel(B * T.ceildiv(S, steps) * blocks, threads=threads) as block:
            T.assume(x_b % vec == 0)  # as above
            T.assume(x_s % vec == 0)
            T.assume(out_b % vec == 0)
            T.assume(out_s % vec == 0)
            convolve(x, weight, weight, out, block)

    return causal_conv1d


def _convolve(x, weight, bias, out, threads, steps):
    B, D, S = x.shape
    if x.numel() == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    together = x.stride(1) == 1 and out.stride(1) == 1
    vec = 1
    if together:
        # The widest power of two, at most 16 bytes, that divides the channels, the strides and all addresses.
        bits = D | x.stride(0) | x.stride(2) | out.stride(0) | out.stride(2) | 16 // itemsize
        bits |= (x.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
        if bias is not None:
            bits |= bias.data_ptr() // itemsize
        vec = bits & -bits
    many = B * D * S >= 1 << 22
    # 16 positions read 19; fewer would read more of them twice, but short sequences fill the machine only in small parts.
    steps = steps or (16 if many else 4)
    threads = threads or (64 if many else 32)
    kernel = convolution_kernel(D, dtype, vec, bias is not None, together, threads, steps)
    rows, written = x.transpose(1, 2), out.transpose(1, 2)
    if bias is None:
        kernel(rows, weight.view(-1), written)
    else:
        kernel(rows, weight.view(-1), bias, written)


def run_causal_conv1d(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, threads=None, steps=None):
    """out[b, d, s] = T(silu(T(sum over j of weight[d, j] * x[b, d, s - 3 + j]))): sums in float32, two roundings.

    x, out: [B, D, S] with any strides, fast if those of D are 1; weight: [D, 4] contiguous; T is bfloat16, float16 or float32.
    A thread has a vector of channels and walks along `steps` positions; None chooses by the amount of work.
    For 16-bit T, silu below -87 gives -0 where float32 holds less than 1e-36 in magnitude.
    """
    _convolve(x, weight, None, out, threads, steps)


def run_causal_conv1d_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *, threads=None, steps=None
):
    """Compute run_causal_conv1d with bias [D] added to the sum before it is rounded."""
    _convolve(x, weight, bias, out, threads, steps)


# ---- one step -------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def update_kernel(D, dtype, vec, aligned, threads):
    """Compile for D channels, of which a thread has `vec`; `aligned` if whole states and weights may be accessed at once."""
    of_states = T.vectorized if aligned else T.unroll
    N = T.dynamic("N", "int64")
    exact = dtype == torch.float32

    @T.prim_func
    def causal_conv1d_update(
        x: T.Tensor((N,), dtype),
        state: T.Tensor((N * WIDTH,), dtype),
        weight: T.Tensor((D * WIDTH,), dtype),
        out: T.Tensor((N,), dtype),
    ):
        with T.Kernel(T.ceildiv(N, threads * vec), threads=threads) as block:
            T.assume(N % vec == 0)  # run() chose vec so
            first = T.cast(block, "int64") * (threads * vec) + T.get_thread_binding(0) * vec
            inputs = T.alloc_local((vec * WIDTH,), dtype)
            shifted = T.alloc_local((vec * WIDTH,), dtype)
            weights = T.alloc_local((vec * WIDTH,), dtype)
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
                    total[v] = T.cast(T.cast(total[v], dtype), "float32")
                    result[v] = T.cast(_silu(total[v], exact), dtype)
                for v in T.vectorized(vec):
                    out[first + v] = result[v]

    return causal_conv1d_update


def run_causal_conv1d_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, threads=64
):
    """conv_state = its last three inputs and x, in place; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j]))).

    x, out: [B, D, 1], conv_state: [B, D, 4], weight: [D, 4], contiguous; T is bfloat16, float16 or float32. A thread has as many
    channels as states fit into 16 bytes: two in half precision.
    """
    _, D, _ = out.shape
    if out.numel() == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two that divides the channels and all addresses, of x and of the states.
    bits = D | 16 // (itemsize * WIDTH) | (x.data_ptr() | out.data_ptr()) // itemsize
    bits |= (conv_state.data_ptr() | weight.data_ptr()) // (itemsize * WIDTH)
    aligned = (conv_state.data_ptr() | weight.data_ptr()) % 16 == 0
    vec = bits & -bits if aligned else 1
    kernel = update_kernel(D, dtype, vec, aligned, threads)
    kernel(x.view(-1), conv_state.view(-1), weight.view(-1), out.view(-1))
