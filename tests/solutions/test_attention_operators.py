"""The solutions that call ATen's attention operators, with stand-ins for the operators on a CPU.

The stand-ins take what the GPU's operators take, refuse what those refuse, and lay their output out as those do. They compute in
fp32, so that what a solution does around the call (padding, alignment, repeated heads) must be right for its result to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.resolver.loader import load_verified

pytestmark = pytest.mark.sweep

PREFILL = ("attention_prefill_aten_cudnn", "attention_prefill_aten_efficient", "attention_prefill_aten_flash")
DECODE = ("attention_decode_aten_flash",)
BYTES_AT_ONCE = 16
EMPTY = [torch.empty(0) for _ in range(3)]


class Operators:
    """Remembers the sizes and strides of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def flash(self, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        return self._compute(q, k, v, is_causal, scale), *EMPTY, q.shape[2], k.shape[2], *EMPTY

    def cudnn(self, q, k, v, bias, log, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        assert (bias, log) == (None, False)
        assert k.shape[2] > 1
        return self._compute(q, k, v, is_causal, scale), *EMPTY, q.shape[2], k.shape[2], *EMPTY

    def efficient(self, q, k, v, bias, log, dropout_p=0.0, is_causal=False, *, scale=None):
        assert (bias, log) == (None, False)
        assert q.shape[1] == k.shape[1]
        return self._compute(q, k, v, is_causal, scale), *EMPTY

    def _compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Any:
        self.calls.append((q, k, v))
        for x in (q, k, v):
            assert x.stride(-1) == 1
            starts = [x.storage_offset(), *x.stride()[:-1]]
            assert all(start * x.element_size() % BYTES_AT_ONCE == 0 for start in starts)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
        scores = q.float() @ k.mT * scale
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.empty_like(q).copy_(scores.softmax(-1) @ v)


@pytest.fixture
def operators() -> Iterator[Operators]:
    operators, library = Operators(), torch.library.Library("aten", "IMPL")
    for name in ("flash", "cudnn", "efficient"):
        library.impl(f"_scaled_dot_product_{name}_attention", getattr(operators, name), "CPU")
    yield operators
    library._destroy()


def entry(name: str) -> Callable[..., torch.Tensor]:
    solution = CATALOG.solution(name)
    return load_verified(solution, solution.digest)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, is_causal=q.shape[2] > 1, scale=scale)


def as_models_pass(batch: int, heads: int, tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, S, D], a view of [B, S, H, D]."""
    return torch.randn(batch, tokens, heads, size).to(dtype).transpose(1, 2)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if "efficient" in name else torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize(("batch", "heads"), [(1, (4, 4)), (3, (6, 2))])
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("name", PREFILL)
def test_prompts_are_right_and_leave_heads_after_tokens(
    name: str, is_cached: bool, batch: int, heads: tuple[int, int], tokens: int, operators: Operators
) -> None:
    q = as_models_pass(batch, heads[0], tokens, 16, dtype_of(name))
    k, v = (as_models_pass(batch, heads[1], tokens, 16, dtype_of(name)) for _ in range(2))
    if is_cached:  # a cache holds them in the order of their shape
        k, v = k.contiguous(), v.contiguous()
    out = entry(name)(q, k, v, 0.3)
    assert out.transpose(1, 2).is_contiguous()
    assert (out.double() - exact(q, k, v, 0.3)).abs().max() < 2e-2
    assert len(operators.calls) == 1


@pytest.mark.parametrize("length", [1, 2, 40, 513])
@pytest.mark.parametrize("name", DECODE)
def test_a_position_is_right(name: str, length: int, operators: Operators) -> None:
    q = as_models_pass(2, 6, 1, 16, torch.bfloat16)
    k, v = (torch.randn(2, 2, length, 16).bfloat16() for _ in range(2))
    out = entry(name)(q, k, v, 0.3)
    assert out.shape == q.shape
    assert (out.double() - exact(q, k, v, 0.3)).abs().max() < 2e-2


@pytest.mark.parametrize("name", [*PREFILL, *DECODE])
def test_rows_that_start_anywhere_are_copied_first(name: str, operators: Operators) -> None:
    tokens = 1 if name in DECODE else 40
    q, k, v = (torch.randn(2, heads, 40, 17).to(dtype_of(name))[..., 1:] for heads in (4, 2, 2))
    q = q[:, :, :tokens]
    out = entry(name)(q, k, v, 0.3)
    assert (out.double() - exact(q, k, v, 0.3)).abs().max() < 2e-2


def test_what_models_pass_at_planned_lengths_is_not_copied(operators: Operators) -> None:
    for name in ("attention_prefill_aten_cudnn", "attention_prefill_aten_flash"):
        q, k, v = (as_models_pass(1, heads, 256, 16, torch.bfloat16) for heads in (4, 2, 2))
        entry(name)(q, k, v, 0.3)
        passed = operators.calls.pop()
        assert [x.data_ptr() for x in passed] == [x.data_ptr() for x in (q, k, v)]


def test_cudnn_gets_few_lengths_at_most_an_eighth_too_long(operators: Operators) -> None:
    lengths = [*range(1, 300), 511, 512, 513, 1000, 1023, 1025]
    given = {}
    for tokens in lengths:
        q, k, v = (as_models_pass(1, 1, tokens, 8, torch.bfloat16) for _ in range(3))
        assert entry("attention_prefill_aten_cudnn")(q, k, v, 1.0).shape[2] == tokens
        given[tokens] = operators.calls.pop()[0].shape[2]
    assert set(given.values()) == {128, 256, 384, 512, 640, 1024, 1152}
    assert all(length - tokens < max(128, tokens / 8 + 1) for tokens, length in given.items())


@pytest.mark.parametrize("name", [*PREFILL, *DECODE])
def test_they_are_kernels_of_the_gpus_that_they_name_alone(name: str) -> None:
    spec = CATALOG.solution(name).record.spec
    assert (spec.role, spec.provides) == ("kernel", "library")
    assert spec.runs_on("sm_90")
    assert not spec.runs_on("cpu")
