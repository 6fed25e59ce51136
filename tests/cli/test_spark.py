"""Latency by size in a few characters: only where a person reads it, and in characters that the terminal has."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tilegym_db.cli.kit.output import ASCII, BLOCKS, by_size, spark_line


def row(solution: str, *latencies_us: float) -> dict[str, object]:
    return {
        "definition": "d", "gpu": "h200", "solution": solution, "dtypes_key": "T=float32", "latencies_us": latencies_us,
    }  # fmt: skip


def test_lowest_and_highest_values_have_the_ends_of_the_scale():
    assert spark_line([1, 10, 100], 1, 100, ramp=BLOCKS) == "▁▅█"
    assert spark_line([1, 10, 100], 1, 100, ramp=ASCII) == "_=#"
    assert spark_line([5, 5, 5], 5, 5, ramp=ASCII) == "___"


def test_a_line_has_at_most_its_width_and_keeps_both_ends():
    line = spark_line([float(value) for value in range(1, 101)], 1, 100, width=10, ramp=ASCII)
    assert (len(line), line[0], line[-1]) == (10, "_", "#")


def test_solutions_of_one_operator_share_a_scale():
    lines = by_size([row("fast", 1, 2, 4), row("slow", 16, 32, 64), row("few", 1, 64)])
    assert set(lines) == {("d", "h200", "fast"), ("d", "h200", "slow")}
    assert max(lines["d", "h200", "fast"]) < min(lines["d", "h200", "slow"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("command", [("best", "softmax", "--rank"), ("best", "softmax"), ("show", "softmax_triton")])
def test_lines_are_left_out_of_a_pipe_and_fit_a_terminal(command, cli):
    assert not set(BLOCKS) & set(cli(*command).out)
    shown = cli(*command, "--spark").out
    with_line = [line for line in shown.splitlines() if set(BLOCKS) & set(line)]
    assert with_line
    assert all(len(line) <= 80 for line in with_line)
    assert not set(BLOCKS) & set(cli(*command, "--spark", "--json").out)


def test_lines_of_a_narrow_terminal_say_what_they_show(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "45")
    shown = cli("best", "softmax", "--spark").out.splitlines()
    labels = [above for above, line in pairwise(shown) if set(BLOCKS) & set(line)]
    assert len(labels) > 1
    assert len(labels) == len(set(labels))
    assert all("softmax" in label and len(label) <= 45 for label in labels)


def test_a_terminal_without_blocks_gets_characters_that_it_has(cli, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = cli("best", "softmax", "--rank", "--spark").out
    assert shown.isascii()
    assert "#" in shown
