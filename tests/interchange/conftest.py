"""A data set in which nothing is wrong, and a separate store to import it into."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)

from tilegym_db.catalog import Catalog
from tilegym_db.interchange.flashinfer_export import Export, build_export
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import shipped_traces
from tilegym_db.records import Trace
from tilegym_db.store.journal import read_journal

# Not a test that is skipped: where the package is not installed there is nothing to hold the export against.
collect_ignore = [] if importlib.util.find_spec("flashinfer_bench") else ["test_flashinfer_bench.py"]


@pytest.fixture(scope="session")
def shipped() -> Catalog:
    return Catalog((shipped_root(),))


@pytest.fixture(scope="session")
def traces(shipped: Catalog) -> list[Trace]:
    """Return the shipped passes."""
    found = [trace for path in shipped_traces(shipped) for trace in read_journal(path).traces]
    return [trace for trace in found if trace.status == "PASSED"]


@pytest.fixture(scope="session")
def export(shipped: Catalog, traces: list[Trace]) -> Export:
    """Export the whole shipped catalog, with its shipped traces and without blobs."""
    return build_export(shipped, traces)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Write a FlashInfer-Trace data set in which nothing is wrong."""
    return (
        Tree(tmp_path / "small")
        .write(DEFINITION, definition())
        .write(SOLUTION, solution())
        .write(WORKLOADS, lines(of_workload(workload()), of_workload(workload("w-2", 3))))
        .write(TRACES, lines(trace()))
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty store of the user."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TILEGYM_DB_HOME", str(folder))
    return folder


@pytest.fixture
def new_tree(tmp_path: Path) -> Callable[[str], Tree]:
    """Make an empty data set of a name."""
    return lambda name: Tree(tmp_path / name)
