"""Attention within packed sequences, cuTile: sequences of any length over several blocks, and nothing behind the last one."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.tile")

import torch
from shipped_records import CATALOG

from tilegym_db.backends.cutile_interpreter import interpreting
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "behind", "D", "scale", "config"),
    [
        ((33, 0, 70, 200), 0, 16, 0.3, {"CONFIG": "s64_n64"}),
        ((0, 129, 1), 150, 80, 0.2, {}),
        ((64, 128, 63), 1, 24, -0.3, {"CONFIG": "s128_n64"}),
        ((0, 0), 5, 16, 0.3, {}),
    ],
)
def test_packed_sequences_do_not_see_each_other(lengths, behind, D, scale, config, causal) -> None:
    solution = CATALOG.solution("attention_varlen_cutile")
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(ends[-1]) + behind
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(tokens, heads, D).bfloat16() for heads in (4, 2, 2))
    k[int(ends[-1]) :] = v[int(ends[-1]) :] = torch.nan
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens": ends.int(), "scale": scale, "causal": causal}
    truth = oracle(CATALOG.definition("attention_varlen"), inputs)["out"]
    out = torch.full_like(q, float("nan"))
    with interpreting():
        load_verified(solution, solution.digest)(*inputs.values(), out, **config)
    assert float((out - truth).abs().max()) < 1e-2 * max(1.0, float(truth.abs().max()))
    assert not out[int(ends[-1]) :].any()
