"""Modules, classes, functions and comprehensions as scopes of names, and a walk that knows which one it is in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["COMPREHENSIONS", "FUNCTIONS", "Module", "NameBinding", "Scope", "ScopedVisitor", "every_argument"]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, eq=False)
class NameBinding:
    """One way in which a name gets a meaning: a path, an expression to resolve, or something defined in the source."""

    path: str | None = None
    value: ast.expr | None = None
    scope: Scope | None = None
    node: ast.AST | None = None
    """A definition (class, function, parameter); None for what is not known, such as a loop variable."""


@dataclass(eq=False)
class Scope:
    """A module, class, function or comprehension with the names that are bound in it."""

    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[NameBinding]] = field(default_factory=dict)
    outer: dict[str, Scope] = field(default_factory=dict)
    """Names declared ``global`` or ``nonlocal``, with the scope that holds them."""

    @property
    def is_class(self) -> bool:
        """True for the body of a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def root(self) -> Scope:
        """The module's scope."""
        return self if self.parent is None else self.parent.root

    def function(self) -> Scope | None:
        """The innermost function or lambda around, or None at module and class level."""
        if isinstance(self.node, FUNCTIONS):
            return self
        return None if self.is_class or self.parent is None else self.parent.function()

    def holder(self, name: str) -> Scope | None:
        """The scope whose binding a use of ``name`` here means; None for builtins and unknown names."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.outer:
                return scope.outer[name]
            # The body of a class sees its own names; the functions in it do not.
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None

    def bind(self, name: str, binding: NameBinding) -> None:
        """Add one meaning of a name."""
        self.outer.get(name, self).bindings.setdefault(name, []).append(binding)


@dataclass(eq=False)
class Module:
    """One parsed source: its path, its dotted name within the Solution, and its scopes by syntax node."""

    path: str
    name: str
    tree: ast.Module
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    """Every dotted name, with its parents, that an import statement makes a module."""
    stars: list[tuple[Scope, str]] = field(default_factory=list)
    """Where ``from .part import *`` stands, with the dotted name of the part."""

    @property
    def scope(self) -> Scope:
        """The scope of the module itself."""
        return self.scopes[self.tree]

    @property
    def package(self) -> str:
        """The dotted name of the folder it lies in; empty for the Solution's own folder."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    def absolute(self, level: int, name: str | None) -> str:
        """What ``from ...name import`` with that many dots means, as a dotted name within the Solution."""
        parts = self.package.split(".") if self.package else []
        kept = parts[: len(parts) - (level - 1)]
        return ".".join([*kept, *([name] if name else [])])


class ScopedVisitor(ast.NodeVisitor):
    """Walks a module and keeps ``self.scope`` at the scope that each expression is evaluated in."""

    scope: Scope

    def open_scope(self, node: ast.AST) -> Scope:
        """The scope that a node opens."""
        raise NotImplementedError

    @contextmanager
    def inside(self, node: ast.AST) -> Iterator[None]:
        """Walk in the scope of ``node``."""
        before, self.scope = self.scope, self.open_scope(node)
        try:
            yield
        finally:
            self.scope = before

    def visit_all(self, nodes: list[ast.expr] | list[ast.stmt] | list[ast.keyword] | list[ast.expr | None]) -> None:
        """Walk several nodes."""
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: D102
        self.visit_all(node.decorator_list)
        self._visit_signature(node.args)
        if node.returns is not None:
            self.visit_annotation(node.returns)
        with self.inside(node):
            self.visit_all(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:  # noqa: D102
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:  # noqa: D102
        self._visit_signature(node.args)
        with self.inside(node):
            self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: D102
        self.visit_all(node.decorator_list)
        self.visit_all(node.bases)
        self.visit_all(node.keywords)
        with self.inside(node):
            self.visit_all(node.body)

    def _visit_signature(self, arguments: ast.arguments) -> None:
        self.visit_all([*arguments.defaults, *arguments.kw_defaults])
        for argument in every_argument(arguments):
            if argument.annotation is not None:
                self.visit_annotation(argument.annotation)

    def visit_annotation(self, node: ast.expr) -> None:
        """Walk the annotation of a parameter or of what a function returns."""
        self.visit(node)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # evaluated outside, before any of the names exist
        with self.inside(node):
            self.visit(first.target)
            self.visit_all(first.ifs)
            for generator in others:
                self.visit(generator)
            self.visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension


def every_argument(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters, the starred ones last."""
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]
