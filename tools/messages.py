"""List every error message of the package with its code, as the sources have it.

    python tools/messages.py            # print the list
    python tools/messages.py --write    # write tests/messages.txt, which a test compares

A line is ``code`` and the message; an expression inside a message stands as ``{...}``. The list is read from the sources: a call
with ``code="..."`` whose first argument is a text. After a change of wording write the file: its diff shows both wordings.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "messages.txt"


def main() -> None:
    """Print the messages, or write the snapshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {SNAPSHOT.relative_to(ROOT)}")
    text = "".join(f"{code}\t{message}\n" for code, message in messages(ROOT / "tilegym_db"))
    if parser.parse_args().write:
        SNAPSHOT.write_text(text)
    else:
        print(text, end="")


def messages(package: Path) -> list[tuple[str, str]]:
    """Return code and message of every error of a package, sorted, each once."""
    return sorted({found for path in package.rglob("*.py") for found in _messages_of(ast.parse(path.read_text()))})


def _messages_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        code = next((word.value for word in node.keywords if word.arg == "code"), None)
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            yield code.value, " ".join(_text_of(node.args[0]).split())


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    return "{...}"


if __name__ == "__main__":
    main()
