"""Successive sizes leave every remainder, and their contents and results are parts of one oracle."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records.workload import Case
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.residues import SIZES, may_be_parted, part_of, starts_of_parts, successive
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


@pytest.mark.parametrize(("name", "axis"), [("kv_cache_write_stock", "S"), ("gemm_cublas", "K")])
def test_an_axis_that_others_bound_has_every_size(tmp_path: Path, name: str, axis: str) -> None:
    handle, shapes = drawn(name, tmp_path, 5)
    assert len(shapes[axis]) == SIZES
    assert max(shapes[axis]) - min(shapes[axis]) == SIZES - 1
    assert all(
        handle.definition.bind_axes({name: case.call.axes[name] for name in handle.definition.var_axes})
        for case in shapes[axis].values()
    )


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


@pytest.mark.parametrize(
    ("name", "axis", "start"),
    [
        ("attention_prefill_stock", "S", "first"),
        ("gated_delta_rule_chunk_stock", "V", "any"),
        ("gemm_cublas", "N", "any"),
    ],
)
def test_parts_of_a_larger_result_serve_as_an_oracle(tmp_path: Path, name: str, axis: str, start: str) -> None:
    handle, shapes = drawn(name, tmp_path, 3)
    definition, sizes = handle.definition, sorted(shapes[axis])[:40]
    whole = make_oracle_case(definition, shapes[axis][sizes[-1]], "cpu")
    assert whole is not None
    starts = starts_of_parts(definition, whole, axis, sizes[:-1], random.Random(1))
    assert starts is not None
    assert (len(starts) > 1) == (start == "any")


@pytest.mark.parametrize(("name", "axis"), [("gemm", "K"), ("moe_experts", "E"), ("top_p_sampling_from_probs", "V")])
def test_results_that_all_indices_count_in_have_no_parts(name: str, axis: str) -> None:
    assert not may_be_parted(CATALOG.definition(name), axis)


def test_a_softmax_over_all_keys_has_no_parts(tmp_path: Path) -> None:
    handle, shapes = drawn("attention_bidirectional_stock", tmp_path, 3)
    sizes = sorted(shapes["L"])
    whole = make_oracle_case(handle.definition, shapes["L"][sizes[-1]], "cpu")
    assert whole is not None
    assert starts_of_parts(handle.definition, whole, "L", sizes[:-1], random.Random(1)) is None
