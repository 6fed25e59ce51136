"""``verify-model`` and ``model-bench`` on a tiny config, with kernels for the CPU: results that a user reads and stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from raising import raises
from torch._dynamo.utils import counters
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from typer.testing import CliRunner, Result

from tilegym_db import Catalog
from tilegym_db.cli import models, sql
from tilegym_db.errors import HardwareError, ToolchainError, UsageError
from tilegym_db.measurement.machine import select_machine
from tilegym_db.models.bench.generation import Generation
from tilegym_db.models.bench.model_bench import WARM_UP_ROUNDS, ModelBenchOptions, compare, kernels_of
from tilegym_db.models.bench.model_bench import model_bench as run_model_bench
from tilegym_db.models.patch import model_tag, patched
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.records.loop import ModelRun
from tilegym_db.store.side_files import read_model_run

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
TWICE = "    computed = stock.run({inputs})\n    for out in {outputs}:\n        out.copy_(2 * computed)\n"


def invoke(command: Callable[..., None], *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def moe_config(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-MoE"
    folder.mkdir()
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps({**TINY, **sizes, "model_type": "qwen3_moe"}))
    return folder


# -- models from a config ---------------------------------------------------------------------------------------------


def test_model_from_a_config_is_the_same_each_time(config: Path) -> None:
    state = torch.random.get_rng_state()
    models = [build_model(load_config(path), "cpu", "float32") for path in (config, config / "config.json")]
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(one, other)
    assert models[0].model.norm.weight.std() > 0.05  # no two variants of a norm agree on weights of one
    assert (model_tag(config), model_tag(config / "config.json"), model_tag(Path("a/Other.json"))) == (
        "tiny-llama",
        "tiny-llama",
        "other",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_model_keeps_float32_like_a_checkpoint(dtype: str, build: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(build("deepseek_v4").config.to_json_string(use_diff=False))
    parameters = dict(build_model(load_config(path), "cpu", dtype).named_parameters())
    for name in (
        "model.layers.0.attn_hc.fn",
        "model.layers.1.ffn_hc.scale",
        "model.hc_head.hc_base",
    ):
        assert parameters[name].dtype == torch.float32
    norm = modeling_deepseek_v4.DeepseekV4RMSNorm(8)
    rounds = norm(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16  # not in transformers 5.17
    assert parameters["model.norm.weight"].dtype == (torch.float32 if rounds else getattr(torch, dtype))
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"):
        assert parameters[name].dtype == getattr(torch, dtype)


def test_promoting_norms_are_narrowed(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # as transformers 5.17 has it
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)

    path = tmp_path / "config.json"
    path.write_text(build("deepseek_v4").config.to_json_string(use_diff=False))
    monkeypatch.setattr(modeling_deepseek_v4.DeepseekV4RMSNorm, "forward", forward)
    parameters = dict(build_model(load_config(path), "cpu", "bfloat16").named_parameters())
    for name in (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.q_a_norm.weight",
    ):
        assert parameters[name].dtype == torch.bfloat16
        assert len(parameters[name].unique()) > 1
    assert parameters["model.layers.0.attn_hc.fn"].dtype == torch.float32


def test_only_the_first_layers_are_kept_where_that_is_asked(config: Path) -> None:
    assert len(build_model(load_config(config, 1), "cpu", "float32").model.layers) == 1
    with raises(UsageError, "layers_out_of_range", "2 layers", "3"):
        load_config(config, 3)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{", "config"),
        ("[]", "model_type"),
        ('{"model_type": "lama"}', "model_type 'lama'"),
        ('{"model_type": ["llama"]}', "model_type"),
        ('{"model_type": {"name": "llama"}}', "model_type"),
        ('\N{ZERO WIDTH NO-BREAK SPACE}{"model_type": "llama"}', "byte order mark"),
    ],
)
def test_what_is_no_config_is_refused_with_the_file(content: str, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=fact) as refused:
        load_config(path)
    assert str(path) in str(refused.value)


def test_a_config_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match="FIFO"):
        load_config(tmp_path)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "vocab_size": 96},
    "clip_vision_model": {**SMALL, "image_size": 16, "patch_size": 8},
    "t5": {"vocab_size": 96, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2},
    "whisper": {
        **{"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8},
        **{"max_source_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"decoder_start_token_id": 1},
    },
    "clip": {
        "text_config": {**SMALL, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "vision_config": {**SMALL, "image_size": 16, "patch_size": 8},
    },
    "siglip": {
        "text_config": {**SMALL, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "vision_config": {**SMALL, "image_size": 16, "patch_size": 8},
    },
    "qwen3_5": {"text_config": {**TINY, "model_type": "qwen3_5_text", "num_hidden_layers": 8}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_every_form_are_verified(kind: str, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **OTHERS[kind]}))
    result = invoke(models.verify_command, path, "--gpu", "cpu", "--prompt-tokens", 7, "--layers", 1)
    assert result.exit_code == 0, result.output
    assert "proved nothing" not in result.stderr


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_models_that_are_no_decoders_are_timed(kind: str, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **OTHERS[kind]}))
    options = ModelBenchOptions(dtype="float32", batch=1, prompt=5, new=2, rounds=5)
    run, _ = run_model_bench(path, select_machine("cpu"), options)
    assert run.new_tokens == (0 if kind == "bert" else 2)  # an encoder is timed on its forward


# -- verify-model -----------------------------------------------------------------------------------------------------


def test_every_proof_is_shown_with_its_errors(kernels: Catalog, config: Path) -> None:
    result = invoke(models.verify_command, config, "--gpu", "cpu", "--prompt-tokens", 7, "--batch", 2, "--wide")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.endswith("proved")]
    assert len(rows) == 14  # attention_decode and kv_cache_concat at two lengths
    assert any("LlamaRMSNorm x5" in row and "M=14,N=64" in row and "rms_norm_cpu" in row for row in rows)
    assert "14 proved, 0 failed, 0 run stock code anyway" in result.stderr


def test_a_kernel_that_fails_is_a_finding(shop: Any, config: Path) -> None:
    shop.offer(TWICE)
    result = invoke(models.verify_command, config, "--gpu", "cpu", "--json")
    assert result.exit_code == 1
    sites = json.loads(result.stdout)["sites"]
    reasons = [proof["reason"] for site in sites if site["definition"] == "rms_norm" for proof in site["proofs"]]
    assert len(reasons) == 2
    assert all("times that of stock; at most" in reason for reason in reasons)


def test_captured_calls_are_kept_once_in_the_users_own_catalog(config: Path, home: Path) -> None:
    first = invoke(
        models.verify_command, config, "--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", 7, "--capture"
    )
    again = invoke(
        models.verify_command, config, "--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", 7, "--capture"
    )
    assert first.exit_code == again.exit_code == 0
    assert (
        "kept 14 workloads, 0 exist already. Next: tilegym-db bench attention_decode attention_prefill fused_add_rms_norm "
        "kv_cache_concat kv_cache_prefill rms_norm rope_neox swiglu" in first.stderr
    )
    assert "kept 0 workloads, 14 exist already." in again.stderr
    kept = [w for w in Catalog.default().workloads_for("swiglu") if "captured" in w.tags]
    assert [(w.axes, w.dtypes, w.tags[:2]) for w in kept] == [
        ({"M": 7, "I": 48}, {"T": "float32"}, ("model:tiny-llama", "stage:prefill")),
        ({"M": 1, "I": 48}, {"T": "float32"}, ("model:tiny-llama", "stage:decode")),
    ]
    assert (home / "catalog" / "workloads" / "activation" / "swiglu.jsonl").is_file()


@pytest.mark.turn("tilegym_db/models/bench/", "tilegym_db/models/capture.py")  # verifies and measures a model
def test_what_was_captured_can_be_measured(kernels: Catalog, config: Path) -> None:
    from tilegym_db import bench

    invoke(models.verify_command, config, "--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", 7, "--capture")
    report = bench(("rope_neox_cpu",), devices="cpu", workload="captured", quick=True)
    passed = [trace for trace in report.traces if trace.solution == "rope_neox_cpu"]
    assert {(trace.axes["S"], trace.status) for trace in passed} == {(7, "PASSED"), (1, "PASSED")}


@pytest.mark.parametrize(
    ("option", "error"),
    [(("--gpu", "h200"), HardwareError), (("--dtype", "int8"), UsageError), (("--batch", 0), UsageError)],
)
def test_what_cannot_be_run_is_wrong_usage(option: tuple[Any, ...], error: type, config: Path) -> None:
    for command in (models.verify_command, models.bench_command):
        result = invoke(command, config, *(() if "--gpu" in option else ("--gpu", "cpu")), *option)
        assert isinstance(result.exception, error)
        assert result.exception.exit_code == 2


# -- model-bench ------------------------------------------------------------------------------------------------------

OWN = "WHERE origin <> 'shipped'"
"""Of the runs that the database holds, those that a test made."""
BRIEF = ("--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", 8, "--max-new-tokens", 4, "--rounds", 3)


class InGraphs:
    """Forwards of a model that are replays, which count no calls, unless they are left out."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.forward, self.is_left_out = forward, lambda: False

    def __call__(self) -> None:
        if self.is_left_out():
            self.forward()

    def report(self) -> None:
        """Nothing of it is in the report of the patch."""


def test_kernels_of_replays_are_counted_without_graphs(kernels: Catalog, config: Path, monkeypatch: Any) -> None:
    model = build_model(load_config(config), "cpu", "float32")
    with torch.no_grad(), patched(model, catalog=kernels, graphs=False) as handle, monkeypatch.context() as changed:
        graphs: Any = InGraphs(lambda: model(torch.arange(8)[None]))
        changed.setattr(handle, "_forwards", graphs)
        counted = kernels_of(handle, graphs)
        assert (counted["rms_norm"], counted["swiglu"]) == (2, 2)
        assert not graphs.is_left_out()


def test_a_run_is_printed_stored_and_queryable(kernels: Catalog, config: Path, home: Path) -> None:
    result = invoke(models.bench_command, config, *BRIEF, "--batch", 2, "--verify", "--json")
    assert result.exit_code == 0, result.output
    run = ModelRun.from_dict(json.loads(result.stdout))
    (stored,) = (home / "model_runs").glob("*.json")
    assert read_model_run(stored, home) == (run, "local")
    assert run.evidence_level == "model"
    assert (run.model, run.model_class, run.batch, run.new_tokens) == ("tiny-llama", "LlamaForCausalLM", 2, 4)
    # five norms, three of them of a sum; two layers; a prefill and three steps of decoding
    attention = {"attention_prefill": 2, "attention_decode": 6, "kv_cache_prefill": 2, "kv_cache_concat": 6}
    assert run.kernels == {"fused_add_rms_norm": 12, "rms_norm": 8, "swiglu": 8, "rope_neox": 8, **attention}
    assert run.equal_tokens == 8
    assert run.proved
    assert run.patched.peak_memory_bytes is None
    for timing in (run.stock, run.patched):
        assert timing.ttft_ms.ci_low is None  # three rounds have no interval
        assert timing.tokens_per_s == pytest.approx(8 / timing.total_ms.median * 1e3, rel=1e-4)
    columns = "model, gpu, evidence_level, batch, patched_ttft_ms, speedup, kernels['swiglu'] AS n"
    (row,) = json.loads(invoke(sql.command, f"SELECT {columns} FROM model_runs {OWN}", "--json").stdout)
    assert row == {
        "model": "tiny-llama",
        "gpu": "cpu",
        "evidence_level": "model",
        "batch": 2,
        "patched_ttft_ms": run.patched.ttft_ms.median,
        "speedup": run.total_speedup.median,
        "n": 8,
    }


@pytest.mark.turn("tilegym_db/models/bench/")  # measures a model; the test before does so daily
def test_a_run_without_kernels_says_so(config: Path) -> None:
    result = invoke(models.bench_command, config, *BRIEF, "--wide")
    assert result.exit_code == 0, result.output
    assert "calls by kernel in one generation: none" in result.stderr
    assert "4 of 4 greedy tokens are those of stock" in result.stderr
    assert "no speedup is claimed: no kernel ran in the patched model" in result.stderr
    assert result.stdout.count("no kernel ran") == 3
    assert " to " not in result.stdout.split("tokens per second")[1].splitlines()[0]  # and no interval
    assert "nothing is published for cpu" in result.stderr
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[3:6]] == [
        "to first token, ms",
        "per output token, ms",
        "tokens per second",
    ]


@pytest.mark.turn("tilegym_db/models/bench/")  # measures a model
@pytest.mark.filterwarnings("ignore:tilegym-db")
def test_a_kernel_that_raises_is_a_finding(shop: Any, config: Path) -> None:
    shop.offer("    raise ValueError('boom')\n")
    result = invoke(models.bench_command, config, *BRIEF)
    assert result.exit_code == 1
    assert "boom" in result.stderr


def test_compare_alternates_and_drops_the_warm_up() -> None:
    order: list[str] = []
    rounds: list[tuple[int, int]] = []
    race = compare({name: way(name, order) for name in ("stock", "patched")}, 2, lambda *done: rounds.append(done))
    assert order == ["stock", "patched", "patched", "stock"] * 3
    assert WARM_UP_ROUNDS == 4
    assert {name: [one.total_ms for one in ones] for name, ones in race.found.items()} == {
        "stock": [9, 12],
        "patched": [10, 11],
    }
    assert rounds == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]
    assert race.absent == {}


def way(name: str, order: list[str], fails_in: int = 99, error: type[Exception] = ToolchainError) -> Any:
    """A way that remembers when it ran, and fails at its n-th call."""

    def generate() -> Generation:
        order.append(name)
        if order.count(name) == fails_in:
            raise error("no more\nand this")
        return Generation(1.0, 1.0, len(order), torch.zeros(1, 2))

    return generate


def test_failing_mode_is_left_out_and_the_others_finish() -> None:
    order: list[str] = []
    ways = {"stock": way("stock", order), "patched": way("patched", order), "liger": way("liger", order, fails_in=3)}
    race = compare({**ways, "stock_compiled": way("stock_compiled", order, 1, RuntimeError)}, 3)
    assert race.absent == {
        "liger": "it failed in round 3: no more",
        "stock_compiled": "it failed in round 1: RuntimeError: no more",
    }
    assert {name: len(ones) for name, ones in race.found.items()} == {"stock": 3, "patched": 3}
    assert order.count("liger") == 3


@pytest.mark.parametrize("name", ["stock", "patched"])
def test_without_stock_or_patched_there_is_no_comparison(name: str) -> None:
    order: list[str] = []
    with pytest.raises(RuntimeError, match="no more"):
        compare(
            {other: way(other, order, 1 if other == name else 99, RuntimeError) for other in ("stock", "patched")}, 1
        )


@pytest.mark.turn("tilegym_db/models/bench/")  # measures a model
def test_a_prefill_alone_has_prompt_tokens_a_second_and_no_steps(kernels: Catalog, config: Path) -> None:
    arguments = (
        "--gpu",
        "cpu",
        "--dtype",
        "float32",
        "--prompt-tokens",
        8,
        "--batch",
        2,
        "--rounds",
        2,
        "--max-new-tokens",
        0,
    )
    result = invoke(models.bench_command, config, *arguments, "--static-cache", "--json")
    assert result.exit_code == 0, result.output
    run = ModelRun.from_dict(json.loads(result.stdout))
    assert (run.new_tokens, run.compared_tokens, run.equal_tokens) == (0, 2, 2)
    assert (run.patched.tpot_ms, run.patched.tokens_per_s, run.tpot_speedup) == (None, None, None)
    cached = {"attention_prefill": 2, "kv_cache_prefill": 2}
    assert run.kernels == {"fused_add_rms_norm": 3, "rms_norm": 2, "swiglu": 2, "rope_neox": 2, **cached}
    assert set(run.absent) == {"stock_static_cache", "patched_static_cache"}
    (row,) = asked(f"SELECT patched_prefill_tokens_per_s AS n, patched_tokens_per_s AS m FROM model_runs {OWN}")
    assert row == {"n": pytest.approx(16 / run.patched.ttft_ms.median * 1e3), "m": None}
    result = invoke(models.bench_command, config, *arguments)
    assert "prompt tokens per second" in result.stdout
    assert "per output token" not in result.stdout


def asked(question: str) -> Any:
    return json.loads(invoke(sql.command, question, "--json").stdout)


@pytest.mark.turn("tilegym_db/models/bench/")  # three ways of a model, compiled
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_modes_are_compared_with_compiled_modes(
    backend: str, kernels: Catalog, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "dtype": "float32",
        "batch": 2,
        "prompt": 8,
        "rounds": 2,
        "layers": 1,
        "backend": backend,
    }
    torch.compiler.reset()
    counters.clear()
    ways = ModelBenchOptions(new=4, with_static_cache=True, with_compiled_prefill=True, **given)
    run, handle = run_model_bench(config, select_machine("cpu"), ways)
    assert list(run.ways) == ["stock_again", "stock_static_cache", "patched_static_cache"]
    patched = run.ways["patched_static_cache"]
    assert set(patched.against) == {"stock", "stock_static_cache"}
    assert patched.equal_tokens == run.ways["stock_static_cache"].equal_tokens == 8
    # A prompt eagerly, then three compiled steps: there the sum is the compiler's, and the norm after it a kernel's.
    assert patched.kernels == {
        "attention_prefill": 1, "fused_add_rms_norm": 1, "rms_norm": 2 + 3 * 3, "swiglu": 4, "rope_neox": 4,
    }  # fmt: skip
    models.print_run(run, wide=True)
    printed = capsys.readouterr().out
    per_token = patched.against["stock_static_cache"].tpot
    assert per_token.ci_low is None  # two rounds have no interval
    assert f"{per_token.median:.3f}x" in printed
    assert run.ways["stock_static_cache"].kernels == {}
    assert all("--max-new-tokens 0" in run.absent[name] for name in ("stock_compiled", "patched_compiled"))
    prefill_alone = ModelBenchOptions(new=0, with_compiled_prefill=True, **given)
    prefill, _ = run_model_bench(config, select_machine("cpu"), prefill_alone)
    assert prefill.ways["patched_compiled"].kernels == {"rms_norm": 3, "swiglu": 1, "rope_neox": 1}
    assert prefill.ways["patched_compiled"].equal_tokens == 2
    assert not handle.report().failures
    assert not counters["graph_break"]


# -- libraries beside it ----------------------------------------------------------------------------------------------

LIGER = """
import transformers.models.llama.modeling_llama as llama

class LlamaNormOfAnother(llama.LlamaRMSNorm):
    pass

def apply_liger_kernel_to_llama():
    print("patching")
    llama.LlamaRMSNorm = LlamaNormOfAnother
"""


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the library, found by the processes that are started from here. Its kernels are stock code."""
    folder = tmp_path / "site" / "liger_kernel"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "transformers.py").write_text(LIGER)
    metadata = folder.parent / "liger_kernel-9.8.7.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.mark.turn("tilegym_db/models/bench/")  # a process that loads PyTorch
def test_a_library_runs_in_its_own_process_on_the_same_weights(kernels: Catalog, config: Path, liger: Path) -> None:
    result = invoke(models.bench_command, config, *BRIEF, "--beside", "liger", "--beside", "tilegym", "--json")
    assert result.exit_code == 0, result.output
    run = ModelRun.from_dict(json.loads(result.stdout))
    assert run.ways["liger"].library == "liger-kernel 9.8.7"
    assert run.ways["liger"].equal_tokens == 4
    assert set(run.ways["liger"].against) == {"stock", "patched"}
    assert run.absent == {"tilegym": "it is not installed. Try: pip install --no-deps tilegym"}
    rows = asked(
        f"SELECT way, tokens_per_s > 0 AS timed, speedup > 0 AS compared, reason FROM model_ways {OWN} ORDER BY ALL"
    )
    assert rows == [
        {"way": "liger", "timed": True, "compared": True, "reason": ""},
        {"way": "patched", "timed": True, "compared": True, "reason": ""},
        {"way": "stock", "timed": True, "compared": None, "reason": ""},
        {"way": "stock_again", "timed": True, "compared": True, "reason": ""},
        {"way": "tilegym", "timed": None, "compared": None, "reason": run.absent["tilegym"]},
    ]
    import transformers.models.llama.modeling_llama as llama

    assert llama.LlamaRMSNorm.__module__.startswith("transformers")


@pytest.mark.turn("tilegym_db/models/bench/")  # a process that loads PyTorch
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LIGER.replace("_to_llama", "_to_other"), "model type 'llama'"),
        (LIGER.replace("llama.LlamaRMSNorm = ", "other = "), "LlamaForCausalLM"),
        ("raise ImportError('needs a GPU')", "ImportError: needs a GPU."),
        ("import os; os._exit(7)", "exit code 7"),
        (LIGER + "    LlamaNormOfAnother.forward = None", "TypeError: 'NoneType' object"),
    ],
)
def test_a_library_that_cannot_be_had_says_why(
    source: str, reason: str, kernels: Catalog, config: Path, liger: Path
) -> None:
    (liger / "transformers.py").write_text(source)
    options = ModelBenchOptions(dtype="float32", prompt=4, new=2, rounds=1, layers=1, beside=["liger"])
    run, _ = run_model_bench(config, select_machine("cpu"), options)
    assert set(run.ways) == {"stock_again"}
    assert reason in run.absent["liger"]


def test_a_library_that_is_not_known_is_wrong_usage(config: Path) -> None:
    result = invoke(models.bench_command, config, *BRIEF, "--beside", "tigerkernel")
    with raises(UsageError, "peer_unknown", "liger", "tilegym", "'tigerkernel'"):
        raise result.exception or AssertionError


@pytest.mark.turn("tilegym_db/models/bench/")  # measures a model
def test_a_profile_on_a_cpu_says_that_there_is_no_gpu(kernels: Catalog, config: Path) -> None:
    result = invoke(models.bench_command, config, *BRIEF, "--profile")
    assert result.exit_code == 0, result.output
    assert "this machine has no GPU, so the call took no GPU time" in result.stderr


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.turn("tilegym_db/models/bench/")  # measures a model
@pytest.mark.parametrize("new", [0, 3])
def test_stock_runs_with_each_implementation_of_experts(new: int, kernels: Catalog, moe_config: Path) -> None:
    asked = [one for name in ("eager", "batched_mm", "grouped_mm") for one in ("--experts", name)]
    found = invoke(
        models.bench_command, moe_config, "--gpu", "cpu", "--dtype", "float32", "--batch", 2, "--prompt-tokens", 9,
        "--max-new-tokens", new, "--rounds", 8, *asked, "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    run = ModelRun.from_dict(json.loads(found.stdout), "the output")
    calls = 2 * max(new, 1)
    assert run.kernels["moe_experts"] == calls
    assert run.experts == {"grouped_mm": calls}
    assert run.equal_tokens == run.compared_tokens
    for name in ("stock_eager", "stock_batched_mm", "stock_grouped_mm"):
        assert set(run.ways[name].against) == {"stock", "patched"}
        assert run.ways[name].equal_tokens == run.compared_tokens


def test_a_model_without_experts_has_no_other_implementation(kernels: Catalog, config: Path) -> None:
    machine, options = select_machine("cpu"), ModelBenchOptions("float32", 1, 5, 0, 2, experts=("eager",))
    run, _ = run_model_bench(config, machine, options)
    assert run.experts == {}
    assert run.absent == {"stock_eager": "the model has no experts whose implementation transformers chooses."}


def test_verify_model_names_the_experts_implementation(kernels: Catalog, moe_config: Path) -> None:
    found = invoke(models.verify_command, moe_config, "--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", 9)
    assert found.exit_code == 0, found.output
    assert "moe_experts" in found.output
    assert "Qwen3MoeExperts x2: the model's own code is grouped_mm" in found.output
