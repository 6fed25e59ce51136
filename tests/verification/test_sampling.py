"""Samplers are judged by the law of what they draw: planted mistakes are refused, honest ones pass however they choose."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import (
    FALSE_ALARM,
    agreement_bound,
    check_outputs,
    check_sampled_outputs,
    distance_bound,
    distinct_bound,
    expected_distinct,
    share_bound,
)
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_reference
from tilegym_db.verification.verifier import MAX_DRAWN_AT_ONCE, Failure, calls_for, judge_draws

CATALOG = Catalog((shipped_root(),))
TOP_K, TOP_P, MIN_P = (CATALOG.definition(f"{name}_sampling_from_probs") for name in ("top_k", "top_p", "min_p"))
CONTENTS = {
    "typical": "normal",
    "one_law": "row_scale",
    "few_values": "small_integers",
    "steep": "constant_rows",
    "flat": "one_hot",
    "extreme_parameters": "subnormals",
    "unnormalised": "ties",
}
"""Contents that these operators name -> the distribution whose cases have them."""

Inputs = dict[str, Any]
Sampler = Callable[[Inputs], torch.Tensor]


def expected(definition: Definition, contents: str, rows: int = 512, columns: int = 24, seed: int = 0) -> OracleCase:
    case = Case(Call(definition.name, {"B": rows, "V": columns}), distribution=CONTENTS[contents], seed=seed)
    inputs = draw_inputs(definition, case, "cpu")
    return OracleCase(case, inputs, run_reference(definition, inputs), {"samples": EXACTLY})


def verdict(definition: Definition, case: OracleCase, sampler: Sampler, draws: int = 8192) -> Failure | None:
    """What many calls of a sampler are found to be: a failure, or None."""

    def call(given: OracleCase) -> dict[str, torch.Tensor]:
        return {"samples": sampler(dict(given.inputs))}

    return judge_draws(definition, case, call(case), call, draws)


def kept_by_rank(inputs: Inputs, more: int = 0) -> torch.Tensor:
    """The probabilities that top-k keeps, with so many more ranks; ties with the last one stay."""
    probs, columns = inputs["probs"].double(), inputs["probs"].shape[-1]
    count = inputs["top_k"].long()
    count = torch.where((count < 1) | (count > columns), columns, (count + more).clamp(1, columns))
    threshold = probs.sort(dim=-1, descending=True).values.gather(-1, count[:, None] - 1)
    return probs * (probs >= threshold)


def pick(weights: torch.Tensor, uniform: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    mass = weights.cumsum(dim=-1)
    index = (mass <= uniform.double()[:, None] * (mass[:, -1:] if total is None else total)).sum(dim=-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(index, last)


def honest(inputs: Inputs) -> torch.Tensor:
    return pick(kept_by_rank(inputs), inputs["uniform"])


def from_the_last(inputs: Inputs) -> torch.Tensor:
    return inputs["probs"].shape[-1] - 1 - pick(kept_by_rank(inputs).flip(-1), inputs["uniform"])


def by_exponential_race(inputs: Inputs) -> torch.Tensor:
    """Derive separate random bits from the number of the row, as a kernel with a generator would make them."""
    bits = (inputs["uniform"].double() * 2**24).long()[:, None] * 0x9E3779B9 + torch.arange(inputs["probs"].shape[-1])
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 0x297A2D39)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return (kept_by_rank(inputs) / -((bits + 0.5) / 2**32).log()).argmax(dim=-1)


def in_reverse(inputs: Inputs) -> torch.Tensor:
    """Give each row a separate number still, if not the one at its place."""
    return pick(kept_by_rank(inputs), inputs["uniform"].flip(0))


@pytest.mark.turn("tilegym_db/verification/")  # the judged samplers beside it are tried daily
def test_honest_samplers_pass_200_of_200_in_any_index_order() -> None:
    contents, samplers = tuple(CONTENTS), (honest, from_the_last, by_exponential_race, in_reverse)
    for seed in range(200):
        case = expected(TOP_K, contents[seed // 4 % len(contents)], rows=64, seed=seed)
        found = verdict(TOP_K, case, samplers[seed % 4], 256)
        assert found is None, found.reason


def by_rank(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    return order.gather(-1, pick(ordered, uniform)[:, None])[:, 0]


def shared_by(inputs: Inputs, rows: int) -> torch.Tensor:
    """One random number for so many rows that follow each other."""
    return inputs["uniform"][torch.arange(len(inputs["uniform"])) // rows * rows]


def hash_of_rows(inputs: Inputs) -> torch.Tensor:
    uniform = torch.frac(torch.arange(len(inputs["uniform"])).double() * 0.6180339887)
    return pick(kept_by_rank(inputs), uniform)


PLANTED: dict[str, tuple[str, Sampler, str]] = {
    "one rank too many": ("steep", lambda x: pick(kept_by_rank(x, 1), x["uniform"]), "support"),
    "one rank too few": ("steep", lambda x: pick(kept_by_rank(x, -1), x["uniform"]), "distribution"),
    "k ignored": ("typical", lambda x: pick(x["probs"].double(), x["uniform"]), "support"),
    "always the largest": ("typical", lambda x: x["probs"].argmax(dim=-1), "distribution"),
    "the sum of the whole row instead of what is kept": (
        "steep",
        lambda x: pick(kept_by_rank(x), x["uniform"], x["probs"].double().sum(dim=-1, keepdim=True)),
        "distribution",
    ),
    "temperature": ("one_law", lambda x: pick(kept_by_rank(x) ** 1.3, x["uniform"]), "distribution"),
    "even indices twice as often": (
        "flat",
        lambda x: pick(kept_by_rank(x) * (2 - torch.arange(24) % 2), x["uniform"]),
        "distribution",
    ),
    "one random number for all rows": (
        "one_law",
        lambda x: pick(kept_by_rank(x), x["uniform"][:1].expand(len(x["uniform"]))),
        "distribution",
    ),
    "one random number for all rows of different laws": (
        "typical",
        lambda x: pick(kept_by_rank(x), x["uniform"][:1].expand(len(x["uniform"]))),
        "distribution",
    ),
    "neighbours share a random number": ("typical", lambda x: pick(kept_by_rank(x), shared_by(x, 2)), "distribution"),
    "rows in groups of four share one": ("typical", lambda x: pick(kept_by_rank(x), shared_by(x, 4)), "distribution"),
    "rows of the two halves share one": (
        "typical",
        lambda x: pick(kept_by_rank(x), x["uniform"][: len(x["uniform"]) // 2].repeat(2)),
        "distribution",
    ),
    "every sixteenth row shares one": (
        "typical",
        lambda x: pick(kept_by_rank(x), x["uniform"][:16].repeat(len(x["uniform"]) // 16)),
        "distribution",
    ),
    "neighbours share one, from the likeliest index": (
        "typical",
        lambda x: by_rank(kept_by_rank(x), shared_by(x, 2)),
        "distribution",
    ),
    "random numbers ignored": ("typical", hash_of_rows, "distribution"),
    "random numbers of a bell shape": (
        "typical",
        lambda x: pick(kept_by_rank(x), (x["uniform"] + x["uniform"].roll(1)) / 2),
        "distribution",
    ),
    "the index after": ("few_values", lambda x: (honest(x) + 1) % 24, "support"),
    "past the end where a sum rounds up": (
        "flat",
        lambda x: torch.where(x["uniform"] >= 1 - 2**-24, 24, honest(x)),
        "support",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_refused(mistake: str) -> None:
    contents, sampler, gate = PLANTED[mistake]
    for seed in range(2):
        found = verdict(TOP_K, expected(TOP_K, contents, seed=seed), sampler)
        assert isinstance(found, Failure)
        assert found.gate == gate, found.reason


@pytest.mark.parametrize("rows", [8, 9, 64])
def test_small_batch_refuses_neighbours_with_one_random_number(rows: int) -> None:
    def sampler(inputs: Inputs) -> torch.Tensor:
        return pick(kept_by_rank(inputs), shared_by(inputs, 2))

    found = verdict(TOP_K, expected(TOP_K, "typical", rows=rows, columns=1024), sampler)
    assert isinstance(found, Failure)
    assert "samples: neighbouring rows" in found.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_numbers_with_too_few_bits_are_refused(dtype: torch.dtype) -> None:
    def sampler(inputs: Inputs) -> torch.Tensor:
        return pick(kept_by_rank(inputs), inputs["uniform"].to(dtype).float())

    found = verdict(TOP_K, expected(TOP_K, "flat", rows=16, columns=8192), sampler, 4096)
    assert isinstance(found, Failure)
    assert "random numbers of too few bits" in found.reason or "draw the same in a share" in found.reason
    assert verdict(TOP_K, expected(TOP_K, "flat", rows=16, columns=8192), honest, 4096) is None


def three_apart(uniform: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(uniform))
    return uniform[rows // 6 * 6 + rows % 3]


def opposite(uniform: torch.Tensor) -> torch.Tensor:
    first = uniform[torch.arange(len(uniform)) // 2 * 2]
    return torch.where(torch.arange(len(uniform)) % 2 == 1, (1 - first).clamp(max=1 - 2**-24), first)


@pytest.mark.parametrize("shared", [three_apart, opposite])
def test_rows_that_depend_on_one_number_are_refused_in_any_form(
    shared: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def sampler(inputs: Inputs) -> torch.Tensor:
        return pick(kept_by_rank(inputs), shared(inputs["uniform"]))

    found = verdict(TOP_K, expected(TOP_K, "typical", rows=48), sampler)
    assert isinstance(found, Failure)
    assert found.gate == "distribution"


def test_random_sampler_need_not_keep_the_draws_of_other_rows() -> None:
    case = expected(TOP_K, "typical", rows=48)

    def call(given: OracleCase) -> dict[str, torch.Tensor]:
        uniform = (given.inputs["uniform"] + torch.rand(48)).remainder(1).clamp(max=1 - 2**-24)
        return {"samples": honest({**given.inputs, "uniform": uniform})}

    assert judge_draws(TOP_K, case, call(case), call, 1024, deterministic=False) is None
    found = judge_draws(TOP_K, case, call(case), call, 1024)
    assert isinstance(found, Failure)
    assert "changes what" in found.reason


def test_sampler_that_assumes_rows_sum_to_one_is_refused() -> None:
    def sampler(inputs: Inputs) -> torch.Tensor:
        return pick(
            kept_by_rank(inputs), inputs["uniform"], kept_by_rank(inputs).sum(dim=-1, keepdim=True).clamp(max=1)
        )

    found = verdict(TOP_K, expected(TOP_K, "unnormalised", rows=48), sampler)
    assert isinstance(found, Failure)
    assert found.gate == "distribution"
    assert verdict(TOP_K, expected(TOP_K, "unnormalised", rows=48), honest) is None


def test_finding_states_figures_and_the_chance_of_a_false_alarm() -> None:
    found = verdict(TOP_K, expected(TOP_K, "typical"), PLANTED["always the largest"][1])
    assert isinstance(found, Failure)
    assert found.gate == "distribution"
    assert f"false alarm {FALSE_ALARM:g}" in found.reason
    outside = verdict(TOP_K, expected(TOP_K, "typical"), lambda x: torch.full_like(honest(x), -1))
    assert isinstance(outside, Failure)
    assert outside.gate == "support"
    assert "first at [0]" in outside.reason


@pytest.mark.parametrize(("moved", "gate"), [(0.0, None), (4e-6, None), (-4e-6, None), (2e-3, "support")])
def test_a_border_may_lie_as_far_away_as_sums_in_float32_round(moved: float, gate: str | None) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).repeat(64, 1)
    inputs = {"probs": probs, "top_p": torch.full((64,), 0.75), "uniform": torch.rand(64)}
    kept = probs * (torch.tensor([0.0, 0.5, 0.75, 0.75]) < 0.75 + moved)  # the third is at the border: in or out
    truth = {"samples": pick(kept.double(), inputs["uniform"])}
    index = truth["samples"].clone()
    if gate is not None:  # a border that lies elsewhere for sure
        inputs["top_p"] = inputs["top_p"] - moved
        index[0] = 2
    verdicts = check_outputs(TOP_P, {}, inputs, truth, {"samples": index}, {"samples": EXACTLY})
    assert verdicts["samples"].gate == gate


def test_row_whose_law_hangs_on_rounding_needs_only_membership() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(512, 1)
    probs[:, :2] += torch.tensor([1e-7, -1e-7])
    inputs = {"probs": probs, "top_p": torch.full((512,), 0.5), "uniform": torch.rand(512)}
    for drawn in (0, 1):  # 0.5000001 and 0.5: whether the second is kept is beyond float32
        outputs = {"samples": torch.full((512,), drawn)}
        assert check_outputs(TOP_P, {}, inputs, outputs, outputs, {"samples": EXACTLY})["samples"].passed
    outputs = {"samples": torch.full((512,), 2)}
    assert check_outputs(TOP_P, {}, inputs, outputs, outputs, {"samples": EXACTLY})["samples"].gate == "support"


def test_laws_in_groups_of_rows_give_the_same_result() -> None:
    case = expected(MIN_P, "one_law", rows=70)
    outputs = [dict(case.outputs), {"samples": case.outputs["samples"].roll(1)}]
    whole = check_sampled_outputs(MIN_P, case.inputs, case.outputs, outputs)
    in_groups = functools.partial(check_sampled_outputs, elements_at_once=24 * 16)
    assert in_groups(MIN_P, case.inputs, case.outputs, outputs) == whole
    wrong = case.outputs["samples"].clone()
    wrong[69] = case.inputs["probs"][69].argmin()
    found = in_groups(MIN_P, case.inputs, case.outputs, [{"samples": wrong}])["samples"]
    assert (found.gate, found.index) == ("support", (69,))


def test_a_law_that_gives_no_row_of_weights_is_named() -> None:
    source = TOP_K.reference.replace("    return largest(probs.double(), top_k)", "    return top_k")
    broken = TOP_K.model_copy(update={"reference": source})
    case = expected(TOP_K, "typical", rows=4)
    with raises(RecordError, "law_shape_differs", "law", "[4]"):
        check_sampled_outputs(broken, case.inputs, case.outputs, [case.outputs])


def test_bounds_are_those_of_the_inequalities_that_they_name() -> None:
    draws, chance = 1000, 1e-6
    distance = distance_bound(draws, chance)
    assert 2 * math.e * math.exp(-2 * draws * distance**2) == pytest.approx(chance)
    assert share_bound(torch.tensor([1.0]), draws, chance) == pytest.approx(math.sqrt(math.log(1e6) / 2000))
    halves = share_bound(torch.tensor([0.5, 0.5]), draws, chance) - share_bound(torch.tensor([1.0]), draws, chance)
    assert halves == pytest.approx(0.5 / math.sqrt(draws))
    assert math.isfinite(share_bound(torch.tensor([1 + 1e-15], dtype=torch.float64), draws, chance))
    most = agreement_bound(0.01, draws, chance)
    entropy = most * math.log(most / 0.01) + (1 - most) * math.log((1 - most) / 0.99)
    assert math.exp(-draws * entropy) == pytest.approx(chance)
    assert agreement_bound(0.0, draws, chance) == 0.0
    assert agreement_bound(1.0, draws, chance) == 1.0
    assert 2 * math.exp(-2 * distinct_bound(draws, chance) ** 2 / draws) == pytest.approx(chance)


def test_number_of_different_draws_of_a_law_is_as_expected() -> None:
    law = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    drawn = torch.multinomial(law.expand(4000, 4), 5, replacement=True, generator=torch.Generator().manual_seed(1))
    found = sum(len(row.unique()) for row in drawn) / 4000
    assert expected_distinct(law, 5) == pytest.approx(found, abs=0.05)
    assert expected_distinct(torch.tensor([1.0, 0.0]), 1000) == 1.0


def test_bound_on_honest_draws_is_exceeded_as_often_as_stated() -> None:
    generator = torch.Generator().manual_seed(5)
    draws = torch.rand((2000, 50), generator=generator, dtype=torch.float64).sort(dim=1).values
    steps = torch.arange(51, dtype=torch.float64) / 50
    distance = torch.maximum(steps[1:] - draws, draws - steps[:-1]).amax(dim=1)
    assert float((distance > distance_bound(50, 0.01)).double().mean()) <= 0.01


@pytest.mark.parametrize(
    ("rows", "draws", "elements", "calls"),
    [
        (1, 16384, MAX_DRAWN_AT_ONCE, 1024),
        (3, 16384, MAX_DRAWN_AT_ONCE, 342),
        (8, 16384, MAX_DRAWN_AT_ONCE, 256),
        (1, 16384, MAX_DRAWN_AT_ONCE + 1, 256),
        (256, 16384, 256, 64),
        (100_000, 16384, 1 << 20, 1),
        (1, 192, 3, 12),
        (1, 192, 1 << 20, 3),
        (1, 64, 1 << 20, 1),
        (0, 192, 0, 12),
        (1, 1, 1, 1),
    ],
)
def test_a_small_batch_is_drawn_more_often(rows: int, draws: int, elements: int, calls: int) -> None:
    assert calls_for(rows, draws, elements) == calls


def test_a_temperature_is_seen_in_a_single_row() -> None:
    case = expected(TOP_K, "typical", rows=1, columns=251, seed=0)
    assert verdict(TOP_K, case, honest, 16384) is None
    found = verdict(TOP_K, case, lambda x: pick(kept_by_rank(x) ** 1.3, x["uniform"]), 16384)
    assert isinstance(found, Failure)
    assert found.gate == "distribution"
    assert "samples: 1025 draws" in found.reason
