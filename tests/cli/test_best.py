from __future__ import annotations

import json

import pytest

from tilegym_db.published.input_files import read_traces


@pytest.fixture
def measured(cli, journal_traces):
    journal_traces(5.0, 30.0, 10.0)
    assert cli("data", "ingest").code == 0


@pytest.fixture
def screened(cli, journal_traces):
    """A screen pass and nothing else, in a store that only takes the promotion tier for verified."""
    journal_traces(5.0, tier="screen")
    assert cli("data", "ingest").code == 0


def test_best_is_the_newest_trace_of_the_fastest_solution(cli, measured):
    (row,) = cli("best", "--json").json()
    assert (row["solution"], row["latency_us"], row["speedup"], row["gpu"]) == ("row_scale_stock", 10.0, 1.5, "h200")
    result = cli("best", "row_scale", "--gpu", "h200")
    assert result.code == 0
    assert "T=float32" in result.out
    assert "M=4,N=8" in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["--gpu", "b200"], 3, "h200"),
        (["--op-type", "norm"], 2, "elementwise"),
        (["row_scal"], 2, "'row_scale'"),
        (["--gpu", "h300"], 2, "'h200'"),
    ],
)
def test_best_says_what_there_is_instead(arguments, code, fact, cli, measured):
    result = cli("best", *arguments)
    assert (result.code, result.out) == (code, "")
    assert fact in result.err


def test_a_changed_source_is_no_longer_best(cli, measured, row_scale):
    source = row_scale / "solutions/elementwise/row_scale/row_scale_stock/kernel.py"
    source.write_text(source.read_text() + "# changed\n")
    assert cli("best", "--json").code == 3
    traces = cli("show", "row_scale_stock")
    assert traces.out.count(" old") == 3


def test_passes_of_a_screen_are_pointed_out(cli, screened):
    waiting = "1 screen pass is not verified yet: run tilegym-db verify"
    result = cli("best", "row_scale")
    assert result.code == 3
    assert f"{waiting} row_scale" in " ".join(result.err.split())
    for name in ([], ["row_scale"]):
        result = cli("best", "--rank", *name)
        assert (result.code, result.out) == (3, "")
        assert " ".join([waiting, *name]) in " ".join(result.err.split())
    refused = " ".join(cli("best", "--rank", "--gpu", "b200").err.split())
    assert "on a machine with b200: tilegym-db bench --gpu b200 --verify" in refused


def test_passes_of_a_screen_are_shown_beside_what_is_verified(cli, screened, journal_traces):
    journal_traces(9.0, 8.0, config={"BLOCK": 1})
    assert cli("data", "ingest").code == 0
    for command in (["best"], ["best", "--rank"]):
        result = cli(*command)
        assert result.code == 0
        assert result.err.endswith("1 screen pass is not verified yet: run tilegym-db verify\n")


def test_rank_counts_shapes_and_wins(cli, measured):
    (row,) = cli("best", "--rank", "--json").json()
    assert (row["solution"], row["shapes"], row["wins"]) == ("row_scale_stock", 1, 1)
    assert row["geomean_speedup"] == pytest.approx(1.5)
    shown = cli("best", "row_scale", "--rank", "--gpu", "h200").out
    assert "row_scale_stock" in shown
    assert "1.5 - 1.5" in shown
    none = cli("best", "--rank", "--gpu", "b200")
    assert (none.code, none.cause) == (3, "no_solution")
    assert "h200" in none.err


@pytest.mark.parametrize("command", [["best"], ["best", "--rank"]])
def test_unknown_or_other_family_is_no_empty_answer(command, cli, measured):
    unknown = cli(*command, "--op-type", "nosuch")
    assert (unknown.code, unknown.cause) == (2, "op_type_unknown")
    assert "elementwise" in unknown.err
    assert cli(*command, "--op-type", "").code == 2
    assert cli(*command, "row_scale", "--op-type", "elementwise").code == 0


@pytest.mark.parametrize("option", [("--axes", "M=4"), ("--language", "triton"), ("--limit", "3")])
def test_rank_with_a_filter_of_rows_is_refused(option, cli, measured):
    result = cli("best", "--rank", *option)
    assert (result.code, result.cause) == (2, "options_clash")
    assert option[0] in result.err


def test_limit_beyond_what_a_database_counts_is_refused(cli, measured):
    for limit in ("9223372036854775808", "9" * 30):
        result = cli("best", "--limit", limit)
        assert result.code == 2
        assert "--limit" in result.err


def test_ingest_is_idempotent_and_rebuilds(cli, journal_traces):
    journal_traces(1.0, 2.0)
    assert cli("data", "ingest").code == 0
    assert cli("data", "ingest", "--json").json()["added"] == 0
    assert cli("sql", "SELECT count(*) AS n FROM traces", "--csv").out == "n\n2\n"
    assert cli("data", "ingest", "--rebuild").code == 0
    assert cli("sql", "SELECT count(*) AS n FROM traces", "--csv").out == "n\n2\n"


def test_ingest_names_each_line_that_is_no_trace(cli, journal_traces, home):
    journal_traces(1.0)
    journal = home / "runs" / "run-1.jsonl"
    journal.write_text(journal.read_text() + '{"trace_id": 1}\n')
    result = cli("data", "ingest", journal)
    assert result.code == 1
    assert f"{journal}:2: " in result.err
    assert cli("sql", "SELECT count(*) AS n FROM traces", "--csv").out == "n\n1\n"


@pytest.mark.turn("tilegym_db/cli/best.py", "tilegym_db/records/hardware.py")  # several commands on a full store
@pytest.mark.parametrize("rebuild", [[], ["--rebuild"]])
def test_ingest_takes_a_torn_line_of_a_journal_for_no_finding(rebuild, cli, journal_traces, home):
    journal_traces(1.0)
    assert cli("data", "ingest").code == 0
    journal = home / "runs" / "run-1.jsonl"
    whole = journal.read_text()
    journal.write_text(f'{whole}{{"trace_id": "a\n{whole}')
    result = cli("data", "ingest", *rebuild, "--json")
    assert (result.code, result.json()["added"], result.json()["rejected"]) == (0, len(rebuild), [])
    assert result.json()["cut_off"] == [f"{journal}:2: cut off in mid write."]
    assert f"{journal}:2: cut off" in result.err
    assert cli("data", "ingest", journal).code == 1  # a file that was given is incomplete


def test_ingest_takes_files_or_rebuilds(cli, journal_traces, home):
    journal_traces(1.0)
    assert cli("data", "ingest", home / "runs" / "run-1.jsonl", "--rebuild").code == 2


def test_publish_writes_traces_and_the_resolver_table(cli, measured, row_scale):
    result = cli("publish", "--gpu", "h200")
    assert result.code == 0
    folder = row_scale / "traces" / "h200"
    lock = folder / "traces.lock.json"
    assert set(result.out.split()) == {str(lock), str(folder / "elementwise" / "row_scale.jsonl.gz")}
    path = folder / "elementwise" / "row_scale.jsonl.gz"
    (trace,) = read_traces(path.read_bytes(), path)
    assert trace.performance.latency_us == 10.0
    assert cli("publish", "--gpu", "h200").out == ""


def test_publish_says_what_it_leaves_out_and_why(cli, measured, journal_traces):
    journal_traces(1.0, 1.0, config={"BLOCK": 1}, sandbox_level=1)
    journal_traces(1.0, 1.0, 1.0, 1.0, config={"BLOCK": 2}, tier="screen")
    journal_traces(1.0, 1.0, 1.0, 1.0, 1.0, config={"BLOCK": 3})
    assert cli("data", "ingest").code == 0
    result = cli("publish", "--gpu", "h200")
    assert "left out 1: the worker was not confined" in result.err
    assert "left out 1: passed a screen only" in result.err
    assert "1 traces of 1 shapes" in result.err


def test_publish_refuses_a_gpu_without_verified_traces(cli, measured):
    result = cli("publish", "--gpu", "b200")
    assert result.code == 2
    assert "'b200'" in result.err
    assert "h200" in result.err


@pytest.mark.turn("tilegym_db/cli/best.py", "tilegym_db/records/hardware.py")  # several commands on a full store
def test_a_family_name_works_wherever_a_gpu_is_named(cli, journal_traces, row_scale, tmp_path):
    journal_traces(5.0, gpu="h100-sxm", gpu_name="NVIDIA H100 80GB HBM3")
    assert cli("data", "ingest").code == 0
    (best,) = cli("best", "--gpu", "h100", "--json").json()
    assert (best["gpu"], best["gpu_family"], best["origin"]) == ("h100-sxm", "h100", "local")
    (row,) = cli("best", "--rank", "--gpu", "h100", "--json").json()
    assert (row["gpu"], row["gpu_family"], row["origin"]) == ("h100-sxm", "h100", "local")
    assert cli("best", "--gpu", "h100-pcie").code == 3
    query = "SELECT gpu_family, count(*) AS n FROM traces GROUP BY ALL"
    assert cli("sql", query, "--csv").out == "gpu_family,n\nh100,1\n"
    assert cli("publish", "--gpu", "h100").code == 0
    assert (row_scale / "traces" / "h100-sxm" / "elementwise" / "row_scale.jsonl.gz").is_file()

    asked = ("explain", "row_scale", "--axes", "M=4,N=8", "--dtype", "T=float32", "--json", "--gpu")
    assert cli(*asked, "h100").json()["evidence"]["gpu"] == "h100-sxm"
    assert cli(*asked, "h100-pcie").json()["evidence"]["reason"] == "nothing is published for h100-pcie"
    for gpu, traces in (("h100", 1), ("h100-sxm", 1), ("h100-pcie", 0), ("h200", 0)):
        folder = tmp_path / gpu
        assert cli("data", "export", "flashinfer", str(folder), "--gpu", gpu).code == 0
        assert len(list(folder.glob("traces/**/*.jsonl"))) == traces
    shared = tmp_path / "shared"
    assert cli("publish", "--gpu", "h100", "--to", str(shared)).code == 0
    assert {path.name for path in shared.rglob("gpu=*")} == {"gpu=h100-sxm"}  # its traces, and its tables
    assert cli("sql", query, "--from", str(shared), "--csv").out == "gpu_family,n\nh100,1\n"
    task = cli("task", "create", "row_scale", "--language", "triton", "--gpu", "h100", "--json")
    assert task.json()["gpu"] == "h100-sxm"


@pytest.mark.turn("tilegym_db/cli/best.py", "tilegym_db/records/hardware.py")  # several commands on a full store
def test_trace_by_hand_counts_only_when_requested(cli, journal_traces, home, tmp_path):
    journal_traces(5.0)
    (line,) = (home / "runs" / "run-1.jsonl").read_text().splitlines()
    by_hand = tmp_path / "by_hand.jsonl"
    by_hand.write_text(line.replace('"latency_us": 5.0', '"latency_us": 4.99') + "\n")
    (home / "runs" / "run-1.jsonl").unlink()
    result = cli("data", "ingest", by_hand)
    assert result.code == 0
    assert "1 trace was not signed by this installation" in result.err
    assert "tilegym-db data ingest --trust" in result.err
    assert cli("sql", "SELECT origin, trusted FROM traces", "--csv").out == "origin,trusted\nforeign,False\n"
    assert cli("best").code == 3
    assert cli("publish", "--gpu", "h200").code == 2
    assert cli("best", "--trust", "--json").json()[0]["origin"] == "foreign"
    assert cli("best", "--rank", "--trust", "--json").json()[0]["origin"] == "foreign"
    assert cli("data", "ingest", by_hand, "--trust").code == 0
    assert cli("best", "--json").json()[0]["origin"] == "foreign"
    assert cli("publish", "--gpu", "h200").code == 0


@pytest.mark.parametrize(
    ("command", "view"),
    [
        (("best",), "best"),
        (("best", "--rank"), "leaderboard"),
        (("show", "row_scale_stock"), "traces"),
    ],
)
def test_typed_files_have_the_types_of_the_view(command, view, cli, measured, tmp_path):
    import pyarrow.parquet as parquet

    files = tmp_path / "command.parquet", tmp_path / "sql.parquet"
    assert cli(*command, "--parquet", "-o", files[0]).code == 0
    assert cli("sql", f"FROM {view}", "--parquet", "-o", files[1]).code == 0
    one, other = (parquet.read_table(file) for file in files)
    assert one.schema.equals(other.schema)
    assert one.num_rows == other.num_rows > 0


@pytest.mark.parametrize("ending", ["json", "csv", "parquet", "arrow", "CSV"])
def test_the_ending_of_a_file_says_its_format(ending, cli, measured, tmp_path):
    files = tmp_path / f"best.{ending}", tmp_path / "rows"
    assert cli("best", "-o", files[0]).code == 0
    assert cli("best", "-o", files[1]).cause == "format_missing"
    assert cli("best", f"--{ending.lower()}", "-o", files[1]).code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_parquet_rows_are_those_of_sql_for_other_tools(cli, measured, tmp_path):
    """Read by DuckDB and pandas, as an analyst without this package does."""
    import duckdb
    import pandas

    files = tmp_path / "command.parquet", tmp_path / "sql.parquet"
    assert cli("best", "--parquet", "-o", files[0]).code == 0
    assert cli("sql", "FROM best", "--parquet", "-o", files[1]).code == 0
    one, other = (duckdb.read_parquet(str(file)) for file in files)
    assert one.columns == other.columns
    assert one.types == other.types
    assert len(one.except_(other)) == len(other.except_(one)) == 0
    (shown,) = cli("best", "--json").json()
    frame = pandas.read_parquet(files[0])
    assert [frame[name].item() for name in ("trace_id", "latency_us", "axes_key")] == [
        shown[name] for name in ("trace_id", "latency_us", "axes_key")
    ]
    assert json.loads(frame["scalars"].item()) == shown["scalars"]
    assert dict(frame["axes"].item()) == shown["axes"]


def test_long_table_ends_with_a_word_on_the_other_rows(cli, row_scale, home, journal_traces, monkeypatch):
    from tilegym_db.cli import best

    monkeypatch.setattr(best, "MAX_TABLE_ROWS", 1)
    for number, size in enumerate((4, 5, 6)):
        journal_traces(*[5.0] * (number + 1), axes={"M": size, "N": 8})
    shown = cli("best")
    assert "only the first 1 rows" in shown.err
    assert len(shown.out.splitlines()) == 3
    assert len(cli("best", "--csv").out.splitlines()) == 4
    assert len(cli("best", "--limit", "3").out.splitlines()) == 5
