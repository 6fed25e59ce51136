"""A part of a model from its capture to a kernel that serves it, and the reasons if a model cannot be cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_models import Hybrid, Mixer, Odd, Ramp, greedy
from transformers import LlamaConfig, LlamaForCausalLM

from tilegym_db import patch
from tilegym_db.catalog import Catalog
from tilegym_db.loop.cut import WORD, cut, why_not_cut
from tilegym_db.loop.from_model import Piece, pieces_of, stock_times, why_no_task
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import create_task
from tilegym_db.models.called_functions import Seam, function_seams
from tilegym_db.models.found import GLUE, LIBRARY, LOOKUP
from tilegym_db.models.handle import IN_GRAPHS
from tilegym_db.scaffold.solution_draft import stock_solution_files
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish
from tilegym_db.verification.add import add_definition, add_solution
from tilegym_db.verification.check import check

SCAN, RAMP = Seam(Mixer, "decayed_scan"), Seam(Ramp)
TOKENS = 48
INDEPENDENT = """import torch


def run(q, k, v, g, scale):
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    total = g.double().cumsum(1)  # differences of sums
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)[:, :, None]
    decay = (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp().to(q.dtype)
    scores = torch.einsum("mthd,mshd->mtsh", q, k) * decay
    out = torch.einsum("mtsh,mshd->mthd", scores, v) * scale
    state = torch.einsum("mshk,msh,mshv->mhkv", k, (total[:, -1:] - total).exp().to(q.dtype), v)
    return out, state
"""
KERNEL = INDEPENDENT.replace("scale):", "scale, out, now):").replace(
    "    out = torch", "    read = torch"
).replace("    return out, state", "    out.copy_(read)\n    now.copy_(state)")  # fmt: skip
PLANTED = [
    {"find": "g[:, at].exp()", "replace": "g[:, at].neg().exp()", "why": "the state grows instead of decaying"},
    {"find": "k[:, at][..., None] *", "replace": "k[:, at].abs()[..., None] *", "why": "keys lose their sign"},
    {"find": ".sum(-2) * scale", "replace": ".sum(-2)", "why": "the scale is left out"},
]


@pytest.fixture
def model() -> Hybrid:
    model: Hybrid = Hybrid().eval()
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 96, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def record(files: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files["definition.json"])
    return found


def test_seams_are_the_functions_that_forwards_call(model: Hybrid) -> None:
    assert [seam.name for seam in function_seams(model)] == ["Mixer.decayed_scan"]


@pytest.mark.turn("tilegym_db/loop/cut.py")  # profiles of a model at three sizes
def test_function_is_cut_with_axes_that_do_not_alias(model: Hybrid, ids: torch.Tensor) -> None:
    found = cut(model, SCAN, ids, "hybrid")
    assert not isinstance(found, str), found
    drafted = record(found.files)
    shapes = {name: spec["shape"] for name, spec in drafted["inputs"].items()}
    batch, tokens, heads, keys, values = drafted["axes"]  # keys and values are both 16 wide in every run
    assert shapes == {
        "q": [batch, tokens, heads, keys],
        "k": [batch, tokens, heads, keys],
        "v": [batch, tokens, heads, values],
        "g": [batch, tokens, heads],
        "scale": None,
    }
    assert [spec["shape"] for spec in drafted["outputs"].values()] == [
        [batch, tokens, heads, values],
        [batch, heads, keys, values],
    ]
    (code,) = drafted["serving"]["code"]
    assert (drafted["serving"]["part"], code["returns"]) == ("function", ["out", "now"])
    assert code["fixed"] == {"normalise": True, "state": None}
    tiny, captured = map(json.loads, found.files["workloads.jsonl"].splitlines())
    assert tiny["tags"] == ["tiny"]
    assert list(captured["axes"].values()) == [1, TOKENS, 4, 16, 16]
    assert captured["tags"] == ["model:hybrid", "stage:prefill", "captured"]
    assert captured["layouts"].keys() == {"q", "k", "v"}


def test_module_is_cut_with_its_attributes_as_inputs(model: Hybrid, ids: torch.Tensor) -> None:
    found = cut(model, RAMP, ids)
    assert not isinstance(found, str), found
    drafted = record(found.files)
    assert [spec["shape"] for spec in drafted["inputs"].values()] == [["M", "N", "K"], ["K"], None]
    assert drafted["serving"]["code"][0]["fixed"] == {"is_centred": True}
    assert found.compared == 2


def test_reason_is_given_if_a_model_cannot_be_cut(ids: torch.Tensor) -> None:
    model = Hybrid(is_odd=True).eval()
    reasons = {seam.name: cut(model, seam, ids) for seam in (Seam(Mixer), Seam(Odd, "doubling"), Seam(Odd, "noisy"))}
    assert reasons == {
        "Mixer": "its code lies between its submodules (qkv, gate, out), so no tensor bounds it",
        "Odd.doubling": "it writes into its argument x",
        "Odd.noisy": "its draft does not give the numbers of the recorded prefill call in out, so they depend on more than "
        "its arguments",
    }


class Scores(torch.nn.Linear):
    """A module without submodules whose forward calls that of its base class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


def test_call_of_a_base_class_is_named() -> None:
    found = why_not_cut(torch.nn.Sequential(Scores(4, 4)), Seam(Scores))
    assert found == "its forward calls super(), so its code is not the whole computation"


def test_capitals_in_a_row_are_one_word_of_a_drafted_name() -> None:
    names = ["GELUTanh", "Llama4TextL2Norm", "Qwen3VLVisionMLP", "forward_of"]
    assert [re.sub(WORD, "_", name).lower() for name in names] == [
        "gelu_tanh", "llama4_text_l2_norm", "qwen3_vl_vision_mlp", "forward_of",
    ]  # fmt: skip


def test_reason_without_a_task_says_what_to_do(model: Hybrid) -> None:
    reasons = [
        why_no_task(model, Piece("part", 0.5, 1, module_class=cls, function=function))
        for cls, function in ((Mixer, ""), (Mixer, "decayed_scan"), (torch.nn.Linear, ""))
    ]
    assert reasons == [
        "no definition describes it; it cannot be cut out: its code lies between its submodules (qkv, gate, out), so no tensor "
        "bounds it",
        "no definition describes it; --drafts DIR of task from-model writes a draft of one",
        "a PyTorch call; no definition describes it",
    ]


def test_reasons_are_those_of_the_report_of_a_patch() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
    pieces = pieces_of(model, torch.ones(1, 8).long(), "llama").pieces
    found = {piece.part: piece.reason for piece in pieces}
    told = {one.module_class: one.reason for one in patch(model, dry_run=True).report().undescribed}
    assert found["Embedding"] == told["Embedding"] == LOOKUP
    assert found["LlamaModel"] == GLUE
    assert "LlamaModel" not in told
    (activation,) = [piece for piece in pieces if piece.part == "SiLUActivation"]
    assert why_no_task(model, activation) == "no task: kernels of swiglu compute it too"
    assert {piece.inside for piece in pieces if piece is not activation} == {""}
    assert (found["Linear"], told["Linear"]) == (IN_GRAPHS, LIBRARY)  # nothing of this model runs in graphs on a CPU


def test_function_has_its_time_apart_from_its_module(model: Hybrid, ids: torch.Tensor) -> None:
    times, _ = stock_times(model, ids)
    assert (Mixer, "decayed_scan", 1) in {(one.module_class, one.function, one.calls) for one in times}
    (scan,) = [one for one in times if one.function]
    (mixer,) = [one for one in times if one.module_class is Mixer and not one.function]
    assert scan.time_us > mixer.time_us > 0


def finished(folder: Path) -> Path:
    """Do what a person does with the draft: another formulation, typical errors, a description and limits."""
    content = json.loads((folder / "definition.json").read_text())
    for number, axis in enumerate(content["axes"].values()):
        axis["description"] = f"axis {number}"
    content |= {"tags": ["status:open"], "constraints": ["N <= 256", "N >= 1", "M >= 1", "K >= 1", "H >= 1", "D >= 1"]}
    content["special_values"] = []
    (folder / "definition.json").write_text(json.dumps(content))
    (folder / "independent.py").write_text(INDEPENDENT)
    (folder / "planted_errors.json").write_text(json.dumps(PLANTED))
    return folder


def published(source: str, hand_in: Callable[..., Path], home: Path) -> None:
    """Submit a kernel for the captured calls, and publish it for this user."""
    layouts = dict.fromkeys(("q", "k", "v", "g", "out", "now"), "strided")
    spec = {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}, "layouts": layouts}
    task = create_task("decayed_scan", language="python", gpu="cpu", workload="captured")
    attempt = submit(task, hand_in(source, definition="decayed_scan", spec=spec))
    assert attempt.verdict == "promoted", attempt.reason
    with open_store(home, catalog=Catalog.default()) as store:
        ingest(store)
        publish(store, "cpu", own=True)


@pytest.mark.alone  # the kernel must be found faster
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cut_part_is_served_from_its_definition_alone(
    model: Hybrid, ids: torch.Tensor, checkout: Path, hand_in: Callable[..., Path], home: Path, tmp_path: Path
) -> None:
    found = cut(model, SCAN, ids, "hybrid")
    assert not isinstance(found, str), found
    folder = finished(found.write(tmp_path / "drafts"))
    assert check(folder) == []
    definition = add_definition(folder).definition
    assert definition is not None
    stock, sources = stock_solution_files(definition, "a script")
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "solution.json").write_text(stock.to_json())
    (tmp_path / "stock" / "kernel.py").write_bytes(sources["kernel.py"])
    add_solution(tmp_path / "stock")
    published(KERNEL, hand_in, home)
    expected = greedy(model, ids, 3)
    handle = patch(model)
    assert torch.equal(greedy(model, ids, 3), expected)
    assert handle.report().hits() == {"decayed_scan": 1}  # the measured length; no kernel was measured at the others
    assert all(site.reason == "" for site in handle.report().sites if site.kind == "function")
    handle.unpatch()
    assert torch.equal(greedy(model, ids, 3), expected)
