"""``benchmarks/pressure.py``: a kernel that is right alone and wrong beside others is told, an honest one beside it is not."""

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


def test_what_goes_wrong_at_once_is_told_with_all_that_repeats_it(
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
