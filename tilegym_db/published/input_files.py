"""Names the files from which the database is derived, in the catalog's roots and the home folder. It reads no content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.catalog.record_files import library_files, solution_folders
from tilegym_db.files import regular_files
from tilegym_db.paths import home as default_home
from tilegym_db.published.trace_file import SUFFIX

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog

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


def loop_folder(home: Path | None = None) -> Path:
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
