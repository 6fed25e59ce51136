"""Gradients of mixtures of experts: the references are derivatives of the forward in fp64, and stock code is near autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records.workload import Case
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted, load_function, run_lifted

EXPERTS, ROUTER = "moe_experts_backward", "topk_softmax_backward"


def cases(catalog: Catalog, name: str) -> list[dict[str, Any]]:
    definition = catalog.definition(name)
    tiny = [one for one in catalog.workloads_for(name) if "tiny" in one.tags]
    return [
        draw_inputs(definition, Case.of_workload(definition, one, distribution="normal", seed=3), "cpu") for one in tiny
    ]


def of_experts(run: Any, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return what autograd computes behind a forward."""
    leaves = {key: given[key].clone().requires_grad_() for key in ("x", "weights", "gate_up", "down")}
    out = run(leaves["x"], given["ids"], leaves["weights"], leaves["gate_up"], leaves["down"])
    return torch.autograd.grad(out, list(leaves.values()), given["grad_out"])


def test_gradients_of_experts_are_those_of_the_forward(catalog: Catalog) -> None:
    backward, forward = catalog.definition(EXPERTS), catalog.definition("moe_experts")
    mode: Any = Lifted
    for given in cases(catalog, EXPERTS):
        wide = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
        with mode():
            want = of_experts(load_function(forward.reference, forward.name), wide)
        for value, one in zip(run_lifted(backward, given).values(), want, strict=True):
            torch.testing.assert_close(value, one, rtol=1e-9, atol=1e-9)


def test_stock_gradients_of_experts_are_near_those_of_autograd(catalog: Catalog) -> None:
    forward, stock = catalog.solution("moe_experts_stock"), catalog.solution(f"{EXPERTS}_stock")
    for given in cases(catalog, EXPERTS):
        want = of_experts(load_verified(forward, forward.digest), given)
        for value, one in zip(load_verified(stock, stock.digest)(*given.values()), want, strict=True):
            assert value.dtype == one.dtype
            assert float((value.double() - one.double()).norm() / one.double().norm()) < 8e-3


@pytest.mark.parametrize("renormalise", [True, False])
def test_gradient_of_a_router_is_that_of_the_forward(renormalise: bool, catalog: Catalog) -> None:
    backward, forward = catalog.definition(ROUTER), catalog.definition("topk_softmax")
    mode: Any = Lifted
    for given in cases(catalog, ROUTER):
        given["renormalise"] = renormalise
        logits = given["logits"].double().requires_grad_()
        with mode():
            run = load_function(forward.reference, forward.name)
            weights, ids = run(logits, given["top_k"], renormalise)
            (want,) = torch.autograd.grad(weights, logits, given["grad_weights"].double())
        assert torch.equal(ids, given["ids"])
        torch.testing.assert_close(run_lifted(backward, given)["grad_logits"], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("renormalise", [True, False])
def test_stock_gradient_of_a_router_is_near_that_of_autograd(renormalise: bool, catalog: Catalog) -> None:
    forward, stock = catalog.solution("topk_softmax_stock"), catalog.solution(f"{ROUTER}_stock")
    for given in cases(catalog, ROUTER):
        given["renormalise"] = renormalise
        logits = given["logits"].clone().requires_grad_()
        weights, _ = load_verified(forward, forward.digest)(logits, given["top_k"], renormalise)
        (want,) = torch.autograd.grad(weights, logits, given["grad_weights"])
        found = load_verified(stock, stock.digest)(*given.values())
        bound = 4 * torch.finfo(want.dtype).eps * float(want.abs().max())
        torch.testing.assert_close(found, want, rtol=0, atol=bound)
