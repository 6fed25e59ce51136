"""Numbers under the TileLang interpreter: each operation rounds as the device rounds it."""

import math
from typing import Any

import pytest
import tilelang.language as T
import torch

from tilegym_db.backends.tilelang_interpreter import InterpretedKernel


def mapped(expression: Any, out_dtype: str, *inputs: torch.Tensor) -> torch.Tensor:
    """An expression of the elements of tensors, an element a thread."""
    count = inputs[0].numel()
    names = [str(x.dtype).removeprefix("torch.") for x in inputs]
    if len(inputs) == 1:

        @T.prim_func
        def one(x: T.Tensor((count,), names[0]), out: T.Tensor((count,), out_dtype)):
            with T.Kernel(1, threads=count):
                out[T.get_thread_binding(0)] = expression(x[T.get_thread_binding(0)])

        function = one
    else:

        @T.prim_func
        def two(x: T.Tensor((count,), names[0]), y: T.Tensor((count,), names[1]), out: T.Tensor((count,), out_dtype)):
            with T.Kernel(1, threads=count):
                out[T.get_thread_binding(0)] = expression(x[T.get_thread_binding(0)], y[T.get_thread_binding(0)])

        function = two
    out = torch.empty(count, dtype=getattr(torch, out_dtype))
    InterpretedKernel(function)(*inputs, out)
    return out


_EDGES = [0.0, -0.0, 1.0, 1 + 2**-9, 1 + 3 * 2**-9, -1.5, 447.0, 464.0, 465.0, 1e5, -1e9, 3e38, 1e-8, -1e-40]
FLOATS = torch.cat([torch.tensor([*_EDGES, torch.inf, -torch.inf]), torch.randn(48) * 30])


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_round_to_nearest_even(dtype: str) -> None:
    assert same(mapped(lambda x: T.cast(x, dtype), dtype, FLOATS), FLOATS.to(getattr(torch, dtype)))


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_casts_to_eight_bits_saturate(dtype: str, most: float) -> None:
    expected = FLOATS.clamp(-most, most).to(getattr(torch, dtype))
    assert same(mapped(lambda x: T.cast(x, dtype), dtype, FLOATS), expected)
    assert mapped(lambda x: T.cast(x, dtype), dtype, torch.tensor([math.nan] * 2)).float().isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_casts_to_float32_are_exact_for_every_code(dtype: str) -> None:
    narrow = getattr(torch, dtype)
    codes = torch.arange(256, dtype=torch.uint8) if narrow.itemsize == 1 else torch.arange(0, 2**15, 32).to(torch.int16)
    x = codes.view(narrow)
    found = mapped(lambda x: T.cast(x, "float32"), "float32", x)
    assert torch.equal(found.isnan(), x.float().isnan())
    assert torch.equal(found.nan_to_num(), x.float().nan_to_num())


def test_bfloat16_arithmetic_rounds_every_operation() -> None:
    x, y = torch.randn(2, 64).bfloat16()
    found = mapped(lambda x, y: x * y + x, "bfloat16", x, y)
    assert torch.equal(found, x * y + x)
    assert not torch.equal(found, (x.double() * y.double() + x.double()).bfloat16())


def test_float_to_integer_cuts_toward_zero_and_saturates() -> None:
    x = torch.tensor([1.9, -1.9, 3e9, -3e9, math.nan, math.inf, -math.inf, 2147483520.0])
    found = mapped(lambda x: T.cast(x, "int32"), "int32", x)
    assert found.tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31), 2147483520]


def test_integers_wrap_around_and_divide_both_ways() -> None:
    x = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31)], dtype=torch.int32)
    y = torch.tensor([3, 3, -3, -3, 2, 3], dtype=torch.int32)
    assert mapped(lambda x, y: x * 65537 + y, "int32", x, y).tolist() == (x * 65537 + y).tolist()
    assert mapped(lambda x, y: x // y, "int32", x, y).tolist() == (x // y).tolist()
    assert mapped(lambda x, y: x % y, "int32", x, y).tolist() == (x % y).tolist()
    assert torch.equal(mapped(T.truncdiv, "int32", x, y), torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(mapped(T.truncmod, "int32", x, y), torch.fmod(x, y))
    assert torch.equal(mapped(lambda x: x // 8, "int32", x), x // 8)
    assert torch.equal(mapped(lambda x: x % 8, "int32", x), x % 8)


def test_shifts_and_bits_are_those_of_the_dtype() -> None:
    x = torch.tensor([1, -1, 2**31 - 1, -(2**31), 12345], dtype=torch.int32)
    assert torch.equal(mapped(lambda x: (x << 5) ^ (x >> 3), "int32", x), (x << 5) ^ (x >> 3))
    unsigned = mapped(lambda x: T.cast(T.cast(x, "uint32") >> 3, "int32"), "int32", x)
    assert unsigned.tolist() == [(value % 2**32) >> 3 for value in x.tolist()]


def test_reinterpreting_keeps_the_bits() -> None:
    assert torch.equal(mapped(lambda x: T.reinterpret(x, "int32"), "int32", FLOATS), FLOATS.view(torch.int32))
    assert same(mapped(lambda x: T.reinterpret(T.reinterpret(x, "int32"), "float32"), "float32", FLOATS), FLOATS)


def test_maxima_pass_over_nan_and_comparisons_with_it_fail() -> None:
    x, y = torch.tensor([math.nan, 1.0, math.nan, 2.0]), torch.tensor([1.0, math.nan, math.nan, 3.0])
    found = mapped(T.max, "float32", x, y)
    assert found.nan_to_num(-1.0).tolist() == [1.0, 1.0, -1.0, 3.0]
    assert mapped(lambda x, y: T.cast(x < y, "int32"), "int32", x, y).tolist() == [0, 0, 0, 1]
    assert mapped(lambda x: T.cast(T.isnan(x), "int32"), "int32", x).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "log", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos", "floor", "ceil", "erf"]
)
def test_functions_are_right_to_the_last_bit_but_one(name: str) -> None:
    x = torch.rand(64) * 8 + 0.01
    found = mapped(getattr(T, name), "float32", x)
    expected = getattr(torch, name)(x.double()).float()
    assert (found.view(torch.int32) - expected.view(torch.int32)).abs().max() <= 1


def test_fast_intrinsics_are_as_accurate() -> None:
    x = torch.rand(64) * 8 + 0.01
    assert torch.equal(mapped(T.__exp, "float32", x), x.double().exp().float())
    assert torch.equal(mapped(T.fast_rcp, "float32", x), 1 / x)


def test_a_fused_multiplication_and_addition_rounds_once() -> None:
    x = torch.tensor([1 + 2.0**-12, 3.0, 1e20, 1 + 2.0**-23])
    y = torch.tensor([1 + 2.0**-12, 5.0, 1e20, 1 - 2.0**-24])
    found = mapped(lambda x, y: T.ieee_fmaf(x, y, T.float32(-1.0)), "float32", x, y)
    assert found.tolist() == [2.0**-11 + 2.0**-24, 14.0, math.inf, 2.0**-24 - 2.0**-47]
