"""Kimi Delta Attention in PyTorch, as transformers' Kimi Linear runs it without further libraries."""

import torch

CHUNK = 64
EPSILON = 1e-6


def _wide(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, ...] -> float32 [B, H, T, ...], contiguous."""
    return x.transpose(1, 2).contiguous().to(torch.float32)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)


def run_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V] -> [B, T, H, V], [B, H, K, V]."""
    tokens, size = k.shape[1], k.shape[3]
    query, key, value, rate, decay = (_wide(x) for x in (q, k, v, beta, g))
    padding = -tokens % CHUNK
    query, key = _normalised(query), _normalised(key)
    query, key, value, decay = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (query, key, value, decay))
    query = query * (1 / size**0.5)
    rate = torch.nn.functional.pad(rate, (0, padding))[..., None]
    written, read = value * rate, key * rate
    query, key, decay, written, read = (x.unflatten(2, (-1, CHUNK)) for x in (query, key, decay, written, read))
    total = decay.cumsum(dim=-2)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # Each row of the state has its own decay, so the decays of pairs of tokens have an axis of rows: [..., C, C, K].
    pairs = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(above[..., None], float("-inf")).exp()
    system = -(read[..., :, None, :] * key[..., None, :, :] * pairs).sum(dim=-1)
    system = system.masked_fill(torch.ones_like(above).triu(0), 0)
    for token in range(1, CHUNK):
        row, rows = system[..., token, :token].clone(), system[..., :token, :token].clone()
        system[..., token, :token] = row + (row[..., None] * rows).sum(-2)
    system = system + torch.eye(CHUNK, dtype=system.dtype, device=q.device)
    new_values, reads = system @ written, system @ (read * total.exp())
    state, out = initial_state.float(), torch.zeros_like(new_values)
    for number in range(out.shape[2]):
        query_of, key_of, total_of = query[:, :, number], key[:, :, number], total[:, :, number]
        attention = (query_of[..., :, None, :] * key_of[..., None, :, :] * pairs[:, :, number]).sum(dim=-1)
        errors = new_values[:, :, number] - reads[:, :, number] @ state
        out[:, :, number] = (query_of * total_of.exp()) @ state + attention.masked_fill(above, 0) @ errors
        left = total_of[:, :, -1].exp()[..., None]
        state = state * left + (key_of * (total_of[:, :, -1:] - total_of).exp()).transpose(-1, -2) @ errors
    out = out.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
    return out.contiguous().to(q.dtype), state


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, g [B, 1, H, K], v [B, 1, H, V], beta [B, 1, H], state [B, H, K, V] -> [B, 1, H, V], [B, H, K, V]."""
    query, key, value, decay, rate = (x.to(torch.float32) for x in (q, k, v, g, beta))
    query, key = _normalised(query), _normalised(key)
    query = query * (1 / k.shape[3] ** 0.5)
    state = initial_state.float() * decay[:, 0, :, :, None].exp()
    found = (state * key[:, 0, :, :, None]).sum(dim=-2)
    error = (value[:, 0] - found) * rate[:, 0, :, None]
    state = state + key[:, 0, :, :, None] * error[..., None, :]
    out = torch.zeros_like(value)
    out[:, 0] = (state * query[:, 0, :, :, None]).sum(dim=-2)
    return out.to(q.dtype), state
