"""The walk that applies the rules for every language to one source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tilegym_db.verify.scan.annotations import check_texts
from tilegym_db.verify.scan.calls import check_call, check_environment_item
from tilegym_db.verify.scan.context import Context
from tilegym_db.verify.scan.scopes import Scope, ScopedVisitor
from tilegym_db.verify.scan.stores import (
    check_attribute_store,
    check_augmented_name,
    check_item_store,
    check_mutating_call,
    is_own,
)
from tilegym_db.verify.scan.tables import LISTED_ROOTS, WORDS, import_rule, words

__all__ = ["Checker"]

LONG_CONSTANT = 2000
DANGEROUS_KEYS = {
    "tl.device_compile_flags": "compiler-flags",
    "compile_flags": "compiler-flags",
    "extern_libs": "native-extension",
}
TAKES_CLASSES = words("builtins.isinstance builtins.issubclass typing.cast typing.TypeVar typing.NewType")
TENSOR_CLASS = re.compile(r"torch\.(\w*Tensor|(nn\.)?(parameter\.)?\w*Parameter)(\..*)?")


class Checker(ScopedVisitor):
    """Judges one source by every rule that does not depend on the language being a tile language."""

    def __init__(self, context: Context) -> None:
        """Walk with ``context``, whose scope is the module's."""
        self.context, self.report = context, context.report
        self._strings_as_statements = {
            id(node.value) for node in ast.walk(context.module.tree) if isinstance(node, ast.Expr)
        }
        self._types_seen: set[ast.AST] = set()
        self._own_roots = {name.partition(".")[0] for name in context.names.modules}

    @property
    def scope(self) -> Scope:
        """The scope that is walked; the rules see the same one."""
        return self.context.scope

    @scope.setter
    def scope(self, value: Scope) -> None:
        self.context.scope = value

    def open_scope(self, node: ast.AST) -> Scope:  # noqa: D102
        return self.context.module.scopes[node]

    def run(self) -> None:
        """Judge the whole source."""
        self.visit_all(self.context.module.tree.body)

    # -- imports ------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:  # noqa: D102
        for alias in node.names:
            self._check_import(node, alias.name)
            self._check_class_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: D102
        for alias in node.names:
            if alias.name == "*" and not self._is_own_import(node):
                self.report.add(node, "star-import", f"from {'.' * node.level}{node.module or ''} import *")
            self._check_class_import(node, f"{node.module}.{alias.name}")
        if node.level:
            self._check_relative(node)
        elif node.module is not None and self._check_import(node, node.module):
            for alias in node.names:
                self.context.check_path(node, f"{node.module}.{alias.name}", imported=True)

    def _is_own_import(self, node: ast.ImportFrom) -> bool:
        return bool(node.level) or (node.module or "").partition(".")[0] in self._own_roots

    def _check_import(self, node: ast.stmt, name: str) -> bool:
        """Judge an absolute import; True where its members are worth a look."""
        # Once loaded, a Solution no longer finds its own files by their plain names: a later import means another module.
        if name.partition(".")[0] in self._own_roots and self.scope.function() is None:
            return False
        rule = import_rule(name, self.context.language, self.context.declared)
        if rule is not None:
            self.report.add(node, rule, f"imports {name}")
            if name.partition(".")[0] not in LISTED_ROOTS or rule not in ("imports-os", "imports-library"):
                return False
        return self.context.check_path(node, name, imported=True)

    def _check_class_import(self, node: ast.stmt, path: str) -> None:
        if self.scope.is_class and self.context.is_module(path):
            self.report.add(node, "module-as-value", f"imports {path} as an attribute of a class")

    def _check_relative(self, node: ast.ImportFrom) -> None:
        modules = self.context.names.modules
        base = self.context.module.absolute(node.level, node.module)
        for alias in node.names:
            if base not in modules and f"{base}.{alias.name}".lstrip(".") not in modules:
                what = f"imports {alias.name} from {'.' * node.level}{node.module or ''}, which is no source of this solution"
                self.report.add(node, "unlisted-source", what)

    # -- names and attributes -----------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            if node.id in WORDS["hooks"] and (self.scope.is_class or self.scope.parent is None):
                self.report.add(node, "object-hooks", f"defines {node.id}")
            return
        if node.id in ("__builtins__", "__loader__", "__spec__", "__annotations__", "__path__", "__class__"):
            self.report.add(node, "namespace-access", f"uses {node.id}")
        self._judge(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: D102
        resolved = bool(self.context.resolve(node))
        if isinstance(node.ctx, ast.Load):
            self._judge(node)
        else:
            check_attribute_store(self.context, node)
        root: ast.expr = node
        harmless_class = False
        while isinstance(root, ast.Attribute):  # the chain was judged as one path; its names are judged each
            if not (root.attr == "__class__" and harmless_class):
                own = is_own(self.context, root.value)
                self.context.check_attribute_name(root, root.attr, resolved=resolved, own=own)
            harmless_class = root.attr in ("__name__", "__qualname__")  # x.__class__.__name__ is a string
            root = root.value
        if harmless_class:
            self.context.may_hold_class.add(root)
        self.context.may_hold_module.add(root)
        bindings = self.context.names.bindings(root, self.scope)
        if not (resolved and bindings and all(binding.path is not None for binding in bindings)):
            self.visit(root)  # else it is an import, judged where it stands

    def _judge(self, node: ast.expr) -> None:
        for path in sorted(self.context.resolve(node)):
            if path == "builtins.getattr" and node not in self.context.may_hold_module:
                self.report.add(node, "dynamic-attribute", "passes getattr around")
            self.context.check_path(node, path)
            self.context.check_escape(node, path)

    def visit_Constant(self, node: ast.Constant) -> None:  # noqa: D102
        value = node.value
        is_long = isinstance(value, str | bytes) and len(value) > LONG_CONSTANT
        if is_long and id(node) not in self._strings_as_statements:
            self.report.add(node, "long-constant", f"a constant of {len(value)} characters")  # type: ignore[arg-type]
        if isinstance(value, str) and value in DANGEROUS_KEYS:
            self.report.add(node, DANGEROUS_KEYS[value], f"uses the key '{value}'")

    # -- statements ---------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: D102
        if all(isinstance(target, ast.Name) for target in node.targets) and not self.scope.is_class:
            self.context.allow_module(node.value)
        elif not all(isinstance(target, ast.Name) for target in node.targets):
            self._check_classes([node.value])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: D102
        check_augmented_name(self.context, node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: D102
        check_texts(self.context, node.annotation, self._types_seen)
        if isinstance(node.target, ast.Name) and not self.scope.is_class:
            self.context.allow_module(node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:  # noqa: D102
        for path in sorted(self.context.resolve(node.value)):
            self.context.check_escape(node, path)
        self.context.allow_module(node.value)
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:  # noqa: D102
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            self.context.allow_module(node.left)  # 'module is None' gives nothing away
        self.context.may_hold_class |= {node.left, *node.comparators}
        if all(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            check_environment_item(self.context, node, node.comparators[0], node.left)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:  # noqa: D102
        check_environment_item(self.context, node, node.value, node.slice)
        self.context.may_hold_class.add(node.slice)  # Union[torch.Tensor, int]
        if not isinstance(node.ctx, ast.Load):
            check_item_store(self.context, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: D102
        check_call(self.context, node)
        check_mutating_call(self.context, node)
        if self.context.resolve(node.func) & TAKES_CLASSES:
            self.context.may_hold_class |= {*node.args, *(item.value for item in node.keywords)}
        else:
            self._check_classes([*node.args, *(item.value for item in node.keywords)])
        self.generic_visit(node)

    def _check_classes(self, values: Iterable[ast.expr | None]) -> None:
        for value in values:
            self.context.check_class(value)

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> None:  # noqa: D102
        if node not in self.context.may_hold_class:
            self._check_classes(node.elts)
        self.generic_visit(node)

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> None:  # noqa: D102
        self._check_classes([*node.keys, *node.values])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return | ast.Yield) -> None:  # noqa: D102
        self._check_classes([node.value])
        self.generic_visit(node)

    visit_Yield = visit_Return

    def visit_MatchClass(self, node: ast.MatchClass) -> None:  # noqa: D102
        for name in node.kwd_attrs:  # 'case object(__globals__=g)' reads an attribute
            self.context.check_attribute_name(node, name, resolved=False)
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:  # noqa: D102
        self.context.may_hold_class.add(node.value)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:  # noqa: D102
        self._check_classes([node.subject])
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:  # noqa: D102
        self.report.add(node, "keeps-state", f"rebinds {', '.join(node.names)} outside the function")

    visit_Nonlocal = visit_Global

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:  # noqa: D102
        self.report.add(node, "try", "catches errors")
        self.generic_visit(node)

    visit_TryStar = visit_Try

    def visit_annotation(self, node: ast.expr) -> None:
        """A type is not used: nothing can read it back, for what could is refused. Unless it computes something."""
        if any(isinstance(part, ast.Call | ast.NamedExpr | ast.Lambda) for part in ast.walk(node)):
            self.visit(node)
        check_texts(self.context, node, self._types_seen)

    # -- definitions --------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: D102
        if node.name in WORDS["hooks"] or (self.scope.parent is None and node.name == "__getattr__"):
            self.report.add(node, "object-hooks", f"defines {node.name}")
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            is_container = isinstance(default, ast.Call) and self.context.resolve(default.func) & WORDS["containers"]
            self._check_classes([default])
            if is_container or isinstance(default, ast.Dict | ast.List | ast.Set):
                self.report.add(node, "keeps-state", f"gives {node.name} a mutable default, which outlives the call")
        super().visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: D102
        for path in sorted(path for base in node.bases for path in self.context.resolve(base)):
            if TENSOR_CLASS.fullmatch(path):
                self.report.add(node, "tensor-subclass", f"derives {node.name} from {path}")
            elif path == "builtins.type":
                self.report.add(node, "object-hooks", f"defines {node.name} as a metaclass")
        super().visit_ClassDef(node)
