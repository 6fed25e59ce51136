"""The catalog: folders of records, read into validated records with digests and checked against the lock.

The roots are, in this order, the shipped catalog (a checkout, or the data of an installed wheel) and the user's overlay
(``$TILEGYM_DB_HOME/catalog``). A name may exist in one root only: an overlay record never shadows a shipped one.
A broken record is left out and named once; only commands about that record fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegym_db.catalog.reader import Catalog
from tilegym_db.catalog.record_files import Broken
from tilegym_db.lazy import loader

if TYPE_CHECKING:
    from tilegym_db.catalog.record_files import SolutionFiles, check_entry_point, stock_of

__all__ = ["Broken", "Catalog", "SolutionFiles", "check_entry_point", "stock_of"]

# These modules load the record classes, which take as long as the rest of a command that only needs the roots.
_HOMES = {
    "SolutionFiles": "tilegym_db.catalog.record_files",
    "check_entry_point": "tilegym_db.catalog.record_files",
    "stock_of": "tilegym_db.catalog.record_files",
}
__getattr__ = loader(__name__, _HOMES)
