from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import full_run
import pytest
from full_run import (
    COMPILERS,
    JUDGES,
    SAMPLE,
    Choice,
    FullRun,
    beyond_the_sample,
    check_marks,
    digest_of_test,
    is_by_hand,
    is_whole,
    judge_digest,
    name_of,
)

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root

RECORDS = {f"solution:kernel_{number}": f"digest {number}" for number in range(400)}
TEST = "test_kernels.py"
LAST = FullRun("judge", {TEST: "its text"}, RECORDS)
NOW = Choice("judge", RECORDS, LAST, "commit")


def tried(choice: Choice, text: str = "its text") -> set[str]:
    return {key for key in choice.records if choice.tries([key], TEST, text)}


def test_where_nothing_changed_a_sample_is_tried_that_another_commit_changes() -> None:
    first, second = (tried(replace(NOW, salt=salt)) for salt in ("one commit", "another"))
    assert first != second
    for chosen in (first, second):
        assert len(RECORDS) / SAMPLE / 2 < len(chosen) < len(RECORDS) / SAMPLE * 2


def of_a_sweep(count: int, *given: int) -> list[Any]:
    """As pytest collects a test with the mark ``sweep`` and so many cases."""
    mark = SimpleNamespace(args=given)
    path = Path(__file__).with_name("test_kernels.py")
    return [
        SimpleNamespace(nodeid=f"test_kernels.py::test_it[{number}]", path=path, get_closest_marker=lambda name: mark)
        for number in range(count)
    ]


def test_of_a_sweep_every_case_comes_in_its_turn_and_one_at_least_under_each_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "its text"
    monkeypatch.setattr(full_run, "digest_of_test", lambda path: text)
    for count, given, fewest, most in ((3, (), 1, 1), (40, (), 5, 5), (15, (4,), 3, 4)):
        items = of_a_sweep(count, *given)
        seen = set()
        for salt in range(100):
            left = {item.nodeid for item in beyond_the_sample(items, replace(NOW, salt=str(salt)))}
            tried = [item.nodeid for item in items if item.nodeid not in left]
            assert fewest <= len(tried) <= most
            seen.update(tried)
        assert len(seen) == count
    for last in (FullRun(), replace(LAST, judge="another judge"), replace(LAST, tests={})):
        assert beyond_the_sample(of_a_sweep(40), replace(NOW, last=last)) == []
    text = "another text"
    assert beyond_the_sample(of_a_sweep(40), NOW) == []


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({}, False),
        ({"keyword": "kernel"}, True),
        ({"lf": True}, True),
        ({"args": ["tests/test_it.py::test_it[7]"]}, True),
    ],
)
def test_what_somebody_names_or_what_failed_runs_whole(changes: dict[str, Any], by_hand: bool) -> None:
    option = SimpleNamespace(**{"keyword": "", "lf": False, **changes})
    config: Any = SimpleNamespace(option=option, args=changes.get("args", ["tests"]))
    assert is_by_hand(config) is by_hand


def test_of_pages_one_of_four_is_tried_and_each_that_changed() -> None:
    pages = {f"page:docs/{number}.md": "a" for number in range(64)}
    last = FullRun("judge", {"test.py": "t"}, pages)
    now = Choice("judge", {**pages, "page:docs/7.md": "b"}, last, "commit")
    tried = [key for key in pages if now.tries([key], "test.py", "t")]
    assert "page:docs/7.md" in tried
    assert 64 / 4 / 2 < len(tried) < 64 / 4 * 2


def test_what_is_new_or_differs_is_tried_under_every_commit() -> None:
    records = RECORDS | {"solution:kernel_7": "edited", "solution:new": "new"}
    for salt in range(20):
        assert {"solution:kernel_7", "solution:new"} <= tried(replace(NOW, records=records, salt=str(salt)))


def test_a_test_of_several_records_runs_where_one_of_them_differs() -> None:
    quiet = sorted(RECORDS.keys() - tried(NOW))[:2]
    assert not NOW.tries(quiet, TEST, "its text")
    assert replace(NOW, records=RECORDS | {quiet[1]: "edited"}).tries(quiet, TEST, "its text")


@pytest.mark.parametrize("last", [FullRun(), replace(LAST, judge="another judge"), replace(LAST, tests={})])
def test_everything_is_tried_where_what_judges_has_changed_or_the_test_file_is_new(last: FullRun) -> None:
    assert tried(replace(NOW, last=last)) == set(RECORDS)


def test_everything_is_tried_in_a_test_file_that_was_edited() -> None:
    assert tried(NOW, "another text") == set(RECORDS)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    LAST.write(tmp_path / "run.json")
    assert FullRun.read(tmp_path / "run.json") == LAST
    assert FullRun.read(tmp_path / "none.json") == FullRun()


def edited(content: dict[str, Any]) -> str:
    content["records"]["solution:kernel_7"] = "digest of what was never tried"
    return json.dumps(content)


@pytest.mark.parametrize(
    "damage",
    [
        edited,
        lambda content: json.dumps({**content, "judge": "another"}),
        lambda content: json.dumps({key: value for key, value in content.items() if key != "seal"}),
        lambda content: json.dumps({**content, "more": 1}),
        lambda content: json.dumps([content]),
        lambda content: json.dumps(content)[:-9],
        lambda content: "",
    ],
)
def test_a_run_that_was_edited_or_damaged_is_none(damage: Callable[[dict[str, Any]], str], tmp_path: Path) -> None:
    LAST.write(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(damage(json.loads((tmp_path / "run.json").read_text())))
    assert FullRun.read(tmp_path / "run.json") == FullRun()


@pytest.mark.parametrize(
    ("option", "value", "whole"),
    [
        ("markexpr", "not alone", True),
        ("markexpr", "alone", False),
        ("keyword", "kernel", False),
        ("all_records", False, False),
        ("collectonly", True, False),
    ],
)
def test_only_a_run_of_everything_is_whole(
    option: str, value: Any, whole: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig, "args", ["tests"])
    monkeypatch.setattr(pytestconfig, "args_source", pytest.Config.ArgsSource.TESTPATHS)
    everything = {
        "markexpr": "",
        "keyword": "",
        "deselect": None,
        "ignore": None,
        "ignore_glob": None,
        "maxfail": 0,
        "lf": False,
    }
    for name, chosen in {**everything, "all_records": True, "collectonly": False, option: value}.items():
        monkeypatch.setattr(pytestconfig.option, name, chosen, raising=False)
    assert is_whole(pytestconfig) is whole


def test_a_whole_run_remembers_what_passed_and_nothing_that_was_skipped() -> None:
    here = Path(__file__).name
    outcomes = [
        ("passed", here, ["solution:kernel_1"]),
        ("passed", here, ["solution:kernel_2"]),
        ("skipped", here, ["solution:kernel_2"]),
    ]
    found = NOW.remembered(outcomes)
    assert NOW.remembered([*outcomes, ("passed", "conftest.py", [])]).tests.keys() == {
        here,
        "conftest.py",
    }  # of a sweep
    assert found == FullRun("judge", {here: digest_of_test(Path(__file__))}, {"solution:kernel_1": "digest 1"})


def test_a_whole_run_with_failures_remembers_the_rest() -> None:
    here = Path(__file__).name
    outcomes = [
        ("passed", "conftest.py", ["solution:kernel_1"]),
        ("passed", "conftest.py", ["solution:kernel_2"]),
        ("failed", here, ["solution:kernel_2"]),
        ("passed", here, ["solution:kernel_1"]),
    ]
    found = NOW.remembered(outcomes)
    assert found.tests.keys() == {"conftest.py"}
    assert found.records.keys() == {"solution:kernel_1"}


@pytest.mark.parametrize("place", [*JUDGES, "sandbox/scan/allowed"])
@pytest.mark.parametrize("suffix", [".py", ".txt", ".toml"])
def test_a_change_of_what_judges_changes_its_digest(place: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    before = judge_digest(tmp_path)
    file = tmp_path.joinpath("tilegym_db", place, f"module{suffix}")
    file.parent.mkdir(parents=True)
    file.write_text("limit = 1\n")
    assert judge_digest(tmp_path) != before


@pytest.mark.parametrize("name", COMPILERS)
def test_another_compiler_is_another_judge_and_another_library_is_not(name: str, tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    digests = []
    for text in (f"{name}==1\nrich==1\n", f"{name}==1\nrich==2\n", f"{name}==2\nrich==2\n"):
        pins.write_text(text)
        digests.append(judge_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("tests/part/test_it.py", True),
        ("tests/part/conftest.py", True),
        ("tests/conftest.py", True),
        ("tilegym_db/module.py", True),
        ("tilegym_db/package/inner.py", True),
        ("tilegym_db/part/deep/inner.py", True),
        ("part/page.md", False),
        ("part/record.json", False),
        ("tests/part/test_other.py", False),
        ("tests/helper.py", True),
        ("tests/part/of_the_helper.py", True),
        ("tests/unrelated.py", False),
        ("tests/other/conftest.py", False),
        ("tilegym_db/another.py", False),
    ],
)
def test_a_test_file_is_its_text_its_fixtures_what_they_import_and_the_modules_it_tests(
    changed: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_run, "ROOT", tmp_path)
    monkeypatch.setattr(full_run, "STATE", tmp_path / "tests" / "full_run.json")
    test = tmp_path / "tests" / "part" / "test_it.py"
    test.parent.mkdir(parents=True)
    test.write_text("from helper import three\nfrom tilegym_db.module import one\nfrom tilegym_db.package import two\n")
    helper = tmp_path / "tests" / "helper.py"
    helper.write_text("from part.of_the_helper import four\n")
    test.with_name("of_the_helper.py").write_text("four = 4\n")
    before = digest_of_test.__wrapped__(test)
    path = tmp_path / changed
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.read_text() + "# more\n" if path.exists() else "one = 1\n")
    assert (digest_of_test.__wrapped__(test) != before) is counts


def over_definitions(count: int, *, marked: bool) -> list[Any]:
    """As pytest collects a test with a parameter for each of so many definitions."""
    return [
        SimpleNamespace(
            nodeid=f"test_it.py::test_it[{number}]",
            callspec=SimpleNamespace(params={"name": f"operator_{number}", "size": 3}),
            get_closest_marker=lambda name: marked or None,
        )
        for number in range(count)
    ]


def test_a_test_over_most_of_the_catalog_must_say_so() -> None:
    choice = replace(NOW, records={f"definition:operator_{number}": "" for number in range(10)})
    check_marks(over_definitions(10, marked=True), choice)
    check_marks(over_definitions(3, marked=False), choice)
    with pytest.raises(pytest.UsageError, match=r"test_it.py::test_it is over shipped definitions: give it the mark"):
        check_marks(over_definitions(10, marked=False), choice)


def test_every_shipped_record_has_a_digest_of_its_own_and_is_found_by_what_tests_are_given() -> None:
    catalog = Catalog((shipped_root(),))
    choice = Choice.of_checkout(everything=True)
    assert len(set(choice.records.values())) == len(choice.records)
    for kind, records in (("definition", catalog.definitions), ("solution", catalog.solutions)):
        for name, record in records.items():
            assert f"{kind}:{name}" in choice.keys(name) & choice.keys(record) & choice.keys((record, "a workload"))
    assert choice.keys(shipped_root() / "traces/h200/norm/rms_norm.jsonl") == {"traces:h200/rms_norm"}
    with pytest.raises(pytest.UsageError, match="'rms_nrom', which names no shipped record"):
        choice.keys("rms_nrom")


def test_a_solution_is_another_where_its_definition_or_a_workload_is(
    row_scale: Path, workload_record: Callable[..., dict[str, Any]]
) -> None:
    before = full_run.record_digests()
    file = row_scale / "workloads" / "elementwise" / "row_scale.jsonl"
    file.write_text(file.read_text() + json.dumps(workload_record(axes={"M": 5, "N": 7})) + "\n")
    after = full_run.record_digests()
    assert name_of(row_scale / "traces/cpu/elementwise/row_scale.jsonl") == "cpu/row_scale"
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"definition:row_scale", "solution:row_scale_stock"}
