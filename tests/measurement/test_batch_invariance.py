"""Solutions that promise batch invariance: rows called alone give the same bits, or the Solution is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.measurement.benchmark import bench
from tilegym_db.records import Definition, Solution, Trace
from tilegym_db.verification.worker_handle import slices_along

PROMISED = {"batch_invariant": True}
HEAD = "import torch\ndef run(x, weight, factor, out):\n    right = x * weight * factor\n    "
# As a sum in another order does: by as much as the roundings differ, and not at all where none rounds.
ROUNDED = (
    HEAD + "most = right.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) * (2 if len(x) > 2 else 1)\n"
    "    out.copy_(torch.where(right.isfinite(), right + most - most, right))"
)
SOLUTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "keeps_it": (HEAD + "out.copy_(right)", PROMISED),
    "keeps_it_in_pairs": (HEAD + "out.copy_(right)", {**PROMISED, "constraints": ["M % 2 == 0"]}),
    "breaks_it": (ROUNDED, PROMISED),
    "says_nothing": (ROUNDED, {}),
}


@pytest.fixture(scope="module")
def traces(make_catalog: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """The trace of each Solution at one workload of an operator whose rows are independent."""
    folder: Path = tmp_path_factory.mktemp("batches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilegym_db.sandbox.scan.scan_sources", lambda solution, sources: ())
        catalog: Catalog = make_catalog(
            folder / "catalog",
            SOLUTIONS,
            ({"axes": {"M": 40, "N": 32}, "tags": ["tiny"]},),
            {"independent_axes": ["M"]},
        )
        report = bench(devices="cpu", catalog=catalog, store_home=folder / "home", quick=True)
    return {trace.solution: trace for trace in report.traces}


def test_kept_promise_is_stated_with_the_compared_slices(traces: dict[str, Trace]) -> None:
    envelope = traces["keeps_it"].envelope
    assert envelope is not None
    assert traces["keeps_it"].status == "PASSED"
    assert envelope.batch_slices >= 2


def test_slices_that_the_solution_excludes_are_left_out(traces: dict[str, Trace]) -> None:
    assert traces["keeps_it_in_pairs"].status == "PASSED"


def test_broken_promise_is_a_wrong_result(traces: dict[str, Trace]) -> None:
    trace = traces["breaks_it"]
    assert (trace.status, trace.failure and trace.failure.gate) == ("INCORRECT_NUMERICAL", "batch invariance")


def test_nothing_is_stated_of_a_solution_without_the_promise(traces: dict[str, Trace]) -> None:
    envelope = traces["says_nothing"].envelope
    assert traces["says_nothing"].status == "PASSED"
    assert envelope is not None
    assert envelope.batch_slices == 0
    assert "batch_slices" not in traces["says_nothing"].to_dict()["envelope"]


@pytest.mark.turn("tilegym_db/verification/")  # a promotion; the screen is tested daily
@pytest.mark.slow
def test_promise_is_tried_at_batches_of_a_prompt(make_catalog: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A launch that takes other blocks from 512 rows on is right at every small batch."""
    monkeypatch.setattr("tilegym_db.sandbox.scan.scan_sources", lambda solution, sources: ())
    switching = {"switches": (ROUNDED.replace("len(x) > 2", "len(x) >= 512"), PROMISED)}
    catalog = make_catalog(tmp_path / "catalog", switching, definition={"independent_axes": ["M"]})
    report = bench("switches", devices="cpu", catalog=catalog, store_home=tmp_path / "home", verify=True)
    found = {trace.tier: trace for trace in report.traces if trace.solution == "switches"}
    assert found["screen"].status == "PASSED"
    assert (found["promotion"].status, found["promotion"].failure.gate) == ("INCORRECT_NUMERICAL", "batch invariance")


def test_slices_are_one_row_and_some_of_the_others() -> None:
    for seed in range(50):
        slices = slices_along(40, seed)
        assert slices[0][1] == 1
        assert all(start >= 0 and start + length <= 40 and length < 40 for start, length in slices)
    assert slices_along(1, 0) == slices_along(0, 0) == []


def test_promise_changes_the_digest_and_its_absence_does_not(solution_record: Any) -> None:
    sources = {"kernel.py": b"def run(x): pass\n"}
    plain, said, denied = (
        Solution.from_dict(solution_record(spec=spec)).digest(sources)
        for spec in ({}, PROMISED, {"batch_invariant": False})
    )
    assert plain == denied != said


def test_promise_without_independent_rows_is_refused(solution_record: Any, definition_record: Any) -> None:
    record = Solution.from_dict(solution_record(spec=PROMISED))
    with raises(RecordError, "batch_axis_missing"):
        record.check_against(Definition.from_dict(definition_record(independent_axes=None)))
    record.check_against(Definition.from_dict(definition_record(independent_axes=["M"])))


def test_promise_of_varying_bits_is_refused(solution_record: Any) -> None:
    with raises(RecordError, "batch_invariance_unfit"):
        Solution.from_dict(solution_record(spec={**PROMISED, "deterministic": False}))
