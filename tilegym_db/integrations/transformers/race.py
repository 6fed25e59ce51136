"""The ways of running a model that a comparison is made of, and the rounds in which they take turns.

Stock and patched always take part; compiled ways and other libraries where they are asked for. One that cannot be had, or that
fails on the way, is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_db.errors import ToolchainError, UsageError
from tilegym_db.integrations.transformers.experts_wrapper import wrapper_of
from tilegym_db.integrations.transformers.generation import Generate, Generation, dynamic_cache, prefill, static_cache
from tilegym_db.integrations.transformers.patch import Handle
from tilegym_db.integrations.transformers.peers import Peer
from tilegym_db.records.claims import CONTROL

__all__ = ["ALTERNATIVES", "ALWAYS", "WARM_UP_ROUNDS", "Entries", "Observer", "Race", "compare", "new_hits"]

WARM_UP_ROUNDS = 2
"""Not counted: kernels are chosen, loaded and compiled there, and allocators find their size."""

ALWAYS = ("stock", "patched")
ALTERNATIVES = {
    CONTROL: ("stock",),
    "stock_static_cache": ("stock", "patched"),
    "patched_static_cache": ("stock", "stock_static_cache"),
    "stock_compiled": ("stock", "patched"),
    "patched_compiled": ("stock", "stock_compiled"),
}
"""What each way in this process is compared with; a library with both that are always there."""

Observer = Callable[[int, int], None]
"""Called with (rounds done, rounds to do), warm-up included."""


class Entries:
    """The ways that take part, and why others do not."""

    def __init__(self, stock: Any, twin: Any, handle: Handle, ids: torch.Tensor, new: int, backend: str) -> None:
        """``twin`` is the patched one; see :func:`model_bench` for the others."""
        self._models = {"stock": stock, "patched": twin}
        self._handle = handle
        self._ids = ids
        self._new = new
        self._backend = backend
        self.ways: dict[str, Generate] = {}
        self.absent: dict[str, str] = {}
        self.kernels: dict[str, dict[str, int]] = {}
        """Way -> Definition -> calls by kernel in its first generation."""
        self.libraries: dict[str, str] = {}

    def add_eager(self) -> None:
        """The two that are always there, and the control."""
        for name, model in {**self._models, CONTROL: self._models["stock"]}.items():
            self.ways[name] = dynamic_cache(model, self._ids, self._new) if self._new else prefill(model, self._ids)

    def add_static_cache(self, asked: bool) -> None:
        """Both with a static cache and compiled steps, where there are steps."""
        for name, model in self._models.items() if asked else ():
            if self._new < 2:
                self.absent[f"{name}_static_cache"] = (
                    "what is compiled is decoding, and --new 0 or 1 has no step of it."
                )
                continue
            try:
                self._add_compiled(f"{name}_static_cache", static_cache(model, self._ids, self._new, self._backend))
            except UsageError as error:
                self.absent[f"{name}_static_cache"] = str(error)

    def add_compiled_prefill(self, asked: bool) -> None:
        """Both with their forward under torch.compile, where the prefill is all there is."""
        for name, model in self._models.items() if asked else ():
            if self._new:
                self.absent[f"{name}_compiled"] = (
                    "a forward that is compiled for the prompt is for the prefill alone: --new 0. For decoding: --static-cache."
                )
            else:
                self._add_compiled(f"{name}_compiled", prefill(model, self._ids, self._backend))

    def add_experts(self, asked: Collection[str]) -> None:
        """Stock with other implementations of its experts than the one that it is set to."""
        has_experts = any(wrapper_of(type(module).forward) is not None for module in self._models["stock"].modules())
        for implementation in dict.fromkeys(asked):
            if has_experts:
                self.ways[f"stock_{implementation}"] = _with_experts(
                    self._models["stock"], implementation, self.ways["stock"]
                )
            else:
                self.absent[f"stock_{implementation}"] = (
                    "the model has no experts whose implementation transformers chooses."
                )

    def add_peers(self, peers: Sequence[Peer]) -> None:
        """Those whose processes are ready to be asked."""
        for peer in peers:
            name = peer.job.peer
            try:
                self.libraries[name] = peer.ready()
                self.ways[name] = peer
            except ToolchainError as error:
                self.absent[name] = str(error)

    def _add_compiled(self, name: str, generate: Generate) -> None:
        def counted() -> Generation:
            if name in self.kernels:
                return generate()
            before = self._handle.report().hits()
            generation = generate()
            self.kernels[name] = new_hits(self._handle, before)
            return generation

        self.ways[name] = counted


def _with_experts(model: Any, implementation: str, generate: Generate) -> Generate:
    """The same call while the model's experts are set to another implementation."""

    def run() -> Generation:
        own = model.config._experts_implementation
        model.set_experts_implementation(implementation)
        try:
            return generate()
        finally:
            model.set_experts_implementation(own)

    return run


@dataclass(frozen=True)
class Race:
    """What came of it: the generations of each way that count, and why a way gave up."""

    found: dict[str, list[Generation]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def compare(ways: Mapping[str, Generate], rounds: int, observer: Observer | None = None) -> Race:
    """Generate with each way in each round and return what was counted, in :func:`balanced_orders`.

    A way other than ``stock`` and ``patched`` that fails takes no further part: a library that raises, or a compiler
    that cannot compile the model (what those raise are RuntimeErrors, as is a GPU without enough memory).
    """
    race = Race({name: [] for name in ways})
    total = WARM_UP_ROUNDS + rounds
    for index in range(total):
        orders = balanced_orders(list(race.found))
        for name in orders[index % len(orders)]:
            try:
                generation = ways[name]()
            except (ToolchainError, RuntimeError) as error:
                if name in ALWAYS:
                    raise
                race.absent[name] = f"it failed in round {index + 1}: {_first_line(error)}"
                del race.found[name]
                continue
            if index >= WARM_UP_ROUNDS:
                race.found[name].append(generation)
        if observer is not None:
            observer(index + 1, total)
    return race


def balanced_orders(names: Sequence[str]) -> list[list[str]]:
    """Orders of which all together let every way follow every other equally often (Williams, 1949).

    What ran before leaves a warm or a throttled GPU, and caches, to what comes next.
    """
    count = len(names)
    zigzag = [(number + 1) // 2 if number % 2 else (count - number // 2) % count for number in range(count)]
    rows = [[names[(place + shift) % count] for place in zigzag] for shift in range(count)]
    return rows if count % 2 == 0 else rows + [row[::-1] for row in rows]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if isinstance(error, ToolchainError) else f"{type(error).__name__}: {text}"


def new_hits(handle: Handle, before: Mapping[str, int]) -> dict[str, int]:
    """Definition -> calls by kernel since :meth:`Report.hits` was ``before``; those without any are left out."""
    new = {name: calls - before.get(name, 0) for name, calls in handle.report().hits().items()}
    return {name: calls for name, calls in sorted(new.items()) if calls}
