"""Linear layers of FP8 codes by torch._scaled_mm, which is cuBLAS, with scales of blocks."""

import torch

BLOCK = 128
ALIGNMENT = 16  # in bytes: cuBLAS refuses codes that begin elsewhere, or rows of them that do


def _cast(x):
    """x [M, K] -> codes [M, K] and scales [M, ceil(K / 128)], as per_token_cast gives them without rounding of scales."""
    groups = -(-x.shape[1] // BLOCK)
    blocks = torch.nn.functional.pad(x.float(), (0, groups * BLOCK - x.shape[1])).unflatten(1, (groups, BLOCK))
    amax = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    limit = torch.full_like(amax, 448.0)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    codes = (blocks * (limit / amax).unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], amax / limit


def _rows(codes):
    """Codes whose rows cuBLAS can read, in a copy where they lie otherwise: column by column, or off the alignment."""
    if codes.stride(1) == 1 and codes.stride(0) % ALIGNMENT == 0 and codes.data_ptr() % ALIGNMENT == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


def _columns(scales):
    """Scales as cuBLAS wants those of a, column by column without gaps; other strides and addresses are copied."""
    if scales.stride() == (1, scales.shape[0]) and scales.data_ptr() % ALIGNMENT == 0:
        return scales
    return scales.T.clone(memory_format=torch.contiguous_format).T


def _multiply(a, b, scale_a, scale_b):
    if scale_b.data_ptr() % ALIGNMENT:
        scale_b = scale_b.clone()
    return torch._scaled_mm(
        _rows(a), _rows(b).T, scale_a=_columns(scale_a), scale_b=scale_b.T, out_dtype=torch.bfloat16
    )


def run_gemm_fp8_blockwise_cublas(a, b, scale_a, scale_b):
    """a [M, K], b [N, K], scales of blocks of 128 -> [M, N]."""
    return _multiply(a, b, scale_a, scale_b)


def run_gemm_fp8_blockwise_dynamic_cublas(x, b, scale_b):
    """x [M, K] in bfloat16, b [N, K], scales of blocks of 128 -> [M, N]: the cast in eager PyTorch, then one product."""
    codes, scale = _cast(x)
    return _multiply(codes, b, scale, scale_b)
