"""Verify a patch on the model's own numbers: the error of a kernel may exceed that of stock code only by a factor.

Kernel and stock code run on the same captured inputs, and both are compared with the Definition's reference in fp64. The
verification of a Solution does the same on drawn contents; here the contents, sizes and strides are those of this model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.errors import TilegymDBError
from tilegym_db.models.capture import CapturedCall, copied
from tilegym_db.records import Definition
from tilegym_db.records.call import Call, bind_call
from tilegym_db.records.definition import LIMITS
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import Allocate
from tilegym_db.verification.comparison import check_outputs, followed
from tilegym_db.verification.gates import ReferenceDeviation, relative_error
from tilegym_db.verification.oracle import oracle

ALLOWED_FACTOR = 2.0
"""Largest ratio of a kernel's error to that of stock code. Honest kernels round no more often than stock and stay near 1."""

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Proof:
    """The result of one captured call. Errors are relative Frobenius norms against fp64, of the worst output.

    ``kernel`` is None if stock code serves such a call anyway. ``reason`` gives the reason if no kernel may serve the call;
    it is empty if the proof holds.
    """

    stage: str
    axes: Mapping[str, int]
    kernel: str | None
    reason: str
    kernel_error: float | None = None
    stock_error: float | None = None
    allowed: float | None = None

    @property
    def holds(self) -> bool:
        """True if a kernel was tried and may be used."""
        return self.kernel is not None and not self.reason

    @property
    def failed(self) -> bool:
        """True if a kernel was tried and must not be used."""
        return self.kernel is not None and bool(self.reason)


def allowed_error(stock_error: float, rounding_error: float, dtype: torch.dtype) -> float:
    """Return the largest relative error that a kernel may have.

    Args:
        stock_error: the error of the model's own code.
        rounding_error: the error of the exact result after rounding once to the output's dtype; no code does better.
        dtype: the dtype of the output. For float32, the bound of verification applies if it is larger: the approximate
            exponentials of a GPU are many times worse than those of a CPU.
    """
    allowed = ALLOWED_FACTOR * max(stock_error, rounding_error)
    return max(allowed, LIMITS["float32"].tau) if dtype == torch.float32 else allowed


def prove(dispatcher: Dispatcher, allocate: Allocate, call: CapturedCall) -> Proof:
    """Try the kernel that would serve the captured calls of one kind.

    The kernel runs twice, without gradients and in inference mode, on outputs full of NaN. It must give the same bits both
    times and leave its inputs unchanged. The result is that of the call with the kernel's largest error.

    Args:
        dispatcher: the dispatcher of the call site.
        allocate: makes the outputs for the inputs of a call.
        call: the captured inputs, at several positions and for several tokens.
    """
    definition = dispatcher.definition
    preview = dispatcher.preview(call.inputs, allocate)
    if preview.launch is None:
        return Proof(call.stage, _axes(definition, call), None, preview.reason)
    binding = bind_call(definition, call.inputs)
    try:
        runs, again, changed = _in_both_modes(preview.launch, definition, call, allocate)
    except Exception as error:  # a kernel may raise anything: the error is reported, and stock code runs
        what = traceback.format_exception_only(error)[-1].strip()
        return Proof(call.stage, binding.axes, preview.kernel, f"verification on this model failed: it raises {what}")
    if changed:
        reason = f"it changes its input '{changed}'"
    elif not all(map(_same_outputs, runs, again)):
        reason = "two runs on the same inputs differ; the second is in inference mode and after other calls"
    else:
        kernel = str(preview.kernel)
        proofs = []
        with torch.no_grad():  # the codes of a quantised weight may require gradients
            for inputs, outputs in zip(call.all_inputs, runs, strict=True):
                stock, _ = _run(dispatcher.run_stock, definition, inputs, allocate)
                proofs.append(_compared(definition, CapturedCall(call.stage, inputs), binding, kernel, outputs, stock))
        return max(proofs, key=lambda proof: (bool(proof.reason), proof.kernel_error or 0.0))
    return Proof(call.stage, binding.axes, preview.kernel, f"verification on this model failed: {reason}")


def _in_both_modes(
    launch: Callable[..., Any], definition: Definition, call: CapturedCall, allocate: Allocate
) -> tuple[list[Outputs], list[Outputs], str]:
    """Return the outputs of each captured call from two runs, and the name of an input that was changed.

    The first run is without gradients, the second in inference mode. The second has the opposite order, so each call but the
    last comes after others of its kind.
    """
    with torch.no_grad():
        runs = [_run(launch, definition, inputs, allocate) for inputs in call.all_inputs]
    with torch.inference_mode():
        again = [_run(launch, definition, inputs, allocate) for inputs in reversed(call.all_inputs)]
    changed = next((name for _, name in (*runs, *again) if name), "")
    return [outputs for outputs, _ in runs], [outputs for outputs, _ in reversed(again)], changed


def _same_outputs(outputs: Outputs, others: Outputs) -> bool:
    return all(_same_bits(value, others[name]) for name, value in outputs.items())


def _axes(definition: Definition, call: CapturedCall) -> Mapping[str, int]:
    try:
        return bind_call(definition, call.inputs).axes
    except TilegymDBError:  # no call of the Definition; the preview's reason says so
        return {}


def _compared(
    definition: Definition, call: CapturedCall, binding: Call, kernel: str, outputs: Outputs, stock: Outputs
) -> Proof:
    inputs = dict(zip(definition.inputs, call.inputs, strict=True))
    truth = oracle(definition, inputs)
    # A choice is right or wrong and has no error. What follows from a choice is compared given the choice that was made.
    own = followed(definition, inputs, truth, stock, ())
    errors = {name: _error(value, own[name]) for name, value in stock.items()}
    of_stock = {name: ReferenceDeviation(error) for name, error in errors.items()}
    verdicts = check_outputs(definition, binding.dtypes, inputs, truth, outputs, of_stock)
    wrong = [name for name, verdict in verdicts.items() if not verdict.passed and not outputs[name].is_floating_point()]
    exact = followed(definition, inputs, truth, outputs, wrong)
    reason, worst = "", (0.0, 0.0, 0.0)
    for name, value in outputs.items():
        if not _is_measured(value):
            continue
        found = _error(value, exact[name])
        allowed = allowed_error(errors[name], _error(exact[name].to(value.dtype), exact[name]), value.dtype)
        if found > allowed and not reason:
            reason = (
                f"the error of {name} against fp64 is {found:.3g}, which is {found / max(errors[name], 1e-300):.3g} times that "
                f"of stock; at most {allowed:.3g} is allowed"
            )
        worst = max(worst, (found, errors[name], allowed), key=lambda figures: figures[0])
    reason = reason or next((verdict.reason for verdict in verdicts.values() if not verdict.passed), "")
    if reason:
        reason = f"verification on this model failed: {reason}"
    return Proof(call.stage, binding.axes, kernel, reason, *worst)


def _error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative error; 0 for outputs of 8 bits and of indices, whose codes the gates compare."""
    return relative_error(value, truth) if _is_measured(value) else 0.0


def _is_measured(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.element_size() > 1


def _run(
    launch: Callable[..., Any], definition: Definition, inputs: tuple[Any, ...], allocate: Allocate
) -> tuple[Outputs, str]:
    """Return every output by name, and the name of an input that the call must not change but did."""
    given = {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in zip(definition.inputs, inputs, strict=True)
    }
    made = allocate(*given.values())
    outputs: Outputs = dict(zip(definition.written_outputs, made if isinstance(made, tuple) else (made,), strict=True))
    for value in outputs.values():
        value.fill_(float("nan") if value.is_floating_point() else 1)  # the memory may hold the result of another run
    launch(*given.values(), *outputs.values())
    changed = [
        name
        for name, before in zip(definition.inputs, inputs, strict=True)
        if isinstance(before, torch.Tensor) and name not in definition.in_place and not _same_bits(given[name], before)
    ]
    outputs |= {target: given[source] for source, target in definition.in_place.items()}
    return outputs, changed[0] if changed else ""


def _same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (value, other)))
