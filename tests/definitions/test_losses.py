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
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.oracle import load_function, run_reference

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


# -- planted errors at vocabularies of models, through the gates that judge every kernel -------------------------------

LOSSES = ["cross_entropy", "cross_entropy_backward", "cross_entropy_smoothed", "fused_linear_cross_entropy"]
NUMBERS = {"ignore_index": IGNORED, "smoothing": 0.1, "z_weight": 1e-3}
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
