from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from tilegym_db.cli.sql import ask_for_statements, completer_of, names_of
from tilegym_db.errors import QueryError

QUERY = "SELECT name, op_type, 1 AS name FROM definitions"


def test_a_fresh_store_answers_as_a_table(cli, row_scale):
    result = cli("sql", "SELECT definition, axes_key FROM workloads")
    assert result.code == 0
    assert "row_scale   M=4,N=8" in result.out
    assert result.err == "1 row\n"


def test_json_keeps_columns_of_the_same_name_apart(cli, row_scale):
    assert cli("sql", QUERY, "--json").json() == [{"name": "row_scale", "op_type": "elementwise", "name_2": 1}]


def test_csv_has_a_header(cli, row_scale):
    assert cli("sql", QUERY, "--csv").out == "name,op_type,name\nrow_scale,elementwise,1\n"


def test_a_statement_is_read_from_standard_input(cli, row_scale):
    assert cli("sql", "-", "--csv", stdin="SELECT 42 AS answer").out == "answer\n42\n"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("DROP TABLE meta", "only reads"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("", "statement"),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM tracs", "Views: definitions"),
        ("COPY definitions TO 'out.csv'", "only reads"),
        ("SELECT * FROM read_csv('/etc/passwd')", "no files"),
    ],
)
def test_anything_but_one_read_is_wrong_usage(text, fact, cli, row_scale):
    result = cli("sql", text)
    assert (result.code, result.out) == (2, "")
    assert fact in result.err


def test_two_formats_are_one_too_many(cli, row_scale):
    assert cli("sql", QUERY, "--json", "--csv").code == 2


@pytest.mark.timeout(60)
def test_a_query_that_takes_too_long_is_stopped_and_says_so(cli, row_scale):
    slow = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    result = cli("sql", slow, "--timeout", "0.5")
    assert (result.code, result.out) == (1, "")
    assert "0.5 s" in result.err
    assert cli("sql", "SELECT 1 AS one", "--timeout", "30", "--csv").out == "one\n1\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused(cli, row_scale, seconds):
    assert cli("sql", "SELECT 1", "--timeout", seconds).code == 2


@pytest.mark.parametrize("value", ["INTERVAL 1 MONTH", "union_value(k := 1)"])
def test_a_value_that_parquet_has_no_type_for_is_refused(value, cli, row_scale, tmp_path):
    file = tmp_path / "out.parquet"
    result = cli("sql", f"SELECT {value} AS a", "--parquet", "-o", file)
    assert (result.code, result.cause) == (2, "column_not_writable")
    assert not file.exists()


def test_schema_lists_columns_with_their_meaning(cli, row_scale, home):
    listed = cli("sql", "--schema", "leaderboard", "--json").json()
    assert {row["view"] for row in listed} == {"leaderboard"}
    assert {"column_name": "wins", "column_type": "BIGINT"}.items() <= listed[9].items()
    assert all(row["comment"] for row in listed)
    assert len({row["view"] for row in cli("sql", "--schema", "--json").json()}) > 15


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ((), "statement_missing"),
        (("--schema", "leaderbord"), "view_unknown"),
        (("--schema", "--trust"), "options_clash"),
    ],
)
def test_schema_of_nothing_is_wrong_usage(arguments, cause, cli, row_scale, home):
    result = cli("sql", *arguments)
    assert (result.code, result.cause) == (2, cause)


def lines_of(*lines):
    """Return a function that gives one line per call, and then ends the input."""
    left = list(lines)

    def read(prompt):
        if not left:
            raise EOFError
        line = left.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    return read


def test_prompt_answers_each_statement_also_after_an_error(home, capsys):
    asked = []

    def answer(text):
        asked.append(text)
        if "wrong" in text:
            raise QueryError("no such view", code="query_invalid")

    lines = (
        "SELECT 1",
        "FROM best;",
        "SELECT wrong;",
        "half a",
        KeyboardInterrupt,
        "SHOW TABLES",
        "",
        "",
        "exit;",
        "no;",
    )
    ask_for_statements(answer, list, lines_of(*lines))
    assert asked == ["SELECT 1\nFROM best;", "SELECT wrong;", "SHOW TABLES"]
    assert "error: no such view" in capsys.readouterr().err


def test_commands_of_other_prompts_mean_their_sql(capsys):
    asked = []
    ask_for_statements(
        asked.append, list, lines_of(".help", ".tables", "\\d best", ".schema peaks;", ".SCHEMA", "\\q", "no;")
    )
    assert asked == ["SHOW TABLES", "DESCRIBE best", "DESCRIBE peaks", "DESCRIBE"]
    assert capsys.readouterr().err.count("Ctrl-D ends") == 2


def test_prompt_completes_views_and_columns_in_any_case():
    complete = completer_of(lambda: names_of([("best", "latency_us", "DOUBLE"), ("best", "layouts", "MAP")]))
    assert [complete("LA", state) for state in range(3)] == ["latency_us", "layouts", None]
    assert complete("be", 0) == "best"


@pytest.mark.turn("tilegym_db/cli/sql.py")  # a separate process at a terminal
def test_sql_at_a_terminal_is_a_prompt_with_a_history(row_scale, home):
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "tilegym_db", "sql"]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, close_fds=True) as process:
        os.close(child)
        os.write(parent, b"SELECT 41 + 1 AS answer;\nexit\n")
        shown = b""
        with suppress(OSError):  # the terminal is gone when the program ends
            while chunk := os.read(parent, 4096):
                shown += chunk
        assert process.wait(timeout=60) == 0
    os.close(parent)
    assert b"answer" in shown
    assert b"42" in shown
    assert "SELECT 41 + 1 AS answer;" in (home / "sql-history").read_text()


def test_meaning_of_a_column_is_whole_at_45_columns(cli, row_scale, monkeypatch):
    monkeypatch.setenv("COLUMNS", "45")
    shown = " ".join(cli("sql", "DESCRIBE best").out.split())
    assert "id of the run that measured it" in shown
    assert max(map(len, cli("sql", "--schema", "best").out.splitlines())) <= 45


@pytest.mark.parametrize("words", [["--schema"], ["DESCRIBE traces"]])
def test_one_long_type_does_not_move_the_meanings_away(words, cli, row_scale, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = cli("sql", *words).out.splitlines()
    assert lines[0].index("comment") < 90
    (failure,) = [line for line in lines if re.search(r"(^|traces +)failure +STRUCT", line)]
    assert failure.count("VARCHAR") > 5
    kinds = {row["column_name"]: row["column_type"] for row in cli("sql", *words, "--json").json()}
    assert kinds["failure"].startswith("STRUCT(gate VARCHAR")


def test_pipe_has_whole_cells_of_the_columns_asked_for(cli, row_scale, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "attention_masked_decode_backward_triton"
    shown = cli("sql", f"SELECT 1 AS n, '{name}' AS solution, '{name * 2}' AS note, '{name}' AS again").out
    assert shown.splitlines()[2].split() == ["1", name, name * 2, name]


def test_wide_view_in_a_pipe_keeps_names_and_times(cli):
    heading = cli("sql", "FROM best WHERE gpu = 'h200' LIMIT 3").out.split("\n")[0].split()
    assert {"definition", "solution", "axes_key", "latency_us", "speedup"} <= set(heading)
    assert {"run_id", "solution_digest", "workload_uuid"}.isdisjoint(heading)
