"""The benchmark whose author copies kernels: what it hands in, and what the loop starts from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.kernelize_from_catalog import (
    hand_in,
    install_without_kernels,
    interrupted_after,
    kernels_for,
    search_path,
    summary,
)
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.paths import shipped_root


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


def test_the_author_hands_in_one_kernel_after_the_other(catalog: Catalog, tmp_path: Path) -> None:
    known = kernels_for(catalog, "softmax", "triton")
    for number, kernel in enumerate(known, start=1):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert hand_in("Write a triton kernel for `softmax` on h200.", folder, catalog) == kernel.name
        assert sorted(path.name for path in folder.iterdir()) == ["kernel.py", "solution.json"]
        assert SolutionFiles.read(folder).digest == kernel.digest
    beyond = tmp_path / str(len(known) + 1)
    beyond.mkdir()
    with pytest.raises(SystemExit, match="all were handed in"):
        hand_in("Write a triton kernel for `softmax` on h200.", beyond, catalog)


def test_the_loop_starts_with_every_baseline_and_no_kernel(catalog: Catalog, tmp_path: Path) -> None:
    site = install_without_kernels(tmp_path, catalog)
    installed = Catalog((site / "tilegym_db" / "_data",))
    assert {one.record.spec.role for one in installed.solutions.values()} == {"baseline"}
    wanted = {name: one.digest for name, one in catalog.solutions.items() if one.record.spec.role == "baseline"}
    assert {name: one.digest for name, one in installed.solutions.items()} == wanted
    assert set(installed.definitions) == set(catalog.definitions)


def test_the_summary_has_coverage_of_what_was_kept_and_a_row_for_each() -> None:
    share = {"median": 0.25, "low": 0.2, "high": 0.3, "profiles": 5, "time_of": "gpu"}
    none = {**share, "median": 0.0}
    kept = {"definition": "a", "decision": "keep", "before": none, "after": share, "seconds": 60.0, "reason": "rose"}
    refused = {"solution": "b_x", "verdict": "refused", "stage": "compiled", "gate": "screen", "reason": "wrong"}
    attempts = [{**refused, "wall_s": 9.0, "device_s": 7.0}]
    discarded = {**kept, "definition": "b", "decision": "discard", "before": share, "after": None}
    first, covered, *rows = summary([kept, discarded], attempts, 120.0).splitlines()
    assert (first, covered) == ("2.0 minutes, 2 experiments", "coverage of gpu time: 0.0% before, 25.0% after")
    assert [line.split()[:2] for line in rows] == [["a", "keep"], ["b", "discard"], ["attempt", "b_x:"]]
    assert rows[-1].endswith("refused after 'compiled' screen wrong (9.0 s, 7.0 s of them measuring)")


@pytest.mark.parametrize("text", ["", "import signal; signal.signal(signal.SIGINT, lambda *_: exit(3)); "])
def test_a_loop_whose_time_is_up_is_interrupted_and_one_that_ends_has_its_status(text: str) -> None:
    assert interrupted_after([sys.executable, "-c", f"{text}import time; time.sleep(60)"], 2.0) is None
    assert interrupted_after([sys.executable, "-c", "raise SystemExit(4)"], None) == 4


def test_packages_are_found_where_this_process_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert search_path(Path("/site")) == f"/site{os.pathsep}/packages"
