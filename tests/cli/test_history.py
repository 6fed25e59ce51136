"""The passes of a kernel over runs, as ``show --history`` prints them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_history_has_each_pass_with_its_change(cli: Callable[..., Any], journal_traces: Callable[..., Any]) -> None:
    ids = journal_traces(10.0, 13.0, 13.1)
    result = cli("show", "row_scale_stock", "--history", "--wide", "--spark")
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines() if line.startswith("row_scale_stock ") and ":" in line]
    assert [row[-1] for row in rows[:3]] == [trace_id[:8] for trace_id in ids]
    assert [row[-3] for row in rows[1:3]] == ["slower", "same"]
    assert "in 3 passes" in result.out
    assert cli("show", "row_scale", "--history").out.count("slower") == 1


def test_history_as_json_is_the_view(cli: Callable[..., Any], journal_traces: Callable[..., Any]) -> None:
    journal_traces(10.0, 9.0)
    rows = cli("show", "row_scale_stock", "--history", "--json").json()
    assert rows == cli("sql", "FROM history ORDER BY number", "--json").json()
    assert [(row["number"], row["change"], row["ci_low_us"]) for row in rows] == [(1, None, 9.9), (2, "faster", 8.91)]


@pytest.mark.parametrize(("times", "next_step"), [((), "bench row_scale_stock"), ((10.0,), "--force")])
def test_history_of_less_than_two_passes_says_what_next(
    times: tuple[float, ...], next_step: str, cli: Callable[..., Any], journal_traces: Callable[..., Any]
) -> None:
    if times:
        journal_traces(*times)
    result = cli("show", "row_scale_stock", "--history")
    assert (result.code, result.out) == (0, "")
    assert next_step in result.err.split("\n")[-2]


def test_passes_of_two_configs_do_not_look_alike(
    cli: Callable[..., Any], journal_traces: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    journal_traces(10.0, 9.0, config={"BLOCK": 16})
    journal_traces(10.0, 9.0, 8.0, config={"BLOCK": 32})
    shown = cli("show", "row_scale_stock", "--history").out
    assert (shown.count("BLOCK=16"), shown.count("BLOCK=32")) == (2, 3)


def test_history_of_an_unknown_name_is_refused(cli: Callable[..., Any], row_scale: Any) -> None:
    result = cli("show", "row_scael_stock", "--history")
    assert (result.code, result.cause) == (2, "name_unknown")
