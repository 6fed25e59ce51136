"""Scans the sources of one Solution: parses them, follows names across files, applies every rule."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import PurePosixPath

from tilegym_db.records import TILE_LANGUAGES, Solution
from tilegym_db.verify.scan.checker import Checker
from tilegym_db.verify.scan.compute import device_functions, fallbacks, survey
from tilegym_db.verify.scan.context import Context, ScanReport
from tilegym_db.verify.scan.findings import Finding, Severity
from tilegym_db.verify.scan.names import Names
from tilegym_db.verify.scan.own import own_names, own_operators
from tilegym_db.verify.scan.scopes import Module
from tilegym_db.verify.scan.tables import KNOWN_ROOTS, RULES, distribution_roots
from tilegym_db.verify.scan.texts import check_texts

__all__ = ["hard_findings", "rule_table", "scan_sources", "soft_findings"]

MAX_SOURCE_BYTES = 1 << 20
INERT_SUFFIXES = frozenset({".md", ".txt", ".json"})
HIDDEN = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def scan_sources(solution: Solution, sources: Mapping[str, bytes]) -> tuple[Finding, ...]:
    """Everything that the rules find in the sources of a Solution, by path and line; empty where all is well.

    Nothing is imported, run or read from disk.

    Args:
        solution: its language and dependencies decide which imports and which rules hold.
        sources: path -> bytes, as the catalog read them.
    """
    reports = {path: ScanReport(path) for path in sources}
    modules = _parse(sources, reports, distribution_roots(solution.spec.dependencies))
    try:
        _judge(solution, modules, reports)
    except RecursionError:
        _refuse(reports, "is nested too deeply to walk")
    except ValueError as error:  # from Names: meanings without end
        _refuse(reports, str(error))
    found = [finding for report in reports.values() for finding in report.findings.values()]
    return tuple(sorted(found, key=lambda finding: (finding.path, finding.line, finding.column, finding.rule)))


def hard_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that refuse the Solution."""
    return tuple(finding for finding in findings if finding.severity is Severity.HARD)


def soft_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that are noted with its traces."""
    return tuple(finding for finding in findings if finding.severity is Severity.SOFT)


def rule_table() -> str:
    """The rules as a Markdown table, for the documentation."""
    lines = ["| rule | severity | catches | why |", "|---|---|---|---|"]
    lines += [f"| {rule.name} | {rule.severity} | {rule.catches} | {rule.why} |" for rule in RULES.values()]
    return "\n".join(lines)


def _refuse(reports: Mapping[str, ScanReport], what: str) -> None:
    for report in reports.values():
        report.add(None, "unparsable-source", what)


def _parse(
    sources: Mapping[str, bytes], reports: Mapping[str, ScanReport], declared: frozenset[str]
) -> dict[str, Module]:
    """Dotted name -> module, of every source that can be read; reports the others."""
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
    """The syntax tree of one source, read exactly as the interpreter will read it."""
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


def _judge(solution: Solution, modules: Mapping[str, Module], reports: Mapping[str, ScanReport]) -> None:
    names = Names(modules)
    language = solution.spec.language
    declared = distribution_roots(solution.spec.dependencies)
    own = own_names(modules.values()), own_operators(modules.values(), names)
    for module in modules.values():
        Checker(Context(module, names, language, declared, reports[module.path], module.scope, *own)).run()
        check_texts(module.tree, reports[module.path])
    surveys = [survey(module, names) for module in modules.values()]
    for found, handler, what in fallbacks(surveys):
        reports[found.module.path].add(handler, "except-fallback", what)
    if language not in TILE_LANGUAGES:
        return
    device = device_functions(surveys)
    for found in surveys:
        for use in found.uses:
            if use.anywhere or use.function not in device:
                reports[found.module.path].add(use.node, use.rule, use.what)
    if surveys and not any(found.makes_kernel for found in surveys):
        reports[solution.spec.entry_path].add(None, "no-kernel", f"no source makes a {language} kernel")
