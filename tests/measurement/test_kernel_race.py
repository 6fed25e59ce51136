"""``benchmarks/kernel_race.py``: the admission, the ratio, and a tiny race on this machine's processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.paths import shipped_root
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(shipped_root()))


def case_of(name: str, axes: dict[str, int]) -> tuple[Any, Case]:
    definition = Catalog.default().definition(name)
    scalars = {key: 1e-5 for key, spec in definition.inputs.items() if spec.is_scalar}
    return definition, Case(Call(definition.name, definition.bind_axes(axes), {"T": "float32"}, scalars=scalars))


def norm(given: dict[str, Any]) -> torch.Tensor:
    return torch.nn.functional.rms_norm(given["x"], given["weight"].shape, given["weight"], given["eps"])


def test_only_candidates_that_run_and_are_right_start() -> None:
    from benchmarks.kernel_race import admit, make_slot
    from benchmarks.race_candidates import Racer

    def broken(given: dict[str, Any]) -> None:
        raise RuntimeError("no such kernel image")

    definition, case = case_of("rms_norm", {"M": 4, "N": 64})
    racers = [
        Racer("stock", "right", norm),
        Racer("triton", "not normalised", lambda given: given["x"] * given["weight"]),
        Racer("cutile", "writes nothing", lambda given: None),
        Racer("tilelang", "broken", broken),
    ]
    absent: dict[str, str] = {}
    started = admit(definition, case, racers, make_slot(definition, case, "cpu", ()), absent)
    assert [racer.name for racer in started] == ["right"]
    assert "wrong: relative error" in absent["triton"]
    assert absent["cutile"] == "wrong: relative error nan > 2e-05"
    assert absent["tilelang"] == "raises RuntimeError: no such kernel image"


def test_what_a_racer_overwrites_is_there_again_for_the_next_one() -> None:
    from benchmarks.kernel_race import admit, make_slot, race
    from benchmarks.race_candidates import Racer

    definition, case = case_of("fused_add_rms_norm", {"M": 2, "N": 32})
    seen = []

    def in_place(given: dict[str, Any]) -> torch.Tensor:
        seen.append(float(given["residual"].sum()))
        given["residual"].add_(given["x"])
        return torch.nn.functional.rms_norm(given["residual"], given["weight"].shape, given["weight"], given["eps"])

    racers = [Racer(column, column, in_place, overwrites=("residual",)) for column in ("stock", "triton")]
    slot = make_slot(definition, case, "cpu", ("residual",))
    drawn = float(slot.given["residual"].sum())
    absent: dict[str, str] = {}
    assert admit(definition, case, racers, slot, absent) == racers, absent
    race(racers, [slot], "cpu", rounds=2, calls=2)
    assert set(seen) == {drawn}


def test_the_ratio_is_that_of_the_best_of_both_sides() -> None:
    from benchmarks.kernel_race import line, summary
    from benchmarks.race_candidates import Racer

    def raced(language: str, latency_us: float) -> Racer:
        racer = Racer(language, language, lambda given: None)
        racer.rounds = [latency_us * (1 + 0.01 * drift) for drift in range(9)]  # the same drift for all
        racer.samples = list(racer.rounds)
        return racer

    racers = [raced("triton", 40.0), raced("cutile", 130.0), raced("library", 150.0), raced("stock", 120.0)]
    found = summary(racers)
    assert (found["best"], found["best_other"]) == ("triton", "stock")
    assert found["ratio"]["ci_low"] == pytest.approx(3.0)
    definition, case = case_of("rms_norm", {"M": 2, "N": 32})
    assert "stock" in line({"definition": definition.name, "axes": case.call.axes, **found})
    assert summary(racers[:2])["ratio"] is None


def test_a_tiny_race_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import kernel_race

    out = tmp_path / "race.json"
    options = ["rms_norm", "rope_neox", "--gpu", "cpu", "--tiny", "--no-compile", "--rounds", "8", "--calls", "2"]
    monkeypatch.setattr(sys, "argv", ["kernel_race", *options, "--out", str(out)])
    assert kernel_race.main() == 0
    content = json.loads(out.read_text())
    assert content["gpu"] == "cpu"
    rms_norm, rope = content["results"]
    assert set(rms_norm["times"]) >= {"stock", "library"}
    assert all(len(entry["rounds_us"]) == 8 and entry["latency_us"] > 0 for entry in rms_norm["times"].values())
    assert rope["times"]["stock"]["rel_error"] < 4e-3
    assert rms_norm["absent"]["cutile"] == "it is not declared for cpu"
    assert rms_norm["absent"]["compile"] == "left out (--no-compile)"
    printed = capsys.readouterr()
    assert "rms_norm M=4,N=64" in printed.out
    assert "liger: " in printed.err


def test_every_shape_is_one_that_its_operator_allows() -> None:
    from benchmarks.kernel_race import LAYOUTS, SHAPES, TINY
    from benchmarks.race_candidates import why_not

    catalog, machine = Catalog.default(), cpu_machine()
    for name, shapes in [*SHAPES.items(), *TINY.items()]:
        definition, _ = case_of(name, shapes[0])
        stock = next(files for files in catalog.solutions_for(name) if files.record.spec.provides == "stock")
        for axes in shapes:
            case = Case(Call(definition.name, definition.bind_axes(axes), {"T": "bfloat16"}, LAYOUTS.get(name, {})))
            assert why_not(definition, stock, case, machine) is None
