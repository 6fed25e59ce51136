"""The benchmark scripts for the GPU machine: what of them can run without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root


@pytest.fixture
def model_hits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import model_hits

    module: ModuleType = model_hits
    return module


def run(model_hits: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path) -> int:
    arguments = ["--tiny", "--device", "cpu", "--dtype", "float32", "--prompt", "8", "--new", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["model_hits.py", *arguments])
    monkeypatch.setattr(model_hits, "REPEATS", 1)
    code: int = model_hits.main()
    return code


def test_every_operator_of_a_real_prefill_and_decode_is_served(
    model_hits: ModuleType, kernels: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(model_hits, monkeypatch, tmp_path / "hits.json") == 0
    results = json.loads((tmp_path / "hits.json").read_text())
    assert results["findings"] == []
    assert results["prefill"]["8x8"]["hits"] == {"rms_norm": 3, "swiglu": 2, "rope_neox": 2}
    assert results["decode"]["8x8+3 static cache"]["hits"] == {"rms_norm": 6, "swiglu": 4, "rope_neox": 4}
    assert results["decode"]["1x8+3 dynamic cache"]["equal_tokens"] == "3 of 3"
    assert results["prefill"]["1x8"]["patched_against_stock"] == 0


def test_operators_without_kernels_and_wrong_logits_are_findings(
    model_hits: ModuleType, poison: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(model_hits, monkeypatch, tmp_path / "hits.json") == 1
    found = json.loads((tmp_path / "hits.json").read_text())["findings"]
    assert "prefill 1x8: nan times the error of stock against fp32" in found
