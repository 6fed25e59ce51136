"""Roofline of a call: its speed of light, the floor below which a time is impossible, and the peaks of a GPU.

The *speed of light* is a reference: the Definition's compulsory work over the rates that are stated for this GPU model, or were
measured on a GPU without stated rates. A call whose output stays in the L2 can be slightly faster. The *floor* rejects times, so
it uses only hard limits:

- The memory bus at its highest clock, for the bytes that must cross it during the call. Before a cold call the L2 was
  flushed, so every input comes from memory. Writes end in the L2, and lines that are still dirty when the call returns
  reach memory later, outside the measured time. Before a warm call, inputs may be in the L2 as well.
- The tensor cores of every SM at its highest clock, in the fastest product that the operands' dtype allows.
- A launch: a call must launch a kernel to write its outputs, and even an empty kernel takes time.

If other inputs choose the slices of an input that are used (ids choose experts), the work depends on the contents. The
Definition's cost then states the usual work, and the floor counts neither those bytes nor their products.

The floor treats all flops as products. Vector units are slower than tensor cores, so the bound holds for any arithmetic.
It is loose without products, but then memory decides: the bound would need about 200 flops per byte moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Int64, Real, Record, RecordPart, in_utc
from tilegym_db.records.definition import Definition
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.hardware import CPU
from tilegym_db.records.text import NAME_PATTERN

FLOOR_MARGIN = 0.95
"""A time is rejected if it is below this share of the floor; the margin covers errors of the driver's figures and timer."""

PRODUCT_FLOPS_PER_CLOCK: dict[str, dict[str, int]] = {
    "sm_80": {"tf32": 1024, "float16": 2048},
    "sm_86": {"tf32": 512, "float16": 1024},
    "sm_89": {"tf32": 512, "float16": 1024, "float8": 2048},
    "sm_90": {"tf32": 2048, "float16": 4096, "float8": 8192},
    "sm_100": {"tf32": 4096, "float16": 8192, "float8": 16384, "float4": 32768},
    "sm_103": {"tf32": 4096, "float16": 8192, "float8": 16384, "float4": 49152},
    "sm_120": {"tf32": 512, "float16": 1024, "float8": 2048, "float4": 4096},
}
"""Dense flops per clock of the tensor cores of one SM, by width of the operands; some consumer cards have less."""

# Dtype of an operand -> widths at which its product can run without rounding it, narrowest (fastest) first.
_WIDTHS: dict[str, tuple[str, ...]] = {
    "float4_e2m1": ("float4", "float8", "float16"),
    "float8_e4m3fn": ("float8", "float16"),
    "float8_e5m2": ("float8", "float16"),
    "float16": ("float16",),
    "bfloat16": ("float16",),
    "float32": ("tf32",),
}
_CALIBRATED: dict[str, tuple[str, ...]] = {
    "float4": (),
    "float8": ("float8_e4m3fn",),
    "float16": ("bfloat16", "float16"),
    "tf32": ("tf32",),
}


@dataclass(frozen=True)
class SpeedOfLight:
    """The compulsory work of one call, and its time in microseconds at some peaks.

    ``read_bytes`` and ``written_bytes`` add up to ``bytes``; ``operand`` is the dtype that products read, or None.
    """

    us: float
    bound_by: Literal["memory", "compute"]
    bytes: float
    flops: float
    written_bytes: float
    operand: str | None
    chosen_bytes: float = 0.0
    """Bytes of inputs whose slices are chosen by the contents of others (``sliced_inputs``); included in ``bytes``."""

    @property
    def read_bytes(self) -> float:
        """The bytes that must be read."""
        return self.bytes - self.written_bytes


def speed_of_light(
    definition: Definition,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    peaks: GpuPeaks | StatedPeaks,
    *,
    math_mode: Literal["ieee", "tf32"] = "ieee",
) -> SpeedOfLight | None:
    """Return the minimum time of a call if only the peaks limit it.

    Args:
        peaks: of the GPU that the call runs on, stated or calibrated.
        math_mode: ``spec.math`` of the Solution; float32 products run on tensor cores only with ``tf32``.

    Returns:
        None if the Definition states no cost, or the call has no work.
    """
    flops, size = definition.cost_of(axes, dtypes)
    if flops <= 0 and size <= 0:
        return None
    written = min(size, sum(_bytes_of(definition, name, axes, dtypes) for name in definition.outputs))
    size -= min(size - written, _unread_bytes(definition, axes, dtypes))
    operand = _operand(definition, dtypes)
    memory_s = _memory_s(size, written, peaks)
    rate = _product_rate(operand, peaks, math_mode)
    compute_s = flops / rate if rate else 0.0
    return SpeedOfLight(
        us=max(memory_s, compute_s) * 1e6,
        bound_by="compute" if compute_s > memory_s else "memory",
        bytes=size,
        flops=flops,
        written_bytes=written,
        operand=operand,
        chosen_bytes=min(
            size - written, sum(_bytes_of(definition, name, axes, dtypes) for name in definition.sliced_inputs)
        ),
    )


def sol_ratio(sol: SpeedOfLight, latency_us: float) -> float:
    """Return the share of the speed of light that a call reached; above 1 if the cost counts more than the call did."""
    return sol.us / latency_us


def share_of_stated_light(
    definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str], gpu: str, latency_us: float
) -> tuple[float, float] | None:
    """Return (speed of light in microseconds, share of it) by the stated peaks of a GPU; None if they are not known.

    It is also None if the time depends on the kind of float32 products, which a trace does not state.
    """
    peaks = stated_peaks(gpu)
    if peaks is None:
        return None
    bound = definition.bind_axes(axes), definition.bind_dtypes(dtypes)
    light = speed_of_light(definition, *bound, peaks)
    if light is None:
        return None
    if light.operand == "float32":
        fast = speed_of_light(definition, *bound, peaks, math_mode="tf32")
        if fast is None or light.us != fast.us:
            return None
    return light.us, sol_ratio(light, latency_us)


def below_floor(latency_us: float, sol: SpeedOfLight, peaks: GpuPeaks, *, cold_l2: bool, timer: str) -> str | None:
    """Return the reason why a time is impossible, or None if it is possible.

    Args:
        peaks: of the GPU; the floor uses the driver's figures, not the measured ones.
        timer: the timer of the call; the launch floor holds only for the timer of the calibration.
    """
    crossing = _crossing_bytes(sol, peaks.l2_bytes, cold_l2=cold_l2)
    memory_us = crossing / peaks.memory_ceiling_bytes_per_s * 1e6
    if latency_us < FLOOR_MARGIN * memory_us:
        return (
            f"{latency_us:.4g} us is below the physics floor of {memory_us:.4g} us: {crossing:.4g} bytes must cross the "
            f"memory bus of {peaks.gpu_name}, which carries {peaks.memory_ceiling_bytes_per_s:.3g} a second at most"
        )
    ceiling = product_ceiling(sol.operand, peaks)
    compute_us = _min_compute_us(sol, ceiling)
    if latency_us < FLOOR_MARGIN * compute_us:
        return (
            f"{latency_us:.4g} us is below the physics floor of {compute_us:.4g} us: {sol.flops:.4g} flops on "
            f"{sol.operand} operands, of which {peaks.gpu_name} does {ceiling:.3g} a second at its highest clock"
        )
    launch_us = _min_launch_us(peaks)
    if timer == peaks.timer and latency_us < launch_us:
        return (
            f"{latency_us:.4g} us is below the physics floor of {launch_us:.4g} us: a kernel that does nothing takes "
            f"{peaks.launch_us.value:.4g} us here and no kernel at all {peaks.no_launch_us.value:.4g} us, so none ran"
        )
    return None


def least_us(sol: SpeedOfLight, peaks: GpuPeaks, *, cold_l2: bool, timer: str) -> float:
    """Return the shortest time in microseconds that :func:`below_floor` accepts; takes the same arguments."""
    memory_us = _crossing_bytes(sol, peaks.l2_bytes, cold_l2=cold_l2) / peaks.memory_ceiling_bytes_per_s * 1e6
    compute_us = _min_compute_us(sol, product_ceiling(sol.operand, peaks))
    launch_us = _min_launch_us(peaks) if timer == peaks.timer else 0.0
    return max(FLOOR_MARGIN * memory_us, FLOOR_MARGIN * compute_us, launch_us)


def product_ceiling(operand: str | None, peaks: GpuPeaks) -> float | None:
    """Return the maximum flop/s of products of such operands on this GPU; None if unknown."""
    per_clock = PRODUCT_FLOPS_PER_CLOCK.get(peaks.sm, {})
    known = [per_clock[width] for width in _WIDTHS.get(operand or "", ()) if width in per_clock]
    return max(known) * peaks.sm_count * peaks.max_sm_mhz * 1e6 if known else None


def _unread_bytes(definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> float:
    """Return the bytes of slices that a cost counts, and that typical ids do not choose.

    A cost counts as many slices as there are ids, at most all. Ids of different tokens may choose the same slice: of 128 experts,
    16 tokens with 8 ids each choose 82 on average.
    """
    unread = 0.0
    for ids in definition.input_generators:
        axis, shape = definition.sliced_axis(ids), definition.shape_of(ids, axes)
        slices, draws = axes.get(axis, 0), math.prod(shape)
        if not slices or not draws or shape[-1] > slices:
            continue
        chosen = slices * (1.0 - (1.0 - shape[-1] / slices) ** (draws / shape[-1]))
        share = max(min(slices, draws) - chosen, 0.0) / slices
        sliced = (name for name, found in definition.sliced_inputs.items() if found == axis)
        unread += share * sum(_bytes_of(definition, name, axes, dtypes) for name in sliced)
    return unread


def _bytes_of(definition: Definition, name: str, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> float:
    return math.prod(definition.shape_of(name, axes)) * STORED_BYTES[definition.dtype_of(name, dtypes)]


def _memory_s(size: float, written: float, peaks: GpuPeaks | StatedPeaks) -> float:
    """Return the seconds for the traffic; a bus that switches between reads and writes is slower than one that only reads.

    Between pure reading and a copy, the time per byte is linear in the share of writes. A call that writes more than a copy
    is treated like a copy.
    """
    copy_s = 1 / peaks.copy_bytes_per_s.value
    read_s = min(copy_s, 1 / peaks.read_bytes_per_s.value) if peaks.read_bytes_per_s else copy_s
    share = min(2 * written / size, 1.0) if size else 0.0
    return size * (read_s + share * (copy_s - read_s))


def _operand(definition: Definition, dtypes: Mapping[str, str]) -> str | None:
    """Return the narrowest dtype of the floating-point inputs, which allows the fastest product; None without one."""
    used = {definition.dtype_of(name, dtypes) for name in definition.tensor_inputs}
    return next((name for name in _WIDTHS if name in used), None)


def _product_rate(operand: str | None, peaks: GpuPeaks | StatedPeaks, math_mode: str) -> float | None:
    """Return the calibrated flop/s of the fastest product for such operands; None if none was measured."""
    if operand == "float32" and math_mode == "ieee":
        measured = peaks.flops.get("float32")
        return measured.value if measured else None
    per_clock = PRODUCT_FLOPS_PER_CLOCK.get(peaks.sm)
    for width in _WIDTHS.get(operand or "", ()):
        if per_clock is None or width in per_clock:
            rates = [peaks.flops[name].value for name in _CALIBRATED[width] if name in peaks.flops]
            if rates or per_clock is not None:
                return max(rates, default=None)
    return None


def _crossing_bytes(sol: SpeedOfLight, l2_bytes: int, *, cold_l2: bool) -> float:
    """Return the bytes that must cross the memory bus between the start and the end of a call."""
    late = min(sol.written_bytes, l2_bytes)  # dirty in the L2 when the call ends
    read = sol.read_bytes - sol.chosen_bytes
    early = 0.0 if cold_l2 else min(read, l2_bytes)  # in the L2 when it begins
    return read + sol.written_bytes - late - early


def _min_compute_us(sol: SpeedOfLight, ceiling: float | None) -> float:
    return sol.flops / ceiling * 1e6 if ceiling and not sol.chosen_bytes else 0.0


def _min_launch_us(peaks: GpuPeaks) -> float:
    """Return the middle between an empty kernel and no kernel, less the spread of the calibration, in microseconds."""
    middle = (peaks.launch_us.value + peaks.no_launch_us.value) / 2
    return middle * (1 - min(peaks.launch_us.spread, 0.5))


# ---- stated peaks ---------------------------------------------------------------------------------
# One set of rates for each GPU model, so that the shares of all machines and runs are of one scale. The rates are those of the
# data sheet. No calibration exceeds them: the largest copies reach 90% of the memory rate, the largest products 85%.


class Rate(NamedTuple):
    """A rate per second that a data sheet states."""

    value: float


@dataclass(frozen=True)
class StatedPeaks:
    """The peaks of a GPU model by its data sheet. Rates are per second and dense, without sparsity."""

    sm: str
    copy_bytes_per_s: Rate
    flops: Mapping[str, Rate]

    @property
    def read_bytes_per_s(self) -> Rate:
        """The memory rate, which a data sheet states once for reads and writes."""
        return self.copy_bytes_per_s


def _stated(
    sm: str, bytes_per_s: float, float16: float, tf32: float, float32: float, float8: float = 0.0
) -> StatedPeaks:
    """Return peaks from the rates of a data sheet, in TB/s and TFLOP/s."""
    rates = {"bfloat16": float16, "float16": float16, "tf32": tf32, "float32": float32, "float8_e4m3fn": float8}
    flops = {name: Rate(rate * 1e12) for name, rate in rates.items() if rate}
    return StatedPeaks(sm, Rate(bytes_per_s * 1e12), flops)


STATED_PEAKS: dict[str, StatedPeaks] = {
    "a100-sxm": _stated("sm_80", 2.039, 312, 156, 19.5),
    "a100-pcie": _stated("sm_80", 1.935, 312, 156, 19.5),
    "h100-sxm": _stated("sm_90", 3.35, 989.4, 494.7, 66.9, 1978.9),
    "h100-nvl": _stated("sm_90", 3.9, 835.5, 417.5, 60, 1670.5),
    "h100-pcie": _stated("sm_90", 2.0, 756, 378, 51.2, 1513),
    "h200": _stated("sm_90", 4.8, 989.4, 494.7, 66.9, 1978.9),
}
"""GPU slug -> its peaks. A slice or a variant has none: it is calibrated."""


def stated_peaks(gpu: str) -> StatedPeaks | None:
    """Return the stated peaks of a GPU slug; None for a GPU that is calibrated."""
    return STATED_PEAKS.get(gpu)


# ---- calibrated peaks -----------------------------------------------------------------------------
# The measured rates give the speed of light of a GPU without stated ones. The driver's figures give the floor.

PRODUCT_DTYPES: tuple[str, ...] = ("bfloat16", "float16", "tf32", "float32", "float8_e4m3fn")
"""Kinds of matrix product that are calibrated, by the dtype of their operands; ``tf32`` reads float32."""

IMPLAUSIBLE = 1.05
"""Maximum measured over possible rate; above it, the clock or the driver's figures are wrong and must not be used."""


def _product(name: str) -> str:
    if name not in PRODUCT_DTYPES:
        raise RecordError(f"unknown product dtype {name!r}; known: {', '.join(PRODUCT_DTYPES)}", code="dtype_unknown")
    return name


ProductDType = Annotated[str, AfterValidator(_product), Field(json_schema_extra={"enum": list(PRODUCT_DTYPES)})]


class Measured(RecordPart):
    """The median over several rounds, and the spread of the rounds."""

    value: Real = Field(gt=0)
    """In the unit that the field's name ends with."""
    spread: Real = Field(ge=0)
    """Half the range of the rounds over their median; no unit."""
    rounds: Int64 = Field(ge=1)
    how: str = Field(min_length=1)
    """The call, its size, and whether the L2 was cold."""


class GpuPeaks(Record):
    """Calibrated peaks of one GPU. Rates are per second; the launch times are microseconds by ``timer``."""

    kind: ClassVar[str] = "peaks"

    schema_version: Literal[1] = 1
    gpu: str = Field(pattern=NAME_PATTERN)
    gpu_name: str
    sm: str = Field(pattern=r"^sm_\d{2,3}$")
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    timestamp: datetime
    timer: Literal["cupti", "events"]
    """The timer of the calibration; launch times by different timers are not comparable."""
    copy_bytes_per_s: Measured
    """Bytes read plus bytes written, by a copy much larger than the L2."""
    read_bytes_per_s: Measured | None = None
    """Bytes read, by a reduction that writes almost nothing."""
    flops: dict[ProductDType, Measured] = {}
    """Flop/s of large matrix products; a dtype without a product on this GPU is left out."""
    launch_us: Measured
    """Time of an empty kernel."""
    no_launch_us: Measured
    """Time of a call that launches nothing: the overhead of the timer."""
    clock_mhz: Int64 | None = None
    """SM clock during the calibration, median."""
    l2_bytes: Int64 = Field(gt=0)
    sm_count: Int64 = Field(gt=0)
    max_sm_mhz: Real = Field(gt=0)
    max_memory_mhz: Real = Field(gt=0)
    memory_bus_bits: Int64 = Field(gt=0)

    @property
    def memory_ceiling_bytes_per_s(self) -> float:
        """Maximum bytes per second of the memory bus: twice its highest clock, as every memory is double data rate."""
        return 2 * self.max_memory_mhz * 1e6 * self.memory_bus_bits / 8

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if self.gpu == CPU:
            raise RecordError("gpu: peaks are calibrated for GPUs, not for a CPU", code="gpu_is_cpu")
        if self.timestamp.tzinfo is None:
            raise RecordError("timestamp: needs a time zone", code="time_zone_missing")
        in_utc(self.timestamp)
        if self.no_launch_us.value >= self.launch_us.value:
            raise RecordError(
                f"launch_us: an empty kernel ({self.launch_us.value} us) must take longer than no kernel at all "
                f"(no_launch_us: {self.no_launch_us.value} us)",
                code="launch_too_short",
            )
        ceiling = self.memory_ceiling_bytes_per_s
        for name, rate in (("copy_bytes_per_s", self.copy_bytes_per_s), ("read_bytes_per_s", self.read_bytes_per_s)):
            if rate is not None and rate.value > IMPLAUSIBLE * ceiling:
                raise RecordError(
                    f"{name}: {rate.value:.3g} is more than the memory bus can carry ({ceiling:.3g} bytes/s)",
                    code="peak_implausible",
                )
        return self
