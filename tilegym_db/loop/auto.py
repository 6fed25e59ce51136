"""The loop over a model: the costliest piece of stock code, a task for it, an author, a verdict, an experiment; and again.

Everything that was finished is in a journal, and is not done again by a loop that goes on where another was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.loop.author import run_author, wait_for_author
from tilegym_db.loop.from_model import LEAST_SHARE, ModelPieces, Piece
from tilegym_db.loop.handed_in import discarded, last_attempt, verdicts
from tilegym_db.loop.model_state import ModelState
from tilegym_db.loop.outcome import Outcome, unpromoted
from tilegym_db.loop.prompt import prompt_of
from tilegym_db.loop.rules import KeepDecision, decide, next_piece, why_stop
from tilegym_db.loop.submission_catalog import withdraw
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import create_task
from tilegym_db.loop.trial import Trial
from tilegym_db.paths import home as default_home
from tilegym_db.records.loop import Attempt, Coverage, Experiment, Task
from tilegym_db.store.input_files import loop_folder
from tilegym_db.store.loop_journals import append, journaled, loop_lock
from tilegym_db.store.model_runs import save_model_run

__all__ = ["Kernelizer", "auto_kernelize"]

Say = Callable[[str], None]
SUBMITTED = ".submitted"
"""In the folder of an attempt: it was handed in, and judged, by another command."""
DECIDED = ("keep", "discard")
"""Decisions of an experiment that are about a kernel."""


@dataclass
class Kernelizer:
    """One run of the loop."""

    state: ModelState
    language: str
    author: str | None
    budget_s: float
    max_attempts: int
    home: Path
    say: Say
    done: list[Experiment] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _pieces: dict[str, ModelPieces] = field(default_factory=dict)
    _coverages: dict[str, Coverage] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self.budget_s - (time.monotonic() - self._began)

    def run(self) -> str:
        """Experiments until one of the reasons to stop; returns it."""
        for task in self._on_trial():  # of a loop that was killed
            self._finish(self._experiment(task))
        while True:
            stop = why_stop(self.done, self.left_s)
            if stop is not None:
                return stop
            pieces = self._pieces_now().pieces
            piece = next_piece(pieces, self._tried())
            if piece is None:
                self._say_what_is_left(pieces)
                return (
                    "nothing above 1% of the time is left that a definition describes and no experiment decided about"
                )
            self.say(f"{piece.part}: {piece.share:.1%} of the time, {piece.definition}")
            self._finish(self._experiment(self._task(piece)))

    # -- what is known of the model as it is served now: a change that was discarded leaves it as it was ------------------

    @property
    def _served(self) -> str:
        return Trial("", self.state.machine.gpu, self.home).served

    def _pieces_now(self) -> ModelPieces:
        key = self._served
        if key not in self._pieces:
            self._pieces[key] = self.state.pieces()
        return self._pieces[key]

    def _coverage_now(self) -> Coverage:
        key = self._served
        if key not in self._coverages:
            self._coverages[key] = self.state.coverage()
        return self._coverages[key]

    def _say_what_is_left(self, pieces: Sequence[Piece]) -> None:
        tried = self._tried()
        for piece in pieces:
            if piece.share >= LEAST_SHARE and not piece.served:
                why = f"{piece.definition}, {tried[piece.definition]}" if piece.definition in tried else piece.reason
                self.say(f"left to stock code: {piece.part}, {piece.share:.1%} ({why or 'no definition describes it'})")

    def _finish(self, experiment: Experiment) -> None:
        self.say(f"{experiment.decision}: {experiment.reason}")

    def _on_trial(self) -> list[Task]:
        """The tasks of this model whose kernels are on trial; what is decided already is carried out."""
        folder = loop_folder(self.home) / "trials"
        named = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
        decided = {one.task: one for one in journaled(Experiment, self.home)}
        waiting = []
        for task in {task.id: task for task in journaled(Task, self.home)}.values():
            if task.id in decided and task.id in named:
                self._carry_out(decided[task.id])
            elif task.id in named and task.model == self.state.digest:
                waiting.append(task)
        return waiting

    def _tried(self) -> dict[str, str]:
        """Definition -> what came of it, for what this run is not to ask for.

        A discard is about kernels of one language. Where an author crashed nothing is known of any kernel: that is not asked
        for twice in one run, and another run, with another author, asks again.
        """
        languages = {task.id: task.language for task in journaled(Task, self.home)}
        done = {one.id for one in self.done}
        return {
            one.definition: "decided" if one.decision in DECIDED else f"{one.decision}, another run asks again"
            for one in journaled(Experiment, self.home)
            if (one.config_digest, one.gpu) == (self.state.digest, self.state.machine.gpu)
            and languages.get(one.task, self.language) == self.language
            and (one.decision in DECIDED or one.id in done)
        }

    def _task(self, piece: Piece) -> Task:
        return create_task(
            piece.definition,
            language=self.language,
            gpu=self.state.machine.gpu,
            workload=tuple(workload.uuid for workload in piece.workloads),
            objective="coverage",
            model=self.state.digest,
            home=self.home,
        )

    def _experiment(self, task: Task) -> Experiment:
        began = time.monotonic()
        trial = Trial(task.id, self.state.machine.gpu, self.home)
        before, base = self._coverage_now(), trial.base
        outcome: Outcome = Outcome("crash", "")
        try:
            attempt, problem = self._author(task)
            if attempt is None or attempt.verdict != "promoted":
                outcome = unpromoted(attempt, problem)
            else:
                before, base, outcome = self._try(trial, attempt, before)
        except TilegymDBError as error:
            outcome = Outcome("crash", f"{type(error).__name__}: {error}")
        experiment = outcome.experiment(self.state, task, before, base, time.monotonic() - began)
        with loop_lock(self.home):
            append(experiment, self.home)
        self.done.append(experiment)
        self._carry_out(experiment)
        return experiment

    def _carry_out(self, experiment: Experiment) -> None:
        """Keep what is on trial, or publish again what was published before. Done twice, it is done once."""
        trial = Trial(experiment.task, experiment.gpu, self.home)
        if experiment.decision == "keep":
            trial.keep()
            return
        definition = Catalog.default().definition(experiment.definition)
        for solution in experiment.changed:
            withdraw(definition, solution, self.home / "catalog", self.home)
        if trial.folder.is_dir():
            trial.undo()
        kept = Catalog.default().solution_paths
        for solution in experiment.changed.keys() & kept.keys():
            self.say(
                f"{solution} stays promoted and in the catalog, where `task submit` put it ({kept[solution].parent}); it is "
                "not published, and no later experiment here publishes it. To serve models with it all the same: "
                f"tilegym-db publish --gpu {experiment.gpu}"
            )

    # -- the author ---------------------------------------------------------------------------------------------------

    def _author(self, task: Task) -> tuple[Attempt | None, str]:
        """The last attempt at a task, and what the author's last problem was."""
        last, problem = last_attempt(task, self.home), ""
        if last is not None and last.verdict == "promoted":
            return last, ""
        for number in range(1, self.max_attempts + 1):
            folder = loop_folder(self.home) / "work" / task.id / str(number)
            is_judged = (folder / ".judged").is_file()
            if is_judged:
                continue
            if not (folder / ".written").is_file():
                problem = self._write(task, folder) or ""
                if problem == "timeout":
                    return last, problem
                if problem:
                    self.say(f"attempt {number}: {problem}")
                    continue
                (folder / ".written").touch()
            last = self._judged(task, folder)
            (folder / ".judged").touch()
            self.say(f"attempt {last.number}: {last.verdict} {last.gate} {last.reason}".rstrip())
            if last.verdict in ("promoted", "no_gpu"):
                break
        return last, problem

    def _write(self, task: Task, folder: Path) -> str | None:
        catalog, prompt = Catalog.default(), prompt_of(task, home=self.home)
        if self.author is not None:
            return run_author(self.author, prompt, folder, catalog, self.left_s)
        before = verdicts(task, self.home)
        self.say(f"waiting for a kernel in its folder, or: tilegym-db task submit {task.id} FOLDER")
        problem = wait_for_author(
            prompt, folder, catalog, self.left_s, is_submitted=lambda: verdicts(task, self.home) != before
        )
        if problem is None and not (folder / "solution.json").is_file():
            (folder / SUBMITTED).touch()
        return problem

    def _judged(self, task: Task, folder: Path) -> Attempt:
        """The verdict on what is in the folder; or the one that ``task submit`` came to while the loop waited."""
        known = last_attempt(task, self.home) if (folder / SUBMITTED).is_file() else None
        return known or submit(task, folder, home=self.home, root=self.home / "catalog")

    # -- the experiment -----------------------------------------------------------------------------------------------

    def _try(self, trial: Trial, attempt: Attempt, before: Coverage) -> tuple[Coverage, str, Outcome]:
        """Publish on trial, measure the model, decide."""
        before, base = trial.begin(before, discarded(self.state.machine.gpu, self.home) - {attempt.solution_digest})
        after = self._coverages[self._served] = self.state.coverage()
        run, failed = self.state.run()
        save_model_run(run, self.home)
        decision: KeepDecision = decide(before, after, run.total_speedup, failed)
        changed = {attempt.solution: attempt.solution_digest}
        return before, base, Outcome(decision.decision, decision.reason, after, run, changed)


def auto_kernelize(
    state: ModelState,
    *,
    language: str = "triton",
    author: str | None = None,
    budget_s: float = 7200.0,
    max_attempts: int = 3,
    home: Path | None = None,
    say: Say = lambda text: None,
    done: list[Experiment] | None = None,
) -> tuple[list[Experiment], str]:
    """Let an author write kernels for a model, the costliest piece of its own code first, and keep what makes it better.

    Args:
        state: the model, where and how it is called.
        language: of the kernels.
        author: a command that reads the prompt on stdin and leaves ``kernel.py`` and ``solution.json`` in its working directory;
            None waits for a person to put them there.
        budget_s: seconds after which no new experiment begins, and no author is waited for.
        max_attempts: at each task.
        home: folder of the store.
        say: told what happens.
        done: each experiment is added to it once it is journaled, for whom Ctrl-C leaves without an answer.

    Returns:
        The experiments of this run, and why it ended. Ctrl-C ends it too; what is journaled is not done again.
    """
    done = [] if done is None else done
    loop = Kernelizer(state, language, author, budget_s, max_attempts, home or default_home(), say, done)
    return loop.done, loop.run()
