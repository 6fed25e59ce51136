from __future__ import annotations

import shlex
from datetime import timedelta

from tilegym_db.catalog import Catalog
from tilegym_db.report.data import ReportData, reproduce_command
from tilegym_db.report.weekly import weekly
from tilegym_db.store.database import Store


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
    row = next(row for row in shipped_report.evidence if row["definition"] == "rms_norm" and row["axes"]["M"] > 1)
    m, n = row["axes"]["M"], row["axes"]["N"]
    definition = catalog.definition("rms_norm")
    assert (row["flops"], row["bytes"]) == definition.cost_of({"M": m, "N": n}, definition.bind_dtypes(row["dtypes"]))
    assert row["bytes"] >= 2 * m * n


def test_coverage_counts_the_verified_workloads_of_each_operator_and_language(shipped_report: ReportData, store: Store):
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


def test_operators_that_are_open_and_kernels_that_nothing_verified_are_named(shipped_report: ReportData, store: Store):
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
        assert shlex.split(row["command"])[:5] == [
            "tilegym-db",
            "reproduce",
            row["solution"],
            "--axes",
            row["axes_key"],
        ]


def test_the_command_names_config_scalars_and_layouts():
    row = {
        "solution": "x", "axes_key": "M=1,N=2", "dtypes_key": "T=bfloat16", "scalars_key": "eps=1e-05",
        "layouts_key": "x=strided(8,1)", "config": {"BLOCK_M": 2, "flag": True},
    }  # fmt: skip
    assert reproduce_command(row) == (
        "tilegym-db reproduce x --axes M=1,N=2 --dtype T=bfloat16 --scalar eps=1e-05 "
        "--layout 'x=strided(8,1)' --config BLOCK_M=2 --config flag=true"
    )


def test_the_week_in_markdown_has_the_leaders_and_only_what_is_new(shipped_report: ReportData, store: Store):
    assert shipped_report.newest is not None
    later = weekly(store, shipped_report.newest + timedelta(days=1))
    assert "No kernel was verified or promoted." in later
    assert "No revocation or regression." in later
    assert "No model was measured in this time." in later
    assert "No attempt was submitted in this time." in later
    everything = weekly(store, shipped_report.newest - timedelta(days=365))
    rows = [line for line in everything.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    table = everything.partition("## Furthest from the speed of light")[2].partition("## Models")[0]
    shares = [
        int(cell.strip(" %")) for line in table.splitlines()[4:] if (cell := line.rpartition("|")[0].rpartition("|")[2])
    ]
    assert shares == sorted(shares)
    assert len(shares) == 10


def test_the_changes_of_a_week_are_kernels_one_line_an_operator(shipped_report: ReportData, store: Store):
    assert shipped_report.newest is not None
    week = weekly(store, shipped_report.newest - timedelta(days=365))
    changes = week.partition("## Changes")[2].partition("## Attempts")[0]
    assert "_stock" not in changes
    assert len(changes.splitlines()) < 200
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in changes.splitlines() if line.startswith("| ")]
    shown = {cells[0]: cells[1:] for cells in lines[1:]}
    assert len(shown) == len(lines) - 1
    asked = store.rows(
        """SELECT definition, count(DISTINCT (gpu, workload_uuid)) AS shapes, max(ratio) AS ratio
        FROM promotions WHERE status = 'standing' GROUP BY definition"""
    )
    assert {name for name, cells in shown.items() if cells[3] != "0"} == {row["definition"] for row in asked}
    for row in asked:
        gpus, languages, verified, promoted, ratio, _ = shown[row["definition"]]
        assert (promoted, ratio) == (str(row["shapes"]), f"{row['ratio']:.4g}"), row["definition"]
        assert int(verified) >= int(promoted)
        assert gpus
        assert languages


def test_stock_code_is_no_change_and_a_pass_below_the_bar_is_no_promotion(shipped_report: ReportData, store: Store):
    roles = {row["name"]: row["role"] for row in shipped_report.solutions}
    news = [row for row in shipped_report.changes if row["kind"] in ("promotion", "verified")]
    assert {roles[row["solution"]] for row in news if row["solution"] in roles} == {"kernel"}
    promoted = {row["solution"] for row in store.rows("SELECT DISTINCT solution FROM promotions")}
    assert {row["solution"] for row in news if row["kind"] == "promotion"} == promoted
