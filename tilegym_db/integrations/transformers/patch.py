"""Patches one model instance, and takes the patch away again."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FunctionType
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.discover import ROPE_FUNCTION, Found, discover
from tilegym_db.integrations.transformers.points import mlp_forward, norm_forward, rope_function
from tilegym_db.integrations.transformers.rebind import forget_shadow, shadow_function, subclass
from tilegym_db.integrations.transformers.report import CallSite, Report
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.resolve import call_site

__all__ = ["Handle", "patch", "patched", "patched_init"]

MODES = ("inference",)
POLICIES = ("verified",)

# Which model object carries which patch: a second patch of the same object would wrap the first.
_patched: weakref.WeakKeyDictionary[torch.nn.Module, Handle] = weakref.WeakKeyDictionary()


class Handle:
    """One patch on one model. Keep it to read the report and to undo the patch."""

    def __init__(self, model: torch.nn.Module) -> None:
        """An empty patch; :func:`patch` fills it."""
        self.model = model
        self._changed: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []
        self._shadows: list[FunctionType] = []
        self._sites: list[tuple[Found, Dispatcher | None, str]] = []

    def report(self) -> Report:
        """Each call site: what it is, what serves it and why, how often it was called."""
        return Report(
            tuple(
                CallSite(
                    found.kind,
                    found.module_class.__name__,
                    len(found.modules),
                    found.definition,
                    reason,
                    None if dispatcher is None else dispatcher.report(),
                )
                for found, dispatcher, reason in self._sites
            )
        )

    def unpatch(self) -> None:
        """Give every module its own class back. Safe to call twice; the report stays readable."""
        while self._changed:
            module, original = self._changed.pop()
            module.__class__ = original
        while self._shadows:
            forget_shadow(self._shadows.pop())
        if _patched.get(self.model) is self:
            del _patched[self.model]

    def _install(self, found: Found, dispatcher: Dispatcher) -> None:
        base = found.module_class
        changed = subclass(base, self._forward(found, dispatcher))
        for module in found.modules:
            module.__class__ = changed
            self._changed.append((module, base))

    def _forward(self, found: Found, dispatcher: Dispatcher) -> Callable[..., Any]:
        stock: Any = found.module_class.forward
        if found.kind == "norm":
            return norm_forward(stock, dispatcher.attempt, found.eps_attribute)
        if found.kind == "mlp":
            return mlp_forward(stock, dispatcher.attempt)
        rotate = stock.__globals__[ROPE_FUNCTION]
        shadow = shadow_function(stock, {ROPE_FUNCTION: rope_function(rotate, dispatcher.attempt)})
        self._shadows.append(shadow)
        return shadow


def patch(
    model: torch.nn.Module,
    *,
    mode: str = "inference",
    ops: Collection[str] | None = None,
    policy: str = "verified",
    dry_run: bool = False,
    catalog: Catalog | None = None,
) -> Handle:
    """Let verified kernels serve the operators of one model instance wherever they are faster than its own code.

    No class, module or function of transformers changes: other models in the process are untouched. What is not recognised,
    not verified or not faster runs the model's own code; ``handle.report()`` says why.

    Args:
        model: any ``torch.nn.Module``; call sites are found by structure, at whatever depth.
        mode: ``inference``. With grad enabled on the tensors concerned, the model's own code runs.
        ops: only these Definitions; None means all that are known.
        policy: ``verified``, the only one.
        dry_run: find and probe, but change nothing.
        catalog: the records; the shipped ones and the user's overlay by default.

    Raises:
        UsageError: the model is patched already, or an argument is none of its choices.
    """
    if mode not in MODES or policy not in POLICIES:
        raise UsageError(f"mode must be one of {MODES} and policy one of {POLICIES}, not {mode!r} and {policy!r}.")
    if model in _patched:
        raise UsageError("this model is patched already; call unpatch() on its handle first.")
    records = catalog or Catalog.default()
    unknown = sorted(set(ops or ()) - set(records.definitions))
    if unknown:
        raise UsageError(f"ops names {unknown[0]!r}, which is no definition. Try: tilegym-db list")
    handle = Handle(model)
    try:
        for found in discover(model, records):
            reason = found.reason
            if not reason and ops is not None and found.definition not in ops:
                reason = "not among the ops asked for"
            if not reason and dry_run:
                reason = "dry run"
            dispatcher = None if reason else call_site(records.definition(found.definition), records)
            handle._sites.append((found, dispatcher, reason))
            if dispatcher is not None:
                handle._install(found, dispatcher)
    except BaseException:
        handle.unpatch()
        raise
    if not dry_run:
        _patched[model] = handle
    return handle


@contextlib.contextmanager
def patched(model: torch.nn.Module, **options: Any) -> Iterator[Handle]:
    """:func:`patch` for the length of a ``with`` block; the model is itself again afterwards, also after an exception."""
    handle = patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()


@contextlib.contextmanager
def patched_init(**options: Any) -> Iterator[list[Handle]]:
    """Patch every transformers model that is built inside the ``with`` block, once it is complete.

    The models stay patched after the block. Yields the list of their handles, filled as the block ends.
    """
    from transformers import PreTrainedModel

    built: list[torch.nn.Module] = []
    handles: list[Handle] = []
    original = PreTrainedModel.__init__

    here = threading.get_ident()

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if threading.get_ident() == here:  # a model that another thread builds meanwhile is none of ours
            built.append(self)

    PreTrainedModel.__init__ = remember  # type: ignore[method-assign]
    try:
        yield handles
    finally:
        PreTrainedModel.__init__ = original  # type: ignore[method-assign]
    inner = {id(module) for model in built for module in model.modules() if module is not model}
    handles += [patch(model, **options) for model in built if id(model) not in inner]
