"""What every rule needs to judge a place in a source: names, scope, declared libraries, and where to report."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from tilegym_db.verify.scan.findings import Finding
from tilegym_db.verify.scan.modules import SMUGGLED
from tilegym_db.verify.scan.names import Names
from tilegym_db.verify.scan.paths import FORBIDDEN_ATTRIBUTES, MODULES, OS_ALLOWED, is_public_dunder, path_rule
from tilegym_db.verify.scan.rules import RULES
from tilegym_db.verify.scan.scopes import Module, Scope

__all__ = ["Context", "Report", "is_external"]

TORCH_CLASS = re.compile(r"torch\.([\w.]+\.)?[A-Z][A-Z]*[a-z]\w*")
DEVICE_LANGUAGES = ("triton.language.", "tilelang.language.", "cuda.tile.", "triton.experimental.gluon.language.")
"""Their members with a leading underscore are operations of the language, such as ``T.__exp``."""


def is_external(path: str) -> bool:
    """True for something of another module, builtins excepted."""
    return not path.startswith((".", "builtins."))


@dataclass
class Report:
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
    report: Report
    scope: Scope
    may_hold_module: set[ast.AST] = field(default_factory=set)
    """Expressions that stand where a module may: before a dot, or on the right of a plain alias."""
    may_hold_class: set[ast.AST] = field(default_factory=set)
    """Expressions that stand where a class may: in ``isinstance``, in a comparison, in a type, in an f-string."""
    called_operators: set[ast.AST] = field(default_factory=set)
    """Calls of :data:`~tilegym_db.verify.scan.paths.ATTENTION_OPERATORS` that are written out: the expression that is called."""

    def resolve(self, node: ast.expr | None) -> frozenset[str]:
        """What an expression stands for, here."""
        return self.names.resolve(node, self.scope)

    def text(self, node: ast.expr | None) -> str | None:
        """The string that an expression certainly is."""
        return self.names.text(node, self.scope)

    def is_module(self, path: str) -> bool:
        """True for a path that is known to be a module."""
        return self.names.is_own_module(path) or path in MODULES or path in self.module.imported

    def check_path(self, node: ast.AST, path: str, *, imported: bool = False) -> bool:
        """Judge a path that is imported or used; True where it is harmless."""
        if path.startswith("."):
            return True
        if path == "os" or path.startswith("os."):
            if not OS_ALLOWED.fullmatch(path):
                self.report.add(node, "os-call", f"uses {path}")
                return False
            return True
        named, rule = path_rule(path)
        parts = path.split(".")[1:]
        if named and rule is not None:
            self.report.add(node, rule, f"{'imports' if imported else 'uses'} {path.removeprefix('builtins.')}")
            return False
        if named or path.startswith("builtins."):
            return True
        smuggled = next((part for part in parts if part in SMUGGLED), None)
        if smuggled is not None:
            self.report.add(node, "smuggled-module", f"reaches the module {smuggled} as {path}")
            return False
        private = any(part.startswith("_") and not part.endswith("__") for part in parts)
        if private and not path.startswith(DEVICE_LANGUAGES) and node not in self.called_operators:
            self.report.add(node, "private-member", f"uses {path}")
            return False
        return True

    def check_escape(self, node: ast.expr, path: str) -> None:
        """Refuse a module, or the environment, where it is used as a value."""
        if node in self.may_hold_module:
            return
        if path == "os.environ":
            self.report.add(node, "environment", "uses the whole environment")
        elif self.is_module(path):
            self.report.add(node, "module-as-value", f"uses the module {path.lstrip('.')} as a value")

    def check_attribute_name(self, node: ast.AST, name: str, *, resolved: bool) -> None:
        """Judge the name of an attribute, whatever it is taken from.

        Args:
            node: where.
            name: of the attribute.
            resolved: True where the whole path is known and judged already.
        """
        if name.startswith("__") and name.endswith("__"):
            if not is_public_dunder(name):
                self.report.add(node, "dunder-access", f"reads {name}")
        elif name in FORBIDDEN_ATTRIBUTES and not (resolved and (name in SMUGGLED or name == "_C")):
            self.report.add(node, FORBIDDEN_ATTRIBUTES[name], f"uses .{name}")

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
