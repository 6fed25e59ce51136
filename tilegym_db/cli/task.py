"""``tilegym-db task`` and ``mcp``: tasks, submissions and the loop over a model."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import TABLE, AsJson, Form, with_form, write_records
from tilegym_db.cli.kit.options import (
    ConfigFile,
    Layers,
    MachineGpu,
    ModelDtype,
    PromptTokens,
    Require,
    Rounds,
    complete_definition,
    complete_gpu,
    complete_language,
)
from tilegym_db.cli.kit.output import note, print_json, print_line, print_table
from tilegym_db.errors import UsageError
from tilegym_db.paths import DISABLE_VARIABLE, DISABLED, is_disabled
from tilegym_db.records.verdicts import MIN_SPEEDUP

if TYPE_CHECKING:
    from tilegym_db.measurement.machine import Machine
    from tilegym_db.records.loop import Attempt, Experiment


app = command_group("Create a task, print it for its author, submit a kernel, see the verdict.")

TaskId = Annotated[str, typer.Argument(help="The task's id, or how it begins.", metavar="ID")]
Language = Annotated[
    str, typer.Option("--language", "-l", help="python, triton, tilelang or cutile.", autocompletion=complete_language)
]
TaskGpu = Annotated[
    str, typer.Option(help="h100, h200, cpu, ..., or auto for what is here.", autocompletion=complete_gpu)
]
ELSEWHERE = "run this on a machine with a GPU"


@app.command("create")
def create(
    definition: Annotated[str, typer.Argument(help="The operator.", autocompletion=complete_definition)],
    language: Language = "triton",
    gpu: TaskGpu = "auto",
    workload: Annotated[
        list[str] | None, typer.Option(help="Glob over tags, axes (M=1,*) and uuid; repeatable.")
    ] = None,
    min_speedup: Annotated[float, typer.Option(help="Bar over the best baseline: 1.10 to 1000.")] = 1.10,
    as_json: AsJson = False,
) -> None:
    """Create a task for a kernel of one operator, language and GPU, with the bar to beat, and print its id."""
    from tilegym_db.loop.tasks import create_task, unverifiable

    task = create_task(
        definition, language=language, gpu=gpu, workload=tuple(workload) if workload else None, min_speedup=min_speedup
    )
    if as_json:
        print_json(task.model_dump(mode="json"))
    else:
        print_line(task.id)
    if why := unverifiable(task.language, task.gpu, "name a GPU with --gpu"):
        note(why)
    count = len(task.workloads)
    note(
        f"{count} workload{'' if count == 1 else 's'} on {task.gpu}. Next: tilegym-db task prompt {task.id} > prompt.md"
    )
    note(f"then, with kernel.py and solution.json in FOLDER: tilegym-db task submit {task.id} FOLDER")


@app.command("from-model")
def from_model(
    config: ConfigFile,
    language: Language = "triton",
    gpu: TaskGpu = "auto",
    prompt_tokens: PromptTokens = 128,
    dtype: ModelDtype = "bfloat16",
    layers: Layers = None,
    drafts: Annotated[Path | None, typer.Option(help="Folder for drafts of what no definition describes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Profile a model, rank its code by time, and create a task for each operator without a verified kernel.

    For a part that no definition describes, a draft is written with the captured shapes, dtypes, strides and source location.
    """
    from tilegym_db.loop.from_model import tasks_from_model
    from tilegym_db.loop.tasks import unverifiable
    from tilegym_db.models.capture import of_unreached

    found = tasks_from_model(
        config, language=language, gpu=gpu, prompt=prompt_tokens, dtype=dtype, layers=layers, drafts=drafts
    )
    if found.time_of == "cpu" and (why := unverifiable(language, "cpu", ELSEWHERE)):
        note(why)
    rows = [piece.to_dict() for piece in found.pieces]
    if as_json:
        content = {"time_of": found.time_of, "total_us": found.total_us, "pieces": rows}
        print_json({**content, "unreached": list(found.unreached)})
        return
    columns = ("part", "share", "calls", "definition", "match", "outcome")
    shown: set[str] = set()
    for row in rows:  # a module class has its time once, however many operators it calls
        if row["part"] in shown:
            row["share"] = row["calls"] = None
        shown.add(row["part"])
    print_table(columns, [tuple(row[name] for name in columns) for row in rows], prose=("outcome",))
    note(f"shares are of {found.time_of} time: {found.total_us:.0f} us in one call of {prompt_tokens} tokens")
    if found.unreached:
        note(of_unreached(found.unreached))
    tasks = [row["outcome"].removeprefix("task ") for row in rows if row["outcome"].startswith("task ")]
    if tasks:
        note(f"Next, for the largest share that has a task: tilegym-db task prompt {tasks[0]}")


@app.command("prompt")
def prompt(task: TaskId) -> None:
    """Print the task as one Markdown page for its author. The same task and history give the same bytes."""
    from tilegym_db.loop.tasks import find_task, prompt_of

    sys.stdout.write(prompt_of(find_task(task)))


@app.command("submit")
def submit(
    task: TaskId,
    path: Annotated[Path, typer.Argument(help="Folder with kernel.py and solution.json.")],
    gpu: Annotated[str | None, typer.Option(help="The GPU to measure on; it must be the task's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a kernel: it is received, scanned, compiled, screened and verified. It runs only in a confined worker.

    Exit 0: it has an award, and the stored verdict is 'promoted'. Exit 1: it is refused. Exit 3: there is no GPU for the last
    steps, so submit the same source again on a machine with the GPU.
    """
    from tilegym_db.loop.tasks import find_task

    asked = find_task(task)  # before the slow import of PyTorch
    from tilegym_db.cli.kit.progress import Progress
    from tilegym_db.loop.submit import submit as judge

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        attempt = judge(asked, path, gpu=gpu, observer=progress.observer())
    if as_json:
        print_json(attempt.model_dump(mode="json"))
    else:
        _print_attempt(attempt, asked.gpu)
    raise typer.Exit(EXIT_STATUS[attempt.verdict])


EXIT_STATUS = {"promoted": 0, "refused": 1, "no_gpu": 3, "pending": 1}


NEXT = {
    "promoted": "It is in the catalog. Next: tilegym-db publish --gpu {gpu}, so that the resolver may use it",
    "refused": "Next: change the kernel and submit it again; tilegym-db task prompt {task} has this reason in section 9",
    "no_gpu": "Next: the same command on a machine with this GPU ({gpu}) continues",
    "pending": "Next: the same command continues",
}


def _print_attempt(attempt: Attempt, gpu: str) -> None:
    print_line(f"attempt {attempt.number}: {attempt.solution}: {attempt.verdict} (passed: {attempt.stage})")
    if attempt.reason:
        print_line(f"{attempt.gate + ': ' if attempt.gate else ''}{attempt.reason}")
    if attempt.command:
        note(f"To reproduce it: {attempt.command}")
    for award in attempt.promotions:
        print_line(award)
    note(NEXT[attempt.verdict].format(task=attempt.task, gpu=gpu))


@app.command("status")
@with_form
def status(
    task: Annotated[str | None, typer.Argument(help="A task's id, or how it begins; none lists all.")] = None,
    form: Form = TABLE,
) -> None:
    """List the tasks, or the attempts at one of them with the reasons for refusals."""
    from tilegym_db.loop.tasks import attempts_of, find_task, tasks_table

    rows: list[dict[str, Any]] = tasks_table() if task is None else attempts_of(find_task(task))
    if not form.is_table:
        write_records(form, rows)
    elif rows:
        shown = rows if task or form.wide else _with_short_ids(rows)
        print_table(
            [*rows[0]],
            [tuple(row.values()) for row in shown],
            wide=form.wide,
            prose=("reason",),
            least=("device_s", "objective"),
            most=("status", "verdict"),
        )
        if task is None:
            note(f"Next: tilegym-db task status {shown[0]['id']}")
    elif task is None:
        note("nothing yet. Try: tilegym-db task create DEFINITION")
    else:
        note(f"no attempt yet. Next: tilegym-db task prompt {task}, then: tilegym-db task submit {task} FOLDER")


def _with_short_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shorten the ids to a unique prefix, which every command accepts."""
    length = next(n for n in range(8, 37) if n == 36 or len({row["id"][:n] for row in rows}) == len(rows))
    return [{**row, "id": row["id"][:length]} for row in rows]


# ---- Auto -------------------------------------------------------------------------------------

MAX_BUDGET_S = 30 * 24 * 3600


@app.command("auto")
def auto_command(
    config: ConfigFile,
    author: Annotated[
        str | None,
        typer.Option(
            help="Command: prompt on stdin, kernel.py and solution.json into its working directory. None waits."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Total time: 90s, 30m, 2h; at most 720h.")] = "2h",
    max_attempts: Annotated[int, typer.Option(help="Maximum attempts of the author per task.", min=1, max=100)] = 3,
    language: Annotated[
        str, typer.Option("--language", "-l", help="Language of the kernels.", autocompletion=complete_language)
    ] = "triton",
    gpu: MachineGpu = "auto",
    dtype: ModelDtype = "bfloat16",
    prompt_tokens: PromptTokens = 128,
    rounds: Rounds = 10,
    layers: Layers = None,
    as_json: AsJson = False,
) -> None:
    """Profile a model, let an author write kernels for the costliest stock code, and keep those that help.

    A kernel is kept if it raises the coverage without slowing the model. The loop stops if no piece
    above 1% is left, if less of the budget is left than the quickest experiment took, after five experiments in a row that were
    not kept, or on Ctrl-C. Run it again to continue. On a CPU it uses the process's CPU time instead of GPU time, and the
    records state this.
    """
    budget_s = parse_duration(budget)
    machine = checked_machine(language, author, gpu)
    from tilegym_db.loop.auto import auto_kernelize
    from tilegym_db.loop.from_model import ModelState

    state = ModelState(config, machine, dtype, prompt_tokens, rounds, layers)
    done: list[Experiment] = []
    why = ""
    try:
        options: dict[str, Any] = {"budget_s": budget_s, "max_attempts": max_attempts, "say": note, "done": done}
        _, why = auto_kernelize(state, language=language, author=author, **options)
    finally:  # also after Ctrl-C, so that no experiment is lost
        if done or why:
            print_experiments(done, as_json=as_json)
            sys.stdout.flush()  # an interrupt discards unwritten output
    note(f"ended: {why}")
    if done and done[-1].decision == "timeout":
        note(
            "The task stays open, and the same command waits for its kernel again. Its attempts: tilegym-db task status"
        )


def checked_machine(language: str, author: str | None, gpu: str) -> Machine:
    """Return the machine to measure on, after checking the options, because building a model is slow."""
    from tilegym_db.loop.auto import author_command
    from tilegym_db.loop.tasks import check_language, unverifiable

    check_language(language)
    if author is not None:
        author_command(author)
    from tilegym_db.measurement.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    machine = select_machine(gpu)
    if why := unverifiable(language, machine.gpu, ELSEWHERE):
        note(why)
    return machine


def print_experiments(done: Sequence[Experiment], *, as_json: bool) -> None:
    """Print the experiments as table rows or JSON."""
    if as_json:
        print_json([one.model_dump(mode="json") for one in done])
    else:
        columns = ("definition", "before", "after", "of", "total", "decision", "reason")
        rows = [
            (
                one.definition,
                f"{one.before.median:.1%}",
                None if one.after is None else f"{one.after.median:.1%}",
                f"{one.before.time_of} time",
                one.total_speedup,
                one.decision,
                one.reason,
            )
            for one in done
        ]
        print_table(columns, rows, prose=("reason",))


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``30m`` or ``2h``; raise :class:`UsageError` for other texts and above 30 days."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r} must read 90s, 30m or 2h.", code="budget_invalid")
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    if seconds > MAX_BUDGET_S:
        raise UsageError(f"--budget {text} is more than 30 days; at most 720h.", code="budget_too_large")
    return seconds


# ---- Recommend ------------------------------------------------------------------------------------------


@app.command("recommend")
def recommend_command(
    config: ConfigFile,
    gpu: Annotated[str, typer.Option(help="h100, h200, ...; it need not be here.", autocompletion=complete_gpu)],
    prompt_tokens: PromptTokens = 128,
    dtype: ModelDtype = "bfloat16",
    layers: Layers = 1,
    parallel: Annotated[int, typer.Option("--tp", help="Number of GPUs that share the model.", min=1)] = 1,
    require: Require = "",
    as_json: AsJson = False,
) -> None:
    """Show which kernels with an award would serve a model's calls. Nothing is applied: publish and patch do that.

    Ratios are per operator and say nothing about the whole model. Timings of the model itself are listed separately.
    """
    from tilegym_db.cli.best import chosen_gpu

    chosen_gpu(gpu)  # before the slow import of PyTorch
    from tilegym_db.loop.from_model import recommend
    from tilegym_db.models.capture import of_unreached

    found = recommend(
        config, gpu=gpu, prompt=prompt_tokens, dtype=dtype, layers=layers, parallel=parallel, require=require
    )
    if as_json:
        print_json(found.to_dict())
        return
    columns = ("definition", "stage", "axes", "dtypes", "award", "op_ratio", "over", "reason")
    rows = [tuple(getattr(call, name) for name in columns) for call in found.calls]
    prose = ("award", "reason")  # an award has a name of up to 60 characters, and a part of it names nothing
    print_table(columns, rows, prose=prose, least=("over", "dtypes", "stage"), most=("definition", "op_ratio"))
    if is_disabled():
        note(f"{DISABLED}. To see kernels, unset {DISABLE_VARIABLE}.")
        return
    if found.unreached:
        note(of_unreached(found.unreached))
    without = [call for call in found.calls if not call.available]
    if without:
        note(
            f"An award needs {MIN_SPEEDUP:.2f}x over the best baseline, but any kernel faster than stock code may serve."
        )
        note(f"To see what serves the first call without an award: {without[0].explain}")
    if found.model_runs:
        names = list(found.model_runs[0])
        print_table(names, [tuple(run.values()) for run in found.model_runs])
    else:
        command = f"tilegym-db model bench {shlex.quote(str(config))} --dtype {dtype}"
        note(f"No run of this model on {gpu} is stored. On a machine with one: {command}")


# ---- MCP server -----------------------------------------------------------------------------------------


def mcp_command(
    allow_submit: Annotated[
        bool, typer.Option("--allow-submit", help="Also offer tools that write: creating tasks and submitting kernels.")
    ] = False,
) -> None:
    """Offer the loop's commands to an agent as tools, on stdin and stdout. Read-only unless --allow-submit is given.

    Submitted kernels run in a confined worker.
    """
    from tilegym_db.loop.mcp_server import serve

    serve(allow_submit)
