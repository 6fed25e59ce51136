from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import FILE_NAME as PARSED_SOURCES
from tilegym_db.errors import StoreError
from tilegym_db.published.input_files import packed, trace_lines
from tilegym_db.store import connection as connections
from tilegym_db.store import filling
from tilegym_db.store.connection import LOCK_TIMEOUT_S, ROW_GROUP_SIZE
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import count_traces, definition_by_digest, read_traces
from tilegym_db.store.statements import SCHEMA_VERSION

NOBODY = 65534

HOLDER = """
import sys, duckdb
connection = duckdb.connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


OPENS_AND_FILLS = pytest.mark.turn(
    "tilegym_db/store/connection.py", "tilegym_db/store/opening.py", "tilegym_db/store/filling.py"
)
"""The test fills databases, or starts a process that opens one."""


@pytest.fixture(autouse=True)
def stores_are_made(make_store: Callable[[Path], connections.Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files' stores begin as copies."""
    monkeypatch.setattr(filling, "new_store", make_store)


@pytest.fixture
def read_only_folder(root: Path) -> Iterator[Path]:
    """A folder that this process may not write, even where the tests run as root; the catalog stays readable."""
    folder = Path(tempfile.mkdtemp(prefix="tilegym-db-test-"))
    shutil.copytree(root, folder / "catalog")
    (folder / "home").mkdir()
    user = os.geteuid()
    for path in (folder, folder / "home"):
        path.chmod(0o555)
    if user == 0:
        os.seteuid(NOBODY)
    yield folder
    if user == 0:
        os.seteuid(user)
    for path in (folder, folder / "home"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def left_in(home: Path) -> list[str]:
    """What lies in a home folder, but for what parsing found: that is there where a source was new to this process."""
    return sorted({path.name for path in home.iterdir()} - {PARSED_SOURCES})


def names(store, view: str) -> list[str]:
    return [row["name"] for row in store.rows(f"SELECT name FROM {view} ORDER BY name")]


def test_fresh_store_holds_catalog_shipped_traces_and_journals(opened, home, root, trace):
    shipped = root / "traces" / "h200" / "norm"
    shipped.mkdir(parents=True)
    (shipped / "scale.jsonl.gz").write_bytes(packed(trace_lines([trace().to_dict()], {})))
    with Journal("run-1", home) as journal:
        journal.append(trace())
    with opened() as store:
        assert names(store, "definitions") == ["scale", "shift"]
        assert names(store, "solutions") == [
            f"{d}_{k}" for d in ("scale", "shift") for k in ("stock", "tilelang", "triton")
        ]
        assert store.rows("SELECT count(*) AS n FROM workloads WHERE axes['M'] = 4096 AND 'model:toy' IN tags") == [
            {"n": 2}
        ]
        assert count_traces(store) == 2


def test_reader_makes_a_missing_store(opened, home):
    with opened(read_only=True) as store:
        assert names(store, "definitions") == ["scale", "shift"]
    assert left_in(home) == ["tilegym.duckdb", "tilegym.duckdb.lock"]


def test_files_open_in_duckdb_1_5(opened, home):
    with opened():
        pass
    with duckdb.connect(home / "tilegym.duckdb", read_only=True) as connection:
        (tags,) = connection.execute("SELECT tags FROM duckdb_databases() WHERE path IS NOT NULL").fetchone()
    assert tags["storage_version"].startswith("v1.5.0")


def test_table_is_written_and_scanned_in_more_pieces_than_usual(opened, home):
    with opened() as store:
        store.connection.execute(f"CREATE TABLE numbers AS FROM range({ROW_GROUP_SIZE + 1})")
    with opened(read_only=True) as store:
        pieces = store.rows("SELECT DISTINCT row_group_id FROM pragma_storage_info('numbers') ORDER BY ALL")
    assert pieces == [{"row_group_id": 0}, {"row_group_id": 1}]


def test_opening_the_store_twice_in_a_process_says_so(opened):
    with opened(), raises(StoreError, "store_open_here", "tilegym.duckdb"), opened(read_only=True):
        pass
    with opened(read_only=True), raises(StoreError, "store_open_here", "tilegym.duckdb"), opened():
        pass


def test_changed_catalog_reaches_the_next_reader_with_old_texts(opened, root, catalog):
    old = catalog.definition("scale")
    with opened():
        pass
    path = root / "definitions" / "norm" / "scale.json"
    path.write_text(path.read_text().replace("x * 2", "x * 3.0").replace("1.0.0", "1.1.0"))
    shutil.rmtree(root / "solutions" / "norm" / "scale" / "scale_tilelang")
    with opened(read_only=True) as store:
        assert store.stale is None
        assert store.rows("SELECT version FROM definitions WHERE name = 'scale'") == [{"version": "1.1.0"}]
        assert "scale_tilelang" not in names(store, "solutions")
        assert definition_by_digest(store, old.digest) == old.to_dict()
        assert definition_by_digest(store, "0" * 64) is None


def test_invalid_record_is_named_once_and_returns_when_mended(opened, root, home, caplog):
    with opened() as store:
        before = names(store, "definitions")
    path = root / "definitions" / "norm" / "scale.json"
    good = path.read_text()
    path.write_text("{")
    for _ in range(2):
        with opened() as store:
            assert set(before) - set(names(store, "definitions")) == {"scale"}
    (record,) = caplog.records
    assert f"left out: {path}: not valid JSON" in record.getMessage()
    path.write_text(good)
    with opened() as store:
        assert names(store, "definitions") == before


def test_a_failed_creation_leaves_nothing(opened, home, file_size_limit):
    with file_size_limit(4096), raises(StoreError, "disk_full", "TILEGYM_DB_HOME"), opened():
        pass
    assert left_in(home) == ["tilegym.duckdb.lock"]


def test_a_store_held_by_another_program_says_by_which(opened, home):
    with opened():
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home / "tilegym.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    for read_only in (True, False):
        with raises(StoreError, "store_locked", f"PID {holder.pid}"), opened(read_only=read_only):
            pass
    holder.communicate()
    with opened() as store:
        assert not store.read_only


WRITER = """
import sys, time
from pathlib import Path
from tilegym_db.store.connection import connect, writer_lock
path = Path(sys.argv[1])
with writer_lock(path, 5):
    connection = connect(path, read_only=False, timeout_s=5)
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    connection.close()
"""


@pytest.mark.turn("tilegym_db/store/connection.py")  # waits 12 s
@pytest.mark.slow
def test_reader_waits_with_a_word_while_a_command_writes(opened, home, root, caplog):
    with opened():
        pass
    command = [sys.executable, "-c", WRITER, str(home / "tilegym.duckdb"), str(LOCK_TIMEOUT_S + 2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with open_store(home, read_only=True, catalog=Catalog((root,))) as store:
            assert count_traces(store) == 0
    assert [record.message for record in caplog.records if f"PID {writer.pid}" in record.message]


@pytest.mark.turn("tilegym_db/store/connection.py")  # waits 6 s
@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_reader_waits_for_a_busy_writer_and_not_for_an_idle_one(opened, home, root, monkeypatch, is_busy):
    with opened():
        pass
    monkeypatch.setattr(connections, "IDLE_S", 1.0)
    compute = "end = time.monotonic() + 6\n    while time.monotonic() < end: sum(range(100_000))"
    work = WRITER.replace("time.sleep(float(sys.argv[2]))", compute) if is_busy else WRITER
    command = [sys.executable, "-c", work, str(home / "tilegym.duckdb"), "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        if is_busy:
            open_store(home, read_only=True, catalog=Catalog((root,))).close()
        else:
            with raises(StoreError, "store_locked", f"PID {writer.pid}"):
                open_store(home, read_only=True, catalog=Catalog((root,)))
            writer.kill()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("read_only", [True, False, None])
def test_all_wait_for_the_process_that_creates_the_store(home, root, monkeypatch, read_only):
    """Under load creation takes longer than any other use of the lock; None stands for a rebuild."""
    home.mkdir()
    monkeypatch.setattr("tilegym_db.store.connection.LOCK_TIMEOUT_S", 0.1)
    held = threading.Event()

    def create() -> None:
        with connections.writer_lock(home / "tilegym.duckdb", 1.0):
            held.set()
            time.sleep(0.5)

    creator = threading.Thread(target=create)
    creator.start()
    held.wait(10)
    catalog = Catalog((root,))
    if read_only is None:
        rebuild(home, catalog=catalog, lock_timeout_s=0.1)
    else:
        open_store(home, read_only=read_only, catalog=catalog, lock_timeout_s=0.1).close()
    creator.join()


@pytest.mark.parametrize("first", [True, False])
def test_a_store_that_is_open_here_is_to_be_closed(first, opened):
    with opened():
        pass
    with opened(read_only=first), raises(StoreError, "store_open_here", "store.close()"), opened(read_only=False):
        pass
    with opened():
        pass


def test_reader_beside_another_reader_reports_the_old_catalog(opened, root):
    with opened(read_only=True) as first:
        assert first.stale is None
        shutil.rmtree(root / "solutions" / "norm" / "scale" / "scale_tilelang")
        with opened(read_only=True) as second:
            assert "scale_tilelang" in names(second, "solutions")
            assert "catalog changed" in second.stale


@OPENS_AND_FILLS
def test_no_progress_bar_goes_to_stdout_of_a_prompt(opened, home, root):
    with opened():
        pass
    program = """
import sys
from pathlib import Path
from tilegym_db.catalog import Catalog
from tilegym_db.store.opening import open_store
for read_only in (True, False):
    with open_store(Path(sys.argv[1]), read_only=read_only, catalog=Catalog((Path(sys.argv[2]),))) as store:
        print(store.rows("SELECT current_setting('enable_progress_bar') AS bar")[0]["bar"])
"""
    command = [sys.executable, "-c", program, str(home), str(root)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


@OPENS_AND_FILLS
def test_reader_that_waits_sees_the_catalog_once_a_writer_ends(opened, root, home):
    with opened():
        pass
    shutil.rmtree(root / "solutions" / "norm" / "scale" / "scale_tilelang")
    held = threading.Event()

    def write():
        with connections.writer_lock(home / "tilegym.duckdb", 1.0):
            held.set()
            time.sleep(0.5)

    writer = threading.Thread(target=write)
    writer.start()
    held.wait()
    with open_store(home, read_only=True, catalog=Catalog((root,)), waits=True) as store:
        assert store.stale is None
        assert "scale_tilelang" not in names(store, "solutions")
    writer.join()


def test_a_store_of_a_newer_schema_version_is_refused(opened):
    with opened() as store, store.transaction("age") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    for read_only in (True, False):
        with raises(StoreError, "version_newer", "pip install --upgrade tilegym-db"), opened(read_only=read_only):
            pass


# What schemas 2 and 3 added, taken away again.
TO_SCHEMA_1 = """
    ALTER TABLE trace_records DROP COLUMN audit;
    ALTER TABLE trace_records DROP COLUMN failure;
    ALTER TABLE trace_records ALTER COLUMN attempt SET DATA TYPE INTEGER;
    ALTER TABLE trace_records ALTER COLUMN sandbox_level SET DATA TYPE INTEGER;
    ALTER TABLE trace_records ALTER COLUMN envelope SET DATA TYPE STRUCT(cases BIGINT, digest VARCHAR, seed VARCHAR);
    DROP TABLE peak_records;
    UPDATE meta SET value = '1' WHERE key = 'schema_version';
"""


@pytest.fixture
def old_store(opened, home, root, catalog, trace, write_traces):
    """A store with the tables of schema 1, and its traces: one of a journal, one of a file that is gone."""
    journaled, given = trace(), trace(envelope={"cases": 24, "digest": "d", "seed": "7"})
    with Journal("run-1", home) as journal:
        journal.append(journaled)
    with opened() as store:
        file = write_traces(given)
        ingest(store, [file])
        file.unlink()
        for (view,) in store.connection.execute(
            "SELECT view_name FROM duckdb_views() WHERE NOT internal AND database_name = current_database()"
        ).fetchall():
            store.connection.execute(f"DROP VIEW {view}")
        store.connection.execute(TO_SCHEMA_1)
    path = root / "definitions" / "norm" / "scale.json"
    path.write_text(path.read_text().replace("x * 2", "x * 3.0").replace("1.0.0", "1.1.0"))
    return {item.trace_id: item for item in (journaled, given)}


@OPENS_AND_FILLS
@pytest.mark.parametrize("read_only", [True, False])
def test_store_of_an_older_schema_is_remade_once_without_loss(opened, old_store, catalog, home, caplog, read_only):
    with opened(read_only=read_only) as store:
        assert read_traces(store, old_store) == old_store
        assert definition_by_digest(store, catalog.definition("scale").digest) is not None
        assert store.rows("SELECT envelope_dropped, failure FROM traces WHERE envelope_cases = 24") == [
            {"envelope_dropped": None, "failure": None}
        ]
    with opened(read_only=read_only) as store:
        assert count_traces(store) == 2
    (record,) = caplog.records
    said = f"tables of an older tilegym-db (schema 1, now {SCHEMA_VERSION}): making it anew, once"
    assert said in record.getMessage()
    assert left_in(home) == [
        "installation.key",
        "runs",
        "tilegym.duckdb",
        "tilegym.duckdb.lock",
    ]


@OPENS_AND_FILLS
def test_rebuild_remakes_an_older_store_from_its_journals_alone(opened, old_store, home, root):
    assert rebuild(home, catalog=Catalog((root,))).added == 1
    with opened() as store:
        assert read_traces(store, old_store) == dict([next(iter(old_store.items()))])


@pytest.mark.turn("tilegym_db/store/opening.py", "tilegym_db/store/schema.sql")  # a separate process
def test_first_command_after_an_upgrade_says_the_store_is_remade(old_store, home, root):
    code = (
        "import sys; from pathlib import Path; from tilegym_db.catalog import Catalog\n"
        "from tilegym_db.store.opening import open_store\n"
        "open_store(Path(sys.argv[1]), read_only=True, catalog=Catalog((Path(sys.argv[2]),))).close()\n"
    )
    command = [sys.executable, "-c", code, str(home), str(root)]
    told = [subprocess.run(command, check=True, capture_output=True, text=True).stderr for _ in range(2)]
    assert told[0].count("making it anew") == 1
    assert told[1] == ""


@OPENS_AND_FILLS
def test_older_store_stays_whole_if_the_new_one_has_no_room(opened, old_store, home, file_size_limit):
    before = (home / "tilegym.duckdb").read_bytes()
    for read_only in (True, False):
        with (
            file_size_limit(64 * 1024),
            raises(StoreError, "disk_full", "TILEGYM_DB_HOME"),
            opened(read_only=read_only),
        ):
            pass
    assert (home / "tilegym.duckdb").read_bytes() == before
    with opened() as store:
        assert read_traces(store, old_store) == old_store


@OPENS_AND_FILLS
def test_a_reader_that_cannot_make_an_older_store_anew_says_why(opened, old_store, home):
    reading = HOLDER.replace("(sys.argv[1])", "(sys.argv[1], read_only=True)")
    holder = subprocess.Popen(
        [sys.executable, "-c", reading, str(home / "tilegym.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with raises(StoreError, "store_locked", "older tilegym-db", f"PID {holder.pid}"), opened(read_only=True):
        pass
    holder.communicate()


def test_a_file_that_is_no_store_is_left_alone(opened, home):
    home.mkdir()
    path = home / "tilegym.duckdb"
    path.write_bytes(b"not a database" * 1000)
    with raises(StoreError, "store_damaged", "tilegym-db data ingest --rebuild"), opened():
        pass
    assert path.read_bytes() == b"not a database" * 1000

    path.unlink()
    with duckdb.connect(path) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 1 AS a")
    with raises(StoreError, "store_foreign", "TILEGYM_DB_HOME"), opened():
        pass


def test_a_store_opens_by_the_text_of_its_path(tmp_path, catalog):
    with open_store(str(tmp_path / "home"), catalog=catalog) as store:
        assert store.path == tmp_path / "home" / "tilegym.duckdb"


def test_a_read_only_folder_is_named_with_the_way_out(read_only_folder):
    catalog = Catalog((read_only_folder / "catalog",))
    for read_only in (True, False):
        with raises(StoreError, "folder_unwritable", "TILEGYM_DB_HOME"):
            open_store(read_only_folder / "home", read_only=read_only, catalog=catalog)
    assert list((read_only_folder / "home").iterdir()) == []


@OPENS_AND_FILLS
def test_a_full_disk_leaves_no_half_made_store(opened, home, file_size_limit):
    with file_size_limit(64 * 1024), raises(StoreError, "disk_full", "TILEGYM_DB_HOME"), opened():
        pass
    assert left_in(home) == ["tilegym.duckdb.lock"]
    with opened() as store:
        assert names(store, "definitions") == ["scale", "shift"]


def test_a_failed_write_changes_nothing(opened):
    def spoil(store):
        with store.transaction("spoil") as connection:
            connection.execute("DELETE FROM definition_records")
            connection.execute("INSERT INTO meta VALUES (NULL, NULL)")

    with opened() as store:
        with raises(StoreError, "store_failed", "spoil"):
            spoil(store)
        assert names(store, "definitions") == ["scale", "shift"]


def test_a_reader_cannot_write(opened):
    with (
        opened(read_only=True) as store,
        raises(StoreError, "store_read_only", "write to"),
        store.transaction("write to"),
    ):
        pass


def test_a_store_is_not_used_across_a_fork(opened):
    with opened() as store:
        child = os.fork()
        if child == 0:
            try:
                store.rows("SELECT 1")
            except StoreError as error:
                os._exit(0 if error.code == "store_forked" else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert names(store, "definitions") == ["scale", "shift"]


def test_importing_the_store_loads_no_engine_and_no_torch():
    code = (
        "import sys, tilegym_db.store; early = set(sys.modules)\n"
        "import tilegym_db.store.filling, tilegym_db.store.publish\n"
        "late = set(sys.modules)\n"
        "assert not early & {'duckdb', 'pydantic', 'torch'}, early\n"
        "assert not late & {'duckdb', 'torch', 'triton', 'pyarrow', 'numpy'}, late\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reader_of_a_store_in_step_loads_no_record_class(home, root):
    open_store(home, read_only=True, catalog=Catalog((root,))).close()
    code = (
        "import sys\nfrom pathlib import Path\nfrom tilegym_db.catalog import Catalog\n"
        "from tilegym_db.store.opening import open_store\nfrom tilegym_db.store.queries.measured import best_rows\n"
        f"with open_store(Path({str(home)!r}), read_only=True, catalog=Catalog((Path({str(root)!r}),))) as store:\n"
        "    best_rows(store)\n"
        "slow = {'filling', 'definition', 'solution', 'trace', 'workload'}\n"
        "loaded = {name.rpartition('.')[2] for name in sys.modules if name.startswith('tilegym_db.')}\n"
        "assert not loaded & slow, loaded & slow\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@OPENS_AND_FILLS
@pytest.mark.parametrize(("pages", "limit"), [(1 << 16, "128.0 MiB"), (1 << 30, "2.0 GiB")])
def test_writer_takes_half_of_the_memory_at_its_connection(opened, monkeypatch, pages, limit):
    machine = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}
    with opened():
        pass  # the module was in use before
    monkeypatch.setattr(connections.os, "sysconf", machine.__getitem__)
    with opened() as store:
        assert store.rows("SELECT current_setting('memory_limit') AS found") == [{"found": limit}]


@pytest.mark.parametrize("cause", ["Operation not supported", "No locks available"])
@pytest.mark.parametrize("read_only", [True, False])
def test_file_system_without_locks_is_named_at_once(cause, read_only, tmp_path, monkeypatch):
    def connect(*_: object, **__: object) -> None:
        raise duckdb.IOException(
            f'IO Error: Could not set lock on file "x.duckdb": {cause}. See also the documentation'
        )

    monkeypatch.setattr(duckdb, "connect", connect)
    began = time.monotonic()
    with raises(StoreError, "locks_missing", "TILEGYM_DB_HOME", cause):
        connections.connect(tmp_path / "x.duckdb", read_only=read_only, timeout_s=connections.LOCK_TIMEOUT_S)
    assert time.monotonic() - began < connections.LOCK_TIMEOUT_S / 2
