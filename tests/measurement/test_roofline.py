from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import definition_of, read_lines, trace_files
from tilegym_db.records import Definition
from tilegym_db.records.roofline import GpuPeaks, Measured, below_floor, product_ceiling, sol_ratio, speed_of_light

L2 = 60 << 20
BUS = 2 * 3201e6 * 6144 / 8
CEILING = 132 * 1980e6 * 4096
T = 1e12

TRACES = trace_files(shipped_root() / "traces" / "h200")


def measured(value: float, spread: float = 0.0) -> Measured:
    return Measured(value=value, spread=spread, rounds=5, how="a call")


def h200(**changes: Any) -> GpuPeaks:
    content: dict[str, Any] = {
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "sm": "sm_90",
        "timestamp": datetime(2026, 11, 21, tzinfo=UTC),
        "timer": "events",
        "copy_bytes_per_s": measured(4.3 * T),
        "read_bytes_per_s": measured(4.5 * T),
        "flops": {"bfloat16": measured(790 * T), "tf32": measured(400 * T), "float32": measured(50 * T)},
        "launch_us": measured(3.0),
        "no_launch_us": measured(1.0),
        "l2_bytes": L2,
        "sm_count": 132,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "memory_bus_bits": 6144,
    }
    return GpuPeaks.from_dict(content | changes)


@pytest.fixture
def operator(definition_record: Callable[..., dict[str, Any]]) -> Callable[..., Definition]:
    """An operator over M x K and N x K with the given cost, whose inputs have the given dtypes."""

    def make(flops: str, size: str, a: str = "bfloat16", b: str = "bfloat16", out: str = "bfloat16") -> Definition:
        return Definition.from_dict(
            definition_record(
                dtypes=None,
                axes={name: {"type": "var"} for name in "MNK"},
                inputs={"a": {"shape": ["M", "K"], "dtype": a}, "b": {"shape": ["N", "K"], "dtype": b}},
                outputs={"out": {"shape": ["M", "N"], "dtype": out}},
                constraints=None,
                cost={"flops": flops, "bytes": size},
                reference="# Source: https://example.org/a.py#L1\ndef run(a, b):\n    return a @ b.T\n",
            )
        )

    return make


GEMM = ("2 * M * N * K", "2 * (M * K + N * K + M * N)")


def sized(m: int, n: int, k: int) -> dict[str, int]:
    return {"M": m, "N": n, "K": k}


def test_large_product_is_bound_by_compute_and_one_row_by_memory(operator):
    gemm = operator(*GEMM)
    large = speed_of_light(gemm, sized(8192, 8192, 8192), {}, h200())
    row = speed_of_light(gemm, sized(1, 128256, 4096), {}, h200())
    assert (large.bound_by, large.us) == ("compute", pytest.approx(2 * 8192**3 / (790 * T) * 1e6))
    assert row.bound_by == "memory"
    assert row.read_bytes + row.written_bytes == row.bytes
    assert row.written_bytes == 2 * 128256


@pytest.mark.parametrize(
    ("written", "rate"),
    [(0.0, 4.5), (0.5, 4.3), (1.0, 4.3), (0.25, 2 / (1 / 4.5 + 1 / 4.3))],
    ids=["only reads", "a copy", "only writes", "in between"],
)
def test_the_memorys_rate_depends_on_the_share_of_writes(operator, written, rate):
    # The output has 2 * M * N bytes; the cost says how many there are in all.
    size = "1000000 + 0 * M" if not written else f"2 * M * N / {written}"
    definition = operator("0", size)
    axes = sized(0, 0, 1) if not written else sized(1024, 1024, 1)
    sol = speed_of_light(definition, axes, {}, h200())
    assert sol.bytes / sol.us * 1e6 == pytest.approx(rate * T)


def test_reading_kernel_slower_than_the_copy_lowers_no_peak(operator):
    definition = operator("0", "1000000 + 0 * M")
    for read in (measured(4.0 * T), None):
        sol = speed_of_light(definition, sized(0, 0, 1), {}, h200(read_bytes_per_s=read))
        assert sol.bytes / sol.us * 1e6 == pytest.approx(4.3 * T)


@pytest.mark.parametrize(
    ("a", "b", "math_mode", "tflops"),
    [
        ("bfloat16", "bfloat16", "ieee", 790),
        ("float32", "bfloat16", "ieee", 790),  # scales and angles are float32 beside narrow operands
        ("float32", "float32", "ieee", 50),
        ("float32", "float32", "tf32", 400),
        ("float8_e4m3fn", "float32", "ieee", 1400),
        ("float8_e5m2", "float8_e5m2", "ieee", 1400),
        ("float4_e2m1", "float4_e2m1", "ieee", 1400),  # there are no float4 products on Hopper
    ],
)
def test_applicable_product_is_the_fastest_for_the_operands(operator, a, b, math_mode, tflops):
    peaks = h200(flops={**h200().flops, "float8_e4m3fn": measured(1400 * T)})
    sol = speed_of_light(operator("1e15 + 0 * M", GEMM[1], a, b), sized(1, 1, 1), {}, peaks, math_mode=math_mode)
    assert (sol.bound_by, sol.us) == ("compute", pytest.approx(1e15 / (tflops * T) * 1e6))


def test_a_gpu_without_a_narrow_product_widens_the_operands(operator):
    ampere = h200(gpu="a100-sxm", gpu_name="NVIDIA A100", sm="sm_80", flops={"float16": measured(280 * T)})
    definition = operator("1e15 + 0 * M", GEMM[1], "float8_e4m3fn", "float8_e4m3fn")
    assert speed_of_light(definition, sized(1, 1, 1), {}, ampere).us == pytest.approx(1e15 / (280 * T) * 1e6)


@pytest.mark.parametrize(
    ("dtype", "flops"),
    [("int8", {"bfloat16": measured(790 * T)}), ("bfloat16", {}), ("float8_e4m3fn", {"bfloat16": measured(790 * T)})],
    ids=["integers", "nothing calibrated", "a product that was not calibrated"],
)
def test_where_no_peak_applies_only_memory_bounds(operator, dtype, flops):
    sol = speed_of_light(operator("1e15 + 0 * M", GEMM[1], dtype, dtype), sized(64, 64, 64), {}, h200(flops=flops))
    assert sol.bound_by == "memory"


def test_without_cost_or_work_there_is_no_speed_of_light(operator, definition_record):
    free = Definition.from_dict(definition_record(cost=None))
    assert speed_of_light(free, {"M": 4, "N": 8}, {"T": "float32"}, h200()) is None
    assert speed_of_light(operator(*GEMM), sized(0, 0, 0), {}, h200()) is None


def test_element_wise_work_is_never_bound_by_compute():
    """True of every shipped operator without products: none comes near the flops per byte that it would take."""
    catalog = Catalog.default()
    bound = {
        name: speed_of_light(definition, axes, dtypes, h200()).bound_by
        for name in ("rms_norm", "fused_add_rms_norm", "softmax", "silu_and_mul", "swiglu", "rope_neox")
        for definition in (catalog.definition(name),)
        for workload in catalog.workloads_for(name)[:4]
        for axes in (definition.bind_axes(workload.axes),)
        for dtypes in (definition.bind_dtypes(workload.dtypes),)
    }
    assert bound == dict.fromkeys(bound, "memory")


def test_the_ratio_is_the_share_of_the_speed_of_light(operator):
    sol = speed_of_light(operator(*GEMM), sized(4096, 4096, 4096), {}, h200())
    assert sol_ratio(sol, 2 * sol.us) == 0.5


# -- the floor --------------------------------------------------------------------------------------------------------


def floor_of(sol: Any, peaks: GpuPeaks, **changes: Any) -> float:
    """The smallest time that is believed, by bisection."""
    low, high = 0.0, 1e7
    for _ in range(80):
        middle = (low + high) / 2
        if below_floor(middle, sol, peaks, **{"cold_l2": True, "timer": "events", **changes}):
            low = middle
        else:
            high = middle
    return high


def copied(size: int, peaks: GpuPeaks, operator: Callable[..., Definition]) -> Any:
    """The work of a call that writes ``size`` bytes and reads as many."""
    return speed_of_light(operator("0", "4 * M * N"), sized(1, size // 2, 0), {}, peaks)


@pytest.mark.parametrize(
    ("size", "cold", "crossing"),
    [
        (1 << 30, True, 2 * (1 << 30) - L2),  # what stays dirty in the L2 is written later
        (1 << 30, False, 2 * (1 << 30) - 2 * L2),  # and a warm call may find as much of its inputs there
        (32 << 20, True, 32 << 20),  # all the output stays in the L2; all the input comes from memory
    ],
)
def test_only_bytes_that_cross_the_bus_during_the_call_count(operator, size, cold, crossing):
    peaks = h200()
    floor = floor_of(copied(size, peaks, operator), peaks, cold_l2=cold)
    assert floor == pytest.approx(0.95 * crossing / BUS * 1e6)


def test_warm_set_inside_the_l2_has_only_the_floor_of_a_launch(operator):
    peaks = h200()
    sol = copied(16 << 20, peaks, operator)
    assert floor_of(sol, peaks, cold_l2=False) == pytest.approx(2.0)
    assert below_floor(3.1, sol, peaks, cold_l2=False, timer="events") is None


def test_no_product_is_faster_than_all_tensor_cores_at_top_clock(operator):
    peaks = h200()
    sol = speed_of_light(operator(*GEMM), sized(8192, 8192, 8192), {}, peaks)
    assert floor_of(sol, peaks) == pytest.approx(0.95 * 2 * 8192**3 / CEILING * 1e6)
    assert below_floor(sol.us * 0.9, sol, peaks, cold_l2=True, timer="events") is None  # a better kernel than cuBLAS


def test_floor_of_float32_is_that_of_tf32_even_for_ieee(operator):
    definition = operator(*GEMM, "float32", "float32", "float32")
    ieee = speed_of_light(definition, sized(8192, 8192, 8192), {}, h200())
    assert floor_of(ieee, h200()) == pytest.approx(0.95 * 2 * 8192**3 / (CEILING / 2) * 1e6)


@pytest.mark.parametrize(("spread", "floor"), [(0.0, 2.0), (0.1, 1.8), (3.0, 1.0)])
def test_launch_is_distinguished_from_an_idle_call_by_the_spread(operator, spread, floor):
    peaks = h200(launch_us=measured(3.0, spread))
    sol = copied(2, peaks, operator)
    assert floor_of(sol, peaks) == pytest.approx(floor)


def test_launch_times_of_another_timer_are_not_compared(operator):
    assert below_floor(0.5, copied(2, h200(), operator), h200(), cold_l2=True, timer="cupti") is None


@pytest.mark.parametrize(
    ("latency_us", "axes", "said"),
    [
        (100.0, (8192, 8192, 1), "must cross the memory bus of NVIDIA H200"),
        (400.0, (8192, 8192, 8192), "flops on bfloat16 operands"),
        (0.9, (1, 1, 1), "so none ran"),
    ],
)
def test_a_quarantined_time_is_explained(operator, latency_us, axes, said):
    flops = GEMM[0] if axes[2] > 1 else "0"
    definition = operator(flops, "2 * M * K + 2 * N * K + 20 * M * N")
    sol = speed_of_light(definition, sized(*axes), {}, h200())
    found = below_floor(latency_us, sol, h200(), cold_l2=True, timer="events")
    assert found is not None
    assert said in found
    assert f"{latency_us:.4g} us is below the physics floor" in found


def test_experts_that_may_not_be_chosen_are_not_in_the_floor():
    definition = Catalog((shipped_root(),)).definition("moe_experts")
    axes = definition.bind_axes({"M": 16, "H": 2048, "I": 768, "E": 128, "K": 8})
    light = speed_of_light(definition, axes, {"T": "bfloat16", "W": "bfloat16"}, h200())
    assert light is not None
    # Of 128 experts, 16 tokens choose 82 on average, or 8 if all choose the same.
    assert light.bytes == pytest.approx(82.4 * 3 * 2048 * 768 * 2, rel=0.001)
    assert below_floor(131.9, light, h200(), cold_l2=True, timer="events") is None
    assert "no kernel" in str(below_floor(1.0, light, h200(), cold_l2=True, timer="events"))
    everything = replace(light, chosen_bytes=0.0)
    assert "memory bus" in str(below_floor(131.9, everything, h200(), cold_l2=True, timer="events"))


def test_an_unknown_architecture_has_no_ceiling_for_products(operator):
    peaks = h200(sm="sm_75")
    assert product_ceiling("bfloat16", peaks) is None
    sol = speed_of_light(operator(*GEMM), sized(8192, 8192, 8192), {}, peaks)
    assert below_floor(sol.us / 2, sol, peaks, cold_l2=True, timer="events") is None


@pytest.mark.records("path")
@pytest.mark.parametrize("path", TRACES, ids=definition_of)
def test_no_published_time_is_below_the_floor(path):
    catalog = Catalog.default()
    refused = []
    for trace in read_lines(path.read_bytes(), path):
        if not (performance := trace.get("performance")):
            continue
        sol = speed_of_light(catalog.definition(trace["definition"]), trace["axes"], trace.get("dtypes", {}), h200())
        if sol is None:
            continue
        timing = {"cold_l2": performance["cold_l2"], "timer": performance["timer"]}
        if reason := below_floor(performance["latency_us"], sol, h200(), **timing):
            refused.append((trace["solution"], trace["axes"], reason))
    assert refused == []
