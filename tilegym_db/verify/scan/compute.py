"""Where a Solution computes with torch: refused in tile languages outside kernels, and in every ``except`` handler."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tilegym_db.verify.scan.names import Names
from tilegym_db.verify.scan.scopes import FUNCTIONS, Module, Scope, ScopedVisitor, every_argument
from tilegym_db.verify.scan.tables import WORDS, is_torch_compute

__all__ = ["Survey", "Use", "device_functions", "fallbacks", "survey"]

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod)


@dataclass(frozen=True)
class Use:
    """One place that computes or copies with torch."""

    node: ast.AST
    rule: str
    what: str
    function: ast.AST | None
    """The innermost function around it."""
    anywhere: bool
    """True for a member of torch by name: no kernel has a use for it. Methods and operators are fine inside kernels."""


class Survey(ScopedVisitor):
    """What one source does with torch, which of its functions name which others, and whether it makes a kernel."""

    def __init__(self, module: Module, names: Names) -> None:
        """Nothing is walked yet: see :func:`survey`."""
        self.module, self.names, self.scope = module, names, module.scope
        self.uses: list[Use] = []
        self.named: dict[ast.AST | None, set[ast.AST]] = defaultdict(set)
        """Function (None: the module itself) -> the Solution's functions that it names."""
        self.handlers: dict[ast.ExceptHandler, tuple[list[Use], dict[ast.AST, str]]] = {}
        """``except`` handler -> what it does with torch, and the functions that it names."""
        self.makes_kernel = False
        self._handlers_around: list[ast.ExceptHandler] = []
        self._tensors = _tensor_names(module, names)

    def open_scope(self, node: ast.AST) -> Scope:  # noqa: D102
        return self.module.scopes[node]

    def visit_annotation(self, node: ast.expr) -> None:
        """A type computes nothing."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: D102
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:  # noqa: D102
        self.handlers[node] = ([], {})
        self._handlers_around.append(node)
        self.visit_all(node.body)
        self._handlers_around.pop()

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            return
        self._judge(node)
        for binding in self.names.bindings(node, self.scope):
            if isinstance(binding.node, FUNCTIONS):
                self.named[self._function].add(binding.node)
                for handler in self._handlers_around:
                    self.handlers[handler][1][binding.node] = node.id

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            self.visit(node.value)
            return
        if self._judge(node):
            return
        if node.attr in WORDS["compute-methods"]:
            self._add(node, "torch-compute", f"calls .{node.attr}() outside a kernel")
        elif node.attr in WORDS["copy-methods"]:
            self._add(node, "copies-with-torch", f"calls .{node.attr}()")
        self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: D102
        self._arithmetic(node, node.op, (node.left, node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: D102
        self._arithmetic(node, node.op, (node.target, node.value))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:  # noqa: D102
        if isinstance(node.op, ast.USub):
            self._arithmetic(node, ast.Sub(), (node.operand,))
        self.generic_visit(node)

    @property
    def _function(self) -> ast.AST | None:
        around = self.scope.function()
        return around.node if around is not None else None

    def _judge(self, node: ast.expr) -> bool:
        """Note what a name or attribute stands for; True where that is known."""
        paths = self.names.resolve(node, self.scope)
        self.makes_kernel |= bool(paths & WORDS["kernel-makers"])
        for path in sorted(paths):
            if is_torch_compute(path) and path not in self.module.imported:  # a module computes nothing by itself
                self._add(node, "torch-compute", f"uses {path}", anywhere=True)
        return bool(paths)

    def _arithmetic(self, node: ast.AST, operator: ast.operator, operands: Iterable[ast.expr]) -> None:
        if isinstance(operator, ast.MatMult):
            self._add(node, "tensor-arithmetic", "multiplies matrices with @ outside a kernel")
        elif isinstance(operator, ARITHMETIC):
            for operand in operands:
                holder = self.scope.holder(operand.id) if isinstance(operand, ast.Name) else None
                if isinstance(operand, ast.Name) and holder is not None and (holder, operand.id) in self._tensors:
                    self._add(node, "tensor-arithmetic", f"computes with the tensor {operand.id} outside a kernel")
                    return

    def _add(self, node: ast.AST, rule: str, what: str, *, anywhere: bool = False) -> None:
        use = Use(node, rule, what, self._function, anywhere)
        self.uses.append(use)
        for handler in self._handlers_around:
            self.handlers[handler][0].append(use)


class _Tensors(ScopedVisitor):
    """Finds names that are certainly tensors: annotated so, or asked for what only tensors know."""

    def __init__(self, module: Module, names: Names) -> None:
        self.module, self.names, self.scope = module, names, module.scope
        self.found: set[tuple[Scope, str]] = set()

    def open_scope(self, node: ast.AST) -> Scope:
        scope = self.module.scopes[node]
        if isinstance(node, FUNCTIONS):
            for argument in every_argument(node.args):
                if "torch.Tensor" in self.names.resolve(argument.annotation, self.scope):
                    self.found.add((scope, argument.arg))
        return scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in WORDS["tensor-marks"] and isinstance(node.value, ast.Name):
            holder = self.scope.holder(node.value.id)
            if holder is not None:
                self.found.add((holder, node.value.id))
        self.generic_visit(node)


def _tensor_names(module: Module, names: Names) -> set[tuple[Scope, str]]:
    visitor = _Tensors(module, names)
    visitor.visit_all(module.tree.body)
    return visitor.found


def survey(module: Module, names: Names) -> Survey:
    """Walk one source."""
    found = Survey(module, names)
    found.visit_all(module.tree.body)
    return found


def device_functions(surveys: Iterable[Survey]) -> set[ast.AST]:
    """Functions that run on the GPU: kernels, what is defined in them, and what nothing but such functions names.

    A function that host code names as well counts as host code. So does the body of a ``tilelang.jit`` function: it is
    Python that builds a kernel.
    """
    callers: dict[ast.AST, set[ast.AST | None]] = defaultdict(set)
    around: dict[ast.AST, ast.AST | None] = {}
    device: set[ast.AST] = set()
    for found in surveys:
        for caller, called in found.named.items():
            for function in called - {caller}:
                callers[function].add(caller)
        for node, scope in found.module.scopes.items():
            if isinstance(node, ast.FunctionDef) and scope.parent is not None:
                outer = scope.parent.function()
                around[node] = outer.node if outer is not None else None
                if _is_kernel(node, scope.parent, found.names):
                    device.add(node)
    pending = True
    while pending:
        more = {
            node
            for node, outer in around.items()
            if node not in device and (outer in device or (callers[node] and callers[node] <= device))
        }
        device |= more
        pending = bool(more)
    return device


def _is_kernel(node: ast.FunctionDef, scope: Scope, names: Names) -> bool:
    called = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return any(names.resolve(decorator, scope) & WORDS["device-decorators"] for decorator in called)


def fallbacks(surveys: Iterable[Survey]) -> Iterator[tuple[Survey, ast.ExceptHandler, str]]:
    """Every ``except`` handler that computes with torch, itself or through functions of the Solution, and how."""
    surveys = list(surveys)
    every = [use for found in surveys for use in found.uses if use.rule != "copies-with-torch"]
    computing = {use.function for use in every if use.function is not None}
    pending = True
    while pending:
        named = ((caller, called) for found in surveys for caller, called in found.named.items())
        more = {caller for caller, called in named if caller is not None and called & computing} - computing
        computing |= more
        pending = bool(more)
    for found in surveys:
        for handler, (uses, names) in found.handlers.items():
            computes = next((use.what for use in uses if use.rule != "copies-with-torch"), None)
            named_one = next((name for function, name in names.items() if function in computing), None)
            if computes is not None:
                yield found, handler, f"{computes}, after an error"
            elif named_one is not None:
                yield found, handler, f"calls {named_one}, which computes with torch, after an error"
