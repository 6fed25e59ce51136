"""Padded rows that end within a vector: what writes whole vectors, as TMA stores do, writes into the padding."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import Call
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.workload import Case
from tilegym_db.verification.cases import (
    MANY_ROWS,
    ROWS_ALIGNED,
    ROWS_OFF,
    LayoutChoices,
    draw_layouts,
    fuzz_cases,
    ragged_rows,
)
from tilegym_db.verification.distributions import REFERENCE_MAY_FAIL

CATALOG = Catalog((shipped_root(),))
LANGUAGES = ("triton", "tilelang", "cutile", "stock")
WITH_ROWS = [
    *(f"{name}_{language}" for name in ("rms_norm", "silu_and_mul", "batched_transpose") for language in LANGUAGES),
    *(f"gemm_{language}" for language in (*LANGUAGES[:3], "cublas")),
]
COUNTS = (2, 4, 24)


def cases_of(name: str, count: int, seed: int) -> tuple[Definition, list[Case]]:
    record = CATALOG.solution(name).record
    definition = CATALOG.definition(record.definition)
    anchors = [workload.axes for workload in CATALOG.workloads_for(definition.name)]
    dtypes = {name: record.spec.dtypes.get(name, choices)[0] for name, choices in definition.dtypes.items()}
    return definition, fuzz_cases(definition, record, anchors, dtypes, {}, count=count, seed=seed)


def solution(**spec: Any) -> Solution:
    full = {"language": "python", "entry_point": "kernel.py::run", **spec}
    return Solution.from_dict(
        {"name": "any", "definition": "row_scale", "author": "tests", "spec": full, "sources": [{"path": "kernel.py"}]}
    )


def rows_of(definition: Definition, case: Case, name: str) -> tuple[int, list[int]]:
    """The bytes of a row, and from one to the next in every outer dimension."""
    itemsize = STORED_BYTES[definition.dtype_of(name, case.call.dtypes)]
    strides = case.strides(definition, name)
    assert strides[-1] == 1
    return definition.shape_of(name, case.call.axes)[-1] * itemsize, [stride * itemsize for stride in strides[:-1]]


@pytest.mark.sweep
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_every_run_has_padded_rows_with_and_without_alignment(name, count):
    for seed in range(50 if count < 24 else 20):  # the cases that count come first, and are alike in larger sets
        definition, cases = cases_of(name, count, seed)
        assert len(cases) == count
        aligned, off = cases[0], cases[min(2, count - 1)]
        assert aligned.offset == 0  # or no kernel takes the tensor copy engine
        assert off.offset == (count == 2)
        assert not {aligned.distribution, off.distribution} & REFERENCE_MAY_FAIL  # or nothing is left to compare
        for case in (aligned, off):
            assert set(case.call.layouts) >= set(definition.written_outputs), "every output has padded rows"
            assert any(rows_of(definition, case, name)[0] % 16 for name in definition.written_outputs)
        for tensor in aligned.call.layouts:
            row, steps = rows_of(definition, aligned, tensor)
            assert steps[-1] > row
            assert all(step % 16 == 0 for step in steps)
        for tensor in off.call.layouts:
            row, steps = rows_of(definition, off, tensor)
            assert steps[-1] > row
            assert steps[-1] % 16


def test_all_operands_of_a_product_fit_the_copy_engine():
    for seed in range(20):
        definition, cases = cases_of("gemm_triton", 4, seed)
        assert set(cases[0].call.layouts) == {*definition.tensor_inputs, *definition.written_outputs}
        assert cases[0].call.axes["M"] >= MANY_ROWS
        assert cases[0].call.axes["N"] % 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65])
def test_both_kinds_of_rows_exist_at_every_size(size, dtype, operator):
    definition, itemsize = operator(), STORED_BYTES[dtype]
    choices = LayoutChoices.of(definition, solution(layouts={"x": "row_contiguous"}))
    drawn: dict[str, set[int]] = {ROWS_ALIGNED: set(), ROWS_OFF: set()}
    axes = {"M": 3, "N": size}
    for layout, strides in drawn.items():
        for seed in range(40):
            found, _ = draw_layouts(choices, axes, {"T": dtype}, random.Random(seed), layout)
            strides.add(Case(Call(definition.name, axes, {"T": dtype}, found)).strides(definition, "x")[0])
        assert min(strides) > size
    assert {stride * itemsize % 16 for stride in drawn[ROWS_ALIGNED]} == {0}
    assert all(stride * itemsize % 16 for stride in drawn[ROWS_OFF])
    assert len(drawn[ROWS_ALIGNED]) >= 2 <= len(drawn[ROWS_OFF])
    assert any(stride % 64 == 0 for stride in drawn[ROWS_ALIGNED])


def test_raggedness_of_rows_depends_on_the_bytes_of_the_output(operator):
    definition = operator()
    assert ragged_rows(definition, ["x", "out"], {"M": 3, "N": 6}, {"T": "float32"}) == 3
    assert ragged_rows(definition, ["x", "out"], {"M": 3, "N": 8}, {"T": "float32"}) == 0
    assert ragged_rows(definition, ["x", "out"], {"M": 0, "N": 6}, {"T": "float32"}) == 0
