"""Files of other projects that no dialect reads are refused with what they are, and with a command that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.interchange.importing import import_data_set, unread_form

PROBLEM = "class Model:\n    def forward(self, x):\n        return x\n\n\ndef get_inputs():\n    return []\n"
FILES = {
    "23_Softmax.py": (PROBLEM, "a problem of KernelBench"),
    "answer.py": ("class Model: ...\n\n\nclass ModelNew: ...\n\n\ndef get_inputs(): ...\n", "an answer to KernelBench"),
    "submission.py": (
        "from task import input_t\n\n\ndef custom_kernel(data):\n    return data\n",
        "a submission to GPU MODE",
    ),
    "reference.py": (
        "from task import input_t\n\n\ndef generate_input(size, seed): ...\n\n\ndef ref_kernel(data):\n    return data\n",
        "a problem of GPU MODE",
    ),
    "E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json": ('{"1": {"BLOCK_SIZE_M": 16}}', "vLLM's fused_moe"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("as_folder", [False, True])
def test_form_is_refused_with_its_name_and_a_command(name: str, as_folder: bool, tmp_path: Path) -> None:
    text, said = FILES[name]
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / name
    path.write_text(text)
    with raises(UsageError, "dialect_unread", said) as refused:
        import_data_set(path.parent if as_folder else path)
    assert re.search(r"tilegym-db (new|tune) ", str(refused.value))


@pytest.mark.parametrize("text", ["def run(x):\n    return x\n", "class Model:", "\0", "x = 1\n" * 3])
def test_other_source_is_not_known(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert unread_form(tmp_path) is None
