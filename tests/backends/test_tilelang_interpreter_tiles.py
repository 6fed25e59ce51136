"""Operators on tiles under the TileLang interpreter, against the same computed by PyTorch."""

from typing import Any

import pytest
import tilelang.language as T
import torch
from raising import raises

from tilegym_db.backends.tilelang_interpreter import InterpretedKernel, KernelFault, NotInterpreted


def run(function: Any, *arguments: Any) -> None:
    InterpretedKernel(function)(*arguments)


def product(turn_a: bool, turn_b: bool, dtype: str, block: int, depth: int) -> Any:
    """out = a b by tiles of any of their layouts; sizes that the tiles need not divide."""
    M, N, K = T.dynamic("M N K")

    @T.prim_func
    def multiply(
        a: T.Tensor((K, M) if turn_a else (M, K), dtype),
        b: T.Tensor((N, K) if turn_b else (K, N), dtype),
        out: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, block), T.ceildiv(N, block), threads=128) as (m, n):
            a_tile = T.alloc_shared((depth, block) if turn_a else (block, depth), dtype)
            b_tile = T.alloc_shared((block, depth) if turn_b else (depth, block), dtype)
            sums = T.alloc_fragment((block, block), "float32")
            T.clear(sums)
            for k in T.Pipelined(T.ceildiv(K, depth), num_stages=2):
                if turn_a:
                    T.copy(a[k * depth, m * block], a_tile)
                else:
                    T.copy(a[m * block, k * depth], a_tile)
                if turn_b:
                    T.copy(b[n * block, k * depth], b_tile)
                else:
                    T.copy(b[k * depth, n * block], b_tile)
                T.gemm(a_tile, b_tile, sums, transpose_A=turn_a, transpose_B=turn_b)
            T.copy(sums, out[m * block, n * block])

    return multiply


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(("turn_a", "turn_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_products_of_every_layout_with_edges_of_zeros(turn_a: bool, turn_b: bool, dtype: str) -> None:
    a, b = (torch.randint(-4, 5, shape).to(getattr(torch, dtype)) for shape in ((40, 72), (72, 50)))
    out = torch.full((40, 50), torch.nan)
    given = (a.T.contiguous() if turn_a else a, b.T.contiguous() if turn_b else b)
    run(product(turn_a, turn_b, dtype, 32, 32), *given, out)
    assert torch.equal(out, a.float() @ b.float())


def test_float32_product_is_refused_because_a_device_rounds_it() -> None:
    with raises(NotInterpreted, "not_interpreted", "tf32"):
        run(product(False, False, "float32", 32, 32), torch.ones(32, 32), torch.ones(32, 32), torch.empty(32, 32))


def test_a_copy_converts_cuts_and_skips_axes_of_one() -> None:
    @T.prim_func
    def copied(x: T.Tensor((3, 20, 20), "float32"), out: T.Tensor((20, 20), "bfloat16")):
        with T.Kernel(2, 2, threads=32) as (i, j):
            tile = T.alloc_fragment((16, 16), "bfloat16")
            T.copy(x[2, i * 16, j * 16], tile)
            T.copy(tile, out[i * 16, j * 16])

    x, out = torch.randn(3, 20, 20), torch.zeros(20, 20, dtype=torch.bfloat16)
    run(copied, x, out)
    assert torch.equal(out, x[2].bfloat16())


def test_a_tile_beyond_a_tensor_is_zero() -> None:
    @T.prim_func
    def beyond(x: T.Tensor((20,), "float32"), out: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((16,), "float32")
            T.copy(x[12], tile)
            T.copy(tile, out)

    x, out = torch.randn(20), torch.empty(16)
    run(beyond, x, out)
    assert torch.equal(out, torch.cat([x[12:], torch.zeros(8)]))


def test_a_tile_beyond_shared_memory_raises() -> None:
    @T.prim_func
    def beyond(x: T.Tensor((32,), "float32"), at: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((24,), "float32")
            T.copy(x[0:16], tile[at : at + 16])

    run(beyond, torch.randn(32), 8)
    with raises(KernelFault, "index_outside", "writes tile"):
        run(beyond, torch.randn(32), 9)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "abssum", "absmax"])
def test_reductions_along_each_axis(kind: str, axis: int) -> None:
    @T.prim_func
    def reduced(x: T.Tensor((16, 8), "float32"), out: T.Tensor((8 if axis == 0 else 16,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((16, 8), "float32")
            found = T.alloc_fragment((8 if axis == 0 else 16,), "float32")
            T.copy(x, tile)
            getattr(T, f"reduce_{kind}")(tile, found, dim=axis)
            T.copy(found, out)

    x = torch.randint(-9, 9, (16, 8)).float()
    out = torch.empty(8 if axis == 0 else 16)
    run(reduced, x, out)
    of = x.abs() if kind.startswith("abs") else x
    assert torch.equal(out, {"sum": of.sum, "max": of.amax, "min": of.amin}[kind.removeprefix("abs")](axis))


def test_reduction_without_clear_continues_from_its_output() -> None:
    @T.prim_func
    def reduced(x: T.Tensor((3, 16, 8), "float32"), out: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((16, 8), "float32")
            found = T.alloc_fragment((16,), "float32")
            T.fill(found, 100.0)
            for part in T.serial(3):
                T.copy(x[part, 0, 0], tile)
                T.reduce_sum(tile, found, dim=1, clear=False)
            T.copy(found, out)

    x, out = torch.randint(-9, 9, (3, 16, 8)).float(), torch.empty(16)
    run(reduced, x, out)
    assert torch.equal(out, 100 + x.sum((0, 2)))


def test_parallel_loops_share_tiles_and_read_what_threads_share() -> None:
    rows = T.dynamic("rows")

    @T.prim_func
    def softmax(
        x: T.Tensor((rows, 48), "float32"), first: T.Tensor((1,), "int32"), out: T.Tensor((rows, 48), "float32")
    ):
        with T.Kernel(T.ceildiv(rows, 4), threads=64) as block:
            tile = T.alloc_fragment((4, 64), "float32")
            top = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((4,), "float32")
            start = T.alloc_var("int32")
            start = block * 4 + first[0]
            for i, j in T.Parallel(4, 64):
                tile[i, j] = T.if_then_else(start + i < rows and j < 48, x[start + i, j], -T.infinity("float32"))
            T.reduce_max(tile, top, dim=1)
            for i, j in T.Parallel(4, 64):
                tile[i, j] = T.exp(tile[i, j] - top[i])
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(4, 64):
                if start + i < rows and j < 48:
                    out[start + i, j] = tile[i, j] / total[i]

    x, out = torch.randn(10, 48), torch.empty(10, 48)
    run(softmax, x, torch.zeros(1, dtype=torch.int32), out)
    torch.testing.assert_close(out, x.softmax(-1), rtol=1e-6, atol=1e-8)


def test_a_parallel_loop_over_what_threads_disagree_on_raises() -> None:
    @T.prim_func
    def mixed(out: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_var("int32")
            own = T.get_thread_binding(0)
            for i in T.Parallel(16):
                out[i] = own + i

    with raises(KernelFault, "threads_differ", "own"):
        run(mixed, torch.zeros(16, dtype=torch.int32))


def test_registers_written_in_shared_loops_are_refused() -> None:
    @T.prim_func
    def kept(x: T.Tensor((16,), "float32"), out: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((16,), "float32")
            for i in T.Parallel(16):
                own[i] = x[i]
            for i in T.Parallel(16):
                out[i] = own[i]

    with raises(NotInterpreted, "not_interpreted", "own"):
        run(kept, torch.randn(16), torch.empty(16))


def test_a_sum_into_one_element_by_a_parallel_loop_raises() -> None:
    @T.prim_func
    def summed(x: T.Tensor((16,), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                out[0] = out[0] + x[i]

    with raises(KernelFault, "store_conflict", "out"):
        run(summed, torch.randn(16), torch.zeros(1))


def test_blocks_walk_over_tiles_each_as_long_as_it_has_some() -> None:
    @T.prim_func
    def walked(x: T.Tensor((50,), "float32"), used: T.Tensor((1,), "int32"), out: T.Tensor((50,), "float32")):
        with T.Kernel(3, threads=32) as block:
            tile = T.alloc_shared((8,), "float32")
            for wave in T.serial(T.ceildiv(7, 3)):
                index = wave * 3 + block
                if index < used[0]:
                    T.copy(x[index * 8], tile)
                    for i in T.Parallel(8):
                        if index * 8 + i < 50:
                            out[index * 8 + i] = tile[i] + 1.0

    x, out = torch.randn(50), torch.zeros(50)
    run(walked, x, torch.tensor([5], dtype=torch.int32), out)
    assert torch.equal(out, torch.where(torch.arange(50) < 40, x + 1, 0))


@pytest.mark.parametrize("columns", [256, 288])  # eight tiles, which are one group, and nine
def test_persistent_blocks_reach_every_tile_once(columns: int) -> None:
    @T.prim_func
    def counted(x: T.Tensor((64, columns), "float32"), out: T.Tensor((64, columns), "float32")):
        with T.Kernel(3, threads=32) as block:
            tile = T.alloc_fragment((16, 32), "float32")
            for m, n in T.Persistent([T.ceildiv(64, 16), T.ceildiv(columns, 32)], 3, block):
                T.copy(x[m * 16, n * 32], tile)
                for i, j in T.Parallel(16, 32):
                    out[m * 16 + i, n * 32 + j] += tile[i, j]

    x, out = torch.randn(64, columns), torch.zeros(64, columns)
    run(counted, x, out)
    assert torch.equal(out, x)
