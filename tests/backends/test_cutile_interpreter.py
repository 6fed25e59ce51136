"""cuTile kernels interpreted on CPU tensors, against PyTorch and against Python's own integers."""

from __future__ import annotations

import importlib.util
import itertools
import operator

import numpy as np
import pytest
import torch

ct = pytest.importorskip("cuda.tile")

from raising import raises  # noqa: E402

from tilegym_db.backends.cutile_interpreter import interpreting, tiles, writer  # noqa: E402
from tilegym_db.errors import SolutionError  # noqa: E402

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
Size = ct.Constant[int]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """Launches run here, and every value has the type that cuTile gave it and a shape that repeats to its own."""
    result = writer.Writer.result

    def checked(self, op, text):
        result(self, op, text)
        kind = op.result_var.get_type()
        if hasattr(kind, "shape") and not kind.dtype.name.startswith("pointer") and len(self._regions) == 0:
            wanted = np.dtype(tiles.host_dtype(kind.dtype.name))

            def check(value):
                assert value.dtype == wanted, (op.op, getattr(op, "fn", ""), value.dtype, wanted)
                assert np.broadcast_shapes(value.shape, kind.shape) == tuple(kind.shape), (op.op, value.shape)

            lines = self._lines if self._lines and self._lines[-1].strip().startswith(self.of(op.result_var)) else None
            (lines if lines is not None else self._early).append(
                f"{'        ' if lines is not None else '    '}{self.object(check)}({self.of(op.result_var)})"
            )

    monkeypatch.setattr(writer.Writer, "result", checked)
    with interpreting():
        yield


def run(kernel, *arguments, grid=(1,)):
    ct.launch(None, grid, kernel, arguments)


SOURCE = """
import cuda.tile as ct

@ct.kernel
def one(x, result, SIZE: ct.Constant[int]):
    at = ct.arange(SIZE, dtype=ct.int32)
    a = ct.gather(x, at)
    ct.scatter(result, at, ct.astype({expression}, result.dtype))

@ct.kernel
def two(x, y, result, SIZE: ct.Constant[int]):
    at = ct.arange(SIZE, dtype=ct.int32)
    a = ct.gather(x, at)
    b = ct.gather(y, at)
    ct.scatter(result, at, ct.astype({expression}, result.dtype))
"""


@pytest.fixture
def elementwise(tmp_path):
    """The value of an expression of ``a`` and ``b``, tiles that hold the inputs whole."""

    def call(expression, *inputs, out):
        path = tmp_path / f"kernels_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(SOURCE.format(expression=expression))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = torch.zeros(16, dtype=out)
        run((module.one, module.two)[len(inputs) - 1], *inputs, result, 16)
        return result

    return call


def drawn(dtype, *, low=-100, high=100):
    generator = torch.Generator().manual_seed(int(dtype.itemsize))
    if dtype.is_floating_point:
        return (torch.rand(16, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
    limits = torch.iinfo(dtype)
    values = torch.randint(max(low, limits.min), min(high, limits.max) + 1, (16,), generator=generator)
    return values.to(dtype)


# -- arithmetic ------------------------------------------------------------------------------------------------------

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(elementwise, name, dtype):
    x, y = drawn(dtype, low=-(2**40), high=2**40), drawn(dtype).flip(0)
    found = elementwise(f"a {name} b", x, y, out=dtype)
    torch.testing.assert_close(found, OPERATIONS[name](x, y), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_division_and_remainder_of_integers_are_those_of_python(elementwise, dtype):
    x = torch.tensor([-7, -6, -1, 0, 1, 6, 7, 8] * 2, dtype=dtype)
    y = torch.tensor([3] * 8 + [-3] * 8, dtype=dtype)
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    expected = {
        "//": [a // b for a, b in pairs],
        "%": [a % b for a, b in pairs],
        "cdiv": [-(-a // b) for a, b in pairs],
    }
    assert elementwise("a // b", x, y, out=dtype).tolist() == expected["//"]
    assert elementwise("a % b", x, y, out=dtype).tolist() == expected["%"]
    assert elementwise("ct.cdiv(a, b)", x, y, out=dtype).tolist() == expected["cdiv"]


@pytest.mark.parametrize(
    ("left", "right"), [*itertools.combinations_with_replacement((*INTEGERS, *FLOATS), 2)], ids=str
)
def test_operands_are_promoted_before_they_are_added(elementwise, left, right):
    x, y = drawn(left), drawn(right)
    try:
        found = elementwise("a + b", x, y, out=torch.float64)
    except ct.TileTypeError:  # the compiler wants a cast, as of bfloat16 with float16
        assert {left, right} == {torch.float16, torch.bfloat16} or torch.uint8 in (left, right)
        return
    torch.testing.assert_close(found, (x + y).double(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_float_operation_rounds_once(elementwise, dtype):
    x, y = drawn(dtype), drawn(dtype).flip(0)
    for name, operation in (OPERATIONS | {"/": operator.truediv}).items():
        found = elementwise(f"a {name} b", x, y, out=dtype)
        torch.testing.assert_close(found, operation(x, y), rtol=0, atol=0)


def test_a_constant_takes_the_type_of_the_tile(elementwise):
    x = drawn(torch.bfloat16)
    found = elementwise("a * 0.1 + 1", x, out=torch.float32)
    # One rounding of the fused product and sum; the constant is rounded to bfloat16 first.
    expected = (x.double() * torch.tensor(0.1).bfloat16().double() + 1).float().bfloat16().float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


UNARY = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "abs": torch.abs,
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_float32_are_accurate(elementwise, name):
    x = drawn(torch.float32, low=0.01, high=9)
    torch.testing.assert_close(elementwise(f"ct.{name}(a)", x, out=torch.float32), UNARY[name](x))


def test_products_and_sums_are_contracted_as_by_the_compiler(elementwise):
    x = torch.full((16,), 1 + 2.0**-12)
    found = elementwise("a * a - 1.0", x, out=torch.float32)
    assert found[0].item() == (1 + 2.0**-12) ** 2 - 1  # the last bit of the square would be lost


def test_comparisons_with_nan_are_false_but_for_unequal(elementwise):
    x = torch.full((16,), float("nan"))
    assert not elementwise("(a == a) | (a < a) | (a >= a)", x, out=torch.bool).any()
    assert elementwise("a != a", x, out=torch.bool).all()


def test_minimum_and_maximum_omit_nan_unless_asked_to_keep_it(elementwise):
    x = torch.tensor([1.0, float("nan")] * 8)
    assert elementwise("ct.maximum(a, 0.5)", x, out=torch.float32)[:2].tolist() == [1.0, 0.5]
    assert elementwise("ct.minimum(a, 0.5, propagate_nan=True)", x, out=torch.float32)[1].isnan()


def test_bits_are_shifted_and_masked(elementwise):
    x = drawn(torch.int32, low=-(2**31), high=2**31 - 1)
    found = elementwise("((a >> 3) & 0xFF) | (a << 28) ^ 5", x, out=torch.int32)
    assert found.tolist() == (((x >> 3) & 0xFF) | (x << 28) ^ 5).tolist()
    assert elementwise("~a", x, out=torch.int32).tolist() == (~x).tolist()


# -- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_rounds_to_nearest_even(elementwise, dtype):
    x = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 1e-40, 65504.1, -0.0, 3.1, -1e30, float("inf")] * 2)
    torch.testing.assert_close(elementwise("a", x, out=dtype), x.to(dtype), rtol=0, atol=0)
    assert elementwise("a", torch.full((16,), float("nan")), out=dtype).isnan().all()


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_cast_to_eight_bits_saturates(elementwise, dtype):
    most = torch.finfo(dtype).max
    x = torch.tensor([0.0, 1e-9, 0.3, -17.2, most, most * 1.5, -1e30, float("inf")] * 2)
    found = elementwise("a", x, out=dtype)
    assert found.view(torch.uint8).tolist() == x.clamp(-most, most).to(dtype).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *EIGHT_BITS, torch.float16], ids=str)
def test_a_cast_from_a_narrow_float_is_exact(elementwise, dtype):
    x = drawn(torch.float32, low=-3, high=3).to(dtype)
    torch.testing.assert_close(elementwise("a", x, out=torch.float32), x.float(), rtol=0, atol=0)


def test_a_cast_to_an_integer_cuts_the_fraction_off(elementwise):
    x = torch.tensor([-1.9, -0.5, 0.5, 1.9, 1e6, -1e6, 2.0, 3.5] * 2)
    assert elementwise("a", x, out=torch.int32).tolist() == x.int().tolist()


def test_a_bitcast_keeps_every_bit(elementwise):
    x = drawn(torch.int32, low=-(2**31), high=2**31 - 1)
    found = elementwise("ct.bitcast(ct.bitcast(a, ct.float32), ct.int32)", x, out=torch.int32)
    assert found.tolist() == x.tolist()
    codes = torch.tensor([0, 1, 0x3F80, -(1 << 15), 0x7F80, -128, 77, -5] * 2, dtype=torch.int16)
    found = elementwise("ct.bitcast(ct.bitcast(a, ct.bfloat16), ct.int16)", codes, out=torch.int16)
    assert found.tolist() == codes.tolist()
    eight = torch.arange(16, dtype=torch.uint8) * 15
    found = elementwise("ct.bitcast(a, ct.float8_e4m3fn)", eight, out=torch.float32)
    torch.testing.assert_close(found, eight.view(torch.float8_e4m3fn).float(), rtol=0, atol=0)


# -- shapes, reductions, products ------------------------------------------------------------------------------------


@ct.kernel
def _reduced(x, sums, tops, places, scans, product):
    tile = ct.load(x, (0, 0), (8, 16))
    at = ct.arange(8, dtype=ct.int32)
    ct.scatter(sums, at, ct.sum(tile, axis=1))
    ct.scatter(tops, at, ct.max(tile, axis=1))
    ct.scatter(places, at, ct.argmax(tile, axis=1))
    ct.store(scans, (0, 0), ct.cumsum(tile, axis=1, reverse=True))
    ct.store(product, (0, 0), ct.mma(tile, ct.transpose(tile), ct.full((8, 8), 1.0, ct.float32)))


def test_reductions_scans_and_products_of_tiles():
    x = torch.randint(-9, 9, (8, 16), generator=torch.Generator().manual_seed(3)).float()
    sums, tops, places = torch.zeros(8), torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    scans, product = torch.zeros(8, 16), torch.zeros(8, 8)
    run(_reduced, x, sums, tops, places, scans, product)
    assert sums.tolist() == x.sum(1).tolist()
    assert tops.tolist() == x.amax(1).tolist()
    assert places.tolist() == [row.index(max(row)) for row in x.int().tolist()]  # the first of equals
    assert scans.tolist() == x.flip(1).cumsum(1).flip(1).tolist()
    assert product.tolist() == (x @ x.T + 1).tolist()


@ct.kernel
def _best(keys, values, out):
    def better(key, value, other_key, other_value):
        first = (key > other_key) | ((key == other_key) & (value < other_value))
        return ct.where(first, key, other_key), ct.where(first, value, other_value)

    at = ct.arange(16, dtype=ct.int32)
    pair = (ct.gather(keys, at), ct.gather(values, at))
    key, value = ct.reduce(pair, 0, better, (-1000, 1000))
    ct.scatter(out, 0, key)
    ct.scatter(out, 1, value)
    part = ct.extract(pair[0], (1,), (4,))
    ct.scatter(out, ct.arange(4, dtype=ct.int32) + 2, part)
    turned = ct.permute(ct.reshape(pair[1], (2, 8)), (1, 0))
    ct.scatter(out, ct.arange(16, dtype=ct.int32) + 6, ct.reshape(turned, (16,)))


def test_a_reduction_by_a_function_of_pairs_and_parts_of_tiles():
    keys = torch.tensor([3, 9, 9, 1] * 4, dtype=torch.int32)
    values = torch.arange(16, dtype=torch.int32).flip(0).contiguous()
    out = torch.zeros(22, dtype=torch.int32)
    run(_best, keys, values, out)
    assert out[:2].tolist() == [9, 1]
    assert out[2:6].tolist() == keys[4:8].tolist()
    assert out[6:].tolist() == values.view(2, 8).T.reshape(-1).tolist()


# -- control flow ----------------------------------------------------------------------------------------------------


@ct.kernel
def _collatz(starts, steps):
    block = ct.bid(0)
    value = ct.gather(starts, block)
    count = 0
    while value != 1:
        if value % 2 == 0:  # noqa: SIM108 - a branch of the kernel is what is tried
            value = value // 2
        else:
            value = value * 3 + 1
        count += 1
        if count >= 50:
            break
    total = 0
    for turn in range(block, ct.num_blocks(0)):
        total = total + turn
    ct.scatter(steps, (block, 0), count)
    ct.scatter(steps, (block, 1), total)


def test_loops_and_branches_follow_the_values():
    starts = torch.arange(1, 11, dtype=torch.int32)
    steps = torch.zeros(10, 2, dtype=torch.int32)
    run(_collatz, starts, steps, grid=(10,))

    def length(value, count=0):
        while value != 1 and count < 50:
            value, count = (value // 2 if value % 2 == 0 else value * 3 + 1), count + 1
        return count

    assert steps[:, 0].tolist() == [length(value) for value in range(1, 11)]
    assert steps[:, 1].tolist() == [sum(range(block, 10)) for block in range(10)]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_not_interpreted_is_refused_by_name():
    @ct.kernel
    def kernel(array):
        view = array.tiled_view((16,))
        view.atomic_store_add((0,), view.load((0,)))

    with raises(SolutionError, "not_interpreted", "tile_atomic_red_view"):
        run(kernel, torch.zeros(16, dtype=torch.int32))


def test_tiles_that_overlap_and_their_bytes():
    @ct.kernel
    def kernel(array, out, codes):
        tile = array.tiled_view((8,), traversal_steps=(4,)).load((ct.bid(0),))
        out.tiled_view((8,)).store((ct.bid(0),), tile)
        packed = ct.pack_to_bytes(tile)
        ct.store(codes, (ct.bid(0),), ct.unpack_from_bytes(packed, ct.int16))

    array, out = torch.arange(16).bfloat16(), torch.zeros(24, dtype=torch.bfloat16)
    codes = torch.zeros(24, dtype=torch.int16)
    run(kernel, array, out, codes, grid=(3,))
    expected = torch.cat([array[0:8], array[4:12], array[8:16]])
    assert out.tolist() == expected.tolist()
    assert codes.tolist() == expected.view(torch.int16).tolist()


def test_an_assertion_of_the_kernel_fails_the_launch():
    @ct.kernel
    def kernel(array):
        ct.assert_(ct.gather(array, 0) > 0, "positive")  # noqa: PT009 - the kernel's

    run(kernel, torch.ones(1))
    with raises(SolutionError, "assertion_failed", "positive"):
        run(kernel, torch.zeros(1))
