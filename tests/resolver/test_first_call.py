"""A kernel checked at the first call of a size that was not measured: it serves if it is right and faster, and is asked once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.resolver.resolve import call_site, stock_launcher

SLOW = "import time\n\n\ndef run(x, weight, eps):\n    time.sleep(1e-3)\n    return x * weight + eps\n"
RIGHT = "def run(x, weight, eps, out):\n    out.copy_(x * weight + eps)\n"
WRONG = "def run(x, weight, eps, out):\n    out.copy_(x * weight + eps)\n    out[-1] += 1\n"
SLOWER = "import time\n\n\ndef run(x, weight, eps, out):\n    time.sleep(2e-3)\n    out.copy_(x * weight + eps)\n"
RAISING = "def run(x, weight, eps, out):\n    if x.shape[1] == 12:\n        raise ValueError('no')\n"
TAMPERING = "def run(x, weight, eps, out):\n    out.copy_(x * weight + eps)\n    weight.zero_()\n"


def site_of(shop: Any, source: str, *, check: bool = True, **changes: Any) -> Any:
    """Return a call site of ``scale_rows``, measured at N = 8 and N = 16 only."""
    stock = shop.add(
        "scale_rows", "scale_rows_stock", SLOW, role="baseline", provides="stock", destination_passing_style=False
    )
    kernel = shop.add("scale_rows", "scale_rows_kernel", source)
    points = [{"M": rows, "N": width} for rows in (4, 64) for width in (8, 16)]
    shop.publish(
        [
            shop.entry("scale_rows", point, [shop.candidate(kernel, **changes)], dtypes={"T": "float32"})
            for point in points
        ]
    )
    definition = shop.definition("scale_rows")
    return call_site(definition, shop.catalog, stock=stock_launcher(definition, stock), check=check)


def arguments(rows: int = 4, width: int = 12) -> tuple[Any, ...]:
    return torch.randn(rows, width), torch.randn(width), 0.5, torch.zeros(rows, width)


def test_right_and_faster_kernel_serves_after_its_check(shop: Any) -> None:
    site = site_of(shop, RIGHT)
    for _ in range(3):
        given = arguments()
        assert site.attempt(*given)
        torch.testing.assert_close(given[3], given[0] * given[1] + 0.5)
    (key,) = site.report().keys
    assert (key.solution, key.calls) == ("scale_rows_kernel", 3)
    assert key.reason.startswith("not measured here; checked at its first call: right, and ")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (WRONG, "out is wrong: "),
        (SLOWER, "it is not surely faster, with "),
        (RAISING, "it raises ValueError: no"),
        (TAMPERING, "it changes its input 'weight'"),
    ],
)
def test_kernel_failing_its_check_is_taken_out_for_the_size(shop: Any, source: str, reason: str) -> None:
    site = site_of(shop, source)
    given = arguments()
    weight = given[1].clone()
    assert not site.attempt(*given)
    assert given[3].eq(0).all()
    assert torch.equal(given[1], weight)
    (key,) = site.report().keys
    assert key.solution is None
    assert f"scale_rows_kernel, checked at its first call: {reason}" in key.reason
    assert site.report().failures == ()


def test_without_check_the_nearest_point_decides(shop: Any) -> None:
    site = site_of(shop, RIGHT, check=False)
    assert site.attempt(*arguments())
    (key,) = site.report().keys
    assert key.reason.startswith("fastest at M=4,N=16 on cpu, the nearest measured point")


def test_measured_size_is_not_checked(shop: Any) -> None:
    site = site_of(shop, SLOWER)
    assert site.attempt(*arguments(4, 16))
    (key,) = site.report().keys
    assert key.reason.startswith("fastest verified solution at")


@pytest.mark.parametrize(("changes", "rows"), [({"envelope_cases": 0}, 4), ({"speedup_ci_low": 0.9}, 4), ({}, 100_000)])
def test_unverified_and_slow_kernels_are_not_even_tried(shop: Any, changes: dict[str, Any], rows: int) -> None:
    site = site_of(shop, RIGHT, **changes)
    assert not site.attempt(*arguments(rows))
    (key,) = site.report().keys
    assert "first call" not in key.reason


def test_check_waits_for_the_end_of_a_capture(shop: Any) -> None:
    site = site_of(shop, RIGHT)
    site.is_capturing = lambda: True
    assert not site.attempt(*arguments())
    site.is_capturing = lambda: False
    assert site.attempt(*arguments())


def test_question_about_a_call_checks_nothing(shop: Any) -> None:
    site = site_of(shop, RIGHT)
    allocate = lambda x, weight, eps: torch.empty_like(x)  # noqa: E731
    assert "first call" not in site.preview(arguments()[:3], allocate).reason
    assert site.report().keys == ()
    serve = site.serving(allocate)
    assert serve(*arguments()[:3]) is not None
