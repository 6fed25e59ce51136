"""Compares two runs on one page: faster, slower, newly failing or passing, and measured in one run only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from tilegym_db.errors import NotFoundError, did_you_mean
from tilegym_db.store.queries import report_rows as queries

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

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
    """Read two runs by their ids or by prefixes of the ids.

    Raises:
        NotFoundError: there is no such run, or several begin so.
    """
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
