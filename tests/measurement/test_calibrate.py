from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.measurement import run_setup
from tilegym_db.measurement.calibrate import (
    PeakCall,
    StopWatch,
    best_rate,
    calibrate,
    copy_candidates,
    float32_precision,
    product_candidates,
    read_candidates,
)
from tilegym_db.measurement.machine import Machine, cpu_machine, select_machine
from tilegym_db.measurement.run_setup import peaks_or_reason
from tilegym_db.published.input_files import own_peaks_files
from tilegym_db.records.roofline import PRODUCT_DTYPES, GpuPeaks, Measured


def wall(call: Callable[[], Any], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


WALL = StopWatch(wall, wall)


def peaks(**changes: Any) -> GpuPeaks:
    rate = Measured(value=4e12, spread=0.01, rounds=5, how="a copy")
    content: dict[str, Any] = {
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "sm": "sm_90",
        "timestamp": datetime(2026, 11, 21, tzinfo=UTC),
        "timer": "events",
        "copy_bytes_per_s": rate,
        "launch_us": Measured(value=3.5, spread=0.01, rounds=5, how="an empty kernel"),
        "no_launch_us": Measured(value=1.0, spread=0.01, rounds=5, how="no kernel at all"),
        "l2_bytes": 60 << 20,
        "sm_count": 132,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "memory_bus_bits": 6144,
    }
    return GpuPeaks.from_dict(content | changes)


def scripted(times_us: dict[str, list[float]]) -> tuple[StopWatch, list[PeakCall], list[str]]:
    """Candidates that are timed at given values, one a block (the first two blocks warm up), and the order of blocks."""
    played: list[str] = []
    rounds = {name: iter([values[0]] * 2 + values) for name, values in times_us.items()}

    def block(call: Callable[[], Any], calls: int) -> list[float]:
        name = call()
        played.append(name)
        return [next(rounds[name])] * calls

    candidates = [PeakCall(name, 1e6, lambda name=name: name) for name in times_us]
    return StopWatch(block, block), candidates, played


def test_the_best_candidate_by_its_median_round_is_the_peak():
    watch, candidates, _ = scripted({"slow": [20, 20, 20], "lucky once": [1, 20, 20], "best": [10, 11, 10]})
    found = best_rate(candidates, watch, rounds=3)
    assert (found.how, found.value, found.rounds) == ("best", 1e11, 3)


def test_the_spread_is_half_the_range_of_the_rounds():
    watch, candidates, _ = scripted({"one": [10, 8, 12.5]})
    found = best_rate(candidates, watch, rounds=3)
    assert found.spread == pytest.approx((1.25 - 0.8) / 2)


def test_candidates_take_turns_so_that_a_drift_meets_all_of_them():
    watch, candidates, played = scripted({"a": [1, 1, 1], "b": [1, 1, 1]})
    best_rate(candidates, watch, rounds=3)
    assert played[4:] == ["a", "b"] * 3


def test_warm_candidates_are_timed_back_to_back():
    kinds: list[str] = []

    def block(kind: str) -> Callable[[Callable[[], Any], int], list[float]]:
        def play(call: Callable[[], Any], calls: int) -> list[float]:
            kinds.append(kind)
            return [1.0] * calls

        return play

    best_rate([PeakCall("x", 1.0, int, warm=True)], StopWatch(block("cold"), block("warm")), rounds=2)
    assert kinds[-2:] == ["warm", "warm"]


@pytest.mark.parametrize("dtype", [name for name in PRODUCT_DTYPES if name != "float8_e4m3fn"])
def test_a_product_call_multiplies_what_its_flops_say(dtype):
    cold, warm = product_candidates(dtype, (32, 16, 64), "cpu")
    found = cold.call()
    assert found.shape == (32, 16)
    assert found.float().std() == pytest.approx(8, rel=0.3)  # a sum of 64 products of standard normals
    assert cold.amount == 2 * 32 * 16 * 64
    assert (cold.warm, warm.warm) == (False, True)
    assert best_rate([cold, warm], WALL, rounds=2).value > 0


def test_copies_and_reads_touch_every_byte_that_they_count():
    source, target = torch.randn(2, 8192)
    for candidate in copy_candidates(source, target, 4 * 4096):
        target.zero_()
        candidate.call()
        assert torch.equal(target[:4096].abs(), source[:4096].abs())
        assert int(target[4096:].count_nonzero()) == 0
        assert candidate.amount == 2 * 4 * 4096
    total, product = read_candidates(source)
    assert total.call() == pytest.approx(float(source.sum()))
    assert torch.allclose(product.call(), source.view(2, 4096) @ source[:4096])
    assert total.amount == product.amount == 4 * 8192


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_the_precision_of_float32_products_is_put_back(precision):
    before = torch.get_float32_matmul_precision()
    with float32_precision(precision):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), float32_precision(precision):
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == before


def test_a_cpu_has_no_peaks(home):
    with raises(HardwareError, "gpu_absent", "tilegym-db doctor calibrate"):
        calibrate(cpu_machine())
    assert peaks_or_reason(cpu_machine(), None, home) == (None, [])
    assert not home.exists()


def test_unknown_gpu_is_calibrated_and_the_result_is_stored(home, monkeypatch):
    monkeypatch.setattr(run_setup, "calibrate", lambda machine: peaks())
    h200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90")
    known = peaks(driver="1")
    assert peaks_or_reason(h200, known, home) == (known, [])
    assert own_peaks_files(home) == []
    assert peaks_or_reason(h200, None, home) == (peaks(), [])
    (stored,) = own_peaks_files(home)
    assert GpuPeaks.from_json(stored.read_bytes()) == peaks()


@pytest.mark.gpu
def test_a_gpu_is_calibrated_in_less_than_fifteen_seconds(home):
    machine = select_machine("auto")
    before = torch.get_float32_matmul_precision()
    start = time.monotonic()
    found = calibrate(machine)
    assert time.monotonic() - start < 15
    assert torch.get_float32_matmul_precision() == before
    assert (found.gpu, found.sm) == (machine.gpu, machine.sm)
    # Between half of what the bus carries and all of it; one that reads only is not slower than one that turns round.
    ceiling = found.memory_ceiling_bytes_per_s
    assert 0.5 * ceiling < found.copy_bytes_per_s.value < ceiling
    assert found.read_bytes_per_s is not None
    assert 0.9 * found.copy_bytes_per_s.value < found.read_bytes_per_s.value < ceiling
    assert all(rate.spread < 0.1 for rate in (found.copy_bytes_per_s, found.read_bytes_per_s, *found.flops.values()))
    assert found.flops["bfloat16"].value > 2 * found.flops["float32"].value
    assert found.flops["bfloat16"].value < ceiling_of(found)
    assert found.l2_bytes == torch.cuda.get_device_properties(0).L2_cache_size
    assert found.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    assert 1 < found.launch_us.value < 10


def ceiling_of(found: GpuPeaks) -> float:
    from tilegym_db.records.roofline import product_ceiling

    ceiling = product_ceiling("bfloat16", found)
    assert ceiling is not None
    return ceiling
