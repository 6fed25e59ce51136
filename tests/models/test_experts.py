"""Experts of mixtures: served in whichever implementation the model is set to, and only where they compute the Definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, use_experts_implementation
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST, OTHER_ACTIVATION
from tilegym_db.models.parts.experts import NO_CONFIG, NOT_CALLED_SO, OWN_GATE, SHARDED

pytestmark = pytest.mark.sweep

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
OTHER_BITS = "the results of its probe are not the bits of moe_experts or moe_experts_gelu_tanh"
TOKENS, EXPERTS, HIDDEN, INNER = 7, 4, 64, 32


def config(implementation: str = "grouped_mm", **changes: Any) -> Qwen3MoeConfig:
    made = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2, **changes
    )
    made._experts_implementation = implementation
    return made


def experts(cls: type[torch.nn.Module] = Qwen3MoeExperts, **changes: Any) -> Any:
    """One module of experts with random weights, in eval mode."""
    module: Any = cls(config(**changes))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return module.eval()


def routed(tokens: int = TOKENS, choices: int = 2, only: int | None = None) -> tuple[torch.Tensor, ...]:
    """Hidden states, ids and weights; with ``only``, every token chooses that expert every time."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :choices].contiguous()
    weights = torch.rand(tokens, choices, generator=generator)
    states = torch.randn(tokens, HIDDEN, generator=generator)
    return states, ids if only is None else torch.full_like(ids, only), weights


def reason(module: torch.nn.Module, catalog: Catalog) -> str:
    """Why a module stays stock."""
    sites = patch(torch.nn.ModuleList([module]), catalog=catalog, dry_run=True).report().sites
    (site,) = (site for site in sites if site.kind == "experts")
    return site.reason


NO_BACKWARD = "training asked for a backward, and got none"


def bypassed(module: Any, catalog: Catalog, call: Callable[[Any], Any]) -> set[str]:
    """What a call of a patched module is left to stock for; it gives the bits of stock."""
    stock = call(copy.deepcopy(module))
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert torch.equal(call(module), stock)
    (site,) = handle.report().sites
    assert handle.report().kernel_calls == 0
    answers = [key for one in site.training for key in one.keys]
    return {*site.bypassed, *([NO_BACKWARD] if answers and not any(key.solution for key in answers) else [])}


def call(module: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = module(*routed())
    return out


# -- in models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 2), ("mixtral", 2), ("gpt_oss", 2), ("deepseek_v3", 1)])
def test_greedy_tokens_equal_stock_for_every_implementation(
    name: str, layers: int, implementation: str, kernels: Catalog, build: Any, left_padded: Any
) -> None:
    model = build(name)
    model.set_experts_implementation(implementation)
    inputs = left_padded((9, 4, 7))
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    (site,) = [site for site in handle.report().sites if site.kind == "experts"]
    assert site.counts is not None
    assert site.counts.kernel_calls == 4 * layers
    assert site.own_code == {implementation: 4 * layers}


def test_the_report_names_the_implementation_that_stock_runs(kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build("gpt_oss")
    with patched(model, catalog=kernels, ops=["rms_norm"]) as handle:
        model(prompt())
    (site,) = [site for site in handle.report().sites if site.kind == "experts"]
    assert site.reason == "not among the ops asked for"
    assert site.own_code == {"grouped_mm": 0}
    assert "the model's own code is grouped_mm" in str(handle.report())


# -- calls that are served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [routed(1), routed(), routed(64), routed(only=EXPERTS - 1), routed(1, only=0), routed(5, choices=1), routed(5, 4)],
    ids=["one token", "few", "many", "all to one expert", "one to one", "one choice", "every expert"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_odd_batch_is_served(dtype: torch.dtype, given: tuple[torch.Tensor, ...], kernels: Catalog) -> None:
    module, (states, ids, weights) = experts().to(dtype), given
    with torch.no_grad():
        stock = module(states.to(dtype), ids, weights.to(dtype))
        with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
            found = module(states.to(dtype), ids, weights.to(dtype))
    assert handle.report().hits() == {"moe_experts": 1}
    torch.testing.assert_close(found, stock)


def test_no_tokens_are_left_to_stock(kernels: Catalog) -> None:
    module = experts()
    with torch.no_grad(), patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert module(*routed(0)).shape == (0, HIDDEN)
    assert handle.report().kernel_calls == 0


def test_weights_that_change_after_the_patch_are_honoured(kernels: Catalog) -> None:
    module = experts()
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        before = call(module)
        module.down_proj.data = module.down_proj.data * 2
        torch.testing.assert_close(call(module), before * 2)
        module.gate_up_proj = torch.nn.Parameter(torch.zeros_like(module.gate_up_proj))
        assert not call(module).any()
    assert handle.report().hits() == {"moe_experts": 3}


def test_nothing_is_left_behind(kernels: Catalog) -> None:
    module = experts()
    before, functions = dict(vars(module)), dict(ALL_EXPERTS_FUNCTIONS)
    with patched(torch.nn.ModuleList([module]), catalog=kernels):
        call(module)
        assert vars(module) == before
    assert type(module) is Qwen3MoeExperts
    assert vars(module) == before
    assert dict(ALL_EXPERTS_FUNCTIONS) == functions


@pytest.mark.turn("tilegym_db/models/parts/")  # compilation; eager code is compared daily
@pytest.mark.parametrize("smallest", [1, 2048])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_code_has_the_operator_or_stock_operations(implementation: str, smallest: int, shop: Any) -> None:
    module, catalog = experts(implementation=implementation), shop.offer(ops=("moe_experts",), smallest=smallest)
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        compiled = torch.compile(module, backend="aot_eager", fullgraph=implementation != "eager")
        found = call(compiled)
    torch.compiler.reset()
    is_served = smallest == 1 and implementation != "eager"
    assert handle.report().kernel_calls == int(is_served)
    if is_served:
        torch.testing.assert_close(found, stock)
    else:
        assert torch.equal(found, stock)


@pytest.mark.parametrize("smallest", [1, 2048])
def test_compiled_code_runs_layers_with_few_and_all_experts(smallest: int, shop: Any) -> None:
    fewer, whole = experts(), experts()
    for name in ("gate_up_proj", "down_proj"):
        setattr(fewer, name, torch.nn.Parameter(getattr(fewer, name)[: EXPERTS // 2].clone()))
    fewer.num_experts = EXPERTS // 2
    catalog, stock = shop.offer(ops=("moe_experts",), smallest=smallest), call(whole)
    with patched(torch.nn.ModuleList([fewer, whole]), catalog=catalog):
        found = call(torch.compile(whole, backend="aot_eager"))
    torch.compiler.reset()
    torch.testing.assert_close(found, stock)


def test_compiled_code_honours_a_limit_changed_after_patch(shop: Any) -> None:
    settings = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    settings._experts_implementation = "grouped_mm"
    module: Any = GptOssExperts(settings).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    catalog = shop.offer(ops=("moe_experts_oai",), smallest=2048)
    with patched(torch.nn.ModuleList([module]), catalog=catalog):
        module.limit = 0.5
        found = call(torch.compile(module, backend="aot_eager"))
    torch.compiler.reset()
    torch.testing.assert_close(found, call(module))


# -- calls that are left to stock -------------------------------------------------------------------------------------


@pytest.fixture
def own_implementation() -> Iterator[str]:
    """The name of an experts function that a user registered."""

    def doubled(self: Any, *given: Any) -> torch.Tensor:
        out: torch.Tensor = 2 * ALL_EXPERTS_FUNCTIONS["batched_mm"](self, *given)
        return out

    ExpertsInterface.register("doubled", doubled)
    yield "doubled"
    ExpertsInterface._global_mapping.pop("doubled")


def test_an_implementation_of_the_users_own_is_left_alone(own_implementation: str, poison: Catalog) -> None:
    (told,) = bypassed(experts(implementation=own_implementation), poison, call)
    assert told == (
        "the model's experts are 'doubled'; only eager, batched_mm, grouped_mm are known to compute a definition"
    )


def test_a_known_name_with_another_function_is_left_alone(poison: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts()
    with patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
        monkeypatch.setitem(ExpertsInterface._global_mapping, "grouped_mm", lambda self, x, ids, weights: x)
        assert torch.equal(call(module), routed()[0])
    assert handle.report().kernel_calls == 0


def test_training_gradients_and_autocast_are_left_to_stock(poison: Catalog) -> None:
    def with_grad(module: Any) -> torch.Tensor:
        out: torch.Tensor = module(*routed())
        return out.detach()

    def in_autocast(module: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(module)

    assert bypassed(experts().train(), poison, call) == {NO_BACKWARD}
    (reason,) = bypassed(experts(), poison, with_grad)
    assert reason.endswith("the gradient of gate_up, down alone")
    assert bypassed(experts(), poison, in_autocast) == {AUTOCAST}


def test_hooked_or_replaced_activation_stays_stock(poison: Catalog) -> None:
    def hooked(module: Any) -> torch.Tensor:
        with module.act_fn.register_forward_hook(lambda *_: None):
            return call(module)

    def replaced(module: Any) -> torch.Tensor:
        own, module.act_fn = module.act_fn, torch.nn.GELU()
        try:
            return call(module)
        finally:
            module.act_fn = own

    assert bypassed(experts(), poison, hooked) == {OTHER_ACTIVATION}
    assert bypassed(experts(), poison, replaced) == {OTHER_ACTIVATION}


def test_calls_of_another_shape_are_left_to_stock(poison: Catalog) -> None:
    def by_name(module: Any) -> torch.Tensor:
        states, ids, weights = routed()
        with torch.no_grad():
            out: torch.Tensor = module(states, top_k_index=ids, top_k_weights=weights)
        return out

    def flat_weights(module: Any) -> torch.Tensor:
        states, ids, weights = routed(5, choices=1)
        with torch.no_grad():
            out: torch.Tensor = module(states, ids, weights.unsqueeze(-1))
        return out

    assert bypassed(experts(), poison, by_name) == set()
    assert bypassed(experts(implementation="batched_mm"), poison, flat_weights) == {NOT_CALLED_SO}


# -- modules that are not patched at all ------------------------------------------------------------------------------


class SwappedExperts(Qwen3MoeExperts):
    """Up before gate."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        up, gate = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def restated(**flags: bool) -> type[torch.nn.Module]:
    """Experts of the same code, which say otherwise how their weights lie."""

    class OtherExperts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            vars(self).update({name: value for name, value in vars(experts()).items() if name != "config"})

        forward = vars(Qwen3MoeExperts)["forward"].__wrapped__

    return use_experts_implementation(**flags)(OtherExperts)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["gelu", "relu", "quick_gelu"])
def test_another_activation_is_no_definition(activation: str, kernels: Catalog) -> None:
    assert reason(experts(hidden_act=activation), kernels) == OTHER_BITS


def test_an_activation_that_clamps_is_no_definition(kernels: Catalog) -> None:
    module = experts()
    del module.act_fn
    module.act_fn = lambda gate: torch.nn.functional.silu(gate).clamp(max=7.0)
    assert reason(module, kernels) == OTHER_BITS


def test_experts_that_lie_otherwise_are_no_definition(kernels: Catalog) -> None:
    told = reason(experts(SwappedExperts), kernels)
    assert told == "its code between the two products, _apply_gate, computes no definition of experts"
    transposed, biased = restated(is_transposed=True), restated(has_bias=True)
    assert reason(experts(transposed), kernels).startswith("its batched_mm experts cannot be probed: RuntimeError")
    assert reason(experts(biased), kernels).startswith("its batched_mm experts cannot be probed: AttributeError")


def test_clamped_gates_are_recognised_by_their_limit(kernels: Catalog) -> None:
    """gpt-oss and DeepSeek-V4: the number is the module's own, and one that is none is refused."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    made = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    made._experts_implementation = "grouped_mm"
    module = GptOssExperts(made)
    for limit, told in ((7.0, "dry run"), (2, "dry run"), (None, "its limit is None, no number that {} takes")):
        module.limit = limit
        assert reason(module, kernels) == told.format("moe_experts_oai")


def test_a_gate_of_the_instances_own_is_left_alone(kernels: Catalog) -> None:
    module = experts()
    module._apply_gate = lambda both: both[..., :INNER]
    assert reason(module, kernels) == OWN_GATE


def test_a_gate_that_is_set_after_the_patch_is_honoured(poison: Catalog) -> None:
    def gated(module: Any) -> torch.Tensor:
        module._apply_gate = lambda both: both[..., :INNER]
        try:
            return call(module)
        finally:
            del module._apply_gate

    assert bypassed(experts(), poison, gated) == {OWN_GATE}


def test_experts_of_another_rank_or_without_config_stay_stock(kernels: Catalog) -> None:
    sharded, bare = experts(), experts()
    sharded._is_expert_parallel = True
    bare.config = None
    assert reason(sharded, kernels) == SHARDED
    assert reason(bare, kernels) == NO_CONFIG


def test_quantised_or_wrapped_weights_are_left_alone(kernels: Catalog) -> None:
    whole, missing = experts(), experts()
    whole.down_proj = torch.nn.Parameter(torch.ones(EXPERTS, HIDDEN, INNER, dtype=torch.int8), requires_grad=False)
    down = missing._parameters.pop("down_proj")
    vars(missing)["down_proj"] = down.detach()
    told = "its down_proj is a Tensor{}, not a parameter of plain floating point"
    assert reason(whole, kernels) == told.format(" of torch.int8")
    assert reason(missing, kernels) == told.format("")


def test_experts_absent_or_offloaded_stay_stock(kernels: Catalog) -> None:
    replaced = experts()
    replaced.forward = lambda *given: given[0]
    assert "already replaced on the instance" in reason(replaced, kernels)
    assert reason(experts().to("meta"), kernels) == "its weights are not in memory"


def test_without_anything_published_experts_stay_as_they_are(build: Any) -> None:
    model = build("qwen3_moe")
    with patched(model) as handle:
        assert {
            type(module).__mro__[0].__module__ for module in model.modules() if "Experts" in type(module).__name__
        } == {"transformers.models.qwen3_moe.modeling_qwen3_moe"}
        assert type(model.model.layers[0].mlp.experts) is Qwen3MoeExperts
    assert {site.reason for site in handle.report().sites} == {"nothing is published for cpu"}
