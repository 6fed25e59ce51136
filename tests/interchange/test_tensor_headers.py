"""A safetensors file whose header contradicts itself or its data is refused; what the library writes is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_sets import Tree, lines, of_workload, workload
from safetensors.torch import save

from tilegym_db.interchange.checks import tensor_header
from tilegym_db.interchange.importing import import_data_set

WORKLOADS = "workloads/scale/scale_n8.jsonl"
WHOLE = {"x": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}


def file_of(header: dict[str, Any], size: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def with_x(**changes: Any) -> dict[str, Any]:
    return {"x": WHOLE["x"] | changes}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (with_x(data_offsets=[128, 0]), 128),
        (with_x(data_offsets=[-128, 0]), 128),
        (with_x(data_offsets=[0, 256]), 128),
        (with_x(data_offsets=[0, 4]), 4),
        (with_x(data_offsets=[0, 128.0]), 128),
        (with_x(data_offsets=[0]), 128),
        (with_x(data_offsets="0128"), 128),
        (with_x(shape="48"), 128),
        (with_x(shape=["4", 8]), 128),
        (with_x(shape=[-4, -8]), 128),
        (with_x(shape=[True, 32]), 128),
        (with_x(dtype=32), 128),
        (with_x(data_offsets=[4, 132]), 132),
        (WHOLE, 132),
        (WHOLE | {"y": {"dtype": "F32", "shape": [4, 8], "data_offsets": [64, 192]}}, 192),
        (WHOLE | {"y": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, 128),
    ],
)
def test_header_that_contradicts_itself_is_refused(tree: Tree, home: Path, header: dict[str, Any], size: int) -> None:
    tree.write(
        WORKLOADS, lines(of_workload(workload(x={"type": "safetensors", "path": "b.safetensors", "tensor_key": "x"})))
    )
    tree.write("b.safetensors", file_of(header, size))
    refused = import_data_set(tree.root).data_set.refused
    assert [item.path for item in refused if "workloads" in item.path] == [f"{WORKLOADS}:1"]
    assert isinstance(tensor_header(tree.root / "b.safetensors"), str)


def test_header_that_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(0, 4),
        "c": torch.zeros((), dtype=torch.int64),
        "d": torch.zeros(7, dtype=torch.bool),
        "e": torch.zeros(2, 2).to(torch.float8_e4m3fn),
    }
    file = tmp_path / "all.safetensors"
    file.write_bytes(save(tensors, {"by": "a test"}))
    found = tensor_header(file)
    assert not isinstance(found, str), found
    assert {key: shape for key, (_, shape) in found.items()} == {key: (*value.shape,) for key, value in tensors.items()}
