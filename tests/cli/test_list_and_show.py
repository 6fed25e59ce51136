from __future__ import annotations

import json

import pytest

from tilegym_db.catalog import Catalog, record_files
from tilegym_db.store.statements import FILE_NAME


def test_list_has_one_row_per_definition(cli, row_scale):
    (row,) = cli("list", "--json").json()
    assert row["definition"] == "row_scale"
    assert (row["status"], row["languages"], row["solutions"], row["workloads"]) == ("verified", ["python"], 1, 1)


def test_list_fits_80_columns_and_says_what_it_leaves_out(cli, row_scale):
    result = cli("list")
    assert any(line.startswith("row_scale ") for line in result.out.splitlines())
    assert max(map(len, result.out.splitlines())) <= 80
    assert "1 listed" in result.err


def test_wide_leaves_nothing_out(cli, row_scale):
    result = cli("list", "--wide")
    assert any(
        "row_scale" in line and "Every row times a weight and a factor." in line for line in result.out.splitlines()
    )
    assert "not shown" not in result.err


def test_list_filters_by_family_and_status(cli, row_scale):
    assert len(cli("list", "--op-type", "elementwise", "--status", "verified", "--json").json()) == 1
    result = cli("list", "--op-type", "norm")
    assert (result.code, result.cause, "elementwise" in result.err) == (2, "op_type_unknown", True)
    other = cli("list", "--status", "open")
    assert (other.cause, "verified" in other.err) == ("status_unknown", True)


def test_workloads_are_counted_as_they_are_read(cli, row_scale, home, workload_record):
    file = home / "catalog" / "workloads" / "elementwise" / "row_scale.jsonl"
    file.parent.mkdir(parents=True)
    lines = [json.dumps(workload_record(axes={"M": size, "N": 8})) for size in (5, 6, 6)]
    file.write_text("\n".join([*lines, "", "{"]) + "\n")
    (row,) = cli("list", "--json").json()
    assert row["workloads"] == len(Catalog.default().workloads_for("row_scale")) == 3


def test_what_was_listed_is_kept_until_a_file_changes(cli, row_scale, home, workload_record, monkeypatch):
    home.mkdir()
    first = cli("list", "--json").json()
    assert (home / FILE_NAME).is_file()
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "definitions", property(lambda catalog: pytest.fail("the catalog was read again")))
        assert cli("list", "--json").json() == first
        assert cli("list", "--op-type", "elementwise", "--status", "verified", "--json").json() == first
        assert cli("list", "--op-type", "norm").cause == "op_type_unknown"
    file = home / "catalog" / "workloads" / "elementwise" / "row_scale.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(workload_record(axes={"M": 5, "N": 8})) + "\n")
    (row,) = cli("list", "--json").json()
    assert row["workloads"] == first[0]["workloads"] + 1


def test_a_broken_record_is_named_by_every_list(cli, row_scale, home, monkeypatch, caplog):
    path = home / "catalog" / "definitions" / "elementwise" / "draft.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    for _ in range(2):
        monkeypatch.setattr(record_files, "_named", set())
        caplog.clear()
        assert cli("list").code == 0
        assert "draft.json" in caplog.text
    assert not (home / FILE_NAME).exists()


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"state": 1, "rows": []}', "[" * 9999])
def test_a_damaged_list_is_made_again(cli, row_scale, home, damage):
    home.mkdir()
    first = cli("list", "--json").json()
    (home / FILE_NAME).write_text(damage)
    assert cli("list", "--json").json() == first
    assert json.loads((home / FILE_NAME).read_bytes())["rows"] == first


def test_list_of_solutions_and_workloads(cli, row_scale):
    (solution,) = cli("list", "--solutions", "--json").json()
    assert (solution["solution"], solution["role"], solution["targets"]) == ("row_scale_stock", "baseline", [])
    (workload,) = cli("list", "--workloads", "--json").json()
    assert (workload["axes"], workload["dtypes"], workload["tags"]) == ("M=4,N=8", ["float32"], ["tiny"])
    assert cli("list", "--workloads", "--solutions").code == 2


def test_an_empty_catalog_lists_nothing(cli, checkout):
    result = cli("list")
    assert (result.code, result.out, result.err) == (0, "", "nothing matches.\n")


def test_show_a_definition(cli, row_scale):
    result = cli("show", "row_scale")
    assert result.code == 0
    assert "x[M, N] T, weight[N] T, factor float32" in result.out
    assert "return (x.float() * weight.float() * factor).to(x.dtype)" in result.out
    assert "row_scale_stock" in result.out
    content = cli("show", "row_scale", "--json").json()
    assert content["definition"]["name"] == "row_scale"
    assert content["solutions"][0]["solution"] == "row_scale_stock"
    assert content["leaderboard"] == []


def test_show_a_solution(cli, row_scale):
    result = cli("show", "row_scale_stock")
    assert "row_scale_stock for row_scale: python, baseline, by tests" in result.out
    assert "def run(x, weight, factor, out" in result.out
    assert "no traces yet" in result.err
    content = cli("show", "row_scale_stock", "--json").json()
    assert content["sources"].keys() == {"kernel.py"}
    assert content["traces"] == []


def test_show_suggests_the_nearest_names(cli, row_scale):
    result = cli("show", "row_scal")
    assert (result.code, result.cause) == (2, "name_unknown")
    assert "'row_scal'" in result.err
    assert "'row_scale'" in result.err


def test_a_record_in_the_wrong_place_is_named(cli, row_scale):
    (row_scale / "definitions" / "norm").mkdir()
    (row_scale / "definitions" / "elementwise" / "row_scale.json").rename(
        row_scale / "definitions" / "norm" / "row_scale.json"
    )
    assert cli("list").code == 0
    result = cli("show", "row_scale")
    assert result.code == 1
    assert "definitions/elementwise/row_scale.json" in result.err


def test_source_on_a_terminal_is_readable_on_any_background(monkeypatch, capsys):
    import re
    import sys

    from tilegym_db.cli.show import print_source

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    print_source("# scale\nimport torch\n\n\ndef run(x):\n    'doc'\n    return x * 2.5\n")
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", capsys.readouterr().out) for code in found.split(";")}
    assert codes
    assert codes <= {"", "0", "1", "2", "32", "35", "36"}  # neither white nor black, and no background


def test_list_shows_only_names_with_the_word(cli, row_scale):
    assert [row["definition"] for row in cli("list", "SCALE", "--json").json()] == ["row_scale"]
    assert len(cli("list", "scale", "--workloads", "--json").json()) == 1
    assert "tilegym-db list" in cli("list", "softmax").err


def test_source_is_printed_alone(cli, row_scale):
    (solution,) = Catalog.default().solutions_for("row_scale")
    assert (
        cli("show", solution.name, "--source").out == solution.sources[solution.record.spec.entry_path].decode() + "\n"
    )
    assert cli("show", "row_scale", "--source").out == Catalog.default().definition("row_scale").reference + "\n"
    assert cli("show", "row_scale", "--source", "--json").cause == "options_clash"
    assert cli("show", "row_scal", "--source").cause == "name_unknown"


def test_explain_without_sizes_names_a_command_that_works(cli, row_scale):
    refused = cli("explain", "row_scale", "--gpu", "h200")
    assert refused.cause == "axis_missing"
    words = refused.err.partition("Try: tilegym-db ")[2].split()
    assert cli(*words).code == 3
    assert words[words.index("--gpu") + 1] == "h200"
