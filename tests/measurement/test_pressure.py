"""``benchmarks/pressure.py``: a kernel that is right alone and wrong beside others is reported, an honest one is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.paths import shipped_root

RIGHT = "    out.copy_(x * weight * factor)\n"
HONEST = f"def run(x, weight, factor, out):\n{RIGHT}"
DRIFTING = f"""
import itertools

calls = itertools.count()


def run(x, weight, factor, out):
{RIGHT}    out.mul_(1 + 1e-7 * (next(calls) % 3))
"""
SHARING = """
import time

scratch = {}


def run(x, weight, factor, out):
    scratch["product"] = x * weight * factor
    time.sleep(0.001)
    product = scratch["product"]
    out.copy_(product if product.shape == out.shape else x * 0)
"""
RAISING = "def run(x, weight, factor, out):\n    raise ValueError('no such size')\n"
TINY = {"axes": {"M": 6, "N": 16}, "inputs": {"factor": {"type": "scalar", "value": 2.0}}, "tags": ["tiny"]}


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(shipped_root()))


def press(root: Path, log: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the lines of the log of one round on the CPU."""
    from benchmarks.pressure import main

    status = main(["--gpu", "cpu", "--seconds", "0", "--catalog", str(root), "--log", str(log), "--seed", "3", *more])
    return status, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.turn("tilegym_db/verification/sequences.py")  # a whole bench run
def test_pressure_failure_is_reported_with_all_that_repeats_it(
    make_catalog: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    solutions = {"honest": HONEST, "drifting": DRIFTING, "sharing": SHARING, "raising": RAISING}
    make_catalog(tmp_path / "planted", solutions, (TINY,))
    status, lines = press(tmp_path / "planted", tmp_path / "log.jsonl", "--jobs", "10")
    wrong = {line["solution"] for line in lines if line["mismatches"]}
    assert status == 1
    assert wrong == {"drifting", "sharing"}
    assert {line["solution"] for line in lines if line["errors"]} == {"raising"}
    assert all(line["calls"] == 16 for line in lines if line["solution"] == "honest")
    told = capsys.readouterr().out
    assert "bytes of out differ from those of a call alone" in told
    assert "ValueError: no such size" in told
    drifted = next(line for line in lines if line["solution"] == "drifting" and line["mismatches"])
    (tmp_path / "some.jsonl").write_text(json.dumps(drifted))
    status, lines = press(tmp_path / "planted", tmp_path / "again.jsonl", "--again", str(tmp_path / "some.jsonl"))
    assert status == 1
    assert [(line["solution"], line["case"]) for line in lines] == [("drifting", drifted["case"])]


def test_honest_kernels_pass(make_catalog: Any, tmp_path: Path) -> None:
    make_catalog(tmp_path / "honest", {"honest": HONEST}, (TINY,))
    status, lines = press(tmp_path / "honest", tmp_path / "log.jsonl")
    assert status == 0
    assert {line["solution"] for line in lines} == {"honest", "row_scale_stock"}
    assert {line["mismatches"] + line["errors"] for line in lines} == {0}


def test_workers_take_every_operator_before_any_repeats(
    make_catalog: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_catalog(tmp_path / "honest", {"first": HONEST, "second": HONEST, "third": HONEST}, (TINY,))
    log = tmp_path / "log.jsonl"
    status, lines = press(tmp_path / "honest", log, "--workers", "2", "--jobs", "2")
    assert status == 0
    assert sorted(line["solution"] for line in lines) == ["first", "row_scale_stock", "second", "third"]
    assert len({line["round"] for line in lines}) == 2
    assert all(line["compared"] == line["calls"] > 0 and line["bytes"] > 0 for line in lines)
    assert min(line["case"]["call"]["axes"]["M"] for line in lines) > 0
    told = capsys.readouterr().out
    end = told.splitlines()[-1]
    assert end.startswith(
        "1 of 1 operators and 4 of 4 Solutions were called beside others; 4 jobs, 64 calls, 64 compared"
    )

    from benchmarks.pressure import main

    assert main(["--gpu", "cpu", "--catalog", str(tmp_path / "honest"), "--summary", str(log)]) == 0
    assert capsys.readouterr().out == told


def test_of_each_operator_one_solution_comes_first_then_its_next(make_catalog: Any, tmp_path: Path) -> None:
    import random
    from types import SimpleNamespace

    from benchmarks.pressure_jobs import in_turns

    found = [
        SimpleNamespace(definition=SimpleNamespace(name=name), number=number)
        for name in "abc"
        for number in range(3 if name != "c" else 1)
    ]
    order = in_turns(found, random.Random(1))
    laps = [[next(order) for _ in range(3)] for _ in range(3)]
    assert all({one.definition.name for one in lap} == set("abc") for lap in laps)
    assert len({(one.definition.name, one.number) for lap in laps for one in lap}) == 7
    assert list(in_turns([], random.Random(1))) == []


@pytest.mark.turn("benchmarks/pressure")  # a script that waits 8 s
def test_a_round_that_still_runs_at_the_end_counts_for_nothing(
    make_catalog: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_catalog(tmp_path / "slow", {"slow": f"import time\n{HONEST}    time.sleep(60)\n"}, (TINY,))
    status, lines = press(tmp_path / "slow", tmp_path / "log.jsonl", "--end", "8", "--workers", "2")
    assert (status, lines) == (1, [])
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 1 operators and 0 of 2 Solutions")
