"""Parses the Python sources in records. Sources are never imported, and every problem is a :class:`RecordError`."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import warnings
from collections.abc import Mapping

from tilegym_db.errors import RecordError

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
    """Return the top-level functions of a source, without their bodies; callers must not change the tree.

    Raises:
        RecordError: the source is not valid Python, or nested too deeply; the message gives the line.
    """
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

    Raises:
        RecordError: the source is not valid Python.
    """
    tree = parse_source(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        return None
    arguments = functions[-1].args
    starred = [f"*{one.arg}" for one in (arguments.vararg, *arguments.kwonlyargs) if one is not None]
    starred += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return (*(argument.arg for argument in (*arguments.posonlyargs, *arguments.args)), *starred)
