"""Configs of shipped kernels, through the real compilers, for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest

from tilegym_db.backends.aot import CompileResult
from tilegym_db.backends.toolchains import toolchain_status
from tilegym_db.catalog import Catalog
from tilegym_db.measurement.tune.search import CompileAhead, ConfigCandidate, refusal


def build(solution: str, target: str, *configs: dict[str, Any]) -> dict[str, str]:
    catalog = Catalog.default()
    definition = catalog.definition("rms_norm")
    workload = next(item for item in catalog.workloads_for("rms_norm") if item.axes == {"M": 1, "N": 4096})
    with CompileAhead(definition, catalog.solution(solution), workload, target) as ahead:
        wave = [ConfigCandidate(config, "") for config in configs]
        ahead.start(wave)
        return ahead.refused(wave)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("language", "good", "bad", "reason"),
    [
        ("triton", {"BLOCK_M": 1, "num_warps": 4}, {"BLOCK_M": 1, "num_warps": 3}, "power of 2"),
        ("cutile", {"TILE_M": 1, "WARPS": 4}, {"TILE_M": 3, "WARPS": 4}, "power of"),
        ("tilelang", {"threads": 128, "rows": 1}, {"threads": 2048, "rows": 1}, "Divide by zero"),
    ],
)
def test_config_that_does_not_compile_is_separated_from_others(language, good, bad, reason):
    if not toolchain_status(language).available:
        pytest.fail(f"{language} is not installed: make install")
    refused = build(f"rms_norm_{language}", "sm_90", {}, good, bad)
    (said,) = refused.values()
    assert list(refused) == [ConfigCandidate(bad, "").id]
    assert reason in said


@pytest.mark.parametrize(("solution", "target"), [("rms_norm_triton", ""), ("rms_norm_triton", "sm_75")])
def test_worker_compiles_by_itself_if_nothing_compiles_ahead(solution, target):
    assert build(solution, target, {"BLOCK_M": 1, "num_warps": 3}) == {}


@pytest.mark.turn("tilegym_db/measurement/tune/")  # compilers of a whole search
def test_leaving_ends_the_compilers_without_waiting_for_the_rest():
    catalog = Catalog.default()
    definition, solution = catalog.definition("rms_norm"), catalog.solution("rms_norm_triton")
    workload = next(item for item in catalog.workloads_for("rms_norm") if item.axes == {"M": 1, "N": 4096})
    wave = [ConfigCandidate(config, "") for config in solution.record.configs()]
    with CompileAhead(definition, solution, workload, "sm_90") as ahead:
        ahead.start(wave)
        assert ahead.refused(wave[:1]) == {}
    assert ahead._thread is not None
    assert not ahead._thread.is_alive()
    assert sum(not result.exception() for result in ahead._results.values()) < len(wave)


@pytest.mark.parametrize("status", ["compiled", "refused", "toolchain-missing", "unsupported"])
def test_only_the_solutions_own_failure_counts(status):
    assert refusal(CompileResult(status, log="a.py:1: error: no room")) is None


def test_the_reason_is_the_line_that_names_the_error():
    log = "Traceback:\n  a.py\n  ^^^^\na.py:1: error: no room\n  ^^^^\n"
    assert refusal(CompileResult("failed", log=log)) == "a.py:1: error: no room"
    assert refusal(CompileResult("failed", log="num_warps must be\n  ^^^\n")) == "num_warps must be"
    assert refusal(CompileResult("failed")) == "the compiler said nothing"
