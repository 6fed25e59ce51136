"""What the small operators around the experts of a model do at their edges, by the gates that kernels face."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verify.comparison import base_errors, check_outputs
from tilegym_db.verify.reference import name_outputs, oracle, run_reference

INF, NAN = math.inf, math.nan
Run = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def run(catalog: Catalog) -> Run:
    """Run an operator's reference and hold its stock code and independent formulation against it; the reference's outputs."""

    def agree(name: str, *values: Any) -> dict[str, torch.Tensor]:
        definition = catalog.definition(name)
        given = dict(zip(definition.inputs, values, strict=True))
        written, truth = run_reference(definition, given), oracle(definition, given)
        dtypes = {variable: "float32" if variable == "T" else "int64" for variable in definition.dtypes}
        assert definition.self_test is not None
        found = {"independent": run_reference(definition, given, source=definition.self_test.independent)}
        stock = load_entry(catalog.solution(f"{name}_stock"))
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        found["stock"] = name_outputs(definition, stock(*copies.values()), copies, name)
        e_base = base_errors(definition, dtypes, written, truth)
        for who, outputs in {"reference": written, **found}.items():
            for verdict in check_outputs(definition, dtypes, given, truth, outputs, e_base).values():
                assert verdict.passed, f"{who}: {verdict.reason}"
        return written

    return agree


def test_a_row_of_zero_weights_gives_zeros_and_its_denominator_is_next_to_nothing(run: Run) -> None:
    found = run("normalize_weight", torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 1.0]]))
    assert found["denominator"].tolist() == [torch.tensor(1e-20).item(), 4.0]
    assert found["out"].tolist() == [[0.0, 0.0, 0.0], [0.25, 0.5, 0.25]]


def test_weights_are_added_in_order_of_the_choices(run: Run) -> None:
    # 2**24 + 1 is no float32: added first to last the ones are lost one by one, from the other end they are not.
    row = [2.0**24, 1.0, 1.0, 1.0, 1.0]
    found = run("normalize_weight", torch.tensor([row, row[::-1]]))
    assert found["denominator"].tolist() == [2.0**24, 2.0**24 + 4]


def test_of_sixteen_experts_on_two_times_two_ranks_each_rank_keeps_its_own_renumbered(run: Run) -> None:
    # Four ranks hold four experts each; two tensor-parallel ranks make a group, so rank 1 holds experts 4..7 and 12..15.
    ids = torch.tensor([[-1, 0, 3, 4, 7], [8, 11, 12, 15, -7]])
    found = run("mask_indices_by_tp", ids, 16, 4, 1, 2)["out"]
    assert found.tolist() == [[-1, -1, -1, 0, 3], [-1, -1, 4, 7, -1]]


def test_without_tensor_parallel_ranks_ids_stay_as_they_are(run: Run) -> None:
    ids = torch.tensor([[0, 5, 71, -1]])
    assert run("mask_indices_by_tp", ids, 72, 8, 0, 1)["out"].tolist() == ids.tolist()


COUNTED = {
    "all to one": lambda experts: torch.full((64, 8), experts - 1),
    "none at all": lambda experts: torch.full((64, 8), -1),
    "one of each": lambda experts: torch.arange(-2, experts + 2)[:, None],
    "equal in their lower halves": lambda experts: torch.arange(experts)[:, None] + torch.tensor([[2**32, -(2**32)]]),
}


@pytest.mark.parametrize("experts", [1, 3, 8, 160, 256, 512])
@pytest.mark.parametrize("contents", COUNTED)
def test_counts_of_skewed_ids(contents: str, experts: int, run: Run) -> None:
    ids = COUNTED[contents](experts)
    last, others = {"all to one": (512, 0), "one of each": (1, 1)}.get(contents, (0, 0))
    want = [others] * (experts - 1) + [last]
    assert run("group_count", ids, experts)["counts"].tolist() == want
    found = run("aux_fi", ids, experts, 8)["frequency"]
    assert found.tolist() == [torch.tensor(float(count * experts)).div(len(ids) * 8).item() for count in want]


@pytest.mark.parametrize("experts", [4, 9, 256])
def test_slots_of_an_expert_keep_the_order_of_its_ids_and_ids_of_none_come_last(experts: int, run: Run) -> None:
    last = experts - 1
    ids = torch.tensor([[2, last, -1], [2, 0, experts], [experts + 44, 2, 0]])
    found = run("moe_offsets", ids, experts)
    assert found["perm"].tolist() == [4, 8, 0, 3, 7, 1, 2, 5, 6]
    assert found["inverse"].tolist() == [2, 5, 6, 3, 0, 7, 8, 4, 1]
    assert found["offs"].tolist() == [2, 2, *[5] * (experts - 3), 6]


@pytest.mark.parametrize("expert", ["first", "last", "-1", "beyond", "far"])
@pytest.mark.parametrize("experts", [1, 3, 160, 256])
def test_slots_are_in_order_where_one_expert_or_none_takes_all(experts: int, expert: str, run: Run) -> None:
    taken = {"first": 0, "last": experts - 1, "-1": -1, "beyond": experts, "far": 2**32}[expert]
    found = run("moe_offsets", torch.full((64, 8), taken), experts)
    assert found["perm"].tolist() == found["inverse"].tolist() == list(range(512))
    assert found["offs"].tolist() == [512 if 0 <= taken <= e else 0 for e in range(experts)]


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([3, 3, 3, 3], [3, -1, -1, -1]),
        ([2, 0, 2, 1, 0], [2, 0, -1, 1, -1]),
        ([-1, 4, -1, 4], [-1, 4, -1, -1]),
        ([5], [5]),
        ([2**40, 0, 2**40], [2**40, 0, -1]),  # equal in its low half to the 0 beside it
    ],
)
def test_the_first_of_equal_groups_stays(row: list[int], want: list[int], run: Run) -> None:
    assert run("inplace_unique_group_indices", torch.tensor([row]))["ids_out"].tolist() == [want]


def test_without_a_limit_the_clamped_gate_is_swiglu(run: Run, catalog: Catalog) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * 20
    plain = run_reference(catalog.definition("swiglu"), {"a": x[:, :32], "b": x[:, 32:]})["out"]
    assert torch.equal(run("swiglu_clamp", x, INF)["out"], plain)


def test_the_clamped_gate_at_its_bounds_and_beyond(run: Run) -> None:
    gate, up = [10.0, 1e4, INF, -200.0, 1.0, NAN, 1.0], [1.0, 1.0, 1.0, 1.0, -INF, 1.0, NAN]
    out = run("swiglu_clamp", torch.tensor([gate + up]), 10.0)["out"][0]
    top = float(torch.nn.functional.silu(torch.tensor(10.0)))
    assert out[:3].tolist() == pytest.approx([top, top, top])
    assert out[3] == 0
    assert float(out[4]) == pytest.approx(-10 * float(torch.nn.functional.silu(torch.tensor(1.0))))
    assert out[5:].isnan().all()


def test_the_gate_of_gpt_oss_takes_alternating_columns_and_lets_nan_pass(run: Run) -> None:
    pairs = [(1.0, 0.0), (100.0, -1.0), (0.0, 5.0), (-300.0, 100.0), (NAN, 1.0), (1.0, NAN)]
    out = run("swiglu_oai", torch.tensor([[value for pair in pairs for value in pair]]), 1.702, 7.0)["out"][0]
    assert float(out[0]) == pytest.approx(1 / (1 + math.exp(-1.702)))
    assert out[1:4].eq(0).all()  # up + 1 is 0; the gate is 0; the sigmoid is
    assert out[4:].isnan().all()


def test_a_shared_expert_is_added_whole_or_by_its_gate(run: Run) -> None:
    routed, shared = torch.tensor([[1.0, 2.0]] * 3), torch.tensor([[4.0, -8.0]] * 3)
    assert run("shared_expert_add", routed, shared)["out"].tolist() == [[5.0, -6.0]] * 3
    x, weight = torch.tensor([[0.0, 0.0], [200.0, 0.0], [-200.0, 0.0]]), torch.ones(1, 2)
    found = run("shared_expert_gate", routed, x, weight, shared)["out"]
    assert found.tolist() == [[3.0, -2.0], [5.0, -6.0], [1.0, 2.0]]  # gates of a half, one and zero
