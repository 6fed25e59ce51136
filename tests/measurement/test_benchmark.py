"""Whole runs on this machine's processor: real workers, a real journal, a real database."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from raising import raises
from verdicts import conclusive

from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError
from tilegym_db.measurement.benchmark import bench, tiers_of, verify
from tilegym_db.measurement.plan import BenchReport, Options
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.records import Trace
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.verification.worker_handle import MIN_SANDBOX_LEVEL

TRITON = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, weight, out, factor, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < N
    values = tl.load(x + row * N + columns, inside) * tl.load(weight + columns, inside) * factor
    tl.store(out + row * N + columns, values, inside)

def run(x, weight, factor, out):
    kernel[(x.shape[0],)](x, weight, out, factor, x.shape[1], triton.next_power_of_2(x.shape[1]))
"""
IN_PLACE = {
    "name": "row_add",
    "inputs": {
        "x": {"shape": ["M", "N"], "dtype": "T"},
        "residual": {"shape": ["M", "N"], "dtype": "T"},
        "factor": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "out": {"shape": ["M", "N"], "dtype": "T"},
        "residual_out": {"shape": ["M", "N"], "dtype": "T"},
    },
    "in_place": {"residual": "residual_out"},
    "cost": None,
    "reference": "# Source: https://example.org/row_add.py#L1\n"
    "def run(x, residual, factor):\n    total = x + residual\n    return total * factor, total\n",
}
ADD = "def run(x, residual, factor, out):\n    residual.add_(x)\n    out.copy_(residual * factor)\n"
STOCK = {"role": "baseline", "provides": "stock"}
STORED = {
    "factor": {"type": "scalar", "value": 0.5},
    "x": {"type": "safetensors", "path": "a.safetensors", "tensor_key": "x"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="module")
def catalog(folder, make_catalog) -> Catalog:
    """Two operators, one of them in place; a Triton kernel; a workload without its data and one with a row stride."""
    plain = {"axes": {"M": 12, "N": 96}}
    strided = {"axes": {"M": 6, "N": 16}, "layouts": {"residual": "strided(N + 8, 1)"}, "dtypes": {"T": "float32"}}
    make_catalog(
        folder, {"row_add_stock": (ADD, STOCK | {"layouts": {"residual": "row_contiguous"}})}, (strided,), IN_PLACE
    )
    return make_catalog(
        folder, {"row_scale_triton": (TRITON, {"language": "triton"})}, (plain, {**plain, "inputs": STORED})
    )


@pytest.fixture(scope="module")
def seen() -> list[str]:
    return []


@pytest.fixture(scope="module")
def first(catalog, folder, seen) -> BenchReport:
    watching = Observer(
        planned=lambda plan, machine: seen.append(f"{plan.pair_count} pairs on {machine.gpu}"),
        starting=seen.append,
        traced=lambda trace: seen.append(trace.solution),
    )
    return bench(devices="cpu", catalog=catalog, store_home=folder / "home", observer=watching)


def only(report: BenchReport, solution: str, status: str = "PASSED") -> Trace:
    (trace,) = [trace for trace in report.traces if (trace.solution, trace.status) == (solution, status)]
    return trace


def stored_ids(folder: Path, catalog: Catalog) -> set[str]:
    with open_store(folder / "home", read_only=True, catalog=catalog) as store:
        return {row["trace_id"] for row in store.rows("SELECT trace_id FROM traces")}


def test_every_trace_is_observed_and_stored(first, seen, folder, catalog):
    assert seen[0] == "5 pairs on cpu"
    assert [what for what in seen[1:] if "=" in what] == [
        "row_add M=6 N=16",
        "row_scale M=12 N=96",
        "row_scale M=12 N=96",
    ]
    assert [what for what in seen[1:] if "=" not in what] == [trace.solution for trace in first.traces]
    assert {trace.trace_id for trace in first.traces} <= stored_ids(folder, catalog)


def test_an_in_place_input_is_restored_before_every_timed_call(first):
    trace = only(first, "row_add_stock")
    assert trace.layouts == {"residual": "row_contiguous"}
    assert trace.performance is not None


def test_triton_kernel_is_verified_in_the_interpreter_untimed(first):
    trace = only(first, "row_scale_triton")
    assert trace.tier == "interpreter"
    assert trace.performance is None
    assert trace.correctness.cases == 8


def test_a_workload_without_its_data_fails_alone_and_says_why(first):
    trace = only(first, "row_scale_stock", "UNSUPPORTED")
    assert "cannot be verified on this machine: inputs.x: a.safetensors does not exist in " in trace.reason
    assert only(first, "row_scale_stock").performance is not None


def test_the_seed_is_secret_until_the_traces_state_it(first):
    assert {trace.envelope.seed for trace in first.traces if trace.envelope} == {
        only(first, "row_scale_stock").envelope.seed
    }
    assert int(only(first, "row_scale_stock").envelope.seed).bit_length() > 40


def test_a_second_run_measures_nothing_and_says_why(first, catalog, folder):
    again = bench(devices="cpu", catalog=catalog, store_home=folder / "home")
    assert again.traces == []
    assert [item.reason for item in again.plan.skipped] == ["already measured (--force repeats it)"] * 5
    assert len(list((folder / "home" / "runs").iterdir())) == 1  # no empty journal


def test_again_measures_anew_and_keeps_what_was_there(first, catalog, folder):
    before = stored_ids(folder, catalog)
    report = bench(("row_add",), devices="cpu", force=True, catalog=catalog, store_home=folder / "home")
    assert [trace.solution for trace in report.traces] == ["row_add_stock"]
    assert stored_ids(folder, catalog) == before | {only(report, "row_add_stock").trace_id}
    assert only(report, "row_add_stock").envelope.seed != only(first, "row_add_stock").envelope.seed


@pytest.fixture(scope="module")
def promoted(first, catalog, folder) -> BenchReport:
    return verify(devices="cpu", catalog=catalog, store_home=folder / "home")


def test_promotion_leaves_out_failed_screens_and_untimed_code(promoted):
    assert sorted((trace.solution, trace.tier) for trace in promoted.traces) == [
        ("row_add_stock", "promotion"),
        ("row_scale_stock", "promotion"),
    ]
    reasons = {item.solution: item.reason for item in promoted.plan.skipped}
    assert reasons["row_scale_stock"] == "did not pass the screen: UNSUPPORTED"
    assert reasons["row_scale_triton"].startswith("triton kernels run on a GPU only")


def test_a_promotion_says_what_it_looked_into(promoted, first):
    trace = only(promoted, "row_add_stock")
    assert trace.sandbox_level >= MIN_SANDBOX_LEVEL
    assert trace.audit is not None
    assert trace.audit.wall_us is not None
    assert trace.audit.owned_share is None  # a processor's time has no owner
    assert trace.envelope is not None
    assert trace.envelope.seed not in {t.envelope.seed for t in first.traces if t.envelope}


def test_a_second_promotion_has_nothing_to_do(promoted, catalog, folder):
    again = verify(devices="cpu", catalog=catalog, store_home=folder / "home")
    assert again.traces == []


@pytest.mark.turn("tilegym_db/measurement/benchmark.py")  # a promotion; cli/test_verify.py has one daily
def test_bench_can_promote_what_passed_in_one_go(catalog, tmp_path):
    report = bench(("row_scale_stock",), devices="cpu", quick=True, verify=True, catalog=catalog, store_home=tmp_path)
    tiers = [(trace.tier, trace.status) for trace in report.traces if trace.status != "UNSUPPORTED"]
    assert tiers == [("screen", "PASSED"), ("promotion", "PASSED")]


@pytest.mark.parametrize(
    ("then_verify", "on_gpu", "quick", "omits", "tiers"),
    [
        (False, True, False, False, ("screen",)),
        (True, True, False, False, ("promotion",)),
        (True, False, False, False, ("screen", "promotion")),
        (True, True, True, False, ("screen", "promotion")),
        (True, True, False, True, ("screen", "promotion")),
    ],
)
def test_only_a_gpu_verifies_without_a_screen(then_verify, on_gpu, quick, omits, tiers):
    options = Options((), None, None, quick)
    assert tiers_of(options, then_verify=then_verify, on_gpu=on_gpu, omits=omits) == tiers


def test_promotion_is_refused_where_workers_cannot_be_confined(catalog, tmp_path, monkeypatch):
    weak = SimpleNamespace(level=1, description="", reasons=("this kernel has no Landlock",))
    monkeypatch.setattr("tilegym_db.measurement.awards.best_level", lambda device: weak)
    with raises(HardwareError, "sandbox_too_weak", "this kernel has no Landlock", "--allow-unsandboxed"):
        verify(devices="cpu", catalog=catalog, store_home=tmp_path)


def test_what_the_static_scan_refuses_is_never_run(make_catalog, tmp_path):
    source = "import ctypes\nraise SystemExit\ndef run(x, weight, factor, out): out.copy_(x * weight * factor)"
    catalog = make_catalog(tmp_path / "catalog", {"opens_a_door": source})
    report = bench(devices="cpu", catalog=catalog, store_home=tmp_path / "home", quick=True)
    refused = only(report, "opens_a_door", "REJECTED")
    assert refused.reason.startswith("the static scan: kernel.py:1: ")
    assert only(report, "row_scale_stock").sandbox_level >= MIN_SANDBOX_LEVEL


SLOW = (
    "def run(x, weight, factor, out):\n    for row in range(x.shape[0]):\n        out[row] = x[row] * weight * factor\n"
)
FAST = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
HALVES = """def run(x, weight, factor, out):
    for half in (slice(0, 32), slice(32, None)):
        out[half] = x[half] * weight * factor
"""


@pytest.mark.turn("tilegym_db/measurement/benchmark.py", "tilegym_db/measurement/plan.py")  # two promotions
def test_new_kernel_is_compared_with_the_best_in_the_same_rounds(make_catalog, tmp_path):
    solutions = {"row_scale_stock": (SLOW, STOCK), "row_scale_fast": FAST, "row_scale_rows": SLOW + "# again\n"}
    sizes = ({"axes": {"M": 64, "N": 64}},)
    before = make_catalog(tmp_path / "before", solutions, sizes)
    home = tmp_path / "home"
    first = verify(devices="cpu", catalog=before, store_home=home)
    assert {c.provides for trace in first.traces for c in trace.performance.comparisons} == {"stock"}

    after = make_catalog(tmp_path / "after", {**solutions, "row_scale_halves": HALVES}, sizes)
    second = verify(("row_scale_halves",), devices="cpu", catalog=after, store_home=home)
    assert sorted(trace.solution for trace in second.traces) == [
        "row_scale_fast",
        "row_scale_halves",
        "row_scale_stock",
    ]
    (found,) = [c for c in only(second, "row_scale_halves").performance.comparisons if c.provides == "incumbent"]
    assert (found.other, found.ratio < 0.95, found.ci_high < 1) == ("row_scale_fast", True, True)
    with open_store(home, read_only=True, catalog=after) as store:
        (row,) = store.rows(
            "SELECT incumbent, incumbent_ratio, incumbent_ci_low FROM traces WHERE solution = 'row_scale_halves'"
        )
        assert list(row.values()) == ["row_scale_fast", found.ratio, found.ci_low]
        (best,) = store.rows("SELECT solution, run_id FROM best")
    assert best == {"solution": "row_scale_fast", "run_id": second.run_id}


@pytest.mark.turn("tilegym_db/measurement/benchmark.py")  # two promotions; test_queries.py has the rule daily
def test_verify_says_that_a_wrong_number_outweighs_its_pass(make_catalog, tmp_path):
    source = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
    catalog, home = make_catalog(tmp_path / "catalog", {"honest": source}), tmp_path / "home"

    def of_honest(report: BenchReport) -> Trace:
        return next(trace for trace in report.traces if trace.solution == "honest")

    def promoted() -> BenchReport:
        return verify("honest", devices="cpu", catalog=catalog, store_home=home, quick=True, force=True)

    passed = of_honest(conclusive(promoted, of_honest)).to_dict()
    kept = {key: value for key, value in passed.items() if key not in ("performance", "correctness", "audit")}
    wrong = Trace.from_dict({**kept, "trace_id": "wrong", "status": "INCORRECT_SHAPE", "reason": "planted"})
    with Journal("planted", home) as journal:
        journal.append(wrong)
    again = conclusive(promoted, of_honest)
    assert of_honest(again).status == "PASSED"
    assert any("attempts_disagree" in note and "trace wrong" in note for note in again.notes)
