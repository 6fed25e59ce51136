"""``patch(model, quantise="fp8")``: linear layers become codes, each is proved, and unpatching gives the model back."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from triton.runtime.errors import OutOfResources

from tilegym_db import Catalog, patch, patched
from tilegym_db.errors import UsageError
from tilegym_db.models import quantise
from tilegym_db.models.call_site import subclass
from tilegym_db.models.capture import PROMPT_TOKENS
from tilegym_db.models.handle import NEVER_MATCHED, PATIENCE
from tilegym_db.models.proof import LARGEST_ERROR, NOT_CALLED, LayerInput, prove_layer
from tilegym_db.models.quantise import (
    READ,
    TELLS_DTYPE,
    BlockwiseLinear,
    Quantisation,
    blockwise_product,
    choose,
    dequantised,
    quantised,
    why_no_products,
)
from tilegym_db.paths import shipped_root

pytestmark = pytest.mark.sweep

CAST, PRODUCT = "per_token_cast", "gemm_fp8_blockwise"
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
LAYERS = 14
"""Seven linear layers in each of two decoder layers."""
REFERENCE = "fp8-reference"


@pytest.fixture
def model(build: Any) -> Any:
    return build("qwen3", torch.bfloat16, **SIZES)


@pytest.fixture
def catalog(shop: Any) -> Catalog:
    """Kernels of the two operators alone, which compute what their Definitions say."""
    made: Catalog = shop.offer(rounding="reference", ops=(CAST, PRODUCT))
    return made


def linears(model: Any) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


class Bits:
    """What a model is: its parameters themselves, their bits, names in order and classes, and its logits."""

    def __init__(self, model: Any, run: Callable[[], torch.Tensor]) -> None:
        self.parameters = dict(model.named_parameters())
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.classes = [type(module) for module in model.modules()]
        self.attributes = [set(vars(module)) for module in model.modules()]
        self.logits = run()

    def check(self, model: Any, run: Callable[[], torch.Tensor]) -> None:
        found = dict(model.named_parameters())
        assert list(found) == list(self.parameters)
        assert all(found[name] is value for name, value in self.parameters.items())
        assert list(model.state_dict()) == list(self.state)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in self.state.items())
        assert [type(module) for module in model.modules()] == self.classes
        assert [set(vars(module)) for module in model.modules()] == self.attributes
        assert torch.equal(run(), self.logits)


# -- a model ----------------------------------------------------------------------------------------------------------


def test_model_is_quantised_with_proofs_and_restored(model: Any, catalog: Catalog, logits: Any, prompt: Any) -> None:
    ids = prompt(2)
    before, weight = Bits(model, lambda: logits(model, ids)), model.model.layers[1].mlp.up_proj.weight
    handle = patch(model, quantise=REFERENCE, catalog=catalog)
    report = handle.report()
    assert report.kernel_calls == 0  # the proofs count nothing
    served = logits(model, ids)
    assert handle.report().hits() == {CAST: LAYERS, PRODUCT: LAYERS}
    assert 0.01 < relative(served, before.logits) < 0.5

    shown = report.quantised
    assert shown is not None
    assert len(shown.layers) == len(shown.quantised) == LAYERS
    assert all(0.01 < proof.fp8_error < 0.06 for proof in shown.layers if proof.fp8_error is not None)
    assert all(0 < proof.bf16_error < 0.004 for proof in shown.layers if proof.bf16_error is not None)
    assert shown.skipped == {"lm_head": "transformers' FP8 quantiser skips it by default"}
    assert shown.logits.reason == ""
    assert shown.logits.bf16_error is not None
    assert shown.logits.fp8_error is not None
    assert 0 < shown.logits.bf16_error < shown.logits.fp8_error < 0.5
    halved = sum(module.weight.numel() for name, module in linears(model).items() if name != "lm_head")
    assert shown.bytes_held == 2 * halved
    assert shown.bytes_before - shown.bytes_after == halved - 4 * halved // 128**2
    assert "quantise='fp8-reference' changes this model's numbers: 14 linear layers" in str(report)
    assert weight.dtype == torch.bfloat16
    handle.unpatch()
    handle.unpatch()
    before.check(model, lambda: logits(model, ids))
    assert handle.report().quantised is shown


def test_the_proof_of_a_layer_is_what_the_layer_does(model: Any, catalog: Catalog, prompt: Any) -> None:
    given: list[torch.Tensor] = []
    name = "model.layers.0.self_attn.q_proj"
    hook = linears(model)[name].register_forward_pre_hook(lambda _, args: given.append(args[0][0].clone()))
    own = copy.deepcopy(linears(model)[name].weight)
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs=prompt(1, 7)) as handle:
        pass
    hook.remove()
    (proof,) = [proof for proof in handle.report().quantised.layers if proof.name == name]  # type: ignore[union-attr]
    exact = given[0].double() @ own.double().T
    assert proof.tokens == 7
    assert proof.fp8_error == pytest.approx(relative(blockwise_product(given[0], *quantised(own)), exact), rel=0.01)
    assert proof.bf16_error == pytest.approx(relative(given[0] @ own.T, exact), rel=1e-6)


def test_a_twin_that_shares_the_weights_is_not_touched(model: Any, catalog: Catalog, logits: Any, prompt: Any) -> None:
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    before = Bits(model, lambda: logits(model, prompt()))
    with patched(twin, quantise=REFERENCE, catalog=catalog):
        before.check(model, lambda: logits(model, prompt()))
        assert not torch.equal(logits(twin, prompt()), before.logits)
    before.check(twin, lambda: logits(twin, prompt()))


def test_weights_with_no_other_owner_are_freed_and_made_anew(model: Any, catalog: Catalog) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(False).note = "an attribute"
    own, weight = layer.weight.detach().clone(), weakref.ref(layer.weight)
    with patched(model, quantise=REFERENCE, catalog=catalog):
        assert weight() is None
    assert torch.equal(layer.weight, own)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert (layer.weight.requires_grad, layer.weight.note) == (False, "an attribute")


def test_after_an_exception_the_model_is_itself_again(model: Any, catalog: Catalog, logits: Any, prompt: Any) -> None:
    before = Bits(model, lambda: logits(model, prompt()))
    with pytest.raises(KeyboardInterrupt), patched(model, quantise=REFERENCE, catalog=catalog):
        raise KeyboardInterrupt
    before.check(model, lambda: logits(model, prompt()))


def test_an_interrupt_while_converting_is_undone(
    model: Any, catalog: Catalog, logits: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls = Bits(model, lambda: logits(model, prompt())), []

    def interrupted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(weight)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return quantised(weight)

    monkeypatch.setattr(quantise, "quantised", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(model, quantise=REFERENCE, catalog=catalog)
    before.check(model, lambda: logits(model, prompt()))


def test_it_generates_and_proves_its_kernels(model: Any, catalog: Catalog, prompt: Any) -> None:
    options = {"max_new_tokens": 3, "do_sample": False}
    with patched(model, quantise=REFERENCE, catalog=catalog, verify=True, inputs=prompt(1, 5)) as handle:
        assert model.generate(prompt(2), **options).shape == (2, 12)
    report = handle.report()
    assert {name: hits for name, hits in report.hits().items() if hits} == {CAST: 3 * LAYERS, PRODUCT: 3 * LAYERS}
    proofs = [proof for site in report.sites if site.definition in (CAST, PRODUCT) for proof in site.proofs]
    assert proofs
    assert [proof for proof in proofs if not proof.holds] == []


# -- what is left as it is --------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Linear layers of every kind; ``forward`` calls those that are to be quantised but for one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused = (torch.nn.Linear(256, 256, bias=False) for _ in range(3))
        self.gate, self.odd = torch.nn.Linear(256, 128), torch.nn.Linear(256, 100)
        self.experts = torch.nn.Module()
        self.experts.down = torch.nn.Parameter(torch.zeros(2, 128, 128))
        self.one, self.same = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
        self.same.weight = self.one.weight
        self.to(torch.bfloat16).eval()
        self.wide = torch.nn.Linear(128, 128)
        self.bad = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
        self.bad.weight.data[3, 3] = float("inf")
        self.trained = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
        self.trained.weight.grad = torch.zeros_like(self.trained.weight)
        self.hooked = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
        self.hooked.forward = self.hooked.forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_other_layers_say_why_they_are_not_quantised() -> None:
    chosen, skipped = choose(Layers())
    assert list(chosen) == ["first", "last", "unused"]
    assert skipped == {
        "gate": "it is a router",
        "odd": "its weight is 100 x 256, which are not both multiples of 128",
        "experts": "its weights are no matrices, like those of experts and convolutions",
        "one": "another module has the same weight",
        "same": "another module has the same weight",
        "wide": "its weight is float32, not bfloat16",
        "trained": "its weight has a gradient; set it to None first",
        "hooked": "its forward was replaced on the instance, as hooks of accelerate do",
        "bad": "its weight has values that are not finite",
    }


def test_layer_inexact_or_not_called_keeps_its_weight(catalog: Catalog) -> None:
    """One value of each block is so large that the codes of all others are zero, and the run multiplies it with zero."""
    model, x = Layers(), tokens()
    weight, columns = model.first.weight, torch.arange(256) % 128 == 0
    weight.data[:, columns] = 1e6
    x[:, columns] = 0
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs={"x": x}) as handle:
        assert model.first.weight is weight
        assert [name for name, module in linears(model).items() if isinstance(module, BlockwiseLinear)] == ["last"]
    shown = handle.report().quantised
    assert shown is not None
    assert shown.quantised == ("last",)
    reasons = {proof.name: proof.reason for proof in shown.layers}
    assert reasons == {"first": reasons["first"], "last": "", "unused": NOT_CALLED}
    assert f"; at most {LARGEST_ERROR:g} is allowed" in reasons["first"]


class Reading(Layers):
    """Return code that reads the weight of ``first`` in one way and also calls it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "a hook":
            self.first.register_forward_hook(lambda module, args, out: out + module.weight.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "a dtype":
            x = (1000 * x).to(self.first.weight.dtype)
        elif self.way == "a product":
            x = x @ self.first.weight.to(x.dtype)
        elif self.way == "the first parameter":
            x = x.to(next(self.parameters()).dtype)
        elif self.way == "its dictionary":
            x = x + self.first._parameters["weight"].sum().to(x.dtype)
        return super().forward(x)


@pytest.mark.parametrize("way", ["a dtype", "a product", "the first parameter", "its dictionary", "a hook"])
def test_layer_whose_weight_other_code_reads_keeps_it(way: str, catalog: Catalog) -> None:
    model = Reading(way)
    weight, attributes, hooks = model.first.weight, set(vars(model.first)), len(model.first._forward_hooks)
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs={"x": tokens()}) as handle:
        shown = handle.report().quantised
        assert model.first.weight is weight
        assert type(model.first._parameters) is dict
        assert (set(vars(model.first)), len(model.first._forward_hooks)) == (attributes, hooks)
    assert shown is not None
    assert shown.quantised == ("last",)
    assert shown.skipped["first"] == READ


def test_first_parameter_of_a_model_keeps_its_dtype() -> None:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = Siglip2VisionModel(Siglip2VisionConfig(**sizes, patch_size=16, num_patches=16)).to(torch.bfloat16)
    chosen, skipped = choose(torch.nn.Sequential(model.eval()))
    (name,) = [name for name in skipped if name.endswith("patch_embedding")]
    assert skipped[name] == TELLS_DTYPE
    quantisation = Quantisation(chosen)
    quantisation.convert()
    assert model.dtype == torch.bfloat16


class Cancelling(Layers):
    """What is left of a layer's output once almost the same is taken away."""

    def forward(self, x: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.last(x)
        return out if known is None else out - known


def test_inexact_logits_are_refused_and_the_model_stays(catalog: Catalog) -> None:
    model, x = Cancelling(), tokens()
    with torch.no_grad():
        inputs = {"x": x, "known": 0.99 * model(x)}
    before = Bits(model, lambda: model(**inputs))
    with raises(UsageError, "quantise_too_inexact", REFERENCE):
        patch(model, quantise=REFERENCE, catalog=catalog, inputs=inputs)
    before.check(model, lambda: model(**inputs))


class Pooling(Layers):
    """``last`` gets the first two rows alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x)[:2])
        return out


def test_unserved_layer_keeps_its_weight_in_mode_fp8(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "why_no_products", lambda device, capability: "")
    model, catalog = Pooling(), shop.offer(rounding="reference", ops=(CAST, PRODUCT), smallest=4)
    found = {}
    for way in quantise.WAYS:
        with patched(model, quantise=way, catalog=catalog, inputs={"x": tokens()}) as handle:
            found[way] = handle.report().quantised.quantised  # type: ignore[union-attr]
    assert found == {"fp8": ("first",), REFERENCE: ("first", "last")}
    with raises(UsageError, "quantise_leaves_nothing", "M=3", "tilegym-db fit"):
        patch(model, quantise="fp8", catalog=catalog, inputs={"x": tokens(3)})
    assert type(model.first) is torch.nn.Linear


def test_a_layer_is_proved_with_as_many_rows_as_its_calls_have(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "why_no_products", lambda device, capability: "")
    model, rows = Layers(), PROMPT_TOKENS + 72
    catalog = shop.offer(rounding="reference", ops=(CAST, PRODUCT), smallest=rows)  # fewer are served by nothing
    with patched(model, quantise="fp8", catalog=catalog, inputs={"x": tokens(rows)}) as handle:
        report = handle.report().quantised
    assert report is not None
    assert report.quantised == ("first", "last")
    proof = report.layers[0]
    assert proof.tokens == PROMPT_TOKENS
    assert proof.fp8_error is not None
    assert proof.fp8_error < LARGEST_ERROR


def test_wrong_row_in_any_repetition_is_an_error() -> None:
    weight, x = torch.randn(64, 32), torch.randn(4, 32)

    class LastRowsWrong(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out = super().forward(rows)
            out[8:] = 0
            return out

    layer = LastRowsWrong(32, 64, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    assert prove_layer("a", layer, weight, LayerInput(x, 8)).reason == ""
    assert "its relative error is" in prove_layer("a", layer, weight, LayerInput(x, 9)).reason


def test_unserved_calls_count_for_both_operators(shop: Any) -> None:
    model, catalog = Layers(), shop.offer(rounding="reference", ops=(CAST, PRODUCT), smallest=64)
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs={"x": tokens()}) as handle, torch.no_grad():
        for _ in range(PATIENCE + 1):
            model(tokens())
        reasons = {site.definition: site.reason for site in handle.report().sites if site.definition in (CAST, PRODUCT)}
    assert reasons == dict.fromkeys((CAST, PRODUCT), NEVER_MATCHED.format(2 * PATIENCE))


def test_what_a_model_is_given_stays_as_it_is(model: Any, catalog: Catalog, prompt: Any) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=prompt(1, 5), past_key_values=cache)
    before = copy.deepcopy(cache)
    given = {"input_ids": prompt(1, 4), "past_key_values": cache, "use_cache": True}
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs=given) as handle:
        pass
    assert cache.get_seq_length() == 5
    assert all(torch.equal(one.keys, own.keys) for one, own in zip(cache.layers, before.layers, strict=True))
    assert handle.report().quantised.logits.reason == ""  # type: ignore[union-attr]


def test_model_without_logits_is_compared_by_its_first_output(model: Any, catalog: Catalog) -> None:
    with patched(model.model, quantise=REFERENCE, catalog=catalog) as handle:
        assert handle.report().quantised.logits.tokens == 128  # type: ignore[union-attr]


class Narrow(Layers):
    """Raises in fp64, as a kernel may that a model's code calls."""

    error: Exception

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize(
    "error", [AttributeError("none"), KeyError("fp64"), OSError("no file"), OutOfResources(2, 1, "n")]
)
def test_a_model_that_does_not_run_in_fp64_says_so(error: Exception, catalog: Catalog) -> None:
    model = Narrow()
    model.error = error
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs={"x": tokens()}) as handle:
        reason = handle.report().quantised.logits.reason  # type: ignore[union-attr]
    assert reason.startswith(f"it does not run in fp64: {type(error).__name__}")


def test_routers_and_experts_of_a_mixture_stay(build: Any, catalog: Catalog, prompt: Any) -> None:
    model = build("qwen2_moe", torch.bfloat16, **SIZES, shared_expert_intermediate_size=256, num_hidden_layers=1)
    with patched(model, quantise=REFERENCE, catalog=catalog, inputs=prompt(1, 5)) as handle:
        shown = handle.report().quantised
    assert shown is not None
    block = "model.layers.0.mlp"
    assert {name for name in shown.quantised if name.startswith(block)} == {
        f"{block}.shared_expert.{name}_proj" for name in ("gate", "up", "down")
    }
    assert shown.skipped[f"{block}.experts"] == "its weights are no matrices, like those of experts and convolutions"
    assert shown.skipped[f"{block}.shared_expert_gate"] == "it is a router"
    assert shown.logits.reason == ""


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "capability", "reason"),
    [
        ("cpu", None, "the model is on cpu, which has no FP8 products"),
        ("xpu", None, "the model is on xpu, which has no FP8 products"),
        ("cuda", (8, 0), "compute capability 8.0, and FP8 products need 8.9"),
        ("cuda", (8, 6), "compute capability 8.6"),
        ("cuda", (8, 9), ""),
        ("cuda", (9, 0), ""),
        ("cuda", (10, 0), ""),
    ],
)
def test_a_device_has_products_of_codes_or_says_that_it_has_none(
    device: str, capability: tuple[int, int] | None, reason: str
) -> None:
    found = why_no_products(device, capability)
    assert reason in found
    assert bool(found) == bool(reason)


class Wordy(Layers):
    """Returns text before numbers."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"text": "first", "numbers": super().forward(x)}


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], str, str]] = {
    "on a cpu": (Layers, {"quantise": "fp8"}, "fp8_unsupported", "cpu"),
    "not in memory": (lambda: Layers().to("meta"), {"quantise": REFERENCE}, "weights_absent", REFERENCE),
    "another way": (
        Layers,
        {"quantise": "int8"},
        "quantise_unknown",
        "'fp8', 'fp8-reference'",
    ),
    "in training": (lambda: Layers().train(), {"quantise": REFERENCE}, "model_in_training", "model.eval()"),
    "a dry run": (Layers, {"quantise": REFERENCE, "dry_run": True}, "options_clash", "dry_run or quantise"),
    "in float32": (lambda: Layers().float(), {"quantise": REFERENCE}, "nothing_to_quantise", "float32"),
    "no logits": (
        Wordy,
        {"quantise": REFERENCE, "inputs": {"x": tokens()}},
        "logits_absent",
        "Wordy",
    ),
    "not to be copied": (
        Layers,
        {"quantise": REFERENCE, "inputs": {"x": tokens().float().requires_grad_() * 2}},
        "inputs_not_copyable",
        "inputs['x']",
    ),
    "nothing to run": (Layers, {"quantise": REFERENCE}, "vocabulary_unknown", "inputs="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantised_is_refused(name: str, catalog: Catalog) -> None:
    make, options, code, fact = REFUSED[name]
    model = make()
    with raises(UsageError, code, fact):
        patch(model, catalog=catalog, **options)
    assert not any(isinstance(module, BlockwiseLinear) for module in model.modules())


def test_quantise_without_a_published_kernel_is_refused(
    logits: Any, model: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "why_no_products", lambda device, capability: "")
    before = Bits(model, lambda: logits(model, prompt()))
    with raises(UsageError, "quantise_unserved", "cpu", "tilegym-db fit"):
        patch(model, quantise="fp8", catalog=Catalog((shipped_root(),)))
    before.check(model, lambda: logits(model, prompt()))


def test_nothing_is_quantised_unless_it_is_asked_for(model: Any, kernels: Catalog) -> None:
    with patched(model, catalog=kernels) as handle:
        assert not any(isinstance(module, BlockwiseLinear) for module in model.modules())
    assert handle.report().quantised is None
    assert "quantised" not in handle.report().to_dict()


# -- one layer --------------------------------------------------------------------------------------------------------


def quantised_layer(*, bias: bool = False) -> tuple[Any, Quantisation]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 128, bias=bias, dtype=torch.bfloat16).eval()
    quantisation = Quantisation({"layer": layer})
    quantisation.convert()
    return layer, quantisation


def test_codes_are_as_near_as_codes_can_be() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[:128, :128] = 0
    codes, scale = quantised(weight)
    back = dequantised(codes, scale)
    assert torch.equal(back[:128, :128], torch.zeros(128, 128))
    assert float(codes.float().abs().max()) == 448
    step = 2.0 ** (codes.float().abs().clamp(min=2.0**-6).log2().floor() - 3) * scale.repeat_interleave(
        128, 0
    ).repeat_interleave(128, 1)
    assert bool(((back - weight.float()).abs() <= step / 2 * (1 + 1e-5)).all())


def test_pytorch_operations_compute_what_the_definitions_say() -> None:
    layer, _ = quantised_layer()
    shipped, steps = Catalog((shipped_root(),)), {}
    for name in (CAST, PRODUCT):
        exec(shipped.definition(name).reference, steps.setdefault(name, {}))
    codes, scale = steps[CAST]["run"](tokens(50), False)
    expected = steps[PRODUCT]["run"](codes, layer.weight, scale, layer.weight_scale_inv)
    with torch.no_grad():
        found = layer(tokens(50))
    assert relative(found, expected) < 1e-3
    assert float((found == expected).double().mean()) > 0.99  # sums in another order, rounded to bfloat16


def test_a_gradient_reaches_the_activation_and_the_bias() -> None:
    layer, quantisation = quantised_layer(bias=True)
    x = tokens(3).requires_grad_()
    layer(x).float().sum().backward()
    expected = dequantised(layer.weight, layer.weight_scale_inv).sum(dim=0).expand(3, 256)
    torch.testing.assert_close(x.grad.float(), expected, rtol=1e-2, atol=1e-2)  # type: ignore[union-attr]
    assert torch.equal(layer.bias.grad.float(), torch.full((128,), 3.0))
    quantisation.undo()
    assert type(layer) is torch.nn.Linear


def test_autocast_does_not_round_in_between() -> None:
    layer, _ = quantised_layer()
    with torch.no_grad():
        expected = layer(tokens())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(tokens()), expected)


SPREAD: dict[str, Callable[[Any], Any]] = {
    "saved": lambda model: model.state_dict(),
    "loaded into": lambda model: model.load_state_dict({"layer.weight": torch.zeros(128, 256)}, strict=False),
    "pickled": pickle.dumps,
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("way", SPREAD)
@pytest.mark.parametrize("is_patched", [False, True])
def test_codes_get_into_no_checkpoint_and_no_copy(way: str, is_patched: bool) -> None:
    layer, quantisation = quantised_layer()
    if is_patched:
        layer.__class__ = subclass(BlockwiseLinear, BlockwiseLinear.forward)
    with raises(UsageError, "quantised_held", way, "unpatch()"):
        SPREAD[way](torch.nn.ModuleDict({"layer": layer}))
    layer.__class__ = BlockwiseLinear
    quantisation.undo()
    SPREAD[way](torch.nn.ModuleDict({"layer": layer}))


def test_a_quantised_model_is_not_saved(model: Any, catalog: Catalog, tmp_path: Path) -> None:
    with patched(model, quantise=REFERENCE, catalog=catalog), raises(UsageError, "quantised_held", "unpatch()"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    model.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))


def test_an_activation_of_one_byte_is_refused() -> None:
    layer, _ = quantised_layer()
    with raises(UsageError, "quantised_input_dtype", "torch.float8_e4m3fn", "unpatch()"):
        layer(tokens().to(layer.weight.dtype))


def test_cast_codes_are_refused_and_the_weight_is_restored() -> None:
    torch.manual_seed(0)
    own = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16).weight
    layer, quantisation = quantised_layer()
    layer.to(torch.float32)
    with raises(UsageError, "quantised_cast", "torch.float32", "unpatch()"):
        layer(tokens())
    quantisation.undo()
    assert torch.equal(layer.weight, own)


def test_parameter_moved_or_cast_since_is_recreated() -> None:
    layer, quantisation = quantised_layer()
    quantisation.undo()
    own, values = layer.weight, layer.weight.detach().clone()
    quantisation.convert()
    own.data = own.data.float()  # as a twin does that is cast
    quantisation.undo()
    assert layer.weight is not own
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, values)
    own = layer.weight
    quantisation.convert()
    layer.to("meta")
    quantisation.undo()
    assert (own.device.type, layer.weight.device.type) == ("cpu", "meta")


def test_a_layer_that_got_another_class_is_named() -> None:
    layer, quantisation = quantised_layer()
    layer.__class__ = type("Wrapped", (BlockwiseLinear,), {})
    with raises(UsageError, "modules_wrapped", "layer", "unpatch()"):
        quantisation.undo()
    layer.__class__ = BlockwiseLinear
    quantisation.undo()
    assert type(layer) is torch.nn.Linear
