"""Reading axes, dtypes, layouts and scalars off the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.binding import TensorInfo, bind_arguments, bind_call, is_code_selecting, solve_axes
from tilegym_db.records.layouts import contiguous_strides


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


def test_axes_dtypes_layouts_and_scalars_are_read_off_the_arguments() -> None:
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


def test_an_expression_that_cannot_be_undone_waits_for_another_tensor() -> None:
    op = define({"scale": (["N // 4"], "T"), "x": (["M", "N"], "T")}, {"out": (["M"], "T")})
    assert solve_axes(op, {"scale": (2,), "x": (3, 9)}) == {"M": 3, "N": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": tensor(7)}, "dimension 0 of 'weight' has size 7, but must be N = 8"),
        ({"weight": tensor(8, 1)}, r"'weight' of op has 1 dimensions \[N\], not 2"),
        ({"weight": tensor(8, dtype="float32")}, "'weight' of op must be bfloat16, not float32"),
        ({"x": tensor(4, 8, dtype="int8"), "weight": tensor(8, dtype="int8")}, "dtype 'int8' is not in op's set"),
        ({"eps": tensor(1)}, "'eps' of op is a Python number"),
        ({"x": 3.0}, "'x' of op is a tensor, not float"),
        ({"eps": [1]}, "'eps' of op is a Python number, not list"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bind_arguments(NORM, {"x": tensor(4, 8), "weight": tensor(8), "eps": 1e-5, **change})


def test_a_missing_argument_and_a_wrong_count_are_named() -> None:
    with pytest.raises(UsageError, match="needs the argument 'weight'"):
        bind_arguments(NORM, {"x": tensor(4, 8), "eps": 1e-5})
    with pytest.raises(
        UsageError, match=r"takes \(x, weight, eps\), optionally followed by its outputs \(out\); got 2"
    ):
        bind_call(NORM, (1, 2))


def test_a_size_that_no_axis_gives_is_refused() -> None:
    op = define({"x": (["M", "2*I"], "T")}, {"out": (["M", "I"], "T")}, axes="M I")
    with pytest.raises(UsageError, match=r"dimension 1 of 'x' has size 7, but must be 2\*I = 6"):
        solve_axes(op, {"x": (5, 7)})


def test_an_axis_that_no_shape_tells_is_refused() -> None:
    op = define({"x": (["M", "N // 2"], "T")}, {"out": (["M"], "T")})
    with pytest.raises(UsageError, match=r"cannot tell the axes of op apart: .* size 7 = N // 2"):
        solve_axes(op, {"x": (5, 7)})


def test_constraints_and_const_axes_are_checked() -> None:
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 8}}
    op = Definition.from_dict({**NORM.to_dict(), "axes": axes, "constraints": ["M <= 4"]})
    with pytest.raises(UsageError, match="requires M <= 4"):
        solve_axes(op, {"x": (5, 8), "weight": (8,)})
    with pytest.raises(UsageError, match="has size 9, but must be N = 8"):
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
