"""Removes a user's record from a catalog, and lists the traces that lose it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilegym_db.catalog import Catalog
from tilegym_db.store.connection import open_store
from tilegym_db.store.queries import count_traces_of


@dataclass(frozen=True)
class Removed:
    """A record that was removed, with its files and the traces that stay."""

    kind: Literal["definition", "solution"]
    name: str
    paths: tuple[Path, ...]
    """The folder of a Solution, or the files of a Definition and its Workloads."""
    traces: dict[str, int]
    """GPU -> number of its traces. They stay in the store, and nothing ranks or serves them."""


def remove(name: str, *, catalog: Catalog | None = None, store_home: Path | None = None) -> Removed:
    """Remove a Solution or a Definition of the user's. Shipped records are never removed, and traces stay.

    Args:
        name: of the Solution or Definition.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; by default ``$TILEGYM_DB_HOME`` or the user data folder.

    Raises:
        ConflictError: the record is shipped, is one of a family's file, or is a Definition that other records use.
        NotFoundError: there is no such record.
        StoreError: a file cannot be removed, or the store cannot be used; then nothing is removed.
    """
    catalog = catalog or Catalog.default()
    with open_store(store_home, read_only=True, catalog=catalog) as store:
        traces = count_traces_of(store, name)
    is_definition = name in catalog.definition_paths
    paths = catalog.remove(name)
    return Removed("definition" if is_definition else "solution", name, paths, traces)
