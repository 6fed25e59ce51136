"""Checks a kernel at the first call of a size that was not measured: its numbers against the reference, its time against stock.

The measurement of another size decides such a call. ``patch(model, check="first")`` tries the kernel of the nearest measured
point once, on the arguments of that call. Later calls of the same kind only look up the result.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilegym_db.published.entries import MIN_SPEEDUP_CI_LOW
from tilegym_db.records import Definition

if TYPE_CHECKING:
    import torch

ROUNDS = 7
"""Timed rounds; each times the kernel and stock code one after the other. An odd number has a middle."""
CALLS = 10
"""Calls of a round, between two synchronisations. Host and device work at the same time, as in a model."""
WARM_UP = 3


@dataclass(frozen=True)
class FirstCall:
    """The result of a first call: the reason against the kernel, empty if it serves, and the times of a call in microseconds."""

    reason: str
    kernel_us: float | None = None
    stock_us: float | None = None

    @property
    def text(self) -> str:
        """One sentence with the result, for the report."""
        if self.reason:
            return f"checked at its first call: {self.reason}"
        times = f"{self.kernel_us:.1f} us against {self.stock_us:.1f} us of stock code"
        return f"not measured here; checked at its first call: right, and {times}"


def check_first_call(
    definition: Definition,
    dtypes: Mapping[str, str],
    launch: Callable[..., Any],
    stock: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: tuple[torch.Tensor, ...],
    synchronise: Callable[[], None],
) -> FirstCall:
    """Run a kernel and stock code on copies of the arguments of a call, and return the result.

    Args:
        launch: the kernel, ``launch(*inputs, *outputs)``.
        outputs: tensors like the outputs of the call; they are not written.
    """
    import torch

    try:
        with torch.no_grad():
            wrong = _why_wrong(definition, dtypes, launch, stock, inputs, outputs)
            return FirstCall(wrong) if wrong else _timed(definition, launch, stock, inputs, outputs, synchronise)
    except torch.OutOfMemoryError:
        return FirstCall("there is no memory to check it")
    except Exception as error:  # a kernel may raise anything: the error is reported, and stock code runs
        return FirstCall(f"it raises {traceback.format_exception_only(error)[-1].strip()}")


def _why_wrong(
    definition: Definition,
    dtypes: Mapping[str, str],
    launch: Callable[..., Any],
    stock: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: tuple[torch.Tensor, ...],
) -> str:
    """Return why the kernel is wrong: an output outside the tolerance of the Definition, or a changed input."""
    from tilegym_db.verification.comparison import check_outputs, followed
    from tilegym_db.verification.gates import ReferenceDeviation, relative_error
    from tilegym_db.verification.oracle import oracle

    named = dict(zip(definition.inputs, inputs, strict=True))
    truth = oracle(definition, named)
    found, changed = _run(definition, launch, inputs, outputs)
    if changed:
        return f"it changes its input '{changed}'"
    own, _ = _run(definition, stock, inputs, outputs)
    exact = followed(definition, named, truth, own, ())
    of_stock = {
        name: ReferenceDeviation(relative_error(value, exact[name]) if value.is_floating_point() else 0.0)
        for name, value in own.items()
    }
    verdicts = check_outputs(definition, dtypes, named, truth, found, of_stock)
    return next((f"{name} is wrong: {one.reason}" for name, one in verdicts.items() if not one.passed), "")


def _run(
    definition: Definition, launch: Callable[..., Any], inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the outputs of one run by name, and the name of an input that it must not change but did."""
    given, made = _copies(inputs), _copies(outputs)
    for value in made:  # the memory may hold the result of another run
        value.fill_(float("nan") if value.is_floating_point() else 1)
    launch(*given, *made)
    named = dict(zip(definition.inputs, given, strict=True))
    found = dict(zip(definition.written_outputs, made, strict=True))
    found |= {target: named[source] for source, target in definition.in_place.items()}
    before = dict(zip(definition.inputs, inputs, strict=True))
    changed = [name for name in definition.tensor_inputs if not _may_differ(definition, name, named, before)]
    return found, changed[0] if changed else ""


def _may_differ(definition: Definition, name: str, after: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    import torch

    return name in definition.in_place or torch.equal(
        *(value[name].contiguous().flatten().view(torch.uint8) for value in (after, before))
    )


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    import torch

    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    )


def _timed(
    definition: Definition,
    launch: Callable[..., Any],
    stock: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: tuple[torch.Tensor, ...],
    synchronise: Callable[[], None],
) -> FirstCall:
    """Return the times of both, in turn, and the reason if the kernel is not faster."""
    given = _copies(inputs) if definition.in_place else inputs
    made = _copies(outputs)
    times: dict[str, list[float]] = {"kernel": [], "stock": []}
    ways = {"kernel": launch, "stock": stock}
    for round_number in range(ROUNDS + 1):
        for name, way in ways.items():
            count = CALLS if round_number else WARM_UP
            synchronise()
            start = time.perf_counter()
            for _ in range(count):
                way(*given, *made)
            synchronise()
            if round_number:
                times[name].append((time.perf_counter() - start) * 1e6 / count)
    kernel_us, stock_us = (statistics.median(times[name]) for name in ways)
    slowest = max(kernel / own for kernel, own in zip(times["kernel"], times["stock"], strict=True))
    ratio = stock_us / kernel_us
    reason = ""
    if ratio <= MIN_SPEEDUP_CI_LOW or (slowest > 1 and ratio < 1 + 2 * _spread(times)):
        reason = f"it is not surely faster, with {kernel_us:.1f} us against {stock_us:.1f} us of stock code"
    return FirstCall(reason, kernel_us, stock_us)


def _spread(times: Mapping[str, list[float]]) -> float:
    """Return the median deviation of a round's ratio from the median ratio, relative to it."""
    ratios = [own / kernel for kernel, own in zip(times["kernel"], times["stock"], strict=True)]
    middle = statistics.median(ratios)
    return statistics.median(abs(ratio - middle) for ratio in ratios) / middle
