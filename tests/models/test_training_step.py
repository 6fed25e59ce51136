"""The benchmark of training steps and loss curves: what of it can run on the CPU, with tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root

# A script; test_training.py has the gradients daily.
pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.turn("benchmarks/training_step.py")]

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--rows", "4", "--tokens", "8"]


@pytest.fixture
def training_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import training_step

    module: ModuleType = training_step
    return module


def run(training_step: ModuleType, out: Path, *arguments: str) -> tuple[int, Any]:
    code = training_step.main([*TINY, *arguments, "--out", str(out)])
    return code, json.loads(out.read_text())


def test_steps_are_taken_in_turns_with_kernels(
    training_step: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    models = ["llama-3.2-1b", "qwen3-30b-a3b:2"]
    brief = ["--rounds", "1", "--steps", "1", "--ways", "stock,patched"]
    code, found = run(training_step, tmp_path / "steps.json", *brief, "--models", *models)
    assert (code, found["findings"]) == (0, [])
    for result in found["results"]:
        assert {*result["ways"]} == {"stock", "patched"}
        assert result["ways"]["patched"]["loss"] == pytest.approx(result["ways"]["stock"]["loss"], rel=1e-2)
        assert {*result["against"]} == {"stock"}
        assert result["hits"]["rms_norm_backward"] > 0
        assert result["hits"]["cross_entropy_backward"] == 2 * 2 * 2  # rounds, steps of a turn, parts of a step
    assert "swiglu_backward" in found["results"][0]["hits"]


def test_ways_that_cannot_run_are_absent_with_reason(
    training_step: ModuleType, training_kernels: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it is not\nfor this machine")

    monkeypatch.setattr(training_step.torch, "compile", lambda model: refuses)
    brief = ["--rounds", "1", "--steps", "1", "--models", "llama-3.2-1b", "--lora", "--checkpoint"]
    with pytest.warns(FutureWarning):
        code, found = run(training_step, tmp_path / "steps.json", *brief)
    (result,) = found["results"]
    assert code == 0
    assert result["absent"]["compile"] == "RuntimeError: it is not"
    assert "not installed" in result["absent"]["liger"] or "liger" in result["ways"]
    assert result["trained"] < result["parameters"]
    assert result["hits"]["swiglu_backward"] > 0


def test_curves_of_stock_and_patched_agree(
    training_step: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    code, found = run(training_step, tmp_path / "curve.json", "--loss-curve", "20")
    (result,) = found["results"]
    assert (code, found["findings"]) == (0, [])
    assert result["distances"]["patched"] < 1e-3 < result["distances"]["seed 1"]
    assert result["last"]["stock"] < result["curves"]["stock"]["losses"][0]
    assert result["curves"]["patched"]["hits"]["rms_norm_backward"] == 20 * 5


def test_a_curve_without_logits_agrees_with_stock(
    training_step: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    code, found = run(training_step, tmp_path / "curve.json", "--loss-curve", "20", "--dtype", "bfloat16")
    (result,) = found["results"]
    assert (code, found["findings"]) == (0, [])
    assert result["curves"]["patched"]["hits"]["fused_linear_cross_entropy"] == 20
    assert result["distances"]["patched"] < 1e-2


def test_a_curve_that_leaves_stock_is_a_finding(
    training_step: ModuleType, shop: Any, training_kernels: Catalog, tmp_path: Path
) -> None:
    shop.offer("    for value in {outputs}:\n        value.zero_()\n", ops=("rms_norm_backward",))
    code, found = run(training_step, tmp_path / "curve.json", "--loss-curve", "20")
    assert code == 1
    assert found["findings"][0].startswith("patched is ")


@pytest.mark.parametrize("parallel", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_processes_share_the_batches_of_a_curve(
    parallel: list[str], training_step: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    alone = run(training_step, tmp_path / "alone.json", "--loss-curve", "6")[1]["results"][0]
    code, found = run(training_step, tmp_path / "shared.json", "--loss-curve", "6", "--gpus", "2", *parallel)
    (result,) = found["results"]
    assert (code, found["findings"]) == (0, [])
    assert result["parallel"] == ("fsdp2" if parallel else "ddp")
    assert result["distances"]["patched"] < 1e-4
    assert result["curves"]["patched"]["hits"]["swiglu_backward"] == 6 * 2
    for name, one in alone["curves"].items():
        assert result["curves"][name]["losses"] == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "2"], "are for --loss-curve"),
        (["--loss-curve", "2", "--shard"], "needs --gpus 2"),
        (["--ways", "stock,tigerkernel"], "unknown: tigerkernel"),
    ],
)
def test_options_without_a_meaning_are_refused(
    arguments: list[str], message: str, training_step: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        training_step.main(arguments)
    assert message in capsys.readouterr().err


def test_speedups_are_those_of_the_same_round(training_step: ModuleType) -> None:
    turns = {
        "patched": [training_step.Turn([1.0, 1.0], 50, 0.0), training_step.Turn([2.0], 60, 0.0)],
        "stock": [training_step.Turn([2.0, 2.0], 120, 0.0), training_step.Turn([8.0], 100, 0.0)],
    }
    assert training_step.against(turns) == {"stock": {"speedup": 3.0, "least": 2.0, "most": 4.0, "memory": 0.5}}
    assert training_step.against({"stock": turns["stock"]}) == {}
    assert sys.modules["training_step"] is training_step


@pytest.mark.parametrize(
    ("spent", "seconds", "expected"),
    [([50, 50], 10, True), ([5, 9, 4], 22, True), ([5, 9, 4], 21, False), ([5, 9, 4, 4], 24, False)],
)
def test_a_round_that_would_end_late_is_not_started(
    spent: list[float], seconds: float, expected: bool, training_step: ModuleType
) -> None:
    assert training_step.is_time_for_another(spent, seconds) == expected
