"""GpuPeaks: what one kind of GPU was measured to be able to do, and what its driver says is the most it ever could.

The measured rates are what a speed of light is computed from; the driver's figures bound what a time can be believed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import NAME_PATTERN, Int64, Real, Record, RecordPart
from tilegym_db.records.hardware import CPU

__all__ = ["PRODUCT_DTYPES", "GpuPeaks", "Measured"]

PRODUCT_DTYPES: tuple[str, ...] = ("bfloat16", "float16", "tf32", "float32", "float8_e4m3fn")
"""The kinds of matrix product that are calibrated, by the dtype of their operands; ``tf32`` reads float32."""

IMPLAUSIBLE = 1.05
"""Measured over possible: beyond it, the clock or the driver's figures are wrong, and nothing may be judged by them."""


def _product(name: str) -> str:
    if name not in PRODUCT_DTYPES:
        raise RecordError(f"unknown product dtype {name!r}; known: {', '.join(PRODUCT_DTYPES)}", code="dtype_unknown")
    return name


ProductDType = Annotated[str, AfterValidator(_product), Field(json_schema_extra={"enum": list(PRODUCT_DTYPES)})]


class Measured(RecordPart):
    """The median over several rounds, and how far the rounds lay apart."""

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
    """What took the times; launch times by another timer are not comparable with these."""
    copy_bytes_per_s: Measured
    """Bytes read plus bytes written, by a copy much larger than the L2."""
    read_bytes_per_s: Measured | None = None
    """Bytes read, by a reduction that writes next to nothing."""
    flops: dict[ProductDType, Measured] = {}
    """Flop/s of large matrix products; a dtype that the GPU has no product for is left out."""
    launch_us: Measured
    """A kernel that does nothing."""
    no_launch_us: Measured
    """A call that launches nothing: what the timer alone amounts to."""
    clock_mhz: Int64 | None = None
    """SM clock during the calibration, median."""
    l2_bytes: Int64 = Field(gt=0)
    sm_count: Int64 = Field(gt=0)
    max_sm_mhz: Real = Field(gt=0)
    max_memory_mhz: Real = Field(gt=0)
    memory_bus_bits: Int64 = Field(gt=0)

    @property
    def memory_ceiling_bytes_per_s(self) -> float:
        """What the pins of the memory can carry: its bus at twice its highest clock (every kind is double data rate)."""
        return 2 * self.max_memory_mhz * 1e6 * self.memory_bus_bits / 8

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if self.gpu == CPU:
            raise RecordError("gpu: peaks are calibrated for GPUs, not for a CPU", code="gpu_is_cpu")
        if self.timestamp.tzinfo is None:
            raise RecordError("timestamp: needs a time zone", code="time_zone_missing")
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
