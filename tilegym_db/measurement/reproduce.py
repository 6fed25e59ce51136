"""Reproduction of a failure: verify one Solution on one case, as a failure report suggests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilegym_db.backends.toolchains import interpreted_here
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError, did_you_mean
from tilegym_db.measurement.machine import Machine, select_machine
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Config, Definition
from tilegym_db.records.call import Call, scalars_with_axes
from tilegym_db.records.definition_parts import layout_strides
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.workload import TYPICAL, Case
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verification.admission import require_returning_reference
from tilegym_db.verification.distributions import CONTENTS, MODIFIERS, OF_OTHERS, are_contents
from tilegym_db.verification.expected import ExpectedCache, OracleCase
from tilegym_db.verification.session import Verification
from tilegym_db.verification.verifier import Failure, WorstErrors
from tilegym_db.verification.worker_handle import PROMOTION, WorkerHandle


@dataclass(frozen=True)
class Reproduction:
    """The result of a case: the worst errors of a pass, or the failure.

    If both are None, the reference fails on the case itself.
    """

    case: Case
    verdict: WorstErrors | None = None
    failure: Failure | None = None


def reproduce(
    solution: str,
    *,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    layouts: Mapping[str, str],
    contents: str,
    seed: int,
    offset: int = 0,
    config: Config | None = None,
    gpu: str = "auto",
    catalog: Catalog | None = None,
) -> Reproduction:
    """Verify one case of one Solution in a separate worker, with every gate on outputs.

    Args:
        layouts: tensor -> layout as Workloads spell it; a tensor not named is contiguous.
        contents: the distribution of the inputs; with the suffix ``:typical``, ids and lengths are spread as in most models,
            and with the name of another distribution as in that one.
        offset: number of elements by which every tensor is moved off its alignment.
    """
    records = catalog or Catalog.default()
    files = records.solution(solution)
    definition = records.definition(files.record.definition)
    machine = select_machine(gpu)
    numbers = scalars_with_axes(definition, scalars, axes)
    distribution, _, spread = contents.partition(":")
    typical = f":{spread}" == TYPICAL
    case = Case(
        Call(definition.name, dict(axes), dict(dtypes), dict(layouts), numbers),
        typical=typical,
        distribution=distribution,
        seed=seed,
        offset=offset,
        spread_as="" if typical else spread,
    )
    case = _checked(definition, case)
    if (file := records.untried(definition)) is not None:
        require_returning_reference(definition, file)
    expected = ExpectedCache(definition, machine.device).get(case)
    if expected is None:
        return Reproduction(case)
    return _verify(case, expected, definition, files, machine, config or {})


def _checked(definition: Definition, case: Case) -> Case:
    """Return a case with all axes and dtypes bound. Raise as :func:`reproduce` does if it does not fit the Definition."""
    for contents in filter(None, (case.distribution, case.spread_as)):
        _check_contents(definition, contents, case.call.scalars)
    axes, dtypes = definition.bind_axes(case.call.axes), definition.bind_dtypes(case.call.dtypes)
    bound = replace(case, call=replace(case.call, axes=axes, dtypes=dtypes))
    _check_layouts(definition, bound)
    return bound


def _verify(
    case: Case, expected: OracleCase, definition: Definition, files: SolutionFiles, machine: Machine, config: Config
) -> Reproduction:
    interpret = interpreted_here(files.record.spec.language, on_gpu=machine.is_gpu)
    with scratch_folder() as folder:
        handle = WorkerHandle(
            definition, files, machine.device, folder, PROMOTION, config, interpret=interpret, profiled=False
        )
        with contextlib.closing(handle):
            outcome = Verification(handle).case_alone(expected)
    if isinstance(outcome, Failure):
        return Reproduction(case, failure=outcome)
    return Reproduction(case, verdict=outcome)


def _check_contents(definition: Definition, contents: str, scalars: Mapping[str, Scalar]) -> None:
    if not are_contents(contents):
        hint = did_you_mean(contents, CONTENTS)
        raise UsageError(
            f"unknown distribution '{contents}'.{hint} Known: {', '.join(CONTENTS)}. Any of "
            f"+{', +'.join((*MODIFIERS, *OF_OTHERS))} may follow.",
            code="contents_unknown",
        )
    missing = [name for name, spec in definition.inputs.items() if spec.is_scalar and name not in scalars]
    if missing:
        raise UsageError(
            f"{definition.name} needs a value for scalar '{missing[0]}'. Try: --scalar {missing[0]}=1e-5",
            code="scalar_missing",
        )


def _check_layouts(definition: Definition, case: Case) -> None:
    for name, layout in case.call.layouts.items():
        if name not in (*definition.tensor_inputs, *definition.outputs):
            raise UsageError(f"{definition.name} has no tensor '{name}'.", code="tensor_unknown")
        layout_strides(layout, definition.shape_of(name, case.call.axes), case.call.axes)
    plan_slot(definition, case)  # raises if a tensor is in the memory of something else than an input
