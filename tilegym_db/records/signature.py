"""Does a Solution's entry point take what it will be given? Read off the source text; nothing is imported or run."""

from __future__ import annotations

import ast

from tilegym_db.records.definition import Definition
from tilegym_db.records.omitted import narrowed
from tilegym_db.records.python_source import parse_source
from tilegym_db.records.solution import Solution

__all__ = ["called_with", "signature_problem"]


def called_with(definition: Definition, *, destination_passing_style: bool) -> tuple[str, ...]:
    """The positional arguments of ``run``: the inputs in order, then (destination passing) the outputs it writes."""
    return (*definition.inputs, *definition.written_outputs) if destination_passing_style else tuple(definition.inputs)


def signature_problem(record: Solution, source: bytes | str, definition: Definition) -> str | None:
    """Why the entry point cannot be called as the Definition calls it, or None where it can.

    Args:
        record: names the function, the calling style and the tunables, which arrive as keyword arguments.
        source: text of the entry point's file; it parses and defines the function.
        definition: the operator.
    """
    function = find_function(source, record.spec.entry_function)
    if function is None:
        return None  # bound by an assignment or a decorator's result: only a call can tell
    definition = narrowed(definition, record.spec.omits)
    arguments = function.args
    given = called_with(definition, destination_passing_style=record.spec.destination_passing_style)
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    spelled = f"{function.name}({', '.join(positional)})"
    if required > len(given) or (len(positional) < len(given) and arguments.vararg is None):
        return f"{spelled} does not fit: {definition.name} calls it with ({', '.join(given)})"
    without_default = {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    if without_default:
        return f"{spelled}: keyword argument '{min(without_default)}' needs a default, since a call may leave it out"
    accepted = {*positional[len(given) :], *(argument.arg for argument in arguments.kwonlyargs)}
    unknown = [name for name in record.spec.tunables if name not in accepted]
    if unknown and arguments.kwarg is None:
        return f"{spelled} does not accept the tunable '{unknown[0]}' as a keyword argument"
    return None


def find_function(source: bytes | str, name: str) -> ast.FunctionDef | None:
    """The last definition of a function at the top level of a source text."""
    found = [node for node in parse_source(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None
