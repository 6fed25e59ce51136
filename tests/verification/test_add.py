"""``tilegym_db.add``: one call for a definition, a solution and workloads, with the checks of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises

import tilegym_db
from tilegym_db.catalog import Catalog
from tilegym_db.errors import ConflictError, RecordError, UsageError
from tilegym_db.verification.add import kind_of

KERNEL = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
WORKLOAD = {
    "definition": "row_scale",
    "axes": {"M": 3, "N": 5},
    "dtypes": {"T": "float32"},
    "inputs": {"factor": {"type": "scalar", "value": 2.0}},
}


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_source_file_becomes_a_solution(row_scale, write):
    added = tilegym_db.add(write("halves.py", KERNEL), definition="row_scale", language="python")
    assert added.solution is not None
    assert added.solution.name == "row_scale_python_halves"
    assert Catalog.default().solution("row_scale_python_halves").folder == added.paths[0]


def test_shared_code_that_a_source_imports_is_declared(row_scale, write):
    shared = row_scale / "solutions/_lib/python"
    shared.mkdir(parents=True)
    (shared / "one.py").write_text("ONE = 1\n")
    (shared / "scale.py").write_text(
        "from _lib.python.one import ONE\n\n\ndef scaled(x, by):\n    return x * by * ONE\n"
    )
    source = KERNEL.replace("x * weight * factor", "scaled(x * weight, factor)")
    file = write("shared.py", f"from _lib.python.scale import scaled\n\n\n{source}")
    added = tilegym_db.add(file, definition="row_scale", language="python")
    found = Catalog.default().solution("row_scale_python_shared")
    assert list(found.sources) == ["shared.py", "_lib/python/scale.py", "_lib/python/one.py"]
    assert {path.name for path in added.paths[0].iterdir()} == {"shared.py", "solution.json"}


def test_workloads_are_added_and_known_ones_counted(row_scale, write):
    file = write("sizes.jsonl", json.dumps(WORKLOAD))
    first, second = tilegym_db.add(str(file)), tilegym_db.add(file)
    assert [workload.axes for workload in first.workloads] == [WORKLOAD["axes"]]
    assert (second.workloads, second.known_workloads) == ((), first.workloads)


def test_a_new_version_is_added_after_its_reference_ran(row_scale, write):
    path = row_scale / "definitions" / "elementwise" / "row_scale.json"
    record = {**json.loads(path.read_text()), "version": "1.1.0", "constraints": ["N >= 2"]}
    added = tilegym_db.add(write("row_scale.json", json.dumps(record)))
    assert added.definition is not None
    assert (added.definition.version, added.reference_ran, added.paths) == ("1.1.0", True, (path,))
    assert (
        tilegym_db.add(write("row_scale.json", json.dumps(record))).definition == added.definition
    )  # the same once more
    with raises(ConflictError, "version_not_raised", "1.1.0"):
        tilegym_db.add(write("row_scale.json", json.dumps({**record, "constraints": ["N >= 3"]})))


def test_a_refused_source_adds_nothing(row_scale, write):
    source = write("evil.py", f"import gc\n{KERNEL}")
    with raises(RecordError, "scan_refused", "imports gc"):
        tilegym_db.add(source, definition="row_scale", language="python")
    assert Catalog.default().solution_paths.keys() == {"row_scale_stock"}


def test_arguments_must_fit_what_the_path_contains(row_scale, write):
    with raises(UsageError, "options_missing", "a language"):
        tilegym_db.add(write("one.py", KERNEL), definition="row_scale")
    with raises(UsageError, "options_clash", "'name'"):
        tilegym_db.add(write("sizes.jsonl", json.dumps(WORKLOAD)), name="mine")
    with raises(UsageError, "language_unknown", "'tritn'"):
        tilegym_db.add(write("one.py", KERNEL), definition="row_scale", language="tritn")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.py", "", "solution"),
        ("a.jsonl", "", "workload"),
        ("a.json", '{"spec": {}}', "solution"),
        ("a.json", '{"reference": ""}', "definition"),
        ("a.json", '{"definition": "row_scale", "axes": {}}', "workload"),
    ],
)
def test_the_kind_of_a_file_follows_from_its_content(write, name, text, kind):
    assert kind_of(write(name, text)) == kind


def test_a_path_of_no_known_kind_is_wrong_usage(write, tmp_path):
    with raises(UsageError, "file_missing", "absent.py"):
        kind_of(tmp_path / "absent.py")
    for name, text in (("a.txt", "text"), ("a.json", "[]")):
        with raises(UsageError, "file_kind", name):
            kind_of(write(name, text))
