"""The answer to a SELECT as a notebook wants it: rows, Arrow, pandas, polars, and tables and plots that show themselves."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tilegym_db.errors import MissingPackageError, missing_package
from tilegym_db.store.asking import Asked, QueryResult, ask
from tilegym_db.store.html_table import html_table
from tilegym_db.store.line_plot import LinePlot, line_plot

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """Columns and rows; a sequence of rows. Arrow, pandas and polars ask the open store again, and keep DuckDB's types."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    _store: Asked = field(repr=False, compare=False)
    _question: tuple[str, Sequence[Any] | Mapping[str, Any]] = field(repr=False, compare=False)

    @classmethod
    def of(cls, store: Asked, text: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Self:
        """Ask; raises as :func:`tilegym_db.store.asking.ask` does."""
        found: QueryResult = ask(store, text, parameters)
        return cls(found.columns, found.types, found.rows, store, (text, parameters))

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The rows, as tuples in the order of ``columns``."""
        return iter(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """One row."""
        return self.rows[index]

    def arrow(self) -> pyarrow.Table:
        """As a ``pyarrow.Table``.

        Raises:
            MissingPackageError: pyarrow is not installed.
            StoreError: the store was closed.
        """
        required("pyarrow")
        return ask(self._store, *self._question, as_arrow=True).table

    def pandas(self) -> Any:
        """As a ``pandas.DataFrame``; raises as :meth:`arrow` does."""
        required("pandas")
        return self.arrow().to_pandas()

    def polars(self) -> Any:
        """As a ``polars.DataFrame``; raises as :meth:`arrow` does."""
        return required("polars").from_arrow(self.arrow())

    def plot(self, x: str, y: str, line: str | None = None) -> LinePlot:
        """A plot that a notebook shows: column ``y`` over column ``x``, one line for each value of the column ``line``.

        Raises:
            UsageError: no such column, no numbers in it, or too many lines.
        """
        return line_plot(self.columns, self.rows, x, y, line)

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows)


def required(module: str) -> Any:
    """A module of a package that need not be installed.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        error = missing_package(module) or MissingPackageError(
            f"{module} is not installed. Try: pip install '{module}'"
        )
        raise error from None
