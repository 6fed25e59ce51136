"""Draws inputs that are no noise around zero: ids, offsets, scales, probabilities, decays, codes, and what belongs together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import InputGenerator
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.expressions import evaluate, evaluate_int
from tilegym_db.verify.distributions import CONTENTS
from tilegym_db.verify.reference import load_function
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["ID_CONTENTS", "KINDS", "contents_among", "draw_codes", "draw_jointly", "spread_contents"]

Shape = tuple[int, ...]
Axes = Mapping[str, int]

ID_CONTENTS = ("uniform", "zipf", "one_row", "some_none", "all_none")
"""How ids are spread: evenly, by Zipf's law, the same few in each row, 30% of them -1, and all of them -1."""
NONE_SHARE = 0.3
INTEGER_CONTENTS = ("even", "even", "few", "zipf", "ends", "one")
"""How whole numbers are spread: evenly, over three of them, by Zipf's law, at both ends of their range, and all the same."""
SCALE_CONTENTS = ("usual", "decades", "usual", "one_decade", "alike")
"""How factors are spread: within a decade, over ten decades, around another decade, and all the same."""
_FEW = 3
_DECADES_DOWN, _DECADES_UP = 7.0, 3.0
LENGTH_CONTENTS = ("even", "skewed", "one_takes_all", "some_empty")
"""How the lengths between offsets are spread."""
DECAY_ROWS = 0.1
"""Share of the elements of a decay that are 0 (nothing is forgotten), and again of those at its lower bound."""
LOWEST_DECAY = -80.0

# Codes of 8-bit floats that are NaN or infinite.
_NOT_FINITE = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF),
    torch.float8_e8m0fnu: (0xFF,),
}


def contents_among(choices: tuple[str, ...], distribution: str) -> str:
    """Which of some contents the case of a distribution gets: the first where that is normal, each in its turn after it."""
    names = tuple(CONTENTS)
    return choices[(names.index(distribution) if distribution in names else 0) % len(choices)]


def spread_contents(spec: InputGenerator) -> tuple[str, ...]:
    """How a generator of ids, lengths or whole numbers may spread them, the usual way first; nothing of any other.

    These may decide how much a call has to do: which rows, how many of a group.
    """
    ids = ID_CONTENTS if spec.none else ID_CONTENTS[:3]
    return {"distinct_ids": ids, "offsets": LENGTH_CONTENTS, "integers": INTEGER_CONTENTS}.get(spec.kind, ())


# -- one input -------------------------------------------------------------------------------------------------------------


def _distinct_ids(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    """Different whole numbers in each row, drawn by adding noise to the logarithm of how likely each is."""
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
    ids = noise.argsort(dim=-1, descending=True)[..., : shape[-1]] + low
    if contents == "some_none":
        return torch.where(torch.rand(shape, generator=generator, device=device) < NONE_SHARE, -1, ids)
    return torch.full_like(ids, -1) if contents == "all_none" else ids


def _offsets(
    spec: InputGenerator, generator: torch.Generator, shape: Shape, axes: Axes, distribution: str
) -> torch.Tensor:
    """Where each of some parts ends, the last of them at ``high``; with ``leading``, where the first begins comes before."""
    low, high = _whole(spec.low, axes), _whole(spec.high, axes)
    count = shape[-1] - int(spec.leading)
    if high < low or (count < 1 and high > low):
        raise RecordError(
            f"offsets: {max(count, 0)} lengths cannot add up to {spec.high} = {high} from {low} up.",
            code="offsets_impossible",
        )
    if count < 1:
        return torch.full(shape, low, device=generator.device)
    contents = contents_among(LENGTH_CONTENTS, distribution)
    sizes, device = (*shape[:-1], count), generator.device
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
    """Every code of an 8-bit dtype, or of two packed 4-bit ones, equally often; what is not finite only with ``nan``."""
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
    """The inputs that a Definition's own function draws together, by name; none where it has no such function.

    Args:
        definition: says which inputs, by which function, with which contents.
        axes: every axis.
        dtypes: dtype variable -> dtype.
        scalars: scalar inputs by name.
        generator: whose device the tensors are on.
        distribution: of the case, which decides about the contents.

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
    """Raise :class:`RecordError` for anything but a tensor of the declared shape, dtype and kind of device."""
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
