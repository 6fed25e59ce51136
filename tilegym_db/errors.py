"""Every exception of tilegym-db, in one tree rooted at :class:`TilegymDBError`.

A message is one paragraph: what is wrong, where (file and key), and the next step. The command line prints the message
unchanged and exits with ``exit_code``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Top-level module -> its package and the extra that installs it.
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

# Top-level module -> package that every installation has. If one is missing, the installation is broken.
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
    ``code`` names the cause (``axis_undeclared``) for programs and tests. The wording may change, codes do not.
    """

    exit_code = 1
    code = "error"

    def __init__(self, *arguments: object, code: str = "") -> None:
        super().__init__(*arguments)
        if code:
            self.code = code


class RecordError(TilegymDBError, ValueError):
    """An invalid Definition, Solution, Workload or Trace; the message names the file and the key.

    ``problems`` lists every fault of a record that was read whole, and ``codes`` their codes in the same order. The message
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
    """A record that clashes with an existing one: a duplicate name, or a new meaning without a new version."""

    code = "conflict"


class NotFoundError(TilegymDBError, KeyError):
    """A record name that does not exist; the message suggests the nearest names."""

    exit_code = 2
    code = "not_found"

    def __str__(self) -> str:  # KeyError would print repr(message)
        return str(self.args[0]) if self.args else ""


class UsageError(TilegymDBError):
    """A request that makes no sense: a missing axis, or an option that does not apply."""

    exit_code = 2
    code = "usage"


class HardwareError(UsageError):
    """A GPU that is unknown or not in this machine, or a driver that refuses what measuring needs."""

    code = "hardware"


class ToolchainError(TilegymDBError):
    """A compiler or library that a Solution needs and that is missing or too old; names the pip extra to install."""

    code = "toolchain"


class MissingPackageError(ToolchainError):
    """A missing package of an extra; names the extra and the command that installs it."""

    exit_code = 2
    code = "package_missing"


class SolutionError(TilegymDBError):
    """A Solution's source that failed to load or raised while it ran."""

    code = "solution_failed"


class StoreError(TilegymDBError):
    """A database or folder that cannot be used: locked, read-only, full, or written by a newer version."""

    code = "store"


class QueryError(UsageError):
    """SQL that is not a single read-only statement, or that DuckDB refused."""

    code = "query"


class QueryTimeoutError(QueryError):
    """A query that exceeded its time limit and was stopped."""

    exit_code = 1
    code = "query_timeout"


class NoSolutionError(TilegymDBError):
    """A request that no verified Solution can serve and that has no stock code as fallback."""

    exit_code = 3
    code = "no_solution"


def check_kind(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise :class:`UsageError` if an argument has another type; ``what`` describes it ("gpu is the name of a GPU")."""
    if not isinstance(value, kind):
        raise UsageError(f"{what}, not {type(value).__name__}.", code="argument_type")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'rms_norm'?`` with the nearest known names, or an empty string.

    A name that differs by case and punctuation alone, such as ``RMSNorm``, is the only suggestion.
    """
    known = list(known)
    close = [match for match in known if _letters(match) == _letters(name)]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(match) for match in close) + "?"


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


ALLOCATION_FAILURES = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""Texts of PyTorch's RuntimeError if memory is short: on a CPU, on a GPU, and for a size that no machine has."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports a failed allocation, by Python or by PyTorch on any device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION_FAILURES)


def missing_package(module: str) -> MissingPackageError | None:
    """Return the error that says how to install the package of ``module`` (``torch.nn``); None for an unknown package."""
    top = module.partition(".")[0]
    if top in PACKAGES:
        package, extra = PACKAGES[top]
        return MissingPackageError(
            f"this needs {package}, which is not installed here. Try: pip install 'tilegym-db[{extra}]'",
            code="package_missing",
        )
    if top in REQUIRED:
        return MissingPackageError(
            f"the package {REQUIRED[top]} is missing, which tilegym-db always needs. Try: pip install {REQUIRED[top]}",
            code="package_missing",
        )
    return None


def broken_package(error: BaseException) -> MissingPackageError | None:
    """Return the error that names an installed package that failed to import; None if ``error`` has another cause."""
    trace, broken = error.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and (top in PACKAGES or top in REQUIRED):
            broken = top  # the innermost one: the packages that import it are intact
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
