"""Outputs whose strides a Workload or a Definition says: gaps between elements have no owner and stay unwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.backends.aot_worker import call_arguments
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.call import Call, bind_call
from tilegym_db.records.definition_parts import overlap
from tilegym_db.records.workload import Case
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.verifier import check_memory, read_outputs

COLUMNS = "strided(1, ceil_div(M, 4) * 4)"
SCALARS = {"factor": {"type": "scalar", "value": 2.0}}


@pytest.fixture
def by_columns(definition_record: Any) -> Definition:
    """The small operator, with an output that lies in memory column by column, each a multiple of four elements long."""
    return Definition.from_dict(definition_record(layouts={"out": COLUMNS}))


def workload(definition: Definition, **changes: Any) -> Workload:
    record = {"definition": "row_scale", "axes": {"M": 5, "N": 3}, "dtypes": {"T": "float32"}, "inputs": SCALARS}
    made = Workload.from_dict({**record, **changes})
    made.check_against(definition)
    return made


def solution(**layouts: str) -> Solution:
    spec = {"language": "python", "entry_point": "kernel.py::run", "layouts": layouts}
    sources = [{"path": "kernel.py"}]
    return Solution.from_dict(
        {"name": "any", "definition": "row_scale", "author": "tests", "spec": spec, "sources": sources}
    )


def fuzzed_strides(definition: Definition, **layouts: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape, strides) of ``out`` in many fuzz cases."""
    cases = [
        case
        for seed in range(12)
        for case in fuzz_cases(
            definition, solution(**layouts), [], {"T": "float32"}, {"factor": 2.0}, count=12, seed=seed
        )
    ]
    return [(definition.shape_of("out", case.call.axes), case.strides(definition, "out")) for case in cases]


def test_the_strides_of_a_definition_are_those_of_every_call(by_columns):
    made = workload(by_columns)
    assert made.layout_classes(by_columns) == {"out": "strided"}
    case = Case.of_workload(by_columns, made, distribution="normal", seed=1)
    assert case.strides(by_columns, "out") == (1, 8)
    assert call_arguments(by_columns, made)[-1].stride() == (1, 8)
    out = allocate_of(by_columns)(torch.empty(5, 3), torch.empty(3), 2.0)
    assert (tuple(out.shape), out.stride()) == ((5, 3), (1, 8))


def test_fuzz_varies_only_the_gaps_of_a_definitions_strides(by_columns):
    found = fuzzed_strides(by_columns, x="strided", out="strided")
    assert all(strides == (1, -(-shape[0] // 4) * 4) for shape, strides in found)
    assert len({strides[1] - shape[0] for shape, strides in found if 0 not in shape}) == 4


def test_fuzz_pads_columns_of_an_output_with_free_strides(definition_record):
    plain = Definition.from_dict(definition_record())
    gaps = {
        strides[1] - shape[0] for shape, strides in fuzzed_strides(plain, out="strided") if strides[0] == 1 < shape[0]
    }
    assert len(gaps) > 3
    assert not [strides for _, strides in fuzzed_strides(plain, x="strided") if strides[0] == 1 and strides[1] > 1]


def test_a_call_with_other_strides_is_no_call_of_the_operator(by_columns):
    x, weight = torch.empty(5, 3), torch.empty(3)
    right = torch.empty_strided((5, 3), (1, 8))
    assert bind_call(by_columns, [x, weight, 2.0, right]).layouts["out"] == "strided"
    with pytest.raises(UsageError, match=r"'out' of row_scale must have the strides \(1, 8\)"):
        bind_call(by_columns, [x, weight, 2.0, torch.empty_strided((5, 3), (1, 5))])


def test_strides_are_part_of_what_an_operator_means(by_columns, definition_record):
    assert by_columns.digest != Definition.from_dict(definition_record()).digest


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"other": COLUMNS}, "layouts.other: no such tensor"),
        ({"factor": COLUMNS}, "layouts.factor: no such tensor"),
        ({"out": "contiguous"}, "leave it out"),
        ({"out": "strided(1)"}, "1 strides for 2 dimensions"),
        ({"out": "strided(1, K)"}, "uses the undeclared axis 'K'"),
        ({"out": "columns"}, "must be 'contiguous' or 'strided"),
    ],
)
def test_strides_that_are_none_are_refused_with_their_key(layouts, message, definition_record):
    with pytest.raises(RecordError, match="layout") as error:
        Definition.from_dict(definition_record(layouts=layouts))
    assert message in str(error.value)


def test_workload_keeps_definition_strides_and_unique_addresses(by_columns, definition_record):
    with pytest.raises(RecordError, match=r"layouts\.out: row_scale states it"):
        workload(by_columns, layouts={"out": "strided(1, M)"})
    plain = Definition.from_dict(definition_record())
    assert workload(plain, layouts={"out": COLUMNS}).layout_classes(plain) == {"out": "strided"}
    with pytest.raises(RecordError, match="one address to be written to"):
        workload(plain, layouts={"out": "strided(1, M - 1)"})


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [
        ((5, 3), (1, 8), "none"),
        ((5, 3), (1, 5), "none"),
        ((5, 3), (1, 4), "certain"),
        ((5, 3), (0, 1), "certain"),
        ((1, 3), (0, 1), "none"),
        ((0, 3), (0, 0), "none"),
        ((2, 5, 3), (24, 1, 8), "none"),
        ((4, 8), (3, 4), "none"),
        ((4, 4096, 8), (3, 1000, 4), "possible"),
        ((4096, 4096), (0, 1), "certain"),
    ],
)
def test_elements_with_one_address_are_counted_if_they_are_few(shape, strides, wanted):
    assert overlap(shape, strides) == wanted


def test_gaps_are_not_compared_and_a_write_into_one_is_refused(by_columns):
    case = Case(Call("row_scale", {"M": 5, "N": 3}, {"T": "float32"}, scalars={"factor": 2.0}))
    with SharedBuffers(plan_slot(by_columns, case), 1, "cpu") as buffers:
        buffers.slot(0).fill_(255)  # NaN, in the gaps too
        before = buffers.slot(0).clone()
        out = buffers.tensor(0, "out")
        out.zero_()
        assert check_memory(buffers, 0, before, by_columns, case) is None
        written = read_outputs(buffers, 0, by_columns)["out"]
        assert written.is_contiguous()
        assert torch.equal(written, torch.zeros(5, 3))
        out.as_strided((8, 3), (1, 8))[5:, 0] = 0.0  # the rest of the first column, which has no owner
        failure = check_memory(buffers, 0, before, by_columns, case)
        assert failure is not None
        assert failure.gate == "memory"
        assert "wrote to out, a gap between its elements, at byte 20" in failure.reason
        del out
