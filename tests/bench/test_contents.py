"""What is timed of operators whose ids or lengths decide how much there is to do."""

from __future__ import annotations

import pytest
import torch

from tilegym_db.bench.contents import CONTENT_SETS, ExpectedCache, WorkloadContents
from tilegym_db.bench.reproduce import reproduce
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.records import Workload
from tilegym_db.verify.inputs import draws_spread

ROWS, GROUPS = 256, 4


def contents_of(name: str, axes: dict[str, int], seed: int, **scalars: float) -> WorkloadContents:
    definition = Catalog.default().definition(name)
    dtypes = {variable: choices[0] for variable, choices in definition.dtypes.items()}
    inputs = {scalar: {"type": "scalar", "value": value} for scalar, value in scalars.items()}
    record = {"definition": name, "axes": axes, "dtypes": dtypes, "inputs": inputs}
    workload = Workload.from_dict(record, "a test")
    return WorkloadContents.draw(definition, workload, seed, ExpectedCache(definition, "cpu"))


def grouped_gemm(seed: int) -> WorkloadContents:
    return contents_of("moe_grouped_gemm", {"S": ROWS, "K": 16, "N": 16, "E": GROUPS}, seed)


def lengths(offs: torch.Tensor) -> list[int]:
    return torch.diff(offs, prepend=offs.new_zeros(1)).tolist()


def test_every_set_that_is_timed_spreads_its_rows_as_a_model_does() -> None:
    contents = grouped_gemm(seed=7)
    assert len(contents.sets) == len(CONTENT_SETS)
    for expected in contents.sets:
        assert sum(lengths(expected.inputs["offs"])) == ROWS  # no tail that belongs to nobody
        assert min(lengths(expected.inputs["offs"])) > ROWS // GROUPS // 2


def test_contents_that_the_audit_has_timed_are_spread_like_those_that_were_timed() -> None:
    for expected in grouped_gemm(seed=7).fresh(0, 8):
        assert min(lengths(expected.inputs["offs"])) > ROWS // GROUPS // 2


def test_one_more_set_is_spread_otherwise_and_verified_and_its_kind_changes_from_run_to_run() -> None:
    spreads = set()
    for seed in range(6):
        contents = grouped_gemm(seed)
        assert contents.unusual is not None
        assert contents.verified == [*contents.sets, contents.unusual]
        assert not contents.unusual.case.typical
        spreads.add(contents.unusual.case.contents)
    assert spreads == set(CONTENT_SETS[1:])


def test_an_operator_without_ids_or_lengths_has_the_sets_that_it_always_had() -> None:
    contents = contents_of("rms_norm", {"M": 8, "N": 32}, seed=3, eps=1e-6)
    assert contents.unusual is None
    assert [expected.case.contents for expected in contents.sets] == list(CONTENT_SETS)


@pytest.mark.parametrize(
    ("name", "spread"),
    [("moe_experts", True), ("moe_offsets", True), ("topk_softmax", False), ("gemm", False), ("per_token_cast", False)],
)
def test_what_counts_as_spread_is_said_by_the_definition(name: str, spread: bool) -> None:
    assert draws_spread(Catalog.default().definition(name)) is spread


def test_a_case_whose_ids_are_typical_is_reproduced_by_what_it_is_called() -> None:
    case = grouped_gemm(seed=7).sets[2].case
    assert case.contents == "outliers:typical"
    call = {"axes": case.axes, "dtypes": case.dtypes, "scalars": {}, "layouts": {}, "gpu": "cpu"}
    found = reproduce("moe_grouped_gemm_stock", contents=case.contents, seed=case.seed, **call)
    assert (found.case, found.failure) == (case, None)
    with pytest.raises(UsageError, match="unknown contents 'outliers:often'"):
        reproduce("moe_grouped_gemm_stock", contents="outliers:often", seed=1, **call)
