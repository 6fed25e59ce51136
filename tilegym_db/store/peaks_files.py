"""Calibrated peaks of GPUs: one file per calibration in ``<home>/peaks/``, and one per GPU beside the published traces.

The database table is filled from these files when one changes. Local measurements override published ones, which come
from another machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Broken, Catalog
from tilegym_db.catalog.record_files import warn_once
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically, writing
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import own_peaks_files, published_peaks_files
from tilegym_db.published.snapshot import read_published
from tilegym_db.records.roofline import GpuPeaks


def save_peaks(peaks: GpuPeaks, home: Path | None = None) -> Path:
    """Store a calibration of this machine and return its file. The database loads it when it is next opened.

    Raises:
        StoreError: the folder cannot be written.
    """
    folder = home or default_home()
    path = folder / "peaks" / f"{peaks.gpu}-{peaks.timestamp:%Y%m%dT%H%M%S%f}.json"
    with writing(folder):
        write_atomically(path, peaks_text(peaks).encode())
    return path


def peaks_text(peaks: GpuPeaks) -> str:
    """Return the content of a file of peaks."""
    return peaks.to_json(indent=2) + "\n"


def peaks_rows(home: Path, catalog: Catalog, refused: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table, from every file.

    An invalid file is left out and named once. An untrusted published file is named in ``refused``.
    """
    rows = []
    for is_own, files in ((True, own_peaks_files(home)), (False, published_peaks_files(catalog))):
        for path in files:
            try:
                content = (
                    read_bytes(path, "calibration") if is_own else read_published(path, path.parent, home, refused)
                )
                if content is None:
                    continue
                peaks = GpuPeaks.from_json(content, path)
            except RecordError as error:
                warn_once(Broken(path, path.stem, "", str(error)))
                continue
            rows.append(
                {
                    "gpu": peaks.gpu,
                    "gpu_name": peaks.gpu_name,
                    "driver": peaks.driver,
                    "timestamp": peaks.timestamp.isoformat(),
                    "is_own": is_own,
                    "record": json.loads(peaks.to_json()),
                }
            )
    return rows
