"""Patches one model instance, and takes the patch away again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.attention import (
    DECODE,
    PREFILL,
    REGISTRY,
    Interfaces,
    attention_function,
    sdpa_function,
)
from tilegym_db.integrations.transformers.capture import ModelInputs, captured_calls
from tilegym_db.integrations.transformers.discover import Found, discover, probed_activation
from tilegym_db.integrations.transformers.fusion import ADD_NORM, plain_forward, rewritten
from tilegym_db.integrations.transformers.gpu_time import GpuTime, profiled
from tilegym_db.integrations.transformers.operators import ALLOCATE, make_site
from tilegym_db.integrations.transformers.points import (
    add_norm_function,
    attention_forward,
    gated_mlp_forward,
    layer_forward,
    norm_forward,
    packed_mlp_forward,
    rope_function,
)
from tilegym_db.integrations.transformers.proof import Proof, prove
from tilegym_db.integrations.transformers.rebind import is_patched, shadow_function, subclass, unpatched_class
from tilegym_db.integrations.transformers.report import CallSite, Report
from tilegym_db.integrations.transformers.site import Site
from tilegym_db.integrations.transformers.variants import Variant
from tilegym_db.integrations.transformers.workloads import workload_of
from tilegym_db.records import Workload
from tilegym_db.resolver.dispatch import Dispatcher

__all__ = ["Handle", "patch", "patched"]

MODES = ("inference",)
POLICIES = ("verified",)
SHARING_KINDS = ("rope", "attention")
"""What is patched by replacing functions that the forward of an attention module calls."""

Module = torch.nn.Module


class Handle:
    """One patch on one model. Keep it to read the report and to undo the patch.

    The patch itself lives in the classes of the modules: a model that is dropped takes it along.
    """

    def __init__(self) -> None:
        """An empty patch; :func:`patch` fills it."""
        self._changed: list[tuple[Module, type[Module]]] = []
        self._forget_shadows: list[Callable[[], Any]] = []
        self._sites: list[tuple[CallSite, Dispatcher | None, Site | None]] = []
        self._proofs: dict[Site, tuple[Proof, ...]] = {}
        self._workloads: dict[str, Workload] = {}
        self._gpu_time: GpuTime | None = None

    def profile(self, call: Callable[[], Any]) -> GpuTime:
        """Where the GPU time of a call goes, and how much of it into verified kernels; reports show it from then on.

        Args:
            call: runs the patched model, for instance ``lambda: model.generate(...)``. It is run twice, the second time
                under PyTorch's profiler; not at all where there is no GPU, which the result then says.
        """
        sites = [(described.definition, site) for described, _, site in self._sites if site is not None]
        self._gpu_time = profiled(call, sites)
        return self._gpu_time

    def report(self, profile: Callable[[], Any] | None = None) -> Report:
        """Each call site: what it is, what serves it and why, how often it was called.

        Args:
            profile: a call to :meth:`profile` first.
        """
        if profile is not None:
            self.profile(profile)
        return Report(
            sites=tuple(
                described
                if dispatcher is None or site is None
                else replace(
                    described,
                    counts=dispatcher.report(),
                    training=() if site.training is None else site.training.reports(),
                    bypassed=dict(site.bypassed),
                    proofs=self._proofs.get(site, ()),
                )
                for described, dispatcher, site in self._sites
            ),
            gpu_time=self._gpu_time,
        )

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The kinds of calls that were captured to prove the patch, as Workloads tagged with their stage."""
        return tuple(self._workloads.values())

    def unpatch(self) -> None:
        """Give every module its own class back. Safe to call twice; the report stays readable.

        Raises:
            UsageError: something else changed the class of a module after the patch. Those modules run their own code but
                keep their class; all others are restored.
        """
        for _, _, site in self._sites:
            if site is not None:
                site.close()
        while self._forget_shadows:
            self._forget_shadows.pop()()
        left = [(module, ours) for module, ours in self._changed if not _restore(module, ours)]
        self._changed = left
        if left:
            names = ", ".join(sorted({type(module).__name__ for module, _ in left}))
            raise UsageError(
                f"{len(left)} modules were given another class after they were patched ({names}): a wrapper such as FSDP or a "
                "parametrization. They run their own code again; remove the wrapper and call unpatch() once more."
            )

    def _add(self, group: Sequence[tuple[Found, str]], catalog: Catalog) -> None:
        """Install what shares one forward, each part with its reason to stay stock instead."""
        parts = []
        for found, reason in group:
            site = self._describe(found, reason, catalog)
            if site is not None:
                parts.append((found, site))
        if not parts:
            return
        cls = parts[0][0].module_class
        ours = subclass(cls, self._forward(parts))
        for module in parts[0][0].modules:
            self._changed.append((module, ours))  # first, so that an interrupt in between is undone too
            module.__class__ = ours

    def _describe(self, found: Found, reason: str, catalog: Catalog) -> Site | None:
        """Enter a call site into the report; returns the way to its kernels, None where it stays stock."""
        if not reason and is_patched(found.modules[0]):
            reason = "another part of the same forward is patched"
        described = CallSite(found.kind, found.module_class.__name__, len(found.modules), found.definition, reason)
        if reason:
            self._sites.append((described, None, None))
            return None
        site, dispatcher = make_site(catalog.definition(found.definition), catalog)
        self._sites.append((described, dispatcher, site))
        return site

    def _prove(self, model: Module, inputs: ModelInputs | None) -> None:
        """Try every kernel on the model's own calls, and take those out that fail."""
        patched = [
            (site, dispatcher) for _, dispatcher, site in self._sites if site is not None and dispatcher is not None
        ]
        captured = captured_calls(model, [site for site, _ in patched], inputs)
        for (site, dispatcher), calls in zip(patched, captured, strict=True):
            allocate = ALLOCATE[dispatcher.definition.name]
            self._proofs[site] = tuple(prove(dispatcher, allocate, call) for call in calls)
            for proof in self._proofs[site]:
                if proof.kernel is not None and proof.reason:
                    dispatcher.refuse(proof.kernel, proof.reason)
                    if site.training is not None:
                        site.training.refuse(proof.kernel, proof.reason)
            for call in calls:
                workload = workload_of(dispatcher.definition, call, allocate)
                if workload is not None:
                    self._workloads.setdefault(workload.uuid, workload)

    def _forward(self, parts: Sequence[tuple[Found, Site]]) -> Callable[..., Any]:
        (found, site), *_ = parts
        stock: Any = found.module_class.forward
        if found.kind in SHARING_KINDS:
            shadow = self._shadow(stock, {**_ropes(stock, parts, training=False), **_attention(stock, parts)})
            trained = _ropes(stock, parts, training=True)
            training_shadow = self._shadow(stock, trained) if trained else None
            # What trains is whole sequences.
            told = [site for part, site in parts if part.definition != DECODE]
            return attention_forward(stock, shadow, training_shadow, told or [site])
        variant = found.variant or Variant("")
        if found.kind == "norm":
            return norm_forward(stock, site, variant.eps_attribute)
        if found.kind == "mlp":
            make = packed_mlp_forward if variant.packed else gated_mlp_forward
            return make(stock, site, probed_activation(found.modules[0]))
        if found.kind == "add_norm":
            plain = plain_forward(found.module_class)
            assert plain is not None, "found by its source"
            norm = getattr(found.modules[0], found.function)
            add_norm = add_norm_function(site, variant.eps_attribute, unpatched_class(norm))
            fused, forget = shadow_function(rewritten(plain, found.function), {ADD_NORM: add_norm})
            self._forget_shadows.append(forget)
            return layer_forward(stock, fused, site)
        raise AssertionError(f"nothing is known to patch for a {found.kind}")

    def _shadow(self, stock: Any, replacements: dict[str, Any]) -> Callable[..., Any]:
        shadowed, forget = shadow_function(stock, replacements)
        self._forget_shadows.append(forget)
        return shadowed


def _ropes(stock: Any, parts: Sequence[tuple[Found, Site]], *, training: bool) -> dict[str, Any]:
    """The rotary functions that an attention forward is to see instead of its own."""
    return {
        found.function: rope_function(stock.__globals__[found.function], site, training=training)
        for found, site in parts
        if found.kind == "rope" and (site.training is not None or not training)
    }


def _attention(stock: Any, parts: Sequence[tuple[Found, Site]]) -> dict[str, Any]:
    """The registry of attention functions that an attention forward is to see instead of its own."""
    sites = {found.definition: site for found, site in parts if found.kind == "attention"}
    if not sites:
        return {}
    sdpa = sdpa_function(stock)
    served = attention_function(sdpa, sites.get(PREFILL), sites.get(DECODE))
    return {REGISTRY: Interfaces(stock.__globals__[REGISTRY], sdpa, served, next(iter(sites.values())).bypass)}


def _restore(module: Module, ours: type[Module]) -> bool:
    """Give a module back the class it had, unless its class is not the one that the patch gave it."""
    if type(module) is ours:
        module.__class__ = ours.__mro__[1]
        return True
    return not issubclass(type(module), ours)


def patch(
    model: torch.nn.Module,
    *,
    mode: str = "inference",
    ops: Collection[str] | None = None,
    policy: str = "verified",
    dry_run: bool = False,
    verify: bool = False,
    inputs: ModelInputs | None = None,
    catalog: Catalog | None = None,
) -> Handle:
    """Let verified kernels serve the operators of one model instance wherever they are faster than its own code.

    No class, module or function of transformers changes: other models in the process are untouched. What is not recognised,
    not verified or not faster runs the model's own code; ``handle.report()`` says why.

    Args:
        model: any ``torch.nn.Module``; call sites are found by structure, at whatever depth.
        mode: ``inference``, the only one. What trains (a module in training mode, a tensor that needs a gradient) is
            served where a kernel for the backward is verified as well, and runs the model's own code elsewhere.
        ops: only these Definitions; None means all that are known.
        policy: ``verified``, the only one.
        dry_run: find and probe, but change nothing.
        verify: prove the patch on the model itself before it serves anything. The model runs a prompt and one step of decoding
            on its own code; on what each call site was given there, the kernel is compared with the stock code, both against
            fp64. A kernel that is further off than stock by more than a factor of two, that is not deterministic or that
            fails is left out, and the report says so (:attr:`CallSite.proofs`). Takes the time of that run and a little more.
        inputs: what to run for ``verify``: token ids [batch, tokens], or the arguments of the model's forward by name. By
            default random token ids.
        catalog: the records; the shipped ones and the user's overlay by default.

    Raises:
        UsageError: the model is patched already, an argument is none of its choices, or ``verify`` cannot run the model
            (it is in training mode, it has no vocabulary to draw a prompt from, or nothing is patched in a dry run).
    """
    if mode not in MODES or policy not in POLICIES:
        raise UsageError(f"mode must be one of {MODES} and policy one of {POLICIES}, not {mode!r} and {policy!r}.")
    if any(is_patched(module) for module in model.modules()):
        raise UsageError("this model, or a part of it, is patched already; call unpatch() on its handle first.")
    if verify and dry_run:
        raise UsageError("a dry run patches nothing that could be proved; leave out dry_run or verify.")
    if inputs is not None and not verify:
        raise UsageError("inputs are what verify=True runs; give both or none.")
    records = catalog or Catalog.default()
    unknown = sorted(set(ops or ()) - set(records.definitions))
    if unknown:
        raise UsageError(f"ops names {unknown[0]!r}, which is no definition. Try: tilegym-db list")
    handle = Handle()
    try:
        for group in _sharing_a_forward(discover(model, records)):
            handle._add([(found, _why_not(found, ops, dry_run)) for found in group], records)
        if verify:
            handle._prove(model, inputs)
    except BaseException:
        handle.unpatch()
        raise
    return handle


def _sharing_a_forward(found: Sequence[Found]) -> list[list[Found]]:
    """The rotary and the attention functions of one forward together, everything else alone; in order."""
    groups: dict[tuple[int, ...], list[Found]] = {}
    for index, part in enumerate(found):
        key = tuple(map(id, part.modules)) if part.kind in SHARING_KINDS else (index,)
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def _why_not(found: Found, ops: Collection[str] | None, dry_run: bool) -> str:
    """Why a group stays stock; empty where it is to be patched."""
    if found.reason:
        return found.reason
    if ops is not None and found.definition not in ops:
        return "not among the ops asked for"
    return "dry run" if dry_run else ""


@contextlib.contextmanager
def patched(model: torch.nn.Module, **options: Any) -> Iterator[Handle]:
    """:func:`patch` for the length of a ``with`` block; the model is itself again afterwards, also after an exception."""
    handle = patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()
