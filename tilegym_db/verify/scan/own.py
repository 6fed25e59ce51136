"""What a Solution's sources define themselves: attributes of their classes and modules, and operators."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tilegym_db.verify.scan.names import Names
from tilegym_db.verify.scan.scopes import Module
from tilegym_db.verify.scan.tables import FORBIDDEN, OPERATOR_MAKERS

__all__ = ["own_names", "own_operators"]

FIELDS = ("namedtuple", "NamedTuple", "SimpleNamespace", "TypedDict", "Enum", "IntEnum")


def own_names(modules: Iterable[Module]) -> frozenset[str]:
    """Every attribute that a class or module of the sources gives a value to; none that is refused everywhere."""
    found: set[str] = set()
    for module in modules:
        for scope in module.scopes.values():
            if scope.is_class or scope.parent is None:
                found |= scope.bindings.keys()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Call):
                found.update(_fields(node))
    return frozenset(found - FORBIDDEN.keys())


def _fields(node: ast.Call) -> Iterator[str]:
    """The fields of ``namedtuple("Tile", "rows columns")`` and its like."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if called in FIELDS:
        yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
        yield from (name for text in texts if isinstance(text, str) for name in re.findall(r"\w+", text))


def own_operators(modules: Iterable[Module], names: Names) -> frozenset[str]:
    """The paths of the operators that the sources register: ``torch.ops.mine.scale`` and its overload ``default``."""
    found: set[str] = set()
    for module in modules:
        for scope in module.scopes.values():
            for node in ast.walk(scope.node) if scope.parent is None else ():
                if isinstance(node, ast.Call) and names.resolve(node.func, scope) & OPERATOR_MAKERS and node.args:
                    text = names.text(node.args[0], scope) or ""
                    space, _, name = text.partition("::")
                    found |= (
                        {f"torch.ops.{space}{end}" for end in ("", f".{name}", f".{name}.default")} if name else set()
                    )
    return frozenset(found)
