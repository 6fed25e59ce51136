"""What names and expressions stand for: imports and aliases followed through a Solution's sources without running them.

The order of statements does not matter: a name stands for everything that any of its bindings gives it, so that an alias
cannot hide behind a branch or a loop. What comes out of calls, containers and parameters is unknown; the rule
``module-as-value`` keeps modules out of all three.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping

from tilegym_db.verify.scan.scopes import (
    COMPREHENSIONS,
    FUNCTIONS,
    Module,
    NameBinding,
    Scope,
    ScopedVisitor,
    every_argument,
)

__all__ = ["Names"]

MAX_MEANINGS = 64
MAX_DEPTH = 16
"""Attributes in a row; what ``a = a.b`` would otherwise make endless."""

_BUILTIN_NAMES = frozenset(dir(builtins))
_ALIASES = (ast.Name, ast.Attribute, ast.NamedExpr, ast.IfExp, ast.BoolOp, ast.Call, ast.Starred, ast.Await)

Key = tuple[Scope, str]


class Names:
    """What names and expressions stand for, across the sources of one Solution.

    A path of another module is spelt from its root (``torch.cuda.Stream``, ``builtins.eval``). A path that begins with
    a dot lies in the Solution's own sources.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        """Bind every name of ``modules``, which go by their dotted names, and follow the aliases among them.

        Raises:
            ValueError: a name has so many meanings that following it is hopeless.
        """
        self.modules = modules
        self._final: dict[tuple[ast.expr, Scope], frozenset[str]] | None = None
        self._meanings: dict[Key, frozenset[str]] = {}
        roots = frozenset(name.partition(".")[0] for name in modules)
        for module in modules.values():
            _Binder(module, roots).visit_all(module.tree.body)
        self._spread_stars()
        self._follow()
        self._final = {}

    def resolve(self, node: ast.expr | None, scope: Scope) -> frozenset[str]:
        """Every path that an expression may stand for; empty where it is a value of its own."""
        if node is None or not isinstance(node, _ALIASES):
            return frozenset()
        if self._final is None:
            return self._paths(node, scope)
        if (node, scope) not in self._final:
            self._final[node, scope] = self._paths(node, scope)
        return self._final[node, scope]

    def literal(self, node: ast.expr | None, scope: Scope) -> ast.expr | None:
        """The literal behind a name that is bound once and to a literal; any other expression itself."""
        bindings = self.bindings(node, scope) if node is not None else []
        only = bindings[0].value if len(bindings) == 1 else None
        return only if isinstance(only, ast.Constant | ast.List | ast.Tuple) else node

    def text(self, node: ast.expr | None, scope: Scope) -> str | None:
        """The string that an expression certainly is, or None where it is computed."""
        literal = self.literal(node, scope)
        return literal.value if isinstance(literal, ast.Constant) and isinstance(literal.value, str) else None

    def attribute(self, node: ast.Call, scope: Scope) -> str | None:
        """The name that ``getattr(x, "name")`` reads, or None where it is computed."""
        return self.text(node.args[1], scope) if len(node.args) > 1 else None

    def bindings(self, node: ast.expr, scope: Scope) -> list[NameBinding]:
        """The bindings of a plain name; empty for anything else."""
        if not isinstance(node, ast.Name):
            return []
        holder = scope.holder(node.id)
        return holder.bindings.get(node.id, []) if holder is not None else []

    def _spread_stars(self) -> None:
        """Bind what ``from .part import *`` takes from an own source: every name of it."""
        changed = True
        while changed:
            changed = False
            for module in self.modules.values():
                for scope, base in module.stars:
                    source = self.modules.get(base)
                    for name in list(source.scope.bindings) if source is not None else ():
                        if not any(binding.path == f".{base}.{name}" for binding in scope.bindings.get(name, ())):
                            scope.bind(name, NameBinding(path=f".{base}.{name}"))
                            changed = True

    def _follow(self) -> None:
        """Give every name all meanings of its bindings, until nothing changes."""
        pending: list[tuple[Key, list[NameBinding]]] = []
        for module in self.modules.values():
            for scope in module.scopes.values():
                for name, bindings in scope.bindings.items():
                    useful = [item for item in bindings if item.path or isinstance(item.value, _ALIASES)]
                    if useful:
                        pending.append(((scope, name), useful))
        changed = True
        while changed:
            changed = False
            for key, bindings in pending:
                before = self._meanings.get(key, frozenset())
                found = before.union(*map(self._meaning, bindings))
                if len(found) > MAX_MEANINGS:
                    raise ValueError(f"the name {key[1]} has more than {MAX_MEANINGS} meanings")
                if found != before:
                    self._meanings[key] = found
                    changed = True

    def _meaning(self, binding: NameBinding) -> frozenset[str]:
        if binding.path is not None:
            return self._own_member(binding.path)
        return self.resolve(binding.value, binding.scope) if binding.scope is not None else frozenset()

    def _paths(self, node: ast.expr, scope: Scope) -> frozenset[str]:
        match node:
            case ast.Name():
                return self._name(node.id, scope)
            case ast.Attribute():
                return self._members(self.resolve(node.value, scope), node.attr)
            case ast.NamedExpr() | ast.Starred() | ast.Await():
                return self.resolve(node.value, scope)
            case ast.IfExp():
                return self.resolve(node.body, scope) | self.resolve(node.orelse, scope)
            case ast.BoolOp():
                return frozenset[str]().union(*(self.resolve(value, scope) for value in node.values))
            case ast.Call() if "builtins.getattr" in self.resolve(node.func, scope):
                name = self.attribute(node, scope)
                return self._members(self.resolve(node.args[0], scope), name) if name else frozenset()
        return frozenset()

    def _name(self, name: str, scope: Scope) -> frozenset[str]:
        holder = scope.holder(name)
        builtin = frozenset({f"builtins.{name}"} if name in _BUILTIN_NAMES else ())
        if holder is None or name not in holder.bindings:
            return builtin
        found = self._meanings.get((holder, name), frozenset())
        # Where a module or class binds a name on a path that is not taken, the one further out is meant.
        if holder.parent is None:
            return found | builtin
        return found | self._name(name, holder.parent) if holder.is_class else found

    def _members(self, bases: frozenset[str], name: str) -> frozenset[str]:
        shallow = (base for base in bases if base.count(".") < MAX_DEPTH)
        return frozenset[str]().union(*(self._own_member(f"{base}.{name}") for base in shallow))

    def _own_member(self, path: str) -> frozenset[str]:
        """A path in the Solution's own sources stands for what that source binds it to."""
        holder, name = self._owner(path)
        return (self._meanings.get((holder, name), frozenset()) if holder is not None else frozenset()) or frozenset(
            {path}
        )

    def _owner(self, path: str) -> tuple[Scope | None, str]:
        """The scope of the own module that a path leads into, with the name there; None where it leads into none."""
        if not path.startswith("."):
            return None, ""
        owner, _, name = path[1:].rpartition(".")
        module = self.modules.get(owner or "__init__")
        return (module.scope if module is not None and name in module.scope.bindings else None), name

    def is_own_module(self, path: str) -> bool:
        """True for a source of the Solution, unless its package gives the same name to something else."""
        return path.startswith(".") and path[1:] in self.modules and self._owner(path)[0] is None


class _Binder(ScopedVisitor):
    """First walk: makes the scopes and fills their bindings."""

    def __init__(self, module: Module, own: frozenset[str]) -> None:
        self.module, self.own = module, own
        self.scope = Scope(module.tree, None)
        module.scopes[module.tree] = self.scope

    def open_scope(self, node: ast.AST) -> Scope:
        scope = Scope(node, self.scope)
        self.module.scopes[node] = scope
        if isinstance(node, FUNCTIONS):
            for argument in every_argument(node.args):
                scope.bind(argument.arg, NameBinding(node=argument))
        body = getattr(node, "body", None)
        for statement in ast.walk(ast.Module(body, [])) if isinstance(body, list) else ():
            # Declarations count for the whole body, wherever they stand in it. Those of nested functions are taken along:
            # that only makes a name mean more.
            if isinstance(statement, ast.Global):
                scope.outer.update(dict.fromkeys(statement.names, scope.root))
            elif isinstance(statement, ast.Nonlocal):
                scope.outer.update({name: self.scope.holder(name) or scope.root for name in statement.names})
        return scope

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.bind(node.name, NameBinding(node=node))
        super().visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.bind(node.name, NameBinding(node=node))
        super().visit_ClassDef(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            prefix = "." if root in self.own else ""
            self._note_module(alias.name)
            self.scope.bind(alias.asname or root, NameBinding(path=prefix + (alias.name if alias.asname else root)))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            base = f".{self.module.absolute(node.level, node.module)}"
        else:
            name = node.module or ""
            base = f".{name}" if name.partition(".")[0] in self.own else name
            self._note_module(name)
        for alias in node.names:
            if alias.name == "*" and base.startswith("."):
                self.module.stars.append((self.scope, base[1:]))
            path = f"{base}{alias.name}" if base == "." else f"{base}.{alias.name}"
            self.scope.bind(alias.asname or alias.name, NameBinding(path=path))

    def _note_module(self, name: str) -> None:
        parts = name.split(".")
        if parts[0] not in self.own:
            self.module.imported |= {".".join(parts[: end + 1]) for end in range(len(parts))}

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind_target(target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind_target(node.target, node.value)
        self.visit_all([node.annotation, node.value])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        holder = self.scope
        while isinstance(holder.node, COMPREHENSIONS) and holder.parent is not None:
            holder = holder.parent
        holder.bind(node.target.id, NameBinding(value=node.value, scope=self.scope))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self.scope.bind(node.id, NameBinding())

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.scope.bind(node.name, NameBinding())
        self.generic_visit(node)

    def _bind_pattern(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self.scope.bind(name, NameBinding())
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = _bind_pattern

    def _bind_target(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.scope.bind(target.id, NameBinding(value=value, scope=self.scope))
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            self.visit(target)  # lengths may differ, and a starred part shifts the rest
            for part, given in zip(target.elts, value.elts, strict=False):
                self._bind_target(part, given)
        else:
            self.visit(target)
