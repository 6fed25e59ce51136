"""Every shipped kernel, with the real compilers and the real interpreters."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shipped_records import CATALOG

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.catalog import SolutionFiles
from tilegym_db.cli.compile import choose_workloads, compile_catalog
from tilegym_db.measurement.benchmark import bench
from tilegym_db.published.input_files import shipped_traces
from tilegym_db.records import TILE_LANGUAGES, Trace, Workload
from tilegym_db.store.journal import read_journal

KERNELS = sorted(name for name, files in CATALOG.solutions.items() if files.record.spec.language in TILE_LANGUAGES)
TRITON = [name for name in KERNELS if CATALOG.solutions[name].record.spec.language == "triton"]
CUTILE = [name for name in KERNELS if CATALOG.solutions[name].record.spec.language == "cutile"]
BATCH = 24
"""Kernels that one call compiles or benches. The limit of time is of a test, and all kernels at once take longer than that."""
INSTRUCTION = re.compile(r"(?<![.\w])(mov|mul|add|sub|fma)\.(\S+)\s+(\{[^}]*\}|%\w+),([^;]*);")  # of PTX


def chosen(request: pytest.FixtureRequest, argument: str) -> list[str]:
    """The kernels that this run tries, in order."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    values = (item.callspec.params.get(argument) for item in items)
    return sorted({value for value in values if value is not None})


class InBatches(dict[str, list]):
    """What is found about each kernel, made for several kernels at a time when a test first asks for one of them."""

    def __init__(self, names: Sequence[str], make: Callable[[Sequence[str]], dict[str, list]]) -> None:
        super().__init__()
        self._names, self._make = names, make

    def __missing__(self, name: str) -> list:
        first = self._names.index(name) // BATCH * BATCH
        found = self._make(self._names[first : first + BATCH])
        self.update(found)
        return found[name]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, list[tuple[CompileJob, CompileResult]]]:
    return InBatches(chosen(request, "kernel"), compiled_for_sm_90)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    return InBatches(
        chosen(request, "triton_kernel"),
        lambda names: traces_at_smallest("triton", names, tmp_path_factory.mktemp("home")),
    )


@pytest.fixture(scope="module")
def interpreted_cutile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Trace]]:
    return InBatches(
        chosen(request, "cutile_kernel"),
        lambda names: traces_at_smallest("cutile", names, tmp_path_factory.mktemp("home")),
    )


def compiled_for_sm_90(names: Sequence[str]) -> dict[str, list[tuple[CompileJob, CompileResult]]]:
    outcomes: dict[str, list[tuple[CompileJob, CompileResult]]] = {}
    for job, result in compile_catalog(CATALOG, names, ("sm_90",)):
        outcomes.setdefault(job.solution.name, []).append((job, result))
    return outcomes


def traces_at_smallest(language: str, names: Sequence[str], home: Path) -> dict[str, list[Trace]]:
    """Return the traces of kernels in the interpreter, each at its smallest Workload; of stock code, those at all of them."""
    smallest = {name: smallest_it_takes(name).uuid for name in names}
    workloads = tuple(sorted(set(smallest.values())))
    report = bench(tuple(names), devices="cpu", language=language, workload=workloads, catalog=CATALOG, store_home=home)
    traces: dict[str, list[Trace]] = {}
    for trace in report.traces:
        if smallest.get(trace.solution) in (None, trace.workload_uuid):
            traces.setdefault(trace.solution, []).append(trace)
    return traces


def smallest_it_takes(name: str) -> Workload:
    """The first tiny Workload that a kernel's constraints do not exclude."""
    record = CATALOG.solutions[name].record
    definition = CATALOG.definition(record.definition)
    for workload in CATALOG.workloads_for(record.definition):
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        excluded = record.unsupported(axes, dtypes, workload.layout_classes(definition))
        if "tiny" in workload.tags and excluded is None:
            return workload
    raise AssertionError(f"{name} takes no tiny Workload of {record.definition}")


@pytest.mark.slow
@pytest.mark.records("kernel")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.timeout(1200)  # the first test of a batch waits for all of it
def test_it_compiles_for_sm_90_in_every_dtype_it_declares(kernel: str, compiled: dict[str, list]) -> None:
    results = [result for _, result in compiled[kernel]]
    record = CATALOG.solutions[kernel].record
    definition = CATALOG.definition(record.definition)
    declared = itertools.product(*(record.spec.dtypes.get(name, all_) for name, all_ in definition.dtypes.items()))
    built = [tuple(definition.bind_dtypes(job.workload.dtypes).values()) for job, _ in compiled[kernel]]
    assert sorted(built) == sorted(declared)
    assert [result.status for result in results] == ["compiled"] * len(results), [result.log for result in results]


def ptx_of(result: CompileResult) -> list[str]:
    """The PTX of each kernel of a Triton Solution that compiled: Triton keeps it beside the machine code."""
    from triton.runtime.cache import get_cache_manager

    assert result.status == "compiled", result.log
    files = [get_cache_manager(item.key).get_file(f"{item.kernel}.ptx") for item in result.artifacts]
    assert files
    assert None not in files, "Triton's cache does not have the PTX"
    return [Path(file).read_text() for file in files]


def sums_of_unrounded_products(ptx: str) -> list[str]:
    """Instructions in bf16 or fp16 that add to a product which is not rounded, or which ptxas may leave so.

    That is every ``fma``, and a sum of what a ``mul`` gives, by way of ``mov`` too, where neither says ``.rn``.
    """
    found: list[str] = []
    products: set[str] = set()
    for instruction in INSTRUCTION.finditer(ptx):
        operation, kind, written, read = instruction.groups()
        narrow = re.search(r"\bb?f16(x2)?$", kind) is not None
        fusible = narrow and not kind.startswith("rn.")
        of_product = not products.isdisjoint(re.findall(r"%\w+", read))
        if (narrow and operation == "fma") or (fusible and operation in ("add", "sub") and of_product):
            found.append(instruction[0])
        elif (fusible and operation == "mul") or (operation == "mov" and of_product):
            products.update(re.findall(r"%\w+", written))
    return found


@pytest.mark.slow
@pytest.mark.records("kernel")
@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.timeout(1200)
def test_it_rounds_every_product_that_it_adds_in_half_precision(kernel: str, compiled: dict[str, list]) -> None:
    """One whose Definition wants such a product fused would be named here; none is."""
    for job, result in compiled[kernel]:
        found = [line for ptx in ptx_of(result) for line in sums_of_unrounded_products(ptx)]
        assert found == [], job.workload.dtypes


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounded", "dtype", "fused"),
    [("mhc_post_hf_triton", "bfloat16", "fma.rn.bf16"), ("shared_expert_gate_triton", "float16", "fma.rn.f16")],
)
def test_a_kernel_that_lets_triton_fuse_such_a_product_is_found(
    rounded: str, dtype: str, fused: str, tmp_path: Path
) -> None:
    """It passes in the interpreter, and on a GPU with most contents."""
    shipped = CATALOG.solution(rounded)
    folder = shutil.copytree(shipped.path.parent, tmp_path / "careless")
    source = (folder / "kernel.py").read_text()
    (folder / "kernel.py").write_text(source.replace(", enable_fp_fusion=False", ""))
    careless = SolutionFiles.read(folder / shipped.path.name)
    definition = CATALOG.definition(shipped.record.definition)
    workloads = choose_workloads(definition, careless, CATALOG.workloads_for(definition.name), None)
    workload = next(item for item in workloads if item.dtypes == {"T": dtype})

    (compiled,) = compile_many([CompileJob(definition, careless, workload, "sm_90")])
    (ptx,) = ptx_of(compiled)

    assert {line.split()[0].removesuffix("x2") for line in sums_of_unrounded_products(ptx)} == {fused}


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        ("fma.rn.relu.bf16 %rs4, %rs1, %rs2, %rs3;", 1),
        ("fma.rn.f32 %r4, %r1, %r2, %r3;", 0),
        ("mul.bf16x2 \t%r3, %r1, %r2;\nadd.bf16x2 \t%r5, %r4, %r3;", 1),  # ptxas makes one HFMA2 of these
        ("mul.rn.bf16x2 %r3, %r1, %r2;\nadd.rn.bf16x2 %r5, %r4, %r3;", 0),
        ("mul.f16 %rs3, %rs1, %rs2;\nmov.b32 %r1, {%rs0, %rs3};\nsub.f16x2 %r3, %r2, %r1;", 1),
        ("mul.f16x2 %r3, %r1, %r2;\nmov.b32 {%rs1, %rs2}, %r3;\nadd.f16 %rs4, %rs3, %rs2;", 1),
        ("mul.f16 %rs3, %rs1, %rs2;\nadd.f16 %rs5, %rs1, %rs2;\nmul.f16 %rs6, %rs5, %rs3;", 0),
    ],
)
def test_what_ptx_says_of_a_product_that_is_added_to(ptx: str, found: int) -> None:
    assert len(sums_of_unrounded_products(ptx)) == found


@pytest.mark.slow
@pytest.mark.records("triton_kernel")
@pytest.mark.parametrize("triton_kernel", TRITON)
@pytest.mark.timeout(1200)
def test_it_passes_every_gate_in_the_interpreter(triton_kernel: str, interpreted: dict[str, list[Trace]]) -> None:
    traces = interpreted[triton_kernel]
    assert {(trace.tier, trace.status) for trace in traces} == {("interpreter", "PASSED")}, [t.reason for t in traces]


@pytest.mark.slow
@pytest.mark.records("cutile_kernel")
@pytest.mark.parametrize("cutile_kernel", CUTILE)
@pytest.mark.timeout(1200)
def test_it_passes_every_gate_in_the_interpreter_of_cutile(
    cutile_kernel: str, interpreted_cutile: dict[str, list[Trace]]
) -> None:
    traces = interpreted_cutile[cutile_kernel]
    found = {(trace.tier, trace.status) for trace in traces}
    assert ("interpreter", "PASSED") in found
    # Another kernel of the operator may take a Workload that this one's constraints exclude.
    assert found <= {("interpreter", "PASSED"), ("interpreter", "UNSUPPORTED")}, [t.reason for t in traces]


def test_verified_operator_has_a_triton_kernel_and_most_have_all() -> None:
    found: dict[str, set[str]] = {}
    for name in KERNELS:
        record = CATALOG.solutions[name].record
        found.setdefault(record.definition, set()).add(record.spec.language)
    verified = {name for name, definition in CATALOG.definitions.items() if "status:verified" in definition.tags}
    attention = {name for name, definition in CATALOG.definitions.items() if definition.op_type == "attention"}
    waiting = {name for name, definition in CATALOG.definitions.items() if definition.is_open}
    attention -= waiting  # what is not verified on a GPU yet stays open
    assert set(found) - waiting == verified | attention
    assert [name for name in verified | attention if "triton" not in found[name]] == []
    assert len([name for name in verified if found[name] == set(TILE_LANGUAGES)]) > len(verified) / 2


def test_published_traces_are_of_the_shipped_sources() -> None:
    for path in shipped_traces(CATALOG):
        for trace in read_journal(path).traces:
            assert trace.solution_digest == CATALOG.solution(trace.solution).digest, f"{trace.solution}: bench it again"
            assert trace.definition_digest == CATALOG.definition(trace.definition).digest


@pytest.mark.parametrize(("C", "H", "J", "excluded"), [(13, 5, 1, True), (13, 5, 2, False), (13, 4, 1, False)])
def test_row_that_ends_between_16_bytes_avoids_the_copy_engine(C, H, J, excluded) -> None:
    """cuTile 1.7 stores an array of one row by TMA, whatever its length; TMA writes whole 16 bytes, here past the end."""
    record = CATALOG.solution("mhc_norm_fn_backward_cutile").record
    why = record.unsupported({"M": 17, "C": C, "H": H, "J": J}, {"T": "bfloat16"})
    assert (why is not None) == excluded, why
