"""Print figures of the code's structure, so that two checkouts can be compared.

    python tools/house.py [ROOT]                    # a table
    python tools/house.py --json FILE               # the figures as JSON as well
    python tools/house.py --compare FILE            # beside the figures of another checkout
    python tools/house.py --run                     # count the modules that a bench run and an operator call go through, too

ROOT is a checkout, by default the one that this file lies in. Sources are parsed, not run, except with ``--run``: that benches an
operator on the CPU with a store in a temporary folder and notes each module of the package that has a function called, in worker
processes as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "tilegym_db"
WINDOW = 6
CALL_FIELDS = {"axes", "dtypes", "layouts", "scalars"}
BENCH = ("bench", "softmax", "--gpu", "cpu", "--quick")
SERVE = """
import torch, tilegym_db
x = torch.randn(4, 64)
tilegym_db.ops.softmax(x)
mark()
tilegym_db.ops.softmax(x)
"""

TRACER = """
import atexit, os, sys
_seen = set()
def _note(frame, event, argument):
    if event == "call":
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tilegym_db") and name not in _seen and not _imports(frame):
            _seen.add(name)
def _imports(frame):  # class bodies and tables of a module that is being imported are no steps of the job
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") not in ("__main__", "tilegym_db.__main__"):
            return True
        frame = frame.f_back
    return False
def mark():
    _seen.clear()
def _write():
    with open(os.path.join(os.environ["HOUSE_TRACE"], str(os.getpid())), "w") as file:
        file.write("\\n".join(sorted(_seen)))
if os.environ.get("HOUSE_TRACE"):
    import threading
    sys.setprofile(_note)
    threading.setprofile(_note)
    atexit.register(_write)
"""


def main() -> None:
    """Print the figures of one checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="a file that --json wrote, shown as the first column"
    )
    parser.add_argument(
        "--run", action="store_true", help="count modules on the way of a bench run and of an operator call"
    )
    options = parser.parse_args()
    found = figures(options.root.resolve())
    if options.run:
        found |= ways(options.root.resolve())
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    before = json.loads(options.compare.read_text()) if options.compare else {}
    for name, value in found.items():
        print(f"{name:<58}{before.get(name, '') if before else '':>12}{value:>12}")


def figures(root: Path) -> dict[str, float]:
    """Return name and value of every figure that the sources alone give."""
    package, solutions, tests = (sources(root / folder) for folder in (PACKAGE, "solutions", "tests"))
    trees = {path: ast.parse(text) for path, text in package.items()}
    lines = {path: len(text.splitlines()) for path, text in package.items()}
    graph = import_graph(root, trees)
    total = sum(lines.values())
    alone = single_importers(graph, entry_points(trees, root))
    pages = sorted((root / "docs").rglob("*.md"))
    joined = "\n".join(tests.values())
    return {
        "modules of the package": len(package),
        "lines of the package": total,
        "lines of the median module": statistics.median(lines.values()),
        "modules of more than 800 lines": sum(count > 800 for count in lines.values()),
        "modules with one importer, in their own folder": len(alone),
        "imports and __all__, % of lines": round(100 * sum(map(import_lines, trees.values())) / total, 1),
        "import cycles": len(cycles(graph)),
        "classes that carry axes, dtypes, layouts or scalars": sum(map(call_classes, trees.values())),
        "clones in the package, % of lines": clones(package),
        "clones in solutions, % of lines": clones(solutions),
        "clones in tests, % of lines": clones(tests),
        "lines of solutions": sum(len(text.splitlines()) for text in solutions.values()),
        "lines of tests": sum(len(text.splitlines()) for text in tests.values()),
        "test functions": joined.count("def test_"),
        "match= in tests": joined.count("match="),
        "setattr of monkeypatch in tests": joined.count("monkeypatch.setattr"),
        "commands, top level": len(commands(root)),
        "public names": len(public_names(trees, root)),
        "pages in docs": len(pages),
        "words in docs": sum(len(page.read_text().split()) for page in pages),
    }


def sources(folder: Path) -> dict[Path, str]:
    """Return the text of every Python file below a folder."""
    paths = (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)
    return {path: path.read_text() for path in paths}


def module_name(root: Path, path: Path) -> str:
    """Return the dotted name of a module."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path, trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports, inside functions as well."""
    names = {module_name(root, path) for path in trees}
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        found = graph.setdefault(module_name(root, path), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names if alias.name in names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                found.update(
                    name if name in names else node.module for name in inner if name in names or node.module in names
                )
    return graph


def entry_points(trees: Mapping[Path, ast.Module], root: Path) -> set[str]:
    """Return packages, commands and modules that ``python -m`` runs: an importer is not why they exist."""
    found = set()
    for path, tree in trees.items():
        text = ast.dump(tree)
        runs = "'__main__'" in text and "'__name__'" in text
        if path.name == "__init__.py" or runs or path.parent.name == "cli" or path.parent.name == "parts":
            found.add(module_name(root, path))
    return found


def single_importers(graph: Mapping[str, set[str]], entries: set[str]) -> list[str]:
    """Return the modules that one module imports, which lies in the same folder."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        for name in imported:
            importers[name].add(module)
    folder = lambda name: name.rpartition(".")[0]  # noqa: E731
    return [
        name for name, users in importers.items() if name not in entries and [*map(folder, users)] == [folder(name)]
    ]


def import_lines(tree: ast.Module) -> int:
    """Return the lines of imports and of ``__all__`` in a module."""
    count = 0
    for node in ast.walk(tree):
        is_all = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
        if isinstance(node, ast.Import | ast.ImportFrom) or is_all:
            count += (node.end_lineno or node.lineno) - node.lineno + 1
    return count


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return groups of modules that import each other, directly or not."""
    reached = {module: reachable(module, graph) for module in graph}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return [set(group) for group in groups]


def reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that ``start`` imports, directly or not."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph.get(module, ())
    return found


def call_classes(tree: ast.Module) -> int:
    """Return how many classes have at least three of axes, dtypes, layouts and scalars as fields."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
            count += len(fields & CALL_FIELDS) >= 3
    return count


def clones(files: Mapping[Path, str]) -> float:
    """Return the share of code lines that lie in a window of six lines which occurs more than once, in percent.

    Blank lines, comments, imports and indentation do not count.
    """
    windows: defaultdict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    total = 0
    for path, text in files.items():
        lines = [
            line
            for line in map(str.strip, text.splitlines())
            if line and not line.startswith(("#", "import ", "from "))
        ]
        total += len(lines)
        for start in range(len(lines) - WINDOW + 1):
            windows[tuple(lines[start : start + WINDOW])].append((path, start))
    repeated = (places for places in windows.values() if len(places) > 1)
    copied = {(path, start + number) for places in repeated for path, start in places for number in range(WINDOW)}
    return round(100 * len(copied) / max(total, 1), 2)


def commands(root: Path) -> list[str]:
    """Return the commands in the table of the command line."""
    tree = ast.parse((root / PACKAGE / "cli" / "commands.py").read_text())
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "COMMANDS"
            and node.value
        ):
            table: dict[str, dict[str, str]] = ast.literal_eval(node.value)
            return [name for panel in table.values() for name in panel]
    return []


def public_names(trees: Mapping[Path, ast.Module], root: Path) -> list[str]:
    """Return what ``tilegym_db.__all__`` lists."""
    tree = trees[root / PACKAGE / "__init__.py"]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def ways(root: Path) -> dict[str, float]:
    """Return how many modules a bench run and a call of an operator go through.

    The store is empty, so the reference answers the call.
    """
    bench = traced(root, [sys.executable, "-m", PACKAGE, *BENCH])
    served = traced(root, [sys.executable, "-c", f"from sitecustomize import mark\n{SERVE}"])
    return {
        "modules on the way of a bench run": len(bench),
        "lines of these modules": line_count(root, bench),
        "modules on the way of an operator call by its reference": len(served),
    }


def traced(root: Path, command: list[str]) -> set[str]:
    """Run a command and return the modules of the package that had a function called, in any of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER)
        notes = Path(folder, "notes")
        notes.mkdir()
        added = {
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "HOUSE_TRACE": str(notes),
            "TILEGYM_DB_HOME": f"{folder}/home",
        }
        environment = {**os.environ, **added}
        subprocess.run(command, env=environment, cwd=root, check=False, capture_output=True, timeout=600)
        return {line for note in notes.iterdir() for line in note.read_text().splitlines() if line}


def line_count(root: Path, modules: Iterable[str]) -> int:
    """Return the lines of modules together."""
    count: Counter[str] = Counter()
    for name in modules:
        path = root.joinpath(*name.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        count[name] = len(file.read_text().splitlines()) if file.is_file() else 0
    return count.total()


if __name__ == "__main__":
    main()
