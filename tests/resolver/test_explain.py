"""``tilegym-db explain``: the decision for a person and for a program, and its exit statuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import tilegym_db
from tilegym_db.cli import explain
from tilegym_db.cli.kit import options
from tilegym_db.errors import TilegymDBError, UsageError

POINT = ["scale_rows", "--axes", "M=4,N=8", "--dtype", "T=float32", "--gpu", "cpu"]


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("explain")(explain.command)
    return CliRunner().invoke(app, arguments)


def test_the_table_shows_the_pick_and_every_reason(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel(config={"BIAS": 1})
    shop.add("scale_rows", "never_measured", "def run(x, weight, eps, out):\n    pass\n")
    result = run(*POINT, "--scalar", "eps=1e-5")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    reasons = dict(itertools.pairwise(lines))  # a line -> the one below it
    assert reasons["picked scale_rows_kernel python BIAS=1 50 1.5 1.45"].startswith("fastest verified")
    assert "role baseline (stock)" in next(why for line, why in reasons.items() if line.startswith("scale_rows_stock"))
    assert "not in the table" in next(why for line, why in reasons.items() if line.startswith("never_measured"))
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_has_the_same_for_programs(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    answer = json.loads(run(*POINT, "--json").stdout)
    assert (answer["solution"], answer["stock"], answer["evidence"]["source"]) == (
        "scale_rows_kernel",
        "scale_rows_stock",
        "exact",
    )
    assert answer["evidence"]["measurement"]["latency_us"] == 50.0
    assert [item["solution"] for item in answer["rejected"]] == ["scale_rows_stock"]
    assert answer["left_to_compilers"] is None


def test_explain_answers_for_replays(shop: Any, stock: Any, kernel: Any) -> None:
    own = shop.candidate(stock, 9.0, host_us=20.0, speedup=1.0, speedup_ci_low=1.0)
    measured = [shop.candidate(kernel, 6.0, host_us=80.0), own]
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, measured, dtypes={"T": "float32"})])
    assert "launch-bound" in " ".join(run(*POINT).output.split())
    answer = json.loads(run(*POINT, "--launch", "replay", "--json").stdout)
    assert (answer["launch"], answer["solution"]) == ("replay", "scale_rows_kernel")
    assert "only the device time counts" in answer["evidence"]["reason"]


def test_explain_names_a_pick_unused_in_compiled_code(shop: Any, stock: Any, kernel: Any) -> None:
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, [shop.candidate(kernel, 5.0)], dtypes={"T": "float32"})])
    result = run(*POINT)
    assert "picked" in result.stdout
    assert "Under torch.compile, stock code runs: a call of 5.00 us is left to the compiler" in " ".join(
        result.output.split()
    )
    assert json.loads(run(*POINT, "--json").stdout)["left_to_compilers"].startswith("a call of 5.00 us")


def test_no_verified_solution_exits_3_and_names_what_runs(shop: Any, stock: Any, kernel: Any) -> None:
    result = run(*POINT)
    assert result.exit_code == 3
    assert "stock (scale_rows_stock)" in result.stdout
    assert "nothing is published for cpu" in result.stdout


def test_python_gets_the_decision_with_its_reasons(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    found = tilegym_db.explain("scale_rows", axes={"M": 4, "N": 8}, dtypes={"T": "float32"}, gpu="cpu")
    assert (found.solution, found.stock, found.evidence.source) == ("scale_rows_kernel", "scale_rows_stock", "exact")
    assert [row["picked"] for row in found.candidates()] == [True, False]
    assert str(found).splitlines()[0].startswith("picked scale_rows_kernel: fastest verified")
    assert found.to_dict() == json.loads(run(*POINT, "--json").stdout)


def test_python_gets_an_answer_without_stock_code_too(shop: Any, kernel: Any) -> None:
    found = tilegym_db.explain("scale_rows", axes={"M": 4, "N": 8}, dtypes={"T": "float32"}, gpu="cpu")
    assert (found.solution, found.stock) == (None, None)
    with pytest.raises(UsageError, match="mode must be"):
        tilegym_db.explain("scale_rows", axes={"M": 4, "N": 8}, dtypes={"T": "float32"}, mode="serving")


@pytest.fixture
def screened(shop: Any, kernel: Any) -> None:
    """A store in which the kernel passed a screen on the CPU, and only that."""
    from tilegym_db.records import Trace
    from tilegym_db.store.journal import Journal

    definition = shop.definition("scale_rows")
    passed = {
        "trace_id": "t",
        "run_id": "r",
        "timestamp": "2026-11-01T00:00:00Z",
        "definition": definition.name,
        "definition_version": definition.version,
        "definition_digest": definition.digest,
        "op_type": "toy",
        "solution": kernel.name,
        "solution_digest": kernel.digest,
        "language": "python",
        "workload_uuid": "w",
        "axes": {"M": 4, "N": 8},
        "gpu": "cpu",
        "gpu_name": "a processor",
        "tier": "screen",
        "status": "PASSED",
        "correctness": {},
        "performance": {"latency_us": 1.0, "ci_low_us": 1.0, "ci_high_us": 1.0, "samples": 1, "timer": "wall"},
    }
    with Journal("r") as journal:
        journal.append(Trace.from_dict(passed))


def test_where_stock_runs_what_waits_for_its_promotion_is_named(shop: Any, stock: Any, screened: None) -> None:
    result = run(*POINT)
    assert result.exit_code == 3
    assert "1 screen pass is not verified yet: run tilegym-db verify scale_rows" in result.stderr


def test_explain_with_an_unreadable_store_still_answers(shop: Any, stock: Any, kernel: Any) -> None:
    shop.home.mkdir(exist_ok=True)
    (shop.home / "tilegym.duckdb").write_bytes(b"not a database" * 1000)
    result = run(*POINT)
    assert result.exit_code == 3
    assert "nothing is published for cpu" in result.stdout
    assert "ingest --rebuild" in result.stderr


def test_a_layout_is_part_of_the_question(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    result = run(*POINT, "--layout", "x=row_contiguous")
    assert result.exit_code == 3
    told = " ".join(result.stdout.split())
    assert "with these layouts (x row_contiguous), but with others (all contiguous)" in told
    assert told.count("with these layouts") == 1  # the next solutions have the same reason


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--axes", "M=-4,N=8"], "'M'"),
        (["--axes", "M=4"], "'N'"),
        (["--axes", "M=4,N=8,K=2"], "'K'"),
        (["--axes", "M=four,N=8"], "number_not_whole"),
        (["--axes", "M"], "pair_invalid"),
        (["--axes", "M=4,M=5,N=8"], "pair_repeated"),
        (["--axes", "M=4,N=8", "--dtype", "T=int8"], "'int8'"),
        (["--axes", "M=4,N=8", "--gpu", "h2000"], "'h2000'"),
        (["--axes", "M=4,N=8", "--mode", "serving"], "mode_unknown"),
        ([], "'M', 'N'"),
    ],
)
def test_a_wrong_question_exits_2(shop: Any, arguments: list[str], fact: str) -> None:
    base = [] if "--dtype" in arguments else ["--dtype", "T=float32"]
    result = run("scale_rows", *base, *arguments)
    error = result.exception
    assert isinstance(error, TilegymDBError)
    assert error.exit_code == 2
    assert fact == error.code or fact in str(error)


def test_an_unknown_definition_suggests_the_nearest(shop: Any) -> None:
    result = run("scale_row", "--axes", "M=4,N=8")
    assert getattr(result.exception, "exit_code", None) == 2
    assert "'scale_rows'" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("none", None), ("3", 3), ("1e-5", 1e-5), ("relu", "relu")],
)
def test_a_scalar_is_read_as_what_it_looks_like(text: str, value: object) -> None:
    assert options.parse_scalar(text) == value
    assert type(options.parse_scalar(text)) is type(value)
