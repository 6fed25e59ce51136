"""Gradients of residual sums and their norms at the ends of blocks, in Triton's interpreter, in a separate process.

Run as a program, this file prints for every kernel how far its gradients are from those of the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

KERNELS = ("add_rms_norm", "add_rms_norm_fp32", "add_rms_norm_gemma", "add_layer_norm")
M, N = 3, 60
"""Neither fills a block."""


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.turn("solutions/norm/", "solutions/_lib/triton/")  # interpreted, of kernels that seldom change
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.records(of=f"{one}_backward_triton")) for one in KERNELS]
)
def test_gradients_without_epsilon_are_finite(errors: dict[str, list[float]], name: str) -> None:
    assert all(error <= 1e-5 for error in errors[name]), errors[name]


def answer(name: str) -> list[float]:
    """The largest error of each gradient, with an epsilon of zero."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verification.oracle import load_function

    catalog, generator = Catalog.default(), torch.Generator().manual_seed(0)
    definition = catalog.definition(f"{name}_backward")
    total, grad, given = torch.randn(3, M, N, generator=generator)
    inputs = total, torch.randn(N, generator=generator), grad, given, 0.0
    wanted = load_function(definition.reference, definition.name)(*inputs)
    found = [torch.empty_like(one) for one in wanted]
    load_entry(catalog.solution(f"{name}_backward_triton"))(*inputs, *found)
    return [float((got - want).abs().max()) for got, want in zip(found, wanted, strict=True)]


if __name__ == "__main__":
    from tilegym_db.backends.toolchains import repair_interpreter

    repair_interpreter()
    print(json.dumps({name: answer(name) for name in KERNELS}))
