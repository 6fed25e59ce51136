"""Gradients of mixtures of experts: the references are derivatives of the forward in fp64, and stock code is near autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.workload import Case
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted, load_function, run_lifted

EXPERTS = ["moe_experts", "moe_experts_oai"]
ROUTER = "topk_softmax_backward"


def lifted(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def cases(catalog: Catalog, name: str) -> list[dict[str, Any]]:
    definition = catalog.definition(name)
    tiny = [one for one in catalog.workloads_for(name) if "tiny" in one.tags]
    return [
        draw_inputs(definition, Case.of_workload(definition, one, distribution="normal", seed=3), "cpu") for one in tiny
    ]


def of_experts(forward: Definition, run: Any, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return what autograd computes behind a forward."""
    inputs = {key: given[key] for key in forward.inputs}
    leaves = {
        key: inputs[key].clone().requires_grad_() for key in forward.tensor_inputs if inputs[key].is_floating_point()
    }
    out = run(*(inputs | leaves).values())
    return torch.autograd.grad(out, list(leaves.values()), given["grad_out"])


@pytest.mark.parametrize("name", EXPERTS)
def test_gradients_of_experts_are_those_of_the_forward(name: str, catalog: Catalog) -> None:
    backward, forward = catalog.definition(f"{name}_backward"), catalog.definition(name)
    mode: Any = Lifted
    # without the rounding of what the clamp decides on
    exact = backward.reference.replace("    mantissa, exponent", "    return value\n    mantissa, exponent")
    for given in cases(catalog, backward.name):
        wide = {key: lifted(value) for key, value in given.items()}
        with mode():
            want = of_experts(forward, load_function(forward.reference, forward.name), wide)
        for value, one in zip(run_lifted(backward, given, source=exact).values(), want, strict=True):
            torch.testing.assert_close(value, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EXPERTS)
def test_stock_gradients_of_experts_are_near_those_of_autograd(name: str, catalog: Catalog) -> None:
    forward, stock = catalog.solution(f"{name}_stock"), catalog.solution(f"{name}_backward_stock")
    for given in cases(catalog, f"{name}_backward"):
        want = of_experts(catalog.definition(name), load_verified(forward, forward.digest), given)
        for value, one in zip(load_verified(stock, stock.digest)(*given.values()), want, strict=True):
            assert value.dtype == one.dtype
            assert float((value.double() - one.double()).norm() / one.double().norm()) < 8e-3


@pytest.mark.parametrize(("limit", "gates", "ups"), [(0.5, 4, 2), (2.5, 5, 4), (4.0, 6, 6)])
def test_clamped_values_of_experts_pass_no_gradient(limit: float, gates: int, ups: int, catalog: Catalog) -> None:
    """Gates have a bound above, and what is beside them has two."""
    forward, stock = (catalog.solution(f"moe_experts_oai{way}_stock") for way in ("", "_backward"))
    values = torch.tensor([-3.0, -2.0, -0.25, 0.25, 2.0, 3.0], dtype=torch.bfloat16)
    given = {
        "x": torch.zeros(2, 4, dtype=torch.bfloat16),
        "ids": torch.zeros(2, 1, dtype=torch.int64),
        "weights": torch.ones(2, 1, dtype=torch.bfloat16),
        "gate_up": torch.zeros(1, 4, 12, dtype=torch.bfloat16),
        "gate_up_bias": values.repeat_interleave(2)[None],
        "down": torch.ones(1, 6, 4, dtype=torch.bfloat16),
        "down_bias": torch.zeros(1, 4, dtype=torch.bfloat16),
        "alpha": 1.0,
        "limit": limit,
        "grad_out": torch.ones(2, 4, dtype=torch.bfloat16),
    }
    want = of_experts(catalog.definition("moe_experts_oai"), load_verified(forward, forward.digest), given)[3]
    found = load_verified(stock, stock.digest)(*given.values())[3]
    torch.testing.assert_close(found, want, rtol=2**-6, atol=0)
    assert [int((found[0, part::2] != 0).sum()) for part in (0, 1)] == [gates, ups]


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
