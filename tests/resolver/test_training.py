"""Training: a kernel serves forward only where one is verified for the backward, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.resolver.resolve import call_site, resolve

ROWS, COLUMNS = {"shape": ["M", "N"], "dtype": "T"}, {"shape": ["N"], "dtype": "T"}
BACKWARD: dict[str, Any] = {
    "name": "scale_rows_backward",
    "version": "1.0.0",
    "op_type": "toy",
    "backward_of": "scale_rows",
    "dtypes": {"T": ["bfloat16", "float32"]},
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {"x": ROWS, "weight": COLUMNS, "grad_out": ROWS},
    "outputs": {"grad_x": ROWS, "grad_weight": COLUMNS},
    "constraints": ["M >= 2"],
    "reference": "# Source: https://example.org/op.py#L1\n"
    "def run(x, weight, grad_out):\n    return grad_out * weight, (grad_out * x).sum(0)\n",
}
KERNEL = "def run(x, weight, grad_out, grad_x, grad_weight):\n    grad_x.fill_(1)\n    grad_weight.fill_(1)\n"
FLOAT32 = {"dtypes": {"T": "float32"}}


@pytest.fixture
def define(shop: Any) -> Callable[..., None]:
    """Write the Definition of the gradients, with changes."""

    def write(**changes: Any) -> None:
        record = {**BACKWARD, **changes}
        (shop.root / "definitions" / "toy" / f"{record['name']}.json").write_text(json.dumps(record))

    return write


@pytest.fixture
def publish_both(shop: Any, stock: Any, kernel: Any, define: Callable[..., None]) -> Callable[..., None]:
    """Publish a kernel forward and one backward; changes are of the backward candidate, ``layouts`` of its point."""

    def publish(layouts: dict[str, str] | None = None, **changes: Any) -> None:
        define()
        backward = shop.add("scale_rows_backward", "scale_rows_backward_kernel", KERNEL, layouts={"x": "strided"})
        pairs = (
            ("scale_rows", shop.candidate(kernel), {}),
            ("scale_rows_backward", shop.candidate(backward, **changes), layouts),
        )
        shop.publish(
            [
                shop.entry(name, {"M": m, "N": 8}, [candidate], layouts=where or {}, **FLOAT32)
                for name, candidate, where in pairs
                for m in (1, 64)
            ]
        )

    return publish


def why_stock(shop: Any, **changes: Any) -> str:
    options = {
        "axes": {"M": 4, "N": 8},
        "gpu": "cpu",
        "mode": "training",
        "catalog": shop.catalog,
        **FLOAT32,
        **changes,
    }
    resolved = resolve("scale_rows", **options)
    return resolved.evidence.reason if resolved.is_stock else ""


def test_training_with_a_backward_resolves_to_the_kernel(shop: Any, publish_both: Any) -> None:
    publish_both()
    assert why_stock(shop) == ""
    resolved = resolve("scale_rows_backward", axes={"M": 4, "N": 8}, gpu="cpu", catalog=shop.catalog, **FLOAT32)
    assert resolved.solution.name == "scale_rows_backward_kernel"


def test_kernel_credit_is_limited_to_the_cost_of_autograd(shop: Any, publish_both: Any) -> None:
    publish_both(speedup=1.26, speedup_ci_low=1.25)
    reason = "mode training: it has no verified backward: no verified solution is faster than stock"
    assert why_stock(shop).startswith(reason)
    publish_both(speedup=1.27, speedup_ci_low=1.26)
    assert why_stock(shop) == ""


def test_an_unverified_backward_leaves_the_forward_to_stock(shop: Any, publish_both: Any) -> None:
    publish_both(tier="interpreter")
    assert "it has no verified backward" in why_stock(shop)
    assert not resolve("scale_rows", axes={"M": 4, "N": 8}, gpu="cpu", catalog=shop.catalog, **FLOAT32).is_stock


def test_backward_is_requested_with_its_real_layouts(shop: Any, publish_both: Any) -> None:
    publish_both(layouts={"x": "row_contiguous"})
    assert "scale_rows_backward was not measured on cpu with these layouts" in why_stock(shop)


def test_a_size_that_the_backward_excludes_is_left_to_stock(shop: Any, publish_both: Any) -> None:
    publish_both()
    assert "scale_rows_backward requires M >= 2" in why_stock(shop, axes={"M": 1, "N": 8})
    site = call_site(shop.definition("scale_rows"), shop.catalog, mode="training")
    for rows, served in ((1, False), (2, True)):
        given = torch.ones(rows, 8), torch.ones(8), 0.5, torch.zeros(rows, 8)
        assert site.attempt(*given) is served


def test_the_one_of_most_gradients_is_asked_by_default(shop: Any, publish_both: Any, define: Any) -> None:
    publish_both()
    define(
        name="scale_rows_backward_a",
        outputs={"grad_x": ROWS},
        reference=BACKWARD["reference"].replace(", (grad_out * x).sum(0)", ""),
    )
    assert [record.name for record in shop.catalog.backwards_of("scale_rows")] == [
        "scale_rows_backward",
        "scale_rows_backward_a",
    ]
    assert why_stock(shop) == ""
    lesser = shop.definition("scale_rows_backward_a")
    site = call_site(shop.definition("scale_rows"), shop.catalog, mode="training", backward=lesser)
    assert not site.attempt(torch.ones(4, 8), torch.ones(8), 0.5, torch.zeros(4, 8))
    (key,) = site.report().keys
    assert key.reason.endswith("scale_rows_backward_a was not measured on cpu")


def test_a_backward_that_does_not_fit_is_named_and_left_out(shop: Any, define: Any, caplog: Any) -> None:
    define(outputs={"grad_x": COLUMNS, "grad_weight": COLUMNS})
    assert shop.catalog.backwards_of("scale_rows") == []
    (record,) = caplog.records
    assert "scale_rows_backward cannot be the backward of scale_rows: outputs" in record.getMessage()
