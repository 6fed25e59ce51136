"""N-gram hashing in eager PyTorch, operation by operation, as models run it."""

import torch


def run_hash(
    ids: torch.Tensor, multipliers: torch.Tensor, vocab_sizes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """ids [M, N], multipliers [L, N], vocab_sizes [L, N - 1, E], offsets [L, (N - 1) * E] -> rows [L, M, (N - 1) * E]."""
    layers = []
    for layer, sizes in enumerate(vocab_sizes):
        mixed = ids[:, 0].long() * multipliers[layer, 0]
        blocks = []
        for n, of_table in enumerate(sizes, start=1):
            mixed = torch.bitwise_xor(mixed, ids[:, n].long() * multipliers[layer, n])
            blocks.append(torch.remainder(mixed.unsqueeze(-1), of_table.long()))
        layers.append((torch.cat(blocks, dim=-1) + offsets[layer]).to(torch.int32))
    return torch.stack(layers)


def run_ngram_shift(tokens: torch.Tensor, eos: int, shifts: int) -> torch.Tensor:
    """tokens [B, S] -> [B, S, shifts], each shifted within its text."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.where(tokens == eos, positions, -1)
    last = torch.cummax(ends, dim=1).values if tokens.numel() else ends
    start = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1) + 1
    columns = [tokens]
    for shift in range(1, shifts):
        source = (positions - shift).clamp_min(0).expand_as(tokens)
        moved = tokens.gather(1, source)
        valid = (positions - start >= shift) & (positions >= shift)
        columns.append(torch.where(valid, moved, torch.full_like(moved, eos)))
    return torch.stack(columns, dim=-1)
