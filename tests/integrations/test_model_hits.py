"""The benchmark scripts for the GPU machine: what of them can run without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilegym_db import Catalog
from tilegym_db.errors import HardwareError
from tilegym_db.paths import shipped_root
from tilegym_db.records.solution import TILE_LANGUAGES

SHIPPED = Catalog((shipped_root(),))
TILE_SOLUTIONS = [name for name, files in SHIPPED.solutions.items() if files.record.spec.language in TILE_LANGUAGES]


@pytest.fixture
def model_hits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import model_hits

    module: ModuleType = model_hits
    return module


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import own_kernels

    module: ModuleType = own_kernels
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
    assert results["prefill"]["8x8"]["hits"] == {"rms_norm": 5, "swiglu": 2, "rope_neox": 2}
    assert results["decode"]["8x8+3 static cache"]["hits"] == {"rms_norm": 10, "swiglu": 4, "rope_neox": 4}
    assert results["decode"]["1x8+3 dynamic cache"]["equal_tokens"] == "3 of 3"
    assert results["prefill"]["1x8"]["patched_against_stock"] == 0


def test_operators_without_kernels_and_wrong_logits_are_findings(
    model_hits: ModuleType, poison: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(model_hits, monkeypatch, tmp_path / "hits.json") == 1
    found = json.loads((tmp_path / "hits.json").read_text())["findings"]
    assert "prefill 1x8: nan times the error of stock against fp32" in found


@pytest.mark.parametrize("name", TILE_SOLUTIONS)
def test_each_tile_solution_is_profiled_at_a_size_it_declares(name: str, own_kernels: ModuleType) -> None:
    solution = SHIPPED.solution(name)
    definition = SHIPPED.definition(solution.record.definition)
    cases = list(own_kernels.declared_cases(definition, solution, "sm_90"))
    dtypes = solution.record.spec.dtypes.get("T", definition.dtypes["T"])
    assert {case.dtypes["T"] for _, case in cases} == set(dtypes)
    stock = next(files for files in SHIPPED.solutions_for(definition.name) if files.record.spec.role == "baseline")
    own_kernels.bound_call(definition, stock, cases[0][1], "cpu")


def test_only_kernels_of_the_solution_itself_are_its_own(own_kernels: ModuleType) -> None:
    functions = {"_norm", "norm_kernel", "norm", "run"}
    own = [
        "_norm",
        "norm_kernel",
        "norm_kernel_1",
        "_norm_KcT2f32s8_1",
        "void norm_kernel(float*, int)",
        "Memset (Device)",
    ]
    foreign = [
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
        "nvjet_hsh_128x128_64x6_TNT",
        "Memcpy DtoD (Device -> Device)",
        "normalize",
        "triton_poi_fused_norm_0",
        "other_norm_kernel",
    ]
    assert own_kernels.foreign_kernels([*own, *foreign], functions) == foreign


def test_the_functions_of_every_source_count(own_kernels: ModuleType) -> None:
    names = own_kernels.function_names(SHIPPED.solution("rms_norm_tilelang"))
    assert {"run", "rms_norm", "rms_norm_kernel"} <= names


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_nothing_runs_on_a_device_that_is_not_there(own_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_kernels.device_activities(lambda: torch.ones(3) + 1) == []
    with pytest.raises(HardwareError, match="needs a CUDA GPU"):
        own_kernels.profile_catalog("*", lambda text: None)
