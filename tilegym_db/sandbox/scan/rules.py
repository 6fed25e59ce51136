"""Walks one source and applies the rules that hold for every language."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable

from tilegym_db.sandbox.scan.names import (
    FUNCTIONS,
    Context,
    NameBinding,
    Scope,
    ScopedVisitor,
    check_class,
    check_grammar,
    check_printed,
    is_external,
)
from tilegym_db.sandbox.scan.tables import LISTED_ROOTS, OPERATOR_MAKERS, WORDS, import_rule, words

LONG_CONSTANT = 2000
DANGEROUS_KEYS = {
    "tl.device_compile_flags": "compiler-flags",
    "compile_flags": "compiler-flags",
    "extern_libs": "native-extension",
}
TAKES_CLASSES = words("builtins.isinstance typing.cast typing.TypeVar")


class Checker(ScopedVisitor):
    """A visitor that checks one source with the rules that do not depend on a tile language."""

    def __init__(self, context: Context) -> None:
        """Prepare a walk. The scope of ``context`` is that of the module."""
        self.context, self.report = context, context.report
        self._strings_as_statements = {
            id(node.value) for node in ast.walk(context.module.tree) if isinstance(node, ast.Expr)
        }
        self._types_seen: set[ast.AST] = set()
        self._addresses = Addresses(context)
        self._assembles = has_assembler(context.module.tree)
        self._decorates: set[ast.AST] = set()  # functions of a call right above a def
        self._types: set[ast.AST] = set()  # arguments that name types: of isinstance, and what a subscript holds
        self._own_roots = {name.partition(".")[0] for name in context.names.modules}

    @property
    def scope(self) -> Scope:
        """The scope of the walk, which the rules share."""
        return self.context.scope

    @scope.setter
    def scope(self, value: Scope) -> None:
        self.context.scope = value

    def open_scope(self, node: ast.AST) -> Scope:  # noqa: D102
        return self.context.module.scopes[node]

    def run(self) -> None:
        """Check the whole source."""
        check_grammar(self.context)
        self.visit_all(self.context.module.tree.body)
        self._addresses.check()

    # -- imports ------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:  # noqa: D102
        for alias in node.names:
            self._check_import(node, alias.name)
            self._check_class_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: D102
        is_own = bool(node.level) or (node.module or "").partition(".")[0] in self._own_roots
        for alias in node.names:
            if alias.name == "*" and not is_own:
                self.report.add(node, "star-import", f"from {'.' * node.level}{node.module or ''} import *")
            self._check_class_import(node, f"{node.module}.{alias.name}")
        if node.level:
            self._check_relative(node)
        elif node.module is not None and self._check_import(node, node.module):
            for alias in node.names:
                self.context.check_path(node, f"{node.module}.{alias.name}", imported=True)

    def _check_import(self, node: ast.stmt, name: str) -> bool:
        """Check an absolute import; return True if its members must be checked."""
        # A loaded Solution does not find its own files by their plain names: a later import means another module.
        if name.partition(".")[0] in self._own_roots and self.scope.function() is None:
            return False
        rule = import_rule(name, self.context.language, self.context.declared)
        if rule is not None:
            self.report.add(node, rule, f"imports {name}")
            if name.partition(".")[0] not in LISTED_ROOTS or rule not in ("imports-os", "imports-library"):
                return False
        return self.context.check_path(node, name, imported=True)

    def _check_class_import(self, node: ast.stmt, path: str) -> None:
        if self.scope.is_class and self.context.is_module(path):
            self.report.add(node, "module-as-value", f"imports {path} as an attribute of a class")

    def _check_relative(self, node: ast.ImportFrom) -> None:
        modules = self.context.names.modules
        base = self.context.module.absolute(node.level, node.module)
        for alias in node.names:
            if base not in modules and f"{base}.{alias.name}".lstrip(".") not in modules:
                what = f"imports {alias.name} from {'.' * node.level}{node.module or ''}, which is no source of this solution"
                self.report.add(node, "unlisted-source", what)

    # -- names and attributes -----------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            if node.id in WORDS["hooks"] and (self.scope.is_class or self.scope.parent is None):
                self.report.add(node, "object-hooks", f"defines {node.id}")
            return
        if node.id in ("__builtins__", "__loader__", "__spec__", "__annotations__", "__path__", "__class__"):
            self.report.add(node, "namespace-access", f"uses {node.id}")
        holder = self.scope.holder(node.id)
        if holder is not None:
            self._addresses.loads[holder, node.id].append((node, self.scope))
        self._judge(node)
        check_text(self.context, node, assembles=self._assembles)

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: D102
        resolved = bool(self.context.resolve(node))
        check_text(self.context, node, assembles=self._assembles)
        if node.attr == "data_ptr":
            self._addresses.found.append((node, self.scope))
        if isinstance(node.ctx, ast.Load):
            self._judge(node)
        else:
            check_attribute_store(self.context, node)
        root: ast.expr = node
        while isinstance(root, ast.Attribute):  # the chain is checked as one path; its names are checked one by one
            own = is_own(self.context, root.value) and not _is_decorated(self.context, root.value)
            self.context.check_attribute_name(root, root.attr, resolved=resolved, own=own)
            root = root.value
        self.context.may_hold_module.add(root)
        bindings = self.context.names.bindings(root, self.scope)
        if not (resolved and bindings and all(binding.path is not None for binding in bindings)):
            self.visit(root)  # an import is checked at its own statement

    def _judge(self, node: ast.expr) -> None:
        for path in sorted(self.context.resolve(node)):
            if path in ("builtins.getattr", "builtins.hasattr") and node not in self.context.may_hold_module:
                self.report.add(node, "dynamic-attribute", f"passes {path[9:]} around")
            if path == "functools.wraps" and node not in self._decorates:
                what = (
                    "uses functools.wraps, which sets attributes of what it is given, elsewhere than right above a def"
                )
                self.report.add(node, "dynamic-attribute", what)
            self.context.check_path(node, path)
            self.context.check_escape(node, path)

    def visit_Constant(self, node: ast.Constant) -> None:  # noqa: D102
        value = node.value
        is_long = isinstance(value, str | bytes) and len(value) > LONG_CONSTANT
        if is_long and id(node) not in self._strings_as_statements:
            self.report.add(node, "long-constant", f"a constant of {len(value)} characters")  # type: ignore[arg-type]
        if isinstance(value, str) and value in DANGEROUS_KEYS:
            self.report.add(node, DANGEROUS_KEYS[value], f"uses the key '{value}'")
        if isinstance(value, str) and id(node) not in self._strings_as_statements:
            check_text(self.context, node, assembles=self._assembles)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:  # noqa: D102
        check_printed(self.context, node.value)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr | ast.BinOp) -> None:  # noqa: D102
        check_text(self.context, node, assembles=self._assembles)
        self.generic_visit(node)

    visit_BinOp = visit_JoinedStr

    # -- statements ---------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: D102
        if all(isinstance(target, ast.Name) for target in node.targets) and not self.scope.is_class:
            self.context.allow_module(node.value)
        elif not all(isinstance(target, ast.Name) for target in node.targets):
            self._check_classes([node.value])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: D102
        check_augmented_name(self.context, node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: D102
        check_texts(self.context, node.annotation, self._types_seen)
        if isinstance(node.target, ast.Name) and not self.scope.is_class:
            self.context.allow_module(node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:  # noqa: D102
        for path in sorted(self.context.resolve(node.value)):
            self.context.check_escape(node, path)
        self.context.allow_module(node.value)
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:  # noqa: D102
        if all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            self.context.allow_module(node.left)  # 'module is None' gives nothing away
        if all(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            check_environment_item(self.context, node, node.comparators[0], node.left)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:  # noqa: D102
        check_environment_item(self.context, node, node.value, node.slice)
        self._types.add(node.slice)
        if not isinstance(node.ctx, ast.Load):
            check_item_store(self.context, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: D102
        check_call(self.context, node)
        check_text(self.context, node, assembles=self._assembles)
        check_mutating_call(self.context, node)
        is_format = isinstance(node.func, ast.Attribute) and node.func.attr == "format"
        if is_format or "builtins.str" in self.context.resolve(node.func):
            for value in [*node.args, *(item.value for item in node.keywords)]:
                check_printed(self.context, value)
        if not self.context.resolve(node.func) & WORDS["ignores-order"] and not is_set_method(node.func):
            self._check_order(node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
            self._check_order([node.func.value])
        if self.context.resolve(node.func) & TAKES_CLASSES:
            self._types |= {*node.args}
        else:
            self._check_classes([*node.args, *(item.value for item in node.keywords)])
        self.generic_visit(node)

    def _check_classes(self, values: Iterable[ast.expr | None]) -> None:
        for value in values:
            self.context.check_class(value)

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> None:  # noqa: D102
        if node not in self._types:
            self._check_classes(node.elts)
        self.generic_visit(node)

    visit_List = visit_Set = visit_Tuple

    def visit_For(self, node: ast.For) -> None:  # noqa: D102
        self._check_order([node.iter])
        self.generic_visit(node)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        if not isinstance(node, ast.SetComp):
            self._check_order([part.iter for part in node.generators])
        super()._visit_comprehension(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def visit_Starred(self, node: ast.Starred) -> None:  # noqa: D102
        self._check_order([node.value])
        self.generic_visit(node)

    def _check_order(self, values: Iterable[ast.expr]) -> None:
        """Report sets whose order is asked for: that of texts and objects differs from process to process."""
        for value in values:
            if is_set(self.context, value):
                self.report.add(value, "unordered", f"takes the elements of {ast.unparse(value)[:40]} in their order")

    def visit_Dict(self, node: ast.Dict) -> None:  # noqa: D102
        self._check_classes([*node.keys, *node.values])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return | ast.Yield) -> None:  # noqa: D102
        self._check_classes([node.value])
        self.generic_visit(node)

    visit_Yield = visit_Return

    def visit_Match(self, node: ast.Match) -> None:  # noqa: D102
        self._check_classes([node.subject])
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:  # noqa: D102
        self.report.add(node, "keeps-state", f"rebinds {', '.join(node.names)} outside the function")

    visit_Nonlocal = visit_Global

    def visit_annotation(self, node: ast.expr) -> None:
        """Check an annotation only for computation: a type cannot be read back, because such reads are refused."""
        if any(isinstance(part, ast.Call | ast.NamedExpr | ast.Lambda) for part in ast.walk(node)):
            self.visit(node)
        check_texts(self.context, node, self._types_seen)

    # -- definitions --------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: D102
        if node.name in WORDS["hooks"] or (self.scope.parent is None and node.name == "__getattr__"):
            self.report.add(node, "object-hooks", f"defines {node.name}")
        inner = node.decorator_list[-1] if node.decorator_list else None
        if isinstance(inner, ast.Call):
            self._decorates.add(inner.func)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            is_container = isinstance(default, ast.Call) and self.context.resolve(default.func) & WORDS["containers"]
            self._check_classes([default])
            if is_container or isinstance(default, ast.Dict | ast.List | ast.Set):
                self.report.add(node, "keeps-state", f"gives {node.name} a mutable default, which outlives the call")
        super().visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: D102
        check_class(self.context, node)
        super().visit_ClassDef(node)


# ---- order ----------------------------------------------------------------------------------------
# The hash of a text is another one in every process, and with it the order of a set: a verdict in one says nothing of the next.

SET_METHODS = words(
    "add difference discard intersection isdisjoint issubset issuperset remove symmetric_difference union update"
)


def is_set(context: Context, node: ast.expr) -> bool:
    """Return True for a set, and for a name that may be bound to one."""
    seen, waiting = set[ast.expr](), [node]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        match one:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in SET_METHODS:
                waiting.append(value)
            case ast.Call(func=function) if context.resolve(function) & WORDS["sets"]:
                return True
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.BitXor() | ast.Sub(), left=left, right=right):
                waiting += [left, right]
            case ast.Name():
                values = [binding.value for binding in context.names.bindings(one, context.scope)]
                waiting += [value for value in values if isinstance(value, ast.expr)]
    return False


def is_set_method(function: ast.expr) -> bool:
    """Return True for a method that takes another set, or an element, whose order does not matter."""
    return isinstance(function, ast.Attribute) and function.attr in SET_METHODS


# ---- calls ----------------------------------------------------------------------------------------
# Rules for calls: computed attributes, the environment, raw device code, operators, compiler flags.

AUTOTUNERS = frozenset(
    f"triton.{module}{name}" for module in ("", "runtime.", "runtime.autotuner.") for name in ("autotune", "Autotuner")
)
EXTERN_CALLS = frozenset({"tilelang.language.call_extern", "tilelang.language.call_pure_extern"})


FLAG_ARGUMENTS = ("compile_flags", "nvcc_flags")
SAFE_FLAG = re.compile(
    r"-O[0-3]|-G|-lineinfo|-D\w+(=\w+)?|-?-use_fast_math|-?-(fmad|ftz|prec-div|prec-sqrt)=(true|false)"
    r"|-?-maxrregcount=\d+|-?-ptxas-options=-[vO][0-3]?|-?-expt-(relaxed-constexpr|extended-lambda)"
)
READS_ATTRIBUTES = re.compile(r"\{[^{}:!]*[.\[]")
"""A field of ``str.format`` that reads an attribute or item: ``{0.__globals__}``."""

HARMLESS_VARIABLES = frozenset({"TRITON_INTERPRET"})
"""Properties that a kernel may query: they do not differ between a worker with its scrubbed environment and a model."""


def check_call(context: Context, node: ast.Call) -> None:
    """Apply every rule for one call."""
    paths = context.resolve(node.func)
    count = len(node.args) + len(node.keywords)
    if paths & {"builtins.getattr", "builtins.hasattr"} and node.args:
        _check_getattr(context, node)
    if _is_attention_operator(context, node.func):
        context.called_operators.add(node.func)
    if "cuda.tile.launch" in paths and node.args and isinstance(_literal(context, node.args[0]), ast.Constant):
        context.report.add(node, "stream-or-graph", "launches on a stream given by number")
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = context.text(node.func.value)
        if text is not None and not READS_ATTRIBUTES.search(text):
            context.plain_formats.add(node.func)
    if "torch.compile" in paths and any(keyword.arg in (None, "options") for keyword in node.keywords):
        context.report.add(node, "compiler-flags", "gives torch.compile options")
    if paths & AUTOTUNERS:
        context.report.add(node, "tunes-itself", "chooses a config by measuring")
    if paths & WORDS["class-factories"]:
        context.report.add(node, "outside-language", "makes a class by a call; write a class statement with NamedTuple")
    if "builtins.object" in paths:
        context.report.add(node, "question", "makes a plain object, of which only the address is its own")
    if "functools.wraps" in paths and count > 1:
        context.report.add(node, "dynamic-attribute", "gives functools.wraps a list of attributes to set")
    if "warnings.warn" in paths and (not node.args or context.text(node.args[0]) is None):
        context.report.add(node, "prints", "warns with a text that is computed, which is printed anew for each text")
    if paths & EXTERN_CALLS and not _names_an_intrinsic(context, node):
        context.report.add(
            node, "native-extension", "gives T.call_extern a name that is not a listed intrinsic of CUDA"
        )
    if paths & OPERATOR_MAKERS and _is_torch_operator(context, node):
        context.report.add(node, "dispatch-override", "registers an operator whose name is computed or torch's own")
    if paths & {"os.getenv", "os.environ.get"}:
        _check_variable(context, node, node.args[0] if node.args else None)
    _check_keywords(context, node)


def _is_attention_operator(context: Context, function: ast.expr) -> bool:
    """Return True if Python code calls an attention operator by its full name, with ``torch`` bound only by ``import torch``."""
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
    """Check ``os.environ[name]`` and ``name in os.environ``."""
    if "os.environ" in context.resolve(mapping):
        context.may_hold_module.add(mapping)
        _check_variable(context, node, name)


def _check_variable(context: Context, node: ast.AST, name: ast.expr | None) -> None:
    text = context.text(name)
    if text is None:
        context.report.add(node, "environment", "reads a variable whose name is computed")
    elif text not in HARMLESS_VARIABLES:
        context.report.add(node, "environment", f"reads {text}")


def _check_getattr(context: Context, node: ast.Call) -> None:
    context.may_hold_module |= {node.func, node.args[0]}
    name, bases = context.names.attribute(node, context.scope), context.resolve(node.args[0])
    if name is None or not bases or not all(map(context.is_module, bases)):
        context.report.add(node, "dynamic-attribute", "asks for an attribute of a value, or by a name that is computed")
        return
    for path in sorted(f"{base}.{name}" for base in bases):
        context.check_path(node, path)
        context.check_escape(node, path)


def _names_an_intrinsic(context: Context, node: ast.Call) -> bool:
    text = context.text(node.args[1]) if len(node.args) > 1 else None
    return text is not None and text in WORDS["device-intrinsics"]


def _is_torch_operator(context: Context, node: ast.Call) -> bool:
    name = context.text(node.args[0]) if node.args else None
    return name is None or name.partition("::")[0] in WORDS["torch-namespaces"]


def _check_keywords(context: Context, node: ast.Call) -> None:
    for keyword in node.keywords:
        if keyword.arg == "extern_libs" and not _is_none(keyword.value):
            context.report.add(node, "native-extension", "links an external device library (extern_libs)")
        if keyword.arg in FLAG_ARGUMENTS and not _are_safe_flags(_literal(context, keyword.value)):
            context.report.add(node, "compiler-flags", f"gives {keyword.arg} that are not on the list of harmless ones")
        if keyword.arg == "pass_configs" and not _are_listed_passes(context, keyword.value):
            what = f"gives pass_configs beyond {', '.join(sorted(WORDS['tilelang-passes']))}, written out in one dict"
            context.report.add(node, "compiler-flags", what)


def _are_listed_passes(context: Context, node: ast.expr) -> bool:
    """Return True for a dict with listed keys, or a name that is bound once to one and only ever given as ``pass_configs``."""
    if _is_none(node):
        return True
    bindings = context.names.bindings(node, context.scope)
    made = bindings[0].value if len(bindings) == 1 and _is_only_given_as_passes(context, node) else node
    if not isinstance(made, ast.Dict):
        return False
    return all(key is not None and _names_a_pass(context, key) for key in made.keys)


def _is_only_given_as_passes(context: Context, name: ast.expr) -> bool:
    """Return False for a name that is read elsewhere, where the dict could be changed before a kernel is compiled."""
    nodes = list(ast.walk(context.module.tree))
    given = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "pass_configs"}
    return isinstance(name, ast.Name) and all(
        id(node) in given
        for node in nodes
        if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Load)
    )


def _names_a_pass(context: Context, key: ast.expr) -> bool:
    member = {path.rpartition(".")[2] for path in context.resolve(key) if ".PassConfigKey." in path}
    text = next(iter(member)).lower().replace("_", ".", 1) if len(member) == 1 else context.text(key)
    return text in WORDS["tilelang-passes"]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _are_safe_flags(node: ast.expr | None) -> bool:
    flags = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return all(
        isinstance(flag, ast.Constant)
        and (flag.value is None or (isinstance(flag.value, str) and SAFE_FLAG.fullmatch(flag.value)))
        for flag in flags
    )


# ---- stores ---------------------------------------------------------------------------------------
# Rules for changes to other modules, to objects from elsewhere, and to state that outlives a call.


def check_attribute_store(context: Context, node: ast.Attribute) -> None:
    """Check ``x.name = ...`` and all other ways to set or delete an attribute."""
    for path in sorted(context.resolve(node.value)):
        if not path.startswith(".") or context.is_module(path):
            context.report.add(node, "foreign-assignment", f"changes {path.lstrip('.')}.{node.attr}")
            return
    if node.attr in WORDS["hooks"] or (node.attr.startswith("__") and node.attr.endswith("__")):
        context.report.add(node, "object-hooks", f"sets {node.attr}")
    elif _is_decorated(context, node.value):
        context.report.add(node, "foreign-assignment", f"sets .{node.attr} of what a decorator returned")
    elif is_own(context, node.value):
        _note_state(context, node, node.value)
    elif node.attr != "block_shape":  # how the autotuner of Triton tells tensor descriptors their tile
        made = ast.unparse(node.value)[:40]
        rule = "private-member" if node.attr.startswith("_") else "keeps-state"
        context.report.add(node, rule, f"sets .{node.attr} of {made}, which was made elsewhere")


def check_item_store(context: Context, node: ast.Subscript) -> None:
    """Check ``x[...] = ...`` and all other ways to set or delete an item."""
    for path in sorted(context.resolve(node.value)):
        if is_external(path):
            context.report.add(node, "foreign-assignment", f"changes an item of {path}")
    _note_state(context, node, node.value)


def check_mutating_call(context: Context, node: ast.Call) -> None:
    """Check ``x.append(...)`` and similar calls on containers of this module or another one."""
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr not in WORDS["mutators"]:
        return
    for path in sorted(context.resolve(function.value)):
        if is_external(path) and not context.is_module(path):
            context.report.add(node, "foreign-assignment", f"changes {path} with .{function.attr}()")
    _note_state(context, node, function.value)


def _note_state(context: Context, node: ast.AST, container: ast.expr) -> None:
    """Record a function's change to a container, class or function of its module."""
    root = container
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if not isinstance(root, ast.Name) or context.scope.function() is None:
        return
    is_global = context.scope.holder(root.id) is context.module.scope
    if is_global and not any(is_external(path) for path in context.resolve(root)):
        context.report.add(node, "keeps-state", f"changes {root.id}, which outlives the call")


def check_augmented_name(context: Context, node: ast.AugAssign) -> None:
    """Check ``x += ...`` on a container of another module, which changes in place."""
    if isinstance(node.target, ast.Name):
        for path in sorted(context.resolve(node.target)):
            if is_external(path) and not path.startswith("math."):
                context.report.add(node, "foreign-assignment", f"changes {path} in place")


def _is_decorated(context: Context, node: ast.expr) -> bool:
    """Return True for a decorated function; the decorator may turn it into another object, such as a kernel."""
    bound = [binding.node for binding in context.names.bindings(node, context.scope)]
    return any(isinstance(item, ast.FunctionDef) and item.decorator_list for item in bound)


def is_own(context: Context, node: ast.expr) -> bool:
    """Return True for ``self`` (a method's first parameter), the Solution's functions and classes, and their instances."""
    bindings = context.names.bindings(node, context.scope)
    return bool(bindings) and all(_is_own_binding(context, binding) for binding in bindings)


def _is_own_binding(context: Context, binding: NameBinding) -> bool:
    if isinstance(binding.node, ast.arg):
        return _is_self(context, binding.node)
    if isinstance(binding.value, ast.Call) and binding.scope is not None:
        made = context.names.bindings(binding.value.func, binding.scope)
        return any(isinstance(item.node, ast.ClassDef) for item in made)
    return isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_self(context: Context, argument: ast.arg) -> bool:
    """Return True for the first parameter of a method."""
    scope = context.scope.holder(argument.arg)
    if scope is None or scope.parent is None or not scope.parent.is_class or not isinstance(scope.node, FUNCTIONS):
        return False
    return argument in [*scope.node.args.posonlyargs, *scope.node.args.args][:1]


# ---- annotations ----------------------------------------------------------------------------------
# A text in an annotation may only name a type.

NOT_EVALUATED = words("typing.Annotated typing.Literal typing_extensions.Annotated typing_extensions.Literal")


def check_texts(context: Context, node: ast.expr, seen: set[ast.AST]) -> None:
    """Refuse a text in an annotation that would do more than name a type if it were evaluated.

    ``seen`` holds the names whose value is already checked.
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
    """Return True for an f-string or an operation on texts; operations on sizes occur in TileLang annotations."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return False
    parts = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    return any(isinstance(part, ast.JoinedStr) or context.text(part) is not None for part in parts)


def _names_a_type(text: str) -> bool:
    """Return True if a text is not Python, or only names, members and unions that HARD rules do not refuse."""
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


# ---- texts ----------------------------------------------------------------------------------------
# No text of a source may contain assembler that reads clocks, counts launches, or leaves the kernel. A text that is put
# together from constants is judged whole; in a source with assembler, no word may be put together from anything else.

SPECIAL_REGISTER = re.compile(r"%+\s*([A-Za-z_]\w*)")
PLACES = re.compile(
    r"n?(tid|ctaid|clusterid|cluster_ctaid)|cluster_n?ctarank|cluster_nctaid|laneid|n?warpid|n?smid|lanemask_(eq|lt|le|gt|ge)"
)
"""Special registers of PTX that a kernel may read: its place in the launch. Others tell time, graphs, counters or the driver."""
REGISTERS = re.compile(r"\.reg\s*\.\w+\s+([^;]*);")
CLOCK_REGISTER = re.compile(r"%\s*(clock|globaltimer|gridid|pm\d|current_graph)")
"""PTX special registers that tell a kernel the time, the number of its launch, or its graph."""
OUTSIDE_THE_KERNEL = re.compile(
    r"(?:^|[;{}\s])(?:call(?:\.uni)?\s|\.(?:extern|func|entry|global|const|visible|weak|common|alias|file|section|pragma)\b"
    r"|nanosleep\b|brkpt\b|pmevent\b|trap\b|exit\b)"
)
"""PTX that calls a function, defines one, defines memory that outlives a launch, or ends the launch."""
SPLIT_REGISTER = re.compile(r"%\w*$")
TEXT_CHANGES = words(
    "capitalize casefold format format_map lower maketrans replace swapcase title translate upper zfill"
)


def has_assembler(tree: ast.AST) -> bool:
    """Return True if a source names a function of Triton that takes assembler."""
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return any(name.startswith("inline_asm") for name in named)


def check_text(context: Context, node: ast.expr, *, assembles: bool) -> None:
    """Check the text that an expression gives. In a source with assembler, check also how it is put together."""
    text = context.text(node)
    if text is not None:
        if CLOCK_REGISTER.search(text):
            context.report.add(node, "imports-clock", "names a register that tells the time or counts launches")
        if assembles and ";" in text and not _names_known_registers(text):
            context.report.add(
                node, "imports-clock", "names a register that is neither declared by .reg nor its place in the launch"
            )
        if assembles and ";" in text and OUTSIDE_THE_KERNEL.search(text):
            context.report.add(
                node, "native-extension", "has assembler that calls, defines or ends more than its own block"
            )
    elif assembles and isinstance(node, ast.JoinedStr) and _splits_a_word(node):
        context.report.add(node, "native-extension", "computes a part of a word of assembler; write each word out")
    elif assembles and isinstance(node, ast.BinOp) and _is_sum_with_text(context, node):
        context.report.add(node, "native-extension", "adds to assembler what is no constant; write it in one f-string")
    if assembles and isinstance(node, ast.Constant) and SPLIT_REGISTER.search(text or ""):
        context.report.add(node, "native-extension", "has a part of the name of a register; write each name out")
    if assembles and isinstance(node, ast.Attribute) and node.attr in TEXT_CHANGES:
        context.report.add(node, "native-extension", f"changes a text by .{node.attr}; write assembler out")
    if assembles and "builtins.chr" in context.resolve(node):
        context.report.add(node, "native-extension", "makes a character of a number; write assembler out")


def _names_known_registers(text: str) -> bool:
    declared = {name.strip(" %").partition("<")[0] for names in REGISTERS.findall(text) for name in names.split(",")}
    return all(
        PLACES.fullmatch(name) or name in declared or name.rstrip("0123456789") in declared
        for name in SPECIAL_REGISTER.findall(text)
    )


def _splits_a_word(node: ast.JoinedStr) -> bool:
    """Return True if two parts touch without a space or a sign between, so that they may make one word."""
    texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values]
    edges = [(text[0], text[-1]) if text else None for text in texts]
    for left, right in itertools.pairwise(edges):
        touching = (right or left or ("_",))[0 if right else -1]
        if touching.isalnum() or touching in "_.%":
            return True
    return False


def _is_sum_with_text(context: Context, node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return isinstance(node.op, ast.Add | ast.Mod) and any(
        isinstance(side, ast.JoinedStr) or context.text(side) is not None for side in sides
    )


# ---- addresses ------------------------------------------------------------------------------------
# An address may only decide how wide an access is: ``x.data_ptr() % 16``, or ``bits & -bits`` of addresses joined with ``|``.

MAX_ALIGNMENT = 1024
Key = tuple[Scope, str]


class Addresses:
    """The addresses of one source, followed through names and the Solution's functions to all their uses."""

    def __init__(self, context: Context) -> None:
        """Start without addresses; :class:`Checker` adds them and the uses of names while it walks."""
        self.context = context
        self.found: list[tuple[ast.expr, Scope]] = []
        self.loads: dict[Key, list[tuple[ast.expr, Scope]]] = defaultdict(list)
        self._parents = {child: node for node in ast.walk(context.module.tree) for child in ast.iter_child_nodes(node)}

    def check(self) -> None:
        """Report every use of an address that is no question about alignment."""
        followed: set[Key] = set()
        waiting = [(self._parents[node], scope) for node, scope in self.found]
        while waiting:
            node, scope = waiting.pop()
            keys = self._receivers(node, scope)
            if keys is None:
                self.context.report.add(node, "address-as-value", f"uses an address in {ast.unparse(node)[:40]}")
            for key in set(keys or ()) - followed:
                followed.add(key)
                waiting += self.loads[key]

    def _receivers(self, node: ast.AST, scope: Scope) -> list[Key] | None:
        """Return the names that an address goes to; None if its use is not allowed."""
        if not isinstance(node, ast.Call | ast.Name):
            return None
        child: ast.AST = node
        parent = self._parents[node]
        while True:
            match parent:
                case ast.BinOp(op=ast.BitOr() | ast.Mult()) | ast.IfExp() if child is not getattr(parent, "test", None):
                    child, parent = parent, self._parents[parent]
                case ast.BinOp(op=ast.FloorDiv(), left=left) if left is child:
                    child, parent = parent, self._parents[parent]
                case ast.BinOp(op=ast.Mod(), left=left, right=right) if left is child:
                    return [] if 0 < (self.context.names.number(right, scope) or 0) <= MAX_ALIGNMENT else None
                case ast.BinOp(
                    op=ast.BitAnd(), left=ast.Name(id=one), right=ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=two))
                ):
                    return [] if one == two else None
                case ast.UnaryOp(op=ast.USub()) if isinstance(self._parents[parent], ast.BinOp):
                    child, parent = parent, self._parents[parent]
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(op=ast.BitOr(), target=ast.Name(id=name)):
                    return self._key(name, scope)
                case ast.For(target=ast.Name(id=name), iter=values) if values is child:
                    return self._key(name, scope)
                case ast.Call(args=args) if child in args:
                    return self._parameter(parent, args.index(child), scope)
                case _:
                    return None

    def _key(self, name: str, scope: Scope) -> list[Key]:
        holder = scope.holder(name)
        return [(holder, name)] if holder is not None else []

    def _parameter(self, call: ast.Call, place: int, scope: Scope) -> list[Key] | None:
        """Return the parameter of one of the source's own functions, which a call passes an address to."""
        made = [binding.node for binding in self.context.names.bindings(call.func, scope)]
        if len(made) != 1 or not isinstance(made[0], ast.FunctionDef):
            return None
        arguments = made[0].args
        named = [*arguments.posonlyargs, *arguments.args, *([arguments.vararg] if arguments.vararg else [])]
        return [(self.context.module.scopes[made[0]], named[min(place, len(named) - 1)].arg)] if named else None
