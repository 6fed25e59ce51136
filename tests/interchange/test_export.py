"""Our catalog in FlashInfer-Bench's terms: what is said, what is left out, and that its own loader takes it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.backends.toolchains import lacking_dependency
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.interchange.checks import check_definition, check_solution, check_trace
from tilegym_db.interchange.flashinfer_export import Export, build_export, constant_axes
from tilegym_db.interchange.flashinfer_trace import RULES
from tilegym_db.interchange.importing import import_data_set, write_tree
from tilegym_db.records import Trace
from tilegym_db.records.solution import find_function
from tilegym_db.records.trace import Comparison, Correctness, Performance

pytestmark = pytest.mark.turn(
    "tilegym_db/interchange/"
)  # exports the whole catalog; test_round_trip.py has a small one daily

FOLDERS = ("definitions", "solutions", "workloads", "traces")


def records(export: Export, folder: str) -> list[Any]:
    files = [content for path, content in export.files.items() if path.startswith(f"{folder}/")]
    if folder in ("definitions", "solutions"):
        return [json.loads(content) for content in files]
    return [json.loads(line) for content in files for line in content.splitlines()]


def test_every_record_keeps_the_rules_of_flashinfer_trace(export: Export) -> None:
    checks = dict(zip(FOLDERS, (check_definition, check_solution, check_trace, check_trace), strict=True))
    for folder in FOLDERS:
        found = records(export, folder)
        assert found
        assert [problems for record in found if (problems := checks[folder](record, RULES))] == []
        if folder in ("definitions", "solutions"):
            assert len({record["name"] for record in found}) == len(found)


def test_whole_catalog_is_exported_or_left_out_with_a_reason(export: Export, shipped: Catalog) -> None:
    told = {item["definition"] for item in export.definitions.values()}
    missing = " ".join(what for what, _ in export.left_out)
    assert all(name in told or name in missing for name in shipped.definitions)
    told_workloads = {line["workload"]["uuid"] for line in records(export, "workloads")}
    assert all(workload.uuid in told_workloads or workload.uuid in missing or any(
        f"definition {workload.definition}_" in what for what, _ in export.left_out)
        for workload in shipped.all_workloads())  # fmt: skip
    assert all(reason for _, reason in export.left_out)


def test_partial_export_has_what_the_whole_has_of_its_share(
    export: Export, shipped: Catalog, traces: list[Trace]
) -> None:
    part = build_export(shipped, traces, names=["aux_fi", "cast_back"])
    assert {item["definition"] for item in part.definitions.values()} == {"aux_fi", "cast_back"}
    assert {path for path in export.files if "/aux_fi_" in path} <= set(part.files)
    assert all(export.files[path] == content for path, content in part.files.items() if path.split("/")[0] in FOLDERS)


def test_export_can_be_imported_without_a_finding_or_a_refusal(export: Export, home: Path, tmp_path: Path) -> None:
    write_tree(tmp_path / "out", export.files, export.blobs)
    found = import_data_set(tmp_path / "out").data_set
    assert found.refused == ()
    assert [item for item in found.records if item.findings] == []


def test_what_flashinfer_trace_has_no_dtype_for_is_left_out(export: Export) -> None:
    reasons = {reason for what, reason in export.left_out if what.startswith("definition ")}
    assert reasons
    assert all(re.search(r"dtype (uint8|uint32|float8_e8m0fnu|float64), which", reason) for reason in reasons), reasons


def test_no_workload_leaves_indices_to_be_drawn_there(export: Export) -> None:
    inputs = {record["name"]: record["inputs"] for record in records(export, "definitions")}
    for line in records(export, "workloads"):
        for name, given in line["workload"]["inputs"].items():
            spec = inputs[line["definition"]][name]
            assert given["type"] != "random" or spec["dtype"] not in ("int16", "int32", "int64"), line
    told = json.loads(export.files["tilegym_db/export.json"])
    assert any("would draw integers from -1024 to 1023" in json.dumps(item) for item in told["left_out"])


def test_variable_axes_can_be_read_off_the_inputs(export: Export) -> None:
    for record in records(export, "definitions"):
        told = {axis for spec in record["inputs"].values() for axis in spec["shape"] or ()}
        assert {name for name, axis in record["axes"].items() if axis["type"] == "var"} <= told


def test_the_constants_of_a_model_become_constants(shipped: Catalog) -> None:
    found = {
        name: set(constant_axes(shipped.definition(name), shipped.workloads_for(name)))
        for name in ("rms_norm", "gemm", "silu_and_mul", "attention_decode")
    }
    assert found == {
        "rms_norm": {"N"}, "gemm": {"N", "K"}, "silu_and_mul": {"I"}, "attention_decode": {"Hq", "Hkv", "D"},
    }  # fmt: skip


def test_no_unverified_pass_is_reported(export: Export) -> None:
    lines = [line for path in export.files if path.startswith("tilegym_db/evidence/")
             for line in export.files[path].splitlines()]  # fmt: skip
    assert len(lines) == export.counts["trace"] > 0
    for line in lines:
        trace = Trace.from_dict(json.loads(line)["trace"])
        assert trace.tier == "promotion" or trace.status != "PASSED"


def made_trace(shipped: Catalog, status: str, **changes: Any) -> Trace:
    definition, solution = shipped.definition("rms_norm"), shipped.solutions_for("rms_norm")[0]
    workload = next(item for item in shipped.workloads_for("rms_norm") if not item.layouts)
    compared = Comparison.against("rms_norm_stock", "stock", ratio=2.0, ci_low=1.9, ci_high=2.1)
    passed = {
        "correctness": Correctness(max_abs=0.25, worst_row_rel=0.01),
        "performance": Performance(
            latency_us=10.0, ci_low_us=9.0, ci_high_us=11.0, samples=9, timer="cupti", comparisons=(compared,)
        ),
    }
    return Trace(
        trace_id=f"t-{status}", run_id="r", timestamp=datetime(2026, 1, 2, tzinfo=UTC), definition="rms_norm",
        definition_version=definition.version, definition_digest=definition.digest, op_type="norm", solution=solution.name,
        solution_digest=solution.digest, language=solution.record.spec.language, workload_uuid=workload.uuid,
        axes=workload.axes, dtypes=workload.dtypes, gpu="h200", gpu_name="NVIDIA H200", tier="promotion", status=status,
        reason="" if status == "PASSED" else "why", **(passed if status == "PASSED" else {}), **changes,
    )  # fmt: skip


def test_statuses_without_a_counterpart_are_never_passes(shipped: Catalog) -> None:
    traces = [made_trace(shipped, status) for status in ("PASSED", "REJECTED", "TIMEOUT", "UNSUPPORTED")]
    export = build_export(shipped, traces, "norm")
    passed, rejected, timeout = (line["evaluation"] for line in records(export, "traces"))
    assert passed["performance"] == {"latency_ms": 0.01, "reference_latency_ms": 0.02, "speedup_factor": 2.0}
    assert passed["correctness"]["max_absolute_error"] == 0.25
    assert (rejected["status"], rejected["log"]) == ("RUNTIME_ERROR", "REJECTED by tilegym-db: why")
    assert timeout["status"] == "TIMEOUT"
    assert [(what, reason) for what, reason in export.left_out if what == "trace t-UNSUPPORTED"]


def test_a_chosen_config_becomes_a_solution_of_its_own(shipped: Catalog) -> None:
    export = build_export(shipped, [made_trace(shipped, "PASSED", config={"num_warps": 8})], "norm")
    (line,) = records(export, "traces")
    (solution,) = [item for item in records(export, "solutions") if item["name"] == line["solution"]]
    entry = next(item["content"] for item in solution["sources"] if item["path"] == "flashinfer_entry.py")
    assert "num_warps=8" in entry
    compile(entry, "flashinfer_entry.py", "exec")
    assert export.solutions[line["solution"]]["config"] == {"num_warps": 8}


def test_entry_has_the_parameters_that_flashinfer_bench_counts(export: Export) -> None:
    """Its builders refuse an entry with more, which options with defaults are: inputs, and outputs where it writes them."""
    definitions = {item["name"]: item for item in records(export, "definitions")}
    wrong, seen = [], set()
    for solution in records(export, "solutions"):
        path, _, symbol = solution["spec"]["entry_point"].partition("::")
        definition = definitions[solution["definition"]]
        expected = len(definition["inputs"])
        expected += len(definition["outputs"]) if solution["spec"]["destination_passing_style"] else 0
        source = next(item["content"] for item in solution["sources"] if item["path"] == path)
        if (source, expected) in seen:
            continue
        seen.add((source, expected))
        function = find_function(source, symbol)
        assert function is not None
        arguments = function.args
        if len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) != expected:
            wrong.append(solution["name"])
    assert wrong == []


def test_adapted_entries_of_in_place_operators_give_every_output(export: Export, tmp_path: Path) -> None:
    """Called as FlashInfer-Bench calls them: as a package, with every output, and with inputs that must stay as they were."""
    import importlib
    import sys

    found = [item for item in records(export, "solutions")
             if item["definition"].startswith("fused_add_rms_norm_float32") and item["spec"]["language"] == "python"
             and "cuda-tile" not in item["spec"]["dependencies"]
             and lacking_dependency(tuple(item["spec"]["dependencies"])) is None]  # fmt: skip
    definition = next(item for item in records(export, "definitions") if item["name"] == found[0]["definition"])
    size = next(axis["value"] for axis in definition["axes"].values() if axis["type"] == "const")
    x, residual, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    wanted = scope["run"](x, residual.clone(), weight, 1e-5)
    for source in found[0]["sources"]:
        (tmp_path / "exported_package").mkdir(exist_ok=True)
        (tmp_path / "exported_package" / source["path"]).write_text(source["content"])
    sys.path.insert(0, str(tmp_path))
    try:
        entry = importlib.import_module("exported_package.flashinfer_entry").run
    finally:
        sys.path.remove(str(tmp_path))
    before = residual.clone()
    given = entry(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    assert len(given) == len(wanted) == len(definition["outputs"])
    for one, two in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, two)


def test_an_export_never_writes_over_what_is_there(export: Export, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with raises(UsageError, "folder_occupied", str(tmp_path)):
        write_tree(tmp_path, export.files)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
