"""What threads do under the TileLang interpreter, against the same computed by PyTorch."""

import sys
from typing import Any

import pytest
import tilelang
import tilelang.language as T
import torch
from raising import raises

from tilegym_db.backends.tilelang_interpreter import InterpretedKernel, KernelFault, NotInterpreted, interpreting


def run(function: Any, *arguments: Any) -> None:
    InterpretedKernel(function)(*arguments)


def scaled(columns: int, threads: int, guarded: bool = True) -> Any:
    """out = 2 x, row by row, for columns that the threads need not divide."""
    rows, stride = T.dynamic("rows"), T.dynamic("stride", "int64")

    @T.prim_func
    def scale(x: T.StridedTensor((rows, columns), (stride, 1), "float32"), out: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, T.ceildiv(columns, threads), threads=threads) as (row, part):
            column = part * threads + T.get_thread_binding(0)
            if column < columns or not guarded:
                out[row, column] = 2.0 * x[row, column]

    return scale


def test_every_block_and_thread_runs_and_a_mask_excludes_threads() -> None:
    x, out = torch.randn(5, 80)[:, :50], torch.full((5, 50), torch.nan)
    run(scaled(50, 32), x, out)
    assert torch.equal(out, 2 * x)


def test_access_outside_of_a_tensor_names_it_with_its_indices() -> None:
    with raises(KernelFault, "index_outside", "scale", "x[0, 50]", "[5, 50]"):
        run(scaled(50, 32, guarded=False), torch.randn(5, 50), torch.empty(5, 50))


def test_store_outside_of_a_tensor_raises_and_keeps_memory() -> None:
    @T.prim_func
    def shifted(out: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            out[T.get_thread_binding(0) - 1] = 1

    memory = torch.zeros(16, dtype=torch.int32)
    with raises(KernelFault, "index_outside", "out[-1]"):
        run(shifted, memory[4:12])
    assert not memory.any()


def test_lanes_that_disagree_about_one_element_raise() -> None:
    @T.prim_func
    def race(out: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=8):
            out[T.get_thread_binding(0) // 2] = T.get_thread_binding(0)

    with raises(KernelFault, "store_conflict", "out"):
        run(race, torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        (torch.randn(5, 50), torch.empty(5, 50, dtype=torch.bfloat16)),
        (torch.randn(5, 51), torch.empty(5, 50)),
        (torch.randn(4, 50), torch.empty(5, 50)),
        (torch.randn(50, 5).T, torch.empty(5, 50)),
        (torch.randn(5, 50), torch.empty(5, 60)[:, :50]),
        (torch.randn(5, 50), torch.empty(250)),
    ],
)
def test_arguments_that_generated_host_code_refuses_are_refused(wrong: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(RuntimeError, match="kernel scale input"):
        run(scaled(50, 32), *wrong)


def test_the_stride_of_an_axis_of_one_element_is_of_no_account() -> None:
    x, out = torch.randn(1, 50), torch.empty(1, 50)
    run(scaled(50, 32), x, out.as_strided((1, 50), (999, 1)))
    assert torch.equal(out, 2 * x)


def test_a_grid_of_no_blocks_is_refused() -> None:
    with raises(KernelFault, "grid_out_of_range"):
        run(scaled(50, 32), torch.randn(0, 50), torch.empty(0, 50))


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 inputs, but 1"):
        run(scaled(50, 32), torch.randn(5, 50))


def test_scalars_take_the_dtype_that_the_kernel_declares() -> None:
    @T.prim_func
    def add(x: T.Tensor((4,), "float32"), addend: T.float32, times: T.int32, out: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            thread = T.get_thread_binding(0)
            out[thread] = x[thread] + addend * T.cast(times, "float32")

    x, out = torch.randn(4), torch.empty(4)
    run(add, x, 0.1, 3, out)
    assert torch.equal(out, x + torch.tensor(0.1) * 3)
    with pytest.raises(RuntimeError, match="times is a float"):
        run(add, x, 0.1, 3.0, out)


@pytest.mark.parametrize("step", [1, 2, 4, 8, 16])
def test_shuffles_move_values_between_the_lanes_of_a_warp(step: int) -> None:
    @T.prim_func
    def shuffled(x: T.Tensor((64,), "int32"), out: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding(0)
            value = T.alloc_var("int32")
            value = x[thread]
            out[0, thread] = T.shfl_xor(value, step)
            out[1, thread] = T.shfl_up(value, step)
            out[2, thread] = T.shfl_down(value, step)
            out[3, thread] = T.shfl_sync(value, step)

    x, out = torch.randint(1000, (64,), dtype=torch.int32), torch.empty(4, 64, dtype=torch.int32)
    run(shuffled, x, out)
    lanes = torch.arange(64)
    up = torch.where(lanes % 32 >= step, lanes - step, lanes)
    down = torch.where(lanes % 32 + step < 32, lanes + step, lanes)
    assert torch.equal(out, torch.stack([x[lanes ^ step], x[up], x[down], x[lanes // 32 * 32 + step]]))


def test_a_warp_adds_up_in_halves_as_the_device_does() -> None:
    @T.prim_func
    def reduced(x: T.Tensor((2, 64), "float32"), out: T.Tensor((3, 2, 64), "float32")):
        with T.Kernel(2, threads=64) as row:
            thread = T.get_thread_binding(0)
            out[0, row, thread] = T.warp_reduce_sum(x[row, thread])
            out[1, row, thread] = T.warp_reduce_max(x[row, thread])
            out[2, row, thread] = T.warp_reduce_min(x[row, thread])

    x, out = torch.randn(2, 64) * 1e4, torch.empty(3, 2, 64)
    run(reduced, x, out)
    warps = x.view(2, 2, 32)
    halves = warps
    for size in (16, 8, 4, 2, 1):
        halves = halves[..., :size] + halves[..., size : 2 * size]
    expected = torch.stack([halves[..., 0], warps.amax(-1), warps.amin(-1)])
    assert torch.equal(out.view(3, 2, 2, 32), expected[..., None].expand(3, 2, 2, 32))


def test_a_shuffle_from_a_lane_that_does_not_take_part_raises() -> None:
    @T.prim_func
    def diverged(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding(0)
            if thread < 20:
                out[thread] = T.shfl_xor(thread, 16)

    with raises(KernelFault, "lane_absent"):
        run(diverged, torch.zeros(32, dtype=torch.int32))


def test_a_barrier_that_some_threads_do_not_reach_raises() -> None:
    @T.prim_func
    def diverged(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding(0)
            if thread < 20:
                T.sync_threads()
                out[thread] = 1

    with raises(KernelFault, "threads_differ"):
        run(diverged, torch.zeros(32, dtype=torch.int32))


def test_shared_memory_is_per_block_and_registers_are_per_thread() -> None:
    @T.prim_func
    def turned(x: T.Tensor((3, 64), "float32"), out: T.Tensor((3, 64), "float32")):
        with T.Kernel(3, threads=(8, 8)) as row:
            lane, group = T.get_thread_binding(0), T.get_thread_binding(1)
            shared = T.alloc_shared((8, 8), "float32")
            own = T.alloc_local((2,), "float32")
            for i in T.unroll(2):
                own[i] = x[row, group * 8 + lane] * (i + 1)
            shared[lane, group] = own[0] + own[1]
            T.sync_threads()
            out[row, group * 8 + lane] = shared[group, lane]

    x, out = torch.randn(3, 64), torch.empty(3, 64)
    run(turned, x, out)
    assert torch.equal(out, (x + 2 * x).view(3, 8, 8).mT.reshape(3, 64))


def test_unwritten_memory_is_nan() -> None:
    @T.prim_func
    def unwritten(out: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=1):
            shared = T.alloc_shared((1,), "float32")
            own = T.alloc_local((1,), "float32")
            out[0] = shared[0]
            out[1] = own[0]

    out = torch.zeros(2)
    run(unwritten, out)
    assert out.isnan().all()


def test_loops_end_for_each_lane_by_itself() -> None:
    @T.prim_func
    def triangle(out: T.Tensor((40,), "int32")):
        with T.Kernel(2, threads=20) as block:
            thread = T.get_thread_binding(0)
            total = T.alloc_var("int32", init=0)
            for i in T.serial(block * 20 + thread):
                if i % 3 != 1:
                    total += i
            out[block * 20 + thread] = total

    out = torch.empty(40, dtype=torch.int32)
    run(triangle, out)
    assert out.tolist() == [sum(i for i in range(n) if i % 3 != 1) for n in range(40)]


def test_a_loop_whose_iterations_need_one_another_runs_in_order() -> None:
    @T.prim_func
    def running(x: T.Tensor((16,), "float32"), out: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=1):
            own = T.alloc_local((16,), "float32")
            for i in T.vectorized(16):
                own[i] = x[i]
            for i in T.unroll(1, 16):
                own[i] += own[i - 1]
            for i in T.vectorized(16):
                out[i] = own[i]

    x, out = torch.randn(16), torch.empty(16)
    run(running, x, out)
    total = torch.zeros(())
    expected = [total := total + value for value in x]
    assert torch.equal(out, torch.stack(expected))


def test_what_is_not_chosen_is_not_read() -> None:
    @T.prim_func
    def guarded(x: T.Tensor((6,), "float32"), out: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=8):
            thread = T.get_thread_binding(0)
            out[0, thread] = T.if_then_else(thread < 6, x[thread], -1.0)
            out[1, thread] = -1.0
            if thread < 6 and x[thread] > 0.0:
                out[1, thread] = 1.0

    x, out = torch.randn(6), torch.empty(2, 8)
    run(guarded, x, out)
    assert torch.equal(out[0], torch.cat([x, -torch.ones(2)]))
    assert torch.equal(out[1], torch.cat([torch.where(x > 0, 1.0, -1.0), -torch.ones(2)]))


def test_a_name_keeps_the_value_that_a_register_had() -> None:
    @T.prim_func
    def swapped(x: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding(0)
            own = T.alloc_local((2,), "float32")
            own[0] = x[0, thread]
            own[1] = x[1, thread]
            first = own[0]
            own[0] = own[1]
            own[1] = first
            x[0, thread] = own[0]
            x[1, thread] = own[1]

    x = torch.randn(2, 32)
    before = x.clone()
    run(swapped, x)
    assert torch.equal(x, before.flip(0))


def test_atomic_additions_count_every_lane_of_every_block() -> None:
    @T.prim_func
    def histogram(ids: T.Tensor((1000,), "int32"), counts: T.Tensor((7,), "int32")):
        with T.Kernel(8, threads=128) as block:
            place = block * 128 + T.get_thread_binding(0)
            shared = T.alloc_shared((7,), "int32")
            if T.get_thread_binding(0) < 7:
                shared[T.get_thread_binding(0)] = 0
            T.sync_threads()
            if place < 1000:
                T.atomic_add(shared[ids[place]], 1)
            T.sync_threads()
            if T.get_thread_binding(0) < 7:
                T.atomic_add(counts[T.get_thread_binding(0)], shared[T.get_thread_binding(0)])

    ids, counts = torch.randint(7, (1000,), dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    run(histogram, ids, counts)
    assert torch.equal(counts, torch.bincount(ids, minlength=7).int())


def test_an_atomic_addition_gives_what_was_there_before() -> None:
    @T.prim_func
    def tickets(counter: T.Tensor((1,), "int32"), out: T.Tensor((64,), "int32")):
        with T.Kernel(2, threads=32) as block:
            out[block * 32 + T.get_thread_binding(0)] = T.atomic_add(counter[0], 1, return_prev=True)

    counter, out = torch.zeros(1, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run(tickets, counter, out)
    assert sorted(out.tolist()) == list(range(64))
    assert counter.item() == 64


def test_an_assumption_that_does_not_hold_raises() -> None:
    size = T.dynamic("size")

    @T.prim_func
    def assuming(x: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=1):
            T.assume(size % 8 == 0)
            x[0] = 0.0

    run(assuming, torch.ones(16))
    with raises(KernelFault, "assumption_failed"):
        run(assuming, torch.ones(12))


def test_a_division_by_zero_raises_where_a_lane_needs_it() -> None:
    @T.prim_func
    def divided(x: T.Tensor((4,), "int32"), out: T.Tensor((4,), "int32"), guarded: T.int32):
        with T.Kernel(1, threads=4):
            thread = T.get_thread_binding(0)
            if x[thread] != 0 or guarded == 0:
                out[thread] = T.truncdiv(12, x[thread])

    x, out = torch.tensor([3, 0, -5, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(divided, x, out, 1)
    assert out.tolist() == [4, 0, -2, 12]
    with raises(KernelFault, "division_by_zero"):
        run(divided, x, out, 0)


def test_an_operation_without_a_rule_is_named() -> None:
    @T.prim_func
    def voted(out: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            out[T.get_thread_binding(0)] = T.any_sync(T.get_thread_binding(0) > 3)

    with raises(NotInterpreted, "not_interpreted", "voted", "tl.any_sync"):
        InterpretedKernel(voted)


def test_factories_give_interpreted_kernels_until_the_end() -> None:
    factory = sys.modules["tilelang.jit"].JITImpl
    compile_ = factory.compile

    @tilelang.jit
    def doubled(columns):  # type: ignore[no-untyped-def]
        return scaled(columns, 32)

    x, out = torch.randn(3, 40), torch.empty(3, 40)
    with interpreting():
        doubled(40)(x, out)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert torch.equal(out, 2 * x)
    assert factory.compile is compile_
