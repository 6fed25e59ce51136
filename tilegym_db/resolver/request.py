"""A request to the resolver: one call of a Definition on one GPU, checked before any decision."""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.errors import UsageError, did_you_mean
from tilegym_db.records import Definition
from tilegym_db.records.call import LAUNCHES, MODES, Call, Request, is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU, GPU_SLUGS, gpu_base, same_gpu
from tilegym_db.records.layouts import LAYOUT_CLASSES


def make_request(
    definition: Definition,
    call: Call,
    *,
    gpu: str,
    sm: str | None = None,
    mode: str = "inference",
    serving: str | None = None,
    unavailable: Mapping[str, str] | None = None,
    launch: str = "call",
) -> Request:
    """Return a checked request: the call is bound and fits the Definition.

    Raises:
        UsageError: an axis, dtype, layout or scalar is missing, unknown or not allowed; the message names it.
    """
    if mode not in MODES:
        raise UsageError(f"mode must be {' or '.join(MODES)}, not {mode!r}.", code="mode_unknown")
    if launch not in LAUNCHES:
        raise UsageError(f"launch must be {' or '.join(LAUNCHES)}, not {launch!r}.", code="launch_unknown")
    bound = call.bind(definition)
    _check_layouts(definition, call.layouts)
    _check_scalars(definition, call.scalars)
    return Request(definition, bound, gpu, sm or compile_target(gpu), mode, serving, dict(unavailable or {}), launch)


def compile_target(gpu: str) -> str:
    """Return ``sm_90`` for ``h200`` or for the family ``h100``; ``cpu`` for the CPU."""
    if gpu == CPU:
        return CPU
    return next((sm for slug, sm in GPU_SLUGS.items() if same_gpu(gpu, slug)), GPU_SLUGS.get(gpu_base(gpu), ""))


def _check_layouts(definition: Definition, layouts: Mapping[str, str]) -> None:
    tensors = (*definition.tensor_inputs, *definition.outputs)
    for name, layout in layouts.items():
        if name not in tensors:
            raise UsageError(
                f"{definition.name} has no tensor '{name}'.{did_you_mean(name, tensors)}", code="tensor_unknown"
            )
        if layout not in LAYOUT_CLASSES:
            raise UsageError(
                f"layout of '{name}' must be one of {', '.join(LAYOUT_CLASSES)}, not {layout!r}.", code="layout_unknown"
            )


def _check_scalars(definition: Definition, scalars: Mapping[str, Scalar]) -> None:
    known = [name for name, spec in definition.inputs.items() if spec.is_scalar]
    for name in scalars:
        if name not in known:
            raise UsageError(
                f"{definition.name} has no scalar '{name}' (its scalars: {', '.join(known) or 'none'})."
                f"{did_you_mean(name, known)}",
                code="scalar_unknown",
            )
    for name in known:
        if name not in scalars and is_code_selecting(definition, name):
            raise UsageError(
                f"{definition.name} needs the scalar '{name}', because its value selects the code that runs.",
                code="scalar_missing",
            )
