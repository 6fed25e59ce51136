"""Blobs of an export: which inputs they hold, what is in them, how many there are; and that an import takes no other content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_limit import full_disk
from foreign_sets import (
    DEFINITION,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    trace,
    workload,
)
from raising import raises
from safetensors.torch import load, load_file, save

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.interchange.collecting import SIDE_FILE
from tilegym_db.interchange.flashinfer_export import (
    MIB,
    Blob,
    BlobFolder,
    Export,
    blob_of,
    blob_seed,
    build_export,
    drawn_together,
    why_drawn,
)
from tilegym_db.interchange.importing import folder_beside, import_data_set, imported_files, write_tree
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import Case
from tilegym_db.store.imported import DataSet, data_set
from tilegym_db.verification.inputs import draw_inputs

KIB = 1024
BLOB = "blob/workloads/scale/scale_n8/scale_n8_w-1.safetensors"


def inputs_of(export: Export) -> list[tuple[str, dict[str, Any]]]:
    """(path of its file, inputs) of every Workload of an export."""
    return [
        (path, json.loads(line)["workload"]["inputs"])
        for path, content in export.files.items()
        if path.startswith("workloads/")
        for line in content.splitlines()
    ]


@pytest.fixture(scope="module")
def blob_export(shipped: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """The shipped catalog with its smallest blobs."""
    return build_export(shipped, [], None, BlobFolder(tmp_path_factory.mktemp("blobs"), 4 * MIB, 16 * KIB))


@pytest.fixture
def family(shipped: Catalog, tmp_path: Path) -> Path:
    """A data set on disk: the operators of one family, with their smallest blobs."""
    written(shipped, tmp_path / "family")
    return tmp_path / "family"


def planned(shipped: Catalog) -> list[Blob]:
    """A blob of every shipped Definition that needs any: of the Workload whose inputs are the smallest, as all are drawn."""
    found: dict[str, Blob] = {}
    for item in sorted(shipped.all_workloads(), key=lambda item: elements(shipped.definition(item.definition), item)):
        source = shipped.definition(item.definition)
        if source.name not in found and not item.layout_classes(source):
            blob = blob_of(source, item, source.bind_dtypes(item.dtypes), "blob", item.definition)
            if blob is not None:
                found[source.name] = blob
    return list(found.values())


def elements(definition: Definition, workload: Workload) -> int:
    """The number of elements of all inputs."""
    axes = definition.bind_axes(workload.axes)
    return sum(math.prod(definition.shape_of(name, axes)) for name in definition.tensor_inputs)


# -- which inputs, and what is in them ----------------------------------------------------------------------------------------


def test_blobs_hold_what_a_draw_of_all_inputs_has(shipped: Catalog) -> None:
    blobs = planned(shipped)
    assert len(blobs) > 25
    kinds = {"joint": 0, "saved": 0, "alone": 0}
    for blob in blobs:
        source, item = blob.definition, blob.workload
        kinds["joint" if source.joint_inputs else "saved" if source.saved else "alone"] += 1
        case = Case.of_workload(source, item, distribution="normal", seed=blob_seed(item))
        whole = draw_inputs(source, case, "cpu")
        for name, tensor in drawn_together(blob, shipped.roots).items():
            other = whole[name]
            assert isinstance(other, torch.Tensor)
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert torch.equal(tensor.view(torch.uint8), other.contiguous().view(torch.uint8)), (source.name, name)
    assert min(kinds.values()) > 0


@pytest.mark.turn("tilegym_db/interchange/")  # workers; imported contents are compared daily
def test_what_is_positive_here_and_around_zero_there_is_noted(blob_export: Export) -> None:
    assert blob_export.notes["normalize_weight.weights"] == "drawn by the generator positive here, and at random there"


@pytest.mark.turn(
    "tilegym_db/interchange/flashinfer_export.py", "tilegym_db/verification/inputs.py"
)  # exports many Workloads
def test_only_what_cannot_be_drawn_there_lies_in_a_blob(blob_export: Export, shipped: Catalog) -> None:
    held = set()
    for path, inputs in inputs_of(blob_export):
        told = blob_export.definitions[path.rpartition("/")[2].removesuffix(".jsonl")]
        source = shipped.definition(told["definition"])
        reasons = why_drawn(source, told["dtypes"])
        kinds = {name: given["type"] for name, given in inputs.items() if given["type"] != "scalar"}
        assert kinds == {name: "safetensors" if name in reasons else "random" for name in kinds}
        held |= {(source.name, name) for name in reasons}
    assert ("aux_fi", "ids") in held
    assert ("softmax_backward", "out") in held
    assert ("softmax_backward", "grad_out") not in held
    assert ("top_p_sampling_from_probs", "probs") not in held  # 40 KiB and more
    assert ("moe_experts_oai", "ids") in held
    assert ("moe_experts_oai", "gate_up") not in held


def test_a_sampled_output_has_its_random_numbers_in_the_blob(shipped: Catalog) -> None:
    source = shipped.definition("top_p_sampling_from_probs")
    reasons = why_drawn(source, source.bind_dtypes(shipped.workloads_for(source.name)[0].dtypes))
    assert set(reasons) == {"probs", "top_p", "uniform"}
    assert "from 0 to 1" in reasons["uniform"]


def test_what_a_generator_keeps_within_a_range_lies_in_a_blob(definition_record: Callable[..., dict[str, Any]]) -> None:
    record = definition_record()
    name = next(iter(record["inputs"]))
    for kind in ("probabilities", "log_decay"):
        source = Definition.from_dict({**record, "input_generators": {name: {"kind": kind}}})
        assert kind in why_drawn(source, {})[name]
    assert why_drawn(Definition.from_dict(record), {}) == {}


@pytest.mark.turn(
    "tilegym_db/interchange/flashinfer_export.py", "tilegym_db/verification/inputs.py"
)  # exports many Workloads
def test_every_blob_has_the_shape_and_dtype_of_its_definition(blob_export: Export) -> None:
    assert blob_export.drawn
    records = {item["name"]: item for path, text in blob_export.files.items() if path.startswith("definitions/")
               for item in [json.loads(text)]}  # fmt: skip
    seen = set()
    for path, content in blob_export.files.items():
        for line in content.splitlines() if path.startswith("workloads/") else ():
            item = json.loads(line)
            record, axes = records[item["definition"]], item["workload"]["axes"]
            sizes = {axis: spec.get("value") for axis, spec in record["axes"].items()} | axes
            for name, given in item["workload"]["inputs"].items():
                if given["type"] == "safetensors":
                    tensor = load_file(blob_export.drawn[given["path"]])[given["tensor_key"]]
                    spec = record["inputs"][name]
                    assert list(tensor.shape) == [sizes[axis] for axis in spec["shape"]]
                    assert tensor.dtype == getattr(torch, spec["dtype"])
                    seen.add(given["path"])
    assert seen == set(blob_export.drawn)


@pytest.mark.turn(
    "tilegym_db/interchange/flashinfer_export.py", "tilegym_db/verification/inputs.py"
)  # exports many Workloads
def test_a_blob_has_the_same_bytes_every_time(shipped: Catalog, blob_export: Export, tmp_path: Path) -> None:
    again = build_export(shipped, [], "engram", BlobFolder(tmp_path, MIB, 16 * KIB))
    assert again.told_blobs
    for path, told in again.told_blobs.items():
        assert again.drawn[path].read_bytes() == blob_export.drawn[path].read_bytes()
        assert told == blob_export.told_blobs[path]


def test_files_of_one_name_in_different_folders_stay_apart(
    definition_record: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    record = definition_record()
    tree, folder = Tree(tmp_path), record["op_type"]
    scalars = {
        name: {"type": "scalar", "value": 2.0} for name, spec in record["inputs"].items() if spec["shape"] is None
    }
    content = {"definition": record["name"], "axes": {"M": 4, "N": 4}, "dtypes": {"T": "float32"}}
    items = []
    for number, place in enumerate(("a/x.safetensors", "b/x.safetensors")):
        tree.write(place, str(number))
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        given = {"x": {"type": "safetensors", "path": place, "tensor_key": "x", "sha256": sha256}}
        items.append(Workload.from_dict({**content, "inputs": {**scalars, **given}}).to_json() + "\n")
    tree.write(f"definitions/{folder}/{record['name']}.json", record)
    tree.write(f"workloads/{folder}/{record['name']}.jsonl", "".join(items))
    export = build_export(Catalog((tmp_path,)), [])
    assert [file.read_text() for _, file in sorted(export.blobs.items())] == ["0", "1"]
    assert export.counts["blob"] == 2


# -- how many -----------------------------------------------------------------------------------------------------------------


@pytest.mark.turn(
    "tilegym_db/interchange/flashinfer_export.py", "tilegym_db/verification/inputs.py"
)  # exports many Workloads
def test_blobs_keep_to_their_limits_smallest_first(shipped: Catalog, tmp_path: Path) -> None:
    total, largest = 48 * KIB, 8 * KIB
    export = build_export(shipped, [], "moe", BlobFolder(tmp_path, total, largest))
    sizes = [told["bytes"] for told in export.told_blobs.values()]
    assert sum(sizes) <= total
    assert max(sizes) <= largest
    reasons = {
        reason for what, reason in export.left_out if what.startswith("workload ") and "drawn at random" in reason
    }
    assert any("more than 0.0078125 MiB (--largest-blob)" in reason for reason in reasons)
    assert any("the 0.046875 MiB of all blobs, smallest first (--blobs)" in reason for reason in reasons)
    left_out = {what.split()[1] for what, reason in export.left_out if "(--blobs)" in reason}
    wanted = [blob_of(shipped.definition(item.definition), item, dict(item.dtypes), "", "")
              for item in shipped.all_workloads() if item.uuid in left_out]  # fmt: skip
    assert max(sizes) <= min(blob.nbytes for blob in wanted if blob is not None)


def test_without_blobs_every_reason_names_the_input(shipped: Catalog) -> None:
    export = build_export(shipped, [], "moe")
    assert not export.drawn
    assert SIDE_FILE not in export.files
    reasons = {reason for what, reason in export.left_out if what.startswith("workload ")}
    assert "'ids' holds indices or counts, and FlashInfer-Bench would draw integers from -1024 to 1023" in reasons
    assert any("belongs together with other inputs" in reason for reason in reasons)


def test_the_side_file_has_the_digest_and_the_seed_of_every_blob(family: Path) -> None:
    told = json.loads((family / SIDE_FILE).read_text())["blobs"]
    files = {file.relative_to(family).as_posix(): file for file in family.glob("blob/**/*.safetensors")}
    assert set(told) == set(files)
    for path, item in told.items():
        content = files[path].read_bytes()
        assert (item["sha256"], item["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
        assert set(item["inputs"]) == set(load(content))
        assert item["workload"] in path


def test_definition_that_cannot_be_drawn_omits_its_workloads(
    shipped: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegym_db.verification import inputs

    def draw(definition: Definition, *arguments: Any, **keywords: Any) -> Any:
        if definition.name == "ngram_shift":
            raise RuntimeError("[enforce fail] not enough memory\nat line 1")
        return draw_inputs(definition, *arguments, **keywords)

    monkeypatch.setattr(inputs, "draw_inputs", draw)
    export = build_export(shipped, [], "engram", BlobFolder(tmp_path, MIB, 4 * KIB))
    reasons = [reason for _, reason in export.left_out if "its inputs cannot be drawn" in reason]
    assert set(reasons) == {"ngram_shift: its inputs cannot be drawn: [enforce fail] not enough memory"}
    assert {told["definition"] for told in export.definitions.values()} >= {"ngram_shift", "engram_hash"}
    assert export.drawn


# -- writing them -------------------------------------------------------------------------------------------------------------


def written(shipped: Catalog, folder: Path, limit: int | None = None) -> None:
    """Export a family with blobs; with a limit, the disk fills up once they are drawn."""
    with folder_beside(folder) as scratch:
        export = build_export(shipped, [], "engram", BlobFolder(scratch, MIB, 4 * KIB))
        with contextlib.nullcontext() if limit is None else full_disk(limit):
            write_tree(folder, export.files, export.blobs | export.drawn)


def test_a_full_disk_leaves_nothing_behind(shipped: Catalog, tmp_path: Path) -> None:
    with full_disk(512), raises(StoreError, "write_failed", "blob/"):
        written(shipped, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_after_the_blobs_keeps_nothing(shipped: Catalog, tmp_path: Path) -> None:
    with raises(StoreError, "write_failed", str(tmp_path / "out")):
        written(shipped, tmp_path / "out", 512)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_named_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("keep")
    with raises(StoreError, "write_failed", "file/out"), folder_beside(tmp_path / "file" / "out"):
        pytest.fail("nothing can be written there")
    with raises(UsageError, "folder_occupied", "taken"), folder_beside(tmp_path / "taken"):
        pytest.fail("it holds something")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


# -- and back in --------------------------------------------------------------------------------------------------------------


def test_an_export_with_blobs_comes_back_byte_for_byte(family: Path, home: Path, tmp_path: Path) -> None:
    found = import_data_set(family).data_set
    assert found.refused == ()
    assert [item for item in found.records if item.findings] == []
    assert sum(file.role == "blob" for file in found.files) == len(list(family.glob("blob/**/*.safetensors"))) > 0
    write_tree(tmp_path / "again", imported_files(data_set(home, "family")))
    assert Tree(tmp_path / "again").bytes() == Tree(family).bytes()


def first_with_a_blob(found: DataSet, name: str) -> Any:
    return next(item for item in found.of_kind("workload") if item.definition.startswith(name))


def test_imported_blobs_are_what_is_computed_on(family: Path, home: Path, shipped: Catalog) -> None:
    from tilegym_db.interchange.adapt import Adapted, adapted_definition
    from tilegym_db.judging.judging import draw_contents

    found = import_data_set(family).data_set
    item = first_with_a_blob(found, "engram_hash")
    (record,) = [record for record in found.of_kind("definition") if record.name == item.definition]
    adapted = adapted_definition(found, record)
    assert isinstance(adapted, Adapted)
    drawn = draw_contents(found, adapted.definition, item.record, 0, "cpu")
    ours = next(workload for workload in shipped.all_workloads() if workload.uuid == item.name)
    source = shipped.definition("engram_hash")
    case = Case.of_workload(source, ours, distribution="normal", seed=blob_seed(ours))
    for name, value in draw_inputs(source, case, "cpu").items():
        other = drawn[name]
        assert (
            torch.equal(value, other)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
            else value == other
        )


@pytest.mark.turn("tilegym_db/interchange/", "tilegym_db/judging/")  # workers; imported contents are compared daily
@pytest.mark.slow
def test_our_kernels_pass_on_imported_blobs(family: Path, home: Path) -> None:
    """Check that ids of a file stay inside the table; drawn ids would not. A cuTile kernel marked as Python runs as cuTile."""
    from tilegym_db.judging.judging import judge_data_set
    from tilegym_db.measurement.machine import select_machine

    found = import_data_set(family).data_set
    item = first_with_a_blob(found, "engram_hash")
    judgements = judge_data_set(found, select_machine("cpu"), names=[item.definition], limit=1)
    statuses = {judgement.solution: (judgement.status, judgement.reason) for judgement in judgements}
    assert len(statuses) >= 3
    assert set(statuses.values()) == {("PASSED", "")}


def of_blob(*names: str, **changes: str) -> str:
    given = {name: {"type": "safetensors", "path": BLOB, "tensor_key": name} | changes for name in names or ("x",)}
    return lines(of_workload(workload(**given)))


def declared(content: bytes) -> str:
    told = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "seed": 1, "inputs": ["x"]}
    return json.dumps({"blobs": {BLOB: told}})


GOOD = save({"x": torch.ones(4, 8)})
CHANGED = save({"x": torch.full((4, 8), 2.0)})

# Content of the blob, what the side file says of it, the workload -> key and a part of the reason.
BAD: dict[str, tuple[bytes, str | None, str, str, str]] = {
    "edited": (CHANGED, declared(GOOD), of_blob(), "workload.inputs.x.path", f"{BLOB} was changed after the export: its sha256"),
    "edited, and spelled with a dot": (CHANGED, declared(GOOD), of_blob(path=f"./{BLOB}"), "workload.inputs.x.path",
                                       "was changed after the export"),
    "cut": (GOOD[:-1], declared(GOOD), of_blob(), "workload.inputs.x.path", "was changed after the export"),
    "cut, and nobody says so": (GOOD[:-1], None, of_blob(), "workload.inputs.x.path", "the offsets of 'x'"),
    "no safetensors": (b"hello", None, of_blob(), "workload.inputs.x.path", "is not a safetensors file"),
    "no such key": (GOOD, declared(GOOD), of_blob(tensor_key="y"), "workload.inputs.x.tensor_key", "no tensor 'y' (it has x)"),
    "shape": (save({"x": torch.ones(8, 4)}), None, of_blob(), "workload.inputs.x",
              f"{BLOB} holds shape [8, 4], but the definition says [4, 8]"),
    "dtype": (save({"x": torch.ones(4, 8).bfloat16()}), None, of_blob(), "workload.inputs.x",
              f"{BLOB} holds dtype BF16, but the definition says float32"),
    "dimensions": (save({"x": torch.ones(32)}), None, of_blob(), "workload.inputs.x", "holds shape [32]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_blob_that_differs_from_its_workload_is_refused_by_key(
    tree: Tree, home: Path, tmp_path: Path, kind: str
) -> None:
    content, side, line, key, reason = BAD[kind]
    tree.write(BLOB, content).write(WORKLOADS, line + lines(of_workload(workload("w-2"))))
    if side is not None:
        tree.write(SIDE_FILE, side)
    found = import_data_set(tree.root).data_set
    (refusal,) = found.refused
    assert (refusal.path, refusal.key) == (f"{WORKLOADS}:1", key)
    assert reason in refusal.reason
    assert [item.name for item in found.of_kind("workload")] == ["w-2"]
    with raises(RecordError, "records_refused", "--strict"):
        import_data_set(tree.root, name="strict", strict=True)
    write_tree(tmp_path / "again", imported_files(data_set(home, "small")))
    kept = Tree(tmp_path / "again").bytes()
    assert kept == {**tree.bytes(), WORKLOADS: lines(of_workload(workload("w-2"))).encode()}


def test_a_blob_of_a_problem_is_held_against_its_definition(new_tree: Callable[[str], Tree], home: Path) -> None:
    """In SOL-ExecBench, paths start at the folder of the problem."""
    given = workload(x={"type": "safetensors", "path": "x.safetensors", "tensor_key": "x"})
    tree = new_tree("sol").write("one/definition.json", definition()).write("one/workload.jsonl", lines(given))
    tree.write("one/x.safetensors", save({"x": torch.ones(8, 8)}))
    (refusal,) = import_data_set(tree.root).data_set.refused
    assert (refusal.path, refusal.key) == ("one/workload.jsonl:1", "workload.inputs.x")
    assert all(fact in refusal.reason for fact in ("one/x.safetensors", "[8, 8]", "[4, 8]"))


def test_changed_blob_is_not_computed_on_through_a_trace_either(tree: Tree, home: Path) -> None:
    from tilegym_db.interchange.adapt import Adapted, adapted_definition
    from tilegym_db.judging.judging import draw_contents, workloads_of

    given = workload(x={"type": "safetensors", "path": BLOB, "tensor_key": "x"})
    tree.write(BLOB, CHANGED).write(SIDE_FILE, declared(GOOD)).write(WORKLOADS, lines(of_workload(given)))
    tree.write("traces/someone/scale/scale_n8.jsonl", lines(trace(of=given)))
    found = import_data_set(tree.root).data_set
    ((item, base),) = workloads_of(found)["scale_n8"]
    adapted = adapted_definition(found, found.of_kind("definition")[0])
    assert isinstance(adapted, Adapted)
    with raises(RecordError, "blob_changed", "inputs.x", BLOB):
        draw_contents(found, adapted.definition, item, 0, "cpu", base)


def test_a_declared_blob_whose_content_is_elsewhere_is_a_finding(tree: Tree, home: Path) -> None:
    tree.write(SIDE_FILE, declared(GOOD)).write(WORKLOADS, of_blob())
    found = import_data_set(tree.root).data_set
    assert found.refused == ()
    assert "is not in the data set" in found.of_kind("workload")[0].findings[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no object 'blobs'"),
        ('{"blobs": []}', "has no object 'blobs'"),
        ('{"blobs": {"a": null}}', "blobs.a: needs 'sha256' and 'bytes'"),
        ('{"blobs": {"a": {"sha256": "x", "bytes": 1}}}', "blobs.a: needs 'sha256' and 'bytes'"),
        ("[" * 100_000, "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
    ],
)
def test_unreadable_side_file_is_refused_with_its_workloads(
    tree: Tree, home: Path, content: str | bytes, reason: str
) -> None:
    tree.write(SIDE_FILE, content)
    refused_with_its_blobs(tree, reason)


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a link to nothing", "a link out", "no permission"])
def test_invalid_side_file_lets_no_blob_in_either(tree: Tree, home: Path, kind: str, tmp_path: Path) -> None:
    side = tree.root / SIDE_FILE
    side.parent.mkdir()
    match kind:
        case "a folder":
            side.mkdir()
        case "a FIFO":
            os.mkfifo(side)
        case "a link to nothing":
            side.symlink_to("nowhere")
        case "a link out":
            (tmp_path / "theirs").write_text(declared(GOOD))
            side.symlink_to(tmp_path / "theirs")
        case _:
            if os.geteuid() == 0:
                pytest.skip("the superuser may read everything")
            side.touch(0)
    refused_with_its_blobs(tree, "")


def refused_with_its_blobs(tree: Tree, reason: str) -> None:
    """A changed blob could come in as one that was exported."""
    tree.write(BLOB, CHANGED).write(WORKLOADS, of_blob() + lines(of_workload(workload("w-2"))))
    found = import_data_set(tree.root).data_set
    (line,) = [item for item in found.refused if item.path == f"{WORKLOADS}:1"]
    assert line.key == "workload.inputs.x.path"
    unknown, _, side = line.reason.partition(f": {SIDE_FILE} ")
    assert unknown == f"{BLOB} may have changed after the export, and this cannot be checked"
    assert reason in side
    assert side in [item.reason for item in found.refused if item.path == SIDE_FILE]
    assert [item.name for item in found.of_kind("workload")] == ["w-2"]


def test_a_side_file_that_names_files_outside_opens_none(tree: Tree, home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    told = {path: {"sha256": "0" * 64, "bytes": 5} for path in ("../secret", "/etc/passwd", "blob/../../secret")}
    tree.write(SIDE_FILE, json.dumps({"blobs": told})).write(BLOB, GOOD)
    escaping = lines(of_workload(workload("w-2", x={"type": "safetensors", "path": "../secret", "tensor_key": "x"})))
    tree.write(WORKLOADS, of_blob() + escaping)
    found = import_data_set(tree.root).data_set
    (refusal,) = found.refused
    assert (refusal.path, refusal.key) == (f"{WORKLOADS}:2", "workload.inputs.x.path")
    assert refusal.reason == "'../secret' leads out of its folder"


def test_a_side_file_that_is_a_link_out_is_not_read(tree: Tree, home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    (tree.root / SIDE_FILE).parent.mkdir()
    (tree.root / SIDE_FILE).symlink_to(tmp_path / "secret")
    refused = import_data_set(tree.root).data_set.refused
    assert {item.path for item in refused} == {SIDE_FILE}
    assert not any("token" in item.reason for item in refused)


def test_a_definition_that_was_refused_refuses_no_blob(tree: Tree, home: Path) -> None:
    tree.write(DEFINITION, "{").write(BLOB, save({"x": torch.ones(1)})).write(WORKLOADS, of_blob())
    found = import_data_set(tree.root).data_set
    assert [item.path for item in found.refused] == [DEFINITION]
    assert found.of_kind("workload")[0].findings == ("definition 'scale_n8' is not in the data set",)


def test_small_export_has_the_same_blob_twice(shipped: Catalog, tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    one, two = (
        build_export(shipped, [], None, BlobFolder(tmp_path / place, 64 * KIB, 16 * KIB), names=("softmax_backward",))
        for place in ("one", "two")
    )
    assert one.drawn.keys() == two.drawn.keys() != set()
    for path, file in one.drawn.items():
        assert file.read_bytes() == two.drawn[path].read_bytes()
    held = [given for _, inputs in inputs_of(one) for given in inputs.values() if given["type"] == "safetensors"]
    assert {given["path"] for given in held} == one.drawn.keys()
    assert all(given["tensor_key"] in load_file(one.drawn[given["path"]]) for given in held)
