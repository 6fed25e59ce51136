"""Residual add and norm as one call, across modules: the layer's forward is rewritten, nothing else of it changes.

Looked for is one shape of code, in any class: ``x = r + x``, ``r = x``, ``x = self.norm(x)``. The three statements become one
call of a function that asks for a kernel and otherwise does the same in the same order. A kernel overwrites the operand that
the first statement drops; that is allowed only where nobody else holds its memory (:func:`is_owned`), so that what hooks,
caches or callers keep is never touched.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.upstream_code import is_renaming, once_per_function, undecorated, without_checkpointing

_uses_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
_callback_of_dynamo: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_is_compiling = torch.compiler.is_compiling

ADD_NORM = "_tilegym_db_add_norm"
"""What the rewritten forward calls: ``normed, total = ADD_NORM(self, norm, residual, (hidden,))``; see :func:`is_owned`."""


def plain_forward(cls: type[torch.nn.Module]) -> FunctionType | None:
    """Return the function that a class's forward runs, out of the wrappers of transformers whose part is known.

    None if another wrapper is around it, whose part is not known, or it is no function of plain source.
    """
    forward: Any = undecorated(without_checkpointing(cls.forward))
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return None
    return forward


@once_per_function
def fused_norms(forward: FunctionType) -> tuple[str, ...]:
    """Return the attributes of ``self`` that are called with a sum right after it was made; empty if there are none."""
    function = parsed(forward)
    if function is None:
        return ()
    matches = (_match(function.body[index : index + 3]) for index in range(len(function.body)))
    return tuple(match[2] for match in matches if match is not None)


def rewritten(forward: FunctionType, norm: str) -> FunctionType:
    """Return the same function with the add before one of its :func:`fused_norms`, and the norm, as a call of
    :data:`ADD_NORM`.

    Its globals are those of ``forward``.
    """
    function = parsed(forward)
    assert function is not None, "ask fused_norms first"
    function.body = _fused(function.body, norm)
    return recompiled(forward, function)


def recompiled(forward: FunctionType, function: ast.FunctionDef) -> FunctionType:
    """Return a function of another tree than that of ``forward``, with its globals, its defaults and the lines of its
    source.
    """
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


def parsed(forward: FunctionType) -> ast.FunctionDef | None:
    """Return the tree of a function of plain source, without decorators that rename arguments; None of any other
    function.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef) or function.name != forward.__name__:
        return None
    if not all(is_renaming(decorator, forward.__globals__) for decorator in function.decorator_list):
        return None
    function.decorator_list = []
    return function


def _forget_annotations(function: ast.FunctionDef) -> None:
    """Annotations and defaults would be evaluated when the copy is made; its defaults are set as values."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    function.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]


def _fused(body: list[ast.stmt], norm: str) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    index = 0
    while index < len(body):
        match = _match(body[index : index + 3])
        if match is None or match[2] != norm:
            statements.append(body[index])
            index += 1
            continue
        residual, hidden, _ = match
        (call,) = ast.parse(f"{hidden}, {residual} = {ADD_NORM}(self, self.{norm}, {residual}, ({hidden},))").body
        for node in ast.walk(call):
            ast.copy_location(node, body[index])
        statements.append(call)
        index += 3
    return statements


def _match(statements: list[ast.stmt]) -> tuple[str, str, str] | None:
    """(residual, hidden, norm) of ``hidden = residual + hidden; residual = hidden; hidden = self.norm(hidden)``."""
    if len(statements) < 3:
        return None
    texts = [ast.unparse(statement) for statement in statements]
    match statements[0]:
        case ast.Assign(
            targets=[ast.Name(id=hidden)],
            value=ast.BinOp(left=ast.Name(id=residual), op=ast.Add(), right=ast.Name(id=right)),
        ) if right == hidden and residual != hidden and texts[1] == f"{residual} = {hidden}":
            pass
        case _:
            return None
    match statements[2]:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[ast.Name(id=given)], keywords=[]
            ),
        ) if target == hidden and given == hidden:
            return residual, hidden, norm
        case _:
            return None


# -- whose memory it is -----------------------------------------------------------------------------------------------


def is_owned(box: tuple[torch.Tensor]) -> bool:
    """Return True if the tensor that a rewritten forward passes on is held by that forward alone: object, tensor and
    memory.

    To be asked in a function that the forward calls with the tensor in a tuple, and that has it in one variable: these
    references are counted once, with tensors that nobody else can know. Passed as it is, a call of a Python function would hold
    it once or twice: CPython moves arguments into a call only while no other evaluator of frames is installed, and
    torch.compile installs one while any thread is under it, and for the rest of the process after a compilation that failed.

    Under torch.compile nothing is owned: the bytecode that it makes drops a variable that is not read again, so that the count
    is one too low, and one other holder would go unseen. Nor is a tensor that is not contiguous, whose elements may share memory.
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
    """Of a tensor, and of a view whose base nobody else has: PyTorch 2.11 returns one from a linear layer with a bias."""
    with torch.inference_mode(False):  # inside that mode no view knows its base
        return _counted(lambda: torch.empty(1)), _counted(lambda: torch.empty(1).view(1))


def _counted(made: Callable[[], torch.Tensor]) -> Any:
    """As a rewritten forward would: a local variable, passed on in a tuple to a function, which asks."""

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
# Looked for is one shape of code, in any class: one ``z = linear(...)``, and at the end ``return z, weights, ids``,
# the weights by name or as they are computed. After the product comes a call that may give weights and ids; where it
# gives none, the code goes on as it is.

ROUTE = "_tilegym_db_route"
"""What the rewritten forward calls: ``ROUTE(self, logits, *others)`` is (weights, ids), or None. ``others`` are what the forward
was given beside the hidden states, such as the tokens."""
SERVED = "_tilegym_db_routed"
PRODUCT = "linear"


@once_per_function
def is_routing(forward: FunctionType) -> bool:
    """Return True if a function has that shape."""
    function = parsed(forward)
    return function is not None and _product(function) is not None


def with_route(forward: FunctionType) -> FunctionType:
    """Return the same function, which asks :data:`ROUTE` after its product."""
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
    """(the place of the product among the statements, the name of what it gives)."""
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
