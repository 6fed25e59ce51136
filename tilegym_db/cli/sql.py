"""``tilegym-db sql``: read-only SQL over the database."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, with_form
from tilegym_db.cli.kit.options import Trust, complete_statement, finite_seconds
from tilegym_db.cli.kit.output import note, print_table
from tilegym_db.errors import QueryError, UsageError
from tilegym_db.store.asking import public_views

if TYPE_CHECKING:
    from tilegym_db.store.asking import QueryResult


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
    from tilegym_db.store.connection import run_schema_query

    binary = form.kind in ("parquet", "arrow")
    if schema and (source is not None or timeout is not None or trust):
        raise UsageError(
            "--schema describes this database and runs nothing; leave --from, --timeout and --trust out.",
            code="options_clash",
        )
    if statement is None and not schema and form.is_table and sys.stdin.isatty() and sys.stdout.isatty():
        from tilegym_db.cli.kit.sql_prompt import ask_for_statements, names_of

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
        from tilegym_db.store.connection import run_user_query

        catalog = Catalog.default(trust_foreign=True) if trust else None
        return run_user_query(text, catalog=catalog, as_arrow=binary, timeout_s=timeout)
    from tilegym_db.store.sharing import query_data_set

    return query_data_set(source, text, trust=trust, as_arrow=binary, timeout_s=timeout)


def print_answer(result: QueryResult, form: Form) -> None:
    """Print an answer in the chosen form."""
    from tilegym_db.cli.kit.formats import write_arrow, write_rows

    if result.warning:
        note(f"note: {result.warning}")
    if form.kind in ("parquet", "arrow"):
        write_arrow(form, lambda: result.table)
    elif form.is_table:
        print_table(result.columns, result.rows, wide=form.wide)
        note(f"{len(result.rows)} row" + ("" if len(result.rows) == 1 else "s"))
    else:
        write_rows(form, result.columns, result.rows)


command.__doc__ = f"""{command.__doc__}

Views: {", ".join(public_views())}. Their columns: tilegym-db sql --schema best

Example: tilegym-db sql "SELECT definition, solution, latency_us FROM best WHERE gpu = 'h200' ORDER BY ALL"
"""


def read_statement() -> str:
    """Return the statement on standard input, decoded as UTF-8 independent of the locale.

    Raises:
        QueryError: it has another encoding, or is too long.
    """
    from tilegym_db.store.asking import MAX_STATEMENT

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
