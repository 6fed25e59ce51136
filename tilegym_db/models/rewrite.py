"""Residual add and norm of two modules as one call: only the layer's forward is rewritten.

It looks for two shapes of code in any class, with the operands of the sum in either order: ``x = r + x``, ``r = x``,
``x = self.norm(x)`` of a pre-norm layer, and ``x = self.norm(x + r)`` of a post-norm one. The statements become one call of a
function. That function asks for a kernel, and otherwise runs the same operations in the same order. A kernel
overwrites the operand that the first statement drops, but only if no other code holds its memory (:func:`is_owned`). So memory
of hooks, caches or callers never changes.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.upstream_code import is_known_decorator, once_per_function, undecorated, without_checkpointing

_uses_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
_callback_of_dynamo: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_is_compiling = torch.compiler.is_compiling

ADD_NORM = "_tilegym_db_add_norm"
"""The function that the rewritten forward calls: ``normed, total = ADD_NORM(self, norm, residual, (hidden,))``."""


def plain_forward(cls: type[torch.nn.Module]) -> FunctionType | None:
    """Return the function that a class's forward runs, without the wrappers of transformers whose effect is known.

    Returns None if an unknown wrapper is around it, or if it is not written in Python.
    """
    forward: Any = undecorated(without_checkpointing(cls.forward))
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return None
    return forward


@once_per_function
def fused_norms(forward: FunctionType) -> tuple[str, ...]:
    """Return the attributes of ``self`` that are called with a sum right after it is computed; empty if there are none."""
    function = parsed(forward)
    if function is None:
        return ()
    matches = (_match(function.body[index:]) for index in range(len(function.body)))
    return tuple(match.norm for match in matches if match is not None)


def rewritten(forward: FunctionType, norm: str) -> FunctionType:
    """Return the same function with a residual add and one of its :func:`fused_norms` as a call of :data:`ADD_NORM`.

    Its globals are those of ``forward``.
    """
    function = parsed(forward)
    assert function is not None, "ask fused_norms first"
    function.body = _fused(function.body, norm)
    return recompiled(forward, function)


def recompiled(forward: FunctionType, function: ast.FunctionDef) -> FunctionType:
    """Compile a syntax tree into a function with the globals, defaults and source lines of ``forward``."""
    _forget_annotations(function)
    tree = ast.fix_missing_locations(ast.Module([function], type_ignores=[]))
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    exec(compile(tree, forward.__code__.co_filename, "exec"), scope)
    code = scope[forward.__name__].__code__
    copied = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__qualname__, copied.__module__ = forward.__qualname__, forward.__module__
    return copied


def rewritten_by(forward: FunctionType, rewrites: Sequence[Callable[[ast.FunctionDef], None]]) -> FunctionType:
    """Return the same function after each rewrite has changed its syntax tree; ``forward`` itself without rewrites."""
    function = parsed(forward) if rewrites else None
    if function is None:
        return forward
    for rewrite in rewrites:
        rewrite(function)
    return recompiled(forward, function)


def parsed(forward: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a Python function without decorators that rename arguments; None for other functions."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef) or function.name != forward.__name__:
        return None
    if not all(is_known_decorator(decorator, forward.__globals__) for decorator in function.decorator_list):
        return None
    function.decorator_list = []
    return function


def _forget_annotations(function: ast.FunctionDef) -> None:
    """Remove annotations and defaults, which would run when the copy is made; defaults are set as values later."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    function.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]


class _NormOfSum(NamedTuple):
    """Statements that norm a sum: the operand that stays or becomes the sum, the operand that is dropped, and the norm."""

    residual: str
    hidden: str
    norm: str
    statements: int
    keeps_sum: bool


def _fused(body: list[ast.stmt], norm: str) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    index = 0
    while index < len(body):
        match = _match(body[index:])
        if match is None or match.norm != norm:
            statements.append(body[index])
            index += 1
            continue
        call = f"{ADD_NORM}(self, self.{norm}, {match.residual}, ({match.hidden},))"
        kept = f"{match.hidden}, {match.residual} = {call}" if match.keeps_sum else f"{match.hidden} = {call}[0]"
        (statement,) = ast.parse(kept).body
        for node in ast.walk(statement):
            ast.copy_location(node, body[index])
        statements.append(statement)
        index += match.statements
    return statements


def _match(statements: Sequence[ast.stmt]) -> _NormOfSum | None:
    """Return the first statements if they are the code of a pre-norm or of a post-norm layer."""
    return _pre_norm(statements[:3]) or _post_norm(statements[:1])


def _pre_norm(statements: Sequence[ast.stmt]) -> _NormOfSum | None:
    """Match ``hidden = residual + hidden; residual = hidden; hidden = self.norm(hidden)``."""
    if len(statements) < 3:
        return None
    first, second, third = map(_assigned, statements)
    operands = None if first is None else _sum(first[1])
    if first is None or second is None or third is None or operands is None:
        return None
    hidden, residual, called = first[0], second[0], _called_with(third[1])
    is_kept = {*operands} == {hidden, residual} and hidden != residual and is_name(second[1], hidden)
    if not is_kept or called is None or third[0] != hidden or not is_name(called[1], hidden):
        return None
    return _NormOfSum(residual, hidden, called[0], 3, keeps_sum=True)


def _post_norm(statements: Sequence[ast.stmt]) -> _NormOfSum | None:
    """Match ``hidden = self.norm(hidden + residual)``."""
    assigned = _assigned(statements[0]) if statements else None
    called = None if assigned is None else _called_with(assigned[1])
    operands = None if called is None else _sum(called[1])
    if assigned is None or called is None or operands is None or len({*operands}) != 2 or assigned[0] not in operands:
        return None
    residual = operands[1] if operands[0] == assigned[0] else operands[0]
    return _NormOfSum(residual, assigned[0], called[0], 1, keeps_sum=False)


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return (name, value) of ``name = value``."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
    return None


def _sum(value: ast.expr) -> tuple[str, str] | None:
    """Return the names of ``left + right``."""
    match value:
        case ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right)):
            return left, right
    return None


def _called_with(value: ast.expr) -> tuple[str, ast.expr] | None:
    """Return (attribute, argument) of ``self.attribute(argument)``."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attribute), args=[given], keywords=[]):
            return attribute, given
    return None


def is_name(value: ast.AST, name: str) -> bool:
    """Return True if an expression is the variable of that name."""
    return isinstance(value, ast.Name) and value.id == name


# -- ownership of memory ----------------------------------------------------------------------------------------------


def is_owned(box: tuple[torch.Tensor]) -> bool:
    """Return True if only the rewritten forward holds the tensor that it passes on: Python object, tensor and memory.

    Call it in a function that the forward calls with the tensor in a tuple, and that has the tuple in one variable. The
    references of such a call are counted once with fresh tensors. The tuple is needed because a direct argument has one or two
    references: CPython moves arguments into a call only while no other evaluator of frames is installed. torch.compile installs
    one while any thread runs compiled code, and for the rest of the process after a failed compilation.

    Under torch.compile the answer is False. Its bytecode drops a variable that is not read again, so the count would be one too
    low and hide another holder. The answer is also False for a tensor that is not contiguous, whose elements may share memory.
    """
    if _is_compiling() or _callback_of_dynamo() is not None or not box[0].is_contiguous():
        return False
    return _holders(box) in own_holders()


def _holders(box: Any) -> tuple[int, ...]:
    memory = _uses_of_storage(box[0].untyped_storage()._cdata)
    found = sys.getrefcount(box[0]), box[0]._use_count(), memory
    base = box[0]._base
    return found if base is None else (*found, sys.getrefcount(base), base._use_count())


@cache
def own_holders() -> tuple[tuple[int, ...], ...]:
    """Return the counts of a tensor, and of a view whose base has no other holder, as PyTorch 2.11 returns from biased layers."""
    with torch.inference_mode(False):  # in inference mode a view does not know its base
        return _counted(lambda: torch.empty(1)), _counted(lambda: torch.empty(1).view(1))


def _counted(made: Callable[[], torch.Tensor]) -> Any:
    """Count references as in a rewritten forward: a local variable, passed in a tuple to a function that counts."""

    def asked(box: tuple[torch.Tensor]) -> tuple[int, ...]:
        (_hidden,) = box
        return _holders(box)

    def forward() -> tuple[int, ...]:
        hidden = made()
        return asked((hidden,))

    return forward()


# ---- routing --------------------------------------------------------------------------------------
# A router's forward in which a kernel may choose the experts: the same code, with a question after its product.
#
# It looks for one shape of code in any class: one ``z = linear(...)``, and at the end ``return z, weights, ids``. The weights
# may be a name or an expression. After the product comes a call that may return weights and ids. If it returns None, the
# original code goes on.

ROUTE = "_tilegym_db_route"
"""The function that the rewritten forward calls: ``ROUTE(self, logits, *others)`` returns (weights, ids), or None. ``others`` are
the arguments of the forward after the hidden states, for example the tokens."""
SERVED = "_tilegym_db_routed"
PRODUCT = "linear"


@once_per_function
def is_routing(forward: FunctionType) -> bool:
    """Return True if a function has the shape of a router's forward."""
    function = parsed(forward)
    return function is not None and _product(function) is not None


def with_route(forward: FunctionType) -> FunctionType:
    """Return the same function with a call of :data:`ROUTE` after its product."""
    function = parsed(forward)
    product = None if function is None else _product(function)
    assert function is not None, "ask is_routing first"
    assert product is not None, "ask is_routing first"
    place, logits = product
    given = ", ".join(["self", logits, *(argument.arg for argument in function.args.args[2:])])
    source = f"{SERVED} = {ROUTE}({given})\nif {SERVED} is not None:\n    return {logits}, {SERVED}[0], {SERVED}[1]"
    asked = ast.parse(source).body
    for statement in asked:
        for node in ast.walk(statement):
            ast.copy_location(node, function.body[place])
    function.body[place + 1 : place + 1] = asked
    return recompiled(forward, function)


def _product(function: ast.FunctionDef) -> tuple[int, str] | None:
    """Return (index of the product among the statements, name of its result)."""
    products = [
        (place, statement.targets[0].id)
        for place, statement in enumerate(function.body)
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr == PRODUCT
    ]
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(products) != 1 or len(returns) != 1:
        return None
    match returns[0].value:
        case ast.Tuple(elts=[ast.Name(id=first), _, ast.Name()]) if first == products[0][1]:
            return products[0]
        case _:
            return None
