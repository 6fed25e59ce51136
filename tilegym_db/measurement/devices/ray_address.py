"""Address of the Ray cluster, and the connection to it. If no cluster answers, the connection fails within seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator

from tilegym_db.errors import HardwareError, UsageError, missing_package
from tilegym_db.measurement.devices.devices import GpuChoice

LOCAL, RAY = "local", "ray"
AUTO = "auto"
CLIENT = "ray://"
REASON_CHARACTERS = 400
ADDRESS_VARIABLE = "RAY_ADDRESS"
REACH_S = 3.0
"""Seconds to wait for a host to accept a connection."""
CONNECT_S = 12.0
"""Seconds to wait for Ray. Ray connects within two seconds; if another program listens at the port, it would try for a
minute.
"""
CLIENT_CONNECT_S = 30.0
"""The same for Ray's client, since the cluster first starts a process."""


def names_cluster(executor: str) -> bool:
    """Return True if ``--executor`` names devices outside this host."""
    return executor != LOCAL


def parse_executor(text: str) -> str:
    """Return the address of the cluster that ``--executor`` names.

    ``ray`` is the cluster in ``RAY_ADDRESS``, else the one on this machine. ``ray:HOST:PORT`` names one, and
    ``ray://HOST:PORT`` does so through Ray's client.

    Raises:
        UsageError: the text is malformed.
    """
    if text == RAY:
        return os.environ.get(ADDRESS_VARIABLE) or AUTO
    address = text if text.startswith(CLIENT) else text.removeprefix(f"{RAY}:")
    if not text.startswith(f"{RAY}:") or _host_and_port(address) is None:
        raise UsageError(
            f"--executor {text}: neither 'local', nor 'ray' (the cluster that RAY_ADDRESS names, or that runs here), nor an "
            "address of one: ray:HOST:6379, or ray://HOST:10001 for Ray's client.",
            code="executor_invalid",
        )
    return address


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) < 1 << 16 else None


def max_devices(gpus: GpuChoice | None) -> int | None:
    """Return the maximum number of devices of a cluster that are requested; None for all.

    Raises:
        UsageError: the request names GPUs by index, which exists only on a host.
    """
    if gpus is None:
        return None
    if gpus.indices is not None:
        raise UsageError(
            f"{gpus.text}: the GPUs of a cluster have no indices. Name a number of them, or 'all'.",
            code="gpu_indices_refused",
        )
    return gpus.count


def require_ray() -> None:
    """Raise :class:`MissingPackageError` if Ray is not installed."""
    found = importlib.util.find_spec(RAY)
    if found is None or found.origin is None:  # a folder of that name is not a package
        error = missing_package(RAY)
        assert error is not None
        raise error


@contextlib.contextmanager
def connected(address: str, patience_s: float | None = None) -> Iterator[None]:
    """Connect this process to the cluster as a driver while the block runs; keep an existing connection.

    Raises:
        HardwareError: no cluster answers at the address, or it refuses this driver.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    place = _host_and_port(address)
    if place is not None:
        _require_listener(address, place)
    with _kept_off_stdout():
        _connect(address, patience_s or (CLIENT_CONNECT_S if address.startswith(CLIENT) else CONNECT_S))
        try:
            yield
        finally:
            ray.shutdown()


def _require_listener(address: str, place: tuple[str, int]) -> None:
    try:
        socket.create_connection(place, timeout=REACH_S).close()
    except OSError as error:
        raise HardwareError(_no_answer(address, error.strerror or str(error)), code="cluster_silent") from None


def _where(address: str) -> str:
    return "on this machine" if address == AUTO else f"at {address}"


def _no_answer(address: str, reason: str) -> str:
    return (
        f"--executor ray: no Ray cluster answers {_where(address)}: {reason}. Start one with 'ray start --head', or name one: "
        "--executor ray:HOST:6379."
    )


def _connect(address: str, patience_s: float) -> None:
    """Connect in a thread with a timeout.

    Ray itself waits for a minute, and then ends the process, if another program answers.
    """
    import ray
    from ray.exceptions import RayError

    logging.getLogger("ray").setLevel(logging.ERROR)
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
            outcome.put(None)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            outcome.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        error = outcome.get(timeout=patience_s)
    except queue.Empty:
        raise HardwareError(
            _no_answer(address, f"nothing within {patience_s:.0f} s that Ray understands"), code="cluster_silent"
        ) from None
    if error is None:
        return
    reason = " ".join(str(error).split())[:REASON_CHARACTERS].rstrip(".")
    if isinstance(error, OSError):
        raise HardwareError(_no_answer(address, reason), code="cluster_silent")
    raise HardwareError(
        f"--executor ray: the Ray cluster {_where(address)} cannot be used from here: {reason}.",
        code="cluster_unusable",
    )


@contextlib.contextmanager
def _kept_off_stdout() -> Iterator[None]:
    """Suppress Ray's messages on standard output while the block runs: our results go there.

    When a node ends, Ray prints pages of its state there. It has no switch for that, so this replaces the printing
    function, if it still exists. The pool reports losses itself.
    """
    from ray._private import worker

    printing = getattr(worker, "print_to_stdstream", None)
    if printing is None:
        yield
        return
    worker.print_to_stdstream = lambda *lines, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printing
