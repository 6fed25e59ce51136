"""Checks that a Definition must pass before it is admitted. Its code runs only in the sandbox.

A reference may write files, hang or fill the memory. In a confined process, each of these becomes a finding about the record.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from tilegym_db.errors import RecordError, SolutionError
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Call, bind_forward, scalars_with_axes
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.processes import ResourceBounds
from tilegym_db.sandbox.protocol import Channel, storable
from tilegym_db.sandbox.scan import require_clean, scan_definition
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.verification.expected import broken_constraint
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_reference
from tilegym_db.verification.self_test import DRAW_SO, self_test

# ---- confined process -----------------------------------------------------------------------------
# The texts of a Definition run in a worker of the sandbox, as a kernel does, with this file as its program.

START_TIMEOUT_S = 180.0
"""Seconds for imports on a cold file system and a busy machine; no code of a record runs before they finish."""
MAX_MEMORY_BYTES = 4 << 30
"""Memory of one check with PyTorch. Its inputs have some thousand elements."""


def _run_confined(op: str, definition: Definition, where: object, what: str, limit_s: float, **content: Any) -> Any:
    """Return what :func:`serve_checks` answers to a request in a new worker, if the scan finds nothing in the texts.

    Args:
        op: ``run once`` or ``self test``.
        where: the file or name of the record, for the message of the scan.
        what: the name of the code that runs, for other messages: ``rms_norm: the reference``.
        limit_s: seconds, counted from the moment when the worker is ready.

    Raises:
        RecordError: the scan refuses a text; or the code raised one, did not finish in time, or ended its process.
        SolutionError: no process could be started.
    """
    require_clean(scan_definition(definition), where, "the record")
    forward = definition._forward.to_dict() if definition._forward is not None else None
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        try:
            bounds = ResourceBounds.of_machine()
            bounds = replace(bounds, memory_bytes=min(bounds.memory_bytes, MAX_MEMORY_BYTES), disk_bytes=64 << 20)
            worker = WorkerProcess("cpu", folder / "reference", bounds=bounds, script=Path(__file__))
            stack.callback(worker.close)
            worker.wait_until_ready(START_TIMEOUT_S)
        except (WorkerDied, WorkerTimeout, OSError) as error:
            raise SolutionError(
                f"{what}: cannot start a process for it: {error}.", code="process_not_started"
            ) from None
        try:
            reply = worker.request(op, timeout_s=limit_s, definition=definition.to_dict(), forward=forward, **content)
        except WorkerTimeout:
            raise RecordError(
                f"{what} did not finish within {limit_s:g} s and was ended.", code="time_limit_exceeded"
            ) from None
        except WorkerDied as error:
            raise RecordError(
                f"{what} ended its process instead of returning: {error}.", code="process_ended"
            ) from None
    if reply.ok:
        return reply.content.get("result")
    raise RecordError(reply.error, code=storable(reply.content.get("code")))


def serve_checks(channel: int) -> None:
    """Answer requests for checks of Definitions, in the confined process."""
    with contextlib.closing(Channel(channel)) as harness:
        harness.send({"id": 0, "ok": True})
        while (request := harness.receive()) is not None:
            harness.send({"id": request["id"], **_answer(request)})


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    definition = Definition.from_dict(request["definition"])
    if request["forward"] is not None:
        definition = bind_forward(definition, Definition.from_dict(request["forward"]))
    try:
        if request["op"] == "run once":
            _run_reference_once(definition, request["file"])
            return {"ok": True}
        workloads = [Workload.from_dict(item) for item in request["workloads"]]
        return {"ok": True, "result": [str(finding) for finding in self_test(definition, workloads)]}
    except RecordError as error:
        return {"ok": False, "error": str(error), "code": error.code}
    except BaseException as error:  # process boundary: SystemExit is an answer too
        message = f"{definition.name} raises {type(error).__name__}: {error}"
        return {"ok": False, "error": message, "code": "call_raises"}


TRIAL_SIZES = (2, 4, 8, 16, 64, 128, 1)
MAX_TRIALS = 150_000
TRIAL_LIMIT_S = 30.0
SELF_TEST_LIMIT_S = 120.0
"""Limit for all dtypes of one Definition; the slowest shipped one takes 4 s on an idle core."""


def run_self_test(
    definition: Definition, workloads: list[Workload], *, limit_s: float = SELF_TEST_LIMIT_S
) -> list[str]:
    """Return the findings of :func:`~tilegym_db.verification.self_test.self_test` as text, including a reference that hangs."""
    what = f"{definition.name}: the reference, or a formulation of its self_test,"
    given = [workload.to_dict() for workload in workloads]
    try:
        found = _run_confined("self test", definition, definition.name, what, limit_s, workloads=given)
    except RecordError as error:
        return [str(error)]
    return [storable(finding) for finding in found] if isinstance(found, list) else [f"{what} answers no list."]


def run_reference_once(record: Definition, file: Path, *, limit_s: float | None = None) -> None:
    """Run the reference on the smallest inputs that the Definition allows, in its first dtypes, for at most 30 s.

    It runs in the best sandbox of this machine, and only if the static scan finds nothing in the texts of the record.
    """
    _run_confined("run once", record, file, f"{file}: reference: it", limit_s or TRIAL_LIMIT_S, file=str(file))


def require_returning_reference(
    record: Definition, path: Path, *, run: Callable[[Definition, Path], None] = run_reference_once
) -> None:
    """Run a reference of :meth:`Catalog.untried` in a child process, once per digest, before this process uses it.

    A success is remembered in the user's cache folder, because starting a process with PyTorch takes seconds.
    """
    known = Path(platformdirs.user_cache_dir("tilegym-db")) / "references" / f"{record.digest}-{version('torch')}"
    if record.digest in _RETURNED or os.path.exists(known):
        return
    run(record, path)
    _RETURNED.add(record.digest)
    with contextlib.suppress(OSError):  # an unwritable cache folder costs the next command a few seconds
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()


_RETURNED: set[str] = set()
"""Digests of the Definitions whose references returned in a child of this process."""


def _run_reference_once(record: Definition, file: str) -> None:
    axes = smallest_axes(record)
    if axes is None:
        raise RecordError(
            f"{file}: constraints: no sizes among {TRIAL_SIZES} satisfy all of them. Relax them.",
            code="constraints_unsatisfiable",
        )
    dtypes = {name: choices[0] for name, choices in record.dtypes.items()}
    case = Case(Call(record.name, axes, dtypes, scalars=scalars_with_axes(record, trial_scalars(record), axes)))
    try:
        work = record.cost_of(axes, dtypes)
    except RecordError as error:
        raise RecordError(f"{file}: cost: at {case}: {error}", code="cost_failed") from None
    if min(work) < 0:
        raise RecordError(
            f"{file}: cost: at {case}: {min(work):g} is negative; flops and bytes must be at least 0.",
            code="cost_negative",
        )
    try:
        inputs = draw_inputs(record, case, "cpu")
        broken = broken_constraint(record, axes, inputs)
        outputs = run_reference(record, inputs) if broken is None else {}
    except RecordError as error:
        raise RecordError(f"{file}: reference: at {case}: {error}", code=error.code) from None
    if broken is not None:
        raise RecordError(
            f"{file}: content_constraints: drawn inputs break {broken} at {case}; {DRAW_SO}.",
            code="content_constraint_broken",
        )
    for name, value in outputs.items():
        found = (tuple(value.shape), value.dtype)
        declared = (record.shape_of(name, axes), storage_dtype(record.dtype_of(name, dtypes)))
        if found != declared:
            raise RecordError(
                f"{file}: reference: at {case}: '{name}' has shape {found[0]} and dtype {found[1]}, "
                f"but outputs.{name} declares {declared[0]} and {declared[1]}.",
                code="output_differs",
            )


def smallest_axes(record: Definition) -> dict[str, int] | None:
    """Return small axis sizes that satisfy the constraints, or None if none were found.

    Sizes differ from each other if possible, so that a transposed result has the wrong shape. They are 1 only if necessary,
    so that nothing is broadcast by accident.
    """
    names = record.var_axes
    bindings = itertools.islice(itertools.product(TRIAL_SIZES, repeat=len(names)), MAX_TRIALS)
    for sizes in sorted(bindings, key=lambda sizes: (sizes.count(1), -len(set(sizes)), math.prod(sizes))):
        try:
            return record.bind_axes(dict(zip(names, sizes, strict=True)))
        except RecordError:
            continue
    return None


def trial_scalars(record: Definition) -> dict[str, Scalar]:
    """Return a harmless value for every scalar input: small for a float, 1 for an integer, False for a flag."""
    scalars: dict[str, Scalar] = {}
    for name, spec in record.inputs.items():
        if spec.is_scalar:
            dtype = record.dtypes.get(spec.dtype, (spec.dtype,))[0]
            scalars[name] = False if dtype == "bool" else 1 if dtype.startswith(("int", "uint")) else 1e-3
    return scalars


if __name__ == "__main__":
    serve_checks(int(sys.argv[1]))
