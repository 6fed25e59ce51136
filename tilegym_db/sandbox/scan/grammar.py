"""The part of Python that a source may use: functions, loops, conditions, expressions, and plain records.

A kernel is served inside the user's process, so the scan must know which code a source can reach. Class machinery and
patterns on classes reach attributes without naming them. Kernels do not need them, so every syntax node that is not in
``[language]`` of ``words.txt`` is refused, whatever it would do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tilegym_db.sandbox.scan.names import Context
from tilegym_db.sandbox.scan.tables import WORDS, words

RULE = "outside-language"

HINTS = {
    "AsyncFunctionDef": "an async function; write it without 'async'",
    "AsyncFor": "an async loop; write it without 'async'",
    "AsyncWith": "an async with; write it without 'async'",
    "Await": "await; call the function",
    "Try": "try; compare shapes and dtypes instead of catching errors",
    "MatchClass": "a pattern on a class, which reads attributes by position; compare with if",
    "MatchMapping": "a pattern on a mapping; compare with if",
    "TypeAlias": "a type statement; write an assignment",
}
"""Kind of a syntax node that is not in the language -> what it is, and how to write it."""


def check_grammar(context: Context) -> None:
    """Report every node of a source that is outside the allowed language; :func:`check_class` judges classes."""
    for node in ast.walk(context.module.tree):
        kind = type(node).__name__
        if kind not in WORDS["language"]:
            context.report.add(node, RULE, f"uses {HINTS.get(kind, f'{kind}, which kernels do not need')}")
        for name in _defined(node):
            if name.startswith("__") and name not in WORDS["record-methods"] | WORDS["module-names"]:
                what = f"uses the name {name}, which Python itself reads; choose another name"
                context.report.add(node, RULE, what)


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines or passes on: functions, parameters, fields, keywords, aliases, captures."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or ""
    elif isinstance(node, ast.MatchAs | ast.MatchStar):
        yield node.name or ""


# ---- classes --------------------------------------------------------------------------------------


def check_class(context: Context, node: ast.ClassDef) -> None:
    """Report a class that is more than a record: a ``NamedTuple``, a dataclass, or a class without base and decorator.

    ``context.scope`` is the scope around it.
    """
    bases = [_paths(context, base) for base in node.bases]
    makers = [_paths(context, one) for one in node.decorator_list]
    is_named_tuple = len(bases) == 1 and _is_one_of(bases[0], WORDS["record-bases"]) and not makers
    is_record = not bases and all(_is_one_of(maker, WORDS["record-decorators"]) for maker in makers)
    problem = ""
    if node.keywords:
        problem = f"gives the class {node.name} a keyword ({node.keywords[0].arg or '**'})"
    elif context.scope.is_class:
        problem = f"defines the class {node.name} in a class"
    elif not is_named_tuple and not is_record:
        problem = f"defines the class {node.name}, which has a base other than NamedTuple, or a decorator other than dataclass"
    elif is_record and not all(map(_has_plain_options, node.decorator_list)):
        problem = f"gives dataclass options of {node.name} that are computed"
    if problem:
        context.report.add(node, RULE, problem)
        return
    for statement in node.body:
        reason = _why_not_in_a_record(context, statement)
        if reason:
            context.report.add(statement, RULE, f"{reason} in the class {node.name}; keep fields and plain methods")


def _paths(context: Context, expression: ast.expr) -> frozenset[str]:
    return context.resolve(expression.func if isinstance(expression, ast.Call) else expression)


def _is_one_of(paths: frozenset[str], allowed: frozenset[str]) -> bool:
    return bool(paths) and paths <= allowed


def _has_plain_options(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return True
    return not decorator.args and all(
        option.arg is not None and isinstance(option.value, ast.Constant) and isinstance(option.value.value, bool)
        for option in decorator.keywords
    )


def _why_not_in_a_record(context: Context, statement: ast.stmt) -> str:
    if isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ):
        return ""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return ""
    if isinstance(statement, ast.FunctionDef):
        unknown = [
            one for one in statement.decorator_list if not _is_one_of(context.resolve(one), WORDS["method-decorators"])
        ]
        return f"decorates {statement.name} with {ast.unparse(unknown[0])[:40]}" if unknown else ""
    return f"has a {type(statement).__name__} statement"


# ---- texts of values ------------------------------------------------------------------------------

PRINTED = words("dtype shape ndim device name itemsize type index bits")
"""Attributes of values whose text may be used. The text of a method has the address of its tensor."""


def check_printed(context: Context, node: ast.expr, depth: int = 4) -> None:
    """Refuse the text of a function, a method or a plain object, which has an address in it."""
    if isinstance(node, ast.Attribute):
        is_plain = node.attr in PRINTED or node.attr in context.own_fields or bool(context.resolve(node))
        has_address = not is_plain
    elif isinstance(node, ast.Call):
        has_address = "builtins.object" in context.resolve(node.func)
    else:
        bindings = context.names.bindings(node, context.scope)
        has_address = any(isinstance(one.node, ast.FunctionDef | ast.ClassDef) for one in bindings)
        has_address |= isinstance(node, ast.Lambda)
        for value in [one.value for one in bindings if one.value is not None] if depth else ():
            if isinstance(value, ast.Attribute | ast.Name | ast.Lambda):
                check_printed(context, value, depth - 1)
    if has_address:
        context.report.add(
            node, "address-as-value", f"makes a text of {ast.unparse(node)[:40]}, which may have an address"
        )
