"""FlashInfer-Bench's own code reads our export. Collected where its package is installed (see conftest.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tilegym_db.integrations.interchange.flashinfer_export import Export
from tilegym_db.integrations.interchange.writing import write_tree

HAS_VALIDATE = importlib.util.find_spec("flashinfer_bench.data.validate") is not None
"""Release 0.1.2 has none; later sources do."""


def test_its_loader_takes_the_whole_export(export: Export, tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    write_tree(tmp_path / "out", export.files, export.blobs)
    loaded = TraceSet.from_path(str(tmp_path / "out"))
    groups = (loaded.solutions, loaded.workloads, loaded.traces)
    counts = [len(loaded.definitions), *(sum(map(len, group.values())) for group in groups)]
    assert counts == [export.counts[kind] for kind in ("definition", "solution", "workload", "trace")]


if HAS_VALIDATE:

    def test_its_validate_finds_no_error_in_the_whole_export(export: Export, tmp_path: Path) -> None:
        from flashinfer_bench.data.validate import validate_dataset

        write_tree(tmp_path / "out", export.files, export.blobs)
        reports = str(tmp_path / "reports")
        report = validate_dataset(
            dataset=str(tmp_path / "out"), disable_gpu=True, output_folder=reports, outputs=["json"]
        )
        assert {name for name, item in report.definitions.items() if item.status == "error"} == set()
