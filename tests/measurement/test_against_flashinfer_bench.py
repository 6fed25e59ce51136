"""``benchmarks/against_flashinfer_bench``: both sides are given the same work, and ours is measured on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(shipped_root()))


@pytest.fixture
def dataset() -> ModuleType:
    from benchmarks.against_flashinfer_bench import dataset

    return dataset


@pytest.fixture
def store() -> ModuleType:
    from benchmarks.against_flashinfer_bench import store

    return store


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


def subset_of(dataset: ModuleType, catalog: Catalog, name: str, most: int | None = None) -> Any:
    return dataset.subset(catalog.definition(name), catalog.solutions_for(name), catalog.workloads_for(name), most)


def read(root: Path) -> Mapping[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in root.rglob("*.json")}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fused_add_rms_norm", "writes over an input"),
        ("silu_and_mul", r"an expression (2*I)"),
        ("batched_transpose", "may be uint8"),
    ],
)
def test_what_their_format_cannot_say_is_refused_with_the_reason(dataset, catalog, name, reason):
    found = subset_of(dataset, catalog, name)
    assert reason in found.refused[name]
    assert (list(found.solutions), list(found.workloads)) == ([], [])


def test_a_strided_workload_is_left_out_for_both_sides(dataset, catalog):
    found = subset_of(dataset, catalog, "rope_neox")
    definition = catalog.definition("rope_neox")
    strided = [item.uuid for item in catalog.workloads_for("rope_neox") if item.layout_classes(definition)]
    assert strided
    assert {item.uuid for item in found.workloads}.isdisjoint(strided)
    assert all("strided" in found.refused[uuid] for uuid in strided)


def test_each_dtype_binding_gets_a_definition_and_its_solutions(dataset, catalog, tmp_path):
    found = subset_of(dataset, catalog, "rms_norm")
    pairs = dataset.write_theirs(tmp_path, [found])
    definitions, solutions = read(tmp_path / "definitions"), read(tmp_path / "solutions")
    assert definitions["rms_norm_bfloat16"]["inputs"]["x"] == {"shape": ["M", "N"], "dtype": "bfloat16"}
    assert definitions["rms_norm_float16"]["outputs"]["out"]["dtype"] == "float16"
    kernel = solutions["rms_norm_triton_bfloat16"]
    assert kernel["definition"] == "rms_norm_bfloat16"
    assert kernel["sources"][0]["content"].encode() == catalog.solution("rms_norm_triton").sources["kernel.py"]
    assert not any("cutile" in name for name in solutions)
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert {line["workload"]["uuid"] for line in lines} == {item.uuid for item in found.workloads}
    of = {name: sum(item["definition"] == name for item in solutions.values()) for name in definitions}
    assert pairs == sum(of[line["definition"]] for line in lines)


def test_entry_with_tunables_is_exported_without_them(dataset, catalog):
    tunable, plain = catalog.solution("softmax_triton"), catalog.solution("rms_norm_stock")
    record = dataset.their_solution(tunable, {"T": "bfloat16"})
    assert record["spec"]["entry_point"] == "without_options.py::run"
    sources = {source["path"]: source["content"] for source in record["sources"]}
    assert "def run(x, out):" in sources["without_options.py"]
    assert sources["kernel.py"] == tunable.sources["kernel.py"].decode()
    assert dataset.their_solution(plain, {"T": "bfloat16"})["spec"]["entry_point"] == "kernel.py::run"


def test_our_side_gets_records_of_the_same_digests(dataset, catalog, tmp_path):
    found = [subset_of(dataset, catalog, name, most=3) for name in ("rms_norm", "softmax")]
    dataset.write_ours(tmp_path, found)
    copied = Catalog((tmp_path,))
    assert set(copied.definitions) == {"rms_norm", "softmax"}
    for name, solution in copied.solutions.items():
        assert solution.digest == catalog.solution(name).digest
    assert [item.uuid for item in copied.workloads_for("softmax")] == [item.uuid for item in found[1].workloads]
    assert len(found[1].workloads) == 3


def test_passed_trace_keeps_latency_and_speedup_in_their_format(store, tmp_path):
    store.write_both(tmp_path, 400)
    ours = [json.loads(line) for line in (tmp_path / "ours" / "traces.jsonl").read_text().splitlines()]
    theirs = [json.loads(line) for path in (tmp_path / "theirs/traces").rglob("*.jsonl") for line in path.open()]
    assert len(ours) == len(theirs) == 400
    speedups = sorted(line["performance"]["comparisons"][0]["ratio"] for line in ours if "performance" in line)
    passed = [line["evaluation"]["performance"] for line in theirs if line["evaluation"]["status"] == "PASSED"]
    assert sorted(item["speedup_factor"] for item in passed) == speedups
    assert all(item["reference_latency_ms"] >= 0.5 * item["latency_ms"] for item in passed)


@pytest.mark.turn("benchmarks/against_flashinfer_bench/")  # a script that fills a store
def test_our_store_answers_every_point_that_was_measured(store, tmp_path):
    store.write_both(tmp_path, 1000)
    found = store.measure_ours(tmp_path / "ours", repeats=1)
    assert found["points_answered"] == 1
    assert found["entries"] == store.DEFINITIONS
    assert found["start_mb"] > 0
    assert found["peak_mb"] > found["start_mb"] - 1  # the kernel's counters may lag by a few pages


def test_a_line_counts_pairs_a_minute_with_and_without_the_start():
    from benchmarks.against_flashinfer_bench.harness import Line, SideReport

    report = SideReport(timed=3, samples=300, statuses={"PASSED": 3, "COMPILE_ERROR": 1})
    line = Line("one side", report, total_s=12.0, startup_s=4.0)
    assert line.pairs == 4
    assert str(line).split()[2:9] == ["4", "3", "100", "4.0", "8.0", "30.0", "20.0"]


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,1", "3"), ("GPU-8f", "GPU-8f"), ("", "")])
def test_the_runner_uses_the_first_visible_gpu_alone(visible, first):
    from benchmarks.against_flashinfer_bench.runner import first_gpu

    assert first_gpu(visible) == first
