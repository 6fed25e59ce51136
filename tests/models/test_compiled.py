"""Compiled patched models: one graph, our operators in it where a kernel serves, the model's own code everywhere else."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

import tilegym_db
from tilegym_db import Catalog, patch, patched
from tilegym_db.models import operators
from tilegym_db.models.operators import make_site
from tilegym_db.paths import shipped_root

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

ONE_LAYER = {"num_hidden_layers": 1}
ATTENTION = {  # compilers know the model's own, and keep it; no call has labels, so none has a loss
    **{"attention_prefill": 0, "attention_decode": 0, "cross_entropy": 0},
    **{"attention_masked_prefill": 0, "attention_masked_decode": 0, "kv_cache_concat": 0, "kv_cache_prefill": 0},
}
SERVED = {
    # What overwrites an operand is for eager code; compilers fuse an addition by themselves.
    "gemma3": {
        "rms_norm_gemma": 7,
        "fused_add_rms_norm_gemma": 0,
        "gelu_tanh_and_mul": 1,
        "rope_neox": 1,
        **ATTENTION,
    },
    "phi3": {"rms_norm": 3, "fused_add_rms_norm": 0, "silu_and_mul": 1, "rope_partial": 1, **ATTENTION},
    "qwen3": {"rms_norm": 5, "fused_add_rms_norm": 0, "swiglu": 1, "rope_neox": 1, **ATTENTION},
    "deepseek_v2": {
        "rms_norm": 5,
        "fused_add_rms_norm": 0,
        "swiglu": 1,
        "rope_complex_pairs": 1,
        "mla_expand_keys": 0,
        **ATTENTION,
    },  # a norm on part of a projection: rows with a gap between them
}


VIEWS = {"deepseek_v2": {"aten.view.default", "aten.view_as_real.default", "aten.view_as_complex.default"}}
"""Other nodes that a graph may have: the complex table as an operator takes it, and back. They move nothing."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Each test compiles for itself."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build_one_layer(build: Any, name: str = "qwen3") -> Any:
    changes = {"layer_types": ["sliding_attention"]} if name == "gemma3" else {}
    return build(name, **ONE_LAYER, **changes)


def one_block(model: Any) -> Any:
    """A norm and an MLP of a model as one function."""
    layer = model.model.layers[0]

    def block(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.mlp(layer.post_attention_layernorm(x))
        return found

    return block


def targets(graphs: list[torch.fx.GraphModule]) -> list[list[str]]:
    """The operators of this package in each graph."""
    return [[str(node.target) for node in graph.graph.nodes if "tilegym_db" in str(node.target)] for graph in graphs]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SERVED)
def test_one_graph_calls_kernels_for_any_number_of_tokens(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, counter = build_one_layer(build, name), CompileCounter()
    stock = {length: logits(model, prompt(2, length)) for length in (9, 8, 7)}
    with patched(model, catalog=kernels) as handle:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for calls, (length, want) in enumerate(stock.items(), start=1):
            assert torch.equal(logits(compiled, prompt(2, length)), want)
            assert handle.report().hits() == {op: calls * count for op, count in SERVED[name].items()}
        assert counter.frame_count == 2  # the first length, then any
    assert torch.equal(logits(compiled, prompt(2, 9)), stock[9])
    assert handle.report().hits() == {op: 3 * count for op, count in SERVED[name].items()}


@pytest.mark.nightly  # a static cache is decoded with lowered graphs daily, and with as many hits
@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_lowered_graphs_have_the_operators_too(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model = build_one_layer(build, name)
    stock = logits(model, prompt(2))
    with patched(model, catalog=kernels) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(logits(compiled, prompt(2)), stock)
    assert handle.report().hits() == SERVED[name]


@pytest.mark.nightly  # the graphs of the next test have none of its operators either
@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_unserved_operator_is_lowered_to_stock_operations(
    name: str, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, graphs = build_one_layer(build, name), []
    stock = {length: logits(model, prompt(2, length)) for length in (9, 7)}

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with patched(model, catalog=shop.offer(smallest=128)) as handle:  # measured for longer prompts
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
        for length, want in stock.items():
            assert torch.equal(logits(compiled, prompt(2, length)), want)
    assert targets(graphs) == [[], []]
    assert all(site.counts.calls == 0 for site in handle.report().sites if site.counts)


def operations(model: Any, logits: Any, ids: torch.Tensor) -> Counter[tuple[str, Any]]:
    """What the lowered graph of a forward consists of, and the shapes of it."""
    found: Counter[tuple[str, Any]] = Counter()

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.update((str(node.target), getattr(node.meta["val"], "shape", None)) for node in calls)
        return graph

    torch.compiler.reset()
    logits(torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True), ids)
    return found


def copies_of_tables(model: Any, ids: torch.Tensor) -> Counter[tuple[str, Any]]:
    """What makes an operator's table of a complex one, where its views do not: transformers 5.17 transposes DeepSeek-V2's."""
    table = model.model.rotary_emb(model.model.embed_tokens(ids), torch.arange(ids.shape[1])[None])
    if not isinstance(table, torch.Tensor) or table.is_contiguous():
        return Counter()
    pairs = torch.view_as_real(table)
    return Counter([("aten.clone.default", pairs.shape), ("aten._unsafe_view.default", pairs.flatten(-2).shape)])


@pytest.mark.sweep
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2"])  # phi3's rope promises another layout: a copy more
def test_graph_without_a_faster_kernel_equals_the_unpatched_one(
    name: str, length: int, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build_one_layer(build, name), prompt(2, length)
    stock = operations(model, logits, ids)
    with patched(model, catalog=shop.offer(smallest=128)):  # measured for longer prompts
        found = operations(model, logits, ids)
    assert not stock - found
    besides = found - stock - copies_of_tables(model, ids)
    assert {operation for operation, _ in besides} <= VIEWS.get(name, set())


@pytest.mark.nightly  # the test before it compares whole graphs
def test_a_norm_of_heads_behind_tokens_adds_transpositions_alone(
    shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build_one_layer(build, "gemma3"), prompt(2)

    def moving() -> Counter[str]:
        return Counter(name for name, _ in operations(model, logits, ids).elements() if name != "aten.transpose.int")

    stock = moving()
    with patched(model, catalog=shop.offer(smallest=128)):  # measured for longer prompts
        assert moving() == stock


@pytest.mark.parametrize(
    ("stock", "takes"),
    [
        (lambda a, b: torch.nn.functional.silu(a) * b, True),
        (lambda a, b: a.sum(1, keepdim=True) * b, False),
        (lambda a, b: a * torch.mv(b, b[0]).unsqueeze(1), False),
    ],
)
def test_stock_trace_has_leading_axes_only_if_the_bits_agree(stock: Any, takes: bool, kernels: Catalog) -> None:
    site = make_site(kernels.definition("swiglu"), kernels)
    assert site.operator is not None
    impl = replace(site.operator.impl, stock=stock)
    assert impl.takes_leading_axes(torch.empty(1, 1, 8), torch.empty(1, 1, 8)) is takes


def test_graph_with_the_operator_computes_unserved_calls(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model = build_one_layer(build)
    stock = logits(model, prompt(2))
    with patched(model, catalog=shop.offer(smallest=128)) as handle:  # measured for longer prompts
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(logits(compiled, prompt(2)), stock)
    assert {op: (site.calls, site.kernel_calls) for op, site in counts(handle).items()} == {
        "rms_norm": (5, 0),
        "fused_add_rms_norm": (0, 0),
        "swiglu": (1, 0),
        "rope_neox": (1, 0),
        **dict.fromkeys(ATTENTION, (0, 0)),
    }


def counts(handle: Any) -> dict[str, Any]:
    return {site.definition: site.counts for site in handle.report().sites if site.counts is not None}


@pytest.mark.turn("tilegym_db/models/call_site.py")  # code generation; graphs are compared daily
def test_inductor_runs_kernels_between_its_own_code(kernels: Catalog, build: Any) -> None:
    model = build_one_layer(build).requires_grad_(False)
    hidden = [torch.randn(2, length, 64, generator=torch.Generator().manual_seed(1)) for length in (5, 7)]
    with torch.no_grad():
        stock = [one_block(model)(x) for x in hidden]
        with patched(model, catalog=kernels) as handle:
            compiled = torch.compile(one_block(model), fullgraph=True)
            for x, want in zip(hidden, stock, strict=True):
                torch.testing.assert_close(compiled(x), want)
        assert (handle.report().hits()["rms_norm"], handle.report().hits()["swiglu"]) == (2, 2)


# Compilation; eager code falls back daily.
@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/rewrite.py")
def test_failing_kernel_falls_back_in_the_promised_layout(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model = build_one_layer(build, "phi3")
    stock = logits(model, prompt(2))
    with patched(model, catalog=shop.offer("    raise ValueError('boom')\n")) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.warns(RuntimeWarning, match="boom"):
            assert torch.equal(logits(compiled, prompt(2)), stock)
    assert handle.report().kernel_calls == 0


@pytest.mark.turn("tilegym_db/models/rewrite.py")  # two graphs of a training step; eager ones are compared daily
@pytest.mark.sweep
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_compiled_code_are_those_of_stock(
    training: bool, poison: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build_one_layer(build).train(training), prompt(2)

    def gradients(module: Any) -> list[torch.Tensor]:
        model.zero_grad()
        module(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    stock = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    with patched(model, catalog=poison):
        found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(got, want) for got, want in zip(found, stock, strict=True))


# Compilation; eager code is compared daily.
@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/rewrite.py")
@pytest.mark.sweep
@pytest.mark.parametrize("way", ["vmap", "grad", "jvp", "autocast"])
def test_transforms_in_compiled_code_see_the_models_own_code(way: str, kernels: Catalog, build: Any) -> None:
    model = build_one_layer(build).requires_grad_(False)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))

    def transformed() -> Any:
        block = one_block(model)
        if way == "vmap":
            return torch.vmap(block)
        if way == "grad":
            return torch.func.grad(lambda value: block(value).sum())
        if way == "jvp":
            return lambda value: torch.func.jvp(block, (value,), (torch.ones_like(value),))[1]
        return torch.autocast("cpu", torch.bfloat16)(block)

    stock = transformed()(x)
    with patched(model, catalog=kernels):
        found = torch.compile(transformed(), backend="aot_eager", fullgraph=True)(x)
    assert found.dtype == stock.dtype
    torch.testing.assert_close(found, stock)


# Three compiled models; one is compared daily.
@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/rewrite.py")
def test_two_patched_models_of_one_class_keep_their_own_kernels(
    shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    first, second, third, ids = build_one_layer(build), build_one_layer(build), build_one_layer(build), prompt(2)
    stock = logits(third, ids)
    models = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in (first, second, third)]
    kernels = shop.offer()
    handles = [patch(first, catalog=kernels), patch(second, catalog=kernels, ops=["swiglu"])]
    for model in models:
        assert torch.equal(logits(model, ids), stock)
    assert [handle.report().hits() for handle in handles] == [SERVED["qwen3"], {"swiglu": 1}]


# Compilation; one graph is compared daily.
@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/rewrite.py")
def test_generation_with_a_compiled_static_cache_runs_kernels(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build_one_layer(build), prompt()
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    stock = model.generate(ids, **options, disable_compile=True).tolist()
    with patched(model, catalog=kernels) as handle:
        eager = model.forward
        model.forward = torch.compile(eager, backend="aot_eager", fullgraph=True)
        try:
            assert model.generate(ids, **options, disable_compile=True).tolist() == stock
        finally:
            del model.forward
    assert handle.report().hits() == {op: 4 * count for op, count in SERVED["qwen3"].items()}


def test_the_operators_say_truly_what_they_return(kernels: Catalog) -> None:
    records = Catalog((shipped_root(),))
    site = make_site(records.definition("rope_partial"), kernels)
    assert site.operator is not None
    q, k = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 5, 6, 8)[:, :, :2].transpose(1, 2)
    table = torch.randn(1, 5, 4)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(site.operator.call, (q, k, table, table, site.operator.name), test_utils=checks)


def kernels_of(handle: Any) -> list[tuple[Any, ...]]:
    """Return what each call site remembers: the axes of each call, and what serves it."""
    keys = [key for _, site in handle.sites for key in site.dispatcher.report().keys]
    return [(key.axes, key.solution, key.reason) for key in keys]


# Compilation; one graph is compared daily.
@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/rewrite.py")
def test_graph_capture_runs_kernels_for_known_calls_only(
    kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, known, new = build_one_layer(build), prompt(2, 9), prompt(2, 7)
    stock = {ids: logits(model, ids) for ids in (known, new)}
    with patched(model, catalog=kernels) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        logits(compiled, known)  # the warm-up that comes before a capture
        served, tables = handle.report().hits(), kernels_of(handle)
        for _, site in handle.sites:
            site.dispatcher.is_capturing = lambda: True
        assert torch.equal(logits(compiled, known), stock[known])
        assert handle.report().hits() == {op: 2 * count for op, count in served.items()}
        assert torch.equal(logits(compiled, new), stock[new])
        counts = [site.counts for site in handle.report().sites if site.counts is not None]
        assert handle.report().hits() == {op: 2 * count for op, count in served.items()}
        assert {one.definition: one.capture_misses for one in counts} == SERVED["qwen3"]
        assert tables == kernels_of(handle)


def test_tracing_thread_leaves_the_flag_of_other_threads() -> None:
    """Two that begin one after the other, and end in that order."""
    assert not torch.compiler.is_compiling()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(operators.compiling())
        second.enter_context(operators.compiling())
        first.close()
        assert torch.compiler.is_compiling()
        second.close()
        assert not torch.compiler.is_compiling()


def test_while_another_thread_traces_a_derivative_is_what_it_is() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)

    def norm(value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = tilegym_db.ops.rms_norm(value, weight, 1e-6)
        return out

    alone = torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]
    with operators.compiling():
        beside = torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]
    assert alone.abs().max() > 0
    assert torch.equal(alone, beside)
