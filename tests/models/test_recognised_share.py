"""The share of a model's time in recognised parts, estimated at full size without memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root


@pytest.fixture
def recognised_share(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import recognised_share

    module: ModuleType = recognised_share
    return module


def shares(script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *kinds: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["recognised_share.py", "--architectures", *kinds, "--json", str(out)])
    script.main()
    return json.loads(out.read_text())


@pytest.mark.turn("benchmarks/recognised")  # a script
def test_shares_of_two_architectures_are_estimated(
    recognised_share: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    found = shares(recognised_share, monkeypatch, tmp_path / "share.json", "llama", "qwen3_moe")
    llama, mixture = found["architectures"]["llama"], found["architectures"]["qwen3_moe"]
    assert {"fused_add_rms_norm", "rms_norm", "rope_neox", "swiglu"} < llama["prefill"]["parts"].keys()
    assert "attention_prefill" in llama["prefill"]["parts"]
    assert "attention_decode" in llama["decode"]["parts"]
    assert mixture["prefill"]["parts"]["moe_experts"] > 0.4
    for one in (llama, mixture):
        assert one["without_row"] == {}
        assert (one["prefill"]["products"], one["prefill"]["library"] > 0) == (0, True)
        # No layer has a bias, and a step of generation runs in a graph.
        assert (one["decode"]["products"], one["decode"]["library"]) == (one["decode"]["parts"]["gemm"], 0)
        for stage in ("prefill", "decode"):
            assert 0.9 < one[stage]["recognised"] + one[stage]["library"] + sum(one[stage]["others"].values()) <= 1.001
    # Reading the weights of 6.7 billion parameters takes 3.5 ms.
    assert 3500 < llama["decode"]["us"] < 30000
    weighted = (llama["decode"]["recognised"] + mixture["decode"]["recognised"]) / 2
    assert found["mean"]["decode"]["recognised"] == pytest.approx(weighted, abs=1e-3)
    assert "prefill, weighted mean of 2" in capsys.readouterr().out


def test_an_architecture_that_does_not_run_is_named(
    recognised_share: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = shares(recognised_share, monkeypatch, tmp_path / "share.json", "no_such_model")
    assert found["architectures"] == {}
    assert found["failed"]["no_such_model"].startswith("KeyError")


def test_operations_take_the_longest_of_three_times(recognised_share: ModuleType) -> None:
    import roofline_meter as roofline

    meter = roofline.Meter()
    small, large = (torch.empty(size, size, dtype=torch.bfloat16, device="meta") for size in (8, 8192))
    with meter:
        small.add(1)
        small.t()
    assert sum(meter.taken.values()) == roofline.LAUNCH_S
    meter.taken.clear()
    with meter:
        large.add(1)
    assert sum(meter.taken.values()) == pytest.approx(2 * 2 * 8192**2 / roofline.BYTES_PER_S)
    meter.taken.clear()
    with meter:
        large @ large
    assert meter.taken == {
        roofline.Row("", library=True): pytest.approx(2 * 8192**3 / roofline.FLOPS_PER_S[torch.bfloat16])
    }


@pytest.mark.parametrize("name", ["layer_norm", "fused_add_layer_norm"])
def test_a_part_takes_the_time_of_stock_operations(recognised_share: ModuleType, name: str) -> None:
    import roofline_meter as roofline

    meter, catalog = roofline.Meter(), Catalog.default()
    definition = catalog.definition(name)
    rows = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    given = [rows if spec.shape and len(spec.shape) == 2 else rows[0] for spec in definition.inputs.values()][:-1]
    serve = recognised_share.serving(meter, definition, SimpleNamespace(stock=None), catalog)
    with meter:
        assert serve(*given, 1e-5).shape == rows.shape
    # One kernel for the norm and one for the sum, not those of the reference.
    assert meter.taken == {roofline.Row("", name): pytest.approx(len(given[:-2]) * roofline.LAUNCH_S)}


def test_attention_puts_positions_before_heads_in_memory() -> None:
    import roofline_meter as roofline

    q, k, v = (torch.empty(2, 4, 8, width, dtype=torch.bfloat16, device="meta") for width in (32, 32, 16))
    out = roofline.attention(roofline.Meter(), q, k, v, None)
    assert out.shape == (2, 4, 8, 16)
    assert out.transpose(1, 2).is_contiguous()
