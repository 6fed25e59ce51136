"""Nothing is lost: every writer is killed at some of twenty moments, and races itself and the others, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import writing
from sample import SAMPLE
from writing import BY_TIME, WRITERS, Place

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.catalog.writers import read_lock
from tilegym_db.loop.submit import folder_digest
from tilegym_db.loop.tasks import attempts_at
from tilegym_db.records.loop import Attempt
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store.imported import data_sets
from tilegym_db.store.journal import read_journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import count_traces
from tilegym_db.store.sharing import SharedDataSet
from tilegym_db.store.side_files import TuningStep, journaled, read_model_run

MOMENTS = 20
ONE_OF = 5
"""One of so many moments is tried, which ones changes with the day; every one in a run of everything."""
STEPWISE = [name for name in WRITERS if name not in BY_TIME]


@pytest.fixture
def place(row_scale: Path, home: Path) -> Place:
    """The small operator in a checkout, a journal with four passes, and a file of the user's in every folder."""
    place = Place(row_scale, home)
    for folder in ("definitions/elementwise", "solutions/elementwise/row_scale", "workloads/elementwise", "traces"):
        (row_scale / folder / "notes.txt").write_text("the user's own")
    assert writing.run([("journal", "first_0")], place)[0].kind == "done"
    return place


@pytest.fixture
def moments(pytestconfig: pytest.Config) -> list[int]:
    """The moments of 1 to ``MOMENTS`` that this run tries."""
    return [number + 1 for number in pytestconfig.stash[SAMPLE].cases(MOMENTS, ONE_OF)]


def check_whole(place: Place) -> None:
    """Every file holds whole records, and what was there before is there."""
    catalog = Catalog((place.root,))
    assert [broken for broken in catalog.broken() if "notes.txt" not in broken.reason] == []
    assert "row_scale" in catalog.definitions
    assert "row_scale_stock" in catalog.solutions
    assert catalog.workloads_for("row_scale")[0].axes == {"M": 4, "N": 8}
    assert "row_scale" in read_lock(place.root)
    assert len(list(place.root.rglob("notes.txt"))) == 4
    assert len(read_journal(place.home / "runs" / "first_0.jsonl").traces) == 4
    for path in (place.home / "peaks").glob("*.json"):
        GpuPeaks.from_json(path.read_bytes(), path)
    for path in (place.home / "model_runs").glob("*.json"):
        read_model_run(path, place.home)
    for path in place.root.glob("traces/*/*/*.jsonl"):
        assert read_journal(path).rejected == ()
    for path in place.root.glob("traces/*/*.json"):
        json.loads(path.read_bytes())
    for found in data_sets(place.home):
        for file in found.files:
            assert found.content(file.path) == (place.beside / "foreign" / found.name / file.path).read_bytes()
    for path in place.beside.glob("exports/[a-z]*"):
        told = json.loads((path / "tilegym_db" / "export.json").read_bytes())
        exported = {file.stem for file in path.glob("definitions/*/*.json")}
        assert exported == set(told["definitions"])
        assert exported
    shared_traces(place)
    # The numbering of attempts reads and appends under one lock: no number is given twice.
    numbered = {(one.task, one.number, one.solution_digest) for one in journaled(Attempt, place.home)}
    assert len({(task, number) for task, number, _ in numbered}) == len(numbered)


def shared_traces(place: Place) -> list[str]:
    """The ids of every trace of the data set that is shared from here, once each; every file of it is whole."""
    data_set = SharedDataSet(str(place.beside / "team"))
    ids, problems = data_set.trace_ids(data_set.files())
    assert problems == []
    return sorted(ids)


def landed(place: Place, name: str, key: str) -> bool:
    """Whether what a writer writes under a key is there, whole."""
    catalog, number = Catalog((place.root,)), int(key.rpartition("_")[2])
    match name:
        case "add_definition" | "update_lock":
            return key in catalog.definitions and key in read_lock(place.root)
        case "add_version":
            newest = max(int(version.split(".")[1]) for version in read_lock(place.root)["row_scale"])
            return newest >= number + 1 and catalog.definition("row_scale").version == f"1.{newest}.0"
        case "add_solution":
            return set(catalog.solution(key).sources) == {"kernel.py", "parts/rows.py"}
        case "add_workload":
            return sum(workload.axes["M"] == 1000 + number for workload in catalog.workloads_for("row_scale")) == 1
        case "journal" | "ingest":
            return len({trace.trace_id for trace in read_journal(place.home / "runs" / f"{key}.jsonl").traces}) == 4
        case "search":
            lines = (place.home / "tuning" / f"{key}.jsonl").read_bytes().splitlines()
            return len({TuningStep.from_json(line).config["BLOCK"] for line in lines if line.endswith(b"}")}) == 3
        case "peaks":
            return any(f"{1_700_000_000 + number}" in str(GpuPeaks.from_json(path.read_bytes()).timestamp.timestamp())
                       for path in (place.home / "peaks").glob("*.json"))  # fmt: skip
        case "model_run":
            return (place.home / "model_runs" / f"{key}.json").is_file()
        case "import_set":
            return [len(found.records) for found in data_sets(place.home) if found.name == key] == [3]
        case "export":
            return (place.beside / "exports" / key / "tilegym_db" / "export.json").is_file()
        case "share":
            return {trace.trace_id for trace in read_journal(place.home / "runs" / "first_0.jsonl").traces} <= set(
                shared_traces(place)
            )
        case "create_task":
            return len(writing.tasks_at(place, writing.bar_of(key))) == 1
        case "submit_kernel":
            (task,) = writing.tasks_at(place, writing.SUBMITTED_BAR)
            folder = place.beside / "handed_in" / key
            digests = (
                SolutionFiles.read(folder).digest,
                folder_digest(folder),
            )  # the second, of one refused as it came in
            attempts = [one for one in attempts_at(task, place.home) if one.solution_digest in digests]
            (attempt,) = attempts  # a new version that landed before it is a reason to refuse it
            return (attempt.verdict, attempt.stage) == (
                "no_gpu", "compiled",
            ) or "row_scale changed since the task" in attempt.reason  # fmt: skip
        case _:
            return True


# Processes that are killed; a kill of the loop is tried daily.
@pytest.mark.turn(
    "tilegym_db/store/", "tilegym_db/catalog/", "tilegym_db/files.py", "tilegym_db/published/", "tests/writing.py"
)
@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", STEPWISE)
def test_killed_writer_loses_nothing_and_its_work_repeats(name: str, place: Place, moments: list[int]):
    # The first also makes folders, and the database that some of them ask.
    _, whole = (writing.run([(name, key)], place)[0] for key in ("key_0", "key_1"))
    assert whole.kind == "done"
    assert landed(place, name, "key_1")
    steps = sorted({1 + round((moment - 1) * (whole.steps - 1) / (MOMENTS - 1)) for moment in moments})
    for index, step in enumerate(steps, start=2):
        key = f"key_{index}"
        (ending,) = writing.run([(name, key)], place, kill_at=step)
        assert ending.kind == "killed", (step, whole.steps)
        check_whole(place)
        (again,) = writing.run([(name, key)], place)
        assert again.kind == "done" or "exist" in again.said, again.said
        assert landed(place, name, key), (step, whole.steps)
        check_whole(place)


# Processes that are killed; a kill of the loop is tried daily.
@pytest.mark.turn("tilegym_db/store/", "tilegym_db/files.py", "tilegym_db/published/", "tests/writing.py")
@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", BY_TIME)
def test_killed_writer_of_the_database_loses_nothing(name: str, place: Place, moments: list[int]):
    (whole,) = writing.run([("ingest", "first_1")], place)
    assert whole.kind == "done"
    (whole,) = writing.run([(name, "key_0")], place)
    assert whole.kind == "done", whole.said
    killed = 0
    for index in moments:
        key = f"key_{index}"
        (ending,) = writing.run([(name, key)], place, kill_after_s=whole.seconds * (index - 0.5) / MOMENTS)
        killed += ending.kind == "killed"
        check_whole(place)
    assert killed >= len(moments) // 4  # the later ones come too late on a machine that is less busy by now
    assert writing.run([("ingest", "last_0")], place)[0].kind == "done"
    assert writing.run([("publish", "last_1")], place)[0].kind == "done"
    assert writing.run([("share", "last_2")], place)[0].kind == "done"
    own = sum(len(read_journal(path).traces) for path in (place.home / "runs").glob("*.jsonl"))
    others = 0
    if name == "sync":
        keys = [f"key_{index}" for index in (0, *moments)]
        assert {writing.run([(name, key)], place)[0].kind for key in keys} == {"done"}
        others = 4 * len(keys)
    with open_store(place.home, catalog=Catalog((place.root,)), lock_timeout_s=60) as store:
        assert count_traces(store) == own + others
    assert len(shared_traces(place)) == own
    check_whole(place)


@pytest.mark.turn("tests/writing.py", "tilegym_db/files.py")  # several processes; all writers at once are tried daily
@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", WRITERS)
def test_writer_that_races_itself_lands_or_is_refused_by_reason(name: str, place: Place):
    keys = ["same_1"] * 3 + ["other_2", "third_3"]
    endings = writing.run([(name, key) for key in keys], place)
    assert all(ending.kind == "done" or (ending.kind == "refused" and ending.said) for ending in endings), endings
    check_whole(place)
    for key, ending in zip(keys, endings, strict=True):
        if ending.kind == "done":
            assert landed(place, name, key)
    same = [ending for key, ending in zip(keys, endings, strict=True) if key == "same_1"]
    if name in ("add_definition", "add_solution"):  # adding the same bytes again is no error
        assert [ending.kind for ending in same] == ["done", "done", "done"]
        assert [ending.kind for ending in endings[3:]] == ["done", "done"]
    # A version that is not newer than one that landed is refused: where the newest came first, all of the others are.
    assert any(ending.kind == "done" for ending in (endings if name == "add_version" else same))


@pytest.mark.turn("tilegym_db/catalog/writers.py", "tilegym_db/files.py")  # many processes
@pytest.mark.slow
def test_all_writers_at_once_all_land(place: Place):
    writers = [(name, f"{name}_{number}") for number, name in enumerate(WRITERS)]
    endings = {name: ending for (name, _), ending in zip(writers, writing.run(writers, place), strict=True)}
    publication = endings.pop("publish")
    assert {name: (ending.kind, ending.said) for name, ending in endings.items()} == dict.fromkeys(
        endings, ("done", "")
    )
    # Passes of an older version do not count: between the new version and the next passes there is nothing to publish.
    assert publication.kind == "done" or publication.said.startswith("no verified trace on 'h200'"), publication
    check_whole(place)
    for name, key in writers:
        assert landed(place, name, key), name
    again = writing.run([("ingest", "last_0")], place) + writing.run([("publish", "last_1")], place)
    assert [(ending.kind, ending.said) for ending in again] == [("done", "")] * 2


def test_eight_processes_that_add_workloads_lose_no_line(place: Place):
    endings = writing.run([("add_workload", f"key_{number}") for number in range(8)], place)
    assert [ending.kind for ending in endings] == ["done"] * 8
    sizes = [workload.axes["M"] for workload in Catalog((place.root,)).workloads_for("row_scale")]
    assert sorted(sizes) == [4, *range(1000, 1008)]


def test_four_processes_adding_one_name_leave_one_whole_solution(place: Place):
    endings = writing.run([("add_solution", "draft_0")] * 4, place)
    assert [ending.kind for ending in endings] == ["done"] * 4
    assert landed(place, "add_solution", "draft_0")
