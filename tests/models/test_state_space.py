"""State-space layers of Mamba-2: kernels give the tokens of stock, and other calls run stock code."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from host_graphs import eager
from shipped_records import CATALOG
from transformers import DynamicCache
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import IN_TRAINING, NEEDS_GRAD, CallSite
from tilegym_db.models.called_functions import arguments_of
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.found import KnownCode
from tilegym_db.models.parts import state_space
from tilegym_db.models.probe import are_close, matching_definitions

pytestmark = pytest.mark.sweep

PROMPT, STEP = "mamba2_chunk_scan", "mamba2_state_update"
OPS = (PROMPT, STEP)
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
CONFIGS: dict[str, Callable[..., Any]] = {
    "falcon_h1": lambda: transformers.FalconH1Config(**TINY, **HEADS, **MIXER, mamba_d_ssm=128),
    "falcon_h1 with norms": lambda: transformers.FalconH1Config(
        **TINY, **HEADS, **MIXER, mamba_d_ssm=128, mamba_rms_norm=True
    ),
    "bamba": lambda: transformers.BambaConfig(**TINY, **HEADS, **MIXER, mamba_expand=2, attn_layer_indices=[1]),
    "mamba2": lambda: transformers.Mamba2Config(**TINY, num_heads=8, head_dim=16, state_size=16, n_groups=2, expand=2),
}
TOKENS = {"max_new_tokens": 8, "do_sample": False}


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).eval()


@pytest.fixture
def scans(shop: Any) -> Catalog:
    """Kernels of state-space layers alone."""
    catalog: Catalog = shop.offer(ops=OPS)
    return catalog


def rows(handle: Any) -> list[Any]:
    return [site for site in handle.report().sites if site.definition in OPS]


# -- served, and served right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_stock(name: str, use_cache: bool, scans: Catalog, left_padded: Any) -> None:
    model, inputs = built(name), left_padded((9, 4, 7))
    options = {**TOKENS, "use_cache": use_cache}
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=scans, ops=OPS) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    hits = handle.report().hits()
    assert hits[PROMPT]
    assert bool(hits[STEP]) == use_cache
    assert all(site.counts.stock_calls == 0 and not site.bypassed for site in rows(handle))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_dtype_gives_the_bits_of_stock(
    name: str, dtype: torch.dtype, scans: Catalog, logits: Any, prompt: Any
) -> None:
    model, ids = built(name, dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=scans, ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
        assert handle.report().hits()[PROMPT]
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("name", CONFIGS)
def test_other_roundings_stay_within_a_tolerance(name: str, shop: Any, logits: Any, prompt: Any) -> None:
    model, ids = built(name), prompt(2, 80)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OPS, rounding="reference"), ops=OPS):
        assert (logits(model, ids) - stock).norm() < 1e-4 * stock.norm()


@pytest.mark.parametrize("op", OPS)
def test_kernels_are_what_answers(op: str, poison: Catalog, prompt: Any) -> None:
    model = built("mamba2")
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), patched(model, catalog=poison, ops=[op]):
        first = model(prompt(), cache_params=cache, use_cache=True).logits
        second = model(prompt(1, 1), cache_params=cache, use_cache=True).logits
    assert (second if op == STEP else first).isnan().any()


def test_a_cache_goes_on_in_pieces_and_single_tokens(scans: Catalog, prompt: Any) -> None:
    model, ids = built("falcon_h1"), prompt(2, 12)

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = (ids[:, :5], ids[:, 5:7], ids[:, 7:8], ids[:, 8:9], ids[:, 9:])
            found = [model(piece, past_key_values=cache).logits for piece in pieces]
        return [*found, cache.layers[0].recurrent_states[0]]

    stock = run()
    with patched(model, catalog=scans, ops=OPS) as handle:
        assert all(torch.equal(got, want) for got, want in zip(run(), stock, strict=True))
    assert [handle.report().hits()[name] for name in OPS] == [6, 4]


@pytest.mark.parametrize("name", ["falcon_h1", "bamba"])
def test_decoding_in_graphs_gives_the_tokens_of_stock(name: str, scans: Catalog, prompt: Any) -> None:
    model, options = built(name), {"max_new_tokens": 20, "do_sample": False}
    stock = model.generate(prompt(3), **options)
    with patched(model, catalog=scans, ops=OPS) as handle:
        decoding = Decoding(model, eager)
        decoding.install()
        for _ in range(2):
            assert torch.equal(model.generate(prompt(3), **options), stock)
        decoding.remove()
    assert decoding.report().replayed > 30
    assert handle.report().hits()[STEP]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bamba", {"causal_conv1d_update_bias", "silu_gated_rms_norm_groups"}),
        ("mamba2", {"causal_conv1d_update_bias", "silu_gated_rms_norm_groups"}),
        ("falcon_h1", {"causal_conv1d_update_bias"}),
    ],
)
def test_step_with_bias_and_gated_norm_are_found(name: str, expected: set[str]) -> None:
    report = patch(built(name, torch.bfloat16), dry_run=True).report()
    assert {site.definition for site in report.sites} >= expected


# -- left to stock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_training_runs_stock_with_its_gradients(name: str, poison: Catalog, prompt: Any) -> None:
    def gradients(model: Any) -> list[torch.Tensor | None]:
        model.train()
        model(prompt(2), labels=prompt(2)).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    stock, model = gradients(built(name)), built(name)
    with patched(model, catalog=poison, ops=OPS) as handle:
        found = gradients(model)
    assert all(got is want is None or torch.equal(got, want) for got, want in zip(found, stock, strict=True))
    assert handle.report().kernel_calls == 0
    assert any(IN_TRAINING in site.bypassed for site in rows(handle))


def test_a_gradient_in_eval_mode_runs_stock(poison: Catalog, prompt: Any) -> None:
    model = built("bamba")
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert model(prompt()).logits.isfinite().all()
    assert all(site.bypassed.keys() <= {NEEDS_GRAD} for site in rows(handle))


@pytest.mark.parametrize("name", CONFIGS)
def test_unpatching_restores_classes_and_results(name: str, poison: Catalog, logits: Any, prompt: Any) -> None:
    model = built(name)
    classes, stock = [type(module) for module in model.modules()], logits(model, prompt())
    handle = patch(model, catalog=poison, ops=OPS)
    assert [type(module) for module in model.modules()] != classes
    twin = copy.deepcopy(model)
    handle.unpatch()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(logits(model, prompt()), stock)
    assert torch.equal(logits(twin, prompt()), stock)


@pytest.mark.turn("tilegym_db/models/parts/state_space.py")  # compilation; eager code is compared daily
def test_compiled_code_gives_the_results_of_stock(scans: Catalog, logits: Any, prompt: Any) -> None:
    model = built("falcon_h1")
    stock = logits(model, prompt())
    with patched(model, catalog=scans, ops=OPS):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(logits(compiled, prompt()), stock)
    torch._dynamo.reset()


# -- calls ------------------------------------------------------------------------------------------------------------


def torch_text(name: str) -> Any:
    return inspect.unwrap(getattr(falcon, name))


def sequences(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"hidden_states": (2, 5, 4, 8), "dt": (2, 5, 4), "A": (4,), "B": (2, 5, 2, 8), "C": (2, 5, 2, 8)}
    given = {name: torch.randn(shape) for name, shape in {**shapes, "D": (4,), "dt_bias": (4,)}.items()}
    options = {"chunk_size": 4, "dt_softplus": True, "dt_limit": (0.1, float("inf")), "return_final_states": True}
    return {**given, "A": -given["A"].abs(), **options, "z": None, **changes}


def tokens(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    spread = {name: torch.randn(2, 4, 1).expand(2, 4, 8) for name in ("dt",)}
    spread |= {name: torch.randn(4, 1).expand(4, 8) for name in ("D", "dt_bias")}
    own = {"state": torch.randn(2, 4, 8, 6), "hidden_states": torch.randn(2, 4, 8)}
    groups = {name: torch.randn(2, 2, 6) for name in ("B", "C")}
    rates = (-torch.rand(4, 1, 1)).expand(4, 8, 6)
    return {**own, **spread, "A": rates, **groups, "dt_softplus": True, "z": None, **changes}


def served(name: str) -> tuple[Callable[..., Any], CallSite, list[Any]]:
    """Return a function of the model whose kernel is its own code, its call site, and the inputs that the kernel saw."""
    function, seen = torch_text(name), []

    def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any, state: Any, smallest: float) -> Any:
        seen.append((x, state, smallest))
        options = {"dt_softplus": True, "dt_limit": (smallest, float("inf")), "return_final_states": True}
        return function(x, dt, A, B, C, 4, D=D, dt_bias=bias, initial_states=state, **options)

    def update(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any) -> Any:
        seen.append((x, state))
        return function(*state_space._spread(state, x, dt, A, B, C, D, bias), dt_softplus=True)

    is_scan = name == state_space.SCAN
    site = CallSite(scan if is_scan else update)
    make = state_space.scan if is_scan else state_space.update
    return make(getattr(falcon, name), site, arguments_of(function)), site, seen


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_state_may_be_missing_and_unwanted(keeps: bool, has_state: bool) -> None:
    call, _, seen = served(state_space.SCAN)
    given = sequences(return_final_states=keeps, initial_states=torch.randn(2, 4, 8, 8) if has_state else None)
    with torch.no_grad():
        got, want = call(**given), falcon.mamba2_chunk_scan(**given)
    assert len(seen) == 1
    assert seen[0][1].dtype == torch.float32
    assert seen[0][2] == pytest.approx(0.1)
    got, want = (value if keeps else (value,) for value in (got, want))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("gate", [None, torch.full((2, 4, 8), 0.7)])
def test_an_update_writes_the_state_and_opens_the_gate(gate: torch.Tensor | None) -> None:
    call, _, seen = served(state_space.UPDATE)
    given, twin = tokens(z=gate), tokens(z=gate)
    with torch.no_grad():
        got, want = call(**given), falcon.mamba2_selective_state_update(**twin)
    assert len(seen) == 1
    assert torch.equal(got, want)
    assert torch.equal(given["state"], twin["state"])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (state_space.SCAN, {"dt_softplus": False, "dt": torch.rand(2, 5, 4)}, state_space.NO_SOFTPLUS),
        (state_space.SCAN, {"D": None}, state_space.NO_BIAS),
        (state_space.SCAN, {"dt_bias": None}, state_space.NO_BIAS),
        (state_space.SCAN, {"dt_limit": (0.0, 1.0)}, state_space.LARGEST_STEP),
        (state_space.UPDATE, {"dt_softplus": False, "dt": torch.rand(2, 4, 8)}, state_space.NO_SOFTPLUS),
        (state_space.UPDATE, {"D": None}, state_space.NO_BIAS),
        (state_space.UPDATE, {"dt": torch.rand(2, 4, 8)}, state_space.NOT_SPREAD),
        (state_space.UPDATE, {"A": -torch.rand(4, 8, 6)}, state_space.NOT_SPREAD),
        (state_space.UPDATE, {"dt_bias": torch.rand(4, 8)}, state_space.NOT_SPREAD),
    ],
)
def test_other_calls_run_stock(name: str, changes: dict[str, Any], reason: str) -> None:
    call, site, seen = served(name)
    make = sequences if name == state_space.SCAN else tokens
    with torch.no_grad():
        got, want = call(**make(**changes)), getattr(falcon, name)(**make(**changes))
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert not seen
    assert site.bypassed == {reason: 1}


def test_packed_sequences_run_stock() -> None:
    call, site, seen = served(state_space.SCAN)
    with torch.no_grad(), pytest.raises(ValueError, match="packed sequences"):
        call(**sequences(seq_idx=torch.zeros(2, 5)))
    assert not seen
    assert site.bypassed == {"the call has seq_idx": 1}


# -- found ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "definition"), [(state_space.SCAN, PROMPT), (state_space.UPDATE, STEP)])
def test_a_function_of_a_model_computes_its_definition(name: str, definition: str) -> None:
    known, function = KnownCode(CATALOG), torch_text(name)
    (match,) = known.look_up(state_space.KIND, function, {}, "it", {})
    probe = state_space.probe_function(function, match.definition, torch.device("cpu"))
    assert matching_definitions(probe, [match.definition], CATALOG, are_close) == [definition]


@pytest.mark.parametrize(
    ("name", "find", "replace"),
    [
        (state_space.SCAN, "min=dt_limit[0]", "min=0.0"),
        (state_space.SCAN, "D[..., None] *", "0.5 * D[..., None] *"),
        (state_space.SCAN, "A_cumsum[:, :, :, -1:] - A_cumsum", "A_cumsum[:, :, :, -1:] - 0.5 * A_cumsum"),
        (state_space.SCAN, "B.float().repeat_interleave(num_heads // num_groups, dim=2, output_size=num_heads)",
         "B.float().repeat(1, 1, num_heads // num_groups, 1)"),
        (state_space.UPDATE, "dt.float() * A.float()", "0.5 * dt.float() * A.float()"),
        (state_space.UPDATE, "state.copy_(ssm_states.to(state.dtype))", "pass"),
        (state_space.UPDATE, "out + hidden_states * D", "out"),
    ],
)  # fmt: skip
def test_a_function_with_other_maths_stays_stock(
    name: str, find: str, replace: str, scans: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(torch_text(name))
    source = source[source.index("def ") :]
    assert find in source
    space = dict(vars(falcon))
    exec(compile(source.replace(find, replace), "<changed>", "exec"), space)
    monkeypatch.setattr(falcon, name, space[name])
    with patched(built("falcon_h1"), catalog=scans, ops=OPS) as handle:
        (site,) = [site for site in handle.report().sites if site.kind == state_space.KIND and site.reason]
    assert "the results of its probe are not" in site.reason or "is no variant" in site.reason
