"""Open the store briefly for reading, so that other processes are not locked out, and warn about stale data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilegym_db.cli.kit.output import note

if TYPE_CHECKING:
    from tilegym_db.store.database import Store


@contextmanager
def open_reader(*, trust: bool = False) -> Iterator[Store]:
    """Open the user's store read-only; create it if it does not exist. With ``trust``, foreign traces count."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.connection import open_store

    with open_store(read_only=True, catalog=Catalog.default(trust_foreign=trust)) as store:
        if store.stale:
            note(f"note: {store.stale}")
        yield store


def unverified_note(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> str | None:
    """Return how many screen passes await verification and the command for it; None without such passes."""
    from tilegym_db.store.queries import count_unverified

    count = count_unverified(store, definition=definition, op_type=op_type, gpu=gpu)
    if not count:
        return None
    passes = "1 screen pass is" if count == 1 else f"{count} screen passes are"
    words = ["tilegym-db verify", *([definition] if definition else []), *(["--gpu", gpu] if gpu else [])]
    return f"{passes} not verified yet: run {' '.join(words)}"
