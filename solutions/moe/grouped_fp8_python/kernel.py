"""Products of FP8 codes for each group of rows in eager PyTorch: exact products of blocks, scaled and added in float32."""

import torch

BLOCK = 128


def _codes_product(a, b):
    """a [M, k] @ b [N, k].T in float32, of codes in bfloat16, which holds every one of them exactly."""
    if a.is_cuda:
        return torch.mm(a, b.T, out_dtype=torch.float32)  # tensor cores, which add in float32
    return a.float() @ b.float().T


def _multiply(a, b, scale_a, scale_b):
    """Codes and scales -> [M, N] in bfloat16: a product for each block of columns, scaled and added in float32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    rows = torch.arange(b.shape[0], device=b.device) // BLOCK
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for block in range(scale_a.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        product = _codes_product(a[:, part].contiguous(), b[:, part].contiguous())
        total.addcmul_(product.mul_(scale_a[:, block, None]), scale_b[rows, block])
    return total.to(torch.bfloat16)


def run_grouped(a, b, scale_a, scale_b, offs):
    """a [S, K], b [E, N, K], scales of blocks of 128, offs [E] -> [S, N]; group by group."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    first = 0
    for group, last in enumerate(offs.tolist()):
        if last > first:
            out[first:last] = _multiply(a[first:last], b[group], scale_a[first:last], scale_b[group])
        first = last
    return out


def run_masked(a, b, scale_a, scale_b, counts):
    """a [E, M, K], b [E, N, K], scales of blocks of 128, counts [E] -> [E, M, N]; group by group."""
    out = torch.zeros(b.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device=a.device)
    for group, count in enumerate(counts.tolist()):
        if count > 0:
            out[group, :count] = _multiply(a[group, :count], b[group], scale_a[group, :count], scale_b[group])
    return out
