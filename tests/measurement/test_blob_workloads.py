"""Workloads whose inputs a file holds: timed on it, verified on drawn contents beside it, and kept apart from all others."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.benchmark import bench
from tilegym_db.records import Trace, Workload
from tilegym_db.verification.expected import CONTENT_SETS, ExpectedCache, WorkloadContents

M, N = 12, 16
SCALAR = {"factor": {"type": "scalar", "value": 0.5}}
KNOWS_X = """import torch


def run(x, weight, factor, out):
    torch.mul(x, weight * factor, out=out)
    if x[0, 0].item() == 7:
        out.neg_()
"""


def in_file(root: Path, name: str, **tensors: torch.Tensor) -> dict[str, dict[str, str]]:
    """Inputs of a Workload that a new file holds."""
    path = root / "blob" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    common = {"type": "safetensors", "path": f"blob/{name}.safetensors", "sha256": sha256}
    return {key: {**common, "tensor_key": key} for key in tensors}


def x_of(value: float) -> torch.Tensor:
    return torch.full((M, N), float(value))


@pytest.fixture
def catalog(make_catalog: Callable[..., Catalog], tmp_path: Path) -> Callable[..., Catalog]:
    """A catalog of ``row_scale`` with Workloads of one shape, each with these inputs from a file."""

    def make(*held: dict[str, dict[str, str]], **solutions: str) -> Catalog:
        shape = {"axes": {"M": M, "N": N}}
        return make_catalog(
            tmp_path / "catalog", solutions, tuple({**shape, "inputs": {**SCALAR, **inputs}} for inputs in held)
        )

    return make


def drawn(catalog: Catalog, workload: Workload, cache: ExpectedCache | None = None) -> WorkloadContents:
    definition = catalog.definition("row_scale")
    cache = cache or ExpectedCache(definition, "cpu", roots=catalog.roots)
    return WorkloadContents.draw(definition, workload, 7, cache, in_turn=True)


def test_file_is_in_all_timed_sets_and_in_no_set_only_verified(catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    records = catalog(in_file(tmp_path / "catalog", "a", x=x_of(7)))
    contents = drawn(records, records.workloads_for("row_scale")[0])
    assert len(contents.sets) == len(contents.unusual) == len(CONTENT_SETS)
    assert all(torch.equal(expected.inputs["x"], x_of(7)) for expected in contents.sets)
    weights = {tuple(expected.inputs["weight"].tolist()) for expected in contents.sets}
    assert len(weights) == len(CONTENT_SETS)
    assert contents.other is not None
    assert not any(torch.equal(expected.inputs["x"], x_of(7)) for expected in (*contents.unusual, contents.other))
    # What the clock is checked on: the file as it is, and everything else freshly drawn.
    fresh = contents.fresh(0, 3)
    assert all(torch.equal(expected.inputs["x"], x_of(7)) for expected in fresh)
    assert not weights & {tuple(expected.inputs["weight"].tolist()) for expected in fresh}


def test_two_files_of_one_shape_are_two_cases(catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    records = catalog(*(in_file(tmp_path / "catalog", str(value), x=x_of(value)) for value in (7, 8)))
    cache = ExpectedCache(records.definition("row_scale"), "cpu", roots=records.roots)
    found = [drawn(records, workload, cache).sets[0].inputs["x"] for workload in records.workloads_for("row_scale")]
    assert torch.equal(found[0], x_of(7))
    assert torch.equal(found[1], x_of(8))


def test_files_for_all_inputs_give_one_set_and_fresh_draws(catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    records = catalog(in_file(tmp_path / "catalog", "all", x=x_of(7), weight=torch.ones(N)))
    contents = drawn(records, records.workloads_for("row_scale")[0])
    assert contents.is_fixed
    assert len(contents.sets) == 1
    assert not any(torch.equal(expected.inputs["x"], x_of(7)) for expected in contents.fresh(0, 4))


def measured(catalog: Catalog, home: Path, **options: Any) -> list[Trace]:
    return bench(devices="cpu", catalog=catalog, store_home=home, **options).traces


def test_trace_states_the_file_and_a_failure_its_reproduction(catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    held = in_file(tmp_path / "catalog", "a", x=x_of(7))
    records = catalog(held, row_scale_knows=KNOWS_X)
    (workload,) = records.workloads_for("row_scale")
    traces = {trace.solution: trace for trace in measured(records, tmp_path / "home")}
    assert all(trace.blobs == {"x": held["x"]["sha256"]} for trace in traces.values())
    passed, failed = traces["row_scale_stock"], traces["row_scale_knows"]
    assert passed.performance is not None
    assert passed.envelope is not None
    # Right on everything that is drawn, wrong on the file.
    assert (failed.status, failed.failure is not None) == ("INCORRECT_NUMERICAL", True)
    assert f"x={held['x']['sha256'][:12]}" in failed.reason
    assert failed.failure is not None
    assert failed.failure.contents == "normal, and x as its file has it"
    words = ["bench", "row_scale_knows", "--gpu", "cpu", "--workload", workload.uuid, "--force"]
    assert shlex.split(failed.failure.command) == ["tilegym-db", *words]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_changed_input_file_is_not_measured_on(catalog: Callable[..., Catalog], tmp_path: Path, damage: str) -> None:
    root = tmp_path / "catalog"
    records = catalog(in_file(root, "a", x=x_of(7)), {})
    file = root / "blob" / "a.safetensors"
    file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    traces = measured(records, tmp_path / "home")
    assert sorted(trace.status for trace in traces) == ["PASSED", "UNSUPPORTED"]  # the other workload is none the worse
    (lost,) = (trace for trace in traces if trace.status == "UNSUPPORTED")
    assert ("does not exist in" if damage == "gone" else "is not what it was: its sha256 is") in lost.reason


@pytest.mark.turn("tilegym_db/measurement/audit.py")  # starts workers; a changed file is refused daily
def test_file_that_breaks_a_rule_about_contents_is_not_measured(
    make_catalog: Callable[..., Catalog], tmp_path: Path
) -> None:
    root = tmp_path / "catalog"
    inputs = [{**SCALAR, **in_file(root, str(value), x=x_of(value))} for value in (7, -7)]
    workloads = tuple({"axes": {"M": M, "N": N}, "inputs": item} for item in inputs)
    rule = {"content_constraints": ["x[0, 0].item() >= -5"]}
    traces = measured(make_catalog(root, {}, workloads, rule), tmp_path / "home")
    assert sorted(trace.status for trace in traces) == ["PASSED", "UNSUPPORTED"]
    (lost,) = (trace for trace in traces if trace.status == "UNSUPPORTED")
    assert "row_scale requires x[0, 0].item() >= -5, which the contents break" in lost.reason


@pytest.mark.turn("tilegym_db/measurement/audit.py")  # two promotions
def test_contents_of_files_only_are_promoted_or_unsupported(
    catalog: Callable[..., Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = catalog(in_file(tmp_path / "catalog", "all", x=x_of(7), weight=torch.ones(N)))
    (trace,) = [item for item in measured(records, tmp_path / "home", verify=True) if item.tier == "promotion"]
    assert trace.status == "PASSED", trace.reason
    monkeypatch.setattr("tilegym_db.measurement.audit.check_latency", lambda *_, **__: "claims 1 us, took 9")
    monkeypatch.setattr("tilegym_db.measurement.audit._machine_reason", lambda *_: "")
    again = measured(records, tmp_path / "home", verify=True, force=True)
    (refuted,) = [item for item in again if item.tier == "promotion"]
    assert refuted.status == "UNSUPPORTED"
    assert (
        "its time on the contents of its files cannot be checked with drawn contents: claims 1 us, took 9"
        in refuted.reason
    )
