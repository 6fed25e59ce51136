"""What a row of a trace set and its header's tables make together: one trace (:mod:`tilegym_db.records.trace_set`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.trace import new_trace_id

__all__ = [
    "COMPARISONS_AT",
    "ERRORS",
    "NANO",
    "RATIO",
    "Pieces",
    "Point",
    "assembled",
    "inverse",
    "shared_fields",
    "spelled_time",
    "triples",
]

NANO, RATIO = 1000, 100_000
"""Units of a microsecond's times, and of ratios."""

ERRORS = ("rel_fro", "worst_row_rel", "max_abs")
COMPARISONS_AT = 15
"""Where a row's comparisons start."""


class Pieces(NamedTuple):
    """What one trace is put together from: entries of the header's tables, and the row's own numbers."""

    run: Sequence[Any]
    host: Sequence[Any]
    solution: Sequence[Any]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    gpu: Sequence[str | None]
    alternatives: Sequence[Sequence[Any]]
    clock: Sequence[Any]
    kernels: Sequence[str]
    notes: Sequence[str]
    dropped: Sequence[str]
    row: Sequence[Any]
    time: datetime
    comparisons: Sequence[Sequence[int]]


class Point(NamedTuple):
    """Where traces were measured, with the speed of light there."""

    workload_uuid: str
    axes: dict[str, int]
    dtypes: dict[str, str]
    scalars: dict[str, Scalar]
    layouts: dict[str, str]
    sol_us: float | None
    """To as many digits as it takes to give every trace's ``sol_ratio``; a trace keeps four."""


def inverse(triple: tuple[int, int, int]) -> tuple[int, int, int]:
    """The comparison seen from the other side, in the same units: ratio, and its distances to both ends."""
    ratio, below, above = triple
    middle, low, high = (round(RATIO / (value / RATIO)) for value in (ratio, ratio + above, ratio - below))
    return middle, middle - low, high - middle


def triples(row: list[Any]) -> list[tuple[int, int, int] | None]:
    """The comparisons of a row; None for one that is stated elsewhere."""
    found: list[tuple[int, int, int] | None] = []
    position, end = COMPARISONS_AT, len(row)
    while position < end:
        if row[position] == 0:
            found.append(None)
            position += 1
        else:
            found.append((row[position], row[position + 1], row[position + 2]))
            position += 3
    return found


def shared_fields(header: Any, pieces: Pieces) -> dict[str, Any]:
    """The fields that all traces of a setup have alike. ``header`` has those that all of the set share."""
    name, digest, language, role, _ = pieces.solution
    gpu_name, sm, driver, cuda, libs = pieces.host
    facts = pieces.facts
    return _present(
        run_id=pieces.run[0],
        definition=header.definition,
        definition_version=header.definition_version,
        definition_digest=header.definition_digest,
        op_type=header.op_type,
        solution=name,
        solution_digest=digest,
        language=language,
        role=role if role != "kernel" else None,
        config=dict(pieces.config) or None,
        gpu=header.gpu,
        gpu_name=gpu_name,
        sm=sm or None,
        driver=driver or None,
        cuda=cuda or None,
        libs=dict(libs) or None,
        gpu_uuid=pieces.gpu[0],
        host=pieces.gpu[1],
        tier=facts["tier"],
        attempt=facts.get("attempt"),
        sandbox_level=facts.get("sandbox_level"),
        status=facts["status"],
    )


def assembled(shared: Mapping[str, Any], point: Point, pieces: Pieces) -> dict[str, Any]:
    """One trace as :meth:`Trace.to_dict` gives it; ``shared`` is what :func:`shared_fields` gives, whose parts it holds."""
    trace = {**shared, "timestamp": spelled_time(pieces.time), "workload_uuid": point.workload_uuid}
    trace["axes"] = dict(point.axes)
    for name, values in (("dtypes", point.dtypes), ("scalars", point.scalars), ("layouts", point.layouts)):
        if values:
            trace[name] = dict(values)
    for name, value in (
        ("envelope", _fuzz_cases(pieces)),
        ("correctness", _correctness(pieces)),
        ("performance", _performance(point, pieces)),
        ("audit", _audit(pieces)),
    ):
        if value is not None:
            trace[name] = value
    for name, value in pieces.facts.get("other", {}).items():
        if value is not None:
            trace[name] = value
        else:
            trace.pop(name, None)
    if "trace_id" not in trace:
        run_id, digest, attempt = shared["run_id"], shared["solution_digest"], trace.get("attempt", 0)
        config, uuid = trace.get("config", {}), trace["workload_uuid"]
        trace["trace_id"] = new_trace_id(run_id, trace["tier"], attempt, digest, config, uuid)
    return trace


def spelled_time(time: datetime) -> str:
    """A time in UTC as a trace spells it."""
    return time.isoformat().replace("+00:00", "Z")


def _fuzz_cases(pieces: Pieces) -> dict[str, Any] | None:
    cases, digest = pieces.row[13:15]
    if digest is None:
        return None
    more = _present(dropped=list(pieces.dropped) or None, scalars=pieces.facts.get("scalars"))
    return {"cases": cases, "digest": digest, "seed": pieces.run[3], **more}


def _correctness(pieces: Pieces) -> dict[str, Any] | None:
    if "correctness" not in pieces.facts:
        return None
    errors = dict(zip(ERRORS, pieces.row[7:10], strict=True))
    return {**_present(**errors), **pieces.facts["correctness"], **_present(cases=pieces.row[13] or None)}


def _performance(point: Point, pieces: Pieces) -> dict[str, Any] | None:
    latency, below, above, host = pieces.row[2:6]
    if latency is None:
        return None
    clock_mhz, samples = pieces.clock
    comparisons = [
        {"with": name, **_present(provides=provides), **_ratios(triple)}
        for (name, provides), triple in zip(pieces.alternatives, pieces.comparisons, strict=True)
    ]
    return {
        "latency_us": latency / NANO,
        "ci_low_us": (latency - below) / NANO,
        "ci_high_us": (latency + above) / NANO,
        **_present(
            samples=samples,
            host_us=None if host is None else host / NANO,
            comparisons=comparisons or None,
            sol_us=None if point.sol_us is None else round(point.sol_us, 4),
            sol_ratio=None if point.sol_us is None else round(point.sol_us / latency * NANO, 4),
            clock_mhz=clock_mhz,
        ),
        **pieces.facts.get("performance", {}),
    }


def _ratios(triple: Sequence[int]) -> dict[str, float]:
    ratio, below, above = triple
    return {"ratio": ratio / RATIO, "ci_low": (ratio - below) / RATIO, "ci_high": (ratio + above) / RATIO}


def _audit(pieces: Pieces) -> dict[str, Any] | None:
    wall, profiled = pieces.row[10:12]
    found = {
        **_present(wall_us=None if wall is None else wall / NANO),
        **_present(profiled_us=None if profiled is None else profiled / NANO),
        **_present(kernels=list(pieces.kernels) or None, notes=list(pieces.notes) or None),
        **pieces.facts.get("audit", {}),
    }
    return found or None


def _present(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
