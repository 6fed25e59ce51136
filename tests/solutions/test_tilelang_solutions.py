"""Every shipped TileLang kernel through the gates, in the interpreter.

In this process: a worker for each of them would import TileLang for each of them, which takes longer than the kernels.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.backends.load import load_entry
from tilegym_db.backends.tilelang_interpreter import interpreting
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.protocol import Reply
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.self_test import tiny_workloads
from tilegym_db.verification.verifier import Failure, verify_slot
from tilegym_db.verification.worker_handle import INTERPRETER

KERNELS = sorted(name for name, files in CATALOG.solutions.items() if files.record.spec.language == "tilelang")
SEED = 20_261_123


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with interpreting():
        yield


class InThisProcess:
    """What the verifier asks of a worker, for a Solution that is loaded here."""

    def __init__(
        self, entry: Callable[..., Any], buffers: SharedBuffers, definition: Definition, expected: OracleCase
    ) -> None:
        self.entry, self.buffers = entry, buffers
        self.names = [*definition.inputs, *definition.written_outputs]
        self.scalars = {name: value for name, value in expected.inputs.items() if not isinstance(value, torch.Tensor)}

    def request(self, op: str, *, timeout_s: float, slot: int = 0, scalars: Any = None, **mode: Any) -> Reply:
        if op == "scalars":
            self.scalars.update(scalars)
            return Reply(True, {})
        try:
            tensors = {name: self.buffers.tensor(slot, name) for name in self.names if name not in self.scalars}
            self.entry(*({**self.scalars, **tensors}[name] for name in self.names))
        except Exception as error:
            return Reply(False, {"kind": "runtime", "error": "".join(traceback.format_exception(error))})
        return Reply(True, {})


def cases(files: SolutionFiles, definition: Definition) -> Iterator[Case]:
    """Each tiny workload that the kernel takes, and fuzz cases of each of its bindings, as a bench on a CPU has them."""

    def is_taken(workload: Workload) -> bool:
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        return files.record.unsupported(axes, dtypes, workload.layout_classes(definition), target=None) is None

    workloads = tiny_workloads(definition, [*filter(is_taken, CATALOG.workloads_for(definition.name))])
    bindings = {}
    for workload in workloads:
        yield Case.of_workload(definition, workload, distribution="normal", seed=SEED)
        dtypes = definition.bind_dtypes(workload.dtypes)
        bindings[str((dtypes, workload.scalars()))] = (dtypes, workload.scalars())
    for dtypes, scalars in bindings.values():
        anchors = [workload.axes for workload in workloads]
        limits = {"count": INTERPRETER.fuzz_cases, "seed": SEED, "max_rows": INTERPRETER.fuzz_rows}
        yield from fuzz_cases(definition, files.record, anchors, dtypes, scalars, **limits)


@pytest.mark.slow
@pytest.mark.records("tilelang_kernel")
@pytest.mark.parametrize("tilelang_kernel", KERNELS)
def test_it_passes_every_gate_in_the_interpreter(tilelang_kernel: str) -> None:
    files = CATALOG.solution(tilelang_kernel)
    definition = CATALOG.definition(files.record.definition)
    entry = load_entry(files)
    verdicts = []
    for case in cases(files, definition):
        expected = make_oracle_case(definition, case, "cpu")
        if expected is None:
            continue
        with SharedBuffers(plan_slot(definition, case), 1, "cpu") as buffers:
            worker: Any = InThisProcess(entry, buffers, definition, expected)
            limits: dict[str, Any] = {"calls": INTERPRETER.calls, "draws": INTERPRETER.draws, "timeout_s": 60}
            verdict = verify_slot(worker, buffers, 0, definition, files.record, expected, **limits)
        assert not isinstance(verdict, Failure), f"{verdict.reason}\n{verdict.log}"
        verdicts.append(verdict)
    assert len(verdicts) > 1
