"""Damaged data sets: what is refused with which file and key, and that an error changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)
from raising import raises

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.store.imported import data_set, data_sets, forget_data_set, import_lock


def undeclared_axis() -> dict[str, Any]:
    return definition(outputs={"out": {"shape": ["M", "K"], "dtype": "float32"}})


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def evaluated(**changes: Any) -> str:
    record = trace()
    record["evaluation"] |= changes
    return lines(record)


def with_sources(*sources: dict[str, str]) -> dict[str, Any]:
    return {**solution(), "sources": list(sources)}


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
MAIN = {"path": "main.py", "content": "def run(): pass"}
ESCAPING = {"type": "safetensors", "path": "blob/../../secret", "tensor_key": "x"}

# What is written where -> the place, the key and a part of the reason that the report must name.
DAMAGE: dict[str, tuple[str, str | bytes | dict[str, Any], str, str, str]] = {
    "cut JSON": (DEFINITION, '{"name": "scale_n8"', DEFINITION, "", "not valid JSON"),
    "not UTF-8": (DEFINITION, b'{"name": "\xff"}', DEFINITION, "", "not UTF-8"),
    "a list": (DEFINITION, "[]", DEFINITION, "", "is a JSON list"),
    "a key twice": (DEFINITION, '{"name": "a", "name": "b"}', DEFINITION, "", "key 'name' twice"),
    "too deep": (DEFINITION, '{"a":' * 200_000, DEFINITION, "", "nested too deeply"),
    "no op_type": (DEFINITION, without(definition(), "op_type"), DEFINITION, "op_type", "missing key"),
    "unsafe name": (DEFINITION, definition(name="../etc"), DEFINITION, "name", "not safe as a part of a path"),
    "undeclared axis": (DEFINITION, undeclared_axis(), DEFINITION, "outputs.out.shape", "axis 'K'"),
    "negative axis": (DEFINITION, definition(axes={"M": {"type": "const", "value": -1}, "N": {"type": "var"}}), DEFINITION,
                      "axes.M.value", ">= 0"),
    "unknown dtype": (DEFINITION, definition(inputs={"x": {"shape": ["M"], "dtype": "complex64"}}), DEFINITION,
                      "inputs.x.dtype", "complex64"),
    "input as output": (DEFINITION, definition(outputs={"x": {"shape": ["M"], "dtype": "float32"}}), DEFINITION,
                        "outputs.x", "name of an input"),
    "reference without run": (DEFINITION, definition(reference="def go(): pass"), DEFINITION, "reference", "'run'"),
    "reference that does not parse": (DEFINITION, definition(reference="def run(:"), DEFINITION, "reference", "not valid"),
    "constraint that does not parse": (DEFINITION, definition(constraints=["M >="]), DEFINITION, "constraints[0]",
                                       "not a Python expression"),
    "unknown language": (SOLUTION, solution(language="fortran"), SOLUTION, "spec.language", "fortran"),
    "source out of its folder": (SOLUTION, with_sources({"path": "../main.py", "content": "x"}), SOLUTION, "sources[0].path",
                                 "leads out"),
    "source twice": (SOLUTION, with_sources(MAIN, MAIN), SOLUTION, "sources[1].path", "listed twice"),
    "empty source": (SOLUTION, with_sources({"path": "main.py", "content": ""}), SOLUTION, "sources[0].content", "non-empty"),
    "entry that is no source": (SOLUTION, solution(entry_point="other.py::run"), SOLUTION, "spec.entry_point", "is not a source"),
    "entry without function": (SOLUTION, solution(entry_point="main.py"), SOLUTION, "spec.entry_point", "<file>::<function>"),
    "no hardware": (SOLUTION, solution(target_hardware=[]), SOLUTION, "spec.target_hardware", "at least one"),
    "blob out of the root": (WORKLOADS, lines(of_workload(workload(x=ESCAPING))), f"{WORKLOADS}:1", "workload.inputs.x.path",
                             "leads out"),
    "absolute blob": (WORKLOADS, lines(of_workload(workload(x={**ESCAPING, "path": "/etc/passwd"}))), f"{WORKLOADS}:1",
                      "workload.inputs.x.path", "leads out"),
    "unknown input kind": (WORKLOADS, lines(of_workload(workload(x={"type": "custom"}))), f"{WORKLOADS}:1",
                           "workload.inputs.x.type", "custom"),
    "axis that is no number": (WORKLOADS, lines(of_workload(workload(m="4"))), f"{WORKLOADS}:1",  # type: ignore[arg-type]
                               "workload.axes.M", "whole number"),
    "trace among workloads": (WORKLOADS, lines(trace()), f"{WORKLOADS}:1", "solution", "belongs in traces/"),
    "workload among traces": (TRACES, lines(of_workload(workload())), f"{TRACES}:1", "solution", "belongs in workloads/"),
    "unknown status": (TRACES, evaluated(status="FINE"), f"{TRACES}:1", "evaluation.status", "FINE"),
    "pass without a time": (TRACES, evaluated(performance=None), f"{TRACES}:1", "evaluation.performance", "must be present"),
    "failure with a time": (TRACES, evaluated(status="TIMEOUT", correctness=None), f"{TRACES}:1", "evaluation.performance",
                            "must not be present"),
    "negative time": (TRACES, evaluated(performance={"latency_ms": -1}), f"{TRACES}:1", "evaluation.performance.latency_ms",
                      ">= 0"),
    "time of 401 digits": (TRACES, evaluated(performance={"latency_ms": 10**400}), f"{TRACES}:1",
                           "evaluation.performance.latency_ms", ">= 0"),
    "kind of axis that is a list": (DEFINITION, definition(axes={"M": {"type": ["var"]}, "N": {"type": "var"}}), DEFINITION,
                                    "axes.M.type", "must be one of const, var"),
    "kind of input that is an object": (WORKLOADS, lines(of_workload(workload(x={"type": {}}))), f"{WORKLOADS}:1",
                                        "workload.inputs.x.type", "must be one of"),
    "scalar of more than 64 bits": (WORKLOADS, lines(of_workload(workload(eps={"type": "scalar", "value": 10**30}))),
                                    f"{WORKLOADS}:1", "workload.inputs.eps.value", "at most 64 bits"),
    "key nested too deeply": (DEFINITION, json.dumps(definition())[:-1] + ', "a": ' + "[" * 600 + "]" * 600 + "}", DEFINITION,
                              "", "nested too deeply"),
    "LFS pointer as definition": (DEFINITION, POINTER, DEFINITION, "", "run git lfs pull"),
    "LFS pointer as traces": (TRACES, POINTER, f"{TRACES}:1", "", "run git lfs pull"),
    "blob in .git": (WORKLOADS, lines(of_workload(workload(x={**ESCAPING, "path": ".git/config"}))), f"{WORKLOADS}:1",
                     "workload.inputs.x.path", "leads into a repository's .git"),
    "no hardware measured on": (TRACES, evaluated(environment={"libs": {}}), f"{TRACES}:1", "evaluation.environment.hardware",
                                "missing key"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_file_and_key_and_the_rest_comes_in(tree: Tree, home: Path, kind: str) -> None:
    path, content, place, key, reason = DAMAGE[kind]
    tree.write(path, content)
    found = import_data_set(tree.root).data_set
    refusals = [item for item in found.refused if (item.path, item.key) == (place, key)]
    assert len(refusals) == 1, found.refused
    assert reason in refusals[0].reason
    assert not any(item.path == path and place == path for item in found.records)
    assert found.records
    with raises(RecordError, "records_refused", "--strict"):
        import_data_set(tree.root, name="strict", strict=True)
    assert [item.name for item in data_sets(home)] == ["small"]


def twice(tree: Tree, kind: str) -> Tree:
    copy = {
        "definition": (DEFINITION, "definitions/other/scale_n8.json"),
        "solution": (SOLUTION, "solutions/x/scale_torch.json"),
    }
    source, target = copy[kind]
    return tree.write(target, tree.bytes()[source])


# What is done to a data set -> the code of the error, and what its message names.
ERRORS: dict[str, tuple[Callable[[Tree], object], str, str]] = {
    "definition twice": (lambda tree: twice(tree, "definition"), "record_repeated", "'scale_n8'"),
    "solution twice": (lambda tree: twice(tree, "solution"), "record_repeated", "'scale_torch'"),
    "nothing valid": (lambda tree: [tree.write(path, "{}") for path in (DEFINITION, SOLUTION, WORKLOADS, TRACES)],
                      "records_refused", DEFINITION),
}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_changes_nothing(tree: Tree, home: Path, kind: str) -> None:
    damage, code, name = ERRORS[kind]
    damage(tree)
    with raises(RecordError, code, name):
        import_data_set(tree.root)
    assert not list(home.rglob("manifest.json"))
    assert not list(home.rglob("objects"))


def test_a_link_out_of_the_data_set_is_refused(tree: Tree, home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(definition(name="secret")))
    (tree.root / "definitions" / "scale" / "secret.json").symlink_to(tmp_path / "secret.json")
    found = import_data_set(tree.root).data_set
    (refusal,) = found.refused
    assert refusal.path == "definitions/scale/secret.json"
    assert "leads out of the data set" in refusal.reason
    assert "--local-dir" in refusal.reason
    assert "secret" not in {item.name for item in found.records}


def test_a_link_into_git_is_refused(tree: Tree, home: Path) -> None:
    tree.write(".git/config", "token")
    (tree.root / "blob").symlink_to(".git/config")
    tree.write(WORKLOADS, lines(of_workload(workload(x={"type": "safetensors", "path": "blob", "tensor_key": "x"}))))
    found = import_data_set(tree.root).data_set
    assert {item.path for item in found.refused} == {"blob", f"{WORKLOADS}:1"}
    assert not any(file.path in ("blob", ".git/config") for file in found.files)


@pytest.mark.parametrize(("path", "suffix"), [(DEFINITION, ".JSON"), (SOLUTION, ".Json"), (TRACES, ".JSONL")])
def test_suffix_in_another_case_is_named_among_what_was_left_out(
    tree: Tree, home: Path, path: str, suffix: str
) -> None:
    renamed = (tree.root / path).rename((tree.root / path).with_suffix(suffix))
    (refusal,) = import_data_set(tree.root).data_set.refused
    assert refusal.path == renamed.relative_to(tree.root).as_posix()
    assert f"ends in {suffix}, but only {suffix.lower()} is read" in refusal.reason


def test_one_uuid_with_other_axes_is_a_finding(tree: Tree, home: Path) -> None:
    tree.write(WORKLOADS, lines(*(of_workload(item) for item in (workload(), workload(), workload(m=8)))))
    items = import_data_set(tree.root).data_set.of_kind("workload")
    assert [item.findings for item in items] == [
        (),
        (),
        (f"uuid 'w-1' is also in {WORKLOADS}:1 with other axes or inputs; that one is used",),
    ]


def test_a_link_to_itself_is_refused(tree: Tree, home: Path) -> None:
    (tree.root / "loop").symlink_to("loop")
    found = import_data_set(tree.root).data_set
    assert [(item.path, item.reason) for item in found.refused] == [("loop", "a broken link, or not a regular file")]


def test_a_blob_with_a_name_that_no_file_can_have_is_a_finding(tree: Tree, home: Path) -> None:
    blob = {"type": "safetensors", "path": "blob/" + "a" * 400, "tensor_key": "x"}
    tree.write(WORKLOADS, lines(of_workload(workload(x=blob))))
    (item,) = import_data_set(tree.root).data_set.of_kind("workload")
    assert "is not in the data set" in item.findings[0]


def test_a_blob_that_is_a_link_out_is_refused(tree: Tree, home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    (tree.root / "blob").mkdir()
    (tree.root / "blob" / "x").symlink_to(tmp_path / "secret")
    tree.write(WORKLOADS, lines(of_workload(workload(x={"type": "safetensors", "path": "blob/x", "tensor_key": "x"}))))
    found = import_data_set(tree.root).data_set
    assert any(item.key == "workload.inputs.x.path" for item in found.refused)
    assert "blob/x" not in found.files_by_path


def test_a_data_set_in_no_known_dialect_is_an_error(tmp_path: Path, home: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with raises(UsageError, "dialect_unrecognised", str(tmp_path)):
        import_data_set(tmp_path)


def test_other_content_under_a_taken_name_needs_an_option(tree: Tree, home: Path) -> None:
    import_data_set(tree.root)
    tree.write(TRACES, lines(trace(), trace()))
    with raises(UsageError, "data_set_exists", "--replace"):
        import_data_set(tree.root)
    assert len(data_set(home, "small").of_kind("trace")) == 1
    assert import_data_set(tree.root, replace=True).changed
    assert len(data_set(home, "small").of_kind("trace")) == 2


def test_two_imports_at_once_take_turns(tree: Tree, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with import_lock(home), raises(StoreError, "store_locked"), import_lock(home, timeout_s=0.0):
        pass


def test_changed_bytes_in_the_store_are_noticed(tree: Tree, home: Path) -> None:
    found = import_data_set(tree.root).data_set
    target = next((home / "imported" / "objects").rglob(found.files_by_path[DEFINITION].sha256))
    target.chmod(0o644)
    target.write_bytes(b"{}")
    with raises(StoreError, "object_changed", DEFINITION):
        data_set(home, "small").content(DEFINITION)


@pytest.mark.parametrize("which", ["manifest.json", "records-*.jsonl"])
def test_damaged_data_set_stops_nothing_else_and_imports_again(
    tree: Tree, home: Path, which: str, tmp_path: Path
) -> None:
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.opening import open_store

    import_data_set(tree.root)
    import_data_set(tree.root, name="other")
    (path,) = (home / "imported" / "flashinfer-trace" / "small").glob(which)
    path.write_text("{")
    query = "SELECT DISTINCT origin FROM imported_records ORDER BY 1"
    for origins in (["flashinfer-trace:other"], ["flashinfer-trace:other", "flashinfer-trace:small"]):
        with open_store(home, read_only=True, catalog=Catalog((tmp_path,))) as store:
            assert [row["origin"] for row in store.rows(query)] == origins
        import_data_set(tree.root, replace=True)


@pytest.mark.parametrize("which", ["manifest.json", "records-*.jsonl"])
def test_unreadable_data_set_is_warned_of_once_and_is_removable(
    tree: Tree, home: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    import_data_set(tree.root)
    tree.write(DEFINITION, definition(description="another"))
    import_data_set(tree.root, name="other")
    (path,) = (home / "imported" / "flashinfer-trace" / "small").glob(which)
    path.write_text("{")
    assert [found.name for found in data_sets(home)] == ["other"]
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("flashinfer-trace:small left out: ")
    with import_lock(home):
        assert forget_data_set(home, "small") == ("flashinfer-trace:small", 1)
    other = data_set(home, "other")
    assert {file.path: other.content(file.path) for file in other.files} == tree.bytes()
    assert len([path for path in (home / "imported" / "objects").rglob("*") if path.is_file()]) == len(tree.bytes())


def test_a_number_that_no_database_holds_is_refused(tree: Tree, home: Path) -> None:
    tree.write(TRACES, lines(trace()).replace("0.001", "1e999"))
    found = import_data_set(tree.root).data_set
    (refusal,) = found.refused
    assert "1e999" in refusal.reason


def test_nothing_is_executed_on_import(tree: Tree, home: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\ndef run(x, w, eps):\n    return x\n"
    tree.write(DEFINITION, definition(reference=code)).write(SOLUTION, solution(content=code))
    import_data_set(tree.root)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "../x", ".a", "a" * 65, "a\n", "\N{SNOWMAN}"])
def test_a_dry_run_refuses_a_name_that_the_import_would_refuse(tree: Tree, home: Path, name: str) -> None:
    for dry_run in (True, False):
        with raises(UsageError, "name_invalid"):
            import_data_set(tree.root, name=name, dry_run=dry_run)


def test_dry_run_refuses_a_known_name_with_other_content(tree: Tree, home: Path) -> None:
    import_data_set(tree.root, name="one")
    import_data_set(tree.root, name="one", dry_run=True)
    tree.write(DEFINITION, definition(description="another"))
    for dry_run in (True, False):
        with raises(UsageError, "data_set_exists", "--replace"):
            import_data_set(tree.root, name="one", dry_run=dry_run)
    import_data_set(tree.root, name="one", dry_run=True, replace=True)
