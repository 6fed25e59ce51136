"""How commands read the store: briefly, so that nobody is locked out, and saying where what they read is stale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilegym_db.cli.kit.output import note

if TYPE_CHECKING:
    from tilegym_db.store.database import Store


@contextmanager
def open_reader(*, trust: bool = False) -> Iterator[Store]:
    """The user's store, read-only; it is made first if there is none. With ``trust``, foreign traces count."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.connection import open_store

    with open_store(read_only=True, catalog=Catalog.default(trust_foreign=trust)) as store:
        if store.stale:
            note(f"note: {store.stale}")
        yield store


def unverified_note(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> str | None:
    """What to run where passes of a screen wait for their promotion, or None if none do."""
    from tilegym_db.store.queries import count_unverified

    count = count_unverified(store, definition=definition, op_type=op_type, gpu=gpu)
    if not count:
        return None
    passes = "1 screen pass is" if count == 1 else f"{count} screen passes are"
    return f"{passes} not verified yet: run tilegym-db promote {definition or ''}".rstrip()
