from __future__ import annotations

import json
import math
from datetime import datetime

import pytest

from tilegym_db.cli.kit.formats import Form, csv_text, write_bytes
from tilegym_db.cli.kit.output import note, print_json, print_line, print_table, spelled_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (22.71234, "22.71"),
        (4096.0, "4096"),
        (12345.678, "12,346"),
        (0.00001234, "1.234e-05"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_four_digits_and_no_needless_exponent(value, text):
    assert spelled_number(value) == text


def test_json_has_no_nan_and_iso_dates(capsys):
    print_json({"a": [math.nan, math.inf, 1.5], "t": datetime(2026, 1, 2), "m": {1: None}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "t": "2026-01-02T00:00:00", "m": {"1": None}}


def test_csv_quotes_and_keeps_nested_values_as_json():
    assert csv_text(("a", "b"), [("x, y", {"M": 1}), (None, [1])]) == 'a,b\n"x, y","{""M"": 1}"\n,[1]\n'


def test_a_table_prints_brackets_as_they_are(capsys):
    print_table(("solution",), [("row[BLOCK=4]",), (None,)])
    assert "row[BLOCK=4]" in capsys.readouterr().out


def test_a_file_that_is_written_keeps_its_link_and_its_mode(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_bytes(Form("json", link), b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o640


HIDDEN = "a\N{RIGHT-TO-LEFT OVERRIDE}b\x1b[2J\N{LINE SEPARATOR}c\x9b"


@pytest.mark.parametrize("write", [note, print_line])
def test_what_turns_or_moves_text_does_not_reach_a_terminal(capsys, write):
    write(f"{HIDDEN}\nnext\tcolumn")
    captured = capsys.readouterr()
    assert captured.out + captured.err == "a\ufffdb\ufffd[2J\ufffdc\ufffd\nnext\tcolumn\n"


def test_json_escapes_characters_that_turn_text_without_loss(capsys):
    print_json({"text": HIDDEN, "name": "größe"})
    out = capsys.readouterr().out
    assert out.isascii() == ("größe" not in out)
    assert r"\u202e" in out
    assert json.loads(out) == {"text": HIDDEN, "name": "größe"}


def test_a_description_is_shown_without_what_turns_it(cli, row_scale):
    (path,) = row_scale.rglob("definitions/**/row_scale.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "description": "safe \N{RIGHT-TO-LEFT OVERRIDE}elif"}))
    shown = cli("show", "row_scale")
    assert "safe \ufffdelif" in shown.out
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in shown.out + shown.err
    assert json.loads(cli("show", "row_scale", "--json").out)["definition"]["description"].startswith("safe \u202e")


def test_a_refusal_repeats_no_control_characters(cli, row_scale):
    for line in (("show", HIDDEN), ("best", "--limit", HIDDEN), ("best", "--gpu", HIDDEN), (f"--{HIDDEN}",), (HIDDEN,)):
        result = cli(*line)
        assert result.code == 2
        assert not set("\N{RIGHT-TO-LEFT OVERRIDE}\x1b\x9b\N{LINE SEPARATOR}") & set(result.err)


@pytest.mark.parametrize("name", ["a\nb.json", "a\x1b.json", "a\N{RIGHT-TO-LEFT OVERRIDE}.json"])
@pytest.mark.parametrize("line", [("list", "--json"), ("report",), ("new", "definition", "my_op")])
def test_a_file_is_not_given_a_name_that_breaks_a_line(cli, row_scale, tmp_path, name, line):
    result = cli(*line, "-o", str(tmp_path / name))
    assert result.code == 2
    assert "control characters" in " ".join(result.err.split())
    assert not (tmp_path / name).exists()


def test_white_space_around_the_name_of_a_gpu_is_none_of_it(cli, row_scale):
    assert [cli("best", "--gpu", gpu).code for gpu in (" h200 ", "H200", " cpu")] == [
        cli("best", "--gpu", "h200").code
    ] * 3
    assert "unknown GPU" not in cli("best", "--gpu", " Auto ").err
