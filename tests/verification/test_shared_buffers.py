from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import (
    ALIGNMENT,
    GUARD_BYTES,
    SharedBuffers,
    SlotPlan,
    attach,
    plan_slot,
    same_bytes,
    tensor_view,
    tensors_of_slot,
)
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.verifier import check_memory, fill_slot, is_same_outside


def case(offset: int = 0, dtype: str = "float32", layouts: dict[str, str] | None = None, **axes: int) -> Case:
    return Case(
        Call("row_scale", axes or {"M": 4, "N": 8}, {"T": dtype}, layouts or {}, {"factor": 1.0}), offset=offset
    )


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 300),
    padding=st.integers(0, 9),
    offset=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_tensors_keep_guard_bands_from_each_other_and_next_slots(rows, columns, padding, offset, dtype, operator):
    plan = plan_slot(operator(), case(offset, dtype, {"x": f"strided(N + {padding}, 1)"}, M=rows, N=columns))
    end = 0
    for tensor in plan.tensors:
        assert tensor.offset - end >= GUARD_BYTES
        end = tensor.offset + tensor.span
    assert plan.size - end >= GUARD_BYTES
    assert plan.size % ALIGNMENT == 0
    assert SlotPlan.from_message(plan.to_message()) == plan


def test_tensor_starts_aligned_unless_the_case_moves_it(operator):
    aligned, moved = (plan_slot(operator(), case(offset)) for offset in (0, 1))
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in aligned.tensors)
    assert all(tensor.offset % ALIGNMENT == 4 for tensor in moved.tensors)


def test_layout_gives_its_strides_and_span_to_the_last_element(operator):
    plan = plan_slot(operator(), case(layouts={"x": "strided(N + 8, 1)", "out": "strided(1, M)"}))
    x, _, out = plan.tensors
    assert (x.strides, x.span) == ((16, 1), (3 * 16 + 8) * 4)
    assert (out.strides, out.span) == ((1, 4), 32 * 4)
    with SharedBuffers(plan, 1, "cpu") as buffers:
        assert (buffers.tensor(0, "out").shape, buffers.tensor(0, "out").stride()) == ((4, 8), (1, 4))


def test_two_slots_and_two_tensors_of_one_slot_share_no_byte(operator):
    with SharedBuffers(plan_slot(operator(), case()), 2, "cpu") as buffers:
        buffers.memory.zero_()
        views = [buffers.tensor(slot, name) for slot in (0, 1) for name in ("x", "weight", "out")]
        for number, view in enumerate(views, start=1):
            view.fill_(number)
        assert [int(view.unique()) for view in views] == [1, 2, 3, 4, 5, 6]


def test_what_one_side_writes_the_other_side_reads(operator):
    with SharedBuffers(plan_slot(operator(), case()), 2, "cpu") as buffers:
        memory, [(_, plan), _], _ = attach(buffers.to_message(), os.dup(buffers.descriptor))
        tensor_view(memory[plan.size :], plan.outputs[0]).fill_(7)
        assert torch.equal(buffers.tensor(1, "out"), torch.full((4, 8), 7.0))


def test_a_worker_can_neither_shrink_nor_grow_the_memory(operator):
    with SharedBuffers(plan_slot(operator(), case()), 1, "cpu") as buffers:
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(buffers.descriptor, size)


def test_an_buffers_can_be_closed_twice_and_leaves_no_descriptor(operator):
    before = len(os.listdir("/proc/self/fd"))
    buffers = SharedBuffers(plan_slot(operator(), case()), 2, "cpu")
    buffers.close()
    buffers.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_little_memory_is_an_error_and_not_a_later_crash(operator, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with raises(StoreError, "shared_memory_full", "No space left on device"):
        SharedBuffers(plan_slot(operator(), case()), 1, "cpu")


@pytest.mark.gpu
def test_device_memory_is_shared_by_descriptor_beyond_its_owner(operator):
    buffers = SharedBuffers(plan_slot(operator(), case()), 2, "cuda:0")
    memory, [(_, plan), *_], release = attach(buffers.to_message(), os.dup(buffers.descriptor))
    tensor_view(memory[plan.size :], plan.outputs[0]).fill_(7)
    buffers.settle()
    assert torch.equal(buffers.tensor(1, "out").cpu(), torch.full((4, 8), 7.0))
    buffers.close()
    assert float(tensor_view(memory[plan.size :], plan.outputs[0]).sum()) == 7.0 * 32
    release()


PACKED = {"x": "strided(16, 1)", "weight": "strided(1)@x+8"}


def test_inputs_of_one_memory_interleave_without_guards_between(operator):
    with SharedBuffers(plan_slot(operator(), case(layouts=PACKED)), 1, "cpu") as buffers:
        x, weight, out = buffers.plan.tensors
        assert (weight.offset - x.offset, out.offset - (x.offset + x.span) >= GUARD_BYTES) == (8 * 4, True)
        buffers.tensor(0, "x").fill_(1)
        buffers.tensor(0, "weight").fill_(2)
        assert float(buffers.tensor(0, "x").sum()) == 32
        found = tensors_of_slot(buffers.slot(0), buffers.plan)
        assert found["x"].untyped_storage().data_ptr() == found["weight"].untyped_storage().data_ptr()
        assert found["weight"].storage_offset() == 8


def test_two_inputs_at_one_place_are_one_tensor(operator):
    pair = {"x": {"shape": ["M", "N"], "dtype": "T"}, "y": {"shape": ["M", "N"], "dtype": "T"}}
    definition = operator("return x + y", inputs=pair, cost=None, self_test=None)
    twice = {"x": "strided(9, 1)", "y": "strided(9, 1)@x+0"}
    one = Case(Call("row_scale", {"M": 4, "N": 8}, {"T": "float32"}, twice, {}))
    expected = make_oracle_case(definition, one, "cpu")
    assert expected is not None
    assert torch.equal(expected.inputs["x"], expected.inputs["y"])
    with SharedBuffers(plan_slot(definition, one), 1, "cpu") as buffers:
        found = tensors_of_slot(buffers.slot(0), buffers.plan)
        assert found["x"] is found["y"]
        assert found["x"] is not found["out"]


def test_expanded_input_repeats_in_memory_and_in_the_oracle(operator):
    expanded = case(layouts={"x": "strided(0, 1)"})
    expected = make_oracle_case(operator(), expanded, "cpu")
    assert expected is not None
    assert torch.equal(expected.inputs["x"], expected.inputs["x"][:1].expand(4, 8))
    with SharedBuffers(plan_slot(operator(), expanded), 1, "cpu") as buffers:
        fill_slot(buffers, 0, operator(), expected, None)
        assert torch.equal(buffers.tensor(0, "x"), expected.inputs["x"])


@pytest.mark.parametrize("place", ["strided(1)@out+0", "strided(1)@y+0", "strided(1)@weight+0"])
def test_memory_of_something_else_than_an_input_is_refused(place, operator):
    with raises(RecordError, "layout_place", "layouts.weight"):
        plan_slot(operator(), case(layouts={"weight": place}))


def test_write_into_a_neighbour_names_the_neighbour(operator):
    packed = case(layouts=PACKED)
    with SharedBuffers(plan_slot(operator(), packed), 1, "cpu") as buffers:
        before = buffers.slot(0).clone()
        buffers.tensor(0, "weight")[3] = 7
        failure = check_memory(buffers, 0, before, operator(), packed)
        assert failure is not None
        assert "wrote to weight, an input" in failure.reason


@pytest.mark.parametrize(("shape", "strides"), [((5, 1), (4, 1)), ((1,), (4,)), ((3, 4), (4, 1)), ((1, 5), (1, 4))])
def test_bytes_are_compared_whatever_the_strides(shape, strides):
    kept = torch.empty_strided(shape, strides, dtype=torch.int32).zero_()
    other = torch.zeros(shape, dtype=torch.int32)
    assert same_bytes(kept, other)
    other.view(-1)[-1] = 1
    assert not same_bytes(kept, other)


@pytest.mark.parametrize("strides", ["strided(8, 1)", "strided(12, 1)", "strided(1, 4)"])
def test_memory_that_is_compared_whole_shows_each_stray_byte(strides, operator):
    one = case(layouts={"x": strides})
    with SharedBuffers(plan_slot(operator(), one), 1, "cpu") as buffers:
        before, out = buffers.slot(0).clone(), buffers.plan.outputs[0]
        buffers.tensor(0, "out").fill_(3)
        assert is_same_outside(before, buffers.slot(0), [out])
        for stray in (0, out.offset - 1, out.offset + out.span, buffers.plan.inputs[0].offset, before.numel() - 1):
            buffers.slot(0)[stray] ^= 1
            assert not is_same_outside(before, buffers.slot(0), [out]), stray
            buffers.slot(0)[stray] ^= 1
