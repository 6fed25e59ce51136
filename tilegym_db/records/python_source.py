"""Python source text as records carry it: parsed, never imported, and refused in one kind of error."""

from __future__ import annotations

import ast
import functools
import warnings

__all__ = ["check_function", "function_parameters", "parse_source"]


# Parsing is a third of what reading a catalog takes, and one process reads the same sources many times over.
@functools.lru_cache(maxsize=2048)
def parse_source(source: str | bytes) -> ast.Module:
    """The functions at the top level of a source text, without their bodies; to be read only.

    Raises:
        ValueError: it is not valid Python, or nested too deeply for the parser; says what and in which line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape sequence is no finding here
            tree = ast.parse(source)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise ValueError(f"{error.msg}{where}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        function.body = []  # what is kept must stay small
    return ast.Module(body=list(functions), type_ignores=[])


def check_function(source: str, where: str, parameters: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``source`` is Python that defines ``run`` with exactly these parameters, in order."""
    try:
        found = function_parameters(source, "run")
    except ValueError as error:
        raise ValueError(f"{where} is not valid Python: {error}") from None
    if found is None:
        raise ValueError(f"{where} defines no function 'run'")
    if found != parameters:
        raise ValueError(
            f"{where}: run({', '.join(found)}) must take the inputs in order: run({', '.join(parameters)})"
        )


def function_parameters(source: str, name: str) -> tuple[str, ...] | None:
    """The parameters of the last function of that name at the top level of ``source``; None where there is none.

    Those that no positional argument can fill are spelled with their stars.

    Raises:
        ValueError: the source is not valid Python.
    """
    tree = parse_source(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        return None
    arguments = functions[-1].args
    starred = [f"*{one.arg}" for one in (arguments.vararg, *arguments.kwonlyargs) if one is not None]
    starred += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return (*(argument.arg for argument in (*arguments.posonlyargs, *arguments.args)), *starred)
