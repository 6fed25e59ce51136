"""Inputs that a file holds: read once, and only what the Workload says that the file is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import save_file

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.inputs import BlobReader, blob_problems, draw_inputs

X = torch.arange(32.0).reshape(4, 8)
Stored = Callable[..., Workload]


@pytest.fixture
def stored(workload_record: Callable[..., dict[str, Any]], tmp_path: Path) -> Stored:
    """Write a file with this tensor, and give a Workload that has ``x`` from it."""

    def store(tensor: torch.Tensor = X, **changes: str | None) -> Workload:
        file = tmp_path / "blob" / "model.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_file({"layer.x": tensor}, str(file))
        spec = {
            "type": "safetensors",
            "path": "blob/model.safetensors",
            "tensor_key": "layer.x",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            **changes,
        }
        given = {"factor": {"type": "scalar", "value": 3.0}, "x": {k: v for k, v in spec.items() if v is not None}}
        return Workload.from_dict(workload_record(inputs=given))

    return store


def drawn(definition: Definition, workload: Workload, blobs: BlobReader, seed: int = 1) -> dict[str, Any]:
    case = Case.of_workload(definition, workload, distribution="normal", seed=seed)
    return draw_inputs(definition, case, "cpu", blobs=blobs)


def test_a_file_gives_its_tensor_and_everything_else_is_drawn(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    one, other = (drawn(operator(), stored(), BlobReader((tmp_path,)), seed) for seed in (1, 2))
    assert torch.equal(one["x"], X)
    assert torch.equal(other["x"], X)
    assert not torch.equal(one["weight"], other["weight"])


def test_a_file_is_read_once_until_the_reader_is_cleared(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    workload, blobs = stored(), BlobReader((tmp_path,))
    drawn(operator(), workload, blobs)
    (tmp_path / "blob" / "model.safetensors").unlink()
    assert torch.equal(drawn(operator(), workload, blobs)["x"], X)
    blobs.clear()
    with pytest.raises(RecordError, match=r"inputs.x: blob/model.safetensors does not exist in "):
        drawn(operator(), workload, blobs)


@pytest.mark.parametrize(
    ("tensor", "changes", "code", "facts"),
    [
        (torch.zeros(8, 4), {}, "tensor_shape_differs", ("(8, 4)", "(4, 8)")),
        (torch.zeros(4, 8).half(), {}, "tensor_dtype_differs", ("torch.float16", "torch.float32")),
        (X, {"tensor_key": "layer.y"}, "tensor_absent", ("'layer.y'",)),
    ],
)
def test_a_tensor_that_differs_from_the_workload_is_named(
    operator: Callable[..., Definition],
    stored: Stored,
    tmp_path: Path,
    tensor: torch.Tensor,
    changes: dict[str, str],
    code: str,
    facts: tuple[str, ...],
) -> None:
    workload = stored(tensor, **changes)
    with raises(RecordError, code, "inputs.x", *facts):
        drawn(operator(), workload, BlobReader((tmp_path,)))
    (problem,) = blob_problems(operator(), [workload], (tmp_path,))
    assert f"workload {workload.uuid}: inputs.x: " in problem


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (X, {"sha256": "0" * 64}, "is not what it was: its sha256 is .*, and the workload says 000000000000"),
        (X, {"sha256": None}, 'state what blob/model.safetensors holds: "sha256": "[0-9a-f]{64}"'),
        (X, {"path": "blob/other.safetensors"}, "blob/other.safetensors does not exist in "),
    ],
)
def test_a_file_that_is_not_what_the_workload_says_is_named(
    operator: Callable[..., Definition],
    stored: Stored,
    tmp_path: Path,
    tensor: torch.Tensor,
    changes: dict[str, str | None],
    message: str,
) -> None:
    workload = stored(tensor, **changes)
    with pytest.raises(RecordError, match=f"inputs.x: .*{message}"):
        drawn(operator(), workload, BlobReader((tmp_path,)))
    (problem,) = blob_problems(operator(), [workload], (tmp_path,))
    assert f"workload {workload.uuid}: inputs.x: " in problem


def test_bytes_that_are_no_safetensors_file_are_named(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    stored()
    content = b"\xff" * 64
    (tmp_path / "blob" / "model.safetensors").write_bytes(content)
    spec = stored(sha256=hashlib.sha256(content).hexdigest())
    (tmp_path / "blob" / "model.safetensors").write_bytes(content)
    with raises(RecordError, "blob_unreadable", "inputs.x", "blob/model.safetensors"):
        drawn(operator(), spec, BlobReader((tmp_path,)))


def test_a_link_out_of_the_root_is_not_followed(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    workload, root = stored(), tmp_path / "root"
    (root / "blob").mkdir(parents=True)
    (root / "blob" / "model.safetensors").symlink_to(tmp_path / "blob" / "model.safetensors")
    with pytest.raises(RecordError, match=r"inputs.x: .*/root/blob/model.safetensors is a link out of .*/root"):
        drawn(operator(), workload, BlobReader((root,)))


def test_without_a_root_no_file_is_read(operator: Callable[..., Definition], stored: Stored) -> None:
    case = Case.of_workload(operator(), stored(), distribution="normal", seed=1)
    with pytest.raises(RecordError, match="does not exist in no folder: none is known here"):
        draw_inputs(operator(), case, "cpu")


def test_contents_of_a_file_leave_room_for_rounding(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    """Of small integers an exact operator must give exact bits; what a file holds is none of these."""
    case = Case.of_workload(operator(), stored(), distribution="small_integers", seed=1)
    assert not case.exact
    found = make_oracle_case(operator(), case, "cpu", BlobReader((tmp_path,)))
    assert found is not None
    assert not found.exact


def test_rule_about_contents_drops_drawn_ones_and_refuses_files(
    operator: Callable[..., Definition], stored: Stored, tmp_path: Path
) -> None:
    definition = operator(content_constraints=["x[0, 0].item() == 7"])
    workload = stored()
    case = Case.of_workload(definition, workload, distribution="normal", seed=1)
    with raises(RecordError, "content_constraint_broken", "x[0, 0].item() == 7"):
        make_oracle_case(definition, case, "cpu", BlobReader((tmp_path,)))
    plain = Case(Call(definition.name, case.call.axes, case.call.dtypes, scalars=case.call.scalars), seed=1)
    assert make_oracle_case(definition, plain, "cpu") is None
    held = operator(content_constraints=["x[0, 1].item() == 1", "x.shape[0] == M"])
    assert make_oracle_case(held, case, "cpu", BlobReader((tmp_path,))) is not None
