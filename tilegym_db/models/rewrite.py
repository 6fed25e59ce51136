"""Residual add and norm of two modules as one call: only the layer's forward is rewritten.

It looks for a sum of two variables, or of a variable and an expression, whose result is what the next statement norms. The sum is
kept, as ``x = r + x``, ``r = x``, ``x = self.norm(x)`` of a pre-norm layer does, or dropped, as in ``x = self.norm(x + r)`` of a
post-norm one. If an ``if`` stands between, the sum or the norm moves into its branches. The statements become one call of a
function. That function asks for a kernel, and otherwise runs the same operations in the same order. A kernel
overwrites the operand that no later statement reads, but only if no other code holds its memory (:func:`is_owned`). So memory
of hooks, caches or callers never changes.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.upstream_code import (
    is_known_decorator,
    once_per_function,
    source_of,
    undecorated,
    without_checkpointing,
)

_uses_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
_callback_of_dynamo: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_is_compiling = torch.compiler.is_compiling

LAST_SUM, FIRST_NORM = "_tilegym_db_last_sum", "_tilegym_db_first_norm"
"""The functions that a rewritten forward of a layer calls at its ends, so that a sum and the norm in the next layer are one call:
``total = LAST_SUM(self, residual, (hidden,))`` and ``normed = FIRST_NORM(self.norm, hidden)``. True follows in place of
``hidden + residual``."""
ADD_NORM = "_tilegym_db_add_norm"
"""Beginning of the function that the rewritten forward calls; the attribute of the norm follows:
``normed, total = ADD_NORM_norm(self, self.norm, residual, (hidden,))``; False follows if the layer drops the sum."""
PART, NORMED = "_tilegym_db_part", "_tilegym_db_normed"
"""Variables of a rewritten forward for an operand that has no name, and for a norm in the middle of an expression."""


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
    _, norms = _Fusing(function).block(function.body, [])
    return tuple(dict.fromkeys(norms))


@once_per_function
def first_norm(forward: FunctionType) -> str:
    """Return the attribute of ``self`` that norms a layer's input first, if the layer also ends in a residual sum; else empty."""
    function = parsed(forward)
    ends = None if function is None else _ends(function)
    return "" if ends is None else ends.norm


def rewritten(forward: FunctionType, *norms: str, with_ends: bool = False) -> FunctionType:
    """Return the same function with residual adds and some of its :func:`fused_norms` as calls of :func:`called_for`.

    Its globals are those of ``forward``. If ``with_ends`` is true, it also calls :data:`FIRST_NORM` and :data:`LAST_SUM`.
    """
    function = parsed(forward)
    assert function is not None, "ask fused_norms first"
    ends = _ends(function) if with_ends else None
    if ends is not None:
        _join_ends(function, ends)
    function.body, _ = _Fusing(function, frozenset(norms)).block(function.body, [])
    return recompiled(forward, function)


def called_for(norm: str) -> str:
    """Return the name of the function that a rewritten forward calls in place of a sum and that norm."""
    return f"{ADD_NORM}_{norm}"


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
    """Return a copy of the function whose syntax tree each rewrite has changed; ``forward`` itself without rewrites."""
    function = parsed(forward) if rewrites else None
    if function is None:
        return forward
    for rewrite in rewrites:
        rewrite(function)
    return recompiled(forward, function)


def method_calls(name_of: Callable[[ast.Call, ast.Attribute], str | None]) -> Callable[[ast.FunctionDef], None]:
    """Return a rewrite that turns ``owner.method(x, ...)`` into ``name(owner, x, ...)``."""
    transformer = _MethodCalls(name_of)

    def rewrite(function: ast.FunctionDef) -> None:
        transformer.visit(function)

    return rewrite


class _MethodCalls(ast.NodeTransformer):
    """The transformer of :func:`method_calls`."""

    def __init__(self, name_of: Callable[[ast.Call, ast.Attribute], str | None]) -> None:
        self._name_of = name_of

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = node.func
        if not isinstance(method, ast.Attribute) or (name := self._name_of(node, method)) is None:
            return node
        called = ast.copy_location(ast.Name(name, ctx=ast.Load()), method)
        return ast.copy_location(ast.Call(called, [method.value, *node.args], node.keywords), node)


def parsed(forward: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a Python function without decorators that rename arguments; None for other functions.

    The first parameter, ``function.args.args[0]``, has a name, which is that of the module in a forward.
    """
    try:
        tree = ast.parse(source_of(forward))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef) or function.name != forward.__name__:
        return None
    if function.args.posonlyargs or not function.args.args:
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


class _Sum(NamedTuple):
    """``target = residual + hidden``: ``hidden`` is the operand that no later statement reads; ``before`` computes it."""

    target: str
    residual: str
    hidden: str
    before: tuple[ast.stmt, ...] = ()


class _Norm(NamedTuple):
    """The statements that norm a variable, and the variable that keeps it; ``call`` stands in the last of them."""

    norm: str
    keeper: str
    call: ast.Call
    statements: int


class _Fusing:
    """The rewriting of one function: which variables are assigned where, and which norms become calls."""

    def __init__(self, function: ast.FunctionDef, norms: frozenset[str] | None = None) -> None:
        """Look at a function; None for ``norms`` means each of them."""
        self._norms = norms
        self._stores = [
            (node.id, node.lineno)
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]

    def block(self, body: Sequence[ast.stmt], later: Sequence[ast.stmt]) -> tuple[list[ast.stmt], list[str]]:
        """Return the statements of a block with calls in place of sums and norms, and the norms of those calls.

        ``later`` are the statements that may run after the block.
        """
        statements, norms = list[ast.stmt](), list[str]()
        rest = list(body)
        while rest:
            made = self._fused(rest, later) or self._branched(rest, later)
            if made is None:
                statements.append(rest.pop(0))
                continue
            replaced, found, length = made
            statements += replaced
            norms += found
            rest = rest[length:]
        return statements, norms

    def _fused(
        self, rest: Sequence[ast.stmt], later: Sequence[ast.stmt]
    ) -> tuple[list[ast.stmt], list[str], int] | None:
        """Return the call of the first statements, if they are a sum and its norm, and how many statements it replaces."""
        inner = _norm_of_sum(rest[0])
        if inner is not None:
            norm, total, residual = inner
            return (*self._call(rest[0], norm, f"{total} = {{}}[0]", residual, total), 1) if self._wants(norm) else None
        total_of = self._sum(rest[0], [*rest[1:], *later])
        normed = None if total_of is None else _norm(rest[1:], total_of.target)
        if total_of is None or normed is None or not self._wants(normed.norm):
            return None
        last, total = rest[normed.statements], total_of.target
        assert isinstance(last, ast.Assign), "a norm is assigned"
        assigned = _assigned(last)
        is_whole = assigned is not None and assigned[1] is normed.call
        name = assigned[0] if assigned is not None and is_whole else NORMED
        if name != total:
            text = f"{name}, {total} = {{}}"
        else:
            text = f"{name}, {normed.keeper} = {{}}" if normed.keeper else f"{name} = {{}}[0]"
        made, norms = self._call(rest[0], normed.norm, text, total_of.residual, total_of.hidden)
        if normed.keeper and name != total:
            made += _statements(f"{normed.keeper} = {total}", rest[0])
        if not is_whole:
            made += [_Replaced(normed.call, NORMED).visit(last), *_statements(f"{NORMED} = None", last)]
        return [*total_of.before, *made], norms, 1 + normed.statements

    def _wants(self, norm: str) -> bool:
        return self._norms is None or norm in self._norms

    @staticmethod
    def _call(place: ast.stmt, norm: str, text: str, residual: str, hidden: str) -> tuple[list[ast.stmt], list[str]]:
        alone = ", False" if text.endswith("[0]") else ""  # the layer reads the norm alone, not the sum
        call = f"{called_for(norm)}(self, self.{norm}, {residual}, ({hidden},){alone})"
        return _statements(text.format(call), place), [norm]

    def _branched(
        self, rest: Sequence[ast.stmt], later: Sequence[ast.stmt]
    ) -> tuple[list[ast.stmt], list[str], int] | None:
        """Return an ``if`` whose branches have calls; a sum before it and a norm after it may move into both branches."""
        summed = self._sum(rest[0], [*rest[1:], *later]) if len(rest) > 1 else None
        place = 1 if summed is not None and isinstance(rest[1], ast.If) else 0
        branch = rest[place]
        if not isinstance(branch, ast.If):
            return None
        before = list(rest[:place])
        if summed is not None and place and not _is_independent(branch.test, summed.target):
            return None
        ends = {self._end(block, before) for block in (branch.body, branch.orelse)} - {""}
        after = [one for one in (_norm(rest[place + 1 :], end) for end in sorted(ends)) if one is not None]
        for length in dict.fromkeys((after[0].statements if after else 0, 0)):
            moved = rest[place + 1 : place + 1 + length]
            follow = [*rest[place + 1 + length :], *later]
            if place == 0 and length == 0:
                blocks = [self.block(block, follow) for block in (branch.body, branch.orelse)]
            else:
                parts = [[*before, *block, *moved] for block in (branch.body, branch.orelse)]
                blocks = [self.block(copy.deepcopy(part), follow) for part in parts]
            norms = [norm for _, found in blocks for norm in found]
            if norms:
                changed = ast.If(branch.test, *(statements for statements, _ in blocks))
                return [ast.copy_location(changed, branch)], norms, place + 1 + length
        return None

    def _end(self, block: Sequence[ast.stmt], before: Sequence[ast.stmt]) -> str:
        """Return the variable that the last statement of a block assigns a sum to; empty if it assigns something else."""
        last = next(iter([*before, *block][::-1]), None)
        found = None if last is None else self._sum(last, [])
        return "" if found is None else found.target

    def _sum(self, statement: ast.stmt, rest: Sequence[ast.stmt]) -> _Sum | None:
        """Match ``total = left + right``; one of the operands may be an expression. ``rest`` are the later statements."""
        assigned = _assigned(statement)
        if assigned is None or not isinstance(assigned[1], ast.BinOp) or not isinstance(assigned[1].op, ast.Add):
            return None
        target, sides = assigned[0], (assigned[1].left, assigned[1].right)
        names = [side.id if isinstance(side, ast.Name) else "" for side in sides]
        if names[0] == names[1]:
            return None  # twice the same, or no variable
        if "" in names:
            residual, part = next(filter(None, names)), sides[names.index("")]
            hidden = PART if residual == target else target
            if any(isinstance(node, ast.NamedExpr) for node in ast.walk(part)):
                return None  # it may assign the other operand
            (before,) = _statements(f"{hidden} = None", statement)
            assert isinstance(before, ast.Assign), "the text above is an assignment"
            before.value = part
            return _Sum(target, residual, hidden, (before,))
        read = {node.id for one in rest for node in ast.walk(one) if isinstance(node, ast.Name) and _is_load(node)}
        free = [name for name in names if name == target or name not in read]
        if not free:
            return None
        hidden = max(free, key=lambda name: (self._last_store(name, statement.lineno), name == target))
        (residual,) = set(names) - {hidden}
        return _Sum(target, residual, hidden)

    def _last_store(self, name: str, before: int) -> int:
        """Return the line on which a variable is assigned last before another line; 0 if it is an argument."""
        return max((line for stored, line in self._stores if stored == name and line < before), default=0)


class _Ends(NamedTuple):
    """The first norm of a layer's input, by its call, and the last sum, by its place among the statements of the function."""

    norm: str
    call: ast.Call
    place: int
    total: _Sum


def _ends(function: ast.FunctionDef) -> _Ends | None:
    """Return both ends of a layer: ``x = self.norm(given)`` at the beginning, and a sum that it returns; None without these."""
    first, body = _first_norm(function), function.body
    if first is None:
        return None
    for place in range(len(body) - 1, -1, -1):
        rest = body[place + 1 :]
        total = _Fusing(function)._sum(body[place], rest)
        if total is not None:
            return (
                None if _norm(rest, total.target) or not _is_result(total.target, rest) else _Ends(*first, place, total)
            )
    return None


def _first_norm(function: ast.FunctionDef) -> tuple[str, ast.Call] | None:
    """Return (attribute, call) of the first statement that calls a module with the layer's input alone, still unchanged."""
    if len(function.args.args) < 2:
        return None
    given = function.args.args[1].arg
    for statement in function.body:
        assigned = _assigned(statement)
        called = None if assigned is None else _called_with(assigned[1])
        if assigned is not None and called is not None and is_name(called[1], given):
            assert isinstance(assigned[1], ast.Call), "only calls match"
            return called[0], assigned[1]
        if any(isinstance(node, ast.Name) and node.id == given and not _is_load(node) for node in ast.walk(statement)):
            return None
    return None


def _is_result(total: str, rest: Sequence[ast.stmt]) -> bool:
    """Return True if the last statements return a variable that none of them changes, but a branch may replace it."""
    nodes = [node for one in rest for node in ast.walk(one)]
    changed = any(isinstance(node, ast.AugAssign) and is_name(node.target, total) for node in nodes)
    replaced = any((assigned := _assigned(one)) is not None and assigned[0] == total for one in rest)
    return not changed and not replaced and any(isinstance(one, ast.Name) and one.id == total for one in nodes)


def _join_ends(function: ast.FunctionDef, ends: _Ends) -> None:
    """Turn both ends of a layer into calls."""
    total, place = ends.total, function.body[ends.place]
    assigned = _assigned(place)
    is_swapped = assigned is not None and not is_name(assigned[1].left, total.residual)  # type: ignore[attr-defined]
    swapped = ", True" if is_swapped else ""
    text = f"{total.target} = {LAST_SUM}(self, {total.residual}, ({total.hidden},){swapped})"
    norm = ends.call.func
    ends.call.func, ends.call.args = ast.copy_location(ast.Name(FIRST_NORM, ast.Load()), norm), [norm, *ends.call.args]
    function.body[ends.place : ends.place + 1] = [*total.before, *_statements(text, place)]


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_independent(test: ast.expr, name: str) -> bool:
    """Return True if a condition does not read a variable, and neither calls nor assigns anything."""
    return not any(isinstance(node, ast.Call | ast.NamedExpr) or is_name(node, name) for node in ast.walk(test))


def _statements(source: str, place: ast.stmt) -> list[ast.stmt]:
    """Return parsed statements at the place of another one."""
    made = ast.parse(source).body
    for statement in made:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return made


class _Replaced(ast.NodeTransformer):
    """A transformer that puts a variable in the place of one call."""

    def __init__(self, call: ast.Call, name: str) -> None:
        self._call, self._name = call, name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is self._call:
            return ast.copy_location(ast.Name(self._name, ctx=ast.Load()), node)
        return self.generic_visit(node)


def _norm(statements: Sequence[ast.stmt], total: str) -> _Norm | None:
    """Match ``x = self.norm(total)``, also inside of an expression and after ``kept = total``."""
    keeper = ""
    first = _assigned(statements[0]) if statements else None
    if first is not None and is_name(first[1], total) and first[0] != total:
        keeper, statements = first[0], statements[1:]
    assigned = _assigned(statements[0]) if statements else None
    if assigned is None:
        return None
    calls = [(node, called) for node in ast.walk(assigned[1]) if (called := _called_with(node)) is not None]
    found = [(node, called[0]) for node, called in calls if is_name(called[1], total)]
    if len(found) != 1 or [name for _, (name, _) in calls].count(found[0][1]) != 1:
        return None
    call, norm = found[0]
    assert isinstance(call, ast.Call), "only calls match"
    return _Norm(norm, keeper, call, 2 if keeper else 1) if _runs_first(assigned[1], call) else None


def _runs_first(value: ast.expr, call: ast.Call) -> bool:
    """Return True if an expression only reads variables and attributes before it makes a call in it."""
    if value is call:
        return True
    match value:
        case ast.Call(func=function, args=arguments, keywords=[]):
            parts = [function, *arguments]
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case _:
            return False
    for part in parts:
        if any(node is call for node in ast.walk(part)):
            return _runs_first(part, call)
        if not all(isinstance(node, ast.Name | ast.Attribute | ast.Load | ast.Constant) for node in ast.walk(part)):
            return False
    return False


def _norm_of_sum(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Match ``hidden = self.norm(hidden + residual)``; return the norm, ``hidden`` and ``residual``."""
    assigned = _assigned(statement)
    called = None if assigned is None else _called_with(assigned[1])
    operands = None if called is None else _sum(called[1])
    if assigned is None or called is None or operands is None or len({*operands}) != 2 or assigned[0] not in operands:
        return None
    residual = operands[1] if operands[0] == assigned[0] else operands[0]
    return called[0], assigned[0], residual


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


def _called_with(value: ast.AST) -> tuple[str, ast.expr] | None:
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
    """Return the reference counts of two results that nothing else holds: a tensor, and a view of a tensor.

    A layer with a bias returns such a view in PyTorch 2.11.
    """
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
