"""The shipped catalog alone (no overlay), and how a record's reference is run on one of its Workloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from shipped_records import CATALOG

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition, Workload, axes_key
from tilegym_db.records.workload import Case
from tilegym_db.verification.inputs import draw_inputs

SEED = 1729


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise over the shipped records by argument name.

    ``definition``: every Definition; ``core``: those with kernels; ``norm`` and ``rope``: those of that part of a model.
    ``tiny``: every tiny Workload with its Definition; ``lifted_tiny``: those whose oracle is the reference lifted to fp64.
    """
    records = CATALOG.definitions.values()
    selected = {"definition": list(records), "core": [record for record in records if not record.is_open]}
    for part in ("norm", "rope"):
        selected[part] = [record for record in records if record.serving and record.serving.part == part]
    for argument, definitions in selected.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, [_of_record(record, record, record.name) for record in definitions])
    for argument, oracles in (("tiny", ("lifted", "as_written")), ("lifted_tiny", ("lifted",))):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, [_parameter(*pair) for pair in _tiny_pairs() if pair[0].oracle in oracles])


@cache
def _tiny_pairs() -> list[tuple[Definition, Workload]]:
    return [
        (record, workload)
        for name, record in CATALOG.definitions.items()
        for workload in CATALOG.workloads_for(name)
        if "tiny" in workload.tags
    ]


def _parameter(record: Definition, workload: Workload) -> Any:
    dtypes = "-".join(workload.dtypes.values()) or "fixed"
    return _of_record(record, (record, workload), f"{record.name}-{dtypes}-{axes_key(workload.axes)}")


def _of_record(record: Definition, value: Any, name: str) -> Any:
    return pytest.param(value, id=name, marks=pytest.mark.records(of=record.name))


@pytest.fixture
def catalog() -> Catalog:
    """Return the shipped catalog."""
    return CATALOG


@pytest.fixture
def drawn() -> Callable[[Definition, Workload], dict[str, Any]]:
    """Draw N(0, 1)-like inputs of a Workload on the CPU."""

    def draw(definition: Definition, workload: Workload) -> dict[str, Any]:
        case = Case.of_workload(definition, workload, distribution="normal", seed=SEED)
        return draw_inputs(definition, case, "cpu")

    return draw
