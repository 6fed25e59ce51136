"""Operators that make a large step out of a small rounding: what honest sums differ by must pass, and every case must count."""

from __future__ import annotations

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.distributions import CONTENTS, DISTRIBUTIONS, RANGES
from tilegym_db.verification.expected import CONTENT_SETS, ExpectedCache, OracleCase, WorkloadContents, make_oracle_case
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_reference

SEED = 41

# -- codes of activations that were computed first ---------------------------------------------------------------------

EXPERTS = CATALOG.definition("moe_experts_fp8")
PRODUCT = "found = cast.float() @ codes[:, part].float().T"
FEW_CHANNELS = {"M": 31, "H": 64, "I": 33, "E": 1, "K": 32}
LIKE_A_MODEL = {"M": 64, "H": 256, "I": 128, "E": 8, "K": 2}


def with_bits(bits: int) -> str:
    """The reference with the sum of each block cut to so many bits: FP8 tensor cores keep about 14."""
    cut = f".view(torch.int32).bitwise_and({-(1 << (24 - bits))}).view(torch.float32)"
    assert PRODUCT in EXPERTS.reference
    return EXPERTS.reference.replace(PRODUCT, PRODUCT.replace("= ", "= (", 1) + ")" + cut)


def gate_of_experts(definition: Definition, axes: dict[str, int], contents: str, source: str, seed: int) -> str | None:
    case = Case(Call(definition.name, definition.bind_axes(axes), {"W": "bfloat16"}), distribution=contents, seed=seed)
    inputs = draw_inputs(definition, case, "cpu")
    truth, found = run_reference(definition, inputs), run_reference(definition, inputs, source=source)
    return check_outputs(definition, case.call.dtypes, inputs, truth, found, {"out": EXACTLY})["out"].gate


@pytest.mark.parametrize("axes", [FEW_CHANNELS, LIKE_A_MODEL])
@pytest.mark.parametrize("contents", CONTENT_SETS)
def test_experts_with_the_sums_of_fp8_tensor_cores_are_accepted(contents, axes):
    assert gate_of_experts(EXPERTS, axes, contents, with_bits(14), SEED) is None


def test_usual_tolerance_would_refuse_sums_of_fp8_tensor_cores():
    usual = EXPERTS.model_copy(update={"tolerance": {}})
    found = {gate_of_experts(usual, LIKE_A_MODEL, "normal", with_bits(14), seed) for seed in range(3)}
    assert found - {None}


def test_experts_whose_sums_have_five_bits_are_refused():
    assert gate_of_experts(EXPERTS, LIKE_A_MODEL, "normal", with_bits(5), SEED) is not None


# -- a root whose slope has no bound -----------------------------------------------------------------------------------

GATE = CATALOG.definition("engram_gate_hf")
SCALARS = {"clamp": 1e-6, "eps": 1e-6}


def gate_case(contents: str, axes: dict[str, int], dtype: str = "bfloat16") -> OracleCase | None:
    case = Case(
        Call(GATE.name, GATE.bind_axes(axes), {"T": dtype}, scalars=dict(SCALARS)), distribution=contents, seed=SEED
    )
    return make_oracle_case(GATE, case, "cpu")


def test_all_contents_of_thousands_of_scores_count():
    shipped = next(record for record in CATALOG.workloads_for("engram_gate_hf") if record.axes["M"] == 512)
    workload = shipped.model_copy(update={"axes": {"M": 512, "C": 4, "H": 512}})
    contents = WorkloadContents.draw(GATE, workload, SEED, ExpectedCache(GATE, "cpu"))
    assert contents.dropped == []
    assert len(contents.sets) == len(CONTENT_SETS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("contents", [*DISTRIBUTIONS, *RANGES])
def test_the_reference_passes_every_kind_of_contents(contents, dtype):
    assert gate_case(contents, {"M": 33, "C": 3, "H": 160}, dtype) is not None


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_reference_passes_rows_of_a_few_elements(size):
    assert gate_case("normal", {"M": 65, "C": 2, "H": size}) is not None


def test_gates_lie_on_both_sides_of_a_half_and_close_to_it():
    drawn = gate_case("normal", {"M": 256, "C": 4, "H": 256})
    assert drawn is not None
    gate = drawn.outputs["out"].norm(dim=-1) / drawn.inputs["v"].double().norm(dim=-1, keepdim=True)
    assert float(gate.min()) < 0.2 < 0.85 < float(gate.max())
    assert 0.3 < float((gate < 0.5).double().mean()) < 0.7
    assert float((gate - 0.5).abs().min()) < 0.25


def test_planted_contents_have_nan_and_zero_rows_and_a_half_gate():
    names = tuple(CONTENTS)
    assert GATE.joint_inputs is not None
    assert GATE.joint_inputs.contents[names.index("planted_special_values")] == "special values"
    special = gate_case("planted_special_values", {"M": 8, "C": 2, "H": 32})
    assert special is not None
    assert bool(special.outputs["out"][-1, -1].isnan().all())
    zero = next(name for name in names if names.index(name) == GATE.joint_inputs.contents.index("zero rows"))
    halves = gate_case(zero, {"M": 16, "C": 2, "H": 32})
    assert halves is not None
    empty = ~halves.inputs["k"].bool().any(dim=-1)
    expected = 0.5 * halves.inputs["v"].double()[:, None].expand(-1, 2, -1)
    assert bool(empty.any())
    assert torch.equal(halves.outputs["out"][empty], expected[empty])
