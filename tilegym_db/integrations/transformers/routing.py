"""A router's forward in which a kernel may choose the experts: the same code, with a question after its product.

Looked for is one shape of code, in any class: one ``z = linear(...)``, and at the end ``return z, weights, ids``, the weights by
name or as they are computed. After the product comes a call that may give weights and ids; where it gives none, the code goes on
as it is.
"""

from __future__ import annotations

import ast
from types import FunctionType

from tilegym_db.integrations.transformers.fingerprint import once_per_function
from tilegym_db.integrations.transformers.fusion import parsed, recompiled

__all__ = ["ROUTE", "is_routing", "with_route"]

ROUTE = "_tilegym_db_route"
"""What the rewritten forward calls: ``ROUTE(self, logits, *others)`` is (weights, ids), or None. ``others`` are what the forward
was given beside the hidden states, such as the tokens."""
SERVED = "_tilegym_db_routed"
PRODUCT = "linear"


@once_per_function
def is_routing(forward: FunctionType) -> bool:
    """Whether a function has that shape."""
    function = parsed(forward)
    return function is not None and _product(function) is not None


def with_route(forward: FunctionType) -> FunctionType:
    """The same function, which asks :data:`ROUTE` after its product."""
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
