"""Products of at most 16 rows with weights as nn.Linear stores them, Triton: bound by reading the weights once.

Two kernels for each operator: dot products in registers for one row, tensor cores with 16 rows for more. A program owns a few
rows of the weights and all rows of x, so that no sum is split and results do not depend on the order of programs.
"""

import torch
import triton
import triton.language as tl

MAX_ROWS = 16


@triton.jit
def _dots(x_ptr, w_ptr, w_stride, n, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Return [BLOCK_N] sums of one row of x with rows n of the weights."""
    lanes = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * w_stride + lanes[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptr + k + lanes)
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
        else:
            inside = lanes < K - k
            x = tl.load(x_ptr + k + lanes, mask=inside, other=0.0)
            w = tl.load(w_ptrs + k, mask=(n < N)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += x.to(tl.float32)[None, :] * w.to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit
def _tile(
    x_ptr, w_ptr, x_stride, w_stride, n, M, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):
    """Return [16, BLOCK_N] sums of up to 16 rows of x with rows n of the weights."""
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_ptrs = w_ptr + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros([16, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs, mask=(m < M)[:, None], other=0.0)
            w = tl.load(w_ptrs, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptrs, mask=(m < M)[:, None] & (k < K - start)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(n < N)[None, :] & (k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up with the roundings of a model: both products, silu, and the result."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _swiglu_row(
    x_ptr, wg_ptr, wu_ptr, out_ptr, wg_stride, wu_stride, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    g_ptrs = wg_ptr + n.to(tl.int64)[:, None] * wg_stride + lanes[None, :]
    u_ptrs = wu_ptr + n.to(tl.int64)[:, None] * wu_stride + lanes[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptr + k + lanes)
            g = tl.load(g_ptrs + k, eviction_policy="evict_first")
            u = tl.load(u_ptrs + k, eviction_policy="evict_first")
        else:
            inside = lanes < K - k
            in_both = (n < N)[:, None] & inside[None, :]
            x = tl.load(x_ptr + k + lanes, mask=inside, other=0.0)
            g = tl.load(g_ptrs + k, mask=in_both, other=0.0, eviction_policy="evict_first")
            u = tl.load(u_ptrs + k, mask=in_both, other=0.0, eviction_policy="evict_first")
        wide = x.to(tl.float32)[None, :]
        gate += wide * g.to(tl.float32)
        up += wide * u.to(tl.float32)
    out = _gated(tl.sum(gate, axis=1), tl.sum(up, axis=1), out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, out, mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _swiglu_rows(
    x_ptr, wg_ptr, wu_ptr, out_ptr, x_stride, wg_stride, wu_stride, out_stride, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    g_ptrs = wg_ptr + n.to(tl.int64)[None, :] * wg_stride + k[:, None]
    u_ptrs = wu_ptr + n.to(tl.int64)[None, :] * wu_stride + k[:, None]
    gate = tl.zeros([16, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([16, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs, mask=(m < M)[:, None], other=0.0)
            g = tl.load(g_ptrs, eviction_policy="evict_first")
            u = tl.load(u_ptrs, eviction_policy="evict_first")
        else:
            in_k = k < K - start
            x = tl.load(x_ptrs, mask=(m < M)[:, None] & in_k[None, :], other=0.0)
            g = tl.load(g_ptrs, mask=(n < N)[None, :] & in_k[:, None], other=0.0)
            u = tl.load(u_ptrs, mask=(n < N)[None, :] & in_k[:, None], other=0.0)
        gate = tl.dot(x, g, gate, input_precision="ieee")
        up = tl.dot(x, u, up, input_precision="ieee")
        x_ptrs += BLOCK_K
        g_ptrs += BLOCK_K
        u_ptrs += BLOCK_K
    out = _gated(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _row_of(
    x_ptr, w_ptr, out_ptr, w_stride, block, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = _dots(x_ptr, w_ptr, w_stride, n, N, K, BLOCK_N, BLOCK_K, EVEN)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _rows_of(
    x_ptr, w_ptr, out_ptr, x_stride, w_stride, out_stride, block, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    out = _tile(x_ptr, w_ptr, x_stride, w_stride, n, M, N, K, BLOCK_N, BLOCK_K, EVEN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _qkv_row(
    x_ptr, wq_ptr, wk_ptr, wv_ptr, q_ptr, k_ptr, v_ptr, wq_stride, wk_stride, wv_stride, NQ, NK, NV, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One launch for three products: programs of q first, then of k, then of v."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    of_q = tl.cdiv(NQ, BLOCK_N)
    of_k = tl.cdiv(NK, BLOCK_N)
    if block < of_q:
        _row_of(x_ptr, wq_ptr, q_ptr, wq_stride, block, NQ, K, BLOCK_N, BLOCK_K, EVEN)
    elif block < of_q + of_k:
        _row_of(x_ptr, wk_ptr, k_ptr, wk_stride, block - of_q, NK, K, BLOCK_N, BLOCK_K, EVEN)
    else:
        _row_of(x_ptr, wv_ptr, v_ptr, wv_stride, block - of_q - of_k, NV, K, BLOCK_N, BLOCK_K, EVEN)


@triton.jit(do_not_specialize=["M"])
def _qkv_rows(
    x_ptr, wq_ptr, wk_ptr, wv_ptr, q_ptr, k_ptr, v_ptr, x_stride, wq_stride, wk_stride, wv_stride,
    q_stride, k_stride, v_stride, M, NQ, NK, NV, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One launch for three products: programs of q first, then of k, then of v."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    of_q = tl.cdiv(NQ, BLOCK_N)
    of_k = tl.cdiv(NK, BLOCK_N)
    if block < of_q:
        _rows_of(x_ptr, wq_ptr, q_ptr, x_stride, wq_stride, q_stride, block, M, NQ, K, BLOCK_N, BLOCK_K, EVEN)
    elif block < of_q + of_k:
        _rows_of(x_ptr, wk_ptr, k_ptr, x_stride, wk_stride, k_stride, block - of_q, M, NK, K, BLOCK_N, BLOCK_K, EVEN)
    else:
        block -= of_q + of_k
        _rows_of(x_ptr, wv_ptr, v_ptr, x_stride, wv_stride, v_stride, block, M, NV, K, BLOCK_N, BLOCK_K, EVEN)


@triton.jit
def _linear_row(
    x_ptr, w_ptr, out_ptr, w_stride, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _row_of(x_ptr, w_ptr, out_ptr, w_stride, tl.program_id(0), N, K, BLOCK_N, BLOCK_K, EVEN)


@triton.jit(do_not_specialize=["M"])
def _linear_rows(
    x_ptr, w_ptr, out_ptr, x_stride, w_stride, out_stride, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _rows_of(x_ptr, w_ptr, out_ptr, x_stride, w_stride, out_stride, tl.program_id(0), M, N, K, BLOCK_N, BLOCK_K, EVEN)


# BLOCK_N, BLOCK_K, warps
_ROW = ((4, 2048, 4), (4, 1024, 4), (2, 1024, 4), (4, 512, 4), (1, 2048, 8), (8, 512, 8))
# BLOCK_N, BLOCK_K, warps, stages
_ROWS = ((16, 512, 2, 3), (32, 64, 2, 8), (64, 128, 4, 5), (32, 256, 4, 4), (32, 128, 4, 3), (16, 128, 2, 6))


def _default(M: int, K: int, products: int) -> int:
    """Return the index of the launch parameters: some 8 KB of the weights in flight for each warp, fewer for short rows."""
    if M > 1:
        return (0, 2, 1)[products - 1]
    return 3 if (K <= 2048 and products != 2) or K <= 1024 else (0, 2, 1)[products - 1]


def _launch(
    dtype: torch.dtype, M: int, K: int, products: int, variant: int | None, sizes: tuple[int, ...], early: bool
):
    """Return (constants, programs of each size, launch options) for one of the two kernels."""
    index = _default(M, K, products) if variant is None else variant
    if M == 1:
        block_n, block_k, warps = _ROW[index]
        options = {"num_warps": warps}
    else:
        block_n, block_k, warps, stages = (32, 32, 4, 3) if dtype == torch.float32 else _ROWS[index]
        options = {"num_warps": warps, "num_stages": stages}
    is_even = K % block_k == 0 and all(size % block_n == 0 for size in sizes)
    # Dependent launch: programs are placed while the kernel before still runs. They wait for its end before they read.
    early = early and torch.cuda.is_available()
    if early:
        options["launch_pdl"] = True
    return (block_n, block_k, is_even, early), [-(-size // block_n) for size in sizes], options


def run_linear(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, VARIANT: int | None = None, EARLY: bool = True):
    """out = T(a @ b.T), sums in float32.

    Shapes: a [M, K], b [N, K], out [M, N]; unit last stride, any row stride; M <= 16; T bfloat16, float16 or float32.
    VARIANT picks launch parameters (None: by shape). EARLY: launch before the kernel in front has ended.
    """
    (M, N), K = out.shape, a.shape[1]
    if M == 0 or N == 0:
        return
    constants, (programs,), options = _launch(a.dtype, M, K, 1, VARIANT, (N,), EARLY)
    if M == 1:
        _linear_row[(programs,)](a, b, out, b.stride(0), N, K, *constants, **options)
    else:
        _linear_rows[(programs,)](a, b, out, a.stride(0), b.stride(0), out.stride(0), M, N, K, *constants, **options)


def run_swiglu(
    x: torch.Tensor,
    wg: torch.Tensor,
    wu: torch.Tensor,
    out: torch.Tensor,
    *,
    VARIANT: int | None = None,
    EARLY: bool = True,
):
    """out = T(T(silu(T(x @ wg.T))) * T(x @ wu.T)), sums in float32.

    Shapes: x [M, K], wg and wu [I, K], out [M, I]; unit last stride, any row stride; M <= 16.
    """
    (M, N), K = out.shape, x.shape[1]
    if M == 0 or N == 0:
        return
    constants, (programs,), options = _launch(x.dtype, M, K, 2, VARIANT, (N,), EARLY)
    if M == 1:
        strides = (wg.stride(0), wu.stride(0))
        _swiglu_row[(programs,)](x, wg, wu, out, *strides, N, K, *constants, **options)
    else:
        strides = (x.stride(0), wg.stride(0), wu.stride(0), out.stride(0))
        _swiglu_rows[(programs,)](x, wg, wu, out, *strides, M, N, K, *constants, **options)


def run_qkv(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    VARIANT: int | None = None,
    EARLY: bool = True,
):
    """q, k, v = T(x @ wq.T), T(x @ wk.T), T(x @ wv.T) in one launch, sums in float32.

    Shapes: x [M, K], wq [NQ, K], wk [NK, K], wv [NV, K], q [M, NQ], k [M, NK], v [M, NV]; unit last stride; M <= 16.
    """
    M, K = x.shape
    sizes = (q.shape[1], k.shape[1], v.shape[1])
    if M == 0:
        return
    constants, programs, options = _launch(x.dtype, M, K, 3, VARIANT, sizes, EARLY)
    weights = (wq, wk, wv)
    strides = [weight.stride(0) for weight in weights]
    if M == 1:
        _qkv_row[(sum(programs),)](x, *weights, q, k, v, *strides, *sizes, K, *constants, **options)
    else:
        strides = [x.stride(0), *strides, q.stride(0), k.stride(0), v.stride(0)]
        _qkv_rows[(sum(programs),)](x, *weights, q, k, v, *strides, M, *sizes, K, *constants, **options)
