"""Texts in annotations: they may name a type and do nothing else."""

from __future__ import annotations

import ast

from tilegym_db.verify.scan.context import Context
from tilegym_db.verify.scan.tables import words

__all__ = ["check_texts"]

NOT_EVALUATED = words("typing.Annotated typing.Literal typing_extensions.Annotated typing_extensions.Literal")


def check_texts(context: Context, node: ast.expr, seen: set[ast.AST]) -> None:
    """Refuse a text in an annotation that would do more than name a type, were somebody to evaluate it.

    ``seen`` holds the names whose value was judged already.
    """
    if isinstance(node, ast.Subscript) and context.resolve(node.value) & NOT_EVALUATED:
        parts = node.slice.elts[:1] if isinstance(node.slice, ast.Tuple) else []
    else:
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    for part in parts:
        check_texts(context, part, seen)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _names_a_type(node.value):
        context.report.add(node, "dynamic-code", f"annotates with the text '{node.value[:40]}'")
    if isinstance(node, ast.JoinedStr | ast.BinOp) and _is_computed_text(context, node):
        context.report.add(node, "dynamic-code", "annotates with a computed text")
    for binding in context.names.bindings(node, context.scope) if node not in seen else ():
        seen.add(node)
        if isinstance(binding.value, ast.Constant | ast.Subscript | ast.JoinedStr | ast.BinOp | ast.Name):
            check_texts(context, binding.value, seen)


def _is_computed_text(context: Context, node: ast.expr) -> bool:
    """True for an f-string, and for a sum or the like of texts; sums of sizes stand in annotations of TileLang."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return False
    parts = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    return any(isinstance(part, ast.JoinedStr) or context.text(part) is not None for part in parts)


def _names_a_type(text: str) -> bool:
    """Whether a text is no Python, or only names, their members and unions, whose names no HARD rule refuses."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    plain = (
        ast.Expression,
        ast.Name,
        ast.Attribute,
        ast.Subscript,
        ast.Tuple,
        ast.List,
        ast.BinOp,
        ast.BitOr,
        ast.Load,
    )
    return all(isinstance(part, (*plain, ast.Constant)) for part in ast.walk(tree)) and "__" not in text
