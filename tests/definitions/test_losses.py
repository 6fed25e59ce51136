"""Losses at the edges of what models give: nothing learned, one token, one column, huge logits and logits of -inf."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shipped_records import CATALOG

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.records.call import Call, differentiated
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted, load_function, name_outputs, run_lifted, run_reference

IGNORED = -100
INF = float("inf")


def functions(catalog: Catalog, name: str) -> list[Any]:
    """The reference and the stock solution of an operator."""
    return [load_function(catalog.definition(name).reference, name), load_entry(catalog.solution(f"{name}_stock"))]


def logits_and_labels(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"one token": (1, 50), "one column": (7, 1)}
    logits = torch.randn(sizes.get(case, (7, 50)))
    labels = torch.randint(logits.shape[1], (logits.shape[0],))
    if case == "nothing learned":
        labels.fill_(IGNORED)
    elif case == "huge":
        logits *= 1e4
    elif case == "banned columns":
        logits[torch.rand(7, 50) < 0.5] = -INF
        logits[torch.arange(7), labels] = 0.0
    elif case == "both ends":
        labels = torch.tensor([0, 49, 0, 49, IGNORED, 0, 49])
    return logits, labels


CASES = ["one token", "one column", "nothing learned", "huge", "banned columns", "both ends"]


@pytest.mark.parametrize("case", CASES)
def test_cross_entropy_is_that_of_pytorch_in_fp64(case: str, catalog: Catalog) -> None:
    logits, labels = logits_and_labels(case)
    want = F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="none")
    for run in functions(catalog, "cross_entropy"):
        torch.testing.assert_close(run(logits, labels, IGNORED)[0].double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_its_gradient_is_that_of_pytorch_in_fp64(case: str, catalog: Catalog) -> None:
    logits, labels = logits_and_labels(case)
    wide, factors = logits.double().requires_grad_(), torch.rand(len(labels))
    loss = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
    (want,) = torch.autograd.grad(loss, wide, factors.double())
    saved = functions(catalog, "cross_entropy")[0](logits, labels, IGNORED)[1:]
    for run in functions(catalog, "cross_entropy_backward"):
        found = run(logits, labels, *saved, factors, IGNORED)
        torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_backward"])
def test_an_ignored_token_is_zero_whatever_its_logits_are(name: str, catalog: Catalog) -> None:
    logits = torch.tensor([[float("nan"), 1.0], [INF, 0.0], [-INF, -INF], [0.0, 1.0]])
    labels = torch.tensor([IGNORED, IGNORED, IGNORED, 1])
    numbers = () if name == "cross_entropy" else (torch.zeros(4), torch.zeros(4), torch.ones(4))
    for run in functions(catalog, name):
        found = run(logits, labels, *numbers, IGNORED)
        for value in found if isinstance(found, tuple) else (found,):
            assert (value[:3] == 0).all()
            assert (value[3] != 0).any()


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [INF, 0.0], [-INF, -INF]])
def test_a_learned_token_without_a_loss_is_nan(row: list[float], catalog: Catalog) -> None:
    for run in functions(catalog, "cross_entropy"):
        assert all(value.isnan().all() for value in run(torch.tensor([row]), torch.tensor([1]), IGNORED))


def test_the_fused_head_is_the_head_and_its_loss(catalog: Catalog) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2100, 6, dtype=torch.double), torch.randn(9, 6, dtype=torch.double)
    labels, factors = torch.randint(9, (2100,)), torch.rand(2100, dtype=torch.double)  # in three chunks
    labels[::3] = IGNORED
    given = [value.clone().requires_grad_() for value in (hidden, weight)]
    want = F.cross_entropy(given[0] @ given[1].T, labels, ignore_index=IGNORED, reduction="none")
    gradients = torch.autograd.grad(want, given, factors)
    (run, _) = functions(catalog, "fused_linear_cross_entropy")
    found = run(hidden, weight, labels, factors, IGNORED)
    for value, wanted in zip(found, (want, *gradients), strict=True):
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=1e-4, atol=1e-5)


# -- distillation and preferences -----------------------------------------------------------------------------------------

WITH_GRADIENTS = ["kl_div", "jsd", "grpo_loss", "dpo_loss"]


def log_probabilities() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return tuple(torch.log_softmax(2 * torch.randn(7, 50), dim=-1) for _ in range(2))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_losses_are_those_of_autograd_in_fp64(name: str, place: int, catalog: Catalog) -> None:
    forward, backward = catalog.definition(name), catalog.definition(f"{name}_backward")
    workload = [item for item in catalog.workloads_for(backward.name) if "tiny" in item.tags][place]
    case = Case.of_workload(backward, workload, distribution="normal", seed=3)
    given = draw_inputs(backward, case, "cpu")
    missing = draw_inputs(forward, case, "cpu")
    inputs = {key: given.get(key, missing[key]) for key in forward.inputs}
    lift = {key: value.double() if is_floating(value) else value for key, value in inputs.items()}
    wanted = differentiated(backward)
    for key in wanted:
        lift[key] = lift[key].clone().requires_grad_()
    mode: Any = Lifted
    with mode():
        made = name_outputs(forward, load_function(forward.reference, name)(*lift.values()), lift, name)
        want = torch.autograd.grad(made["loss"], [lift[key] for key in wanted], given["grad_loss"].double())
    saved = {key: made[key].detach() for key in backward.saved}
    found = run_lifted(backward, {key: saved.get(key, given[key]) for key in backward.inputs})
    for key, value in zip(wanted, want, strict=True):
        torch.testing.assert_close(found[GRADIENT + key], value, rtol=1e-9, atol=1e-9)


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("default", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", [name for name, one in CATALOG.definitions.items() if one.op_type == "loss"])
def test_losses_do_not_depend_on_the_default_dtype(name: str, default: torch.dtype) -> None:
    definition = CATALOG.definition(name)
    workload = next(item for item in CATALOG.workloads_for(name) if "tiny" in item.tags)
    inputs = draw_inputs(definition, Case.of_workload(definition, workload, distribution="normal", seed=3), "cpu")
    expected = run_reference(definition, inputs)
    torch.set_default_dtype(default)
    try:
        found = run_reference(definition, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("log_target", [True, False])
def test_sums_of_kl_div_are_the_reductions_of_pytorch(log_target: bool, catalog: Catalog) -> None:
    x, y = log_probabilities()
    target = y if log_target else y.exp()
    for run in functions(catalog, "kl_div"):
        rows = run(x, target, log_target)
        for found, reduction in ((rows.sum(), "sum"), (rows.mean(), "batchmean")):
            want = F.kl_div(x.double(), target.double(), reduction=reduction, log_target=log_target)
            torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_target", [True, False])
def test_a_column_without_probability_adds_nothing(log_target: bool, catalog: Catalog) -> None:
    x = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    target = torch.tensor([[1.0, 0.0, 0.0]])
    for run in functions(catalog, "kl_div"):
        found = run(x, target.log() if log_target else target, log_target)
        torch.testing.assert_close(found, torch.tensor([0.5]).log().neg())


@pytest.mark.parametrize(("beta", "first", "second"), [(0.0, 0, 1), (1.0, 1, 0)])
def test_jsd_at_its_ends_is_a_divergence_of_either_direction(
    beta: float, first: int, second: int, catalog: Catalog
) -> None:
    pair = log_probabilities()
    labels = torch.tensor([0, IGNORED, 1, 2, IGNORED, 3, 4])
    want = F.kl_div(pair[first], pair[second], reduction="none", log_target=True).sum(dim=-1)
    want[labels == IGNORED] = 0
    for run in functions(catalog, "jsd"):
        torch.testing.assert_close(run(*pair, labels, beta, IGNORED), want)


def test_jsd_is_symmetric_at_half_and_zero_for_equals(catalog: Catalog) -> None:
    x, y = log_probabilities()
    labels = torch.zeros(7, dtype=torch.long)
    for run in functions(catalog, "jsd"):
        torch.testing.assert_close(run(x, y, labels, 0.5, IGNORED), run(y, x, labels, 0.5, IGNORED))
        assert run(x, x, labels, 0.3, IGNORED).abs().max() < 1e-6


def test_jsd_of_banned_columns_is_finite(catalog: Catalog) -> None:
    (run, _) = functions(catalog, "jsd")
    x, y = torch.log(torch.tensor([[1.0, 0.0, 0.0]])), torch.log(torch.tensor([[0.0, 1.0, 0.0]]))
    found = run(x, y, torch.zeros(1, dtype=torch.long), 0.5, IGNORED)
    torch.testing.assert_close(found, torch.tensor([2.0]).log())


@pytest.mark.parametrize("name", ["jsd", "jsd_backward"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_banned_columns_count_as_if_they_were_left_out(beta: float, name: str, catalog: Catalog) -> None:
    torch.manual_seed(0)
    kept = torch.rand(4, 9) < 0.7
    kept[:, :2] = True
    # A column that only one side bans is left out where the loss does not become infinite by it.
    alone = {0.0: (False, True), 0.3: (True, True), 1.0: (True, False)}[beta]
    x, y = torch.randn(2, 4, 9).masked_fill(~kept, -INF)
    x[:, 0] = -INF if alone[0] else x[:, 0]
    y[:, 1] = -INF if alone[1] else y[:, 1]
    x, y = torch.log_softmax(x, dim=-1), torch.log_softmax(y, dim=-1)
    q, p = (value.double().exp().requires_grad_() for value in (x, y))
    mixture = beta * p + (1 - beta) * q
    sides = [(p, q)] if beta == 0 else [(q, p)] if beta == 1 else [(p, mixture), (q, mixture)]
    shares = [1.0] if len(sides) == 1 else [beta, 1 - beta]
    loss = sum(s * (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(dim=-1) for s, (a, b) in zip(shares, sides, strict=True))
    (grad,) = torch.autograd.grad(loss.sum(), q)
    want = torch.where(q == 0, 0.0, grad.nan_to_num() * q) if name == "jsd_backward" else loss
    factors = (torch.ones(4),) if name == "jsd_backward" else ()
    for run in functions(catalog, name):
        found = run(x, y, torch.zeros(4, dtype=torch.long), *factors, beta, IGNORED)
        torch.testing.assert_close(found.double(), want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_target", [True, False])
def test_a_column_that_neither_side_has_adds_nothing(log_target: bool, catalog: Catalog) -> None:
    target = torch.tensor([[1.0, 0.0]])
    for run in functions(catalog, "kl_div"):
        assert run(torch.tensor([[0.0, -INF]]), target.log() if log_target else target, log_target).tolist() == [0.0]


@pytest.mark.parametrize("ref", [0.0, INF, float("nan")])
def test_grpo_without_a_divergence_ignores_the_reference_model(ref: float, catalog: Catalog) -> None:
    logits, labels = torch.tensor([[0.0, 200.0, 3.0], [1.0, 2.0, 3.0]]), torch.tensor([0, 1])
    numbers = (1.0, 0.0, 0.2, 0.2, IGNORED)
    old, advantages = torch.tensor([-200.0, -1.0]), torch.tensor([0.7, -0.4])
    with_zero = functions(catalog, "grpo_loss")[0](logits, labels, old, old, advantages, *numbers)
    refs = torch.full((2,), ref)
    for run, run_backward in zip(*(functions(catalog, f"grpo_loss{end}") for end in ("", "_backward")), strict=True):
        loss, *saved = run(logits, labels, old, refs, advantages, *numbers)
        torch.testing.assert_close(loss, with_zero[0])
        grad = run_backward(logits, labels, *saved, old, refs, advantages, torch.ones(2), *numbers)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [INF, 0.0], [-INF, -INF]])
def test_a_token_of_grpo_without_a_loss_is_nan(row: list[float], catalog: Catalog) -> None:
    one = torch.ones(1)
    for run in functions(catalog, "grpo_loss"):
        found = run(torch.tensor([row]), torch.tensor([1]), one, one, one, 1.0, 0.1, 0.2, 0.2, IGNORED)
        assert all(value.isnan().all() for value in found)


def test_dpo_of_equal_answers_is_the_logarithm_of_two(catalog: Catalog) -> None:
    logp = torch.tensor([-10.0, -300.0])
    for run in functions(catalog, "dpo_loss"):
        loss, margin = run(logp, logp, logp, logp, 0.1)
        torch.testing.assert_close(loss, torch.full((2,), 2.0).log())
        assert margin.eq(0).all()


def test_dpo_learns_at_its_first_step(catalog: Catalog) -> None:
    given = torch.tensor([-30.0, -40.0])
    for run in functions(catalog, "dpo_loss"):
        chosen, rejected = given.clone().requires_grad_(), given.clone().requires_grad_()
        run(chosen, rejected, given, given, 0.1)[0].sum().backward()
        torch.testing.assert_close(chosen.grad, torch.full((2,), -0.05))
        torch.testing.assert_close(rejected.grad, torch.full((2,), 0.05))


def test_a_clipped_token_has_no_gradient_without_a_divergence(catalog: Catalog) -> None:
    torch.manual_seed(0)
    logits, labels, advantages = torch.randn(2, 9), torch.tensor([3, 4]), torch.tensor([1.0, -1.0])
    numbers = {"temperature": 1.0, "beta": 0.0, "eps_low": 0.2, "eps_high": 0.2, "ignore_index": IGNORED}
    logp = torch.log_softmax(logits, dim=-1)[torch.arange(2), labels]
    for clips, ratios in ((True, torch.tensor([1.5, 0.5])), (False, torch.tensor([0.5, 1.5]))):
        old = logp - ratios.log()
        saved = functions(catalog, "grpo_loss")[0](logits, labels, old, logp, advantages, *numbers.values())[1:]
        for run in functions(catalog, "grpo_loss_backward"):
            grad = run(logits, labels, *saved, old, logp, advantages, torch.ones(2), *numbers.values())
            assert grad.abs().max(dim=-1).values.gt(0.1).tolist() == [not clips, not clips]


# -- planted errors at vocabularies of models, through the gates that judge every kernel -------------------------------

LOSSES = [
    "cross_entropy", "cross_entropy_backward", "cross_entropy_smoothed", "fused_linear_cross_entropy",
    "kl_div", "grpo_loss",
]  # fmt: skip
NUMBERS = {
    "ignore_index": IGNORED, "smoothing": 0.1, "z_weight": 1e-3, "log_target": True, "temperature": 0.9, "beta": 0.1,
    "eps_low": 0.2, "eps_high": 0.3,
}  # fmt: skip
KINDS = ("normal", "row_scale", "outliers", "small_integers", "one_hot", "constant_rows", "channels", "large")


@cache
def cases_of(name: str, tokens: int, vocabulary: int) -> tuple[OracleCase, ...]:
    definition, sizes = CATALOG.definition(name), {"M": tokens, "V": vocabulary, "H": 8}
    axes = definition.bind_axes({axis: sizes[axis] for axis in definition.axes})
    scalars = {key: value for key, value in NUMBERS.items() if key in definition.inputs}
    call = Call(name, axes, {"T": "bfloat16"}, scalars=scalars)
    drawn = (make_oracle_case(definition, Case(call, distribution=kind, seed=11), "cpu") for kind in KINDS)
    return tuple(case for case in drawn if case is not None)


def is_refused(name: str, source: str, cases: Iterable[OracleCase]) -> bool:
    definition = CATALOG.definition(name)
    for case in cases:
        outputs = run_reference(definition, case.inputs, source=source)
        judged = check_outputs(
            definition, case.case.call.dtypes, case.inputs, case.outputs, outputs, case.e_base,
            exact=case.exact, conditioned=case.conditioned,
        )  # fmt: skip
        if not all(verdict.passed for verdict in judged.values()):
            return True
    return False


@pytest.mark.sweep(4)
@pytest.mark.parametrize("vocabulary", [1, 2, 262_208])
@pytest.mark.parametrize("name", LOSSES)
def test_honest_losses_pass_the_gates(name: str, vocabulary: int) -> None:
    definition = CATALOG.definition(name)
    cases = cases_of(name, 6, vocabulary)
    assert len(cases) >= 6
    assert definition.self_test is not None
    assert not is_refused(name, definition.reference, cases)
    assert not is_refused(name, definition.self_test.independent, cases)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", LOSSES)
def test_planted_errors_of_losses_are_refused(name: str) -> None:
    definition = CATALOG.definition(name)
    assert definition.self_test is not None
    # Sums over tokens need more of them before their roundings add up.
    cases = (*cases_of(name, 6, 262_208), *cases_of(name, 600, 33))
    passed = [
        error.why
        for error in definition.self_test.planted_errors
        if not is_refused(name, definition.reference.replace(error.find, error.replace), cases)
    ]
    assert passed == []


def test_a_weight_gradient_summed_in_bf16_is_refused() -> None:
    definition, name = CATALOG.definition("fused_linear_cross_entropy"), "fused_linear_cross_entropy"
    line = "grad_weight += grad.float().T @ hidden[rows].float()"
    rounded = line.replace("+= ", "= (grad_weight.bfloat16() + (") + ").bfloat16()).float()"
    source = definition.reference.replace(line, rounded).replace("CHUNK = 1024", "CHUNK = 4")
    assert source.count("bfloat16") == 2
    assert is_refused(name, source, cases_of(name, 2048, 33))
