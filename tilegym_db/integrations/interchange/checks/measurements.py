"""What a Workload and a line of a trace file of a dialect must be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tilegym_db.integrations.interchange.checks.dialect import (
    Problem,
    Rules,
    check_name,
    check_text,
    is_count,
    is_one_of,
    number,
)
from tilegym_db.integrations.interchange.reading import path_problem

__all__ = [
    "check_trace",
    "check_workload",
]


def check_workload(record: Any, rules: Rules, where: str = "") -> list[Problem]:
    """Why a Workload is refused, alone; whether it fits its Definition is a finding."""
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
    """Why a line of a trace file is refused; one without solution and evaluation is a Workload's."""
    problems = [*check_name(record, "definition"), *check_workload(record.get("workload"), rules, "workload.")]
    evaluation = record.get("evaluation")
    if record.get("solution") is None and evaluation is None:
        return problems
    problems += check_text(record, "solution")
    if not isinstance(evaluation, dict):
        return [*problems, ("evaluation", "must be an object where a solution is named")]
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
            yield f"evaluation.{key}", f"must {'' if present else 'not '}be there with status {status}"
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
    """A figure, also one spelled as text where JSON has no word for it."""
    return float(value) if is_one_of(value, ("NaN", "Infinity", "-Infinity")) else number(value)
