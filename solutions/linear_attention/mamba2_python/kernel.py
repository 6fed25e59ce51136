"""The state-space layer of Mamba-2 in PyTorch, as transformers runs it without further libraries."""

import torch
import torch.nn.functional as F

CHUNK = 256


def _chunks(x: torch.Tensor, padding: int) -> torch.Tensor:
    """[B, T, ...] -> [B, chunks, CHUNK, ...], with zeros behind the last token."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding)).unflatten(1, (-1, CHUNK))


def _sums(x: torch.Tensor) -> torch.Tensor:
    """[..., S] -> [..., S, S]: the sum of x from behind j up to i, and minus infinity above the diagonal."""
    size = x.shape[-1]
    every = torch.ones(size, size, dtype=torch.bool, device=x.device)
    spread = x[..., None].expand(*x.shape, size).masked_fill(~every.tril(-1), 0)
    return spread.cumsum(dim=-2).masked_fill(~every.tril(), float("-inf"))


def run_chunk(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    Bmat: torch.Tensor,
    Cmat: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    dt_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, H, P], dt [B, T, H], Bmat, Cmat [B, T, G, N], states [B, H, P, N] -> [B, T, H, P], [B, H, P, N]."""
    tokens, heads = x.shape[1], x.shape[2]
    padding, group = -tokens % CHUNK, heads // Bmat.shape[2]
    steps = torch.clamp(F.softplus(dt + dt_bias.to(dt.dtype)), min=dt_min, max=float("inf"))
    values = x.float()
    writes, reads = (one.float().repeat_interleave(group, dim=2) for one in (Bmat, Cmat))
    own = D[..., None] * values
    written = _chunks(values * steps[..., None].float(), padding)
    writes, reads = _chunks(writes, padding), _chunks(reads, padding)
    logs = _chunks(A * steps.float(), padding).permute(0, 3, 1, 2)
    total = torch.cumsum(logs, dim=-1)
    # 1. What tokens read of the tokens in their chunk.
    pairs = torch.einsum("bclhn,bcshn->bclsh", reads, writes) * torch.exp(_sums(logs)).permute(0, 2, 3, 4, 1)
    out = torch.einsum("bclsh,bcshp->bclhp", pairs, written)
    # 2. What each chunk adds to the state.
    left = torch.exp(total[..., -1:] - total).permute(0, 2, 3, 1)
    added = torch.einsum("bclhn,bclhp->bchpn", writes * left[..., None], written)
    # 3. The state before each chunk.
    states = torch.cat([initial_state[:, None].float(), added], dim=1)
    decays = torch.exp(_sums(F.pad(total[..., -1], (1, 0)))).transpose(1, 3)
    states = torch.einsum("bzch,bzhpn->bchpn", decays, states)
    # 4. What tokens read of it.
    read = torch.einsum("bclhn,bchpn->bclhp", reads, states[:, :-1])
    out = (out + read * torch.exp(total).permute(0, 2, 3, 1)[..., None]).contiguous()
    return (out.flatten(1, 2)[:, :tokens] + own).contiguous(), states[:, -1].contiguous()


def run_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    Bmat: torch.Tensor,
    Cmat: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """state [B, H, P, N] (overwritten), x [B, H, P], dt [B, H], Bmat, Cmat [B, G, N] -> [B, H, P]."""
    batch, heads, size = x.shape
    group = heads // Bmat.shape[1]
    step = F.softplus(dt + dt_bias.to(dt.dtype))
    decay = torch.exp(step.float() * A)
    write = step[..., None, None] * Bmat.repeat_interleave(group, dim=1)[:, :, None]
    new = state * decay[..., None, None] + write * x[..., None]
    state.copy_(new)
    read = Cmat.repeat_interleave(group, dim=1).reshape(batch * heads, -1, 1)
    total = torch.bmm(new.to(read.dtype).reshape(batch * heads, size, -1), read).view(x.shape)
    return total + x * D[:, None]
