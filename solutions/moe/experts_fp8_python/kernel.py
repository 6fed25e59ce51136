"""Experts with FP8 weights in PyTorch, expert by expert: casts, exact products of blocks, and their scales in float32."""

import torch
import torch.nn.functional as F

BLOCK = 128


def _codes_product(a, b):
    """a [rows, k] @ b [N, k].T in float32, of codes in bfloat16, which holds every one of them exactly."""
    if a.is_cuda:
        return torch.mm(a, b.T, out_dtype=torch.float32)  # tensor cores, which add in float32
    return a.float() @ b.float().T


def _cast(x):
    """x [rows, K] -> codes [rows, K] and scales [rows, ceil(K / 128)], as per_token_cast without rounding of scales."""
    groups = -(-x.shape[1] // BLOCK)
    blocks = F.pad(x.float(), (0, groups * BLOCK - x.shape[1])).unflatten(1, (groups, BLOCK))
    amax = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    limit = torch.full_like(amax, 448.0)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    codes = (blocks * (limit / amax).unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], amax / limit


def _linear(x, codes, scale):
    """x [rows, K] in bfloat16, codes [N, K], scales of blocks of 128 -> [rows, N]: a cast, then block by block in float32."""
    of_x, scale_of_x = _cast(x)
    a, b = of_x.to(torch.bfloat16), codes.to(torch.bfloat16)
    rows = torch.arange(b.shape[0], device=b.device) // BLOCK
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for block in range(scale.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        product = _codes_product(a[:, part].contiguous(), b[:, part].contiguous())
        total.addcmul_(product.mul_(scale_of_x[:, block, None]), scale[rows, block])
    return total.to(torch.bfloat16)


def run(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert on the tokens that chose it."""
    flat, choices, experts = ids.flatten(), ids.shape[1], gate_up.shape[0]
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < experts), flat, experts))
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device), right=True)
    rows = torch.zeros(order.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    shares = weights.flatten().to(torch.bfloat16)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if first == last:
            continue
        chosen, first = order[first:last], last
        gate, up = _linear(x[chosen // choices], gate_up[expert], gate_up_scale[expert]).chunk(2, dim=-1)
        found = _linear(F.silu(gate) * up, down[expert], down_scale[expert])
        rows[chosen] = (found * shares[chosen, None]).float()
    return rows.unflatten(0, ids.shape).sum(dim=1).to(x.dtype)
