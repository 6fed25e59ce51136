"""What the small operators around the experts of a model do at their edges, by the gates that kernels face."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verification.comparison import check_outputs, reference_errors
from tilegym_db.verification.oracle import name_outputs, oracle, run_reference

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
        e_base, _ = reference_errors(definition, dtypes, written, truth)
        for who, outputs in {"reference": written, **found}.items():
            for verdict in check_outputs(definition, dtypes, given, truth, outputs, e_base).values():
                assert verdict.passed, f"{who}: {verdict.reason}"
        return written

    return agree


def test_row_of_zero_weights_gives_zeros_and_a_tiny_denominator(run: Run) -> None:
    found = run("normalize_weight", torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 1.0]]))
    assert found["denominator"].tolist() == [torch.tensor(1e-20).item(), 4.0]
    assert found["out"].tolist() == [[0.0, 0.0, 0.0], [0.25, 0.5, 0.25]]


def test_weights_are_added_in_order_of_the_choices(run: Run) -> None:
    # 2**24 + 1 is no float32: added first to last the ones are lost one by one, from the other end they are not.
    row = [2.0**24, 1.0, 1.0, 1.0, 1.0]
    found = run("normalize_weight", torch.tensor([row, row[::-1]]))
    assert found["denominator"].tolist() == [2.0**24, 2.0**24 + 4]


def test_each_of_four_ranks_keeps_its_own_experts_renumbered(run: Run) -> None:
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
def test_slots_of_an_expert_keep_the_order_of_ids_invalid_last(experts: int, run: Run) -> None:
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


def test_rows_of_an_expert_fill_whole_tiles_up_to_the_end(run: Run) -> None:
    ids = torch.tensor([[2, 3, -1], [2, 0, 4], [2, 2, 0]], dtype=torch.int32)
    found = run("moe_align_block_size", ids, 4, 4)
    assert found["num_tokens_post_padded"].tolist() == [12]
    assert found["sorted_token_ids"].tolist() == [4, 8, 9, 9, 0, 3, 6, 7, 1, *[9] * 11]
    assert found["expert_ids"].tolist() == [0, 2, 3, -1, -1]


@pytest.mark.parametrize("block", [1, 16, 64, 128])
@pytest.mark.parametrize("expert", [0, 159, -1, 160, 2**16])
def test_tiles_where_one_expert_or_none_takes_all(expert: int, block: int, run: Run) -> None:
    found = run("moe_align_block_size", torch.full((64, 8), expert, dtype=torch.int32), block, 160)
    taken = 512 if 0 <= expert < 160 else 0
    assert found["num_tokens_post_padded"].tolist() == [taken]
    assert found["sorted_token_ids"].tolist() == [*range(taken), *[512] * (found["sorted_token_ids"].numel() - taken)]
    tiles = taken // block
    assert found["expert_ids"].tolist() == [expert] * tiles + [-1] * (found["expert_ids"].numel() - tiles)


def gate(run: Run, logits: torch.Tensor, top_k: int, **changes: Any) -> dict[str, list[Any]]:
    """The whole router without groups, shared experts, copies or ranks, but for what is given; its outputs as lists."""
    tokens, experts = logits.shape
    usual = {
        "bias": torch.zeros(experts), "top_k": top_k, "kept": 1, "groups": 1, "shared": 0, "scale": 1.0, "ep_rank": 0,
        "ep": 1, "tp_rank": 0, "tp": 1, "scoring": 0, "mask": torch.ones(tokens, dtype=torch.bool),
        "fixed": torch.zeros(tokens, dtype=torch.bool), "map": torch.arange(experts, dtype=torch.int32)[:, None],
        "counts": torch.ones(experts, dtype=torch.int32), "given": torch.full((tokens, top_k), 1 << 40),
    }  # fmt: skip
    assert set(changes) <= set(usual)
    return {key: value.tolist() for key, value in run("top2_sum_gate", logits, *{**usual, **changes}.values()).items()}


def test_the_gate_takes_the_smaller_of_equal_experts_and_groups(run: Run) -> None:
    found = gate(run, torch.zeros(2, 16), 4, groups=4, kept=2, scale=2.0)
    assert found["topk_idx"] == found["unmapped_topk_idx_out"] == [[0, 1, 2, 3]] * 2
    assert found["topk_weights"] == [[0.5] * 4] * 2


def test_gate_ranks_logits_under_a_softmax_and_scores_otherwise(run: Run) -> None:
    logits = torch.tensor([[4.0, 1.0, 0.0, -1.0]])  # sigmoids 0.98, 0.73, 0.5, 0.27
    bias = torch.tensor([0.0, 0.0, 1.5, 0.0])
    assert [gate(run, logits, 2, bias=bias, scoring=scoring)["topk_idx"] for scoring in range(3)] == [
        [[2, 0]],
        [[2, 0]],
        [[0, 2]],
    ]


def test_weights_of_scores_next_to_nothing_are_not_blown_up(run: Run) -> None:
    assert gate(run, torch.full((1, 4), -1e4), 2)["topk_weights"] == [[0.0, 0.0]]
    assert gate(run, torch.tensor([[-60.0, -1e4, -1e4, -1e4]]), 1)["topk_weights"][0][0] == pytest.approx(
        8.76e-7, rel=1e-3
    )


def test_given_choice_is_kept_and_a_choice_without_mask_has_none(run: Run) -> None:
    yes, given = torch.tensor([True, True, False]), torch.tensor([[3, 1], [7, 7], [1 << 40, -9]])
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0]]).expand(3, 4).contiguous()
    found = gate(run, logits, 2, mask=yes, fixed=torch.tensor([True, False, True]), given=given)
    assert found["topk_idx"] == found["unmapped_topk_idx_out"] == [[3, 1], [2, 0], [-1, -1]]
    assert found["topk_weights"][::2] == [[0.5, 0.5], [0.0, 0.0]]


def test_copies_rotate_with_tokens_and_ranks_number_their_own(run: Run) -> None:
    # Two routed experts and a shared one; the second has two copies: physical experts 1 and 3, two to each of two ranks.
    logits = torch.tensor([[0.0, 9.0]]).expand(3, 2).contiguous()
    copies = {"shared": 1, "map": torch.tensor([[0, -1, -1], [1, 3, -1], [2, -1, -1]], dtype=torch.int32)}
    copies |= {"counts": torch.tensor([1, 2, 1], dtype=torch.int32), "scale": 2.5}
    found = [gate(run, logits, 1, ep_rank=1, ep=2, tp_rank=rank, tp=2, **copies) for rank in range(2)]
    assert [one["topk_idx"] for one in found] == [[[-1, -1], [1, -1], [-1, -1]], [[1, 0], [-1, 0], [1, 0]]]
    assert found[0]["topk_weights"] == found[1]["topk_weights"] == [[2.5, 1.0]] * 3
    assert found[0]["unmapped_topk_idx_out"] == [[1]] * 3


def test_first_of_equal_groups_comes_first_and_a_closed_one_last(run: Run) -> None:
    scores = torch.tensor([[[1.0, 2.0], [3.0, 0.0], [-INF, 9.0], [2.0, 1.0]], [[-INF, -INF]] * 4])
    assert run("topk_sum_and_topk_group_idx", scores, 2, 4)["group_idx"].tolist() == [[0, 1, 3, 2], [0, 1, 2, 3]]
    assert run("topk_sum_and_topk_group_idx", scores, 1, 3)["group_idx"].tolist() == [[2, 1, 0], [0, 1, 2]]


def test_rows_of_an_expert_start_aligned_in_the_order_of_its_ids(run: Run) -> None:
    found = run("get_fused_mapping", torch.tensor([[2, 0], [-1, 2], [2 + 2**32, 0], [3, -5]]), 3, 4)
    none = [-1, -1]
    assert found["pos_to_expert"].tolist() == [0, 0, *none, 2, 2, *none, *none, *none, *none, *none]
    assert found["pos_to_token_topk"].tolist() == [1, 5, *none, 0, 3, *none, *none, *none, *none, *none]
    assert found["pos_to_token"].tolist() == [0, 2, *none, 0, 1, *none, *none, *none, *none, *none]
    assert found["token_topk_to_pos"].tolist() == [[4, 0], [-1, 5], [-1, 1], none]
    assert found["expert_start"].tolist() == [0, 4, 4]
    assert found["expert_end"].tolist() == [4, 4, 8]
    assert found["num_tokens_per_expert"].tolist() == [4, 0, 4]


@pytest.mark.parametrize("alignment", [1, 16, 100, 512])
@pytest.mark.parametrize("contents", ["all to one", "none at all"])
def test_tables_of_rows_where_one_expert_or_none_takes_all(contents: str, alignment: int, run: Run) -> None:
    found = run("get_fused_mapping", COUNTED[contents](3), 3, alignment)
    taken = 512 if contents == "all to one" else 0
    rows = -(-taken // alignment) * alignment
    assert found["pos_to_token_topk"].tolist()[:rows] == [*range(taken), *[-1] * (rows - taken)]
    assert found["pos_to_expert"][rows:].eq(-1).all()
    assert found["num_tokens_per_expert"].tolist() == [0, 0, rows]


@pytest.mark.parametrize("contents", ["drawn", "all to one", "none at all"])
def test_rows_that_are_expanded_and_reduced_are_the_tokens_again(contents: str, run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, 4, (64, 8), generator=generator) if contents == "drawn" else COUNTED[contents](4)
    tables = run("get_fused_mapping", ids, 4, 16)
    slots, owner = tables["token_topk_to_pos"], tables["pos_to_expert"]
    x = torch.randint(-8, 9, (64, 24), generator=generator).float()
    rows = run("expand_to_fused", x, slots, owner)["out"]
    assert rows[owner < 0].eq(0).all()
    assert torch.equal(rows[owner >= 0], x[tables["pos_to_token"][owner >= 0]])
    used = (slots >= 0).sum(dim=1, keepdim=True)
    assert torch.equal(run("reduce_fused_unweighted", rows, slots)["out"], x * used)
    weights = torch.where(slots >= 0, 0.5, math.nan)  # the weight of a choice without a row does not count
    assert torch.equal(run("reduce_fused", rows, weights, slots)["out"], x * used * 0.5)
    scale = torch.full((len(rows),), 2.0)
    small = run("reduce_fused_to_fp8", rows, weights, slots, scale[:1])["out"]
    assert torch.equal(small.float(), (x * used).to(torch.float8_e4m3fn).float())
    codes = rows.to(torch.float8_e4m3fn)
    assert torch.equal(run("reduce_fused_scaled", codes, scale, weights, slots)["out"].float(), x * used)


@pytest.mark.parametrize("name", ["expand_to_fused_with_sf", "expand_to_fused_with_sf_ue8m0"])
def test_scales_go_where_their_codes_go_and_padding_has_none(name: str, run: Run) -> None:
    x = torch.tensor([[1.0, -2.0], [448.0, 0.5]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1, 2, 3], [4, 5, -6]], dtype=torch.float32 if name.endswith("sf") else torch.int32)
    slots = torch.tensor([[3, 0], [-1, 4]], dtype=torch.int32)
    owner = torch.tensor([0, -1, -1, 1, 1, -1], dtype=torch.int32)
    found = run(name, x, scale, slots, owner)
    assert found["out"].float().tolist() == [[1, -2], [0, 0], [0, 0], [1, -2], [448, 0.5], [0, 0]]
    assert found["scale_out"].tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0], [1, 2, 3], [4, 5, -6], [0, 0, 0]]


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


def test_gpt_oss_gate_takes_alternating_columns_and_passes_nan(run: Run) -> None:
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


def test_greedy_decoding_takes_the_first_maximum_or_first_nan(run: Run) -> None:
    rows = [[1.0, 3.0, 3.0], [-INF, -INF, -INF], [5.0, NAN, NAN], [INF, 2.0, INF], [-0.0, 0.0, -1.0]]
    assert run("greedy_argmax", torch.tensor(rows))["ids"].tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "parameters", "kept"),
    [
        ("top_k_sampling_from_probs", ([2, 1, 0],), [{1, 2}, {2}, {0, 1, 2, 3}]),
        ("top_k_sampling_from_probs", ([5, -1, 3],), [{1, 2, 4}, {0, 2}, {0, 1, 2, 3}]),  # equal ones stay together
        ("top_p_sampling_from_probs", ([0.0, 0.8, 0.5],), [{1}, {0, 2}, {0, 1, 2, 3}]),
        ("top_p_sampling_from_probs", ([0.6, -1.0, 2.0],), [{1, 2}, {2}, {0, 1, 2, 3}]),
        ("top_k_top_p_sampling_from_probs", ([2, 2, 0], [0.7, 1.0, 0.0]), [{1, 2}, {0, 2}, {0, 1, 2, 3}]),
        ("min_p_sampling_from_probs", ([0.6, 1.0, 0.0],), [{1, 2}, {2}, {0, 1, 2, 3}]),
        ("min_p_sampling_from_probs", ([-1.0, 0.2, 3.0],), [{1, 2, 4}, {0, 2}, {0, 1, 2, 3}]),
    ],
)
def test_extreme_random_numbers_draw_the_ends_of_what_is_kept(
    run: Run, name: str, parameters: tuple[list[float], ...], kept: list[set[int]]
) -> None:
    probs = torch.tensor([[0.0, 0.5, 0.3, 0.0, 0.2], [0.2, 0.0, 0.8, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0]])
    given = [torch.tensor(values).to(torch.int32 if "top_k" in name and index == 0 else torch.float32)
             for index, values in enumerate(parameters)]  # fmt: skip
    for number, pick in ((0.0, min), (1 - 2**-24, max)):
        found = run(name, probs, *given, torch.full((3,), number))["samples"].tolist()
        assert found == [pick(allowed) for allowed in kept]
