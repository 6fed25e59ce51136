"""One patch on one model: the installed call sites, the report of their calls, and the removal."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError, check_kind
from tilegym_db.models.call_site import IN_TRAINING, CallSite, change_class, is_patched, shadow_function, subclass
from tilegym_db.models.capture import CapturedCall, ModelInputs, captured_calls, workload_of
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.forward_graphs import ForwardGraphs
from tilegym_db.models.found import (
    LIBRARY,
    FunctionOverrides,
    MemberOverrides,
    ModuleGroup,
    Newcomers,
    OwnCode,
    PartCall,
    Undescribed,
)
from tilegym_db.models.gpu_time import GpuTime, cpu_share, profiled
from tilegym_db.models.operators import make_site
from tilegym_db.models.parts import part
from tilegym_db.models.products import LINEAR, Products
from tilegym_db.models.proof import Proof, QuantisationReport, prove
from tilegym_db.models.report import CallSiteReport, PatchReport, why_fit
from tilegym_db.models.rewrite import rewritten_by
from tilegym_db.models.upstream_code import decorated_alike, undecorated
from tilegym_db.published.table import LockedKernel, write_lock_file
from tilegym_db.records import Workload
from tilegym_db.resolver import device
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import Allocate, allocate_of, replayed

PATIENCE = 16
"""Calls per module that ask for a kernel and get none before the call site leaves the model, that is, forwards of the model."""
LONGER = 256
"""Forwards after which a forward leaves the model if a site of it has left and nothing ever asked the others."""
NOTHING_PROVED = "verification proved nothing: the model made no call that asks for a kernel; the rows above say why."
SHARED = "another part of the same forward is patched"
IN_GRAPHS = "a library call in eager code; in graphs of generate, the rows of products say what computes it"

Module = torch.nn.Module


@dataclass(eq=False)
class _Installed:
    """Modules that have another class now, and the call sites that share it.

    It holds weak references only. A copied function finds its call site through ``sys.modules``, and must not keep alive the
    class of a model that was dropped.
    """

    ours: weakref.ref[type[Module]]
    modules: list[weakref.ref[Module]]
    sites: list[CallSite]


class Handle:
    """One patch on one model. Keep it to read the report and to undo the patch.

    The patch itself lives in the classes of the modules: it goes away with the model.
    """

    def __init__(self, note: str = "") -> None:
        """Create an empty patch, with a note for its report; :func:`~tilegym_db.models.patch.patch` fills it."""
        self._changed: list[tuple[Module, type[Module]]] = []
        self._sites: list[tuple[CallSiteReport, CallSite | None]] = []
        self._given_up: dict[CallSite, str] = {}
        self._proofs: dict[CallSite, tuple[Proof, ...]] = {}
        self._workloads: dict[str, Workload] = {}
        self._gpu_time: GpuTime | None = None
        self._quantised: QuantisationReport | None = None
        self._note = note
        self.required: frozenset[str] = frozenset()
        """What is required of the bits of its kernels."""
        self.generates = False
        """The model may generate: sites that no call has asked may be those of its steps."""
        self.undescribed: tuple[Undescribed, ...] = ()
        self.newcomers: Newcomers | None = None
        self._undo: Callable[[], None] | None = None
        self._decoding: Decoding | None = None
        self._forwards: ForwardGraphs | None = None
        self._products: Products | None = None
        self._writes: CallSite | None = None

    def __repr__(self) -> str:
        """Return what was patched; ``report()`` has the calls."""
        return f"<Handle: {len(self._changed)} modules patched, {len(self.sites)} call sites that kernels may serve>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def run_in_graphs(self, model: Module) -> None:
        """Run forwards that the caller makes in CUDA graphs, if the model is one of transformers and on one GPU."""
        if ForwardGraphs.fits(model):
            self._forwards = ForwardGraphs(model, replayed=self._replays)
            self._forwards.install()
            self._changed.append((model, self._forwards.ours))

    @contextlib.contextmanager
    def as_in_graphs(self) -> Iterator[None]:
        """Run forwards that the caller makes without graphs, but with the kernels that a graph repeats, so that calls count."""
        forwards = self._forwards
        with contextlib.ExitStack() as stack:
            if forwards is not None:
                before, forwards.is_left_out = forwards.is_left_out, lambda: True
                stack.callback(setattr, forwards, "is_left_out", before)
                stack.enter_context(self._replays())
            yield

    @property
    def _replays(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return replayed if self._products is None else self._products.replayed

    def decode_in_graphs(self, model: Module) -> None:
        """Run decoding steps of ``generate`` in CUDA graphs, if the model generates and is on one GPU."""
        self._decoding = decoding = Decoding.of(model, self._replays, self._writes)
        if decoding is not None and decoding.ours is not None:
            self._changed.append((model, decoding.ours))
            if self._forwards is not None:
                self._forwards.is_left_out = lambda: bool(decoding.generations)

    def add_products(self, products: Products) -> None:
        """Add the products of linear layers, which ask for kernels only inside the graphs of ``generate``."""
        self._products = products
        self._sites += products.rows
        if products.sites:
            self.undescribed = tuple(
                one._replace(reason=IN_GRAPHS) if one.reason == LIBRARY and one.module_class == LINEAR else one
                for one in self.undescribed
            )

    def add_cache_writes(self, found: tuple[CallSiteReport, CallSite | None]) -> None:
        """Add the writes into a cache of fixed size, which graphs of ``generate`` make in each step."""
        self._sites.append(found)
        self._writes = found[1]

    def quantised(self, report: QuantisationReport, undo: Callable[[], None]) -> None:
        """Add a quantisation to the patch: reports include it, and :meth:`unpatch` calls ``undo`` last."""
        self._quantised, self._undo = report, undo

    def profile(self, call: Callable[[], Any]) -> GpuTime:
        """Profile a call, and return its GPU time and the share of verified kernels; later reports include it.

        Args:
            call: runs the patched model, for example ``lambda: model.generate(...)``. It runs twice, the second time under
                PyTorch's profiler. Without a GPU it does not run, and the result says so.
        """
        self._gpu_time = profiled(call, self.sites)
        return self._gpu_time

    def cpu_share(self, call: Callable[[], Any]) -> float:
        """Return the share of a call's CPU time in verified kernels. Without a GPU it stands for GPU time."""
        return cpu_share(call, [site for _, site in self.sites])

    def kernel_calls(self, kind: str) -> int:
        """Count the calls that kernels served at the sites of one kind, without sites that only come before another."""
        first = {site.before for _, site in self.sites}
        own = [one for described, one in self._sites if one is not None and described.kind == kind and one not in first]
        return sum(site.dispatcher.report().kernel_calls for site in own if site.dispatcher is not None)

    def report(self, profile: Callable[[], Any] | None = None) -> PatchReport:
        """Return for each call site: its part, its kernel or the reason for none, and its number of calls.

        Args:
            profile: a call to pass to :meth:`profile` first.
        """
        if profile is not None:
            self.profile(profile)
        sites = tuple(self._reported(*pair) for pair in self._sites)
        decoding = None if self._decoding is None else self._decoding.report()
        forwards = None if self._forwards is None else self._forwards.report()
        note = self._note or why_fit(site.reason for site in sites)
        served = dict.fromkeys(site.module_class for site in sites if site.definition and not site.reason)
        added = () if self.newcomers is None else self.newcomers.of_classes(served)
        return PatchReport(
            sites, self._gpu_time, self._quantised, note, (*added, *self.undescribed), decoding, forwards
        )

    def _reported(self, described: CallSiteReport, site: CallSite | None) -> CallSiteReport:
        if site is None or site.dispatcher is None:
            return described
        return replace(
            described,
            own_code={**described.own_code, **site.own_code},
            reason=described.reason or self._given_up.get(site, ""),
            counts=site.dispatcher.report(),
            training=() if site.training is None else site.training.reports(),
            bypassed=dict(site.bypassed),
            proofs=self._proofs.get(site, ()),
        )

    @property
    def sites(self) -> list[tuple[str, CallSite]]:
        """Name of the Definition and call site of each part that kernels may serve, in the order of the report."""
        return [(described.definition, site) for described, site in self._sites if site is not None]

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The kinds of calls that were captured to verify the patch, as Workloads tagged with their stage."""
        return tuple(self._workloads.values())

    def write_lock(self, path: str | Path) -> Path:
        """Write the kernels that have served calls so far as a lock, for ``patch(model, lock=path)`` in a deployment.

        Run the model on typical calls first. The file names each kernel with the digests of its operator and source, its config
        and its GPU, and what was required of their bits. An existing file is replaced.

        Raises:
            UsageError: no kernel has served a call.
            StoreError: the file cannot be written.
        """
        check_kind(path, (str, Path), "a lock is written to the path of a file")
        kernels = self.kernels_that_served()
        if not kernels:
            raise UsageError(
                "no kernel has served a call, so there is nothing to lock. Run the patched model first; handle.report() says "
                "why a call site has no kernel.",
                code="nothing_to_lock",
            )
        write_lock_file(Path(path), kernels, self.required)
        return Path(path)

    def kernels_that_served(self) -> set[LockedKernel]:
        """Return the kernels that have served calls so far, as a lock names them."""
        dispatchers = [site.dispatcher for _, site in self.sites if site.dispatcher is not None]
        dispatchers += [one for _, site in self.sites if site.training is not None for one in site.training.dispatchers]
        kernels: set[LockedKernel] = set()
        for dispatcher in dispatchers:
            served = {key.solution for key in dispatcher.report().keys if key.kernel_calls}
            kernels |= {
                LockedKernel.of(dispatcher.definition.name, dispatcher.definition.digest, candidate, gpu)
                for kernel, (candidate, gpu) in dispatcher.loaded.items()
                if kernel in served
            }
        return kernels

    def unpatch(self) -> None:
        """Restore the class and the weights of every module. Calling it twice is safe; the report stays readable.

        Raises:
            UsageError: other code changed the class of a module after the patch. These modules run their original code but
                keep their class; all others are restored.
        """
        for graphs in (self._decoding, self._forwards):  # the one that was installed last has its class on top
            if graphs is not None:
                graphs.remove()
        for _, site in self.sites:
            site.close()
            while site.shadows:
                site.shadows.pop()()
        left = [(module, ours) for module, ours in self._changed if not _restore(module, ours)]
        self._changed = left
        if left:
            names = ", ".join(sorted({type(module).__name__ for module, _ in left}))
            raise UsageError(
                f"{len(left)} modules got another class after they were patched ({names}), for example by a wrapper such as "
                "FSDP or a parametrization. They run their original code again; remove the wrapper and call unpatch() again.",
                code="modules_wrapped",
            )
        if self._undo is not None:
            self._undo()

    # -- installation -------------------------------------------------------------------------------------------------

    def add(self, group: Sequence[tuple[ModuleGroup, str]], catalog: Catalog, *, check: bool = False) -> None:
        """Install the parts of one forward. Each has the reason for stock code, which is empty if kernels may serve it.

        If ``check`` is true, a kernel is checked at the first call of a size that was not measured.
        """
        calls = []
        for found, reason in group:
            site = self._describe(found, reason, catalog, check)
            if site is not None:
                calls.append(PartCall(found, site))
        if not calls:
            return
        modules = calls[0].found.modules
        base = calls[0].found.module_class
        made = _forward(calls)
        members = made.members if isinstance(made, MemberOverrides) else {"forward": made}
        ours = subclass(base, members.get("forward", base.forward), members)
        installed = _Installed(
            weakref.ref(ours), [weakref.ref(module) for module in modules], [site for _, site in calls]
        )
        for _, site in calls:
            site.patience, site.give_up = PATIENCE * len(modules), self._giving_up(installed)
        for module in modules:
            self._changed.append((module, ours))  # first, so that an interrupt on the next line is undone too
            change_class(module, ours)

    def _describe(self, found: ModuleGroup, reason: str, catalog: Catalog, check: bool) -> CallSite | None:
        """Add a call site to the report; return the site, or None if it stays stock."""
        if not reason and is_patched(found.modules[0]):
            reason = SHARED
        own = _own_code(found)
        described = CallSiteReport(
            found.kind, found.module_class.__name__, len(found.modules), found.definition, reason,
            own_code={} if own is None else {own.way: 0},
        )  # fmt: skip
        if reason:
            self._sites.append((described, None))
            return None
        site = make_site(catalog.definition(found.definition), catalog, None if own is None else own.call, check=check)
        self._sites.append((described, site))
        if found.before is not None:
            site.before = make_site(found.before.definition, catalog, check=check)
            self._sites.append((replace(described, definition=found.before.definition.name, own_code={}), site.before))
        return site

    def prove(self, model: Module, inputs: ModelInputs | None) -> None:
        """Try every kernel on the model's own calls, and remove those that fail."""
        patched = [(site, site.dispatcher) for _, site in self.sites if site.dispatcher is not None]
        waited = [site.patience for site, _ in patched]
        with contextlib.nullcontext() if self._products is None else self._products.replayed():
            captured = captured_calls(model, [site for site, _ in patched], inputs)
        for (site, dispatcher), calls, patience in zip(patched, captured, waited, strict=True):
            site.patience = patience
            self._prove_site(site, dispatcher, calls)
        for site in () if self._products is None else self._products.sites.values():
            site.bypassed.clear()
        if not any(captured):
            self._note = NOTHING_PROVED

    def _prove_site(self, site: CallSite, dispatcher: Dispatcher, calls: Sequence[CapturedCall]) -> None:
        """Try the kernels of one site on its calls, refuse those that fail, and keep the calls as Workloads."""
        allocate = allocate_of(dispatcher.definition)
        self._proofs[site] = tuple(proof for call in calls for proof in self._proofs_of(dispatcher, allocate, call))
        for proof in self._proofs[site]:
            if proof.kernel is not None and proof.reason:
                dispatcher.refuse(proof.kernel, proof.reason)
                if site.training is not None:
                    site.training.refuse(proof.kernel, proof.reason)
        for call in calls:
            workload = workload_of(dispatcher.definition, call, allocate)
            if workload is not None:
                self._workloads.setdefault(workload.uuid, workload)

    def _proofs_of(self, dispatcher: Dispatcher, allocate: Allocate, call: CapturedCall) -> list[Proof]:
        """Try the kernel of an eager call, and also the kernel that a replay of the call would have, if it is another one."""
        proofs = [prove(dispatcher, allocate, call)]
        if self._products is not None:
            with replayed():
                other = prove(dispatcher, allocate, call)
            if other.kernel not in (None, proofs[0].kernel):
                proofs.append(other)
        return proofs

    # -- removal of sites that nothing serves -------------------------------------------------------------------------

    def leave(self, never_served: Callable[[CallSiteReport], str]) -> None:
        """Remove the call sites that nothing will ever serve: those that ``never_served`` gives a reason for."""
        for described, site in self._sites:
            reason = "" if site is None else never_served(described)
            if site is not None and reason and site.give_up is not None:
                self._given_up[site] = reason
                site.close(reason)
                site.patience = site.give_up(site)

    def _giving_up(self, installed: _Installed) -> Callable[[CallSite], int]:
        """Return what a call site does after too many calls without a kernel: close, and remove the forward after the last.

        Sites that nothing asked, such as those of steps and masks in a vision tower, leave long after the one beside them. In a
        model that generates they stay.
        The forward stays while compiled code may depend on the class of a module, and while a CUDA graph is being captured.
        """
        handle = weakref.ref(self)

        def give_up(site: CallSite) -> int:
            owner, reasons = handle(), dict[CallSite, str]()
            if site.is_open:
                reasons = why_given_up(site)
                if not reasons:
                    return 0
            elif site.patience == 0 and owner is not None and not owner.generates:
                # It left long ago. While a model is patched, patience is not over.
                reasons = {one: NEVER_ASKED for one in installed.sites if is_never_asked(one)}
            if reasons and (has_compiled_code() or device.is_capturing()):
                return len(installed.modules)
            for one in {site, *reasons} & {*installed.sites}:
                one.close(reasons.get(one, site.closed))
            if owner is not None:
                owner._given_up.update(reasons)
            if any(one.is_open for one in installed.sites):
                return LONGER * len(installed.modules)
            _remove(installed, owner)
            return 0

        return give_up


def _own_code(found: ModuleGroup) -> OwnCode | None:
    """Return what a part says of the model's own code; None for parts whose code has one execution mode, as most do."""
    ask = getattr(part(found.kind), "own_code", None)
    answer: OwnCode | None = None if ask is None else ask(found)
    return answer


def _remove(installed: _Installed, handle: Handle | None) -> None:
    ours = installed.ours()
    for module in (reference() for reference in installed.modules):
        if module is not None and ours is not None and type(module) is ours:
            change_class(module, ours.__mro__[1])
    if handle is not None:
        # The class that decodes in graphs may stand on top of the one of the loss: that module is still to be restored.
        handle._changed = [
            (module, cls) for module, cls in handle._changed if cls is not ours or issubclass(type(module), cls)
        ]


def _restore(module: Module, ours: type[Module]) -> bool:
    """Restore the class of a module, unless other code has changed the class since the patch; return True if restored."""
    if type(module) is ours:
        change_class(module, ours.__mro__[1])
        return True
    return not issubclass(type(module), ours)


# -- the forward of parts that are patched together -------------------------------------------------------------------


def _forward(calls: Sequence[PartCall]) -> Callable[..., Any] | MemberOverrides:
    """Return the replacement for the forward of some modules, or for other members, from the parts that share it."""
    stock: Any = calls[0].found.module_class.forward
    by_kind: dict[str, list[PartCall]] = {}
    for call in calls:
        by_kind.setdefault(call.found.kind, []).append(call)
    for kind in [one for one in by_kind if getattr(part(one), "IS_INNER", False)]:
        stock = part(kind).forward(stock, by_kind.pop(kind))
    if not by_kind:
        inner: Callable[..., Any] = stock
        return inner
    made = [part(kind).forward(stock, of_kind) for kind, of_kind in by_kind.items()]
    if len(made) > 1 and isinstance(made[0], MemberOverrides):
        return _on_top(calls[0].found.module_class, made[0], list(by_kind.items())[1:])
    if not isinstance(made[0], FunctionOverrides):
        alone: Callable[..., Any] | MemberOverrides = made[0]
        return alone
    inference = {name: value for one in made for name, value in one.inference.items()}
    training = {name: value for one in made for name, value in one.training.items()}
    sites = [site for _, site in calls]
    counting = [site for one in made for site in one.counting] or sites[:1]
    rewrites = [rewrite for one in made for rewrite in one.rewrites]
    shadow = _shadowed(stock, inference, rewrites, sites[0])
    of_training = _shadowed(stock, training, [], sites[0]) if training else None
    return shared_forward(stock, shadow, of_training, counting, sites)


def _on_top(
    base: type[Module], below: MemberOverrides, later: Sequence[tuple[str, Sequence[PartCall]]]
) -> MemberOverrides:
    """Return the members of several parts of one class: each part is given a class with the members of those before it."""
    members = dict(below.members)
    for kind, calls in later:
        between: Any = type(base.__name__, (base,), dict(members))
        on_it = [PartCall(replace(found, module_class=between), site) for found, site in calls]
        members.update(part(kind).forward(between.forward, on_it).members)
    return MemberOverrides(members)


def _shadowed(
    stock: Any, replacements: dict[str, Any], rewrites: Sequence[Callable[..., None]], owner: CallSite
) -> Callable[..., Any]:
    shadowed, forget = shadow_function(rewritten_by(undecorated(stock), rewrites), replacements)
    owner.shadows.append(forget)
    return decorated_alike(stock, shadowed)


# ---- giving up ------------------------------------------------------------------------------------
# A call site leaves a model after many calls without a kernel: the reasons, and the moments when it may.

NEVER_MATCHED = "no kernel could serve any of its first {} calls; it runs the model's own code"
NEVER_ASKED = "no call asked it while the operator beside it left the model; the model's own code runs"
NEVER_FOLLOWED = "the operator after it served none of its first {} calls; the model's own code runs"


def why_given_up(site: CallSite) -> dict[CallSite, str]:
    """Return the reason for a site whose patience is over, and for the one before it; empty if a kernel has served a call.

    A site with another before it is asked only if that one was served, so it may have had fewer calls.
    """
    counts = [] if site.dispatcher is None else [site.dispatcher.report()]
    counts += () if site.training is None else site.training.reports()
    if any(one.kernel_calls for one in counts):
        return {}
    calls = sum(one.calls for one in counts[:1])
    if site.before is None or site.before.dispatcher is None:
        return {site: NEVER_MATCHED.format(calls)}
    before = site.before.dispatcher.report()
    waited = max(calls, before.calls)
    reason = NEVER_FOLLOWED if before.kernel_calls else NEVER_MATCHED
    return {site: NEVER_MATCHED.format(waited), site.before: reason.format(waited)}


def is_never_asked(site: CallSite) -> bool:
    """Return True if no call has come to an open site, whether a kernel might serve it or not."""
    counts = [] if site.dispatcher is None else [site.dispatcher.report()]
    counts += () if site.training is None else site.training.reports()
    return site.is_open and not site.bypassed and not any(one.calls for one in counts)


def has_compiled_code() -> bool:
    """Return True if this process holds code from torch.compile. Its guards look at classes, so a change recompiles it."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    made = getattr(frames, "output_codes", None)
    return frames is not None and bool(getattr(made, "seen", True))


# ---- shared forward -------------------------------------------------------------------------------
# A forward whose parts are functions that it calls. The patch runs the same code with some of these functions replaced.

_is_compiling = torch.compiler.is_compiling


def shared_forward(
    stock: Callable[..., Any],
    shadow: Callable[..., Any],
    training_shadow: Callable[..., Any] | None,
    counting: Sequence[CallSite],
    sites: Sequence[CallSite],
) -> Callable[..., Any]:
    """Return a forward that runs a copy of the code with replaced rotary or attention functions, or ``stock`` itself.

    Args:
        stock: the forward of the class.
        shadow: the copy for modules in inference.
        training_shadow: the copy for modules in training, because the functions in it cannot tell training from their
            arguments; None for stock.
        counting: the call sites that count calls which run stock code as a whole.
        sites: the call sites of all functions in the copies.
    """
    untrained = [site for site in counting if training_shadow is None or site.training is None]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_compiling, training = _is_compiling(), self.training
        is_open = sites[0].is_open or any([site.is_open for site in sites])
        if not is_open or (training and (is_compiling or training_shadow is None)):
            if not is_compiling:
                for site in counting:
                    site.bypass(IN_TRAINING if training else site.closed)
            return stock(self, *args, **kwargs)
        if training and training_shadow is not None:
            for site in untrained:
                site.bypass(IN_TRAINING)
            return training_shadow(self, *args, **kwargs)
        return shadow(self, *args, **kwargs)

    return forward
