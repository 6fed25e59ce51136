"""Drafts of foreign samplers: recognised by what they take and give, judged by the distribution of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from foreign_sets import Tree, lines, of_workload, solution
from raising import raises

from tilegym_db.catalog import Catalog, writers
from tilegym_db.errors import UsageError
from tilegym_db.interchange.adapt import Draft, draft_of
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.measurement.benchmark import bench
from tilegym_db.records import Definition

NAME = "filtered_draws_v16"
ROWS = {
    "top_k": {"shape": ["batch"], "dtype": "int32"},
    "top_p": {"shape": ["batch"], "dtype": "float32"},
    "min_p": {"shape": ["batch"], "dtype": "float32"},
}
REFERENCE = "import torch\n\ndef run({}):\n    return torch.multinomial(probs, 1)[:, 0].to(torch.{})\n"
BY_INVERSION = """import torch


def run(probs, top_k, uniform, out):
    rank = torch.where((top_k < 1) | (top_k > probs.shape[-1]), probs.shape[-1], top_k).long()
    least = probs.sort(dim=-1, descending=True).values.gather(-1, rank[:, None] - 1)
    mass = torch.where(probs >= least, probs, 0).double().cumsum(-1)
    index = (mass <= uniform.double()[:, None] * mass[:, -1:]).sum(-1)
    last = probs.shape[-1] - 1 - (probs >= least).flip(-1).int().argmax(-1)
    out.copy_(torch.minimum(index, last))
"""


def sampler(*given: str, output: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    drawn = {"shape": ["batch"], "dtype": "int64", **(output or {})}
    probs = {"shape": ["batch", "vocab"], "dtype": "float32"}
    uniform = {"shape": ["batch"], "dtype": "float32"}
    inputs = {"probs": probs} | {name: ROWS.get(name, uniform) for name in given}
    return {
        "name": NAME,
        "op_type": "sampling",
        "axes": {"batch": {"type": "var"}, "vocab": {"type": "const", "value": 16}},
        "inputs": inputs,
        "outputs": {"out": drawn},
        "reference": REFERENCE.format(", ".join(inputs), drawn["dtype"]),
        **changes,
    }


def draft(tree: Tree, record: dict[str, Any], *solutions: dict[str, Any]) -> Draft:
    for path in tree.bytes():
        (tree.root / path).unlink()
    tree.write(f"definitions/sampling/{NAME}.json", record)
    call = {"uuid": "w-1", "axes": {"batch": 40}, "inputs": {name: {"type": "random"} for name in record["inputs"]}}
    tree.write(f"workloads/sampling/{NAME}.jsonl", lines({**of_workload(call), "definition": NAME}))
    for item in solutions:
        item = {**item, "definition": NAME}
        tree.write(f"solutions/someone/sampling/{NAME}/{item['name']}.json", item)
    found = import_data_set(tree.root).data_set
    assert found is not None
    return draft_of(found, NAME)


def record_of(made: Draft) -> Definition:
    content = json.loads(made.files["definition.json"])
    return Definition.from_dict({**content, "reference": made.files["reference.py"].decode()})


@pytest.mark.parametrize("given", [("top_k",), ("top_p",), ("top_k", "top_p"), ("min_p",)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sampler_of_a_known_law_becomes_a_draft_judged_by_it(
    tree: Tree, home: Path, given: tuple[str, ...], dtype: str
) -> None:
    own = solution("own", "import torch\n\ndef run(probs):\n    return torch.multinomial(probs, 1)[:, 0]\n")
    made = draft(tree, sampler(*given, output={"dtype": dtype}), own)
    record = record_of(made)
    assert tuple(record.inputs) == ("probs", *given, "uniform")
    assert record.sampled["out"].uniforms == "uniform"
    assert record.outputs["out"].dtype == dtype
    assert f"the distribution of {'_'.join(given)}_sampling_from_probs" in made.judged
    assert made.solutions == []
    assert "draws its own random numbers" in dict(made.left_out)["solution own"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (sampler("top_p", "top_k"), "sampler"),
        (sampler("temperature"), "sampler"),
        (sampler(), "sampler"),
        (sampler("top_k", output={"shape": ["batch", "vocab"]}), "batch"),
        (
            sampler("top_k", inputs={**sampler("top_k")["inputs"], "top_k": {"shape": None, "dtype": "int32"}}),
            "top_k is",
        ),
        (
            sampler("top_k", inputs={**sampler("top_k")["inputs"], "top_k": {"shape": ["batch"], "dtype": "int64"}}),
            "int64",
        ),
    ],
)
def test_other_forms_are_refused_with_what_is_in_the_way(
    tree: Tree, home: Path, record: dict[str, Any], words: str
) -> None:
    with raises(UsageError, "judged_otherwise", words):
        draft(tree, record)


def test_what_masks_probabilities_is_judged_by_its_elements(tree: Tree, home: Path) -> None:
    record = sampler("top_k", output={"shape": ["batch", "vocab"], "dtype": "float32"})
    assert record_of(draft(tree, record)).sampled == {}


@pytest.mark.turn("tilegym_db/judging/")  # workers of another data set
@pytest.mark.slow
def test_drafted_samplers_are_judged_as_distributions(tree: Tree, home: Path, tmp_path: Path) -> None:
    """An honest one passes; one that never draws the last it may, and one that draws what it may not, fail."""
    greedy = "import torch\n\n\ndef run(probs, top_k, uniform, out):\n    out.copy_(probs.argmax(-1))\n"
    unmasked = BY_INVERSION.replace("top_k > probs.shape[-1])", "top_k > 0)")
    sources = {"honest": BY_INVERSION, "greedy": greedy, "unmasked": unmasked}
    given = [solution(name, text, destination_passing_style=True) for name, text in sources.items()]
    made = draft(tree, sampler("top_k", "uniform"), *given)
    assert sorted(made.solutions) == ["solutions/greedy", "solutions/honest", "solutions/unmasked"]
    catalog = _catalog_of(made, tmp_path / "catalog")
    report = bench(NAME, devices="cpu", catalog=catalog, store_home=home, force=True)
    found = {trace.solution: trace for trace in report.traces}
    assert {name: trace.status for name, trace in found.items()} == {
        "honest": "PASSED", "greedy": "INCORRECT_NUMERICAL", "unmasked": "INCORRECT_NUMERICAL",
    }  # fmt: skip
    assert {found[name].failure.gate for name in ("greedy", "unmasked")} <= {"support", "distribution"}


def _catalog_of(made: Draft, root: Path) -> Catalog:
    record = record_of(made)
    folder = root / "definitions" / "sampling"
    folder.mkdir(parents=True)
    (folder / f"{NAME}.json").write_text(record.to_json())
    (root / "workloads" / "sampling").mkdir(parents=True)
    (root / "workloads" / "sampling" / f"{NAME}.jsonl").write_bytes(made.files["workloads.jsonl"])
    for path, content in made.files.items():
        if path.startswith("solutions/"):
            target = root / "solutions" / "sampling" / NAME / path.removeprefix("solutions/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    writers.update_lock(Catalog((root,)), root)
    return Catalog((root,))
