"""Scans the sources of one Solution: parses them, follows names across files, applies every rule."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import PurePosixPath

from tilegym_db.errors import RecordError
from tilegym_db.records import TILE_LANGUAGES, Definition, Solution
from tilegym_db.sandbox.scan.names import (
    FUNCTIONS,
    Context,
    Module,
    Names,
    ScanReport,
    Scope,
    ScopedVisitor,
    every_argument,
)
from tilegym_db.sandbox.scan.rules import Checker
from tilegym_db.sandbox.scan.tables import (
    FORBIDDEN,
    KNOWN_ROOTS,
    OPERATOR_MAKERS,
    REFERENCE,
    RULES,
    WORDS,
    Finding,
    Severity,
    distribution_roots,
    is_torch_compute,
)

MAX_SOURCE_BYTES = 1 << 20
INERT_SUFFIXES = frozenset({".md", ".txt", ".json"})
HIDDEN = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def scan_sources(solution: Solution, sources: Mapping[str, bytes]) -> tuple[Finding, ...]:
    """Return all findings in the sources of a Solution, by path and line.

    Nothing is imported, run or read from disk.
    """
    return _scan(sources, solution.spec.language, distribution_roots(solution.spec.dependencies))


def scan_definition(definition: Definition) -> tuple[Finding, ...]:
    """Return all findings in the texts of a Definition, each of which is a source for itself, in plain PyTorch.

    What keeps something from call to call is refused: it could pass its self-test and give another result afterwards.
    """
    texts = definition.texts.items()
    found = (finding for name, text in texts for finding in _scan({name: text.encode()}, REFERENCE, frozenset()))
    return tuple(replace(one, severity=Severity.HARD) if one.rule in WORDS["stateful"] else one for one in found)


def _scan(sources: Mapping[str, bytes], language: str, declared: frozenset[str]) -> tuple[Finding, ...]:
    reports = {path: ScanReport(path) for path in sources}
    modules = _parse(sources, reports, declared)
    try:
        _judge(language, declared, modules, reports)
    except RecursionError:
        _refuse(reports, "is nested too deeply to walk")
    except ValueError as error:  # from Names: a name has too many meanings
        _refuse(reports, str(error))
    found = [finding for report in reports.values() for finding in report.findings.values()]
    return tuple(sorted(found, key=lambda finding: (finding.path, finding.line, finding.column, finding.rule)))


def hard_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that refuse the Solution."""
    return tuple(finding for finding in findings if finding.severity is Severity.HARD)


def soft_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that are noted with the Solution's traces."""
    return tuple(finding for finding in findings if finding.severity is Severity.SOFT)


def require_clean(findings: Iterable[Finding], where: object, what: str) -> None:
    """Raise :class:`RecordError` with every line and rule if ``what`` at ``where`` has hard findings."""
    refused = hard_findings(findings)
    if refused:
        lines = "\n".join(f"  {finding}" for finding in refused)
        raise RecordError(
            f"{where}: the static scan refuses {what}, and nothing of it ran or was added.\n{lines}",
            code="scan_refused",
        )


def rule_table() -> str:
    """Return the rules as a Markdown table, for the documentation."""
    lines = ["| rule | severity | catches | why |", "|---|---|---|---|"]
    lines += [f"| {rule.name} | {rule.severity} | {rule.catches} | {rule.why} |" for rule in RULES.values()]
    return "\n".join(lines)


def _refuse(reports: Mapping[str, ScanReport], what: str) -> None:
    for report in reports.values():
        report.add(None, "unparsable-source", what)


def _parse(
    sources: Mapping[str, bytes], reports: Mapping[str, ScanReport], declared: frozenset[str]
) -> dict[str, Module]:
    """Return dotted name -> module for every readable source; report the others."""
    modules = {}
    for path, content in sources.items():
        pure = PurePosixPath(path)
        if pure.suffix != ".py":
            if pure.suffix not in INERT_SUFFIXES:
                reports[path].add(None, "unscanned-source", f"'{path}' is not Python")
            continue
        root = pure.parts[0].removesuffix(".py")
        if root in KNOWN_ROOTS or root in declared:
            reports[path].add(None, "shadowed-module", f"'{root}' is the name of another module")
        tree = _parse_one(content, reports[path])
        if tree is not None:
            parts = pure.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
            modules[name] = Module(path, name, tree)
    return modules


def _parse_one(content: bytes, report: ScanReport) -> ast.Module | None:
    """Return the syntax tree of one source, read exactly as the interpreter reads it."""
    try:
        if len(content) > MAX_SOURCE_BYTES:
            raise ValueError(f"is larger than {MAX_SOURCE_BYTES} bytes")
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        if encoding not in ("utf-8", "utf-8-sig"):
            raise ValueError(f"declares the encoding {encoding}")
        lines = content.decode(encoding).splitlines()
        tree = ast.parse(content)
    except SyntaxError as error:
        report.add_at(error.lineno or 0, error.offset or 0, "unparsable-source", f"is not valid Python ({error.msg})")
        return None
    except (ValueError, RecursionError, MemoryError) as error:
        report.add(None, "unparsable-source", str(error) or "is nested too deeply to parse")
        return None
    for number, line in enumerate(lines, start=1):
        if HIDDEN.search(line):
            report.add_at(number, 0, "hidden-text", "contains bidirectional control characters")
    return tree


def _judge(
    language: str, declared: frozenset[str], modules: Mapping[str, Module], reports: Mapping[str, ScanReport]
) -> None:
    names = Names(modules)
    own = *own_names(modules.values()), own_operators(modules.values(), names)
    for module in modules.values():
        Checker(Context(module, names, language, declared, reports[module.path], module.scope, *own)).run()
    surveys = [survey(module, names) for module in modules.values()]
    for found in surveys:
        for function in found.named:
            if function is not None and calls_itself(function, surveys):
                reports[found.module.path].add(function, "outside-language", "calls itself; write a loop")
    if language not in TILE_LANGUAGES:
        return
    device = device_functions(surveys)
    for found in surveys:
        for use in found.uses:
            if use.anywhere or use.function not in device:
                reports[found.module.path].add(use.node, use.rule, use.what)
    if surveys and not any(found.makes_kernel for found in surveys):
        next(iter(reports.values())).add(None, "no-kernel", f"no source makes a {language} kernel")


# ---- compute --------------------------------------------------------------------------------------
# Computing with torch is refused in tile languages outside kernels.

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod)


@dataclass(frozen=True)
class Use:
    """A place that computes or copies with torch."""

    node: ast.AST
    rule: str
    what: str
    function: ast.AST | None
    """The innermost function around it."""
    anywhere: bool
    """True for a member of torch by name, which is not allowed in kernels either. Methods and operators are."""


class Survey(ScopedVisitor):
    """The torch operations of one source, the references between its functions, and a flag for kernels."""

    def __init__(self, module: Module, names: Names) -> None:
        """Start with an empty result; :func:`survey` walks the source."""
        self.module, self.names, self.scope = module, names, module.scope
        self.uses: list[Use] = []
        self.named: dict[ast.AST | None, set[ast.AST]] = defaultdict(set)
        """Function (None: the module itself) -> the Solution's functions that it names."""
        self.makes_kernel = False
        self._tensors = _tensor_names(module, names)

    def open_scope(self, node: ast.AST) -> Scope:  # noqa: D102
        return self.module.scopes[node]

    def visit_annotation(self, node: ast.expr) -> None:
        """Skip annotations: a type does not compute."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: D102
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            return
        self._judge(node)
        for binding in self.names.bindings(node, self.scope):
            function = binding.value if isinstance(binding.value, ast.Lambda) else binding.node
            if isinstance(function, FUNCTIONS):
                self.named[self._function].add(function)

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: D102
        if not isinstance(node.ctx, ast.Load):
            self.visit(node.value)
            return
        if self._judge(node):
            return
        if node.attr in WORDS["compute-methods"]:
            self._add(node, "torch-compute", f"calls .{node.attr}() outside a kernel")
        elif node.attr in WORDS["copy-methods"]:
            self._add(node, "copies-with-torch", f"calls .{node.attr}()")
        self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: D102
        self._arithmetic(node, node.op, (node.left, node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: D102
        self._arithmetic(node, node.op, (node.target, node.value))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:  # noqa: D102
        if isinstance(node.op, ast.USub):
            self._arithmetic(node, ast.Sub(), (node.operand,))
        self.generic_visit(node)

    @property
    def _function(self) -> ast.AST | None:
        around = self.scope.function()
        return around.node if around is not None else None

    def _judge(self, node: ast.expr) -> bool:
        """Record what a name or attribute stands for; return True if it is known."""
        paths = self.names.resolve(node, self.scope)
        self.makes_kernel |= bool(paths & WORDS["kernel-makers"])
        for path in sorted(paths):
            if is_torch_compute(path) and path not in self.module.imported:  # a module itself does not compute
                self._add(node, "torch-compute", f"uses {path}", anywhere=True)
        return bool(paths)

    def _arithmetic(self, node: ast.AST, operator: ast.operator, operands: Iterable[ast.expr]) -> None:
        if isinstance(operator, ast.MatMult):
            self._add(node, "tensor-arithmetic", "multiplies matrices with @ outside a kernel")
        elif isinstance(operator, ARITHMETIC):
            for operand in operands:
                holder = self.scope.holder(operand.id) if isinstance(operand, ast.Name) else None
                if isinstance(operand, ast.Name) and holder is not None and (holder, operand.id) in self._tensors:
                    self._add(node, "tensor-arithmetic", f"computes with the tensor {operand.id} outside a kernel")
                    return

    def _add(self, node: ast.AST, rule: str, what: str, *, anywhere: bool = False) -> None:
        self.uses.append(Use(node, rule, what, self._function, anywhere))


class _Tensors(ScopedVisitor):
    """A visitor that finds names that are certainly tensors by their annotation, or by an attribute that only tensors have."""

    def __init__(self, module: Module, names: Names) -> None:
        self.module, self.names, self.scope = module, names, module.scope
        self.found: set[tuple[Scope, str]] = set()

    def open_scope(self, node: ast.AST) -> Scope:
        scope = self.module.scopes[node]
        if isinstance(node, FUNCTIONS):
            for argument in every_argument(node.args):
                if "torch.Tensor" in self.names.resolve(argument.annotation, self.scope):
                    self.found.add((scope, argument.arg))
        return scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in WORDS["tensor-marks"] and isinstance(node.value, ast.Name):
            holder = self.scope.holder(node.value.id)
            if holder is not None:
                self.found.add((holder, node.value.id))
        self.generic_visit(node)


def _tensor_names(module: Module, names: Names) -> set[tuple[Scope, str]]:
    visitor = _Tensors(module, names)
    visitor.visit_all(module.tree.body)
    return visitor.found


def survey(module: Module, names: Names) -> Survey:
    """Walk one source."""
    found = Survey(module, names)
    found.visit_all(module.tree.body)
    return found


def device_functions(surveys: Iterable[Survey]) -> set[ast.AST]:
    """Return the functions that run on the GPU: kernels, functions inside them, and functions that only those name.

    A function that host code names as well counts as host code. So does the body of a ``tilelang.jit`` function: it is
    Python that builds a kernel.
    """
    callers: dict[ast.AST, set[ast.AST | None]] = defaultdict(set)
    around: dict[ast.AST, ast.AST | None] = {}
    device: set[ast.AST] = set()
    for found in surveys:
        for caller, called in found.named.items():
            for function in called - {caller}:
                callers[function].add(caller)
        for node, scope in found.module.scopes.items():
            if isinstance(node, ast.FunctionDef) and scope.parent is not None:
                outer = scope.parent.function()
                around[node] = outer.node if outer is not None else None
                if _is_kernel(node, scope.parent, found.names):
                    device.add(node)
    pending = True
    while pending:
        more = {
            node
            for node, outer in around.items()
            if node not in device and (outer in device or (callers[node] and callers[node] <= device))
        }
        device |= more
        pending = bool(more)
    return device


def _is_kernel(node: ast.FunctionDef, scope: Scope, names: Names) -> bool:
    called = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return any(names.resolve(decorator, scope) & WORDS["device-decorators"] for decorator in called)


def calls_itself(function: ast.AST, surveys: Iterable[Survey]) -> bool:
    """Return True if a function names itself, directly or through other functions."""
    named = {caller: called for found in surveys for caller, called in found.named.items()}
    reached, waiting = set[ast.AST](), list(named.get(function, ()))
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += named.get(one, ())
    return function in reached


# ---- own ------------------------------------------------------------------------------------------
# Attributes and operators that a Solution's sources define.


def own_names(modules: Iterable[Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes that the sources define, except those that are always refused, and which of them are of classes.

    A variable of a module, or a store to an attribute, defines a name for own values only, not for all others.
    """
    fields, found = set[str](), set[str]()
    for module in modules:
        for scope in module.scopes.values():
            if scope.is_class:
                fields |= scope.bindings.keys()
            elif scope.parent is None:
                found |= scope.bindings.keys()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return frozenset((fields | found) - FORBIDDEN.keys()), frozenset(fields - FORBIDDEN.keys())


def own_operators(modules: Iterable[Module], names: Names) -> frozenset[str]:
    """Return the paths of registered operators: ``torch.ops.mine.scale`` and its overload ``default``."""
    found: set[str] = set()
    for module in modules:
        for scope in module.scopes.values():
            for node in ast.walk(scope.node) if scope.parent is None else ():
                if isinstance(node, ast.Call) and names.resolve(node.func, scope) & OPERATOR_MAKERS and node.args:
                    text = names.text(node.args[0], scope) or ""
                    space, _, name = text.partition("::")
                    found |= (
                        {f"torch.ops.{space}{end}" for end in ("", f".{name}", f".{name}.default")} if name else set()
                    )
    return frozenset(found)
