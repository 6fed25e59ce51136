"""``benchmarks/sanitize_order.py``: what was never checked, and that a sweep begins with it."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.instruments.requests import Chosen, choose_solutions
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.paths import shipped_root
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case

H200 = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")
TOOLS = ("memcheck", "racecheck", "synccheck")
MACHINE = {
    "machine": {"gpu": "NVIDIA H100 80GB HBM3, 580.1, 81559 MiB", "compute-sanitizer": "X | Version 2025.3.1.0 (b)"}
}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root()))
    from benchmarks import sanitize_order

    return sanitize_order


@pytest.fixture(scope="module")
def chosen() -> list[Chosen]:
    one = Case(Call("row_scale", {"M": 2, "N": 3}, {"T": "float32"}))
    found = choose_solutions(Catalog((shipped_root(),)), ["softmax", "rms_norm"], H200)
    return [replace(item, cases=[one]) for item in found]


def result(digest: str, tool: str, said: str) -> dict:
    return {"kernel": "k", "language": "triton", "digest": digest, "tool": tool, "result": said, "shapes": ["a", "b"]}


def test_record_adds_clean_kernels_and_drops_those_found_later(order: ModuleType) -> None:
    first = [
        MACHINE,
        result("d1", "memcheck", "clean"),
        result("d1", "plain", "clean"),
        result("d2", "racecheck", "not run"),
    ]
    record = order.merged([], first, "2026-11-25")
    assert [(line["digest"], line["tools"]) for line in record] == [
        ("d1", {"memcheck": "2026-11-25, NVIDIA H100 80GB HBM3, 2025.3.1.0, 2 cases"})
    ]
    more = order.merged(record, [MACHINE, result("d1", "racecheck", "clean")], "2026-11-26")
    assert order.clean_before(more) == {("d1", "memcheck"), ("d1", "racecheck")}
    less = order.merged(more, [MACHINE, result("d1", "memcheck", "found")], "2026-11-27")
    assert order.clean_before(less) == {("d1", "racecheck")}
    assert order.clean_before(more) == {("d1", "memcheck"), ("d1", "racecheck")}


def test_a_kernel_that_was_changed_since_was_never_checked(order: ModuleType, chosen: list[Chosen]) -> None:
    before = {(chosen[0].files.digest, "memcheck"), ("of an earlier source", "memcheck")}
    names = order.never_checked(chosen, before, "memcheck")
    assert names == [item.files.name for item in chosen[1:]]
    assert order.never_checked(chosen, before, "racecheck") == [item.files.name for item in chosen]


def test_controls_run_first_then_unchecked_kernels_then_triton(order: ModuleType, chosen: list[Chosen]) -> None:
    from benchmarks.sanitize_catalog import batches_of
    from benchmarks.sanitize_pool import Batch, Sweep

    seen = {item.files.digest for item in chosen if item.definition.name == "softmax"}
    before = {(digest, "memcheck") for digest in seen}
    batches = batches_of(chosen, ["tilelang", "cutile", "triton"], 5, TOOLS, before)
    assert {len({item.files.digest in seen for item in batch.solutions}) for batch in batches} == {1}
    sweep = Sweep(Path("t"), "cpu", 1, time.monotonic(), Path("c"), rank=order.unchecked_first(TOOLS, before))
    for batch in [*batches, Batch("racecheck", chosen[:1], is_control=True)]:
        sweep._push(batch)
    ran = []
    while sweep._waiting:
        _, _, batch = heapq.heappop(sweep._waiting)
        first = batch.solutions[0]
        ran.append((batch.tool, first.files.record.spec.language, first.files.digest in seen))
        if batch.then:
            sweep._push(Batch(batch.then[0], batch.solutions, batch.then[1:]))
    assert ran[0][0] == "racecheck"
    memchecked = [number for number, (tool, _, old) in enumerate(ran) if tool == "memcheck" and not old]
    raced = [number for number, (tool, *_) in enumerate(ran) if tool == "racecheck"][1:]
    assert len(memchecked) == 3
    assert len(raced) == 6
    assert max(memchecked) < min(raced)
    assert [ran[number][1] for number in raced[:2]] == ["triton", "triton"]
    assert [(tool, old) for tool, _, old in ran[-3:]] == [("memcheck", True)] * 3


def test_every_line_of_the_record_has_a_kernel_and_a_known_tool(order: ModuleType) -> None:
    lines = order.read_lines(order.RECORD)
    assert len(lines) > 100
    assert {tool for line in lines for tool in line["tools"]} <= set(order.TOOLS)
    assert len({line["digest"] for line in lines}) == len(lines)
