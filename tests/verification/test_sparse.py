"""Long calls whose oracle has a few positions: for which operators, and that the few decide alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Solution
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import leaves_the_rest_out, make_large_case, without_weight
from tilegym_db.verification.large import SPARSE_LENGTHS, large_cases
from tilegym_db.verification.oracle import at_indices, in_fp64

CATALOG = Catalog.default()


def tiny(name: str) -> Case:
    workload = next(one for one in CATALOG.workloads_for(name) if "tiny" in one.tags)
    return Case.of_workload(CATALOG.definition(name), workload, distribution="normal", seed=11)


@pytest.mark.parametrize(
    ("name", "axis", "left_out"),
    [
        ("attention_prefill", "S", True),
        ("mla_prefill", "S", True),
        ("attention_bidirectional", "L", True),
        ("attention_prefill_backward", "S", False),
        ("attention_softcap", "L", False),
        ("softmax", "M", False),
    ],
)
def test_the_reference_says_if_positions_can_be_left_out(name: str, axis: str, left_out: bool) -> None:
    assert leaves_the_rest_out(CATALOG.definition(name), tiny(name), axis, "cpu") == left_out


@pytest.mark.parametrize("seed", range(3))
def test_a_long_prompt_has_the_results_of_its_positions(seed: int) -> None:
    definition = CATALOG.definition("attention_prefill")
    spec = {"language": "python", "entry_point": "kernel.py::run"}
    record = Solution.from_dict(
        {
            "name": "long",
            "definition": definition.name,
            "author": "tests",
            "spec": spec,
            "sources": [{"path": "kernel.py"}],
        }
    )
    found = large_cases(
        definition, record, {"T": "float32"}, {"scale": 0.125}, seed=seed, budget_bytes=24 << 20, on_gpu=False
    )
    (long,) = [case for case in found if case.is_sparse]
    size, positions = long.case.call.axes["S"], long.rows["S"]
    assert SPARSE_LENGTHS[False][0][0] * 0.9 <= size
    assert sum(after - before > size // 100 for before, after in itertools.pairwise(positions)) >= 3
    made = make_large_case(definition, long, "cpu")
    assert made is not None
    assert made.given.inputs["q"].shape[2] == size
    assert made.compared.outputs["out"].shape[2] == len(positions)


def test_other_positions_change_nothing() -> None:
    definition, case = CATALOG.definition("attention_prefill"), tiny("attention_prefill")
    generator = torch.Generator().manual_seed(3)
    shape = (1, 2, 90, 16)
    inputs = {name: torch.randn(shape, generator=generator) for name in ("q", "k", "v")} | {"scale": 0.25}
    kept = torch.tensor([0, 7, 50, 89])
    found = without_weight(definition, inputs, "S", kept, case.seed)
    assert found is not None
    among = at_indices(definition, in_fp64(definition, found), {"S": kept})
    alone = in_fp64(definition, at_indices(definition, found, {"S": kept}))
    assert torch.equal(among["out"], alone["out"]) or torch.allclose(among["out"], alone["out"], rtol=1e-12)
