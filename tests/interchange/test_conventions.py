"""Every dialect calls its functions in its own way, and a draft computes the same as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_sets import Tree, definition, solution
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.interchange import adapt
from tilegym_db.interchange.adapt import CALLED_BY_NAME, Draft, draft_of
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.judging.sandboxed import NOT_COMPARED, compared_draft
from tilegym_db.store.imported import DataSet

GATE = "import torch\n\n\ndef run({}):\n    return x / (1 + g.abs())\n"
WRITES = "import torch\n\n\ndef run({}, out):\n    out.copy_(x / (1 + g.abs()))\n"
DIALECTS = ("flashinfer-trace", "fi-trace", "sol-execbench", "tilegym")


def data_set(dialect: str, root: Path, *, reference: str = GATE) -> DataSet:
    """Import ``x / (1 + |g|)`` with inputs in the order of names, and functions with the parameters in a dialect's order."""
    parameters = "x, g" if dialect in CALLED_BY_NAME else "g, x"
    tensor = {"shape": ["M"], "dtype": "float32"}
    record = definition(
        name="gate",
        axes={"M": {"type": "var"}},
        inputs={"g": tensor, "x": tensor},
        outputs={"out": tensor},
        reference=reference.format(parameters),
    )
    returns, writes = GATE.format(parameters), WRITES.format(parameters)
    answers = [
        {**solution("returns", returns), "definition": "gate"},
        {**solution("writes", writes, destination_passing_style=True), "definition": "gate"},
    ]
    tree = Tree(root / "set")
    if dialect == "flashinfer-trace":
        tree.write("definitions/act/gate.json", record)
        for one in answers:
            tree.write(f"solutions/act/gate/{one['name']}.json", one)
    elif dialect == "fi-trace":
        tree.write("gate.json", {**record, "tags": ["fi_api:gate"]})
        for one in answers:
            tree.write(f"{one['name']}.json", one)
    elif dialect == "sol-execbench":
        tree.write("gate/definition.json", record).write("gate/workload.jsonl", "")
        for one in answers:
            spec: dict[str, Any] = {**one["spec"], "languages": ["pytorch"]}
            del spec["language"]
            tree.write(f"gate/solution_{one['name']}.json", {**one, "spec": spec})
    else:
        tree.write("src/kernel_definitions/gate.json", record)
        for one in answers:
            path = f"src/kernels/{one['name']}.py"
            tree.write(path, one["sources"][0]["content"])
            spec = {**one["spec"], "entry_point": f"{path}::run"}
            tree.write(f"src/kernel_solutions/{one['name']}.json", {**one, "sources": {"path": [path]}, "spec": spec})
    found = import_data_set(tree.root).data_set
    assert (found.dialect, found.refused) == (dialect, ())
    return found


def result_of(draft: Draft, folder: str, tmp_path: Path, *, writes: bool = True) -> float:
    """Return the draft's output for g = 1, x = 8, called by position in the order of the record."""
    import importlib
    import sys

    import torch

    name = f"draft_{len(list(tmp_path.iterdir()))}"
    package = tmp_path / name
    for path, content in draft.files.items():
        if path.startswith(folder) and path.endswith(".py"):
            (package / path.removeprefix(folder)).parent.mkdir(parents=True, exist_ok=True)
            (package / path.removeprefix(folder)).write_bytes(content)
    entry = next((f for f in ("reference.py", "tilegym_entry.py", "main.py") if (package / f).exists()), None)
    assert entry is not None
    sys.path.insert(0, str(tmp_path))
    try:
        function = importlib.import_module(f"{name}.{entry.removesuffix('.py')}").run
    finally:
        sys.path.remove(str(tmp_path))
    out = torch.zeros(1)
    returned = function(*(torch.tensor([1.0]), torch.tensor([8.0])), *((out,) if writes else ()))
    return float(out if returned is None else returned)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_draft_computes_what_the_original_computes(dialect: str, home: Path, tmp_path: Path) -> None:
    draft = draft_of(data_set(dialect, tmp_path), "gate")
    assert result_of(draft, "", tmp_path, writes=False) == 4.0
    by_name = dialect in CALLED_BY_NAME
    assert result_of(draft, "solutions/returns/", tmp_path, writes=by_name) == 4.0
    assert result_of(draft, "solutions/writes/", tmp_path) == 4.0


@pytest.mark.sweep(4)
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_draft_of_every_dialect_agrees_with_the_original(dialect: str, home: Path, tmp_path: Path) -> None:
    draft = compared_draft(data_set(dialect, tmp_path), "gate")
    assert (draft.solutions, draft.left_out) == (["solutions/returns", "solutions/writes"], [])


@pytest.mark.slow
def test_draft_with_swapped_arguments_is_not_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = data_set("tilegym", tmp_path)
    monkeypatch.setattr(adapt, "CALLED_BY_NAME", frozenset())
    with raises(UsageError, "draft_differs", "gate"):
        compared_draft(found, "gate")


@pytest.mark.slow
def test_reference_that_does_not_run_is_said_to_be_uncompared(home: Path, tmp_path: Path) -> None:
    failing = "def run({}):\n    raise ValueError('only on a B200')\n"
    draft = compared_draft(data_set("tilegym", tmp_path, reference=failing), "gate")
    assert ("comparison of the reference", NOT_COMPARED) in draft.left_out


def test_function_that_cannot_be_called_by_name_is_refused(home: Path, tmp_path: Path) -> None:
    other = "def run(x, gate):\n    return x / (1 + gate.abs())\n{}"
    found = data_set("tilegym", tmp_path, reference=other.replace("{}", "# {}"))
    with raises(UsageError, "definition_not_adaptable", "no parameter g"):
        draft_of(found, "gate")
