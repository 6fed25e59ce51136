"""Rules about what a source changes: other modules, objects made elsewhere, and state that outlives a call."""

from __future__ import annotations

import ast

from tilegym_db.verify.scan.context import Context, is_external
from tilegym_db.verify.scan.scopes import FUNCTIONS, NameBinding
from tilegym_db.verify.scan.tables import WORDS

__all__ = ["check_attribute_store", "check_augmented_name", "check_item_store", "check_mutating_call", "is_own"]


def check_attribute_store(context: Context, node: ast.Attribute) -> None:
    """``x.name = ...`` and everything else that sets or deletes an attribute."""
    for path in sorted(context.resolve(node.value)):
        if not path.startswith(".") or context.is_module(path):
            context.report.add(node, "foreign-assignment", f"changes {path.lstrip('.')}.{node.attr}")
            return
    if node.attr in WORDS["hooks"] or (node.attr.startswith("__") and node.attr.endswith("__")):
        context.report.add(node, "object-hooks", f"sets {node.attr}")
    elif _is_decorated(context, node.value):
        context.report.add(node, "foreign-assignment", f"sets .{node.attr} of what a decorator returned")
    elif is_own(context, node.value):
        _note_state(context, node, node.value)
    elif node.attr != "block_shape":  # how the autotuner of Triton tells tensor descriptors their tile
        made = ast.unparse(node.value)[:40]
        rule = "private-member" if node.attr.startswith("_") else "keeps-state"
        context.report.add(node, rule, f"sets .{node.attr} of {made}, which was made elsewhere")


def check_item_store(context: Context, node: ast.Subscript) -> None:
    """``x[...] = ...`` and everything else that sets or deletes an item."""
    for path in sorted(context.resolve(node.value)):
        if is_external(path):
            context.report.add(node, "foreign-assignment", f"changes an item of {path}")
    _note_state(context, node, node.value)


def check_mutating_call(context: Context, node: ast.Call) -> None:
    """``x.append(...)`` and its like, on containers of other modules or of this one."""
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr not in WORDS["mutators"]:
        return
    for path in sorted(context.resolve(function.value)):
        if is_external(path) and not context.is_module(path):
            context.report.add(node, "foreign-assignment", f"changes {path} with .{function.attr}()")
    _note_state(context, node, function.value)


def _note_state(context: Context, node: ast.AST, container: ast.expr) -> None:
    """Note where a function changes a container, class or function of its module."""
    root = container
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if not isinstance(root, ast.Name) or context.scope.function() is None:
        return
    is_global = context.scope.holder(root.id) is context.module.scope
    if is_global and not any(is_external(path) for path in context.resolve(root)):
        context.report.add(node, "keeps-state", f"changes {root.id}, which outlives the call")


def check_augmented_name(context: Context, node: ast.AugAssign) -> None:
    """``x += ...`` where ``x`` is a container of another module: it changes in place."""
    if isinstance(node.target, ast.Name):
        for path in sorted(context.resolve(node.target)):
            if is_external(path) and not path.startswith("math."):
                context.report.add(node, "foreign-assignment", f"changes {path} in place")


def _is_decorated(context: Context, node: ast.expr) -> bool:
    """True for a function under a decorator: then it is an object of the decorator's, such as a kernel."""
    bound = [binding.node for binding in context.names.bindings(node, context.scope)]
    return any(isinstance(item, ast.FunctionDef) and item.decorator_list for item in bound)


def is_own(context: Context, node: ast.expr) -> bool:
    """True for ``self`` (the first parameter of a method), own functions and classes, and instances of own classes."""
    bindings = context.names.bindings(node, context.scope)
    return bool(bindings) and all(_is_own_binding(context, binding) for binding in bindings)


def _is_own_binding(context: Context, binding: NameBinding) -> bool:
    if isinstance(binding.node, ast.arg):
        return _is_self(context, binding.node)
    if isinstance(binding.value, ast.Call) and binding.scope is not None:
        made = context.names.bindings(binding.value.func, binding.scope)
        return any(isinstance(item.node, ast.ClassDef) for item in made)
    return isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_self(context: Context, argument: ast.arg) -> bool:
    """True for the first parameter of a function that stands directly in a class."""
    scope = context.scope.holder(argument.arg)
    if scope is None or scope.parent is None or not scope.parent.is_class or not isinstance(scope.node, FUNCTIONS):
        return False
    return argument in [*scope.node.args.posonlyargs, *scope.node.args.args][:1]
