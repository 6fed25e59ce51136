from __future__ import annotations

from pathlib import Path

import pytest
from full_run import COMPILERS, JUDGES, SAMPLE, FullRun, choose, judge_digest, record_digests, select

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root

DIGESTS = {f"solution:kernel_{number}": f"digest {number}" for number in range(400)}
LAST = FullRun("judge", DIGESTS)


def test_where_nothing_changed_a_sample_is_tried_that_another_commit_changes() -> None:
    first, second = (choose(DIGESTS, LAST, "judge", salt) for salt in ("one commit", "another"))
    assert first != second
    for chosen in (first, second):
        assert len(DIGESTS) / SAMPLE / 2 < len(chosen) < len(DIGESTS) / SAMPLE * 2


def test_what_is_new_or_differs_is_tried_under_every_commit() -> None:
    now = DIGESTS | {"solution:kernel_7": "edited", "solution:new": "new"}
    assert all({"solution:kernel_7", "solution:new"} <= choose(now, LAST, "judge", str(salt)) for salt in range(20))


@pytest.mark.parametrize("last", [FullRun(), FullRun("another judge", DIGESTS)])
def test_everything_is_tried_where_what_judges_has_changed(last: FullRun) -> None:
    assert choose(DIGESTS, last, "judge", "any") == frozenset(DIGESTS)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    LAST.write(tmp_path / "run.json")
    assert FullRun.read(tmp_path / "run.json") == LAST
    assert FullRun.read(tmp_path / "none.json") == FullRun()


@pytest.mark.parametrize("folder", JUDGES)
def test_a_change_of_what_judges_changes_its_digest(folder: str, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    before = judge_digest(tmp_path)
    file = tmp_path / "tilegym_db" / folder / "module.py"
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


def test_every_shipped_record_has_a_digest_of_its_own() -> None:
    catalog = Catalog((shipped_root(),))
    digests = record_digests(catalog)
    assert len(digests) == len(catalog.definitions) + len(catalog.solutions)
    assert len(set(digests.values())) == len(digests)
    assert select(catalog.solutions, "solution", frozenset(digests)) == list(catalog.solutions)
