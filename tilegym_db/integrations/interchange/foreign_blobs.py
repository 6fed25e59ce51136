"""Where a Workload of a data set has its tensors: the file that the data set holds under a path, or why none can be used."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from tilegym_db.errors import RecordError
from tilegym_db.integrations.interchange import sol_execbench
from tilegym_db.store.imported import DataSet, StoredFile, StoredRecord

__all__ = ["base_of", "blob_of"]


def base_of(found: DataSet, item: StoredRecord) -> str:
    """The folder that paths of tensors in a Workload or Trace start at."""
    return PurePosixPath(item.path).parent.as_posix() if found.dialect == sol_execbench.DIALECT else ""


def blob_of(found: DataSet, name: str, given: str, base: str = "") -> StoredFile:
    """The file of an input.

    Args:
        found: the data set.
        name: of the input, for messages.
        given: the path that the Workload states.
        base: the folder that it starts at.

    Raises:
        RecordError: the file is not there, or is none that may be used.
    """
    file = found.files_by_path.get(os.path.normpath(os.path.join(base, given)))
    if file is None or file.role == "pointer":
        what = "is not in the data set" if file is None else "is a Git LFS pointer without its content"
        raise RecordError(f"inputs.{name}: {given} {what}; fetch it and import the data set again.")
    if file.role == "changed":
        raise RecordError(f"inputs.{name}: {given} was changed after the export, and is not used.")
    return file
