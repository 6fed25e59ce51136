from __future__ import annotations

import json
import math
from datetime import datetime

import pytest

from tilegym_db.cli.formats import Form, csv_text, write_bytes
from tilegym_db.cli.output import print_json, print_table, spelled_number


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
