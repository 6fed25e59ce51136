"""Successive sizes leave every remainder, and their contents and results are parts of one oracle."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records.case import Case
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.residues import SIZES, part_of, successive
from tilegym_db.verification.worker_handle import WorkerHandle

CATALOG = Catalog.default()


def drawn(name: str, folder: Path, seed: int) -> tuple[WorkerHandle, dict[str, dict[int, Case]]]:
    """Return a handle without a process, and the successive sizes of each axis in one promotion."""
    solution = CATALOG.solution(name)
    definition = CATALOG.definition(solution.record.definition)
    handle, workload = WorkerHandle(definition, solution, "cpu", folder), CATALOG.workloads_for(definition.name)[0]
    dtypes = definition.bind_dtypes(workload.dtypes)
    cases = fuzz_cases(definition, solution.record, [], dtypes, workload.scalars(), count=24, seed=seed)
    generator = random.Random(seed)
    return handle, {axis: successive(handle, cases, axis, generator) for axis in definition.var_axes}


@pytest.mark.parametrize("seed", range(10))
def test_free_axes_have_every_remainder(tmp_path: Path, seed: int) -> None:
    _, shapes = drawn("rms_norm_stock", tmp_path, seed)
    for sizes in shapes.values():
        assert all({size % divisor for size in sizes} == {*range(divisor)} for divisor in range(1, SIZES + 1))


def test_a_part_has_the_results_of_its_own_oracle(tmp_path: Path) -> None:
    handle, shapes = drawn("rms_norm_stock", tmp_path, 3)
    definition, (size, case) = handle.definition, max(shapes["M"].items())
    whole, fewer = make_oracle_case(definition, case, "cpu"), size - 7
    smaller = Case(case.call.__class__(**{**vars(case.call), "axes": {**case.call.axes, "M": fewer}}))
    part = part_of(definition, whole, smaller, "M", range(7, size))
    alone = make_oracle_case(definition, smaller, "cpu", inputs=part.inputs)
    assert part.inputs["x"].shape[0] == fewer
    for name, value in alone.outputs.items():
        assert torch.allclose(part.outputs[name], value, rtol=1e-12, atol=0)
