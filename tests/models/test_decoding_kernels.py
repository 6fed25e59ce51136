"""Kernels of decoding steps in graphs: chosen by device time, and for products that eager code leaves to PyTorch.

All kernels are stock code, so tokens must be those of the stock model.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_graphs import eager
from torch.overrides import _get_current_function_mode_stack

from tilegym_db import Catalog, patch
from tilegym_db.models.call_site import AUTOCAST, NEEDS_GRAD, NOT_PLAIN
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.products import MANY_ROWS, Products, forwards
from tilegym_db.paths import shipped_root
from tilegym_db.resolver.hot_path import threads

pytestmark = pytest.mark.sweep

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``patch`` run decoding steps in graphs on the CPU."""
    monkeypatch.setattr(Decoding, "fits", staticmethod(lambda model: True))
    monkeypatch.setattr("tilegym_db.models.decoding.captured", eager)


def make_launches_slow(shop: Any, *ops: str) -> None:
    """Publish kernels whose calls take the host longer than stock code takes at all."""
    for entry in shop.entries:
        if entry["definition"] in ops:
            (kernel,) = entry["candidates"]
            kernel["host_us"] = 800.0
            stock = {
                **kernel, "solution": f"{entry['definition']}_stock", "role": "baseline", "provides": "stock",
                "latency_us": 100.0, "host_us": 20.0,
            }  # fmt: skip
            entry["candidates"].append(stock)
    shop.republish()


KERNELS = {
    "gemm": "out.copy_(linear(a, b))",
    "gemm_bias": "out.copy_(linear(a, b, bias))",
    "gemm_qkv": "[out.copy_(linear(x, w)) for out, w in ((q, wq), (k, wk), (v, wv))]",
    "gemm_swiglu": "out.copy_(silu(linear(x, wg)) * linear(x, wu))",
}


def offer_products(shop: Any, *names: str, body: str = "", ops: tuple[str, ...] = ()) -> Catalog:
    """Publish kernels of products that compute what PyTorch computes, beside those of ``ops``."""
    shop.offer(ops=ops)
    for name in names:
        definition = Catalog((shipped_root(),)).definition(name)
        folder = shop.root / "solutions" / "gemm" / name / f"{name}_cpu"
        folder.mkdir(parents=True)
        arguments = ", ".join((*definition.inputs, *definition.outputs))
        source = (
            f"from torch.nn.functional import linear, silu\n\n\ndef run({arguments}):\n    {body or KERNELS[name]}\n"
        )
        (folder / "kernel.py").write_text(source)
        layouts = dict.fromkeys([*definition.inputs, *definition.outputs], "strided")
        record = {
            "name": f"{name}_cpu", "definition": name, "author": "tests", "sources": [{"path": "kernel.py"}],
            "spec": {"language": "python", "entry_point": "kernel.py::run", "layouts": layouts},
        }  # fmt: skip
        (folder / "solution.json").write_text(json.dumps(record))
    catalog = Catalog((shipped_root(), shop.root))
    for name in names:
        shop.entries += shop._entries(catalog, name, 1)
    shop.republish()
    return catalog


def products(handle: Any) -> dict[str, Any]:
    return {site.definition: site for site in handle.report().sites if site.kind == "product"}


def reasons(handle: Any, definition: str) -> list[str]:
    return [key.reason for site in handle.report().sites for one in site.all_counts for key in one.keys
            if one.definition == definition]  # fmt: skip


@pytest.mark.usefixtures("in_graphs")
def test_a_kernel_with_a_slow_launch_serves_replays_alone(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    catalog = shop.offer(ops=("rms_norm",))
    make_launches_slow(shop, "rms_norm")
    stock, model = build(), build()
    handle = patch(model, catalog=catalog)
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    served = handle.report().hits()["rms_norm"]
    assert served > 0
    with torch.no_grad():
        model(prompt(1, 1))
    assert handle.report().hits()["rms_norm"] == served
    assert any("only the device time counts" in reason for reason in reasons(handle, "rms_norm"))
    assert any("no verified solution is faster" in reason for reason in reasons(handle, "rms_norm"))
    assert not threads


@pytest.mark.usefixtures("in_graphs")
def test_an_interrupted_step_ends_the_answers_for_replays(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = build(), []
    patch(model, catalog=shop.offer(ops=("rms_norm",)))
    norm = model.model.norm

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if threads:
            found.append(dict(threads))
            raise KeyboardInterrupt
        return type(norm).forward(norm, x)

    monkeypatch.setattr("tilegym_db.models.graphs.has_hooks", lambda module: False)
    monkeypatch.setattr(norm, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), **OPTIONS)
    assert found == [{threading.get_ident(): 1}]
    assert not threads


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_graphs")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3_moe", "phi3", "qwen3_5"])
def test_products_in_graphs_give_the_tokens_of_stock(
    name: str, shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model = build(name), build(name)
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    for ids in (prompt(), prompt(3, 5), prompt()):
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    report = handle.report()
    assert report.decoding.replayed > 30
    assert report.hits()["gemm"] > 0
    assert {key.axes["M"] for key in products(handle)["gemm"].counts.keys} == {1, 3}
    assert not _get_current_function_mode_stack()


@pytest.mark.usefixtures("in_graphs")
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3_moe", "deepseek_v3", "qwen3_next"]
)
@pytest.mark.parametrize("names", [("gemm_qkv", "gemm_swiglu"), ("gemm", "gemm_qkv", "gemm_swiglu")])
def test_fused_products_give_the_tokens_of_stock(
    name: str, names: tuple[str, ...], shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model = build(name), build(name)
    handle = patch(model, catalog=offer_products(shop, *names, ops=("swiglu",)))
    for ids in (prompt(), prompt(3, 5), prompt()):
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    hits = handle.report().hits()
    assert handle.report().decoding.replayed > 30
    if name in ("llama", "qwen3", "mistral", "gemma3"):
        assert hits["gemm_qkv"] > 2 * 40
    if name in ("llama", "qwen3", "mistral"):
        assert hits["gemm_swiglu"] > 2 * 40
        assert not forwards


@pytest.mark.usefixtures("in_graphs")
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_products_with_a_bias_give_the_tokens_of_stock(
    name: str, shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model = build(name), build(name)
    handle = patch(model, catalog=offer_products(shop, "gemm", "gemm_bias"))
    for ids in (prompt(), prompt(3, 5)):
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    found = products(handle)
    assert found["gemm_bias"].modules == sum(
        isinstance(one, torch.nn.Linear) and one.bias is not None for one in stock.modules()
    )
    assert min(handle.report().hits()[name] for name in ("gemm", "gemm_bias")) > 0
    assert {key.axes["M"] for key in found["gemm_bias"].counts.keys} == {1, 3}


@pytest.mark.usefixtures("in_graphs")
def test_a_product_with_a_transposed_weight_is_one(shop: Any, prompt: Callable[..., torch.Tensor]) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    stock = FalconForCausalLM(config).eval()
    model = copy.deepcopy(stock)
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    sizes = {(key.axes["N"], key.axes["K"]) for key in products(handle)["gemm"].counts.keys}
    assert {(96, 64), (64, 64), (256, 64), (64, 256)} <= sizes


@pytest.mark.usefixtures("in_graphs")
def test_eager_calls_and_prompts_ask_for_no_product(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model = build()
    handle = patch(model, catalog=offer_products(shop, "gemm", body="out.fill_(float('nan'))"))
    with torch.no_grad():
        assert not model(prompt(1, 1)).logits.isnan().any()
    assert handle.report().hits()["gemm"] == 0
    assert products(handle)["gemm"].modules == 15


@pytest.mark.usefixtures("in_graphs")
def test_a_product_without_a_faster_kernel_stays_stock(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model = build()
    catalog = offer_products(shop, "gemm", body="out.fill_(float('nan'))", ops=("rms_norm",))
    for entry in shop.entries:
        if entry["definition"] == "gemm":
            entry["candidates"][0]["speedup_ci_low"] = 0.9
    shop.republish()
    handle = patch(model, catalog=catalog)
    assert torch.equal(model.generate(prompt(), **OPTIONS), build().generate(prompt(), **OPTIONS))
    assert "no verified solution of gemm is faster than stock" in products(handle)["gemm"].reason
    assert "gemm" in str(handle.report())


@pytest.mark.usefixtures("in_graphs")
def test_more_than_sixteen_rows_stay_stock(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model = build()
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    model.generate(prompt(17, 4), **OPTIONS)
    assert handle.report().decoding.replayed > 0
    assert handle.report().hits()["gemm"] == 0
    assert products(handle)["gemm"].bypassed[MANY_ROWS] > 0


@pytest.mark.usefixtures("in_graphs")
def test_options_leave_out_products(shop: Any, build: Callable[..., Any]) -> None:
    catalog = offer_products(shop, "gemm", ops=("rms_norm",))
    assert products(patch(build(), catalog=catalog, ops=["rms_norm"]))["gemm"].reason == "not among the ops asked for"
    assert products(patch(build(), catalog=catalog, dry_run=True))["gemm"].reason == "dry run"
    assert not products(patch(build(), catalog=catalog, graphs=False))


@pytest.mark.usefixtures("in_graphs")
def test_a_verified_patch_proves_products(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model = build()
    handle = patch(model, catalog=offer_products(shop, "gemm", body="out.copy_(1.01 * linear(a, b))"), verify=True)
    proofs = products(handle)["gemm"].proofs
    assert "decode" in {proof.stage for proof in proofs}
    assert all("verification on this model failed" in proof.reason for proof in proofs)
    assert torch.equal(model.generate(prompt(), **OPTIONS), build().generate(prompt(), **OPTIONS))


@pytest.mark.usefixtures("in_graphs")
def test_a_verified_patch_proves_kernels_of_replays(shop: Any, build: Callable[..., Any]) -> None:
    catalog = shop.offer("    for value in {outputs}:\n        value.fill_(0.5)\n", ops=("rms_norm",))
    make_launches_slow(shop, "rms_norm")
    handle = patch(build(), catalog=catalog, verify=True)
    assert any("verification on this model failed" in proof.reason for proof in handle.report().failed_proofs)


@pytest.mark.usefixtures("in_graphs")
def test_a_second_thread_asks_for_no_product(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model, stock, wrong = build(), build(), []
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    is_over = threading.Event()
    with torch.no_grad():
        expected = stock(prompt(1, 4)).logits

    def call() -> None:
        with torch.no_grad():
            while not is_over.is_set():
                if threads.keys() & {threading.get_ident()} or not torch.equal(model(prompt(1, 4)).logits, expected):
                    wrong.append(1)

    other = threading.Thread(target=call)
    other.start()
    tokens = [model.generate(prompt(batch), **OPTIONS) for batch in (1, 2, 3)]
    is_over.set()
    other.join()
    assert not wrong
    assert all(torch.equal(found, stock.generate(prompt(len(found)), **OPTIONS)) for found in tokens)
    assert 4 not in {key.axes["M"] for key in products(handle)["gemm"].counts.keys}


@pytest.mark.usefixtures("in_graphs")
def test_a_replaced_weight_and_later_hooks_are_seen(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model, stock, calls = build(), build(), []
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    model.generate(prompt(), **OPTIONS)
    for one in (model, stock):
        torch.manual_seed(9)
        one.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 48, bias=False)
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    assert handle.report().decoding.captured == 2
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    hook.remove()
    assert len(calls) == OPTIONS["max_new_tokens"]


@pytest.mark.usefixtures("in_graphs")
def test_a_lock_names_and_serves_products(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    model, catalog = build(), offer_products(shop, "gemm", "gemm_qkv", ops=("rms_norm",))
    handle = patch(model, catalog=catalog)
    model.generate(prompt(), **OPTIONS)
    path = handle.write_lock(tmp_path / "lock.json")
    handle.unpatch()
    again = patch(model, catalog=catalog, lock=path)
    assert torch.equal(model.generate(prompt(), **OPTIONS), build().generate(prompt(), **OPTIONS))
    assert min(again.report().hits()[name] for name in ("gemm", "gemm_qkv", "rms_norm")) > 0


@pytest.mark.usefixtures("in_graphs")
def test_unpatch_ends_products(shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]) -> None:
    model = build()
    handle = patch(model, catalog=offer_products(shop, "gemm"))
    model.generate(prompt(), **OPTIONS)
    served = handle.report().hits()["gemm"]
    assert "the rows of products say what computes it" in str(handle.report())
    handle.unpatch()
    assert torch.equal(model.generate(prompt(), **OPTIONS), build().generate(prompt(), **OPTIONS))
    assert handle.report().hits()["gemm"] == served


@pytest.mark.usefixtures("in_graphs")
def test_two_models_keep_their_products(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    names, found = ("llama", "qwen3"), {}
    catalog = offer_products(shop, "gemm", "gemm_qkv", "gemm_swiglu", ops=("swiglu",))
    models = {name: build(name) for name in names}
    handles = {name: patch(model, catalog=catalog) for name, model in models.items()}

    def generate(name: str, batch: int) -> None:
        found[name, batch] = models[name].generate(prompt(batch), **OPTIONS)

    workers = [threading.Thread(target=generate, args=(name, batch)) for name in names for batch in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for (name, batch), tokens in found.items():
        assert torch.equal(tokens, build(name).generate(prompt(batch), **OPTIONS))
    assert all(handle.report().hits()["gemm_qkv"] > 0 for handle in handles.values())
    assert not forwards
    assert not threads


class Wrapped(torch.Tensor):
    pass


def test_only_plain_products_ask(shop: Any) -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.Sequential(layer, torch.nn.Linear(8, 8))
    made = Products(model, offer_products(shop, "gemm", body="out.fill_(7)"), lambda name: "", check=False)
    site = made.sites["gemm"]
    x, linear = torch.ones(2, 1, 8), torch.nn.functional.linear

    def is_served(*args: Any, **options: Any) -> bool:
        with made.replayed():
            return bool((linear(*args, **options) == 7).all())

    assert not is_served(x, layer.weight)
    assert site.bypassed == {NEEDS_GRAD: 1}
    with torch.no_grad():
        assert is_served(x, layer.weight)
        assert is_served(input=x, weight=layer.weight, bias=None)
        assert not is_served(x, layer.weight, model[1].bias)
        assert not is_served(x, layer.weight.clone())
        assert not is_served(x[0, 0], layer.weight)
        assert not is_served(x.as_subclass(Wrapped), layer.weight)
        assert site.bypassed[NOT_PLAIN] == 1
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_served(x, layer.weight)
        assert site.bypassed[AUTOCAST] == 1
        assert not (linear(x, layer.weight) == 7).all()
    with torch.inference_mode():
        assert is_served(x, layer.weight)


def test_distributed_and_quantised_weights_stay_stock(shop: Any) -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Wrapped))
    model = torch.nn.Sequential(layer)
    made = Products(model, offer_products(shop, "gemm"), lambda name: "", check=False)
    site = made.sites["gemm"]
    with torch.no_grad(), made.replayed():
        layer(torch.ones(2, 8))
    assert site.dispatcher is not None
    assert [key.reason for key in site.dispatcher.report().keys] == ["an argument is a Wrapped, not a plain tensor"]


# -- three products of one input --------------------------------------------------------------------------------------


class Attends(torch.nn.Module):
    """Three products of one input, with something done between the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        x = self.between(x)
        return self.o(q + self.k(x) * self.v(x))


@pytest.fixture
def attends(shop: Any) -> tuple[Attends, Products]:
    """A module whose fused products were seen once."""
    model = Attends().requires_grad_(requires_grad=False)
    made = Products(model, offer_products(shop, "gemm_qkv"), lambda name: "", check=False)
    with made.replayed():
        model(torch.ones(2, 8))
    return model, made


def fused_calls(made: Products) -> int:
    dispatcher = made.sites["gemm_qkv"].dispatcher
    assert dispatcher is not None
    return dispatcher.report().kernel_calls


def run(model: Attends, made: Products) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in a graph, and that of eager code."""
    x = torch.arange(16.0).view(2, 8)
    with made.replayed():
        found = model(x.clone())
    return found, model(x.clone())


def test_three_products_in_a_row_are_one_call(attends: tuple[Attends, Products]) -> None:
    model, made = attends
    assert fused_calls(made) == 1  # the kernel was bound at the third product
    assert torch.equal(*run(model, made))
    assert fused_calls(made) == 2
    assert len(made.groups) == 1


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "changed in place": lambda x: x.add_(1),
    "changed through a view": lambda x: (x.view(-1)[3:5].zero_(), x)[1],
    "another object": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_another_input_gets_no_result_of_the_first(name: str, attends: tuple[Attends, Products]) -> None:
    model, made = attends
    model.between = BETWEEN[name]
    assert torch.equal(*run(model, made))
    assert fused_calls(made) == 2
    assert torch.equal(*run(model, made))
    assert fused_calls(made) == 2  # it is not tried again


def test_results_that_no_call_takes_are_dropped(attends: tuple[Attends, Products]) -> None:
    model, made = attends
    with made.replayed():
        model.q(torch.ones(2, 8))
        (here,) = forwards.values()
        assert len(here._made) == 2
    assert not here._made
    assert not any(group.is_usable for group in made.groups.values())


def test_results_are_used_once(attends: tuple[Attends, Products]) -> None:
    model, made = attends
    x = torch.ones(2, 8)
    with made.replayed():
        model.q(x)
        first, second = model.k(x), model.k(x)
        model.v(x)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_an_exception_ends_the_products(attends: tuple[Attends, Products]) -> None:
    model, made = attends

    def between(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model.between = between
    with pytest.raises(KeyboardInterrupt):
        run(model, made)
    assert not forwards
    assert not threads
    assert not _get_current_function_mode_stack()
    model.between = lambda x: x
    assert torch.equal(*run(model, made))
    assert fused_calls(made) == 3  # also the call before the exception


def test_a_replaced_weight_makes_another_group(attends: tuple[Attends, Products]) -> None:
    model, made = attends
    model.k = torch.nn.Linear(8, 8, bias=False).requires_grad_(requires_grad=False)
    assert torch.equal(*run(model, made))
    (group,) = made.groups.values()
    assert group.weights[1] is model.k.weight
    assert torch.equal(*run(model, made))
    assert fused_calls(made) == 3


def test_inference_mode_has_no_fused_products(shop: Any) -> None:
    model = Attends().requires_grad_(requires_grad=False)
    made = Products(model, offer_products(shop, "gemm", "gemm_qkv"), lambda name: "", check=False)
    with torch.inference_mode():
        assert torch.equal(*run(model, made))
    assert fused_calls(made) == 0


# -- two products and their gate --------------------------------------------------------------------------------------

UNFUSED: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda mlp: mlp.gate_proj.register_forward_hook(lambda *_: None),
    "a bias": lambda mlp: setattr(mlp, "up_proj", torch.nn.Linear(64, 48)),
    "another class": lambda mlp: setattr(mlp.up_proj, "__class__", type("Own", (torch.nn.Linear,), {})),
    "another activation": lambda mlp: setattr(mlp, "act_fn", torch.nn.GELU()),
}


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.usefixtures("in_graphs")
def test_only_plain_projections_are_fused_with_their_gate(
    name: str,
    shop: Any,
    build: Callable[..., Any],
    prompt: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilegym_db.models.graphs.has_hooks", lambda module: False)
    model, stock = build(num_hidden_layers=1), build(num_hidden_layers=1)
    handle = patch(model, catalog=offer_products(shop, "gemm", "gemm_swiglu", ops=("swiglu",)))
    for one in (model, stock):
        torch.manual_seed(4)
        UNFUSED[name](one.model.layers[0].mlp)
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    assert handle.report().decoding.replayed > 0
    assert handle.report().hits()["gemm_swiglu"] == 0


@pytest.mark.turn("tilegym_db/models/gate_product.py", "tilegym_db/models/parts/")  # captures a model
@pytest.mark.usefixtures("in_graphs")
def test_a_gate_that_only_graphs_fuse_stays_in_the_model(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    model, stock = build(), build()
    handle = patch(model, catalog=offer_products(shop, "gemm_swiglu", ops=("rms_norm",)))
    for _ in range(20):
        assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    served = handle.report().hits()["gemm_swiglu"]
    model.generate(prompt(2), **OPTIONS)
    assert handle.report().hits()["gemm_swiglu"] > served > 0


def test_eager_gates_are_not_fused(shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]) -> None:
    model = build()
    catalog = offer_products(shop, "gemm_swiglu", body="out.fill_(float('nan'))", ops=("swiglu",))
    handle = patch(model, catalog=catalog)
    with torch.no_grad():
        assert not model(prompt(1, 1)).logits.isnan().any()
    assert handle.report().hits()["swiglu"] > 0
