"""The write of a decoding step into a cache of fixed size, and the count of it, in few launches.

A layer of transformers makes five launches for the new position: the position is an ``arange`` plus the count, the count goes up,
and keys and values are copied to the position. A layer here copies to the position that its count already has. The counts of all
layers that a forward has written go up together at its end, in one launch. A verified kernel may copy both in one launch.

The code of transformers that this stands for is known by its fingerprint. A layer with other code keeps its own.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch

from tilegym_db.models.call_site import CallSite
from tilegym_db.models.next_inputs import COUNTER
from tilegym_db.models.upstream_code import fingerprint
from tilegym_db.resolver.hot_path import is_replayed

KNOWN = {
    "update": ("73bb1582edab3b84", "9066d79715840ba4"),
    "get_seq_length": ("9db8dece2e256ffc", "1572d930c7ecda76"),
}
"""Method of a layer -> the fingerprints of its code without a window and with one, in transformers 5.17 to 5.24."""


class Writes:
    """The layers that the forward of one step has written, and whose counts do not have its position yet.

    It is a context around the forward. Outside of it, each write counts at once, as in transformers.
    """

    def __init__(self, site: CallSite | None = None) -> None:
        """Begin outside of a step. ``site`` asks for a kernel that writes keys and values; None for stock code alone."""
        self.is_open = False
        self._site = site
        self._uncounted: dict[int, Any] = {}

    def __enter__(self) -> Writes:
        """Begin the forward of a step."""
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Count what the forward has written. After an exception nothing is counted: no later step uses the cache."""
        self.is_open = False
        counts = [layer.cumulative_length for layer in self._uncounted.values()]
        self._uncounted.clear()
        if counts and kind is None:
            torch._foreach_add_(counts, 1)

    def has_uncounted(self, layer: Any) -> bool:
        """Return True if a layer has one position more than its count."""
        return id(layer) in self._uncounted

    def put(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one position of keys and values behind those of a layer."""
        self.settle(layer)
        position = layer.cumulative_length.view(1)
        if not self._is_served(layer.keys, layer.values, keys, values, position):
            layer.keys.index_copy_(2, position, keys)
            layer.values.index_copy_(2, position, values)
        self._uncounted[id(layer)] = layer

    def _is_served(self, k_cache: Any, v_cache: Any, k: Any, v: Any, start: torch.Tensor) -> bool:
        """Return True if a kernel has written. Only a write that a graph repeats asks for one."""
        site = self._site
        if site is None or not is_replayed() or site.falls_back(False, k, v, k_cache, v_cache):
            return False
        return site.ask(False, k_cache, v_cache, k, v, start) is not None

    def settle(self, layer: Any) -> None:
        """Count what a layer has written, before it is written again in the same forward."""
        if self._uncounted.pop(id(layer), None) is not None:
            layer.cumulative_length.add_(1)


def is_known(layer: Any) -> bool:
    """Return True if a class of layers writes a step with code that is known here."""
    codes = [fingerprint(getattr(layer, name, None)) for name in KNOWN]
    return any(codes == list(known) for known in zip(*KNOWN.values(), strict=True))


@functools.cache
def writing(layer: Any) -> Any:
    """Return a subclass of a class of layers that writes one position in few launches, and is counted by :class:`Writes`.

    A full window, several positions, and a layer outside of a step are left to the class itself.
    """

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        writes: Writes | None = self.writes
        if writes is None or not writes.is_open or not self.is_initialized:
            return layer.update(self, keys, values, *args, **kwargs)
        tokens = getattr(self, COUNTER, None)
        if keys.shape[-2] != 1 or (tokens is not None and tokens >= self.max_cache_len):
            writes.settle(self)
            return layer.update(self, keys, values, *args, **kwargs)
        writes.put(self, keys, values)
        if tokens is not None:
            setattr(self, COUNTER, tokens + 1)
        return self.keys, self.values

    def get_seq_length(self: Any) -> Any:
        length = layer.get_seq_length(self)
        is_behind = self.writes is not None and not hasattr(self, COUNTER) and self.writes.has_uncounted(self)
        return length + 1 if is_behind else length

    members = {"update": update, "get_seq_length": get_seq_length, "writes": None, "__module__": layer.__module__}
    return type(layer.__name__, (layer,), members)
