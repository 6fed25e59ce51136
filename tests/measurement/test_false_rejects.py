"""``benchmarks/false_rejects.py``: which kernels come first where there is no time for all, and what an end keeps."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root


@pytest.fixture
def rejects(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root()))
    from benchmarks import false_rejects

    return false_rejects


def test_repeat_has_a_kernel_of_each_definition_before_any_again(rejects: ModuleType) -> None:
    catalog = Catalog((shipped_root(),))
    names = ["rms_norm", "softmax", "attention_decode"]
    repeats = list(islice(rejects.in_turns(catalog, names), 6))
    for repeat in repeats:
        assert [catalog.solution(name).record.definition for name in repeat.names] == names
    languages = [[catalog.solution(name).record.spec.language for name in repeat.names] for repeat in repeats]
    assert {found[0] for found in languages[:3]} == {"triton", "tilelang", "cutile"}
    assert languages[0][0] != languages[0][1]
    asked = [(name, uuid) for repeat in repeats for name, uuid in zip(repeat.names, repeat.workloads, strict=True)]
    assert len(set(asked)) == len(asked)
    first = {uuid for repeat in repeats[:3] for uuid in repeat.workloads[:2]}
    assert len(first) == 2


def test_the_smallest_workload_that_is_worth_a_call_comes_first(rejects: ModuleType) -> None:
    catalog = Catalog((shipped_root(),))
    definition = catalog.definition("rms_norm")
    order = rejects.by_size(definition, catalog.workloads_for("rms_norm"))
    moved = [definition.cost_of(definition.bind_axes(w.axes), definition.bind_dtypes(w.dtypes))[1] for w in order]
    worth = [size for size in moved if size >= rejects.WORTH_A_CALL]
    assert moved[: len(worth)] == sorted(worth)
    assert len(worth) < len(moved)


@pytest.mark.turn("benchmarks/false_rejects.py")  # a script that starts workers
@pytest.mark.slow
def test_an_end_in_the_middle_keeps_the_verdicts_that_were_there(
    rejects: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = rejects.verify
    calls: list[Any] = []

    def verify(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(rejects, "verify", verify)
    out = tmp_path / "verdicts.jsonl"
    arguments = ["rms_norm_stock", "--gpu", "cpu", "--workload", "tiny", "--workloads", "1", "--out", str(out)]
    asked_of_each = rejects.plan.QUICK_WORKLOADS
    assert rejects.main(arguments) == 0
    assert len(calls) == 2
    assert asked_of_each == rejects.plan.QUICK_WORKLOADS
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["solution"], line["status"]) for line in verdicts] == [("rms_norm_stock", "PASSED")]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("1 promotion-tier verdicts on 1 honest solutions of 1 definitions, 1 to 1 of each")
