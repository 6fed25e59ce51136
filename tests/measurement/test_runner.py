"""One run over Solutions that break every rule: each gets its verdict, and none disturbs another's.

The static scan is out of the way here, so that the gates behind it are what is tested.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import FILE_NAME as PARSED_SOURCES
from tilegym_db.measurement.benchmark import bench
from tilegym_db.measurement.plan import BenchReport
from tilegym_db.measurement.runner import Runner
from tilegym_db.records import Trace
from tilegym_db.sandbox.worker import best_level
from tilegym_db.store.opening import open_store
from tilegym_db.verification.worker_handle import RunnerLimits, WorkerHandle

RETURNS = {"destination_passing_style": False}
HEAD = "import os, time, torch\ndef run(x, weight, factor, out):\n    right = x * weight * factor\n    "

# The first fuzz case may be one of small integers, which leave no room for rounding: then that is what is said first.
INEXACT = "where all must be equal"

# name -> (source, changes of the spec, status, what the reason says)
ZOO: dict[str, tuple[str, dict[str, object], str, str]] = {
    "writes_into_its_output": (HEAD + "out.copy_(right)", {}, "PASSED", ""),
    "returns_its_output": ("def run(x, weight, factor): return x * weight * factor", RETURNS, "PASSED", ""),
    "writes_to_stdout": (
        HEAD + 'print(\'{"id": 2, "ok": true}\', flush=True); os.write(1, b"\\0" * 99); out.copy_(right)',
        {},
        "PASSED",
        "",
    ),
    "writes_nothing": (HEAD + "pass", {}, "INCORRECT_NUMERICAL", f"NaN or infinite where they should not be|{INEXACT}"),
    "writes_zeros": (HEAD + "out.zero_()", {}, "INCORRECT_NUMERICAL", "out: relative Frobenius error 1 exceeds|out: "),
    "leaves_the_last_row": (HEAD + "out[:-1] = right[:-1]", {}, "INCORRECT_NUMERICAL", f"NaN or infinite|{INEXACT}"),
    "writes_past_its_output": (
        HEAD + "out.copy_(right); out.as_strided((out.numel() + 1,), (1,))[-1] = 7",
        {},
        "INCORRECT_NUMERICAL",
        "wrote outside the tensors, near out",
    ),
    "changes_an_input": (
        HEAD + "out.copy_(right); x.neg_()",
        {},
        "INCORRECT_NUMERICAL",
        "x: the number of writes to it",
    ),
    "knows_the_workloads_shape_only": (
        HEAD + "out.copy_(right if tuple(x.shape) in ((40, 32), (24, 48)) else x)",
        {},
        "INCORRECT_NUMERICAL",
        "out: ",
    ),
    "returns_another_shape": (
        "def run(x, weight, factor): return (x * weight * factor)[None]",
        RETURNS,
        "INCORRECT_SHAPE",
        "out has shape",
    ),
    "returns_another_dtype": (
        "def run(x, weight, factor): return (x * weight * factor).double()",
        RETURNS,
        "INCORRECT_DTYPE",
        "out has dtype torch.float64, expected torch.float32",
    ),
    "returns_a_subclass": (
        "import torch\ndef run(x, weight, factor): return torch.nn.Parameter(x * weight * factor)",
        RETURNS,
        "INCORRECT_SHAPE",
        "out is a Parameter, not a plain tensor",
    ),
    "raises": (
        HEAD + 'raise ValueError("[/red] \\ud800 no such shape")',
        {},
        "RUNTIME_ERROR",
        r"raised at .*: ValueError: \[/red\] . no such shape",
    ),
    "raises_when_imported": ("def run(x, weight, factor, out): pass\n1 / 0", {}, "RUNTIME_ERROR", "does not load"),
    "hangs": (HEAD + "time.sleep(3600)", {}, "TIMEOUT", "the call did not return within 3 s"),
    "exits": (HEAD + "os._exit(7)", {}, "RUNTIME_ERROR", "the worker died"),
    "crashes": (HEAD + "os.kill(os.getpid(), 11)", {}, "RUNTIME_ERROR", "the worker died"),
    "is_random": (
        HEAD + "out.copy_(right * (1 + 3e-6 * torch.rand(1)))",
        {},
        "INCORRECT_NUMERICAL",
        f"different bytes|{INEXACT}",
    ),
    "is_random_and_says_so": (
        # As a sum in another order does: by as much as the roundings differ, and not at all where none rounds.
        HEAD + "most = right.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) * torch.randint(1, 3, (1,)); "
        "out.copy_(torch.where(right.isfinite(), right + most - most, right))",
        {"deterministic": False},
        "PASSED",
        "",
    ),
    "is_more_random_than_may_be": (
        HEAD + "run.calls = getattr(run, 'calls', 0) + 1; out.copy_(right * (1 + 6e-6 * (run.calls % 2)))",
        {"deterministic": False},
        "INCORRECT_NUMERICAL",
        f"two calls on the same inputs lie .* apart, more than 2e-06|{INEXACT}",
    ),
    "supports_little": (HEAD + "out.copy_(right)", {"constraints": ["N <= 8"]}, "UNSUPPORTED", "N <= 8 excludes"),
    "finds_no_memory_on_the_gpu": (
        HEAD + "raise torch.OutOfMemoryError('CUDA out of memory')",
        {},
        "UNSUPPORTED",
        "CUDA out of memory",
    ),
    "remembers_outputs_by_address": (
        "known = {}\n" + HEAD + "out.copy_(known.setdefault((out.data_ptr(), out.shape), right))",
        {},
        "INCORRECT_NUMERICAL",
        "out: ",
    ),
    "stops_working_after_a_while": (
        "calls = {}\n" + HEAD + "calls[x.shape] = calls.get(x.shape, 0) + 1\n"
        "    if calls[x.shape] <= 14: out.copy_(right)",
        {},
        "REJECTED",
        "the timed calls left another result",
    ),
    "patches_the_comparison_and_is_wrong": (
        "import time, torch\n"
        "class Instant:\n    def __init__(self, **_): pass\n    def elapsed_time(self, _): return 0.0\n"
        "torch.allclose = torch.equal = torch.isfinite = torch.isnan = lambda *_, **__: True\n"
        "torch.cuda.Event = Instant\ntime.perf_counter = time.perf_counter_ns = time.monotonic = lambda: 0\n"
        "def run(x, weight, factor, out):\n    out.zero_(); print('PASSED', flush=True)",
        {},
        "INCORRECT_NUMERICAL",
        "out: ",
    ),
    "patches_the_clocks_and_is_slow": (
        "import time\nsleep = time.sleep\n"
        "time.perf_counter = time.perf_counter_ns = time.monotonic = time.time = lambda: 0\n"
        "def run(x, weight, factor, out):\n    sleep(0.002); out.copy_(x * weight * factor)",
        {},
        "PASSED",
        "",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="module")
def report(make_catalog, folder) -> Iterator[BenchReport]:
    solutions = {name: (source, spec) for name, (source, spec, _, _) in ZOO.items()}
    workloads = ({"axes": {"M": 40, "N": 32}, "tags": ["tiny"]}, {"axes": {"M": 24, "N": 48}})
    catalog = make_catalog(folder / "catalog", solutions, workloads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tilegym_db.measurement.local_executor.RunnerLimits", functools.partial(RunnerLimits, first_call_s=3.0)
        )
        patch.setattr("tilegym_db.sandbox.scan.scan_sources", lambda solution, sources: ())
        yield bench(devices="cpu", catalog=catalog, store_home=folder / "home", quick=True)


def traces_of(report: BenchReport, solution: str) -> list[Trace]:
    return [trace for trace in report.traces if trace.solution == solution]


@pytest.mark.parametrize("solution", ZOO)
def test_each_solution_gets_its_own_verdict_on_every_workload(solution, report):
    _, _, status, reason = ZOO[solution]
    traces = traces_of(report, solution)
    assert [trace.status for trace in traces] == [status, status], [trace.reason for trace in traces]
    assert all(re.search(reason, trace.reason) for trace in traces), traces[0].reason


def test_stock_code_is_measured_on_every_workload_in_all_events(report):
    assert [trace.status for trace in traces_of(report, "row_scale_stock")] == ["PASSED", "PASSED"]


def test_every_trace_is_in_the_database(report, folder):
    with open_store(folder / "home", read_only=True, catalog=Catalog((folder / "catalog",))) as store:
        rows = store.rows("SELECT trace_id, status FROM traces")
    assert {(row["trace_id"], row["status"]) for row in rows} == {(t.trace_id, t.status) for t in report.traces}


def test_a_passed_trace_says_how_it_was_verified_and_timed(report):
    trace = traces_of(report, "writes_into_its_output")[0]
    assert (trace.tier, trace.gpu, trace.sandbox_level) == ("screen", "cpu", best_level("cpu").level)
    assert trace.correctness is not None
    assert trace.correctness.cases == trace.envelope.cases == 8  # four shapes and four content sets
    assert trace.performance.timer == "wall"
    assert trace.performance.ci_low_us <= trace.performance.latency_us <= trace.performance.ci_high_us
    assert [(c.other, c.provides) for c in trace.performance.comparisons] == [("row_scale_stock", "stock")]


def test_a_clock_that_is_replaced_is_not_the_one_that_is_read(report):
    for trace in traces_of(report, "patches_the_clocks_and_is_slow"):
        assert trace.performance.latency_us > 2000


def test_a_failure_says_where_and_with_which_contents(report):
    trace = traces_of(report, "leaves_the_last_row")[0]
    assert trace.correctness.gate in ("nan_inf_mask", "exact")
    assert "contents=" in trace.reason
    assert "expected" in trace.reason


def test_a_crash_keeps_the_last_words_and_the_exit_status(report):
    assert "exit status 7" in traces_of(report, "exits")[0].log
    assert "SIGSEGV" in traces_of(report, "crashes")[0].log
    assert "ZeroDivisionError" in traces_of(report, "raises_when_imported")[0].log


def test_nothing_but_the_journal_and_the_database_is_left_behind(report, folder):
    files = {path.name for path in (folder / "home").rglob("*") if path.is_file()}
    assert sorted(files - {PARSED_SOURCES}) == [
        f"{report.run_id}.jsonl",
        "installation.key",
        "tilegym.duckdb",
        "tilegym.duckdb.lock",
    ]


def test_cpu_run_skips_gpu_python_code_and_interprets_a_kernel(tmp_path):
    catalog = Catalog.default()
    for name, reason in (("attention_prefill_cudnn", "it is not declared for cpu"), ("gemm_triton", None)):
        files = catalog.solution(name)
        definition = catalog.definition(files.record.definition)
        (workload, *_) = (item for item in catalog.workloads_for(definition.name) if "bfloat16" in item.dtypes.values())
        assert Runner(WorkerHandle(definition, files, "cpu", tmp_path), "").unsupported(workload) == reason
