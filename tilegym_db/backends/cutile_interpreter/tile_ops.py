"""Writes the operations on tiles: constants, arithmetic, casts, shapes, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilegym_db.backends.cutile_interpreter import memory, tiles
from tilegym_db.backends.cutile_interpreter.writer import Writer, emits, refuse

__all__: list[str] = []

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
_INTEGER = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floordiv": "({} // {})",
    "cdiv": "ceil_div({}, {})",
    "c_mod": "np.fmod({}, {})",
    "min": "np.minimum({}, {})",
    "max": "np.maximum({}, {})",
}
_FLOAT = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "truediv": "({} / {})",
    "floordiv": "np.floor({} / {})",
    "c_mod": "np.fmod({}, {})",
    "pow": "np.power({}, {})",
    "atan2": "np.arctan2({}, {})",
    "min": "np.fmin({}, {})",
    "max": "np.fmax({}, {})",
}
_FLOAT_WITH_NAN = {"min": "np.minimum({}, {})", "max": "np.maximum({}, {})"}
_UNARY = {
    "abs": "np.abs({})",
    "neg": "(-{})",
    "invert": "(~{})",
    "bitwise_not": "(~{})",
    **{
        name: f"np.{name}({{}})" for name in ("exp", "exp2", "sin", "cos", "sinh", "cosh", "tan", "tanh", "log", "log2")
    },
    **{name: f"np.{name}({{}})" for name in ("sqrt", "floor", "ceil")},
    "rsqrt": "reverse_square_root({})",
}
_NEAREST = {None, "RN", "FULL", "APPROX"}
_FOLDS = {
    ("add", False): np.add,
    ("mul", False): np.multiply,
    ("min", False): np.fmin,
    ("max", False): np.fmax,
    ("min", True): np.minimum,
    ("max", True): np.maximum,
    ("and_", False): np.bitwise_and,
    ("or_", False): np.bitwise_or,
    ("xor", False): np.bitwise_xor,
}

OBJECTS: dict[str, Any] = {"np": np, **{name: getattr(tiles, name) for name in tiles.__all__}}
"""Names that every text may use."""


def shape_of(var: Any) -> tuple[int, ...]:
    """Return the shape of a tile."""
    return tuple(var.get_type().shape)


def dtype_of(var: Any) -> str:
    """Return the type of a tile's elements."""
    return str(var.get_type().dtype.name)


def _mode(op: Any) -> str | None:
    return None if op.rounding_mode is None else str(op.rounding_mode.name)


def _arithmetic(writer: Writer, op: Any, text: str, operands: tuple[Any, ...], dtype: str) -> None:
    """Write an operation; a float operation includes its rounding and flushing."""
    if dtype not in tiles.NARROW and not tiles.is_float(dtype):
        writer.result(op, text.format(*map(writer.of, operands)))
        return
    if _mode(op) not in _NEAREST:
        raise refuse(op, f"rounding mode {_mode(op)}")
    names = [writer.of(var) for var in operands]
    if op.flush_to_zero:
        flush = writer.object(tiles.flush)
        writer.result(op, writer.rounded(f"{flush}({text.format(*(f'{flush}({name})' for name in names))})", dtype))
    else:
        writer.result(op, writer.rounded(text.format(*names), dtype))


@emits("typed_const", once=True)
def _constant(writer: Writer, op: Any) -> None:
    kind = op.result_var.get_type()
    if not hasattr(kind, "shape"):
        writer.names[op.result_var.name] = "None"
        return
    value = op.value
    if isinstance(value, tuple) and np.size(value) == 1:
        value = np.asarray(value, dtype=object).item()
    held = tiles.constant(value, dtype_of(op.result_var))
    writer.result(op, writer.object(held.reshape(kind.shape) if np.ndim(held) else held))


@emits("make_dummy")
def _dummy(writer: Writer, op: Any) -> None:
    writer.names[op.result_var.name] = "None"


@emits("raw_binary_arith", once=True)
def _binary(writer: Writer, op: Any) -> None:
    dtype = dtype_of(op.result_var)
    table = _FLOAT if tiles.is_float(dtype) else _INTEGER
    if op.fn not in table or (dtype == "bool_" and op.fn not in ("min", "max")):
        raise refuse(op, f"{op.fn} of {dtype}")
    text = _FLOAT_WITH_NAN[op.fn] if tiles.is_float(dtype) and op.propagate_nan else table[op.fn]
    _arithmetic(writer, op, text, (op.lhs, op.rhs), dtype)


@emits("raw_fpowi", once=True)
def _integer_power(writer: Writer, op: Any) -> None:
    dtype = dtype_of(op.result_var)
    host = writer.object(tiles.host_dtype(dtype))
    power = f"np.power({writer.of(op.base)}, {writer.of(op.exponent)}.astype({host}))"
    writer.result(op, writer.rounded(power, dtype))


@emits("fma", once=True)
def _fused(writer: Writer, op: Any) -> None:
    dtype = dtype_of(op.result_var)
    if any(dtype_of(var) != dtype for var in (op.lhs, op.rhs, op.acc)):
        raise refuse(op, "operands of several types")
    text = "fused_multiply_add({}, {}, {})" if tiles.host_dtype(dtype) is np.float32 else "({} * {} + {})"
    if dtype == "float16":
        text = f"fused_multiply_add({{}}, {{}}, {{}}).astype({writer.object(np.float16)})"
    _arithmetic(writer, op, text, (op.lhs, op.rhs, op.acc), dtype)


@emits("unaryop", once=True)
def _unary(writer: Writer, op: Any) -> None:
    if op.fn not in _UNARY:
        raise refuse(op, op.fn)
    _arithmetic(writer, op, _UNARY[op.fn], (op.operand,), dtype_of(op.result_var))


@emits("raw_cmp", once=True)
def _compare(writer: Writer, op: Any) -> None:
    writer.result(op, f"({writer.of(op.lhs)} {_COMPARE[op.fn]} {writer.of(op.rhs)})")


@emits("raw_binary_bitwise", "raw_bitwise_shift", once=True)
def _bitwise(writer: Writer, op: Any) -> None:
    writer.result(op, f"({writer.of(op.lhs)} {_BITWISE[op.fn]} {writer.of(op.rhs)})")


@emits("raw_where", once=True)
def _where(writer: Writer, op: Any) -> None:
    if dtype_of(op.result_var).startswith("pointer"):
        raise refuse(op, "pointers")
    writer.result(op, f"np.where({writer.of(op.cond)}, {writer.of(op.x)}, {writer.of(op.y)})")


@emits("tile_astype", once=True)
def _cast(writer: Writer, op: Any) -> None:
    source, target = dtype_of(op.x), dtype_of(op.result_var)
    try:
        cast = tiles.convert(source, target, _mode(op))
    except KeyError as missing:
        raise refuse(op, f"{source} to {target}, {missing}") from None
    if cast is None:
        writer.alias(op.result_var, op.x)
    else:
        writer.result(op, f"{writer.object(cast)}({writer.of(op.x)})")


@emits("tile_bitcast", once=True)
def _bitcast(writer: Writer, op: Any) -> None:
    source, target = dtype_of(op.x), dtype_of(op.result_var)
    encode, decode = tiles.encoder(source), tiles.decoder(target)
    if "tfloat32" in (source, target):
        raise refuse(op, "tfloat32")
    bits = f"{writer.object(encode)}({writer.of(op.x)})" if encode else writer.of(op.x)
    text = f"bits_as({bits}, {writer.object(tiles.raw_dtype(target))})"
    writer.result(op, f"{writer.object(decode)}({text})" if decode else text)


@emits("tile_pack", "tile_unpack", once=True)
def _bytes(writer: Writer, op: Any) -> None:
    source, target = dtype_of(op.x), dtype_of(op.result_var)
    if source in ("bool_", "tfloat32") or target in ("bool_", "tfloat32"):
        raise refuse(op, f"{source} to {target}")
    encode, decode = tiles.encoder(source), tiles.decoder(target)
    whole = f"spread({writer.of(op.x)}, {shape_of(op.x)})"
    bits = f"{writer.object(encode)}({whole})" if encode else whole
    text = f"bits_as(np.ascontiguousarray({bits}), {writer.object(tiles.raw_dtype(target))})"
    writer.result(op, f"{writer.object(decode)}({text})" if decode else text)


# -- shapes ----------------------------------------------------------------------------------------------------------


@emits("assume_div_by", "assume_bounded", "tile_broadcast", "assign")
def _same(writer: Writer, op: Any) -> None:
    value = op.value if op.op == "assign" else op.x
    writer.alias(op.result_var, value)


@emits("tile_reshape", once=True)
def _reshape(writer: Writer, op: Any) -> None:
    if not shape_of(op.x):  # a scalar is a tile of any shape
        writer.alias(op.result_var, op.x)
        return
    if dtype_of(op.x).startswith("pointer"):
        raise refuse(op, "pointers")
    writer.result(op, f"reshape({writer.of(op.x)}, {shape_of(op.x)}, {shape_of(op.result_var)})")


@emits("tile_permute", once=True)
def _permute(writer: Writer, op: Any) -> None:
    writer.result(op, f"spread({writer.of(op.x)}, {shape_of(op.x)}).transpose({tuple(op.axes)})")


@emits("tile_arange", once=True)
def _arange(writer: Writer, op: Any) -> None:
    held = np.arange(shape_of(op.result_var)[0]).astype(tiles.host_dtype(dtype_of(op.result_var)))
    writer.result(op, writer.object(held))


@emits("tile_cat", once=True)
def _concatenate(writer: Writer, op: Any) -> None:
    parts = ", ".join(f"spread({writer.of(var)}, {shape_of(var)})" for var in (op.x, op.y))
    writer.result(op, f"np.concatenate(({parts}), axis={op.axis})")


def _tuple(writer: Writer, variables: Any) -> str:
    return f"({''.join(f'{writer.of(var)}, ' for var in variables)})"


@emits("tile_extract", once=True)
def _extract(writer: Writer, op: Any) -> None:
    writer.result(op, f"extract({writer.of(op.x)}, {shape_of(op.x)}, {tuple(op.shape)}, {_tuple(writer, op.index)})")


@emits("tile_insert", once=True)
def _insert(writer: Writer, op: Any) -> None:
    part = f"{writer.of(op.value)}, {shape_of(op.value)}, {_tuple(writer, op.index)}"
    writer.result(op, f"insert({writer.of(op.x)}, {shape_of(op.x)}, {part})")


@emits("tile_mma", once=True)
def _multiply_tiles(writer: Writer, op: Any) -> None:
    shapes = tuple(shape_of(var) for var in (op.x, op.y, op.acc))
    factors = ", ".join(writer.of(var) for var in (op.x, op.y, op.acc))
    writer.result(op, f"multiply_tiles({factors}, {shapes})")


# -- reductions and scans --------------------------------------------------------------------------------------------


def _single(op: Any) -> Any:
    """Return the NumPy function for a body of one operation on both parameters, if there is one; float16 rounds each step."""
    body = list(op.body)
    if len(op.xs) != 1 or len(body) != 2 or body[0].op not in ("raw_binary_arith", "raw_binary_bitwise"):
        return None
    step, dtype = body[0], dtype_of(op.xs[0])
    exact = not tiles.is_float(dtype) or dtype in ("float32", "float64") or step.fn in ("min", "max")
    plain = not getattr(step, "flush_to_zero", False) and not (dtype == "bool_" and step.fn in ("add", "mul"))
    both = {step.lhs.name, step.rhs.name} == {var.name for var in op.body.params}
    nan = bool(getattr(step, "propagate_nan", False)) and step.fn in ("min", "max")
    return _FOLDS.get((step.fn, nan)) if exact and plain and both else None


def _collected(writer: Writer, op: Any, one: str, many: str, rest: str) -> None:
    place = f"{shape_of(op.xs[0])}, {op.axis}{rest}"
    function = _single(op)
    if function is not None:
        writer.result(op, f"{one}({writer.object(function)}, {writer.of(op.xs[0])}, {place})")
        return
    body = writer.function(op.body)
    results = "".join(f"{writer.name(var)}, " for var in op.result_vars)
    writer.line(f"{results}= {many}({body}, {_tuple(writer, op.xs)}, {place})")


@emits("tile_reduce")
def _reduce(writer: Writer, op: Any) -> None:
    _collected(writer, op, "fold", "fold_pairs", "")


@emits("tile_scan")
def _scan(writer: Writer, op: Any) -> None:
    _collected(writer, op, "scan", "scan_pairs", f", {bool(op.reverse)}")


# ---- memory ops -----------------------------------------------------------------------------------
# Operations on memory: pointers, arrays and their partitions, loads, stores, atomic updates.

OBJECTS.update({name: getattr(memory, name) for name in ("load", "load_tile", "store", "store_tile")})
OBJECTS.update({name: getattr(memory, name) for name in memory.__all__})

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
    """Return the memory and the offset of a pointer."""
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


@emits("make_partition_view", "make_strided_view")
def _partition(writer: Writer, op: Any) -> None:
    kind = op.result_var.get_type()
    order = tuple(kind.order)
    steps = tuple(getattr(kind, "traversal_steps", kind.tile_shape))
    name, array = writer.name(op.result_var), writer.of(op.array)
    if order == tuple(range(len(order))):
        writer.line(f"{name} = (*{array}, {steps})")
    else:
        sizes, strides = ("".join(f"{array}[{part}][{axis}], " for axis in order) for part in (1, 2))
        writer.line(f"{name} = ({array}[0], ({sizes}), ({strides}), {steps})")
    writer.memories[op.result_var.name] = writer.memories[op.array.name]


def _tile(writer: Writer, op: Any, *, write: bool = False) -> str:
    """Return the memory, the partition and the index of a tile."""
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
    if hasattr(op.view.get_type(), "traversal_steps"):
        raise refuse(op, "tiles that overlap")
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
