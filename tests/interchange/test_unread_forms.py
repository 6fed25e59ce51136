"""Files of other projects that are no data set are refused with what they are, and with a command that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.interchange.importing import import_data_set, unread_form

TILE_SIZES = "E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"


@pytest.mark.parametrize("as_folder", [False, True])
def test_tile_sizes_are_refused_with_the_command_to_use_them(as_folder: bool, tmp_path: Path) -> None:
    (tmp_path / TILE_SIZES).write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    with raises(UsageError, "dialect_unread", "vLLM's fused_moe", "tilegym-db tune moe_experts --start", TILE_SIZES):
        import_data_set(tmp_path if as_folder else tmp_path / TILE_SIZES)


@pytest.mark.parametrize("text", ["def run(x):\n    return x\n", "class Model:", "\0", "x = 1\n" * 3])
def test_other_source_is_not_known(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert unread_form(tmp_path) is None
