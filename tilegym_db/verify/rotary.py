"""Tables of rotary positions: what a model puts into them, drawn so that cos and sin of one call belong to the same angles."""

from __future__ import annotations

import hashlib
import math
import random

import torch

from tilegym_db.records.definition_parts import InputGenerator

__all__ = ["rotary_table"]

Shape = tuple[int, ...]

DEFAULT_BASE = 10_000.0
BASES = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
FARTHEST = 1 << 17
"""Positions up to the context of long models; in fp64 their angles are exact to 1e-11."""
STARTS_AT_ZERO, LEFT_PADDED, PACKED = 0.15, 0.15, 0.15
"""Share of sequences that begin at position 0, begin with padding, or hold several documents one after the other."""
ATTENTION_FACTORS = (1.0, 1.0, 1.0, 1.2079, 1.4)
"""What YaRN multiplies both tables with, so that cos**2 + sin**2 is no 1."""


def rotary_table(spec: InputGenerator, seed: int, shape: Shape, device: str | torch.device) -> torch.Tensor:
    """cos or sin of real positions: ``[..., S, D]`` with two identical halves, in float32.

    The angles depend on the seed of the case and not on the name of the input: the tables of one call belong together. Each
    sequence has positions of its own, which start anywhere. The base is the generator's in half of the cases, and that of
    another model in the others.

    Args:
        spec: ``rotary_cos`` or ``rotary_sin``; its ``scale`` is the base, 10000 where it is 1.
        seed: of the case.
        shape: of the table.
        device: where it is wanted.
    """
    length, dim = shape[-2:]
    drawn = random.Random(hashlib.sha256(f"{seed}:positions".encode()).digest())
    own = spec.scale if spec.scale > 1 else DEFAULT_BASE
    base = own if drawn.random() < 0.5 else drawn.choice(BASES)
    factor = drawn.choice(ATTENTION_FACTORS)
    sequences = [_positions(drawn, length) for _ in range(math.prod(shape[:-2]))]
    positions = torch.tensor(sequences, dtype=torch.float64, device=device).reshape(*shape[:-2], length, 1)
    exponents = torch.arange(0, dim // 2, device=device, dtype=torch.float64) * 2 / max(dim, 1)
    angles = positions * base**-exponents
    table = torch.cat([angles, angles], dim=-1)
    return ((torch.cos(table) if spec.kind == "rotary_cos" else torch.sin(table)) * factor).reshape(shape).float()


def _positions(drawn: random.Random, length: int) -> list[int]:
    """The positions of one sequence, as a model numbers them."""
    kind, start = drawn.random(), int(2 ** drawn.uniform(0, math.log2(FARTHEST)))
    if length > 1:
        if kind < STARTS_AT_ZERO:
            return list(range(length))
        if kind < STARTS_AT_ZERO + LEFT_PADDED:
            padding = drawn.randrange(length)
            return [1] * padding + list(range(length - padding))
        if kind < STARTS_AT_ZERO + LEFT_PADDED + PACKED:
            first = drawn.randrange(1, length)
            return [*range(first), *range(length - first)]
    return list(range(start, start + length))
