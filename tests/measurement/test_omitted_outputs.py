"""Solutions that omit an optional output: judged by what they give, without a time, and in no ranking whatever a trace says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError, UsageError
from tilegym_db.measurement.benchmark import bench, verify
from tilegym_db.measurement.instruments.calls import arguments_of
from tilegym_db.measurement.reproduce import reproduce
from tilegym_db.published.input_files import read_traces, trace_files
from tilegym_db.records import Trace
from tilegym_db.records.call import Call
from tilegym_db.records.solution import narrowed
from tilegym_db.records.trace import Performance
from tilegym_db.records.workload import Case
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish

WITH_PEAK: dict[str, Any] = {
    "name": "row_peak",
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}, "peak": {"shape": ["M"], "dtype": "T"}},
    "optional_outputs": ["peak"],
    "cost": {"flops": "2 * M * N", "bytes": "(2 * M * N + N + M) * sizeof(T)"},
    "reference": "# Source: https://example.org/row_peak.py#L1\n"
    "def run(x, weight, factor):\n    return x * weight * factor, x.amax(-1)\n",
}
WHOLE = """import torch


def run(x, weight, factor, out, peak):
    out.copy_(x * weight * factor)
    torch.amax(x, -1, out=peak)
"""
PART = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
STOCK = {"row_peak_stock": (WHOLE, {"role": "baseline", "provides": "stock"})}
OMITS = {"omits": ["peak"]}


@pytest.fixture
def catalog(make_catalog: Callable[..., Catalog], tmp_path: Path) -> Callable[..., Catalog]:
    """A catalog of ``row_peak`` with its stock code, a whole kernel, and these."""

    def make(**solutions: Any) -> Catalog:
        given = {**STOCK, "row_peak_whole": WHOLE, **solutions}
        return make_catalog(tmp_path / "catalog", given, definition=WITH_PEAK)

    return make


def screened(catalog: Catalog, home: Path, *names: str) -> dict[str, Trace]:
    report = bench(names, devices="cpu", catalog=catalog, store_home=home)
    return {trace.solution: trace for trace in report.traces}


@pytest.mark.turn("tilegym_db/measurement/plan.py", "tilegym_db/records/solution.py")  # a whole bench run
def test_solution_that_omits_an_output_is_judged_but_not_timed(catalog: Callable[..., Catalog], home: Path) -> None:
    wrong = PART.replace("* factor)", "* factor * 1.01)")
    gaps = PART.replace("out.copy_(x", "out[1:].copy_(x[1:]")
    records = catalog(
        row_peak_part=(PART, OMITS), row_peak_wrong=(wrong, OMITS), row_peak_returns=(
            "def run(x, weight, factor):\n    return x * weight * factor\n", {**OMITS, "destination_passing_style": False}
        ), row_peak_gaps=(gaps, OMITS),
    )  # fmt: skip
    found = screened(records, home)
    assert {name: (trace.status, trace.tier) for name, trace in found.items()} == {
        "row_peak_stock": ("PASSED", "screen"),
        "row_peak_whole": ("PASSED", "screen"),
        "row_peak_part": ("PASSED", "untimed"),
        "row_peak_returns": ("PASSED", "untimed"),
        "row_peak_wrong": ("INCORRECT_NUMERICAL", "untimed"),
        "row_peak_gaps": ("INCORRECT_NUMERICAL", "untimed"),
    }
    assert found["row_peak_part"].performance is None
    assert found["row_peak_part"].definition_digest == records.definition("row_peak").digest
    assert found["row_peak_part"].envelope is not None
    others = [item.other for item in found["row_peak_whole"].performance.comparisons]
    assert "row_peak_part" not in others
    again = bench(("row_peak_part",), devices="cpu", catalog=records, store_home=home)
    assert "row_peak_part" not in {trace.solution for trace in again.traces}


def test_an_output_that_is_not_optional_cannot_be_omitted(catalog: Callable[..., Catalog]) -> None:
    records = catalog(row_peak_bad=("def run(x, weight, factor, peak): pass\n", {"omits": ["out"]}))
    with pytest.raises(TilegymDBError, match="row_peak"):
        records.solution("row_peak_bad")


@pytest.mark.turn("tilegym_db/measurement/plan.py")  # a promotion; the screen of it is tested daily
def test_promotion_of_an_omitted_output_is_refused_by_name(catalog: Callable[..., Catalog], home: Path) -> None:
    records = catalog(row_peak_part=(PART, OMITS))
    with raises(UsageError, "solution_not_timed", "row_peak_part omits peak"):
        verify(("row_peak_part",), devices="cpu", catalog=records, store_home=home, allow_unsandboxed=True)
    screened(records, home)
    report = verify((), devices="cpu", catalog=records, store_home=home, allow_unsandboxed=True, quick=True)
    assert {trace.solution for trace in report.traces} == {"row_peak_stock", "row_peak_whole"}
    assert any("omits peak" in skipped.reason for skipped in report.plan.skipped if skipped.solution == "row_peak_part")


@pytest.mark.turn("tilegym_db/measurement/plan.py")  # a promotion; the screen of it is tested daily
def test_ranking_leaves_out_omitted_outputs_even_if_promoted(
    catalog: Callable[..., Catalog], home: Path, tmp_path: Path
) -> None:
    records = catalog(row_peak_part=(PART, OMITS))
    found = screened(records, home)
    forged = _promoted(found["row_peak_part"], found["row_peak_whole"].performance, "forged", 0.01)
    honest = _promoted(found["row_peak_whole"], found["row_peak_whole"].performance, "honest", 1.0)
    with Journal("forged", home) as journal:
        journal.append(forged)
        journal.append(honest)
    with open_store(home, catalog=records) as store:
        ingest(store)
        kept = store.rows("SELECT solution, tier FROM traces WHERE solution = 'row_peak_part' ORDER BY tier")
        assert [row["tier"] for row in kept] == ["promotion", "untimed"]
        for view in ("standing", "verified", "best", "best_per_solution", "leaderboard", "promotable"):
            rows = store.rows(f"SELECT DISTINCT solution FROM {view}")
            assert "row_peak_part" not in {row["solution"] for row in rows}, view
        assert [row["solution"] for row in store.rows("SELECT solution FROM best")] == ["row_peak_whole"]
        report = publish(store, "cpu", tmp_path / "published")
        assert (report.entries, report.traces) == (1, 1)
        assert report.left_out["it omits an output, so its times are compared with nothing"] == 1
    published = [trace for path in trace_files(report.folder) for trace in read_traces(path.read_bytes(), path)]
    assert {trace.solution for trace in published} == {"row_peak_whole"}


def _promoted(trace: Trace, performance: Performance, run: str, factor: float) -> Trace:
    times = {name: getattr(performance, name) * factor for name in ("latency_us", "ci_low_us", "ci_high_us")}
    return trace.model_copy(
        update={
            "trace_id": f"00000000-0000-0000-0000-{run:0>12}",
            "run_id": run,
            "tier": "promotion",
            "sandbox_level": 3,
            "performance": performance.model_copy(update=times),
        }
    )


def test_failure_without_the_output_is_reproduced_for_a_tool(catalog: Callable[..., Catalog]) -> None:
    records = catalog(row_peak_part=(PART, OMITS))
    found = reproduce(
        "row_peak_part", axes={"M": 5, "N": 7}, dtypes={"T": "float32"}, scalars={"factor": 0.5}, layouts={},
        contents="normal", seed=1, gpu="cpu", catalog=records,
    )  # fmt: skip
    assert found.failure is None
    assert found.verdict is not None
    view = narrowed(records.definition("row_peak"), ("peak",))
    case = Case(Call("row_peak", {"M": 5, "N": 7}, {"T": "float32"}, scalars={"factor": 0.5}))
    assert list(arguments_of(view, case, "cpu")) == ["x", "weight", "factor", "out"]
