"""Inputs from a model that has gone wrong to routers, in Triton's interpreter, in a separate process.

Run as a program, this file prints for every router what a row with a NaN gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

E, K, G, M = 60, 4, 6, 3
"""Not powers of two, so that a block has lanes which are no experts."""
ROUTERS: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {
    "topk_softmax": (torch.bfloat16, (K, True)),
    "topk_then_softmax": (torch.bfloat16, (K,)),
    "topk_softmax_groups": (torch.float32, (K, G, 2, 1.0)),
    "topk_sigmoid_bias_groups": (torch.float32, (torch.zeros(E), K, G, 2, True, 2.5)),
    "topk_sqrtsoftplus_bias": (torch.bfloat16, (torch.zeros(E), K, 1.5)),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.turn("solutions/moe/", "solutions/_lib/triton/")  # interpreted, of kernels that seldom change
@pytest.mark.slow
@pytest.mark.parametrize(
    "router", [pytest.param(name, marks=pytest.mark.records(of=f"{name}_triton")) for name in ROUTERS]
)
def test_row_with_a_nan_gives_real_experts_and_visible_weights(answers: dict[str, Any], router: str) -> None:
    one, every, healthy = answers[router]
    assert all(0 <= expert < E for row in (one, every, healthy) for expert in row["ids"])
    assert one["nan"] > 0
    assert every["nan"] == K
    assert healthy["nan"] == 0


def answer(router: str) -> list[dict[str, Any]]:
    """Ids and how many weights are NaN: of a row with one NaN, of one that is all NaN, and of one without."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog

    dtype, others = ROUTERS[router]
    logits = torch.randn(M, E, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 7] = float("nan")
    logits[1] = float("nan")
    weights, ids = torch.zeros(M, K, dtype=dtype), torch.full((M, K), -1, dtype=torch.int64)
    load_entry(Catalog.default().solution(f"{router}_triton"))(logits, *others, weights, ids)
    return [{"ids": ids[row].tolist(), "nan": int(weights[row].isnan().sum())} for row in range(M)]


if __name__ == "__main__":
    from tilegym_db.backends.toolchains import repair_interpreter

    repair_interpreter()
    print(json.dumps({router: answer(router) for router in ROUTERS}))
