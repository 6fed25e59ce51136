"""Solution: one kernel (or baseline) for a Definition, its source files, and the rules for its omitted outputs and signature.

Family: several Solutions of one kernel file in one record.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

from tilegym_db.errors import RecordError, UsageError, check_kind, did_you_mean
from tilegym_db.records.base import DType, Flag, Line, Prose, Record, RecordPart
from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import LAYOUT_CLASSES, ExpressionText, accepts
from tilegym_db.records.expressions import evaluate_bool, names_in, parse_source
from tilegym_db.records.hardware import TARGETS
from tilegym_db.records.text import NAME_PATTERN, canonical_json, length_prefixed_digest, shown

if TYPE_CHECKING:
    from tilegym_db.records.workload import Workload

LANGUAGES: tuple[str, ...] = ("python", "triton", "tilelang", "cutile")
TILE_LANGUAGES: tuple[str, ...] = ("triton", "tilelang", "cutile")

ENTRY_POINT = "kernel.py::run"
MAX_CONFIGS = 1_000_000
MAX_PATH = 200
Tunable = bool | int | float | str
Config = dict[str, Tunable]
"""A value per tunable; empty means the defaults in the source."""


def config_id(config: Mapping[str, Tunable]) -> str:
    """Return the same text for configs that differ only in the order of tunables; ``{}`` is the source's defaults."""
    return canonical_json(dict(config))


def spell_config(config: Mapping[str, Tunable]) -> str:
    """Return ``BLOCK_M=2, num_warps=4``, or ``defaults``."""
    return ", ".join(f"{name}={value}" for name, value in config.items()) or "defaults"


def name_with_config(name: str, config: Mapping[str, Tunable]) -> str:
    """Return ``rms_norm_triton[BLOCK_M=2, num_warps=4]``; the name alone for the source's defaults."""
    return f"{name}[{spell_config(config)}]" if config else name


def normalise_language(language: str) -> str:
    """Return the language in the spelling of records; refuse an unknown one."""
    check_kind(language, str, "a language is a text")
    if language in LANGUAGES:
        return language
    if language in ("cuda-tile", "cuTile"):
        return "cutile"
    raise UsageError(
        f"unknown language {language!r}.{did_you_mean(language.lower(), LANGUAGES)} Known: {', '.join(LANGUAGES)}.",
        code="language_unknown",
    )


class Source(RecordPart):
    """One source file, relative to the folder of the record."""

    path: str

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if len(value) > MAX_PATH or not value.isprintable():
            raise RecordError(
                f"source path {shown(value)!r} must be of at most {MAX_PATH} printable characters",
                code="source_path_invalid",
            )
        if value == "solution.json":
            raise RecordError(
                "source path 'solution.json' is the record itself, not a source", code="source_path_reserved"
            )
        if not path.parts or "\\" in value or path.is_absolute() or ".." in path.parts or str(path) != value:
            raise RecordError(
                f"source path {value!r} must be relative, plain and inside the solution's folder (no '..')",
                code="source_path_outside",
            )
        return value


_PLAIN_REQUIREMENT = re.compile(r"[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*(?:(?:==|>=|<=|~=|!=|<|>)[0-9]+(?:\.[0-9]+)+)?")
"""Matches most requirements, and only valid ones: importing packaging takes longer than reading a catalog."""


def _check_requirement(text: str) -> None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise RecordError(
            f"{text!r} is not a requirement such as 'triton>=3.4': {reason}", code="requirement_syntax"
        ) from None
    if requirement.url is not None:
        raise RecordError(
            f"{text!r} names an address; give a package and its versions, such as 'triton>=3.4'",
            code="requirement_address",
        )


class SolutionSpec(RecordPart):
    """Build and call settings of the source, and the limits that its author declares."""

    language: Literal["python", "triton", "tilelang", "cutile"]
    entry_point: str = ENTRY_POINT
    role: Literal["kernel", "baseline"] = "kernel"
    destination_passing_style: Flag = True
    target_hardware: tuple[str, ...] = TARGETS
    dependencies: tuple[Line, ...] = ()
    dtypes: dict[str, tuple[DType, ...]] = {}
    constraints: tuple[ExpressionText, ...] = ()
    layouts: dict[str, Literal["contiguous", "row_contiguous", "strided"]] = {}
    deterministic: Flag = True
    batch_invariant: Flag = False
    """True if the bits of a row or sequence do not depend on the others in its call, nor on their number. Verification then
    compares slices along the Definition's ``batch_axis`` that are called alone."""
    math: Literal["ieee", "tf32"] = "ieee"
    tunables: dict[str, tuple[Tunable, ...]] = {}
    omits: tuple[str, ...] = ()
    """Optional outputs of the Definition that it does not produce: the last ones. It is verified but not timed."""
    provides: Literal["stock", "library", "compile"] | None = None
    """Kind of python code: the code that models run today (``stock``), a call of a library, or ``torch.compile``. Only a call
    of a library may also be a kernel."""

    @field_validator("language", mode="before")
    @classmethod
    def _known_language(cls, value: object) -> object:
        if value == "cuda-tile":
            return "cutile"
        if value not in LANGUAGES:
            raise RecordError(f"unknown language {value!r}; known: {', '.join(LANGUAGES)}", code="language_unknown")
        return value

    @field_validator("dependencies")
    @classmethod
    def _requirements(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not _PLAIN_REQUIREMENT.fullmatch(text):
                _check_requirement(text)
        return value

    @field_validator("target_hardware")
    @classmethod
    def _known_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            if target not in TARGETS and target != "cpu":
                raise RecordError(
                    f"unknown target {target!r}; known: {', '.join((*TARGETS, 'cpu'))}", code="target_unknown"
                )
        return value

    @field_validator("entry_point")
    @classmethod
    def _file_and_function(cls, value: str) -> str:
        path, separator, function = value.partition("::")
        if not separator or not path.endswith(".py") or not function.isidentifier():
            raise RecordError(f"entry_point {value!r} must read '<file>.py::<function>'", code="entry_point_syntax")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.language in TILE_LANGUAGES and not self.destination_passing_style:
            raise RecordError(
                f"a {self.language} solution must use destination passing, so that its outputs can be guarded",
                code="destination_passing_needed",
            )
        for name, values in self.tunables.items():
            if not values or not name.isidentifier():
                raise RecordError(f"tunable {name!r} needs an identifier and at least one value", code="tunable_empty")
        points = math.prod(len(values) for values in self.tunables.values())
        if points > MAX_CONFIGS:
            raise RecordError(
                f"tunables span {points:.3g} configs; at most {MAX_CONFIGS} can be searched", code="tunables_too_many"
            )
        if self.provides == "compile" and self.role != "baseline":
            raise RecordError(
                "torch.compile compiles at run time, so it can only be a baseline", code="compile_not_baseline"
            )
        if self.provides == "stock" and self.role != "baseline":
            # Stock code may fail some of its cases, as models run it anyway.
            raise RecordError(
                "stock code is what kernels replace, so it can only be a baseline", code="stock_not_baseline"
            )
        if self.batch_invariant and not self.deterministic:
            raise RecordError(
                "a solution whose calls differ in their bits cannot be batch_invariant; leave one of the two out",
                code="batch_invariance_unfit",
            )
        if self.language in TILE_LANGUAGES and self.provides is not None:
            raise RecordError("'provides' is for python solutions", code="provides_not_python")
        return self

    def runs_on(self, target: str) -> bool:
        """Return True if it is declared for a target. Python code without declared targets runs on every target of PyTorch."""
        return target in self.target_hardware or (self.language == "python" and self.target_hardware == TARGETS)

    @property
    def entry_path(self) -> str:
        """The file of the entry point."""
        return self.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        """The function of the entry point."""
        return self.entry_point.partition("::")[2]


class Solution(Record):
    """One kernel for one Definition. Its sources lie beside the record, and several Solutions may share them."""

    kind: ClassVar[str] = "solution"

    schema_version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    definition: str = Field(pattern=NAME_PATTERN)
    author: Line = Field(min_length=1)
    description: Prose = ""
    spec: SolutionSpec
    sources: tuple[Source, ...] = Field(default=(Source(path="kernel.py"),), min_length=1)

    @model_validator(mode="after")
    def _entry_is_a_source(self) -> Self:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise RecordError("sources: a path is listed twice", code="source_repeated")
        if self.spec.entry_path not in paths:
            raise RecordError(
                f"entry_point file '{self.spec.entry_path}' is not among the sources ({', '.join(paths)})",
                code="entry_file_missing",
            )
        return self

    def digest(self, sources: Mapping[str, bytes]) -> str:
        """Return the sha256 over definition, spec and every source's path and bytes, each length-prefixed."""
        return digest_of(self.definition, self.spec.model_dump(mode="json", exclude_defaults=True), sources)

    def check_against(self, definition: Definition) -> None:
        """Raise :class:`RecordError` if the spec names an axis, tensor or dtype that the Definition does not have. Also raise it
        if the spec declares TF32 for a Definition without products of float32, or batch invariance for one without a batch axis.
        """
        if self.spec.batch_invariant and not definition.batch_axis:
            raise RecordError(
                f"spec.batch_invariant: {definition.name} has no independent axis of every output, so no row of it can be "
                "called alone; leave 'batch_invariant' out",
                code="batch_axis_missing",
            )
        if self.spec.math == "tf32" and not definition.multiplies_float32:
            raise RecordError(
                f"spec.math: {definition.name} multiplies no float32 matrices, so it has nothing for TF32; leave 'math' out",
                code="math_unfit",
            )
        tensors = {*definition.tensor_inputs, *definition.outputs}
        for name in self.spec.layouts:
            if name not in tensors:
                raise RecordError(
                    f"spec.layouts names '{name}', which is not a tensor of {definition.name}", code="tensor_unknown"
                )
        for text in self.spec.constraints:
            axes, variables = names_in(text)
            unknown = sorted(axes - set(definition.axes)) or sorted(variables - set(definition.dtypes))
            if unknown:
                raise RecordError(
                    f"spec.constraints {text!r} uses '{unknown[0]}', unknown to {definition.name}",
                    code="name_undeclared",
                )
        for variable, choices in self.spec.dtypes.items():
            if variable not in definition.dtypes:
                raise RecordError(
                    f"spec.dtypes names '{variable}', which is not a dtype variable of {definition.name}",
                    code="dtype_variable_unknown",
                )
            outside = [choice for choice in choices if choice not in definition.dtypes[variable]]
            if outside or not choices:
                raise RecordError(
                    f"spec.dtypes.{variable}: {outside or 'nothing'} is not in {definition.name}'s set",
                    code="dtype_not_allowed",
                )
        check_omits(self.spec.omits, definition, role=self.spec.role, layouts=self.spec.layouts)

    def unsupported_at(self, definition: Definition, workload: Workload, target: str | None = None) -> str | None:
        """Return :meth:`unsupported` for the call of a Workload."""
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        return self.unsupported(axes, dtypes, workload.layout_classes(definition), target=target)

    def unsupported(
        self,
        axes: Mapping[str, int],
        dtypes: Mapping[str, str],
        layouts: Mapping[str, str] | None = None,
        *,
        target: str | None = None,
    ) -> str | None:
        """Return the reason why this Solution does not support a request, or None if its declared limits include it.

        Args:
            layouts: tensor -> layout class; a tensor not listed is contiguous.
            target: the device's ``sm_XX``, or ``cpu``; None skips this check.
        """
        for variable, choices in self.spec.dtypes.items():
            if dtypes.get(variable) not in choices:
                return f"dtype {variable}={dtypes.get(variable)} is not among {', '.join(choices)}"
        for text in self.spec.constraints:
            try:
                holds = evaluate_bool(text, axes, dtypes)
            except RecordError as error:
                return f"its constraint has no value here: {error}"
            if not holds:
                return f"its constraint {text} excludes this shape"
        for tensor, found in (layouts or {}).items():
            declared = self.spec.layouts.get(tensor, LAYOUT_CLASSES[0])
            if not accepts(declared, found):
                return f"it reads {tensor} as {declared}, not {found}"
        if target is not None and not self.spec.runs_on(target):
            return f"it is not declared for {target}"
        return None

    def configs(self) -> Iterator[Config]:
        """Yield every point of the search space, in a fixed order; one empty config if nothing is tunable."""
        names = list(self.spec.tunables)
        for values in itertools.product(*(self.spec.tunables[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def digest_of(definition: str, spec: Mapping[str, Any], sources: Mapping[str, bytes]) -> str:
    """Return :meth:`Solution.digest` from a spec as JSON has it, without keys of their default value."""
    spec = {"entry_point": ENTRY_POINT, **spec}  # part of every digest, even if the record leaves it out
    parts = [definition.encode(), canonical_json(spec).encode()]
    for path in sorted(sources):
        parts += [path.encode(), sources[path]]
    return length_prefixed_digest(parts)


def without_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``to_dict()`` of a Solution from the content of its record, which is known to be valid."""
    spec = {key: value for key, value in content["spec"].items() if value != _SPEC_DEFAULTS.get(key)}
    return {key: value for key, value in content.items() if value != _DEFAULTS.get(key)} | {"spec": spec}


def source_names(content: Mapping[str, Any]) -> list[str]:
    """Return the paths of the sources from the content of a valid record."""
    return [source["path"] for source in content.get("sources", _DEFAULTS["sources"])]


def _defaults(model: type[RecordPart]) -> dict[str, Any]:
    """Return key -> default value as JSON has it, of the keys that a record may leave out."""
    fields = model.model_fields.items()
    return {name: to_jsonable_python(field.default) for name, field in fields if not field.is_required()}


_DEFAULTS, _SPEC_DEFAULTS = _defaults(Solution), _defaults(SolutionSpec)


# ---- families -------------------------------------------------------------------------------------
# The Solutions of a family share a kernel file and most of their records. One ``family.json`` states them together.


def _known_keys(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if key not in SolutionSpec.model_fields:
            close = difflib.get_close_matches(key[:MAX_PATH], SolutionSpec.model_fields, n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise RecordError(f"unknown key '{shown(key)}'{hint}", code="key_unknown")
    return value


PartialSpec = Annotated[
    dict[str, Any],
    AfterValidator(_known_keys),
    Field(json_schema_extra={"propertyNames": {"enum": list(SolutionSpec.model_fields)}}),
]
"""Some keys of a spec. Their values are validated with the whole spec."""


class FamilyMember(Record):
    """One Solution in the record of its family: its name, its Definition, and all that differs from the shared keys."""

    kind: ClassVar[str] = "solution of a family"

    name: str = Field(pattern=NAME_PATTERN)
    definition: str = Field(pattern=NAME_PATTERN)
    description: Prose = ""
    """Replaces the shared description, unless it is empty."""
    spec: PartialSpec = {}
    """Keys that the shared spec lacks or that differ from it; each replaces the whole value of the shared key."""


class Family(Record):
    """The Solutions of one kernel file. ``author``, ``description``, ``spec`` and ``sources`` are shared.

    The spec of a Solution has the shared keys and its own keys. Its own key replaces the shared key as a whole. Lists
    and objects inside a key are never merged.
    """

    kind: ClassVar[str] = "family"

    schema_version: Literal[1] = 1
    author: Line = Field(min_length=1)
    description: Prose = ""
    """Description of each Solution that has none."""
    spec: PartialSpec = {}
    """Keys of the spec that the Solutions share."""
    sources: tuple[Source, ...] = Field(default=(Source(path="kernel.py"),), min_length=1)
    solutions: tuple[FamilyMember, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [member.name for member in self.solutions]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise RecordError(
                f"solutions: '{repeated[0]}' is listed twice. Rename or remove one of them", code="solution_repeated"
            )
        return self

    def solution(self, name: str, source: str | Path = "<family>") -> Solution:
        """Return one Solution with the shared keys; ``source`` is its origin, for messages."""
        member = next((member for member in self.solutions if member.name == name), None)
        if member is None:
            raise RecordError(f"{source}: solutions: '{name}' is not listed.", code="solution_unlisted")
        # The texts of a family have a length that is allowed.
        return Solution._validated(expanded(self._shared, member.to_dict()), source, bounded=True)

    @cached_property
    def _shared(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"solutions"})


def expanded(family: Mapping[str, Any], member: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of one Solution's record, from the content of its family and of its entry in ``solutions``.

    A key of the entry's spec replaces the whole value of the shared key. An empty description stands for the shared one.
    """
    shared = {key: value for key, value in family.items() if key != "solutions"}
    spec = {**family.get("spec", {}), **member.get("spec", {})}
    description = member.get("description") or family.get("description", "")
    return {**shared, **member, "description": description, "spec": spec}


# ---- omitted outputs ------------------------------------------------------------------------------
# A Solution may omit outputs that a caller may not need (decision 0037).


def check_omits(omits: Sequence[str], definition: Definition, *, role: str, layouts: Collection[str]) -> None:
    """Raise :class:`RecordError` unless a Solution omits the last optional outputs of its Definition, in order."""
    if not omits:
        return
    optional = definition.optional_outputs
    for name in omits:
        if name not in optional:
            known = ", ".join(optional) or "none"
            raise RecordError(
                f"spec.omits names '{name}', which is not an optional output of {definition.name} (optional: {known})",
                code="omits_not_optional",
            )
    if tuple(optional[-len(omits) :]) != tuple(omits):
        raise RecordError(
            f"spec.omits must be the last optional outputs, in order ({', '.join(optional)})", code="omits_order"
        )
    if role == "baseline":
        raise RecordError(
            "spec.omits: baselines must produce every output, because they are the fallback", code="omits_of_baseline"
        )
    for name in omits:
        if name in layouts:
            raise RecordError(f"spec.layouts names '{name}', which the solution omits", code="layout_of_omitted")


def narrowed(definition: Definition, omits: Sequence[str]) -> Definition:
    """Return the Definition without these outputs, for calling and checking a Solution that omits them.

    Its digest and cost are those of the whole Definition; Solutions that omit an output are not timed.
    """
    if not omits:
        return definition
    left_out = set(omits)
    view = definition.model_copy(
        update={
            "outputs": {name: spec for name, spec in definition.outputs.items() if name not in left_out},
            "optional_outputs": tuple(name for name in definition.optional_outputs if name not in left_out),
            "codes": {name: rule for name, rule in definition.codes.items() if name not in left_out},
            "layouts": {name: layout for name, layout in definition.layouts.items() if name not in left_out},
        }
    )
    view.__dict__["digest"] = definition.digest  # the trace is about the whole operator
    return view


def why_not_timed(name: str, omits: Sequence[str]) -> str | None:
    """Return the reason why a Solution is not timed, and so never ranked; None if it is timed."""
    if not omits:
        return None
    return (
        f"{name} omits {', '.join(omits)}: it is verified without a time, and not ranked, published or resolved, "
        "since there is nothing yet that its times could be compared with"
    )


# ---- signature ------------------------------------------------------------------------------------
# Checks the entry point's parameters in the source text; nothing is imported or run.


def called_with(definition: Definition, *, destination_passing_style: bool) -> tuple[str, ...]:
    """Return the positional arguments of ``run``: the inputs in order, then (destination passing) the written outputs."""
    return (*definition.inputs, *definition.written_outputs) if destination_passing_style else tuple(definition.inputs)


def signature_problem(record: Solution, source: bytes | str, definition: Definition) -> str | None:
    """Return the reason why the Definition's call does not fit the entry point, or None if it fits."""
    function = find_function(source, record.spec.entry_function)
    if function is None:
        return None  # bound by an assignment or a decorator: only a call can show it
    definition = narrowed(definition, record.spec.omits)
    arguments = function.args
    given = called_with(definition, destination_passing_style=record.spec.destination_passing_style)
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    spelled = f"{function.name}({', '.join(positional)})"
    if required > len(given) or (len(positional) < len(given) and arguments.vararg is None):
        other = not record.spec.destination_passing_style
        is_of_other_style = len(positional) == len(called_with(definition, destination_passing_style=other))
        remedy = (
            f'; with "destination_passing_style": {str(other).lower()} in its spec it fits' if is_of_other_style else ""
        )
        return f"{spelled} does not fit: {definition.name} calls it with ({', '.join(given)}){remedy}"
    without_default = {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    if without_default:
        return f"{spelled}: keyword argument '{min(without_default)}' needs a default, since a call may leave it out"
    accepted = {*positional[len(given) :], *(argument.arg for argument in arguments.kwonlyargs)}
    unknown = [name for name in record.spec.tunables if name not in accepted]
    if unknown and arguments.kwarg is None:
        return f"{spelled} does not accept the tunable '{unknown[0]}' as a keyword argument"
    return None


def find_function(source: bytes | str, name: str) -> ast.FunctionDef | None:
    """Return the last top-level definition of a function in a source text; None if there is none."""
    found = [node for node in parse_source(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None
