"""Measurement of the peaks of this GPU: a large copy, a large read, large matrix products, and the cost of a launch.

The rates use the same clock and the same L2 flush as Solutions, so that their overheads cancel in a speed-of-light ratio.
Each rate is the best of several calls, sizes and places in memory, since a peak is not a typical value. The place of a
block decides up to a tenth of its rate (``docs/decisions/timing.md``, 0007).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.machine import Machine, timing_lock
from tilegym_db.measurement.timing import ClockWatch, median
from tilegym_db.records.roofline import GpuPeaks, Measured

if TYPE_CHECKING:
    import torch


# ---- peak calls -----------------------------------------------------------------------------------
# Calls that reach the peaks of a GPU: copies, reads, matrix products of the library, and an empty kernel.

GIB = 1 << 30


@dataclass(frozen=True)
class PeakCall:
    """A call that may reach a peak; it processes ``amount`` (bytes or flops) each time."""

    how: str
    amount: float
    call: Callable[[], Any]
    warm: bool = False


def empty_kernel() -> None:
    """Launch a kernel of one thread that waits for zero cycles."""
    import torch

    busy_wait: Any = torch.cuda._sleep
    busy_wait(0)


def copy_candidates(source: torch.Tensor, target: torch.Tensor, size: int) -> Iterator[PeakCall]:
    """Yield two kernels that read ``size`` bytes of one float32 tensor and write them to another."""
    import torch

    one, other = source[: size // 4], target[: size // 4]
    spelled = f"of {size / GIB:.3g} GiB, cold L2"
    yield PeakCall(f"copy_ {spelled}", 2.0 * size, lambda: other.copy_(one))
    yield PeakCall(f"neg {spelled}", 2.0 * size, lambda: torch.neg(one, out=other))


def read_candidates(source: torch.Tensor) -> Iterator[PeakCall]:
    """Yield two kernels that read a whole float32 tensor and write almost nothing."""
    size = source.numel() * 4
    columns = 4096
    matrix = source[: source.numel() // columns * columns].view(-1, columns)
    vector = matrix[0].clone()
    yield PeakCall(f"sum of {size / GIB:.3g} GiB, cold L2", float(size), source.sum)
    yield PeakCall(f"mv of {size / GIB:.3g} GiB, cold L2", 4.0 * matrix.numel(), lambda: matrix.mv(vector))


def product_candidates(dtype: str, shape: tuple[int, int, int], device: str) -> Iterator[PeakCall]:
    """Yield one library product ``[M, K] x [N, K]^T``, with a cold and a warm L2.

    The data is random: zeros draw less power and run faster.
    """
    import torch

    m, n, k = shape
    left, right = (torch.randn(rows, k, device=device) for rows in (m, n))
    call: Callable[[], Any]
    if dtype == "float8_e4m3fn":
        scale = torch.ones((), device=device)
        one, other = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()

        def call() -> Any:
            return torch._scaled_mm(one, other, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        storage = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        one, other = left.to(storage), right.to(storage).t()
        out = torch.empty(m, n, dtype=storage, device=device)

        def call() -> Any:
            return torch.mm(one, other, out=out)

    plain = PeakCall(f"{dtype} product {m}x{n}x{k}, cold L2", 2.0 * m * n * k, call)
    yield plain
    yield dataclasses.replace(plain, how=plain.how.replace("cold L2", "back to back"), warm=True)


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Set PyTorch's process-wide choice between TF32 and full float32 products, and restore it afterwards."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


ROUNDS = 5
BLOCK_US = 10_000.0
MAX_BLOCK = 20
PLACES = 4
COPY_BYTES = (GIB, 2 * GIB)
"""Bytes per operand. They are large because part of the written data stays in the L2, which must not count for much."""
COPY_SHARE_OF_MEMORY = 32
PRODUCTS = ((4096, 4096, 4096), (4096, 4096, 14336), (8192, 8192, 8192))
SLOW_PRODUCTS = PRODUCTS[:1]
"""Shapes without tensor cores: larger ones take tens of milliseconds and are not faster."""

Block = Callable[[Callable[[], Any], int], list[float]]
"""A function that makes the given number of calls and returns microseconds, one value per sample."""


@dataclass(frozen=True)
class StopWatch:
    """Timers of blocks of calls: ``cold`` flushes the L2 before each call, ``warm`` runs the calls back to back."""

    cold: Block
    warm: Block


def calibrate(machine: Machine) -> GpuPeaks:
    """Measure the peaks of a GPU. This takes a few seconds and a quarter of its memory, and holds its timing lock.

    Raises:
        HardwareError: there is no GPU, it slowed down during calibration, it lacks memory, or its driver does not state its
            limits.
        RecordError: a measured peak is more than the device can reach.
    """
    if not machine.is_gpu:
        raise HardwareError(
            f"peaks are measured on a GPU, and '{machine.gpu}' ({machine.gpu_name}) is not a GPU; traces of a CPU have no "
            "speed of light. Run tilegym-db doctor calibrate on a machine with an NVIDIA GPU.",
            code="gpu_absent",
        )
    import torch

    facts = _driver_facts(torch.device(machine.device).index or 0)
    try:
        with timing_lock(machine.device), ClockWatch(machine.device) as clocks, torch.cuda.device(machine.device):
            measured = _measure(machine)
    except torch.OutOfMemoryError as error:
        raise HardwareError(
            f"{machine.gpu_name} has too little free memory to be calibrated: {error}. End the other programs on it.",
            code="gpu_memory_short",
        ) from None
    reading = clocks.reading()
    if reading.throttled:
        raise HardwareError(
            f"{machine.gpu_name} slowed down while it was calibrated ({', '.join(reading.reasons)}); nothing was stored. "
            "Try again when it has cooled down.",
            code="gpu_slowed_down",
        )
    measured |= {
        "gpu": machine.gpu,
        "gpu_name": machine.gpu_name,
        "sm": machine.sm,
        "driver": machine.driver,
        "cuda": machine.cuda,
        "libs": machine.libs,
        "timestamp": datetime.now(UTC),
        "timer": "events",
        "clock_mhz": reading.sm_mhz,
    }
    return GpuPeaks.from_dict(facts | measured, f"calibration of {machine.gpu_name}")


def best_rate(candidates: Sequence[PeakCall], watch: StopWatch, rounds: int = ROUNDS) -> Measured:
    """Return the highest rate (amount per second) of the candidates. They take turns, so that drift affects all of them."""
    blocks = [_calls_per_block(candidate, watch) for candidate in candidates]
    rates: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for candidate, calls, found in zip(candidates, blocks, rates, strict=True):
            block = watch.warm if candidate.warm else watch.cold
            found.append(candidate.amount / median(block(candidate.call, calls)) * 1e6)
    best = max(range(len(candidates)), key=lambda index: median(rates[index]))
    return _measured(rates[best], candidates[best].how)


def _calls_per_block(candidate: PeakCall, watch: StopWatch) -> int:
    """Return the number of calls per block. This also warms up: libraries choose and load their kernels."""
    watch.cold(candidate.call, 2)
    once_us = max(median(watch.cold(candidate.call, 3)), 1.0)
    return max(2, min(MAX_BLOCK, int(BLOCK_US / once_us)))


def _measured(values: Sequence[float], how: str) -> Measured:
    middle = median(values)
    spread = (max(values) - min(values)) / (2 * middle)
    return Measured(value=float(f"{middle:.5g}"), spread=round(spread, 5), rounds=len(values), how=how)


def _measure(machine: Machine) -> dict[str, Any]:
    watch = _device_stop_watch(machine.device)
    return {
        "launch_us": _launch(watch, "an empty kernel", empty_kernel),
        "no_launch_us": _launch(watch, "no kernel at all", lambda: None),
        "flops": _products(machine, watch),
        **_memory(machine, watch),  # last, since it frees the memory of the allocator
    }


# -- measurements -------------------------------------------------------------------------------------------------


def _launch(watch: StopWatch, how: str, call: Callable[[], Any]) -> Measured:
    watch.cold(call, MAX_BLOCK)
    return _measured([median(watch.cold(call, MAX_BLOCK)) for _ in range(ROUNDS)], how)


def _memory(machine: Machine, watch: StopWatch) -> dict[str, Measured]:
    """Return ``copy_bytes_per_s`` and ``read_bytes_per_s``, measured over several allocations."""
    import torch

    sizes = sorted({min(size, machine.memory_bytes // COPY_SHARE_OF_MEMORY) for size in COPY_BYTES})
    elements = sizes[-1] // 4
    pairs = [torch.randn(2, elements, device=machine.device) for _ in range(PLACES)]
    copies = [item for source, target in pairs for size in sizes for item in copy_candidates(source, target, size)]
    reads = [item for source, _ in pairs for item in read_candidates(source)]
    found = {"copy_bytes_per_s": best_rate(copies, watch), "read_bytes_per_s": best_rate(reads, watch)}
    del pairs, copies, reads
    torch.cuda.empty_cache()
    return found


def _products(machine: Machine, watch: StopWatch) -> dict[str, Measured]:
    found = {}
    major, minor = (int(part) for part in (machine.sm[3:-1], machine.sm[-1:]))
    for dtype, (shapes, needs) in _PRODUCT_PLAN.items():
        if (major, minor) >= needs:
            with float32_precision("high" if dtype == "tf32" else "highest"):
                candidates = [item for shape in shapes for item in product_candidates(dtype, shape, machine.device)]
                found[dtype] = best_rate(candidates, watch)
    return found


# Product dtype -> shapes, and the minimum compute capability that has instructions for it.
_PRODUCT_PLAN: dict[str, tuple[tuple[tuple[int, int, int], ...], tuple[int, int]]] = {
    "bfloat16": (PRODUCTS, (8, 0)),
    "float16": (PRODUCTS, (7, 0)),
    "tf32": (PRODUCTS, (8, 0)),
    "float32": (SLOW_PRODUCTS, (0, 0)),
    "float8_e4m3fn": (PRODUCTS, (8, 9)),
}


# -- the device -------------------------------------------------------------------------------------------------------


def _device_stop_watch(device: str) -> StopWatch:
    import torch

    from tilegym_db.sandbox.timing import BlockTimer

    timer = BlockTimer(device)
    new_event: Any = torch.cuda.Event

    def cold(call: Callable[[], Any], calls: int) -> list[float]:
        samples = timer.time([0] * calls, {0: call}, lambda index: None, lambda index, returned: None)
        return [sample.device_us for sample in samples]

    def warm(call: Callable[[], Any], calls: int) -> list[float]:
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        torch.cuda.synchronize(device)
        timer.occupy(50.0 * calls)  # keep the device busy until the host has queued every call
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1e3 / calls]

    return StopWatch(cold, warm)


# CUdevice_attribute: limits of the device as the driver states them.
_ATTRIBUTES: dict[str, tuple[int, float]] = {
    "max_sm_mhz": (13, 1e-3),
    "sm_count": (16, 1),
    "max_memory_mhz": (36, 1e-3),
    "memory_bus_bits": (37, 1),
    "l2_bytes": (38, 1),
}


def _driver_facts(index: int) -> dict[str, Any]:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    facts: dict[str, Any] = {}
    for name, (attribute, factor) in _ATTRIBUTES.items():
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index) != 0 or value.value <= 0:
            raise HardwareError(
                f"the driver does not state {name} of GPU {index}; its peaks cannot be checked.",
                code="gpu_limits_unknown",
            )
        facts[name] = value.value * factor
    return facts
