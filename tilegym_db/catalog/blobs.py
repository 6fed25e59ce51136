"""Files that hold inputs of Workloads: finds, checks and copies them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from tilegym_db.errors import ConflictError, RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.records import Workload
from tilegym_db.records.workload import SafetensorsInput

FOLDER, SUFFIX = "blob", ".safetensors"


def find_blob(roots: Sequence[Path], name: str, spec: SafetensorsInput) -> tuple[Path, bytes]:
    """Return the path and the bytes of the file that holds an input, from the first root that has it.

    Raises:
        RecordError: the file is missing in every root, leads out of its root, or differs from its sha256; or the Workload
            states no sha256.
    """
    root = next((root for root in roots if (root / spec.path).is_file()), None)
    if root is None:
        where = " or ".join(map(str, roots)) or "no folder: none is known here"
        raise RecordError(f"inputs.{name}: {spec.path} does not exist in {where}.", code="blob_missing")
    path = root / spec.path
    if not path.resolve().is_relative_to(root.resolve()):
        raise RecordError(f"inputs.{name}: {path} is a link out of {root}.", code="link_outside")
    content = read_bytes(path, "blob", limit=None)
    found = hashlib.sha256(content).hexdigest()
    if spec.sha256 is None:
        raise RecordError(f'inputs.{name}: state what {spec.path} holds: "sha256": "{found}".', code="digest_missing")
    if found != spec.sha256:
        raise RecordError(
            f"inputs.{name}: {path} is not what it was: its sha256 is {found[:12]}..., and the workload says "
            f"{spec.sha256[:12]}....",
            code="digest_differs",
        )
    return path, content


def check_blobs(workloads: Iterable[Workload], source: Path) -> None:
    """Raise :class:`RecordError` if a file that Workloads name cannot be added from ``source``."""
    for name, spec in _named(workloads).values():
        find_blob((source,), name, spec)


def add_blobs(workloads: Iterable[Workload], source: Path | None, root: Path) -> None:
    """Copy the files that Workloads name from ``source`` to ``root``; existing files stay.

    Raises:
        RecordError: a file is missing, differs from its sha256, or does not lie in ``blob/``.
        ConflictError: the root has a different file of that name.
    """
    named, roots = _named(workloads), (root,) if source is None else (source,)
    new = {place: given for place, given in named.items() if not os.path.lexists(root / place)}
    for place, (name, spec) in named.items():  # check all of them before writing one
        if place in new:
            find_blob(roots, name, spec)
        else:
            _refuse_other(name, spec, root)
    for place, (name, spec) in new.items():
        write_atomically(root / place, find_blob(roots, name, spec)[1])


def _named(workloads: Iterable[Workload]) -> dict[str, tuple[str, SafetensorsInput]]:
    """Return path -> name and spec of an input that the file holds."""
    named: dict[str, tuple[str, SafetensorsInput]] = {}
    for workload in workloads:
        for name, spec in workload.files().items():
            place = PurePosixPath(spec.path)
            if place.parts[:1] != (FOLDER,) or len(place.parts) < 2 or place.suffix != SUFFIX:
                raise RecordError(
                    f"inputs.{name}: {spec.path} does not lie in {FOLDER}/, or is not a {SUFFIX} file.",
                    code="blob_place",
                )
            _, known = named.setdefault(place.as_posix(), (name, spec))
            if known.sha256 != spec.sha256:
                raise RecordError(
                    f"inputs.{name}: two workloads name {spec.path}, each with another sha256.", code="blob_clash"
                )
    return named


def _refuse_other(name: str, spec: SafetensorsInput, root: Path) -> None:
    try:
        find_blob((root,), name, spec)
    except RecordError as error:
        raise ConflictError(
            f"{str(error).rstrip('.')}. Give the file another name, or remove that one.", code="blob_exists"
        ) from None
