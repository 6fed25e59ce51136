"""FP8 experts of transformers: served in whichever implementation is set, and only where they compute the Definition.

transformers runs them with kernels of a hub on a GPU and has no code for a CPU; stand-ins for the hub's functions, in PyTorch,
take their place here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.utils.quantization_config import FineGrainedFP8Config

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD
from tilegym_db.models.parts.experts import SHARDED
from tilegym_db.paths import shipped_root

pytestmark = pytest.mark.sweep

NAME = "moe_experts_fp8"
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
OTHER_BITS = f"the results of its probe are not the bits of {NAME}"
EXPERTS, HIDDEN, INNER = 4, 256, 128
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 384, "moe_intermediate_size": INNER}


def reference_of_a_product() -> Callable[..., torch.Tensor]:
    namespace: dict[str, Any] = {}
    exec(Catalog((shipped_root(),)).definition("gemm_fp8_blockwise_dynamic").reference, namespace)
    run: Callable[..., torch.Tensor] = namespace["run"]
    return run


blockwise = reference_of_a_product()


def hub(product: Callable[..., torch.Tensor] = blockwise) -> Any:
    """What transformers finds where it looks for the kernels of the hub. They leave rows of no expert unwritten."""

    def matmul(x: Any, codes: Any, scale: Any, block_size: Any, dtype: Any, activation_scale: Any = None) -> Any:
        assert (tuple(block_size), dtype, activation_scale) == ((128, 128), x.dtype, None)
        return product(x.reshape(-1, x.shape[-1]), codes, scale).view(*x.shape[:-1], codes.shape[0])

    def of_experts(x: Any, codes: Any, scale: Any, expert_ids: Any) -> Any:
        out = torch.full((x.shape[0], codes.shape[1]), float("nan"), dtype=x.dtype)
        for expert in range(codes.shape[0]):
            (rows,) = torch.where(expert_ids == expert)
            out[rows] = product(x[rows], codes[expert], scale[expert]) if len(rows) else out[rows]
        return out

    def batched(x: Any, codes: Any, scale: Any, *, block_size: Any, expert_ids: Any) -> Any:
        assert tuple(block_size) == (128, 128)
        return of_experts(x, codes, scale, expert_ids)

    def of_groups(x: Any, codes: Any, scale: Any, *, offsets: Any, tokens_per_expert: Any, block_size: Any) -> Any:
        assert tuple(block_size) == (128, 128)
        assert torch.equal(offsets, tokens_per_expert.cumsum(0).int())
        return of_experts(x, codes, scale, torch.searchsorted(offsets, torch.arange(len(x)), right=True))

    return fp8.FineGrainedFP8(matmul, batched, of_groups)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the hub, and a class of experts that is left as it was: transformers decorates the class itself."""
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", hub())
    for name in ("__init__", "forward"):
        monkeypatch.setattr(fp8.FP8Experts, name, vars(fp8.FP8Experts)[name])


def filled(module: Any, name: str, weight: torch.Tensor) -> None:
    """Quantise a weight into a module by transformers' own code."""
    quantizer = type("Quantizer", (), {"quantization_config": FineGrainedFP8Config()})
    for key, value in fp8.Fp8Quantize(quantizer()).convert({name: weight}).items():
        module._parameters[key] = torch.nn.Parameter(value)  # as the module makes them, which want gradients


def experts(implementation: str = "grouped_mm", **changes: Any) -> Any:
    """One module of experts with random weights, in eval mode."""
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2)
    config._experts_implementation = implementation
    cls: Any = use_experts_implementation(experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    for name, value in changes.items():
        setattr(config, name, value)
    scheme = changes.get("activation_scheme", "dynamic")
    module = cls(config=config, block_size=(128, 128), activation_scheme=scheme)
    generator = torch.Generator().manual_seed(0)
    for name, columns in (("gate_up_proj", HIDDEN), ("down_proj", INNER)):
        rows = 2 * INNER if name == "gate_up_proj" else HIDDEN
        filled(module, name, torch.randn(EXPERTS, rows, columns, generator=generator) * 0.2)
    return module.eval()


def quantised_model(build: Any, name: str, only_experts: bool) -> Any:
    """A tiny FP8 model: random weights, quantised as transformers does it."""
    model = build(name, torch.bfloat16, **SIZES, **({} if only_experts else {"head_dim": 64}))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    kept = [*(get_keys_to_not_convert(model) or []), *(["proj"] if only_experts else [])]
    fp8.replace_with_fp8_linear(model, kept, FineGrainedFP8Config())
    for path, module in model.named_modules():
        if isinstance(module, fp8.FP8Experts):
            for key in ("gate_up_proj", "down_proj"):
                filled(module, key, weights[f"{path}.{key}"])
        elif isinstance(module, fp8.FP8Linear):
            filled(module, "weight", weights[f"{path}.weight"])
    return model.eval()


def routed(tokens: int = 7, choices: int = 2, only: int | None = None, below: int = EXPERTS) -> Any:
    """Hidden states, ids and weights; with ``only``, every token chooses that expert every time."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, below, generator=generator).argsort(-1)[:, :choices].contiguous()
    weights = torch.rand(tokens, choices, generator=generator)
    states = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    return states, ids if only is None else torch.full_like(ids, only), weights.to(torch.bfloat16)


def call(module: Any, given: Any = None) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = module(*(given or routed()))
    return out


def reason(module: torch.nn.Module, catalog: Catalog) -> str:
    """Why a module stays stock."""
    sites = patch(torch.nn.ModuleList([module]), catalog=catalog, dry_run=True).report().sites
    (site,) = (site for site in sites if site.kind == "experts")
    return site.reason


def bypassed(module: Any, catalog: Catalog, act: Callable[[Any], torch.Tensor]) -> set[str]:
    """What a call of a patched module is left to stock for; it gives the bits of stock."""
    stock = act(module)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert torch.equal(act(module), stock)
    (site,) = handle.report().sites
    assert handle.report().kernel_calls == 0
    return set(site.bypassed)


# -- in models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 2), ("deepseek_v3", 1)])
def test_greedy_tokens_equal_stock_for_every_implementation(
    name: str, layers: int, implementation: str, shop: Any, build: Any, left_padded: Any
) -> None:
    model = quantised_model(build, name, only_experts=name != "qwen3_moe")
    catalog = shop.offer(rounding="reference", ops=(NAME,))
    model.set_experts_implementation(implementation)
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    inputs = left_padded((9, 4))
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=catalog, ops=[NAME]) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    (site,) = [site for site in handle.report().sites if site.kind == "experts"]
    assert site.counts is not None
    assert site.counts.kernel_calls == 3 * layers
    assert site.own_code == {implementation: 3 * layers}
    assert not any(type(module).__dict__.get("_tilegym_db_replaces") for module in model.modules())


def test_a_model_is_proved_on_its_own_calls(shop: Any, build: Any, prompt: Any) -> None:
    model, catalog = quantised_model(build, "qwen3_moe", only_experts=True), shop.offer(ops=(NAME,))
    with patched(model, catalog=catalog, ops=[NAME], verify=True, inputs=prompt(1, 5)) as handle:
        pass
    (site,) = [site for site in handle.report().sites if site.kind == "experts"]
    assert site.proofs
    assert all(proof.holds for proof in site.proofs)


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "given",
    [
        routed(1),
        routed(),
        routed(64),
        routed(only=EXPERTS - 1),
        routed(1, only=0),
        routed(5, choices=1),
        routed(below=3),
    ],
    ids=["one token", "few", "many", "all to one expert", "one to one", "one choice", "an expert without tokens"],
)
def test_a_call_gives_the_bits_of_stock(given: Any, implementation: str, shop: Any) -> None:
    module, catalog = experts(implementation), shop.offer(rounding="reference", ops=(NAME,))
    stock = call(module, given)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert torch.equal(call(module, given), stock)
    assert handle.report().hits() == {NAME: 1}


def test_weights_of_a_router_in_float32_are_served(shop: Any) -> None:
    (states, ids, weights), module = routed(), experts()
    given, catalog = (states, ids, weights.float() / 3), shop.offer(rounding="reference", ops=(NAME,))
    stock = call(module, given)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert torch.equal(call(module, given), stock)
    assert handle.report().hits() == {NAME: 1}


def test_codes_requiring_grad_are_served_with_grad_enabled(kernels: Catalog) -> None:
    module = experts()
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert not module(*routed()).requires_grad
    assert handle.report().hits() == {NAME: 1}


def test_nothing_is_left_behind(kernels: Catalog) -> None:
    module = experts()
    before, functions = dict(vars(module)), dict(fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    with patched(torch.nn.ModuleList([module]), catalog=kernels):
        call(module)
        assert vars(module) == before
    assert type(module) is fp8.FP8Experts
    assert vars(module) == before
    assert dict(fp8.ALL_FP8_EXPERTS_FUNCTIONS) == functions


def test_compiled_code_has_the_operator(shop: Any) -> None:
    module, catalog = experts(), shop.offer(rounding="reference", ops=(NAME,))
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert torch.equal(call(torch.compile(module, backend="aot_eager", fullgraph=True)), stock)
    torch.compiler.reset()
    assert handle.report().hits() == {NAME: 1}


def test_empty_grad_training_and_autocast_calls_run_stock(poison: Catalog) -> None:
    def with_grad(module: Any) -> torch.Tensor:
        states, ids, weights = routed()
        out: torch.Tensor = module(states.requires_grad_(), ids, weights)
        return out.detach()

    def in_autocast(module: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(module)

    assert bypassed(experts("eager"), poison, with_grad) == {NEEDS_GRAD}
    assert bypassed(experts().train(), poison, call) == {IN_TRAINING}
    assert bypassed(experts("eager"), poison, in_autocast) == {AUTOCAST}
    assert call(experts("eager"), routed(0)).shape == (0, HIDDEN)


# -- modules that are left alone --------------------------------------------------------------------------------------


OTHER_CODE: dict[str, Callable[..., torch.Tensor]] = {
    "activations not cast": lambda x, codes, scale: torch.nn.functional.linear(
        x.float(), codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).to(x.dtype),
    "one scale for all": lambda x, codes, scale: blockwise(x, codes, torch.full_like(scale, scale[0, 0].item())),
    "one scale for a row of blocks": lambda x, codes, scale: blockwise(x, codes, scale[:, :1].expand_as(scale)),
    "the scales of the first rows": lambda x, codes, scale: blockwise(x, codes, scale[:1].expand_as(scale)),
}


@pytest.mark.parametrize("name", OTHER_CODE)
def test_code_that_computes_something_else_is_left_alone(
    name: str, kernels: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", hub(OTHER_CODE[name]))
    assert reason(experts(), kernels) == OTHER_BITS


@pytest.mark.parametrize("changes", [{"swiglu_limit": 7.0}, {"hidden_act": "gelu"}, {"hidden_act": "relu"}])
def test_another_activation_is_no_definition(changes: dict[str, Any], kernels: Catalog) -> None:
    assert reason(experts(**changes), kernels) == OTHER_BITS


def test_machine_unable_to_run_stock_code_serves_nothing(kernels: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setattr(fp8, "is_kernels_available", lambda: False)
    assert reason(experts(), kernels).startswith(
        "its eager experts cannot be probed: ImportError: finegrained-fp8 kernel unavailable"
    )


def test_experts_that_no_definition_describes_say_why(kernels: Catalog) -> None:
    packed, sharded = experts(), experts()
    packed.down_proj_scale_inv.data = packed.down_proj_scale_inv.data.to(torch.float8_e8m0fnu)
    assert (
        reason(packed, kernels) == f"its down_proj_scale_inv is a Tensor of torch.float8_e8m0fnu; {NAME} takes float32"
    )
    sharded._is_expert_parallel = True
    assert reason(sharded, kernels) == SHARDED
    assert reason(experts(activation_scheme="static"), kernels).startswith("its eager experts cannot be probed")


def test_an_implementation_of_a_library_is_left_alone(poison: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fp8.FP8ExpertsInterface._global_mapping, "deepgemm", fp8.fp8_batched_mm_experts_forward)
    (told,) = bypassed(experts("deepgemm"), poison, call)
    assert told == (
        "the model's experts are 'deepgemm'; only eager, batched_mm, grouped_mm are known to compute a definition"
    )
