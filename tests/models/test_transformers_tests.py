"""``benchmarks/transformers_tests.py``: tests run stock and patched, and one that fails patched alone is a regression."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_db.paths import shipped_root

# A script that runs pytest twice.
pytestmark = pytest.mark.turn("benchmarks/transformers_tests.py")

SCRIPT = shipped_root() / "benchmarks" / "transformers_tests.py"
TESTS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def generated():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return model, model.generate(torch.ones((1, 3), dtype=torch.long), max_new_tokens=2, do_sample=False)


def test_it_generates():
    assert generated()[1].shape == (1, 5)


def test_it_generates_with_the_class_of_transformers():
    assert "_tilegym_db_of_tests" not in generated()[0].__dict__


def test_it_generates_with_what_is_not_installed():
    raise ImportError


def test_of_another_kind():
    assert False
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "test_modeling_llama.py").write_text(TESTS)
    return tmp_path


def test_a_test_that_fails_patched_alone_is_a_regression(checkout):
    command = [sys.executable, SCRIPT, checkout, "llama", "--jobs", "1", "--out", checkout / "rows.json"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    (row,) = json.loads((checkout / "rows.json").read_text())
    assert (row["passed_stock"], row["passed_patched"], row["failed_stock"]) == (2, 1, 1)
    assert [name.split("::")[-1] for name in row["regressed"]] == ["test_it_generates_with_the_class_of_transformers"]
    assert (row["models"], row["unpatched"]) == (2, {})
    assert ["_tilegym_db_of_tests" in text for text in row["failures"].values()] == [True]


def test_tests_that_do_not_start_are_an_error(checkout):
    (checkout / "tests" / "models" / "llama" / "test_modeling_llama.py").write_text("import no_such_module\n")
    command = [sys.executable, SCRIPT, checkout, "llama", "--jobs", "1"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "no_such_module" in ran.stdout
