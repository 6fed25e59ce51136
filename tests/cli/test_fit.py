"""A model fitted to this machine: its calls are measured, published, proved and timed, and then there is nothing left to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from user_catalog import slow_stock
from write_checked_records import judged

from tilegym_db import fit, patched
from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.loop.fit import FitOptions, fit_config, runnable_kernels
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.models.capture import run_model
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.published.snapshot import checked_file
from tilegym_db.published.table import ServingLock, load_table
from tilegym_db.records import Trace
from tilegym_db.sandbox import worker
from tilegym_db.sandbox.confine import Sandbox
from tilegym_db.sandbox.processes import Confinement
from tilegym_db.store.opening import open_store

REAL = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
KERNEL = """import torch


def run(x, weight, eps, out):
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    out.mul_(weight)
"""
OPTIONS = FitOptions(prompts=(64,), new=2, dtype="float32", rounds=2)


@pytest.fixture
def config(checkout: Path, tmp_path: Path) -> Path:
    """A tiny model beside a catalog of its norm, with stock code and a kernel in PyTorch."""
    name = "rms_norm"
    slow_stock(checkout)
    (checkout / "definitions/norm").mkdir(parents=True, exist_ok=True)
    shutil.copy(REAL / f"definitions/norm/{name}.json", checkout / "definitions/norm")
    kernel = checkout / f"solutions/norm/{name}/{name}_in_place"
    kernel.mkdir(parents=True)
    (kernel / "kernel.py").write_text(KERNEL)
    spec = {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}}
    record = {"name": f"{name}_in_place", "definition": name, "author": "tests", "spec": spec}
    (kernel / "solution.json").write_text(json.dumps({**record, "sources": [{"path": "kernel.py"}]}))
    folder = tmp_path / "Tiny-Fit"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


# A whole fit; each of its steps is tested daily.
@pytest.mark.turn("tilegym_db/loop/fit.py", "tilegym_db/cli/models.py")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_measured_published_and_timed_once(config: Path, home: Path, cli: Any) -> None:
    kept: list[Trace] = []

    def interrupt(trace: Trace) -> None:
        kept.append(trace)
        raise KeyboardInterrupt

    cut_off = fit_config(config, "cpu", OPTIONS, Observer(traced=interrupt))
    assert (cut_off.interrupted, cut_off.published, cut_off.runs) == (True, "", [])

    found = fit_config(config, "cpu", OPTIONS)
    assert {call.definition for call in found.calls} == {"rms_norm"}
    assert found.measured is not None
    verdicts = {(trace.solution, trace.tier, trace.status) for trace in found.measured.traces}
    assert ("rms_norm_in_place", "promotion", "PASSED") in verdicts
    assert found.published == str(home / "published" / "cpu")
    assert [(run.model, run.prompt_tokens, run.proved) for run in found.runs] == [("tiny-fit", 64, True)]
    assert (found.new_runs, found.failed, found.interrupted) == (1, [], False)
    parts = {piece.part: piece for piece in found.pieces}
    assert parts["LlamaRMSNorm"].definition == "rms_norm"
    assert parts["Linear"].reason or parts["Linear"].share >= 0
    assert found.served_share == pytest.approx(
        sum(piece.share for piece in found.pieces if piece.served) / sum(piece.share for piece in found.pieces)
    )

    # A second time nothing is measured, published or timed; the model in memory finds everything done, too.
    with open_store(read_only=True) as store:
        (before,) = store.rows("SELECT count(*) AS traces FROM traces")
        assert store.rows("SELECT 1 FROM traces WHERE trace_id = $id", {"id": kept[0].trace_id})
    files = {path: path.read_bytes() for path in (home / "published").rglob("*") if path.is_file()}
    lock = home.parent / "new" / "serving.lock.json"
    again = fit_config(config, "cpu", replace(OPTIONS, lock=lock))
    assert (again.lock, again.notes) == (str(lock), [])
    assert [kernel.solution for kernel in ServingLock.read(lock).kernels] == ["rms_norm_in_place"]
    assert (again.measured, again.new_runs) == (None, 0)
    assert [run.run_id for run in again.runs] == [run.run_id for run in found.runs]
    model = build_model(load_config(config), "cpu", "float32")
    ids = model.dummy_inputs["input_ids"].new_ones(1, 64)
    classes = [type(module) for module in model.modules()]
    own_lock = lock.with_name("own.json")
    in_memory = fit(model, ids, rounds=2, lock=own_lock)
    assert own_lock.read_bytes() == lock.read_bytes()
    with patched(model, lock=own_lock) as handle, torch.no_grad():
        run_model(
            model, {"input_ids": ids}
        )  # as when the lock was written: a busy machine may leave the prompt to stock code
        assert handle.report().hits()["rms_norm"], str(handle.report())
    bits = lock.with_name("bits.json")
    required = fit(model, ids, rounds=2, lock=bits, require="deterministic")
    assert (required.lock, ServingLock.read(bits).required) == (str(bits), {"deterministic"})
    assert ServingLock.read(bits).kernels == ServingLock.read(lock).kernels
    none = fit(model, ids, rounds=2, lock=lock.with_name("none.json"), require="batch-invariant")
    assert (none.lock, none.kernels, lock.with_name("none.json").exists()) == ("", [], False)
    assert any("that is batch-invariant" in text for text in none.notes)
    assert in_memory.measured is None
    assert in_memory.speedup is not None
    assert in_memory.speedup.total.median > 0
    assert [type(module) for module in model.modules()] == classes
    with open_store(read_only=True) as store:
        assert store.rows("SELECT count(*) AS traces FROM traces") == [before]
    assert {path: path.read_bytes() for path in files} == files

    asked = (
        "fit",
        str(config),
        "--gpu",
        "cpu",
        "--prompt-tokens",
        "64",
        "--max-new-tokens",
        "2",
        "--dtype",
        "float32",
        "--rounds",
        "2",
    )
    told = cli(*asked, "--lock", str(lock), "--json").json()
    assert told["lock"] == str(lock)
    assert (told["measured"], told["new_runs"], len(told["calls"])) == ({}, 0, len(found.calls))
    assert told["kernels"] == ["rms_norm_in_place"]
    shown = cli(*asked, "--lock", str(lock))
    assert f"Next: tilegym_db.patch(model, lock='{lock}')" in shown.err
    assert shown.code == 0
    assert "measured nothing new" in shown.err
    assert "LlamaRMSNorm" in shown.out
    assert "per output token, ms" in shown.out


def test_unwritable_lock_is_refused_before_anything_is_measured(config: Path, tmp_path: Path, cli: Any) -> None:
    for place in (tmp_path, config / "config.json" / "lock", Path("/proc/lock.json")):
        refused = cli("fit", str(config), "--gpu", "cpu", "--lock", str(place))
        assert (refused.code, refused.cause) == (2, "output_unwritable")
        with raises(UsageError, "output_unwritable", str(place)):
            fit(torch.nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.int64), lock=place)


def test_a_cpu_runs_no_tile_language(config: Path) -> None:
    shipped = Catalog((REAL,))
    names = runnable_kernels(shipped, ["rms_norm", "swiglu"], cpu_machine())
    languages = {shipped.solutions[name].record.spec.language for name in names}
    assert languages <= {"python"}
    assert runnable_kernels(Catalog.default(), ["rms_norm"], cpu_machine()) == ["rms_norm_in_place"]


@pytest.mark.parametrize(
    ("content", "code", "fact"),
    [
        ({"model_type": "hyena_9"}, "model_type_unknown", "'hyena_9'"),
        (
            {"model_type": "hyena_9", "auto_map": {"AutoModelForCausalLM": "modeling_hyena.Hyena"}},
            "model_type_unknown",
            "its code comes with the model",
        ),
        (
            {**CONFIG, "hidden_size": 65536, "intermediate_size": 1 << 20, "num_hidden_layers": 400},
            "memory_short",
            "None of its 400 layers would fit. Run this on",
        ),
        (
            {**CONFIG, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 400},
            "memory_short",
            "--layers ",
        ),
    ],
)
def test_model_that_cannot_run_is_refused_before_any_build(tmp_path: Path, content, code: str, fact: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with raises(UsageError, code, fact):
        fit_config(path, "cpu", OPTIONS)


def test_fit_measures_on_the_models_device_and_on_no_cluster(config: Path) -> None:
    model, ids = torch.nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.int64)
    with raises(UsageError, "fit_on_cluster", "'ray'"):
        fit(model, ids, devices="ray")
    with raises(UsageError, "fit_on_cluster", "'ray:head:6379'"):
        fit_config(config, "ray:head:6379", OPTIONS)
    with raises(HardwareError, "gpu_other", "devices='h200'"):
        fit(model, ids, devices="h200")


@pytest.mark.parametrize("text", ["0", "1,,8", "x", "-1", "1.5", ""])
def test_what_is_no_list_of_numbers_is_wrong_usage(config: Path, cli: Any, text: str) -> None:
    refused = cli("fit", str(config), "--gpu", "cpu", "--batch", text)
    assert (refused.code, refused.cause) == (2, "numbers_invalid")


@pytest.mark.turn("tilegym_db/loop/fit.py", "tilegym_db/sandbox/")  # test_sandbox_levels.py has the level daily
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_confinement_a_model_gets_what_the_package_ships(
    config: Path, home: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = Sandbox(Confinement(1), "level 1: a session of its own", ("level 2 is not available: no Landlock",))
    monkeypatch.setitem(worker._sandboxes, "cpu", weak)
    with pytest.raises(HardwareError, match="rms_norm_in_place"):
        fit_config(config, "cpu", OPTIONS)

    checked_file().write_text(json.dumps(judged(Catalog((checkout,)), set())))
    found = fit_config(config, "cpu", OPTIONS)
    assert found.published == str(home / "published" / "cpu")
    assert found.measured is not None
    assert {trace.sandbox_level for trace in found.measured.traces} == {1}
    assert any("workers cannot be confined here (sandbox level 1: level 2 is" in note for note in found.notes)
    table = load_table("cpu")
    assert table is not None
    assert {one.shipped_source for entry in table for one in entry.candidates} == {True}
