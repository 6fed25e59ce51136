"""The first two steps of a submission: its folder is read as data, and its source is read before anything of it runs."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.broken import RECORD_NAME
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.files import read_bytes
from tilegym_db.records import Definition
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.loop import Task
from tilegym_db.records.omitted import why_not_timed
from tilegym_db.records.signature import signature_problem
from tilegym_db.verify.scan import hard_findings, scan_sources

__all__ = ["DELIVERABLE", "AttemptRefusal", "folder_digest", "receive", "scan_refusal"]

DELIVERABLE = ("kernel.py", RECORD_NAME)
"""What a submission consists of. Whatever else an author has written, a reference or a benchmark, has no place in a verdict."""

LISTED = 8


@dataclass(frozen=True)
class AttemptRefusal:
    """Why a submission goes no further: the gate that refused it, the reason, and what shows it again."""

    gate: str
    reason: str
    command: str = ""


def receive(folder: Path, task: Task, definition: Definition) -> SolutionFiles | AttemptRefusal:
    """The Solution that a folder holds, or why it is none that the task asks for. Nothing of it runs.

    Raises:
        UsageError: ``folder`` is no folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Give one with {' and '.join(DELIVERABLE)}.")
    others = _others(folder)
    if others:
        named = ", ".join(others[:LISTED]) + (f" and {len(others) - LISTED} more" if len(others) > LISTED else "")
        return AttemptRefusal(
            "received",
            f"the folder holds {named}. An author hands in {' and '.join(DELIVERABLE)} and nothing else: reference, inputs, "
            "comparison and timing are the database's.",
        )
    if definition.digest != task.definition_digest:
        return AttemptRefusal("received", f"{definition.name} changed since the task was made. Make a new task.")
    try:
        files = SolutionFiles.read(folder)
        record = files.record
        if set(files.sources) != {DELIVERABLE[0]}:
            return AttemptRefusal(
                "received", f"solution.json lists the sources {', '.join(files.sources)}, not kernel.py alone."
            )
        if (record.definition, record.spec.language) != (task.definition, task.language):
            found = f"{record.spec.language} for {record.definition}"
            return AttemptRefusal(
                "received", f"it is {found}, and the task asks for {task.language} for {task.definition}."
            )
        if record.spec.role != "kernel" or record.spec.provides is not None:
            return AttemptRefusal(
                "received", "a submission has the role 'kernel' and provides nothing: baselines are the database's."
            )
        if record.spec.omits:
            return AttemptRefusal(
                "received", f"{why_not_timed('it', record.spec.omits)}. The task asks for every output."
            )
        record.check_against(definition)
    except (RecordError, ValueError) as error:
        return AttemptRefusal("received", str(error).replace(f"{folder}{os.sep}", ""))
    problem = signature_problem(record, files.sources[record.spec.entry_path], definition)
    return files if problem is None else AttemptRefusal("received", f"entry_point {problem}.")


def _others(folder: Path) -> list[str]:
    """What is neither of the two files. Hidden files and compiled Python are what tools leave behind, and nobody reads them."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in (*DELIVERABLE, "__pycache__") and not entry.name.startswith(".")
    )


def scan_refusal(files: SolutionFiles) -> AttemptRefusal | None:
    """What the static scan refuses of the sources."""
    found = hard_findings(scan_sources(files.record, files.sources))
    if not found:
        return None
    return AttemptRefusal(f"scan: {found[0].rule}", "\n".join(str(finding) for finding in found[:LISTED]))


def folder_digest(folder: Path) -> str:
    """Identity of a folder that holds no valid Solution: the names of what it holds, and the bytes of the two files."""
    parts = [name.encode() for name in _others(folder)]
    for name in DELIVERABLE:
        try:
            parts.append(hashlib.sha256(read_bytes(folder / name, "file")).digest())
        except RecordError:
            parts.append(b"")
    return length_prefixed_digest(parts)
