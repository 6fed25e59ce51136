"""Recognise the product of a gate in a forward, ``self.act(a) * b``, whatever happens before and after it, and replace it.

Code around the product stays as it is: clamps and multipliers of ``a`` and ``b``, and a norm or dropout of the result.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.rewrite import is_name, parsed, recompiled

CALL = "_tilegym_db_gate"
"""The function that a rewritten forward calls: ``CALL(self, left, right)``, in the order of the source."""
FUNCTIONS = frozenset(name for name in map(str.lower, torch.nn.modules.activation.__all__) if not hasattr(torch, name))
"""Names of the activations that PyTorch has as functions for networks alone; others, such as sigmoids, are in many formulas."""
OF_MIXERS = ("attention", "rotary", "conv1d", "delta_rule", "scan")
"""Parts of names in the forward of a mixer, whose gate is part of other kinds of operators."""
MAX_ARGUMENTS = 3
"""Arguments of the forward of an MLP, with the module; a mixer takes more."""


class GateProduct(NamedTuple):
    """The activation of a product: an attribute of the module, or the source of a call of a function.

    ``gate_is_left`` is True if the activated operand comes first.
    """

    attribute: str
    call: str
    gate_is_left: bool


class _Found(NamedTuple):
    """The nodes of a product: the product, its activation, and the assignment that keeps the activated gate, if any."""

    product: ast.BinOp
    activation: ast.Call
    assigned: ast.Assign | None
    gate_is_left: bool


def gate_product(module: torch.nn.Module) -> GateProduct | None:
    """Return the one product of an activated gate in the forward of a module; None if there are none or several.

    A module that has vectors only is no MLP, but a norm with a gate.
    """
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return None
    code = forward.__code__
    is_plain = code.co_argcount <= MAX_ARGUMENTS and not code.co_kwonlyargcount and not code.co_flags & 0x0C
    is_mlp = is_plain and any(one.dim() > 1 for one in module.parameters())
    function = (
        parsed(forward) if is_mlp and not any(part in name for name in code.co_names for part in OF_MIXERS) else None
    )
    if function is None:
        return None
    owner = function.args.args[0].arg
    products = _products(function, owner, activations_of(module))
    if len(products) != 1:
        return None
    activation = products[0].activation.func
    is_own = isinstance(activation, ast.Attribute) and is_name(activation.value, owner)
    attribute = activation.attr if is_own and isinstance(activation, ast.Attribute) else ""
    products[0].activation.args = [ast.Name("gate", ctx=ast.Load())]
    return GateProduct(attribute, "" if attribute else ast.unparse(products[0].activation), products[0].gate_is_left)


def multiplies(cls: type[torch.nn.Module]) -> bool:
    """Return True if the forward of a class has a product in its source, or if it has no source."""
    forward: Any = cls.forward
    function = parsed(forward) if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None
    return function is None or any(isinstance(node, ast.Mult) for node in ast.walk(function))


def activations_of(module: torch.nn.Module) -> frozenset[str]:
    """Return the attributes of a module that are functions, or modules without weights and submodules."""
    idle = (torch.nn.Dropout, torch.nn.Identity)
    own = {name for name, value in vars(module).items() if isinstance(value, FunctionType) or _is_builtin(value)}
    of_modules = {
        name
        for name, one in module._modules.items()
        if one is not None and not (one._modules or one._parameters or one._buffers or isinstance(one, idle))
    }
    return frozenset(own | of_modules)


def _is_builtin(value: Any) -> bool:
    return type(value) is type(torch.relu)


def with_call(forward: FunctionType, product: GateProduct, names: Collection[str]) -> FunctionType:
    """Return a forward whose product is a call of :data:`CALL`; ``names`` are the activations of the module."""
    function = parsed(forward)
    assert function is not None, "ask gate_product first"
    owner = function.args.args[0].arg
    (found,) = _products(function, owner, names)
    gate = found.activation.args[0]
    if found.assigned is not None:
        found.assigned.value = gate
        gate = found.product.left if found.gate_is_left else found.product.right
    sides = (gate, found.product.right) if found.gate_is_left else (found.product.left, gate)
    call = ast.Call(ast.Name(CALL, ctx=ast.Load()), [ast.Name(owner, ctx=ast.Load()), *sides], [])
    changed: ast.FunctionDef = _Replaced(found.product, call).visit(function)
    return recompiled(forward, changed)


class _Replaced(ast.NodeTransformer):
    """A transformer that puts one node in place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self._old:
            return ast.copy_location(self._new, self._old)
        return self.generic_visit(node)


def _products(function: ast.FunctionDef, owner: str, names: Collection[str]) -> list[_Found]:
    kept = _activated_variables(function, owner, names)
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side, other, is_left in ((node.left, node.right, True), (node.right, node.left, False)):
                if isinstance(other, ast.Attribute | ast.Constant):
                    continue  # a setting, not another projection
                if _is_activation(side, owner, names):
                    found.append(_Found(node, side, None, is_left))  # type: ignore[arg-type]
                elif isinstance(side, ast.Name) and side.id in kept:
                    assigned = kept[side.id]
                    found.append(_Found(node, assigned.value, assigned, is_left))  # type: ignore[arg-type]
    return found


def _activated_variables(function: ast.FunctionDef, owner: str, names: Collection[str]) -> dict[str, ast.Assign]:
    """Return the variables that are assigned once, an activation of something, in the body itself, and read once."""
    uses: dict[str, list[ast.expr_context]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            uses.setdefault(node.id, []).append(node.ctx)
    found = {}
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_activation(value, owner, names):
                if sorted(type(one).__name__ for one in uses[name]) == ["Load", "Store"]:
                    found[name] = statement
    return found


def _is_activation(node: ast.expr, owner: str, names: Collection[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute), args=[_], keywords=[]) if (
            name == owner
        ):
            return attribute in names
        case ast.Call(func=ast.Attribute(attr=name), args=[_]) | ast.Call(func=ast.Name(id=name), args=[_]):
            return name in FUNCTIONS
    return False
