"""One Solution at one case, alone: what a failure report tells its author to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilegym_db.bench.contents import ExpectedCache
from tilegym_db.bench.machine import select_machine
from tilegym_db.bench.member import Member
from tilegym_db.bench.rigor import PROMOTION
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError, did_you_mean
from tilegym_db.records import Config
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.layouts import layout_strides
from tilegym_db.scratch import scratch_folder
from tilegym_db.verify.inputs import DISTRIBUTIONS, Case
from tilegym_db.verify.verifier import Failure, Verdict

__all__ = ["Reproduction", "reproduce"]


@dataclass(frozen=True)
class Reproduction:
    """What came of it: the worst figures of a pass, or the failure; where neither, the case proves nothing."""

    case: Case
    verdict: Verdict | None = None
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
    """Verify one case of one Solution in a worker of its own, with every gate on outputs.

    Args:
        solution: its name.
        axes: size of every axis that the Definition leaves open.
        dtypes: dtype variable -> dtype.
        scalars: input name -> number.
        layouts: tensor -> layout as Workloads spell it; a tensor not named is contiguous.
        contents: the distribution that inputs are drawn from.
        seed: of the drawing. The same seed draws other numbers on another kind of device.
        offset: elements by which every tensor is moved off its alignment.
        config: a value per tunable.
        gpu: as for :func:`tilegym_db.benchmark`.
        catalog: the records.

    Raises:
        NotFoundError: no such Solution.
        RecordError: the case is not one of the Definition.
        UsageError: unknown contents, or a tensor that the Definition does not have.
    """
    records = catalog or Catalog.default()
    files = records.solution(solution)
    definition = records.definition(files.record.definition)
    machine = select_machine(gpu)
    if contents not in DISTRIBUTIONS:
        hint = did_you_mean(contents, DISTRIBUTIONS)
        raise UsageError(f"unknown contents '{contents}'.{hint} Known: {', '.join(DISTRIBUTIONS)}.")
    missing = [name for name, spec in definition.inputs.items() if spec.is_scalar and name not in scalars]
    if missing:
        raise UsageError(f"{definition.name} needs a value for scalar '{missing[0]}'. Try: --scalar {missing[0]}=1e-5")
    case = Case(
        definition.bind_axes(axes),
        definition.bind_dtypes(dtypes),
        dict(scalars),
        dict(layouts),
        contents,
        seed,
        offset,
    )
    for name, layout in layouts.items():
        if name not in (*definition.tensor_inputs, *definition.outputs):
            raise UsageError(f"{definition.name} has no tensor '{name}'.")
        layout_strides(layout, definition.shape_of(name, case.axes), case.axes)
    expected = ExpectedCache(definition, machine.device).get(case)
    if expected is None:
        return Reproduction(case)
    interpret = not machine.is_gpu and files.record.spec.language == "triton"
    with scratch_folder() as folder:
        member = Member(
            definition, files, machine.device, machine.sm, folder, PROMOTION, config or {}, interpret=interpret
        )
        try:
            outcome = member.verify_alone(expected)
        finally:
            member.close()
    if isinstance(outcome, Failure):
        return Reproduction(case, failure=outcome)
    return Reproduction(case, verdict=outcome)
