"""Compare an imported function, called as its own project calls it, with its draft. Runs in a confined worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SAME, DIFFERENT, ORIGINAL_FAILED, DRAFT_FAILED = range(4)
TOLERANCE = 1e-3
"""Maximum difference, relative to the value and to the largest one. Swapped arguments differ by more."""


@dataclass(frozen=True)
class Called:
    """A function and its calling convention. ``writes`` is true if outputs are arguments."""

    function: Callable[..., Any]
    by_name: bool
    writes: bool


def code_of(
    original: Called,
    draft: Called,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Sequence[int], str]],
    in_place: Mapping[str, str],
) -> torch.Tensor:
    """Return the result as a 0-d int32 tensor.

    Args:
        in_place: input to the output that overwrites it.
    """
    found = []
    for called, failed in ((original, ORIGINAL_FAILED), (draft, DRAFT_FAILED)):
        try:
            found.append(_results(called, inputs, outputs, in_place))
        except Exception:  # foreign code may raise anything, and the code reports it
            return torch.tensor(failed, dtype=torch.int32)
    theirs, ours = found
    same = all(_close(value, ours[name]) for name, value in theirs.items() if name in ours)
    return torch.tensor(SAME if same else DIFFERENT, dtype=torch.int32)


def _results(
    called: Called,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Sequence[int], str]],
    in_place: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    kept = {target: given[source] for source, target in in_place.items()}
    written: dict[str, torch.Tensor] = {}
    if called.writes:
        written = {
            name: torch.zeros(*shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in outputs.items()
            if name not in kept
        }
    arguments = given | written
    returned = called.function(**arguments) if called.by_name else called.function(*arguments.values())
    if called.writes:
        return kept | written
    values = returned if isinstance(returned, tuple | list) else (returned,)
    pairs = zip(outputs, values, strict=False)  # trailing outputs may be optional
    return kept | {name: torch.as_tensor(value) for name, value in pairs if value is not None}


def _close(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    if theirs.shape != ours.shape:
        return False
    one, other = theirs.to(ours.dtype).double(), ours.double()
    finite = one[torch.isfinite(one)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
