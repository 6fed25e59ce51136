from __future__ import annotations

import json

import pytest

from tilegym_db.catalog import Catalog, SolutionFiles

EAGER = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
OTHER = "def run(x, weight, factor, out):\n    out.copy_(weight * x * factor)\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EAGER)
    return path


def add(cli, source, *options):
    return cli("add-solution", source, "-d", "row_scale", "-l", "python", "--name", "mine", *options)


def test_the_same_bytes_are_added_again_without_an_error(cli, row_scale, source, snapshot):
    assert add(cli, source).code == 0
    before = snapshot(row_scale)
    again = add(cli, source, "--json")
    assert (again.code, again.json()["outcome"]) == (0, "known")
    assert "has this already" in again.err
    assert snapshot(row_scale) == before


def test_other_bytes_are_refused_and_name_replace(cli, row_scale, source):
    add(cli, source)
    source.write_text(OTHER)
    refused = add(cli, source)
    assert (refused.code, refused.cause) == (1, "solution_exists")
    assert "--replace" in refused.err


def test_replace_puts_the_new_bytes_in_place_of_the_old_ones(cli, row_scale, source):
    add(cli, source)
    source.write_text(OTHER)
    replaced = add(cli, source, "--replace", "--json")
    assert (replaced.code, replaced.json()["outcome"]) == (0, "replaced")
    files = Catalog.default().solution("mine")
    assert files.sources["mine.py"].decode() == OTHER
    assert sorted(path.name for path in files.folder.iterdir()) == ["mine.py", "solution.json"]
    assert not list(files.folder.parent.glob(".tilegym-db-*.new*"))


def test_replace_of_what_does_not_exist_adds_it(cli, row_scale, source):
    assert add(cli, source, "--replace", "--json").json()["outcome"] == "added"


def ship(root, *places):
    """List records as shipped."""
    path = root / "workloads" / "checked-records.json"
    path.write_text(json.dumps({"definitions": {}, "files": dict.fromkeys(places, "0" * 32)}))


STOCK = "solutions/elementwise/row_scale/row_scale_stock/solution.json"


def test_shipped_records_are_neither_replaced_nor_removed(cli, row_scale, source, snapshot):
    ship(row_scale, STOCK, "definitions/elementwise/row_scale.json")
    (row_scale / ".tilegym-db.lock").touch()
    before = snapshot(row_scale)
    refusals = [
        cli("add-solution", source, "-d", "row_scale", "-l", "python", "--name", "row_scale_stock", "--replace"),
        cli("remove", "row_scale_stock"),
        cli("remove", "row_scale"),
    ]
    assert [(result.code, result.cause) for result in refusals] == [(1, "record_shipped")] * 3
    assert snapshot(row_scale) == before


def test_remove_says_which_traces_stay(cli, row_scale, journal_traces):
    journal_traces(5.0, 6.0)
    removed = cli("remove", "row_scale_stock", "--json")
    assert (removed.code, removed.json()["traces"]) == (0, {"h200": 2})
    assert "2 on h200" in removed.err
    assert "row_scale_stock" not in Catalog.default().solutions
    assert cli("sql", "SELECT count(*) FROM traces", "--json").json()[0]["count_star()"] == 2


def test_remove_of_an_unknown_name_suggests_the_nearest(cli, row_scale):
    result = cli("remove", "row_scale_stok")
    assert (result.code, result.cause) == (2, "name_unknown")
    assert "'row_scale_stock'" in result.err


def test_definition_that_solutions_use_is_removed_after_them(cli, row_scale):
    refused = cli("remove", "row_scale")
    assert (refused.code, refused.cause) == (1, "definition_used")
    assert "tilegym-db remove row_scale_stock" in refused.err
    content = json.loads((row_scale / "definitions/elementwise/row_scale.json").read_text())
    cli("remove", "row_scale_stock")
    assert cli("remove", "row_scale").code == 0
    assert Catalog.default().definitions == {}
    assert not list(row_scale.glob("workloads/*/row_scale.jsonl"))
    changed = row_scale.parent / "row_scale.json"
    changed.write_text(json.dumps({**content, "constraints": ["N >= 2"]}))
    assert cli("add-definition", changed).code == 0  # the lock has forgotten the old meaning


def test_definition_is_added_again_without_an_error(cli, row_scale):
    copy = row_scale.parent / "row_scale.json"
    copy.write_text((row_scale / "definitions/elementwise/row_scale.json").read_text())
    assert cli("add-definition", copy).code == 0


def test_replaced_folder_is_whole_without_an_exchange_of_names(cli, row_scale, source, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    add(cli, source)
    source.write_text(OTHER)
    assert add(cli, source, "--replace").code == 0
    folder = row_scale / "solutions/elementwise/row_scale/mine"
    assert SolutionFiles.read(folder).sources["mine.py"].decode() == OTHER
    assert not list(folder.parent.glob(".tilegym-db-*"))
