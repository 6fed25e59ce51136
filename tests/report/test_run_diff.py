"""A page of two runs: what changed, by how much, and only where that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import chromium_page, needs_chromium
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError
from tilegym_db.records import Trace
from tilegym_db.records.trace import new_trace_id
from tilegym_db.report.weekly import CHANGES, change_of, diff_page, read_diff
from tilegym_db.store.connection import Store
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import read_traces

A, B = "20261101T000000-h200-aaaaaa", "20261102T000000-h200-bbbbbb"


def row(a: tuple[float, float, float] | str | None, b: tuple[float, float, float] | str | None) -> dict[str, Any]:
    """A pair by its (low, median, high) in each run, by the status that it failed with, or None where it is missing."""
    content: dict[str, Any] = {}
    for name, value in (("a", a), ("b", b)):
        timed = isinstance(value, tuple)
        content[f"{name}_status"] = "PASSED" if timed else value
        low, middle, high = value if isinstance(value, tuple) else (None, None, None)
        content |= {f"{name}_low_us": low, f"{name}_us": middle, f"{name}_high_us": high}
    return content


@pytest.mark.parametrize(
    ("a", "b", "change", "ratio"),
    [
        ((9, 10, 11), (19, 20, 21), "slower", 2.0),
        ((19, 20, 21), (9, 10, 11), "faster", 0.5),
        ((9, 10, 11), (10, 11, 12), "not known", 1.1),
        ((9, 10, 11), "INCORRECT_NUMERICAL", "fails now", None),
        ("TIMEOUT", (9, 10, 11), "passes now", None),
        ("TIMEOUT", "TIMEOUT", "fails in both", None),
        (None, (9, 10, 11), "only in B", None),
        ((9, 10, 11), None, "only in A", None),
    ],
)
def test_a_difference_is_named_only_where_intervals_lie_apart(a: Any, b: Any, change: str, ratio: float | None) -> None:
    assert change_of(row(a, b)) == (change, ratio)


@pytest.fixture(scope="module")
def two(store: Store, catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with two runs of shipped traces: the second repeats all but one of them, and one is twice as slow there."""
    home = tmp_path_factory.mktemp("runs")
    (ids,) = store.rows("SELECT list(trace_id ORDER BY trace_id)[:6] AS ids FROM best WHERE definition = 'softmax'")
    traces = list(read_traces(store, ids["ids"]).values())
    for run, measured in ((A, traces), (B, traces[:-1])):
        with Journal(run, home) as journal:
            for number, trace in enumerate(measured):
                content = trace.to_dict()
                key = (run, trace.tier, number, trace.solution_digest, trace.config, trace.workload_uuid)
                content |= {"run_id": run, "trace_id": new_trace_id(*key), "attempt": number}
                if run == B and number == 0:
                    for name in ("latency_us", "ci_low_us", "ci_high_us"):
                        content["performance"][name] *= 2
                if run == B:
                    content["libs"] = {**trace.libs, "triton": "9.9.9"}
                journal.append(Trace.from_dict(content))
    with open_store(home, catalog=catalog) as writable:
        ingest(writable)
    with open_store(home, read_only=True, catalog=catalog) as opened:
        yield opened


@pytest.mark.turn("tilegym_db/report/")  # measures twice
def test_two_runs_differ_if_one_is_slower_or_lacks_a_measurement(two: Store) -> None:
    diff = read_diff(two, A, B)
    assert {change: len(diff.of(change)) for change in CHANGES if diff.of(change)} == {
        "slower": 1, "not known": 4, "only in A": 1,
    }  # fmt: skip
    assert diff.of("slower")[0].ratio == pytest.approx(2)
    assert [name for name, *_ in diff.circumstances] == ["triton"]


@pytest.mark.turn("tilegym_db/report/")  # fills a database
def test_a_run_against_itself_has_no_difference(two: Store) -> None:
    diff = read_diff(two, A, A)
    assert {one.change for one in diff.differences} == {"not known"}
    assert diff.circumstances == []


def test_run_is_found_by_an_id_prefix_and_unknown_ones_refused(two: Store) -> None:
    assert read_diff(two, A[:-1], B).a["run_id"] == A
    with raises(NotFoundError, "run_unknown", "'x'"):
        read_diff(two, "x", A)
    with raises(NotFoundError, "run_ambiguous", "'2026'"):
        read_diff(two, "2026", A)


@needs_chromium
@pytest.mark.slow
@pytest.mark.nightly
def test_page_opens_offline_and_axe_finds_nothing_serious(two: Store, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    diff = read_diff(two, A, B)
    path = tmp_path / "diff.html"
    path.write_text(diff_page(diff, version="0.2.0"))
    with chromium_page(viewport={"width": 1280, "height": 900}) as (tab, wrong):
        tab.goto(path.as_uri())
        shown = {change: tab.locator(f"#{change.replace(' ', '-')} tbody tr").count() for change in CHANGES}
        found = Axe().run(tab).response
        tab.set_viewport_size({"width": 390, "height": 844})
        sideways = tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert shown == {change: len(diff.of(change)) for change in CHANGES}
    assert [rule["id"] for rule in found["violations"] if rule["impact"] in ("serious", "critical")] == []
    assert (wrong, sideways) == ([], False)


def test_a_hostile_reason_is_text(two: Store) -> None:
    diff = read_diff(two, A, B)
    hostile = "<script>alert(1)</script>"
    first = diff.differences[0]
    spoilt = type(first)({**first.row, "a_status": "TIMEOUT", "a_reason": hostile}, "fails in both")
    page = diff_page(type(diff)(diff.a, diff.b, [spoilt]), version="0.2.0")
    assert hostile not in page
    assert "&lt;script&gt;alert(1)" in page
