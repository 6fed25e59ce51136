"""Output formats of readers: JSON, CSV, Parquet and Arrow, to stdout or into a file (``-o``)."""

from __future__ import annotations

import csv
import functools
import inspect
import io
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilegym_db.cli.kit.options import path_given
from tilegym_db.cli.kit.output import json_text, note, plain_value, printable_lines
from tilegym_db.errors import UsageError

if TYPE_CHECKING:
    import pyarrow

    from tilegym_db.store.connection import Store

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")]
AsParquet = Annotated[bool, typer.Option("--parquet", help="Write a Parquet file.")]
AsArrow = Annotated[bool, typer.Option("--arrow", help="Write an Arrow IPC stream.")]


def file_name(path: Path | None) -> Path | None:
    """Return the path to write to, unless its name has control characters."""
    if path is not None and any(unicodedata.category(character) in _CONTROL for character in str(path)):
        raise typer.BadParameter("a file name must not have line breaks or control characters.")
    return path


_CONTROL = ("Cc", "Cf", "Zl", "Zp")
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="A file to write to in place of stdout; its ending (.json, .csv, .parquet, .arrow) says the format.",
        metavar="FILE",
        parser=path_given,
        callback=file_name,
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="Show every column in full, at any width.")]

Kind = Literal["table", "json", "csv", "parquet", "arrow"]
_ENDINGS: dict[str, Kind] = {".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Form:
    """The output of a result: the format, the file (None: stdout), and whether a table may exceed the terminal's width."""

    kind: Kind = "table"
    file: Path | None = None
    wide: bool = False

    @property
    def is_table(self) -> bool:
        """True for a table, which is for people."""
        return self.kind == "table"

    @property
    def is_typed(self) -> bool:
        """True for Parquet and Arrow, whose columns have types."""
        return self.kind in ("parquet", "arrow")


def chosen_form(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
    wide: Wide = False,
) -> Form:
    """Return the form that the options select. Without a format, the ending of the file says it."""
    given: dict[Kind, bool] = {"json": as_json, "csv": as_csv, "parquet": as_parquet, "arrow": as_arrow}
    kinds = [kind for kind, asked in given.items() if asked]
    if len(kinds) > 1:
        raise UsageError(f"--{' and --'.join(kinds)} are several formats; give one of them.", code="options_clash")
    kind: Kind = kinds[0] if kinds else "table"
    if output is not None:
        if kind == "table":
            kind = _ENDINGS.get(output.suffix.lower(), "table")
        if kind == "table":
            raise UsageError(
                f"-o {output}: its ending names no format. Give --json, --csv, --parquet or --arrow.",
                code="format_missing",
            )
        if output.exists() and not output.is_file():
            raise UsageError(
                f"-o {output}: this is not a regular file. To print to stdout, leave out -o.", code="output_not_file"
            )
    elif kind in ("parquet", "arrow") and sys.stdout.isatty():
        raise UsageError(
            f"--{kind} writes binary data, which a terminal cannot show. Use -o FILE or a pipe.",
            code="output_is_terminal",
        )
    return Form(kind, output, wide)


TABLE = Form()
"""The default of a command's ``form``."""


def with_form(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :func:`chosen_form` in the place of its parameter ``form``, and the chosen form."""
    own, options = (inspect.signature(function, eval_str=True).parameters for function in (command, chosen_form))

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        form = chosen_form(**{name: given.pop(name) for name in options})
        command(**given, form=form)

    parameters = [one for name in own for one in (options.values() if name == "form" else (own[name],))]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


def write_rows(
    form: Form, columns: Sequence[str], rows: Sequence[Sequence[Any]], schema: pyarrow.Schema | None = None
) -> None:
    """Write rows in any form but a table. Nested values become JSON text in CSV, and in Parquet and Arrow without a schema."""
    if form.kind == "json":
        names = unique_names(columns)
        write_bytes(form, (json_text([dict(zip(names, row, strict=True)) for row in rows]) + "\n").encode(**_TOTAL))
    elif form.kind == "csv":
        write_bytes(form, csv_text(columns, rows).encode(**_TOTAL))
    else:
        write_arrow(form, lambda: _arrow_table(columns, rows, schema))


_TOTAL: dict[str, str] = {"encoding": "utf-8", "errors": "backslashreplace"}


def write_records(
    form: Form, records: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), schema: pyarrow.Schema | None = None
) -> None:
    """Write dicts with equal keys by :func:`write_rows`.

    Args:
        columns: the names if there are no records.
        schema: types of the columns in Parquet and Arrow, by name; by default those of the values.
    """
    names = list(records[0]) if records else list(columns or ([] if schema is None else schema.names))
    write_rows(form, names, [[record.get(name) for name in names] for record in records], schema)


def schema_of(form: Form, store: Store, view: str) -> pyarrow.Schema | None:
    """Return the types of a view's columns for Parquet and Arrow, so that every command writes what ``sql`` writes."""
    return store.sql(f"FROM {view} LIMIT 0").arrow().schema if form.is_typed else None


def write_json(form: Form, value: Any) -> None:
    """Write one JSON document of any shape."""
    write_bytes(form, (json_text(value) + "\n").encode(**_TOTAL))


def write_arrow(form: Form, table: Callable[[], Any]) -> None:
    """Write what ``table`` returns, a ``pyarrow.Table``, as Parquet or as an Arrow IPC stream."""
    import pyarrow as pa
    import pyarrow.parquet

    sink = io.BytesIO()
    content = table()
    if form.kind == "parquet":
        try:
            pyarrow.parquet.write_table(content, sink)
        except pa.ArrowNotImplementedError as error:
            raise UsageError(
                f"Parquet cannot hold this: {error}. Cast the column in SQL, or use --arrow.",
                code="column_not_writable",
            ) from None
    else:
        with pa.ipc.new_stream(sink, content.schema) as writer:
            writer.write_table(content)
    write_bytes(form, sink.getvalue())


def write_bytes(form: Form, content: bytes) -> None:
    """Write to stdout, or atomically into the file. A link is followed."""
    from tilegym_db.files import write_atomically

    if form.file is None:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(content.decode(errors="replace"))
        else:
            sys.stdout.flush()
            # JSON escapes such characters itself. A file or a pipe gets every byte.
            if form.kind == "csv" and sys.stdout.isatty():
                content = printable_lines(content.decode()).encode()
            stream.write(content)
        return
    write_atomically(form.file, content)
    note(f"written to {form.file}")


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return RFC 4180 text with a header line; nested values become JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_flat(cell) for cell in row] for row in rows)
    return text.getvalue()


def _flat(value: Any) -> Any:
    return json_text(value, indent=None) if isinstance(value, Mapping | list | tuple) else value


def _arrow_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], schema: pyarrow.Schema | None) -> Any:
    import pyarrow as pa

    arrays = []
    for index, column in enumerate(columns):
        if schema is not None and column in schema.names:
            arrays.append(_typed_array([row[index] for row in rows], schema.field(column).type))
            continue
        values = [_flat(row[index]) if isinstance(row[index], Mapping) else row[index] for row in rows]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # mixed types become JSON text
            arrays.append(pa.array([None if value is None else str(plain_value(value)) for value in values]))
    return pa.table(arrays, names=unique_names(columns))


def _typed_array(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    import pyarrow as pa

    if pa.types.is_string(kind):
        values = [value if value is None or isinstance(value, str) else _stored(value) for value in values]
    elif pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    return pa.array(values, kind)


def _stored(value: Any) -> str:
    """Return the text of an object as the database stores it, so that rows of commands and of SQL can be joined on it."""
    from tilegym_db.store.connection import StoredObject

    return value.text if isinstance(value, StoredObject) else _flat(value)


def unique_names(columns: Sequence[str]) -> list[str]:
    """Return unique column names: a repeated one gets a number, so that no value is lost."""
    taken: set[str] = set()
    names = []
    for column in columns:
        name, number = column, 1
        while name in taken:
            number += 1
            name = f"{column}_{number}"
        taken.add(name)
        names.append(name)
    return names


# ---- readers of the store -------------------------------------------------------------------------
# Open the store briefly for reading, so that other processes are not locked out, and warn about stale data.


@contextmanager
def open_reader(*, trust: bool = False, waits: bool = False) -> Iterator[Store]:
    """Open the user's store read-only; create it if it does not exist. With ``trust``, foreign traces count.

    With ``waits``, wait for a writer in order to see all that is there.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.opening import open_store

    with open_store(read_only=True, catalog=Catalog.default(trust_foreign=trust), waits=waits) as store:
        if store.stale:
            note(f"note: {store.stale}")
        yield store


def unverified_note(store: Store, *, definition: str | None, gpu: str | None, op_type: str | None = None) -> str | None:
    """Return how many screen passes await verification and the command for it; None without such passes."""
    from tilegym_db.store.queries.measured import count_unverified

    count = count_unverified(store, definition=definition, op_type=op_type, gpu=gpu)
    if not count:
        return None
    passes = "1 screen pass is" if count == 1 else f"{count} screen passes are"
    words = ["tilegym-db verify", *([definition] if definition else []), *(["--gpu", gpu] if gpu else [])]
    return f"{passes} not verified yet: run {' '.join(words)}"
