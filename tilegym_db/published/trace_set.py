"""A trace set: the published traces of one Definition on one GPU, in one small file of JSON lines.

The first line is an object, the *header*. Its tables hold values that traces repeat (hosts, runs, Solutions, configs,
kernel names, ...). ``point_columns`` and ``row_columns`` name the columns of the other lines. Every other line is an
array: one measured *point* of the Definition (a Workload's sizes, dtypes, scalars and layouts), whose last element is
the rows of its traces. Indices count from 0 and point into the header's tables.

Times are whole nanoseconds and ratios whole hundred thousandths. Errors keep three significant digits, as every report
prints them, and the digest of an `envelope` its first eight. Fields that do not fit the columns stay unchanged in
``other`` of the row's facts, so that every trace is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field
from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.records.base import NAME_PATTERN, Int64, Record
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.trace import new_trace_id

SCHEMA_VERSION = 3
"""Version of the layout; older ones are still read. Version 2 had notes, dropped cases and the GPU among the facts.
Version 1 was one whole trace per line, without a header.
"""

DIGEST_DIGITS = 8
POINT_COLUMNS: tuple[str, ...] = ("workload_uuid", "axes", "dtypes", "scalars", "layouts", "sol_us", "rows")
"""Columns of a point. A whole number instead of the Workload refers to the point of that earlier line, counted from 0.
The speed of light then differs, because runs used other peaks.
"""
ROW_COLUMNS: tuple[str, ...] = (
    "setup", "after_us", "latency_ns", "below_ns", "above_ns", "host_ns", "clock", "rel_fro", "worst_row_rel", "max_abs",
    "wall_ns", "profiled_ns", "launches", "cases", "envelope", "comparisons...",
)  # fmt: skip
"""Columns of a row. ``after_us`` is the time since the row before, or since the run's start for a point's first row.
``below_ns`` and ``above_ns`` are the distances of the ends of the latency's interval from it. After the last named
column come the comparisons with the setup's alternatives: ratio, and the distances of its interval's lower and upper
end. A single 0 means that the row already states the three numbers for the same alternative. Otherwise they are the
inverse of the row of that alternative in the same run and point.
"""

_DAMAGE = (ValueError, TypeError, LookupError, OverflowError)

MARK = b'{"schema_version":'
"""Start of a set's first line; a single trace starts with another key."""


_Indices = tuple[Int64, ...]
_SetupOfVersion2 = tuple[Int64, Int64, Int64, Int64, _Indices]
_Setup = tuple[Int64, Int64, Int64, Int64, _Indices, Int64, _Indices, _Indices]


class TraceSetHeader(Record):
    """The first line of a trace set."""

    kind: ClassVar[str] = "trace_set"

    schema_version: Literal[2, 3] = 3
    record: Literal["trace set"] = "trace set"
    gpu: str = Field(pattern=NAME_PATTERN)
    definition: str = Field(pattern=NAME_PATTERN)
    definition_version: str
    definition_digest: str
    op_type: str = Field(pattern=NAME_PATTERN)
    point_columns: tuple[str, ...] = POINT_COLUMNS
    row_columns: tuple[str, ...] = ROW_COLUMNS
    axes: tuple[str, ...]
    """Names of the axes, in the order of every point's sizes."""
    dtypes: tuple[dict[str, str], ...] = ()
    scalars: tuple[dict[str, Scalar], ...] = ()
    layouts: tuple[dict[str, str], ...] = ()
    hosts: tuple[tuple[str, str, str, str, dict[str, str]], ...] = ()
    """Driver's name of the GPU, compile target, driver, CUDA, and versions of libraries."""
    runs: tuple[tuple[str, Int64, datetime, str | None, Literal["local", "foreign"]], ...] = ()
    """Run id, host, time of its first trace here, seed of its fuzz cases, and origin on the publishing machine."""
    solutions: tuple[tuple[str, str, str, str, str | None], ...] = ()
    """Name, digest, language, role, and what it provides."""
    configs: tuple[dict[str, Any], ...] = ()
    alternatives: tuple[tuple[str, str | None], ...] = ()
    """Name of every alternative that some trace is compared with, and what it stands for."""
    gpus: tuple[tuple[str | None, str | None], ...] = ()
    """Driver's UUID of the GPU and the name of its host; several GPUs of a host measure in one run."""
    setups: tuple[_Setup | _SetupOfVersion2, ...] = ()
    """Run, Solution, config, facts, alternatives, GPU, notes, and dropped fuzz cases."""
    facts: tuple[dict[str, Any], ...] = ()
    """Fields of a trace that rarely differ, by name; ``other`` replaces whole fields."""
    clocks: tuple[tuple[Int64 | None, Int64 | None], ...] = ()
    """SM clock in MHz, and samples."""
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    kernels: tuple[tuple[str, ...], ...] = ()
    """Groups of kernel names. The common prefix comes first, and names omit it. Indices count through the groups."""
    launches: tuple[tuple[Int64, ...], ...] = ()
    """The kernels of a call."""

    @cached_property
    def kernel_names(self) -> tuple[str, ...]:
        """Return the names as a trace has them."""
        return tuple(stem + rest for stem, *group in self.kernels for rest in group)


def is_trace_set(content: bytes) -> bool:
    """Return True if the content of a file is a set, by its start; otherwise it holds one whole trace per line."""
    return content.startswith(MARK)


@dataclass(frozen=True)
class TraceSet:
    """A parsed set, which assembles traces on demand."""

    header: TraceSetHeader
    points: tuple[list[Any], ...]
    source: str

    @classmethod
    def parse(cls, content: bytes, source: str | Path = "<bytes>") -> Self:
        """Read a set; errors name ``source``.

        Raises:
            RecordError: not a trace set, written by a newer version, or damaged.
        """
        first, *lines = content.splitlines()
        try:
            version = from_json(first).get("schema_version")
            if isinstance(version, int) and version > SCHEMA_VERSION:
                raise RecordError(
                    f"{source}: schema_version {version} was written by a newer tilegym-db (this one reads "
                    f"{SCHEMA_VERSION}). Try: pip install --upgrade tilegym-db",
                    code="version_newer",
                )
            header = TraceSetHeader.from_json(first, f"{source}:1")
            points = tuple(from_json(line, cache_strings="all") for line in lines)
        except (ValueError, AttributeError) as error:
            raise error if isinstance(error, RecordError) else damaged(source, error) from None
        return cls(header, points, str(source))

    def traces(self) -> Iterator[dict[str, Any]]:
        """Yield every trace as :meth:`Trace.to_dict` gives it, point by point."""
        for _, traces in self.by_point():
            yield from traces

    def by_point(self) -> Iterator[tuple[Point, list[dict[str, Any]]]]:
        """Yield the points in file order, each with its traces."""
        for point, rows in self.rows():
            yield point, self.traces_of(point, rows)

    def traces_of(self, point: Point, rows: list[list[Any]]) -> list[dict[str, Any]]:
        """Return the traces of some rows of :meth:`rows`."""
        try:
            return [assembled(shared, point, pieces) for shared, pieces in self._pieces(rows)]
        except _DAMAGE as error:
            raise damaged(self.source, error) from None

    def rows(self) -> Iterator[tuple[Point, list[list[Any]]]]:
        """Yield the points in file order, each with its raw rows."""
        seen: list[Point] = []
        for raw in self.points:
            try:
                point = seen[raw[0]]._replace(sol_us=raw[5]) if isinstance(raw[0], int) else self._point(raw)
            except _DAMAGE as error:
                raise damaged(self.source, error) from None
            seen.append(point)
            yield point, raw[-1]

    @cached_property
    def provides(self) -> dict[str, str | None]:
        """Return what each Solution provides, by name."""
        return {name: provides for name, _, _, _, provides in self.header.solutions}

    @cached_property
    def foreign_runs(self) -> frozenset[str]:
        """Return the ids of runs that the publishing installation had not measured."""
        return frozenset(run[0] for run in self.header.runs if run[4] == "foreign")

    def _point(self, raw: list[Any]) -> Point:
        header = self.header
        uuid, sizes, dtypes, scalars, layouts, sol_us, _ = raw
        axes = sizes if isinstance(sizes, dict) else dict(zip(header.axes, sizes, strict=True))
        return Point(uuid, axes, header.dtypes[dtypes], header.scalars[scalars], header.layouts[layouts], sol_us)

    def _pieces(self, rows: list[list[Any]]) -> Iterator[tuple[dict[str, Any], Pieces]]:
        header, known = self.header, self.first_rows(rows)
        time = header.runs[header.setups[rows[0][0]][0]][2].astimezone(UTC)
        for row in rows:
            shared, of_setup = self._of_setup(row[0])
            time += timedelta(microseconds=row[1])
            launches = header.launches[row[12]] if row[12] is not None else ()
            yield (
                shared,
                of_setup._replace(
                    clock=header.clocks[row[6]],
                    kernels=[header.kernel_names[index] for index in launches],
                    row=row,
                    time=time,
                    comparisons=self.comparisons(row, known),
                ),
            )

    def _of_setup(self, index: int) -> tuple[dict[str, Any], Pieces]:
        """Return the shared part of a setup's traces: fields, and pieces without those of the row."""
        if index not in self._setups:
            header = self.header
            setup = header.setups[index]
            run, solution, config, facts, alternatives = setup[:5]
            said = header.facts[facts]
            gpu, notes, dropped = _of_version_2(said) if len(setup) == 5 else setup[5:]
            pieces = Pieces(
                run=header.runs[run],
                host=header.hosts[header.runs[run][1]],
                solution=header.solutions[solution],
                config=header.configs[config],
                facts=said,
                gpu=(None, None) if gpu is None else header.gpus[gpu],
                alternatives=[header.alternatives[index] for index in alternatives],
                clock=(),
                kernels=(),
                notes=[header.notes[index] for index in notes],
                dropped=[header.dropped[index] for index in dropped],
                row=(),
                time=header.runs[run][2],
                comparisons=(),
            )
            self._setups[index] = shared_fields(header, pieces), pieces
        return self._setups[index]

    @cached_property
    def _setups(self) -> dict[int, tuple[dict[str, Any], Pieces]]:
        return {}

    def first_rows(self, rows: list[list[Any]]) -> dict[tuple[str, str], list[Any]]:
        """Return (run id, Solution) -> the row of a point from which other rows' comparisons may be read."""
        known: dict[tuple[str, str], list[Any]] = {}
        for row in rows:
            run, solution, *_ = self.header.setups[row[0]]
            known.setdefault((self.header.runs[run][0], self.header.solutions[solution][0]), row)
        return known

    def comparisons(self, row: list[Any], known: Mapping[tuple[str, str], list[Any]]) -> list[tuple[int, int, int]]:
        """Return a row's comparison with each alternative: ratio and distances to both ends, in hundred thousandths."""
        stated = triples(row)
        return [
            stated[place] or self.comparison(row, place, known) for place in range(len(self.header.setups[row[0]][4]))
        ]

    def comparison(
        self, row: list[Any], place: int, known: Mapping[tuple[str, str], list[Any]]
    ) -> tuple[int, int, int]:
        """Return a row's comparison with the alternative at ``place``; ``known`` is the result of :meth:`first_rows`."""
        stated = triples(row)
        if stated[place] is not None:
            return stated[place]  # type: ignore[return-value]
        run, index, *_ = self.header.setups[row[0]]
        names = self._alternatives(row)
        earlier = (triple for triple, name in zip(stated[:place], names, strict=False) if name == names[place])
        said = next((triple for triple in earlier if triple is not None), None)
        return said or self._mirrored(known[self.header.runs[run][0], names[place]], self.header.solutions[index][0])

    def _alternatives(self, row: list[Any]) -> list[str]:
        return [self.header.alternatives[index][0] for index in self.header.setups[row[0]][4]]

    def _mirrored(self, row: list[Any], solution: str) -> tuple[int, int, int]:
        """Return the inverse of another row's comparison with a Solution."""
        for triple, name in zip(triples(row), self._alternatives(row), strict=True):
            if triple is not None and name == solution:
                return inverse(triple)
        raise ValueError(f"no row states the comparison with {solution}")


def _of_version_2(facts: Mapping[str, Any]) -> tuple[None, Sequence[int], Sequence[int]]:
    return None, facts.get("notes", ()), facts.get("dropped", ())


def damaged(source: str | Path, error: Exception) -> RecordError:
    """Return the error for a trace set that cannot be read."""
    return RecordError(
        f"{source}: not a valid trace set: {type(error).__name__}: {error}. Publish it again.", code="trace_set_damaged"
    )


# ---- trace pieces ---------------------------------------------------------------------------------
# Assembles one trace from a row of a trace set and the tables of its header.

NANO, RATIO = 1000, 100_000
"""Nanoseconds in a microsecond, and units in a ratio of 1."""

ERRORS = ("rel_fro", "worst_row_rel", "max_abs")
COMPARISONS_AT = 15
"""Index of a row's first comparison."""


class Pieces(NamedTuple):
    """The parts of one trace: entries of the header's tables, and the row's own numbers."""

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
    """A measured point, with its speed of light."""

    workload_uuid: str
    axes: dict[str, int]
    dtypes: dict[str, str]
    scalars: dict[str, Scalar]
    layouts: dict[str, str]
    sol_us: float | None
    """Speed of light with enough digits to give every trace's ``sol_ratio``; a trace keeps four."""


def inverse(triple: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the inverse comparison in the same units: ratio, and its distances to both ends."""
    ratio, below, above = triple
    middle, low, high = (round(RATIO / (value / RATIO)) for value in (ratio, ratio + above, ratio - below))
    return middle, middle - low, high - middle


def triples(row: list[Any]) -> list[tuple[int, int, int] | None]:
    """Return the comparisons of a row; None for one that is stated elsewhere."""
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
    """Return the fields that all traces of a setup share. ``header`` has those shared by the whole set."""
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
    """Return one trace as :meth:`Trace.to_dict` gives it, from the result of :func:`shared_fields` and the pieces."""
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
    """Return a UTC time as a trace spells it."""
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
