"""What was imported comes out byte for byte, whatever odd things it holds; and importing twice changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)
from safetensors.torch import save_file

from tilegym_db.interchange.importing import import_data_set, imported_files, write_tree
from tilegym_db.store.imported import counted, data_set

BLOB = "./blob/workloads/scale/scale_n8/scale_n8_0af3.safetensors"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def tensor(key: str, path: str = BLOB) -> dict[str, str]:
    return {"type": "safetensors", "path": path, "tensor_key": key}


@pytest.fixture
def odd(tree: Tree) -> Tree:
    """Every odd case that real FlashInfer-Trace data holds, and that is no mistake."""
    blob = tree.root / BLOB
    blob.parent.mkdir(parents=True)
    save_file({"x": torch.ones(4, 8), "w": torch.ones(8)}, blob)  # one file, several keys
    flat = "blob/workloads/scale/scale_n8_flat.safetensors"
    save_file({"x": torch.ones(4, 8)}, tree.root / flat)
    tree.write("blob/workloads/scale/scale_n8/pointer.safetensors", POINTER)
    with_unknown_keys = definition(
        name="scale_odd", tags=["fused", "model:a"], constraints=["M >= 1", "M == x.shape[0]"]
    )
    with_unknown_keys["inputs"]["w"]["optional"] = True  # type: ignore[index]
    scalar_output = definition(name="sum_all", outputs={"out": {"shape": [], "dtype": "float32"}})
    numbers = (
        '{"definition":"scale_n8","workload":{"axes":{"M":4},"inputs":{"x":{"type":"random"},"w":{"type":"random"},'
    )
    numbers += '"eps":{"type":"scalar","value":0.0883883461356163}},"uuid":"n"},"solution":null,"evaluation":null}'
    return (
        tree.write("definitions/scale/deeper/scale_odd.json", with_unknown_keys)  # not where its fields say
        .write("definitions/scale/sum_all.json", json.dumps(scalar_output))  # no indent, no line end
        .write(SOLUTION.replace("scale_torch", "cuda"), solution("cuda", "// é\r\nvoid run();", language="cuda"))
        .write(
            WORKLOADS,
            lines(of_workload(workload("a", x=tensor("x"), w=tensor("w"))))
            + "\n"  # an empty line
            + lines(of_workload(workload("b", x=tensor("x", flat))))
            + lines(of_workload(workload("c", x=tensor("x", "blob/workloads/scale/scale_n8/pointer.safetensors"))))
            + lines(of_workload(workload("d", x=tensor("x", "blob/nowhere.safetensors"))))
            + numbers,  # no line end
        )
        .write(
            TRACES,
            lines(trace(), trace(), trace(status="TIMEOUT"))  # several of one pair
            + lines(trace(status="INCORRECT_NUMERICAL")).replace('"NaN"', "NaN")
            + lines(trace(of=workload("zero", m=0))),
        )
        .write("tests/references/test_scale_n8.py", "raise SystemExit('never run on import')\n")
        .write("README.md", "# small\r\n")
    )


def test_an_odd_data_set_comes_out_byte_for_byte(odd: Tree, home: Path, tmp_path: Path) -> None:
    report = import_data_set(odd.root)
    assert not report.data_set.refused
    assert counted(report.data_set.records) == {"definition": 3, "solution": 2, "trace": 5, "workload": 5}
    write_tree(tmp_path / "out", imported_files(data_set(home, "small")))
    assert Tree(tmp_path / "out").bytes() == odd.bytes()


def test_importing_twice_changes_nothing(odd: Tree, home: Path) -> None:
    assert import_data_set(odd.root).changed
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert not import_data_set(odd.root).changed
    after = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == before


def test_what_cannot_be_measured_says_so(odd: Tree, home: Path) -> None:
    records = import_data_set(odd.root).data_set.records
    findings = {record.name: " ".join(record.findings) for record in records if record.findings}
    assert "Git LFS pointer without its content (sha256 4d7a2146" in findings["c"]
    assert "12345 bytes" in findings["c"]
    assert "blob/nowhere.safetensors is not in the data set" in findings["d"]
    assert "its path is definitions/scale/deeper/scale_odd.json" in findings["scale_odd"]
    assert not {"a", "b", "n"} & set(findings)


def test_defaults_are_filled_in_and_remembered(tree: Tree, home: Path) -> None:
    record = solution()
    del record["spec"]["destination_passing_style"]
    tree.write(SOLUTION, record)
    (read,) = import_data_set(tree.root).data_set.of_kind("solution")
    assert read.record["spec"]["destination_passing_style"] is True
    assert set(read.unset) == {"spec.destination_passing_style", "spec.binding", "spec.dependencies"}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"value": 1e-06}', '{"value": 0.000001}'),
        ('{"value": 1}', '{"value": 1.0}'),
        ('{"value": 1}', '{"value": true}'),
        ('{"description": null, "name": "n"}', '{"name": "n"}'),
        ('{"tags": ["a", "b"]}', '{"tags": ["b", "a"]}'),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
        ('{"path": "./blob/x"}', '{"path": "blob/x"}'),
        ('{"timestamp": "2026-01-02T03:04:05"}', '{"timestamp": "2026-01-02T03:04:05Z"}'),
        ('{"value": "1"}', '{"value": 1}'),
    ],
)
def test_identity_keeps_spellings_apart(one: str, two: str) -> None:
    from tilegym_db.interchange.checks import parse

    assert len({parse(text.encode())[1] for text in (one, two)}) == 2


def test_identity_leaves_white_space_out() -> None:
    from tilegym_db.interchange.checks import parse

    assert parse(b'{"a": [1,  2]}')[1] == parse(b' {"a":[1,2]}\r\n')[1]


def test_one_family_comes_out_alone(odd: Tree, home: Path, tmp_path: Path) -> None:
    odd.write("definitions/norm/other.json", definition(name="other", op_type="norm"))
    import_data_set(odd.root)
    files = imported_files(data_set(home, "small"), "norm")
    assert list(files) == ["definitions/norm/other.json"]


def test_a_refused_line_is_not_in_what_comes_out(tree: Tree, home: Path) -> None:
    good = lines(of_workload(workload()))
    tree.write(WORKLOADS, good + '{"definition": 3}\n' + lines(of_workload(workload("w-2"))))
    report = import_data_set(tree.root)
    assert report.data_set.refused
    files = imported_files(data_set(home, "small"))
    assert files[WORKLOADS].decode() == good + lines(of_workload(workload("w-2")))
    assert files[DEFINITION] == tree.bytes()[DEFINITION]


def test_two_data_sets_share_bytes_and_one_can_be_removed(
    tree: Tree, home: Path, new_tree: Callable[[str], Tree]
) -> None:
    from tilegym_db.store.imported import data_sets, forget_data_set

    twin = new_tree("twin")
    for path, content in tree.bytes().items():
        twin.write(path, content)
    import_data_set(tree.root)
    import_data_set(twin.root)
    objects = [path for path in (home / "imported" / "objects").rglob("*") if path.is_file()]
    assert len(objects) == len(tree.bytes())
    assert forget_data_set(home, "twin") == ("flashinfer-trace:twin", 0)
    assert [found.name for found in data_sets(home)] == ["small"]
    assert imported_files(data_set(home, "small")) == tree.bytes()


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_text_that_holds_a_line_separator_is_read_back(tree: Tree, home: Path, mark: str) -> None:
    text = f"first{mark}second"
    tree.write(DEFINITION, json.dumps(definition(description=text), ensure_ascii=False))
    run = trace()
    run["evaluation"]["log"] = text
    tree.write(TRACES, json.dumps(run, ensure_ascii=False) + "\n")
    import_data_set(tree.root)
    found = data_set(home, "small")
    assert found.of_kind("definition")[0].record["description"] == text
    assert found.of_kind("trace")[0].record["evaluation"]["log"] == text
    assert imported_files(found) == tree.bytes()


@pytest.mark.turn("tilegym_db/interchange/")  # a set of 10,000 traces
def test_ten_thousand_traces_are_imported_in_seconds(tree: Tree, home: Path) -> None:
    import time

    runs = [trace(of=workload(f"w-{number}", m=number % 512 + 1)) for number in range(10_000)]
    tree.write(TRACES, lines(*runs))
    started = time.process_time()
    report = import_data_set(tree.root)
    took = time.process_time() - started
    assert counted(report.data_set.records)["trace"] == 10_000
    assert took < 15, f"{took:.1f} s of processor time"
