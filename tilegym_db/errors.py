"""Every exception tilegym-db raises, in one tree rooted at :class:`TilegymDBError`.

A message is one paragraph: what is wrong, where (file and key), and the next step. The command line prints it as it is
and exits with ``exit_code``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Top-level module -> the package that has it and the extra that brings it.
PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("PyTorch", "torch"),
    "numpy": ("NumPy", "torch"),
    "triton": ("Triton", "triton"),
    "tilelang": ("TileLang", "tilelang"),
    "tvm": ("TileLang", "tilelang"),
    "tvm_ffi": ("TileLang", "tilelang"),
    "cuda": ("cuTile (cuda-tile)", "cutile"),
    "pyarrow": ("Apache Arrow (pyarrow)", "arrow"),
    "jinja2": ("Jinja2", "report"),
    "transformers": ("transformers", "transformers"),
    "safetensors": ("safetensors", "transformers"),
    "flashinfer_bench": ("flashinfer-bench", "flashinfer"),
    "mcp": ("the package mcp", "mcp"),
    "ray": ("Ray", "ray"),
}

# Top-level modules of what every installation has: where one is missing, the installation is broken.
REQUIRED = {
    "duckdb": "duckdb",
    "_duckdb": "duckdb",
    "filelock": "filelock",
    "packaging": "packaging",
    "platformdirs": "platformdirs",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "rich": "rich",
    "typer": "typer",
}


class TilegymDBError(Exception):
    """Base of every error of this package.

    ``exit_code`` is the exit status of the command line: 1 a finding, 2 wrong usage, 3 no verified solution.
    ``code`` names the cause (``axis_undeclared``). Programs and tests compare it; wording may change, codes do not.
    """

    exit_code = 1
    code = "error"

    def __init__(self, *arguments: object, code: str = "") -> None:
        super().__init__(*arguments)
        if code:
            self.code = code


class RecordError(TilegymDBError, ValueError):
    """A Definition, Solution, Workload or Trace is not valid; names the file and the key.

    ``problems`` has every fault of a record that was read whole, and ``codes`` their codes in the same order. The message
    shows the first ones; ``code`` is the first code.
    """

    code = "record_invalid"
    problems: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()

    @classmethod
    def of(cls, faults: Iterable[RecordError]) -> RecordError:
        """Return one error for several faults of a record."""
        each = [(text, code) for fault in faults for text, code in fault.each()]
        error = cls("; ".join(text for text, _ in each), code=each[0][1] if each else "")
        error.problems = tuple(text for text, _ in each)
        error.codes = tuple(code for _, code in each)
        return error

    def each(self) -> list[tuple[str, str]]:
        """Return the text and the code of every fault."""
        return list(zip(self.problems, self.codes, strict=True)) or [(str(self), self.code)]


class ConflictError(TilegymDBError):
    """A record clashes with one that exists: duplicate name, or a semantic change without a version bump."""

    code = "conflict"


class NotFoundError(TilegymDBError, KeyError):
    """No record of that name; the message suggests the nearest ones."""

    exit_code = 2
    code = "not_found"

    def __str__(self) -> str:  # KeyError would print repr(message)
        return str(self.args[0]) if self.args else ""


class UsageError(TilegymDBError):
    """The request itself makes no sense: a missing axis, an option that does not apply."""

    exit_code = 2
    code = "usage"


class HardwareError(UsageError):
    """The GPU asked for is unknown or not the one in this machine, or its driver refuses what measuring takes."""

    code = "hardware"


class ToolchainError(TilegymDBError):
    """A compiler or library that a Solution needs is missing or too old; names the pip extra to install."""

    code = "toolchain"


class MissingPackageError(ToolchainError):
    """What was asked for needs a package of an extra that is not installed; names the extra and the command."""

    exit_code = 2
    code = "package_missing"


class CompileError(TilegymDBError):
    """A Solution's source did not compile for a target; carries the compiler's own message, clipped."""

    code = "compile_failed"


class SolutionError(TilegymDBError):
    """A Solution's source failed to load or raised while it ran."""

    code = "solution_failed"


class StoreError(TilegymDBError):
    """The database or its folder cannot be used: locked, read-only, full, or written by a newer version."""

    code = "store"


class QueryError(UsageError):
    """The SQL given is not a single read-only statement, or DuckDB refused it."""

    code = "query"


class QueryTimeoutError(QueryError):
    """A query took longer than it was given, and was stopped."""

    exit_code = 1
    code = "query_timeout"


class NoSolutionError(TilegymDBError):
    """Nothing verified can serve the request, and there is no stock code to fall back on."""

    exit_code = 3
    code = "no_solution"


def check_kind(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise :class:`UsageError` for an argument of another type; ``what`` says what it is ("gpu is the name of a GPU")."""
    if not isinstance(value, kind):
        raise UsageError(f"{what}, not {type(value).__name__}.", code="argument_type")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'rms_norm'?`` for the nearest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(match) for match in close) + "?"


def missing_package(module: str) -> MissingPackageError | None:
    """Return the error that says how to install what ``module`` (``torch.nn``) belongs to; None for one that we do not
    use.
    """
    top = module.partition(".")[0]
    if top in PACKAGES:
        package, extra = PACKAGES[top]
        return MissingPackageError(
            f"this needs {package}, which is not installed here. Try: pip install 'tilegym-db[{extra}]'",
            code="package_absent",
        )
    if top in REQUIRED:
        return MissingPackageError(
            f"the package {REQUIRED[top]} is missing, which tilegym-db always needs. Try: pip install {REQUIRED[top]}",
            code="package_absent",
        )
    return None


def broken_package(error: BaseException) -> MissingPackageError | None:
    """Return the error that names a package which is installed and cannot be imported; None if ``error`` came from
    elsewhere.
    """
    trace, broken = error.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and (top in PACKAGES or top in REQUIRED):
            broken = top  # the innermost: a package that imports it is whole
        trace = trace.tb_next
    if not broken:
        return None
    package = PACKAGES[broken][0] if broken in PACKAGES else f"the package {REQUIRED[broken]}"
    wanted = f"'tilegym-db[{PACKAGES[broken][1]}]'" if broken in PACKAGES else REQUIRED[broken]
    reason = (str(error).splitlines() or [""])[0][:300]
    return MissingPackageError(
        f"{package} is installed here and cannot be imported: {type(error).__name__}: {reason}. Try: pip install "
        f"--force-reinstall {wanted}",
        code="package_broken",
    )
