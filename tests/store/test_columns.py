"""Every view and column that users may rely on says what it means."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from tilegym_db.store.asking import VIEWS, comment_on
from tilegym_db.store.opening import open_store, run_schema_query, run_user_query


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    open_store(home).close()
    return home


def test_every_view_and_column_has_a_comment(place: Path) -> None:
    rows = run_schema_query(path=place).rows
    assert {row[0] for row in rows} == set(VIEWS)
    assert [row[:2] for row in rows if not row[3]] == []
    assert [view for view in VIEWS if not comment_on(view)] == []


def test_every_comment_is_on_a_column_that_exists(place: Path) -> None:
    stated = tomllib.loads(files("tilegym_db.store").joinpath("columns.toml").read_text())
    there = {(row[0], row[1]) for row in run_schema_query(path=place).rows}
    assert set(stated["views"]) == set(VIEWS)
    assert set(stated["columns"]) <= {column for _, column in there}
    assert {(view, column) for view, own in stated["of"].items() for column in own} <= there


@pytest.mark.parametrize(
    "text", ["SHOW TABLES", "show tables;", " Show  Tables ", "SHOW ALL TABLES", "DESCRIBE", "DESCRIBE TABLES"]
)
def test_show_tables_lists_the_views_and_no_internals(text: str, place: Path) -> None:
    result = run_user_query(text, path=place)
    assert result.columns == ("view", "comment")
    assert tuple(row[0] for row in result.rows) == VIEWS


@pytest.mark.sweep(5)
@pytest.mark.parametrize("text", ["DESCRIBE best", "desc BEST;", "SHOW best", "DESCRIBE main.best", 'DESC "best"'])
def test_describe_has_types_and_comments(text: str, place: Path) -> None:
    result = run_user_query(text, path=place)
    assert result.columns == ("column_name", "column_type", "comment")
    assert ("latency_us", "DOUBLE", "device time of a call, median, microseconds") in result.rows
    types = dict(
        zip(
            *[run_user_query("SELECT * FROM best", path=place).__dict__[key] for key in ("columns", "types")],
            strict=True,
        )
    )
    assert {row[0]: row[1] for row in result.rows} == types


def test_describe_of_a_query_is_duckdbs_own(place: Path) -> None:
    assert run_user_query("DESCRIBE SELECT 1 AS one", path=place).rows[0][:2] == ("one", "INTEGER")
