"""Arithmetic over axes for constraints, shapes, costs and strides, evaluated without ``eval``.

The grammar is a part of Python's: integers, floats, axis names, ``+ - * / // % **``, comparisons, ``and or not``, ``min``,
``max``, ``ceil_div`` and ``sizeof(T)``. Other syntax is refused when the record is read; the message quotes it.

The last part changes sizes so that they meet constraints.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError
from tilegym_db.records.dtypes import DTYPE_BYTES

if TYPE_CHECKING:
    import random

MAX_LENGTH = 400
MAX_EXPONENT = 64
MAX_MAGNITUDE = 1 << 256
MAX_DEPTH = 64
"""Maximum nesting: checks and evaluation recurse once per level, and must work however deep the caller's stack is."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "ceil_div": lambda a, b: -(-a // b),
}
_Function = Callable[[Mapping[str, int], Mapping[str, str]], Any]


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> ast.expr:
    """Return the checked syntax tree of ``text``; raise :class:`RecordError` unless it is arithmetic."""
    if len(text) > MAX_LENGTH:
        raise RecordError(
            f"expression of {len(text)} characters is too long (at most {MAX_LENGTH}): {text[:60]!r}...",
            code="expression_too_long",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "1 is not a function", before it is refused
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecordError(f"{text!r} is not arithmetic over axes: {error}", code="expression_syntax") from None
    if _depth(tree) > MAX_DEPTH:
        raise RecordError(
            f"{text[:60]!r}... is not arithmetic over axes: it is nested more than {MAX_DEPTH} deep",
            code="expression_too_deep",
        )
    _check(tree, text)
    _check_constants(tree, text)
    return tree


def _check_constants(node: ast.expr, text: str) -> bool:
    """Return True if a part is constant. Constants are evaluated, so that ``9**9**9`` is refused when the record is read."""
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Call):
        parts = [] if isinstance(node.func, ast.Name) and node.func.id == "sizeof" else node.args
        constant = bool(parts)
    else:
        constant = not isinstance(node, ast.Name)
    constants = [_check_constants(part, text) for part in parts]
    if not (constant and all(constants)):
        return False
    try:
        value = _evaluate(node, {}, {})
    except ZeroDivisionError:
        raise RecordError(
            f"{text!r} is not arithmetic over axes: {_segment(text, node)!r} divides by zero", code="division_by_zero"
        ) from None
    except OverflowError:
        raise RecordError(
            f"{text!r} is not arithmetic over axes: {_segment(text, node)!r} is out of range "
            f"(exponents up to {MAX_EXPONENT}, numbers up to 2**256)",
            code="number_out_of_range",
        ) from None
    return value is not None


def _segment(text: str, node: ast.expr) -> str:
    return ast.get_source_segment(text.strip(), node) or type(node).__name__


def _depth(tree: ast.AST) -> int:
    level, depth = [tree], 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    return depth


def names_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the axis names and the ``sizeof`` dtype variables that ``text`` uses."""
    axes: set[str] = set()
    dtypes: set[str] = set()
    _collect(parse_expression(text), axes, dtypes)
    return frozenset(axes), frozenset(dtypes)


def evaluate(text: str, axes: Mapping[str, int], dtypes: Mapping[str, str] | None = None) -> int | float | bool:
    """Return the value of ``text`` with these axis sizes; ``sizeof(T)`` is the bytes of the dtype bound to T.

    A name in ``sizeof`` that is not bound is read as a dtype (``sizeof(float32)``).
    """
    try:
        value: int | float | bool = _function_of(text)(axes, dtypes or {})
        return value
    except ZeroDivisionError:
        raise RecordError(f"{text!r} divides by zero at {_spelled(axes)}", code="division_by_zero") from None
    except (OverflowError, RecursionError):
        raise RecordError(f"{text!r} is out of range at {_spelled(axes)}", code="number_out_of_range") from None
    except LookupError as error:
        raise RecordError(
            f"{text!r} uses {error.args[0]}, which has no value at {_spelled(axes)}", code="name_without_value"
        ) from None


def evaluate_int(text: str | int, axes: Mapping[str, int]) -> int:
    """Return the value of a shape or stride; see :func:`evaluate`. Raise :class:`RecordError` unless it is a whole number."""
    if isinstance(text, int):
        return text
    if text in axes:  # fast path: most entries of a shape are an axis
        return axes[text]
    value = evaluate(text, axes)
    if isinstance(value, bool) or value != int(value):
        raise RecordError(
            f"{text!r} must be a whole number but is {value} at {_spelled(axes)}", code="number_not_whole"
        )
    return int(value)


def evaluate_bool(text: str, axes: Mapping[str, int], dtypes: Mapping[str, str] | None = None) -> bool:
    """Return True if a constraint holds; see :func:`evaluate`."""
    return bool(evaluate(text, axes, dtypes))


def _spelled(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(axes.items())) or "no axes"


def _refuse(text: str, node: ast.expr) -> RecordError:
    return RecordError(
        f"{text!r} is not arithmetic over axes: {_segment(text, node)!r} is not allowed "
        "(numbers, axis names, + - * / // % **, comparisons, and/or/not, min, max, ceil_div, sizeof)",
        code="expression_syntax",
    )


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return
        case ast.Name():
            return
        case ast.BinOp(op=op) if type(op) in _BINARY:
            _check(node.left, text)
            _check(node.right, text)
        case ast.UnaryOp(op=op) if type(op) in _UNARY:
            _check(node.operand, text)
        case ast.BoolOp():
            for value in node.values:
                _check(value, text)
        case ast.Compare(ops=ops) if all(type(op) in _COMPARE for op in ops):
            for value in (node.left, *node.comparators):
                _check(value, text)
        case ast.Call(func=ast.Name(id="sizeof"), args=[ast.Name()], keywords=[]):
            return
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS and len(args) >= 2:
            if name == "ceil_div" and len(args) != 2:
                raise _refuse(text, node)
            for value in args:
                _check(value, text)
        case _:
            raise _refuse(text, node)


def _collect(node: ast.expr, axes: set[str], dtypes: set[str]) -> None:
    match node:
        case ast.Name(id=name):
            axes.add(name)
        case ast.Call(func=ast.Name(id="sizeof"), args=[ast.Name(id=name)]):
            if name not in DTYPE_BYTES:
                dtypes.add(name)
        case ast.Call(args=args):
            for value in args:
                _collect(value, axes, dtypes)
        case _:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    _collect(child, axes, dtypes)


def _bounded(value: Any) -> Any:
    if value.__class__ is int and -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE:  # fast path
        return value
    if isinstance(value, complex) or not abs(value) <= MAX_MAGNITUDE:  # NaN is not in bounds either
        raise OverflowError
    return value


def _evaluate(node: ast.expr, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> Any:
    return _function(node)(axes, dtypes)


@lru_cache(maxsize=4096)
def _function_of(text: str) -> _Function:
    return _function(parse_expression(text))


def _function(node: ast.expr) -> _Function:
    """Return a function of axes and dtypes that computes a node. It is several times quicker than a walk for each value."""
    match node:
        case ast.Constant(value=value):
            return lambda axes, dtypes: _bounded(value)
        case ast.Name(id=name):
            return _axis(name)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(_function(left), _BINARY[type(op)], _function(right), is_power=isinstance(op, ast.Pow))
        case ast.UnaryOp(op=op, operand=operand):
            unary, only = _UNARY[type(op)], _function(operand)
            return lambda axes, dtypes: unary(only(axes, dtypes))
        case ast.BoolOp(op=op, values=values):
            combine, parts = all if isinstance(op, ast.And) else any, [_function(value) for value in values]
            return lambda axes, dtypes: combine(part(axes, dtypes) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            rest = zip(ops, comparators, strict=True)
            return _comparison(_function(left), [(_COMPARE[type(op)], _function(part)) for op, part in rest])
        case ast.Call(func=ast.Name(id="sizeof"), args=[ast.Name(id=name)]):
            return _size_of(name)
        case ast.Call(func=ast.Name(id=name), args=args):
            call, given = _CALLS[name], [_function(value) for value in args]
            return lambda axes, dtypes: _bounded(call(*[value(axes, dtypes) for value in given]))
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _axis(name: str) -> _Function:
    def size(axes: Mapping[str, int], dtypes: Mapping[str, str]) -> Any:
        if name not in axes:
            raise LookupError(f"the axis {name!r}")
        return axes[name]

    return size


def _binary(left: _Function, op: Callable[[Any, Any], Any], right: _Function, *, is_power: bool) -> _Function:
    def value(axes: Mapping[str, int], dtypes: Mapping[str, str]) -> Any:
        a, b = left(axes, dtypes), right(axes, dtypes)
        if is_power and not abs(b) <= MAX_EXPONENT:
            raise OverflowError
        return _bounded(op(a, b))

    return value


def _comparison(first: _Function, rest: list[tuple[Callable[[Any, Any], bool], _Function]]) -> _Function:
    def value(axes: Mapping[str, int], dtypes: Mapping[str, str]) -> bool:
        current = first(axes, dtypes)
        for compare, part in rest:
            following = part(axes, dtypes)
            if not compare(current, following):
                return False
            current = following
        return True

    return value


def _size_of(name: str) -> _Function:
    def size(axes: Mapping[str, int], dtypes: Mapping[str, str]) -> float:
        dtype = dtypes.get(name, name)
        if dtype not in DTYPE_BYTES:
            raise LookupError(f"sizeof({name})")
        return DTYPE_BYTES[dtype]

    return size


# ---- content constraints --------------------------------------------------------------------------
# Constraints on contents (``num_kv_indices == kv_indptr[-1].item()``), evaluated without ``eval``.

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.BitAnd: operator.and_,
}  # fmt: skip
_METHODS = frozenset({"item", "max", "min", "sum", "all", "any", "numel", "size", "dim", "diff"})
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "abs": abs, "all": all, "any": any}


class Unknown(Exception):
    """Syntax or a name that this evaluator does not know; the constraint is then reported as not checked."""


def holds(text: str, values: Mapping[str, Any]) -> bool:
    """Return True if a constraint holds for sizes (by axis) and tensors or numbers (by input).

    Raises:
        Unknown: it uses an unknown name, method or syntax.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _is_true(_value(tree, values, 0))
    except (
        SyntaxError,
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
        ZeroDivisionError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise Unknown(f"{text!r} cannot be evaluated: {error}") from None


def constraint_problem(text: str, names: Collection[str]) -> str | None:
    """Return the reason why :func:`holds` cannot evaluate a constraint over these names; None if it may."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{text!r} is not an expression: {error}"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name not in names and not (id(node) in called and name in _FUNCTIONS):
                return f"{text!r} uses '{name}', which is not an axis or input"
            case ast.Attribute(attr=name) if name not in (_METHODS if id(node) in called else {"shape"}):
                return f"{text!r} uses '.{name}', which is not known here"
            case ast.Call(keywords=[_, *_]) | ast.Lambda() | ast.IfExp() | ast.NamedExpr() | ast.Starred():
                return f"{ast.unparse(node)!r} is not known here"
            case ast.comprehension() | ast.Dict() | ast.Set() | ast.JoinedStr() | ast.Await():
                return f"{text!r} is not a comparison of sizes and contents"
            case ast.BinOp(op=op) | ast.UnaryOp(op=op) if type(op) not in _OPERATORS:
                return f"{ast.unparse(node)!r} is not known here"
    return None


def check_content_constraints(texts: Collection[str], axes: Collection[str], inputs: Collection[str]) -> None:
    """Check that each constraint can be evaluated and only names axes and inputs."""
    for number, text in enumerate(texts):
        problem = constraint_problem(text, {*axes, *inputs})
        if problem is not None:
            raise RecordError(f"content_constraints[{number}]: {problem}", code="content_constraint")


def _value(node: ast.expr, values: Mapping[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Unknown("it is nested too deeply")

    def of(child: ast.expr) -> Any:
        return _value(child, values, depth + 1)

    match node:
        case ast.Constant(value=int() | float() | bool()):
            return node.value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(left), of(right))
        case ast.BoolOp(op=op, values=parts):
            results = (_is_true(of(part)) for part in parts)
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _OPERATORS for op in ops):
            operands = [of(left), *(of(item) for item in comparators)]
            found = [_OPERATORS[type(op)](a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False)]
            return found[0] if len(found) == 1 else all(_is_true(item) for item in found)
        case ast.Subscript(value=value, slice=index):
            return of(value)[_index(index, of)]
        case ast.Attribute(value=value, attr="shape"):
            return tuple(of(value).shape)
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=args, keywords=[]) if method in _METHODS:
            return getattr(of(value), method)(*(of(item) for item in args))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(of(item) for item in args))
    raise Unknown(f"{ast.unparse(node)!r} is not known here")


def _is_true(value: Any) -> bool:
    """Return True if a value is true; for a tensor, if every element is."""
    return bool(value.all() if hasattr(value, "numel") else value)


def _index(node: ast.expr, of: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node, ast.Slice):
        return slice(*(None if part is None else of(part) for part in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Tuple):
        return tuple(_index(item, of) for item in node.elts)
    return of(node)


# ---- Python sources -------------------------------------------------------------------------------
# Parses the Python sources in records. Sources are never imported, and every problem is a :class:`RecordError`.

LARGE = 400
"""Minimum size in bytes of a source whose headers are cached between processes."""

_headers: dict[str, str] = {}


def recall_headers(headers: Mapping[str, str]) -> None:
    """Add the headers of functions that another process parsed, by the sha256 of the source's text."""
    _headers.update(headers)


def headers_of_large_sources() -> dict[str, str]:
    """Return the recalled headers and those that this process parsed."""
    return dict(_headers)


def forget_sources() -> None:
    """Forget every source that this process parsed or recalled; for tests."""
    _headers.clear()
    parse_source.cache_clear()


# Parsing takes a third of the time to read a catalog, and a process reads the same sources many times.
@functools.lru_cache(maxsize=2048)
def parse_source(source: str | bytes) -> ast.Module:
    """Return the top-level functions of a source, without their bodies; callers must not change the tree."""
    content = source.encode() if isinstance(source, str) and source.isascii() else source
    if not isinstance(content, bytes) or len(content) < LARGE or not content.isascii():
        return _functions(source)
    key = hashlib.sha256(content).hexdigest()
    if key in _headers:
        with contextlib.suppress(RecordError):  # the file of headers may be damaged
            return _functions(_headers[key])
    return _functions(content, key)


def _functions(source: str | bytes, key: str = "") -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences are not a finding here
            tree = ast.parse(source)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise RecordError(f"{error.msg}{where}", code="python_syntax") from None
    except ValueError as error:  # a NUL byte, in Python 3.11
        raise RecordError(str(error), code="python_syntax") from None
    except (RecursionError, MemoryError):
        raise RecordError("it is nested too deeply", code="python_syntax") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if key and isinstance(source, bytes):
        lines = source.splitlines()
        _headers[key] = "".join(_header(function, lines) for function in functions)
    for function in functions:
        function.body = []  # keeps the cached tree small
    return ast.Module(body=list(functions), type_ignores=[])


def _header(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[bytes]) -> str:
    """Return the text of a function from ``def`` to its colon, with an empty body."""
    first = function.body[0]
    on_a_line_of_the_header = lines[first.lineno - 1][: first.col_offset].strip()
    if on_a_line_of_the_header or hasattr(first, "decorator_list"):  # a decorator starts above its function's line
        body: list[ast.stmt] = [ast.Pass()]
        kind = type(function)
        bare = kind(name=function.name, args=function.args, body=body, decorator_list=[], lineno=1, col_offset=0)
        return ast.unparse(bare) + "\n"
    return b"\n".join(lines[function.lineno - 1 : first.lineno - 1]).decode() + "\n pass\n"


_PRODUCTS = frozenset(
    (
        *(
            "addbmm",
            "addmm",
            "addmv",
            "baddbmm",
            "bilinear",
            "bmm",
            "chain_matmul",
            "conv1d",
            "conv2d",
            "conv3d",
            "dot",
        ),
        *(
            "einsum",
            "inner",
            "linear",
            "matmul",
            "mm",
            "multi_dot",
            "mv",
            "scaled_dot_product_attention",
            "tensordot",
            "vdot",
        ),
    )
)
"""Functions of PyTorch that multiply matrices, which a GPU may do in TF32."""


@functools.lru_cache(maxsize=512)
def has_product(source: str) -> bool:
    """Return True if a source multiplies matrices, by ``@`` or by a function of PyTorch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in _PRODUCTS:
                return True
    return False


def check_function(source: str, where: str, parameters: tuple[str, ...]) -> None:
    """Raise :class:`RecordError` unless ``source`` is Python that defines ``run`` with exactly these parameters, in order."""
    try:
        found = function_parameters(source, "run")
    except RecordError as error:
        raise RecordError(f"{where} is not valid Python: {error}", code="python_syntax") from None
    if found is None:
        raise RecordError(f"{where} defines no function 'run'", code="function_missing")
    if found != parameters:
        raise RecordError(
            f"{where}: run({', '.join(found)}) must take the inputs in order: run({', '.join(parameters)})",
            code="parameters_differ",
        )


def function_parameters(source: str, name: str) -> tuple[str, ...] | None:
    """Return the parameters of the last top-level function of that name; None if ``source`` has no such function.

    Variadic and keyword-only parameters are spelled with stars.
    """
    tree = parse_source(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        return None
    arguments = functions[-1].args
    starred = [f"*{one.arg}" for one in (arguments.vararg, *arguments.kwonlyargs) if one is not None]
    starred += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return (*(argument.arg for argument in (*arguments.posonlyargs, *arguments.args)), *starred)


# ---- repair of sizes ------------------------------------------------------------------------------
# Changes random sizes to meet the usual constraints, which random sizes rarely meet.

_PASSES = 2  # meeting one constraint (R <= D) may break another (R % 2 == 0)


def repaired(
    constraints: Sequence[str],
    axes: Mapping[str, int],
    fixed: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
) -> dict[str, int]:
    """Return the axes, changed to meet constraints of known forms; the sizes in ``fixed`` stay.

    Known forms are multiples (``N % 8 == 0``, ``N * sizeof(T) % 16 == 0``), bounds and equalities between an axis and an
    axis or number, and ``and`` and ``or`` of these. The caller must check the result, because other forms are ignored.
    """
    repair = _Repair({**fixed, **axes}, frozenset(axes), dtypes, generator)
    for _ in range(_PASSES):
        broken = [text for text in constraints if not repair.holds(text)]
        for text in broken:
            repair.meet(parse_expression(text))
        if not broken:
            break
    return {name: repair.sizes[name] for name in axes}


@dataclass
class _Repair:
    sizes: dict[str, int]
    movable: frozenset[str]
    dtypes: Mapping[str, str]
    generator: random.Random

    def holds(self, text: str) -> bool:
        try:
            return evaluate_bool(text, self.sizes, self.dtypes)
        except RecordError:
            return False

    def meet(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(op=ast.Or(), values=values):
                self.meet(self.generator.choice(values))
            case ast.BoolOp(op=ast.And(), values=values):
                for value in values:
                    self.meet(value)
            case ast.Compare(
                left=ast.BinOp(left=left, op=ast.Mod(), right=divisor),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=0)],
            ):
                self._make_multiple(left, divisor)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for one, op, other in zip((left, *comparators), ops, comparators, strict=False):
                    self._meet_comparison(one, op, other)

    def _make_multiple(self, left: ast.expr, divisor: ast.expr) -> None:
        """Round the one axis of ``left`` (``N``, ``2*N``, ``N * sizeof(T)``) down to a multiple, but not to zero."""
        names = [node.id for node in ast.walk(left) if isinstance(node, ast.Name) and node.id in self.movable]
        modulus = self._value(divisor)
        if len(names) != 1 or not modulus:
            return
        (name,) = names
        factor = self._value(left, {name: 1})
        if factor and factor == int(factor):
            step = int(modulus) // math.gcd(int(modulus), int(factor))
            self.sizes[name] = max(step, self.sizes[name] // step * step)

    def _meet_comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> None:
        """Set the axis that stands alone on one side, preferably the left, to satisfy the comparison with the other side."""
        slack = {ast.Lt: -1, ast.Gt: 1}.get(type(op), 0)
        for moving, other, sign in ((left, right, 1), (right, left, -1)):
            target = self._value(other)
            if not isinstance(moving, ast.Name) or moving.id not in self.movable or target is None:
                continue
            size, wanted = self.sizes[moving.id], int(target) + sign * slack
            if isinstance(op, ast.Eq):
                self.sizes[moving.id] = wanted
            elif isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                is_upper = isinstance(op, ast.Lt | ast.LtE) == (sign == 1)
                self.sizes[moving.id] = min(size, wanted) if is_upper else max(size, wanted)
            return

    def _value(self, node: ast.expr, changed: Mapping[str, int] | None = None) -> float | None:
        try:
            return float(evaluate(ast.unparse(node), {**self.sizes, **(changed or {})}, self.dtypes))
        except RecordError:
            return None
