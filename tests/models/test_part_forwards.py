"""Patched forwards hand over views, and give outputs the strides of the stock code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.models.call_site import CallSite
from tilegym_db.models.parts.norm import norm_forward
from tilegym_db.models.parts.rope import HEADS_FIRST, RotaryCall, RotaryCode, possible_codes, rope_function
from tilegym_db.resolver.hot_path import allocate_of

pytestmark = pytest.mark.sweep

DEFINITIONS = CATALOG.definitions
KEPT = (["weight", "eps"], [0])


def rotation(function: Any) -> RotaryCode:
    """Return what rope_neox needs to know about a function that takes heads before tokens only."""
    (code,) = possible_codes(function, [DEFINITIONS["rope_neox"]])
    return code._replace(calls=(RotaryCall(HEADS_FIRST),))


WIDE = torch.arange(2 * 6 * 8, dtype=torch.float32).reshape(2, 6, 8)
INPUTS: dict[str, tuple[torch.Tensor, list[int] | None]] = {
    "matrix": (WIDE[0], [6, 8]),
    "batch": (WIDE, [12, 8]),
    "heads": (WIDE.view(2, 6, 2, 4), [24, 4]),
    "last token": (WIDE[:, -1:], [2, 8]),
    "padded rows": (WIDE[..., :5], [12, 5]),
    "heads before tokens": (WIDE.view(2, 6, 2, 4).transpose(1, 2), [24, 4]),
    "one head before tokens": (WIDE.view(2, 6, 1, 8).transpose(1, 2), [12, 8]),
    "heads inside a projection": (WIDE.view(2, 6, 2, 4).transpose(1, 2)[..., :3], None),
    "some tokens": (WIDE[:, :4], None),
    "transposed": (WIDE.transpose(1, 2), None),
    "columns": (WIDE[0].T, None),
    "vector": (WIDE[0, 0], None),
    "no tokens": (WIDE[:, :0], None),
}


def steps(value: torch.Tensor) -> list[int]:
    """The strides that matter: no code steps along an axis of one."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


class Norm(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = 0.0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


@pytest.mark.parametrize("name", INPUTS)
def test_a_norm_is_given_its_rows_as_a_view_or_not_at_all(name: str) -> None:
    value, rows = INPUTS[name]
    given: list[torch.Tensor] = []

    def serve(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        given.append(x)
        return (x + 1).contiguous()

    module, site = Norm(value.shape[-1]).eval(), CallSite(serve)
    found = norm_forward(Norm.forward, site, *KEPT)(module, value)
    assert torch.equal(found, value + 1)
    assert steps(found) == steps(value + 1)
    assert [list(x.shape) for x in given] == ([rows] if rows else [])
    assert all(x.data_ptr() == value.data_ptr() for x in given)
    assert sum(site.bypassed.values()) == (not rows)


def test_a_call_by_keyword_is_for_the_stock_code() -> None:
    site = CallSite(lambda *args: pytest.fail("must not be asked"))
    forward = norm_forward(Norm.forward, site, *KEPT)
    assert torch.equal(forward(Norm(8).eval(), hidden_states=WIDE), WIDE + 1)
    with pytest.raises(TypeError, match="hidden_states"):
        forward(Norm(8).eval())


LAYOUTS = {
    "as models pass it": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "contiguous": lambda b, h, s, d: torch.randn(b, h, s, d),
    "part of a fused projection": lambda b, h, s, d: torch.randn(b, s, h + 3, d)[:, :, :h].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 5])
def test_rotated_heads_have_the_strides_that_stock_gives(layout: str, length: int) -> None:
    make = LAYOUTS[layout]
    q, k, cos = make(2, 4, length, 8), make(2, 2, length, 8), torch.randn(1, length, 8)

    def stock(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + q * sin, k * cos + k * sin

    given: list[Any] = []

    def serve(*inputs: Any) -> Any:
        given.append(inputs)
        return allocate_of(DEFINITIONS["rope_neox"])(*inputs)

    served = rope_function(stock, CallSite(serve), rotation(stock))(q, k, cos, cos)
    assert len(given) == 1
    for got, want in zip(served, stock(q, k, cos, cos), strict=True):
        assert steps(got) == steps(want)


def test_another_axis_order_of_the_tables_is_left_to_stock() -> None:
    site = CallSite(lambda *args: pytest.fail("must not be asked"))
    q = torch.randn(1, 5, 2, 8)

    def stock(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> int:
        return unsqueeze_dim

    served = rope_function(stock, site, rotation(stock))
    assert served(q, q, q[0], q[0], 2) == 2
    assert served(q, q, q[0], q[0], unsqueeze_dim=2) == 2


@pytest.mark.gpu
def test_a_served_norm_allocates_its_output_and_nothing_else() -> None:
    module, x = Norm(1024).eval().cuda(), torch.randn(4, 1024, device="cuda")
    forward = norm_forward(Norm.forward, CallSite(allocate_of(DEFINITIONS["rms_norm"])), *KEPT)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = forward(module, x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert out.shape == x.shape
