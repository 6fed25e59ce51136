"""The supervisor of one device, a process of its own: ``python -m`` starts it, with a socket as standard input.

It is the harness of its device: it draws inputs, keeps oracle and clock, and has its own fork server and workers, through the
executor that a run without ``--gpus`` uses. Its arguments are the processors that it may use and the slug of the GPU that it must
find. It ends when the socket does. What imports PyTorch is imported in functions, after the fork server was started.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tilegym_db.records.hardware import CPU

__all__ = ["main"]

GRACE_S = 20.0
"""Code that is interrupted has so long to end. It may be in the middle of a call of a library that catches what is raised."""


def main() -> None:
    """Carry out orders until there are no more."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in its background ignores it
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    connection = _take_socket()
    orders = queue.Queue[Any]()
    threading.Thread(target=listen, args=(connection, orders), daemon=True).start()
    try:
        with _telling_failures(connection):
            _serve(connection, orders, began)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # whoever gave the orders has ended, or wants us to


def _take_socket() -> Connection:
    """The socket at a descriptor that no compiler which is started later inherits."""
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


def listen(connection: Connection, orders: queue.Queue[Any]) -> None:
    """Pass orders on; at the end of all, end the main thread, by a signal only where it does not wait for an order.

    On hosts of H200s a waiting one was not woken by a signal to its process, and was killed after 15 s.
    """
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        is_at_work = orders.unfinished_tasks > 0
    orders.put(None)
    if is_at_work:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(1)  # its device must not stay taken by a process that nobody gives orders; its workers end with it


def _serve(connection: Connection, orders: queue.Queue[Any], began: float) -> None:
    from tilegym_db.verify.worker.process import prepare_workers

    gpu = sys.argv[2]
    device = CPU if gpu == CPU else "cuda:0"
    prepare_workers(device)  # the fork server imports PyTorch while this process does
    from tilegym_db.bench.gpus.jobs import DeviceJobs
    from tilegym_db.bench.gpus.messages import Ready

    jobs = DeviceJobs.open(gpu, connection.send)
    threading.Thread(target=_find_sandbox, args=(device,), daemon=True).start()
    connection.send(Ready(time.monotonic() - began, jobs.machine))
    while (order := orders.get()) is not None:
        jobs.carry_out(order)
        orders.task_done()


def _find_sandbox(device: str) -> None:
    """Find out how workers can be confined, which takes the start of a worker or two, while there is no order yet."""
    from tilegym_db.verify.worker.losses import WorkerDied, WorkerTimeout
    from tilegym_db.verify.worker.process import best_level

    with contextlib.suppress(WorkerDied, WorkerTimeout):  # whoever needs a worker meets it again, and says so
        best_level(device)


@contextlib.contextmanager
def _telling_failures(connection: Connection) -> Iterator[None]:
    """The boundary of this process: whatever ends it is told, with the reason."""
    from tilegym_db.errors import HardwareError

    try:
        yield
    except HardwareError as error:
        _tell_failure(connection, str(error), is_device=True)
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        _tell_failure(connection, f"{type(error).__name__}: {error}", is_device=False)


def _tell_failure(connection: Connection, reason: str, *, is_device: bool) -> None:
    from tilegym_db.bench.gpus.messages import Failed

    connection.send(Failed(reason, is_device))


if __name__ == "__main__":
    main()
