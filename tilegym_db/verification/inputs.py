"""Draws the inputs of one call from distributions, generators and files, by a secret seed.

Its parts are the drawing, the generators, rotary tables, and files of inputs.
"""

from __future__ import annotations

import hashlib
import math
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.catalog.reader import find_blob
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import forward_of
from tilegym_db.records.definition_parts import InputGenerator
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.expressions import evaluate, evaluate_int
from tilegym_db.records.workload import Case, SafetensorsInput
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.verification.distributions import (
    CONTENTS,
    PLANTED,
    RAGGED,
    STYLES,
    WITH_ZEROS,
    modified,
    modifiers_of,
    parts_of,
    plant,
    ragged_lengths,
    styles_of,
)
from tilegym_db.verification.oracle import as_written, load_function

_INTEGERS = {torch.bool: (0, 2), torch.uint8: (0, 256)}
"""Dtype -> its first number and the one after its last, if not all integers are drawn alike."""


Shape = tuple[int, ...]
NOISE = frozenset({"normal", "uniform", "positive", "probabilities", "log_decay", "unit_rows"})
Inputs = dict[str, torch.Tensor | Scalar]


def draws_noise(definition: Definition) -> bool:
    """Return True if some input is always noise, so that contents cannot be small integers throughout."""
    return (
        bool(definition.saved)
        or definition.joint_inputs is not None
        or any(generator.kind in NOISE for generator in definition.input_generators.values())
    )


def draws_spread(definition: Definition) -> bool:
    """Return True if the amount of work may depend on the spread of ids, lengths or probabilities, as for experts."""
    return bool(_spreads(definition))


def has_spreads(definition: Definition) -> bool:
    """Return True if ids, lengths or a mask may be spread in other ways while the other contents stay normal.

    A mask of numbers is one input that is drawn beside the data, so it is not the first.
    """
    beside = definition.joint_inputs.inputs if definition.joint_inputs is not None else ()
    return draws_spread(definition) or (len(beside) == 1 and beside[0] != definition.tensor_inputs[0])


def spreads_otherwise(definition: Definition, distribution: str) -> bool:
    """Return True if cases of a distribution spread ids, lengths or probabilities in an unusual way."""
    return any(contents_among(contents, distribution) != contents[0] for contents in _spreads(definition))


def _spreads(definition: Definition) -> list[tuple[str, ...]]:
    """Return the contents of every draw that may decide the amount of work, the usual ones first."""
    found = [spread_contents(generator) for generator in definition.input_generators.values()]
    if definition.joint_inputs is not None and _joint_decides(definition):
        found.append(definition.joint_inputs.contents)
    if definition.saved:
        found += _spreads(forward_of(definition))
    return [contents for contents in found if contents]


def _joint_decides(definition: Definition) -> bool:
    """Return True if joint inputs include ids, counts or flags, or feed a random draw."""
    joint = definition.joint_inputs.inputs if definition.joint_inputs is not None else ()
    spelled = {definition.inputs[name].dtype for name in joint}
    dtypes = {choice for dtype in spelled for choice in definition.dtypes.get(dtype, (dtype,))}
    return bool(definition.sampled) or not dtypes.isdisjoint({"bool", "int32", "int64"})


def draw_inputs(definition: Definition, case: Case, device: str, *, blobs: BlobReader | None = None) -> Inputs:
    """Return input name -> tensor or scalar, in Definition order.

    Tensors are drawn in fp32 from ``case.seed`` on the device and rounded to the target dtype. They are contiguous; the caller
    lays them out by ``case.strides``. Saved tensors of a backward are computed by its forward from the others.

    Args:
        device: ``cpu`` or ``cuda:<n>``. The same seed draws other numbers on another device.
        blobs: reads the inputs that the case has in files; by default no file can be read.
    """
    drawn: Inputs = {}
    styles = styles_of(definition, case.distribution, case.seed)
    modifiers = modifiers_of(definition, case.distribution, case.seed)
    together = torch.Generator(device).manual_seed(_input_seed(case.seed, "joint inputs"))
    contents = case.spread if _joint_decides(definition) or case.spread_as else case.distribution
    joint = draw_jointly(definition, case.call.axes, case.call.dtypes, case.call.scalars, together, contents)
    for name, spec in definition.inputs.items():
        if spec.is_scalar:
            drawn[name] = case.call.scalars[name]
        elif name in definition.saved:
            continue
        elif name in case.files:
            shape, dtype = definition.shape_of(name, case.call.axes), definition.dtype_of(name, case.call.dtypes)
            drawn[name] = (blobs or BlobReader()).tensor(name, case.files[name], shape, dtype).to(device)
        elif name in joint:
            generator = torch.Generator(device).manual_seed(_input_seed(case.seed, name))
            drawn[name] = modified(joint[name], modifiers.get(name, ()), generator, joint[name].dtype)
        else:
            drawn[name] = _draw(definition, case, name, device, styles.get(name, "normal"), modifiers.get(name, ()))
    return _with_saved(definition, case, drawn, device) if definition.saved else drawn


def _with_saved(backward: Definition, case: Case, drawn: Inputs, device: str) -> Inputs:
    """Return the inputs of a backward with its saved tensors: outputs of the forward's reference as written.

    Inputs of the forward that the backward does not take are drawn as for the forward.
    """
    forward = forward_of(backward)
    call = replace(
        case.call,
        definition=forward.name,
        axes={name: case.call.axes[name] for name in forward.axes},
        dtypes={name: case.call.dtypes[name] for name in forward.dtypes},
    )
    of_forward = replace(case, call=call, files={})
    given = draw_inputs(forward, of_forward, device)
    given |= {name: drawn[name] for name in forward.inputs if name in drawn}
    made = as_written(forward, given)
    return {name: made[name] if name in backward.saved else drawn[name] for name in backward.inputs}


def _draw(
    definition: Definition, case: Case, name: str, device: str, style: str, modifiers: tuple[str, ...]
) -> torch.Tensor:
    shape = definition.shape_of(name, case.call.axes)
    dtype = storage_dtype(definition.dtype_of(name, case.call.dtypes))
    generator = torch.Generator(device).manual_seed(_input_seed(case.seed, name))
    generated = definition.input_generators.get(name)
    if generated is not None and generated.kind.startswith("rotary"):
        value = rotary_table(generated, case.seed, shape, device)
    elif generated is not None and generated.kind == "codes":
        return draw_codes(generated, generator, shape, dtype)
    elif generated is not None and generated.kind in KINDS:
        if case.typical:
            generated = _of_slices(definition, name, generated, shape, case.call.axes)
        contents = case.spread if spread_contents(generated) else case.distribution
        value = KINDS[generated.kind](generated, generator, shape, case.call.axes, contents)
    elif generated is not None and generated.kind != "normal":
        value = _uniform(generated, generator, shape, case.call.axes)
        if generated.low == 0 and parts_of(case.distribution)[0] in WITH_ZEROS and not definition.sampled:
            value[torch.rand(shape, generator=generator, device=device) < 0.5] = 0.0
    elif not dtype.is_floating_point:
        # Draw every byte, because codes are packed in bytes: each half must take all of its sixteen values.
        low, high = _INTEGERS.get(dtype, (-100, 100) if dtype.is_signed else (0, 200))
        value = torch.randint(low, high, shape, generator=generator, device=device)
    elif 0 in shape or not shape:
        value = torch.randn(shape, generator=generator, device=device)
    else:
        value = STYLES[style](generator, shape, dtype) * (1.0 if generated is None else generated.scale)
        value = modified(value, modifiers, generator, dtype)
        if style == PLANTED:
            value = plant(value, generator, definition.special_values)
    scale = case.scales.get(name, 1.0)
    return (value if scale == 1.0 else value * scale).to(dtype)


def _of_slices(definition: Definition, name: str, spec: InputGenerator, shape: Shape, axes: Axes) -> InputGenerator:
    """Return the generator of ids as a model has them: those of existing slices, and different ones in a row.

    An id of no expert costs nothing, so times of such ids would be too short. Cases that are not timed have them.
    """
    axis = definition.sliced_axis(name)
    if not axis or shape[-1] > axes[axis]:
        return spec
    return spec.model_copy(update={"kind": "distinct_ids", "low": 0.0, "high": axis})


def _input_seed(seed: int, name: str) -> int:
    mixed = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(mixed[:8], "little") >> 1


def _uniform(spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Mapping[str, int]) -> torch.Tensor:
    low, high = (float(evaluate(str(bound), axes)) for bound in (spec.low, spec.high))
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


# ---- generators -----------------------------------------------------------------------------------
# Inputs other than noise around zero: ids, offsets, scales, probabilities, decays, codes, and joint inputs.

Axes = Mapping[str, int]

ID_CONTENTS = ("uniform", "zipf", "one_row", "some_none", "all_none")
"""Spreads of ids: even, by Zipf's law, the same few in each row, 30% of them -1, and all of them -1."""
NONE_SHARE = 0.3
INTEGER_CONTENTS = ("even", "even", "few", "zipf", "ends", "one")
"""Spreads of whole numbers: even, over three of them, by Zipf's law, at both ends of their range, and all the same."""
SCALE_CONTENTS = ("usual", "decades", "usual", "one_decade", "alike")
"""Spreads of factors: within a decade, over ten decades, around another decade, and all the same."""
_FEW = 3
_MAX_GROUPS = 1 << 12
"""Maximum range of whole numbers that may be the groups of tokens."""
_DECADES_DOWN, _DECADES_UP = 7.0, 3.0
LENGTH_CONTENTS = ("even", "skewed", "one_takes_all", "some_empty")
"""Spreads of the lengths between offsets."""
DECAY_ROWS = 0.1
"""Share of a decay's elements that are 0 (nothing is forgotten); the same share is at its lower bound."""
LOWEST_DECAY = -80.0

# Codes of 8-bit floats that are NaN or infinite.
_NOT_FINITE = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF),
    torch.float8_e8m0fnu: (0xFF,),
}


def contents_among(choices: tuple[str, ...], distribution: str) -> str:
    """Return the contents for a distribution: the first for ``normal``, the others in turn for other distributions."""
    names, (distribution, _) = tuple(CONTENTS), parts_of(distribution)
    return choices[(names.index(distribution) if distribution in names else 0) % len(choices)]


def spread_contents(spec: InputGenerator) -> tuple[str, ...]:
    """Return the spreads of a generator of ids, lengths or whole numbers, the usual one first; empty for other generators.

    These may decide the amount of work: rows, and elements per group.
    """
    ids = ID_CONTENTS if spec.none else ID_CONTENTS[:3]
    return {"distinct_ids": ids, "offsets": LENGTH_CONTENTS, "integers": INTEGER_CONTENTS}.get(spec.kind, ())


# -- one input -------------------------------------------------------------------------------------------------------------


def _distinct_ids(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    """Return different whole numbers in each row, drawn by adding noise to their log-probabilities."""
    low, high = _whole(spec.low, axes), _whole(spec.high, axes)
    if shape[-1] > high - low:
        raise RecordError(
            f"distinct_ids: a row of {shape[-1]} different ids does not fit below {spec.high} = {high} (from {low} up).",
            code="ids_too_many",
        )
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int64, device=generator.device)
    contents = contents_among(spread_contents(spec), distribution)
    device, rows = generator.device, (*shape[:-1], high - low)
    noise = -(-torch.rand(rows, generator=generator, device=device).clamp_min(1e-30).log()).clamp_min(1e-30).log()
    if contents == "zipf":
        order = torch.randperm(high - low, generator=generator, device=device)
        noise = noise - torch.log1p(order.float())
    elif contents == "one_row":
        noise = noise.reshape(-1, high - low)[:1].expand(noise.reshape(-1, high - low).shape).reshape(rows)
    if RAGGED in distribution:  # some ids are only chosen if there are too few others
        left_out = torch.rand(high - low, generator=generator, device=device) < 0.5
        noise = torch.where(left_out, noise - 1e6, noise)
    ids = noise.argsort(dim=-1, descending=True)[..., : shape[-1]] + low
    if contents == "some_none":
        return torch.where(torch.rand(shape, generator=generator, device=device) < NONE_SHARE, -1, ids)
    return torch.full_like(ids, -1) if contents == "all_none" else ids


def _offsets(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    """Return the ends of consecutive parts, the last at ``high``; with ``leading``, the begin of the first comes before."""
    low, high = _whole(spec.low, axes), _whole(spec.high, axes)
    count = shape[-1] - int(spec.leading)
    if high < low or (count < 1 and high > low):
        raise RecordError(
            f"offsets: {max(count, 0)} lengths cannot add up to {spec.high} = {high} if the offsets begin at {low}.",
            code="offsets_impossible",
        )
    if count < 1:
        return torch.full(shape, low, device=generator.device)
    contents = contents_among(LENGTH_CONTENTS, distribution)
    sizes, device = (*shape[:-1], count), generator.device
    if RAGGED in distribution:
        rows = [ragged_lengths(high - low, count, generator).cumsum(0) + low for _ in range(math.prod(shape[:-1]))]
        ends = torch.stack(rows).reshape(sizes)
        return torch.cat([torch.full_like(ends[..., :1], low), ends], dim=-1) if spec.leading else ends
    share = torch.rand(sizes, generator=generator, device=device, dtype=torch.float64)
    if contents == "skewed":
        share = share**8
    elif contents == "one_takes_all":
        place = torch.randint(0, count, (*sizes[:-1], 1), generator=generator, device=device)
        share = torch.zeros_like(share).scatter_(-1, place, 1.0)
    elif contents == "some_empty":
        share = share * (torch.rand(sizes, generator=generator, device=device) >= NONE_SHARE)
    total = share.sum(dim=-1, keepdim=True)
    ends = (share.cumsum(dim=-1) / total.clamp_min(1e-30) * (high - low)).floor().long().clamp(0, high - low) + low
    ends[..., -1] = high
    return torch.cat([torch.full_like(ends[..., :1], low), ends], dim=-1) if spec.leading else ends


def _powers_of_two(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    low, high = (
        (_whole(spec.low, axes), _whole(spec.high, axes)) if spec.model_fields_set & {"low", "high"} else (-8, 8)
    )
    exponent = torch.randint(low, max(high, low) + 1, shape, generator=generator, device=generator.device)
    return torch.ldexp(torch.ones(shape, device=generator.device), exponent)


def _positive(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    device, contents = generator.device, contents_among(SCALE_CONTENTS, distribution)
    value = torch.randn(shape, generator=generator, device=device).exp()
    if contents == "alike":
        return torch.full_like(value, spec.scale)
    if contents in ("decades", "one_decade"):
        of = shape if contents == "decades" else (1,) * len(shape)
        decade = torch.rand(of, generator=generator, device=device) * (_DECADES_DOWN + _DECADES_UP) - _DECADES_DOWN
        value = value * 10**decade
    return value * spec.scale


def _integers(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    low, high = (int(float(evaluate(str(bound), axes))) for bound in (spec.low, spec.high))
    device, contents = generator.device, contents_among(INTEGER_CONTENTS, distribution)
    count = max(high - low, 1)
    value = torch.randint(count, shape, generator=generator, device=device)
    if contents in ("few", "one"):
        some = torch.randint(count, (_FEW if contents == "few" else 1,), generator=generator, device=device)
        value = some[value % len(some)]
    elif contents == "zipf":
        share = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        value = (count**share).long().clamp(1, count) - 1
    elif contents == "ends":
        value = torch.where(value % 2 == 0, 0, count - 1)
    if RAGGED in distribution and value.numel() and count <= _MAX_GROUPS:
        lengths = ragged_lengths(value.numel(), count, generator)
        places = torch.randperm(value.numel(), generator=generator, device=device)
        value = torch.arange(count, device=device).repeat_interleave(lengths)[places].reshape(shape)
    return value + low


def _probabilities(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    scores = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return torch.softmax(scores * spec.scale, dim=-1)


def _log_decay(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    low = float(evaluate(str(spec.low), axes)) if "low" in spec.model_fields_set else LOWEST_DECAY
    device = generator.device
    decay = -torch.randn(shape, generator=generator, device=device).exp() * spec.scale
    kind = torch.rand(shape, generator=generator, device=device)
    decay = torch.where(kind < DECAY_ROWS, 0.0, decay)
    return torch.where(kind >= 1 - DECAY_ROWS, low, decay).clamp(low, 0.0)


def _unit_rows(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    value = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    rows: torch.Tensor = value / torch.linalg.vector_norm(value, dim=-1, keepdim=True).clamp_min(1e-30)
    return rows


Draw = Callable[[InputGenerator, torch.Generator, Shape, Axes, str], torch.Tensor]
KINDS: dict[str, Draw] = {
    "distinct_ids": _distinct_ids,
    "offsets": _offsets,
    "integers": _integers,
    "powers_of_two": _powers_of_two,
    "positive": _positive,
    "probabilities": _probabilities,
    "log_decay": _log_decay,
    "unit_rows": _unit_rows,
}
"""Kind of generator -> ``draw(spec, generator, shape, axes, distribution)``, on the generator's device."""


def draw_codes(spec: InputGenerator, generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return random codes of an 8-bit dtype, or of two packed 4-bit ones, all equally likely; NaN and inf only with ``nan``."""
    left_out = set() if spec.nan else set(_NOT_FINITE.get(dtype, ()))
    allowed = torch.tensor([code for code in range(256) if code not in left_out], dtype=torch.uint8)
    chosen = torch.randint(0, allowed.numel(), shape, generator=generator, device=generator.device)
    codes: torch.Tensor = allowed.to(generator.device)[chosen]
    return codes.view(dtype)


def _whole(bound: float | str, axes: Axes) -> int:
    return evaluate_int(bound if isinstance(bound, str) else int(bound), axes)


# -- several inputs --------------------------------------------------------------------------------------------------------


def draw_jointly(
    definition: Definition,
    axes: Axes,
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    generator: torch.Generator,
    distribution: str,
) -> dict[str, torch.Tensor]:
    """Return the inputs that a Definition's ``draw`` function draws together, by name; empty without such a function.

    Raises:
        RecordError: the function raises, or returns other names, shapes, dtypes or devices than the Definition declares.
    """
    joint = definition.joint_inputs
    if joint is None:
        return {}
    where = f"{definition.name}: joint_inputs"
    wanted = {name: storage_dtype(definition.dtype_of(name, dtypes)) for name in joint.inputs}
    contents = contents_among(joint.contents, distribution)
    draw = load_function(joint.source, where, "draw")
    try:
        with torch.no_grad():
            drawn = draw(dict(axes), dict(scalars), wanted, generator, contents)
    except (Exception, SystemExit):
        raise RecordError(
            f"{where}: draw raises with contents '{contents}':\n{traceback.format_exc(limit=-3)}", code="draw_raises"
        ) from None
    if not isinstance(drawn, dict) or set(drawn) != set(joint.inputs):
        found = ", ".join(map(str, drawn)) if isinstance(drawn, dict) else type(drawn).__name__
        raise RecordError(
            f"{where}: draw returns {found or 'nothing'}; it must return {', '.join(joint.inputs)} by name.",
            code="draw_names_differ",
        )
    for name, value in drawn.items():
        _check_drawn(where, name, value, (definition.shape_of(name, axes), wanted[name], generator.device.type))
    return {name: value.contiguous() for name, value in drawn.items()}


def _check_drawn(where: str, name: str, value: object, declared: tuple[tuple[int, ...], torch.dtype, str]) -> None:
    """Raise :class:`RecordError` unless the value is a tensor of the declared shape, dtype and kind of device."""
    if not isinstance(value, torch.Tensor):
        raise RecordError(
            f"{where}: draw returns a {type(value).__name__} for '{name}', not a tensor.", code="draw_not_tensor"
        )
    got = tuple(value.shape), value.dtype, value.device.type
    if got != declared:
        raise RecordError(
            f"{where}: draw returns '{name}' with shape {got[0]}, {got[1]} on {got[2]}; "
            f"inputs.{name} declares {declared[0]}, {declared[1]}, and the generator is on {declared[2]}.",
            code="draw_differs",
        )


# ---- rotary tables --------------------------------------------------------------------------------
# Tables of rotary positions as in models; cos and sin of one call have the same angles.

DEFAULT_BASE = 10_000.0
BASES = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
MAX_POSITION = 1 << 17
"""Maximum position, the context of long models; in fp64 its angles are exact to 1e-11."""
STARTS_AT_ZERO, LEFT_PADDED, PACKED = 0.15, 0.15, 0.15
"""Share of sequences that begin at position 0, begin with padding, or hold several documents in a row."""
ATTENTION_FACTORS = (1.0, 1.0, 1.0, 1.2079, 1.4)
"""Factors of YaRN on both tables, with which cos**2 + sin**2 is not 1."""


def rotary_table(spec: InputGenerator, seed: int, shape: Shape, device: str | torch.device) -> torch.Tensor:
    """Return cos or sin of real positions: ``[..., S, D]`` with two identical halves, in float32.

    The angles depend on the seed of the case and not on the input's name, so that the tables of one call match. Each sequence
    has separate positions with a random start. Half of the cases use the generator's base, the others that of another model.

    Args:
        spec: ``rotary_cos`` or ``rotary_sin``; its ``scale`` is the base, or 10000 if it is 1.
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
    """Return the positions of one sequence, as a model numbers them."""
    kind, start = drawn.random(), int(2 ** drawn.uniform(0, math.log2(MAX_POSITION)))
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


# ---- files of inputs ------------------------------------------------------------------------------


class BlobReader:
    """Reads tensors from files below the roots of a catalog and keeps them until it is cleared; for one thread at a time."""

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        """Start with nothing read. Without a root there are no files."""
        self.roots = tuple(roots)
        self._files: dict[str | None, dict[str, torch.Tensor]] = {}

    def tensor(self, name: str, spec: SafetensorsInput, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return the tensor of an input, on the CPU and contiguous; callers must not change it."""
        if spec.sha256 is None or spec.sha256 not in self._files:
            self._files[spec.sha256] = _tensors(find_blob(self.roots, name, spec)[1], name, spec.path)
        held = self._files[spec.sha256]
        if spec.tensor_key not in held:
            raise RecordError(f"inputs.{name}: {spec.path} has no tensor '{spec.tensor_key}'.", code="tensor_absent")
        found = held[spec.tensor_key]
        if tuple(found.shape) != shape:
            raise RecordError(
                f"inputs.{name}: {spec.path} holds shape {tuple(found.shape)}, the workload says {shape}.",
                code="tensor_shape_differs",
            )
        if found.dtype != storage_dtype(dtype):
            raise RecordError(
                f"inputs.{name}: {spec.path} holds {found.dtype}, the workload says {storage_dtype(dtype)}.",
                code="tensor_dtype_differs",
            )
        return found

    def clear(self) -> None:
        """Forget every tensor."""
        self._files.clear()


def _tensors(content: bytes, name: str, path: str) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError:
        raise RecordError(
            f"inputs.{name}: reading {path} needs safetensors: pip install safetensors.", code="package_missing"
        ) from None
    try:
        return {key: value.contiguous() for key, value in load(content).items()}
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors has no tensor for
        raise RecordError(f"inputs.{name}: {path} cannot be read: {error}.", code="blob_unreadable") from None


def blob_problems(definition: Definition, workloads: Sequence[Workload], roots: Sequence[Path]) -> list[str]:
    """Return the reasons why inputs of Workloads cannot be read from their files; empty if all can."""
    problems = []
    for workload in workloads:
        blobs = BlobReader(roots)
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        for name, spec in workload.files().items():
            try:
                blobs.tensor(name, spec, definition.shape_of(name, axes), definition.dtype_of(name, dtypes))
            except RecordError as error:
                problems.append(f"{definition.name}: workload {workload.uuid}: {error}")
    return problems


# ---- nearly the same contents ---------------------------------------------------------------------
# Contents that differ from those before in one place, as weights after a step and caches after a token do.


_ALIKE_SHARE = 0.6
"""Share of these calls in which an input is alike except in one place."""


def fill_with_one(value: torch.Tensor) -> None:
    """Give all elements the value of the largest finite one; zeros stay zeros."""
    finite = torch.where(value.isfinite(), value, 0).view(-1)
    if finite.numel():
        value.fill_(finite[finite.abs().argmax()])


def nearly_same(definition: Definition, inputs: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """Return inputs of which one element of one floating-point input has another value, or two elements have changed places.

    Or all elements of an input but the first get one value, except for one element: a check at a few places takes the input
    for a constant, as weights are before training. Inputs with a generator or drawn together stay as they are; None if there
    are no others, or if all elements are equal.
    """
    drawn = random.Random(f"nearly {seed}")
    bound = {*definition.input_generators, *definition.saved, *definition.in_place}
    bound |= {*definition.joint_inputs.inputs} if definition.joint_inputs is not None else set()
    if definition.saved:  # saved outputs belong to these inputs, which a kernel may read instead
        bound |= {*forward_of(definition).inputs}
    names = [
        name
        for name in definition.tensor_inputs
        if name not in bound and inputs[name].dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    drawn.shuffle(names)
    first, alike = definition.tensor_inputs[0], drawn.random() < _ALIKE_SHARE
    for name in sorted(names, key=lambda name: alike and name == first):
        value = inputs[name].clone(memory_format=torch.contiguous_format)
        if alike and name != first:
            fill_with_one(value)
        flat = value.view(-1)
        if not flat.numel():
            continue
        one, two = drawn.randrange(flat.numel()), drawn.randrange(flat.numel())
        before = flat[[one, two]].tolist()
        if before[0] != before[1] and drawn.random() < 0.5:
            flat[one], flat[two] = before[1], before[0]
        elif math.isfinite(before[0]) and before[0]:
            flat[one] = -before[0]
        else:
            continue
        return {**inputs, name: value}
    return None
