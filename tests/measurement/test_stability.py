"""``benchmarks/stability.py``: what it calls agreement, how it draws, and a tiny run on this machine's processor."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Workload

ROUNDS = 12
SLOW = "def run(x, weight, factor, out):\n    for _ in range(100):\n        out.copy_(x * weight * factor)\n"


@pytest.fixture
def stability(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import stability

    module: ModuleType = stability
    return module


def rounds(latency_us: float) -> list[float]:
    return [latency_us * (1 + 0.001 * (number % 3)) for number in range(ROUNDS)]


def workloads(*sizes: int) -> list[Workload]:
    content = {"definition": "row_scale", "dtypes": {"T": "float32"}, "tags": ["cpu"]}
    return [Workload.from_dict({**content, "axes": {"M": size, "N": 8}, "inputs": {}}) for size in sizes]


def test_same_winner_in_every_run_is_identical_if_close(stability):
    runs = [{"a": rounds(10), "b": rounds(10.01)}, {"a": rounds(9), "b": rounds(12)}]
    assert stability.agreement(runs) == "identical"


@pytest.mark.parametrize(("apart", "verdict"), [(1.01, "tied"), (1.05, "different")])
def test_two_winners_agree_only_where_they_tie_in_both_runs(stability, apart, verdict):
    runs = [{"a": rounds(10), "b": rounds(10 * apart)}, {"a": rounds(10.05), "b": rounds(10)}]
    assert stability.agreement(runs) == verdict


def test_winner_that_another_run_could_not_time_is_a_difference(stability):
    assert stability.agreement([{"a": rounds(10)}, {"b": rounds(10)}]) == "different"


def test_operator_with_many_workloads_does_not_outweigh_others(stability):
    groups = {"many": workloads(*range(1, 50)), "few": workloads(1, 2)}
    drawn = stability.stratified(groups, 6, random.Random(0))
    assert [pair.definition for pair in drawn] == ["few", "many", "few", "many", "many", "many"]
    assert len({(pair.definition, pair.workload.uuid) for pair in drawn}) == 6
    assert len(stability.stratified(groups, 1000, random.Random(0))) == 51


def test_kept_runs_of_other_pairs_are_refused(stability, tmp_path):
    pairs = [stability.Pair("row_scale", item) for item in workloads(1, 2)]
    runs = [{pair.workload.uuid: {"a": rounds(10)} for pair in pairs}]
    stability.write_runs(tmp_path / "runs.json", pairs, runs)
    assert stability.read_runs(tmp_path / "runs.json", pairs) == runs
    with pytest.raises(ValueError, match="runs of other pairs"):
        stability.read_runs(tmp_path / "runs.json", pairs[:1])


@pytest.mark.turn("tilegym_db/measurement/timing.py")  # times three runs
def test_runs_from_nothing_agree_on_a_clear_winner(stability, make_catalog, tmp_path, monkeypatch, capsys):
    catalog = make_catalog(
        tmp_path,
        {"row_scale_slow": SLOW, "row_scale_fast": SLOW.replace("100", "1")},
        ({"axes": {"M": 128, "N": 256}}, {"axes": {"M": 64, "N": 256}}),
    )
    monkeypatch.setattr(Catalog, "default", lambda: catalog)
    kept = ["--keep", str(tmp_path / "runs.json")]
    arguments = ["stability.py", "--gpu", "cpu", "--pairs", "2", "--quick", "--expect", "1", *kept]
    monkeypatch.setattr(sys, "argv", [*arguments, "--runs", "1"])
    assert stability.main() == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*arguments, "--runs", "2"])
    assert stability.main() == 0
    shown, progress = capsys.readouterr()
    assert "run 2 of 2" in progress
    assert "run 1 of 2" not in progress  # it was kept by the first call
    assert "identical  row_scale M=64,N=256,float32: row_scale_fast, row_scale_fast" in shown
    assert "2 pairs in 2 runs: 2 identical, 0 tied, 0 different; 100.0% agree" in shown
