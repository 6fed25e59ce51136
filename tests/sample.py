"""Choose the tests that ``make test`` runs of shipped records and of long sweeps: a sample by date, and the records that changed.

A test of shipped records has the mark ``records``, which names the parameters that hold records, or records themselves. A page of
documentation is such a record. A test of many cases of one kind has the mark ``sweep``. A test that takes seconds has the mark
``turn``, which names the files that it tests, or what their paths begin with. ``make test-all`` runs every one.
``make test`` runs

* the records whose own files differ from those of the base, up to ``MAX_CHANGED`` and ``MAX_CHANGED_PAGES``;
* one of ``ONE_OF`` other records, or one of ``ONE_OF_CHANGED`` if the code that judges differs from that of the base;
  if a test would run with none, it runs with one;
* one of eight cases of a sweep, or of ``sweep(n)``: at least one;
* the tests with the mark ``turn`` of one of eight files, and of up to ``MAX_CHANGED_FILES`` that test what differs from the base.

The sample moves on by one every day (UTC), so every record and every case has its turn. ``TILEGYM_DB_SAMPLE=2026-11-28`` repeats
the sample of a day. The base is the commit at which the branch left ``main``; on ``main`` itself, the last commit a day older.
``TILEGYM_DB_BASE`` names another one. Without a base (no git, a shallow clone) the sample alone runs.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from shipped_records import CATALOG

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import shipped_traces

ROOT = Path(__file__).resolve().parents[1]
JUDGES = ("backends", "measurement", "records", "sandbox", "verification")
"""Folders of the package whose code can change a verdict."""
COMPILERS = ("torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""Packages of ``constraints.txt`` that can change a verdict."""
PAGES = ("*.md", "docs/*.md", "docs/how-to/*.md", "docs/performance/*.md", "docs/reference/*.md")
CHEATS = "tests/exploits/cheats/*.py"
KINDS = ("definition", "solution", "traces", "cheat", "page")

MARK = "records"
SWEEP = "sweep"
TURN = "turn"
ONE_OF = 128
ONE_OF_CHANGED = 64
ONE_OF_CASES = 8
ONE_OF_FILES = 8
MAX_CHANGED = 8
MAX_CHANGED_FILES = 4
MAX_CHANGED_PAGES = 1
"""A page's commands take up to a minute."""


@dataclass(frozen=True)
class Sample:
    """The sample of a day: the keys of all shipped records, and the differences from the base."""

    day: str
    """A date as ``2026-11-28``."""
    records: Mapping[str, str]
    """Digest by key, as ``solution:rms_norm_triton``."""
    base: str = ""
    """A commit; '' without one."""
    changed: frozenset[str] = frozenset()
    """The keys of the records that the base has not, or has with another digest."""
    judge_changed: bool = False
    everything: bool = False
    changed_files: frozenset[str] = frozenset()
    """Paths of the files that differ from the base, from the root."""

    @classmethod
    def of_checkout(cls, *, everything: bool = False) -> Sample:
        """Compare this checkout with its base; ``everything`` needs no base."""
        day = os.environ.get("TILEGYM_DB_SAMPLE") or datetime.now(UTC).date().isoformat()
        try:
            date.fromisoformat(day)
        except ValueError:
            raise pytest.UsageError(f"TILEGYM_DB_SAMPLE is {day!r}, which is no date such as 2026-11-28") from None
        records = record_digests(shipped_root())
        base = "" if everything else base_of(ROOT)
        if not base:
            return cls(day, records, everything=everything)
        with tempfile.TemporaryDirectory(prefix="tilegym-db-base-") as folder:
            unpack(base, Path(folder))
            before = record_digests(Path(folder))
            changed = frozenset(key for key, digest in records.items() if before.get(key) != digest)
            return cls(
                day, records, base, changed, judge_changed(Path(folder), ROOT), changed_files=changed_files(ROOT, base)
            )

    @classmethod
    def from_json(cls, text: str) -> Sample:
        """Read :meth:`to_json`."""
        content = json.loads(text)
        return cls(**{**content, **{name: frozenset(content[name]) for name in ("changed", "changed_files")}})

    def to_json(self) -> str:
        """Write it for a process that must choose the same tests."""
        sets = {"changed": sorted(self.changed), "changed_files": sorted(self.changed_files)}
        return json.dumps({**asdict(self), **sets})

    def header(self) -> str:
        """Describe the sample in one line, with the option that repeats it."""
        if self.everything:
            return f"shipped records: all {len(self.records)}, and every case of a sweep"
        one_of = ONE_OF_CHANGED if self.judge_changed else ONE_OF
        why = ", as the code that judges changed" if self.judge_changed else ""
        parts = [f"shipped records: one of {one_of}{why} (TILEGYM_DB_SAMPLE={self.day} repeats this sample)"]
        if self.base:
            parts.append(f"{len(self.changed_in_turn)} of {len(self.changed)} that changed since {self.base[:8]}")
        else:
            parts.append("no base to find the changed ones by")
        return ", ".join([*parts, "'make test-all' tries every one"])

    def keys(self, value: Any) -> frozenset[str]:
        """Find the records that an argument of a test stands for, as keys of ``records``."""
        name = name_of(value)
        found = frozenset(f"{kind}:{name}" for kind in KINDS) & self.records.keys()
        if not found:
            raise pytest.UsageError(f"the mark '{MARK}' gives {name!r}, which names no shipped record.")
        return found

    def tries(self, keys: Iterable[str]) -> bool:
        """Tell if a test of these records runs."""
        one_of = ONE_OF_CHANGED if self.judge_changed else ONE_OF
        return self.everything or any(key in self.changed_in_turn or self._has_its_turn(key, one_of) for key in keys)

    def cases(self, count: int, one_of: int = ONE_OF_CASES) -> range:
        """Return the numbers of the cases that a sweep runs.

        Sweeps over the same cases run the same ones, so that they can share what is made for one.
        """
        return range(count) if self.everything else range(self._ordinal % max(1, min(one_of, count)), count, one_of)

    def files_in_turn(self, tested: Mapping[str, Iterable[str]]) -> frozenset[str]:
        """Choose the files whose slow tests run, of these with what they test: all of a file, so that they share fixtures."""
        if self.everything:
            return frozenset(tested)
        changed = [
            file
            for file, paths in sorted(tested.items())
            if any(name.startswith(path) for name in self.changed_files for path in paths)
        ]
        one_of = max(1, -(-len(changed) // MAX_CHANGED_FILES))
        of_the_day = {file for file in tested if self._has_its_turn(file, ONE_OF_FILES)}
        return frozenset(of_the_day.union(changed[self._ordinal % one_of :: one_of]))

    @cached_property
    def _ordinal(self) -> int:
        return date.fromisoformat(self.day).toordinal()

    @cached_property
    def changed_in_turn(self) -> frozenset[str]:
        """The changed records that are tried: of many, as many as the limit, others every day."""
        pages = sorted(key for key in self.changed if key.startswith("page:"))
        others = sorted(self.changed.difference(pages))
        found: set[str] = set()
        for keys, limit in ((pages, MAX_CHANGED_PAGES), (others, MAX_CHANGED)):
            one_of = max(1, -(-len(keys) // limit))
            found.update(keys[self._ordinal % one_of :: one_of])
        return frozenset(found)

    def _has_its_turn(self, key: str, one_of: int) -> bool:
        return (_place(key) + self._ordinal) % one_of == 0


@cache
def _place(key: str) -> int:
    return int(_sha256(key.encode())[:16], 16)


SAMPLE = pytest.StashKey[Sample]()


def records_of(parameters: Mapping[str, Any], marks: Iterable[pytest.Mark], sample: Sample) -> frozenset[str]:
    """Find the records of a case: ``records("name")`` marks a parameter, if the test has it, and ``of=`` a record."""
    values = []
    for mark in marks:
        if mark.name == MARK:
            values += [parameters[name] for name in mark.args if name in parameters]
            values += [mark.kwargs["of"]] if "of" in mark.kwargs else []
    return frozenset(key for value in values for key in sample.keys(value))


def cases_in_turn(cases: Sequence[tuple[Mapping[str, Any], Sequence[pytest.Mark]]], sample: Sample) -> list[int]:
    """Choose the cases of one test that run, given the parameters and marks of each.

    A test none of whose records has its turn runs with one of them, so that each behaviour shows daily. A sweep over records
    takes its share of those that have their turn. One case runs at least: of none, pytest would make a test without values.
    """
    keys = [records_of(parameters, marks, sample) for parameters, marks in cases]
    tried = [number for number, of_case in enumerate(keys) if not of_case or sample.tries(of_case)]
    tried = tried or [sample.cases(len(cases), len(cases))[0]]
    for mark in cases[0][1]:
        if mark.name == SWEEP:
            return [tried[number] for number in sample.cases(len(tried), *mark.args)]
    return tried


def left_to_other_days(items: Iterable[pytest.Item], sample: Sample) -> list[pytest.Item]:
    """List the tests with the mark ``turn`` of files that have no turn."""
    slow: list[pytest.Item] = []
    tested: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers(TURN):
            slow.append(item)
            tested.setdefault(item.nodeid.partition("::")[0], set()).update(mark.args)
    in_turn = sample.files_in_turn(tested)
    return list({item.nodeid: item for item in slow if item.nodeid.partition("::")[0] not in in_turn}.values())


def is_by_hand(config: pytest.Config) -> bool:
    """Tell if a person named the tests of this run, or runs again those that failed: then all of them run."""
    option = config.option
    return bool(option.keyword or getattr(option, "lf", False) or any("::" in argument for argument in config.args))


def check_marks(items: Iterable[pytest.Item], sample: Sample) -> None:
    """Refuse a test over most of the catalog without its mark, and one of a path that is not there."""
    definitions = {key.partition(":")[2] for key in sample.records if key.startswith("definition:")}
    names: dict[str, set[str]] = {}
    tested: dict[str, str] = {}
    for item in items:
        tested |= {path: item.nodeid for mark in item.iter_markers(TURN) for path in mark.args}
        if hasattr(item, "callspec") and not item.get_closest_marker(MARK):
            known = {name for name in map(name_of, item.callspec.params.values()) if name in definitions}
            names.setdefault(item.nodeid.partition("[")[0], set()).update(known)
    for path, test in tested.items():
        if not any(ROOT.glob(f"{path}*")):
            raise pytest.UsageError(
                f"{test} has the mark '{TURN}' with {path!r}, which begins no path of the checkout."
            )
    for test, found in names.items():
        if len(found) > len(definitions) / 2:
            raise pytest.UsageError(f"{test} is over shipped definitions: give it the mark '{MARK}' (tests/sample.py).")


def name_of(value: Any) -> str:
    """Return a record's name by what a test is given: the name, a record, a file of traces, or a pair that starts so."""
    if isinstance(value, tuple) and value:
        return name_of(value[0])
    if isinstance(value, Path):
        return f"{value.parent.parent.name}/{value.name.partition('.')[0]}"
    return str(getattr(value, "name", value))


def record_digests(root: Path) -> dict[str, str]:
    """Digest by key: of Definitions with their Workloads and forward, Solutions with their Definition, traces, and cheats."""
    found = {}
    catalog = CATALOG if CATALOG.roots == (root,) else Catalog((root,), False)
    for name, record in catalog.definitions.items():
        paths = [catalog.definition_paths[one] for one in {name, record.backward_of or name}]
        paths.append(root / "workloads" / record.op_type / f"{name}.jsonl")
        lines = [_sha256(path.read_bytes()) for path in sorted(paths) if path.is_file()]
        found[f"definition:{name}"] = _sha256(json.dumps(lines).encode())
    for name, files in catalog.solutions.items():
        content = json.dumps([files.record.to_dict(), files.digest, found[f"definition:{files.record.definition}"]])
        found[f"solution:{name}"] = _sha256(content.encode())
    found |= {f"traces:{name_of(path)}": _sha256(path.read_bytes()) for path in shipped_traces(catalog)}
    found |= {f"page:{name}": _sha256((root / name).read_bytes()) for name in pages_of(root)}
    return found | {f"cheat:{path.stem}": _sha256(path.read_bytes()) for path in root.glob(CHEATS)}


def pages_of(root: Path = ROOT) -> list[str]:
    """List every page of documentation, by its path from the root."""
    return sorted(path.relative_to(root).as_posix() for pattern in PAGES for path in root.glob(pattern))


def judge_changed(before: Path, now: Path) -> bool:
    """Tell if anything differs between two checkouts that can change a verdict; comments and docstrings cannot."""
    texts = [
        {path.relative_to(root / "tilegym_db"): path.read_bytes() for path in _judges(root)} for root in (before, now)
    ]
    if texts[0].keys() != texts[1].keys() or _pins(before) != _pins(now):
        return True
    return any(
        text != texts[1][path] and (path.suffix != ".py" or code_of(text) != code_of(texts[1][path]))
        for path, text in texts[0].items()
    )


def code_of(source: bytes) -> str:
    """Return what Python runs of a source: no comments, no positions, and no text that stands alone as docstrings do."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (
                    isinstance(line, ast.Expr)
                    and isinstance(line.value, ast.Constant)
                    and isinstance(line.value.value, str)
                )
            ]
    return ast.dump(tree)


def base_of(root: Path) -> str:
    """Return the commit that this checkout is compared with; '' if there is none."""
    if named := os.environ.get("TILEGYM_DB_BASE"):
        if not (base := _git(root, "rev-parse", "--verify", "--quiet", f"{named}^{{commit}}")):
            raise pytest.UsageError(f"TILEGYM_DB_BASE is {named!r}, which is no commit of this repository")
        return base
    head = _git(root, "rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        if (base := _git(root, "merge-base", main, "HEAD")) and base != head:
            return base
    if not (committed := _git(root, "log", "-1", "--format=%cI", "HEAD")):
        return ""
    day_before = datetime.fromisoformat(committed) - timedelta(days=1)
    return _git(root, "rev-list", "-1", f"--before={day_before.isoformat()}", "HEAD")


def changed_files(root: Path, base: str) -> frozenset[str]:
    """List the files that differ from those of a commit, and those that git does not know yet."""
    found = [_git(root, "diff", "--name-only", base), _git(root, "ls-files", "--others", "--exclude-standard")]
    return frozenset(line for text in found for line in text.splitlines())


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # Python 3.11.4


def _git(root: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a machine without git
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _judges(root: Path) -> Iterable[Path]:
    folders = [root / "tilegym_db" / name for name in JUDGES]
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def _pins(root: Path) -> list[str]:
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in pins if line.partition("==")[0] in COMPILERS]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
