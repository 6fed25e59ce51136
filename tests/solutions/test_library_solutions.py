"""Baselines that call libraries, by stand-ins with the libraries' signatures: what they are given, and what becomes of it."""

from __future__ import annotations

from math import prod
from typing import Any

import library_stand_ins
import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.backends import load
from tilegym_db.measurement.plan import Options
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.records import Definition
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.scan.scan import scan_sources
from tilegym_db.sandbox.scan.tables import LIBRARIES, MEMBERS
from tilegym_db.sandbox.shared_buffers import same_bytes
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.verifier import Failure, judge, judge_draws

LIBRARY_SOLUTIONS = sorted(name for name in CATALOG.solutions if name.endswith(("_flashinfer", "_fla", "_liger")))
CASES, DRAWS = 6, 1024


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element behind an aligned address."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    return storage[1:].view(x.shape).copy_(x)


def cases_of(definition: Definition, name: str) -> list[Case]:
    """What the Solution is fuzzed with, beside a workload that it serves, in each of its dtypes."""
    record = CATALOG.solution(name).record
    found: list[Case] = []
    for workload in sorted(CATALOG.workloads_for(definition.name), key=lambda workload: prod(workload.axes.values())):
        dtypes = definition.bind_dtypes(workload.dtypes)
        anchor = definition.bind_axes(workload.axes)
        if record.unsupported(anchor, dtypes) is None and all(case.call.dtypes != dtypes for case in found):
            anchors, scalars = [workload.axes], workload.scalars()
            found += fuzz_cases(definition, record, anchors, dtypes, scalars, count=CASES, seed=1, max_rows=24)
    return found


def answer(definition: Definition, entry: Any, expected: OracleCase, number: int) -> dict[str, torch.Tensor]:
    """What the entry returns and writes over, and that it leaves every other input as it was."""
    lay = misaligned if number % 2 else torch.clone
    given = {name: lay(value) if torch.is_tensor(value) else value for name, value in expected.inputs.items()}
    before = {name: value.clone() for name, value in given.items() if torch.is_tensor(value)}
    with torch.inference_mode():
        results = entry(**given)
    for name, value in before.items():
        assert name in definition.in_place or same_bytes(given[name], value), f"{name} was changed"
    replaced = {output: name for name, output in definition.in_place.items()}
    written = iter(results if isinstance(results, tuple) else (results,))
    return {name: given[replaced[name]] if name in replaced else next(written) for name in definition.outputs}


@pytest.mark.records("name")
@pytest.mark.parametrize("name", LIBRARY_SOLUTIONS)
def test_library_call_has_its_signature_and_the_defined_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library_stand_ins.install(monkeypatch)
    monkeypatch.setattr(load, "check_dependencies", lambda dependencies, needed_by: None)
    files = CATALOG.solution(name)
    definition = CATALOG.definition(files.record.definition)
    entry = load.load_entry(files)
    judged = 0
    for number, case in enumerate(cases_of(definition, name)):
        expected = make_oracle_case(definition, case, "cpu")
        if expected is None:
            continue
        judged += 1
        outputs = answer(definition, entry, expected, number)
        if definition.sampled:
            call = lambda again: answer(definition, entry, again, 0)  # noqa: E731
            verdict = judge_draws(definition, expected, outputs, call, DRAWS)
            assert verdict is None, verdict
        else:
            verdicts = judge(definition, files.record, expected, outputs)
            assert not isinstance(verdicts, Failure), verdicts
    load.unload_entry(files)
    assert judged >= CASES // 2


@pytest.mark.records("name")
@pytest.mark.parametrize("name", LIBRARY_SOLUTIONS)
def test_a_baseline_of_a_library_uses_reviewed_members_only(name: str) -> None:
    files = CATALOG.solution(name)
    findings = scan_sources(files.record, files.sources)
    assert {finding.rule for finding in findings} - {"address"} == {"imports-library"}, findings


def test_listed_member_of_a_library_has_a_stand_in_and_a_use() -> None:
    listed = {
        f"{module}.{name}"
        for module, names in MEMBERS.items()
        if module.partition(".")[0] in LIBRARIES.values()
        for name in names
        if not module.endswith("Function")
    }
    stood_in = {
        f"{module}.{function.__name__}"
        for module, functions in library_stand_ins.MODULES.items()
        for function in functions
    }
    assert listed == stood_in
    sources = b"\n".join(content for name in LIBRARY_SOLUTIONS for content in CATALOG.solution(name).sources.values())
    assert [path for path in listed if path.rpartition(".")[2].encode() not in sources] == []


def test_baseline_without_its_library_is_left_out_by_package(tmp_path) -> None:
    plan = RunSetup.of("cpu", CATALOG, tmp_path).plan(Options(("softmax_flashinfer",), workload="tiny"))
    assert plan.definitions == []  # stock code alone would compare nothing
    (skipped,) = [item for item in plan.skipped if item.solution == "softmax_flashinfer"]
    fix = "pip install 'flashinfer-python>=0.7.2'"
    assert skipped.reason == f"needs flashinfer-python>=0.7.2, but it is not installed. Fix: {fix}"
