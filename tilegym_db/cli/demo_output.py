"""What the demo says while it works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["heartbeat", "say", "step"]


def say(text: str) -> None:
    """One line of the story, on standard output at once."""
    typer.echo(text)


def step(title: str, why: str) -> None:
    """Begin a part: its name, and why it matters."""
    say(f"\n== {title}\n{why}\n")


@contextmanager
def heartbeat(what: str, every_s: float = 3.0) -> Iterator[None]:
    """Say every few seconds that something is still at work, into a pipe as well as on a terminal."""
    done, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(every_s):
            say(f"   ... {what}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
