"""A definition of a data set as a draft: what is in it, what is not and why, and how its traces come back beside theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.integrations.interchange.comparing import compared, promoted_pairs, summary
from tilegym_db.integrations.interchange.drafts import draft_of
from tilegym_db.integrations.interchange.importing import import_data_set
from tilegym_db.integrations.interchange.writing import write_tree
from tilegym_db.records import Trace, Workload
from tilegym_db.scaffold import read_definition_file
from tilegym_db.store.imported import DataSet


def imported(tree: Tree) -> DataSet:
    found = import_data_set(tree.root).data_set
    assert found is not None
    return found


def test_a_draft_is_what_add_definition_reads_once_its_self_test_is_written(
    tree: Tree, home: Path, tmp_path: Path
) -> None:
    draft = draft_of(imported(tree), "scale_n8")
    folder = tmp_path / "draft"
    write_tree(folder, draft.files)
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
    assert "builds no C++ or CUDA sources" in draft.left_out[1][1]


def test_integers_are_drawn_in_the_range_of_flashinfer_bench(tree: Tree, home: Path) -> None:
    inputs = {**definition()["inputs"], "x": {"shape": ["M", "N"], "dtype": "int32"}}
    tree.write(DEFINITION, definition(inputs=inputs))
    record = json.loads(draft_of(imported(tree), "scale_n8").files["definition.json"])
    assert record["input_generators"] == {"x": {"kind": "integers", "low": -1024, "high": 1024}}


def test_a_constraint_on_contents_is_refused_and_says_what_judges_it(tree: Tree, home: Path) -> None:
    tree.write(DEFINITION, definition(constraints=["M >= 1", "x[0, 0].item() == 2"]))
    found = imported(tree)
    with pytest.raises(UsageError, match=r"about contents.*compare-foreign flashinfer-trace:small scale_n8 --run"):
        draft_of(found, "scale_n8")
    with pytest.raises(NotFoundError, match="Did you mean 'scale_n8'"):
        draft_of(found, "scale_n9")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "top_k_sampling_from_probs_v8", "op_type": "sampling"}, "judged as a distribution"),
        ({"name": "dsa_topk_indexer_fp8_h64"}, "judged by their scores"),
    ],
)
def test_what_no_element_is_judged_by_becomes_no_draft(
    tree: Tree, home: Path, changes: dict[str, str], reason: str
) -> None:
    tree.write(DEFINITION, definition(**changes))
    with pytest.raises(UsageError, match=reason):
        draft_of(imported(tree), changes["name"])


def test_a_promoted_trace_stands_beside_the_foreign_verdict_and_is_counted(
    tree: Tree, home: Path, tmp_path: Path
) -> None:
    found = imported(tree)
    draft = draft_of(found, "scale_n8")
    catalog = _catalog_of(draft.files, tmp_path / "catalog")
    uuids = {tag: row.uuid for row in catalog.workloads_for("scale_n8") for tag in row.tags}
    passed = _trace(catalog, uuids["imported:w-1"], "PASSED")
    pairs = compared(found, (), promoted_pairs(found, catalog, [passed]))
    assert [(pair.promoted_status, pair.promoted_latency_us, pair.agreement) for pair in pairs] == [
        ("PASSED", 7.0, "agree")
    ]
    later = _trace(catalog, uuids["imported:w-1"], "RUNTIME_ERROR")
    assert summary(compared(found, (), promoted_pairs(found, catalog, [passed, later]))) == {"we fail it": 1}
    assert promoted_pairs(found, Catalog((tmp_path / "none",)), [passed]) == {}


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
