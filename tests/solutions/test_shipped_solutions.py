"""Every shipped kernel, with the real compilers and the real Triton interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilegym_db.backends.jobs import CompileJob, CompileResult
from tilegym_db.bench.session import benchmark
from tilegym_db.catalog import Catalog
from tilegym_db.cli.compile import compile_catalog
from tilegym_db.records import TILE_LANGUAGES, Trace

CATALOG = Catalog.default()
KERNELS = sorted(name for name, files in CATALOG.solutions.items() if files.record.spec.language in TILE_LANGUAGES)
TRITON = [name for name in KERNELS if CATALOG.solutions[name].record.spec.language == "triton"]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[tuple[CompileJob, CompileResult]]]:
    outcomes: dict[str, list[tuple[CompileJob, CompileResult]]] = {}
    for job, result in compile_catalog(CATALOG, (), ("sm_90",)):
        outcomes.setdefault(job.solution.name, []).append((job, result))
    return outcomes


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    home: Path = tmp_path_factory.mktemp("home")
    report = benchmark(gpu="cpu", language="triton", workload="tiny", quick=True, catalog=CATALOG, store_home=home)
    traces: dict[str, list[Trace]] = {}
    for trace in report.traces:
        traces.setdefault(trace.solution, []).append(trace)
    return traces


@pytest.mark.slow
@pytest.mark.timeout(1200)  # of all of them, in the first one's fixture
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_for_sm_90_in_every_dtype_it_declares(name: str, compiled: dict[str, list]) -> None:
    results = [result for _, result in compiled[name]]
    declared = CATALOG.solutions[name].record.spec.dtypes.get("T")
    assert len(results) == (3 if declared is None else len(declared))
    assert [result.status for result in results] == ["compiled"] * len(results), [result.log for result in results]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TRITON)
def test_it_passes_every_gate_in_the_interpreter(name: str, interpreted: dict[str, list[Trace]]) -> None:
    traces = interpreted[name]
    assert {(trace.tier, trace.status) for trace in traces} == {("interpreter", "PASSED")}, [t.reason for t in traces]


def test_every_verified_operator_has_a_kernel_in_each_language_and_backwards_and_attention_have_one_in_triton() -> None:
    found: dict[str, set[str]] = {}
    for name in KERNELS:
        record = CATALOG.solutions[name].record
        found.setdefault(record.definition, set()).add(record.spec.language)
    verified = {name for name, definition in CATALOG.definitions.items() if "status:verified" in definition.tags}
    attention = {name for name, definition in CATALOG.definitions.items() if definition.op_type == "attention"}
    assert set(found) == verified | attention
    backwards = {name for name in verified if CATALOG.definitions[name].backward_of}
    assert (len(verified - backwards), len(backwards)) == (12, 4)
    assert all(found[name] == set(TILE_LANGUAGES) for name in verified - backwards)
    assert all(found[name] == {"triton"} for name in backwards | attention)


def test_the_published_traces_are_of_the_sources_that_are_shipped() -> None:
    for path in sorted((CATALOG.roots[0] / "traces").glob("*/*/*.jsonl")):
        for line in path.read_text().splitlines():
            trace = Trace.from_json(line, path)
            assert trace.solution_digest == CATALOG.solution(trace.solution).digest, f"{trace.solution}: bench it again"
            assert trace.definition_digest == CATALOG.definition(trace.definition).digest
