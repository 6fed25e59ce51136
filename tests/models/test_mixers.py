"""Mixers of hybrid models: kernels for their functions and norms give the tokens of stock, and other calls run stock code."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_graphs import eager
from shipped_records import CATALOG
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import IN_TRAINING, NEEDS_GRAD, CallSite
from tilegym_db.models.called_functions import arguments_of
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.found import KnownCode
from tilegym_db.models.parts import causal_conv, delta_rule
from tilegym_db.models.probe import are_close, matching_definitions

pytestmark = pytest.mark.sweep

MODELS = ("qwen3_5", "qwen3_next")
PROMPT = ("causal_conv1d", "gated_delta_rule_chunk")
STEP = ("causal_conv1d_update", "gated_delta_rule_recurrent")
ALWAYS = ("rms_norm_gated_silu", "gdn_gates", "sigmoid_mul")
OPS = (*PROMPT, *STEP, *ALWAYS)
TOKENS = {"max_new_tokens": 8, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


@pytest.fixture
def mixers(shop: Any) -> Catalog:
    """Kernels of the operators of mixers alone."""
    catalog: Catalog = shop.offer(ops=OPS)
    return catalog


def rows(handle: Any) -> dict[str, Any]:
    return {site.definition: site for site in handle.report().sites if site.definition in OPS}


def torch_text(name: str) -> Any:
    return inspect.unwrap(getattr(qwen, name))


# -- served, and served right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_stock(name: str, way: str, mixers: Catalog, build: Any, left_padded: Any) -> None:
    model, options = build(name), {**TOKENS, **WAYS[way]}
    inputs = left_padded((9, 4, 7))
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=mixers, ops=OPS) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    hits = handle.report().hits()
    assert all(hits[name] for name in (*PROMPT, *ALWAYS))
    assert all(bool(hits[name]) == (way != "no cache") for name in STEP)
    assert all(site.counts.stock_calls == 0 and not site.bypassed for site in rows(handle).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_every_dtype_gives_the_bits_of_stock(
    name: str, dtype: torch.dtype, mixers: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=mixers, ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
        assert all(handle.report().hits()[name] for name in PROMPT)
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("name", MODELS)
def test_other_roundings_stay_within_a_tolerance(name: str, shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(name), prompt(2, 80)  # more than a chunk of 64
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OPS, rounding="reference"), ops=OPS) as handle:
        assert (logits(model, ids) - stock).norm() < 1e-4 * stock.norm()
    assert all(handle.report().hits()[name] for name in PROMPT)


@pytest.mark.parametrize("op", OPS)
def test_kernels_are_what_answers(op: str, poison: Catalog, build: Any, prompt: Any) -> None:
    model, cache = build("qwen3_5"), DynamicCache(config=build("qwen3_5").config)
    with torch.no_grad(), patched(model, catalog=poison, ops=[op]):
        first = model(prompt(), past_key_values=cache).logits
        second = model(prompt(1, 1), past_key_values=cache).logits
    assert (second if op in STEP else first).isnan().any()


def test_a_cache_goes_on_in_pieces_and_single_tokens(mixers: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3_5"), prompt(2, 12)

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = (ids[:, :5], ids[:, 5:7], ids[:, 7:8], ids[:, 8:9], ids[:, 9:])
            found = [model(piece, past_key_values=cache).logits for piece in pieces]
        return [*found, cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]]

    stock = run()
    with patched(model, catalog=mixers, ops=OPS) as handle:
        assert all(torch.equal(got, want) for got, want in zip(run(), stock, strict=True))
    assert [handle.report().hits()[name] for name in (*PROMPT, *STEP)] == [3, 3, 2, 2]


@pytest.mark.parametrize("name", MODELS)
def test_decoding_in_graphs_gives_the_tokens_of_stock(name: str, mixers: Catalog, build: Any, prompt: Any) -> None:
    model, options = build(name), {"max_new_tokens": 20, "do_sample": False}
    stock = model.generate(prompt(3), **options)
    with patched(model, catalog=mixers, ops=OPS) as handle:
        decoding = Decoding(model, eager)
        decoding.install()
        for _ in range(2):
            assert torch.equal(model.generate(prompt(3), **options), stock)
        decoding.remove()
    assert decoding.report().replayed > 30
    assert all(handle.report().hits()[name] for name in STEP)


# -- left to stock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_training_runs_stock_with_its_gradients(name: str, poison: Catalog, build: Any, prompt: Any) -> None:
    def gradients(model: Any) -> list[torch.Tensor | None]:
        model.train()
        model(prompt(2), labels=prompt(2)).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    stock, model = gradients(build(name)), build(name)
    with patched(model, catalog=poison, ops=OPS) as handle:
        found = gradients(model)
    assert all(got is want is None or torch.equal(got, want) for got, want in zip(found, stock, strict=True))
    assert handle.report().kernel_calls == 0
    assert all(IN_TRAINING in site.bypassed for site in rows(handle).values())


def test_a_gradient_in_eval_mode_runs_stock(poison: Catalog, build: Any, prompt: Any) -> None:
    model = build("qwen3_5")
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert model(prompt()).logits.isfinite().all()
    assert all(site.bypassed.keys() <= {NEEDS_GRAD} for site in rows(handle).values())


@pytest.mark.parametrize("name", MODELS)
def test_unpatching_restores_classes_and_results(
    name: str, poison: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model = build(name)
    classes, stock = [type(module) for module in model.modules()], logits(model, prompt())
    handle = patch(model, catalog=poison, ops=OPS)
    assert [type(module) for module in model.modules()] != classes
    twin = copy.deepcopy(model)
    handle.unpatch()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(logits(model, prompt()), stock)
    assert torch.equal(logits(twin, prompt()), stock)


@pytest.mark.turn("tilegym_db/models/parts/")  # compilation; eager code is compared daily
@pytest.mark.parametrize("name", MODELS)
def test_compiled_code_gives_the_results_of_stock(
    name: str, mixers: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model = build(name)
    stock = logits(model, prompt())
    with patched(model, catalog=mixers, ops=OPS):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "qwen3_5")
        torch.testing.assert_close(logits(compiled, prompt()), stock)
    torch._dynamo.reset()


# -- calls ------------------------------------------------------------------------------------------------------------


def drawn(tokens: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, tokens, 2, 8), (2, tokens, 2, 8), (2, tokens, 4, 8), (2, tokens, 4), (2, tokens, 4))
    *rest, g, beta = (torch.randn(shape) for shape in shapes)
    return [*rest, -g.abs(), beta.sigmoid()]


def served_rule(name: str) -> tuple[Callable[..., Any], CallSite, list[Any]]:
    """Return a rule of the model whose kernel is its own code, its call site, and the inputs that the kernel saw."""
    function, seen = torch_text(name), []

    def serve(*inputs: torch.Tensor) -> Any:
        seen.append(inputs)
        return function(*inputs[:5], initial_state=inputs[5], output_final_state=True, use_qk_l2norm_in_kernel=True)

    site = CallSite(serve)
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    rule = delta_rule.delta_rule(
        getattr(qwen, name), site, arguments_of(function), defaults, one_token="recurrent" in name
    )
    return rule, site, seen


RULES = {"torch_chunk_gated_delta_rule": 3, "torch_recurrent_gated_delta_rule": 1}


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_state_may_be_missing_and_unwanted(name: str, keeps: bool, has_state: bool) -> None:
    rule, _, seen = served_rule(name)
    options = {
        "initial_state": torch.randn(2, 4, 8, 8) if has_state else None,
        "output_final_state": keeps,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": None,
        "use_cache": True,
    }
    with torch.no_grad():
        out, state = rule(*drawn(RULES[name]), **options)
        want, kept = getattr(qwen, name)(*drawn(RULES[name]), **options)
    assert len(seen) == 1
    assert torch.equal(out, want)
    assert state is kept is None or torch.equal(state, kept)
    assert seen[0][5].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "tokens", "options", "reason"),
    [
        ("torch_chunk_gated_delta_rule", 3, {}, delta_rule.NOT_NORMALISED),
        ("torch_chunk_gated_delta_rule", 3, {"chunk_size": 2}, "the call sets the size of a chunk"),
        ("torch_recurrent_gated_delta_rule", 3, {}, delta_rule.NOT_ONE_TOKEN),
    ],
)
def test_other_calls_of_a_rule_run_stock(name: str, tokens: int, options: dict[str, Any], reason: str) -> None:
    rule, site, seen = served_rule(name)
    given = {"use_qk_l2norm_in_kernel": reason != delta_rule.NOT_NORMALISED, **options}
    with torch.no_grad():
        out, _ = rule(*drawn(tokens), **given)
        assert torch.equal(out, getattr(qwen, name)(*drawn(tokens), **given)[0])
    assert not seen
    assert site.bypassed == {reason: 1}


@pytest.mark.parametrize("name", RULES)
def test_packed_sequences_run_stock(name: str) -> None:
    rule, site, seen = served_rule(name)
    with torch.no_grad(), pytest.raises(ValueError, match="packed sequences"):
        rule(*drawn(RULES[name]), use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 1]))
    assert not seen
    assert site.bypassed == {"the call has cu_seqlens": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": None}, causal_conv.OTHER_ACTIVATION),
        ({"activation": "gelu"}, causal_conv.OTHER_ACTIVATION),
        ({"activation": "silu", "bias": torch.ones(8)}, causal_conv.OTHER_BIAS),
        ({"activation": "silu", "weight": torch.ones(8, 3)}, "its window has 3 positions, not 4"),
    ],
)
def test_other_calls_of_a_convolution_run_stock(options: dict[str, Any], reason: str) -> None:
    site = CallSite(lambda *_: pytest.fail("served"))
    definition = CATALOG.definition("causal_conv1d")
    function = torch_text("causal_conv1d_fn")
    convolve = causal_conv.convolution(qwen.causal_conv1d_fn, site, arguments_of(function), definition)
    given = {"hidden_states": torch.randn(2, 8, 5), "weight": torch.randn(8, 4), **options}
    with torch.no_grad():
        assert torch.equal(convolve(**given), qwen.causal_conv1d_fn(**given))
    assert site.bypassed == {reason: 1}


# -- found ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "definition"),
    [
        ("torch_chunk_gated_delta_rule", delta_rule, "gated_delta_rule_chunk"),
        ("torch_recurrent_gated_delta_rule", delta_rule, "gated_delta_rule_recurrent"),
        ("causal_conv1d_fn", causal_conv, "causal_conv1d"),
        ("causal_conv1d_update", causal_conv, "causal_conv1d_update"),
    ],
)
def test_a_function_of_a_model_computes_its_definition(name: str, part: Any, definition: str) -> None:
    known, function = KnownCode(CATALOG), torch_text(name)
    matches = {match.definition.name: match for match in known.look_up(part.KIND, function, {}, "it", {})}
    match = matches[definition]
    probe = part.probe_function(function, match if part is delta_rule else match.definition, torch.device("cpu"))
    assert matching_definitions(probe, [match.definition], CATALOG, are_close) == [definition]


@pytest.mark.parametrize(
    ("name", "find", "replace"),
    [
        ("torch_chunk_gated_delta_rule", "1e-6", "1e-5"),
        ("torch_chunk_gated_delta_rule", "** -0.5", "** -0.51"),
        ("torch_chunk_gated_delta_rule", "decay = g ", "decay = 2 * g "),
        ("torch_recurrent_gated_delta_rule", "1e-6", "1e-5"),
        ("torch_recurrent_gated_delta_rule", "- kv_mem", ""),
        ("causal_conv1d_fn", "weight.shape[-1] - 1", "weight.shape[-1]"),
        ("causal_conv1d_update", "conv_state.copy_(hidden_states_new[:, :, -state_len:])", "pass"),
    ],
)
def test_a_function_with_other_maths_stays_stock(
    name: str, find: str, replace: str, build: Any, mixers: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(torch_text(name))
    source = source[source.index("def ") :]
    assert find in source
    other = changed(source.replace(find, replace), name)
    monkeypatch.setattr(qwen, name, other)
    with patched(build("qwen3_5"), catalog=mixers, ops=OPS) as handle:
        refused = [site for site in handle.report().sites if site.kind in ("delta_rule", "causal_conv") and site.reason]
    (site,) = refused
    assert "the results of its probe are not" in site.reason or "is no variant" in site.reason


def changed(source: str, name: str) -> Any:
    scope = dict(vars(qwen))
    exec(compile(source, "<changed>", "exec"), scope)
    return scope[name]


def test_a_function_of_another_text_is_found_by_its_results(
    build: Any, mixers: Catalog, logits: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inverse = (
        "if not is_torchdynamo_exporting():",
        "if False:",
    )  # another order of additions in the triangular systems
    texts = {
        "torch_chunk_gated_delta_rule": inverse,
        "torch_recurrent_gated_delta_rule": ("query / (query.shape[-1] ** 0.5)", "query * query.shape[-1] ** -0.5"),
        "causal_conv1d_fn": ("hidden_states.to(weight.dtype)", "hidden_states.to(weight.dtype).contiguous()"),
    }
    for name, (find, replace) in texts.items():
        source = inspect.getsource(torch_text(name))
        assert find in source
        monkeypatch.setattr(qwen, name, changed(source[source.index("def ") :].replace(find, replace), name))
    model = build("qwen3_5")
    stock = logits(model, prompt())
    with patched(model, catalog=mixers, ops=OPS) as handle:
        torch.testing.assert_close(logits(model, prompt()), stock, rtol=1e-3, atol=1e-4)
    assert handle.report().hits()["gated_delta_rule_chunk"] == 1
    assert handle.report().hits()["causal_conv1d"] == 1


def test_a_package_behind_a_function_stays_stock(build: Any, mixers: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_package(*args: Any, **kwargs: Any) -> Any:
        return torch_text("torch_chunk_gated_delta_rule")(*args, **kwargs)

    of_package.__module__ = "fla.ops"
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", of_package)
    with patched(build("qwen3_5"), catalog=mixers, ops=OPS) as handle:
        reasons = [site.reason for site in handle.report().sites if site.kind == "delta_rule" and site.reason]
    assert reasons == [
        "its torch_chunk_gated_delta_rule is that of fla.ops, and the kernels were measured against PyTorch code"
    ]


ATTRIBUTES = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}


@pytest.fixture
def with_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Qwen3.5 as older versions of transformers have it: its functions are attributes of the mixer."""
    source = (
        inspect.getsource(qwen).replace("from ... ", "from transformers ").replace("from ...", "from transformers.")
    )
    source = source.replace("from ..", "from transformers.models.").replace("from .", f"from {qwen.__package__}.")
    kept = "".join(f"        self.{name} = {function}\n" for name, function in ATTRIBUTES.items())
    source = source.replace("        self.num_v_heads = config", f"{kept}        self.num_v_heads = config", 1)
    for name, function in ATTRIBUTES.items():
        assert f"= {function}(\n" in source
        source = source.replace(f"= {function}(\n", f"= self.{name}(\n")
    (tmp_path / "qwen_with_attributes.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("qwen_with_attributes")
    del sys.modules["qwen_with_attributes"]


def test_functions_that_are_attributes_are_served(
    with_attributes: Any, mixers: Catalog, build: Any, prompt: Any
) -> None:
    usual = build("qwen3_5")
    model = with_attributes.Qwen3_5ForCausalLM(usual.config).eval()
    model.load_state_dict(usual.state_dict())
    before = {name: vars(model.model.layers[0].linear_attn)[name] for name in ATTRIBUTES}
    stock = usual.generate(prompt(2), **TOKENS)
    with patched(model, catalog=mixers, ops=OPS) as handle:
        assert torch.equal(model.generate(prompt(2), **TOKENS), stock)
        assert vars(model.model.layers[0].linear_attn).items() >= before.items()
    assert all(handle.report().hits()[name] for name in OPS)
    assert torch.equal(model.generate(prompt(2), **TOKENS), stock)


def test_an_attribute_that_is_replaced_later_is_called(
    with_attributes: Any, mixers: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model = with_attributes.Qwen3_5ForCausalLM(build("qwen3_5").config).eval()
    mixer, calls = model.model.layers[0].linear_attn, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return with_attributes.torch_chunk_gated_delta_rule(*args, **kwargs)

    with patched(model, catalog=mixers, ops=OPS) as handle:
        mixer.chunk_gated_delta_rule = counting
        logits(model, prompt())
    assert calls == [1]
    assert handle.report().hits()["gated_delta_rule_chunk"] == 0


def test_calls_are_proved_on_the_model(mixers: Catalog, build: Any) -> None:
    handle = patch(build("qwen3_5"), catalog=mixers, ops=OPS, verify=True)
    proofs = {name: site.proofs for name, site in rows(handle).items()}
    handle.unpatch()
    assert not handle.report().failed_proofs
    assert all(proofs[name] and all(proof.kernel for proof in proofs[name]) for name in OPS)


def test_hooks_of_the_convolution_still_run(mixers: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    calls: list[str] = []

    class Hook:
        def pre_forward(self, module: Any, *args: Any) -> None:
            calls.append("before")

        def post_forward(self, module: Any, output: Any) -> None:
            calls.append("after")

    model = build("qwen3_5")
    model.model.layers[0].linear_attn.conv1d._hf_hook = Hook()
    with patched(model, catalog=mixers, ops=OPS) as handle:
        logits(model, prompt())
    assert calls == ["before", "after"]
    assert handle.report().hits()["causal_conv1d"] == 1


# -- a decay of each row of the state ---------------------------------------------------------------------------------

OF_ROWS = ("kda_chunk", "kda_recurrent")


@pytest.mark.parametrize("way", WAYS)
def test_decays_of_rows_give_the_tokens_of_stock(way: str, shop: Any, build: Any, left_padded: Any) -> None:
    model, options = build("kimi_linear"), {**TOKENS, **WAYS[way]}
    inputs = left_padded((9, 4, 7))
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=shop.offer(ops=OF_ROWS), ops=OF_ROWS) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    hits = handle.report().hits()
    assert [bool(hits[name]) for name in OF_ROWS] == [True, way != "no cache"]
    assert torch.equal(model.generate(**inputs, **options), stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_of_rows_give_the_bits_of_stock(
    dtype: torch.dtype, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("kimi_linear", dtype), prompt(2, 80)  # more than a chunk of 64
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OF_ROWS), ops=OF_ROWS) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits()["kda_chunk"]
    assert torch.equal(logits(model, ids), stock)


def test_decays_of_rows_have_the_gradients_of_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("kimi_linear"), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=OF_ROWS), ops=OF_ROWS) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
    assert handle.report().hits()["kda_chunk"] == 0


@pytest.mark.parametrize("sizes", [{}, {"T": 1}])
def test_unknown_rule_is_known_by_the_decays_that_it_takes(sizes: dict[str, int], build: Any) -> None:
    kimi = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    token = bool(sizes)
    rules = [getattr(kimi, f"{'recurrent' if token else 'chunk'}_kimi_delta_attention")]
    rules.append(torch_text(f"torch_{'recurrent' if token else 'chunk'}_gated_delta_rule"))
    names = ["kda_recurrent", "gated_delta_rule_recurrent"] if token else ["kda_chunk", "gated_delta_rule_chunk"]
    known = KnownCode(CATALOG)
    for rule, expected in zip(rules, names, strict=True):
        nominated = [one for one in known.nominated(delta_rule.KIND) if delta_rule.is_of_one_token(one) == token]
        taken = [
            one.definition.name
            for one in nominated
            if delta_rule.takes_inputs_of(inspect.unwrap(rule), one, torch.device("cpu"))
        ]
        assert taken == [expected]
