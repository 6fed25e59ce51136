"""``auto-kernelize`` and ``submit`` killed at each stage: the next run goes on, and repeats nothing that is journaled."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killed_process import killed
from loop_authors import GOOD

from tilegym_db.catalog import Catalog
from tilegym_db.loop import auto as auto_module
from tilegym_db.loop import submit as submit_module
from tilegym_db.loop.auto import Trial, auto_kernelize
from tilegym_db.loop.from_model import ModelPieces, Piece, coverage_of
from tilegym_db.loop.submit import submit
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records.loop import Attempt, Award, Coverage, Estimate, Experiment, Task
from tilegym_db.store.side_files import append, journaled, loop_lock

HandIn = Callable[..., Path]


def dies(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    """Have a function kill its process before or after it does what it does."""
    real = getattr(owner, name)

    def deadly(*args: Any, **options: Any) -> None:
        if after:
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(owner, name, deadly)


def on_trial(home: Path) -> list[Path]:
    """Folders of the changes that nothing decided about."""
    return [path for path in (loop_folder(home) / "trials").glob("*") if path.is_dir()]


class StubModel:
    """A model of which one operator is worth a kernel; it notes how often it was timed."""

    tag, digest, machine = "tiny", "0" * 64, cpu_machine()

    def __init__(self, home: Path, note: Callable[[str], None]) -> None:
        self.home, self.note = home, note

    def pieces(self) -> ModelPieces:
        work = tuple(Catalog.default().workloads_for("row_scale"))
        return ModelPieces(self.tag, "cpu", 1.0, [Piece("Scale", 0.5, 1, "row_scale", "exact", work)])

    def coverage(self) -> Coverage:
        return coverage_of([0.4 if on_trial(self.home) else 0.0] * 5, "cpu")

    def run(self) -> tuple[Any, list[str]]:
        self.note("model timed")
        return SimpleNamespace(run_id="a-run", total_speedup=Estimate(median=1.2, ci_low=1.1, ci_high=1.3)), []


@pytest.fixture
def loop(operator: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Run the loop over the stub; what authors, judges and timings did is in a file that outlives the process."""

    def note(what: str) -> None:
        with (tmp_path / "done").open("a") as file:
            file.write(f"{what}\n")

    def write(command: str, prompt: str, folder: Path, catalog: Catalog, limit_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        note("author asked")

    def judge(task: Task, folder: Path, *, home: Path, root: Path) -> Attempt:
        note("kernel judged")
        digest = "a" * 64
        content: dict[str, Any] = {"task": task.id, "number": 1, "solution": "row_scale_x", "solution_digest": digest}
        content |= {"promotions": ("python_row_scale_v1",)}
        attempt = Attempt.from_dict({**content, "stage": "promoted", "verdict": "promoted", "timestamp": task.created})
        with loop_lock(home):
            append(attempt, home)
        return attempt

    monkeypatch.setattr(auto_module, "run_author", write)
    monkeypatch.setattr(auto_module, "submit", judge)
    monkeypatch.setattr(auto_module, "save_model_run", lambda run, where: None)
    return lambda: auto_kernelize(StubModel(home, note), language="python", author="x", home=home)  # type: ignore[arg-type]


STAGES = {
    "before the author is asked": (auto_module, "run_author", False),
    "while the author's kernel is not noted": (auto_module, "run_author", True),
    "before the kernel is judged": (auto_module, "submit", False),
    "after the kernel is judged": (auto_module, "submit", True),
    "before the trial": (Trial, "begin", False),
    "on trial": (Trial, "begin", True),
    "after the model is timed": (StubModel, "run", True),
    "before the decision is journaled": (auto_module, "append", False),
    "after the decision is journaled": (auto_module, "append", True),
    "before the change is kept": (Trial, "keep", False),
    "after the change is kept": (Trial, "keep", True),
}
DONE_TWICE = {
    "while the author's kernel is not noted": ["author asked"],
    "after the model is timed": ["model timed"],
    "before the decision is journaled": ["model timed"],
}
"""What the process that was killed had not journaled yet. A kernel is never judged twice."""


@pytest.mark.sweep(4)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_loop_resumes_and_repeats_only_unjournaled_work(
    stage: str, loop: Callable[[], Any], home: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        owner, name, after = STAGES[stage]
        dies(patch, owner, name, after=after)
        killed(loop)
    _, why = loop()
    assert why.startswith("every piece above 1% of the time is decided")
    (experiment,) = journaled(Experiment, home)
    assert (experiment.decision, experiment.before.median, experiment.after and experiment.after.median) == (
        "keep", 0.0, 0.4,
    ), experiment.reason  # fmt: skip
    assert len(journaled(Task, home)) == 1
    done = (tmp_path / "done").read_text().splitlines()
    assert sorted(done) == sorted(["author asked", "kernel judged", "model timed", *DONE_TWICE.get(stage, [])])
    assert not on_trial(home)
    assert loop()[0] == []
    assert (tmp_path / "done").read_text().splitlines() == done


MOMENTS = ("verify", "record_awards", "leave", "append")
"""After which a submission that is measured is killed; the last is what journals its end."""


@pytest.mark.alone  # the kernel must be found faster
@pytest.mark.slow
def test_killed_verification_ends_without_a_second_measurement(
    task: Task, hand_in: HandIn, home: Path, operator: Path, tmp_path: Path
) -> None:
    """One submission is measured. What is on disk at each moment is what a process killed there leaves."""
    folder, left = hand_in(GOOD), tmp_path / "left"

    def save(moment: str) -> None:
        shutil.copytree(home, left / moment / "home")
        shutil.copytree(operator, left / moment / "catalog")

    def saves(name: str) -> Callable[..., Any]:
        real = getattr(submit_module, name)

        def saving(*args: Any, **options: Any) -> Any:
            answer = real(*args, **options)
            save(name)
            return answer

        return saving

    def append_and_die(record: Any, where: Path) -> None:
        append(record, where)
        if record.verdict in ("promoted", "refused"):
            save("append")
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        for name in MOMENTS[:-1]:
            patch.setattr(submit_module, name, saves(name))
        patch.setattr(submit_module, "append", append_and_die)
        killed(lambda: submit(task, folder))

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured again")

    for moment in MOMENTS:
        for place, name in ((home, "home"), (operator, "catalog")):
            shutil.rmtree(place)
            shutil.copytree(left / moment / name, place)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(submit_module, "bench", measured)
            patch.setattr(submit_module, "verify", measured)
            attempt = submit(task, folder)
        found = (attempt.number, attempt.verdict, attempt.stage)
        assert found == (1, "promoted", "promoted"), f"killed after {moment}: {attempt.reason}"
        assert attempt.promotions == ("python_row_scale_cpu_float32_M512-N1024_v1",), moment
        assert [one.id for one in journaled(Award, home)] == list(attempt.promotions), moment
        assert attempt.solution in Catalog.default().solutions, moment
