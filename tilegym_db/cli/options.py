"""Options that several commands share, so that each is spelled, explained and completed in one way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from tilegym_db.cli.completion import (
    complete_definition,
    complete_gpu,
    complete_language,
    complete_measurable_gpu,
    complete_name,
    complete_op_type,
)

__all__ = [
    "MOST_TOKENS",
    "Axes",
    "ConfigFile",
    "DefinitionName",
    "Gpu",
    "Gpus",
    "Language",
    "MachineGpu",
    "Names",
    "OpType",
    "Trust",
    "WorkloadGlob",
    "finite_seconds",
    "regular_file",
    "regular_files",
]

MOST_TOKENS = 1 << 20
"""Of a prompt: attention over more takes hours, or more memory than there is."""

DefinitionName = Annotated[
    str | None, typer.Argument(help="A definition; none means all.", autocompletion=complete_definition)
]
Names = Annotated[
    list[str] | None, typer.Argument(help="Definitions or solutions; none means all.", autocompletion=complete_name)
]
OpType = Annotated[
    str | None, typer.Option(help="Only this family: norm, activation, gemm, ...", autocompletion=complete_op_type)
]
Gpu = Annotated[
    str | None,
    typer.Option(help="Only this GPU: h100, h200, cpu, ..., or auto for the one here.", autocompletion=complete_gpu),
]
MachineGpu = Annotated[
    str,
    typer.Option(
        help="auto, cpu, or the GPU in this machine (h100, h200, ...).", autocompletion=complete_measurable_gpu
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="Measure on several GPUs of this host, of one kind: all, a number (2), or indices (0,2).",
        metavar="all|N|I,J",
    ),
]
Language = Annotated[
    str | None, typer.Option(help="Only solutions in this language.", autocompletion=complete_language)
]
Axes = Annotated[
    list[str] | None,
    typer.Option(help="Sizes: M=4096,N=4096; commas, or the option again.", metavar="A=SIZE,..."),
]
Trust = Annotated[bool, typer.Option("--trust", help="Count foreign traces too: not measured here, nor shipped.")]
WorkloadGlob = Annotated[str | None, typer.Option(help="Glob over tags, axes (M=1,*) and uuid.")]


def finite_seconds(value: float | None) -> float | None:
    """A callback: refuse what is no time, before anything is loaded.

    Raises:
        BadParameter: NaN, infinity, zero or less.
    """
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"a number of seconds above 0, not {value:g}.")
    return value


def regular_file(path: Path) -> Path:
    """A callback of path arguments: refuse what is neither a file nor a folder, since reading a FIFO may never end.

    Raises:
        BadParameter: a FIFO, a socket or a device.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise typer.BadParameter(f"'{path}' is neither a file nor a folder.")
    return path


def regular_files(paths: list[Path] | None) -> list[Path] | None:
    """:func:`regular_file` of every path."""
    for path in paths or ():
        regular_file(path)
    return paths


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="A model's config: a JSON file, or a folder with config.json.", exists=True, callback=regular_file
    ),
]
