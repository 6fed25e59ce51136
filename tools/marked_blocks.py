"""Blocks of a page that a script writes: the text between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # the checkout, before whatever is installed


def with_block(page: str, name: str, content: str) -> str:
    """Return the page with ``content`` in its block; raise ``SystemExit`` if it has no such block."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"the page has no block {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{content.strip()}\n{end}", page, count=1)


@contextlib.contextmanager
def shipped_store() -> Iterator[None]:
    """Use a separate home, so that the database holds what ships with the package and nothing measured here."""
    before = os.environ.get("TILEGYM_DB_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEGYM_DB_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TILEGYM_DB_HOME"]
            else:
                os.environ["TILEGYM_DB_HOME"] = before


def write_or_check(description: str, wanted: Mapping[Path, str]) -> int:
    """Run the command line of such a script: write the files, or with ``--check`` say which are not current (status 1)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is not current")
    options = parser.parse_args()
    stale = {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'not current' if options.check else 'written'}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if options.check and stale else 0
