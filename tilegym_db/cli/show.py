"""``tilegym-db show``: show a definition, a solution or a trace in full."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, open_reader, schema_of, with_form, write_json, write_records
from tilegym_db.cli.kit.options import complete_name
from tilegym_db.cli.kit.output import (
    Spark,
    note,
    print_by_size,
    print_line,
    print_table,
    printable,
    printable_lines,
    spark_wanted,
    spelled_map,
    spelled_number,
)
from tilegym_db.errors import NotFoundError, UsageError, did_you_mean

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog, SolutionFiles
    from tilegym_db.records import Definition, TensorSpec


TRACES_SHOWN = 40
TRACE_ID_SHOWN = 8


@with_form
def command(
    name: Annotated[
        str,
        typer.Argument(
            help="A definition, a solution, or a trace by its id or the start of it.", autocompletion=complete_name
        ),
    ],
    history: Annotated[
        bool, typer.Option("--history", help="Show the timed passes of a definition's or solution's kernels over runs.")
    ] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Print only the source of a solution, or the reference of a definition.")
    ] = False,
    form: Form = TABLE,
    spark: Spark = None,
) -> None:
    """Show a definition with its reference and solutions, a solution with its source and traces, or one trace.

    A failed trace is shown with the place of the failure and the command that reproduces it. JSON has all of it; CSV, Parquet
    and Arrow have only tables: a definition's solutions, a solution's traces, the trace.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.catalog.other_names import OTHER_NAMES

    catalog = Catalog.default()
    if source:
        if history or not form.is_table:
            raise UsageError("--source prints text. Leave out --history and the format.", code="options_clash")
        print_source(source_of(catalog, name))
    elif history:
        show_history(catalog, name, form, spark)
    elif name in catalog.definitions:
        show_definition(catalog, catalog.definition(name), form, spark)
    elif name in catalog.solutions:
        show_solution(catalog.solution(name), form, spark)
    elif name in OTHER_NAMES:
        show_other_name(catalog, name, form, spark)
    elif not show_trace(name, form):
        raise _unknown(catalog, name, "a definition, a solution or a trace")


def _unknown(catalog: Catalog, name: str, kinds: str) -> NotFoundError:
    catalog.refuse_broken(name)
    hint = did_you_mean(name, [*catalog.definitions, *catalog.solutions])
    return NotFoundError(f"'{name}' is not {kinds}.{hint} Try: tilegym-db list", code="name_unknown")


def source_of(catalog: Catalog, name: str) -> str:
    """Return the source with a Solution's entry point, or the reference of a Definition."""
    if name in catalog.definitions:
        return catalog.definition(name).reference
    if name not in catalog.solutions:
        raise _unknown(catalog, name, "a definition or a solution")
    solution = catalog.solution(name)
    return solution.sources[solution.record.spec.entry_path].decode(errors="replace")


def show_other_name(catalog: Catalog, name: str, form: Form, spark: bool | None = None) -> None:
    """Explain a name of TileKernels, and show its Definition if there is exactly one."""
    from tilegym_db.catalog.other_names import OTHER_NAMES

    other = OTHER_NAMES[name]
    said = other.said(name)
    if len(other.definitions) == 1:
        note(said)
        show_definition(catalog, catalog.definition(other.definitions[0]), form, spark)
    elif not form.is_table:
        raise UsageError(f"{said}. Use one of these names.", code="name_of_others")
    else:
        print_line(said)
        for definition in other.definitions:
            print_line(f"  tilegym-db show {definition}")
        if other.python:
            print_line(f"  python -c 'import {other.python.rpartition('.')[0]}; help({other.python})'")


def show_definition(catalog: Catalog, definition: Definition, form: Form, spark: bool | None = None) -> None:
    """Print a Definition, its Solutions, and how they rank."""
    from tilegym_db.cli.best import print_leaderboard
    from tilegym_db.cli.list import solution_rows
    from tilegym_db.records import axes_key
    from tilegym_db.records.text import binding_key, explain_command
    from tilegym_db.store.queries.measured import leaderboard_rows, size_rows

    solutions = solution_rows(catalog, [definition])
    with open_reader() as store:
        ranks = leaderboard_rows(store, definition=definition.name)
        sized = size_rows(store, definition.name) if form.is_table and spark_wanted(spark) else []
    workloads = catalog.workloads_for(definition.name)
    if form.kind == "json":
        content = {**definition.to_dict(), "digest": definition.digest, "workloads": len(workloads)}
        write_json(form, {"definition": content, "solutions": solutions, "leaderboard": ranks})
        return
    if not form.is_table:
        write_records(form, solutions)
        return
    print_line(f"{definition.name} {definition.version} ({definition.op_type})  {definition.digest[:12]}")
    print_line(definition.description)
    for label, values in definition_facts(definition).items():
        print_line(f"  {label:<12}{values}")
    print_line("")
    print_source(definition.reference)
    if solutions:
        cells = [(s["solution"], s["language"], s["role"]) for s in solutions]
        print_table(("solution", "language", "role"), cells, wide=form.wide)
    if ranks:
        print_leaderboard(ranks, sized, wide=form.wide)
    if not workloads:
        note(f"no workloads. Next: tilegym-db new workload {definition.name} --from-config FILE")
        return
    first = workloads[0]
    gpu = ranks[0]["gpu"] if ranks else ""
    command = explain_command(definition.name, axes_key(first.axes), binding_key(first.dtypes), gpu)
    note(f"{len(workloads)} workloads. What the resolver would pick: {command}")


def definition_facts(definition: Definition) -> dict[str, str]:
    """Return what a Definition declares, as label and text."""
    stated = {name: axis.value if axis.scalar is None else axis.scalar for name, axis in definition.axes.items()}
    axes = {name: "" if value is None else f"={value}" for name, value in stated.items()}
    facts = {
        "axes": ", ".join(f"{name}{value}" for name, value in axes.items()),
        "dtypes": "; ".join(f"{name}: {', '.join(choices)}" for name, choices in definition.dtypes.items()),
        "inputs": ", ".join(_tensor(name, spec) for name, spec in definition.inputs.items()),
        "outputs": ", ".join(_tensor(name, spec) for name, spec in definition.outputs.items()),
        "optional": ", ".join(definition.optional_outputs),
        "in place": ", ".join(f"{source} becomes {target}" for source, target in definition.in_place.items()),
        "constraints": "; ".join(definition.constraints),
        "flops": definition.cost.flops if definition.cost else "",
        "bytes": definition.cost.bytes if definition.cost else "",
        "tags": ", ".join(definition.tags),
    }
    return {label: text for label, text in facts.items() if text}


def _tensor(name: str, spec: TensorSpec) -> str:
    shape = "" if spec.shape is None else "[" + ", ".join(str(entry) for entry in spec.shape) + "]"
    return f"{name}{shape} {spec.dtype}"


def show_solution(solution: SolutionFiles, form: Form, spark: bool | None = None) -> None:
    """Print a Solution, its source, and its latest traces."""
    from tilegym_db.store.queries.measured import size_rows, traces_of

    with open_reader() as store:
        traces, schema = traces_of(store, solution.name), schema_of(form, store, "traces")
        drawn = form.is_table and spark_wanted(spark)
        sized = size_rows(store, solution=solution.name, all_dtypes=True) if drawn else []
    record = solution.record
    if form.kind == "json":
        sources = {path: content.decode(errors="replace") for path, content in solution.sources.items()}
        content = {**record.to_dict(), "digest": solution.digest, "folder": str(solution.folder)}
        write_json(form, {"solution": content, "sources": sources, "traces": traces})
        return
    if not form.is_table:
        write_records(form, traces, schema=schema)
        return
    spec = record.spec
    author = f"{spec.language}, {spec.role}, by {record.author}"
    print_line(f"{record.name} for {record.definition}: {author}  {solution.digest[:12]}")
    print_line(record.description)
    facts = {
        "folder": str(solution.folder),
        "targets": "" if spec.language == "python" else ", ".join(spec.target_hardware),
        "needs": ", ".join(spec.dependencies),
        "dtypes": "; ".join(f"{name}: {', '.join(choices)}" for name, choices in spec.dtypes.items()),
        "constraints": "; ".join(spec.constraints),
        "layouts": spelled_map(spec.layouts),
        "omits": f"{', '.join(spec.omits)} (verified without a time, never ranked or served)" if spec.omits else "",
        "tunables": "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in spec.tunables.items()),
    }
    for label, text in facts.items():
        if text:
            print_line(f"  {label:<12}{text}")
    print_line("")
    print_source(solution.sources[spec.entry_path].decode(errors="replace"))
    print_traces(traces, solution.digest, form.wide)
    print_by_size(sized, "latency on {gpu}, {dtypes_key}")


def print_traces(traces: list[dict[str, Any]], digest: str, wide: bool = False) -> None:
    """Print the newest traces; those of other sources than the current one are marked as old."""
    if not traces:
        note("no traces yet. Try: tilegym-db bench")
        return
    columns = (
        "trace", "timestamp", "gpu", "dtypes", "axes", "config", "tier", "status", "latency_us", "speedup", "source",
    )  # fmt: skip
    newest = traces[:TRACES_SHOWN]
    print_table(
        columns,
        [_cells(row, columns, row["axes_key"], is_current=row["solution_digest"] == digest) for row in newest],
        wide=wide,
        least=("timestamp", "config", "tier", "dtypes"),
        most=("trace", "axes", "latency_us"),
        key=("gpu", "axes"),
    )
    if len(traces) > TRACES_SHOWN:
        note(f"the newest {TRACES_SHOWN} of {len(traces)} traces; all of them: --json")
    failed = next((row for row in newest if row["status"] not in ("PASSED", "UNSUPPORTED", "OVERRULED")), None)
    if failed is not None:
        note(f"details of a failure: tilegym-db show {failed['trace_id'][:TRACE_ID_SHOWN]}")


HISTORY_COLUMNS = (
    "solution", "gpu", "dtypes", "axes", "config", "tier", "timestamp", "latency_us", "ci_low_us", "ci_high_us", "ratio",
    "change", "source", "trace",
)  # fmt: skip


def show_history(catalog: Catalog, name: str, form: Form, spark: bool | None = None) -> None:
    """Print the timed passes of a Solution, or of a Definition's Solutions, oldest first; a table has only repeated ones."""
    from tilegym_db.store.queries.measured import history_of_passes

    with open_reader() as store:
        passes, schema = history_of_passes(store, name), schema_of(form, store, "history")
    if not passes and name not in catalog.definitions and name not in catalog.solutions:
        raise _unknown(catalog, name, "a definition or a solution")
    if not form.is_table:
        write_records(form, passes, schema=schema)
        return
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in passes:
        series.setdefault(tuple(row[key] for key in HISTORY_KEY), []).append(row)
    repeated = [rows for rows in series.values() if len(rows) > 1]
    if repeated:
        cells = [_pass_cells(row) for rows in repeated for row in rows]
        dropped_first = ("tier", "ci_low_us", "ci_high_us", "dtypes", "config", "gpu")
        kept = ("change", "latency_us", "timestamp")
        print_table(HISTORY_COLUMNS, cells, wide=form.wide, least=dropped_first, most=kept, key=IDENTITY)
        if spark_wanted(spark):
            lines = [{**rows[0], "latencies_us": [row["latency_us"] for row in rows]} for rows in repeated]
            print_by_size(lines, "{solution} on {gpu}, {axes_key} {dtypes_key}", "in {} passes")
    once = len(series) - len(repeated)
    if once:
        note(
            f"{once} case{'s were' if once > 1 else ' was'} timed once and {'have' if once > 1 else 'has'} no history yet"
        )
    if not passes:
        note(f"no timed pass of {name} yet. Next: tilegym-db bench {name}")
    elif not repeated:
        (gpu, *others) = sorted({row["gpu"] for row in passes})
        there = f"Next, on a machine with {gpu}" + (f" or {' or '.join(others)}" if others else "")
        note(f"{there}: tilegym-db bench {name} --force, which times what is done again")


IDENTITY = ("solution", "gpu", "dtypes", "axes", "config", "tier")
"""The columns that state which passes are compared with each other."""
HISTORY_KEY = (
    "solution", "gpu", "dtypes_key", "axes_key", "scalars_key", "layouts_key", "blobs_key", "config_key", "tier",
)  # fmt: skip
"""What is equal for the passes that are compared with each other."""


def _cells(row: dict[str, Any], columns: Sequence[str], call: str, *, is_current: bool) -> tuple[Any, ...]:
    """Return the cells of one trace, of a call by its axes and whatever else states it."""
    shown = {
        **row,
        "axes": call,
        "config": row["config_key"] or None,
        "dtypes": row["dtypes_key"],
        "source": "current" if is_current else "old",
        "timestamp": row["timestamp"].isoformat(sep=" ", timespec="seconds"),
        "trace": row["trace_id"][:TRACE_ID_SHOWN],
    }
    return tuple(shown[name] for name in columns)


def _pass_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cells of one pass, in the order of ``HISTORY_COLUMNS``."""
    call = ",".join(filter(None, (row["axes_key"], row["scalars_key"], row["layouts_key"], row["blobs_key"])))
    return _cells(row, HISTORY_COLUMNS, call, is_current=row["is_current"])


def print_source(text: str) -> None:
    """Print Python source, highlighted on a terminal and unchanged otherwise."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from pygments.token import Comment, Keyword, Name, Number, String
    from rich.console import Console
    from rich.style import Style
    from rich.syntax import ANSISyntaxTheme, Syntax

    # The terminal's own colours, without white and black: they are readable on a light and on a dark background.
    colours = {Keyword: "magenta", String: "green", Number: "cyan", Comment: "dim", Name.Function: "bold"}
    theme = ANSISyntaxTheme({(*kind,): Style.parse(style) for kind, style in colours.items()})
    Console().print(Syntax(printable_lines(text), "python", theme=theme, word_wrap=True))


# ---- Trace ----------------------------------------------------------------------------------------------

MIN_PREFIX = 6
LOG_LINES = 60
MAX_LINE = 400

UNCONFINED = " (not confined: serves only this user, and only if the package ships the source)"


def show_trace(trace_id: str, form: Form) -> bool:
    """Print the trace with this id or id prefix, which must be unique; return False if there is none."""
    from tilegym_db.store.queries.measured import find_traces

    if len(trace_id) < MIN_PREFIX:
        return False
    with open_reader() as store:
        found, schema = find_traces(store, trace_id.lower(), most=4), schema_of(form, store, "traces")
    if len(found) > 1:
        ids = ", ".join(row["trace_id"] for row in found[:3])
        raise UsageError(
            f"several traces have an id that starts with '{trace_id}': {ids}, ... Give more characters.",
            code="trace_ambiguous",
        )
    if not found:
        return False
    if form.kind == "json":
        write_json(form, found[0])
        return True
    if not form.is_table:
        write_records(form, found, schema=schema)
        return True
    for line in describe(found[0]):
        typer.echo(printable(line))
    if found[0]["failure_command"]:
        note("The command in the last line reproduces it.")
    elif found[0]["status"] == "COMPILE_ERROR":
        note(f"Build it alone: tilegym-db compile {found[0]['solution']}")
    return True


def describe(row: dict[str, Any]) -> list[str]:
    """Return the lines of a trace, from a row of the view ``traces`` with what :func:`find_traces` adds."""
    sections = {
        "": _measurement(row),
        "failed at": _failure(row["failure"]) if row["failure"] else {},
        "found": _findings(row),
    }
    lines = [f"{row['status']}  {row['solution']} for {row['definition']} on {row['gpu']}, {row['tier']} tier"]
    for title, facts in sections.items():
        shown = {label: text for label, text in facts.items() if text}
        if shown and title:
            lines += ["", title]
        for label, text in shown.items():
            first, *more = text.splitlines()
            lines += [f"  {label:<15}{first}", *(f"{'':<17}{line}" for line in more)]
    if row["log"]:
        lines += ["", "log", *_clipped(row["log"])]
    if row["failure_command"]:
        lines += ["", row["failure_command"]]
    return lines


def _measurement(row: dict[str, Any]) -> dict[str, str]:
    from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL

    weak = row["sandbox_level"] < PUBLISHED_SANDBOX_LEVEL and row["tier"] == "promotion"
    level = f"sandbox level {row['sandbox_level']}{UNCONFINED if weak else ''}"
    where = f"{row['gpu_name']}, driver {row['driver'] or 'unknown'}, {level}"
    return {
        "reason": row["reason"],
        "overrules": "{trace_id}, decided by {by}".format(**row["overrules"]) if row["overrules"] else "",
        "counts" if row["overruled"] else "verified": _standing(row),
        "workload": _joined(row["axes"], row["dtypes"], row["scalars"], row["layouts"]),
        "contents": ", ".join(f"{name} of the file with sha256 {sha256}" for name, sha256 in row["blobs"].items()),
        "config": spelled_map(row["config"]),
        "measured": f"{row['timestamp'].isoformat(sep=' ', timespec='seconds')} UTC, {where}",
        "source": row["solution_digest"][:12] + ("" if row["is_current"] else ", not the catalog's any more"),
        "trace": f"{row['trace_id']} of run {row['run_id']}",
    }


def _standing(row: dict[str, Any]) -> str:
    """Return ``yes`` if a pass is verified, else the reason it is not; for an overruled failure, the person and the reason."""
    from tilegym_db.records.verdicts import VERIFIED_TIERS

    if row["overruled"]:
        return "overruled by {by} on {timestamp:%Y-%m-%d}: {reason}".format(**row["overruled"])
    if row["status"] != "PASSED":
        return ""
    if row["is_verified"]:
        return "yes"
    if not row["is_current"]:
        return "no: the definition or the source has changed since"
    if row["revoked_by"]:
        return f"no: a failure revoked it, see tilegym-db show {row['revoked_by'][:8]}"
    if row["tier"] == "untimed":
        return "no: it omits an output, so it was verified but not timed"
    if row["tier"] not in VERIFIED_TIERS:
        return f"no: the {row['tier']} tier is not enough; run tilegym-db verify {row['solution']}"
    return "no: there is a newer pass of the same source, config and shape"


def _failure(failure: dict[str, Any]) -> dict[str, str]:
    where = f"{failure['output'] or ''}{list(failure['index']) if failure['index'] else ''}"
    values = f"expected {failure['expected']}, got {failure['got']}" if failure["expected"] or failure["got"] else ""
    offset = failure["offset"]
    return {
        "gate": failure["gate"],
        "shape": _joined(failure["axes"], failure["dtypes"]),
        "layout": spelled_map(failure["layouts"] or {}) or "all contiguous",
        "address": f"every tensor off its alignment, elements: {offset}" if offset else "",
        "contents": f"{failure['contents']}, seed {failure['seed']}",
        "first wrong": ": ".join(part for part in (where, values) if part),
        "worst row": "" if failure["worst_row"] is None else str(failure["worst_row"]),
    }


def _findings(row: dict[str, Any]) -> dict[str, str]:
    interval = ""
    if row["latency_us"] is not None:
        times = [spelled_number(row[key]) for key in ("latency_us", "ci_low_us", "ci_high_us")]
        interval = f"{times[0]} us ({times[1]} to {times[2]}), {row['samples']} samples by {row['timer']}"
    numbers = {key: row[key] for key in ("rel_fro", "worst_row_rel", "max_abs", "matched_ratio")}
    errors = {key: spelled_number(value) for key, value in numbers.items() if value is not None}
    against = [
        f"{spelled_number(c['ratio'])}x {c['with']}" + (" (the best so far)" if c["provides"] == "incumbent" else "")
        for c in row["comparisons"] or ()
    ]
    clock = [] if row["clock_mhz"] is None else [f"{row['clock_mhz']} MHz"]
    clock += ["slowed down at times, in rounds that were discarded"] if row["throttled"] else []
    light = "" if row["sol_ratio"] is None else f"{row['sol_ratio']:.1%}, which is {spelled_number(row['sol_us'])} us"
    envelope = f"{row['envelope_cases']} cases" if row["envelope_cases"] else ""
    dropped = len(row["envelope_dropped"] or ())
    return {
        "time": interval,
        "wall clock": "" if row["wall_us"] is None else f"{spelled_number(row['wall_us'])} us a call",
        "speed": ", ".join(against),
        "speed of light": light,
        "clock": ", ".join(clock),
        "errors": spelled_map(errors),
        "closest gate": "" if row["failure"] else row["gate"] or "",
        "envelope": envelope + (f", and {dropped} that the reference fails itself" if envelope and dropped else ""),
        "profiler": "" if row["profiled_us"] is None else f"{row['profiled_us']:.1f} us of device time a call (CUPTI)",
        "own kernels": "" if row["owned_share"] is None else f"{row['owned_share']:.1%} of the device time",
        "kernels": ", ".join(row["kernels"] or ()),
        "scan notes": "; ".join(row["scan_notes"] or ()),
    }


def _joined(*maps: dict[str, Any] | None) -> str:
    return "; ".join(spelled_map(item) for item in maps if item)


def _clipped(log: str) -> list[str]:
    """Indent the log's lines, and cut lines out of its middle beyond ``LOG_LINES``."""
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..." for line in log.rstrip().splitlines()]
    if len(lines) > LOG_LINES:
        half = LOG_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines cut, whole: --json ...", *lines[-half:]]
    return [f"  {line}" for line in lines]
