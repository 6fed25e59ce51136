"""Routers of mixtures: the product is the model's own, and a kernel chooses from its scores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST, NOT_PLAIN

pytestmark = pytest.mark.sweep

EXPERTS, HIDDEN, WORDS = 8, 64, 30


def router(**changes: Any) -> Any:
    """One router of Qwen3-MoE with random weights, in eval mode."""
    settings = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "hidden_size": HIDDEN, "norm_topk_prob": True}
    return filled(Qwen3MoeTopKRouter(Qwen3MoeConfig(**{**settings, **changes})))


def grouped_router(method: str, groups: int | None, kept: int | None) -> Any:
    """One router of DeepSeek-V2."""
    config = DeepseekV2Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=3)
    config.topk_method, config.n_group, config.topk_group = method, groups, kept
    return filled(DeepseekV2TopkRouter(config))


def v4_router(cls: type[torch.nn.Module], **changes: Any) -> Any:
    """One router of DeepSeek-V4 with a random bias or table."""
    settings = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "vocab_size": WORDS}
    module = filled(cls(DeepseekV4Config(**{**settings, **changes})))
    with_experts(module)
    return module


def with_experts(model: torch.nn.Module) -> None:
    """Random biases and tables for all routers of DeepSeek-V4 in a model."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), EXPERTS, generator=generator).argsort(dim=1)[:, : buffer.shape[1]])


def filled(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.eval()


def states(tokens: int = 5) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))


def call(module: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = module(states())
    return found


def same(found: tuple[torch.Tensor, ...], stock: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(got, want) for got, want in zip(found, stock, strict=True))


def reason(module: torch.nn.Module, catalog: Catalog) -> str:
    """Why a module stays stock."""
    report = patch(torch.nn.ModuleList([module]), catalog=catalog, dry_run=True).report()
    (site,) = [one for one in report.sites if one.kind == "router"]
    return site.reason


NO_BACKWARD = "training asked for a backward, and got none"


def bypassed(module: Any, catalog: Catalog, call: Callable[[Any], Any]) -> set[str]:
    """What a call of a patched module is left to stock for; it gives the bits of stock."""
    stock = call(copy.deepcopy(module))
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert same(call(module), stock)
    (site,) = [one for one in handle.report().sites if one.kind == "router"]
    assert handle.report().kernel_calls == 0
    answers = [key for one in site.training for key in one.keys]
    return {*site.bypassed, *([NO_BACKWARD] if answers and not any(key.solution for key in answers) else [])}


@pytest.mark.parametrize("renormalise", [False, True])
def test_scores_weights_and_ids_are_those_of_stock(renormalise: bool, kernels: Catalog) -> None:
    module = router(norm_topk_prob=renormalise)
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert same(call(module), stock)
    assert handle.report().hits() == {"topk_softmax": 1}
    assert type(module) is Qwen3MoeTopKRouter


def test_settings_changed_after_patch_are_honoured(kernels: Catalog) -> None:
    module = router()
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        call(module)
        module.top_k, module.norm_topk_prob = 2, False
        module.weight.data = -module.weight.data
        found = call(module)
    assert same(found, call(module))
    assert found[1].shape == (5, 2)
    assert handle.report().hits() == {"topk_softmax": 2}


@pytest.mark.parametrize("smallest", [1, 2048])
def test_compiled_code_has_the_operator_or_stock_operations(smallest: int, shop: Any) -> None:
    module, catalog = router(), shop.offer(ops=("topk_softmax",), smallest=smallest)
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert same(call(torch.compile(module, backend="aot_eager", fullgraph=True)), stock)
    torch.compiler.reset()
    assert handle.report().kernel_calls == int(smallest == 1)


def test_what_no_kernel_serves_goes_on_as_the_model_has_it(shop: Any) -> None:
    module, catalog = router(), shop.offer(ops=("topk_softmax",), smallest=2048)
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert same(call(module), stock)
    (site,) = [one for one in handle.report().sites if one.kind == "router"]
    assert site.counts is not None
    assert (site.counts.calls, site.counts.kernel_calls) == (1, 0)


def test_training_gradients_and_autocast_are_left_to_stock(poison: Catalog) -> None:
    def with_grad(module: Any) -> tuple[torch.Tensor, ...]:
        return tuple(value.detach() for value in module(states()))

    def in_autocast(module: Any) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return call(module)

    assert bypassed(router().train(), poison, call) == {NO_BACKWARD}
    assert bypassed(router(), poison, with_grad) == {NO_BACKWARD}
    assert bypassed(router(), poison, in_autocast) == {AUTOCAST}


@pytest.mark.parametrize(
    ("method", "groups", "kept", "told"),
    [
        ("greedy", 1, 1, ""),
        ("group_limited_greedy", 4, 2, ""),
        ("greedy", 4, 2, "the results of its probe are not the bits of topk_softmax_groups"),
        ("greedy", None, None, "its num_group is None, no number that topk_softmax_groups takes"),
        ("group_limited_greedy", 3, 2, "it cannot be probed: RuntimeError: shape '[-1, 3, 2]' is invalid for input of size 40"),
    ],
)  # fmt: skip
def test_groups_are_served_if_the_settings_match_the_code(
    method: str, groups: int | None, kept: int | None, told: str, kernels: Catalog
) -> None:
    module = grouped_router(method, groups, kept)
    why = reason(module, kernels)
    assert why == (told or "dry run")
    if not told:
        stock = call(module)
        with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
            assert same(call(module), stock)
        assert handle.report().hits() == {"topk_softmax_groups": 1}


class Sorted(Qwen3MoeTopKRouter):
    """Ids in another order."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        weights, ids = torch.topk(logits, self.top_k)
        ids = ids.flip(-1)
        return logits, weights, ids


def test_other_code_is_no_definition(kernels: Catalog) -> None:
    module = router()
    module.__class__ = Sorted
    assert reason(module, kernels).startswith("no definition computes its choice of experts (fingerprint ")


def by_table(module: Any, tokens: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = module(states().view(1, 5, HIDDEN), tokens)
    return found


TOKENS = torch.tensor([[4, 29, 0, 4, 7]])


def test_the_router_of_deepseek_v4_is_served(kernels: Catalog) -> None:
    module = v4_router(DeepseekV4TopKRouter)
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert same(call(module), stock)
    assert handle.report().hits() == {"topk_sqrtsoftplus_bias": 1}


def test_table_router_is_served_with_the_tokens_of_the_call(kernels: Catalog) -> None:
    module = v4_router(DeepseekV4HashRouter)
    stock = by_table(module, TOKENS)
    assert stock[2].tolist() == module.tid2eid[TOKENS[0]].tolist()
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert same(by_table(module, TOKENS), stock)
        assert same(by_table(module, TOKENS.flip(1)), by_table(copy.deepcopy(module), TOKENS.flip(1)))
    assert handle.report().hits() == {"table_router": 2}


@pytest.mark.parametrize("cls", [DeepseekV4TopKRouter, DeepseekV4HashRouter])
def test_another_score_function_is_not_the_definition(cls: type[torch.nn.Module], kernels: Catalog) -> None:
    module = v4_router(cls, scoring_func="sigmoid")
    name = "table_router" if cls is DeepseekV4HashRouter else "topk_sqrtsoftplus_bias"
    assert reason(module, kernels) == f"the results of its probe are not the bits of {name}"


def test_table_router_without_tokens_raises_like_stock(kernels: Catalog) -> None:
    module = v4_router(DeepseekV4HashRouter)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        with pytest.raises(AttributeError, match="reshape"):
            by_table(module, None)
        (site,) = [one for one in handle.report().sites if one.kind == "router"]
        assert (dict(site.bypassed), handle.report().kernel_calls) == ({NOT_PLAIN: 1}, 0)


@pytest.mark.parametrize("smallest", [1, 2048])
def test_compiled_code_asks_for_the_table_too(smallest: int, shop: Any) -> None:
    module, catalog = v4_router(DeepseekV4HashRouter), shop.offer(ops=("table_router",), smallest=smallest)
    stock = by_table(module, TOKENS)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert same(by_table(torch.compile(module, backend="aot_eager", fullgraph=True), TOKENS), stock)
    torch.compiler.reset()
    assert handle.report().kernel_calls == int(smallest == 1)


def test_greedy_tokens_of_deepseek_v4_are_those_of_stock(kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build("deepseek_v4", n_routed_experts=EXPERTS, mlp_layer_types=["hash_moe", "moe"])
    with_experts(model)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    stock = model.generate(prompt(2), **options).tolist()
    with patched(model, catalog=kernels, ops=["table_router", "topk_sqrtsoftplus_bias"]) as handle:
        assert model.generate(prompt(2), **options).tolist() == stock
    assert handle.report().hits() == {"table_router": 4, "topk_sqrtsoftplus_bias": 4}  # a prompt and three steps
