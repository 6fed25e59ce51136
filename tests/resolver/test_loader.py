"""Only the verified source runs, and every solution is called the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.errors import SolutionError
from tilegym_db.resolver.loader import load_launcher, load_verified

ARGS = (torch.ones(2, 3), torch.full((3,), 2.0), 0.5)


def test_the_config_is_bound(shop: Any, kernel: Any) -> None:
    launch = load_launcher(shop.definition("scale_rows"), kernel, {"BIAS": 10}, kernel.digest)
    out = torch.empty(2, 3)
    launch(*ARGS, out)
    assert torch.equal(out, torch.full((2, 3), 12.5))


def test_value_returning_solution_writes_the_passed_outputs(shop: Any, stock: Any) -> None:
    out = torch.empty(2, 3)
    load_launcher(shop.definition("scale_rows"), stock, {}, stock.digest)(*ARGS, out)
    assert torch.equal(out, torch.full((2, 3), 2.5))


def test_an_in_place_output_is_no_argument(shop: Any) -> None:
    source = "def run(x, total):\n    total.add_(x)\n    return 2 * total\n"
    files = shop.add("add_into", "add_into_stock", source, destination_passing_style=False)
    total, out = torch.ones(3), torch.empty(3)
    load_launcher(shop.definition("add_into"), files, {}, files.digest)(torch.ones(3), total, out)
    assert (total.tolist(), out.tolist()) == ([2.0] * 3, [4.0] * 3)


@pytest.fixture
def fresh(shop: Any, request: pytest.FixtureRequest) -> Any:
    """A kernel that no other test of this process has loaded."""
    source = f"# {request.node.name}\ndef run(x, weight, eps, out):\n    out.copy_(x)\n"
    return shop.add("scale_rows", "fresh", source, tunables={"BIAS": [0, 1]})


def test_a_source_edited_after_verification_is_refused(fresh: Any) -> None:
    (fresh.folder / "kernel.py").write_text("def run(x, weight, eps, out):\n    out.zero_()\n")
    with raises(SolutionError, "source_differs", str(fresh.folder)):
        load_verified(fresh, fresh.digest)


def test_a_spec_edited_after_verification_is_refused(fresh: Any) -> None:
    record = fresh.folder / "solution.json"
    record.write_text(record.read_text().replace('"BIAS": [0, 1]', '"BIAS": [0, 1, 2]'))
    with raises(SolutionError, "source_differs"):
        load_verified(fresh, fresh.digest)


def test_what_a_compiler_reads_later_is_still_the_verified_text(shop: Any) -> None:
    source = "import inspect\ndef run(x, weight, eps, out):\n    return inspect.getsource(run)\n"
    files = shop.add("scale_rows", "reads_itself", source)
    entry = load_verified(files, files.digest)
    (files.folder / "kernel.py").write_text("def run(x, weight, eps, out):\n    return 'edited'\n")
    assert entry(*ARGS, None) == source.partition("\n")[2]
