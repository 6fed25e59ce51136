"""What every rule needs to judge a place in a source: names, scope, declared libraries, and where to report."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from tilegym_db.verify.scan.findings import Finding, Severity
from tilegym_db.verify.scan.names import Names
from tilegym_db.verify.scan.scopes import Module, Scope
from tilegym_db.verify.scan.tables import (
    CLOSED,
    FORBIDDEN,
    LISTED_ROOTS,
    MEMBERS,
    RULES,
    SMUGGLED,
    VALUES,
    is_listed,
    is_public_dunder,
    label,
    path_rule,
)

__all__ = ["Context", "ScanReport", "is_external"]

TORCH_CLASS = re.compile(r"torch\.([\w.]+\.)?[A-Z][A-Z]*[a-z]\w*")


def is_external(path: str) -> bool:
    """True for something of another module, builtins excepted."""
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
    """One source under judgement. ``scope`` follows the walk."""

    module: Module
    names: Names
    language: str
    declared: frozenset[str]
    """Import roots of the Solution's dependencies."""
    report: ScanReport
    scope: Scope
    own_names: frozenset[str] = frozenset()
    """Attributes that the Solution's own classes and modules define."""
    own_operators: frozenset[str] = frozenset()
    """Paths of the operators that the Solution registers: ``torch.ops.mine.scale``."""
    may_hold_module: set[ast.AST] = field(default_factory=set)
    """Expressions that stand where a module may: before a dot, or on the right of a plain alias."""
    may_hold_class: set[ast.AST] = field(default_factory=set)
    """Expressions that stand where a class may: in ``isinstance``, in a comparison, in a type, in an f-string."""
    called_operators: set[ast.AST] = field(default_factory=set)
    """What is called, where it is written out and one of the attention operators."""
    plain_formats: set[ast.AST] = field(default_factory=set)
    """``"...".format`` where it is called and its text reads no attributes."""

    def resolve(self, node: ast.expr | None) -> frozenset[str]:
        """What an expression stands for, here."""
        return self.names.resolve(node, self.scope)

    def text(self, node: ast.expr | None) -> str | None:
        """The string that an expression certainly is."""
        return self.names.text(node, self.scope)

    def is_module(self, path: str) -> bool:
        """True for a path that is known to be a module."""
        return self.names.is_own_module(path) or path in MEMBERS or path in self.module.imported

    def check_path(self, node: ast.AST, path: str, *, imported: bool = False) -> bool:
        """Judge a path that is imported or used; True where it is harmless."""
        root = path.partition(".")[0]
        if not root:  # of the Solution's own
            return True
        verb = "imports" if imported else "uses"
        noted = path_rule(path)
        is_allowed = is_listed(path) if root in LISTED_ROOTS else label(path) == "unlisted-member"
        is_allowed &= not path.startswith("builtins.type.")
        is_allowed &= path == "os.environ.get" or not path.startswith("os.environ.")
        if is_allowed or path in self.own_operators or node in self.called_operators:
            if noted in RULES and RULES[noted].severity is Severity.SOFT:
                self.report.add(node, noted, f"{verb} {path}")
            return True
        rule = "os-call" if root == "os" else label(path)
        self.report.add(node, rule, f"{verb} {path.removeprefix('builtins.')}")
        return False

    def check_escape(self, node: ast.expr, path: str) -> None:
        """Refuse a module, or the environment, where it is used as a value."""
        if node in self.may_hold_module:
            return
        if path == "os.environ":
            self.report.add(node, "environment", "uses the whole environment")
        elif self.is_module(path):
            self.report.add(node, "module-as-value", f"uses the module {path.lstrip('.')} as a value")

    def check_attribute_name(self, node: ast.AST, name: str, *, resolved: bool, own: bool = False) -> None:
        """Judge the name of an attribute, whatever it is taken from.

        Args:
            node: where.
            name: of the attribute.
            resolved: True where the whole path is known and judged already.
            own: True for an attribute of an instance of an own class.
        """
        if name.startswith("__") and name.endswith("__"):
            if not is_public_dunder(name):
                self.report.add(node, "dunder-access", f"reads {name}")
        elif name in FORBIDDEN and not (resolved and (name in SMUGGLED or name == "_C")):
            self.report.add(node, FORBIDDEN[name], f"uses .{name}")
        elif name in ("format", "format_map") and node not in self.plain_formats:
            self.report.add(node, "dynamic-attribute", f"uses .{name} with a text that may read attributes")
        elif not (resolved or name in VALUES or (name in self.own_names and (own or name not in CLOSED))):
            self.report.add(node, "unlisted-member", f"reads .{name}")

    def check_class(self, node: ast.expr | None) -> None:
        """Refuse a class of torch that is handed on: whoever receives it could change it."""
        for path in sorted(self.resolve(node)):
            if TORCH_CLASS.fullmatch(path) and node is not None:
                self.report.add(node, "module-as-value", f"hands on the class {path}")

    def allow_module(self, value: ast.expr | None) -> None:
        """Let a module stand as ``value``, the right-hand side of a plain alias, and in what such a side is made of."""
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
