"""Reading axes, dtypes, layouts and scalars off the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import TensorInfo, bind_arguments, bind_call, is_code_selecting, solve_axes
from tilegym_db.records.definition_parts import contiguous_strides


def define(inputs: dict[str, Any], outputs: dict[str, Any], axes: str = "M N", **changes: Any) -> Definition:
    specs = [{name: {"shape": s[0], "dtype": s[1]} for name, s in group.items()} for group in (inputs, outputs)]
    return Definition.from_dict(
        {
            "name": "op",
            "version": "1.0.0",
            "op_type": "toy",
            "dtypes": {"T": ["bfloat16", "float32"]},
            "axes": {name: {"type": "var"} for name in axes.split()},
            "inputs": specs[0],
            "outputs": specs[1],
            "reference": f"# Source: https://example.org/op.py#L1\ndef run({', '.join(inputs)}):\n    return 0\n",
            **changes,
        }
    )


def tensor(*shape: int, dtype: str = "bfloat16", strides: tuple[int, ...] | None = None) -> TensorInfo:
    return TensorInfo(shape, strides or contiguous_strides(shape), dtype)


NORM = define({"x": (["M", "N"], "T"), "weight": (["N"], "T"), "eps": (None, "float32")}, {"out": (["M", "N"], "T")})


def test_axes_dtypes_layouts_and_scalars_are_read_off_arguments() -> None:
    padded = tensor(4, 8, strides=(16, 1))
    binding = bind_arguments(NORM, {"x": padded, "weight": tensor(8), "eps": 1e-5})
    assert binding.axes == {"M": 4, "N": 8}
    assert binding.dtypes == {"T": "bfloat16"}
    assert binding.layouts == {"x": "row_contiguous", "weight": "contiguous"}
    assert binding.scalars == {"eps": 1e-5}


def test_real_tensors_bind_by_position_with_or_without_outputs() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    assert bind_call(NORM, (x, weight, 1e-5)).axes == {"M": 4, "N": 8}
    layouts = bind_call(NORM, (x, weight, 1e-5, torch.zeros(8, 4, dtype=torch.bfloat16).T)).layouts
    assert layouts["out"] == "strided"


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [("2*I", 8, 4), ("I*2", 8, 4), ("I + 1", 8, 7), ("3 + 2*I", 9, 3), ("M - I", 1, 4), ("I - M", 3, 8), ("M*I", 0, 0)],
)
def test_an_expression_with_one_unknown_axis_is_solved(shape: str, size: int, expected: int) -> None:
    op = define({"x": (["M", shape], "T")}, {"out": (["M"], "T")}, axes="M I")
    assert solve_axes(op, {"x": (5, size)}) == {"M": 5, "I": expected}


def test_expression_that_cannot_be_inverted_waits_for_a_tensor() -> None:
    op = define({"scale": (["N // 4"], "T"), "x": (["M", "N"], "T")}, {"out": (["M"], "T")})
    assert solve_axes(op, {"scale": (2,), "x": (3, 9)}) == {"M": 3, "N": 9}


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        ({"weight": tensor(7)}, "size_differs", "dimension 0 of 'weight'"),
        ({"weight": tensor(8, 1)}, "rank_differs", "'weight' of op"),
        ({"x": tensor(2, 3, 4, 8)}, "rank_differs", "x.flatten(0, 2)"),
        ({"weight": tensor(8, dtype="float32")}, "dtype_differs", "'weight' of op"),
        ({"x": tensor(4, 8, dtype="int8"), "weight": tensor(8, dtype="int8")}, "dtype_not_allowed", "'int8'"),
        ({"eps": tensor(1)}, "scalar_expected", "'eps' of op"),
        ({"x": 3.0}, "tensor_expected", "'x' of op"),
        ({"eps": [1]}, "scalar_expected", "'eps' of op"),
        ({"eps": "1e-5"}, "scalar_expected", "'eps' of op"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], code: str, name: str) -> None:
    with raises(UsageError, code, name):
        bind_arguments(NORM, {"x": tensor(4, 8), "weight": tensor(8), "eps": 1e-5, **change})


def test_a_missing_argument_and_a_wrong_count_are_named() -> None:
    with raises(UsageError, "argument_missing", "'weight'"):
        bind_arguments(NORM, {"x": tensor(4, 8), "eps": 1e-5})
    with raises(UsageError, "argument_count", "(x, weight, eps)", "(out)"):
        bind_call(NORM, (1, 2))


def test_a_size_that_no_axis_gives_is_refused() -> None:
    op = define({"x": (["M", "2*I"], "T")}, {"out": (["M", "I"], "T")}, axes="M I")
    with raises(UsageError, "size_differs", "dimension 1 of 'x'", "2*I = 6"):
        solve_axes(op, {"x": (5, 7)})


def test_an_axis_that_no_shape_tells_is_refused() -> None:
    op = define({"x": (["M", "N // 2"], "T")}, {"out": (["M"], "T")})
    with raises(UsageError, "axis_ambiguous", "size 7 = N // 2"):
        solve_axes(op, {"x": (5, 7)})


def test_constraints_and_const_axes_are_checked() -> None:
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 8}}
    op = Definition.from_dict({**NORM.to_dict(), "axes": axes, "constraints": ["M <= 4"]})
    with raises(UsageError, "constraint_broken", "M <= 4"):
        solve_axes(op, {"x": (5, 8), "weight": (8,)})
    with raises(UsageError, "size_differs", "N = 8"):
        solve_axes(op, {"x": (4, 9), "weight": (9,)})


def test_packed_four_bit_floats_are_known_by_their_bytes() -> None:
    op = define({"x": (["M", "N"], "float4_e2m1")}, {"out": (["M", "N"], "float32")}, dtypes={})
    assert bind_arguments(op, {"x": tensor(2, 3, dtype="uint8")}).axes == {"M": 2, "N": 3}


def test_a_flag_selects_code_and_an_epsilon_does_not() -> None:
    op = define(
        {"x": (["M", "N"], "T"), "causal": (None, "bool"), "eps": (None, "float32")}, {"out": (["M", "N"], "T")}
    )
    assert is_code_selecting(op, "causal")
    assert not is_code_selecting(op, "eps")


@pytest.mark.turn("tilegym_db/records/call.py", "workloads/")  # every shipped workload
def test_the_arguments_of_every_shipped_workload_bind_back_to_it() -> None:
    catalog = Catalog((shipped_root(),))
    for workload in catalog.all_workloads():
        definition = catalog.definition(workload.definition)
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        arguments: dict[str, Any] = dict(workload.scalars())
        for name in (*definition.tensor_inputs, *definition.written_outputs):
            shape = definition.shape_of(name, axes)
            strides = definition.strides_of(name, axes, workload.layouts.get(name))
            arguments[name] = TensorInfo(shape, strides, definition.dtype_of(name, dtypes))
        binding = bind_arguments(definition, arguments)
        assert (binding.axes, binding.dtypes, binding.scalars) == (axes, dtypes, workload.scalars())
        found = {name: layout for name, layout in binding.layouts.items() if layout != "contiguous"}
        stated = workload.layout_classes(definition)
        assert found == {name: layout for name, layout in stated.items() if name in binding.layouts}
