"""Check the language of code and pages against the rules in CONTRIBUTING.md.

    python tools/check_language.py [PATH ...]

PATH is a file or a folder; by default the paths that pyproject.toml lists under ``[tool.tilegym-language]``. The command prints
one line per finding and exits with 1 if there is one. It checks these rules:

1. The docstring of a function begins with an imperative verb, the one of a class or a property with a noun phrase.
2. Code is "it": no ``who``, ``nobody`` or ``somebody`` for code.
5. Words that the project does not use.
8. The name of a test has at most 60 characters. ``--commits RANGE`` checks the subjects of commits.

A string of one word is a key or a name, so that rules 2 and 5 do not apply to it. In a test all strings but docstrings are data.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_TEST_NAME = 60
MAX_SUBJECT = 65

CLAUSES = frozenset(["What", "Why", "How", "Whether", "Which", "Who", "Whose", "That", "Where"])
"""First words of a docstring that is a clause."""
NOT_VERBS = CLAUSES | frozenset(
    [
        "The",
        "A",
        "An",
        "Every",
        "Each",
        "All",
        "As",
        "One",
        "True",
        "False",
        "None",
        "Of",
        "If",
        "It",
        "Its",
        "In",
        "No",
        "Not",
        "Only",
        "Those",
        "These",
        "This",
        "From",
        "Two",
        "So",
        "For",
        "With",
        "Same",
        "Is",
        "By",
        "Any",
        "On",
        "At",
        "To",
        "Where",
        "There",
        "Here",
        "Also",
        "Both",
        "Most",
        "Our",
        "Their",
        "They",
        "Nothing",
        "Something",
        "Random",
        "Like",
    ]
)
VERBS_IN_S = frozenset(
    [
        "Pass",
        "Process",
        "Press",
        "Access",
        "Miss",
        "Focus",
        "Guess",
        "Cross",
        "Express",
        "Suppress",
        "Bypass",
        "Address",
    ]
)

PERSON = r"(?:people|person|users?|authors?|engineers?|readers?|developers?|anyone|everyone|someone|analysts?|those)"
_PERSON_BEFORE = re.compile(rf"\b{PERSON},?\s+$", re.IGNORECASE)
WORDS = {
    "2": re.compile(r"\b(?:who|whom|whoever|nobody|somebody)\b", re.IGNORECASE),
    "5": re.compile(
        r"\b(?:refut\w+|convict\w*|acquit\w*|witness\w*|vouch\w*|told|at hand|thereby|of (?:its|their) own|besides|meanwhile)\b",
        re.IGNORECASE,
    ),
}
"""Rule -> the words that it forbids."""
STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
"""Kinds of tokens with text; Python 3.12 splits an f-string into several."""
ONE_WORD = re.compile(r"""[a-zA-Z]{0,2}(['"])\w*\1""")
FIELD = re.compile(r"\{[^{}]*\}")
"""A field of an f-string or of a format, which holds code."""


def main() -> int:
    """Print the findings; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; by default those in pyproject.toml")
    parser.add_argument("--commits", metavar="RANGE", help="check the subjects of commits, for example main..HEAD")
    options = parser.parse_args()
    paths = options.paths or [ROOT / path for path in listed_paths(ROOT / "pyproject.toml")]
    findings = [finding for path in files_of(paths) for finding in check_file(path)]
    if options.commits:
        findings += check_subjects(subjects(options.commits))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def listed_paths(project: Path) -> list[str]:
    """Return the paths that are checked by default."""
    table = tomllib.loads(project.read_text())["tool"].get("tilegym-language", {})
    return list(table.get("paths", ["tilegym_db"]))


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files and pages of paths, sorted."""
    for path in paths:
        yield from (
            [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md"))
        )


def check_file(path: Path) -> list[str]:
    """Return the findings in one file, each with its place."""
    text = path.read_text()
    if path.suffix == ".md":
        found = check_page(text)
    else:
        has_data = "tests" in path.resolve().parts or path.resolve() == Path(__file__).resolve()
        found = check_source(text, is_test=path.name.startswith("test_"), has_data=has_data)
    shown = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path
    return [f"{shown}:{line}: rule {rule}: {message}" for line, rule, message in sorted(found)]


def check_page(text: str) -> list[tuple[int, str, str]]:
    """Return line, rule and message of every finding in a page; blocks of code do not count."""
    found = []
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            found += [(number, rule, message) for rule, message in check_words(re.sub(r"`[^`]*`", "", line))]
    return found


def check_source(text: str, *, is_test: bool = False, has_data: bool = False) -> list[tuple[int, str, str]]:
    """Return line, rule and message of every finding in a Python source.

    Args:
        text: the source.
        is_test: check the names of tests, but not the first words of docstrings.
        has_data: strings other than docstrings are data, which is not checked.
    """
    found = []
    tree = ast.parse(text)
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            is_test
            and isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and len(node.name) > MAX_TEST_NAME
        ):
            found.append(
                (node.lineno, "8", f"{node.name} has {len(node.name)} characters, {MAX_TEST_NAME} are allowed")
            )
        if not is_test and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += [(node.lineno, "1", message) for message in check_docstring(node)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_prose = token.type == tokenize.COMMENT or token.start in docstrings
        if is_prose or (token.type in STRINGS and not has_data and not ONE_WORD.fullmatch(token.string)):
            content = token.string if is_prose else FIELD.sub("", token.string)
            for offset, line in enumerate(content.splitlines()):
                cleaned = re.sub(r"``?[^`]*``?", "", line)
                found += [(token.start[0] + offset, rule, message) for rule, message in check_words(cleaned)]
    return found


def check_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield what is wrong with the first word of a docstring."""
    text = ast.get_docstring(node) or ""
    first = (re.match(r"\W*(\w+)", text) or [""])[0].strip(" *`:(")
    is_noun = isinstance(node, ast.ClassDef) or any("property" in ast.unparse(item) for item in node.decorator_list)
    if not is_noun and re.match(r"[`(\[{\d]", text):
        yield f"{node.name}: the docstring begins with code or a number; begin with an imperative verb"
    if not text or not first[:1].isupper():
        return
    if is_noun and first in CLAUSES:
        yield f"{node.name}: the docstring begins with the clause '{first} ...'; begin with a noun"
    elif not is_noun and (first in NOT_VERBS or (first.endswith("s") and first not in VERBS_IN_S)):
        yield f"{node.name}: the docstring begins with '{first}'; begin with an imperative verb"


def check_words(line: str) -> Iterator[tuple[str, str]]:
    """Yield rule and message of every word that a line must not have."""
    for rule, pattern in WORDS.items():
        for match in pattern.finditer(line):
            if match[0].lower() == "who" and _PERSON_BEFORE.search(line[: match.start()]):
                continue
            yield rule, f"'{match[0]}' in '{line.strip()[:70]}'"


def subjects(commits: str) -> list[str]:
    """Return the subjects of a range of commits."""
    command = ["git", "log", "--no-merges", "--format=%s", commits]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def check_subjects(lines: list[str]) -> list[str]:
    """Return the findings in subjects of commits: ``area: imperative change``, at most 65 characters."""
    found = [f"commit: rule 8: '{line}' has {len(line)} characters" for line in lines if len(line) > MAX_SUBJECT]
    return found + [f"commit: rule 8: '{line}' has no area" for line in lines if not re.match(r"[a-z0-9_/.-]+: ", line)]


if __name__ == "__main__":
    sys.exit(main())
