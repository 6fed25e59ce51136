"""The scores of a router in float32 from half precision operands, Triton: no copy of the hidden states and none of the weight.

Products of half precision numbers are exact in float32, so tensor cores multiply the operands as they are. A program owns its
scores, so no sum is split.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _scores_of_one(a_ptr, b_ptr, out_ptr, b_stride, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    b_ptrs = b_ptr + n.to(tl.int64)[:, None] * b_stride + lanes[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = lanes < K - k
        a = tl.load(a_ptr + k + lanes, mask=inside, other=0.0)
        b = tl.load(b_ptrs + k, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        acc += a.to(tl.float32)[None, :] * b.to(tl.float32)
    tl.store(out_ptr + n, tl.sum(acc, axis=1), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _scores(
    a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // n_tiles * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % n_tiles * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m[:, None] * a_stride + k[None, :]
    b_ptrs = b_ptr + n[None, :] * b_stride + k[:, None]
    in_m = (m < M)[:, None]
    in_n = (n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m, other=0.0)
            b = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=in_m & (k[None, :] < K - start), other=0.0)
            b = tl.load(b_ptrs, mask=in_n & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], acc, mask=in_m & in_n)


# BLOCK_N, BLOCK_K, warps, for one token
_ONE = ((2, 1024, 4), (2, 2048, 4), (1, 2048, 4), (4, 512, 4), (2, 4096, 8))
# BLOCK_N, BLOCK_K, warps, stages, for at most 16 tokens
_FEW = ((16, 256, 4, 4), (16, 512, 4, 3), (16, 128, 2, 6), (32, 256, 4, 3), (16, 256, 2, 5))
# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, for more tokens
_MANY = ((32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (128, 128, 64, 8, 4), (16, 64, 128, 4, 5))


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _tile(M: int, N: int) -> int:
    """Return the variant with the largest tiles that still give each multiprocessor one, of about 132."""
    for variant in (3, 2, 1, 0):
        if _cdiv(M, _MANY[variant][0]) * _cdiv(N, _MANY[variant][1]) >= 120:
            return variant
    return 4


def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, VARIANT: int | None = None):
    """out = float32(a) @ float32(b).T, sums in float32.

    Shapes: a [M, K], b [N, K] bfloat16 or float16, out [M, N] float32; unit last stride, any row stride.
    VARIANT picks launch parameters of the kernel that M selects (None: by shape).
    """
    (M, N), K = out.shape, a.shape[1]
    if M == 0 or N == 0:
        return
    if M == 1:
        block_n, block_k, warps = _ONE[VARIANT or 0]
        _scores_of_one[(_cdiv(N, block_n),)](a, b, out, b.stride(0), N, K, block_n, block_k, num_warps=warps)
        return
    if M <= 16:
        block_m, (block_n, block_k, warps, stages) = 16, _FEW[VARIANT or 0]
    else:
        block_m, block_n, block_k, warps, stages = _MANY[_tile(M, N) if VARIANT is None else VARIANT]
    programs = _cdiv(M, block_m) * _cdiv(N, block_n)
    strides = (a.stride(0), b.stride(0), out.stride(0))
    blocks = (block_m, block_n, block_k, K % block_k == 0)
    _scores[(programs,)](a, b, out, *strides, M, N, K, *blocks, num_warps=warps, num_stages=stages)
