"""What was judged when the package was made fills the database as judging it anew does; what changed since is judged."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DEFINITION
from write_checked_records import judged

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import file_of
from tilegym_db.paths import shipped_root
from tilegym_db.published import snapshot
from tilegym_db.published.snapshot import Checked, checked_file
from tilegym_db.records import Workload
from tilegym_db.store.filling import definition_rows, solution_rows, workload_rows
from tilegym_db.store.opening import open_store

KERNEL = "def run(x, weight, factor, out):\n    out.copy_(x)\n"
SOLUTION = {
    "schema_version": 1,
    "name": "row_scale_plain",
    "definition": "row_scale",
    "author": "a test",
    "spec": {"language": "python", "dtypes": {"T": ["float32"]}, "target_hardware": ["cpu"]},
    "sources": [{"path": "kernel.py"}],
}
WORKLOAD = {
    "definition": "row_scale",
    "axes": {"M": 2, "N": 4},
    "dtypes": {"T": "float32"},
    "inputs": {"factor": {"type": "scalar", "value": 2.0}},
}


def rows_of(catalog: Catalog) -> list[list[dict[str, Any]]]:
    known = Checked(catalog)
    definitions = definition_rows(catalog, known)
    return [
        definitions,
        solution_rows(catalog, known),
        workload_rows(catalog, known, [row["name"] for row in definitions]),
    ]


@pytest.fixture
def shipped(tmp_path: Path, ship: Callable[[Path], Path]) -> Path:
    """A package that ships one operator, all of it on the list."""
    root = tmp_path / "shipped"
    for path, content in (
        ("definitions/elementwise/row_scale.json", json.dumps(copy.deepcopy(DEFINITION))),
        ("solutions/elementwise/row_scale/row_scale_plain/solution.json", json.dumps(SOLUTION)),
        ("solutions/elementwise/row_scale/row_scale_plain/kernel.py", KERNEL),
        ("workloads/elementwise/row_scale.jsonl", Workload.from_dict(WORKLOAD).to_json() + "\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    ship(root)
    checked_file().write_text(json.dumps(judged(Catalog((root,)), set())))
    return root


@pytest.mark.turn("tilegym_db/published/snapshot.py")  # fills two databases
def test_the_list_fills_the_database_as_judging_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_list = rows_of(Catalog((shipped_root(),)))
    monkeypatch.setattr(snapshot, "checked_file", lambda: tmp_path / "none.json")
    without = rows_of(Catalog((shipped_root(),)))
    assert with_list == without
    assert all(len(rows) > 100 for rows in without)


@pytest.mark.turn("tilegym_db/store/", "traces/")  # of all shipped traces
def test_doubts_are_the_same_if_every_shipped_trace_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    catalog = Catalog((shipped_root(),))
    plausible = Checked(catalog).plausible()
    with open_store(tmp_path / "one", catalog=catalog, read_only=True) as store:
        first = store.rows("SELECT trace_id, doubt, is_newest FROM trace_records ORDER BY ALL")
    monkeypatch.setattr(snapshot, "checked_file", lambda: tmp_path / "none.json")
    with open_store(tmp_path / "two", catalog=catalog, read_only=True) as store:
        assert store.rows("SELECT trace_id, doubt, is_newest FROM trace_records ORDER BY ALL") == first
        doubted = store.rows("SELECT DISTINCT definition FROM traces WHERE doubt IS NOT NULL")
    assert not {row["definition"] for row in doubted} & plausible


def test_nearly_all_that_is_shipped_is_on_the_list() -> None:
    catalog = Catalog((shipped_root(),))
    known = Checked(catalog)
    digests = [known.definition_digest(name) for name in catalog.definition_paths]
    assert sum(digest is not None for digest in digests) > 0.75 * len(digests), (
        "run: python tools/write_checked_records.py"
    )
    measured = known.trace_keys()
    assert len(known.plausible()) > 0.75 * len(measured), "run: python tools/write_checked_records.py"
    listed = json.loads(checked_file().read_bytes())["files"]
    here = [name for name in listed if file_of(shipped_root() / name).is_file()]
    assert len(here) > 0.75 * len(catalog.solution_paths), "run: python tools/write_checked_records.py"


def test_what_is_on_the_list_is_not_judged_again(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("judged")

    monkeypatch.setattr(Workload, "check_against", refuse)
    monkeypatch.setattr("tilegym_db.catalog.record_files.check_entry_point", refuse)
    assert [len(rows) for rows in rows_of(Catalog((shipped,)))] == [1, 1, 1]


def _replace(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


DEFINITION_FILE = "definitions/elementwise/row_scale.json"
SOLUTION_FILE = "solutions/elementwise/row_scale/row_scale_plain/solution.json"
WORKLOAD_FILE = "workloads/elementwise/row_scale.jsonl"


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (_replace(DEFINITION_FILE, '"op_type": "elementwise"', '"op_type": "norm"'), [0, 0, 0]),
        (_replace(DEFINITION_FILE, '"version": "1.0.0"', '"version": "1.0.1"'), [1, 1, 1]),
        (_replace(DEFINITION_FILE, '["float32", "bfloat16"]', '["bfloat16"]'), [1, 0, 0]),
        (_replace(SOLUTION_FILE, '"row_scale_plain"', '"row_scale_other"'), [1, 0, 1]),
        (_replace(SOLUTION_FILE, '"float32"', '"float64"'), [1, 0, 1]),
        (_replace(SOLUTION_FILE.replace("solution.json", "kernel.py"), "run", "walk"), [1, 0, 1]),
        (_replace(SOLUTION_FILE.replace("solution.json", "kernel.py"), "copy_", "add_"), [1, 1, 1]),
        (_replace(WORKLOAD_FILE, '"M": 2', '"M": -2'), [1, 1, 0]),
        (lambda root: (root / WORKLOAD_FILE).unlink(), [1, 1, 0]),
        (lambda root: shutil.rmtree((root / SOLUTION_FILE).parent), [1, 0, 1]),
    ],
)
def test_what_changed_since_is_judged(shipped: Path, change: Callable[[Path], None], left: list[int]) -> None:
    change(shipped)
    catalog = Catalog((shipped,), warns=False)
    found = rows_of(catalog)
    assert [len(rows) for rows in found] == left
    judging = Catalog((shipped,), warns=False)
    assert [row["digest"] for row in found[0]] == [one.digest for one in judging.definitions.values()]
    assert [row["digest"] for row in found[1]] == [one.digest for one in judging.solutions.values()]


FAMILY_FILE = "solutions/elementwise/scales_python/family.json"


@pytest.fixture
def shipped_family(shipped: Path) -> Path:
    """The same package, with two more Solutions in a family."""
    file = shipped / FAMILY_FILE
    file.parent.mkdir(parents=True)
    (file.parent / "kernel.py").write_text(KERNEL)
    solutions = [{"name": name, "definition": "row_scale"} for name in ("row_scale_one", "row_scale_two")]
    file.write_text(json.dumps({"author": "tests", "spec": SOLUTION["spec"], "solutions": solutions}))
    checked_file().write_text(json.dumps(judged(Catalog((shipped,)), set())))
    return shipped


def test_each_solution_of_a_family_is_listed(shipped_family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("judged")

    listed = json.loads(checked_file().read_bytes())["files"]
    assert {f"{FAMILY_FILE}#row_scale_one", f"{FAMILY_FILE}#row_scale_two"} < listed.keys()
    monkeypatch.setattr("tilegym_db.catalog.record_files.check_entry_point", refuse)
    rows = rows_of(Catalog((shipped_family,)))[1]
    assert [row["name"] for row in rows] == ["row_scale_one", "row_scale_plain", "row_scale_two"]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (
            _replace(FAMILY_FILE, '"row_scale_two", ', '"row_scale_two", "spec": {"deterministic": false}, '),
            {"row_scale_two"},
        ),
        (_replace(FAMILY_FILE, '"author": "tests"', '"author": "me"'), {"row_scale_one", "row_scale_two"}),
        (
            _replace(FAMILY_FILE.replace("family.json", "kernel.py"), "def", "\n\ndef"),
            {"row_scale_one", "row_scale_two"},
        ),
    ],
)
def test_changed_solution_of_a_family_is_judged(
    shipped_family: Path, change: Callable[[Path], None], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(shipped_family)
    catalog = Catalog((shipped_family,), warns=False)
    known = Checked(catalog)
    names = ("row_scale_one", "row_scale_two")
    files = {name: catalog.solution(name) for name in names}
    found = {name for name, one in files.items() if not known.solution(one.path, one.record.definition, one.sources)}
    assert found == left
    assert {row["name"]: row["digest"] for row in rows_of(catalog)[1]} == {
        name: one.digest for name, one in Catalog((shipped_family,)).solutions.items()
    }


@pytest.mark.parametrize(
    "damage",
    [b"", b"[1]", b'{"definitions": {"row_scale": 3}, "files": {}}', b'{"files": 3}', b"\xff\xfe", b"[" * 9999],
)
def test_a_damaged_list_costs_time_and_nothing_else(shipped: Path, damage: bytes) -> None:
    before = rows_of(Catalog((shipped,)))
    checked_file().write_bytes(damage)
    assert rows_of(Catalog((shipped,))) == before


def test_a_broken_record_of_the_user_is_left_out_and_named(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    overlay = tmp_path / "overlay"
    for name in ("solutions/elementwise/row_scale/draft", "solutions/elementwise/nothing/draft_two"):
        (overlay / name).mkdir(parents=True)
        (overlay / name / "solution.json").write_text("{")
    (overlay / "definitions/elementwise").mkdir(parents=True)
    (overlay / "definitions/elementwise/own.json").write_text("{}")
    catalog = Catalog((shipped, overlay))
    assert [len(rows) for rows in rows_of(catalog)] == [1, 1, 1]
    said = capsys.readouterr().err + caplog.text
    assert all(name in said for name in ("draft/solution.json", "draft_two/solution.json", "own.json"))
