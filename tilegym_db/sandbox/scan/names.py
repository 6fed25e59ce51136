"""Resolves names and expressions: follows imports and aliases through a Solution's sources without running them.

The order of statements does not matter. A name stands for everything that any of its bindings assigns to it, so that a
branch or a loop cannot hide an alias. Results of calls, containers and parameters are unknown; the rule
``module-as-value`` keeps modules out of all three.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilegym_db.sandbox.scan.tables import (
    CLOSED,
    FORBIDDEN,
    LISTED_ROOTS,
    MEMBERS,
    REFERENCE,
    RULES,
    SMUGGLED,
    VALUES,
    WORDS,
    Finding,
    Severity,
    is_listed,
    is_public_dunder,
    label,
    nearest,
    path_rule,
    words,
)

# ---- context --------------------------------------------------------------------------------------
# Rules check a place in a source with its names, scope, declared libraries and report.

TORCH_CLASS = re.compile(r"torch\.([\w.]+\.)?[A-Z][A-Z]*[a-z]\w*")


def _is_closed(name: str) -> bool:
    """Return True for a name that values from elsewhere have too, such as a private one; a class of a source may not open it."""
    return name in CLOSED or name.startswith("_")


def is_external(path: str) -> bool:
    """Return True for a member of another module, except builtins."""
    return not path.startswith((".", "builtins."))


@dataclass
class ScanReport:
    """The findings of one source, each (line, rule, subject) once."""

    path: str
    findings: dict[tuple[int, str, str], Finding] = field(default_factory=dict)

    def add(self, node: ast.AST | None, rule: str, what: str) -> None:
        """Record that ``what`` at ``node`` (None: the whole file) breaks a rule."""
        self.add_at(getattr(node, "lineno", 0), getattr(node, "col_offset", 0), rule, what)

    def add_at(self, line: int, column: int, rule: str, what: str) -> None:
        """Record that ``what`` at a line breaks a rule."""
        known = RULES[rule]
        finding = Finding(self.path, line, column, rule, known.severity, f"{what}; {known.instead}")
        self.findings.setdefault((line, rule, what), finding)


@dataclass
class Context:
    """A source that is being checked. ``scope`` follows the walk."""

    module: Module
    names: Names
    language: str
    declared: frozenset[str]
    """Import roots of the Solution's dependencies."""
    report: ScanReport
    scope: Scope
    own_names: frozenset[str] = frozenset()
    """Attributes that the Solution's own classes and modules define, for values that are known to be its own."""
    own_fields: frozenset[str] = frozenset()
    """Attributes of the Solution's own classes; any value may have them."""
    own_operators: frozenset[str] = frozenset()
    """Paths of the operators that the Solution registers: ``torch.ops.mine.scale``."""
    may_hold_module: set[ast.AST] = field(default_factory=set)
    """Expressions at places that may hold a module: before a dot, or on the right of a plain alias."""
    called_operators: set[ast.AST] = field(default_factory=set)
    """Called expressions that name an attention operator in full."""
    plain_formats: set[ast.AST] = field(default_factory=set)
    """``"...".format`` expressions that are called and whose text reads no attributes."""

    def resolve(self, node: ast.expr | None) -> frozenset[str]:
        """Return all paths that an expression may stand for in the current scope."""
        return self.names.resolve(node, self.scope)

    def text(self, node: ast.expr | None) -> str | None:
        """Return the string value of an expression if it is certain, otherwise None."""
        return self.names.text(node, self.scope)

    def is_module(self, path: str) -> bool:
        """Return True for a path that is known to be a module."""
        return self.names.is_own_module(path) or path in MEMBERS or path in self.module.imported

    def check_path(self, node: ast.AST, path: str, *, imported: bool = False) -> bool:
        """Check a path that is imported or used; return True if it is allowed."""
        root = path.partition(".")[0]
        if not root:  # a path of the Solution itself
            return True
        verb = "imports" if imported else "uses"
        noted = path_rule(path)
        is_allowed = is_listed(path) if root in LISTED_ROOTS else label(path) == "unlisted-member"
        is_allowed &= path == "os.environ.get" or not path.startswith("os.environ.")
        if is_allowed or path in self.own_operators or node in self.called_operators:
            if noted in RULES and RULES[noted].severity is Severity.SOFT:
                self.report.add(node, noted, f"{verb} {path}")
            return True
        rule = "os-call" if root == "os" else label(path)
        meant = nearest(path) if rule == "unlisted-member" else None
        hint = "" if meant is None else f" (did you mean {meant}?)"
        self.report.add(node, rule, f"{verb} {path.removeprefix('builtins.')}{hint}")
        return False

    def check_escape(self, node: ast.expr, path: str) -> None:
        """Refuse a module, or the environment, if it is used as a value."""
        if node in self.may_hold_module:
            return
        if path == "os.environ":
            self.report.add(node, "environment", "uses the whole environment")
        elif self.is_module(path):
            self.report.add(node, "module-as-value", f"uses the module {path.lstrip('.')} as a value")

    def check_attribute_name(self, node: ast.AST, name: str, *, resolved: bool, own: bool = False) -> None:
        """Check the name of an attribute of any value.

        Args:
            resolved: True if the whole path is known and already checked.
            own: True for an attribute of an instance of an own class.
        """
        if name.startswith("__") and name.endswith("__"):
            if not is_public_dunder(name):
                self.report.add(node, "dunder-access", f"reads {name}")
        elif self.language == REFERENCE and name in WORDS["reference-values"]:
            return
        elif name in FORBIDDEN and not (resolved and (name in SMUGGLED or name == "_C")):
            self.report.add(node, FORBIDDEN[name], f"uses .{name}")
        elif name in ("format", "format_map") and node not in self.plain_formats:
            self.report.add(node, "dynamic-attribute", f"uses .{name} with a text that may read attributes")
        elif not (
            resolved
            or name in VALUES
            or (name in self.own_names if own else name in self.own_fields and not _is_closed(name))
        ):
            self.report.add(node, "unlisted-member", f"reads .{name}")

    def check_class(self, node: ast.expr | None) -> None:
        """Refuse a torch class that is passed on, because the receiver could change it."""
        for path in sorted(self.resolve(node)):
            if TORCH_CLASS.fullmatch(path) and node is not None:
                self.report.add(node, "module-as-value", f"hands on the class {path}")

    def allow_module(self, value: ast.expr | None) -> None:
        """Allow a module as ``value``, the right-hand side of a plain alias, and in the parts of such an expression."""
        match value:
            case ast.Name() | ast.Attribute():
                self.may_hold_module.add(value)
            case ast.IfExp():
                self.allow_module(value.body)
                self.allow_module(value.orelse)
            case ast.BoolOp():
                for part in value.values:
                    self.allow_module(part)
            case ast.NamedExpr():
                self.allow_module(value.value)


# ---- scopes ---------------------------------------------------------------------------------------
# Modules, classes, functions and comprehensions are scopes of names.

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, eq=False)
class NameBinding:
    """A binding of a name: a path, an expression to resolve, or a definition in the source."""

    path: str | None = None
    value: ast.expr | None = None
    scope: Scope | None = None
    node: ast.AST | None = None
    """The definition (class, function, parameter); None if it is unknown, such as a loop variable."""


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
        """Return the innermost enclosing function or lambda, or None at module and class level."""
        if isinstance(self.node, FUNCTIONS):
            return self
        return None if self.is_class or self.parent is None else self.parent.function()

    def holder(self, name: str) -> Scope | None:
        """Return the scope that binds ``name`` as used here; None for builtins and unknown names."""
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
    """Scope of each ``from .part import *``, with the dotted name of the part."""

    @property
    def scope(self) -> Scope:
        """The scope of the module itself."""
        return self.scopes[self.tree]

    @property
    def package(self) -> str:
        """The dotted name of the folder it lies in; empty for the Solution's own folder."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    def absolute(self, level: int, name: str | None) -> str:
        """Return the dotted name within the Solution for ``from ...name import`` with that many dots."""
        parts = self.package.split(".") if self.package else []
        kept = parts[: len(parts) - (level - 1)]
        return ".".join([*kept, *([name] if name else [])])


class ScopedVisitor(ast.NodeVisitor):
    """Walks a module and keeps ``self.scope`` at the scope that each expression is evaluated in."""

    scope: Scope

    def open_scope(self, node: ast.AST) -> Scope:
        """Return the scope that a node opens."""
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
        """Walk the annotation of a parameter or a return value."""
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
    """Return all parameters, the starred ones last."""
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


MAX_MEANINGS = 64
MAX_TEXT = 1 << 16
MAX_DEPTH = 16
"""Maximum number of attributes in a row, which stops ``a = a.b``."""

_BUILTIN_NAMES = frozenset(dir(builtins))
_ALIASES = (ast.Name, ast.Attribute, ast.NamedExpr, ast.IfExp, ast.BoolOp, ast.Call, ast.Starred, ast.Await)

Key = tuple[Scope, str]


class Names:
    """A resolver of names and expressions across the sources of one Solution.

    A path of another module is spelt from its root (``torch.cuda.Stream``, ``builtins.eval``). A path that begins with
    a dot lies in the Solution's own sources.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        """Bind every name of ``modules``, which go by their dotted names, and follow the aliases among them."""
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
        """Return every path that an expression may stand for; empty for a new value."""
        if node is None or not isinstance(node, _ALIASES):
            return frozenset()
        if self._final is None:
            return self._paths(node, scope)
        if (node, scope) not in self._final:
            self._final[node, scope] = self._paths(node, scope)
        return self._final[node, scope]

    def literal(self, node: ast.expr | None, scope: Scope) -> ast.expr | None:
        """Return the literal behind a name that is bound once, to a literal; return any other expression unchanged."""
        bindings = self.bindings(node, scope) if node is not None else []
        only = bindings[0].value if len(bindings) == 1 else None
        return only if isinstance(only, ast.Constant | ast.List | ast.Tuple) else node

    def text(self, node: ast.expr | None, scope: Scope) -> str | None:
        """Return the string value of an expression of constants, or None if it is computed from anything else."""
        value = self._constant(node, scope, MAX_DEPTH)
        return value if isinstance(value, str) and len(value) <= MAX_TEXT else None

    def number(self, node: ast.expr | None, scope: Scope) -> int | None:
        """Return the whole number behind a constant or a name that is bound once to one, or None."""
        value = self._constant(node, scope, MAX_DEPTH)
        return value if isinstance(value, int) else None

    def _constant(self, node: ast.expr | None, scope: Scope, depth: int) -> Any:
        """Return the value of an expression of constants, or None; names count if they are bound once."""

        def value_of(part: ast.expr | None) -> Any:
            return self._constant(part, scope, depth - 1) if depth else None

        match self.literal(node, scope) if depth else None:
            case ast.Constant(value=str() | int() as value):
                return value
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return None if (found := value_of(value)) is None else str(found)
            case ast.JoinedStr(values=parts):
                texts = [value_of(part) for part in parts]
                return None if None in texts else "".join(texts)
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult() | ast.Mod() as operator, right=right):
                return _combined(value_of(left), operator, value_of(right))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                texts = [value_of(part) for part in parts]
                return None if None in texts else tuple(texts)
            case ast.Call(func=ast.Attribute(value=glue, attr="join"), args=[parts]):
                text, texts = value_of(glue), value_of(parts)
                return text.join(map(str, texts)) if isinstance(text, str) and isinstance(texts, tuple) else None
        name = node.id if isinstance(node, ast.Name) else ""
        holder = scope.holder(name) if name else None
        bound = holder.bindings.get(name, []) if holder is not None else []
        only = bound[0] if len(bound) == 1 else None
        return (
            self._constant(only.value, only.scope, depth - 1) if only is not None and only.scope is not None else None
        )

    def attribute(self, node: ast.Call, scope: Scope) -> str | None:
        """Return the name that ``getattr(x, "name")`` reads, or None if it is computed."""
        return self.text(node.args[1], scope) if len(node.args) > 1 else None

    def bindings(self, node: ast.expr, scope: Scope) -> list[NameBinding]:
        """Return the bindings of a plain name; empty for anything else."""
        if not isinstance(node, ast.Name):
            return []
        holder = scope.holder(node.id)
        return holder.bindings.get(node.id, []) if holder is not None else []

    def _spread_stars(self) -> None:
        """Bind every name that ``from .part import *`` takes from a source of the Solution."""
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
        # A module or class may bind a name only on a path that is not taken. Then the outer name is meant.
        if holder.parent is None:
            return found | builtin
        return found | self._name(name, holder.parent) if holder.is_class else found

    def _members(self, bases: frozenset[str], name: str) -> frozenset[str]:
        shallow = (base for base in bases if base.count(".") < MAX_DEPTH)
        return frozenset[str]().union(*(self._own_member(f"{base}.{name}") for base in shallow))

    def _own_member(self, path: str) -> frozenset[str]:
        """Resolve a path in the Solution's own sources to the paths that the source binds it to."""
        holder, name = self._owner(path)
        return (self._meanings.get((holder, name), frozenset()) if holder is not None else frozenset()) or frozenset(
            {path}
        )

    def _owner(self, path: str) -> tuple[Scope | None, str]:
        """Split a path into the scope of a module of the Solution and a name in this scope; None if no module has the name."""
        if not path.startswith("."):
            return None, ""
        owner, _, name = path[1:].rpartition(".")
        module = self.modules.get(owner or "__init__")
        return (module.scope if module is not None and name in module.scope.bindings else None), name

    def is_own_module(self, path: str) -> bool:
        """Return True for a source of the Solution, unless its package binds the same name to something else."""
        return path.startswith(".") and path[1:] in self.modules and self._owner(path)[0] is None


def _combined(left: Any, operator: ast.operator, right: Any) -> str | None:
    """Return the text that a sum, a repetition or a formatted string gives; None if it is no text, or a very long one."""
    if isinstance(left, int) and isinstance(right, str):
        left, right = right, left
    match left, operator, right:
        case str(), ast.Add(), str():
            return str(left + right)
        case str(), ast.Mult(), int() if len(left) * right <= MAX_TEXT:
            return str(left * right)
    return None


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
            # Declarations hold for the whole body. Those of nested functions are included, which only adds meanings to a name.
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


# ---- language -------------------------------------------------------------------------------------
# The part of Python that a source may use: functions, loops, conditions, expressions, and plain records.
#
# A kernel is served inside the user's process, so the scan must know which code a source can reach. Class machinery and
# patterns on classes reach attributes without naming them. Kernels do not need them, so every syntax node that is not in
# ``[language]`` of ``words.txt`` is refused, whatever it would do.


OUTSIDE = "outside-language"

HINTS = {
    "AsyncFunctionDef": "an async function; write it without 'async'",
    "AsyncFor": "an async loop; write it without 'async'",
    "AsyncWith": "an async with; write it without 'async'",
    "Await": "await; call the function",
    "Try": "try; compare shapes and dtypes instead of catching errors",
    "MatchClass": "a pattern on a class, which reads attributes by position; compare with if",
    "MatchMapping": "a pattern on a mapping; compare with if",
    "TypeAlias": "a type statement; write an assignment",
}
"""Kind of a syntax node that is not in the language -> what it is, and how to write it."""


def check_grammar(context: Context) -> None:
    """Report every node of a source that is outside the allowed language; :func:`check_class` judges classes."""
    for node in ast.walk(context.module.tree):
        kind = type(node).__name__
        if kind not in WORDS["language"]:
            context.report.add(node, OUTSIDE, f"uses {HINTS.get(kind, f'{kind}, which kernels do not need')}")
        for name in _defined(node):
            if name.startswith("__") and name not in WORDS["record-methods"] | WORDS["module-names"]:
                what = f"uses the name {name}, which Python itself reads; choose another name"
                context.report.add(node, OUTSIDE, what)


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines or passes on: functions, parameters, fields, keywords, aliases, captures."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or ""
    elif isinstance(node, ast.MatchAs | ast.MatchStar):
        yield node.name or ""


# ---- classes --------------------------------------------------------------------------------------


def check_class(context: Context, node: ast.ClassDef) -> None:
    """Report a class that is more than a record: a ``NamedTuple``, a dataclass, or a class without base and decorator.

    ``context.scope`` is the scope around it.
    """
    bases = [_paths(context, base) for base in node.bases]
    makers = [_paths(context, one) for one in node.decorator_list]
    is_named_tuple = len(bases) == 1 and _is_one_of(bases[0], WORDS["record-bases"]) and not makers
    is_record = not bases and all(_is_one_of(maker, WORDS["record-decorators"]) for maker in makers)
    problem = ""
    if node.keywords:
        problem = f"gives the class {node.name} a keyword ({node.keywords[0].arg or '**'})"
    elif context.scope.is_class:
        problem = f"defines the class {node.name} in a class"
    elif not is_named_tuple and not is_record:
        problem = f"defines the class {node.name}, which has a base other than NamedTuple, or a decorator other than dataclass"
    elif is_record and not all(map(_has_plain_options, node.decorator_list)):
        problem = f"gives dataclass options of {node.name} that are computed"
    if problem:
        context.report.add(node, OUTSIDE, problem)
        return
    for statement in node.body:
        reason = _why_not_in_a_record(context, statement)
        if reason:
            context.report.add(statement, OUTSIDE, f"{reason} in the class {node.name}; keep fields and plain methods")


def _paths(context: Context, expression: ast.expr) -> frozenset[str]:
    return context.resolve(expression.func if isinstance(expression, ast.Call) else expression)


def _is_one_of(paths: frozenset[str], allowed: frozenset[str]) -> bool:
    return bool(paths) and paths <= allowed


def _has_plain_options(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return True
    return not decorator.args and all(
        option.arg is not None and isinstance(option.value, ast.Constant) and isinstance(option.value.value, bool)
        for option in decorator.keywords
    )


def _why_not_in_a_record(context: Context, statement: ast.stmt) -> str:
    if isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ):
        return ""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return ""
    if isinstance(statement, ast.FunctionDef):
        unknown = [
            one for one in statement.decorator_list if not _is_one_of(context.resolve(one), WORDS["method-decorators"])
        ]
        return f"decorates {statement.name} with {ast.unparse(unknown[0])[:40]}" if unknown else ""
    return f"has a {type(statement).__name__} statement"


# ---- texts of values ------------------------------------------------------------------------------

PRINTED = words("dtype shape ndim device name itemsize type index bits")
"""Attributes of values whose text may be used. The text of a method has the address of its tensor."""


def check_printed(context: Context, node: ast.expr, depth: int = 4) -> None:
    """Refuse the text of a function, a method or a plain object, which has an address in it."""
    if isinstance(node, ast.Attribute):
        is_plain = node.attr in PRINTED or node.attr in context.own_fields or bool(context.resolve(node))
        has_address = not is_plain
    elif isinstance(node, ast.Call):
        has_address = "builtins.object" in context.resolve(node.func)
    else:
        bindings = context.names.bindings(node, context.scope)
        has_address = any(isinstance(one.node, ast.FunctionDef | ast.ClassDef) for one in bindings)
        has_address |= isinstance(node, ast.Lambda)
        for value in [one.value for one in bindings if one.value is not None] if depth else ():
            if isinstance(value, ast.Attribute | ast.Name | ast.Lambda):
                check_printed(context, value, depth - 1)
    if has_address:
        context.report.add(
            node, "address-as-value", f"makes a text of {ast.unparse(node)[:40]}, which may have an address"
        )
