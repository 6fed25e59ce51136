"""``tilegym-db auto-kernelize``: kernels for what a model spends its time on, kept where they make it better."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.completion import complete_language
from tilegym_db.cli.options import MOST_TOKENS, ConfigFile, MachineGpu
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.bench.machine import Machine
    from tilegym_db.records.loop import Experiment

MOST_BUDGET_S = 30 * 24 * 3600


def command(
    config: ConfigFile,
    author: Annotated[
        str | None,
        typer.Option(
            help="Command: prompt on stdin, kernel.py and solution.json into its working directory. None waits."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 30m, 2h; 720h at most.")] = "2h",
    max_attempts: Annotated[int, typer.Option(help="Of the author, at each task.", min=1, max=100)] = 3,
    language: Annotated[
        str, typer.Option("--language", "-l", help="Of the kernels.", autocompletion=complete_language)
    ] = "triton",
    gpu: MachineGpu = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    prompt: Annotated[int, typer.Option(help="Random tokens of the measured call.", min=1, max=MOST_TOKENS)] = 128,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of stock and patched.", max=100_000)] = 10,
    layers: Annotated[int | None, typer.Option(help="Keep only the first so many layers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the experiments as JSON.")] = False,
) -> None:
    """Profile a model, have kernels written for the costliest stock code, and keep what raises coverage and slows nothing.

    Stops where nothing above 1% is left, less of the budget is left than the quickest experiment took, five experiments in a row
    were not kept, or on Ctrl-C; started again, it goes on. On a CPU the process's CPU time stands for GPU time, and the records
    say so.
    """
    budget_s = parse_duration(budget)
    machine = checked_machine(language, author, gpu)
    from tilegym_db.loop.auto import auto_kernelize
    from tilegym_db.loop.model_state import ModelState

    state = ModelState(config, machine, dtype, prompt, rounds, layers)
    done: list[Experiment] = []
    why = ""
    try:
        options: dict[str, Any] = {"budget_s": budget_s, "max_attempts": max_attempts, "say": note, "done": done}
        _, why = auto_kernelize(state, language=language, author=author, **options)
    finally:  # Ctrl-C is a way to end it, and loses no experiment
        if done or why:
            print_experiments(done, as_json=as_json)
            sys.stdout.flush()  # what an interrupt finds unwritten is thrown away
    note(f"ended: {why}")


def checked_machine(language: str, author: str | None, gpu: str) -> Machine:
    """Where to measure; what cannot be asked for is refused before a model is built, which takes a while."""
    from tilegym_db.loop.author import author_command
    from tilegym_db.loop.tasks import check_language, unpromotable

    check_language(language)
    if author is not None:
        author_command(author)
    from tilegym_db.bench.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    machine = select_machine(gpu)
    if why := unpromotable(language, machine.gpu):
        note(why)
    return machine


def print_experiments(done: Sequence[Experiment], *, as_json: bool) -> None:
    """A row each, or JSON."""
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
    """Seconds of ``90s``, ``30m`` or ``2h``; raises :class:`UsageError` for anything else, and for more than 30 days."""
    from tilegym_db.errors import UsageError

    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r} must read 90s, 30m or 2h.", code="budget_invalid")
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    if seconds > MOST_BUDGET_S:
        raise UsageError(f"--budget {text} is more than 30 days; at most 720h.", code="budget_too_large")
    return seconds
