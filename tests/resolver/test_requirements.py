"""Kernels that must be deterministic or batch-invariant: what is verified serves, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db import resolve
from tilegym_db.errors import UsageError
from tilegym_db.published.table import table_for
from tilegym_db.records.call import Call
from tilegym_db.resolver.decide import Decision, decide
from tilegym_db.resolver.resolve import make_request

SOURCE = "def run(x, weight, eps, out):\n    out.copy_(x * weight + eps)\n"
PROMISED = {"batch_invariant": True}
SHOWN = {"deterministic": True, "batch_slices": 8}


@pytest.fixture
def by_row(shop: Any, stock: Any) -> None:
    """Declare that the rows of ``scale_rows`` are independent."""
    path = shop.root / "definitions" / "toy" / "scale_rows.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "independent_axes": ["M"]}))


def publish(shop: Any, times: dict[int, list[tuple[Any, float, dict[str, Any]]]]) -> None:
    """Publish kernels by the number of rows: each with its latency and what its trace states."""
    shop.publish(
        [
            shop.entry(
                "scale_rows",
                {"M": rows, "N": 8},
                [shop.candidate(files, latency, **stated) for files, latency, stated in kernels],
            )
            for rows, kernels in times.items()
        ],
        gpu="h200",
    )


def decision(shop: Any, required: str | tuple[str, ...], rows: int = 4, launch: str = "call") -> Decision:
    catalog = shop.catalog.requiring((required,) if isinstance(required, str) else required)
    solutions = {files.name: files for files in catalog.solutions_for("scale_rows")}
    call = Call("scale_rows", {"M": rows, "N": 8}, {"T": "bfloat16"})
    request = make_request(shop.definition("scale_rows"), call, gpu="h200", launch=launch)
    return decide(request, table_for(catalog, "h200"), solutions)


def served(found: Decision) -> str | None:
    return None if found.solution is None else found.solution.name


def why(found: Decision, name: str) -> str:
    return next(reason for candidate, reason in found.rejected if str(candidate) == name)


CASES = {
    "verified": ("deterministic", {}, {"deterministic": True}, ""),
    "not stated": ("deterministic", {}, {}, "does not state that repeated calls gave equal bits"),
    "declared not": ("deterministic", {"deterministic": False}, {"deterministic": True}, "declares that it is not"),
    "promised and verified": ("batch_invariant", PROMISED, SHOWN, ""),
    "not promised": ("batch_invariant", {}, SHOWN, "does not promise"),
    "not verified": ("batch_invariant", PROMISED, {"deterministic": True}, "its promise is not verified"),
    "not deterministic": ("batch_invariant", PROMISED, {"batch_slices": 8}, "deterministic kernels are required"),
}


@pytest.mark.parametrize(("required", "spec", "stated", "reason"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("by_row")
def test_kernel_serves_only_with_verified_bits(
    required: str, spec: dict[str, Any], stated: dict[str, Any], reason: str, shop: Any
) -> None:
    files = shop.add("scale_rows", "by_rows", SOURCE, **spec)
    publish(shop, {4: [(files, 10.0, stated)]})
    assert served(decision(shop, ())) == "by_rows"
    found = decision(shop, required)
    assert served(found) == (None if reason else "by_rows")
    if reason:
        assert reason in why(found, "by_rows")
        assert f"that is {required.replace('_', '-')}" in found.evidence.reason


def test_operator_without_a_batch_axis_has_no_such_kernel(shop: Any, kernel: Any, stock: Any) -> None:
    publish(shop, {4: [(kernel, 10.0, SHOWN)]})
    found = decision(shop, "batch_invariant")
    assert served(found) is None
    assert "no row of this operator can be called alone" in why(found, "scale_rows_kernel")


@pytest.mark.usefixtures("by_row")
def test_one_kernel_serves_every_size_of_the_batch(shop: Any) -> None:
    first = shop.add("scale_rows", "first", SOURCE, **PROMISED)
    second = shop.add("scale_rows", "second", SOURCE + "\n", **PROMISED)
    publish(
        shop,
        {
            4: [(first, 5.0, SHOWN), (second, 9.0, SHOWN)],
            64: [(first, 30.0, SHOWN), (second, 20.0, SHOWN)],
        },
    )
    assert [served(decision(shop, "deterministic", rows)) for rows in (4, 64)] == ["first", "second"]
    assert [served(decision(shop, "batch_invariant", rows)) for rows in (4, 16, 64)] == ["first"] * 3
    assert "first serves every M" in why(decision(shop, "batch_invariant", 64), "second")
    assert served(decision(shop, "batch_invariant", 64, launch="replay")) == "first"


@pytest.mark.usefixtures("by_row")
def test_kernel_of_some_batches_alone_serves_none(shop: Any) -> None:
    everywhere = shop.add("scale_rows", "everywhere", SOURCE, **PROMISED)
    somewhere = shop.add("scale_rows", "somewhere", SOURCE + "\n", **PROMISED)
    slow = {**SHOWN, "speedup": 0.5, "speedup_ci_low": 0.4}
    publish(shop, {4: [(somewhere, 5.0, SHOWN), (everywhere, 9.0, SHOWN)], 64: [(everywhere, 9.0, SHOWN)]})
    assert served(decision(shop, "batch_invariant")) == "everywhere"
    assert "at M=64 it was not measured" in why(decision(shop, "batch_invariant"), "somewhere")
    publish(shop, {4: [(somewhere, 5.0, SHOWN)], 64: [(somewhere, 50.0, slow)]})
    found = decision(shop, "batch_invariant")
    assert served(found) is None
    assert "at M=64 slower than stock" in why(found, "somewhere")


@pytest.mark.usefixtures("by_row")
def test_resolve_runs_stock_code_without_such_a_kernel(shop: Any, publish_kernel: Any) -> None:
    publish_kernel()
    x, weight = torch.ones(4, 8), torch.ones(8)
    found = resolve("scale_rows", like=(x, weight, 0.5), catalog=shop.catalog, require="batch-invariant")
    out = torch.empty(4, 8)
    found(x, weight, 0.5, out)
    assert found.is_stock
    assert found.report().hits == 0
    assert torch.equal(out, torch.full((4, 8), 1.5))
    assert not resolve("scale_rows", like=(x, weight, 0.5), catalog=shop.catalog).is_stock


def test_unknown_requirement_names_the_known_ones(shop: Any) -> None:
    with raises(UsageError, "requirement_unknown", "deterministic or batch_invariant", "'determinstic'"):
        resolve("scale_rows", axes={"M": 4, "N": 8}, dtypes={"T": "float32"}, gpu="cpu", require="determinstic")
