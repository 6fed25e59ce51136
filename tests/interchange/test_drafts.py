"""A definition of a data set as a draft: what is in it, what is not and why, and how its traces come back beside theirs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    workload,
)
from raising import raises
from safetensors.torch import save

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.interchange.adapt import draft_of
from tilegym_db.interchange.importing import import_data_set, write_tree
from tilegym_db.judging.judging import compared, summary, verified_pairs
from tilegym_db.records import Definition, Trace, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.scaffold.definition_draft import read_definition_file
from tilegym_db.store.imported import DataSet, object_path
from tilegym_db.verification.expected import broken_constraint
from tilegym_db.verification.inputs import draw_inputs

DRAWN = {"op_type": "sampling", "outputs": {"samples": {"shape": ["M"], "dtype": "int64"}}}


def imported(tree: Tree) -> DataSet:
    found = import_data_set(tree.root).data_set
    assert found is not None
    return found


def test_draft_is_read_by_add_definition_with_its_self_test(tree: Tree, home: Path, tmp_path: Path) -> None:
    draft = draft_of(imported(tree), "scale_n8")
    folder = tmp_path / "draft"
    write_tree(folder, draft.files, draft.copies)
    (folder / "independent.py").write_text("def run(x, w, eps):\n    return w * x + eps\n")
    planted = [{"find": "x * w", "replace": changed, "why": "wrong"} for changed in ("x + w", "x", "x * w * w")]
    (folder / "planted_errors.json").write_text(json.dumps(planted))
    record = read_definition_file(folder)
    assert (record.name, record.tags) == ("scale_n8", ("status:draft", "origin:flashinfer-trace:small"))
    rows = [Workload.from_json(line) for line in draft.files["workloads.jsonl"].splitlines()]
    assert [(row.axes["M"], row.tags, row.scalars()) for row in rows] == [
        (3, ("imported:w-2", "tiny"), {"eps": 1e-06}),
        (4, ("imported:w-1",), {"eps": 1e-06}),
    ]
    assert draft.solutions == ["solutions/scale_torch"]
    assert draft.left_out == []


def test_what_bench_could_not_run_is_left_out_with_its_reason(tree: Tree, home: Path) -> None:
    tree.write(WORKLOADS, lines(of_workload(workload(eps={"type": "random"})), of_workload(workload("w-2"))))
    cuda = solution("cuda", "void run();", language="cuda", entry_point="main.py::run")
    tree.write(SOLUTION.replace("scale_torch", "cuda"), cuda)
    draft = draft_of(imported(tree), "scale_n8")
    assert [what for what, _ in draft.left_out] == ["workload w-1", "solution cuda"]
    assert "is a number, and the workload gives none" in draft.left_out[0][1]
    assert "does not build C++ or CUDA sources" in draft.left_out[1][1]


def test_integers_are_drawn_in_the_range_of_flashinfer_bench(tree: Tree, home: Path) -> None:
    inputs = {**definition()["inputs"], "x": {"shape": ["M", "N"], "dtype": "int32"}}
    tree.write(DEFINITION, definition(inputs=inputs))
    record = json.loads(draft_of(imported(tree), "scale_n8").files["definition.json"])
    assert record["input_generators"] == {"x": {"kind": "integers", "low": -1024, "high": 1024}}


def test_constraint_on_contents_is_kept_and_marked_as_not_drawn(tree: Tree, home: Path) -> None:
    tree.write(DEFINITION, definition(constraints=["M >= 1", "x[0, 0].item() == 2"]))
    draft = draft_of(imported(tree), "scale_n8")
    record = json.loads(draft.files["definition.json"])
    assert (record["constraints"], record["content_constraints"]) == (["M >= 1"], ["x[0, 0].item() == 2"])
    assert draft.undrawn == ["x[0, 0].item() == 2"]


@pytest.mark.parametrize("text", ["M == ends[-1].item()", "ends[-1].item() == M", "M == ends[-1]"])
def test_offsets_that_end_at_the_size_of_an_axis_are_drawn_so(tree: Tree, home: Path, text: str) -> None:
    axes = {**definition()["axes"], "L": {"type": "var"}}
    inputs = {**definition()["inputs"], "ends": {"shape": ["L"], "dtype": "int32"}}
    reference = "def run(x, w, eps, ends):\n    return x * w + eps\n"
    tree.write(DEFINITION, definition(axes=axes, inputs=inputs, constraints=["L >= 2", text], reference=reference))
    draft = draft_of(imported(tree), "scale_n8")
    record = json.loads(draft.files["definition.json"])
    assert record["input_generators"] == {"ends": {"kind": "offsets", "high": "M", "leading": True}}
    assert draft.undrawn == []
    made = Definition.from_dict({**record, "reference": draft.files["reference.py"].decode()})
    for seed in range(3):
        case = Case(Call(made.name, {"M": 9, "N": 8, "L": 4}, scalars={"eps": 1e-6}), seed=seed)
        assert broken_constraint(made, case.call.axes, draw_inputs(made, case, "cpu")) is None


@pytest.mark.parametrize("text", ["x.shape[0] == M", "len(x) == M", "x.size(1) >= len(w)"])
def test_a_constraint_on_the_shapes_of_inputs_is_one_on_axes(tree: Tree, home: Path, text: str) -> None:
    tree.write(DEFINITION, definition(constraints=[text]))
    draft = draft_of(imported(tree), "scale_n8")
    made = Definition.from_dict(
        json.loads(draft.files["definition.json"]) | {"reference": draft.files["reference.py"].decode()}
    )
    assert (made.content_constraints, draft.undrawn) == ((), [])
    assert made.bind_axes({"M": 3}) == {"M": 3, "N": 8}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x.tolist() == 2", "'.tolist'"),
        ("y[0] == 2", "'y'"),
        ("x.item().__class__ == 1", "'.__class__'"),
    ],
)
def test_constraint_that_cannot_be_evaluated_is_refused(tree: Tree, home: Path, text: str, name: str) -> None:
    tree.write(DEFINITION, definition(constraints=["M >= 1", text]))
    found = imported(tree)
    command = "tilegym-db data compare flashinfer-trace:small scale_n8 --run"
    with raises(UsageError, "constraint_unchecked", name, command):
        draft_of(found, "scale_n8")
    with raises(NotFoundError, "definition_unknown", "'scale_n8'"):
        draft_of(found, "scale_n9")


BLOB = "blob/workloads/scale/a.safetensors"
OF_BLOB = {"type": "safetensors", "path": f"./{BLOB}", "tensor_key": "x"}


def with_blobs(tree: Tree) -> Tree:
    """A Workload whose ``x`` a file holds, one with a file that is elsewhere, and one that is drawn."""
    given = [workload("w-1", x=OF_BLOB), workload("w-2", x={**OF_BLOB, "path": "blob/b.safetensors"}), workload("w-3")]
    tree.write(WORKLOADS, lines(*map(of_workload, given)))
    tree.write(BLOB, save({"x": torch.arange(32.0).reshape(4, 8)}))
    oid = "0" * 64
    tree.write("blob/b.safetensors", f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 3\n")
    return tree


def test_input_files_are_kept_under_the_sha256_of_their_bytes(tree: Tree, home: Path, tmp_path: Path) -> None:
    draft = draft_of(imported(with_blobs(tree)), "scale_n8")
    content = (tree.root / BLOB).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    rows = {row.tags[0]: row for row in map(Workload.from_json, draft.files["workloads.jsonl"].splitlines())}
    assert set(rows) == {"imported:w-1", "imported:w-3"}
    spec = rows["imported:w-1"].files()["x"]
    assert (spec.path, spec.tensor_key, spec.sha256) == (f"blob/{sha256}.safetensors", "x", sha256)
    assert [what for what, _ in draft.left_out] == ["workload w-2"]
    assert "blob/b.safetensors is a Git LFS pointer without its content" in draft.left_out[0][1]
    write_tree(tmp_path / "draft", draft.files, draft.copies)
    assert (tmp_path / "draft" / spec.path).read_bytes() == content


def test_input_file_that_the_store_lost_leaves_its_workload_out(tree: Tree, home: Path) -> None:
    found = imported(with_blobs(tree))
    stored = object_path(home, hashlib.sha256((tree.root / BLOB).read_bytes()).hexdigest())
    stored.chmod(0o644)
    stored.write_bytes(b"other")
    draft = draft_of(found, "scale_n8")
    assert {what: "is not what was imported" in reason for what, reason in draft.left_out} == {
        "workload w-1": True,
        "workload w-2": False,
    }
    assert draft.copies == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "top_k_sampling_from_probs_v8", **DRAWN}, "sampler"),
        ({"name": "dsa_topk_indexer_fp8_h64"}, "scores"),
    ],
)
def test_what_no_element_is_judged_by_becomes_no_draft(
    tree: Tree, home: Path, changes: dict[str, Any], reason: str
) -> None:
    tree.write(DEFINITION, definition(**changes))
    with raises(UsageError, "judged_otherwise", changes["name"], reason):
        draft_of(imported(tree), changes["name"])


def test_verified_trace_is_counted_beside_the_foreign_verdict(tree: Tree, home: Path, tmp_path: Path) -> None:
    found = imported(tree)
    draft = draft_of(found, "scale_n8")
    catalog = _catalog_of(draft.files, tmp_path / "catalog")
    uuids = {tag: row.uuid for row in catalog.workloads_for("scale_n8") for tag in row.tags}
    passed = _trace(catalog, uuids["imported:w-1"], "PASSED")
    pairs = compared(found, (), verified_pairs(found, catalog, [passed]))
    assert [(pair.verified_status, pair.verified_latency_us, pair.agreement) for pair in pairs] == [
        ("PASSED", 7.0, "agree")
    ]
    later = _trace(catalog, uuids["imported:w-1"], "RUNTIME_ERROR")
    assert summary(compared(found, (), verified_pairs(found, catalog, [passed, later]))) == {"we fail it": 1}
    assert verified_pairs(found, Catalog((tmp_path / "none",)), [passed]) == {}


def _catalog_of(files: dict[str, bytes], root: Path) -> Catalog:
    """A catalog that has what a draft says."""
    content = json.loads(files["definition.json"]) | {"reference": files["reference.py"].decode()}
    written = {
        "definitions/scale/scale_n8.json": json.dumps(content).encode(),
        "workloads/scale/scale_n8.jsonl": files["workloads.jsonl"],
        **{
            f"solutions/scale/scale_n8/{path.removeprefix('solutions/')}": value
            for path, value in files.items()
            if "/" in path
        },
    }
    write_tree(root, written)
    return Catalog((root,))


def _trace(catalog: Catalog, uuid: str, status: str) -> Trace:
    record, files = catalog.definition("scale_n8"), catalog.solution("scale_torch")
    content = {
        "trace_id": f"{uuid}-{status}",
        "run_id": "r",
        "timestamp": "2026-11-01T00:00:00Z",
        "definition": record.name,
        "definition_version": record.version,
        "definition_digest": record.digest,
        "op_type": record.op_type,
        "solution": files.name,
        "solution_digest": files.digest,
        "language": "python",
        "workload_uuid": uuid,
        "axes": {"M": 4, "N": 8},
        "gpu": "cpu",
        "gpu_name": "a processor",
        "tier": "promotion",
        "status": status,
    }
    if status != "PASSED":
        return Trace.from_dict({**content, "reason": "it raised"})
    performance = {"latency_us": 7.0, "ci_low_us": 6.9, "ci_high_us": 7.1, "samples": 9, "timer": "wall"}
    return Trace.from_dict({**content, "correctness": {"rel_fro": 0.0}, "performance": performance})
