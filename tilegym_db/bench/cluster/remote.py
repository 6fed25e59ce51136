"""The driver's end of an actor: to a pool it is a supervisor as those of this host are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any

from tilegym_db.bench.cluster.actor import TracedText
from tilegym_db.bench.cluster.checks import doubt
from tilegym_db.bench.cluster.nodes import Slot
from tilegym_db.bench.gpus.messages import Failed, Order, Ready, Traced
from tilegym_db.bench.gpus.work import WorkItem
from tilegym_db.bench.machine import Machine
from tilegym_db.errors import RecordError
from tilegym_db.records import Trace

__all__ = ["RemoteProcess"]

REASON_CHARACTERS = 400


class RemoteProcess:
    """A supervisor on a node of the cluster. A thread asks its actor for messages, checks them, and passes them on."""

    def __init__(
        self,
        slot: Slot,
        actor: Any,
        deliver: Callable[[Any, Order], Any],
        refuse: Callable[[Machine], str | None],
        is_alive: Callable[[str], bool],
    ) -> None:
        """Listen to an actor.

        Args:
            slot: the device that it is for.
            actor: Ray's handle of it.
            deliver: sends it an order.
            refuse: why a device cannot take part, when it says what it is.
            is_alive: whether a node is there, by its id.
        """
        self.device = slot.device
        self.item: WorkItem | None = None
        self.done: set[str] = set()
        self.last_message_at = time.monotonic()
        self.machine: Machine | None = None
        self.failure: str | None = None
        """Why it does nothing any more, before a pool has heard of it."""
        self.actor = actor
        self.connection, self._relayed = Pipe(duplex=False)
        self._node_id = slot.node.node_id
        self._deliver, self._refuse, self._is_alive = deliver, refuse, is_alive
        self._order: Order | None = None
        self._closing: Any = None
        threading.Thread(target=self._relay, daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Not before Ray has given it its device, which other jobs of the cluster may hold, and the supervisor has started."""
        return self.machine is not None

    def send(self, order: Order) -> None:
        """Give it its next order. Where it is gone, that comes as a message."""
        self.item, self.done, self._order = order.item, set(), order
        self.last_message_at = time.monotonic()
        self._deliver(self.actor, order)

    def receive(self) -> Any:
        """Its next message."""
        message = self.connection.recv()
        self.last_message_at = time.monotonic()
        return message

    def leave(self) -> None:
        """Let its supervisor end; does not wait for that."""
        if self._closing is None:
            self._closing = self.actor.close.remote(2.0)

    def end(self, timeout_s: float = 2.0) -> str:
        """End it, with patience where it was told to leave."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # it died, or has no device yet
            if self._closing is not None and self.is_ready:
                ray.get(self._closing, timeout=timeout_s)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor)
        self.connection.close()
        return "its actor was ended"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _relay(self) -> None:
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(OSError):  # the pool is done with it, and has closed its end
            while self.failure is None:
                try:
                    messages = ray.get(self.actor.receive.remote())
                except RayError as error:
                    messages = [
                        Failed(f"Ray lost it: {_first_words(error)}", is_device=not self._is_alive(self._node_id))
                    ]
                for message in map(self._checked, messages):
                    self._relayed.send(message)
                    if isinstance(message, Failed):
                        self.failure = message.reason
                        return
                if self.connection.closed:
                    return

    def _checked(self, message: Any) -> Any:
        """The message, or in its place a failure of the device where it cannot be believed."""
        match message:
            case Ready():
                reason = self._refuse(message.machine)
                if reason is not None:
                    return Failed(reason, is_device=True)
                self.machine = message.machine
            case TracedText(text):
                return self._checked_trace(text)
        return message

    def _checked_trace(self, text: str) -> Traced | Failed:
        assert self._order is not None
        assert self.machine is not None
        try:
            trace = Trace.from_json(text, f"a trace from {self.device.label}")
        except RecordError as error:
            return Failed(str(error), is_device=True)
        reason = doubt(trace, self._order, self.machine)
        return Traced(trace) if reason is None else Failed(f"it sent a trace that is refused: {reason}", is_device=True)


def _first_words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:", "pid:", "ip:"))]
    return " ".join(said)[:REASON_CHARACTERS]
