"""Serving a call that has no outputs yet: they are allocated for a kernel only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.resolve import call_site

CPU = torch.device("cpu")


class Allocations:
    """Allocates outputs and remembers on which devices."""

    def __init__(self) -> None:
        self.devices: list[str] = []

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.devices.append(x.device.type)
        return torch.empty_like(x)


def inputs(m: int = 4, n: int = 8, **changes: Any) -> tuple[Any, ...]:
    options = {"dtype": torch.float32, **changes}
    return torch.ones(m, n, **options), torch.ones(n, **options), 0.5


@pytest.fixture
def site(shop: Any, publish_kernel: Callable[..., None]) -> Dispatcher:
    """A call site of ``scale_rows`` whose kernel is published for M in 4..64, N = 8, float32."""
    publish_kernel(config={"BIAS": 1})
    return call_site(shop.definition("scale_rows"), shop.catalog)


def test_a_served_call_allocates_its_output_once(site: Dispatcher) -> None:
    allocate = Allocations()
    serve = site.serving(allocate)
    for _ in range(3):
        assert serve(*inputs()).eq(2.5).all()
    assert allocate.devices == ["meta", "cpu", "cpu", "cpu"]
    report = site.report()
    assert (report.calls, report.hits, report.kernel_calls) == (3, 2, 3)


@pytest.mark.parametrize("change", [{"m": 65}, {"dtype": torch.bfloat16}, {"n": 7}])
def test_a_call_left_to_stock_allocates_nothing(site: Dispatcher, change: dict[str, Any]) -> None:
    allocate = Allocations()
    serve = site.serving(allocate)
    for _ in range(2):
        assert serve(*inputs(**change)) is None
    assert allocate.devices == ["meta"]
    assert (site.report().calls, site.report().kernel_calls) == (2, 0)


def test_new_call_in_a_capture_allocates_nothing(site: Dispatcher) -> None:
    allocate, capturing = Allocations(), [True]
    site.is_capturing = lambda: capturing[0]
    serve = site.serving(allocate)
    assert serve(*inputs()) is None
    assert (allocate.devices, site.report().capture_misses) == ([], 1)
    capturing[0] = False
    assert serve(*inputs()) is not None
    capturing[0] = True
    assert serve(*inputs()) is not None


def test_a_kernel_that_raises_is_answered_with_none(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel(config={"NO_SUCH_OPTION": 1})
    site = call_site(shop.definition("scale_rows"), shop.catalog)
    serve = site.serving(Allocations())
    with pytest.warns(RuntimeWarning, match="quarantine"):
        assert serve(*inputs()) is None
    assert serve(*inputs()) is None
    assert len(site.report().failures) == 1


def test_what_would_be_served_can_be_asked_without_serving_it(site: Dispatcher) -> None:
    def shapes(m: int, n: int = 8) -> tuple[Any, ...]:
        return inputs(m, n, device="meta")

    assert site.belongs_in_compiled_code(shapes(4), CPU, Allocations())
    assert not site.belongs_in_compiled_code(shapes(65), CPU, Allocations())
    assert not site.belongs_in_compiled_code(shapes(4, 7), CPU, Allocations())
    assert not site.belongs_in_compiled_code(shapes(4), torch.device("meta"), Allocations())
    assert site.report().calls == 0


@pytest.mark.parametrize("name", ["3_rows", "lambda"])
def test_a_definition_may_have_a_name_that_python_could_not_have(shop: Any, name: str) -> None:
    renamed = shop.definition("scale_rows").model_copy(update={"name": name})
    site = call_site(renamed, shop.catalog)
    assert site.serving(Allocations())(*inputs()) is None
    assert site.attempt.__name__ == name


# -- solutions that return their outputs ------------------------------------------------------------------------------

RETURNS = "def run(x, weight, eps):\n    return {value}\n"


@pytest.fixture
def returning(shop: Any, stock: Any) -> Callable[[str], Dispatcher]:
    """A call site of ``scale_rows`` whose kernel returns an expression of its inputs."""

    def make(value: str) -> Dispatcher:
        source = "import torch\n" + RETURNS.replace("{value}", value)
        kernel = shop.add("scale_rows", "scale_rows_returns", source, destination_passing_style=False)
        points = [shop.entry("scale_rows", {"M": m, "N": 8}, [shop.candidate(kernel, 5.0)]) for m in (1, 64)]
        shop.publish([{**point, "dtypes": {"T": "float32"}} for point in points])
        return call_site(shop.definition("scale_rows"), shop.catalog)

    return make


def test_what_a_solution_returns_is_handed_on_without_a_copy(returning: Callable[[str], Dispatcher]) -> None:
    site, allocate = returning("torch.full((1000, 8), 1.5)[: x.shape[0]]"), Allocations()
    serve = site.serving(allocate)
    outputs = [serve(*inputs()) for _ in range(3)]
    assert allocate.devices == ["meta"]
    assert all(output.eq(1.5).all() for output in outputs)
    assert {output.untyped_storage().nbytes() for output in outputs} == {32_000}
    assert (site.report().calls, site.report().kernel_calls) == (3, 3)


@pytest.mark.parametrize(
    "value",
    ["(x * weight + eps).t().contiguous().t()", "x.mul_(1)", "x.view(x.shape)", "(x * weight + eps,)"],
    ids=["another layout", "its input", "a view of its input", "a tuple of one"],
)
def test_what_callers_rely_on_is_kept(value: str, returning: Callable[[str], Dispatcher]) -> None:
    given = inputs()
    out = returning(value).serving(Allocations())(*given)
    assert out.is_contiguous()
    assert out.shape == (4, 8)
    out.fill_(7.0)
    assert given[0].eq(1.0).all()


@pytest.mark.parametrize("value", ["x[:2]", "x.double()", "None", "(x + 1, x)[1:0]"])
def test_a_solution_that_returns_something_else_is_left_to_stock(
    value: str, returning: Callable[[str], Dispatcher]
) -> None:
    site = returning(value)
    serve = site.serving(Allocations())
    with pytest.warns(RuntimeWarning, match="quarantine"):
        assert serve(*inputs()) is None
    assert serve(*inputs()) is None
    assert (site.report().calls, site.report().kernel_calls) == (2, 0)


def test_a_dimension_of_one_element_may_have_any_stride(returning: Callable[[str], Dispatcher]) -> None:
    site = returning("torch.full((1000, 8), 1.5)[: x.shape[0]].as_strided(x.shape, (640, 1))")
    serve = site.serving(Allocations())
    assert serve(*inputs(m=1)).untyped_storage().nbytes() == 32_000
    assert serve(*inputs(m=4)).stride() == (8, 1)
