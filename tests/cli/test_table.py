from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegym_db.cli.kit.output import cut, lay_out, print_table, text_width

COLUMNS = ("definition", "language", "solution", "us")
ROWS = [("fused_add_rms_norm", "triton", "fused_add_rms_norm_triton_row_fast_for_hopper", "12.5")]


def test_a_name_loses_its_middle_and_a_number_nothing():
    (_, _, row) = lay_out(COLUMNS, ROWS, width=60, numeric=["us"]).lines
    assert len(row) <= 60
    assert row.endswith("  12.5")
    assert row.startswith("fused_add_rms_norm  triton    fused_add_")
    assert ".._for_hopper" in row


def test_least_important_column_goes_before_names_are_unreadable():
    layout = lay_out(COLUMNS, ROWS, width=56, numeric=["us"], least=["language"])
    assert layout.dropped == ("language",)
    assert "us" in layout.lines[0]


def test_narrow_table_states_what_every_row_repeats_once():
    columns, rows = ("gpu", "axes", "solution", "us"), [("h200", "M=1", "rms_norm_triton", "5.1")] * 2
    layout = lay_out(columns, [*rows, ("h200", "M=2", "rms_norm_cutile", "6.1")], width=26, numeric=["us"], most=["us"])
    assert (layout.dropped, layout.repeated) == ((), (("gpu", "h200"),))
    assert layout.lines[0].split() == ["axes", "solution", "us"]


def test_most_important_columns_stay_in_a_narrow_table():
    columns, rows = ("definition", "language", "solution", "us"), [("rms_norm", "triton", "rms_norm_rows", "12.5")]
    layout = lay_out(columns, rows, width=22, numeric=["us"], most=["solution", "us"])
    assert layout.lines[0].split() == ["solution", "us"]
    assert layout.dropped == ("definition", "language")


def test_without_a_width_nothing_is_cut_or_dropped():
    layout = lay_out(COLUMNS, ROWS, width=None, prose=["solution"])
    assert layout.dropped == ()
    assert ROWS[0][2] in layout.lines[2]


def test_name_is_whole_in_a_pipe_and_other_columns_go_for_it(capsys, monkeypatch):
    """A program that reads the pipe searches for names; two that are cut may look alike."""
    monkeypatch.delenv("COLUMNS", raising=False)
    names = [f"attention_{kind}_masked_decode_backward_smoothed" for kind in ("latent", "linear")]
    print_table(("definition", "solution", "about"), [(name, f"{name}_triton", "x" * 50) for name in names])
    shown = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in shown] == names
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("wide", [None, False])
def test_dropped_columns_come_back_as_the_note_says(wide, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    columns, rows = [f"column {number}" for number in range(6)], [[f"{at}" * 12 for at in range(6)], ["x"] * 6]
    print_table(columns, rows, wide=wide)
    note = capsys.readouterr().err
    if wide is False:
        assert "--wide" in note
        return
    found = re.search(r"COLUMNS=(\d+)", note)
    assert found is not None
    monkeypatch.setenv("COLUMNS", found[1])
    print_table(columns, rows)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert all(cell in shown.out for row in rows for cell in row)


def test_a_sentence_is_wrapped_below_its_row():
    why = "not measured on this GPU, so that nothing is known of its speed here"
    layout = lay_out(("solution", "why"), [("a", why), ("b", "")], width=40, prose=["why"])
    assert layout.lines[2] == "a"
    assert " ".join(" ".join(layout.lines[3:-1]).split()) == why
    assert layout.lines[-1] == "b"


@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P"])), min_size=4, max_size=4), max_size=4
    ),
    st.integers(20, 120),
)
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_the_terminal(rows, width):
    for line in lay_out(COLUMNS, rows, width=width, least=["language"], prose=["solution"]).lines:
        assert text_width(line) <= width


@given(st.text(), st.integers(1, 40))
@settings(deadline=None)
def test_what_is_cut_fits(text, width):
    assert text_width(cut(text, width)) <= width


def test_column_without_a_cell_goes_before_a_name_is_cut():
    columns, rows = ("solution", "config", "speedup", "why"), [("swiglu_triton_rows", "", "", "slower")] * 2
    layout = lay_out(columns, [*rows, ("swiglu_cutile", "", "", "faster")], width=30)
    assert layout.lines[0].split() == ["solution", "why"]
    assert layout.lines[2].split() == ["swiglu_triton_rows", "slower"]
    assert (layout.dropped, layout.repeated) == ((), ())
    assert lay_out(columns, rows, width=60).lines[0].split() == [*columns]


def test_part_of_the_key_that_tells_rows_apart_stays():
    columns = ("definition", "axes", "scalars", "solution", "us")
    rows = [
        ("rms_norm", "M=1,N=4096", "eps=1e-06", "rms_norm_tilelang", "5.92"),
        ("rms_norm", "M=1,N=4096", "eps=1e-05", "rms_norm_cutile", "5.79"),
        ("rms_norm", "M=8,N=4096", "eps=1e-05", "rms_norm_cutile", "5.99"),
    ]
    given = {"width": 50, "numeric": ["us"], "least": ["scalars"], "most": ["us"]}
    assert lay_out(columns, rows, **given).lines[0].split() == ["definition", "axes", "solution", "us"]
    layout = lay_out(columns, rows, **given, key=columns[:3])
    assert layout.lines[0].split() == ["axes", "scalars", "solution", "us"]
    assert layout.repeated == (("definition", "rms_norm"),)


NAMES = [f"fused_add_rms_norm_{kind}_backward_{way}" for kind in ("saved", "weighted") for way in ("triton", "cutile")]
NAMED = [("fused_add_rms_norm", name, "h200", f"{at}.5", "") for at, name in enumerate(NAMES)]
SHOWN = ("definition", "solution", "gpu", "us", "note")


def test_names_too_long_for_a_line_are_whole_in_blocks():
    layout = lay_out(SHOWN, NAMED, width=45, numeric=["us"], most=["solution", "us"])
    assert layout.lines[0] == "solution"
    assert layout.lines[2:6] == [NAMES[0], "    us 0.5", NAMES[1], "    us 1.5"]
    assert layout.repeated == (("definition", "fused_add_rms_norm"), ("gpu", "h200"))
    assert layout.dropped == ()


def test_names_alike_when_cut_are_whole_where_they_fit():
    columns, rows = ("solution", "about", "us"), [(name, f"text {us}", us) for _, name, _, us, _ in NAMED]
    assert lay_out(columns, rows, width=50, numeric=["us"]).lines[2:4] == [NAMES[0], "    about text 0.5  us 0.5"]
    layout = lay_out(columns, rows, width=50, numeric=["us"], least=["about"])
    assert [line.split() for line in layout.lines[2:]] == [[name, us] for _, name, _, us, _ in NAMED]


def test_rows_with_equal_names_keep_what_tells_them_apart():
    columns = ("solution", "axes", "dtypes", "us")
    rows = [
        ("rms_norm_triton", f"M={size},N=4096", f"T={dtype}", "5.1") for size in (1, 8) for dtype in ("bf16", "f32")
    ]
    given = {"numeric": ["us"], "most": ["solution", "us"], "least": ["dtypes"], "key": columns[1:3]}
    for width in (30, 40, 45, 80):
        lines = lay_out(columns, rows, width=width, **given).lines[2:]
        size = len(lines) // len(rows)
        assert len({" ".join(lines[at : at + size]) for at in range(0, len(lines), size)}) == len(rows), width


def test_pipe_has_a_line_for_each_row_and_cuts_no_key():
    columns, rows = ("axes", "solution", "us"), [(f"B={at},Hq=32,L=2048,S=2048", NAMES[0], "7.1") for at in range(3)]
    layout = lay_out(columns, rows, width=40, numeric=["us"], most=["solution"], key=["axes"], cuts_names=False)
    assert [line.split()[:2] for line in layout.lines[2:]] == [[axes, NAMES[0]] for axes, *_ in rows]


def test_block_of_a_long_cell_stays_in_the_width():
    columns, rows = ("solution", "config"), [("x" * 50, "BLOCK=128," * 8), ("y" * 50, "")]
    lines = lay_out(columns, rows, width=30).lines
    assert max(map(len, lines)) <= 30
    assert "".join(line.strip() for line in lines[2:]) == "x" * 50 + "config " + "BLOCK=128," * 8 + "y" * 50


def test_time_has_seconds_and_is_not_cut(capsys):
    at = datetime(2026, 11, 25, 17, 55, 30, 402994, tzinfo=UTC)
    print_table(("trace", "timestamp", "solution"), [("7fdc2899" * 5, at, "gelu_tanh_and_mul_tilelang" * 2)] * 2)
    assert "  2026-11-25 17:55:30" in capsys.readouterr().out


def test_note_on_repeated_columns_names_a_few_of_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    columns = [f"column_{number}" for number in range(20)]
    print_table(columns, [[f"value of {name}" for name in columns]] * 2)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("in every row: "))
    assert line.count("value of") == 6
    assert line.endswith("and the same in 12 more columns")
