"""The files from which the database is derived: their places, and the format of published traces and search steps.

The format is JSON Lines in gzip, one file per Definition and GPU.

``traces/<gpu>/<op_type>/<definition>.jsonl.gz`` has one trace per line, and ``<op_type>/tuning/<definition>.jsonl.gz``
one search step per line. Any reader of JSON Lines opens them without this package:

    duckdb -c "SELECT solution, axes, performance.latency_us FROM 'traces/h200/norm/*.jsonl.gz'"
    pandas.read_json("traces/h200/norm/rms_norm.jsonl.gz", lines=True)

A line has the fields of a Trace (``schema/trace.schema.json``) and up to two more. ``provides`` is the baseline that the
Solution stands for (``stock``, ``compile``, ...). ``origin`` is ``foreign`` if the publishing installation had not measured
the trace.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog.record_files import library_files, solution_folders
from tilegym_db.errors import RecordError
from tilegym_db.files import MiB, regular_files
from tilegym_db.paths import home as default_home

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Trace


SUFFIX = ".jsonl.gz"
EXTRA_KEYS = ("provides", "origin")
"""Keys of a line that are not fields of a Trace."""

DIGEST_DIGITS = 8
ERRORS = ("rel_fro", "worst_row_rel", "max_abs")
MAX_BYTES = 256 * MiB
"""Maximum number of bytes that a file may unpack to; the largest today has 0.6 MB."""

_GZIP_MAGIC = b"\x1f\x8b"
_TIMES = ("latency_us", "ci_low_us", "ci_high_us", "host_us", "wall_us", "profiled_us")


# ---- packing --------------------------------------------------------------------------------------


def trace_lines(
    traces: Iterable[Mapping[str, Any]], provides: Mapping[str, str | None], foreign: Iterable[str] = ()
) -> bytes:
    """Return the lines of a trace file.

    Args:
        provides: the baseline that a Solution stands for, by name.
        foreign: ids of runs that were not measured by the installation that publishes them.
    """
    borrowed = frozenset(foreign)
    lines = []
    for trace in traces:
        stands_for = provides.get(trace["solution"])
        more = {} if stands_for is None else {"provides": stands_for}
        lines.append(rounded(trace) | more | ({"origin": "foreign"} if trace["run_id"] in borrowed else {}))
    return json_lines(lines)


def json_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line of JSON per record."""
    return b"".join(
        json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        for record in records
    )


def packed(lines: bytes) -> bytes:
    """Return the content of a file with these lines. It has no time stamp, so equal lines make an equal file."""
    return gzip.compress(lines, 9, mtime=0)


def rounded(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace's fields with the digits that are published.

    Times of a microsecond or more are whole nanoseconds. Errors have three significant digits, as every report prints
    them, and the digest of an envelope has its first eight.
    """
    result = dict(trace)
    correctness = result.get("correctness")
    if correctness is not None:
        errors = {name: float(f"{correctness[name]:.2e}") for name in ERRORS if correctness.get(name) is not None}
        result["correctness"] = {**correctness, **errors}
    for name in ("performance", "audit"):
        if result.get(name) is not None:
            result[name] = {**result[name], **_whole_nanoseconds(result[name])}
    if result.get("envelope") is not None:
        result["envelope"] = {**result["envelope"], "digest": result["envelope"]["digest"][:DIGEST_DIGITS]}
    return result


def _whole_nanoseconds(part: Mapping[str, Any]) -> dict[str, float]:
    # Shorter times would lose significant digits.
    return {name: round(part[name], 3) for name in _TIMES if (part.get(name) or 0) >= 1}


# ---- reading --------------------------------------------------------------------------------------


def is_packed(content: bytes) -> bool:
    """Return True if content is a published file, by its first two bytes; a journal is plain text."""
    return content.startswith(_GZIP_MAGIC)


def unpacked(content: bytes, source: str | Path) -> bytes:
    """Return the lines of a published file; errors name ``source``."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            lines = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(source, error) from None
    if len(lines) > MAX_BYTES:
        raise RecordError(
            f"{source}: this file unpacks to more than {MAX_BYTES // MiB} MiB, which is the most that is read.",
            code="file_too_large",
        )
    return lines


def read_lines(content: bytes, source: str | Path) -> list[dict[str, Any]]:
    """Return the object of every line of a published file."""
    from pydantic_core import from_json

    found = []
    for number, line in enumerate(unpacked(content, source).splitlines(), start=1):
        try:
            record = from_json(line, cache_strings="all")
        except ValueError as error:
            raise damaged(f"{source}:{number}", error) from None
        if not isinstance(record, dict):
            raise damaged(f"{source}:{number}", TypeError("the line is not a JSON object"))
        found.append(record)
    return found


def read_traces(content: bytes, source: str | Path) -> list[Trace]:
    """Return the traces of a published file, validated."""
    from tilegym_db.records import Trace

    return [
        Trace.from_parsed({name: value for name, value in line.items() if name not in EXTRA_KEYS}, source)
        for line in read_lines(content, source)
    ]


def damaged(source: str | Path, error: Exception) -> RecordError:
    """Return the error for a published file that cannot be read."""
    return RecordError(
        f"{source}: not a valid file of published traces: {type(error).__name__}: {error}. Publish it again.",
        code="trace_file_damaged",
    )


# ---- Names of files --------------------------------------------------------------------------------------

LOCK_NAME = "traces.lock.json"
PEAKS_NAME = "peaks.json"
"""Name of the file of a GPU's published peaks, beside its resolver table."""

MODELS_SUFFIX = ".models.jsonl"
"""Suffix of the published runs of a whole model on a GPU, one run per line: ``<model>.models.jsonl``."""

TUNING_FOLDER = "tuning"
"""Folder of published search steps, in the folder of an op_type: ``<op_type>/tuning/<definition>.jsonl.gz``."""

_RECORD_FILES = ("definitions/*/*.json", "workloads/*/*.jsonl")


# -- of a catalog -----------------------------------------------------------------------------------------------------


def record_files(catalog: Catalog) -> list[Path]:
    """Return the files of Definitions, of Solutions with their sources and shared code, and of Workloads."""
    found = [path for root in catalog.roots for pattern in _RECORD_FILES for path in root.glob(pattern)]
    for root in catalog.roots:
        for folder in solution_folders(root):
            for place, folders, names in os.walk(folder):  # a folder that cannot be entered counts as empty
                folders[:] = [name for name in folders if name != "__pycache__"]
                found += [Path(place) / name for name in names]
        found += library_files(root)
    return found


def published_folders(catalog: Catalog) -> list[Path]:
    """Return the folders of published traces that come with a catalog, one per GPU."""
    return sorted(path for root in catalog.roots for path in root.glob("traces/*") if path.is_dir())


def is_trace_file(name: str) -> bool:
    """Return True for ``<op_type>/<definition>.jsonl.gz``, the path of a trace file in one GPU's published folder."""
    return name.count("/") == 1 and name.endswith(SUFFIX)


def definition_of(path: Path) -> str:
    """Return the Definition of a trace file, by its name."""
    return path.name.removesuffix(SUFFIX)


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files of one GPU's published folder."""
    return regular_files(folder, f"*/*{SUFFIX}")


def shipped_traces(catalog: Catalog) -> list[Path]:
    """Return the published trace files that come with a catalog."""
    return [path for folder in published_folders(catalog) for path in trace_files(folder)]


def shipped_locks(catalog: Catalog) -> list[Path]:
    """Return the locks of a catalog's published folders."""
    return [folder / LOCK_NAME for folder in published_folders(catalog)]


def published_peaks_files(catalog: Catalog) -> list[Path]:
    """Return the files of peaks that come with a catalog, one per GPU."""
    return sorted(path for root in catalog.roots for path in root.glob(f"traces/*/{PEAKS_NAME}"))


def published_model_files(catalog: Catalog) -> list[Path]:
    """Return the files of model runs that come with a catalog, one per model and GPU."""
    return [path for folder in published_folders(catalog) for path in model_files(folder)]


def model_files(folder: Path) -> list[Path]:
    """Return the files of model runs in one GPU's published folder."""
    return regular_files(folder, f"*{MODELS_SUFFIX}")


def tuning_files(folder: Path) -> list[Path]:
    """Return the files of search steps in one GPU's published folder."""
    return sorted(folder.glob(f"*/{TUNING_FOLDER}/*{SUFFIX}"))


def published_tuning_files(catalog: Catalog) -> list[Path]:
    """Return the files of search steps that come with a catalog, one per Definition and GPU."""
    return [path for folder in published_folders(catalog) for path in tuning_files(folder)]


def pattern_files(catalog: Catalog) -> list[Path]:
    """Return the pages of patterns, one per language and root. A user's pages lie in the overlay."""
    return [path for root in catalog.roots for path in regular_files(root / "docs" / "patterns", "*.md")]


# -- of a home folder -------------------------------------------------------------------------------------------------


def own_peaks_files(home: Path) -> list[Path]:
    """Return every calibration made on this machine, oldest first."""
    return regular_files(home / "peaks", "*.json")


def own_tuning_files(home: Path) -> list[Path]:
    """Return the log of every search on this machine."""
    return regular_files(home / "tuning", "*.jsonl")


def loop_folder(home: Path | None) -> Path:
    """Return the folder of the loop's journals and submissions."""
    return (home or default_home()) / "loop"


def loop_files(home: Path, catalog: Catalog) -> list[Path]:
    """Return the journals of the loop and the pages of patterns."""
    return [*regular_files(loop_folder(home), "*.jsonl"), *pattern_files(catalog)]


def imported_folder(home: Path) -> Path:
    """Return the folder of data sets imported from other projects."""
    return home / "imported"


def imported_manifests(home: Path) -> list[Path]:
    """Return the manifests of all imported data sets, by path."""
    return regular_files(imported_folder(home), "*/*/manifest.json")


FOLDER = "shared"
