"""``tilegym-db sql``: read-only SQL over the database."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, with_form, write_arrow, write_rows
from tilegym_db.cli.kit.options import Trust, complete_statement, finite_seconds
from tilegym_db.cli.kit.output import has_width, note, print_table, table_width
from tilegym_db.errors import QueryError, TilegymDBError, UsageError
from tilegym_db.paths import home
from tilegym_db.store.asking import MAX_STATEMENT, public_views

if TYPE_CHECKING:
    from tilegym_db.store.asking import QueryResult


MAX_WHOLE_COLUMNS = 12
"""In a pipe, a statement of at most so many columns is printed in full: it chose them, and a program reads the cells."""


@with_form
def command(
    statement: Annotated[
        str | None,
        typer.Argument(
            help="One SELECT; '-' reads it from standard input. With --schema, a view. Without it, a prompt at a terminal.",
            autocompletion=complete_statement,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="List the columns of a view, or of all views, with their meaning.")
    ] = False,
    form: Form = TABLE,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Query a shared data set (a folder, or s3://bucket/folder) instead."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Maximum seconds of the query.", callback=finite_seconds)
    ] = None,
    trust: Trust = False,
) -> None:
    """Run one read-only SQL statement over the database."""
    from tilegym_db.store.opening import run_schema_query

    binary = form.kind in ("parquet", "arrow")
    if schema and (source is not None or timeout is not None or trust):
        raise UsageError(
            "--schema describes this database and runs nothing; leave --from, --timeout and --trust out.",
            code="options_clash",
        )
    if statement is None and not schema and form.is_table and sys.stdin.isatty() and sys.stdout.isatty():
        ask_for_statements(
            lambda text: print_answer(answer_of(text, source, timeout, trust=trust, binary=False), form),
            lambda: names_of(list(run_schema_query(None).rows)),
        )
        return
    if statement is None and not schema:
        raise UsageError(
            'sql takes one SELECT statement. Try: tilegym-db sql "SELECT * FROM best LIMIT 5", or: tilegym-db sql --schema',
            code="statement_missing",
        )
    text = read_statement() if statement == "-" else statement or ""
    if schema:
        print_answer(run_schema_query(text or None, as_arrow=binary), form)
    else:
        print_answer(answer_of(text, source, timeout, trust=trust, binary=binary), form)


def answer_of(text: str, source: str | None, timeout: float | None, *, trust: bool, binary: bool) -> QueryResult:
    """Return the answer of this database, or of a shared data set, to one statement."""
    if source is None:
        from tilegym_db.catalog import Catalog
        from tilegym_db.store.opening import run_user_query

        catalog = Catalog.default(trust_foreign=True) if trust else None
        return run_user_query(text, catalog=catalog, as_arrow=binary, timeout_s=timeout)
    from tilegym_db.store.sharing import query_data_set

    return query_data_set(source, text, trust=trust, as_arrow=binary, timeout_s=timeout)


def print_answer(result: QueryResult, form: Form) -> None:
    """Print an answer in the chosen form."""
    if result.warning:
        note(f"note: {result.warning}")
    if form.kind in ("parquet", "arrow"):
        write_arrow(form, lambda: result.table)
    elif form.is_table:
        wide = form.wide or (not has_width() and len(result.columns) <= MAX_WHOLE_COLUMNS)
        rows = _with_short_types(result.rows) if result.columns[-3:] == _DESCRIPTION else result.rows
        chosen = result.columns if len(result.columns) <= MAX_WHOLE_COLUMNS else ()
        print_table(
            result.columns,
            rows,
            wide=wide,
            prose=_sentences(result),
            key=chosen,
            least=() if chosen else DROPPED_FIRST,
            most=() if chosen else DROPPED_LAST,
        )
        note(f"{len(result.rows)} row" + ("" if len(result.rows) == 1 else "s"))
    else:
        write_rows(form, result.columns, result.rows)


DROPPED_FIRST = (
    "trace_id", "run_id", "timestamp", "definition_digest", "solution_digest", "workload_uuid", "definition_version", "op_type",
    "axes", "dtypes", "scalars", "layouts", "blobs", "config", "language", "role",
)  # fmt: skip
DROPPED_LAST = ("definition", "gpu", "axes_key", "solution", "latency_us", "speedup", "ratio", "status")
"""Columns of a view with many, by what they say of a kernel: ids first, times and names last."""

_DESCRIPTION = ("column_name", "column_type", "comment")
_STRUCT = re.compile(r"STRUCT\((.*)\)((?:\[\])*)", re.DOTALL)


def _with_short_types(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Name the fields of a struct after the meaning of its column, since one long type would widen every row."""
    found = []
    for *place, kind, meaning in rows:
        struct = _STRUCT.fullmatch(kind)
        short = (kind, meaning) if struct is None else (f"STRUCT{struct[2]}", f"{meaning}; fields: {struct[1]}")
        found.append((*place, *short))
    return found


def _sentences(result: QueryResult) -> tuple[str, ...]:
    """Return the column with the meaning of columns, if it would be cut."""
    if "comment" not in result.columns or not result.rows:
        return ()
    widths = [max(len(str(cell)) for cell in cells) for cells in zip(result.columns, *result.rows, strict=True)]
    return ("comment",) if sum(widths) + 2 * (len(widths) - 1) > table_width() else ()


command.__doc__ = f"""{command.__doc__}

Views: {", ".join(public_views())}. Their columns: tilegym-db sql --schema best

Example: tilegym-db sql "SELECT definition, solution, latency_us FROM best WHERE gpu = 'h200' ORDER BY ALL"
"""


def read_statement() -> str:
    """Return the statement on standard input, decoded as UTF-8 independent of the locale."""
    stream = getattr(sys.stdin, "buffer", None)
    most = 4 * MAX_STATEMENT + 1  # maximum bytes of a statement
    content = stream.read(most) if stream is not None else sys.stdin.read(most).encode(errors="surrogatepass")
    try:
        return str(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        if len(content) == most:  # cut within a character; the statement is too long anyway
            return str(content.decode(errors="replace"))
        raise QueryError(
            "the statement on standard input is not UTF-8. Convert it: iconv -t UTF-8", code="text_encoding"
        ) from None


# ---- the prompt -----------------------------------------------------------------------------------
# A prompt for SQL at a terminal, with a history that stays and completion of views and columns.

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
_LEAVES = frozenset({"exit", "quit", ".exit", ".quit", ".q", "\\q"})
_HELP = frozenset({"help", ".help", "?", "\\?"})
_OF_OTHER_PROMPTS = {".tables": "SHOW TABLES", "\\d": "SHOW TABLES", "\\dt": "SHOW TABLES", ".schema": "DESCRIBE"}
"""What people type at the prompts of sqlite3, duckdb and psql, and its SQL."""
_GREETING = "One SELECT, then ; or an empty line. Tab completes names, Ctrl-D ends. SHOW TABLES; DESCRIBE best; .help"


def ask_for_statements(
    answer: Callable[[str], None], words: Callable[[], list[str]], read: Callable[[str], str] = input
) -> None:
    """Read statements up to a semicolon or an empty line, and answer each, until the input ends.

    Args:
        words: gives the names to complete.
        read: returns one line after a prompt; raises EOFError at the end.
    """
    note(_GREETING)
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
        word, _, rest = line.strip().rstrip(";").partition(" ")
        if not lines and word.lower() in _LEAVES:
            return
        if not lines and word.lower() in _HELP:
            note(_GREETING)
            continue
        if not lines and word.lower() in _OF_OTHER_PROMPTS:
            yield f"{'DESCRIBE' if rest else _OF_OTHER_PROMPTS[word.lower()]} {rest}".strip()
            continue
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
