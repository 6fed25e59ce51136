from __future__ import annotations

from functools import partial

import pytest
from raising import raises

from tilegym_db.errors import QueryError
from tilegym_db.store.asking import VIEWS
from tilegym_db.store.opening import run_user_query


@pytest.fixture
def ask(asked):
    """``ask(sql)`` over a store with one trace."""
    home, catalog = asked
    return partial(run_user_query, path=home, catalog=catalog, lock_timeout_s=0.3)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT solution FROM best",
        "FROM best SELECT solution;",
        "WITH fast AS (FROM best) SELECT solution FROM fast",
        "SELECT solution FROM traces WHERE axes['M'] = 4096 -- a comment; with a semicolon",
    ],
)
def test_a_read_is_answered(ask, text):
    result = ask(text)
    assert (result.columns, result.types, result.rows) == (("solution",), ("VARCHAR",), [("scale_triton",)])
    assert result.warning is None


def test_types_are_duckdbs_own(ask):
    result = ask("SELECT latency_us, axes, timestamp FROM traces")
    assert result.types == ("DOUBLE", "MAP(VARCHAR, BIGINT)", "TIMESTAMP")
    assert result.rows[0][:2] == (7.5, {"M": 4096, "N": 4096})


def test_parameters_are_bound(ask):
    assert ask("SELECT count(*) FROM best WHERE gpu = ?", ["h200"]).rows == [(1,)]
    assert ask("SELECT $a", {"a": "'; DROP TABLE meta"}).rows == [("'; DROP TABLE meta",)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("view", [*VIEWS, "best_per_solution", "newest_passes", "standing"])
def test_every_view_can_be_read_and_described(ask, view):
    assert ask(f"SELECT * FROM {view}").columns == tuple(row[0] for row in ask(f"DESCRIBE {view}").rows)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-- nothing",
        "SELECT 1; SELECT 2",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMP TABLE t AS SELECT 1",
        "CREATE VIEW v AS SELECT 1",
        "DROP VIEW best",
        "ALTER TABLE meta ADD COLUMN x INT",
        "INSERT INTO meta VALUES ('a', 'b')",
        "UPDATE meta SET value = '1'",
        "DELETE FROM trace_records",
        "TRUNCATE trace_records",
        "WITH gone AS (DELETE FROM meta RETURNING *) SELECT * FROM gone",
        "MERGE INTO meta USING (SELECT 1 AS a) s ON (key = 'a') WHEN MATCHED THEN DELETE",
        "COPY traces TO '/tmp/out.csv'",
        "COPY (SELECT 1) TO '/tmp/out.csv'",
        "EXPORT DATABASE '/tmp/out'",
        "IMPORT DATABASE '/tmp/out'",
        "ATTACH '/tmp/other.duckdb' AS other",
        "DETACH tilegym",
        "USE memory",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "SET VARIABLE v = 1",
        "RESET threads",
        "PRAGMA database_list",
        "PRAGMA memory_limit = '1GB'",
        "CALL enable_logging()",
        "CHECKPOINT",
        "VACUUM",
        "BEGIN",
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
        "EXPLAIN ANALYZE DELETE FROM meta",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM read_json('/etc/passwd')",
        "SELECT * FROM read_parquet('https://example.org/x.parquet')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM query('COPY (SELECT 1) TO ''/tmp/out.csv''')",
        "SELECT * FROM enable_profiling('json', save_location := '/tmp/out.json')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM force_checkpoint('tilegym')",
        "SELECT getenv('HOME')",
        "SELEC 1",
        "SELECT nothing FROM traces",
        "SELECT count(*) FROM traces WHERE gpu = $missing",
    ],
)
def test_anything_but_one_read_of_the_database_is_refused(ask, asked, text):
    files = {path: path.stat().st_mtime_ns for path in asked[0].rglob("*")}
    with pytest.raises(QueryError):
        ask(text)
    assert {path: path.stat().st_mtime_ns for path in asked[0].rglob("*")} == files


def test_a_callers_variables_are_no_tables(ask):
    secrets = [{"a": 1}]
    with raises(QueryError, "view_unknown", "secrets"):
        ask("SELECT * FROM secrets")
    assert secrets


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("DELETE FROM traces", "statement_not_select", "DELETE"),
        ("SELECT 1; SELECT 2", "statement_count", "2"),
        ("SELECT * FROM runs", "view_unknown", "definitions, solutions"),
        ("SELECT * FROM read_csv('/etc/passwd')", "files_refused", "definitions, solutions"),
        ("PIVOT traces ON gpu USING count(*)", "pivot_without_values", "PIVOT ... ON column IN (value, ...)"),
        ("SELECT now()", "column_unfetchable", "CAST"),
    ],
)
def test_a_refusal_says_what_to_do_instead(ask, text, code, names):
    with raises(QueryError, code, names):
        ask(text)
