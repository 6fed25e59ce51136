"""Python source text as records carry it: parsed, never imported, and refused in one kind of error."""

from __future__ import annotations

import ast
import functools
import warnings

__all__ = ["check_function", "parse_source"]


@functools.lru_cache(maxsize=8)  # a record asks twice in a row, and parsing is a third of what 'list' does
def parse_source(source: str | bytes) -> ast.Module:
    """The syntax tree of a source text; to be read only.

    Raises:
        ValueError: it is not valid Python, or nested too deeply for the parser; says what and in which line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape sequence is no finding here
            return ast.parse(source)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise ValueError(f"{error.msg}{where}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def check_function(source: str, where: str, parameters: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``source`` is Python that defines ``run`` with exactly these parameters, in order."""
    try:
        tree = parse_source(source)
    except ValueError as error:
        raise ValueError(f"{where} is not valid Python: {error}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if not functions:
        raise ValueError(f"{where} defines no function 'run'")
    arguments = functions[-1].args
    found = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    if found != parameters or arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        raise ValueError(
            f"{where}: run({', '.join(found)}) must take the inputs in order: run({', '.join(parameters)})"
        )
