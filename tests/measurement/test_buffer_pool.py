"""The memory that all Solutions of a workload are timed in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilegym_db.measurement.runner import MAX_SLOTS_ON_CPU, MIN_SLOTS, BufferPool
from tilegym_db.records import Definition
from tilegym_db.sandbox.shared_buffers import same_bytes
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents


@pytest.fixture
def contents(make_catalog, tmp_path) -> WorkloadContents:
    catalog = make_catalog(tmp_path)
    definition = catalog.definition("row_scale")
    workload = catalog.workloads_for("row_scale")[0]
    return WorkloadContents.draw(definition, workload, 7, ExpectedCache(definition, "cpu"))


@pytest.fixture
def pool(contents) -> Iterator[BufferPool]:
    pool = BufferPool(contents.definition, contents.sets, "cpu", 1 << 20)
    yield pool
    pool.close()


def test_each_slot_holds_a_content_set_and_garbage_for_outputs(pool, contents):
    for slot in range(pool.slots):
        expected = contents.sets[pool.content_of(slot)]
        assert same_bytes(pool.buffers.tensor(slot, "x"), expected.inputs["x"])
        assert not same_bytes(pool.buffers.tensor(slot, "out"), expected.outputs["out"].float())


def test_filling_again_gives_every_slot_other_contents(pool):
    before = [pool.content_of(slot) for slot in range(pool.slots)]
    pool.fill()
    assert all(one != pool.content_of(slot) for slot, one in enumerate(before))


def test_poison_reaches_only_the_outputs_of_the_named_slots(pool):
    memory = pool.buffers.memory.clone()
    pool.prepare([1], poison=True)
    changed = (pool.buffers.memory != memory).nonzero()
    plan = pool.buffers.plan.outputs[0]
    start = pool.buffers.plan.size + plan.offset
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
    pool = BufferPool(definition, drawn.sets, "cpu", 1 << 20)
    pool.buffers.tensor(2, "x").zero_()
    pool.prepare([2], poison=False)
    assert same_bytes(pool.buffers.tensor(2, "x"), drawn.sets[pool.content_of(2)].inputs["x"])
    pool.close()


@pytest.mark.parametrize(("buffer_bytes", "slots"), [(0, MIN_SLOTS), (1 << 30, MAX_SLOTS_ON_CPU)])
def test_slots_are_bounded_by_memory_and_by_sense(contents, buffer_bytes, slots):
    pool = BufferPool(contents.definition, contents.sets, "cpu", buffer_bytes)
    assert pool.slots == slots
    pool.close()
    pool.close()


def test_fresh_contents_agree_by_solution_and_differ_by_attempt(contents):
    first, again, later = contents.fresh(0, 3), contents.fresh(0, 3), contents.fresh(1, 3)
    assert [one is two for one, two in zip(first, again, strict=True)] == [True] * 3
    drawn = [expected.inputs["x"] for expected in (*contents.sets, *first, *later)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
