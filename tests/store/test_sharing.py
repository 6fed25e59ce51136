"""A data set that a team shares: in a folder, and on a real S3 server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import StoreError, UsageError
from tilegym_db.published.shared_tables import hidden
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import best_rows
from tilegym_db.store.sharing import Row, SharedDataSet, digest_of, query_data_set, share_traces, sync_traces

BATCHES, ROWS = 16, 20

# Makes each line of its input a separate process, forked after pyarrow is imported but nothing of it has begun.
WRITER = """import json, os, sys
import pyarrow, pyarrow.parquet, pyarrow.dataset
from tilegym_db.store.sharing import SharedDataSet, Row
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        data_set = SharedDataSet(line.strip())
        for batch in range(BATCHES):
            data_set.add([Row(json.dumps({"trace_id": f"{batch}-{n}"})) for n in range(ROWS)], "h200")
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
""".replace("BATCHES", str(BATCHES)).replace("ROWS", str(ROWS))


def rows_of(*ids: str) -> list[Row]:
    return [Row(json.dumps({"trace_id": identity, "definition": "scale"})) for identity in ids]


def held(data_set: SharedDataSet) -> list[str]:
    """The trace ids of every row of every file; all files must be valid."""
    found = []
    for file in data_set.files():
        rows, problem = data_set.rows(file)
        assert problem == ""
        found += [json.loads(row.record)["trace_id"] for row in rows]
    return sorted(found)


# -- in a folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path) -> SharedDataSet:
    return SharedDataSet(str(tmp_path / "shared"))


@pytest.fixture
def publish(opened, write_traces, shared):
    """Ingest traces as measured here, and share what the store holds."""

    def share(*traces):
        with opened() as store:
            ingest(store, [write_traces(*traces)])
            return share_traces(store, shared)

    return share


def test_unrelated_folder_is_refused_before_it_is_fully_listed(tmp_path):
    for number in range(30):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / f"folder{number}" / "file.txt").touch()
    for address in (str(tmp_path), tmp_path.as_uri()):
        with raises(StoreError, "data_set_not_one", str(tmp_path)):
            SharedDataSet(address, max_others=20).files()
    (tmp_path / "file").touch()
    with raises(StoreError, "place_refused", "list", str(tmp_path / "file")) as error:
        SharedDataSet(str(tmp_path / "file")).files()
    assert "AWS" not in str(error.value)  # no credentials open a folder of this machine


def test_what_was_measured_here_is_shared_once(publish, trace, shared):
    one, two = trace(latency_us=9.0), trace(kind="stock", gpu="h100-sxm")
    first = publish(one, two)
    assert (first.traces, first.known) == (2, 0)
    assert sorted(name.partition("/")[0] for name in first.written) == ["gpu=h100-sxm", "gpu=h200"]
    again = publish()
    assert (again.traces, again.known, again.written) == (2, 2, [])
    third = publish(trace(latency_us=8.0))
    assert (third.known, len(third.written)) == (2, 1)
    assert len(held(shared)) == 3


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The names of the files that are read from now on."""
    seen: list[str] = []
    read = SharedDataSet._read

    def counted(self, file, columns):
        seen.append(file.name)
        return read(self, file, columns)

    monkeypatch.setattr(SharedDataSet, "_read", counted)
    return seen


@pytest.mark.turn("tilegym_db/store/sharing.py")  # reads files as often as a week does
def test_a_file_is_read_once_by_publish_and_once_by_questions(publish, trace, shared, reads, home, monkeypatch):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(home))
    publish(trace(latency_us=9.0))
    publish()
    publish(trace(latency_us=8.0))
    publish()
    assert len(reads) == len(set(reads)) == len(shared.files()) == 2
    reads.clear()
    count = "SELECT count(*) AS n FROM traces WHERE origin = 'local'"
    for _ in range(2):
        assert query_data_set(shared.uri, count).rows == [(2,)]
    assert sorted(reads) == [file.name for file in shared.files()]
    reads.clear()
    assert query_data_set(shared.uri, count, trust=True).rows == [(2,)]  # in a store apart
    assert len(reads) == 2

    # A file that left the data set leaves the answers, and its traces are shared again.
    gone, kept = (Path(file.path) for file in shared.files())
    gone.unlink()
    assert query_data_set(shared.uri, count).rows == [(1,)]
    assert publish().known == 1
    assert kept.is_file()
    assert len(held(shared)) == 2


def test_what_is_remembered_may_be_lost_or_damaged(publish, trace, shared, reads, home):
    publish(trace())
    publish()
    (memory,) = (home / "shared").glob("*.json")
    for content in (b"", b"[]", b'{"files": [[1]]}', b'{"files": 3}'):
        memory.write_bytes(content)
        reads.clear()
        assert publish().known == 1
        assert len(reads) == 1


def test_traces_of_other_installations_are_foreign_until_trusted(publish, trace, shared, catalog, tmp_path):
    stock, fast = trace(kind="stock", latency_us=20.0), trace(latency_us=9.0, speedup=2.0)
    publish(stock, fast)
    other = tmp_path / "other"
    with open_store(other, catalog=catalog) as store:
        report, problems = sync_traces(store, shared)
        assert (report.added, problems) == (2, [])
        assert {row["origin"] for row in store.rows("SELECT origin FROM traces")} == {"foreign"}
        assert best_rows(store) == []
        assert share_traces(store, shared).traces == 0  # they are not its own to share
        assert sync_traces(store, shared)[0].files == 0  # it has read that file
        sync_traces(store, shared, trust=True)
        assert [row["solution"] for row in best_rows(store)] == ["scale_triton"]


def test_an_installation_knows_its_own_traces_again(publish, trace, shared, home, root, opened):
    publish(trace())
    (home / "tilegym.duckdb").unlink()
    with opened() as store:
        sync_traces(store, shared)
        assert [row["origin"] for row in store.rows("SELECT origin FROM traces")] == ["local"]


def test_invalid_files_are_named_and_the_others_are_read(publish, trace, shared, catalog, tmp_path):
    publish(trace(), trace(gpu="h100-sxm"), trace(gpu="l4"))
    files = {file.name.partition("/")[0]: Path(file.path) for file in shared.files()}
    whole = files["gpu=h200"].read_bytes()
    files["gpu=h200"].write_bytes(whole[: len(whole) // 2])
    other = files["gpu=l4"]
    other.rename(other.with_name("0" * 64 + ".parquet"))
    with open_store(tmp_path / "other", catalog=catalog) as store:
        report, problems = sync_traces(store, shared)
    assert report.added == 1
    assert len(problems) == 2
    assert any("no whole Parquet file" in problem for problem in problems)
    assert any("does not hold what its name says" in problem for problem in problems)


def test_a_data_set_of_a_newer_version_is_refused_as_a_whole(publish, trace, shared, catalog, tmp_path):
    import pyarrow.parquet as parquet

    publish(trace())
    table = parquet.read_table(shared.files()[0].path)
    newer = tmp_path / "shared" / "gpu=h200" / "newer.parquet"
    parquet.write_table(table.replace_schema_metadata({"tilegym_db.schema_version": "2"}), newer)
    with open_store(tmp_path / "other", catalog=catalog) as store:
        with raises(StoreError, "version_newer", "pip install --upgrade tilegym-db"):
            sync_traces(store, shared)
        assert store.rows("SELECT * FROM traces") == []
    with raises(StoreError, "version_newer"):
        publish()


def test_a_table_of_something_else_is_no_file_of_traces(shared, tmp_path):
    import pyarrow
    import pyarrow.parquet as parquet

    (tmp_path / "shared").mkdir()
    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "shared" / "other.parquet")
    rows, problem = shared.rows(shared.files()[0])
    assert rows == []
    assert all(fact in problem for fact in ("other.parquet", "column record"))


def test_empty_address_says_which_command_writes_first_traces(shared, catalog, tmp_path):
    with (
        open_store(tmp_path / "other", catalog=catalog) as store,
        raises(StoreError, "data_set_empty", "tilegym-db publish --gpu auto --to"),
    ):
        sync_traces(store, shared)


def test_the_same_rows_make_the_same_file_whatever_their_order(shared):
    assert shared.add(rows_of("a", "b"), "h200") is not None
    assert shared.add(rows_of("b", "a"), "h200") is None
    assert digest_of(rows_of("a")) != digest_of([Row(rows_of("a")[0].record, "signed")])


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("s3://key:secret@bucket/x", "address_with_credentials"),
        ("s3://bucket/x?secret_key=y", "address_with_credentials"),
        ("", "address_empty"),
        ("ftp://host/x", "address_invalid"),
        ("gs://b/x", "address_invalid"),
        ("hdfs://h/x", "address_invalid"),
    ],
)
def test_address_with_credentials_is_refused_without_showing_it(uri, code):
    with raises(UsageError, code) as error:
        SharedDataSet(uri)
    assert "secret@" not in str(error.value)
    assert "secret_key=y" not in str(error.value)


def test_credentials_that_a_service_repeats_are_hidden():
    environment = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalr"}
    assert hidden("key AKIDEXAMPLE with wJalr is wrong", environment) == "key *** with *** is wrong"


# -- on an S3 server --------------------------------------------------------------------------------------------------


@pytest.fixture
def write(s3) -> Iterator[Callable[[str], tuple[int, Callable[[], int]]]]:
    """Start a writer of all batches; returns its process id and a function that waits for its exit status."""
    command, pipe = [sys.executable, "-c", WRITER], subprocess.PIPE
    launcher = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    with launcher:
        stdin, stdout = launcher.stdin, launcher.stdout
        assert stdin is not None
        assert stdout is not None

        def start(uri: str) -> tuple[int, Callable[[], int]]:
            stdin.write(f"{uri}\n")
            stdin.flush()
            return int(stdout.readline()), lambda: int(stdout.readline())

        yield start


ALL = sorted(f"{batch}-{n}" for batch in range(BATCHES) for n in range(ROWS))


def as_it_lies(uri: str) -> tuple[set[str], list[str]]:
    """Return files of a data set and their content; again, if a request of a killed writer was carried out in between."""
    while True:
        files = {file.name for file in SharedDataSet(uri).files()}
        found = held(SharedDataSet(uri))
        if files == {file.name for file in SharedDataSet(uri).files()}:
            return files, found


@pytest.mark.turn("tilegym_db/store/sharing.py")  # six processes; two writers at once are tried daily
def test_kills_of_a_writer_lose_no_trace_and_double_none(s3, write, pytestconfig):
    most = 20 if pytestconfig.option.all_records else 6  # other moments every time
    moments, folders, kills = random.Random(os.urandom(8)), 1, 0
    seen: set[str] = set()
    while kills < most:
        uri = s3.replace("/traces", f"/traces-{folders}")
        process, ended = write(uri)
        time.sleep(moments.uniform(0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if ended() == -signal.SIGKILL:
            kills += 1
        files, found = as_it_lies(uri)
        assert seen <= files  # what was written stays
        assert len(found) == len(set(found)) == ROWS * len(files)  # whole files, each batch once
        done = len(files) == BATCHES
        seen, folders = (set(), folders + 1) if done else (files, folders)
    _, ended = write(uri)
    assert ended() == 0
    assert held(SharedDataSet(uri)) == ALL


@pytest.mark.turn("tilegym_db/store/sharing.py")  # several processes
def test_two_writers_at_once_make_one_file_of_each_batch(s3):
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(f"{s3}\n")
        writer.stdin.close()
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert held(SharedDataSet(s3)) == ALL


def test_a_bucket_that_does_not_exist_is_named(s3):
    with raises(StoreError, "place_refused", "list", "s3://nobody/x", "NO_SUCH_BUCKET"):
        SharedDataSet("s3://nobody/x?region=us-east-1").files()
    with raises(StoreError, "place_refused", "write", "s3://nobody/x", "NO_SUCH_BUCKET"):
        SharedDataSet("s3://nobody/x?region=us-east-1").add(rows_of("a"), "h200")


def test_a_wrong_key_is_refused_and_not_repeated(s3, server):
    def require_keys(after: str) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{server}/moto-api/reset-auth", after.encode(), headers, method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    require_keys("0")
    try:
        with raises(StoreError, "place_refused", "list", "AWS_ACCESS_KEY_ID") as error:
            SharedDataSet(s3).files()
    finally:
        require_keys("1000000000")
    assert "AKIDEXAMPLE" not in str(error.value)
    assert "wJalrXUtnFEMI" not in str(error.value)


@pytest.mark.turn("tilegym_db/store/sharing.py")  # waits 2 s
def test_a_service_that_never_answers_is_given_up_soon(s3, monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with raises(StoreError, "place_refused", "list", "has not answered for 4 s"):
            SharedDataSet(s3).files()
        assert time.monotonic() - began < 8


@pytest.mark.turn("tilegym_db/store/sharing.py")  # several processes
def test_a_listing_that_is_cut_off_changes_nothing(s3, server, monkeypatch, catalog, tmp_path):
    SharedDataSet(s3).add(rows_of("a", "b"), "h200")
    with CutOff(server) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with open_store(tmp_path / "other", catalog=catalog) as store:
            with raises(StoreError, "place_refused", "list", "s3://"):
                sync_traces(store, SharedDataSet(s3))
            assert store.rows("SELECT * FROM traces") == []


class CutOff:
    """A server in front of another one that ends each answer half way."""

    def __init__(self, target: str) -> None:
        self._port = int(target.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._serve, daemon=True).start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *exception: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, socket.create_connection(("127.0.0.1", self._port)) as server:
                server.sendall(client.recv(1 << 16))
                answer = b""
                while b"</ListBucketResult>" not in answer and (piece := server.recv(1 << 16)):
                    answer += piece
                client.sendall(answer[: len(answer) - 60])


@pytest.mark.turn("tilegym_db/store/sharing.py")  # its functions are tested above
def test_the_command_line_shares_syncs_and_asks(s3, home, tmp_path, monkeypatch, capsys):
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.app import app
    from tilegym_db.store.journal import Journal

    shipped = Catalog.default()
    path = next(iter(sorted((Path(__file__).parents[2] / "traces").glob("*/norm/rms_norm.jsonl.gz"))))
    from tilegym_db.store.journal import read_journal

    with Journal("run-1", home) as journal:
        for trace in read_journal(path).traces[:5]:
            journal.append(
                trace.model_copy(update={"gpu": "l4", "run_id": "run-1", "trace_id": f"{trace.trace_id}-l4"})
            )
    assert shipped.definitions
    monkeypatch.setenv("TILEGYM_DB_HOME", str(home))
    assert app(["publish", "--gpu", "l4", "--to", s3]) == 0
    assert "5 traces added" in capsys.readouterr().err
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "colleague"))
    assert app(["data", "sync", s3]) == 0
    assert "5 traces added" in capsys.readouterr().out
    assert (
        app(["sql", "--from", s3, "--csv", "SELECT count(*) AS n, origin FROM traces WHERE gpu = 'l4' GROUP BY ALL"])
        == 0
    )
    assert capsys.readouterr().out.split() == ["n,origin", "5,foreign"]
    shutil.rmtree(tmp_path / "colleague")


@pytest.mark.parametrize("uri", ["s3://", "s3:///folder"])
def test_address_without_a_bucket_is_refused_before_any_listing(uri: str) -> None:
    with raises(UsageError, "bucket_missing", "s3://bucket/folder"):
        SharedDataSet(uri)
