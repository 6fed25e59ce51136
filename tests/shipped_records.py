"""The shipped catalog, which all test files of a process share, since reading its records takes a while."""

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root

CATALOG = Catalog((shipped_root(),))
