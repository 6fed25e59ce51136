"""The sample of a day: which records and cases run, what counts as a change, and that all processes choose the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sample
from sample import (
    COMPILERS,
    JUDGES,
    MAX_CHANGED,
    MAX_CHANGED_FILES,
    MAX_CHANGED_PAGES,
    ONE_OF,
    ONE_OF_CHANGED,
    ONE_OF_FILES,
    ROOT,
    TURN,
    Sample,
    base_of,
    cases_in_turn,
    check_marks,
    code_of,
    is_by_hand,
    judge_changed,
    left_to_other_days,
    name_of,
    record_digests,
)

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root

RECORDS = {f"solution:kernel_{number}": f"digest {number}" for number in range(3200)}
NOW = Sample("2026-11-28", RECORDS, base="a commit")


def days(count: int) -> list[str]:
    return [(date(2026, 11, 28) + timedelta(days=number)).isoformat() for number in range(count)]


def tried(choice: Sample) -> set[str]:
    return {key for key in choice.records if choice.tries([key])}


@pytest.mark.parametrize(("judge_changed", "one_of"), [(False, ONE_OF), (True, ONE_OF_CHANGED)])
def test_every_record_has_its_turn_once(judge_changed: bool, one_of: int) -> None:
    choices = [tried(replace(NOW, day=day, judge_changed=judge_changed)) for day in days(one_of)]
    assert set.union(*choices) == set(RECORDS)
    assert sum(map(len, choices)) == len(RECORDS)
    for chosen in choices:
        assert len(RECORDS) / one_of / 3 < len(chosen) < len(RECORDS) / one_of * 3


def test_records_that_changed_are_tried_every_day() -> None:
    changed = frozenset(sorted(RECORDS)[:MAX_CHANGED])
    for day in days(ONE_OF):
        assert changed <= tried(replace(NOW, changed=changed, day=day))


def test_more_changed_records_than_the_limit_take_turns() -> None:
    changed = frozenset(sorted(RECORDS)[: 3 * MAX_CHANGED])
    choices = [replace(NOW, changed=changed, day=day) for day in days(3)]
    assert set.union(*map(tried, choices)) >= changed
    for choice in choices:
        assert f" {MAX_CHANGED} of {3 * MAX_CHANGED} that changed since a commit" in choice.header()


def test_changed_pages_have_a_limit_of_their_own() -> None:
    pages = {f"page:docs/{number}.md": "" for number in range(9)}
    choice = replace(NOW, records=RECORDS | pages, changed=frozenset([*pages, "solution:kernel_7"]))
    assert "solution:kernel_7" in choice.changed_in_turn
    assert 0 < len(choice.changed_in_turn) - 1 <= MAX_CHANGED_PAGES


def test_a_test_of_several_records_runs_if_one_is_tried() -> None:
    quiet = sorted(RECORDS.keys() - tried(NOW))[:2]
    assert not NOW.tries(quiet)
    assert replace(NOW, changed=frozenset([quiet[1]])).tries(quiet)


def test_everything_is_every_record_and_every_case() -> None:
    everything = replace(NOW, everything=True)
    assert tried(everything) == set(RECORDS)
    assert list(everything.cases(9, 3)) == list(range(9))
    assert cases_in_turn(of_a_sweep(40), everything) == list(range(40))


def test_another_process_reads_the_same_sample() -> None:
    choice = replace(NOW, changed=frozenset(list(RECORDS)[:2]), judge_changed=True)
    assert Sample.from_json(choice.to_json()) == choice


def test_the_header_names_the_variable_that_repeats_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_DB_SAMPLE", "2025-02-03")
    monkeypatch.setattr(sample, "record_digests", lambda root: RECORDS)
    monkeypatch.setattr(sample, "base_of", lambda root: "")
    choice = Sample.of_checkout()
    assert "TILEGYM_DB_SAMPLE=2025-02-03 repeats this sample" in choice.header()
    assert "no base to find the changed ones by" in choice.header()
    assert tried(choice) == tried(replace(NOW, day="2025-02-03"))


@pytest.mark.parametrize(
    ("variable", "value"), [("TILEGYM_DB_SAMPLE", "yesterday"), ("TILEGYM_DB_BASE", "no_such_commit")]
)
def test_a_bad_day_or_base_is_refused(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sample, "record_digests", lambda root: RECORDS)
    with pytest.raises(pytest.UsageError, match=f"{variable} is '{value}', which is no "):
        Sample.of_checkout()


def of_a_sweep(count: int, *given: int) -> list[tuple[dict[str, int], list[pytest.Mark]]]:
    """The cases of a test with the mark ``sweep``."""
    return [({"number": number}, [pytest.mark.sweep(*given).mark]) for number in range(count)]


@pytest.mark.parametrize(
    ("count", "given", "fewest", "most"), [(3, (), 1, 1), (40, (), 5, 5), (15, (4,), 3, 4), (2, (3,), 1, 1)]
)
def test_every_case_of_a_sweep_has_its_turn(count: int, given: tuple[int, ...], fewest: int, most: int) -> None:
    seen = set()
    for day in days(8):
        chosen = cases_in_turn(of_a_sweep(count, *given), replace(NOW, day=day))
        assert fewest <= len(chosen) <= most
        seen.update(chosen)
    assert len(seen) == count


def of_records(keys: list[str]) -> list[tuple[dict[str, str], list[pytest.Mark]]]:
    """The cases of a test with the mark ``records``, one of each record."""
    return [({}, [pytest.mark.records(of=key.partition(":")[2]).mark]) for key in keys]


def test_a_test_of_records_without_a_turn_runs_with_one() -> None:
    waiting = sorted(RECORDS.keys() - tried(NOW))[:5]
    assert len(cases_in_turn(of_records(waiting), NOW)) == 1
    assert all(cases_in_turn(of_records(waiting), replace(NOW, day=day)) for day in days(64))
    assert cases_in_turn(of_records([*waiting, min(tried(NOW))]), NOW) == [5]


@pytest.mark.parametrize("changed", [frozenset(), frozenset({"solution:kernel_7"})])
def test_a_sweep_over_one_record_runs_a_case_every_day(changed: frozenset[str]) -> None:
    marks = [pytest.mark.records(of="kernel_7").mark, pytest.mark.sweep.mark]
    cases = [({"routing": number}, marks) for number in range(22)]
    seen = set()
    for day in days(len(cases)):
        chosen = cases_in_turn(cases, replace(NOW, day=day, changed=changed))
        assert 1 <= len(chosen) <= 3
        seen.update(chosen)
    assert seen == set(range(len(cases)))


def of_slow_files(count: int, *tested: str) -> list[Any]:
    """As pytest collects two tests of each of so many files with the mark ``turn``."""
    return [
        SimpleNamespace(
            nodeid=f"tests/test_file_{number}.py::test_{name}",
            iter_markers=lambda name: [SimpleNamespace(args=tested, kwargs={})] if name == TURN else [],
            get_closest_marker=lambda name: None,
        )
        for number in range(count)
        for name in ("one", "other")
    ]


def test_slow_tests_of_a_file_have_their_turn_together() -> None:
    items, seen = of_slow_files(80), []
    for day in days(ONE_OF_FILES):
        left = {item.nodeid for item in left_to_other_days(items, replace(NOW, day=day))}
        chosen = [item.nodeid for item in items if item.nodeid not in left]
        assert 8 <= len(chosen) <= 40
        assert {chosen.count(node.replace("other", "one")) for node in chosen} == {1}
        seen += chosen
    assert sorted(seen) == sorted(item.nodeid for item in items)
    assert left_to_other_days(items, replace(NOW, everything=True)) == []


@pytest.mark.parametrize("changed", ["tests/test_file_3.py", "tools/bundle.py", "tools/site/page.py"])
def test_slow_tests_run_if_what_they_test_changed(changed: str) -> None:
    items, choice = (
        of_slow_files(MAX_CHANGED_FILES, "tools/bundle.py", "tools/site/"),
        replace(NOW, changed_files=frozenset({changed})),
    )
    left = {item.nodeid for item in left_to_other_days(items, choice)}
    assert (left == set()) == changed.startswith("tools/")


def test_slow_tests_of_many_changes_take_turns() -> None:
    items, seen = of_slow_files(5 * MAX_CHANGED_FILES, "tools/"), set()
    for day in days(ONE_OF_FILES):
        choice = replace(NOW, day=day, changed_files=frozenset({"tools/bundle.py"}))
        left = {item.nodeid for item in left_to_other_days(items, choice)}
        of_the_day = {item.nodeid for item in items} - {
            item.nodeid for item in left_to_other_days(items, replace(NOW, day=day))
        }
        assert len(items) - len(left) <= 2 * MAX_CHANGED_FILES + len(of_the_day)
        seen |= {item.nodeid for item in items} - left
    assert len(seen) == len(items)


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({}, False),
        ({"keyword": "kernel"}, True),
        ({"lf": True}, True),
        ({"args": ["tests/test_it.py::test_it[7]"]}, True),
    ],
)
def test_tests_that_are_named_or_that_failed_run_whole(changes: dict[str, Any], by_hand: bool) -> None:
    option = SimpleNamespace(**{"keyword": "", "lf": False, **changes})
    config: Any = SimpleNamespace(option=option, args=changes.get("args", ["tests"]))
    assert is_by_hand(config) is by_hand


SOURCE = '''"""A module."""
LIMIT = 1
"""A limit."""
class It:
    """A class."""
    def run(self, x):
        """Run."""
        return x + "text"  # a reason
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("A module.", "Another text.", True),
        ("A limit.", "Another text.", True),
        ("A class.", "Another text.", True),
        ('        """Run."""\n', "", True),
        ("  # a reason", "\n\n", True),
        ("LIMIT = 1", "LIMIT = 2", False),
        ('"text"', '"another"', False),
        ("x + ", "", False),
    ],
)
def test_code_is_what_python_runs_of_a_source(old: str, new: str, same: bool) -> None:
    assert old in SOURCE
    assert (code_of(SOURCE.encode()) == code_of(SOURCE.replace(old, new).encode())) is same


@pytest.fixture
def two_checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """The same judge twice: a module and a table in every folder that judges, and the pins."""
    roots = tmp_path / "before", tmp_path / "now"
    for root in roots:
        for name in JUDGES:
            (root / "tilegym_db" / name).mkdir(parents=True)
            (root / "tilegym_db" / name / "module.py").write_text(SOURCE)
            (root / "tilegym_db" / name / "table.toml").write_text("limit = 1\n")
        (root / "constraints.txt").write_text("".join(f"{name}==1\n" for name in (*COMPILERS, "rich")))
    return roots


@pytest.mark.parametrize("place", JUDGES)
def test_a_change_of_what_judges_is_seen_and_a_docstring_is_not(place: str, two_checkouts: tuple[Path, Path]) -> None:
    before, now = two_checkouts
    folder = now / "tilegym_db" / place
    (folder / "module.py").write_text(SOURCE.replace("A class.", "Another text."))
    assert not judge_changed(before, now)
    for name, content in (("module.py", SOURCE.replace("LIMIT", "MAX")), ("table.toml", ""), ("more.py", "")):
        kept = (folder / name).read_text() if (folder / name).exists() else None
        (folder / name).write_text(content)
        assert judge_changed(before, now), name
        (folder / name).unlink() if kept is None else (folder / name).write_text(kept)
    (folder / "table.toml").unlink()
    assert judge_changed(before, now)


@pytest.mark.parametrize(("name", "changed"), [*((name, True) for name in COMPILERS), ("rich", False)])
def test_another_compiler_is_another_judge(name: str, changed: bool, two_checkouts: tuple[Path, Path]) -> None:
    before, now = two_checkouts
    pins = now / "constraints.txt"
    pins.write_text(pins.read_text().replace(f"{name}==1\n", f"{name}==2\n"))
    assert judge_changed(before, now) is changed


def test_the_tables_of_judges_name_what_exists() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in JUDGES if not any((ROOT / "tilegym_db" / name).glob("*.py"))] == []
    assert set(COMPILERS) <= pinned


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A repository on ``main``; the function runs git in it, at a date."""
    monkeypatch.delenv("TILEGYM_DB_BASE", raising=False)

    def git(*arguments: str, at: str = "2026-11-28T12:00:00Z") -> str:
        for name in ("GIT_COMMITTER_DATE", "GIT_AUTHOR_DATE"):
            monkeypatch.setenv(name, at)
        names = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        command = ["git", *names, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q", "-b", "main")
    return git


def test_the_base_of_a_branch_is_where_it_left_main(repository: Callable[..., str], tmp_path: Path) -> None:
    repository("commit", "-q", "--allow-empty", "-m", "first")
    first = repository("rev-parse", "HEAD")
    repository("checkout", "-q", "-b", "branch")
    repository("commit", "-q", "--allow-empty", "-m", "second")
    assert base_of(tmp_path) == first


def test_the_base_of_main_is_a_day_older(repository: Callable[..., str], tmp_path: Path) -> None:
    commits = []
    for day in (26, 27, 28):
        repository("commit", "-q", "--allow-empty", "-m", str(day), at=f"2026-11-{day}T12:00:00Z")
        commits.append(repository("rev-parse", "HEAD"))
    assert base_of(tmp_path) == commits[1]


def test_a_first_commit_and_a_folder_without_git_have_no_base(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository("commit", "-q", "--allow-empty", "-m", "first")
    assert base_of(tmp_path) == ""
    (tmp_path / ".git").rename(tmp_path / "gone")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert base_of(tmp_path) == ""


def test_a_checkout_is_compared_with_the_files_of_its_base(
    repository: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    (tmp_path / "README.md").write_text("one")
    for name in JUDGES:
        (tmp_path / "tilegym_db" / name).mkdir(parents=True)
        (tmp_path / "tilegym_db" / name / "module.py").write_text(SOURCE)
    repository("add", "README.md", "constraints.txt", "tilegym_db")
    repository("commit", "-q", "-m", "first")
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    monkeypatch.setattr(sample, "shipped_root", lambda: tmp_path)
    monkeypatch.setenv("TILEGYM_DB_BASE", "main")
    unchanged = Sample.of_checkout()
    assert (unchanged.changed, unchanged.judge_changed, unchanged.changed_files) == (frozenset(), False, frozenset())
    (tmp_path / "new.py").touch()
    (tmp_path / "README.md").write_text("two")
    (tmp_path / "tilegym_db" / JUDGES[0] / "module.py").write_text("LIMIT = 2\n")
    changed = Sample.of_checkout()
    assert (changed.changed, changed.judge_changed) == (frozenset({"page:README.md"}), True)
    assert changed.changed_files == {"README.md", "new.py", f"tilegym_db/{JUDGES[0]}/module.py"}


def over_definitions(count: int, *, marked: bool) -> list[Any]:
    """As pytest collects a test with a parameter for each of so many definitions."""
    return [
        SimpleNamespace(
            nodeid=f"test_it.py::test_it[{number}]",
            callspec=SimpleNamespace(params={"name": f"operator_{number}", "size": 3}),
            iter_markers=lambda name: [],
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


def test_a_mark_of_a_path_that_is_gone_is_refused() -> None:
    check_marks(of_slow_files(1, "tests/sample.py", "tilegym_db/sandbox/", "benchmarks/soak"), NOW)
    with pytest.raises(
        pytest.UsageError, match=r"test_file_0.py::test_other has the mark 'turn' with 'tilegym_db/gone.py'"
    ):
        check_marks(of_slow_files(1, "tilegym_db/gone.py"), NOW)


def test_every_shipped_record_has_its_digest_and_is_found() -> None:
    catalog = Catalog((shipped_root(),))
    choice = Sample.of_checkout(everything=True)
    assert len(set(choice.records.values())) == len(choice.records)
    for kind, records in (("definition", catalog.definitions), ("solution", catalog.solutions)):
        for name, record in records.items():
            assert f"{kind}:{name}" in choice.keys(name) & choice.keys(record) & choice.keys((record, "a workload"))
    assert choice.keys(shipped_root() / "traces/h200/norm/rms_norm.jsonl.gz") == {"traces:h200/rms_norm"}
    with pytest.raises(pytest.UsageError, match="'rms_nrom', which names no shipped record"):
        choice.keys("rms_nrom")


def test_a_solution_changes_with_its_definition_and_workloads(
    row_scale: Path, workload_record: Callable[..., dict[str, Any]]
) -> None:
    before = record_digests(row_scale)
    file = row_scale / "workloads" / "elementwise" / "row_scale.jsonl"
    file.write_text(file.read_text() + json.dumps(workload_record(axes={"M": 5, "N": 7})) + "\n")
    after = record_digests(row_scale)
    assert name_of(row_scale / "traces/cpu/elementwise/row_scale.jsonl.gz") == "cpu/row_scale"
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"definition:row_scale", "solution:row_scale_stock"}
