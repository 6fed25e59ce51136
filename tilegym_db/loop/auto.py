"""Optimise a model in a loop: pick the costliest piece of stock code, create a task, run an author, submit, decide.

Each finished step is journaled, so a restarted loop does not repeat it. Parts: the outcome of an experiment; the trial
publication of new kernels; the author process.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import ConflictError, NotFoundError, RecordError, TilegymDBError, UsageError
from tilegym_db.files import regular_files, write_atomically, write_folder, writing
from tilegym_db.loop.from_model import (
    MIN_SHARE,
    KeepDecision,
    ModelPieces,
    ModelState,
    Piece,
    decide,
    next_piece,
    why_no_task,
    why_stop,
)
from tilegym_db.loop.submit import DELIVERABLE, other_files, submit, withdraw
from tilegym_db.loop.tasks import create_task, discarded, last_attempt, prompt_of, verdicts
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import LOCK_NAME, loop_folder, read_lines, trace_files
from tilegym_db.records.loop import Attempt, Coverage, Experiment, ModelRun, Task, identified
from tilegym_db.records.text import length_prefixed_digest
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish, published_folder
from tilegym_db.store.side_files import append, journaled, loop_lock, save_model_run

Say = Callable[[str], None]
SUBMITTED = ".submitted"
"""Marker file in an attempt's folder: another command submitted the kernel."""
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
    _passed_over: set[tuple[str, str]] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.budget_s - (time.monotonic() - self._began)

    def run(self) -> str:
        """Run experiments until a reason to stop applies, and return that reason."""
        for task in self._on_trial():  # left by a loop that was killed
            self._finish(self._experiment(task))
        while True:
            stop = why_stop(self.done, self.left_s)
            if stop is not None:
                return stop
            pieces = self._pieces_now().pieces
            piece = next_piece(pieces, self._tried())
            if piece is None:
                self._say_what_is_left(pieces)
                return "every piece above 1% of the time is decided by an experiment or not described by a definition"
            self._say_what_is_passed_over(pieces, piece)
            self.say(f"{piece.part}: {piece.share:.1%} of the time, {piece.definition}")
            self._finish(self._experiment(self._task(piece)))

    # -- The model as it is served now. Results are cached by the digest of the published tables. --------------------------

    @property
    def _served(self) -> str:
        return Trial("", self.state.machine.gpu, self.home).served

    def _pieces_now(self) -> ModelPieces:
        key = self._served
        if key not in self._pieces:
            self.say("profiling the model as it is served now")  # takes half a minute or more
            self._pieces[key] = self.state.pieces()
        return self._pieces[key]

    def _coverage_now(self) -> Coverage:
        key = self._served
        if key not in self._coverages:
            self._coverages[key] = self.state.coverage()
        return self._coverages[key]

    def _say_what_is_passed_over(self, pieces: Sequence[Piece], chosen: Piece) -> None:
        """Say why no task can be made for a piece that costs more than the one that comes next."""
        for piece in pieces:
            place = (piece.part, piece.definition)
            has_task = piece.served or (piece.definition and piece.workloads)
            if piece.share > chosen.share and not has_task and place not in self._passed_over:
                self._passed_over.add(place)
                why = why_no_task(self.state.model, piece)
                self.say(f"not begun with: {piece.part}, {piece.share:.1%} of the time ({why})")

    def _say_what_is_left(self, pieces: Sequence[Piece]) -> None:
        tried = self._tried()
        for piece in pieces:
            if piece.share >= MIN_SHARE and not piece.served:
                is_tried = piece.definition in tried
                why = (
                    f"{piece.definition}, {tried[piece.definition]}"
                    if is_tried
                    else why_no_task(self.state.model, piece)
                )
                self.say(f"left to stock code: {piece.part}, {piece.share:.1%} ({why})")

    def _finish(self, experiment: Experiment) -> None:
        self.say(f"{experiment.decision}: {experiment.reason}")

    def _on_trial(self) -> list[Task]:
        """Return the tasks of this model whose kernels are on trial, after carrying out the decisions already made."""
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
        """Return the Definitions that this run does not try again, each with the reason.

        A discard applies to kernels of one language. If an author crashed, this run does not try the Definition again, but
        another run may.
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
                outcome = without_award(attempt, problem)
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
        """Keep the published kernels on trial, or restore what was published before. Idempotent."""
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
                f"{solution} stays verified and in the catalog, where `task submit` put it ({kept[solution].parent}), but is "
                "not published, and no later experiment here publishes it. To serve models with it anyway: "
                f"tilegym-db publish --gpu {experiment.gpu}"
            )

    # -- the author ---------------------------------------------------------------------------------------------------

    def _author(self, task: Task) -> tuple[Attempt | None, str]:
        """Return the last attempt at a task, and the author's last problem."""
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
        left = f"{self.left_s:.0f} s" if self.left_s < 120 else f"{self.left_s / 60:.0f} minutes"
        self.say(
            f"waiting at most {left} for a kernel in its folder, or: tilegym-db task submit {task.id} "
            "FOLDER. Ctrl-C ends the wait; the same command continues here"
        )
        problem = wait_for_author(
            prompt, folder, catalog, self.left_s, is_submitted=lambda: verdicts(task, self.home) != before
        )
        if problem is None and not (folder / "solution.json").is_file():
            (folder / SUBMITTED).touch()
        return problem

    def _judged(self, task: Task, folder: Path) -> Attempt:
        """Return the verdict on the folder's kernel, or the one of a ``task submit`` made while the loop waited."""
        known = last_attempt(task, self.home) if (folder / SUBMITTED).is_file() else None
        if known is not None:
            return known
        submission, left_out = delivered(folder)
        if left_out:
            self.say(f"not part of the submission: {', '.join(left_out)}")
        return submit(task, submission, home=self.home, root=self.home / "catalog")

    # -- the experiment -----------------------------------------------------------------------------------------------

    def _try(self, trial: Trial, attempt: Attempt, before: Coverage) -> tuple[Coverage, str, Outcome]:
        """Publish the kernel on trial, measure the model and decide."""
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
    """Let an author write kernels for a model, costliest stock code first.

    A kernel is kept if it raises the coverage without slowing the model.

    Args:
        author: a command that reads the prompt on stdin and writes ``kernel.py`` and ``solution.json`` into its working
            directory. None waits for a person to write them.
        done: list that receives each journaled experiment, so that the caller has them after Ctrl-C.

    Returns:
        The experiments of this run, and the reason it ended. After Ctrl-C a new run does not repeat journaled experiments.
    """
    done = [] if done is None else done
    loop = Kernelizer(state, language, author, budget_s, max_attempts, home or default_home(), say, done)
    return loop.done, loop.run()


# ---- Outcome ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment."""

    decision: str
    reason: str
    after: Coverage | None = None
    run: ModelRun | None = None
    changed: dict[str, str] = field(default_factory=dict)

    def experiment(self, state: ModelState, task: Task, before: Coverage, base: str, seconds: float) -> Experiment:
        """Return the outcome as a record for the journal."""
        now = datetime.now(UTC)
        run = self.run
        content = {
            "id": identified({"task": task.id, "base": base, "at": now.isoformat()}),
            "model": state.tag,
            "config_digest": state.digest,
            "gpu": state.machine.gpu,
            "base": base,
            "definition": task.definition,
            "task": task.id,
            "changed": self.changed,
            "before": before.model_dump(),
            "after": None if self.after is None else self.after.model_dump(),
            "runs": () if run is None else (run.run_id,),
            "total_speedup": None if run is None else run.total_speedup.median,
            "total_ci_low": None if run is None else run.total_speedup.ci_low,
            "decision": self.decision,
            "reason": self.reason[:4000],
            "seconds": round(seconds, 3),
            "timestamp": now,
        }
        return Experiment.model_validate(content)


def without_award(attempt: Attempt | None, problem: str) -> Outcome:
    """Return the outcome if no kernel got an award, from the last attempt or the author's last problem."""
    if problem == "timeout":
        return Outcome("timeout", "the budget ran out before the author finished")
    if attempt is None:
        return Outcome("crash", problem or "the author submitted nothing")
    gate = f"{attempt.gate}: " if attempt.gate else ""
    return Outcome("discard", f"attempt {attempt.number} of {attempt.task} was not taken: {gate}{attempt.reason}")


# ---- Trial --------------------------------------------------------------------------------------------

BEFORE = "before.json"


class Trial:
    """A trial publication of the kernels of one task, for this user and one GPU.

    The previously published files are kept on disk until the decision, so that a restarted loop can continue the trial.
    """

    def __init__(self, task: str, gpu: str, home: Path) -> None:
        """Locate the files of the trial without changing any."""
        self.folder = loop_folder(home) / "trials" / task
        self.home, self.gpu = home, gpu
        self.published = home / "published" / gpu

    @property
    def base(self) -> str:
        """Digest of the published table that the resolver reads now; empty if nothing is published for this user."""
        path = self.published / LOCK_NAME
        return length_prefixed_digest([path.read_bytes()])[:32] if path.is_file() else ""

    @property
    def served(self) -> str:
        """Digest of the tables that select kernels here: this user's and the one of a checkout."""
        locks = [folder / LOCK_NAME for folder in (self.published, published_folder(self.gpu))]
        return length_prefixed_digest([path.read_bytes() if path.is_file() else b"" for path in locks])

    def begin(self, before: Coverage, without: Collection[str] = ()) -> tuple[Coverage, str]:
        """Back up the published files unless that is done, and publish the verified kernels.

        Args:
            without: digests of Solutions not to publish, because earlier experiments discarded them. Those published before
                the trial stay, because they were published on purpose after the discard.

        Returns:
            The coverage and the table digest from before the trial, also if an earlier loop began it.
        """
        if not self.folder.is_dir():
            state = {"coverage": before.model_dump(mode="json"), "base": self.base}
            kept = {f"published/{name}": content for name, content in _files_of(self.published).items()}
            with writing(self.folder.parent):
                write_folder(self.folder, {BEFORE: json.dumps(state).encode(), **kept})
        self._publish(set(without) - self._published_before(without))
        state = json.loads((self.folder / BEFORE).read_bytes())
        return Coverage.model_validate(state["coverage"]), state["base"]

    def keep(self) -> None:
        """Keep the published kernels and delete the backup."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def undo(self) -> None:
        """Restore the backup. The lock is written last, because it makes the other files valid."""
        kept = _files_of(self.folder / "published")
        with writing(self.published.parent):
            for name in _files_of(self.published).keys() - kept.keys():
                (self.published / name).unlink(missing_ok=True)
            for name in sorted(kept, key=lambda name: name == LOCK_NAME):
                write_atomically(self.published / name, kept[name])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _published_before(self, digests: Collection[str]) -> set[str]:
        """Return the Solutions that were published before the trial, for this user or in the checkout."""
        folders = {self.folder / "published", published_folder(self.gpu)} - {self.published}
        found: set[str] = set()
        for path in [path for folder in folders for path in trace_files(folder)]:
            with suppress(RecordError):  # a damaged file is not served
                traces = read_lines(path.read_bytes(), path)
                found |= {trace["solution_digest"] for trace in traces if trace.get("status") == "PASSED"} & set(
                    digests
                )
        return found

    def _publish(self, without: Collection[str]) -> None:
        with open_store(self.home, catalog=Catalog.default()) as store:
            ingest(store)
            try:
                publish(store, self.gpu, own=True, without=without)
            except NotFoundError:
                return  # nothing is verified, so the published files stay


def _files_of(folder: Path) -> Mapping[str, bytes]:
    """Read the files below a folder, by relative path; empty if the folder does not exist."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# ---- Author process -----------------------------------------------------------------------------------

MAX_OUTPUT = 2000
CHECKED_EVERY_S = 2.0


def judge_digest(catalog: Catalog) -> str:
    """Return a digest of what decides about a submission: this package, and the catalog's definitions and workloads."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for root in catalog.roots:
        files += regular_files(root, "definitions/**/*.json") + regular_files(root, "workloads/*/*.jsonl")
    return length_prefixed_digest(part for path in files for part in (str(path).encode(), path.read_bytes()))


def author_command(command: str) -> list[str]:
    """Split a command into words, with the absolute path of the program because it starts in another folder."""
    try:
        words = shlex.split(command)
    except ValueError as error:  # an unclosed quotation
        raise UsageError(
            f"--author {command!r} cannot be parsed: {error}. Check its quotes.", code="command_invalid"
        ) from None
    if not words or not words[0]:
        raise UsageError(
            f"--author {command!r} is empty. Give a program that reads the prompt on stdin.",
            code="command_invalid",
        )
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(
            f"--author {command!r}: the program {words[0]!r} does not exist or is not executable. "
            "Give its path, and make it executable.",
            code="program_absent",
        )
    return [os.path.abspath(program), *words[1:]]


def run_author(command: str, prompt: str, folder: Path, catalog: Catalog, limit_s: float) -> str | None:
    """Start the command in a fresh folder with the prompt on stdin, and wait for it.

    Returns:
        None if it wrote files, else the problem: ``timeout`` or how the command ended.
    """
    words, before = author_command(command), judge_digest(catalog)
    shutil.rmtree(folder, ignore_errors=True)  # left by an author that was killed
    folder.mkdir(parents=True)
    try:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"--author {command}: cannot be started: {error.strerror or error}.", code="process_not_started"
        ) from None
    try:
        said, _ = process.communicate(prompt.encode(), timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if judge_digest(catalog) != before:
        raise ConflictError(
            "files that judge kernels (the package, definitions or workloads) changed while the author ran, so its kernel is "
            "not judged. Restore them, and start again.",
            code="judge_changed",
        )
    if process.returncode != 0:
        last_words = said.decode(errors="replace")[-MAX_OUTPUT:].strip()
        return f"the author ended with status {process.returncode}{f': {last_words}' if last_words else ', and said nothing'}"
    return None if any(folder.iterdir()) else "the author wrote no files"


def delivered(folder: Path) -> tuple[Path, list[str]]:
    """Copy the files of a submission out of an author's working directory, and name the other ones, such as its notes."""
    submission = folder / ".submission"
    shutil.rmtree(submission, ignore_errors=True)  # of a loop that was killed
    submission.mkdir()
    for name in DELIVERABLE:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            shutil.copyfile(folder / name, submission / name)
    return submission, other_files(folder)


def wait_for_author(
    prompt: str,
    folder: Path,
    catalog: Catalog,
    limit_s: float,
    is_submitted: Callable[[], bool],
) -> str | None:
    """Show a person where the prompt is, and wait for a kernel; otherwise like :func:`run_author`.

    Args:
        is_submitted: returns True once a kernel was submitted in another way.
    """
    before = judge_digest(catalog)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder.with_suffix(".md")
    page.write_text(prompt)
    print(f"prompt: {page}\nPut kernel.py and then solution.json into {folder}", file=sys.stderr, flush=True)
    until = time.monotonic() + limit_s
    while not (folder / "solution.json").is_file() and not is_submitted():
        if time.monotonic() > until:
            return "timeout"
        time.sleep(CHECKED_EVERY_S)
    if judge_digest(catalog) != before:
        raise ConflictError(
            "files that judge kernels changed during the wait, so the kernel is not judged. Restore them, and start again.",
            code="judge_changed",
        )
    return None
