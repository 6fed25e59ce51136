"""What becomes of a kernel with an award that an experiment discards: it stays in the catalog, and is not published."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_authors import GOOD
from writing import trace_of

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.loop import auto as auto_module
from tilegym_db.loop import auto as trial_module
from tilegym_db.loop.auto import Trial, auto_kernelize
from tilegym_db.loop.from_model import ModelPieces, Piece, coverage_of
from tilegym_db.loop.submit import enter, leave, submit
from tilegym_db.loop.tasks import discarded
from tilegym_db.measurement.drafts import candidate_root
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.published.input_files import unpacked
from tilegym_db.records.loop import Attempt, Coverage, Estimate, Experiment, Task
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish
from tilegym_db.store.side_files import append, journaled, loop_lock

HandIn = Callable[..., Path]
FAILED = "the proof says no"


class Model:
    """A model of which one operator is worth a kernel; with it, a proof on the model's own calls fails."""

    machine = cpu_machine()

    def __init__(self, tag: str, failed: str = FAILED) -> None:
        self.tag, self.digest, self.failed = tag, (tag[0].encode().hex() * 32)[:64], failed

    def pieces(self) -> ModelPieces:
        work = tuple(Catalog.default().workloads_for("row_scale"))
        return ModelPieces(self.tag, "cpu", 1.0, [Piece("Scale", 0.5, 1, "row_scale", "exact", work)])

    def coverage(self) -> Coverage:
        return coverage_of([0.0] * 5, "cpu")

    def run(self) -> tuple[Any, list[str]]:
        estimate = Estimate(median=1.2, ci_low=1.1, ci_high=1.3)
        return SimpleNamespace(run_id="a-run", total_speedup=estimate), [self.failed]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The digests that each trial left out of what it published."""
    left_out: list[set[str]] = []

    def publish(store: object, gpu: str, *, own: bool, without: Collection[str]) -> None:
        left_out.append(set(without))

    monkeypatch.setattr(trial_module, "publish", publish)
    monkeypatch.setattr(auto_module, "save_model_run", lambda run, where: None)
    return left_out


@pytest.fixture
def loop(
    operator: Path, home: Path, hand_in: HandIn, published: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Experiment], list[str]]]:
    """``loop(Model("a"), by="task submit")``: run the loop; its author's kernel is promoted without being measured."""

    def judged(task: Task, folder: Path, root: Path | None) -> Attempt:
        catalog, files = Catalog.default(), SolutionFiles.read(folder)
        definition = catalog.definition("row_scale")
        candidate = enter(definition, files, catalog, home)
        leave(definition, candidate, catalog, home, root)
        attempt = Attempt(
            task=task.id, number=1, solution=candidate.name, solution_digest=candidate.digest, stage="promoted",
            verdict="promoted", timestamp=datetime.now(UTC), promotions=("python_row_scale_v1",),
        )  # fmt: skip
        with loop_lock(home):
            append(attempt, home)
        return attempt

    def run(model: Model, by: str = "the loop", source: str = GOOD) -> tuple[list[Experiment], list[str]]:
        folder, said = hand_in(source), []

        def write(command: str, prompt: str, into: Path, catalog: Catalog, limit_s: float) -> None:
            into.mkdir(parents=True)
            if by == "task submit":
                judged(journaled(Task, home)[-1], folder, None)
                (into / auto_module.SUBMITTED).touch()

        def judge(task: Task, into: Path, *, home: Path, root: Path) -> Attempt:
            return judged(task, folder, root)

        monkeypatch.setattr(auto_module, "run_author", write)
        monkeypatch.setattr(auto_module, "submit", judge)
        done, _ = auto_kernelize(model, language="python", author="x", home=home, say=said.append)  # type: ignore[arg-type]
        return done, said

    return run


def kernels() -> list[str]:
    return sorted(name for name in Catalog.default().solutions if name.startswith("row_scale_python_"))


def test_discard_removes_what_the_loop_added_to_the_catalog(
    loop: Callable[..., tuple[list[Experiment], list[str]]], home: Path
) -> None:
    (experiment,), said = loop(Model("a"))
    assert experiment.decision == "discard"
    assert FAILED in experiment.reason
    assert kernels() == []
    assert [path.name for path in candidate_root(home).glob("solutions/*/*/*")] == list(experiment.changed)
    assert not any("stays" in text for text in said)


@pytest.mark.parametrize("installed", [False, True])
def test_submitted_solution_stays_unpublished_by_later_trials(
    installed: bool,
    loop: Callable[..., tuple[list[Experiment], list[str]]],
    published: list[set[str]],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a wheel both write to the user's overlay; in a checkout ``task submit`` writes to that."""
    if installed:
        monkeypatch.setattr(Catalog, "write_root", property(lambda _: home / "catalog"))
    (first,), said = loop(Model("a"), by="task submit")
    assert first.decision == "discard"
    assert kernels() == list(first.changed)
    (line,) = [text for text in said if "stays verified and in the catalog" in text]
    assert line.startswith(next(iter(first.changed)))
    assert str(Catalog.default().solution_paths[kernels()[0]].parent) in line
    assert line.endswith("tilegym-db publish --gpu cpu")
    assert discarded("cpu", home) == set(first.changed.values())
    (second,), _ = loop(Model("b"), source=f"{GOOD}# another\n")
    assert published == [set(), set(first.changed.values())]
    assert second.changed.keys().isdisjoint(first.changed)


def test_kernel_kept_by_a_later_experiment_is_not_discarded(
    loop: Callable[..., tuple[list[Experiment], list[str]]], home: Path
) -> None:
    (first,), _ = loop(Model("a"), by="task submit")
    kept = {**first.model_dump(), "id": "f" * 32, "decision": "keep", "timestamp": datetime.now(UTC)}
    with loop_lock(home):
        append(Experiment.model_validate(kept), home)
    assert discarded("cpu", home) == set()
    assert discarded("h200", home) == set()


def test_handing_in_what_the_loop_removed_puts_it_back(
    loop: Callable[..., tuple[list[Experiment], list[str]]], hand_in: HandIn, home: Path
) -> None:
    (experiment,), _ = loop(Model("a"))
    assert kernels() == []
    (task,) = journaled(Task, home)
    for _ in range(2):
        assert submit(task, hand_in(GOOD)).verdict == "promoted"
        assert kernels() == list(experiment.changed)
    assert not list(candidate_root(home).glob("solutions/*/*/*"))


@pytest.mark.turn("tilegym_db/loop/fit.py")  # publishes and discards
@pytest.mark.parametrize("by_himself", [None, "for the user", "into the checkout"])
def test_trial_keeps_what_the_user_published_after_the_discard(
    by_himself: str | None, row_scale: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = (trace_of(None, "run", attempt) for attempt in (0, 1))  # type: ignore[arg-type]
    monkeypatch.setattr(trial_module, "published_folder", lambda gpu: row_scale / "traces" / gpu)
    with Journal("run", home) as journal:
        journal.append(older)
    with open_store() as store:
        ingest(store)
        if by_himself is not None:
            publish(store, "h200", root=None if by_himself == "for the user" else row_scale, own="user" in by_himself)
    with Journal("run", home) as journal:
        journal.append(newer)
    table = home / "published" / "h200" / "elementwise" / "row_scale.jsonl.gz"
    for _ in range(2):  # also where a loop that was killed goes on
        Trial("t", "h200", home).begin(coverage_of([0.0], "gpu"), {newer.solution_digest, "f" * 64})
        there = table.is_file() and newer.solution_digest.encode() in unpacked(table.read_bytes(), table)
        assert there == (by_himself is not None)
