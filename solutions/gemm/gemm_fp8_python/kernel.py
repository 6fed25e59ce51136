"""Linear layers of FP8 codes in PyTorch: exact products of blocks with their scales in float32."""

import torch

BLOCK = 128


def _codes_product(a, b):
    """a [M, k] @ b [N, k].T in float32, of codes in bfloat16, which holds every one of them exactly."""
    if a.is_cuda:
        return torch.mm(a, b.T, out_dtype=torch.float32)  # tensor cores, which add in float32
    return a.float() @ b.float().T


def _multiply(a, b, scale_a, scale_b):
    """Codes and scales -> [M, N] in bfloat16: a product for each block of channels, scaled and added in float32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    rows = torch.arange(b.shape[0], device=b.device) // BLOCK
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for block in range(scale_a.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        product = _codes_product(a[:, part].contiguous(), b[:, part].contiguous())
        total.addcmul_(product.mul_(scale_a[:, block, None]), scale_b[rows, block])
    return total.to(torch.bfloat16)


def _cast(x):
    """x [M, K] -> codes [M, K] and scales [M, ceil(K / 128)], as per_token_cast gives them without rounding of scales."""
    groups = -(-x.shape[1] // BLOCK)
    blocks = torch.nn.functional.pad(x.float(), (0, groups * BLOCK - x.shape[1])).unflatten(1, (groups, BLOCK))
    amax = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    limit = torch.full_like(amax, 448.0)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    codes = (blocks * (limit / amax).unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], amax / limit


def run_gemm_fp8_blockwise(a, b, scale_a, scale_b):
    """a [M, K], b [N, K], scales of blocks of 128 -> [M, N]: block by block in float32."""
    return _multiply(a, b, scale_a, scale_b)


def run_gemm_fp8_blockwise_dynamic(x, b, scale_b):
    """x [M, K] in bfloat16, b [N, K], scales of blocks of 128 -> [M, N]: a cast, then block by block in float32."""
    codes, scale = _cast(x)
    return _multiply(codes, b, scale, scale_b)
