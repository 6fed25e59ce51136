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
from tilegym_db.models.upstream_code import once_per_function

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


# ---- the whole forward ----------------------------------------------------------------------------
# Recognise the forward of a gated MLP, ``self.w2(silu(self.w1(x)) * self.w3(x))``, whatever its attributes are called.


class GatedCode(NamedTuple):
    """The attributes of a gated MLP. ``activation`` is empty if the forward calls a function of its module."""

    gate: str
    up: str
    output: str
    activation: str


def gated_code(forward: Any) -> GatedCode | None:
    """Return the attributes that a forward uses as a gated MLP does; None for any other forward."""
    return _of_source(forward) if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


@once_per_function
def _of_source(forward: FunctionType) -> GatedCode | None:
    function = parsed(forward)
    names = [] if function is None else [argument.arg for argument in function.args.args]
    if function is None or len(names) != 2 or function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
        return None
    result = _result(function)
    match result and _called(result, names[0]):
        case (output, ast.BinOp(left=left, op=ast.Mult(), right=right)):
            pass
        case _:
            return None
    for gate, up in ((left, right), (right, left)):  # a product has the same bits in either order
        activated, second = _activated(gate, names[0]), _called(up, names[0])
        if activated is None or second is None or not is_name(second[1], names[1]):
            continue
        first = _called(activated[1], names[0])
        if first is not None and is_name(first[1], names[1]):
            found = GatedCode(first[0], second[0], output, activated[0])
            return found if len({*found}) == len(found) else None
    return None


def _result(function: ast.FunctionDef) -> ast.expr | None:
    """Return the returned expression with each local variable replaced by its value; None if the code does more."""
    values: dict[str, ast.expr] = {}
    for statement in function.body:
        match statement:
            case ast.Expr(value=ast.Constant()):
                continue
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name not in values:
                values[name] = _Inlined(values).visit(value)
            case ast.Return(value=ast.expr() as value) if statement is function.body[-1]:
                result: ast.expr = _Inlined(values).visit(value)
                is_all = all(isinstance(value, ast.Constant) for value in values.values())
                return result if is_all else None  # a variable that the result does not use is more code
            case _:
                return None
    return None


class _Inlined(ast.NodeTransformer):
    """Replaces each variable by its value, once: a second use would compute the value again."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._values:
            value, self._values[node.id] = self._values[node.id], ast.Constant(None)
            return value
        return node


def _called(node: ast.expr, owner: str) -> tuple[str, ast.expr] | None:
    """Return (attribute, argument) of ``self.attribute(argument)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute), args=[argument], keywords=[]) if (
            name == owner
        ):
            return attribute, argument
    return None


def _activated(node: ast.expr, owner: str) -> tuple[str, ast.expr] | None:
    """Return (attribute, argument) of an activation; the attribute of a function with any options is empty."""
    match _called(node, owner), node:
        case None, ast.Call(args=[argument]):
            return "", argument
        case found, _:
            return found
