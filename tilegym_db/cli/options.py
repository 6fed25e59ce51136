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
    "Executor",
    "Gpu",
    "Gpus",
    "Language",
    "MachineGpu",
    "Names",
    "OpType",
    "Trust",
    "WorkloadGlob",
    "check_op_type",
    "finite_seconds",
    "path_given",
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
Executor = Annotated[
    str | None,
    typer.Option(
        help="Measure on the devices of a Ray cluster: ray (of RAY_ADDRESS, or the one that runs here) or its address. "
        "--gpus N: at most N of them.",
        metavar="local|ray|ray:HOST:PORT",
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


def path_given(text: str | Path) -> Path:
    """A parser of paths: an empty one would be the current folder.

    Raises:
        BadParameter: it is empty, or '-', which elsewhere means a stream.
    """
    if not str(text):
        raise typer.BadParameter("'' is no path.")
    if str(text) == "-":
        raise typer.BadParameter("'-' is no path here; a file of that name is ./-.")
    return Path(text)


def check_op_type(op_type: str | None, name: str | None = None) -> None:
    """Refuse a family that no Definition has, and one that is not that of the Definition asked for.

    Raises:
        NotFoundError: there is no such family; lists those there are.
        UsageError: the Definition is of another one.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.selection import select_definitions
    from tilegym_db.errors import UsageError

    if op_type is None:
        return
    select_definitions(Catalog.default(), op_type, None)
    if name is not None and (found := Catalog.default().definition(name).op_type) != op_type:
        raise UsageError(
            f"{name} is of op_type {found}, not {op_type}; leave one of the two out.", code="op_type_differs"
        )


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


def config_file(path: Path) -> Path:
    """A callback of configs: refuse what is none before PyTorch and transformers are imported, which takes seconds.

    Raises:
        BadParameter: a FIFO, a socket or a device.
        UsageError: no JSON object that states a ``model_type``, or with sizes that no model has.
    """
    from tilegym_db.scaffold.config_sizes import check_config_sizes
    from tilegym_db.scaffold.model_config import typed_config

    file, content = typed_config(regular_file(path))
    check_config_sizes(content, file)
    return path


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="A model's config: a JSON file, or a folder with config.json.", exists=True, callback=config_file
    ),
]
