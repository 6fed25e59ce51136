"""One operator of the catalog in FlashInfer-Bench's terms; test_export.py has the whole catalog."""

from __future__ import annotations

import json
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.interchange.checks import check_definition, check_solution, check_trace
from tilegym_db.interchange.flashinfer_export import build_export
from tilegym_db.interchange.flashinfer_trace import RULES
from tilegym_db.interchange.importing import import_data_set, write_tree
from tilegym_db.published.input_files import read_traces


def test_operator_is_exported_by_the_rules_and_imported(shipped: Catalog, home: Path, tmp_path: Path) -> None:
    name = "swiglu"
    file = shipped.roots[0] / "traces" / "h200" / "activation" / f"{name}.jsonl.gz"
    traces = [trace for trace in read_traces(file.read_bytes(), file) if trace.status == "PASSED"]
    export = build_export(shipped, traces, names=(name,))
    checks = {
        "definitions": check_definition,
        "solutions": check_solution,
        "workloads": check_trace,
        "traces": check_trace,
    }
    found = dict.fromkeys(checks, 0)
    for path, content in export.files.items():
        folder = path.partition("/")[0]
        for line in [content] if folder in ("definitions", "solutions") else content.splitlines():
            if folder in checks:
                assert not checks[folder](json.loads(line), RULES), path
                found[folder] += 1
    assert min(found.values()) > 0
    write_tree(tmp_path / "out", export.files, export.blobs)
    data_set = import_data_set(tmp_path / "out").data_set
    assert not data_set.refused
    assert [len(data_set.of_kind(kind)) for kind in ("definition", "solution")] == [
        found["definitions"],
        found["solutions"],
    ]
