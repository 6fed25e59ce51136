"""The benchmark of training steps: what stands for plain PyTorch, and which way a ratio goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training_layers
from tilegym_db.layers import engram, hyper_connections


@pytest.mark.parametrize("module", [engram, hyper_connections], ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_operator_of_a_module_is_its_reference_in_the_plain_copy_and_itself_elsewhere(module) -> None:
    operators = {name for name, value in vars(module).items() if callable(value) and name.startswith("_")} - {
        "_wide",
        "_flat",
    }
    before = dict(vars(module))
    made = training_layers.plain(module)
    assert operators == set(training_layers.REFERENCES[module.__name__])
    assert all(getattr(made, name) is not before[name] for name in operators)
    assert dict(vars(module)) == before


def test_a_slower_way_has_a_speedup_below_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"ours": 4.0, "reference": 1.0, "ours_compiled": 2.0, "reference_compiled": 1.0}
    monkeypatch.setattr(training_layers, "steps", lambda *given, **named: {way: way for way in ways})
    monkeypatch.setattr(training_layers, "errors", lambda *given: {})
    monkeypatch.setattr(training_layers, "timed_ms", lambda way, calls, device: ways[way])
    out = tmp_path / "layers.json"
    assert training_layers.main(["engram", "--device", "cpu", "--rounds", "6", "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["speedup, low, high"]["ours over reference"] == pytest.approx([0.25] * 3)
    assert found["speedup, low, high"]["ours_compiled over reference_compiled"] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("layer", ["pipeline", "engram"])
def test_both_forms_of_a_layer_have_the_same_gradients(layer: str) -> None:
    options = training_layers.parsed([layer, "--device", "cpu", "--tokens", "3", "--hidden", "16", "--sublayers", "1"])
    ways = training_layers.steps(layer, 3, options, compiles=False)
    ours, plain = (ways[name]() for name in ("ours", "reference"))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
