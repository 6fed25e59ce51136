"""The backward of the experts' activation without rows, and with more choices than rows, in Triton's interpreter.

Run as a program, in a separate process, this file prints what differs from the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "swiglu_backward_and_per_token_cast"
CASES = {"no rows": (0, 7), "more choices than programs zero at once": (2, 300), "more rows than choices": (20, 4)}
"""Rows, and tokens with three choices each."""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": found}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


@pytest.mark.turn("solutions/quant/")  # interpreted, of a kernel that seldom changes
@pytest.mark.slow
@pytest.mark.records(of=f"{NAME}_triton")
@pytest.mark.parametrize("case", CASES)
def test_every_weight_has_its_gradient_and_every_other_one_zero(answers: dict[str, Any], case: str) -> None:
    assert answers[case] == {"off": 0, "zeros": answers[case]["without"], "without": answers[case]["without"]}


def answer(rows: int, tokens: int) -> dict[str, int]:
    """Elements of the outputs that are off, weights whose gradient is zero, and choices that have no row."""
    from swiglu_rows import backward_inputs

    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verification.oracle import run_reference

    catalog, inputs = Catalog.default(), backward_inputs(rows, tokens)
    wanted = run_reference(catalog.definition(NAME), inputs)
    outputs = [torch.full(value.shape, 7.0).to(value.dtype) for value in wanted.values()]
    load_entry(catalog.solution(f"{NAME}_triton"))(*inputs.values(), *outputs)
    pairs = list(zip(outputs, wanted.values(), strict=True))
    off = sum(int((~torch.isclose(got.float(), want.float(), rtol=1e-5, atol=1e-6)).sum()) for got, want in pairs)
    zeros, without = (int(found.sum()) for found in (outputs[-1] == 0, inputs["row_of_choice"] < 0))
    return {"off": off, "zeros": zeros, "without": without}


if __name__ == "__main__":
    from tilegym_db.backends.toolchains import repair_interpreter

    repair_interpreter()
    print(json.dumps({case: answer(*sizes) for case, sizes in CASES.items()}))
