"""A change of what serves models, on trial: what was published before is kept until it is decided whether the new stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, RecordError, StoreError
from tilegym_db.files import write_atomically, write_folder
from tilegym_db.folder_locks import writing
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.loop import Coverage
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.store.input_files import LOCK_NAME, loop_folder, trace_files
from tilegym_db.store.journal import read_journal
from tilegym_db.store.publish import publish, published_folder

__all__ = ["Trial"]

BEFORE = "before.json"


class Trial:
    """What is published for this user on a GPU, with the kernels of one task and without them.

    Everything is on disk before it counts, so that a killed process leaves a trial that the next one goes on with.
    """

    def __init__(self, task: str, gpu: str, home: Path) -> None:
        """Nothing is changed yet."""
        self.folder = loop_folder(home) / "trials" / task
        self.home, self.gpu = home, gpu
        self.published = home / "published" / gpu

    @property
    def base(self) -> str:
        """Digest of the table that the resolver reads now; empty where nothing is published for this user."""
        path = self.published / LOCK_NAME
        return length_prefixed_digest([path.read_bytes()])[:32] if path.is_file() else ""

    @property
    def served(self) -> str:
        """Digest of all that says which kernels serve models here: what is published for this user, and in a checkout."""
        locks = [folder / LOCK_NAME for folder in (self.published, published_folder(self.gpu))]
        return length_prefixed_digest([path.read_bytes() if path.is_file() else b"" for path in locks])

    def begin(self, before: Coverage, without: Collection[str] = ()) -> tuple[Coverage, str]:
        """Keep what is published now, and publish what is verified; done before, it only publishes.

        Args:
            before: the coverage without the change.
            without: digests of Solutions that are not published: earlier experiments discarded them. Those that were published
                before the trial stay, since somebody published them after that.

        Returns:
            The coverage and the table's digest from before the trial, whoever began it.
        """
        if not self.folder.is_dir():
            state = {"coverage": before.model_dump(mode="json"), "base": self.base}
            kept = {f"published/{name}": content for name, content in _files_of(self.published).items()}
            with writing(self.folder.parent):
                write_folder(self.folder, {BEFORE: json.dumps(state).encode(), **kept})
        self._publish(set(without) - self._published_before(without))
        state = json.loads((self.folder / BEFORE).read_bytes())
        return Coverage.model_validate(state["coverage"]), state["base"]

    def keep(self) -> None:
        """The change stays."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def undo(self) -> None:
        """Publish again what was published before; the lock last, which vouches for the rest."""
        kept = _files_of(self.folder / "published")
        with writing(self.published.parent):
            for name in _files_of(self.published).keys() - kept.keys():
                (self.published / name).unlink(missing_ok=True)
            for name in sorted(kept, key=lambda name: name == LOCK_NAME):
                write_atomically(self.published / name, kept[name])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _published_before(self, digests: Collection[str]) -> set[str]:
        """Which Solutions were published before the trial: for this user, or in the checkout that ``publish`` writes to."""
        folders = {self.folder / "published", published_folder(self.gpu)} - {self.published}
        found: set[str] = set()
        for path in [path for folder in folders for path in trace_files(folder)]:
            content = path.read_bytes()
            if any(digest.encode() in content for digest in digests):
                with suppress(StoreError, RecordError):  # damaged, and not served
                    found |= {trace.solution_digest for trace in read_journal(path).traces if trace.status == "PASSED"}
        return found

    def _publish(self, without: Collection[str]) -> None:
        with open_store(self.home, catalog=Catalog.default()) as store:
            ingest_journals(store)
            try:
                publish(store, self.gpu, own=True, without=without)
            except NotFoundError:
                return  # nothing verified: what was published before stays


def _files_of(folder: Path) -> Mapping[str, bytes]:
    """Contents by path below the folder; nothing where there is no folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
