"""A lock of the kernels that a deployment serves: a file that :meth:`tilegym_db.models.Handle.write_lock` writes.

With a lock, the resolver's table of a GPU has the stock code and the locked kernels only. A newer publication or an edited source
then never changes what runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.published.entries import Candidate, Entry, MeasuredEntries
from tilegym_db.records.base import parse_object
from tilegym_db.records.solution import Config, config_id, name_with_config

if TYPE_CHECKING:
    from tilegym_db.published.table import ResolverTable

FORMAT = 1
_TEXTS = ("definition", "definition_digest", "solution", "solution_digest", "gpu")


@dataclass(frozen=True)
class LockedKernel:
    """A kernel that served calls: its operator, source and config, by digest, and the GPU slug of its measurement."""

    definition: str
    definition_digest: str
    solution: str
    solution_digest: str
    gpu: str
    config_text: str = "{}"
    """The config as canonical JSON."""

    @property
    def config(self) -> Config:
        """A value per tunable."""
        config: Config = json.loads(self.config_text)
        return config

    def __str__(self) -> str:
        """Return the form ``rms_norm_triton[BLOCK_M=2]``."""
        return name_with_config(self.solution, self.config)

    @classmethod
    def of(cls, definition: str, definition_digest: str, candidate: Candidate, gpu: str) -> LockedKernel:
        """Return the entry of a candidate that a table of a GPU has."""
        text = json.dumps(dict(candidate.config), sort_keys=True)
        return cls(definition, definition_digest, candidate.solution, candidate.solution_digest, gpu, text)

    def candidates_in(self, table: ResolverTable) -> Iterator[Candidate]:
        """Yield the measurements of this kernel with this operator that a table has."""
        if table.gpu == self.gpu:
            for dtypes in table.dtypes_of(self.definition):
                for entry in table.entries(self.definition, dtypes):
                    if entry.definition_digest == self.definition_digest:
                        yield from (one for one in entry.candidates if _identity(one) == _identity(self))


@dataclass(frozen=True)
class ServingLock:
    """The kernels that may serve, as a file states them."""

    source: str
    """The file, for messages."""
    kernels: tuple[LockedKernel, ...]

    @property
    def definitions(self) -> frozenset[str]:
        """The operators that have a locked kernel."""
        return frozenset(kernel.definition for kernel in self.kernels)

    @classmethod
    def read(cls, path: Path) -> ServingLock:
        """Read a lock.

        Raises:
            RecordError: the file cannot be read, is no lock, or was written by a newer version.
        """
        content = parse_object(read_bytes(path, "serving lock"), "serving lock", path)
        if not isinstance(content, dict) or content.get("serving_lock") != FORMAT:
            raise RecordError(
                f'{path}: this is no lock of served kernels ("serving_lock": {FORMAT}). Write one with handle.write_lock(path).',
                code="serving_lock_invalid",
            )
        kernels = content.get("kernels")
        if not isinstance(kernels, list) or not all(map(_is_kernel, kernels)):
            raise RecordError(
                f"{path}: kernels: each has the texts {', '.join(_TEXTS)} and the object config. Write the lock again.",
                code="serving_lock_invalid",
            )
        return cls(
            str(path),
            tuple(
                LockedKernel(
                    **{name: one[name] for name in _TEXTS}, config_text=json.dumps(one["config"], sort_keys=True)
                )
                for one in kernels
            ),
        )

    def applied_to(self, table: ResolverTable) -> ResolverTable:
        """Return a table whose candidates are stock code, other baselines and the locked kernels."""
        from tilegym_db.published.table import ResolverTable

        allowed = set(map(_identity, self.kernels))
        loaders = {name: partial(_kept, table, name, allowed) for name in table.definitions}
        return ResolverTable(table.gpu, table.sm, table.published, loaders, table.source, table.load_peaks)


def write_lock_file(path: Path, kernels: Iterable[LockedKernel]) -> None:
    """Write kernels as a lock, sorted; the same kernels give the same bytes.

    Raises:
        StoreError: the file cannot be written.
    """
    rows = [
        {**{name: getattr(kernel, name) for name in _TEXTS}, "config": kernel.config}
        for kernel in sorted(kernels, key=lambda one: (one.definition, one.solution, one.config_text, one.gpu))
    ]
    content = {"serving_lock": FORMAT, "kernels": rows}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _identity(kernel: LockedKernel | Candidate) -> tuple[str, str, str]:
    """Return what tells a kernel from others: its name, the digest of its source, and its config."""
    return kernel.solution, kernel.solution_digest, config_id(kernel.config)


def _is_kernel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in _TEXTS)
        and isinstance(value.get("config"), dict)
    )


def _kept(table: ResolverTable, definition: str, allowed: set[tuple[str, str, str]]) -> MeasuredEntries:
    by_dtypes = {
        tuple(sorted(dtypes.items())): partial(_kept_entries, table, definition, dtypes, allowed)
        for dtypes in table.dtypes_of(definition)
    }
    return MeasuredEntries(by_dtypes, table.scalar_hull(definition))


def _kept_entries(
    table: ResolverTable, definition: str, dtypes: Mapping[str, str], allowed: set[tuple[str, str, str]]
) -> tuple[Entry, ...]:
    return tuple(
        replace(
            entry,
            candidates=tuple(one for one in entry.candidates if one.role != "kernel" or _identity(one) in allowed),
        )
        for entry in table.entries(definition, dtypes)
    )
