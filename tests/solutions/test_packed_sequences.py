"""Attention within packed sequences, cuTile and TileLang: any lengths over several blocks, nothing behind the last one."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.tile")
pytest.importorskip("tilelang")

import torch
from shipped_records import CATALOG

from tilegym_db.backends import cutile_interpreter, tilelang_interpreter
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle

pytestmark = pytest.mark.sweep


LANGUAGES = {"cutile": cutile_interpreter, "tilelang": tilelang_interpreter}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("language", "lengths", "behind", "D", "scale", "config"),
    [
        ("cutile", (33, 0, 70, 200), 0, 16, 0.3, {"CONFIG": "s64_n64"}),
        ("cutile", (0, 129, 1), 150, 80, 0.2, {}),
        ("cutile", (64, 128, 63), 1, 24, -0.3, {"CONFIG": "s128_n64"}),
        ("cutile", (0, 0), 5, 16, 0.3, {}),
        ("tilelang", (33, 0, 70, 200), 0, 16, 0.3, {"rows": 64}),
        ("tilelang", (0, 129, 1), 150, 80, 0.2, {}),
        ("tilelang", (64, 128, 63), 1, 24, 0.3, {"keys": 128}),
        ("tilelang", (5, 0, 20), 3, 24, -0.3, {}),  # the plain kernel
        ("tilelang", (0, 0), 5, 16, 0.3, {}),
    ],
)
def test_packed_sequences_do_not_see_each_other(language, lengths, behind, D, scale, config, causal) -> None:
    solution = CATALOG.solution(f"attention_varlen_{language}")
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(ends[-1]) + behind
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(tokens, heads, D).bfloat16() for heads in (4, 2, 2))
    k[int(ends[-1]) :] = v[int(ends[-1]) :] = torch.nan
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens": ends.int(), "scale": scale, "causal": causal}
    truth = oracle(CATALOG.definition("attention_varlen"), inputs)["out"]
    out = torch.full_like(q, float("nan"))
    with LANGUAGES[language].interpreting():
        load_verified(solution, solution.digest)(*inputs.values(), out, **config)
    assert float((out - truth).abs().max()) < 1e-2 * max(1.0, float(truth.abs().max()))
    assert not out[int(ends[-1]) :].any()
