"""Summarises a period or two runs, from SQL alone: what changed, the fastest kernels, and what is open."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from tilegym_db.errors import NotFoundError, did_you_mean
from tilegym_db.store.queries import report_rows as queries
from tilegym_db.store.queries.measured import leaderboard_rows

if TYPE_CHECKING:
    from tilegym_db.store.connection import Store

FEW = 16
"""Maximum number of (operator, GPU) rows listed one by one. The short form groups more rows by family and GPU."""
SHOWN = 8
"""Maximum number of rows in a shortened table, which states how many it leaves out."""

Rows = Sequence[Mapping[str, Any]]
Column = tuple[str, str | Callable[[Mapping[str, Any]], object]]
"""A column's heading, and the key of its values or a function that makes them from a row."""


def weekly(store: Store, since: datetime, *, whole: bool = False, see_all: str = "") -> str:
    """Return the changes since ``since`` (UTC), the state of each GPU, and open work, as Markdown.

    The short form groups kernels by family and shows the first rows of long tables. Each shortened table states what it
    leaves out and names ``see_all``, the command that prints the ``whole``.
    """
    form = _Form(whole, see_all)
    kernels = queries.kernel_rows(store, since)
    changes = queries.change_rows(store, since)
    revoked = [row for row in changes if row["kind"] == "revocation"]
    slower = [row for row in changes if row["kind"] == "regression"]
    attempts, open_rows = queries.attempt_rows(store, since), queries.open_rows(store)
    shapes, awards = (sum(row[name] for row in kernels) for name in ("shapes", "awards"))
    parts = [
        f"# tilegym-db since {since.date().isoformat()}",
        f"Kernels verified at {shapes} shapes (once a GPU) of {len({row['definition'] for row in kernels})} operators, "
        f"at {awards} of them with an award. Revocations: {len(revoked)}. Regressions: {len(slower)}. "
        f"Attempts: {sum(row['attempts'] for row in attempts)}. Open: {len(open_rows)}.",
        "## Kernels",
        _kernels(store, since, kernels, form),
        "## Revocations and regressions",
        form.table(TAKEN_BACK, [*revoked, *slower], "No revocation or regression."),
        "## Attempts",
        form.table(ATTEMPTS, attempts, "No attempt was submitted in this time."),
        "## Models",
        _models([row for row in queries.model_rows(store) if row["timestamp"] >= since], form),
        "## Where each GPU stands",
        form.table(GPUS, queries.gpu_rows(store), "Nothing is verified yet."),
        *(("## Leaders", form.table(LEADERS, _leaders(store), "Nothing is verified yet.")) if whole else ()),
        "## Furthest from the speed of light",
        form.table(FURTHEST, queries.furthest_rows(store), "Nothing is verified yet."),
        "## Open",
        _open(open_rows, form),
    ]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Form:
    """The form of a report: full or short, and the command that prints the full form."""

    whole: bool
    see_all: str

    def table(self, columns: Sequence[Column], rows: Rows, empty: str) -> str:
        """Return a table of the rows. The short form has the first rows and the number of the rest."""
        shown = rows if self.whole else rows[:SHOWN]
        left_out = len(rows) - len(shown)
        return _table(columns, shown, empty) + (self.rest(f"{left_out} more of {len(rows)} rows") if left_out else "")

    def rest(self, what: str) -> str:
        """Return the line below a table that states what it leaves out."""
        return f"\n\n{what}" + (f": `{self.see_all}`" if self.see_all else "") + "."


def _share(key: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda row: None if row[key] is None else f"{row[key]:.0%}"


def _kernels(store: Store, since: datetime, kernels: Rows, form: _Form) -> str:
    """Return the verified kernels: one line per operator and GPU, or per family and GPU if there are many."""
    empty = "No kernel was verified."
    if form.whole or len(kernels) <= FEW:
        return _table([("operator", "definition"), *KERNELS], kernels, empty)
    families = queries.family_rows(store, since)
    columns = [("family", "op_type"), ("operators", "operators"), *KERNELS]
    return _table(columns, families, empty) + form.rest(
        f"{len(kernels)} rows of operators and GPUs gathered in {len(families)}"
    )


def _models(rows: Rows, form: _Form) -> str:
    """Return every mode of every run, or one line per model and GPU of timings and speedup claims if there are many."""
    if form.whole or len(rows) <= FEW:
        return _table(MODELS, rows, NO_MODEL)
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["way"] == "patched":
            runs[row["model"], row["gpu"]].append(row)
    gathered = [
        {
            "model": model,
            "gpu": gpu,
            "runs": len(here),
            "faster": sum(row["claim"] == "faster" for row in here),
            "speedup": max(row["speedup"] for row in here),
            "gpu_share": max((row["gpu_share"] for row in here if row["gpu_share"] is not None), default=None),
        }
        for (model, gpu), here in runs.items()
    ]
    rest = f"{len(rows)} rows gathered in {len(gathered)}" + (f", {SHOWN} of them here" if gathered[SHOWN:] else "")
    return _table(MODELS_GATHERED, gathered[:SHOWN], "") + form.rest(rest)


def _leaders(store: Store) -> list[dict[str, Any]]:
    """Return the solution that is fastest on most shapes of each operator and GPU. Rows come with most wins first."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in leaderboard_rows(store):
        first.setdefault((row["definition"], row["gpu"]), row)
    return list(first.values())


def _open(rows: Rows, form: _Form) -> str:
    """Return open work: every row, or the number of each kind with the first names."""
    if form.whole or len(rows) <= SHOWN:
        return _table(OPEN, rows, "Nothing is open.")
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"], row["gpu"]].append(row["solution"] or row["definition"])
    gathered = [
        {"kind": kind, "gpu": gpu, "count": len(names), "first": ", ".join(names[:3]) + (", ..." if names[3:] else "")}
        for (kind, gpu), names in kinds.items()
    ]
    return _table(GATHERED, gathered, "") + form.rest(f"{len(rows)} rows gathered in {len(gathered)}")


KERNELS: tuple[Column, ...] = (
    ("GPU", "gpu"),
    ("languages", "languages"),
    ("shapes verified", "shapes"),
    ("awards", "awards"),
    ("best ratio", "ratio"),
    ("of", "solution"),
)
TAKEN_BACK: tuple[Column, ...] = (
    ("day", "day"),
    ("what", "kind"),
    ("operator", "definition"),
    ("solution", "solution"),
    ("GPU", "gpu"),
    ("cases", "cases"),
    ("times slower", "ratio"),
)
ATTEMPTS: tuple[Column, ...] = (
    ("verdict", "verdict"),
    ("gate", "gate"),
    ("attempts", "attempts"),
    ("tasks", "tasks"),
)
MODELS: tuple[Column, ...] = (
    ("model", "model"),
    ("GPU", "gpu"),
    ("batch x prompt + new", lambda row: f"{row['batch']} x {row['prompt_tokens']} + {row['new_tokens']}"),
    ("way", "way"),
    ("tokens/s", "tokens_per_s"),
    ("speedup", "speedup"),
    ("claim", "claim"),
    ("GPU time in verified kernels", _share("gpu_share")),
)
MODELS_GATHERED: tuple[Column, ...] = (
    ("model", "model"),
    ("GPU", "gpu"),
    ("runs", "runs"),
    ("claimed faster", "faster"),
    ("best speedup", "speedup"),
    ("most GPU time in verified kernels", _share("gpu_share")),
)
NO_MODEL = "No model was measured in this time."
GPUS: tuple[Column, ...] = (
    ("GPU", "gpu"),
    ("operators", "operators"),
    ("shapes", "shapes"),
    ("fastest in triton", "triton"),
    ("tilelang", "tilelang"),
    ("cutile", "cutile"),
    ("python", "python"),
)
LEADERS: tuple[Column, ...] = (
    ("operator", "definition"),
    ("GPU", "gpu"),
    ("solution", "solution"),
    ("language", "language"),
    ("fastest at", lambda row: f"{row['wins']} of {row['shapes']}"),
    ("speedup", "geomean_speedup"),
    ("lowest", "lowest_speedup"),
    ("highest", "highest_speedup"),
    ("of the speed of light", _share("geomean_sol_ratio")),
)
FURTHEST: tuple[Column, ...] = (
    ("operator", "definition"),
    ("GPU", "gpu"),
    ("solution", "solution"),
    ("largest shape", "axes_key"),
    ("us", "latency_us"),
    ("of the speed of light", _share("sol_ratio")),
)
OPEN: tuple[Column, ...] = (
    ("what", "kind"),
    ("operator", "definition"),
    ("solution", "solution"),
    ("GPU", "gpu"),
)
GATHERED: tuple[Column, ...] = (
    ("what", "kind"),
    ("GPU", "gpu"),
    ("how many", "count"),
    ("first", "first"),
)


def _table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], empty: str) -> str:
    lines = [
        "| " + " | ".join(_cell(row[value] if isinstance(value, str) else value(row)) for _, value in columns) + " |"
        for row in rows
    ]
    head = "| " + " | ".join(name for name, _ in columns) + " |"
    return "\n".join([head, "|---" * len(columns) + "|", *lines]) if lines else empty


def _cell(value: object) -> str:
    """Return a value in which no character ends the table cell or row."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())


# ---- two runs -------------------------------------------------------------------------------------
# Compares two runs on one page: faster, slower, newly failing or passing, and measured in one run only.

Change = Literal["fails now", "slower", "faster", "passes now", "not known", "only in A", "only in B", "fails in both"]
CHANGES: dict[Change, str] = {
    "fails now": "passed in A and failed in B",
    "slower": "the whole interval of B lies above that of A",
    "passes now": "failed in A and passed in B",
    "faster": "the whole interval of B lies below that of A",
    "not known": "intervals overlap, or a time is missing: no difference is known",
    "fails in both": "failed in both",
    "only in A": "B did not measure it",
    "only in B": "A did not measure it",
}
"""The kinds of difference with their meanings, in the order of the page."""


@dataclass(frozen=True)
class Difference:
    """One solution, config and shape in two runs; ``ratio`` is the time in B divided by that in A."""

    row: Mapping[str, Any]
    change: Change
    ratio: float | None = None


@dataclass(frozen=True)
class RunDiff:
    """Two runs with their times and machines, their differences, and the differences of their environments."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    differences: Sequence[Difference]

    def of(self, change: Change) -> list[Difference]:
        """Return the differences of one kind, largest change of time first."""
        return sorted(
            (one for one in self.differences if one.change == change),
            key=lambda one: -abs(math.log(one.ratio)) if one.ratio else 0.0,
        )

    @property
    def circumstances(self) -> list[tuple[str, str, str]]:
        """Return (name, in A, in B) of each difference in machine and packages. These alone can change a time."""
        found = [(name, str(self.a[name]), str(self.b[name])) for name in ("gpu_name", "driver", "cuda", "host")]
        packages = sorted({*self.a["libs"], *self.b["libs"]})
        found += [(name, self.a["libs"].get(name, "none"), self.b["libs"].get(name, "none")) for name in packages]
        return [line for line in found if line[1] != line[2]]


def read_diff(store: Store, a: str, b: str) -> RunDiff:
    """Read two runs by their ids or by prefixes of the ids."""
    known = queries.run_ids(store)
    one, two = (_meant(run, known) for run in (a, b))
    differences = [Difference(row, *change_of(row)) for row in queries.rows_of_two_runs(store, one, two)]
    return RunDiff(queries.run_facts(store, one), queries.run_facts(store, two), differences)


def change_of(row: Mapping[str, Any]) -> tuple[Change, float | None]:
    """Return the kind of difference between two measurements of a pair, and time B / time A if both have a time."""
    if row["a_status"] is None:
        return "only in B", None
    if row["b_status"] is None:
        return "only in A", None
    passed_a, passed_b = row["a_status"] == "PASSED", row["b_status"] == "PASSED"
    if not (passed_a and passed_b):
        return ("fails now" if passed_a else "passes now" if passed_b else "fails in both"), None
    if row["a_us"] is None or row["b_us"] is None:
        return "not known", None
    ratio = row["b_us"] / row["a_us"]
    if row["b_low_us"] > row["a_high_us"]:
        return "slower", ratio
    return ("faster" if row["b_high_us"] < row["a_low_us"] else "not known"), ratio


def diff_page(diff: RunDiff, *, version: str) -> str:
    """Return the page as HTML text, without a script and without external files."""
    folder = files("tilegym_db.report")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        folder.joinpath("run_diff.html.j2").read_text("utf-8")
    )
    parts = [(change, meaning, diff.of(change)) for change, meaning in CHANGES.items()]
    return template.render(
        diff=diff, parts=parts, version=version, style=folder.joinpath("page.css").read_text("utf-8")
    )


def _meant(run: str, known: Sequence[str]) -> str:
    if run in known:
        return run
    found = [name for name in known if name.startswith(run)]
    if len(found) == 1:
        return found[0]
    newest = f" The newest: {', '.join(known[:3])}." if known else " The store has none."
    if found:
        raise NotFoundError(f"{len(found)} runs begin with '{run}'.{newest}", code="run_ambiguous")
    raise NotFoundError(f"no run '{run}'.{did_you_mean(run, known)}{newest}", code="run_unknown")
