"""A linear layer with a bias on at most 16 rows, Triton: bound by reading the weights once.

Dot products in registers for one row, tensor cores with 16 rows for more. A program owns a few output features and all rows, so
no sum is split. It reads its biases while the first weights are on their way, and adds them to the sums before the rounding.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _linear_row(
    a_ptr, b_ptr, bias_ptr, out_ptr, b_stride, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    b_ptrs = b_ptr + n.to(tl.int64)[:, None] * b_stride + lanes[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(a_ptr + k + lanes)
            b = tl.load(b_ptrs + k, eviction_policy="evict_first")
        else:
            inside = lanes < K - k
            a = tl.load(a_ptr + k + lanes, mask=inside, other=0.0)
            b = tl.load(b_ptrs + k, mask=(n < N)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += a.to(tl.float32)[None, :] * b.to(tl.float32)
    out = tl.sum(acc, axis=1) + bias
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _linear_rows(
    a_ptr, b_ptr, bias_ptr, out_ptr, a_stride, b_stride, out_stride, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * a_stride + k[None, :]
    b_ptrs = b_ptr + n.to(tl.int64)[None, :] * b_stride + k[:, None]
    acc = tl.zeros([16, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0.0)
            b = tl.load(b_ptrs, eviction_policy="evict_first")
        else:
            a = tl.load(a_ptrs, mask=(m < M)[:, None] & (k < K - start)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(n < N)[None, :] & (k < K - start)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    out = acc + bias[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


# BLOCK_N, BLOCK_K, warps
_ROW = ((4, 2048, 4), (4, 1024, 4), (2, 1024, 4), (4, 512, 4), (1, 2048, 8), (8, 512, 8))
# BLOCK_N, BLOCK_K, warps, stages
_ROWS = ((16, 512, 2, 3), (32, 64, 2, 8), (64, 128, 4, 5), (32, 256, 4, 4), (32, 128, 4, 3), (16, 128, 2, 6))


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    *,
    VARIANT: int | None = None,
    EARLY: bool = True,
):
    """out = T(a @ b.T + bias), sums in float32.

    Shapes: a [M, K], b [N, K], bias [N], out [M, N]; unit last stride, any row stride; M <= 16; T bfloat16, float16 or float32.
    VARIANT picks launch parameters (None: by shape). EARLY: launch before the kernel in front has ended.
    """
    (M, N), K = out.shape, a.shape[1]
    if M == 0 or N == 0:
        return
    if M == 1:
        block_n, block_k, warps = _ROW[(3 if K <= 2048 else 0) if VARIANT is None else VARIANT]
        options = {"num_warps": warps}
    else:
        block_n, block_k, warps, stages = (32, 32, 4, 3) if a.dtype == torch.float32 else _ROWS[VARIANT or 0]
        options = {"num_warps": warps, "num_stages": stages}
    is_even = K % block_k == 0 and N % block_n == 0
    # Dependent launch: programs are placed while the kernel before still runs. They wait for its end before they read.
    early = EARLY and torch.cuda.is_available()
    if early:
        options["launch_pdl"] = True
    constants, programs = (block_n, block_k, is_even, early), (-(-N // block_n),)
    if M == 1:
        _linear_row[programs](a, b, bias, out, b.stride(0), N, K, *constants, **options)
    else:
        strides = (a.stride(0), b.stride(0), out.stride(0))
        _linear_rows[programs](a, b, bias, out, *strides, M, N, K, *constants, **options)
