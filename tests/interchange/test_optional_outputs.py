"""Foreign Definitions whose second output a Solution need not give: judged by what it gives, and drafted so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_sets import DEFINITION, SOLUTION, WORKLOADS, Tree, definition, lines, of_workload, solution, workload

from tilegym_db.interchange.adapt import Adapted, adapted_definition, draft_of
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.store.imported import DataSet

BOTH = "import torch\n\ndef run(x, w, eps):\n    return x * w + eps, x.sum(-1)\n"
ONE = "import torch\n\ndef run(x, w, eps):\n    return x * w + eps\n"
IN_TUPLE = "import torch\n\ndef run(x, w, eps):\n    return (x * w + eps,)\n"
WRONG = "import torch\n\ndef run(x, w, eps):\n    return x * w * 1.5 + eps\n"
SECOND_ONLY = "import torch\n\ndef run(x, w, eps):\n    return x.sum(-1)\n"
WRITES_ONE = "import torch\n\ndef run(x, w, eps, out):\n    out.copy_(x * w + eps)\n"
OUT = {"shape": ["M", "N"], "dtype": "float32"}
ROWS = {"shape": ["M"], "dtype": "float32"}


def two_outputs(**marks: Any) -> dict[str, Any]:
    return definition(outputs={"out": OUT, "lse": {**ROWS, **marks}}, reference=BOTH)


def imported(tree: Tree) -> DataSet:
    found = import_data_set(tree.root).data_set
    assert found is not None
    return found


def adapted_of(found: DataSet) -> Adapted:
    (item,) = found.of_kind("definition")
    adapted = adapted_definition(found, item)
    assert isinstance(adapted, Adapted), adapted
    return adapted


@pytest.mark.parametrize(
    ("record", "optional"),
    [
        (two_outputs(optional=True), ("lse",)),
        (two_outputs(), ()),
        (two_outputs(optional=False), ()),
        ({**two_outputs(), "name": "dsa_sparse_attention_h16_ckv512"}, ("lse",)),
        (definition(outputs={"out": {**OUT, "optional": True}, "lse": ROWS}, reference=BOTH), ()),
        (definition(outputs={"out": {**OUT, "optional": True}}), ()),
    ],
)
def test_output_is_optional_if_record_or_evaluator_says_so(
    tree: Tree, home: Path, record: dict[str, Any], optional: tuple[str, ...]
) -> None:
    for path in tree.bytes():
        (tree.root / path).unlink()
    tree.write(DEFINITION, record)
    assert adapted_of(imported(tree)).definition.optional_outputs == optional


def fill(tree: Tree, record: dict[str, Any]) -> None:
    """Solutions of every kind for this Definition, and one call."""
    for path in tree.bytes():
        (tree.root / path).unlink()
    tree.write(DEFINITION, record).write(WORKLOADS, lines(of_workload(workload())))
    sources = {"both": BOTH, "one": ONE, "in_tuple": IN_TUPLE, "wrong": WRONG, "second_only": SECOND_ONLY}
    for name, source in sources.items():
        tree.write(SOLUTION.replace("scale_torch", name), solution(name, source))
    writes = solution("writes_one", WRITES_ONE, destination_passing_style=True)
    tree.write(SOLUTION.replace("scale_torch", "writes_one"), writes)


@pytest.mark.turn("tilegym_db/judging/")  # judges in workers
@pytest.mark.slow
def test_given_outputs_are_judged_and_missing_optional_ones_not(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import judge_data_set, keep_judgements, kept_judgements
    from tilegym_db.measurement.machine import select_machine

    fill(tree, two_outputs(optional=True))
    found = imported(tree)
    judgements = judge_data_set(found, select_machine("cpu"))
    assert {item.solution: (item.status, item.omits) for item in judgements} == {
        "both": ("PASSED", ()),
        "one": ("PASSED", ("lse",)),
        "in_tuple": ("PASSED", ("lse",)),
        "writes_one": ("PASSED", ("lse",)),
        "wrong": ("INCORRECT_NUMERICAL", ("lse",)),
        "second_only": ("INCORRECT_SHAPE", ()),
    }
    timed = {item.solution: item.latency_us is not None for item in judgements if item.status == "PASSED"}
    assert timed == {"both": True, "one": False, "in_tuple": False, "writes_one": False}
    assert {item.rule_passed for item in judgements if item.omits and item.status == "PASSED"} == {True}
    keep_judgements(found, judgements)
    assert sorted(kept_judgements(found), key=str) == sorted(judgements, key=str)


@pytest.mark.turn("tilegym_db/judging/")  # workers of another data set
@pytest.mark.slow
def test_an_output_that_is_not_optional_may_not_be_missing(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import judge_data_set
    from tilegym_db.measurement.machine import select_machine

    fill(tree, two_outputs())
    found = {item.solution: item.status for item in judge_data_set(imported(tree), select_machine("cpu"))}
    assert found["both"] == "PASSED"
    assert "PASSED" not in {status for name, status in found.items() if name != "both"}


def test_draft_says_which_outputs_are_optional_and_omitted(tree: Tree, home: Path) -> None:
    fill(tree, two_outputs(optional=True))
    draft = draft_of(imported(tree), "scale_n8")
    assert json.loads(draft.files["definition.json"])["optional_outputs"] == ["lse"]
    spec = json.loads(draft.files["solutions/writes_one/solution.json"])["spec"]
    assert spec["omits"] == ["lse"]
    assert "omits" not in json.loads(draft.files["solutions/both/solution.json"])["spec"]
