"""Traces to a data set that a team shares, and from there into this store."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.folder_locks import writing
from tilegym_db.paths import home
from tilegym_db.scratch import remove_tree
from tilegym_db.store import statements
from tilegym_db.store.connection import open_store
from tilegym_db.store.data_set import Row, SharedDataSet
from tilegym_db.store.database import Store
from tilegym_db.store.exchange import own_traces
from tilegym_db.store.installation import KEY_NAME, signature
from tilegym_db.store.loading import IngestReport, load_traces, remember_files
from tilegym_db.store.remembered import read_own_traces, remember_own_traces, store_folder
from tilegym_db.store.sql import QueryResult, run_user_query

__all__ = ["SharedReport", "brought_in", "query_data_set", "share_traces", "sync_traces"]


@dataclass
class SharedReport:
    """What was written to a data set: traces, those of them that it had already, files, and what in it is not valid."""

    traces: int = 0
    known: int = 0
    written: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def share_traces(store: Store, data_set: SharedDataSet, gpu: str | None = None) -> SharedReport:
    """Add the traces that were measured here, of one GPU slug or family or of all, where the data set does not have them.

    What was shipped, or came from others, is theirs to share. Each GPU's traces become one file.

    Raises:
        StoreError: the data set cannot be reached, was written by a newer version, or cannot be written.
    """
    traces = own_traces(store, gpu)
    known, problems = _own_traces_in(store, data_set)
    report = SharedReport(len(traces), problems=problems)
    by_gpu: dict[str, list[Row]] = {}
    for trace in traces:
        if trace.trace_id in known:
            report.known += 1
            continue
        record = trace.to_json()
        by_gpu.setdefault(trace.gpu, []).append(Row(record, signature(store.home, "trace", record.encode())))
    for slug, rows in by_gpu.items():
        name = data_set.add(rows, slug)
        report.written += [name] if name else []
    return report


def _own_traces_in(store: Store, data_set: SharedDataSet) -> tuple[set[str], list[str]]:
    """Which of the traces that were measured here a data set has, and what in it is no valid file. Reads new files alone."""
    files = data_set.files()
    remembered = read_own_traces(store.home, data_set.uri)
    new = [file for file in files if (file.name, file.size) not in remembered]
    own = {trace.trace_id for trace in own_traces(store)} if new else set()
    found: dict[tuple[str, int], list[str]] = dict(remembered)
    problems = []
    for file in new:
        ids, wrong = data_set.trace_ids([file])
        problems += wrong
        if not wrong:
            found[file.name, file.size] = sorted(ids & own)
    if new or len(files) < len(remembered):
        remember_own_traces(store.home, data_set.uri, found, files)
    present = {(file.name, file.size) for file in files}
    return {one for key, ids in found.items() if key in present for one in ids}, problems


def sync_traces(
    store: Store, data_set: SharedDataSet, *, trust: bool = False, again: bool | None = None
) -> tuple[IngestReport, list[str]]:
    """Bring every trace of a data set into the store that it does not have; files that were read before are not read again.

    Returns what was brought in, and of each file that is not valid, why; such files stop nothing.

    Traces that this installation signed are local, all others foreign: they count only with ``trust``, and are shown without.
    With ``again``, which is as ``trust`` by default, files that were read are read again: they may have been read without trust.

    Raises:
        StoreError: the data set is empty, cannot be reached, or was written by a newer version; then nothing at all was
            brought in.
    """
    files = data_set.files()
    if not files:
        raise StoreError(
            f"there are no traces at {data_set.uri}. The first to share some writes them: "
            f"tilegym-db publish --gpu auto --to {data_set.uri}"
        )
    names = {Path(f"{data_set.uri}/{file.name}"): file for file in files}
    known = {row["path"] for row in store.rows(statements.INGESTED_FILES)}
    again = trust if again is None else again
    pending = {path: file for path, file in names.items() if again or str(path) not in known}
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        written: list[Path] = []
        problems = []
        for number, (path, file) in enumerate(list(pending.items())):
            rows, problem = data_set.rows(file)
            if problem:
                problems.append(problem)
                del pending[path]
                continue
            written.append(Path(folder) / f"{number}.jsonl")
            _write(written[-1], rows)
        report = load_traces(store, written, trust=trust)
    with store.transaction("sync traces into") as connection:
        remember_files(connection, {path: file.size for path, file in pending.items()})
    return replace(report, files=len(pending)), problems


def brought_in(data_set: SharedDataSet, *, trust: bool = False) -> tuple[IngestReport, list[str]]:
    """:func:`sync_traces` into the user's store, and every reason why something was not taken."""
    with open_store() as store:
        report, problems = sync_traces(store, data_set, trust=trust)
    return report, [*problems, *map(str, report.rejected)]


def query_data_set(
    uri: str, text: str, *, trust: bool = False, as_arrow: bool = False, timeout_s: float | None = None
) -> QueryResult:
    """Answer one SQL statement over the traces of a data set, in a store that is kept for it: the shipped ones are there too.

    Each file is read once. Where the data set has lost one that was read, the store is made anew.

    Raises:
        StoreError: as :func:`sync_traces`; also where a file of the data set is not valid, since answers would lack it.
        QueryError: as :func:`~tilegym_db.store.sql.run_user_query`.
    """
    data_set = SharedDataSet(uri)
    catalog = Catalog.default(trust_foreign=trust)
    folder = store_folder(home(), uri, trust=trust)
    with writing(folder.parent):
        problems = _renewed(folder, data_set, catalog, trust=trust)
    if problems:
        raise StoreError(f"{problems[0]} Remove it from the data set, or sync what is valid: tilegym-db sync {uri}")
    return run_user_query(text, path=folder, catalog=catalog, as_arrow=as_arrow, timeout_s=timeout_s)


def _renewed(folder: Path, data_set: SharedDataSet, catalog: Catalog, *, trust: bool) -> list[str]:
    """Bring the store of a data set up to date; returns what in the data set is no valid file."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {str(Path(f"{data_set.uri}/{file.name}")) for file in data_set.files()}
    key = folder / KEY_NAME
    if not key.is_symlink():
        key.symlink_to(home() / KEY_NAME)  # what was measured here is local there as well
    with open_store(folder, catalog=catalog) as store:
        read = {row["path"] for row in store.rows(statements.INGESTED_FILES)}
        lost = {path for path in read if path.startswith(str(Path(data_set.uri)))} - listed
        if not lost:
            return sync_traces(store, data_set, trust=trust, again=False)[1]
    remove_tree(folder)
    return _renewed(folder, data_set, catalog, trust=trust)


def _write(path: Path, rows: Sequence[Row]) -> None:
    """As lines of a journal, whose signatures are looked at as those of any journal are."""
    lines = (
        f'{row.record[:-1]}, "signature": "{row.signature}"}}\n' if row.signature else f"{row.record}\n" for row in rows
    )
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}. Nothing was ingested.") from None
