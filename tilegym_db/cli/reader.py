"""How commands read the store: briefly, so that nobody is locked out, and saying where what they read is stale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilegym_db.cli.output import note

if TYPE_CHECKING:
    from tilegym_db.store.connection import Store

__all__ = ["open_reader"]


@contextmanager
def open_reader() -> Iterator[Store]:
    """The user's store, read-only; it is made first where there is none."""
    from tilegym_db.store.connection import open_store

    with open_store(read_only=True) as store:
        if store.stale:
            note(f"note: {store.stale}")
        yield store
