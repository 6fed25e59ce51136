"""FP8 models of transformers: linear layers of codes are served by a cast and a product, and only where they compute these.

transformers runs such layers with kernels of a hub on a GPU and has no code for a CPU; a stand-in for the hub's function, in
PyTorch, takes their place here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from huggingface_hub.errors import CorruptedCacheException, HTTPError
from shipped_records import CATALOG as SHIPPED
from transformers.integrations import finegrained_fp8 as fp8
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.utils.quantization_config import FineGrainedFP8Config

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD, NOT_ROWS
from tilegym_db.models.parts.fp8_linear import OTHER_DTYPE, STATIC

pytestmark = pytest.mark.sweep

CAST, PRODUCT, FUSED = "per_token_cast", "gemm_fp8_blockwise", "gemm_fp8_blockwise_dynamic"
OTHER_BITS = "the results of its probe are not the bits of {}"
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
LAYERS = 14
"""Seven linear layers in each of two decoder layers."""


def reference(name: str) -> Callable[..., Any]:
    """The reference of a Definition."""
    namespace: dict[str, Any] = {}
    exec(SHIPPED.definition(name).reference, namespace)
    run: Callable[..., Any] = namespace["run"]
    return run


def blockwise(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, round_scale: bool = False) -> torch.Tensor:
    """The exact formula: both references, one after the other."""
    of_x, scale_of_x = reference(CAST)(x.reshape(-1, x.shape[-1]), round_scale)
    out: torch.Tensor = reference(PRODUCT)(of_x, codes, scale_of_x, scale)
    return out.view(*x.shape[:-1], codes.shape[0]).to(x.dtype)


def hub(product: Callable[..., torch.Tensor]) -> Any:
    """What transformers finds where it looks for the kernels of the hub."""

    def matmul(x: Any, codes: Any, scale: Any, block_size: Any, dtype: Any, activation_scale: Any = None) -> Any:
        assert (tuple(block_size), dtype, activation_scale) == ((128, 128), x.dtype, None)
        return product(x, codes, scale)

    return fp8.FineGrainedFP8(matmul, None, None)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", hub(blockwise))


def filled(layer: Any, weight: torch.Tensor) -> None:
    """Quantise a weight into a layer by transformers' own code."""
    quantizer = type("Quantizer", (), {"quantization_config": FineGrainedFP8Config()})
    for name, value in fp8.Fp8Quantize(quantizer()).convert({"weight": weight}).items():
        layer._parameters[name] = torch.nn.Parameter(
            value
        )  # as the layer makes them, which says that codes want gradients


def layer(rows: int = 384, columns: int = 256, *, bias: bool = False, **changes: Any) -> Any:
    """One layer with random weights, in eval mode."""
    made = fp8.FP8Linear(columns, rows, **{"block_size": (128, 128), "has_bias": bias, **changes})
    generator = torch.Generator().manual_seed(0)
    filled(made, torch.randn(rows, columns, generator=generator))
    if bias:
        made.bias.data = torch.randn(rows, generator=generator).to(torch.bfloat16)
    return made.eval()


def quantised_model(build: Any, name: str = "qwen3") -> Any:
    """A tiny FP8 model: random weights, quantised as transformers does it."""
    model = build(name, torch.bfloat16, **SIZES)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    fp8.replace_with_fp8_linear(model, get_keys_to_not_convert(model), FineGrainedFP8Config())
    for path, module in model.named_modules():
        if isinstance(module, fp8.FP8Linear):
            filled(module, weights[f"{path}.weight"])
            if module.bias is not None:
                module.bias = torch.nn.Parameter(weights[f"{path}.bias"])
    return model.eval()


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def kernels(shop: Any) -> Catalog:
    """The cast and the product, and no kernel that does both."""
    catalog: Catalog = shop.offer(ops=(CAST, PRODUCT))
    return catalog


def sites(module: torch.nn.Module, catalog: Catalog, **options: Any) -> dict[str, str]:
    """Definition -> why the layers of a model stay stock."""
    report = patch(torch.nn.ModuleList([module]), catalog=catalog, **options).report()
    return {site.definition: site.reason for site in report.sites if site.kind == "fp8_linear"}


# -- in models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_stock(name: str, shop: Any, build: Any, left_padded: Any) -> None:
    model, inputs, catalog = quantised_model(build, name), left_padded((9, 4)), shop.offer(rounding="reference")
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=catalog, ops=[PRODUCT]) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    hits = handle.report().hits()
    assert (hits[CAST], hits[PRODUCT]) == (3 * LAYERS, 3 * LAYERS)
    assert not any(type(module).__dict__.get("_tilegym_db_replaces") for module in model.modules())


def test_a_model_is_proved_on_its_own_calls(kernels: Catalog, build: Any, prompt: Any) -> None:
    model = quantised_model(build)
    with patched(model, catalog=kernels, ops=[PRODUCT], verify=True, inputs=prompt(1, 5)) as handle:
        pass
    proofs = {
        site.definition: site.proofs for site in handle.report().sites if site.kind == "fp8_linear" and site.proofs
    }
    assert set(proofs) == {CAST, PRODUCT}
    assert all(proof.holds for proof in (*proofs[CAST], *proofs[PRODUCT]))


def test_a_kernel_that_is_further_off_than_stock_is_left_out(shop: Any, build: Any, prompt: Any) -> None:
    catalog = shop.offer("    out.copy_(stock.run({inputs}) * 1.1)\n", ops=(PRODUCT,))
    catalog = shop.offer(ops=(CAST,))
    with patched(quantised_model(build), catalog=catalog, ops=[PRODUCT], verify=True, inputs=prompt(1, 5)) as handle:
        pass
    assert {proof.kernel.split()[0] for proof in handle.report().failed_proofs if proof.kernel} == {f"{PRODUCT}_cpu"}


def test_a_kernel_whose_codes_are_others_is_left_out(shop: Any, build: Any, prompt: Any) -> None:
    body = "    codes, factors = stock.run({inputs})\n    out.copy_((codes.float() * 1.2).to(out.dtype))\n"
    shop.offer(body + "    scale.copy_(factors)\n", ops=(CAST,))
    catalog = shop.offer(ops=(PRODUCT,))
    with patched(quantised_model(build), catalog=catalog, ops=[PRODUCT], verify=True, inputs=prompt(1, 5)) as handle:
        pass
    reasons = [proof.reason for proof in handle.report().failed_proofs if proof.kernel == f"{CAST}_cpu"]
    assert reasons
    assert all("codes differ" in reason for reason in reasons), reasons


INTERPRETED = """
import json, torch, tilegym_db
from tilegym_db.models.quantise import BlockwiseLinear, blockwise_product, quantised
from tilegym_db.backends.toolchains import repair_interpreter

repair_interpreter()
torch.manual_seed(0)
layer = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16).eval()
codes, scale = quantised(layer.weight)
layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(value, requires_grad=False) for value in (codes, scale))
layer.__class__, x = BlockwiseLinear, torch.randn(3, 256, dtype=torch.bfloat16)
with tilegym_db.patched(torch.nn.ModuleList([layer])) as handle, torch.no_grad():
    found, stock = layer(x).double(), blockwise_product(x, codes, scale).double()
print(json.dumps({"error": float((found - stock).norm() / stock.norm()), "hits": handle.report().hits()}))
"""


# Interpreted; the same calls run on stand-ins daily.
@pytest.mark.turn("tilegym_db/models/parts/fp8_linear.py", "solutions/gemm/")
def test_a_layer_runs_on_the_triton_kernels_themselves(shop: Any) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    shop.offer(rounding="triton", ops=(CAST, PRODUCT))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["hits"] == {CAST: 1, PRODUCT: 1}
    assert answer["error"] < 1e-3


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256), (2, 3, 256), (300, 256)])
def test_a_call_gives_the_bits_of_stock(shape: tuple[int, ...], bias: bool, shop: Any) -> None:
    module, x, catalog = layer(bias=bias), values(*shape), shop.offer(rounding="reference", ops=(CAST, PRODUCT))
    with torch.no_grad():
        stock = module(x)
        with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
            assert torch.equal(module(x), stock)
    assert handle.report().hits() == {CAST: 1, PRODUCT: 1}
    expected = blockwise(x, module.weight, module.weight_scale_inv)
    assert torch.equal(stock, expected + module.bias if bias else expected)


def test_codes_requiring_grad_are_served_with_grad_enabled(kernels: Catalog) -> None:
    module = layer()
    with patched(torch.nn.ModuleList([module]), catalog=kernels) as handle:
        assert not module(values(4, 256)).requires_grad
    assert handle.report().hits() == {CAST: 1, PRODUCT: 1}


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another dtype": (lambda module: module(values(4, 256, dtype=torch.float32)), OTHER_DTYPE),
    "columns": (lambda module: module(values(256, 4).T), NOT_ROWS),
    "no tokens": (lambda module: module(values(2, 0, 256)), NOT_ROWS),
    "training": (lambda module: module.train()(values(4, 256)), IN_TRAINING),
    "a gradient": (lambda module: module(values(4, 256).requires_grad_()), NEEDS_GRAD),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_are_left_to_stock(name: str, poison: Catalog) -> None:
    call, reason = CALLS[name]
    stock = call(layer())
    module = layer()
    with patched(torch.nn.ModuleList([module]), catalog=poison) as handle:
        assert torch.equal(call(module), stock)
    (site,) = [site for site in handle.report().sites if site.definition == PRODUCT]
    assert set(site.bypassed) == {reason}
    assert handle.report().kernel_calls == 0


def test_under_autocast_stock_code_runs(poison: Catalog) -> None:
    module = layer()
    with patched(torch.nn.ModuleList([module]), catalog=poison) as handle, torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(module(values(4, 256))).all()
    assert {reason for site in handle.report().sites for reason in site.bypassed} == {AUTOCAST}


@pytest.mark.parametrize("without", [CAST, PRODUCT])
def test_without_a_kernel_for_both_the_layer_is_left_as_it_is(without: str, shop: Any) -> None:
    module, catalog = layer(), shop.offer(without=(without, FUSED))
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        assert type(module) is fp8.FP8Linear
    reasons = {site.definition: site.reason for site in handle.report().sites}
    assert reasons == {
        name: f"{missing} was not measured on cpu" for name, missing in ((FUSED, FUSED), (PRODUCT, without))
    }


def test_a_product_that_fails_leaves_the_whole_call_to_stock(shop: Any) -> None:
    shop.offer("    raise ValueError('boom')\n", ops=(PRODUCT,))
    module, catalog, x = layer(), shop.offer(ops=(CAST,)), values(4, 256)
    with patched(torch.nn.ModuleList([module]), catalog=catalog), pytest.warns(RuntimeWarning, match="boom"):
        assert torch.equal(module(x), blockwise(x, module.weight, module.weight_scale_inv))


# -- layers that are left alone ---------------------------------------------------------------------------------------


def test_machine_unable_to_run_stock_code_serves_nothing(kernels: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setattr(fp8, "is_kernels_available", lambda: False)
    reasons = sites(layer(), kernels)
    assert set(reasons) == {FUSED, PRODUCT}
    for reason in reasons.values():
        assert reason.startswith("it cannot be probed: ImportError: finegrained-fp8 kernel unavailable")


@pytest.mark.parametrize("error", [PermissionError("no cache"), CorruptedCacheException("bad"), HTTPError("no route")])
def test_hub_that_gives_no_kernel_is_reported(
    error: Exception, kernels: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setattr(fp8, "is_kernels_available", lambda: True)
    monkeypatch.setattr(fp8, "lazy_load_kernel", load)
    told = f"it cannot be probed: {type(error).__name__}: {error}"
    assert sites(layer(), kernels) == dict.fromkeys((FUSED, PRODUCT), told)


def divided_roughly(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As a kernel that divides by 448 with an error of a unit in the last place."""
    of_x, scale_of_x = reference(CAST)(x.reshape(-1, x.shape[-1]), False)
    upwards = (
        scale_of_x.view(torch.int32)
        + torch.tensor([1, -1], dtype=torch.int32).repeat(scale_of_x.shape[1])[: scale_of_x.shape[1]]
    )
    out: torch.Tensor = reference(PRODUCT)(of_x, codes, upwards.view(torch.float32), scale)
    return out.view(*x.shape[:-1], codes.shape[0]).to(x.dtype)


def test_code_dividing_with_last_place_error_is_known(kernels: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", hub(divided_roughly))
    assert sites(layer(), kernels)[PRODUCT] == ""


OTHER_CODE: dict[str, Callable[..., torch.Tensor]] = {
    "scales rounded to powers of two": lambda x, codes, scale: blockwise(x, codes, scale, round_scale=True),
    "activations not cast": lambda x, codes, scale: torch.nn.functional.linear(
        x.float(), codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).to(x.dtype),
    "scales transposed": lambda x, codes, scale: blockwise(x, codes, scale.T.contiguous()),
    "one scale for all": lambda x, codes, scale: blockwise(x, codes, torch.full_like(scale, scale[0, 0].item())),
    "one scale for a row of blocks": lambda x, codes, scale: blockwise(x, codes, scale[:, :1].expand_as(scale)),
}


@pytest.mark.parametrize("name", OTHER_CODE)
def test_code_that_computes_something_else_is_left_alone(
    name: str, kernels: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", hub(OTHER_CODE[name]))
    assert sites(layer(), kernels) == {name: OTHER_BITS.format(name) for name in (FUSED, PRODUCT)}


def test_layers_that_no_definition_describes_say_why(kernels: Catalog) -> None:
    assert sites(layer(activation_scheme="static"), kernels) == {FUSED: STATIC, PRODUCT: STATIC}
    packed = layer()
    packed.weight_scale_inv.data = packed.weight_scale_inv.data.to(torch.float8_e8m0fnu)
    told = "its weight_scale_inv is a Tensor of torch.float8_e8m0fnu; {} takes float32"
    assert sites(packed, kernels) == {name: told.format(name) for name in (FUSED, PRODUCT)}
    grouped = fp8.FP8GroupedLinear(256, 256, 2, block_size=(128, 128))
    (reason,) = set(sites(grouped, kernels).values())
    assert "its FP8 forward is no variant that is known (fingerprint" in reason


def test_what_the_forward_calls_is_compared_too(kernels: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fp8_linear(*args: Any) -> torch.Tensor:
        return blockwise(*args[:3])

    monkeypatch.setattr(fp8, "fp8_linear", fp8_linear)
    (reason,) = set(sites(layer(), kernels).values())
    assert reason == "its FP8 forward relies on a fp8_linear that is not the one known with it"


# -- by table ---------------------------------------------------------------------------------------------------------


def fused_from(shop: Any, smallest: int) -> Catalog:
    """The Definition of the whole layer with a kernel for so many tokens and more, and the pair for any number."""
    catalog: Catalog = shop.offer(rounding="reference", ops=(CAST, PRODUCT, FUSED), smallest_of=((FUSED, smallest),))
    return catalog


def test_fused_definition_is_asked_before_the_pair(shop: Any) -> None:
    module, catalog = layer(), fused_from(shop, smallest=64)
    with torch.no_grad(), patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        for tokens in (64, 3):
            x = values(tokens, 256)
            assert torch.equal(module(x), blockwise(x, module.weight, module.weight_scale_inv))
        assert handle.report().hits() == {FUSED: 1, CAST: 1, PRODUCT: 1}
    assert type(module) is fp8.FP8Linear


@pytest.mark.parametrize("bias", [False, True])
def test_fused_definition_is_served_in_compiled_code(bias: bool, shop: Any) -> None:
    module, catalog = layer(bias=bias), fused_from(shop, smallest=64)
    with torch.no_grad(), patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        torch.compiler.reset()
        compiled = torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True)
        for tokens in (64, 3):
            x = values(2, tokens // 2, 256)
            expected = blockwise(x, module.weight, module.weight_scale_inv)
            assert torch.equal(compiled(x), expected + module.bias if bias else expected)
        torch.compiler.reset()
    assert handle.report().hits()[FUSED] == 1
