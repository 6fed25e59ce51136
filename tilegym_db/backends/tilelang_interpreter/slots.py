"""Places for the variables and buffers of a kernel, given out while it is compiled."""

from __future__ import annotations

from typing import Any

__all__ = ["Slots"]


class Slots:
    """Numbers of variables and of buffers: a running kernel keeps their values in lists."""

    def __init__(self) -> None:
        """None yet."""
        self._variables: dict[Any, int] = {}
        self._buffers: dict[Any, int] = {}

    def variable(self, variable: Any) -> int:
        """The number of a variable, a new one where it has none."""
        return self._variables.setdefault(variable, len(self._variables))

    def buffer(self, buffer: Any) -> int:
        """The number of a buffer: those of one data pointer are one."""
        return self._buffers.setdefault(buffer.data, len(self._buffers))

    @property
    def variables(self) -> int:
        """How many variables there are."""
        return len(self._variables)

    @property
    def buffers(self) -> int:
        """How many buffers there are."""
        return len(self._buffers)
