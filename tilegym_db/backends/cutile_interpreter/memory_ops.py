"""Writes the operations on memory: pointers, arrays and their partitions, loads, stores, atomic updates."""

from __future__ import annotations

from typing import Any

from tilegym_db.backends.cutile_interpreter import atomics, memory
from tilegym_db.backends.cutile_interpreter.tile_ops import OBJECTS, dtype_of, shape_of
from tilegym_db.backends.cutile_interpreter.writer import Writer, emits, refuse

__all__: list[str] = []

OBJECTS.update({name: getattr(memory, name) for name in ("load", "load_tile", "store", "store_tile")})
OBJECTS.update({name: getattr(atomics, name) for name in atomics.__all__})

_PADDING = {
    "UNDETERMINED": None,
    "ZERO": 0.0,
    "NEG_ZERO": -0.0,
    "NAN": float("nan"),
    "POS_INF": float("inf"),
    "NEG_INF": float("-inf"),
}


def _optional(writer: Writer, var: Any) -> str:
    return "None" if var is None else writer.of(var)


def _pointed(writer: Writer, op: Any, *, write: bool = False) -> str:
    """The memory and the offset of a pointer."""
    place = writer.memories.get(op.pointer.name)
    if place is None:
        raise refuse(op, "a pointer chosen at run time")
    if write:
        writer.written.add(place)
    return f"{place}, {writer.of(op.pointer)}"


@emits("pointer_offset")
def _offset(writer: Writer, op: Any) -> None:
    place = writer.memories.get(op.pointer.name)
    if place is None:
        raise refuse(op, "a pointer chosen at run time")
    cast = "" if dtype_of(op.offset) == "uint64" else ".astype(np.uint64)"
    writer.result(op, f"({writer.of(op.pointer)} + {writer.of(op.offset)}{cast})")
    writer.memories[op.result_var.name] = place


@emits("load_pointer")
def _load(writer: Writer, op: Any) -> None:
    rest = f"{_optional(writer, op.mask)}, {_optional(writer, op.padding_value)}, {shape_of(op.pointer)}"
    writer.line(f"{writer.name(op.result_vars[0])} = load({_pointed(writer, op)}, {rest})")


@emits("store_pointer")
def _store(writer: Writer, op: Any) -> None:
    rest = f"{writer.of(op.value)}, {_optional(writer, op.mask)}, {shape_of(op.pointer)}"
    writer.line(f"store({_pointed(writer, op, write=True)}, {rest})")


# -- arrays ----------------------------------------------------------------------------------------------------------


@emits("make_tensor_view")
def _array(writer: Writer, op: Any) -> None:
    place = writer.memories.get(op.base_ptr.name)
    if place is None:
        raise refuse(op, "a pointer chosen at run time")
    sizes, strides = ("".join(f"{writer.of(var)}, " for var in part) for part in (op.shape, op.strides))
    name = writer.name(op.result_var)
    writer.line(f"{name} = ({writer.of(op.base_ptr)}, ({sizes}), ({strides}))")
    writer.memories[op.result_var.name] = place


@emits("make_partition_view")
def _partition(writer: Writer, op: Any) -> None:
    order = tuple(op.result_var.get_type().order)
    name, array = writer.name(op.result_var), writer.of(op.array)
    if order == tuple(range(len(order))):
        writer.line(f"{name} = {array}")
    else:
        sizes, strides = ("".join(f"{array}[{part}][{axis}], " for axis in order) for part in (1, 2))
        writer.line(f"{name} = ({array}[0], ({sizes}), ({strides}))")
    writer.memories[op.result_var.name] = writer.memories[op.array.name]


def _tile(writer: Writer, op: Any, *, write: bool = False) -> str:
    """The memory, the partition and the index of a tile."""
    place = writer.memories[op.view.name]
    if write:
        writer.written.add(place)
    return f"{place}, {writer.of(op.view)}, ({''.join(f'{writer.of(var)}, ' for var in op.index)})"


@emits("tile_load")
def _load_tile(writer: Writer, op: Any) -> None:
    padding = _PADDING[op.view.get_type().padding_mode.name]
    kept = "None" if padding is None else writer.object(padding)
    shape = shape_of(op.result_vars[0])
    writer.line(f"{writer.name(op.result_vars[0])} = load_tile({_tile(writer, op)}, {shape}, {kept})")


@emits("tile_store")
def _store_tile(writer: Writer, op: Any) -> None:
    writer.line(f"store_tile({_tile(writer, op, write=True)}, {writer.of(op.tile)}, {shape_of(op.tile)})")


@emits("num_tiles")
def _count_tiles(writer: Writer, op: Any) -> None:
    view = writer.of(op.view)
    for axis, (var, size) in enumerate(zip(op.result_vars, op.view.get_type().tile_shape, strict=True)):
        writer.line(f"{writer.name(var)} = np.int32(-(-int({view}[1][{axis}]) // {size}))")


# -- atomic updates --------------------------------------------------------------------------------------------------


@emits("tile_atomic_rmw")
def _update(writer: Writer, op: Any) -> None:
    rest = f"{writer.of(op.update)}, {_optional(writer, op.mask)}, {shape_of(op.pointer)}, {op.mode.name!r}"
    rounded = writer.rounded("x", dtype_of(op.update))
    rounding = "None" if rounded == "x" else rounded.removesuffix("(x)")
    place = _pointed(writer, op, write=True)
    writer.line(f"{writer.name(op.result_vars[0])} = update({place}, {rest}, {rounding})")


@emits("tile_atomic_cas")
def _exchange(writer: Writer, op: Any) -> None:
    rest = f"{writer.of(op.expected)}, {writer.of(op.desired)}, {_optional(writer, op.mask)}, {shape_of(op.pointer)}"
    writer.line(f"{writer.name(op.result_vars[0])} = compare_and_exchange({_pointed(writer, op, write=True)}, {rest})")
