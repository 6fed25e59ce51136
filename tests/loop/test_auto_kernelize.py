"""The loop over a tiny Qwen3-MoE on a CPU, whose author is a script; and its rules."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.loop import from_model
from tilegym_db.loop.auto import Kernelizer, auto_kernelize
from tilegym_db.loop.from_model import ModelState
from tilegym_db.loop.tasks import attempts_of
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.records.loop import Experiment, Task
from tilegym_db.store.opening import open_store
from tilegym_db.store.side_files import journaled

REAL = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 1024, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1024, "max_position_embeddings": 2048, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# rms_norm gets a wrong kernel, then a slow one, then good ones. Everything else gets one that is wrong, the same every time, so
# that it is run once.
AUTHOR = '''
import json, pathlib, re, sys
prompt = sys.stdin.read()
name = re.search(r"kernel for `([a-z_0-9]+)`", prompt)[1]
signature = re.search(r"`(run\\(.*?\\))`", prompt)[1]
with pathlib.Path(sys.argv[1]).open("a") as calls:
    calls.write(name + "\\n")
attempt = pathlib.Path(sys.argv[1]).read_text().splitlines().count(name)
good = f"""import torch  # attempt {attempt}: measured again where the machine was too busy to tell


def run(x, weight, eps, out):
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    out.mul_(weight)
"""
slow = """import torch


def run(x, weight, eps, out):
    wide = x.double()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    out.copy_((wide * scale * weight.double()).to(x.dtype))
"""
wrong = f"def {signature}:\\n    out.zero_()\\n"
written = {1: wrong, 2: slow}.get(attempt, good) if name == "rms_norm" else wrong
pathlib.Path("kernel.py").write_text(written)
layouts = {"x": "row_contiguous", "out": "row_contiguous"} if name == "rms_norm" else {}
spec = {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}, "layouts": layouts}
pathlib.Path("solution.json").write_text(json.dumps({
    "name": "mine", "definition": name, "author": "a script", "spec": spec, "sources": [{"path": "kernel.py"}]}))
'''


@pytest.fixture
def state(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelState:
    """A tiny model beside a catalog of two of its operators, on a machine whose noise is not what is asked about."""
    for name in ("rms_norm", "fused_add_rms_norm"):
        shutil.copytree(
            REAL / "solutions/norm" / name / f"{name}_stock", checkout / f"solutions/norm/{name}/{name}_stock"
        )
        (checkout / "definitions/norm").mkdir(parents=True, exist_ok=True)
        shutil.copy(REAL / f"definitions/norm/{name}.json", checkout / "definitions/norm")
    (tmp_path / "Tiny-MoE").mkdir()
    (tmp_path / "Tiny-MoE" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(from_model, "MIN_TOTAL_SPEEDUP", 0.2)
    monkeypatch.setattr(from_model, "MIN_SHARE", 0.0)  # one operator's share is about 1%, now below and now above
    return ModelState(tmp_path / "Tiny-MoE", cpu_machine(), dtype="float32", prompt=1024, rounds=8)


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> Counter[str]:
    """How often a model was measured in each of these ways, from now on."""
    found: Counter[str] = Counter()
    for name in names:
        owner, held = (from_model, name) if name == "stock_times" else (ModelState, name)
        real = getattr(owner, held)

        def noted(*args: Any, name: str = name, real: Any = real) -> Any:
            found[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, held, noted)
    return found


@pytest.mark.alone  # the kernel must be found faster
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_coverage_rises_after_a_wrong_a_slow_and_a_good_kernel(
    state: ModelState, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calls = tmp_path / "author.py", tmp_path / "calls"
    script.write_text(AUTHOR)
    said: list[str] = []
    options = {"language": "python", "author": f"{sys.executable} {script} {calls}", "max_attempts": 7}
    measured = counted(monkeypatch, "pieces", "coverage", "stock_times")
    done, why = auto_kernelize(state, **options, say=said.append)  # type: ignore[arg-type]
    # What a discarded change leaves as it was is not measured again, nor what was measured with a change that was kept.
    kept_and_tried = (sum(one.decision == "keep" for one in done), sum(one.after is not None for one in done))
    assert measured == {"pieces": 1 + kept_and_tried[0], "coverage": 1 + kept_and_tried[1], "stock_times": 1}
    assert why.startswith("every piece above 1% of the time is decided"), said
    by_definition = {one.definition: one for one in done}
    kept = by_definition["rms_norm"]
    assert kept.decision == "keep", kept.reason
    assert kept.after is not None
    assert kept.after.median > kept.before.median
    assert kept.before.time_of == kept.after.time_of == "cpu"
    assert all(one.decision == "discard" and one.reason for one in done if one is not kept)
    (task,) = [one for one in journaled(Task, home) if one.definition == "rms_norm"]
    attempts = attempts_of(task)
    assert [one["verdict"] for one in attempts] == ["refused"] * (len(attempts) - 1) + ["promoted"]
    assert "INCORRECT_NUMERICAL" in attempts[0]["reason"]
    assert "over rms_norm_stock" in attempts[1]["reason"]
    assert len({one.definition for one in done}) == 2  # kept one, and discarded the other with its reason
    assert state.coverage().median > 0
    with open_store(read_only=True) as store:
        (row,) = store.rows(
            "SELECT decision, coverage_after > coverage_before AS rose FROM experiments WHERE definition = 'rms_norm'"
        )
    assert row == {"decision": "keep", "rose": True}
    # Started again, it has nothing to do: no author is asked, nothing is measured.
    written, traces = calls.read_text(), sorted((home / "runs").iterdir())
    again, why = auto_kernelize(state, **options)  # type: ignore[arg-type]
    assert again == []
    assert why.startswith("every piece above 1% of the time is decided")
    assert (calls.read_text(), sorted((home / "runs").iterdir())) == (written, traces)
    assert len(journaled(Task, home)) == len(journaled(Experiment, home)) == len(done)
    assert Kernelizer(state, "python", None, 0.0, 1, home, said.append).run() == "the budget is spent"


@pytest.mark.turn("tilegym_db/loop/auto.py")  # a whole loop; test_scripted_author.py refuses a wrong kernel daily
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_wrong_is_discarded_with_its_reason(state: ModelState, tmp_path: Path) -> None:
    script = tmp_path / "author.py"
    script.write_text(AUTHOR.replace("attempt, good)", "attempt, wrong)"))
    author = f"{sys.executable} {script} {tmp_path / 'calls'}"
    state = replace(state, prompt=128, rounds=2)  # how long it takes is not what is asked
    done, _ = auto_kernelize(state, language="python", author=author, max_attempts=1)
    found = {one.definition: one for one in done}["rms_norm"]
    assert found.decision == "discard"
    assert "INCORRECT_NUMERICAL" in found.reason
    with open_store(read_only=True) as store:
        rows = store.rows("SELECT decision, reason FROM experiments WHERE definition = 'rms_norm'")
    assert rows == [{"decision": "discard", "reason": found.reason}]
