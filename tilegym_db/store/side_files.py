"""Files beside the traces: steps of config searches, peaks of GPUs, runs of models, journals of the loop, and pattern pages."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import AwareDatetime, Field

from tilegym_db.catalog import Broken, Catalog
from tilegym_db.catalog.record_files import warn_once
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import decode, read_bytes, regular_files, write_atomically, writing
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import (
    MODELS_SUFFIX,
    loop_folder,
    own_peaks_files,
    own_tuning_files,
    pattern_files,
    published_model_files,
    published_peaks_files,
    published_tuning_files,
    read_lines,
)
from tilegym_db.published.snapshot import Origin, RejectedLine, is_signed, open_snapshot, read_published, signature
from tilegym_db.records.base import Record
from tilegym_db.records.loop import Attempt, Award, Experiment, ModelRun, Pattern, Task
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import Tunable, config_id
from tilegym_db.records.text import NAME_PATTERN, canonical_json, parse_object
from tilegym_db.records.verdicts import Status
from tilegym_db.store import statements
from tilegym_db.store.journal import (
    CUT_OFF,
    IngestReport,
    RunFile,
    grown_files,
    is_cut_off,
    numbered_lines,
    remember_files,
)

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.connection import Store


# ---- config searches ------------------------------------------------------------------------------
# The log of a config search: one line per step, ``<home>/tuning/<run_id>.jsonl``.
#
# A search drops most configs after a few rounds, before a trace could hold a verdict. Its steps are logged here, so that
# a killed search resumes where it stopped. Verdicts are traces, also those of failing configs. The steps that found the
# published configs are published beside the traces of their GPU. They save others the search, and show that the defaults
# were compared with other configs.

Outcome = Literal["leads", "slower", "tie", "compile", "failed"]
"""``leads``: the fastest so far. ``slower`` and ``tie``: dropped in favour of another config. ``compile``: does not
compile ahead of time. ``failed``: a wrong result, a crash or a timeout, at any stage.
"""


class TuningStep(Record):
    """The outcome of one config of one Solution on one Workload and GPU."""

    kind: ClassVar[str] = "tuning step"

    run_id: str
    timestamp: AwareDatetime
    gpu: str
    solution: str = Field(pattern=NAME_PATTERN)
    solution_digest: str
    definition_digest: str
    workload_uuid: str
    config: dict[str, Tunable]
    outcome: Outcome
    reason: str
    status: Status | None = None
    """The verdict of a config that ``failed``."""
    against: dict[str, Tunable] | None = None
    """The config that it lost to."""
    ratio: float | None = None
    """Time of ``against`` divided by its own, from paired rounds; below 1 it was slower."""

    @property
    def pair(self) -> tuple[str, str, str]:
        """Return (solution digest, definition digest, workload uuid)."""
        return self.solution_digest, self.definition_digest, self.workload_uuid


class TuningLog(RunFile):
    """The steps of one run; raises as :class:`~tilegym_db.store.journal.RunFile` does."""

    def __init__(self, run_id: str, home: Path | None = None) -> None:
        super().__init__("tuning", run_id, home)

    def append(self, step: TuningStep) -> None:
        """Write one step as one line and wait until it is on disk."""
        self.append_line((step.to_json() + "\n").encode())


def read_tuning_steps(home: Path, gpu: str, catalog: Catalog | None = None) -> list[TuningStep]:
    """Return every step of a GPU, oldest first. A config on an unreadable line, such as a torn one, is tried again.

    Args:
        catalog: whose published steps count too; None for none.
    """
    published = published_tuning_files(catalog) if catalog is not None else []
    trust = catalog is not None and catalog.trust_foreign
    found = [*(step for path in published for step in _published_steps(path, home, [], trust=trust))]
    found += [step for path in own_tuning_files(home) for step in _steps(path, _read(path))]
    steps = {step.to_json(): step for step in found}  # steps published from this machine are in two files
    return sorted((step for step in steps.values() if step.gpu == gpu), key=lambda step: step.timestamp)


def published_tuning_rows(catalog: Catalog, home: Path, refused: list[str]) -> list[dict[str, Any]]:
    """Return the table rows of a catalog's steps. An untrusted file is named in ``refused`` instead."""
    return [
        _row(step, step.run_id, is_own=False)
        for path in published_tuning_files(catalog)
        for step in _published_steps(path, home, refused)
    ]


def load_tuning(store: Store, home: Path) -> None:
    """Load the search logs that grew since the last time."""
    grown = grown_files(store, own_tuning_files(home))
    if not grown:
        return
    records = json.dumps([_row(step, path.stem, is_own=True) for path in grown for step in _steps(path, _read(path))])
    with store.transaction("ingest searches into") as connection:
        connection.execute(statements.FORGET_OWN_TUNING, {"runs": [path.stem for path in grown]})
        connection.execute(statements.INSERT_TUNING, {"records": records})
        remember_files(connection, grown)


def _row(step: TuningStep, run_id: str, *, is_own: bool) -> dict[str, Any]:
    keys = ("gpu", "solution", "solution_digest", "definition_digest", "workload_uuid", "outcome", "timestamp")
    record = step.to_dict()
    return {
        **{key: record[key] for key in keys},
        "is_own": is_own,
        "run_id": run_id,
        "config_key": config_id(step.config),
        "record": record,
    }


def _published_steps(path: Path, home: Path, refused: list[str], *, trust: bool = False) -> Iterator[TuningStep]:
    content = read_published(path, path.parents[2], home, refused, trust=trust)
    if content is None:
        return
    try:
        yield from [TuningStep.from_parsed(step, path) for step in read_lines(content, path)]
    except RecordError as error:
        refused.append(str(error))


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, "log of a search", limit=None)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None


def _steps(path: Path, content: bytes) -> Iterator[TuningStep]:
    for number, line, _ in numbered_lines(content):
        try:
            yield TuningStep.from_json(line, f"{path}:{number}")
        except RecordError:
            continue


# ---- peaks ----------------------------------------------------------------------------------------
# Calibrated peaks of GPUs: one file per calibration in ``<home>/peaks/``, and one per GPU beside the published traces.
#
# The database table is filled from these files when one changes. Local measurements override published ones, which come
# from another machine.


def save_peaks(peaks: GpuPeaks, home: Path | None = None) -> Path:
    """Store a calibration of this machine and return its file. The database loads it when it is next opened."""
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


# ---- runs of whole models -------------------------------------------------------------------------
# Runs of whole models: one signed file each in the home folder, published ones in ``traces/<gpu>``, and a table of
# both.

MODEL_RUNS = "model_runs"
_KEY = "signature"


# -- of this machine --------------------------------------------------------------------------------------------------


def save_model_run(run: ModelRun, home: Path | None = None) -> Path:
    """Write a signed run to ``<home>/model_runs/<run_id>.json`` and return that path. The next ingest loads it."""
    folder = home or default_home()
    path = folder / MODEL_RUNS / f"{run.run_id}.json"
    with writing(folder):
        content = json.loads(run.to_json())
        content[_KEY] = signature(folder, "model run", canonical_json(content).encode())
        write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return path


def read_model_run(path: Path, home: Path) -> tuple[ModelRun, Origin]:
    """Read the run in a file. Its origin is ``local`` if this installation signed it, else ``foreign``."""
    content = parse_object(read_bytes(path, "model run"), ModelRun.kind, path)
    claimed = content.pop(_KEY, None) if isinstance(content, dict) else None
    run = ModelRun.from_parsed(content, path)
    is_own = isinstance(claimed, str) and is_signed(home, "model run", canonical_json(content).encode(), claimed)
    return run, "local" if is_own else "foreign"


def stored_model_runs(home: Path) -> list[ModelRun]:
    """Return the readable runs in a home folder, in no particular order."""
    runs = []
    for path in regular_files(home / MODEL_RUNS, "*.json"):
        try:
            runs.append(read_model_run(path, home)[0])
        except RecordError:
            continue  # the next ingest names it
    return runs


def load_model_runs(store: Store, home: Path, *, trust: bool = False) -> IngestReport:
    """Insert new runs of a home folder into the database. Invalid files are reported and left out.

    With ``trust``, unsigned runs count from now on.
    """
    known = {row["run_id"] for row in store.rows(statements.OWN_MODEL_RUN_IDS)}
    rows: list[dict[str, Any]] = []
    rejected: list[RejectedLine] = []
    for path in regular_files(home / MODEL_RUNS, "*.json"):
        if path.stem in known:
            continue
        try:
            run, origin = read_model_run(path, home)
            if run.run_id != path.stem:
                raise RecordError(f"run_id '{run.run_id}' does not match the file's name.", code="record_misplaced")
            rows.append(_model_row(run, origin, is_own=True))
        except RecordError as error:
            rejected.append(RejectedLine(path, 1, str(error).removeprefix(f"{path}: ")))
    if rows or trust:
        with store.transaction("ingest model runs into") as connection:
            connection.execute(statements.INSERT_MODEL_RUNS, {"records": json.dumps(rows)})
            if trust:
                connection.execute(statements.TRUST_MODEL_RUNS)
    return IngestReport(rejected=tuple(rejected))


# -- published --------------------------------------------------------------------------------------------------------


def model_texts(runs: Iterable[ModelRun]) -> dict[str, str]:
    """Return name -> text of the files of published runs: one file per model, one run per line."""
    texts: dict[str, str] = {}
    for run in runs:
        name = re.sub(r"[^\w.-]", "-", run.model) + MODELS_SUFFIX
        texts[name] = texts.get(name, "") + run.to_json() + "\n"
    return texts


def published_model_rows(catalog: Catalog, home: Path, refused: list[str]) -> list[dict[str, Any]]:
    """Return the table rows of a catalog's runs. An unused file or line is named in ``refused`` instead."""
    return [row for path in published_model_files(catalog) for row in _published(path, home, refused)]


def _published(path: Path, home: Path, refused: list[str]) -> Iterator[dict[str, Any]]:
    content = read_published(path, path.parent, home, refused)
    if content is None:
        return
    origin = open_snapshot(path.parent, home).origin
    for number, line, _ in numbered_lines(content):
        try:
            run = ModelRun.from_json(line, f"{path}:{number}")
            if run.gpu != path.parent.name:
                raise RecordError(f"{path}:{number}: not used: it is a run on '{run.gpu}'.", code="record_misplaced")
            yield _model_row(run, origin, is_own=False)
        except RecordError as error:
            refused.append(str(error))


def _model_row(run: ModelRun, origin: Origin, *, is_own: bool) -> dict[str, Any]:
    return {"run_id": run.run_id, "is_own": is_own, "origin": origin, "record": run.model_dump(mode="json")}


# ---- loop ----------------------------------------------------------------------------------------
# The journals of the loop, ``<home>/loop/<kind>s.jsonl``, their copy in the database, and its queries.
#
# A line is written whole and synced while the folder's lock is held. A killed process leaves at most a torn last line,
# which readers report and skip, and the next writer ends. Numbered records (attempts, awards) are read and appended
# under one lock.


_log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

JOURNALED: tuple[type[Record], ...] = (Task, Attempt, Award, Experiment)

_INSERT = """INSERT INTO loop_records
    SELECT unnest(from_json($records::JSON, '[{"kind":"VARCHAR","line":"BIGINT","record":"JSON"}]'), recursive := true)"""


@contextmanager
def loop_lock(home: Path | None) -> Iterator[None]:
    """Hold the lock of the journals, so that read records stay current until the next append."""
    with writing(loop_folder(home)):
        yield


def append(record: Record, home: Path | None = None) -> None:
    """Append one record to its journal and wait until it is on disk. The caller holds :func:`loop_lock`.

    Raises:
        StoreError: the disk is full or gone; the journal then ends with its last whole line.
    """
    with RunFile("loop", _stem(type(record)), home) as journal:
        journal.append_line(record.to_json().encode() + b"\n")


def journaled(kind: type[R], home: Path | None = None) -> list[R]:
    """Return every record of a kind in writing order, without invalid lines."""
    return [record for _, record in _numbered(kind, _path(kind, home))]


def _numbered(kind: type[R], path: Path) -> Iterator[tuple[int, R]]:
    for number, found in _lines(kind, path):
        if not isinstance(found, RejectedLine):
            yield number, found
        elif not found.reason.startswith(CUT_OFF):
            _warn_once(str(found))
        elif found.reason != CUT_OFF:  # a torn line was reported when it was ended
            _warn_once(f"{found}, and what follows is written after it.")


def _lines(kind: type[R], path: Path) -> Iterator[tuple[int, R | RejectedLine]]:
    """Yield the number and record of each line, or the reason why it is not valid."""
    if not os.path.lexists(path):
        return
    try:
        content = read_bytes(path, "journal", limit=None)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None
    for number, line, finished in numbered_lines(content):
        try:
            yield number, kind.from_json(line, f"{path}:{number}")
        except RecordError as error:
            reason = str(error).removeprefix(f"{path}:{number}: ")
            if not finished:
                reason = f"{CUT_OFF}: this record is lost"
            elif is_cut_off(line, finished=finished):
                reason = CUT_OFF
            yield number, RejectedLine(path, number, reason)


def loop_journals(home: Path) -> dict[Path, type[Record]]:
    """Return the existing journals, each with the record type of its lines."""
    paths = {_path(kind, home): kind for kind in JOURNALED}
    return {path: kind for path, kind in paths.items() if os.path.lexists(path)}


def rejected_lines(kind: type[Record], path: Path) -> list[RejectedLine]:
    """Return the invalid lines of a journal with their reasons."""
    return [found for _, found in _lines(kind, path) if isinstance(found, RejectedLine)]


@cache
def _warn_once(text: str) -> None:
    """Warn once per text: a command reads a journal several times, and a waiting one every other second."""
    _log.warning("%s", text)


def _stem(kind: type[Record]) -> str:
    return f"{kind.kind}s"


def _path(kind: type[Record], home: Path | None) -> Path:
    return loop_folder(home) / f"{_stem(kind)}.jsonl"


# -- the database's copy ----------------------------------------------------------------------------------------------


def sync_loop(connection: DuckDBPyConnection, home: Path, catalog: Catalog) -> None:
    """Replace the rows of ``loop_records`` by every record of the loop."""
    connection.execute("DELETE FROM loop_records")
    rows: list[dict[str, Any]] = []
    for kind in JOURNALED:
        try:
            found = [*_numbered(kind, _path(kind, home))]
        except StoreError as error:  # affects only the loop
            _warn_once(f"left out: {error}")
            continue
        rows += [{"kind": kind.kind, "line": number, "record": _plain(record)} for number, record in found]
    patterns, refused = read_patterns(catalog)
    for reason in refused:
        _log.warning("%s", reason)
    rows += [{"kind": "pattern", "line": 0, "record": _plain(pattern)} for pattern in patterns]
    connection.execute(_INSERT, {"records": json.dumps(rows, ensure_ascii=False)})


def _plain(record: Record) -> dict[str, Any]:
    return record.model_dump(mode="json")


def latest(attempts: Sequence[Attempt]) -> dict[tuple[str, int], Attempt]:
    """Return (task, number) -> the newest line of that attempt, in the order of arrival."""
    return {(attempt.task, attempt.number): attempt for attempt in attempts}


# ---- pattern pages --------------------------------------------------------------------------------
# Reads the pages ``docs/patterns/<language>.md`` of the catalog's roots, one section per pattern.
# A section is a second-level heading, then a block of TOML with the ``name`` of the pattern and the keys of
# :class:`~tilegym_db.records.loop.Pattern`, then the advice.

_SECTION = re.compile(
    r"\A## (?P<title>[^\n]+)\n\s*```toml\n(?P<keys>.*?)^```\n(?P<text>.*)\Z", re.DOTALL | re.MULTILINE
)
_LINE = re.compile(r"^(?:(?P<fence>```)|(?P<heading>## ))", re.MULTILINE)


def read_patterns(catalog: Catalog) -> tuple[list[Pattern], list[str]]:
    """Read the patterns, sorted by id, and the reason for each section or page that is left out.

    If two pages have a pattern of the same id, that of the first root counts.
    """
    found: dict[str, Pattern] = {}
    refused: list[str] = []
    for path in pattern_files(catalog):
        try:
            sections = _sections(path)
        except RecordError as error:
            refused.append(str(error))
            continue
        names: set[str] = set()
        for line, section in sections:
            try:
                pattern = _pattern(section, path.stem, f"{path}:{line}")
                if pattern.id in names:
                    raise RecordError(
                        f"{path}:{line}: the page has a pattern {pattern.id} already. Choose another name.",
                        code="pattern_repeated",
                    )
            except RecordError as error:
                refused.append(str(error))
            else:
                names.add(pattern.id)
                found.setdefault(pattern.id, pattern)
    return [found[name] for name in sorted(found)], refused


def _sections(path: Path) -> list[tuple[int, str]]:
    """Split a page at its second-level headings: line number and text of each section."""
    text = decode(read_bytes(path, "pattern"), path)
    starts, fenced = [], False
    for match in _LINE.finditer(text):
        if match["fence"]:
            fenced = not fenced
        elif not fenced:
            starts.append(match.start())
    if not starts:
        raise RecordError(
            f"{path}: each pattern on this page needs a section '## TITLE', and the page has none.",
            code="pattern_missing",
        )
    ends = [*starts[1:], len(text)]
    return [(text.count("\n", 0, start) + 1, text[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pattern(section: str, language: str, place: str) -> Pattern:
    """Return the pattern of a section; an error names the file and the line."""
    parts = _SECTION.match(section.rstrip() + "\n")
    if parts is None:
        raise RecordError(
            f"{place}: a pattern begins with '## TITLE', a block ```toml with its keys, and ```.", code="pattern_syntax"
        )
    try:
        keys = tomllib.loads(parts["keys"])
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{place}: its keys are not valid TOML: {error}.", code="toml_syntax") from None
    taken = sorted(keys.keys() & {"digest", "id", "language", "text", "title"})
    if taken:
        raise RecordError(f"{place}: {taken[0]!r} follows from the page. Leave it out of the keys.", code="key_of_page")
    return Pattern.from_dict(
        {
            **{key: value for key, value in keys.items() if key != "name"},
            "id": f"{language}/{keys.get('name', '')}",
            "language": language,
            "title": parts["title"].strip(),
            "digest": hashlib.sha256(section.strip().encode()).hexdigest(),
            "text": parts["text"].strip(),
        },
        place,
    )
