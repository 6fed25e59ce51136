"""Random inputs for probing the experts of a mixture: no order of adding changes a bit of what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilegym_db.integrations.transformers.drawn_codes import CODES, WEIGHT_SCALES, WEIGHTS, activation, choice, single
from tilegym_db.integrations.transformers.probe import Draw
from tilegym_db.records import Definition

__all__ = ["EXPERTS", "drawn_for"]

EXPERTS = 4
SIZES = {"M": 6, "K": 2, "E": EXPERTS, "H": 16, "I": 8}
"""Two choices, since the loop over experts rounds after each of them and the others after all."""
SPREAD = 4.0
"""Of the hidden states: so wide that a clamp of gates would show."""
BLOCKS = 2
"""Of FP8 codes: of scales each way."""
FIRST_SCALE = 2.0**-8
"""Of codes of the first product, which makes gates as wide."""
LAST_SCALES = (0.25, 0.5, 1.0, 2.0)
"""Powers of two: what the second product is given has scales of many bits, which these must not round."""


def drawn_for(
    definition: Definition, kept: Sequence[str], called_with: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every tensor of a Definition of experts, by name.

    Args:
        definition: its inputs are as the part says.
        kept: the inputs that a module keeps.
        called_with: hidden states, ids and weights.
        device: where the tensors lie.
    """
    draw, sizes = Draw(device), {**dict.fromkeys(definition.axes, SIZES["H"]), **SIZES}
    x, ids, weights = called_with
    blocks = [axis.value for axis in definition.axes.values() if axis.value is not None]
    has_codes = any(_is_code(definition, name) for name in kept)
    if has_codes:
        sizes.update({name: axis.value for name, axis in definition.axes.items() if axis.value is not None})
        sizes.update(dict.fromkeys(("H", "I"), BLOCKS * max(blocks)))
        states = activation(draw, sizes["M"], sizes["H"], max(blocks))
    else:
        states = SPREAD * draw(sizes["M"], sizes["H"])
    inputs = {
        x: states,
        ids: draw(sizes["M"], sizes["E"]).float().argsort(dim=-1)[:, : sizes["K"]].contiguous(),
        weights: draw(sizes["M"], sizes["K"]),
    }
    tensors = [name for name in kept if not definition.inputs[name].is_scalar]
    return {**inputs, **(_codes if has_codes else _matrices)(definition, tensors, sizes, draw)}


def _is_code(definition: Definition, name: str) -> bool:
    return definition.inputs[name].dtype == str(CODES).removeprefix("torch.")


def _matrices(
    definition: Definition, names: Sequence[str], sizes: Mapping[str, int], draw: Draw
) -> dict[str, torch.Tensor]:
    """Weights whose every sum is of two terms, so that its rounding depends on no order of adding."""
    found = {}
    for name in names:
        shape = definition.shape_of(name, sizes)
        matrices = [draw.mixing(*shape[1:]) for _ in range(shape[0])] if len(shape) == 3 else []
        found[name] = torch.stack(matrices) if matrices else draw(*shape)
    return found


def _codes(
    definition: Definition, names: Sequence[str], sizes: Mapping[str, int], draw: Draw
) -> dict[str, torch.Tensor]:
    """Codes with scales, of which each output takes one."""
    found, is_first = {}, True
    for name in names:
        shape = definition.shape_of(name, sizes)
        if _is_code(definition, name):
            matrices = [single(draw, *shape[1:]) for _ in range(shape[0])]
            found[name] = (torch.stack(matrices) * choice(draw, WEIGHTS, *shape)).to(CODES)
            scales, is_first = ([FIRST_SCALE * value for value in WEIGHT_SCALES] if is_first else LAST_SCALES), False
        else:
            found[name] = choice(draw, scales, *shape).float()
    return found
