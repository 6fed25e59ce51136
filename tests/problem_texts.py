"""Texts of problems of KernelBench and GPU MODE, and their files and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilegym_db.store.imported import DataSet

HEAD = "import torch\nimport torch.nn as nn\n\n\nclass Model(nn.Module):\n"
SOFTMAX = (
    HEAD
    + """    def forward(self, x):
        return torch.softmax(x, dim=1)

rows = 4096
columns = 393216

def get_inputs():
    return [torch.rand(rows, columns)]

def get_init_inputs():
    return []
"""
)

ADD = """from utils import make_match_reference, DeterministicContext
from task import input_t, output_t
import torch


def ref_kernel(data: input_t) -> output_t:
    with DeterministicContext():
        a, b, c = data
        c[...] = a - 2 * b
        return c


def generate_input(m: int, n: int, seed: int) -> input_t:
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    a = torch.randn(m, n, device="cuda", dtype=torch.float16, generator=gen).contiguous()
    b = torch.empty(n, device="cuda", dtype=torch.float16).uniform_(0, 2, generator=gen)
    return a, b, torch.empty(m, n, device="cuda", dtype=torch.float16)


check_implementation = make_match_reference(ref_kernel)
"""
TASK = """lang: "py"
tests:
  - {"m": 4, "n": 8, "seed": 1}
  - {m: 16, n: 8, seed: 2}  # a comment
benchmarks:
  - {"m": 1024, "n": 512, "seed": 3}
test_timeout: 180
"""
SUBMISSION = """#!POPCORN leaderboard add
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    a, b, c = data
    c.copy_(a - 2 * b)
    return c
"""


def written(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def record_of(found: DataSet, name: str) -> dict[str, Any]:
    return dict(next(item.record for item in found.of_kind("definition") if item.name == name))
