"""Compares the stand-ins of ``tests/library_stand_ins.py`` with the sources of the libraries, read as text.

Unpack the wheels of the releases into one folder, and run this before ``libraries.toml`` names another release:

    pip download --no-deps flashinfer-python liger-kernel && unzip -q -d FOLDER '*.whl'
    PYTHONPATH=tests python tools/library_signatures.py FOLDER
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import library_stand_ins

Parameters = list[tuple[str, str, str | None]]
"""Name, kind, and the default as text, None where there is none."""


def definitions(folder: Path, module: str, name: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield what the package of a module defines under a name; it may define in one file what another exports."""
    path = folder.joinpath(*module.split("."))
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and not is_overload(node):
                yield node


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return True for what only describes types."""
    return any(isinstance(item, ast.Name) and item.id == "overload" for item in node.decorator_list)


def written(function: ast.FunctionDef) -> Parameters:
    """Return the parameters in a source."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(node) for node in arguments.defaults]
    found: Parameters = [(item.arg, "positional", text) for item, text in zip(positional, defaults, strict=True)]
    for item, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((item.arg, "keyword", None if node is None else ast.unparse(node)))
    return found


def standing_in(member: object) -> Parameters:
    """Return the parameters of a stand-in; of a function for autograd, those of its forward."""
    function = member.forward if isinstance(member, type) else member
    found: Parameters = []
    for item in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        kind = "keyword" if item.kind is item.KEYWORD_ONLY else "positional"
        found.append((item.name, kind, None if item.default is item.empty else repr(item.default)))
    return found


def same(one: Parameters, other: Parameters) -> bool:
    """Return whether two lists of parameters say the same, ``1e-6`` and ``1e-06`` alike."""

    def plain(parameters: Parameters) -> list[object]:
        return [(name, kind, text if text is None else ast.literal_eval(text)) for name, kind, text in parameters]

    return plain(one) == plain(other)


def main() -> int:
    """Print each member that differs; 1 where one does."""
    folder, wrong = Path(sys.argv[1]), 0
    for module, members in library_stand_ins.MODULES.items():
        for member in members:
            name = member.__name__
            nodes = list(definitions(folder, module, name))
            functions = [
                next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward")
                if isinstance(node, ast.ClassDef)
                else node
                for node in nodes
            ]
            agrees = any(same(written(function), standing_in(member)) for function in functions)
            wrong += not agrees
            print(f"{'same     ' if agrees else 'DIFFERENT'} {module}.{name}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
