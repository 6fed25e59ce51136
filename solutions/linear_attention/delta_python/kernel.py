"""The gated delta rule in PyTorch, as transformers' Qwen3.5 and Qwen3-Next run it without further libraries."""

import torch

CHUNK = 64
EPSILON = 1e-6


def _wide(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, ...] -> float32 [B, H, T, ...], contiguous."""
    return x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)


def _heads(q: torch.Tensor, k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k for each of the heads of values, normalised, in float32."""
    group = heads // k.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    return _normalised(_wide(q)), _normalised(_wide(k))


def run_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, T, Hk, K], v [B, T, Hv, V], g, beta [B, T, Hv], state [B, Hv, K, V] -> [B, T, Hv, V], [B, Hv, K, V]."""
    tokens, size = k.shape[1], k.shape[3]
    query, key = _heads(q, k, v.shape[2])
    query = query * size**-0.5
    value, rate, decay = _wide(v), _wide(beta), _wide(g)
    padding = -tokens % CHUNK
    query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    rate, decay = (torch.nn.functional.pad(x, (0, padding)) for x in (rate, decay))
    written, read = value * rate[..., None], key * rate[..., None]
    query, key, written, read = (x.unflatten(2, (-1, CHUNK)) for x in (query, key, written, read))
    total = decay.unflatten(2, (-1, CHUNK)).cumsum(dim=3)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    system = (read @ key.transpose(-1, -2)) * pairs
    attention = (query @ key.transpose(-1, -2)) * pairs
    new_values = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, read * total.exp()[..., None], upper=False, unitriangular=True)
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    state, out = initial_state.float(), torch.zeros_like(new_values)
    for number in range(out.shape[2]):
        errors = new_values[:, :, number] - reads[:, :, number] @ state
        out[:, :, number] = query[:, :, number] @ state + attention[:, :, number] @ errors
        state = state * left[:, :, number] + key[:, :, number].transpose(-1, -2) @ errors
    out = out.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
    return out.to(q.dtype, memory_format=torch.contiguous_format), state


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, 1, Hk, K], v [B, 1, Hv, V], g, beta [B, 1, Hv], state [B, Hv, K, V] -> [B, 1, Hv, V], [B, Hv, K, V]."""
    query, key = _heads(q, k, v.shape[2])
    query = query / k.shape[3] ** 0.5
    value, rate, decay = _wide(v), _wide(beta), _wide(g)
    out = torch.zeros_like(value)
    state = initial_state.float() * decay[:, :, 0].exp()[..., None, None]
    found = (state * key[:, :, 0, :, None]).sum(dim=-2)
    error = (value[:, :, 0] - found) * rate[:, :, 0, None]
    state = state + key[:, :, 0, :, None] * error[..., None, :]
    out[:, :, 0] = (state * query[:, :, 0, :, None]).sum(dim=-2)
    return out.transpose(1, 2).contiguous().to(q.dtype), state
