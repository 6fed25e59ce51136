"""The fixtures of every test: a separate home folder, a separate catalog for writing, and one small operator."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Tests run side by side, each with its workers; threads of each that wait for one another would take turns all day.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from sample import SAMPLE, Sample, cases_in_turn, check_marks, is_by_hand, left_to_other_days

from tilegym_db.paths import shipped_root, use_root

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that starts the tests in its background has them and all their children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A machine that only judges cheats has none; a test that needs it says so.
with contextlib.suppress(ImportError):
    import hypothesis

    # A busy machine is no failure; and a submission must not fail on an example that its author never saw.
    hypothesis.settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("tests")

HAS_GPU = os.path.exists("/dev/nvidiactl")

DEFINITION: dict[str, Any] = {
    "schema_version": 1,
    "name": "row_scale",
    "version": "1.0.0",
    "op_type": "elementwise",
    "description": "Every row times a weight and a factor.",
    "tags": ["status:verified"],
    "dtypes": {"T": ["float32", "bfloat16"]},
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["M", "N"], "dtype": "T"},
        "weight": {"shape": ["N"], "dtype": "T"},
        "factor": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
    "constraints": ["N >= 1"],
    "cost": {"flops": "2 * M * N", "bytes": "(2 * M * N + N) * sizeof(T)"},
    "reference": "# Source: https://example.org/row_scale.py#L1-L2\n"
    "def run(x, weight, factor):\n    return (x.float() * weight.float() * factor).to(x.dtype)\n",
}
KERNEL = "def run(x, weight, factor, out):\n    out.copy_((x.float() * weight.float() * factor).to(x.dtype))\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "try every shipped record and every case of a sweep, not only those that changed and a sample"
    parser.addoption("--all-records", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the sample before any test is collected; worker processes are given the one of the first process."""
    given = getattr(config, "workerinput", {}).get("sample")
    everything = config.option.all_records
    config.stash[SAMPLE] = Sample.from_json(given) if given else Sample.of_checkout(everything=everything)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker process of pytest-xdist the sample."""
    node.workerinput["sample"] = node.config.stash[SAMPLE].to_json()


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[SAMPLE].header()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what is imported and collected: millions of objects that all stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # else a library that counts its objects at the end calls them leaks


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drop the cases of other days before pytest makes items of them, which takes longer than to choose."""
    calls, of_test = metafunc._calls, list(metafunc.definition.iter_markers())
    if calls and not is_by_hand(metafunc.config):
        cases = [(call.params, [*call.marks, *of_test]) for call in calls]
        calls[:] = [calls[number] for number in cases_in_turn(cases, metafunc.config.stash[SAMPLE])]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave tests out before pytest sorts them by their fixtures, which takes long for many."""
    sample = config.stash[SAMPLE]
    check_marks(items, sample)
    if not HAS_GPU:
        leave_out(config, items, [item for item in items if item.get_closest_marker("gpu")])
    leave_out(config, items, [] if is_by_hand(config) else left_to_other_days(items, sample))
    yield
    # Files go to the worker that is free: a file that takes minutes must not be the last, with the other worker idle.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    """Take some of the collected tests out of the run."""
    if left_out:
        gone = set(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_compiled() -> Iterator[None]:
    """Code that torch.compile made in one file changes how models are patched in the next one that this process runs."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture(autouse=True, scope="session")
def busy_machine_decides() -> Iterator[None]:
    """Let times of a busy CPU count: tests run side by side, so that threads always wait. ``test_busy.py`` sets the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGYM_DB_MAX_WAITING", "inf")
        yield


@pytest.fixture(autouse=True, scope="module")
def series_are_short() -> Iterator[None]:
    """Bound the series of sizes of a promotion on a CPU; ``exploits``, whose cheats they catch, gives them all their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGYM_DB_MAX_CPU_SERIES_S", "0.1")
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Write without ``fsync``: what a killed process wrote stays without it, and no test ends the whole machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Any]]:
    """Copy the tables and views of a new database, which take longer than a small catalog; yield what really makes them."""
    from tilegym_db.store import filling, statements
    from tilegym_db.store.connection import Store, connect, remove_database

    folder = tmp_path_factory.mktemp("stores")
    made: dict[tuple[object, ...], Path] = {}
    make = filling.new_store

    def copied(path: Path) -> Store:
        state = (statements.SCHEMA_VERSION, statements.schema_sql(), statements.tables_and_views_sql())
        if state not in made:
            first = folder / f"{len(made)}.duckdb"
            try:
                make(first).close()
                connect(first, read_only=True, timeout_s=0.0).close()  # it is cut off if the test filled the disk
            except BaseException:
                remove_database(first)
                raise
            made[state] = first
        shutil.copyfile(made[state], path)
        return Store(path, connect(path, read_only=False, timeout_s=0.0), read_only=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "new_store", copied)
        yield make


@pytest.fixture(autouse=True, scope="session")
def fill_store(tmp_path_factory: pytest.TempPathFactory, make_store: object) -> Iterator[Callable[..., Any]]:
    """Copy a database of the shipped records and traces into an empty home; yield what really fills it, which takes 2 s."""
    from tilegym_db.store import filling, statements

    folder, shipped = tmp_path_factory.mktemp("filled"), shipped_root()
    made: dict[tuple[object, ...], tuple[Path, Any]] = {}
    fill = filling.create_database

    def copied(path: Path, catalog: Any, history: Path | None = None, *, keep_traces: bool = False) -> Any:
        in_home = {file.name for file in path.parent.iterdir()} - {f"{path.name}.lock"}
        if catalog.roots[:1] != (shipped,) or history is not None or in_home:
            return fill(path, catalog, history, keep_traces=keep_traces)
        state = (
            catalog.trust_foreign,
            statements.SCHEMA_VERSION,
            *sorted(statements.fingerprints(catalog, path.parent).items()),
        )
        if state not in made:
            report = fill(path, catalog, keep_traces=keep_traces)
            made[state] = (folder / f"{len(made)}.duckdb", report)
            shutil.copyfile(path, made[state][0])
            return report
        first, report = made[state]
        shutil.copyfile(first, path)
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "create_database", copied)
        yield fill


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an endless row of folders that do not exist yet."""
    return map(tmp_path_factory.mktemp("homes").joinpath, map(str, itertools.count()))


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a separate home folder for every test, not yet created.

    Most tests write nothing. For these no folder is made, because each new one is looked for among all before.
    """
    folder = request.getfixturevalue("tmp_path") / "home" if "tmp_path" in request.fixturenames else next(homes)
    monkeypatch.setenv("TILEGYM_DB_HOME", str(folder))
    return folder


@pytest.fixture
def definition_record() -> Callable[..., dict[str, Any]]:
    """Make the small operator's record with changes: ``definition_record(version="2.0.0")``; None removes a key."""

    def make(**changes: Any) -> dict[str, Any]:
        record = {**copy.deepcopy(DEFINITION), **changes}
        return {key: value for key, value in record.items() if value is not None}

    return make


@pytest.fixture
def solution_record() -> Callable[..., dict[str, Any]]:
    """Make a Solution's record of the small operator with changes; ``spec`` is merged into the default one."""

    def make(*, spec: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        return {
            "name": "row_scale_stock",
            "definition": "row_scale",
            "author": "tests",
            "spec": {"language": "python", "entry_point": "kernel.py::run", **(spec or {})},
            "sources": [{"path": "kernel.py"}],
            **changes,
        }

    return make


@pytest.fixture
def workload_record() -> Callable[..., dict[str, Any]]:
    """Make a Workload's record of the small operator with changes."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "definition": "row_scale",
            "axes": {"M": 4, "N": 8},
            "dtypes": {"T": "float32"},
            "inputs": {"factor": {"type": "scalar", "value": 0.5}},
            "tags": ["tiny"],
            **changes,
        }

    return make


@pytest.fixture
def ship() -> Iterator[Callable[[Path], Path]]:
    """Take a folder for the one that the package ships, until the test ends: ``ship(tmp_path)``."""
    with contextlib.ExitStack() as stack:
        yield lambda root: stack.enter_context(use_root(root))


@pytest.fixture
def checkout(tmp_path: Path, ship: Callable[[Path], Path]) -> Path:
    """Return an empty, writable checkout in place of the shipped catalog."""
    root = tmp_path / "checkout"
    for folder in ("definitions", "solutions", "workloads", "traces"):
        (root / folder).mkdir(parents=True)
    (root / "pyproject.toml").touch()
    return ship(root)


@pytest.fixture
def row_scale(
    checkout: Path,
    definition_record: Callable[..., dict[str, Any]],
    solution_record: Callable[..., dict[str, Any]],
    workload_record: Callable[..., dict[str, Any]],
) -> Path:
    """Fill the empty checkout with the small operator: definition, stock solution, one workload, and the lock."""
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records import Definition, Solution, Workload

    writers.add_definition(Catalog.default(), Definition.from_dict(definition_record()))
    spec = {"provides": "stock", "role": "baseline"}
    writers.add_solution(
        Catalog.default(), Solution.from_dict(solution_record(spec=spec)), {"kernel.py": KERNEL.encode()}
    )
    writers.add_workloads(Catalog.default(), [Workload.from_dict(workload_record())])
    return checkout


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[..., Path]:
    """Write a value as a JSON file and return its path."""

    def write(value: Any, name: str = "record.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(value))
        return path

    return write
