"""The small operator of the shared fixtures as a Definition that can test itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilegym_db.records import Definition

SELF_TEST: dict[str, Any] = {
    "independent": "def run(x, weight, factor):\n"
    "    return (x.float() @ (weight.float() * factor).diag()).to(x.dtype)\n",
    "planted_errors": [
        {"find": "* factor", "replace": "/ factor", "why": "divides by the factor"},
        {"find": "weight.float()", "replace": "weight.float().flip(0)", "why": "weights in reverse"},
        {"find": "* factor", "replace": "+ factor", "why": "adds the factor"},
    ],
}


@pytest.fixture
def operator(definition_record: Callable[..., dict[str, Any]]) -> Callable[..., Definition]:
    """Make ``row_scale`` with a self-test. ``reference`` is the body of ``run``; other changes are keys of the record."""

    def make(reference: str | None = None, **changes: Any) -> Definition:
        if reference is not None:
            source = "# Source: https://example.org/row_scale.py#L1\nimport torch\ndef run({}):\n    {}\n"
            names = changes.get("inputs", definition_record()["inputs"])
            changes["reference"] = source.format(", ".join(names), reference)
        return Definition.from_dict(definition_record(**{"self_test": SELF_TEST, **changes}))

    return make
