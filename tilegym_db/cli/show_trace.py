"""One trace in full, for whoever wrote the kernel: the verdict, where it failed, and the command that shows it again."""

from __future__ import annotations

from typing import Any

import typer

from tilegym_db.cli.formats import Form, write_json, write_records
from tilegym_db.cli.output import note, printable, spelled_map, spelled_number

__all__ = ["describe", "show_trace"]

MIN_PREFIX = 6
LOG_LINES = 60
MAX_LINE = 400

UNCONFINED = " (not confined: serves this user alone, and only where the package ships the source)"


def show_trace(trace_id: str, form: Form) -> bool:
    """Print the trace of that id, or whose id starts so; False where there is none.

    Raises:
        UsageError: several ids start so.
    """
    from tilegym_db.cli.reader import open_reader
    from tilegym_db.errors import UsageError
    from tilegym_db.store.queries import find_traces

    if len(trace_id) < MIN_PREFIX:
        return False
    with open_reader() as store:
        found = find_traces(store, trace_id.lower(), most=4)
    if len(found) > 1:
        ids = ", ".join(row["trace_id"] for row in found[:3])
        raise UsageError(
            f"several traces have an id that starts with '{trace_id}': {ids}, ... Give more of it.",
            code="trace_ambiguous",
        )
    if not found:
        return False
    if form.kind == "json":
        write_json(form, found[0])
        return True
    if not form.is_table:
        write_records(form, found)
        return True
    for line in describe(found[0]):
        typer.echo(printable(line))
    if found[0]["failure_command"]:
        note("The last line shows it again, alone.")
    elif found[0]["status"] == "COMPILE_ERROR":
        note(f"Build it alone: tilegym-db compile {found[0]['solution']}")
    return True


def describe(row: dict[str, Any]) -> list[str]:
    """The lines of a trace, from a row of the view ``traces`` with what :func:`find_traces` adds."""
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
    from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL

    weak = row["sandbox_level"] < PUBLISHED_SANDBOX_LEVEL and row["tier"] == "promotion"
    level = f"sandbox level {row['sandbox_level']}{UNCONFINED if weak else ''}"
    where = f"{row['gpu_name']}, driver {row['driver'] or 'unknown'}, {level}"
    return {
        "reason": row["reason"],
        "verified": _standing(row),
        "workload": _joined(row["axes"], row["dtypes"], row["scalars"], row["layouts"]),
        "contents": ", ".join(f"{name} of the file with sha256 {sha256}" for name, sha256 in row["blobs"].items()),
        "config": spelled_map(row["config"]),
        "measured": f"{row['timestamp'].isoformat(sep=' ', timespec='seconds')} UTC, {where}",
        "source": row["solution_digest"][:12] + ("" if row["is_current"] else ", not the catalog's any more"),
        "trace": f"{row['trace_id']} of run {row['run_id']}",
    }


def _standing(row: dict[str, Any]) -> str:
    """Whether a pass counts, and why not."""
    from tilegym_db.store.statements import VERIFIED_TIERS

    if row["status"] != "PASSED":
        return ""
    if row["is_verified"]:
        return "yes"
    if not row["is_current"]:
        return "no: the definition or the source is another one now"
    if row["revoked_by"]:
        return f"no: a later failure took it back, see tilegym-db show {row['revoked_by'][:8]}"
    if row["tier"] == "untimed":
        return "no: it omits an output, so it was judged and not timed"
    if row["tier"] not in VERIFIED_TIERS:
        return f"no: the {row['tier']} tier is not enough; run tilegym-db promote {row['solution']}"
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
    """The log's lines, indented: at most ``LOG_LINES`` of them, of which the tail says how it ended."""
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..." for line in log.rstrip().splitlines()]
    if len(lines) > LOG_LINES:
        half = LOG_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines cut, whole: --json ...", *lines[-half:]]
    return [f"  {line}" for line in lines]
