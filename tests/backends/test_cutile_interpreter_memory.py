"""How interpreted cuTile kernels reach memory: edges, strides, padding, atomic updates, and what blocks do to each other."""

from __future__ import annotations

import pytest
import torch

ct = pytest.importorskip("cuda.tile")

from raising import raises  # noqa: E402

from tilegym_db.backends.cutile_interpreter import interpreting  # noqa: E402
from tilegym_db.errors import SolutionError  # noqa: E402

Size = ct.Constant[int]


@pytest.fixture(autouse=True)
def _interpreted():
    with interpreting():
        yield


def run(kernel, *arguments, grid=(1,)):
    ct.launch(None, grid, kernel, arguments)


@ct.kernel
def _gathered(source, rows, columns, out, SIZE: Size):
    at = ct.arange(SIZE, dtype=ct.int32)
    i, j = ct.gather(rows, at), ct.gather(columns, at)
    ct.scatter(out, at, ct.gather(source, (i, j), padding_value=-1, mask=i != 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32], ids=str)
def test_a_gather_outside_of_the_array_gives_the_padding(dtype):
    source = torch.arange(12).view(3, 4).float().to(dtype)
    rows = torch.tensor([0, 1, 2, 3, -1, 1, 1, 0], dtype=torch.int32)
    columns = torch.tensor([0, 3, 1, 0, 0, 4, -1, 2], dtype=torch.int32)
    out = torch.zeros(8, dtype=dtype)
    run(_gathered, source, rows, columns, out, 8)
    assert out.float().tolist() == [0, 7, -1, -1, -1, -1, -1, 2]


@ct.kernel
def _scattered(out, rows, columns, SIZE: Size):
    at = ct.arange(SIZE, dtype=ct.int32)
    i, j = ct.gather(rows, at), ct.gather(columns, at)
    ct.scatter(out, (i, j), at + 1, mask=at != 1)


def test_scatter_outside_of_the_array_or_its_slice_is_dropped():
    whole = torch.zeros(6, 10, dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 3, -1, 1, 1, 0], dtype=torch.int32)
    columns = torch.tensor([0, 3, 1, 0, 0, 4, -1, 2], dtype=torch.int32)
    run(_scattered, whole[2:5, 1:9:2], rows, columns, 8)
    expected = torch.zeros(6, 10, dtype=torch.int32)
    expected[2, 1], expected[4, 3], expected[2, 5] = 1, 3, 8
    assert whole.tolist() == expected.tolist()


@ct.kernel
def _tiled(source, out, MODE: Size):
    i, j = ct.bid(0), ct.bid(1)
    if MODE == 0:
        tile = ct.load(source, (j, i), (4, 2), order=(1, 0), padding_mode=ct.PaddingMode.ZERO)
    elif MODE == 1:
        tile = ct.load(source, (j, i), (4, 2), order=(1, 0), padding_mode=ct.PaddingMode.NEG_INF)
    else:
        tile = ct.load(source, (j, i), (4, 2), order=(1, 0))
    ct.store(out, (j, i), tile)


@pytest.mark.parametrize(("mode", "padding"), [(0, 0.0), (1, -float("inf")), (2, None)])
def test_tile_past_the_array_end_is_padded_with_visible_garbage(mode, padding):
    source = torch.arange(15).view(5, 3).float().T.contiguous().T  # columns lie together
    out = torch.full((4, 6), 99.0)
    run(_tiled, source, out, mode, grid=(3, 1))
    assert out[:3, :5].tolist() == source.T.tolist()
    filled = torch.cat([out[3, :], out[:, 5]])
    assert filled.isnan().all() if padding is None else filled.tolist() == [padding] * 10
    partly = torch.full((3, 5), 99.0)
    run(_tiled, source, partly, mode, grid=(3, 1))
    assert partly.tolist() == source.T.tolist()


def test_a_tile_outside_of_the_array_has_no_defined_result():
    with raises(SolutionError, "tile_outside"):
        run(_tiled, torch.zeros(5, 3), torch.zeros(4, 6), 0, grid=(4, 1))


@ct.kernel
def _added(arrays, out, SIZE: Size):
    at = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    total = ct.zeros((SIZE,), dtype=ct.float32)
    for array in ct.static_iter(arrays):
        total = total + ct.gather(array, at)
    ct.scatter(out, at, total)


def test_tuples_of_arrays_and_arrays_inside_of_a_storage():
    base = torch.arange(40).float()
    views = (base[3:23], base[20:40], base[0:40:2])
    out = torch.zeros(20)
    run(_added, views, out, 8, grid=(3,))
    assert out.tolist() == sum(views).tolist()


@ct.kernel
def _counted(keys, counts, places, SIZE: Size):
    at = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    key = ct.gather(keys, at, padding_value=-1)
    ct.scatter(places, at, ct.atomic_add(counts, key, 1))


def test_atomic_updates_of_one_element_add_up_in_some_order():
    keys = torch.tensor([0, 2, 2, 1, 2, 0, 7, 2, 2, 1], dtype=torch.int32)
    counts, places = torch.zeros(4, dtype=torch.int32), torch.full((10,), -1, dtype=torch.int32)
    run(_counted, keys, counts, places, 4, grid=(3,))
    assert counts.tolist() == [2, 2, 5, 0]
    assert sorted(places[keys == 2].tolist()) == [0, 1, 2, 3, 4]


# -- blocks that are in each other's way -----------------------------------------------------------------------------


@ct.kernel
def _same_place(out):
    ct.scatter(out, 0, ct.bid(0) // 2)


def test_blocks_that_write_one_element_differently_are_an_error():
    out = torch.full((1,), 7, dtype=torch.int32)
    run(_same_place, out, grid=(2,))  # both write 0
    assert out.tolist() == [0]
    with raises(SolutionError, "blocks_race"):
        run(_same_place, out, grid=(3,))


@ct.kernel
def _shifted(x, STEP: Size):
    block = ct.bid(0)
    ct.scatter(x, block, ct.gather(x, block + STEP, padding_value=0) + 1)


@pytest.mark.parametrize("step", [1, -1])
def test_a_block_that_reads_what_another_one_writes_is_an_error(step):
    run(_shifted, torch.arange(4), 0, grid=(4,))
    with raises(SolutionError, "blocks_race"):
        run(_shifted, torch.arange(4), step, grid=(4,))


@ct.kernel
def _twice(out, SIZE: Size):
    at = ct.arange(SIZE, dtype=ct.int32)
    ct.scatter(out, at // 2, at)


def test_scatter_of_different_values_to_one_element_is_an_error():
    with raises(SolutionError, "store_conflict"):
        run(_twice, torch.zeros(4, dtype=torch.int32), 8)


@ct.kernel
def _unchecked(x, out, AT: Size):
    ct.scatter(out, 0, ct.gather(x, AT, check_bounds=False))


def test_an_unchecked_index_outside_of_the_memory_is_an_error():
    with raises(SolutionError, "index_outside"):
        run(_unchecked, torch.zeros(4), torch.zeros(1), 4)
