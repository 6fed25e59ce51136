"""Draws the inputs of one call: contents by distribution, secret seed, declared layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from tilegym_db.records import Definition
from tilegym_db.records.backward import forward_of
from tilegym_db.records.case import Case
from tilegym_db.records.definition_parts import InputGenerator
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.expressions import evaluate
from tilegym_db.verify.blobs import BlobReader
from tilegym_db.verify.distributions import CONTENTS, DISTRIBUTIONS, PLANTED, STYLES, plant
from tilegym_db.verify.generators import KINDS, contents_among, draw_codes, draw_jointly, spread_contents
from tilegym_db.verify.reference import as_written
from tilegym_db.verify.rotary import rotary_table
from tilegym_db.verify.torch_dtypes import storage_dtype
from tilegym_db.verify.variation import styles_of

__all__ = [
    "CONTENTS",
    "DISTRIBUTIONS",
    "PLANTED",
    "draw_inputs",
    "draws_noise",
    "draws_spread",
    "spreads_otherwise",
]

_INTEGERS = {torch.bool: (0, 2), torch.uint8: (0, 256)}
"""Dtype -> the first number and the one after the last, where it says which there are."""


Shape = tuple[int, ...]
NOISE = frozenset({"normal", "uniform", "positive", "probabilities", "log_decay", "unit_rows"})
Inputs = dict[str, torch.Tensor | Scalar]


def draws_noise(definition: Definition) -> bool:
    """Whether some input is noise whatever a case asks for, so that no contents are small integers throughout."""
    return (
        bool(definition.saved)
        or definition.joint_inputs is not None
        or any(generator.kind in NOISE for generator in definition.input_generators.values())
    )


def draws_spread(definition: Definition) -> bool:
    """Whether what a call has to do may depend on how its ids, lengths or probabilities are spread, as that of experts does."""
    return bool(_spreads(definition))


def spreads_otherwise(definition: Definition, distribution: str) -> bool:
    """Whether the cases of a distribution have ids, lengths or probabilities spread otherwise than they mostly are."""
    return any(contents_among(contents, distribution) != contents[0] for contents in _spreads(definition))


def _spreads(definition: Definition) -> list[tuple[str, ...]]:
    """The contents of everything drawn that may decide how much there is to do, the usual ones first."""
    found = [spread_contents(generator) for generator in definition.input_generators.values()]
    if definition.joint_inputs is not None and _joint_decides(definition):
        found.append(definition.joint_inputs.contents)
    if definition.saved:
        found += _spreads(forward_of(definition))
    return [contents for contents in found if contents]


def _joint_decides(definition: Definition) -> bool:
    """Whether inputs drawn together have ids or counts among them, or are probabilities to draw from."""
    joint = definition.joint_inputs.inputs if definition.joint_inputs is not None else ()
    spelled = {definition.inputs[name].dtype for name in joint}
    dtypes = {choice for dtype in spelled for choice in definition.dtypes.get(dtype, (dtype,))}
    return bool(definition.sampled) or not dtypes.isdisjoint({"bool", "int32", "int64"})


def draw_inputs(definition: Definition, case: Case, device: str, *, blobs: BlobReader | None = None) -> Inputs:
    """Input name -> tensor or scalar, in Definition order.

    Tensors are drawn in fp32 from ``case.seed`` on the device and rounded to the target dtype; they are contiguous (the
    caller lays them out by ``case.strides``). Saved tensors of a backward are what its forward gives for the others.

    Args:
        definition: names, shapes, dtypes and generators.
        case: sizes and contents.
        device: ``cpu`` or ``cuda:<n>``. The same seed draws other numbers on another device.
        blobs: reads what the case has in files; by default no file can be read.

    Raises:
        RecordError: a file is missing, is not what it was, or does not hold such a tensor.
    """
    drawn: Inputs = {}
    styles = styles_of(definition, case.distribution, case.seed)
    together = torch.Generator(device).manual_seed(_input_seed(case.seed, "joint inputs"))
    contents = case.spread if _joint_decides(definition) else case.distribution
    joint = draw_jointly(definition, case.axes, case.dtypes, case.scalars, together, contents)
    for name, spec in definition.inputs.items():
        if spec.is_scalar:
            drawn[name] = case.scalars[name]
        elif name in definition.saved:
            continue
        elif name in case.files:
            shape, dtype = definition.shape_of(name, case.axes), definition.dtype_of(name, case.dtypes)
            drawn[name] = (blobs or BlobReader()).tensor(name, case.files[name], shape, dtype).to(device)
        elif name in joint:
            drawn[name] = joint[name]
        else:
            drawn[name] = _draw(definition, case, name, device, styles.get(name, "normal"))
    return _with_saved(definition, case, drawn, device) if definition.saved else drawn


def _with_saved(backward: Definition, case: Case, drawn: Inputs, device: str) -> Inputs:
    """Inputs of a backward with its saved tensors: outputs of the forward's reference, as written, for inputs of that.

    Inputs of the forward that the backward does not take are drawn as the forward's own would be.
    """
    forward = forward_of(backward)
    of_forward = replace(
        case,
        axes={name: case.axes[name] for name in forward.axes},
        dtypes={name: case.dtypes[name] for name in forward.dtypes},
        files={},
    )
    given = draw_inputs(forward, of_forward, device)
    given |= {name: drawn[name] for name in forward.inputs if name in drawn}
    made = as_written(forward, given)
    return {name: made[name] if name in backward.saved else drawn[name] for name in backward.inputs}


def _draw(definition: Definition, case: Case, name: str, device: str, style: str) -> torch.Tensor:
    shape = definition.shape_of(name, case.axes)
    dtype = storage_dtype(definition.dtype_of(name, case.dtypes))
    generator = torch.Generator(device).manual_seed(_input_seed(case.seed, name))
    generated = definition.input_generators.get(name)
    if generated is not None and generated.kind.startswith("rotary"):
        value = rotary_table(generated, case.seed, shape, device)
    elif generated is not None and generated.kind == "codes":
        return draw_codes(generated, generator, shape, dtype)
    elif generated is not None and generated.kind in KINDS:
        contents = case.spread if spread_contents(generated) else case.distribution
        value = KINDS[generated.kind](generated, generator, shape, case.axes, contents)
    elif generated is not None and generated.kind != "normal":
        value = _uniform(generated, generator, shape, case.axes)
    elif not dtype.is_floating_point:
        # Every byte, as codes are packed in bytes: each half of one must take all of its sixteen values.
        low, high = _INTEGERS.get(dtype, (-100, 100) if dtype.is_signed else (0, 200))
        value = torch.randint(low, high, shape, generator=generator, device=device)
    elif 0 in shape or not shape:
        value = torch.randn(shape, generator=generator, device=device)
    else:
        value = STYLES[style](generator, shape, dtype) * (1.0 if generated is None else generated.scale)
        if style == PLANTED:
            value = plant(value, generator, definition.special_values)
    scale = case.scales.get(name, 1.0)
    return (value if scale == 1.0 else value * scale).to(dtype)


def _input_seed(seed: int, name: str) -> int:
    mixed = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(mixed[:8], "little") >> 1


def _uniform(spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Mapping[str, int]) -> torch.Tensor:
    low, high = (float(evaluate(str(bound), axes)) for bound in (spec.low, spec.high))
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low
