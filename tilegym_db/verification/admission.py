"""Checks that a Definition must pass before it is admitted. Its code runs only in a child process.

A reference may exit, hang or fill the memory. In a child process, each of these becomes a finding about the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import platformdirs

from tilegym_db.backends.torch_dtypes import storage_dtype
from tilegym_db.catalog import Catalog
from tilegym_db.catalog.writers import read_lock
from tilegym_db.errors import RecordError, SolutionError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Call, scalars_with_axes
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import Scalar
from tilegym_db.verification.expected import broken_constraint
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_reference
from tilegym_db.verification.self_test import DRAW_SO, self_test

# ---- child process --------------------------------------------------------------------------------
# Runs a function in a separate process with a time limit, so that a reference cannot harm this process.
#
# A server process imports PyTorch once and forks one child per call. A child is killed with every process it started.

START_TIMEOUT_S = 180.0
"""Seconds for imports on a cold file system and a busy machine; no code of a record runs before they finish."""
MAX_ANSWER_BYTES = 1 << 24
MAX_PRINTED_BYTES = 1 << 16
"""Maximum number of printed bytes that are passed on, so that endless output cannot fill a terminal or disk."""
_PR_SET_PDEATHSIG = 1


def run_in_child(function: Callable[..., Any], arguments: tuple[Any, ...], what: str, limit_s: float) -> Any:
    """Run ``function(*arguments)`` in a child process and return its result.

    Args:
        function: a top-level function of a module that returns plain JSON.
        arguments: picklable values.
        what: the name of the code that runs, for the message: ``rms_norm: the reference``.
        limit_s: seconds, counted from the moment when the child is ready.

    Raises:
        RecordError: the function raised one, did not finish in time, or ended its process without a result.
        SolutionError: no process could be started.
    """
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_answer, args=(sender, function, arguments, what), daemon=True)
    try:
        process.start()
        sender.close()
        _receive(receiver, process, START_TIMEOUT_S, what)
        kind, value = _receive(receiver, process, limit_s, what)
    except OSError as error:
        raise SolutionError(
            f"{what}: cannot start a process for it: {error.strerror or error}.", code="process_not_started"
        ) from None
    finally:
        _end(process)
        receiver.close()
    if kind == "returned":
        return value
    raise RecordError(value["message"], code=value["code"])


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilegym_db.verification.admission"])
    return context


def _receive(receiver: Connection, process: BaseProcess, limit_s: float, what: str) -> tuple[str, Any]:
    begun = time.monotonic()
    if not receiver.poll(limit_s):
        raise RecordError(f"{what} did not finish within {limit_s:g} s and was ended.", code="time_limit_exceeded")
    try:
        kind, value = json.loads(receiver.recv_bytes(MAX_ANSWER_BYTES))
    except (EOFError, ConnectionError):
        process.join(5)
        code = process.exitcode
        how = f"with exit status {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        seconds = time.monotonic() - begun
        raise RecordError(
            f"{what} ended its process {how} after {seconds:.1f} s instead of returning.", code="process_ended"
        ) from None
    except ValueError:
        raise RecordError(f"{what} wrote to the channel that its result goes through.", code="channel_broken") from None
    return str(kind), value


def _end(process: BaseProcess) -> None:
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its process group, so that processes it started end too
    with contextlib.suppress(OSError):
        process.kill()
    process.join(10)


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], what: str) -> None:
    """Run the function in the child: in its own process group, killed if its server ends, and with limited output."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _send(sender, "ready", None)
    with _printing_little():
        try:
            answer = "returned", function(*arguments)
        except RecordError as error:
            answer = "refused", _fault(error)
        except BaseException as error:  # process boundary: SystemExit is an answer too
            raised = RecordError(f"{what} raises {type(error).__name__}: {error}", code="call_raises")
            answer = "refused", _fault(raised)
    _send(sender, *answer)


def _fault(error: RecordError) -> dict[str, str]:
    return {"message": str(error), "code": error.code}


@contextlib.contextmanager
def _printing_little() -> Iterator[None]:
    """Send output through a pipe to stderr, up to the limit."""
    stderr = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    passing_on = threading.Thread(target=_pass_on, args=(reader, stderr), daemon=True)
    passing_on.start()
    yield
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)  # closes the last writer of the pipe, which ends the thread
    passing_on.join(1)


def _pass_on(reader: int, stderr: int) -> None:
    left = MAX_PRINTED_BYTES
    while chunk := os.read(reader, MAX_PRINTED_BYTES):
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not stop the call
            os.write(stderr, chunk[:left])
        if left and len(chunk) >= left:
            with contextlib.suppress(OSError):
                os.write(stderr, b"\n(what it prints further is left out)\n")
        left = max(left - len(chunk), 0)


def _send(sender: Connection, kind: str, value: Any) -> None:
    sender.send_bytes(json.dumps([kind, value]).encode())


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
    try:
        found = run_in_child(_self_test, (definition, workloads), what, limit_s)
    except RecordError as error:
        return [str(error)]
    return [str(finding) for finding in found]


def _self_test(definition: Definition, workloads: list[Workload]) -> list[str]:
    return [str(finding) for finding in self_test(definition, workloads)]


def run_reference_once(record: Definition, file: Path, *, limit_s: float | None = None) -> None:
    """Run the reference on the smallest inputs that the Definition allows, in its first dtypes, for at most 30 s.

    Raises:
        RecordError: the reference raises, ends its process, does not finish, or returns other outputs than declared.
    """
    run_in_child(_run_reference_once, (record, file), f"{file}: reference: it", limit_s or TRIAL_LIMIT_S)


def require_returning_reference(
    catalog: Catalog, record: Definition, *, run: Callable[[Definition, Path], None] = run_reference_once
) -> None:
    """Run a reference that was not shipped in a child process, once per digest, before this process uses it.

    Its file may not have passed ``add-definition``, but may have been written or changed by hand. In a checkout, a Definition
    is shipped if the lock has its digest. A success is remembered in the user's cache folder, because starting a process with
    PyTorch takes seconds.

    Args:
        catalog: has the file of the Definition.
        record: the Definition.
        run: runs the reference in a child process.

    Raises:
        RecordError: see :func:`run_reference_once`.
    """
    path = catalog.definition_paths.get(record.name)
    packaged = shipped_root()
    if path is None:
        return
    if path.is_relative_to(packaged) and (catalog.write_root != packaged or _is_locked(packaged, record)):
        return
    known = Path(platformdirs.user_cache_dir("tilegym-db")) / "references" / f"{record.digest}-{version('torch')}"
    if record.digest in _RETURNED or os.path.exists(known):
        return
    run(record, path)
    _RETURNED.add(record.digest)
    with contextlib.suppress(OSError):  # an unwritable cache folder costs the next command a few seconds
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()


def _is_locked(root: Path, record: Definition) -> bool:
    with contextlib.suppress(RecordError):  # a damaged lock proves nothing
        return read_lock(root).get(record.name, {}).get(record.version) == record.digest
    return False


_RETURNED: set[str] = set()
"""Digests of the Definitions whose references returned in a child of this process."""


def _run_reference_once(record: Definition, file: Path) -> None:
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
