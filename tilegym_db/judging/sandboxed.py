"""Run foreign references and Solutions in confined workers.

Our own references run in the main process because we reviewed them. Foreign references always run confined.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.record_files import write_solution
from tilegym_db.interchange.adapt import REFERENCE, AdaptedSolution
from tilegym_db.records import Definition, Solution
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import FLOAT_DTYPES, Scalar
from tilegym_db.sandbox.interpreters import INTERPRETERS
from tilegym_db.sandbox.protocol import Reply, load_request
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.verification.comparison import check_reference, reference_errors
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.oracle import Lifted
from tilegym_db.verification.verifier import Failure, fill_slot, not_set_up, read_outputs, verify_slot

FIRST_CALL_S = 180.0
TIMED_CALLS = 7
ORACLE = "oracle.py"
_LIFTED = ("float32", "float16", "bfloat16")

Values = Mapping[str, torch.Tensor | Scalar]
Outputs = dict[str, torch.Tensor]


class Confined:
    """A context manager that runs one source in one worker."""

    def __init__(
        self, files: SolutionFiles, definition: Definition, device: str, folder: Path, *, interpret: bool
    ) -> None:
        """Start the worker. Call :meth:`load` to import the source."""
        self.files, self.definition, self.device = files, definition, device
        self.interpret = interpret
        environment = INTERPRETERS[files.record.spec.language].environment if interpret else {}
        self.worker = WorkerProcess(device, folder, environment, readable=files.folders)

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @property
    def sandbox_level(self) -> int:
        """The isolation level of the worker."""
        return self.worker.sandbox_level

    def load(self) -> Failure | None:
        """Import the source in the worker; return the failure, if any."""
        reply = self._ask("prepare", profile=False)
        if isinstance(reply, Failure):
            return not_set_up(reply)
        reply = self._ask("load", **load_request(self.definition, self.files, interpret=self.interpret))
        return reply if isinstance(reply, Failure) else None

    def call(self, expected: OracleCase) -> Outputs | Failure:
        """Call the source once on the inputs of a case and return its outputs without checking them."""
        with SharedBuffers(plan_slot(self.definition, expected.case), 1, self.device) as buffers:
            reply = self._attach(buffers, expected.case)
            if isinstance(reply, Reply):
                fill_slot(buffers, 0, self.definition, expected, None)
                buffers.settle()
                reply = self._ask("call", slot=0)
            if isinstance(reply, Failure):
                return reply
            if reply.mismatch is not None:
                kind, what = reply.mismatch
                return Failure(
                    "INCORRECT_DTYPE" if kind == "dtype" else "INCORRECT_SHAPE", what, gate="shape", case=expected.case
                )
            outputs = read_outputs(buffers, 0, self.definition)
            self._ask("detach")
            return outputs

    def verify(self, expected: OracleCase, *, timed: bool) -> tuple[float | None, Failure | None]:
        """Apply every gate to one case, including poison, guard bands and repeats.

        Returns:
            The median time in microseconds if ``timed``, and the failure if a gate fails.
        """
        with SharedBuffers(plan_slot(self.definition, expected.case), 1, self.device) as buffers:
            reply = self._attach(buffers, expected.case)
            if isinstance(reply, Failure):
                return None, reply
            outcome = verify_slot(
                self.worker, buffers, 0, self.definition, self.files.record, expected, timeout_s=FIRST_CALL_S
            )
            if isinstance(outcome, Failure):
                return None, outcome
            latency = self._time() if timed else None
            self._ask("detach")
            return latency, None

    def _time(self) -> float | None:
        replies = [self._ask("time", slots=[0]) for _ in range(TIMED_CALLS)]
        times = [float(reply.content["device_us"][0]) for reply in replies if isinstance(reply, Reply)]
        return statistics.median(times) if len(times) == TIMED_CALLS else None

    def _attach(self, buffers: SharedBuffers, case: Case) -> Reply | Failure:
        return self._ask(
            "attach",
            descriptors=(buffers.descriptor,),
            buffers=buffers.to_message(),
            config={},
            scalars=[dict(case.call.scalars)],
        )

    def _ask(self, op: str, descriptors: tuple[int, ...] = (), **content: Any) -> Reply | Failure:
        try:
            reply = self.worker.request(op, timeout_s=FIRST_CALL_S, descriptors=descriptors, **content)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", f"'{op}' did not finish within {FIRST_CALL_S:g} s", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", f"the worker died during '{op}'", str(error))
        if reply.ok:
            return reply
        return Failure(reply.failed_as, f"'{op}' raised: {reply.summary}", reply.error)


def prepare_solution(adapted: AdaptedSolution, folder: Path) -> SolutionFiles:
    """Write an adapted Solution into a folder that a worker can read."""
    return write_solution(folder, adapted.record, adapted.sources)


def prepare_oracle(definition: Definition, folder: Path, *, lifted: bool) -> tuple[SolutionFiles, Definition]:
    """Return a reference as a source that a worker can call, and the Definition of that call.

    If ``lifted``, every floating-point input, cast and output is float64, so that nothing is rounded.
    """
    sources = {REFERENCE: definition.reference.encode()}
    if lifted:
        sources[ORACLE] = _lifting(definition).encode()
    entry = ORACLE if lifted else REFERENCE
    value = {
        "name": definition.name,
        "definition": definition.name,
        "author": "reference",
        "spec": {"language": "python", "entry_point": f"{entry}::run", "destination_passing_style": False},
        "sources": [{"path": path} for path in sources],
    }
    record = Solution.from_dict(value, f"the reference of {definition.name}")
    # The function returns every output, so the Definition of the call has no in-place outputs.
    outputs = {
        name: spec.model_copy(update={"dtype": "float64"}) if lifted and spec.dtype in FLOAT_DTYPES else spec
        for name, spec in definition.outputs.items()
    }
    return write_solution(folder, record, sources), definition.model_copy(update={"outputs": outputs, "in_place": {}})


def _lifting(definition: Definition) -> str:
    names = ", ".join(definition.inputs)
    return (
        "import torch\n\n"
        f"from {Lifted.__module__} import {Lifted.__name__}\n\n"
        "from .reference import run as _run\n\n"
        f"_FLOATS = ({', '.join(f'torch.{name}' for name in _LIFTED)})\n\n\n"
        f"def run({names}):\n"
        f"    given = [{names}]\n"
        "    lifted = [v.double() if isinstance(v, torch.Tensor) and v.dtype in _FLOATS else v for v in given]\n"
        f"    with {Lifted.__name__}():\n"
        "        returned = _run(*lifted)\n"
        "    values = returned if isinstance(returned, tuple | list) else (returned,)\n"
        "    return tuple(v.double() if v.is_floating_point() else v for v in values)\n"
    )


def outputs_of(
    definition: Definition, case: Case, inputs: Values, device: str, folder: Path, *, lifted: bool
) -> Outputs | Failure:
    """Compute the outputs of a reference from these inputs, in a separate worker."""
    files, called = prepare_oracle(definition, folder, lifted=lifted)
    with Confined(files, called, device, folder.with_name(f"{folder.name}-worker"), interpret=False) as worker:
        failure = worker.load()
        return failure if failure is not None else worker.call(OracleCase(case, inputs, {}, {}))


def expected_by_reference(
    definition: Definition, case: Case, inputs: Values, device: str, folder: Path
) -> tuple[OracleCase, Outputs, str] | Failure:
    """Return the oracle's outputs, the outputs of the reference as written, and the name of the oracle.

    The oracle is ``fp64``, the reference in float64. It is ``as_written`` if the reference fails in float64, or if its
    outputs as written do not pass our gates against the float64 ones.
    """
    written = outputs_of(definition, case, inputs, device, folder / "as-written", lifted=False)
    if isinstance(written, Failure):
        return written
    truth = outputs_of(definition, case, inputs, device, folder / "lifted", lifted=True)
    if not isinstance(truth, Failure):
        e_base, _ = reference_errors(definition, case.call.dtypes, written, truth)
        verdicts = check_reference(definition, case.call.dtypes, inputs, truth, written, e_base)
        if all(verdict.passed for verdict in verdicts.values()):
            return OracleCase(case, inputs, truth, e_base), written, "fp64"
    return OracleCase(case, inputs, written, dict.fromkeys(written, EXACTLY)), written, "as_written"
