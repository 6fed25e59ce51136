"""Options that several commands share, with their parsers and shell completion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tilegym_db.errors import (
    MissingPackageError,
    NotFoundError,
    TilegymDBError,
    ToolchainError,
    UsageError,
)

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition
    from tilegym_db.records.dtypes import Scalar

# ---- Selection ------------------------------------------------------------------------------------------

T = TypeVar("T")


def select_definitions(catalog: Catalog, op_type: str | None, status: str | None) -> list[Definition]:
    """Return the Definitions of a family and status, sorted by name.

    Raises:
        NotFoundError: there is no such family or status; the message lists the known ones.
    """
    found = list(catalog.definitions.values())
    return of_kind(found, [(item.op_type, status_of(item)) for item in found], op_type, status)


def of_kind(items: list[T], kinds: list[tuple[str, str]], op_type: str | None, status: str | None) -> list[T]:
    """Return the items of a family and status; ``kinds`` has both for each item. Refuse a family or status without any."""
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
    """Return the value of the ``status:`` tag; ``-`` without the tag."""
    return next((tag.removeprefix("status:") for tag in definition.tags if tag.startswith("status:")), "-")


# ---- Pairs ----------------------------------------------------------------------------------------------
# Every command accepts ``--axes M=1,N=4096`` and ``--axes M=1 --axes N=4096``.

MAX_SIZE = (1 << 63) - 1


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Parse ``["M=1,N=2"]`` or ``["M=1", "N=2"]`` to ``{"M": "1", "N": "2"}``. A comma in brackets belongs to the value."""
    found: dict[str, str] = {}
    for part in (part.strip() for text in texts or () for part in _parts(text)):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not (separator and key and value):
            raise UsageError(f"{option}: {part!r} must read name=value, as in M=4096.", code="pair_invalid")
        if key in found:
            raise UsageError(f"{option}: '{key}' is given twice.", code="pair_repeated")
        found[key] = value
    return found


def parse_axes(texts: Sequence[str] | None) -> dict[str, int]:
    """Parse sizes of at most 64 bits by :func:`parse_pairs`."""
    return {axis: _size(axis, text) for axis, text in parse_pairs("--axes", texts).items()}


def parse_scalars(texts: Sequence[str] | None) -> dict[str, Scalar]:
    """Parse scalars by :func:`parse_pairs`; NaN and infinity are refused."""
    scalars = {name: parse_scalar(text) for name, text in parse_pairs("--scalar", texts).items()}
    for name, value in scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--scalar: {name} must be a finite number, not {value}.", code="number_not_finite")
        if isinstance(value, int) and not -MAX_SIZE <= value <= MAX_SIZE:
            raise UsageError(f"--scalar: {name} does not fit in 64 bits.", code="number_too_large")
    return scalars


def parse_tunables(texts: Sequence[str] | None) -> dict[str, bool | int | float | str]:
    """Parse the values of a config by :func:`parse_pairs`, as JSON or else as text."""
    return {name: _tunable(text) for name, text in parse_pairs("--config", texts).items()}


def parse_scalar(text: str) -> Scalar:
    """Convert a text to a boolean, None or a number if possible; else return the text."""
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


def _size(axis: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"--axes: {axis} must be a whole number, not {text[:40]!r}.", code="number_not_whole")
    if len(digits) > 19 or abs(int(text)) > MAX_SIZE:
        raise UsageError(f"--axes: {axis} does not fit in 64 bits.", code="number_too_large")
    return int(text)


def _tunable(text: str) -> bool | int | float | str:
    import json

    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


# ---- Shell completion -----------------------------------------------------------------------------------
# A failure gives no proposal rather than an error, because a shell completes while the user types.


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the completion of a word by the names that begin with it; they are read when a shell asks."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _definitions() -> list[str]:
    from tilegym_db.catalog import Catalog

    return sorted({path.stem for root in Catalog.default().roots for path in root.glob("definitions/*/*.json")})


def _solutions() -> list[str]:
    from tilegym_db.catalog import Catalog

    try:
        return list(Catalog.default().solutions)
    except TilegymDBError:  # a broken record: propose nothing
        return []


def _op_types() -> list[str]:
    from tilegym_db.catalog import Catalog

    roots = Catalog.default().roots
    return sorted({path.parent.name for root in roots for path in root.glob("definitions/*/*.json")})


def _gpus() -> list[str]:
    from tilegym_db.records.hardware import GPU_SLUGS, gpu_family

    return ["auto", *sorted({*GPU_SLUGS, *map(gpu_family, GPU_SLUGS)})]


def _languages() -> Iterable[str]:
    from tilegym_db.records import LANGUAGES

    return LANGUAGES


def _targets() -> list[str]:
    from tilegym_db.records.hardware import TARGETS

    return [*TARGETS, "all"]


complete_definition = _completing(_definitions)
complete_name = _completing(lambda: [*_definitions(), *_solutions()])
complete_solution = _completing(_solutions)
complete_op_type = _completing(_op_types)
complete_gpu = _completing(_gpus)
complete_language = _completing(_languages)
complete_target = _completing(_targets)


def complete_measurable_gpu(incomplete: str) -> list[str]:
    """Return matching devices for a command that measures."""
    return [name for name in ("auto", "cpu") if name.startswith(incomplete)] or complete_gpu(incomplete)


def complete_statement(incomplete: str) -> list[str]:
    """Return the statement with its last word completed to the name of a view."""
    from tilegym_db.store.asking import public_views

    match = re.search(r"(\w*)$", incomplete)
    word = match.group() if match else ""
    start = incomplete[: len(incomplete) - len(word)]
    return [start + view for view in public_views() if view.startswith(word)]


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
Trust = Annotated[
    bool, typer.Option("--trust", help="Trust foreign traces, which were neither measured here nor shipped.")
]
WorkloadGlob = Annotated[str | None, typer.Option(help="Glob over tags, axes (M=1,*) and uuid.")]
Quick = Annotated[bool, typer.Option(help="Few workloads and samples.")]
Force = Annotated[bool, typer.Option("--force", help="Repeat what earlier runs did.")]
AllowUnsandboxed = Annotated[
    bool, typer.Option(help="Verify even if workers cannot be confined; such traces are never published.")
]

# One kernel.
Implements = Annotated[
    str | None,
    typer.Option("--definition", "-d", help="The operator it implements.", autocompletion=complete_definition),
]

# One call of an operator.
SolutionToRun = Annotated[str, typer.Argument(help="The solution.", metavar="SOLUTION", autocompletion=complete_name)]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="Dtypes: T=bfloat16.", metavar="T=DTYPE,...")]
Require = Annotated[
    str,
    typer.Option(help="What must be verified of a kernel's bits: deterministic, batch-invariant.", metavar="NAME"),
]
Scalars = Annotated[list[str] | None, typer.Option("--scalar", help="Scalars: eps=1e-5.", metavar="S=VALUE,...")]
Tunables = Annotated[list[str] | None, typer.Option("--config", help="Tunables: BLOCK_M=2.", metavar="NAME=VALUE,...")]

# One run of a whole model.
MAX_PROMPT_TOKENS = 1 << 20
"""Maximum prompt length. Attention over more tokens takes hours or too much memory."""
ModelDtype = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
Layers = Annotated[int | None, typer.Option(help="Keep only the first so many layers.", min=1)]
Sequences = Annotated[int, typer.Option("--batch", help="Sequences.")]
PromptTokens = Annotated[int, typer.Option(help="Random tokens of each sequence.", min=1, max=MAX_PROMPT_TOKENS)]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate for each; 0 times the prefill alone.", min=0)]
Rounds = Annotated[
    int,
    typer.Option(
        help="Interleaved rounds of stock and patched; fewer than 8 give no interval, and are not published.",
        min=1,
        max=100_000,
    ),
]


def finite_seconds(value: float | None) -> float | None:
    """Return a number of seconds if it is positive and finite."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"a number of seconds above 0, not {value:g}.")
    return value


def path_given(text: str | Path) -> Path:
    """Parse a path. An empty text, which would mean the current folder, and '-' are refused."""
    if not str(text):
        raise typer.BadParameter("'' is not a path.")
    if str(text) == "-":
        raise typer.BadParameter("'-' is not a path here; for a file of that name use ./-.")
    return Path(text)


def check_op_type(op_type: str | None, name: str | None = None) -> None:
    """Raise if a family does not exist or is not the family of the Definition."""
    from tilegym_db.catalog import Catalog

    if op_type is None:
        return
    select_definitions(Catalog.default(), op_type, None)
    if name is not None and (found := Catalog.default().definition(name).op_type) != op_type:
        raise UsageError(
            f"{name} is of op_type {found}, not {op_type}; leave one of the two out.", code="op_type_differs"
        )


def regular_file(path: Path) -> Path:
    """Return a path unless it is a FIFO, a socket or a device, because reading a FIFO may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise typer.BadParameter(f"'{path}' is neither a file nor a folder.")
    return path


def solution_place(path: Path) -> Path:
    """Return the path of a Solution, or its place in a family: ``family.json#<solution>``."""
    from tilegym_db.catalog.record_files import file_of

    if not file_of(path).exists():
        raise typer.BadParameter(f"Path '{path}' does not exist.")
    regular_file(file_of(path))
    return path


def regular_files(paths: list[Path] | None) -> list[Path] | None:
    """Check every path by :func:`regular_file`."""
    for path in paths or ():
        regular_file(path)
    return paths


def config_file(path: Path) -> Path:
    """Return the path of a valid model config. This check runs before the slow imports of PyTorch and transformers."""
    from tilegym_db.scaffold.model_config import check_config_sizes, typed_config

    file, content = typed_config(regular_file(path))
    check_config_sizes(content, file)
    return path


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="A model's config: a JSON file, a folder with config.json, or an id in the local hub cache.",
        callback=config_file,
    ),
]


# ---- Programs -------------------------------------------------------------------------------------------


@contextmanager
def needing_program(name: str) -> Iterator[None]:
    """Turn a failure due to a missing NVIDIA program into exit status 2, as for a missing package."""
    from tilegym_db.measurement.instruments.requests import find_program

    try:
        yield
    except ToolchainError:
        try:
            find_program(name)
        except ToolchainError as absent:
            raise MissingPackageError(str(absent), code=absent.code) from None
        raise
