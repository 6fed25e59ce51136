"""An element that is a small difference of large terms is known no better than these terms are; every other one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification import conditioning
from tilegym_db.verification.conditioning import STEP, excuse_ill_conditioned
from tilegym_db.verification.distributions import vary_scalars
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.gates import EXACTLY, PASSED, OutputComparison
from tilegym_db.verification.oracle import in_fp64_together, oracle, run_reference
from tilegym_db.verification.verifier import Failure, judge

GRADIENTS = Catalog.default().definition("mhc_head_compute_mix_backward")
KERNEL = Catalog.default().solution("mhc_head_compute_mix_backward_triton").record
TOKENS, STREAMS = 512, 4
ONE_WRONG = OutputComparison("elementwise", "out: 1 of 1000 elements", 1e-6, 1e-6, 1e-6, 0.999)
Make = Callable[..., Definition]


def cancelling(remainder: float) -> OracleCase:
    """Tokens in pairs whose parts of the gradient of the scale cancel but for a share of one of them."""
    drawn = torch.Generator().manual_seed(3)
    mix, grad_out = (torch.randn(TOKENS // 2, STREAMS, generator=drawn) for _ in range(2))
    mix = torch.cat((mix, -mix))
    mix[0] *= 1.0 + remainder
    inputs = {
        "mix": mix,
        "scale": torch.tensor([0.5]),
        "base": torch.zeros(STREAMS),
        "grad_out": torch.cat((grad_out, grad_out)),
    }
    axes = GRADIENTS.bind_axes({"M": TOKENS, "C": STREAMS})
    truth = oracle(GRADIENTS, inputs)
    return OracleCase(Case(Call("row_scale", axes)), inputs, truth, dict.fromkeys(truth, EXACTLY))


def by_terms(inputs: dict[str, Any], terms: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients in float32, block by block, as a kernel adds them up."""
    gate = torch.sigmoid(inputs["mix"] * inputs["scale"] + inputs["base"])
    grad = inputs["grad_out"] * gate * (1 - gate)
    blocks = terms(grad * inputs["mix"]).flatten().split(96)
    total = sum((block.sum() for block in blocks), start=torch.zeros(()))
    return {"grad_mix": grad * inputs["scale"], "grad_scale": total.reshape(1), "grad_base": grad.sum(0)}


def of_tensor_cores(terms: torch.Tensor) -> torch.Tensor:
    """Rounded to the ten bits of TF32."""
    return ((terms.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("remainder", [1e-4, 1e-5])
def test_last_digits_of_the_terms_do_not_fail_their_sum(remainder: float) -> None:
    expected = cancelling(remainder)
    honest = by_terms(dict(expected.inputs), lambda terms: terms)
    error = (honest["grad_scale"].double() - expected.outputs["grad_scale"]).abs() / expected.outputs[
        "grad_scale"
    ].abs()
    assert float(error) > 1e-3, "this sum is not the difference that the test is about"
    verdicts = judge(GRADIENTS, KERNEL, expected, honest)
    assert not isinstance(verdicts, Failure)
    assert verdicts["grad_scale"].matched_ratio == 1.0, "who reads the trace holds it to the bounds of what passes"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(of_tensor_cores, id="terms in TF32"),
        pytest.param(lambda terms: terms.bfloat16().float(), id="terms in bfloat16"),
        pytest.param(lambda terms: terms[:-1], id="the last token left out"),
        pytest.param(torch.zeros_like, id="nothing added up"),
    ],
)
def test_a_sum_of_other_terms_is_refused_on_the_same_contents(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = cancelling(1e-3)
    wrong = judge(GRADIENTS, KERNEL, expected, by_terms(dict(expected.inputs), spoil))
    assert isinstance(wrong, Failure)
    assert wrong.output == "grad_scale"


def test_number_without_cancelling_terms_is_known_exactly() -> None:
    expected = cancelling(1e-3)
    outputs = by_terms(dict(expected.inputs), lambda terms: terms)
    outputs["grad_mix"][7, 2] *= 1.001
    wrong = judge(GRADIENTS, KERNEL, expected, outputs)
    assert isinstance(wrong, Failure)
    assert wrong.output == "grad_mix"


@pytest.mark.parametrize("evaluations", [1, 3])
def test_where_memory_ends_before_it_is_known_the_refusal_stands(monkeypatch, evaluations: int) -> None:
    left = iter(range(evaluations))

    def until_memory_ends(*given: Any) -> list[dict[str, torch.Tensor]]:
        if next(left, None) is None:
            raise torch.OutOfMemoryError
        return in_fp64_together(*given)

    monkeypatch.setattr(conditioning, "in_fp64_together", until_memory_ends)
    expected = cancelling(1e-4)
    refused = judge(GRADIENTS, KERNEL, expected, by_terms(dict(expected.inputs), lambda terms: terms))
    assert isinstance(refused, Failure)
    assert next(left, None) is None, "it was not asked"


def test_uncertainties_of_a_case_are_computed_once(monkeypatch) -> None:
    evaluated: list[int] = []

    def counted(*given: Any) -> list[dict[str, torch.Tensor]]:
        evaluated.append(len(given[1]))
        return in_fp64_together(*given)

    monkeypatch.setattr(conditioning, "in_fp64_together", counted)
    expected = cancelling(1e-4)
    outputs = by_terms(dict(expected.inputs), lambda terms: terms)
    first = judge(GRADIENTS, KERNEL, expected, outputs)
    assert not isinstance(first, Failure)
    assert evaluated
    once = len(evaluated)
    assert judge(GRADIENTS, KERNEL, expected, outputs) == first
    assert len(evaluated) == once
    other = replace(expected, outputs={**expected.outputs})  # other outputs have other uncertainties
    assert judge(GRADIENTS, KERNEL, other, outputs) == first
    assert len(evaluated) == 2 * once


SINKS = Catalog.default().definition("attention_sink_decode")
SHAPE = SINKS.bind_axes({"B": 1, "Hq": 30, "Hkv": 5, "L": 17, "D": 56})


def with_weights_of(bits: int, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Attention in float32 but for the weights, which tensor cores take in bfloat16: eight bits."""
    group = inputs["q"].shape[1] // inputs["k"].shape[1]
    query, sinks = inputs["q"].float(), inputs["sinks"].float()[None, :, None, None]
    keys, values = (inputs[name].float().repeat_interleave(group, dim=1) for name in ("k", "v"))
    scores = query @ keys.mT * inputs["scale"]
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - most)
    mantissa, exponent = torch.frexp(weights)
    rounded = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    return {"out": (rounded @ values / total).to(inputs["v"].dtype)}


@pytest.mark.parametrize("seed", [826, 1313, 1768, 2320])
@pytest.mark.parametrize(("bits", "right"), [(8, True), (4, False)])
def test_half_precision_weights_do_not_fail_sums_that_cancel(seed: int, bits: int, right: bool) -> None:
    """The reference rounds its weights as well, each of them otherwise; on these contents it is luckier than a kernel."""
    case = Case(
        Call("row_scale", SHAPE, {"T": "bfloat16"}, scalars={"scale": 0.125}), distribution="channels", seed=seed
    )
    expected = make_oracle_case(SINKS, case, "cpu")
    assert expected is not None
    kernel = Catalog.default().solution("attention_sink_decode_triton").record
    found = judge(SINKS, kernel, expected, with_weights_of(bits, expected.inputs))
    assert isinstance(found, Failure) is not right


@pytest.mark.parametrize("seed", [475, 7862, 8763])
@pytest.mark.parametrize(("bits", "right"), [(8, True), (4, False)])
def test_few_draws_do_not_decide_the_error_of_rounded_weights(seed: int, bits: int, right: bool) -> None:
    """One large value of a few decides such a row; draws may all move it by little."""
    axes = SINKS.bind_axes({"B": 5, "Hq": 64, "Hkv": 2, "L": 17, "D": 120})
    scalars = vary_scalars(SINKS, {"scale": 0.125}, "varied", seed)
    expected = make_oracle_case(
        SINKS, Case(Call(SINKS.name, axes, {"T": "bfloat16"}, scalars=scalars), distribution="varied", seed=seed), "cpu"
    )
    assert expected is not None
    kernel = Catalog.default().solution("attention_sink_decode_triton").record
    found = judge(SINKS, kernel, expected, with_weights_of(bits, expected.inputs))
    assert isinstance(found, Failure) is not right


def answers(
    definition: Definition, inputs: Mapping[str, Any], truth: Mapping[str, torch.Tensor], off_by: float
) -> list[bool]:
    """Whether each check in turn finds what it is given right, of outputs of which one element is that far off."""
    found = list[bool]()

    def check(outputs: Mapping[str, torch.Tensor]) -> dict[str, OutputComparison]:
        found.append(torch.equal(outputs["out"], truth["out"].float()))
        return {"out": PASSED if found[-1] else ONE_WRONG}

    out = truth["out"].to(torch.float32, copy=True)
    out[0, 0] += off_by
    assert excuse_ill_conditioned(definition, inputs, truth, {"out": out}, check)["out"].passed is found[-1]
    return found


@pytest.mark.parametrize(
    ("off_by", "right"),
    [(STEP / 4, [False, True, True]), (8 * STEP, [False, True, False]), (64 * STEP, [False, False])],
)
def test_one_number_may_be_off_by_what_its_factors_move_it_by(operator: Make, off_by: float, right: list[bool]) -> None:
    inputs = {"x": torch.ones(4, 64), "weight": torch.ones(64), "factor": 1.0}
    definition = operator("return (x * weight).to(x.dtype)", self_test=None)
    assert answers(definition, inputs, oracle(definition, inputs), off_by) == right


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param("return torch.where(x >= 1, weight, 0 * weight).to(x.dtype)", id="one jump an element"),
        pytest.param("return ((x >= 1).sum(1, keepdim=True) * weight).to(x.dtype)", id="a sum of many jumps"),
    ],
)
def test_a_jump_is_no_uncertainty(operator: Make, reference: str) -> None:
    """On which side of a limit a number is that equals it is known exactly, however little must be added to change that."""
    inputs = {"x": torch.ones(4, 64), "weight": torch.full((64,), 3.0), "factor": 1.0}
    definition = operator(reference, self_test=None)
    moved_by_weights = 64 * 3.0 * STEP
    assert answers(definition, inputs, oracle(definition, inputs), 10 * moved_by_weights) == [False, False]


def test_nothing_is_said_of_what_a_reference_makes_of_bits(operator: Make) -> None:
    """Added to a number whose last bit is worth one, float32 rounds to integers; fp64 does not, where the sum moves as x does."""
    rounded = operator("return (x + 2.0**23) - 2.0**23", oracle="as_written", self_test=None)
    inputs = {"x": torch.full((4, 64), 0.75), "weight": torch.ones(64), "factor": 1.0}
    assert answers(rounded, inputs, run_reference(rounded, inputs), STEP / 4) == [False, False]


@pytest.mark.parametrize(
    ("verdict", "name"),
    [
        pytest.param(ONE_WRONG, "topk_softmax", id="weights of a choice, which may change"),
        pytest.param(OutputComparison("elementwise", "", 0, 0, 0, 0.9), "rms_norm", id="a tenth of the elements"),
        pytest.param(OutputComparison("nan_inf_mask", "", 0, 0, 0, 0.999), "rms_norm", id="NaN"),
    ],
)
def test_what_is_never_asked(verdict: OutputComparison, name: str) -> None:
    definition = Catalog.default().definition(name)
    output = next(iter(definition.outputs))
    outputs = {output: torch.zeros(1000)}

    once = iter([{output: verdict, "other": PASSED}])
    found = excuse_ill_conditioned(definition, {}, outputs, outputs, lambda outputs: next(once))
    assert found == {output: verdict, "other": PASSED}


SCAN = Catalog.default().definition("mamba2_chunk_scan")


def scanned(share: float) -> tuple[OracleCase, torch.Tensor]:
    """A scan one of whose outputs is a small difference of its two terms, and the larger one of them."""
    axes = {"B": 1, "T": 24, "H": 2, "G": 1, "P": 4, "N": 8}
    call = Call(SCAN.name, SCAN.bind_axes(axes), {"T": "bfloat16"}, {}, {"dt_min": 0.0})
    case = make_oracle_case(SCAN, Case(call, seed=5), "cpu")
    assert case is not None
    skip = case.inputs["D"].float()[:, None] * case.inputs["x"][0, 20].float()
    written = case.outputs["out"][0, 20] - skip
    # The state's part becomes what the skipped value takes away, but for a share of it: the initial state is not moved.
    inputs = {**case.inputs, "Cmat": case.inputs["Cmat"].clone()}
    inputs["D"] = (-written[0, 0] / case.inputs["x"][0, 20, 0, 0].float() * (1 - share)).to(torch.bfloat16).repeat(2)
    truth = oracle(SCAN, inputs)
    return OracleCase(case.case, inputs, truth, dict.fromkeys(truth, EXACTLY)), written[0, 0].abs()


@pytest.mark.parametrize(("error", "passes"), [(2.0**-17, True), (2.0**-4, False)])
def test_a_recurrence_is_known_as_well_as_its_terms(error, passes):
    case, term = scanned(share=2.0**-9)
    wrong = {name: value.clone() for name, value in case.outputs.items()}
    wrong["out"][0, 20, 0, 0] += error * term

    def check(outputs: Mapping[str, torch.Tensor]) -> dict[str, OutputComparison]:
        near = {name: torch.equal(outputs[name], truth) for name, truth in case.outputs.items()}
        return {name: PASSED if ok else ONE_WRONG for name, ok in near.items()}

    found = excuse_ill_conditioned(SCAN, case.inputs, case.outputs, wrong, check)
    assert all(verdict.passed for verdict in found.values()) is passes


def test_steps_that_a_reference_rounds_are_never_moved():
    case, _ = scanned(share=2.0**-9)
    conditioning._distances(SCAN, case.inputs, case.outputs)
    moved = conditioning._unrounded[SCAN.reference]
    assert {"x", "Bmat", "Cmat", "initial_state"} <= set(moved)
    assert not {"dt", "dt_bias"} & set(moved)
