"""The cuTile kernels of linear attention: heads of any size, moved some at once or read in place, give the recurrence."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("cuda.tile")

import torch
from shipped_records import CATALOG

from tilegym_db.backends.cutile_interpreter import interpreting
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle

pytestmark = pytest.mark.sweep


def _error(name: str, inputs: dict[str, Any], limits: dict[str, int], **config: int) -> float:
    """Return the largest relative error of an output; ``limits`` replaces numbers of the source."""
    solution = CATALOG.solution(name)
    definition = CATALOG.definition(solution.record.definition)
    run = load_verified(solution, solution.digest)
    truth = oracle(definition, inputs)
    out = {output: torch.full(truth[output].shape, float("nan")) for output in definition.written_outputs}
    if definition.outputs["out"].dtype == "T":
        out["out"] = out["out"].to(next(value.dtype for name, value in inputs.items() if name in ("q", "x")))
    with interpreting(), patch.dict(run.__globals__, limits):
        run(*inputs.values(), *out.values(), **config)
    out |= {output: inputs[name] for name, output in definition.in_place.items()}
    return max(float((out[output] - value).norm() / value.norm()) for output, value in truth.items())


@pytest.mark.parametrize(
    ("heads", "T", "K", "V", "at_once", "config"),
    [
        ((1, 2), 70, 24, 130, 1, {}),  # blocks of values, a row at a time
        ((2, 2), 66, 16, 20, 1 << 27, {}),
        ((1, 1), 150, 64, 64, 1 << 27, {"segments": 3}),  # read in place
    ],
)
def test_gated_delta_rule_of_any_heads_is_the_recurrence(heads, T, K, V, at_once, config) -> None:
    torch.manual_seed(T)
    Hk, Hv = heads
    q, k = torch.randn(2, 1, T, Hk, K).bfloat16()
    inputs = {
        "q": q,
        "k": k,
        "v": torch.randn(1, T, Hv, V).bfloat16(),
        "g": -torch.rand(1, T, Hv),
        "beta": torch.rand(1, T, Hv).bfloat16(),
        "initial_state": torch.randn(1, Hv, K, V),
    }
    assert _error("gated_delta_rule_chunk_cutile", inputs, {"MOVED_AT_ONCE": at_once}, **config) < 4e-3


@pytest.mark.parametrize(("K", "V", "at_once"), [(24, 130, 1), (130, 20, 1 << 27), (64, 128, 1 << 27)])
def test_gated_delta_rule_of_one_token_is_the_recurrence(K: int, V: int, at_once: int) -> None:
    torch.manual_seed(K)
    q, k = torch.randn(2, 3, 1, 1, K).bfloat16()
    inputs = {
        "q": q,
        "k": k,
        "v": torch.randn(3, 1, 2, V).bfloat16(),
        "g": -torch.rand(3, 1, 2),
        "beta": torch.rand(3, 1, 2).bfloat16(),
        "initial_state": torch.randn(3, 2, K, V),
    }
    assert _error("gated_delta_rule_recurrent_cutile", inputs, {"MOVED_AT_ONCE": at_once}) < 4e-3


@pytest.mark.parametrize(("P", "N", "at_once"), [(70, 24, 1), (12, 130, 1 << 27), (64, 128, 1 << 27)])
def test_mamba2_of_one_token_is_the_recurrence(P: int, N: int, at_once: int) -> None:
    torch.manual_seed(P)
    inputs = {
        "state": torch.randn(3, 2, P, N),
        "x": torch.randn(3, 2, P).bfloat16(),
        "dt": torch.randn(3, 2).bfloat16(),
        "A": -torch.rand(2),
        "Bmat": torch.randn(3, 1, N).bfloat16(),
        "Cmat": torch.randn(3, 1, N).bfloat16(),
        "D": torch.rand(2).bfloat16(),
        "dt_bias": torch.rand(2).bfloat16(),
    }
    assert _error("mamba2_state_update_cutile", inputs, {"MOVED_AT_ONCE": at_once}) < 4e-3


@pytest.mark.parametrize(
    ("B", "T", "P", "N", "at_once", "dtype"),
    [
        (2, 66, 70, 24, 1, torch.float16),  # blocks of values, a row at a time
        (2, 130, 16, 130, 1 << 27, torch.bfloat16),
        (1, 260, 64, 64, 1 << 27, torch.bfloat16),  # read in place, in segments
    ],
)
def test_mamba2_of_any_heads_is_the_recurrence(
    B: int, T: int, P: int, N: int, at_once: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(T)
    H, G = 2, 1
    inputs = {
        "x": torch.randn(B, T, H, P).to(dtype),
        "dt": torch.randn(B, T, H).to(dtype),
        "A": -torch.rand(H),
        "Bmat": torch.randn(B, T, G, N).to(dtype),
        "Cmat": torch.randn(B, T, G, N).to(dtype),
        "D": torch.rand(H).to(dtype),
        "dt_bias": torch.rand(H).to(dtype),
        "initial_state": torch.randn(B, H, P, N),
        "dt_min": 0.0,
    }
    assert _error("mamba2_chunk_scan_cutile", inputs, {"MOVED_AT_ONCE": at_once}) < 4e-3
