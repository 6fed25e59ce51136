"""Writes the operations on tiles: constants, arithmetic, casts, shapes, reductions, accesses of memory.

The memory of a kernel is the storage of its arrays, accessed by element. On a device, the blocks of one launch run in any
order or at once. If a block reads what another block writes, or two blocks write different values to one element, the
result depends on the order. Both are errors here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilegym_db.backends.cutile_interpreter import tiles
from tilegym_db.backends.cutile_interpreter.tiles import decoder, encoder, host_dtype, raw_dtype, spread
from tilegym_db.backends.cutile_interpreter.writer import Writer, emits, refuse
from tilegym_db.errors import SolutionError

# ---- Memory ----------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
View = tuple[Any, Shape, Shape, Shape]
"""Offset of an array, its shape and strides, and the elements from one tile to the next."""


class Launch:
    """A launch: the block that runs, and the blocks that accessed the elements of every storage that it writes."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.block = 0
        self._marks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def marks(self, address: int, size: int, count: int) -> tuple[Any, Any]:
        """Return, for each element, the block that read it last and the block that wrote it last; 0 for no block."""
        if (address, size) not in self._marks:
            self._marks[address, size] = (np.zeros(count, np.int32), np.zeros(count, np.int32))
        return self._marks[address, size]


class ArrayMemory:
    """The storage of one array, as elements of the array's type."""

    def __init__(self, tensor: torch.Tensor, dtype: str, launch: Launch, position: int, written: bool) -> None:
        """Map the tensor's storage; ``written`` says whether the kernel writes to this array."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        flat = tensor.detach().as_strided((count,), (1,), 0)
        raw = raw_dtype(dtype)
        self.data: Any = flat.view(getattr(torch, np.dtype(raw).name)).numpy()
        self.decode, self.encode = decoder(dtype), encoder(dtype)
        self.launch = launch
        self.name = f"array {position} of {launch.kernel}"
        self.readers: Any = None
        self.writers: Any = None
        if written:
            self.readers, self.writers = launch.marks(storage.data_ptr(), tensor.element_size(), count)
        # A value for undefined elements: it shows in a result that depends on them.
        self.garbage = np.array(np.nan if np.issubdtype(host_dtype(dtype), np.floating) else 85).astype(
            host_dtype(dtype)
        )[()]

    def note_read(self, marked: Any, read: Any) -> None:
        """Record a read of elements; raise :class:`SolutionError` if another block wrote one of them."""
        block = self.launch.block
        if ((marked != 0) & (marked != block)).any():
            raise SolutionError(
                f"A block reads what another block writes in the same launch: {self.name}.", code="blocks_race"
            )
        read[...] = block

    def check_write(self, readers: Any, writers: Any, old: Any, new: Any) -> None:
        """Raise :class:`SolutionError` if a write changes elements that other blocks have accessed."""
        block = self.launch.block
        others = ((writers != 0) & (writers != block)) | ((readers != 0) & (readers != block))
        if others.any() and (_bits(old) != _bits(new))[others].any():
            raise SolutionError(
                f"Blocks of one launch read and write, or write differently, the same element of {self.name}.",
                code="blocks_race",
            )


def _bits(values: Any) -> Any:
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values


# -- by element ------------------------------------------------------------------------------------------------------


def _check(memory: ArrayMemory, index: Any) -> None:
    if index.size and (index.min() < 0 or index.max() >= memory.data.size):
        raise SolutionError(f"An index lies outside of the memory of {memory.name}.", code="index_outside")


def load(memory: ArrayMemory, offset: Any, mask: Any, padding: Any, shape: Shape) -> Any:
    """Return the elements at offsets, and the padding if the mask is false."""
    index = offset.view(np.int64)
    padding = memory.garbage if padding is None else padding
    if mask is not None:
        if not mask.any():
            return padding
        if mask.all():
            mask = None
        else:
            index = np.where(mask, index, index[mask].flat[0] if index.shape == mask.shape else _any(index, mask))
    _check(memory, index)
    values = memory.data[index]
    if memory.writers is not None:
        _note_load(memory, index, mask)
    if memory.decode is not None:
        values = memory.decode(values)
    return values if mask is None else np.where(mask, values, padding)


def _any(index: Any, mask: Any) -> Any:
    """Return an index that the mask selects, as a substitute for those that it does not."""
    index, mask = np.broadcast_arrays(index, mask)
    return index[mask].flat[0]


def _note_load(memory: ArrayMemory, index: Any, mask: Any) -> None:
    if mask is not None:
        index, mask = np.broadcast_arrays(index, mask)
        index = index[mask]
    block = memory.launch.block
    marked = memory.writers[index]
    if ((marked != 0) & (marked != block)).any():
        raise SolutionError(
            f"A block reads what another block writes in the same launch: {memory.name}.", code="blocks_race"
        )
    memory.readers[index] = block


def store(memory: ArrayMemory, offset: Any, value: Any, mask: Any, shape: Shape) -> None:
    """Write elements at offsets if the mask is true."""
    index, value = spread(offset.view(np.int64), shape), spread(value, shape)
    if mask is not None:
        mask = spread(mask, shape)
        if not mask.all():
            index, value = index[mask], value[mask]
    if not index.size:
        return
    _check(memory, index)
    value = np.asarray(value if memory.encode is None else memory.encode(value))
    memory.check_write(memory.readers[index], memory.writers[index], np.asarray(memory.data[index]), value)
    memory.data[index] = value
    if (_bits(np.asarray(memory.data[index])) != _bits(value)).any():
        raise SolutionError(
            f"One store writes different values to the same element of {memory.name}.", code="store_conflict"
        )
    memory.writers[index] = memory.launch.block


# -- by tile ---------------------------------------------------------------------------------------------------------


class _TileView:
    """The part of a tile that lies inside of its partitioned array."""

    def __init__(self, memory: ArrayMemory, view: View, index: tuple[Any, ...], tile: Shape) -> None:
        base, shape, strides, steps = view
        starts = [int(at) * step for at, step in zip(index, steps, strict=True)]
        if any(start < 0 or start >= whole for start, whole in zip(starts, shape, strict=True)):
            raise SolutionError(
                f"A tile at {tuple(map(int, index))} lies outside of {memory.name}, of shape {shape}; "
                "cuTile does not say what happens.",
                code="tile_outside",
            )
        self.sizes = tuple(
            min(int(whole) - start, size) for whole, start, size in zip(shape, starts, tile, strict=True)
        )
        self.start = int(base) + sum(start * int(stride) for start, stride in zip(starts, strides, strict=True))
        self.strides = strides

    def of(self, elements: Any) -> Any:
        """Return the part of a tile inside of its array, as a view of the storage's elements."""
        size = elements.itemsize
        return np.ndarray(
            self.sizes,
            elements.dtype,
            elements,
            self.start * size,
            tuple(int(stride) * size for stride in self.strides),
        )


def load_tile(memory: ArrayMemory, view: View, index: tuple[Any, ...], tile: Shape, padding: float | None) -> Any:
    """Return one tile of a partitioned array, with padding beyond the end of the array."""
    part = _TileView(memory, view, index, tile)
    values = part.of(memory.data).copy()
    if memory.writers is not None:
        memory.note_read(part.of(memory.writers), part.of(memory.readers))
    if memory.decode is not None:
        values = memory.decode(values)
    if part.sizes == tile:
        return values
    whole = np.full(tile, memory.garbage if padding is None else padding, dtype=values.dtype)
    whole[tuple(map(slice, part.sizes))] = values
    return whole


def store_tile(memory: ArrayMemory, view: View, index: tuple[Any, ...], value: Any, tile: Shape) -> None:
    """Write one tile of a partitioned array; elements outside of the array are dropped."""
    part = _TileView(memory, view, index, tile)
    value = spread(value, tile)[tuple(map(slice, part.sizes))]
    value = np.ascontiguousarray(value if memory.encode is None else memory.encode(value))
    target = part.of(memory.data)
    memory.check_write(part.of(memory.readers), part.of(memory.writers), target.copy(), value)
    target[...] = value
    part.of(memory.writers)[...] = memory.launch.block


# ---- atomics --------------------------------------------------------------------------------------
# Atomic updates handle one element after another, in the order of the blocks in the grid.

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "ADD_INT": lambda old, new: old + new,
    "ADD_FLOAT": lambda old, new: old + new,
    "MAX_SIGNED_INT": max,
    "MAX_UNSIGNED_INT": max,
    "MIN_SIGNED_INT": min,
    "MIN_UNSIGNED_INT": min,
    "BITWISE_AND": lambda old, new: old & new,
    "BITWISE_OR": lambda old, new: old | new,
    "BITWISE_XOR": lambda old, new: old ^ new,
    "EXCHANGE": lambda old, new: new,
}


def _each(memory: ArrayMemory, offset: Any, mask: Any, shape: Shape, host: Any, step: Callable[[int, Any], Any]) -> Any:
    """Apply a function that returns the new value to every element; return the old values."""
    index = spread(offset.view(np.int64), shape)
    counts = np.broadcast_to(True if mask is None else mask, shape)
    before = np.zeros(shape, host)
    flat, old = index.reshape(-1), before.reshape(-1)
    for at in np.flatnonzero(counts):
        place = int(flat[at])
        if not 0 <= place < memory.data.size:
            raise SolutionError(f"An index lies outside of the memory of {memory.name}.", code="index_outside")
        value = memory.data[place]
        old[at] = value if memory.decode is None else memory.decode(value)
        new = step(int(at), old[at])
        memory.data[place] = new if memory.encode is None else memory.encode(new)
    return before[()] if not shape else before


def update(
    memory: ArrayMemory,
    offset: Any,
    value: Any,
    mask: Any,
    shape: Shape,
    mode: str,
    rounding: Callable[[Any], Any] | None,
) -> Any:
    """Read, change and write every element; return the old values."""
    values = spread(value, shape).reshape(-1)
    change = _STEPS[mode]

    def step(at: int, old: Any) -> Any:
        new = change(old, values[at])
        return new if rounding is None else rounding(new)

    return _each(memory, offset, mask, shape, values.dtype, step)


def compare_and_exchange(memory: ArrayMemory, offset: Any, expected: Any, desired: Any, mask: Any, shape: Shape) -> Any:
    """Write the desired value to elements that hold the expected one; return the old values."""
    wanted, given = spread(expected, shape).reshape(-1), spread(desired, shape).reshape(-1)
    return _each(memory, offset, mask, shape, given.dtype, lambda at, old: given[at] if old == wanted[at] else old)


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

OBJECTS |= {
    called.__name__: called
    for called in (load, load_tile, store, store_tile, update, compare_and_exchange, ArrayMemory, Launch)
}

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
