"""The report of what is shipped, read once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.report.page import ReportData, read_report
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store


@pytest.fixture(scope="package")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


@pytest.fixture(scope="package")
def store(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("report"), read_only=True, catalog=catalog) as opened:
        yield opened


@pytest.fixture(scope="package")
def shipped_report(store: Store, catalog: Catalog) -> ReportData:
    return read_report(store, catalog)
