"""A family of Solutions: one kernel file, and beside it a record for each Solution that enters it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.catalog.record_files import FAMILY_NAME, record_paths
from tilegym_db.errors import ConflictError, RecordError
from tilegym_db.published.input_files import record_files
from tilegym_db.records import Solution
from tilegym_db.store.statements import fingerprint

KERNEL = """
def run(x, weight, factor, out): out.copy_(x * weight * factor)
def run_reversed(x, weight, factor, out): out.copy_(factor * weight * x)
"""
Write = Callable[..., Path]


@pytest.fixture
def family(row_scale: Path) -> Path:
    """A folder with a kernel of two entry functions, and no record yet."""
    folder = row_scale / "solutions" / "elementwise" / "scales_python"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    return folder


@pytest.fixture
def write(family: Path) -> Write:
    """Write a record of the family that says no more than it must: ``write("name", key=value)``."""

    def make(stem: str, **changes: Any) -> Path:
        path = family / f"{stem}.json"
        record = {"name": stem, "definition": "row_scale", "author": "tests", "spec": {"language": "python"}}
        path.write_text(json.dumps({**record, **changes}))
        return path

    return make


def refused(name: str, code: str, *facts: str) -> None:
    """Check that a Solution of the family is refused; the message has the path of its record and the facts."""
    with raises(RecordError, code, f"{name}.json: ", *facts):
        Catalog.default().solution(name)
    assert name not in Catalog.default().solutions


def test_solutions_of_a_family_share_a_file_but_no_entry(family: Path, write: Write):
    path = write("scale")
    write("scale_reversed", spec={"language": "python", "entry_point": "kernel.py::run_reversed"})
    catalog = Catalog.default()
    one, other = catalog.solution("scale"), catalog.solution("scale_reversed")
    assert (one.path, one.folder, one.root) == (path, family, family.parents[2].resolve())
    assert one.record.spec.entry_point == "kernel.py::run"
    assert one.sources == other.sources == {"kernel.py": KERNEL.encode()}
    assert one.digest != other.digest
    found = [files.name for files in catalog.solutions_for("row_scale")]
    assert found == ["row_scale_stock", "scale", "scale_reversed"]
    assert catalog.broken() == []


def test_solution_digest_is_equal_in_a_family_alone_or_explicit(family: Path, write: Write, tmp_path: Path):
    path = write("scale")
    in_family = Catalog.default().solution("scale")
    shutil.copy(family / "kernel.py", tmp_path)
    spelled = {**json.loads(path.read_text()), "sources": [{"path": "kernel.py"}]}
    spelled["spec"]["entry_point"] = "kernel.py::run"
    (tmp_path / "solution.json").write_text(json.dumps(spelled))
    assert SolutionFiles.read(tmp_path).digest == SolutionFiles.read(path).digest == in_family.digest
    assert in_family.record.to_dict() == {**json.loads(path.read_text())}


def test_a_family_may_keep_further_sources_in_a_folder(family: Path, write: Write):
    (family / "parts").mkdir()
    (family / "parts" / "tile.py").write_text("SIZE = 4\n")
    write("scale", sources=[{"path": "kernel.py"}, {"path": "parts/tile.py"}])
    catalog = Catalog.default()
    assert set(catalog.solution("scale").sources) == {"kernel.py", "parts/tile.py"}
    assert catalog.broken() == []


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"name": "other"}, "record_misplaced", "solutions/elementwise/<family>_python/other.json"),
        ({"spec": {"language": "triton"}}, "record_misplaced", "solutions/elementwise/<family>_triton/"),
        ({"sources": [{"path": "../kernel.py"}]}, "source_path_outside", "../kernel.py"),
        ({"sources": [{"path": "kernel.py"}, {"path": "gone.py"}]}, "source_missing", "'gone.py'"),
        (
            {"spec": {"language": "python", "entry_point": "kernel.py::run_fast"}},
            "entry_point_missing",
            "run, run_reversed",
        ),
        ({"definition": "gone"}, "definition_unknown", "'gone'"),
    ],
    ids=["name", "language", "outside", "missing", "function", "definition"],
)
def test_what_does_not_fit_names_its_record(write: Write, changes: dict[str, Any], code: str, name: str):
    write("fine")
    write("scale", **changes)
    refused("scale", code, name)
    assert Catalog.default().solution("fine").name == "fine"


def test_a_source_that_is_a_link_out_of_the_family_is_refused(family: Path, write: Write, tmp_path: Path):
    (tmp_path / "elsewhere.py").write_text("")
    (family / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    write("scale", sources=[{"path": "kernel.py"}, {"path": "linked.py"}])
    refused("scale", "link_outside", "'linked.py'")


def test_a_family_of_another_op_type_is_named(family: Path, write: Write, row_scale: Path):
    write("scale")
    family.rename(row_scale / "solutions" / "moved_python")
    (row_scale / "solutions" / "norm").mkdir()
    (row_scale / "solutions" / "moved_python").rename(row_scale / "solutions" / "norm" / "scales_python")
    refused("scale", "record_misplaced", "solutions/elementwise/<family>_python/")


def test_json_that_is_no_record_is_named_and_stops_nothing_else(family: Path, write: Write):
    write("scale")
    (family / "sizes.json").write_text('{"sizes": [1, 2]}')
    catalog = Catalog.default()
    assert [files.name for files in catalog.solutions_for("row_scale")] == ["row_scale_stock", "scale"]
    (broken,) = catalog.broken()
    assert broken.reason.startswith(f"{family / 'sizes.json'}: ")
    assert "'sizes'" in broken.reason
    assert "Every .json beside a kernel" in broken.reason


def test_a_kernel_without_a_record_is_named(family: Path):
    (broken,) = Catalog.default().broken()
    assert broken.reason.startswith(f"{family / 'scales_python.json'}: ")
    assert os.strerror(errno.ENOENT) in broken.reason


# -- a family.json ----------------------------------------------------------------------------------------------------


@pytest.fixture
def write_family(family: Path) -> Write:
    """Write the file of two Solutions: ``write_family({"name": {key: value}}, key=value)``."""

    def make(solutions: dict[str, Any] | None = None, **changes: Any) -> Path:
        changed = {"scale": {}, "reversed": {"spec": {"entry_point": "kernel.py::run_reversed"}}, **(solutions or {})}
        listed = [{"name": name, "definition": "row_scale", **changes} for name, changes in changed.items()]
        path = family / FAMILY_NAME
        record = {"author": "tests", "spec": {"language": "python"}, "solutions": listed, **changes}
        path.write_text(json.dumps(record))
        return path

    return make


def names(catalog: Catalog) -> list[str]:
    return [files.name for files in catalog.solutions_for("row_scale")]


def test_family_file_holds_what_records_beside_it_hold(family: Path, write: Write, write_family: Write) -> None:
    paths = [write("scale"), write("reversed", spec={"language": "python", "entry_point": "kernel.py::run_reversed"})]
    before = Catalog.default().solutions
    for path in paths:
        path.unlink()
    file = write_family()
    catalog = Catalog.default()
    assert {name: files.record for name, files in catalog.solutions.items()} == {
        name: files.record for name, files in before.items()
    }
    for name in ("scale", "reversed"):
        found = catalog.solution(name)
        assert (found.digest, found.folder, found.root) == (before[name].digest, family, before[name].root)
        assert found.path == file.with_name(f"family.json#{name}")
        assert SolutionFiles.read(found.path).digest == found.digest
    assert names(catalog) == ["reversed", "row_scale_stock", "scale"]
    assert catalog.broken() == []


def test_family_file_and_records_beside_it_are_both_read(write: Write, write_family: Write) -> None:
    write_family()
    write("other")
    catalog = Catalog.default()
    assert names(catalog) == ["other", "reversed", "row_scale_stock", "scale"]
    assert catalog.broken() == []


def test_family_name_of_a_record_beside_it_is_refused(write: Write, write_family: Write) -> None:
    file, path = write_family(), write("scale")
    catalog = Catalog.default()
    assert catalog.solution("scale").path == file.with_name("family.json#scale")
    (broken,) = catalog.broken()
    assert broken.reason.startswith(f"{path}: 'scale' exists twice: {file}#scale and {path}.")


def test_family_name_that_is_listed_twice_is_refused(write_family: Write) -> None:
    file = write_family()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "solutions": [*record["solutions"], record["solutions"][0]]}))
    catalog = Catalog.default()
    with raises(RecordError, "solution_repeated", f"{file}: ", "'scale' is listed twice"):
        catalog.solution("scale")
    assert names(catalog) == ["reversed", "row_scale_stock"]
    assert [broken.name for broken in catalog.broken()] == ["scale"]


@pytest.mark.parametrize(
    ("changes", "code", "fact"),
    [
        ({"warps": 4}, "key_unknown", "not a valid solution of a family: unknown key 'warps'"),
        ({"spec": {"warps": 4}}, "key_unknown", "unknown key 'warps'"),
        ({"definition": "gone"}, "definition_unknown", "'gone'"),
        ({"definition": 3}, "value_type", "definition: "),
        ({"spec": {"language": "triton"}}, "record_misplaced", "solutions/elementwise/<family>_triton/"),
        ({"spec": {"entry_point": "kernel.py::gone"}}, "entry_point_missing", "run, run_reversed"),
        ({"spec": {"entry_point": "gone.py::run"}}, "entry_file_missing", "'gone.py'"),
        ({"spec": {"dependencies": ["triton>="]}}, "requirement_syntax", "spec.dependencies"),
        ({"spec": []}, "value_type", "spec: "),
    ],
)
def test_family_solution_with_a_fault_is_named_and_others_stay(
    changes: dict[str, Any], code: str, fact: str, write_family: Write
) -> None:
    file = write_family({"scale": changes})
    catalog = Catalog.default()
    with raises(RecordError, code, f"{file}#scale: ", fact):
        catalog.solution("scale")
    assert names(catalog) == ["reversed", "row_scale_stock"]
    (broken,) = catalog.broken()
    assert (broken.name, broken.path) == ("scale", file.with_name("family.json#scale"))
    assert catalog.broken(("reversed",)) == []


@pytest.mark.parametrize(
    ("changes", "code", "fact"),
    [
        ({"warps": 4}, "key_unknown", "unknown key 'warps'"),
        ({"author": ""}, "value_invalid", "author: "),
        ({"spec": {"warps": 4}}, "key_unknown", "spec: unknown key 'warps'"),
        ({"sources": [{"path": "../kernel.py"}]}, "source_path_outside", "'../kernel.py'"),
    ],
)
def test_family_fault_concerns_each_solution(
    changes: dict[str, Any], code: str, fact: str, write_family: Write, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_family(**changes)
    catalog = Catalog.default()
    for name in ("scale", "reversed"):
        with raises(RecordError, code, f"{file}: not a valid family: ", fact):
            catalog.solution(name)
    assert names(catalog) == ["row_scale_stock"]
    assert [broken.name for broken in catalog.broken()] == ["reversed", "scale"]
    assert caplog.text.count(str(file)) == 1


@pytest.mark.parametrize(
    ("content", "code", "fact"),
    [
        ("{", "json_syntax", "not valid JSON"),
        ("[]", "object_expected", "a family is a JSON object"),
        ('{"author": "a"}', "key_missing", "missing key 'solutions'"),
        ('{"author": "a", "solutions": []}', "list_too_short", "solutions: "),
        ('{"author": "a", "solutions": [{"name": "../a", "definition": "b"}]}', "text_pattern", "solutions.0.name: "),
        ('{"author": "a", "solutions": [{"name": "a", "name": "a"}]}', "key_repeated", "'name'"),
    ],
)
def test_family_file_without_names_is_one_broken_record(family: Path, content: str, code: str, fact: str) -> None:
    file = family / FAMILY_NAME
    file.write_text(content)
    catalog = Catalog.default()
    assert names(catalog) == ["row_scale_stock"]
    (broken,) = catalog.broken()
    assert broken.reason.startswith(f"{file}: ")
    assert fact in broken.reason
    with raises(RecordError, code, str(file), fact):
        catalog.solution(broken.name)


def test_family_entry_without_a_name_stops_the_file(write_family: Write) -> None:
    file = write_family({"scale": {"name": ""}})
    with raises(RecordError, "text_pattern", f"{file}: ", "solutions.0.name: "):
        Catalog.default().solution("reversed")


def test_family_file_is_read_only_with_a_name(write_family: Write) -> None:
    file = write_family()
    with raises(RecordError, "solution_unnamed", f"{file}: ", "scale, reversed", "family.json#scale"):
        SolutionFiles.read(file)
    with raises(RecordError, "solution_unlisted", f"{file}#gone: ", "'gone'"):
        SolutionFiles.read(file.with_name("family.json#gone"))


def test_family_name_is_taken_for_a_new_solution(write_family: Write, solution_record: Callable[..., Any]) -> None:
    file = write_family()
    record = Solution.from_dict(solution_record(name="scale", author="another"))
    with raises(ConflictError, "solution_exists", str(file.parent)):
        writers.add_solution(Catalog.default(), record, {"kernel.py": KERNEL.encode()})


@pytest.mark.parametrize("left", [None, "__pycache__/kernel.cpython-311.pyc"])
def test_a_folder_whose_solution_moved_away_is_no_broken_record(row_scale: Path, left: str | None):
    folder = row_scale / "solutions" / "elementwise" / "row_scale" / "moved_away"
    folder.mkdir()
    if left is not None:
        (folder / left).parent.mkdir()
        (folder / left).write_bytes(b"")
    catalog = Catalog([row_scale])
    assert catalog.broken() == []
    (folder / "kernel.py").write_text("def run(): ...\n")
    assert ["moved_away" in str(item) for item in Catalog([row_scale]).broken()] == [True]


def test_a_name_lives_in_one_of_the_layouts(family: Path, write: Write, row_scale: Path):
    path = write("row_scale_stock")
    own = row_scale / "solutions/elementwise/row_scale/row_scale_stock/solution.json"
    catalog = Catalog.default()
    assert catalog.solution("row_scale_stock").path == own
    (broken,) = catalog.broken(("row_scale",))
    assert broken.reason.startswith(f"{path}: 'row_scale_stock' ")
    assert str(own) in broken.reason


def test_record_above_the_folders_of_solutions_stops_none(row_scale: Path):
    folder = row_scale / "solutions" / "elementwise" / "row_scale"
    for name in ("solution.json", "kernel.py"):
        shutil.copy(folder / "row_scale_stock" / name, folder)
    catalog = Catalog.default()
    assert list(catalog.solutions) == ["row_scale_stock"]
    (broken,) = catalog.broken()
    assert "solutions/<op_type>/row_scale/row_scale_stock/" in broken.reason


@pytest.mark.parametrize("target", ["/", "..", "../..", "loop"])
def test_link_to_a_folder_that_holds_the_catalog_is_ignored(tmp_path: Path, target: str) -> None:
    root = tmp_path / "catalog"
    own = root / "solutions" / "norm" / "rms_norm" / "mine"
    own.mkdir(parents=True)
    (own / "solution.json").write_text("{}")
    outside = tmp_path / "outside" / "linked"
    outside.mkdir(parents=True)
    (outside / "solution.json").write_text("{}")
    (root / "solutions" / "norm" / "other").symlink_to(tmp_path / "outside")  # this one is
    for place in ("norm", "."):
        (root / "solutions" / place / "loop").symlink_to(target)
    found = {path.relative_to(root).as_posix() for path in record_paths(root)}
    assert found == {f"solutions/norm/{name}/solution.json" for name in ("rms_norm/mine", "other/linked")}
    assert {path.relative_to(root).as_posix() for path in record_files(Catalog((root,)))} == found


def test_folder_that_disappears_has_no_part_in_a_fingerprint(tmp_path: Path) -> None:
    assert fingerprint([tmp_path / "gone"]) == fingerprint([])
