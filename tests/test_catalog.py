from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog, writers
from tilegym_db.errors import ConflictError, NotFoundError, RecordError, StoreError
from tilegym_db.files import write_atomically
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Solution, Workload

DEFINITION_FILE = "definitions/elementwise/row_scale.json"
SOLUTION_FOLDER = "solutions/elementwise/row_scale/row_scale_stock"
WORKLOAD_FILE = "workloads/elementwise/row_scale.jsonl"

Record = Callable[..., dict[str, Any]]


def test_records_are_read_from_their_folders(row_scale: Path):
    catalog = Catalog.default()
    assert list(catalog.definitions) == ["row_scale"]
    assert catalog.solution("row_scale_stock").folder == row_scale / SOLUTION_FOLDER
    assert [solution.name for solution in catalog.solutions_for("row_scale")] == ["row_scale_stock"]
    assert len(list(catalog.all_workloads())) == 1


def test_solutions_of_names_are_read_without_the_others() -> None:
    catalog = Catalog((shipped_root(),))
    of_operator, of_solution = (catalog.solutions_among([name]) for name in ("softmax", "softmax_triton"))
    assert list(of_operator) == list(of_solution) == [files.name for files in catalog.solutions_for("softmax")]
    assert "solutions" not in vars(catalog)
    assert catalog.solutions_among(["sofmax"]) == catalog.solutions_among([]) == catalog.solutions
    assert catalog.solutions_among(["softmax"]) is catalog.solutions


def test_names_that_do_not_exist_get_suggestions(row_scale: Path):
    with raises(NotFoundError, "definition_unknown", "'row_scael'", "'row_scale'", "tilegym-db list"):
        Catalog.default().definition("row_scael")
    with raises(NotFoundError, "solution_unknown", "'row_scale_stok'", "'row_scale_stock'"):
        Catalog.default().solution("row_scale_stok")


def test_a_name_lives_in_one_root_only(row_scale: Path, home: Path):
    overlay = home / "catalog" / DEFINITION_FILE
    overlay.parent.mkdir(parents=True)
    overlay.write_bytes((row_scale / DEFINITION_FILE).read_bytes())
    catalog = Catalog.default()
    assert list(catalog.definitions) == ["row_scale"]
    assert catalog.definition_paths["row_scale"] == row_scale / DEFINITION_FILE
    (broken,) = catalog.broken()
    assert str(overlay) in broken.reason
    assert str(row_scale / DEFINITION_FILE) in broken.reason


def test_the_overlays_workloads_follow_the_shipped_ones(row_scale: Path, home: Path, workload_record: Record):
    file = home / "catalog" / WORKLOAD_FILE
    file.parent.mkdir(parents=True)
    records = [workload_record(), workload_record(axes={"M": 9, "N": 9})]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [workload.axes["M"] for workload in Catalog.default().workloads_for("row_scale")] == [4, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":2: not valid JSON"),
        ('{"definition": "other", "axes": {}}', ":2: definition is 'other'"),
        (
            '{"definition": "row_scale", "axes": {"M": 1}, "dtypes": {"T": "float32"}}',
            ":2: row_scale needs a size for axis 'N'",
        ),
    ],
)
def test_a_wrong_workload_names_file_and_line(row_scale: Path, text: str, message: str):
    with (row_scale / WORKLOAD_FILE).open("a") as file:
        file.write(text + "\n")
    catalog = Catalog.default()
    assert len(catalog.workloads_for("row_scale")) == 1
    (broken,) = catalog.broken()
    assert str(row_scale / WORKLOAD_FILE) + message in broken.reason


def test_a_solution_of_a_definition_that_is_gone_names_its_file(row_scale: Path):
    (row_scale / DEFINITION_FILE).unlink()
    with raises(RecordError, "definition_unknown", "solution.json: ", "'row_scale'"):
        Catalog.default().solution("row_scale_stock")
    assert Catalog.default().solutions == {}


def test_a_solution_that_cannot_be_called_is_refused_when_read(row_scale: Path):
    (row_scale / SOLUTION_FOLDER / "kernel.py").write_text("def run(x): ...\n")
    with raises(RecordError, "signature_differs", "solution.json: ", "run(x)"):
        Catalog.default().solution("row_scale_stock")


def test_a_solution_in_the_wrong_folder_is_refused(row_scale: Path):
    (row_scale / SOLUTION_FOLDER).rename(row_scale / SOLUTION_FOLDER.replace("stock", "moved"))
    with raises(RecordError, "record_misplaced", "solutions/<op_type>/row_scale/row_scale_stock/"):
        Catalog.default().solution("row_scale_moved")
    assert Catalog.default().solutions == {}


def test_the_digest_follows_the_bytes_of_the_sources(row_scale: Path):
    before = Catalog.default().solution("row_scale_stock").digest
    with (row_scale / SOLUTION_FOLDER / "kernel.py").open("a") as file:
        file.write("# one more line\n")
    assert Catalog.default().solution("row_scale_stock").digest != before


def test_the_lock_finds_a_changed_meaning_under_an_old_version(row_scale: Path, definition_record: Record):
    assert writers.lock_findings(Catalog.default()) == []
    changed = Definition.from_dict(definition_record(constraints=["N >= 2"]))
    (row_scale / DEFINITION_FILE).write_text(changed.to_json())
    (finding,) = writers.lock_findings(Catalog.default())
    assert finding.startswith(f"{row_scale / DEFINITION_FILE}: ")
    assert "1.0.0" in finding
    assert writers.update_lock(Catalog.default(), row_scale) == []
    assert writers.lock_findings(Catalog.default()) == [finding]


def test_the_lock_finds_and_takes_a_new_version(row_scale: Path, definition_record: Record):
    newer = Definition.from_dict(definition_record(version="1.1.0", constraints=["N >= 2"]))
    (row_scale / DEFINITION_FILE).write_text(newer.to_json())
    (finding,) = writers.lock_findings(Catalog.default())
    assert "1.1.0" in finding
    assert "definitions.lock.json" in finding
    assert writers.update_lock(Catalog.default(), row_scale) == ["row_scale 1.1.0"]
    assert writers.lock_findings(Catalog.default()) == []
    lock = json.loads((row_scale / "definitions" / "definitions.lock.json").read_text())
    assert list(lock["row_scale"]) == ["1.0.0", "1.1.0"]


def test_a_damaged_lock_is_named(row_scale: Path):
    (row_scale / "definitions" / "definitions.lock.json").write_text("{")
    (finding,) = writers.lock_findings(Catalog.default())
    assert "definitions.lock.json: " in finding
    with raises(RecordError, "lock_damaged", "definitions.lock.json: "):
        writers.update_lock(Catalog.default(), row_scale)


def test_an_older_version_never_replaces_a_newer_one(row_scale: Path, definition_record: Record):
    writers.add_definition(Catalog.default(), Definition.from_dict(definition_record(version="1.10.0", constraints=[])))
    with raises(ConflictError, "version_not_raised", "'version'", "1.10.0"):
        writers.add_definition(Catalog.default(), Definition.from_dict(definition_record(version="1.9.0")))


def test_a_new_version_stays_in_its_family(row_scale: Path, definition_record: Record):
    with raises(ConflictError, "op_type_differs", "'elementwise'"):
        writers.add_definition(
            Catalog.default(), Definition.from_dict(definition_record(version="2.0.0", op_type="norm"))
        )
    assert list(Catalog.default().definitions) == ["row_scale"]


def test_a_full_disk_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "record.json"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises(StoreError, "write_failed", "record.json: ", os.strerror(errno.ENOSPC)):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_adds_no_half_solution(row_scale: Path, monkeypatch: pytest.MonkeyPatch, solution_record: Record):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(row_scale.rglob("*"))
    record = Solution.from_dict(solution_record(name="another"))
    monkeypatch.setattr(os, "fsync", full)
    with raises(StoreError, "write_failed", os.strerror(errno.ENOSPC)):
        writers.add_solution(Catalog.default(), record, {"kernel.py": b"def run(x, weight, factor, out): ..."})
    assert sorted(row_scale.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "source", "code"),
    [
        ({}, b"def run(x, weight): ...", "signature_differs"),
        ({}, b"def run(:", "python_syntax"),
        ({"constraints": ["K >= 1"]}, b"def run(x, weight, factor, out): ...", "name_undeclared"),
    ],
)
def test_python_adds_no_solution_that_the_command_refuses(
    row_scale: Path, solution_record: Record, changes: dict[str, Any], source: bytes, code: str
) -> None:
    record = solution_record(name="another")
    record["spec"] |= changes
    before = sorted(row_scale.rglob("*"))
    with raises(RecordError, code, "another"):
        writers.add_solution(Catalog.default(), Solution.from_dict(record), {"kernel.py": source})
    assert sorted(row_scale.rglob("*")) == before


def test_a_workload_that_exists_is_not_added_again(row_scale: Path, workload_record: Record):
    known, new = workload_record(), workload_record(axes={"M": 9, "N": 9})
    added = writers.add_workloads(Catalog.default(), (Workload.from_dict(record) for record in (known, new, new)))
    assert [workload.axes["M"] for _, workload in added] == [9]
    assert len((row_scale / WORKLOAD_FILE).read_text().splitlines()) == 2


def test_every_shipped_record_is_valid_and_locked():
    catalog = Catalog((shipped_root(),))
    assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "swiglu", "rope_neox", "softmax", "gemm"} <= set(
        catalog.definitions
    )
    assert all(solution.digest for solution in catalog.solutions.values())
    assert {workload.definition for workload in catalog.all_workloads()} == set(catalog.definitions)
    assert writers.lock_findings(catalog) == []
