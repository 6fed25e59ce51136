"""The memory that all Solutions of a workload are timed in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.stage import MAX_SLOTS_ON_CPU, MIN_SLOTS, Stage
from tilegym_db.records import Definition
from tilegym_db.verify.verifier import same_bytes


@pytest.fixture
def contents(make_catalog, tmp_path) -> WorkloadContents:
    catalog = make_catalog(tmp_path)
    definition = catalog.definition("row_scale")
    workload = catalog.workloads_for("row_scale")[0]
    return WorkloadContents.draw(definition, workload, 7, ExpectedCache(definition, "cpu"))


@pytest.fixture
def stage(contents) -> Iterator[Stage]:
    stage = Stage(contents.definition, contents.sets, "cpu", 1 << 20)
    yield stage
    stage.close()


def test_every_slot_holds_one_of_the_content_sets_and_garbage_for_the_outputs(stage, contents):
    for slot in range(stage.slots):
        expected = contents.sets[stage.content_of(slot)]
        assert same_bytes(stage.arena.tensor(slot, "x"), expected.inputs["x"])
        assert not same_bytes(stage.arena.tensor(slot, "out"), expected.outputs["out"].float())


def test_filling_again_gives_every_slot_other_contents(stage):
    before = [stage.content_of(slot) for slot in range(stage.slots)]
    stage.fill()
    assert all(one != stage.content_of(slot) for slot, one in enumerate(before))


def test_poison_reaches_the_outputs_of_the_slots_named_and_nothing_else(stage):
    memory = stage.arena.memory.clone()
    stage.prepare([1], poison=True)
    changed = (stage.arena.memory != memory).nonzero()
    plan = stage.arena.plan.outputs[0]
    start = stage.arena.plan.size + plan.offset
    assert changed.numel() > 0
    assert start <= int(changed.min())
    assert int(changed.max()) < start + plan.span


def test_an_input_that_is_overwritten_in_place_is_put_back(make_catalog, tmp_path):
    changes = {
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "T"},
            "weight": {"shape": ["N"], "dtype": "T"},
            "factor": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["M", "N"], "dtype": "T"}},
        "in_place": {"x": "y"},
    }
    catalog = make_catalog(tmp_path, definition=changes)
    definition: Definition = catalog.definition("row_scale")
    drawn = WorkloadContents.draw(
        definition, catalog.workloads_for("row_scale")[0], 7, ExpectedCache(definition, "cpu")
    )
    stage = Stage(definition, drawn.sets, "cpu", 1 << 20)
    stage.arena.tensor(2, "x").zero_()
    stage.prepare([2], poison=False)
    assert same_bytes(stage.arena.tensor(2, "x"), drawn.sets[stage.content_of(2)].inputs["x"])
    stage.close()


@pytest.mark.parametrize(("arena_bytes", "slots"), [(0, MIN_SLOTS), (1 << 30, MAX_SLOTS_ON_CPU)])
def test_slots_are_bounded_by_memory_and_by_sense(contents, arena_bytes, slots):
    stage = Stage(contents.definition, contents.sets, "cpu", arena_bytes)
    assert stage.slots == slots
    stage.close()
    stage.close()


def test_fresh_contents_are_the_same_for_every_solution_and_new_at_every_attempt(contents):
    first, again, later = contents.fresh(0, 3), contents.fresh(0, 3), contents.fresh(1, 3)
    assert [one is two for one, two in zip(first, again, strict=True)] == [True] * 3
    drawn = [expected.inputs["x"] for expected in (*contents.sets, *first, *later)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
