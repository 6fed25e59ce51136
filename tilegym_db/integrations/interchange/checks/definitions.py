"""What a Definition of a dialect must be."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from tilegym_db.integrations.interchange.checks.dialect import (
    Problem,
    Rules,
    check_name,
    check_optional_text,
    check_texts,
    is_count,
    is_one_of,
)

__all__ = [
    "axis_kind",
    "check_definition",
]


def check_definition(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Why a Definition is refused; empty where it is not."""
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
    """``const``, ``var`` or a dialect's own; FlashInfer-Bench takes one without a type for what its keys say."""
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
            if axis not in axes:
                yield f"{where}.shape", f"uses the axis '{axis}', which is not declared"
    dtype = spec.get("dtype")
    if not isinstance(dtype, str):
        yield f"{where}.dtype", "missing key" if "dtype" not in spec else f"must be a text, not {dtype!r:.40}"
    elif rules.dtypes is not None and dtype not in rules.dtypes:
        yield f"{where}.dtype", f"unknown dtype '{dtype}'"


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
        yield "reference", "missing key" if "reference" not in record else "must be a text that is not empty"
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
