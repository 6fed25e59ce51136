"""Routers whose code no Definition states: a kernel makes the choice, and the model's own code goes on with its weights."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST
from tilegym_db.models.parts.router import CHANGED, NO_CHOICE, OTHER_BIAS, UNDESCRIBED, choices
from tilegym_db.models.parts.widened_product import product_of

EXPERTS, HIDDEN, CHOSEN = 8, 64, 3
# class -> (module of transformers, type of its config, the Definition of its choice)
ROUTERS = {
    "MixtralTopKRouter": ("mixtral", "mixtral", "topk_softmax"),
    "MiniMaxTopKRouter": ("minimax", "minimax", "topk_softmax"),
    "JambaTopKRouter": ("jamba", "jamba", "topk_softmax"),
    "HunYuanMoEV1Gate": ("hunyuan_v1_moe", "hunyuan_v1_moe", "topk_softmax"),
    "GraniteMoeTopKRouter": ("granitemoe", "granitemoe", "topk_then_softmax"),
    "GraniteMoeHybridTopKRouter": ("granitemoehybrid", "granitemoehybrid", "topk_then_softmax"),
    "MiniMaxM2TopKRouter": ("minimax_m2", "minimax_m2", "topk_sigmoid_bias_groups"),
    "AfmoeTokenChoiceRouter": ("afmoe", "afmoe", "topk_sigmoid_bias_groups"),
    "HYV3TopKRouter": ("hy_v3", "hy_v3", "topk_sigmoid_bias_groups"),
    "LagunaTopKRouter": ("laguna", "laguna", "topk_sigmoid_bias_groups"),
    "MiniMaxM3VLTopKRouter": ("minimax_m3_vl", "minimax_m3_vl_text", "topk_sigmoid_bias_groups"),
    "Step3p7TopKRouter": ("step3p7", "step3p5", "topk_sigmoid_bias_groups"),
    "AXK2TopkRouter": ("axk2", "axk2", "topk_sigmoid_bias_groups"),
    "Mistral4TopkRouter": ("mistral4", "mistral4", "topk_softmax_rounded"),
    "MistralLarge4TextTopkRouter": ("mistral_large4", "mistral_large4_text", "topk_softmax"),
    "Ernie4_5_MoeTopKRouter": ("ernie4_5_moe", "ernie4_5_moe", "topk_softmax_bias"),
    "LongcatFlashTopkRouter": ("longcat_flash", "longcat_flash", "topk_softmax_bias"),
    "Lfm2MoeTopKRouter": ("lfm2_moe", "lfm2_moe", "topk_sigmoid_bias_rounded"),
    "Gemma4TextRouter": ("gemma4", "gemma4_text", "topk_softmax"),
}
OTHERS = {
    "Kolibri1TopKRouter": ("kolibri1", "kolibri1"),
}
SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "top_k_experts")
pytestmark = [
    pytest.mark.skipif("minimax_m3_vl_text" not in CONFIG_MAPPING, reason="this transformers has not all of them"),
    pytest.mark.sweep,
]


def router(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """One router with random weights and biases, in eval mode."""
    folder, kind = {**OTHERS, **{key: value[:2] for key, value in ROUTERS.items()}}[name]
    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {one: EXPERTS for one in SIZES if one in known} | {one: CHOSEN for one in COUNTS if one in known}
    config = CONFIG_MAPPING[kind](
        **{**sizes, "hidden_size": HIDDEN, "n_group": 1, "topk_group": 1, "zero_expert_num": 0}
    )
    module = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 4
    for buffer in module.buffers():
        buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return module.eval()


def call(module: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 3, HIDDEN, generator=generator).to(dtype)
    takes_bias = len(inspect.signature(getattr(module, "_orig_mod", module).forward).parameters) == 2
    bias = [0.1 * torch.randn(EXPERTS, generator=generator)] if takes_bias else []
    flat = states if "Afmoe" in type(module).__name__ else states.view(-1, HIDDEN)
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = module(flat, *bias)
    return found


def assert_same(found: tuple[torch.Tensor, ...], stock: tuple[torch.Tensor, ...]) -> None:
    """The same scores, and the same weights of the same experts, in any order of a token's experts."""
    (scores, weights, ids), (wanted, expected, known) = found, stock
    assert torch.equal(scores, wanted)
    assert weights.dtype == expected.dtype
    order, other = ids.argsort(-1), known.argsort(-1)
    assert torch.equal(ids.gather(-1, order), known.gather(-1, other))
    torch.testing.assert_close(weights.gather(-1, order), expected.gather(-1, other), rtol=2e-7, atol=0)


def reason(module: torch.nn.Module, catalog: Catalog) -> str:
    report = patch(torch.nn.ModuleList([module]), catalog=catalog, dry_run=True).report()
    (site,) = [one for one in report.sites if one.kind == "router"]
    return site.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_other_code_is_served_with_its_own_results(name: str, dtype: torch.dtype, kernels: Catalog) -> None:
    module = router(name, dtype)
    cls, held, stock = type(module), dict(vars(module)), call(module, dtype)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert_same(call(module, dtype), stock)
    widens = dtype != torch.float32 and product_of(cls.forward) is not None
    others = ({"gemm_widened": 1} if widens else {}) | ({"rms_norm": 1} if hasattr(module, "norm") else {})
    assert handle.report().hits() == {ROUTERS[name][2]: 1} | others
    assert type(module) is cls
    assert vars(module) == held
    assert all(torch.equal(got, want) for got, want in zip(call(module, dtype), stock, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_a_choice_that_no_definition_makes_stays_stock(
    name: str, kernels: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason(router(name), kernels) in UNDESCRIBED.values()
    monkeypatch.setattr("tilegym_db.models.parts.router.UNDESCRIBED", {})
    assert reason(router(name), kernels).startswith(f"{NO_CHOICE} (fingerprint ")


@pytest.mark.parametrize("name", ["HYV3TopKRouter", "AXK2TopkRouter", "MiniMaxM2TopKRouter"])
def test_settings_that_change_after_the_patch_are_honoured(name: str, kernels: Catalog) -> None:
    module = router(name)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        module.top_k = 2
        for attribute in ("router_scaling_factor", "routed_scaling_factor"):
            if hasattr(module, attribute):
                setattr(module, attribute, 0.75)
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob
        found = call(module)
    assert_same(found, call(module))
    assert found[2].shape[-1] == 2
    assert handle.report().kernel_calls == 1


def test_a_setting_of_a_config_is_read_at_each_call(kernels: Catalog) -> None:
    module = router("Gemma4TextRouter")
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        module.config.top_k_experts = 2
        found = call(module)
    assert_same(found, call(module))
    assert found[2].shape[-1] == 2
    assert handle.report().hits()["topk_softmax"] == 1


def test_compiled_code_sees_a_changed_setting_of_a_config(shop: Any) -> None:
    module = router("Gemma4TextRouter")
    with patched(torch.nn.ModuleList([module]), catalog=shop.offer(ops=("topk_softmax",), smallest=1)) as handle:
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        found = [call(compiled)]
        module.config.top_k_experts = 2
        found.append(call(compiled))
    torch.compiler.reset()
    assert [ids.shape[-1] for _, _, ids in found] == [CHOSEN, 2]
    assert_same(found[1], call(module))
    assert handle.report().kernel_calls == 2


def test_a_setting_of_the_choice_alone_must_stay_as_probed(kernels: Catalog) -> None:
    module = router("MistralLarge4TextTopkRouter")
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        module.num_group, module.topk_group = 2, 1
        found = call(module)
    assert all(torch.equal(got, want) for got, want in zip(found, call(module), strict=True))
    (site,) = [one for one in handle.report().sites if one.kind == "router"]
    assert dict(site.bypassed) == {CHANGED: 1}


def test_groups_of_experts_are_no_choice_without_groups(kernels: Catalog) -> None:
    module = router("MistralLarge4TextTopkRouter")
    module.num_group, module.topk_group = 2, 1
    assert reason(module, kernels).startswith(NO_CHOICE)


def test_training_gradients_and_autocast_are_left_to_stock(poison: Catalog) -> None:
    def bypassed(module: Any, asked: Any) -> set[str]:
        stock = asked(copy.deepcopy(module))
        with patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
            assert all(torch.equal(got, want) for got, want in zip(asked(module), stock, strict=True))
        (site,) = [one for one in handle.report().sites if one.kind == "router"]
        assert not any(key.solution for one in site.training for key in one.keys)
        return set(site.bypassed)

    def with_grad(module: Any) -> list[torch.Tensor]:
        return [value.detach() for value in module(torch.ones(2, HIDDEN))]

    def in_autocast(module: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(module)

    assert bypassed(router("MixtralTopKRouter").train(), call) == set()  # it asked for a backward
    assert bypassed(router("MixtralTopKRouter"), with_grad) == set()
    assert bypassed(router("MixtralTopKRouter"), in_autocast) == {AUTOCAST}


@pytest.mark.parametrize(
    "name", ["MixtralTopKRouter", "MiniMaxM2TopKRouter", "GraniteMoeTopKRouter", "Ernie4_5_MoeTopKRouter"]
)
@pytest.mark.parametrize("smallest", [1, 2048])
def test_compiled_code_has_the_operator_or_stock_operations(name: str, smallest: int, shop: Any) -> None:
    module, definition = router(name), ROUTERS[name][2]
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=shop.offer(ops=(definition,), smallest=smallest)) as handle:
        assert_same(call(torch.compile(module, backend="aot_eager", fullgraph=True)), stock)
    torch.compiler.reset()
    assert handle.report().kernel_calls == int(smallest == 1)


def test_a_bias_of_a_submodule_with_a_hook_is_left_to_stock(kernels: Catalog) -> None:
    module, calls = router("Ernie4_5_MoeTopKRouter"), []
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        hook = module.moe_statics.register_forward_hook(lambda *_: calls.append(1))
        found = call(module)
        hook.remove()
        assert_same(call(module), found)
    (site,) = [one for one in handle.report().sites if one.kind == "router"]
    assert (dict(site.bypassed), handle.report().kernel_calls, len(calls)) == ({CHANGED: 1}, 1, 1)


def test_a_bias_that_the_code_does_not_widen_is_left_to_stock(kernels: Catalog) -> None:
    module = router("Lfm2MoeTopKRouter", torch.bfloat16)
    states, bias = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(EXPERTS, dtype=torch.bfloat16)
    with torch.no_grad(), patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        module(states, bias)
        module(states, bias.float())
    (site,) = [one for one in handle.report().sites if one.kind == "router"]
    assert (dict(site.bypassed), handle.report().kernel_calls) == ({OTHER_BIAS: 1}, 1)


def flipped(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    weights, ids = torch.topk(logits, self.top_k)
    ids = ids.flip(-1)
    return logits, weights, ids


def doubled(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    hidden_states = hidden_states * 2
    weights, ids = torch.topk(logits, self.top_k)
    return logits, weights * hidden_states[:, :1], ids


def shifted(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    others = hidden_states.mean(-1, keepdim=True)
    scores = torch.softmax(logits + others, dim=-1)
    weights, ids = torch.topk(scores, self.top_k)
    return scores, weights, ids


def scaled_in_place(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    logits.mul_(4.0)
    weights = torch.nn.functional.softmax(logits.float(), dim=-1)
    weights, ids = torch.topk(weights, self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return logits, weights, ids


def test_a_choice_that_changes_its_scores_stays_stock(kernels: Catalog) -> None:
    module = router("MixtralTopKRouter")
    module.__class__ = type("Scaled", (type(module),), {"forward": scaled_in_place})
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert_same(call(module), stock)
    assert handle.report().kernel_calls == 0


def test_every_variable_behind_probabilities_may_be_ranked() -> None:
    assert [one.scores for one in choices(shifted)] == ["scores", "logits", "others"]


def test_code_of_another_shape_has_no_choice() -> None:
    assert [one.stop - one.start for one in choices(flipped)] == [2, 1]
    assert all(one.weights == "weights" for one in choices(doubled))
    assert choices(call) == ()
    assert choices(torch.nn.Linear.forward) == ()


TINY = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LONGCAT = {
    "head_dim": 8,
    **LATENT,
    "num_layers": 2,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS - 2,
    "n_routed_experts": EXPERTS - 2,
    "zero_expert_num": 2,
    "moe_topk": CHOSEN,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 32,
}
# type of the config -> what it changes, and calls of a kernel in a prompt and three steps
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "minimax_m2": ({}, {"topk_sigmoid_bias_groups": 8, "moe_experts": 8}),
    "granitemoe": ({}, {"topk_then_softmax": 8, "moe_experts": 8}),
    "gemma4_text": (
        {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": CHOSEN, "moe_intermediate_size": 32}
        | {"vocab_size_per_layer_input": 96, "layer_types": ["sliding_attention", "full_attention"]},
        {"topk_softmax": 8, "moe_experts_gelu_tanh": 8},
    ),
    "longcat_flash": (
        LONGCAT,
        {"moe_experts": 4, "topk_softmax_bias": 4},
    ),  # a layer has two attentions and one mixture
}


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_are_those_of_stock(kind: str, kernels: Catalog) -> None:
    changes, served = MODELS[kind]
    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(CONFIG_MAPPING[kind](**{**TINY, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    ids = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    stock = model.generate(ids, **options).tolist()
    with patched(model, catalog=kernels) as handle:
        assert model.generate(ids, **options).tolist() == stock
    hits = handle.report().hits()
    assert {name: hits[name] for name in served} == served
    sites = [site for site in handle.report().sites if site.kind in ("router", "experts") and site.counts]
    assert all(site.counts.stock_calls == 0 and not site.bypassed for site in sites)
    assert model.generate(ids, **options).tolist() == stock


def test_a_router_with_groups_is_not_one_without(kernels: Catalog) -> None:
    from transformers.models.mistral4.configuration_mistral4 import Mistral4Config
    from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

    config = Mistral4Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, n_group=4, topk_group=2)
    assert reason(Mistral4TopkRouter(config).eval(), kernels).startswith(NO_CHOICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mixer_of_phi_is_served_with_its_own_results(dtype: torch.dtype, kernels: Catalog) -> None:
    from transformers.models.phimoe.configuration_phimoe import PhimoeConfig
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

    module = PhimoeTopKRouter(PhimoeConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS)).to(dtype).eval()
    stock = call(module, dtype)
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert all(torch.equal(got, want) for got, want in zip(call(module, dtype), stock, strict=True))
        assert handle.report().hits() == {"sparsemixer_top2": 1}
        module.train()
        call(module, dtype)
        assert handle.report().hits() == {"sparsemixer_top2": 1}
