"""Options that several commands share, so that each is spelled, explained and completed in one way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition
    from tilegym_db.records.dtypes import Scalar


# ---- selection ------------------------------------------------------------------------------------
# Which Definitions ``--op-type`` and ``--status`` select.

T = TypeVar("T")


def select_definitions(catalog: Catalog, op_type: str | None, status: str | None) -> list[Definition]:
    """Return the Definitions of a family and status, by name.

    Raises:
        NotFoundError: no Definition has that family or status; lists those there are.
    """
    found = list(catalog.definitions.values())
    return of_kind(found, [(item.op_type, status_of(item)) for item in found], op_type, status)


def of_kind(items: list[T], kinds: list[tuple[str, str]], op_type: str | None, status: str | None) -> list[T]:
    """Return those of ``items`` whose family and status, which ``kinds`` gives for each, are the ones asked for.

    Raises:
        NotFoundError: nothing has that family or status; lists those there are.
    """
    from tilegym_db.errors import NotFoundError

    families, statuses = sorted({kind[0] for kind in kinds}), sorted({kind[1] for kind in kinds})
    if op_type is not None and op_type not in families:
        raise NotFoundError(
            f"no op_type '{op_type}'; there are {', '.join(families) or 'none'}.", code="op_type_unknown"
        )
    if status is not None and status not in statuses:
        raise NotFoundError(
            f"no definition has the status '{status}'; there are {', '.join(statuses) or 'none'}.",
            code="status_unknown",
        )
    wanted = (op_type, status)
    return [
        item
        for item, kind in zip(items, kinds, strict=True)
        if all(want in (None, of) for want, of in zip(wanted, kind, strict=True))
    ]


def status_of(definition: Definition) -> str:
    """Return the value of the ``status:`` tag, ``-`` if there is none."""
    return next((tag.removeprefix("status:") for tag in definition.tags if tag.startswith("status:")), "-")


# ---- pairs ----------------------------------------------------------------------------------------
# One syntax for options that name things: ``--axes M=1,N=4096`` or ``--axes M=1 --axes N=4096``, in every command.

LARGEST_SIZE = (1 << 63) - 1


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """``["M=1,N=2"]`` or ``["M=1", "N=2"]`` -> ``{"M": "1", "N": "2"}``. A comma within brackets is part of a value.

    Raises:
        UsageError: a part is not ``name=value``, or a name is given twice.
    """
    from tilegym_db.errors import UsageError

    found: dict[str, str] = {}
    for part in (part.strip() for text in texts or () for part in _parts(text)):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not (separator and key and value):
            raise UsageError(f"{option}: {part!r} must read name=value, as in M=4096.", code="pair_invalid")
        if key in found:
            raise UsageError(f"{option}: '{key}' is given twice.", code="pair_repeated")
        found[key] = value
    return found


def parse_axes(option: str, texts: Sequence[str] | None) -> dict[str, int]:
    """:func:`parse_pairs` of sizes.

    Raises:
        UsageError: a size is no whole number, or none that 64 bits hold.
    """
    return {axis: _size(option, axis, text) for axis, text in parse_pairs(option, texts).items()}


def parse_scalars(option: str, texts: Sequence[str] | None) -> dict[str, Scalar]:
    """:func:`parse_pairs` of scalars; NaN and infinity are refused."""
    import math

    from tilegym_db.errors import UsageError

    scalars = {name: parse_scalar(text) for name, text in parse_pairs(option, texts).items()}
    for name, value in scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{option}: {name} must be a finite number, not {value}.", code="number_not_finite")
        if isinstance(value, int) and not -LARGEST_SIZE <= value <= LARGEST_SIZE:
            raise UsageError(f"{option}: {name} does not fit in 64 bits.", code="number_too_large")
    return scalars


def parse_tunables(option: str, texts: Sequence[str] | None) -> dict[str, bool | int | float | str]:
    """:func:`parse_pairs` of a config's values, as JSON spells them; anything else is text."""
    return {name: _tunable(text) for name, text in parse_pairs(option, texts).items()}


def parse_scalar(text: str) -> Scalar:
    """``true``, ``false``, ``none``, a number, or the text itself."""
    words: dict[str, Scalar] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _parts(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for index, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _size(option: str, axis: str, text: str) -> int:
    from tilegym_db.errors import UsageError

    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"{option}: {axis} must be a whole number, not {text[:40]!r}.", code="number_not_whole")
    if len(digits) > 19 or abs(int(text)) > LARGEST_SIZE:
        raise UsageError(f"{option}: {axis} does not fit in 64 bits.", code="number_too_large")
    return int(text)


def _tunable(text: str) -> bool | int | float | str:
    import json

    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


# ---- completion -----------------------------------------------------------------------------------
# What a shell completes: names of definitions, solutions, GPUs, languages, targets and views.
#
# A shell asks while a user types: whatever fails, the answer is no proposal, and never an error.


def complete_definition(incomplete: str) -> list[str]:
    """Definitions of the catalog."""
    return _starting(_definitions(), incomplete)


def complete_name(incomplete: str) -> list[str]:
    """Definitions and solutions of the catalog."""
    return _starting([*_definitions(), *_solutions()], incomplete)


def complete_solution(incomplete: str) -> list[str]:
    """Solutions of the catalog."""
    return _starting(_solutions(), incomplete)


def complete_op_type(incomplete: str) -> list[str]:
    """Families of operators."""
    from tilegym_db.catalog import Catalog

    return _starting(
        sorted({path.parent.name for root in Catalog.default().roots for path in root.glob("definitions/*/*.json")}),
        incomplete,
    )


def complete_gpu(incomplete: str) -> list[str]:
    """Slugs and families that a query may name."""
    from tilegym_db.records.hardware import GPU_SLUGS, gpu_family

    return _starting(["auto", *sorted({*GPU_SLUGS, *map(gpu_family, GPU_SLUGS)})], incomplete)


def complete_measurable_gpu(incomplete: str) -> list[str]:
    """What this machine has, by name; a command that measures takes no other."""
    return _starting(["auto", "cpu"], incomplete) or complete_gpu(incomplete)


def complete_language(incomplete: str) -> list[str]:
    """Languages of solutions."""
    from tilegym_db.records import LANGUAGES

    return _starting(LANGUAGES, incomplete)


def complete_target(incomplete: str) -> list[str]:
    """Targets of ``compile``."""
    from tilegym_db.records.hardware import TARGETS

    return _starting([*TARGETS, "all"], incomplete)


def complete_statement(incomplete: str) -> list[str]:
    """Return a statement whose last word is completed to the name of a view."""
    from tilegym_db.store.asking import public_views

    match = re.search(r"(\w*)$", incomplete)
    word = match.group() if match else ""
    start = incomplete[: len(incomplete) - len(word)]
    return [start + view for view in public_views() if view.startswith(word)]


def _definitions() -> list[str]:
    from tilegym_db.catalog import Catalog

    return sorted({path.stem for root in Catalog.default().roots for path in root.glob("definitions/*/*.json")})


def _solutions() -> list[str]:
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import TilegymDBError

    try:
        return list(Catalog.default().solutions)
    except TilegymDBError:  # one broken record; nothing is proposed while it is
        return []


def _starting(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


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
    """Return a callback: refuse what is no time, before anything is loaded.

    Raises:
        BadParameter: NaN, infinity, zero or less.
    """
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"a number of seconds above 0, not {value:g}.")
    return value


def path_given(text: str | Path) -> Path:
    """Return a parser of paths: an empty one would be the current folder.

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
    from tilegym_db.errors import UsageError

    if op_type is None:
        return
    select_definitions(Catalog.default(), op_type, None)
    if name is not None and (found := Catalog.default().definition(name).op_type) != op_type:
        raise UsageError(
            f"{name} is of op_type {found}, not {op_type}; leave one of the two out.", code="op_type_differs"
        )


def regular_file(path: Path) -> Path:
    """Return a callback of path arguments: refuse what is neither a file nor a folder, since reading a FIFO may never
    end.

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
    """Return a callback of configs: refuse what is none before PyTorch and transformers are imported, which takes
    seconds.

    Raises:
        BadParameter: a FIFO, a socket or a device.
        UsageError: no JSON object that states a ``model_type``, or with sizes that no model has.
    """
    from tilegym_db.scaffold.model_config import check_config_sizes, typed_config

    file, content = typed_config(regular_file(path))
    check_config_sizes(content, file)
    return path


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="A model's config: a JSON file, or a folder with config.json.", exists=True, callback=config_file
    ),
]


# ---- programs -------------------------------------------------------------------------------------
# Programs of NVIDIA's that a command is about: without one there is nothing to be found, and the exit status says so.


@contextmanager
def needing_program(name: str) -> Iterator[None]:
    """What fails in here for want of a program fails as for want of a package, with exit status 2.

    Raises:
        MissingPackageError: the program is not installed; says how to get it.
    """
    from tilegym_db.bench.instruments.requests import find_program
    from tilegym_db.errors import MissingPackageError, ToolchainError

    try:
        yield
    except ToolchainError:
        try:
            find_program(name)
        except ToolchainError as absent:
            raise MissingPackageError(str(absent), code=absent.code) from None
        raise
