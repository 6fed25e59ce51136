"""Experts whose code between the two products no Definition states: a probe decides, and bounds are numbers of each module."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.parts.experts import CHANGED, GATE, NOT_CALLED_SO, OTHER_GATE, OTHER_IDENTITY, UNDESCRIBED

TOKENS, EXPERTS, HIDDEN, INNER = 7, 4, 32, 16
WIDTHS = ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# class -> (module of transformers, type of its config)
CLASSES = {
    "HYV4Experts": ("hy_v4", "hy_v4"),
    "Glm5NextTextExperts": ("glm5_next", "glm5_next_text"),
    "Step3p7Experts": ("step3p7", "step3p5"),
    "MiniMaxM3VLExperts": ("minimax_m3_vl", "minimax_m3_vl_text"),
    "Llama4TextExperts": ("llama4", "llama4_text"),
    "LongcatFlashExperts": ("longcat_flash", "longcat_flash"),
    "NemotronHExperts": ("nemotron_h", "nemotron_h"),
    "Gemma4TextExperts": ("gemma4", "gemma4_text"),
    "Inkling2Experts": ("inkling2", "inkling2_text"),
}
OWN_DEFINITIONS = {
    "Gemma4TextExperts": "moe_experts_gelu_tanh",
    "MiniMaxM3VLExperts": "moe_experts_oai_halves",
    "NemotronHExperts": "moe_experts_relu2",
}
UNKNOWN = ["Inkling2Experts"]
BOUNDED = {"HYV4Experts": "swiglu_limit", "Glm5NextTextExperts": "swiglu_limit"}
pytestmark = [
    pytest.mark.skipif("hy_v4" not in CONFIG_MAPPING, reason="this transformers has not all of them"),
    pytest.mark.sweep,
]


def filled(module: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).to(dtype)
    return module.eval()


def experts(name: str, dtype: torch.dtype = torch.float32, implementation: str = "grouped_mm") -> Any:
    """One module of experts with random weights, in eval mode."""
    folder, kind = CLASSES[name]
    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {one: INNER for one in WIDTHS if one in known} | {one: EXPERTS for one in COUNTS if one in known}
    config = CONFIG_MAPPING[kind](**{**sizes, "hidden_size": HIDDEN})
    config._experts_implementation = implementation
    made = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)(config)
    return filled(made, dtype)


def call(module: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :2].contiguous()
    states, weights = 6 * torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 2, generator=generator)
    with torch.no_grad():
        out: torch.Tensor = module(states.to(dtype), ids, weights.to(dtype))
    return out


def reason(module: torch.nn.Module, catalog: Catalog) -> str:
    sites = patch(torch.nn.ModuleList([module]), catalog=catalog, dry_run=True).report().sites
    (site,) = (site for site in sites if site.kind == "experts")
    return site.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_of_another_name_is_an_input(
    name: str, implementation: str, dtype: torch.dtype, kernels: Catalog
) -> None:
    module = experts(name, dtype, implementation)
    cls, held = type(module), dict(vars(module))
    setattr(module, BOUNDED[name], 0.5)
    stock = call(module, dtype)
    setattr(module, BOUNDED[name], held[BOUNDED[name]])
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert vars(module) == held
        setattr(module, BOUNDED[name], 0.5)
        torch.testing.assert_close(call(module, dtype), stock)
        setattr(module, BOUNDED[name], held[BOUNDED[name]])
    assert type(module) is cls
    (site,) = handle.report().sites
    assert (site.kind, handle.report().hits()) == ("experts", {"moe_experts_clamp": 1})
    assert site.own_code == {implementation: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_without_bounds_is_served_without_the_wrapper(dtype: torch.dtype, kernels: Catalog) -> None:
    module = experts("Step3p7Experts", dtype)
    stock = call(module, dtype)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        torch.testing.assert_close(call(module, dtype), stock)
    assert handle.report().hits() == {"moe_experts": 1}
    assert torch.equal(call(module, dtype), stock)


def test_a_bound_that_is_set_after_the_patch_is_honoured(poison: Catalog) -> None:
    module = experts("Step3p7Experts")
    with patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
        module.limit = 0.5
        found = call(module)
    assert torch.equal(found, call(module))
    (site,) = handle.report().sites
    assert dict(site.bypassed) == {CHANGED: 1}


def test_layers_with_and_without_a_bound_are_judged_apart(kernels: Catalog) -> None:
    free, bounded = experts("Step3p7Experts"), experts("Step3p7Experts")
    bounded.limit = 16.0  # larger than all that a probe draws, and applied after the activation
    sites = patch(torch.nn.ModuleList([free, bounded]), catalog=kernels, dry_run=True).report().sites
    assert [(site.modules, site.reason) for site in sites] == [(1, "dry run"), (1, OTHER_GATE.format(GATE))]


def test_training_and_gradients_of_a_loop_are_left_to_stock(poison: Catalog) -> None:
    module = experts("Step3p7Experts")
    with patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
        states = torch.randn(3, HIDDEN, requires_grad=True)
        module(states, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)).sum().backward()
        gradient = states.grad
        module.train()
        call(module)
    states.grad = None
    module.eval()(states, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)).sum().backward()
    assert gradient is not None
    assert torch.equal(gradient, states.grad)
    (site,) = handle.report().sites
    (reason,) = site.bypassed
    assert reason.endswith("the gradient of x, gate_up, down alone")
    assert not any(key.solution for one in site.training for key in one.keys)


class Capped(Qwen3MoeExperts):
    """A bound that is a number in the code."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=1e4) * up


class Exchanged(Qwen3MoeExperts):
    """The factors in the other order."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * self.act_fn(gate)


def test_numbers_between_the_products_are_no_definition(kernels: Catalog) -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    assert reason(filled(Capped(config), torch.float32), kernels) == OTHER_GATE.format(GATE)
    assert reason(filled(Exchanged(config), torch.float32), kernels) == "dry run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", OWN_DEFINITIONS)
def test_experts_with_another_activation_are_served(
    name: str, implementation: str, dtype: torch.dtype, kernels: Catalog
) -> None:
    module = experts(name, dtype, implementation)
    stock = call(module, dtype)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        found = call(module, dtype)
    # Stock adds in another order, and as a loop it rounds after each expert.
    assert (found - stock).norm() < (1e-6 if dtype == torch.float32 else 1e-2) * stock.norm()
    assert handle.report().hits() == {OWN_DEFINITIONS[name]: 1}
    assert torch.equal(call(module, dtype), stock)


def test_a_limit_of_minimax_is_an_input_at_each_call(kernels: Catalog) -> None:
    module = experts("MiniMaxM3VLExperts")
    with patched(torch.nn.ModuleList([module]), catalog=kernels):
        module.swiglu_limit, module.swiglu_alpha = 0.5, 1.0
        served = call(module)
    torch.testing.assert_close(served, call(module))


def call_all(module: Any, states: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, scaled by a score that is zero for all but one."""
    scores = torch.zeros(EXPERTS, TOKENS).scatter_(0, torch.arange(TOKENS)[None] % EXPERTS, 0.75).to(states.dtype)
    with torch.no_grad():
        out: torch.Tensor = module((states[None] * scores[..., None]).view(-1, HIDDEN))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_llama4_are_served_by_rows(dtype: torch.dtype, kernels: Catalog) -> None:
    module = experts("Llama4TextExperts", dtype)
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    stock = call_all(module, states)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        found = call_all(module, states)
        assert found.shape == stock.shape
        torch.testing.assert_close(found, stock)
    assert handle.report().hits() == {"moe_experts_dense": 1}
    assert torch.equal(call_all(module, states), stock)


def test_rows_that_are_not_contiguous_stay_stock(poison: Catalog) -> None:
    module = experts("Llama4TextExperts")
    states = torch.randn(HIDDEN, EXPERTS * TOKENS).T
    with torch.no_grad(), patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
        found = module(states)
    with torch.no_grad():
        assert torch.equal(found, module(states))
    (site,) = handle.report().sites
    assert dict(site.bypassed) == {NOT_CALLED_SO: 1}


@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_that_no_definition_describes_have_a_reason(name: str, kernels: Catalog) -> None:
    assert reason(experts(name), kernels) in UNDESCRIBED.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_return_their_input_are_added(dtype: torch.dtype, kernels: Catalog) -> None:
    module = experts("LongcatFlashExperts", dtype)
    module.num_routed_experts, module.total_experts = 3, 4
    module.down_proj = torch.nn.Parameter(module.down_proj[:3].clone())
    stock = call(module, dtype)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        torch.testing.assert_close(call(module, dtype), stock)
    assert handle.report().hits() == {"moe_experts": 1}
    assert torch.equal(call(module, dtype), stock)


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_experts_that_return_something_else_stay_stock(kernels: Catalog) -> None:
    module = experts("LongcatFlashExperts")
    module.identity_expert = Doubling()
    assert reason(module, kernels) == OTHER_IDENTITY.format("num_routed_experts")


class OneMore(Qwen3MoeExperts):
    """Up with one more, without a bound."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * (up + 1)


def test_another_gate_has_a_reason(kernels: Catalog) -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    module = filled(OneMore(config), torch.float32)
    assert reason(module, kernels) == OTHER_GATE.format(GATE)
    assert not any(math.isinf(value) for value in vars(module).values() if type(value) is float)
