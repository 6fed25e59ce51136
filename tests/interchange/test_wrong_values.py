"""Every value of every kind of record in turn replaced by one of another type: a refusal or a finding, never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.interchange import fi_trace_dumps, flashinfer_trace, sol_execbench, tilegym_inventory
from tilegym_db.interchange.adapt import Adapted, adapted_definition, adapted_solution
from tilegym_db.interchange.collecting import Collection
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.judging.judging import compared, rule_for
from tilegym_db.store.imported import DataSet, data_set
from tilegym_db.store.opening import open_store

Record = dict[str, Any]
VALUES: list[Any] = [None, True, -1, 10**400, 1.5, "", "x", "\0", [], ["var"], [[]], {}, {"a": 1}, {"": [None]}]


def changed(record: Record) -> Iterator[Record]:
    """The record with each value of it, at any depth, replaced by each of VALUES, and with each key left out."""
    for path in places(record):
        for value in VALUES:
            copied = copy.deepcopy(record)
            parent_of(copied, path)[path[-1]] = value
            yield copied
        copied = copy.deepcopy(record)
        del parent_of(copied, path)[path[-1]]
        yield copied


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in keys:
        yield (*above, key)
        yield from places(item, (*above, key))


def parent_of(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def tensor() -> Record:
    return workload("t", x={"type": "safetensors", "path": "blob/x", "tensor_key": "x"})


def expression() -> Record:
    record = definition(name="sol", custom_inputs_entrypoint="get_inputs", constraints=["M > 0"], tags=["a"])
    record["axes"]["R"] = {"type": "expr", "expression": "M * 2"}
    return record


def problem_solution() -> Record:
    record = {**solution("s"), "definition": "sol"}
    record["spec"]["languages"] = ["pytorch"]
    del record["spec"]["language"]
    return record


def inventory_solution() -> Record:
    record = {**solution("k"), "sources": {"path": ["src/k.py"]}}
    record["spec"] |= {"language": "cuda-tile", "entry_point": "src/k.py::run"}
    return record


def dump() -> Record:
    record = definition(name="d", tags=["fi_api:x"], check="def check(): ...")
    record["outputs"] = {"x": {"shape": ["M"], "dtype": "uint8", "param": "x"}}
    return record


def tolerant() -> Record:
    return workload("s", x={"type": "custom"}) | {"tolerance": dict(sol_execbench.TOLERANCE)}


# Dialect and kind -> how it is read, the record, and the file that it stands in; ``.jsonl`` holds one variant a line.
CASES: dict[str, tuple[Callable[[Path], Collection], Callable[[], Record], str]] = {
    "flashinfer definition": (flashinfer_trace.read, lambda: definition(tags=["a"]), DEFINITION),
    "flashinfer solution": (flashinfer_trace.read, solution, SOLUTION),
    "flashinfer workload": (flashinfer_trace.read, lambda: of_workload(tensor()), WORKLOADS),
    "flashinfer trace": (flashinfer_trace.read, trace, TRACES),
    "dump": (fi_trace_dumps.read, dump, "d.json"),
    "problem": (sol_execbench.read, expression, "one/definition.json"),
    "problem's solution": (sol_execbench.read, problem_solution, "one/solution.json"),
    "problem's workload": (sol_execbench.read, tolerant, "one/workload.jsonl"),
    "problem's trace": (sol_execbench.read, lambda: {**trace("s"), "definition": "sol"}, "one/traces.jsonl"),
    "inventory definition": (tilegym_inventory.read, definition, "src/kernel_definitions/d.json"),
    "inventory solution": (tilegym_inventory.read, inventory_solution, "src/kernel_solutions/k.json"),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", CASES)
def test_a_value_of_another_type_never_ends_in_a_traceback(kind: str, new_tree: Callable[[str], Tree]) -> None:
    read, record, path = CASES[kind]
    tree = around(new_tree("wrong"), read)
    variants = list(changed(record()))
    files = [lines(*variants)] if path.endswith(".jsonl") else variants
    for content in files:
        tree.write(path, content)
        with suppress(TilegymDBError):
            use(read(tree.root).finish("wrong", tree.root))


def use(found: DataSet) -> None:
    """What is done with records that came in, before anything of them is run."""
    for item in found.of_kind("definition"):
        adapted = adapted_definition(found, item)
        if isinstance(adapted, Adapted):
            for one in found.of_kind("solution"):
                adapted_solution(found, one, adapted)
    for item in (*found.of_kind("workload"), *found.of_kind("trace")):
        rule_for(found.dialect, item, item.record.get("workload", item.record))
    compared(found, ())


def around(tree: Tree, read: Callable[[Path], Collection]) -> Tree:
    """The rest of a data set, so that a variant is held against it."""
    (tree.root / "blob").mkdir(parents=True)
    tree.write("blob/x", b"\x02\0\0\0\0\0\0\0{}").write("src/k.py", "def run(): pass\n")
    if read is sol_execbench.read:
        return tree.write("one/definition.json", expression()).write("one/workload.jsonl", lines(workload()))
    return tree.write(DEFINITION, definition())


@pytest.mark.parametrize("kind", [name for name, case in CASES.items() if case[2].endswith(".jsonl")])
def test_what_came_in_of_such_values_can_be_read_back(kind: str, new_tree: Callable[[str], Tree], home: Path) -> None:
    read, record, path = CASES[kind]
    tree = around(new_tree("wrong"), read).write(path, lines(*changed(record())))
    report = import_data_set(tree.root)
    found = data_set(home, report.data_set.origin)
    assert found.records == report.data_set.records
    with open_store(home, read_only=True, catalog=Catalog((tree.root,))) as store:
        for kind in ("definition", "solution", "workload", "trace"):
            assert len(store.rows(f"SELECT * FROM imported_{kind}s")) == len(found.of_kind(kind)), kind
