"""Figures of this repository's code: sizes, clones, cycles, names and words. Prints a table, or with ``--json`` an object.

    python tools/house_figures.py [ROOT]
    python tools/house_figures.py --write   # the table in docs/architecture.md, beside what tools/house_figures_before.json holds

ROOT is a checkout; by default the one that this file lies in. Sizes are those of the files that git tracks there, of a wheel that
hatchling builds with ``--wheel`` (and for the table), and of published traces with their searches. Takes grimp (a dependency of
import-linter) and what the package itself imports nothing of: the code is read, never run.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grimp
from marked_blocks import with_block

PACKAGE = "tilegym_db"
MOST_LINES, MOST_FUNCTION_LINES, WINDOW = 300, 50, 6
KB, MB, MOST_TRACES_KB = 1000, 1000 * 1000, 40
PAGE = Path("docs", "architecture.md")
BEFORE = Path(__file__).with_name("house_figures_before.json")
"""What this script found in the last commit before the words, the parts and the files were put in order (30f41a5)."""
WAY = ("cli.add_solution", "cli.promote", "cli.publish", "integrations.transformers.patch")
"""Where one kernel passes on its way from a file to a model."""

# Words that mean nothing else here: found wherever they stand, also inside longer names.
PLAIN_WORDS = (
    *("entrant", "player", "contender", "challenger", "incumbent", "tournament", "bout", "heat", "crew", "arena"),
    *("referee", "rigor", "effort", "envelope", "nursery", "nurseries", "keeper", "head start", "yardstick", "rival"),
)
# Words that are English as well: found as whole names, and as classes.
NAMES = frozenset(
    ["member", "members", "window", "windows", "room", "stage", "leaves", "behind", "Member", "Window", "Room", "Stage"]
)
# Published data keeps these names: columns, record fields, tags of workloads (stage:prefill), how far an attempt came (stage).
PUBLISHED_NAMES = frozenset(["envelope", "envelope_cases", "envelope_digest", "envelope_dropped"])
PUBLISHED = re.compile(
    r"[`\"']incumbent[`\"']|\bincumbent_(ratio|ci_low)|SELECT incumbent|[`\"'.]envelope\b|\benvelope_(cases|digest|dropped)\b"
    r"|\benvelope(: 'STRUCT|\.\w+|,| IS | SET )|\"envelope \d+ cases"
)
HOT = re.compile(r"heat or power|by_?\s?heat|names heat|test_heat", re.IGNORECASE)  # temperature is no metaphor
STAGE_OF_DATA = (
    "integrations",
    "loop",
    "test_writers",
)  # where 'stage' is what a tag says, or a field of the journal of attempts

_WORD = re.compile(
    rf"(?<![a-z])({'|'.join(word.replace(' ', '[ _]') for word in PLAIN_WORDS)})(s|es)?(?![a-z])", re.IGNORECASE
)
_IN_CAMEL = re.compile(rf"({'|'.join(word.title().replace(' ', '') for word in PLAIN_WORDS)})(s|es)?(?![a-z])")


def main() -> None:
    """Print the figures of one checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    parser.add_argument("--wheel", action="store_true", help="build a wheel, and say how large it is")
    parser.add_argument("--write", action="store_true", help="write the table of docs/architecture.md")
    options = parser.parse_args()
    root = options.root.resolve()
    found = figures(root)
    if options.wheel or options.write:
        found["wheel, MB"] = wheel_size(root)
    if options.write:
        page = root / PAGE
        page.write_text(with_block(page.read_text(), "house figures", table(json.loads(BEFORE.read_text()), found)))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        details = value if isinstance(value, list) else None
        print(f"{name}: {len(value) if details is not None else value}")
        for line in details or ():
            print(f"    {line}")


def figures(root: Path) -> dict[str, Any]:
    """Name of a figure -> a number, or a list of what was counted."""
    package, tests = _sources(root, PACKAGE), _sources(root, "tests")
    solutions = _sources(root, "solutions")
    graph = _graph(root)
    found: dict[str, Any] = {
        f"lines of {name}": sum(len(text.splitlines()) for text in files.values())
        for name, files in (("package", package), ("solutions", solutions), ("tests", tests))
    }
    found["modules of package"] = len(package)
    found[f"modules over {MOST_LINES} lines"] = long_modules(package)
    found[f"functions over {MOST_FUNCTION_LINES} lines"] = long_functions(package)
    for name, files in (("package", package), ("solutions", solutions), ("tests", tests)):
        found[f"clones in {name}, % of lines"] = clones(files)
    found["import cycles"] = cycles(graph)
    found["public class names that exist twice"] = names_twice(package)
    found["file names that exist twice"] = files_twice(package)
    found["words of the left column"] = words(root, {**package, **tests, **_sources(root, "benchmarks")})
    found["modules from add-solution to patch"] = len(way(graph))
    traces = trace_sizes(root)
    found["Definitions"] = sum(
        1 for path in (root / "definitions").rglob("*.json") if not path.name.endswith(".lock.json")
    )
    found["files of published traces"] = len(traces)
    found["the largest of them, KB"] = round(max(traces.values(), default=0) / KB, 1)
    found[f"files of published traces over {MOST_TRACES_KB} KB"] = [
        f"{path} {size}" for path, size in traces.items() if size > MOST_TRACES_KB * KB
    ]
    found["checkout, MB"] = checkout_size(root)
    return found


def table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """One row a figure: its name, what it was, what it is."""
    rows = ["| figure | before | now |", "|---|---|---|"]
    counts = [
        {name: len(value) if isinstance(value, list) else value for name, value in one.items()} for one in (before, now)
    ]
    return "\n".join(
        [*rows, *(f"| {name} | {counts[0].get(name, '')} | {value} |" for name, value in counts[1].items())]
    )


def trace_sizes(root: Path) -> dict[str, int]:
    """Published file of a Definition on a GPU -> its bytes, with those of its searches."""
    sizes: Counter[str] = Counter()
    for path in sorted((root / "traces").rglob("*.jsonl")):
        sizes[str(path.relative_to(root)).replace(".tuning.jsonl", ".jsonl")] += path.stat().st_size
    return dict(sizes)


def checkout_size(root: Path) -> float:
    """MB of what git tracks, or of every file where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else root.rglob("*")
    return round(sum(path.stat().st_size for path in map(root.joinpath, names) if path.is_file()) / MB, 1)


def wheel_size(root: Path) -> float:
    """MB of the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        return round(sum(path.stat().st_size for path in Path(folder).glob("*.whl")) / MB, 1)


def _sources(root: Path, folder: str) -> dict[str, str]:
    paths = sorted((root / folder).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths if "__pycache__" not in path.parts}


def long_modules(files: dict[str, str]) -> list[str]:
    """Path and lines of what is too long, the longest first."""
    sizes = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path} {size}" for path, size in sorted(sizes.items(), key=lambda item: -item[1]) if size > MOST_LINES]


def long_functions(files: dict[str, str]) -> list[str]:
    """Functions whose lines from ``def`` to the last statement, docstring included, are too many."""
    found = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MOST_FUNCTION_LINES:
                    found.append(f"{path} {node.name} {size}")
    return found


def clones(files: dict[str, str]) -> float:
    """Share of code lines that lie in a window of six lines which occurs more than once, in percent.

    Blank lines, comments and indentation do not count; imports do not either, which are alike wherever they stand.
    """
    windows: defaultdict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    total = 0
    for path, text in files.items():
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith(("#", *_IMPORTS))]
        total += len(lines)
        for start in range(len(lines) - WINDOW + 1):
            windows[tuple(lines[start : start + WINDOW])].append((path, start))
    copied = {
        (path, start + number)
        for places in windows.values()
        if len(places) > 1
        for path, start in places
        for number in range(WINDOW)
    }
    return round(100 * len(copied) / max(total, 1), 2)


_IMPORTS = ("import ", "from ")


def _graph(root: Path) -> grimp.ImportGraph:
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    return grimp.build_graph(PACKAGE, cache_dir=None)


def cycles(graph: grimp.ImportGraph) -> list[str]:
    """Groups of modules that import each other, directly or not; imports inside functions count."""
    imported = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}
    reached = {module: _reachable(module, imported) for module in imported}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imported
        if module in reached[module]
    }
    return [" <-> ".join(group) for group in sorted(groups)]


def _reachable(start: str, imported: dict[str, list[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imported[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imported[module]
    return found


def way(graph: grimp.ImportGraph) -> set[str]:
    """The modules that :data:`WAY` imports, and what these import."""
    starts = {f"{PACKAGE}.{name}" for name in WAY}
    return starts.union(*(graph.find_upstream_modules(module) for module in starts))


def names_twice(files: dict[str, str]) -> list[str]:
    """Public classes of one name in two modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in files.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def files_twice(files: dict[str, str]) -> list[str]:
    """Module names in two folders; a command's module has the name of the command, and does not count."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        name = path.rsplit("/", 1)[-1]
        if name != "__init__.py" and f"{PACKAGE}/cli/" not in path:
            places[name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def words(root: Path, files: dict[str, str]) -> list[str]:
    """File and counts of words that were replaced; past decisions and releases keep what they said."""
    found = []
    for path, text in files.items():
        counted = Counter(_words_of_code(path, text))
        if counted:
            found.append(f"{path}: {_spell(counted)}")
    texts = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    for page in texts:
        counted = Counter(_words_of_text(page.read_text())) if page.exists() else Counter()
        if counted:
            found.append(f"{page.relative_to(root)}: {_spell(counted)}")
    return found


def _spell(counted: Counter[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in counted.most_common())


def _words_of_code(path: str, text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            if token.string in NAMES and not (token.string == "stage" and any(part in path for part in STAGE_OF_DATA)):
                yield token.string
            yield from _words_of_name(token.string)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from _words_of_text(token.string)


def _words_of_name(name: str) -> Iterable[str]:
    if name in PUBLISHED_NAMES or HOT.search(name):
        return []
    return [match[1].lower() for match in (*_WORD.finditer(name), *_IN_CAMEL.finditer(name if name[:1] != "_" else ""))]


def _words_of_text(text: str) -> Iterable[str]:
    return [match[1].lower() for match in _WORD.finditer(HOT.sub("", PUBLISHED.sub("", text)))]


if __name__ == "__main__":
    main()
