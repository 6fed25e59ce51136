"""Workload: concrete axis sizes, dtypes and input specs, taken from a real model. Case: a call to verify, and its contents."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import DType, Int64, Line, Real, Record, RecordPart
from tilegym_db.records.call import Call
from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import layout_class, overlap_words, parse_layout, shared_place
from tilegym_db.records.dtypes import STORED_BYTES, Scalar
from tilegym_db.records.text import NAME_PATTERN, binding_key, canonical_json, shown

NAMESPACE = uuid.UUID("6f0e6f5e-5a0c-5d0b-9a53-5b8f7f0f6c11")
"""Namespace of every uuid5 of this project."""


class RandomInput(RecordPart):
    """An input that the harness draws from the Definition's generator (N(0, 1) by default), multiplied by ``scale``."""

    type: Literal["random"]
    seed: Int64 | None = None
    scale: Real = 1.0


class ScalarInput(RecordPart):
    """A Python number."""

    type: Literal["scalar"]
    value: Scalar

    @field_validator("value")
    @classmethod
    def _holdable(cls, value: Scalar) -> Scalar:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise RecordError("this whole number does not fit in 64 bits", code="number_out_of_range")
        if isinstance(value, str) and (len(value) > MAX_SCALAR_TEXT or not value.isprintable()):
            raise RecordError(
                f"{shown(value)!r} is not a line of at most {MAX_SCALAR_TEXT} printable characters",
                code="scalar_text_invalid",
            )
        return value


class SafetensorsInput(RecordPart):
    """A tensor of a real model in a safetensors file.

    ``path`` is relative to the root of the catalog, and ``sha256`` is that of the whole file. A file without a matching sha256
    is not measured.
    """

    type: Literal["safetensors"]
    path: str
    tensor_key: str
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts:
            raise RecordError(
                f"safetensors path {value!r} must be relative and inside the dataset", code="path_outside"
            )
        return value


MAX_SCALAR_TEXT = 200
MAX_TENSOR_BYTES = 1 << 44
"""Sixteen tebibytes: more than the memory of a hundred GPUs."""
InputSpec = Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]


class Workload(Record):
    """One concrete call of a Definition. ``uuid`` is the uuid5 of the content, computed if it is missing."""

    kind: ClassVar[str] = "workload"

    uuid: str = ""
    definition: str = Field(pattern=NAME_PATTERN)
    axes: dict[str, Int64]
    dtypes: dict[str, DType] = {}
    inputs: dict[str, InputSpec] = {}
    layouts: dict[str, str] = {}
    tags: tuple[Line, ...] = ()

    @field_validator("layouts")
    @classmethod
    def _known_layouts(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            parse_layout(text)
            if shared_place(text):
                raise RecordError(
                    f"layouts.{name}: {text}: only a fuzz case can put a tensor into the memory of another one. "
                    "Remove the part from '@' on.",
                    code="layout_place",
                )
        return value

    @model_validator(mode="after")
    def _uuid_matches(self) -> Self:
        expected = content_uuid(self.model_dump(mode="json", exclude_defaults=True))
        if not self.uuid:
            object.__setattr__(self, "uuid", expected)
        elif self.uuid != expected:
            raise RecordError(
                f"uuid {self.uuid} is not that of the content ({expected}); leave the key out to fill it in",
                code="uuid_differs",
            )
        return self

    def matches(self, globs: str | Iterable[str]) -> bool:
        """Return True if one of the globs matches the uuid, the axes key (``M=1,*``) or a tag."""
        names = (self.uuid, axes_key(self.axes), *self.tags)
        patterns = (globs,) if isinstance(globs, str) else globs
        return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

    def check_against(self, definition: Definition) -> None:
        """Raise :class:`RecordError` if the Workload does not fit the Definition."""
        axes = definition.bind_axes(self.axes)
        dtypes = definition.bind_dtypes(self.dtypes)
        for name in self.inputs:
            if name not in definition.inputs:
                raise RecordError(f"inputs.{name}: {definition.name} has no such input.", code="input_unknown")
            if name in definition.saved:
                raise RecordError(
                    f"inputs.{name}: {definition.backward_of} computes it from the other inputs.", code="input_computed"
                )
        for name, spec in definition.inputs.items():
            given = self.inputs.get(name)
            if spec.is_scalar and not isinstance(given, ScalarInput):
                raise RecordError(
                    f"inputs.{name}: {definition.name} needs a scalar value here.", code="scalar_expected"
                )
            if not spec.is_scalar and isinstance(given, ScalarInput):
                raise RecordError(
                    f"inputs.{name} is a tensor of {definition.name}, not a scalar.", code="tensor_expected"
                )
            axis = definition.size_scalars.get(name)
            if axis is not None and isinstance(given, ScalarInput) and given.value != axes[axis]:
                raise RecordError(
                    f"inputs.{name} is {given.value!r}, but it is the size of axis '{axis}', {axes[axis]}.",
                    code="size_scalar_differs",
                )
            if isinstance(given, ScalarInput):
                _check_scalar(name, given.value, definition.dtype_of(name, dtypes))
        _check_sizes(definition, axes, dtypes)
        for name in self.layouts:
            if name not in definition.tensor_inputs and name not in definition.outputs:
                raise RecordError(f"layouts.{name}: {definition.name} has no such tensor.", code="tensor_unknown")
            if name in definition.optional_outputs:
                raise RecordError(
                    f"layouts.{name}: an optional output of {definition.name}, which is contiguous.",
                    code="layout_of_optional",
                )
            if name in definition.layouts:
                raise RecordError(
                    f"layouts.{name}: {definition.name} states it: {definition.layouts[name]}. Leave it out.",
                    code="layout_of_definition",
                )
        for name in (*self.layouts, *definition.layouts):
            shape = definition.shape_of(name, axes)
            strides = definition.strides_of(name, axes, self.layouts.get(name))
            text = self.layouts.get(name) or definition.layouts[name]
            span = 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True) if size > 1)
            if span > MAX_TENSOR_BYTES:
                raise RecordError(f"layouts.{name}: {text} reaches over {span:.3g} elements.", code="layout_too_wide")
            shared = overlap_words(text, shape, strides) if name in definition.outputs else None
            if shared is not None:
                raise RecordError(f"layouts.{name}: {shared} to be written to.", code="layout_overlap")

    def call(self, definition: Definition) -> Call:
        """Return the call that the Workload states, with const axes and single dtypes filled in."""
        return Call(
            definition.name,
            definition.bind_axes(self.axes),
            definition.bind_dtypes(self.dtypes),
            dict(self.layouts),
            self.scalars(),
        )

    def scalars(self) -> dict[str, Scalar]:
        """Return the scalar inputs by name."""
        return {name: spec.value for name, spec in self.inputs.items() if isinstance(spec, ScalarInput)}

    def files(self) -> dict[str, SafetensorsInput]:
        """Return the inputs that are read from files, by name."""
        return {name: spec for name, spec in self.inputs.items() if isinstance(spec, SafetensorsInput)}

    def layout_classes(self, definition: Definition) -> dict[str, str]:
        """Return the layout class of every tensor that is not contiguous."""
        axes = definition.bind_axes(self.axes)
        classes = {}
        for name in (*self.layouts, *definition.layouts):
            strides = definition.strides_of(name, axes, self.layouts.get(name))
            found = layout_class(definition.shape_of(name, axes), strides)
            if found != "contiguous":
                classes[name] = found
        return classes


def _check_scalar(name: str, value: Scalar, dtype: str) -> None:
    """Raise :class:`RecordError` for text or a flag as a number, a fraction as a whole number, or a number as a flag."""
    kind = "bool" if dtype == "bool" else "a whole number" if dtype.startswith(("int", "uint")) else "a number"
    fits = (
        isinstance(value, bool) if dtype == "bool" else isinstance(value, int | float) and not isinstance(value, bool)
    )
    if not fits or (kind == "a whole number" and isinstance(value, float)):
        raise RecordError(f"inputs.{name}: {shown(json.dumps(value))} is not {kind} ({dtype}).", code="scalar_kind")


def _check_sizes(definition: Definition, axes: dict[str, int], dtypes: dict[str, str]) -> None:
    for name in (*definition.tensor_inputs, *definition.outputs):
        shape = definition.shape_of(name, axes)
        if any(size < 0 for size in shape):
            raise RecordError(
                f"'{name}' of {definition.name} would have the negative shape {list(shape)}.", code="shape_negative"
            )
        size = math.prod(shape) * STORED_BYTES[definition.dtype_of(name, dtypes)]
        if size > MAX_TENSOR_BYTES:
            raise RecordError(
                f"'{name}' of {definition.name} would have the shape {list(shape)} and {size:.3g} bytes; "
                f"at most {MAX_TENSOR_BYTES:.3g} bytes a tensor are allowed.",
                code="tensor_too_large",
            )


def content_uuid(value: dict[str, Any]) -> str:
    """Return the uuid5 over definition, axes, dtypes, inputs and layouts; tags do not change what is measured."""
    content = {key: value[key] for key in ("definition", "axes", "dtypes", "inputs", "layouts") if value.get(key)}
    try:
        text = canonical_json(content)
    except (TypeError, ValueError) as error:
        raise RecordError(f"not plain JSON: {error}", code="json_unholdable") from None
    return str(uuid.uuid5(NAMESPACE, text))


def axes_key(axes: dict[str, int]) -> str:
    """Return an axis binding as canonical text, ``M=4096,N=4096``, for grouping and joining."""
    return binding_key(axes)


# ---- cases ---------------------------------------------------------------------------------------

TYPICAL = ":typical"


EXACT = "small_integers"


@dataclass(frozen=True)
class Case:
    """A call to verify, and the distribution of its contents."""

    call: Call
    distribution: str = "normal"
    seed: int = 0
    offset: int = 0
    """Elements by which every tensor's address is moved off its alignment."""
    typical: bool = False
    """True if ids, lengths and joint inputs are spread as usual in a model, whatever the distribution."""
    spread_as: str = ""
    """Distribution that spreads ids, lengths and joint inputs instead of the one of the other contents."""
    files: dict[str, SafetensorsInput] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_workload(cls, definition: Definition, workload: Workload, *, distribution: str, seed: int) -> Case:
        """Return the Workload's own shape with fresh contents."""
        return cls(
            workload.call(definition),
            distribution=distribution,
            seed=seed,
            files=workload.files(),
            scales={name: spec.scale for name, spec in workload.inputs.items() if isinstance(spec, RandomInput)},
        )

    def __str__(self) -> str:
        """Return a short form for reasons: sizes, dtypes, contents."""
        dtypes = ",".join(self.call.dtypes.values())
        layouts = " strided" if self.call.layouts else ""
        offset = f" offset={self.offset}" if self.offset else ""
        read = "".join(f" {name}={(spec.sha256 or '')[:12]}" for name, spec in self.files.items())
        return f"{axes_key(dict(self.call.axes))} {dtypes}{layouts}{offset} contents={self.contents}{read}"

    @property
    def key(self) -> str:
        """A text that is unique to one draw."""
        files = {name: spec.model_dump(mode="json") for name, spec in self.files.items()}
        return f"{self} {self.seed} {canonical_json([dict(self.call.layouts), dict(self.call.scalars), self.scales, files])}"

    @property
    def contents(self) -> str:
        """The contents, as ``debug reproduce --distribution`` takes them: ``outliers``, ``outliers:typical``, ``normal:ties``."""
        return self.distribution + (f":{self.spread_as}" if self.spread_as else TYPICAL * self.typical)

    @property
    def spread(self) -> str:
        """The distribution that spreads ids, lengths and joint inputs."""
        return self.spread_as or ("normal" if self.typical else self.distribution)

    @property
    def exact(self) -> bool:
        """True if sums and products of the contents never round, so that an exact operator must give exact bits."""
        return self.distribution == EXACT and not self.files

    def strides(self, definition: Definition, name: str) -> tuple[int, ...]:
        """Return the strides of one tensor of this case, in elements."""
        return definition.strides_of(name, self.call.axes, self.call.layouts.get(name))
