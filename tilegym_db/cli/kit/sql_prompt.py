"""A prompt for SQL at a terminal, with a history that stays and completion of views and columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tilegym_db.cli.kit.output import note
from tilegym_db.errors import TilegymDBError
from tilegym_db.paths import home

HISTORY = "sql-history"
MAX_HISTORY = 1000
FIRST, MORE = "sql> ", "...> "
WORDS = (
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP BY ALL",
    "ORDER BY",
    "LIMIT",
    "DESCRIBE",
    "SHOW TABLES",
    "count(*)",
    "min",
    "max",
)
_LEAVES = frozenset({"exit", "quit", ".exit", ".quit"})


def ask_for_statements(
    answer: Callable[[str], None], words: Callable[[], list[str]], read: Callable[[str], str] = input
) -> None:
    """Read statements up to a semicolon or an empty line, and answer each, until the input ends.

    Args:
        answer: prints the answer to one statement.
        words: gives the names to complete.
        read: returns one line after a prompt; raises EOFError at the end.
    """
    note("One SELECT, then ; or an empty line. Tab completes names, Ctrl-D ends. The views: SHOW TABLES;")
    with _line_editing(words):
        for statement in _statements(read):
            try:
                answer(statement)
            except TilegymDBError as error:
                note(f"error: {error}")
            except KeyboardInterrupt:
                note("stopped")


def _statements(read: Callable[[str], str]) -> Iterator[str]:
    lines: list[str] = []
    while True:
        try:
            line = read(MORE if lines else FIRST)
        except KeyboardInterrupt:
            note("")
            lines = []
            continue
        except EOFError:
            note("")
            return
        if not lines and line.strip().rstrip(";").lower() in _LEAVES:
            return
        if line.strip():
            lines.append(line)
        if lines and (not line.strip() or line.rstrip().endswith(";")):
            yield "\n".join(lines)
            lines = []


@contextmanager
def _line_editing(words: Callable[[], list[str]]) -> Iterator[None]:
    """Keep a history in the home folder and complete words, if this Python can edit lines."""
    try:
        import readline
    except ImportError:  # a Python without it still reads lines
        yield
        return
    path = str(home() / HISTORY)
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer(completer_of(words))
    readline.set_completer_delims(" \t\n,;()=<>*+-/.'\"")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only home keeps no history
            readline.write_history_file(path)
        readline.set_completer(None)


def completer_of(words: Callable[[], list[str]]) -> Callable[[str, int], str | None]:
    """Return a function for readline: the matches of a word, one per call. The names are read at the first use."""
    known: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if not known:
            known.extend([*words(), *WORDS])
        found = [word for word in known if re.match(re.escape(text), word, re.IGNORECASE)]
        return found[state] if state < len(found) else None

    return complete


def names_of(rows: list[Any]) -> list[str]:
    """Return the views and columns of the rows of a schema, each once."""
    return list(dict.fromkeys(str(name) for row in rows for name in row[:2]))
