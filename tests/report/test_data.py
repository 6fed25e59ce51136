from __future__ import annotations

import shlex
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from model_runs import model_run, speedups, timing

from tilegym_db.catalog import Catalog
from tilegym_db.published.input_files import published_model_files
from tilegym_db.records.loop import ModelRun
from tilegym_db.report.page import ReportData, reproduce_command
from tilegym_db.report.weekly import FEW, weekly
from tilegym_db.store.connection import Store
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries import report_rows
from tilegym_db.store.queries.report_rows import model_rows
from tilegym_db.store.side_files import save_model_run


def test_the_fastest_of_each_shape_are_the_rows_of_the_view_best(shipped_report: ReportData, store: Store):
    best = {row["trace_id"]: row["latency_us"] for row in store.rows("SELECT trace_id, latency_us FROM best")}
    assert best
    assert {row["trace_id"]: row["latency_us"] for row in shipped_report.evidence if row["is_fastest"]} == best


def test_the_fastest_in_a_language_is_the_least_latency_of_it(shipped_report: ReportData, store: Store):
    asked = store.rows(
        """SELECT definition, gpu, axes_key, dtypes_key, scalars_key, layouts_key, language, min(latency_us) AS least
        FROM best_per_solution GROUP BY ALL"""
    )
    shape = ("definition", "gpu", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "language")
    shown = {
        tuple(row[key] for key in shape): row["latency_us"]
        for row in shipped_report.evidence
        if row["is_fastest_in_language"]
    }
    assert shown == {tuple(row[key] for key in shape): row["least"] for row in asked}


def test_the_work_of_a_call_is_what_its_definition_states(shipped_report: ReportData, catalog: Catalog):
    row = next(
        row for row in shipped_report.evidence if row["definition"] == "rms_norm" and "M=1," not in row["axes_key"]
    )
    m, n = (int(part.partition("=")[2]) for part in row["axes_key"].split(","))
    definition = catalog.definition("rms_norm")
    dtypes = dict([row["dtypes_key"].split("=")])
    assert (row["flops"], row["bytes"]) == definition.cost_of({"M": m, "N": n}, definition.bind_dtypes(dtypes))
    assert row["bytes"] >= 2 * m * n


def test_coverage_counts_verified_workloads_per_language(shipped_report: ReportData, store: Store):
    for row in shipped_report.coverage:
        assert row["verified"] <= row["workloads"]
        assert not row["verified"] or row["solutions"]
    of_softmax = {
        row["gpu"]: row["verified"]
        for row in shipped_report.coverage
        if (row["definition"], row["language"]) == ("softmax", "triton")
    }
    asked = store.rows(
        """SELECT gpu, count(DISTINCT workload_uuid) AS n FROM verified
        WHERE definition = 'softmax' AND language = 'triton' GROUP BY gpu"""
    )
    assert of_softmax == {row["gpu"]: row["n"] for row in asked}
    assert {"h100-sxm", "h200"} <= of_softmax.keys()


def test_open_operators_and_unverified_kernels_are_named(shipped_report: ReportData, store: Store):
    open_names = {row["definition"] for row in shipped_report.open if row["kind"] == "operator is open"}
    assert open_names == {row["name"] for row in store.rows("SELECT name FROM definitions WHERE is_open")}
    unverified = {row["solution"] for row in shipped_report.open if row["kind"].startswith("solution not")}
    verified = {row["solution"] for row in shipped_report.evidence}
    assert unverified == {row["name"] for row in shipped_report.solutions} - verified


def test_every_solution_has_its_sources_and_every_case_a_command(shipped_report: ReportData, catalog: Catalog):
    for name, files in shipped_report.files_of.items():
        shown = {path: shipped_report.sources[digest].encode() for path, digest in files}
        assert shown == dict(catalog.solution(name).sources)
    for row in shipped_report.evidence:
        assert shlex.split(row["command"])[:6] == [
            "tilegym-db",
            "debug",
            "reproduce",
            row["solution"],
            "--axes",
            row["axes_key"],
        ]


def test_the_command_names_config_scalars_and_layouts():
    row = {
        "solution": "x", "axes_key": "M=1,N=2", "dtypes_key": "T=bfloat16", "scalars_key": "eps=1e-05",
        "layouts_key": "x=strided(8,1)", "blobs_key": "", "config": '{"BLOCK_M": 2, "flag": true}',
    }  # fmt: skip
    assert reproduce_command(row) == (
        "tilegym-db debug reproduce x --axes M=1,N=2 --dtype T=bfloat16 --scalar eps=1e-05 "
        "--layout 'x=strided(8,1)' --config BLOCK_M=2 --config flag=true"
    )


def test_command_for_contents_of_a_file_repeats_its_workload():
    row = {"solution": "x", "workload_uuid": "u-1", "blobs_key": "ids=" + "ab" * 32}
    assert reproduce_command(row) == "tilegym-db bench x --workload u-1 --force"


def table_of(page: str, section: str) -> list[dict[str, str]]:
    """The rows of a section's table, by the heads of its columns."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(("| ", "|-"))
    ]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


@pytest.fixture(scope="module")
def year_ago(shipped_report: ReportData) -> datetime:
    assert shipped_report.newest is not None
    return shipped_report.newest - timedelta(days=365)


def test_week_without_changes_says_so_and_shows_the_standings(shipped_report: ReportData, store: Store):
    assert shipped_report.newest is not None
    later = weekly(store, shipped_report.newest + timedelta(days=1))
    for said in (
        "No kernel was verified.",
        "No revocation or regression.",
        "No model was measured in this time.",
        "No attempt was submitted in this time.",
    ):
        assert said in later
    stands = {row["GPU"]: int(row["shapes"]) for row in table_of(later, "Where each GPU stands")}
    assert stands == {row["gpu"]: row["n"] for row in store.rows("SELECT gpu, count(*) AS n FROM best GROUP BY gpu")}


@pytest.mark.turn("tilegym_db/report/", "tilegym_db/store/queries/")  # reads all shipped data
def test_short_form_of_all_shipped_data_is_read_in_a_minute(year_ago: datetime, store: Store):
    short = weekly(store, year_ago, see_all="SEE ALL")
    models = [row for row in model_rows(store) if row["timestamp"] >= year_ago]
    assert len(short.splitlines()) <= 90
    assert short.count("`SEE ALL`") == 3 + (len(models) > FEW)  # kernels, furthest, open, models
    assert "SEE ALL" not in weekly(store, year_ago, whole=True, see_all="SEE ALL")


@pytest.mark.turn("tilegym_db/report/", "tilegym_db/store/queries/")  # reads all shipped data
def test_runs_of_a_week_are_listed_or_gathered_by_model_if_many(catalog: Catalog, tmp_path: Path):
    def models(count: int, *, whole: bool = False) -> list[dict[str, str]]:
        for number in range(count):
            control = {"timing": timing(1.0), "against": {"stock": speedups(1.0)}, "equal_tokens": 12}
            kernels = {"kernels": {"swiglu": 4}, "ways": {"stock_again": control}}
            run = model_run(run_id=f"r{number}", batch=1 + number, gpu_shares={"swiglu": 0.1 * number}, **kernels)
            save_model_run(run, tmp_path)
        with open_store(tmp_path, catalog=Catalog((tmp_path / "empty",))) as store:
            ingest(store)
            return table_of(weekly(store, datetime(2026, 11, 1), whole=whole), "Models")

    (_, patched, _) = models(1)
    assert (patched["batch x prompt + new"], patched["speedup"], patched["claim"]) == ("1 x 8 + 12", "2", "faster")
    assert models(6) == [
        {
            "model": "tiny", "GPU": "h200", "runs": "6", "claimed faster": "6", "best speedup": "2",
            "most GPU time in verified kernels": "50%",
        }
    ]  # fmt: skip
    assert len(models(6, whole=True)) == 18


@pytest.mark.turn("tilegym_db/report/", "tilegym_db/store/queries/")  # reads all shipped data
def test_what_the_short_form_gathers_adds_up_to_the_whole(year_ago: datetime, store: Store):
    short, whole = weekly(store, year_ago), weekly(store, year_ago, whole=True)
    named, gathered = table_of(whole, "Kernels"), table_of(short, "Kernels")
    for column in ("shapes verified", "awards"):
        assert sum(int(row[column]) for row in gathered) == sum(int(row[column]) for row in named) > 0
    assert sum(int(row["operators"]) for row in gathered) == len(named)
    assert f"{len(named)} rows of operators and GPUs gathered in {len(gathered)}" in short
    open_rows = table_of(whole, "Open")
    assert sum(int(row["how many"]) for row in table_of(short, "Open")) == len(open_rows)
    furthest = table_of(whole, "Furthest from the speed of light")
    first = table_of(short, "Furthest from the speed of light")
    assert furthest[: len(first)] == first
    assert f"{len(furthest) - len(first)} more of {len(furthest)} rows" in short
    assert len(table_of(whole, "Leaders")) == len(store.rows("SELECT DISTINCT definition, gpu FROM leaderboard"))
    shares = [int(row["of the speed of light"].removesuffix("%")) for row in furthest]
    assert shares == sorted(shares)


def test_the_kernels_of_a_week_are_the_awards_that_stand(year_ago: datetime, store: Store):
    named = table_of(weekly(store, year_ago, whole=True), "Kernels")
    shown = {(row["operator"], row["GPU"]): row for row in named}
    assert len(shown) == len(named)
    assert not any(row["of"].endswith("_stock") for row in named)
    asked = store.rows(
        """SELECT definition, gpu, count(DISTINCT workload_uuid) AS shapes, max(ratio) AS ratio
        FROM promotions WHERE status = 'standing' GROUP BY ALL"""
    )
    assert {key for key, row in shown.items() if row["awards"] != "0"} == {
        (row["definition"], row["gpu"]) for row in asked
    }
    for row in asked:
        cells = shown[row["definition"], row["gpu"]]
        assert (cells["awards"], cells["best ratio"]) == (str(row["shapes"]), f"{row['ratio']:.4g}"), row
        assert int(cells["shapes verified"]) >= int(cells["awards"])
        assert cells["languages"]


@pytest.mark.turn("tilegym_db/report/", "tilegym_db/store/queries/")  # reads all shipped data
def test_revocations_come_first_and_what_does_not_fit_is_counted(
    year_ago: datetime, store: Store, monkeypatch: pytest.MonkeyPatch
):
    row = {"day": "2026-11-20", "definition": "d", "solution": "s", "gpu": "h200", "cases": 1, "ratio": 1.2}
    changes = [{**row, "kind": "regression"}] * 20 + [{**row, "kind": "revocation", "ratio": None}]
    monkeypatch.setattr(report_rows, "change_rows", lambda *_: changes)
    short = weekly(store, year_ago, see_all="SEE ALL")
    assert "Revocations: 1. Regressions: 20." in short
    assert table_of(short, "Revocations and regressions")[0]["what"] == "revocation"
    assert "13 more of 21 rows: `SEE ALL`." in short
    assert len(table_of(weekly(store, year_ago, whole=True), "Revocations and regressions")) == 21


def test_stock_code_is_no_change_and_a_weak_pass_no_award(shipped_report: ReportData, store: Store):
    roles = {row["name"]: row["role"] for row in shipped_report.solutions}
    news = [row for row in shipped_report.changes if row["kind"] in ("award", "verified")]
    assert {roles[row["solution"]] for row in news if row["solution"] in roles} == {"kernel"}
    awarded = {row["solution"] for row in store.rows("SELECT DISTINCT solution FROM promotions")}
    assert {row["solution"] for row in news if row["kind"] == "award"} == awarded


def test_every_run_of_a_model_that_ships_is_on_the_page(shipped_report: ReportData, catalog: Catalog):
    lines = [line for path in published_model_files(catalog) for line in path.read_text().splitlines()]
    runs = {run.run_id: run for run in map(ModelRun.from_json, lines)}
    assert len(runs) == len(lines)
    assert {row["run_id"] for row in shipped_report.models} == runs.keys()
    for row in shipped_report.models:
        assert (row["evidence_level"], row["origin"]) == ("model", "shipped")
    assert all(run.total_speedup.ci_low is not None and not run.throttled for run in runs.values())
