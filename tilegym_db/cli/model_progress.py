"""The progress bar of ``model-bench``: rounds done of rounds to do. On stderr, and only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["rounds_on_stderr"]


@contextmanager
def rounds_on_stderr() -> Iterator[Callable[[int, int], None]]:
    """An observer to be called with (rounds done, rounds to do)."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("generating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
