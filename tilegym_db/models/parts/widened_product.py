"""A product in float32 of operands in half precision, ``F.linear(x.float(), self.weight.float())``, as routers have it.

Code of models copies both operands, the weight at every call. A kernel reads them as they are: their products are exact in
float32. Only this expression changes, so other parts find the rest of the forward as it was.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, is_autocast, rows, shadow_function
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    is_plain,
    of_class,
)
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of
from tilegym_db.models.rewrite import parsed, recompiled
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, once_per_function, with_source
from tilegym_db.records.definition_parts import ModelCode

KIND = "widened_product"
AFTER = ("router",)
IS_INNER = True
"""The parts that share a forward get it with this part's call in it."""
CALL = "_tilegym_db_widened"
"""What a rewritten forward calls: ``CALL.linear(self, x, weight)``. Its product keeps the name by which routers are found."""
EXPERTS = 24
"""Rows of the weight of the probe."""
OTHER_DTYPES = "its operands are in float32 already, or have different dtypes"
OTHER_WEIGHT = "its weight is no plain matrix"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module
Function = Callable[..., Any]


class Product(NamedTuple):
    """The expressions of both operands of a product, and its source as a function of them, ``own(i0, i1)``."""

    left: str
    right: str
    source: str


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with one such product in their forward."""
    multiplies = of_class(lambda cls: product_of(cls.forward) is not None)
    parts = [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if multiplies(module)]
    return grouped(KIND, parts if known.definitions(KIND) else ())


def product_of(forward: Any) -> Product | None:
    """Return the one product of widened operands in a forward; None if there is none, or if there are several."""
    return _of_source(forward) if is_plain(forward) and not forward.__code__.co_freevars else None


@once_per_function
def _of_source(forward: FunctionType) -> Product | None:
    function = parsed(forward)
    scope = _read_globals(forward)
    calls = [] if function is None else _products(function, scope)
    if function is None or len(calls) != 1 or not _keeps_owner(function):
        return None
    left, right = (ast.unparse(_widened(one, scope) or one) for one in calls[0].args)
    for name, operand in zip(("i0", "i1"), calls[0].args, strict=True):
        operand.func.value = ast.Name(name, ast.Load())  # type: ignore[attr-defined]
    return Product(left, right, f"def own(i0, i1):\n    return {ast.unparse(calls[0])}\n")


def _read_globals(forward: FunctionType) -> Mapping[str, Any]:
    """Return the globals that a function can read: those without a local variable of the same name, also in inner functions."""
    local, codes = set[str](), [forward.__code__]
    while codes:
        code = codes.pop()
        local.update(code.co_varnames, code.co_cellvars)
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {name: value for name, value in forward.__globals__.items() if name not in local}


def _keeps_owner(function: ast.FunctionDef) -> bool:
    """Return True if the name of the module means nothing else in its forward, nor in inner functions."""
    owner = function.args.args[0]
    return not any(
        (isinstance(node, ast.Name) and node.id == owner.arg and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.arg) and node.arg == owner.arg and node is not owner)
        for node in ast.walk(function)
    )


def _products(function: ast.FunctionDef, scope: Mapping[str, Any]) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and len(node.args) == 2]
    return [
        node
        for node in calls
        if not node.keywords
        and _value(node.func, scope) is torch.nn.functional.linear
        and all(_widened(one, scope) is not None for one in node.args)
    ]


def _widened(node: ast.expr, scope: Mapping[str, Any]) -> ast.expr | None:
    """Return ``x`` of ``x.float()``, ``x.to(torch.float32)`` or ``x.type(torch.float32)``; None for other expressions."""
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr="float"), args=[], keywords=[]):
            return inner if _is_variable(inner) else None
        case ast.Call(func=ast.Attribute(value=inner, attr="to" | "type"), args=[dtype], keywords=[]):
            return inner if _is_variable(inner) and _value(dtype, scope) is torch.float32 else None
    return None


def _is_variable(node: ast.expr) -> bool:
    """Return True for a variable or an attribute of one, which have no effect when they are read."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the value of a global or of its attribute; None for other expressions."""
    match node:
        case ast.Name(id=name):
            return scope.get(name)
        case ast.Attribute(value=inner, attr=name):
            owner = _value(inner, scope)
            return getattr(owner, name, None) if isinstance(owner, types.ModuleType) else None
    return None


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions of the part; the bits of the product decide."""
    code = ModelCode(fingerprint=fingerprint(found.module_class.forward) or NO_FINGERPRINT)
    return MatchCandidates([DefinitionMatch(one, code) for one in known.definitions(KIND)])


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the expression on drawn operands whose products have sums of few terms, so that their order changes no bit."""
    draw = Draw(device_of(module))
    operands = draw(ROWS, SIZE), draw.mixing(EXPERTS, SIZE)
    with torch.no_grad():
        out = expression_of(found.module_class.forward)(*operands)
    return dict(zip(match.definition.inputs, operands, strict=True)), (out,)


def expression_of(forward: Any) -> Function:
    """Return ``own(x, weight)``, the product as a forward computes it."""
    product = product_of(forward)
    assert product is not None, "the group was found by it"
    scope = dict(forward.__globals__)
    exec(compile(product.source, forward.__code__.co_filename, "exec"), scope)
    own: Function = scope["own"]
    return own


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the same forward, whose product asks for a kernel first."""
    ((_, site),) = calls
    function, product = parsed(stock), product_of(stock)
    assert function is not None, "the group was found in it"
    assert product is not None, "the group was found by it"
    (node,) = _products(function, _read_globals(stock))
    node.func = ast.Attribute(ast.Name(CALL, ast.Load()), "linear", ast.Load())
    owner = function.args.args[0].arg
    node.args = [ast.parse(source, mode="eval").body for source in (owner, product.left, product.right)]
    for inner in ast.walk(node):
        ast.copy_location(inner, node)
    source = ast.unparse(function)
    called = types.SimpleNamespace(linear=product_function(site, expression_of(stock)))
    asked, forget = shadow_function(recompiled(stock, function), {CALL: called})
    site.shadows.append(forget)
    return with_source(asked, source)


def product_function(site: CallSite, own: Function) -> Function:
    """Return ``linear(module, x [..., K], weight [N, K]) -> [..., N]`` in float32, which asks for a kernel first."""

    def why_stock(x: torch.Tensor, weight: Any) -> str:
        is_plain_weight = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout is torch.strided
        if not is_plain_weight or weight.dim() != 2 or weight.stride(1) != 1:
            return OTHER_WEIGHT
        if is_autocast(x):
            return AUTOCAST
        return OTHER_DTYPES if x.dtype != weight.dtype or x.dtype == torch.float32 else ""

    def serve(module: Any, x: torch.Tensor, weight: Any) -> torch.Tensor | None:
        if site.falls_back(module.training, x, weight):
            return None
        matrix, reason = rows(x), why_stock(x, weight)
        if matrix is None or reason:
            site.bypass(reason or NOT_ROWS)
            return None
        out: torch.Tensor | None = site.ask(module.training, matrix, weight)
        return None if out is None else out.view(*x.shape[:-1], out.shape[-1])

    def linear(module: Any, x: torch.Tensor, weight: Any) -> Any:
        out = None if _is_compiling() else serve(module, x, weight)
        return own(x, weight) if out is None else out

    return linear
