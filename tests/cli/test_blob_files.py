"""Workloads whose inputs a file holds, on their way into the catalog: with their files or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

X = save({"x": torch.zeros(4, 8)})
PLACE = "blob/x.safetensors"


@pytest.fixture
def given(tmp_path: Path, workload_record: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Write a file of Workloads, each with these changes of its input, beside ``blob/x.safetensors``."""

    def write(*changes: dict[str, Any]) -> Path:
        folder = tmp_path / "given"
        (folder / "blob").mkdir(parents=True, exist_ok=True)
        (folder / PLACE).write_bytes(X)
        spec = {"type": "safetensors", "path": PLACE, "tensor_key": "x", "sha256": hashlib.sha256(X).hexdigest()}
        scalar = {"factor": {"type": "scalar", "value": 1.0}}
        records = [workload_record(axes={"M": 4, "N": 8}, inputs={**scalar, "x": spec | one}) for one in changes]
        file = folder / "workloads.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write


def test_a_file_comes_along_once(
    cli: Callable[..., Any], row_scale: Path, given: Callable[..., Path], snapshot: Callable[[Path], dict[str, bytes]]
) -> None:
    file = given({})
    assert cli("add-workload", file).code == 0
    assert (row_scale / PLACE).read_bytes() == X
    before = snapshot(row_scale)
    again = cli("add-workload", file, "--json").json()
    assert again["added"] == []
    assert snapshot(row_scale) == before


def test_a_file_that_a_killed_command_left_is_taken_as_it_is(
    cli: Callable[..., Any], row_scale: Path, given: Callable[..., Path]
) -> None:
    (row_scale / "blob").mkdir()
    (row_scale / PLACE).write_bytes(X)
    assert len(cli("add-workload", given({}), "--json").json()["added"]) == 1
    assert (row_scale / PLACE).read_bytes() == X


BAD = {
    "missing": ({"path": "blob/y.safetensors"}, "inputs.x: blob/y.safetensors does not exist in "),
    "another file": ({"sha256": "0" * 64}, "is not what it was"),
    "no digest": ({"sha256": None}, f'"sha256": "{hashlib.sha256(X).hexdigest()}"'),
    "no digest at all": ({"sha256": "abc"}, "inputs.x.safetensors.sha256"),
    "elsewhere": ({"path": "definitions/x.safetensors"}, "does not lie in blob/, or is not a .safetensors file"),
    "no such kind": ({"path": "blob/x.json"}, "does not lie in blob/, or is not a .safetensors file"),
    "the folder itself": ({"path": "blob"}, "does not lie in blob/, or is not a .safetensors file"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_file_that_cannot_be_had_adds_nothing(
    cli: Callable[..., Any],
    row_scale: Path,
    given: Callable[..., Path],
    snapshot: Callable[[Path], dict[str, bytes]],
    changes: dict[str, Any],
    message: str,
) -> None:
    before = snapshot(row_scale)
    result = cli("add-workload", given(changes))
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert {path: content for path, content in snapshot(row_scale).items() if "lock" not in path} == {
        path: content for path, content in before.items() if "lock" not in path
    }


def test_another_file_of_that_name_stays_and_is_named(
    cli: Callable[..., Any], row_scale: Path, given: Callable[..., Path]
) -> None:
    (row_scale / "blob").mkdir()
    (row_scale / PLACE).write_bytes(b"mine")
    result = cli("add-workload", given({}))
    assert result.code != 0
    assert "Give the file another name, or remove that one." in result.err
    assert (row_scale / PLACE).read_bytes() == b"mine"


def test_a_link_is_neither_followed_nor_written_through(
    cli: Callable[..., Any], row_scale: Path, given: Callable[..., Path], tmp_path: Path
) -> None:
    outside = tmp_path / "outside.safetensors"
    (row_scale / "blob").mkdir()
    (row_scale / PLACE).symlink_to(outside)
    assert cli("add-workload", given({})).code != 0
    assert not outside.exists()
    outside.write_bytes(X)
    result = cli("add-workload", given({}))
    assert result.code != 0
    assert "is a link out of" in result.err


def test_check_names_what_became_of_a_file(
    cli: Callable[..., Any], row_scale: Path, given: Callable[..., Path]
) -> None:
    assert cli("add-workload", given({})).code == 0
    assert "blob" not in cli("check", "row_scale", "--static").out
    (row_scale / PLACE).write_bytes(X[:-1] + b"\1")
    assert "inputs.x: " in (changed := cli("check", "row_scale", "--static").out)
    assert "is not what it was" in changed


def test_a_draft_whose_file_is_missing_is_not_added_by_halves(
    cli: Callable[..., Any],
    row_scale: Path,
    given: Callable[..., Path],
    snapshot: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    draft = tmp_path / "draft"
    assert cli("new", "definition", "halved", "--inputs", "x[M,N]", "-o", draft).code == 0
    (line, *_) = (draft / "workloads.jsonl").read_text().splitlines()
    spec = {"type": "safetensors", "path": PLACE, "tensor_key": "x", "sha256": hashlib.sha256(X).hexdigest()}
    record = {key: value for key, value in json.loads(line).items() if key != "uuid"} | {"inputs": {"x": spec}}
    (draft / "workloads.jsonl").write_text(json.dumps(record) + "\n")
    for path in draft.iterdir():
        path.write_text(path.read_text().replace("TODO", "Written"))
    independent = (draft / "independent.py").read_text()
    (draft / "independent.py").write_text(independent.replace("wide.to(x.dtype)", "(2 * wide / 2).to(x.dtype)"))
    before = snapshot(row_scale)
    result = cli("add-definition", draft)
    assert result.code == 1
    assert f"inputs.x: {PLACE} does not exist in {draft}" in result.err
    assert snapshot(row_scale) == before
