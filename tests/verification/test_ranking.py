"""How routers are judged that rank values which are neither input nor output, on the shipped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.verification.cases import fuzz_cases, sibling_of
from tilegym_db.verification.comparison import check_outputs, followed, reference_errors
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.oracle import oracle, run_reference

CATALOG = Catalog((shipped_root(),))
GROUPS = CATALOG.definition("topk_sigmoid_bias_groups")
SOFTMAX = CATALOG.definition("topk_softmax")
ROUNDED = CATALOG.definition("topk_sqrtsoftplus_bias")
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def judged(
    definition: Definition, inputs: dict[str, Any], change: Change, dtype: str = "float32"
) -> dict[str, str | None]:
    """Output -> the gate that refuses it, of the reference's own outputs with a change."""
    written, truth = run_reference(definition, inputs), oracle(definition, inputs)
    dtypes = {"T": dtype} if definition.dtypes else {}
    e_base, _ = reference_errors(definition, dtypes, written, followed(definition, inputs, truth, written))
    outputs = change({name: value.clone() for name, value in written.items()})
    verdicts = check_outputs(definition, dtypes, inputs, truth, outputs, e_base)
    return {name: verdict.gate for name, verdict in verdicts.items()}


def inputs_of(definition: Definition, logits: torch.Tensor, *rest: Any) -> dict[str, Any]:
    return dict(zip(definition.inputs, (logits, *rest), strict=True))


def group_inputs(logits: torch.Tensor, bias: torch.Tensor | None = None, kept: int = 2) -> dict[str, Any]:
    given = torch.zeros(logits.shape[-1]) if bias is None else bias
    return inputs_of(GROUPS, logits, given, 3, 4, kept, True, 2.5)


def rows(count: int = 6, experts: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, experts, generator=torch.Generator().manual_seed(seed))


def replaced(old: int, new: int) -> Change:
    """Row 0 with another expert in the place of one that was chosen, at the weight that this one has."""

    def change(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        place = int((outputs["ids"][0] == old).nonzero())
        outputs["ids"][0, place] = new
        return outputs

    return change


def unchanged(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return outputs


def reordered(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.flip(-1) for name, value in outputs.items()}


PASSED = {"weights": None, "ids": None}


def test_the_order_is_free_only_where_the_record_says_so():
    assert judged(GROUPS, group_inputs(rows()), reordered) == PASSED
    assert judged(SOFTMAX, inputs_of(SOFTMAX, rows(), 3, True), reordered)["ids"] == "exact"


def test_weights_in_another_order_than_their_experts_are_refused():
    assert judged(GROUPS, group_inputs(rows()), lambda out: {**out, "ids": out["ids"].flip(-1)})["weights"] is not None


@pytest.mark.parametrize(("apart", "gate"), [(0.0, None), (1e-6, None), (1e-3, "exact")])
def test_tie_may_break_otherwise_within_rounding_of_its_scores(apart, gate):
    logits = torch.full((1, 8), -4.0)
    logits[0, :2], logits[0, 2], logits[0, 5] = 3.0, 1.0 + apart, 1.0
    inputs = inputs_of(SOFTMAX, logits, 3, True)
    assert run_reference(SOFTMAX, inputs)["ids"][0, 2] in ((2, 5) if apart == 0 else (2,))
    chosen = int(run_reference(SOFTMAX, inputs)["ids"][0, 2])
    assert judged(SOFTMAX, inputs, replaced(chosen, 7 - chosen))["ids"] == gate


def test_weights_of_a_tie_belong_to_the_chosen_expert():
    logits, bias = rows(1), torch.zeros(16)
    logits[0, :3], logits[0, 3] = torch.tensor([4.0, 3.0, 1.0]), 0.0
    bias[3] = float(torch.sigmoid(torch.tensor(1.0)) - 0.5)  # ranked alike, at other weights
    inputs = group_inputs(logits, bias, kept=1)
    written = run_reference(GROUPS, inputs)["ids"][0].tolist()
    other = ({2, 3} - set(written)).pop()
    swapped = replaced(({2, 3} & set(written)).pop(), other)
    assert judged(GROUPS, inputs, swapped) == {"weights": "elementwise", "ids": None}

    def with_its_weight(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = swapped(outputs)
        scores = logits.sigmoid().gather(-1, outputs["ids"])
        return {**outputs, "weights": scores / scores.sum(-1, keepdim=True) * 2.5}

    assert judged(GROUPS, inputs, with_its_weight) == PASSED


def test_of_groups_of_equal_value_any_may_be_kept():
    logits = torch.full((1, 16), -3.0)
    logits[0, [0, 1, 2]] = 5.0  # one group that is surely kept
    logits[0, [4, 5, 8, 9]] = torch.tensor([2.0, 1.0, 2.0, 1.0])  # two that tie for the second place
    logits[0, 3] = 0.0
    inputs = inputs_of(GROUPS, logits, torch.zeros(16), 4, 4, 2, False, 1.0)
    written = run_reference(GROUPS, inputs)["ids"][0].tolist()
    old = ({4, 8} & set(written)).pop()
    assert judged(GROUPS, inputs, replaced(old, 12 - old)) == PASSED
    logits[0, old + 1] += 1e-2  # now the other group is worth less, and its best expert the same
    assert old in run_reference(GROUPS, inputs)["ids"][0].tolist()
    assert judged(GROUPS, inputs, replaced(old, 12 - old))["ids"] == "exact"


@pytest.mark.parametrize("wrong", [-1, 16, 1 << 40, "repeated"])
def test_indices_out_of_range_or_repeated_are_refused_unread(wrong):
    def change(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs["ids"][0, 0] = outputs["ids"][0, 1] if wrong == "repeated" else wrong
        return outputs

    assert judged(GROUPS, group_inputs(rows()), change)["ids"] == "exact"


@pytest.mark.parametrize(
    "name", ["topk_softmax", "topk_then_softmax", "topk_sigmoid_bias_groups", "topk_softmax_groups"]
)
def test_ids_of_another_width_are_read_alike(name):
    definition = CATALOG.definition(name)
    rest = {"topk_softmax": (3, True), "topk_then_softmax": (3,), "topk_softmax_groups": (3, 4, 2, 2.5)}
    inputs = group_inputs(rows()) if name not in rest else inputs_of(definition, rows(), *rest[name])
    assert judged(definition, inputs, lambda outputs: {**outputs, "ids": outputs["ids"].int()}) == PASSED


@pytest.mark.parametrize(
    ("find", "replace", "code", "fact"),
    [
        ("dtype=torch.float32)\n", "dtype=torch.float32)[:1]\n", "ranking_shape_differs", "ranked"),
        ("dtype=torch.float32)\n", "dtype=torch.float32)[:, :2]\n", "ranking_too_short", "'ids'"),
        ("return torch.softmax", "raise ValueError('no')\n    return torch.softmax", "reference_raises", "ranked"),
    ],
)
def test_function_without_a_ranked_row_per_index_row_is_named(find, replace, code, fact):
    inputs = inputs_of(SOFTMAX, rows(), 3, True)
    truth = oracle(SOFTMAX, inputs)
    record = SOFTMAX.to_dict()
    changed = Definition.from_dict(
        {**record, "reference": record["reference"].replace(find, replace), "self_test": None}
    )
    with raises(RecordError, code, fact):
        check_outputs(changed, {"T": "float32"}, inputs, truth, truth, dict.fromkeys(truth, EXACTLY))


def test_fuzz_varies_a_size_with_the_scalar_that_states_it():
    stock = CATALOG.solution("topk_sigmoid_bias_groups_stock").record
    workload = next(item for item in CATALOG.workloads_for(GROUPS.name) if "tiny" in item.tags)
    cases = fuzz_cases(GROUPS, stock, [workload.axes], {}, workload.scalars(), count=20, seed=3)
    cases += [sibling_of(GROUPS, case, number, workload.scalars()) for number, case in enumerate(cases)]
    assert len({case.call.axes["K"] for case in cases}) > 5
    for case in cases:
        sizes = {scalar: case.call.axes[axis] for scalar, axis in GROUPS.size_scalars.items()}
        assert {name: case.call.scalars[name] for name in sizes} == sizes


def rank_between(first: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    """One row of two experts: the first with a given logit, the second ranked between the score of that and another one."""
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    logits[0, 0] = first
    second = torch.nn.functional.softplus(logits[0, 1]).sqrt().float()
    between = (torch.nn.functional.softplus(first).sqrt().float() + other.float()) / 2
    return inputs_of(ROUNDED, logits, torch.stack([torch.zeros(()), between - second]), 1, 1.5)


def candidates() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits of bfloat16, the smaller and the larger score that the rounding of float32 allows for each)."""
    logits = torch.arange(-3.0, 3.0, 2.0**-10).to(torch.bfloat16).unique()
    exact = torch.nn.functional.softplus(logits.double())
    smaller, larger = ((exact * (1 + step)).bfloat16().sqrt() for step in (-1e-6, 1e-6))
    return logits, smaller, larger


def test_scores_ranked_after_rounding_are_judged_after_rounding() -> None:
    logits = rows(200, 64).to(torch.bfloat16)
    inputs = inputs_of(ROUNDED, logits, torch.zeros(64), 6, 1.5)
    assert judged(ROUNDED, inputs, unchanged, "bfloat16") == PASSED

    def by_unrounded_scores(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bias = 0.01 * rows(1, 64, seed=1)
        inputs["bias"].copy_(bias[0])
        exact = torch.nn.functional.softplus(logits.float()).sqrt()
        return outputs | {"ids": (exact + bias).topk(6, dim=-1).indices}

    assert judged(ROUNDED, inputs, by_unrounded_scores, "bfloat16")["ids"] == "exact"


def test_of_a_score_between_two_numbers_either_may_be_ranked() -> None:
    logits, smaller, larger = candidates()
    open_ones, sure = (smaller != larger).nonzero().flatten(), (smaller == larger).nonzero().flatten()
    assert len(open_ones) > 0
    swapped = replaced(0, 1), replaced(1, 0)
    for place in open_ones.tolist():
        written = torch.nn.functional.softplus(logits[place]).sqrt()
        other = larger[place] if written == smaller[place] else smaller[place]
        inputs = rank_between(logits[place], other)
        chosen = int(run_reference(ROUNDED, inputs)["ids"])
        assert judged(ROUNDED, inputs, unchanged, "bfloat16")["ids"] is None
        assert judged(ROUNDED, inputs, swapped[chosen], "bfloat16")["ids"] is None
    for place in sure[::40].tolist():
        above = (larger[place].view(torch.int16) + 1).view(torch.bfloat16)
        inputs = rank_between(logits[place], above)
        assert run_reference(ROUNDED, inputs)["ids"].tolist() == [[1]]
        assert judged(ROUNDED, inputs, swapped[1], "bfloat16")["ids"] == "exact"


@pytest.mark.parametrize(("index", "gate"), [(16, "indices"), (-1, "indices"), (0, "indices"), (None, None)])
def test_indices_of_a_row_with_nan_must_exist_and_differ(index, gate):
    logits = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    logits[3] = torch.nan

    def changed(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs["weights"][3] = 0.5
        if index is not None:
            outputs["ids"][3, :2] = torch.tensor([0, index])
        return outputs

    assert judged(SOFTMAX, inputs_of(SOFTMAX, logits, 4, True), changed) == {"weights": None, "ids": gate}
