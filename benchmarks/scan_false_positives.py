"""How often the static scan refuses kernels that people trust: HARD findings per rule over folders of public packages.

Run it with ``python benchmarks/scan_false_positives.py FOLDER...``, for instance after
``pip install --no-deps --target /tmp/kernels/liger liger-kernel``. Every package below a folder is scanned as if it were one
Solution with all its files as sources and all its third-party imports declared. Only files that hold a kernel count.
The rules about computing with torch are counted apart: a library's wrapper may do what a Solution in a tile language
may not.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tilegym_db.records import Solution
from tilegym_db.sandbox.scan import RULES, Finding, hard_findings, scan_sources

LANGUAGES = {"triton": "triton", "tilelang": "tilelang", "cutile": "cuda.tile"}
MAKERS = {"triton": ("jit",), "tilelang": ("jit", "prim_func"), "cutile": ("kernel",)}
TILE_RULES = ("torch-compute", "tensor-arithmetic")


@dataclass(frozen=True)
class Package:
    """One importable folder with its sources, and the language of those that hold a kernel."""

    name: str
    sources: dict[str, bytes]
    languages: dict[str, str]


def main() -> int:
    """Scan, print the tables, and list every HARD finding with ``--list``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument(
        "--list", action="store_true", help="print every HARD finding but those about computing with torch"
    )
    parser.add_argument("--rule", help="list the findings of this rule only")
    arguments = parser.parse_args()
    console = Console()
    every: dict[str, tuple[Finding, ...]] = {}
    table = Table("package", "kernel files", "refused", "refused for torch compute only", title="Files")
    for package in find_packages(arguments.folders):
        found = scan_package(package)
        every |= {f"{package.name}/{path}": findings for path, findings in found.items()}
        table.add_row(package.name, *map(str, counts(found.values())))
    table.add_section()
    table.add_row("all", *map(str, counts(every.values())))
    console.print(table)
    console.print(rule_counts(every))
    if arguments.list or arguments.rule:
        for path, findings in every.items():
            for finding in findings:
                if finding.rule == arguments.rule or (not arguments.rule and finding.rule not in TILE_RULES):
                    console.print(f"{path.partition('/')[0]}: {finding}", soft_wrap=True, highlight=False, markup=False)
    return 0


def find_packages(folders: Iterable[Path]) -> list[Package]:
    """Every importable folder or file directly below the folders given that holds at least one kernel."""
    packages = []
    for folder in folders:
        for top in sorted(folder.iterdir()):
            if top.name.endswith((".dist-info", ".data")) or top.name in ("bin", "tests", "test", "benchmarks"):
                continue
            files = sorted(top.rglob("*.py")) if top.is_dir() else [top] if top.suffix == ".py" else []
            sources = {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}
            languages = {path: language for path, text in sources.items() if (language := kernel_language(text))}
            if languages:
                packages.append(Package(top.name, sources, languages))
    return packages


def kernel_language(source: bytes) -> str | None:
    """The tile language of a file whose functions carry one of its decorators; None where there is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    imported = {name for name, root in LANGUAGES.items() if any(root in text for text in imports(tree))}
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            ending = ast.unparse(called).rpartition(".")[2]
            for language in sorted(imported):
                if ending in MAKERS[language]:
                    return language
    return None


def imports(tree: ast.AST) -> set[str]:
    """Every dotted name that a file imports or imports from."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def scan_package(package: Package) -> dict[str, tuple[Finding, ...]]:
    """Path -> HARD findings, of every file that holds a kernel."""
    found: dict[str, list[Finding]] = {path: [] for path in package.languages}
    for language in sorted(set(package.languages.values())):
        record = as_solution(package, language)
        for finding in hard_findings(scan_sources(record, package.sources)):
            # A library imports itself in full anywhere; a Solution's files find each other while it is loaded only.
            imports_itself = finding.rule == "imports-unknown" and finding.message.startswith(f"imports {package.name}")
            if package.languages.get(finding.path) == language and not imports_itself:
                found[finding.path].append(finding)
    return {path: tuple(findings) for path, findings in found.items()}


def as_solution(package: Package, language: str) -> Solution:
    """The package as one Solution that declares every library it imports."""
    roots: set[str] = set()
    for path in package.languages:
        roots |= {name.partition(".")[0] for name in imports(ast.parse(package.sources[path])) if name[0] != "_"}
    entry = next(path for path, spoken in package.languages.items() if spoken == language)
    return Solution.from_dict(
        {
            "name": "package",
            "definition": "package",
            "author": "public",
            "spec": {
                "language": language,
                "entry_point": f"{entry}::run",
                "dependencies": sorted(roots - set(sys.stdlib_module_names) - {package.name}),
            },
            "sources": [{"path": path} for path in package.sources],
        },
        package.name,
    )


def counts(files: Iterable[tuple[Finding, ...]]) -> tuple[int, int, int]:
    """How many files, how many refused by a rule about doors, and how many by the rules about torch compute alone."""
    doors = [{finding.rule for finding in findings} for findings in files]
    return (
        len(doors),
        sum(bool(rules - set(TILE_RULES)) for rules in doors),
        sum(bool(rules) and rules <= set(TILE_RULES) for rules in doors),
    )


def rule_counts(every: dict[str, tuple[Finding, ...]]) -> Table:
    """Files per rule."""
    files: dict[str, set[str]] = defaultdict(set)
    findings: Counter[str] = Counter()
    for path, found in every.items():
        for finding in found:
            files[finding.rule].add(path)
            findings[finding.rule] += 1
    table = Table("rule", "files", "findings", title="HARD findings")
    for rule in RULES:
        if files[rule]:
            table.add_row(rule, str(len(files[rule])), str(findings[rule]))
    return table


if __name__ == "__main__":
    sys.exit(main())
