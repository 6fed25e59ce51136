"""The catalog: folders of records, read into validated records with digests and checked against the lock.

The roots are, in this order, the shipped catalog (a checkout, or the data of an installed wheel) and the user's overlay
(``$TILEGYM_DB_HOME/catalog``). A name may exist in one root only: an overlay record never shadows a shipped one.
A broken record is left out and named once; only commands about that record fail.
"""

from tilegym_db.catalog.reader import Catalog
from tilegym_db.catalog.record_files import Broken, SolutionFiles, check_entry_point, stock_of

__all__ = ["Broken", "Catalog", "SolutionFiles", "check_entry_point", "stock_of"]
