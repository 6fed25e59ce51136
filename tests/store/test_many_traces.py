"""Questions to a store of 200,000 traces, and a report of 50,000: each answer takes a bounded time of the processor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.report.page import page, read_report
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import best_rows, count_unverified, leaderboard_rows, measured_gpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.turn("tilegym_db/store/views.sql", "tilegym_db/store/queries/"),  # stores of many traces
]

GROWN = {
    # Older measurements of the same points, which newer ones supersede.
    "repeated": "timestamp - INTERVAL 1 DAY * i AS timestamp, false AS is_newest",
    # Other sizes, each verified once.
    "sizes": "regexp_replace(axes_key, '=([0-9]+)', '=\\1' || i) AS axes_key, workload_uuid || i AS workload_uuid",
    # Screens of this machine that nothing verified.
    "screens": "'screen' AS tier, 'local' AS origin, timestamp - INTERVAL 1 DAY * i AS timestamp, false AS is_newest",
}


def grown(home: Path, kind: str, traces: int) -> None:
    """Fill the store of a home folder with the shipped traces, and copies of them up to a number."""
    open_store(home).close()
    with duckdb.connect(str(home / "tilegym.duckdb")) as store:
        (shipped,) = store.execute("SELECT count(*) FROM trace_records").fetchone() or (0,)
        store.execute(
            f"""INSERT INTO trace_records SELECT t.* REPLACE (md5(trace_id || i) AS trace_id, {GROWN[kind]})
            FROM trace_records t, range(1, {traces // shipped}) r(i)"""
        )


@pytest.fixture(scope="module", params=GROWN)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    home = tmp_path_factory.mktemp("many")
    grown(home, request.param, 200_000)
    with open_store(home, read_only=True) as opened:
        yield opened


def seconds(call: object) -> float:
    """The time of all threads of this process. Beside other work it is up to four times that of a quiet machine."""
    assert callable(call)
    begun = time.process_time()
    call()
    return time.process_time() - begun


def test_best_of_one_operator_does_not_read_the_others(store: Store) -> None:
    assert best_rows(store, "rms_norm", for_table=True)
    assert seconds(lambda: best_rows(store, "rms_norm", for_table=True)) < 1.0


def test_first_rows_of_every_operator_come_quickly(store: Store) -> None:
    assert seconds(lambda: best_rows(store, limit=2001, for_table=True)) < 3.0


def test_hints_beside_the_answer_come_quickly(store: Store) -> None:
    assert seconds(lambda: measured_gpus(store)) < 1.0
    assert seconds(lambda: count_unverified(store, "rms_norm")) < 1.0


def test_leaderboard_comes_quickly(store: Store) -> None:
    assert seconds(lambda: leaderboard_rows(store)) < 6.0


def test_table_has_the_rows_of_the_view(store: Store) -> None:
    wide = best_rows(store, "rms_norm", limit=50)
    narrow = best_rows(store, "rms_norm", limit=50, for_table=True)
    assert [{key: row[key] for key in narrow[0]} for row in wide] == narrow


@pytest.mark.turn("tilegym_db/report/")  # a store of 50,000 traces
def test_report_of_fifty_thousand_cases_comes_quickly(tmp_path: Path) -> None:
    grown(tmp_path, "sizes", 50_000)
    catalog = Catalog.default()
    # 5 s on a quiet machine, up to 8 on a busy one; a step that is quadratic in the cases takes longer.
    with open_store(tmp_path, read_only=True) as opened:
        assert seconds(lambda: page(read_report(opened, catalog), version="0")) < 12
