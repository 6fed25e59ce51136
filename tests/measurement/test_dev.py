"""One round of a kernel's author, with real workers, the real interpreter and the real compiler."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.measurement.dev import DevOptions, DevReport, DevSession, choose_workload, kernel_rounds
from tilegym_db.records import Solution

PYTHON = "def run(x, weight, factor):\n    return x * weight * factor\n"
TRITON = """import triton
import triton.language as tl


@triton.jit
def scale_row(x, weight, factor, out, N: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    row = tl.program_id(0).to(tl.int64) * N
    value = tl.load(x + row + columns, mask=inside) * tl.load(weight + columns, mask=inside) * factor
    tl.store(out + row + columns, value, mask=inside)


def run(x, weight, factor, out):
    rows, width = x.shape
    scale_row[(rows,)](x, weight, factor, out, width, triton.next_power_of_2(width))
"""
TINY = {"axes": {"M": 4, "N": 8}, "tags": ["tiny"]}
SMALL = {"axes": {"M": 9, "N": 32}, "tags": ["tiny"]}
MODEL = {"axes": {"M": 2, "N": 8}, "tags": ["stage:decode"]}


def try_kernel(path: Path, definition: str | None = None, *, catalog: Catalog, **options: Any) -> DevReport:
    with contextlib.closing(kernel_rounds(DevOptions(path, definition, **options), catalog=catalog)) as rounds:
        return next(rounds)


@pytest.fixture
def catalog(make_catalog: Callable[..., Catalog], tmp_path: Path) -> Catalog:
    return make_catalog(tmp_path / "catalog", workloads=(MODEL, SMALL, TINY))


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "scaled.py"
    path.write_text(TRITON)
    return path


@pytest.fixture
def tried(catalog: Catalog, kernel: Path) -> Iterator[Callable[..., DevReport]]:
    """Write the kernel and try it, each time in the same session."""
    with DevSession(DevOptions(kernel, "row_scale", gpu="cpu"), catalog) as session:

        def write_and_try(text: str) -> DevReport:
            kernel.write_text(text)
            return session.round()

        yield write_and_try


def files_below(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def cause(report: DevReport) -> tuple[str, str]:
    assert report.problem is not None
    return report.problem.step, report.problem.code


@pytest.mark.turn("tilegym_db/measurement/dev.py", "tilegym_db/backends/")  # loads an interpreter
def test_interpreted_kernel_passes_without_a_time(catalog, kernel, home, tmp_path):
    before = files_below(tmp_path)
    report = try_kernel(kernel, "row_scale", gpu="cpu", catalog=catalog)
    assert report.passed, report.problem
    assert (report.solution.spec.language, report.workload.axes) == ("triton", TINY["axes"])
    assert (report.compiled.status, report.target) == ("compiled", "sm_90")
    assert report.errors.cases == 4
    assert (report.interpreted, report.performance, report.speedup) == (True, None, None)
    assert files_below(tmp_path) == before  # neither the catalog nor a store
    assert not home.exists()


@pytest.mark.turn("tilegym_db/measurement/dev.py", "tilegym_db/backends/")  # loads a compiler
def test_kernel_whose_programs_need_one_order_fails(tried: Callable[..., DevReport]) -> None:
    """Program 0 clears what the others add to, which is right only if it comes first."""
    store = "    tl.store(out + row + columns, value, mask=inside)\n"
    clears = (
        "    if row == 0:\n        for other in range(tl.num_programs(0)):\n"
        "            tl.store(out + other * N + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)\n"
        "    value += tl.load(out + row + columns, mask=inside)\n"
    )
    report = tried(TRITON.replace(store, clears + store))
    assert cause(report) == ("check", "poison")


@pytest.mark.turn("tilegym_db/measurement/dev.py", "tilegym_db/backends/")  # loads a compiler
def test_compiler_imports_nothing_from_the_working_folder(catalog, kernel, monkeypatch):
    marker = kernel.with_name("marker")
    kernel.with_name("grp.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.chdir(kernel.parent)
    report = try_kernel(kernel, "row_scale", gpu="cpu", catalog=catalog)
    assert (report.compiled.status, marker.exists()) == ("compiled", False)


def test_python_kernel_on_a_cpu_is_timed_beside_stock_code(catalog, kernel):
    kernel.write_text(PYTHON)
    report = try_kernel(kernel, "row_scale", gpu="cpu", axes={"M": 64, "N": 40}, catalog=catalog)
    assert report.passed, report.problem
    assert (report.workload.axes, report.compiled) == ({"M": 64, "N": 40}, None)
    assert report.performance.timer == "wall"
    assert report.speedup > 0


@pytest.mark.gpu
def test_kernel_on_a_gpu_is_compiled_by_its_call_and_timed(catalog, kernel):
    report = try_kernel(kernel, "row_scale", catalog=catalog)
    assert report.passed, report.problem
    assert (report.compiled, report.interpreted, report.performance.timer) == (None, False, "events")
    assert report.speedup > 0


@pytest.mark.turn("tilegym_db/measurement/dev.py")  # several rounds; tests/cli/test_dev.py has one daily
def test_rounds_of_one_session_find_each_fault(tried):
    wrong = tried(TRITON.replace("* factor\n", "* factor * 1.5\n"))
    assert cause(wrong)[0] == "check"
    failure = wrong.problem.failure
    assert (failure.output, len(failure.verdict.index)) == ("out", 2)
    assert failure.verdict.expected != failure.verdict.got

    broken = tried(TRITON.replace("columns < N", "columns < N_MISSPELT"))
    assert cause(broken) == ("compile", "compile_failed")
    assert "N_MISSPELT" in broken.problem.log
    assert "scaled.py" in broken.problem.log

    raising = tried(TRITON.replace("    rows, width", "    assert 1 == 2\n    rows, width"))
    assert cause(raising)[0] in ("compile", "check")
    assert "tilegym-db-" not in raising.problem.log  # the author's path, not that of the copy

    assert tried(TRITON).passed
    assert tried(PYTHON).solution.spec.language == "python"


@pytest.mark.parametrize(
    ("text", "step", "code"),
    [
        ("import threading\n" + TRITON, "scan", "scan_refused"),
        (TRITON + "def (", "read", "python_syntax"),
        (TRITON.replace("def run(", "def other("), "read", "entry_point_missing"),
        (TRITON.replace("run(x, weight, factor, out)", "run(x, out)"), "read", "signature_differs"),
        ("", "read", "entry_point_missing"),
    ],
)
def test_fault_of_the_source_is_a_problem_and_nothing_runs(tried, text, step, code):
    report = tried(text)
    assert cause(report) == (step, code)
    assert (report.compiled, report.errors) == (None, None)


def test_scan_finding_has_its_line(tried):
    report = tried("import threading\n" + TRITON)
    assert [(finding.path, finding.line) for finding in report.findings] == [("scaled.py", 1)]


def test_other_entry_function_is_called(catalog, kernel):
    kernel.write_text(PYTHON.replace("run", "scaled"))
    report = try_kernel(kernel, "row_scale", entry="scaled", gpu="cpu", catalog=catalog)
    assert report.passed, report.problem


def test_folder_of_a_solution_is_tried_as_its_record_says(catalog):
    folder = catalog.solution("row_scale_stock").folder
    report = try_kernel(folder, gpu="cpu", catalog=catalog)
    assert report.passed, report.problem
    assert report.solution.name == "row_scale_stock"


@pytest.mark.turn("tilegym_db/measurement/dev.py")  # several rounds; tests/cli/test_dev.py has one daily
def test_watch_picks_up_edits_of_kernel_and_shared_code(catalog, kernel, monkeypatch):
    (root,) = catalog.roots
    shared = root / "solutions/_lib/python/parts.py"
    shared.parent.mkdir(parents=True)
    (shared.parent / "one.py").write_text("ONE = 1.0\n")
    shared.write_text("from _lib.python.one import ONE\n\n\ndef scaled(x, by):\n    return x * by * ONE\n")
    kernel.write_text(
        "from _lib.python.parts import scaled\n\n\ndef run(x, weight, factor):\n    return scaled(x * weight, factor)\n"
    )
    rounds = kernel_rounds(DevOptions(kernel, "row_scale", gpu="cpu"), watch=True, catalog=catalog)
    first = next(rounds)
    assert first.passed, first.problem
    assert [source.path for source in first.solution.sources] == [
        "scaled.py",
        "_lib/python/parts.py",
        "_lib/python/one.py",
    ]
    (shared.parent / "one.py").write_text("ONE = 1.25\n")
    assert cause(next(rounds))[0] == "check"
    kernel.write_text("def (")
    assert cause(next(rounds)) == ("read", "python_syntax")
    kernel.write_text(PYTHON)
    assert next(rounds).passed
    rounds.close()


@pytest.mark.turn("tilegym_db/measurement/dev.py")  # waits; the test before watches a kernel daily
def test_watch_of_a_folder_goes_on_after_a_broken_record(catalog, solution_record, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "kernel.py").write_text("def (")
    record = json.dumps(solution_record(name="mine", spec={"destination_passing_style": False}))
    (folder / "solution.json").write_text(record[:-1])
    rounds = kernel_rounds(DevOptions(folder, gpu="cpu"), watch=True, catalog=catalog)
    assert cause(next(rounds))[0] == "read"
    (folder / "solution.json").write_text(record)
    assert cause(next(rounds)) == ("read", "python_syntax")
    (folder / "kernel.py").write_text(PYTHON)
    assert next(rounds).passed
    rounds.close()


def test_smallest_tiny_workload_is_chosen(catalog, solution_record):
    definition, workloads = catalog.definition("row_scale"), catalog.workloads_for("row_scale")
    record = Solution.from_dict(solution_record())
    assert choose_workload(definition, workloads, record, {}, {}).axes == TINY["axes"]
    wide = Solution.from_dict(solution_record(spec={"constraints": ["N > 8"]}))
    assert choose_workload(definition, workloads, wide, {}, {}).axes == SMALL["axes"]
    own = choose_workload(definition, workloads, record, {"M": 3}, {})
    assert (own.axes, own.dtypes, own.scalars()) == ({"M": 3, "N": 8}, {"T": "float32"}, {"factor": 0.5})
    alone = choose_workload(definition, [], record, {"M": 3, "N": 5}, {})
    assert alone.axes == {"M": 3, "N": 5}
    with raises(UsageError, "workload_missing", "--axes"):
        choose_workload(definition, [], record, {}, {})
    with raises(UsageError, "axis_unknown", "'K'"):
        choose_workload(definition, workloads, record, {"K": 3}, {})
    with raises(UsageError, "dtype_not_allowed"):
        choose_workload(definition, workloads, record, {}, {"T": "float16"})


def test_wrong_requests_are_errors(catalog, kernel):
    with raises(NotFoundError, "definition_unknown"):
        try_kernel(kernel, "row_scales", gpu="cpu", catalog=catalog)
    with raises(UsageError, "options_missing"):
        try_kernel(kernel, gpu="cpu", catalog=catalog)
    with raises(UsageError, "file_missing"):
        try_kernel(kernel.with_name("absent.py"), "row_scale", gpu="cpu", catalog=catalog)
    with raises(UsageError, "target_unknown"):
        try_kernel(kernel, "row_scale", target="sm_91", gpu="cpu", catalog=catalog)
