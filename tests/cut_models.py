"""Small models in plain PyTorch with parts that no Definition describes."""

from __future__ import annotations

from typing import Any

import torch

EPS = 1e-6


def unit(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def decayed_scan(
    q: torch.Tensor, k: Any, v: Any, g: Any, *, scale: float = 0.5, normalise: bool = True, state: Any = None
) -> Any:
    """Read a state that decays and to which an outer product is added at each position."""
    if normalise:
        q, k = unit(q), unit(k)
    now = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    read = []
    for at in range(q.shape[1]):
        now = g[:, at].exp()[..., None, None] * now + k[:, at][..., None] * v[:, at][..., None, :]
        read.append((q[:, at][..., None] * now).sum(-2) * scale)
    return torch.stack(read, 1), now


def doubling(x: torch.Tensor) -> torch.Tensor:
    """Write into the argument, which a kernel must not do."""
    return x.mul_(2)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 1e-3 * torch.randn_like(x)


class Mixer(torch.nn.Module):
    """A mixer around a function: queries, keys and values of equal sizes, which are different axes."""

    def __init__(self, hidden: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.gate = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, heads)
        self.out = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        read, _ = decayed_scan(q, k, v, -torch.nn.functional.softplus(self.gate(x)))
        out: torch.Tensor = self.out(read.reshape(x.shape))
        return out


class Ramp(torch.nn.Module):
    """A leaf with a weight, a number, a flag and a method."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(hidden))
        self.slope, self.is_centred = 0.3, True

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True) if self.is_centred else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._centred(x)
        return self.weight * torch.where(y > 0, y, self.slope * y)


class Odd(torch.nn.Module):
    """A module whose functions no Definition can describe."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(doubling(x * self.scale))


class Hybrid(torch.nn.Module):
    """Token ids to logits."""

    def __init__(self, hidden: int = 64, vocabulary: int = 96, *, is_odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(vocabulary, hidden), torch.nn.Linear(hidden, vocabulary)
        self.mixer, self.ramp = Mixer(hidden), Ramp(hidden)
        self.odd = Odd() if is_odd else torch.nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        logits: torch.Tensor = self.head(self.ramp(self.odd(x + self.mixer(x))))
        return logits


def greedy(model: torch.nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids with further tokens, the likeliest one each time."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids
