"""Which tests ``make test`` runs: of shipped records and of long sweeps, those of what has changed and a sample of the rest.

A test of shipped records has the mark ``records``, which names the parameters that hold records, or records themselves. A test
of many cases of one kind has the mark ``sweep``. ``make test-all`` runs every one, and writes into ``tests/full_run.json`` what
judged (records, backends, verification, harness, pinned compilers), what each file of such tests was in which all passed, with
the modules of the package that it imports and the folder of the package that its own is named after, and every record that
passed. A page of documentation is such a record. By it the next run tries

* every record, where what judges has changed since, or the file is gone, damaged or edited by hand;
* every record in a test file that has changed, or that tests a module or a folder that has;
* a record that is new, has changed or was skipped then, and one of sixteen others (of four pages), which change with the commit;
* every case of a sweep where the first two are so, else one of eight, or of ``sweep(n)``: at least one, others with each commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.store.input_files import shipped_traces

ROOT = Path(__file__).resolve().parents[1]
STATE = Path(__file__).with_suffix(".json")
CHEATS = Path(__file__).parent / "exploits" / "cheats"
MARK = "records"
SWEEP = "sweep"
JUDGES = ("backends", "bench", "confinement", "records", "verify")
COMPILERS = ("torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
IMPORTS = re.compile(r"^\s*(?:from|import) (tilegym_db(?:\.\w+)+)", re.MULTILINE)
HELPERS = re.compile(r"^\s*(?:from|import) (\w+(?:\.\w+)*)", re.MULTILINE)
KINDS = ("definition", "solution", "traces", "cheat", "page")
ALL_BUT_ALONE = "not alone"
"""What 'make test' runs first; tests of records are all among it."""
SAMPLE = 16
"""One of so many records that have not changed is tried all the same; which ones changes with the commit."""
SAMPLES = {"page": 4}
"""The same for kinds of which there are few."""
SWEPT = 8
"""One of so many cases of a sweep is run where nothing has changed."""


@dataclass(frozen=True)
class FullRun:
    """A run of everything: the digest of what judged, of every test file of records that passed, and of every record that did."""

    judge: str = ""
    tests: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = STATE) -> FullRun:
        """Read the committed state; one that knows nothing where there is none, or another than was written."""
        try:
            content = json.loads(path.read_bytes())
            seal = content.pop("seal")
            found = cls(**content)
            return found if seal == found._seal() else cls()
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, path: Path = STATE) -> None:
        """Write the state for a commit."""
        path.write_text(json.dumps({**asdict(self), "seal": self._seal()}, indent=1, sort_keys=True) + "\n")

    def _seal(self) -> str:
        return _sha256(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True)
class Choice:
    """What judges and which records there are now, what the last whole run knew of that, and by it which tests run."""

    judge: str
    records: Mapping[str, str]
    last: FullRun
    salt: str
    """What the sample changes with."""

    @classmethod
    def of_checkout(cls, *, everything: bool = False) -> Choice:
        """What this checkout tries; ``everything``, whatever the last whole run was."""
        return cls(judge_digest(), record_digests(), FullRun() if everything else FullRun.read(), commit())

    def keys(self, value: Any) -> frozenset[str]:
        """The records that an argument of a test stands for, as keys of ``records``."""
        name = name_of(value)
        found = frozenset(f"{kind}:{name}" for kind in KINDS) & self.records.keys()
        if not found:
            raise pytest.UsageError(f"the mark '{MARK}' gives {name!r}, which names no shipped record.")
        return found

    def tries(self, keys: Iterable[str], test: str, digest: str) -> bool:
        """Whether a test of these records runs, which the file ``test`` of this digest holds."""
        if self.is_new(test, digest):
            return True
        return any(self.last.records.get(key) != self.records[key] or self._is_sampled(key) for key in keys)

    def is_new(self, test: str, digest: str) -> bool:
        """Whether what judges, or the file ``test`` of this digest, is not what it was in the last whole run."""
        return self.judge != self.last.judge or digest != self.last.tests.get(test)

    def cases(self, test: str, count: int, one_of: int = SWEPT) -> range:
        """The numbers of those of its cases that a sweep in this file runs under this commit.

        Sweeps over the same cases run the same ones, so that they can share what is made for one.
        """
        return range(self._number(test) % max(1, min(one_of, count)), count, one_of)

    def remembered(self, outcomes: Iterable[tuple[str, str, Iterable[str]]]) -> FullRun:
        """A whole run, by outcome, test file and records of each test.

        What was skipped or failed is left out, and so is a file in which a test failed: the next run tries all of it.
        """
        passed: set[str] = set()
        others: set[str] = set()
        tests: set[str] = set()
        failed: set[str] = set()
        for outcome, test, keys in outcomes:
            (passed if outcome == "passed" else others).update(keys)
            tests.add(test)
            if outcome == "failed":
                failed.add(test)
        known = {test: digest_of_test(STATE.parent / test) for test in sorted(tests - failed)}
        return FullRun(self.judge, known, {key: self.records[key] for key in passed - others})

    def _is_sampled(self, key: str) -> bool:
        return self._number(key) % SAMPLES.get(key.partition(":")[0], SAMPLE) == 0

    def _number(self, key: str) -> int:
        return int(_sha256(f"{self.salt}:{key}".encode())[:16], 16)


CHOICE = pytest.StashKey[Choice]()


def records_of(item: pytest.Item, choice: Choice) -> frozenset[str]:
    """The records that a test is of: ``records("name")`` marks a parameter, where the test has it, and ``of=`` a record."""
    parameters: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    marks = list(item.iter_markers(MARK))
    values = [parameters[name] for mark in marks for name in mark.args if name in parameters]
    values += [mark.kwargs["of"] for mark in marks if "of" in mark.kwargs]
    return frozenset(key for value in values for key in choice.keys(value))


def beyond_the_sample(items: Iterable[pytest.Item], choice: Choice) -> list[pytest.Item]:
    """The cases of sweeps that are left to the runs of other commits."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(SWEEP):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = []
    for cases in sweeps.values():
        if not choice.is_new(file_of(cases[0]), digest_of_test(cases[0].path)):
            mark = cases[0].get_closest_marker(SWEEP)
            tried = choice.cases(file_of(cases[0]), len(cases), *(mark.args if mark else ()))
            left += [item for number, item in enumerate(cases) if number not in tried]
    return left


def is_by_hand(config: pytest.Config) -> bool:
    """Whether somebody named the tests of this run, or runs again what failed: then all of them run."""
    option = config.option
    return bool(option.keyword or getattr(option, "lf", False) or any("::" in argument for argument in config.args))


def file_of(item: pytest.Item) -> str:
    """The file of a test, as a whole run remembers it."""
    return item.path.relative_to(STATE.parent).as_posix()


def check_marks(items: Iterable[pytest.Item], choice: Choice) -> None:
    """Refuse a test over most of the catalog that does not say so: the suite would grow with every operator."""
    definitions = {key.partition(":")[2] for key in choice.records if key.startswith("definition:")}
    names: dict[str, set[str]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker(MARK):
            known = {name for name in map(name_of, item.callspec.params.values()) if name in definitions}
            names.setdefault(item.nodeid.partition("[")[0], set()).update(known)
    for test, found in names.items():
        if len(found) > len(definitions) / 2:
            raise pytest.UsageError(
                f"{test} is over shipped definitions: give it the mark '{MARK}' (tests/full_run.py)."
            )


def is_whole(config: pytest.Config) -> bool:
    """Whether this runs every test of records: nothing was chosen by hand, and more was done than to list the tests."""
    option = config.option
    narrowed = (
        option.keyword,
        option.deselect,
        option.ignore,
        option.ignore_glob,
        option.maxfail,
        getattr(option, "lf", False),
    )
    if (
        config.args != ["tests"]
        or config.args_source is pytest.Config.ArgsSource.ARGS
        or option.markexpr not in ("", ALL_BUT_ALONE)
    ):
        return False
    return bool(option.all_records) and not option.collectonly and not any(narrowed)


def name_of(value: Any) -> str:
    """The name of a record by what a test is given: the name, what has one, a file of traces, or a pair that starts so."""
    if isinstance(value, tuple) and value:
        return name_of(value[0])
    if isinstance(value, Path):
        return f"{value.parent.parent.name}/{value.stem}"
    return str(getattr(value, "name", value))


def record_digests() -> dict[str, str]:
    """Digest by key: of Definitions with their Workloads and forward, Solutions with their Definition, traces, and cheats."""
    root, found = shipped_root(), {}
    catalog = Catalog((root,))
    for name, record in catalog.definitions.items():
        paths = [catalog.definition_paths[one] for one in {name, record.backward_of or name}]
        paths.append(root / "workloads" / record.op_type / f"{name}.jsonl")
        found[f"definition:{name}"] = _digest_of([path for path in paths if path.is_file()], root)
    for name, files in catalog.solutions.items():
        content = json.dumps([files.record.to_dict(), files.digest, found[f"definition:{files.record.definition}"]])
        found[f"solution:{name}"] = _sha256(content.encode())
    found |= {f"traces:{name_of(path)}": _sha256(path.read_bytes()) for path in shipped_traces(catalog)}
    found |= {f"page:{name}": _sha256((root / name).read_bytes()) for name in pages_of(root)}
    return found | {f"cheat:{path.stem}": _sha256(path.read_bytes()) for path in CHEATS.glob("*.py")}


def pages_of(root: Path = ROOT) -> list[str]:
    """Every page of documentation, by its path from the root."""
    patterns = ("*.md", "docs/*.md", "docs/how-to/*.md", "docs/performance/*.md")
    return sorted(path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern))


def judge_digest(root: Path = ROOT) -> str:
    """Digest of everything whose change can change a verdict."""
    folders = [root / "tilegym_db" / name for name in JUDGES]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return _digest_of(paths, root, [line for line in pins if line.partition("==")[0] in COMPILERS])


@cache
def digest_of_test(path: Path) -> str:
    """Digest of a test file, of the ``conftest.py`` of its folder and of those above, of what these import of ``tests/``, of the
    package's modules that the test file imports, and of the folder of the package that its own is named after."""
    folders = [folder for folder in path.parents if folder.is_relative_to(STATE.parent)]
    fixtures = [file for folder in folders if (file := folder / "conftest.py").is_file()]
    modules = [ROOT.joinpath(*name.split(".")) for name in IMPORTS.findall(path.read_text(encoding="utf-8"))]
    files = [
        file for module in modules for file in (module.with_suffix(".py"), *module.rglob("*.py")) if file.is_file()
    ]
    about = path.relative_to(STATE.parent).parts[0]
    files += (ROOT / "tilegym_db" / about).rglob("*.py")
    return _digest_of({*_with_helpers([path, *fixtures]), *files}, ROOT)


def _with_helpers(paths: Iterable[Path]) -> set[Path]:
    """Files of ``tests/``, and every module of ``tests/`` that they import, or that those import."""
    waiting, found = list(paths), set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = [name.split(".") for name in HELPERS.findall(path.read_text(encoding="utf-8"))]
            folders = (STATE.parent, path.parent)
            places = [folder.joinpath(*name).with_suffix(".py") for folder in folders for name in names]
            waiting += [place for place in places if place.is_file()]
    return found


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out; '' outside of a repository."""
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _digest_of(paths: Iterable[Path], root: Path, more: Iterable[str] = ()) -> str:
    lines = [f"{path.relative_to(root).as_posix()} {_sha256(path.read_bytes())}" for path in sorted(paths)]
    return _sha256("\n".join([*lines, *more]).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
