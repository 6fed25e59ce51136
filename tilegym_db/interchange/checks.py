"""Check the records of a dialect against a table of rules: definitions, solutions, workloads and traces."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilegym_db.interchange.reading import path_problem

Problem = tuple[str, str]
"""A key and the reason that it is refused."""

FIB_DTYPES = frozenset(
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float4_e2m1",
        "int64",
        "int32",
        "int16",
        "int8",
        "bool",
    ]
)

STATUSES = (
    "PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT",
)  # fmt: skip

_UNSAFE = frozenset({".", ".."})


@dataclass(frozen=True)
class Rules:
    """The rules in which dialects differ. ``dtypes`` None allows any text."""

    languages: frozenset[str]
    dtypes: frozenset[str] | None = FIB_DTYPES
    axis_kinds: frozenset[str] = frozenset({"const", "var"})
    const_needs_value: bool = True
    op_type_required: bool = True
    reference_required: bool = True
    entry_named_run: bool = True
    derived_axes: bool = False
    """True if a shape may have a number (``"1"``) or a part of an axis (``"K_div_2"``)."""
    in_place_by_name: bool = False
    """True if an output may have an input's name, and then overwrites it."""
    input_kinds: frozenset[str] = frozenset({"random", "safetensors", "scalar"})
    statuses: tuple[str, ...] = STATUSES
    languages_key: str = "language"
    destination_passing_default: bool = True
    binding_default: str | None = "tvm-ffi"


def check_text(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """Yield a problem unless a required key has a non-empty text."""
    value = record.get(key)
    if key not in record:
        yield where + key, "missing key"
    elif not isinstance(value, str) or not value:
        yield where + key, f"must be a non-empty text, not {value!r:.80}"


def check_name(record: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yield a problem unless a required key has a text that can be part of a path."""
    yield from check_text(record, key)
    value = record.get(key)
    if isinstance(value, str) and value and (value in _UNSAFE or any(mark in value for mark in "/\\\0")):
        yield key, f"{value!r} is not safe as a part of a path"


def check_texts(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """Yield a problem unless an optional key has a list of texts."""
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        yield where + key, "must be a list of texts"


def check_optional_text(record: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yield a problem unless an optional key has a text or null."""
    if not isinstance(record.get(key), str | None):
        yield key, f"must be a text or null, not {record[key]!r:.80}"


def is_one_of(value: Any, allowed: Collection[str]) -> bool:
    """Return True if a value is one of the allowed texts. Unlike ``in``, it accepts unhashable JSON values."""
    return isinstance(value, str) and value in allowed


def number(value: Any) -> float | None:
    """Convert a JSON number to float; return None for other values, booleans and too large numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_count(value: Any) -> bool:
    """Return True if a value is a non-negative 63-bit integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


# ---- Definitions --------------------------------------------------------------------------------------


def check_definition(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a Definition; empty if it is accepted."""
    problems = [*check_name(record, "name"), *check_texts(record, "tags"), *check_optional_text(record, "description")]
    if rules.op_type_required or record.get("op_type") is not None:
        problems += check_name(record, "op_type")
    groups = {key: record.get(key) for key in ("axes", "inputs", "outputs")}
    missing = [(key, "missing key" if key not in record else "must be an object") for key in groups
               if not isinstance(groups[key], dict)]  # fmt: skip
    if missing:
        return problems + missing
    for name, axis in record["axes"].items():
        problems += _axis(f"axes.{name}", axis, rules)
    for group in ("inputs", "outputs"):
        for name, spec in record[group].items():
            problems += _tensor(f"{group}.{name}", spec, record["axes"], rules)
    if not rules.in_place_by_name:
        clash = sorted(set(record["inputs"]) & set(record["outputs"]))
        problems += [(f"outputs.{name}", "is the name of an input too") for name in clash]
    problems += _constraints(record)
    return problems + list(_reference(record, rules))


def axis_kind(axis: Mapping[str, Any]) -> Any:
    """Return ``const``, ``var`` or a dialect's own kind. Without a type, a ``value`` means ``const``, as in FlashInfer-Bench."""
    return axis.get("type", "const" if "value" in axis else "var")


def _axis(where: str, axis: Any, rules: Rules) -> Iterator[Problem]:
    if not isinstance(axis, dict):
        yield where, "must be an object"
        return
    kind = axis_kind(axis)
    if not is_one_of(kind, rules.axis_kinds):
        yield f"{where}.type", f"must be one of {', '.join(sorted(rules.axis_kinds))}, not {kind!r:.80}"
    elif kind == "const" and (rules.const_needs_value or "value" in axis) and not is_count(axis.get("value")):
        yield f"{where}.value", f"a const axis needs a whole number >= 0, not {axis.get('value')!r:.40}"
    elif kind == "expr":
        yield from _expression(axis.get("expression"), f"{where}.expression")


def _tensor(where: str, spec: Any, axes: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    if not isinstance(spec, dict):
        yield where, "must be an object"
        return
    if "shape" not in spec:
        yield f"{where}.shape", "missing key"
    shape = spec.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(isinstance(axis, str) for axis in shape)):
        yield f"{where}.shape", "must be a list of names of axes, or null for a Python scalar"
    else:
        for axis in shape or ():
            if axis not in axes and not (rules.derived_axes and derived_axis(axis, axes)):
                yield f"{where}.shape", f"uses the axis '{axis}', which is not declared"
    dtype = spec.get("dtype")
    if not isinstance(dtype, str):
        yield f"{where}.dtype", "missing key" if "dtype" not in spec else f"must be a text, not {dtype!r:.40}"
    elif rules.dtypes is not None and dtype not in rules.dtypes:
        yield f"{where}.dtype", f"unknown dtype '{dtype}'"


_DERIVED = re.compile(r"(?P<axis>\w+?)_(?P<operation>div|mul|times)_?(?P<number>[1-9][0-9]{0,8})")


def derived_axis(text: str, axes: Collection[str]) -> str | None:
    """Return the expression of a shape entry that is no declared axis: ``1``, or ``K // 2`` for ``K_div_2``; else None."""
    if text.isascii() and text.isdigit():
        return text if len(text) < 10 else None
    found = _DERIVED.fullmatch(text)
    if found is None or found["axis"] not in axes:
        return None
    return f"{found['axis']} {'//' if found['operation'] == 'div' else '*'} {found['number']}"


def _expression(text: Any, where: str) -> Iterator[Problem]:
    if not isinstance(text, str) or not text:
        yield where, f"must be a Python expression, not {text!r:.80}"
        return
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield where, f"is not a Python expression: {error}"


def _constraints(record: Mapping[str, Any]) -> list[Problem]:
    value = record.get("constraints", [])
    if not isinstance(value, list):
        return [("constraints", "must be a list of texts")]
    return [problem for number, text in enumerate(value) for problem in _expression(text, f"constraints[{number}]")]


def _reference(record: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    text = record.get("reference")
    if text is None and not rules.reference_required:
        return
    if not isinstance(text, str) or not text:
        yield "reference", "missing key" if "reference" not in record else "must be a non-empty text"
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield "reference", f"is not valid Python: {error}"
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if rules.entry_named_run and "run" not in functions:
        yield "reference", f"defines no top-level function 'run' (it defines {', '.join(functions) or 'none'})"
    elif not functions:
        yield "reference", "defines no function"


# ---- Solutions ----------------------------------------------------------------------------------------


def check_solution(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a Solution. Its sources are inline by now in every dialect."""
    problems = [*check_name(record, "name"), *check_name(record, "definition"), *check_name(record, "author")]
    problems += check_optional_text(record, "description")
    spec = record.get("spec")
    if not isinstance(spec, dict):
        return [*problems, ("spec", "missing key" if "spec" not in record else "must be an object")]
    problems += _language(spec, rules)
    hardware = spec.get("target_hardware")
    if not isinstance(hardware, list) or not hardware or not all(isinstance(item, str) and item for item in hardware):
        problems.append(("spec.target_hardware", "must be a list of at least one text"))
    problems += check_texts(spec, "dependencies", "spec.")
    if not isinstance(spec.get("destination_passing_style", True), bool):
        problems.append(("spec.destination_passing_style", "must be true or false"))
    if spec.get("binding") not in (None, "tvm-ffi", "torch"):
        problems.append(("spec.binding", f"must be tvm-ffi, torch or null, not {spec['binding']!r:.40}"))
    paths = list(_sources(record.get("sources"), problems))
    entry = spec.get("entry_point")
    if not isinstance(entry, str) or entry.count("::") != 1 or not all(entry.split("::")):
        problems.append(("spec.entry_point", f"must read '<file>::<function>', not {entry!r:.80}"))
    elif entry.split("::")[0] not in paths:
        problems.append(("spec.entry_point", f"names the file '{entry.split('::')[0]}', which is not a source"))
    return problems


def _language(spec: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    key = "languages" if "languages" in spec and rules.languages_key == "languages" else "language"
    value = spec.get(key)
    if key == "languages" and not isinstance(value, list):
        yield f"spec.{key}", f"must be a list of texts, not {value!r:.40}"
        return
    chosen = value if isinstance(value, list) and key == "languages" else [value]
    if not chosen:
        yield f"spec.{key}", "names no language"
    for language in chosen:
        if not isinstance(language, str) or language not in rules.languages:
            known = ", ".join(sorted(rules.languages))
            yield f"spec.{key}", f"unknown language {language!r:.40}; this dialect knows {known}"


def _sources(sources: Any, problems: list[Problem]) -> Iterator[str]:
    if not isinstance(sources, list) or not sources:
        problems.append(("sources", "must be a list of at least one source"))
        return
    seen: set[str] = set()
    for number, source in enumerate(sources):
        where = f"sources[{number}]"
        if not isinstance(source, dict) or not isinstance(source.get("path"), str):
            problems.append((f"{where}.path", "missing key"))
            continue
        reason = path_problem(source["path"])
        if reason is not None:
            problems.append((f"{where}.path", reason))
        if source["path"] in seen:
            problems.append((f"{where}.path", f"'{source['path']}' is listed twice"))
        if not isinstance(source.get("content"), str) or not source["content"]:
            problems.append((f"{where}.content", "must be a non-empty text"))
        seen.add(source["path"])
        yield source["path"]


# ---- Workloads and traces -----------------------------------------------------------------------------


def check_workload(record: Any, rules: Rules, where: str = "") -> list[Problem]:
    """Return the problems of a Workload by itself. A mismatch with its Definition is a finding instead."""
    if not isinstance(record, dict):
        return [(where.rstrip(".") or "workload", "must be an object")]
    problems = list(check_text(record, "uuid", where))
    axes, inputs = record.get("axes"), record.get("inputs")
    if not isinstance(axes, dict):
        problems.append((f"{where}axes", "missing key" if "axes" not in record else "must be an object"))
    else:
        problems += [(f"{where}axes.{n}", f"must be a whole number >= 0, not {v!r:.40}") for n, v in axes.items()
                     if not is_count(v)]  # fmt: skip
    if not isinstance(inputs, dict):
        problems.append((f"{where}inputs", "missing key" if "inputs" not in record else "must be an object"))
    else:
        for name, spec in inputs.items():
            problems += _input(f"{where}inputs.{name}", spec, rules)
    return problems


def _input(where: str, spec: Any, rules: Rules) -> Iterator[Problem]:
    kind = spec.get("type") if isinstance(spec, dict) else None
    if not is_one_of(kind, rules.input_kinds):
        yield f"{where}.type", f"must be one of {', '.join(sorted(rules.input_kinds))}, not {kind!r:.80}"
    elif kind == "scalar" and not _is_scalar(spec.get("value")):
        yield f"{where}.value", f"must be a boolean or a number of at most 64 bits, not {spec.get('value')!r:.40}"
    elif kind == "safetensors":
        yield from check_text(spec, "tensor_key", f"{where}.")
        yield from check_text(spec, "path", f"{where}.")
        if isinstance(spec.get("path"), str) and spec["path"]:
            reason = path_problem(spec["path"])
            if reason is not None:
                yield f"{where}.path", reason


def _is_scalar(value: Any) -> bool:
    return -(1 << 63) <= value < 1 << 64 if isinstance(value, int) else isinstance(value, float)


def check_trace(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a trace line. A line without solution and evaluation is a Workload."""
    problems = [*check_name(record, "definition"), *check_workload(record.get("workload"), rules, "workload.")]
    evaluation = record.get("evaluation")
    if record.get("solution") is None and evaluation is None:
        return problems
    problems += check_text(record, "solution")
    if not isinstance(evaluation, dict):
        return [*problems, ("evaluation", "must be an object if a solution is named")]
    return problems + list(_evaluation(evaluation, rules))


def _evaluation(evaluation: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    status = evaluation.get("status")
    if status not in rules.statuses:
        yield "evaluation.status", f"unknown status {status!r:.40}"
        return
    environment = evaluation.get("environment")
    if not isinstance(environment, dict):
        yield "evaluation.environment", "missing key"
    else:
        yield from check_text(environment, "hardware", "evaluation.environment.")
        if not isinstance(environment.get("libs", {}), dict):
            yield "evaluation.environment.libs", "must be an object"
    yield from check_text(evaluation, "timestamp", "evaluation.")
    if not isinstance(evaluation.get("log", ""), str):
        yield "evaluation.log", "must be a text"
    wanted = {"correctness": status in ("PASSED", "INCORRECT_NUMERICAL"), "performance": status == "PASSED"}
    for key, present in wanted.items():
        if present != (evaluation.get(key) is not None):
            yield f"evaluation.{key}", f"must {'' if present else 'not '}be present with status {status}"
    yield from _figures(evaluation, "correctness", ("max_relative_error", "max_absolute_error"), may_be_nan=True)
    yield from _figures(evaluation, "performance", ("latency_ms", "reference_latency_ms", "speedup_factor"))


def _figures(
    evaluation: Mapping[str, Any], group: str, keys: tuple[str, ...], *, may_be_nan: bool = False
) -> Iterator[Problem]:
    values = evaluation.get(group)
    if values is None:
        return
    if not isinstance(values, dict):
        yield f"evaluation.{group}", "must be an object"
        return
    for key in keys:
        figure = _figure(values.get(key, 0.0))
        if figure is None or figure < 0 or (not may_be_nan and not math.isfinite(figure)):
            yield f"evaluation.{group}.{key}", f"must be a number >= 0, not {values[key]!r:.40}"


def _figure(value: Any) -> float | None:
    """Convert a number, or the text of one that JSON cannot express (NaN, Infinity)."""
    return float(value) if is_one_of(value, ("NaN", "Infinity", "-Infinity")) else number(value)
