"""Old against new on this machine's processor: a real git repository, real workers, real times."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError
from tilegym_db.measurement.benchmark import bench
from tilegym_db.measurement.machine import cpu_slots
from tilegym_db.measurement.regress import Bars, RegressionReport, SourceHistory, regress

FAST = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
SLOW = "def run(x, weight, factor, out):\n    for _ in range(100):\n        out.copy_(x * weight * factor)\n"
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight)\n"
BARS = Bars(
    control_shift=3.0
)  # the machine that runs the tests may be busy; what is slow here is a hundred times as slow
SIZES = ({"axes": {"M": 128, "N": 256}},)


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    answer = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def root(make_catalog, tmp_path) -> Path:
    """A catalog in a folder of a repository, with one commit."""
    repository = tmp_path / "repository"
    root = repository / "kernels"
    make_catalog(root, {"row_scale_new": FAST, "row_scale_other": FAST}, SIZES)
    git(repository.parent, "init", "-q", str(repository))
    commit(repository, "both fast")
    return root


def rewrite(root: Path, source: str, name: str = "row_scale_new") -> None:
    (root / "solutions" / "elementwise" / "row_scale" / name / "kernel.py").write_text(source)


def run(root: Path, against: str, *names: str, **options: Any) -> RegressionReport:
    options = {"bars": BARS, "quick": True, "devices": "cpu"} | options
    return regress(against, names, catalog=Catalog((root,)), store_home=root.parent.parent / "home", **options)


def verdicts(report: RegressionReport) -> dict[str, str]:
    return {row.solution: row.verdict for row in report.rows}


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # times two versions; tests/cli/test_regress.py does so daily
def test_slow_version_regresses_and_the_reverse_improves(root):
    before = git(root, "rev-parse", "HEAD")
    rewrite(root, SLOW)  # not committed: the working tree is what is compared
    report = run(root, "HEAD")
    assert report.void == []
    assert verdicts(report) == {
        "row_scale_new": "regression",
        "row_scale_other": "unchanged",
        "row_scale_stock": "unchanged",
    }
    (row,) = report.findings
    assert row.commit == before[:10]
    assert row.workload == "M=128,N=256, float32"
    assert row.change is not None
    assert row.change.change > 5
    assert row.change.new_us > 5 * row.change.old_us
    commit(root, "slow")
    rewrite(root, FAST)
    back = run(root, "HEAD")
    assert verdicts(back)["row_scale_new"] == "improvement"
    assert back.findings == []


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # two devices; one finds it daily
def test_two_devices_find_the_regression_that_one_finds(root):
    rewrite(root, SLOW)
    report = run(root, "HEAD", "row_scale_new", devices=cpu_slots(2))
    assert (report.void, report.notes) == ([], [])
    assert verdicts(report) == {"row_scale_new": "regression"}
    assert report.rows[0].change is not None
    assert report.rows[0].change.change > 5


def test_only_what_is_asked_for_is_compared(root):
    rewrite(root, SLOW)
    assert verdicts(run(root, "HEAD", "row_scale_other")) == {"row_scale_other": "unchanged"}
    with raises(NotFoundError, "name_unknown", "'row_scale_new'"):
        run(root, "HEAD", "row_scale_mew")


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # times two versions; tests/cli/test_regress.py does so daily
def test_version_that_no_longer_passes_is_broken_without_times(root):
    rewrite(root, WRONG)
    report = run(root, "HEAD", bars=Bars(control_shift=-1.0, floor_us=-1.0))
    assert report.void != []
    (row,) = report.findings
    assert (row.solution, row.verdict) == ("row_scale_new", "broken")
    assert row.reason.startswith("passed before, now INCORRECT_NUMERICAL")


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # a session; one finds a regression daily
def test_control_that_differs_from_itself_cancels_a_regression(root):
    rewrite(root, SLOW)
    report = run(root, "HEAD", bars=Bars(control_shift=-1.0, floor_us=-1.0))
    assert report.void[0].startswith("row_scale M=128,N=256, float32: the control differs from itself by")
    assert report.findings == []


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # times two versions; tests/cli/test_regress.py does so daily
def test_old_version_that_fails_or_does_not_fit_is_not_compared(root):
    rewrite(root, WRONG)
    rewrite(root, FAST.replace("factor, out", "out"), "row_scale_other")
    commit(root, "wrong and of another signature")
    for name in ("row_scale_new", "row_scale_other"):
        rewrite(root, FAST, name)
    reasons = {row.solution: row.reason for row in run(root, "HEAD").rows if row.verdict == "not comparable"}
    assert reasons["row_scale_new"].startswith("the old version was not timed: INCORRECT_NUMERICAL")
    assert "does not fit today's definition" in reasons["row_scale_other"]
    assert "entry_point" in reasons["row_scale_other"]


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # two sessions; one finds a regression daily
def test_a_run_of_the_store_is_compared_with_through_its_digests(root):
    rewrite(root, FAST + "# measured\n")
    commit(root, "measured")
    rewrite(root, FAST + "# never committed\n", "row_scale_other")
    home = root.parent.parent / "home"
    measured = bench(devices="cpu", quick=True, catalog=Catalog((root,)), store_home=home)
    rewrite(root, FAST, "row_scale_other")
    rewrite(root, SLOW)
    commit(root, "slow")
    report = run(root, measured.run_id)
    found = {row.solution: row for row in report.rows}
    assert found["row_scale_new"].verdict == "regression"
    assert found["row_scale_stock"].verdict == "unchanged"
    assert found["row_scale_other"].verdict == "not comparable"
    assert "is not in any commit, so it cannot be measured again" in found["row_scale_other"].reason


def test_a_solution_that_is_new_is_not_compared(root, make_catalog):
    make_catalog(root, {"row_scale_new": FAST, "row_scale_added": FAST}, SIZES)
    found = {row.solution: row.reason for row in run(root, "HEAD").rows}
    assert found["row_scale_added"] == "did not exist at HEAD"


def test_unknown_run_or_revision_is_named_with_where_to_look(root, make_catalog, tmp_path):
    with raises(NotFoundError, "run_unknown", "'v9'", "kernels", "SELECT DISTINCT run_id"):
        run(root, "v9")
    with raises(NotFoundError, "run_unknown", "'--help'"):
        run(root, "--help")
    outside = tmp_path / "outside"
    make_catalog(outside, {}, SIZES)
    with raises(NotFoundError, "run_unknown", str(outside)):
        run(outside, "HEAD")


def test_nothing_that_was_measured_is_stored(root):
    rewrite(root, SLOW)
    run(root, "HEAD")
    assert not (root.parent.parent / "home" / "runs").exists()


def test_solution_that_moved_into_a_family_file_is_found(root):
    old = Catalog((root,)).solution("row_scale_new")
    family = root / "solutions" / "elementwise" / "scales_python"
    (root / "solutions" / "elementwise" / "row_scale" / "row_scale_new").rename(family)
    (family / "solution.json").rename(family / "row_scale_new.json")
    before = commit(root, "beside its kernel")
    record = json.loads((family / "row_scale_new.json").read_text())
    (family / "row_scale_new.json").unlink()
    shared = {key: record.pop(key) for key in ("author", "spec")}
    member = {key: record[key] for key in ("name", "definition", "description") if key in record}
    (family / "family.json").write_text(json.dumps({**shared, "solutions": [member]}))
    (family / "kernel.py").write_text(FAST + "# in its family\n")
    after = commit(root, "in the file of its family")
    now = Catalog((root,)).solution("row_scale_new")
    (family / "family.json").write_text(json.dumps({**shared, "solutions": [{**member, "name": "other"}]}))
    without = commit(root, "under another name")
    history = SourceHistory(now.root)
    found = {name: history.at(name, now) for name in (before, after, without)}
    assert [version and version.digest for version in found.values()] == [old.digest, now.digest, None]
    assert history.with_digest(now, old.digest) is not None


def test_solution_moved_to_its_family_is_found_in_its_old_place(root):
    before = git(root, "rev-parse", "HEAD")
    own = root / "solutions" / "elementwise" / "row_scale" / "row_scale_new"
    old = Catalog((root,)).solution("row_scale_new")
    family = own.parent.parent / "scales_python"
    own.rename(family)
    (family / "solution.json").rename(family / "row_scale_new.json")
    moved = Catalog((root,)).solution("row_scale_new")
    assert (moved.folder, moved.digest) == (family, old.digest)
    (family / "kernel.py").write_text(FAST + "# in its family\n")
    after = commit(root, "moved")
    now = Catalog((root,)).solution("row_scale_new")
    history = SourceHistory(now.root)
    found = {name: history.at(name, now) for name in (before, after)}
    assert {name: version and version.digest for name, version in found.items()} == {
        before: old.digest,
        after: now.digest,
    }
    for digest, where in ((old.digest, before), (now.digest, after)):
        version = history.with_digest(now, digest)
        assert version is not None
        assert version.commit == where
