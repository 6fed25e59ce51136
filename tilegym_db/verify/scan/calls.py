"""Rules about calls: computed attributes, the environment, raw device code, operators, flags for compilers."""

from __future__ import annotations

import ast
import re

from tilegym_db.verify.scan.context import Context
from tilegym_db.verify.scan.tables import OPERATOR_MAKERS, WORDS, words

__all__ = ["check_call", "check_environment_item"]

EXTERN_CALLS = frozenset({"tilelang.language.call_extern", "tilelang.language.call_pure_extern"})
DEVICE_INTRINSIC = re.compile(r"__(?!libc|xpg|nss|gconv)[a-z][a-z0-9_]*")
"""What ``T.call_extern`` may name: intrinsics of CUDA. Other names are also those of functions of the C library."""


FLAG_ARGUMENTS = ("compile_flags", "nvcc_flags")
SAFE_FLAG = re.compile(
    r"-O[0-3]|-G|-lineinfo|-D\w+(=\w+)?|-?-use_fast_math|-?-(fmad|ftz|prec-div|prec-sqrt)=(true|false)"
    r"|-?-maxrregcount=\d+|-?-ptxas-options=-[vO][0-3]?|-?-expt-(relaxed-constexpr|extended-lambda)"
)
READS_ATTRIBUTES = re.compile(r"\{[^{}:!]*[.\[]")
"""A field of ``str.format`` that reads an attribute or item: ``{0.__globals__}``."""

CLASS_MAKERS = words(
    "collections.namedtuple enum.Enum enum.IntEnum enum.StrEnum enum.Flag enum.IntFlag typing.NamedTuple typing.TypedDict"
)
HARMLESS_VARIABLES = frozenset({"TRITON_INTERPRET"})
"""What a kernel may ask: nothing that differs between a worker, whose environment is scrubbed, and a model."""


def check_call(context: Context, node: ast.Call) -> None:
    """Every rule about one call."""
    paths = context.resolve(node.func)
    count = len(node.args) + len(node.keywords)
    if paths & {"builtins.getattr", "builtins.hasattr"} and node.args:
        _check_getattr(context, node, reads="builtins.getattr" in paths)
    if _is_attention_operator(context, node.func):
        context.called_operators.add(node.func)
    if "builtins.type" in paths and count > 1:
        context.report.add(node, "class-factory", "calls type() with three arguments")
    elif "builtins.type" in paths and node not in context.may_hold_class:
        context.report.add(
            node, "class-factory", "uses the class that type() returns otherwise than to compare or name it"
        )
    if "cuda.tile.launch" in paths and node.args and isinstance(_literal(context, node.args[0]), ast.Constant):
        context.report.add(node, "stream-or-graph", "launches on a stream given by number")
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = context.text(node.func.value)
        if text is not None and not READS_ATTRIBUTES.search(text):
            context.plain_formats.add(node.func)
    if "torch.compile" in paths and any(keyword.arg in (None, "options") for keyword in node.keywords):
        context.report.add(node, "compiler-flags", "gives torch.compile options")
    if paths & CLASS_MAKERS and any(keyword.arg in (None, "module", "qualname") for keyword in node.keywords):
        context.report.add(node, "class-factory", "gives a class another module")
    if "functools.wraps" in paths and count > 1:
        context.report.add(node, "dynamic-attribute", "gives functools.wraps a list of attributes to set")
    if "types.SimpleNamespace" in paths and (node.args or any(keyword.arg is None for keyword in node.keywords)):
        context.report.add(node, "dynamic-attribute", "gives SimpleNamespace names that cannot be known")
    if paths & EXTERN_CALLS and not _names_an_intrinsic(context, node):
        context.report.add(node, "native-extension", "gives T.call_extern a name that is no intrinsic of CUDA")
    if paths & OPERATOR_MAKERS and _is_torch_operator(context, node):
        context.report.add(node, "dispatch-override", "registers an operator whose name is computed or torch's own")
    if paths & {"os.getenv", "os.environ.get"}:
        _check_variable(context, node, node.args[0] if node.args else None)
    _check_keywords(context, node)


def _is_attention_operator(context: Context, function: ast.expr) -> bool:
    """Whether python code calls an attention operator by its whole name, from what ``import torch`` alone binds."""
    if context.language != "python" or not context.resolve(function) or not isinstance(function, ast.Attribute):
        return False
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    bindings = context.names.bindings(root, context.scope)
    is_torch = bool(bindings) and all(binding.path == "torch" for binding in bindings)
    return is_torch and context.resolve(function) <= WORDS["attention-operators"]


def _literal(context: Context, node: ast.expr) -> ast.expr | None:
    return context.names.literal(node, context.scope)


def check_environment_item(context: Context, node: ast.AST, mapping: ast.expr, name: ast.expr) -> None:
    """``os.environ[name]`` and ``name in os.environ``."""
    if "os.environ" in context.resolve(mapping):
        context.may_hold_module.add(mapping)
        _check_variable(context, node, name)


def _check_variable(context: Context, node: ast.AST, name: ast.expr | None) -> None:
    text = context.text(name)
    if text is None:
        context.report.add(node, "environment", "reads a variable whose name is computed")
    elif text not in HARMLESS_VARIABLES:
        context.report.add(node, "environment", f"reads {text}")


def _check_getattr(context: Context, node: ast.Call, *, reads: bool) -> None:
    context.may_hold_module |= {node.func, node.args[0]}
    name = context.names.attribute(node, context.scope)
    if not reads:
        return
    if name is None:
        context.report.add(node, "dynamic-attribute", "calls getattr with a name that is computed")
        return
    paths = context.resolve(node)
    for path in sorted(paths):
        context.check_path(node, path)
        context.check_escape(node, path)
    context.check_attribute_name(node, name, resolved=bool(paths))


def _names_an_intrinsic(context: Context, node: ast.Call) -> bool:
    text = context.text(node.args[1]) if len(node.args) > 1 else None
    return text is not None and DEVICE_INTRINSIC.fullmatch(text) is not None


def _is_torch_operator(context: Context, node: ast.Call) -> bool:
    name = context.text(node.args[0]) if node.args else None
    return name is None or name.partition("::")[0] in WORDS["torch-namespaces"]


def _check_keywords(context: Context, node: ast.Call) -> None:
    for keyword in node.keywords:
        if keyword.arg == "extern_libs" and not _is_none(keyword.value):
            context.report.add(node, "native-extension", "links an external device library (extern_libs)")
        if keyword.arg in FLAG_ARGUMENTS and not _are_safe_flags(_literal(context, keyword.value)):
            context.report.add(node, "compiler-flags", f"gives {keyword.arg} that are not on the list of harmless ones")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _are_safe_flags(node: ast.expr | None) -> bool:
    flags = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return all(
        isinstance(flag, ast.Constant)
        and (flag.value is None or (isinstance(flag.value, str) and SAFE_FLAG.fullmatch(flag.value)))
        for flag in flags
    )
