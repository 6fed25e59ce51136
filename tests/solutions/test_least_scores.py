"""Attention kernels in the interpreters: rows whose scores all lie far below zero are right, and are no NaN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.tile")
pytest.importorskip("tilelang")

import torch
from shipped_records import CATALOG

from tilegym_db.backends import cutile_interpreter, tilelang_interpreter
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle

pytestmark = pytest.mark.sweep

Inputs = dict[str, Any]
LARGE = 2.0**60
"""Of queries and keys, whose products are 2**120, or 1.3e36."""


def rows(*shape: int, sign: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return rows along the last axis but one, of which the first alone is the smallest in size."""
    numbers = torch.arange(shape[-2])[:, None]
    sizes = 1 + (numbers > 0) * (1 + numbers % 6) / 8
    return (sign * LARGE * sizes).expand(shape).contiguous().to(dtype)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def prefill(D: int, DV: int) -> Inputs:
    return {"q": rows(1, 2, 70, D), "k": rows(1, 2, 70, D, sign=-1.0), "v": values(1, 2, 70, DV), "scale": 0.1}


def decode(D: int, DV: int, heads: int) -> Inputs:
    return {"q": rows(1, heads, 1, D), "k": rows(1, 2, 70, D, sign=-1.0), "v": values(1, 2, 70, DV), "scale": 0.1}


def masked(of: Inputs) -> Inputs:
    mask = torch.ones(1, 1, of["q"].shape[2], 70, dtype=torch.bool).tril(69)
    mask[..., :3] = False
    mask[..., 3] = True
    return {**{key: of[key] for key in ("q", "k", "v")}, "mask": mask, "scale": 0.1}


def paged() -> Inputs:
    table, lengths = torch.tensor([[2, 0, 1, 4, 3]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    k = rows(1, 5 * 16, 16, sign=-1.0).reshape(5, 16, 1, 16).repeat(1, 1, 2, 1)
    return {
        "q": rows(1, 4, 16),
        "k_cache": k,
        "v_cache": values(5, 16, 2, 16),
        "table": table,
        "lengths": lengths,
        "scale": 0.1,
    }


def latents() -> Inputs:
    given = {"q_nope": rows(1, 3, 32), "q_pe": rows(1, 3, 16)}
    return {**given, "kv_nope": rows(1, 70, 32, sign=-1.0), "k_rot": rows(1, 70, 16, sign=-1.0), "scale": 0.1}


def backward() -> Inputs:
    forward = prefill(16, 16)
    out = oracle(CATALOG.definition("attention_prefill"), forward)["out"].bfloat16()
    return {**forward, "out": out, "grad_out": values(1, 2, 70, 16)}


def packed(*lengths: int) -> Inputs:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k = (rows(2, int(ends[-1]), 16, sign=sign).transpose(0, 1) for sign in (1.0, -1.0))
    given = {"q": q.contiguous(), "k": k.contiguous(), "v": values(int(ends[-1]), 2, 16)}
    return {**given, "cu_seqlens": ends.int(), "scale": 0.1, "causal": True}


CALLS: dict[str, Callable[[], Inputs]] = {
    "attention_bidirectional": lambda: prefill(16, 16),
    "attention_masked_decode": lambda: masked(decode(16, 16, 4)),
    "attention_masked_prefill": lambda: masked(prefill(16, 16)),
    "attention_paged_decode": paged,
    "attention_prefill_backward": backward,
    "attention_varlen": lambda: packed(33, 0, 70),
    "mla_decode": latents,
    "mla_expanded_decode": lambda: decode(24, 16, 2),
    "mla_prefill": lambda: prefill(24, 16),
}
KERNELS = [
    *("attention_bidirectional_cutile", "attention_masked_decode_cutile", "attention_masked_prefill_cutile"),
    *("attention_paged_decode_cutile", "mla_decode_cutile", "mla_expanded_decode_cutile", "mla_prefill_cutile"),
    *("attention_masked_decode_tilelang", "attention_masked_prefill_tilelang", "attention_paged_decode_tilelang"),
    *("attention_prefill_backward_tilelang", "mla_decode_tilelang", "mla_expanded_decode_tilelang"),
    *("mla_prefill_tilelang", "attention_varlen_cutile", "attention_varlen_tilelang"),
]


def error(name: str) -> float:
    """Return the largest error of the output of a kernel, relative to its largest element; of gradients, that of the values.

    Those of queries and keys are differences next to zero times 2**60. All outputs must be finite.
    """
    solution = CATALOG.solution(name)
    definition, inputs = CATALOG.definition(solution.record.definition), CALLS[solution.record.definition]()
    truth = oracle(definition, inputs)
    out = {output: torch.full(value.shape, float("nan"), dtype=torch.bfloat16) for output, value in truth.items()}
    load_verified(solution, solution.digest)(*inputs.values(), *out.values())
    assert all(bool(value.isfinite().all()) for value in out.values())
    judged = next(output for output in ("out", "grad_v") if output in truth and output not in inputs)
    return float((out[judged] - truth[judged]).abs().max() / truth[judged].abs().max())


@pytest.mark.parametrize("name", KERNELS)
def test_row_of_far_negative_scores_is_right(name: str) -> None:
    language = CATALOG.solution(name).record.spec.language
    with {"cutile": cutile_interpreter, "tilelang": tilelang_interpreter}[language].interpreting():
        assert error(name) < 0.01


def test_packed_row_of_far_negative_scores_is_right() -> None:
    code = f"""
import json
from tilegym_db.backends.toolchains import repair_interpreter
repair_interpreter()
from {__name__} import error
print(json.dumps(error("attention_varlen_triton")))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout.splitlines()[-1]) < 0.01
