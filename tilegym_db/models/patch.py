"""Patch one model instance, and undo the patch."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilegym_db.backends.toolchains import check_libraries
from tilegym_db.catalog import Catalog, writers
from tilegym_db.errors import RecordError, ToolchainError, UsageError, check_kind, did_you_mean
from tilegym_db.models import parts
from tilegym_db.models.call_site import is_patched
from tilegym_db.models.capture import ModelInputs, new_workloads, random_inputs
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.forward_graphs import ForwardGraphs
from tilegym_db.models.found import (
    NO_DEFINITION,
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    Newcomers,
    Part,
    undescribed,
)
from tilegym_db.models.handle import Handle
from tilegym_db.models.parts import PARTS
from tilegym_db.models.probe import device_of, matching_definitions
from tilegym_db.models.products import Operators, Products
from tilegym_db.models.quantise import quantise_and_patch
from tilegym_db.models.random_model import build_model, check_dtype, check_run_fits, load_config
from tilegym_db.models.report import PatchReport
from tilegym_db.models.write_site import PROVED_EAGERLY, write_site
from tilegym_db.paths import DISABLED, home, is_disabled
from tilegym_db.published.entries import Candidate, why_not_as_required
from tilegym_db.published.table import LockedKernel, ServingLock, table_for, why_no_table
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Launch
from tilegym_db.resolver.device import device_gpu
from tilegym_db.resolver.resolve import requirements, unavailable_languages, why_never_served

CHECK_FIRST = "first"
"""The value of ``check`` that has kernels checked at first calls."""


@dataclass(frozen=True)
class PatchOptions:
    """The choices of a patch, as :func:`patch` describes them."""

    ops: Collection[str] | None = None
    dry_run: bool = False
    verify: bool = False
    inputs: ModelInputs | None = None
    quantise: str | None = None
    catalog: Catalog | None = None
    trust: bool = False
    graphs: bool = True
    graph_forwards: bool | None = None
    check: str | None = None
    lock: str | Path | None = None
    skip_logits: bool = False
    require: str | Collection[str] = ()

    @property
    def has_forward_graphs(self) -> bool:
        """True if forwards of the caller run in graphs; by default they do if those of ``generate`` do."""
        return self.graphs if self.graph_forwards is None else self.graph_forwards


def patch(
    model: torch.nn.Module,
    *,
    ops: Collection[str] | None = None,
    dry_run: bool = False,
    verify: bool = False,
    inputs: ModelInputs | None = None,
    quantise: str | None = None,
    catalog: Catalog | None = None,
    trust: bool = False,
    graphs: bool = True,
    graph_forwards: bool | None = None,
    check: str | None = None,
    lock: str | Path | None = None,
    skip_logits: bool = False,
    require: str | Collection[str] = (),
) -> Handle:
    """Let verified kernels serve the operators of one model instance wherever they are faster than the model's own code.

    No class, module or function of transformers changes, so other models in the process stay as they are. Code that is not
    recognised, not verified or not faster runs as before; ``handle.report()`` gives the reason. A call site that no published
    table can serve, on the model's device and in its dtype, is not patched. A call site whose calls never get a kernel is
    removed again. If the environment variable ``TILEGYM_DB_DISABLE`` is 1, nothing is searched or changed.

    A second patch of the same model undoes the first one, if its handle is still there. A part of a patched model cannot be
    patched beside it.

    A call in training (a module in training mode, a tensor that needs a gradient) is served if a kernel for the backward is
    verified as well, and otherwise runs the model's own code.

    Args:
        model: any ``torch.nn.Module`` with a call site at any depth; call sites are found by structure.
        ops: the Definitions to serve; None means all.
        dry_run: find and probe, but change nothing.
        verify: verify the patch on the model itself before it serves anything. The model runs two batches of prompts on its
            own code and decodes two positions of each. On the inputs of each call site, kernel and stock code are compared
            with fp64, without gradients and in inference mode. A kernel is left out if its error is more than twice that of
            stock code, or if it is not deterministic or fails (:attr:`CallSiteReport.proofs`).
        inputs: the inputs for ``verify`` and ``quantise``: token ids [batch, tokens] or arguments by name; by default random
            ids.
        quantise: ``fp8`` turns the weights of linear layers into FP8 codes, which changes the model's numbers
            (:attr:`PatchReport.quantised`); ``fp8-reference`` does so on any device, slowly. See docs/how-to/serve-a-model.md.
        catalog: the records; by default the shipped ones and the user's overlay.
        trust: also use published traces that neither came with the package nor were published by this installation.
        graphs: run prompts and decoding steps of ``generate`` in CUDA graphs where that is understood (:class:`Decoding`).
        graph_forwards: run forwards that the caller makes without gradients, ``model(**inputs)``, in CUDA graphs too
            (:class:`ForwardGraphs`); by default as ``graphs`` says.
        check: ``first`` checks the kernel of the nearest measured size at the first call of a size that was not measured. It
            runs once on the arguments of that call, beside stock code, and serves such calls if it is right and faster. By
            default the measurement of the nearest size decides.
        lock: a file that :meth:`Handle.write_lock` wrote. Only its kernels serve, and all of them must be here as they were.
            What it requires of their bits is required again.
        skip_logits: the caller does not read the logits of training. If a kernel computes the loss from the hidden states, the
            output has None for them. Without labels and in evaluation, it has them.
        require: what must be verified of the bits of a kernel that serves. ``deterministic``: repeated calls give equal bits.
            ``batch_invariant``: in addition, those of a row or sequence do not depend on the others in its call, and one kernel
            serves every measured size of the batch. Calls without such a kernel run the model's own code, which promises nothing.

    Raises:
        UsageError: the model is no module, has no part that a Definition describes, or is patched already; an argument has an
            unknown value; ``verify`` cannot run the model (training mode, no vocabulary, a dry run); ``quantise`` is refused;
            a kernel of ``lock`` is missing, has changed or cannot run here.
        RecordError: ``lock`` is no lock.
    """
    options = PatchOptions(
        ops,
        dry_run,
        verify,
        inputs,
        quantise,
        catalog,
        trust,
        graphs,
        graph_forwards,
        check,
        lock,
        skip_logits,
        require,
    )
    _undo_earlier(model)
    handle = patch_what_fits(model, options)
    if not handle.report().sites and not is_disabled():
        raise UsageError(
            f"this {type(model).__name__} has no part that can be served ({', '.join(sorted(PARTS))}). "
            "Pass the whole model, or a module that contains such parts.",
            code="nothing_to_patch",
        )
    if isinstance(model, torch.nn.Module):
        _handles[model] = weakref.ref(handle)
    return handle


_handles: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
"""Model -> the handle of its newest :func:`patch`, as long as both are alive."""


def _undo_earlier(model: Any) -> None:
    """Undo the earlier patch of the same model, so that a cell of a notebook can run again."""
    earlier = _handles.pop(model, None) if isinstance(model, torch.nn.Module) else None
    handle = None if earlier is None else earlier()
    if handle is not None:
        handle.unpatch()


def patch_what_fits(model: torch.nn.Module, options: PatchOptions | None = None) -> Handle:
    """Patch a model as :func:`patch` does, but accept one that has nothing to patch."""
    options = options or PatchOptions()
    _check_model(model)
    if options.check not in (None, CHECK_FIRST):
        raise UsageError(
            f"check is 'first' or None, not {options.check!r}. 'first' checks a kernel at the first call of each size.",
            code="check_unknown",
        )
    if is_disabled():
        return Handle(note=f"{DISABLED}; nothing was patched")
    if options.dry_run and (options.verify or options.quantise):
        option = "verify" if options.verify else "quantise"
        raise UsageError(
            f"a dry run changes nothing, so there is nothing to verify; leave out dry_run or {option}.",
            code="options_clash",
        )
    if options.inputs is not None and not (options.verify or options.quantise):
        raise UsageError("inputs are for verify=True; give both or neither.", code="options_clash")
    check_kind(options.ops if options.ops is not None else (), Iterable, "ops are names of definitions")
    ops = (options.ops,) if isinstance(options.ops, str) else options.ops
    required = requirements(options.require)
    records = (options.catalog or current_catalog()).trusting(options.trust).requiring(required)
    unknown = sorted(set(ops or ()) - set(records.definitions))
    if unknown:
        raise UsageError(
            f"ops names {unknown[0]!r}, which is no definition. Try: tilegym-db list", code="definition_unknown"
        )
    if options.lock is not None:
        check_kind(options.lock, (str, Path), "lock is the path of a file")
        kept = ServingLock.read(Path(options.lock))
        records = records.locked(kept).requiring(required | kept.required)
        devices = _placement_of(set(model.parameters())).devices
        refuse_broken_lock(kept, records, {device_gpu(device)[0] for device in devices})
    options = replace(options, ops=ops)
    if options.quantise is not None:
        return quantise_and_patch(
            model,
            options.quantise,
            options.inputs,
            lambda final: _found_and_patched(model, records, replace(options, verify=options.verify and final)),
        )
    return _found_and_patched(model, records, options)


def _found_and_patched(model: torch.nn.Module, records: Catalog, options: PatchOptions) -> Handle:
    with _without_autocast():
        found = discover(model, records, options)
    if options.verify and not found:
        return Handle()  # nothing to verify
    return _patch(model, found, records, options)


def _patch(model: torch.nn.Module, found: Sequence[ModuleGroup], records: Catalog, options: PatchOptions) -> Handle:
    served = PublishedTables(records, "replay" if _has_replays(model, options) else "call")
    handle = Handle()
    handle.required = records.required
    handle.generates = bool(getattr(model, "can_generate", bool)())
    handle.undescribed = undescribed(model, found)
    handle.newcomers = Newcomers(model)
    try:
        for group in _sharing_a_forward(found):
            reasons = [(part, _why_not(part, options, served)) for part in group]
            with _without_autocast():
                handle.add(reasons, records, check=options.check == CHECK_FIRST)
        if served.launch == "replay":
            handle.add_products(
                Products(
                    model,
                    records,
                    lambda name: _why_no_product(name, model, records, options, served),
                    check=options.check == CHECK_FIRST,
                )
            )
            writes = write_site(
                model,
                records,
                lambda name: _why_no_write(name, model, records, options, served),
                check=options.check == CHECK_FIRST,
            )
            if writes is not None:
                handle.add_cache_writes(writes)
        if options.verify:
            # Groups that no table can serve were installed too: their calls are wanted as Workloads.
            handle.prove(model, options.inputs)
            never = {
                (part.kind, part.module_class.__name__, part.definition): served.why_never_served(part)
                for part in found
            }
            handle.leave(lambda site: never.get((site.kind, site.module_class, site.definition), ""))
        if options.has_forward_graphs and not options.dry_run:
            handle.run_in_graphs(model)
        if options.graphs and not options.dry_run:
            handle.decode_in_graphs(model)
    except BaseException:
        handle.unpatch()
        raise
    return handle


def _has_replays(model: torch.nn.Module, options: PatchOptions) -> bool:
    """Return True if graphs may replay forwards of the model."""
    return (options.graphs and Decoding.fits(model)) or (options.has_forward_graphs and ForwardGraphs.fits(model))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Run probes in the dtypes that they draw, also if the caller patches under autocast."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"patch takes a model, a torch.nn.Module, not {type(model).__name__}. "
            "Try: patch(AutoModelForCausalLM.from_pretrained(...))",
            code="model_kind",
        )
    if any(is_patched(module) for module in model.modules()):
        raise UsageError(
            "this model, or a part of it, is already patched; call unpatch() on its handle first.",
            code="model_patched_already",
        )


def _sharing_a_forward(found: Sequence[ModuleGroup]) -> list[list[ModuleGroup]]:
    """Gather the groups of the same modules, because they share one forward; in order."""
    groups: dict[tuple[int, ...], list[ModuleGroup]] = {}
    for group in found:
        groups.setdefault(tuple(map(id, group.modules)), []).append(group)
    return list(groups.values())


def _why_not(found: ModuleGroup, options: PatchOptions, served: PublishedTables) -> str:
    """Return the reason for a group to stay stock; empty if it is to be patched."""
    reason = found.reason or _why_left_out(found.definition, options, served)
    return reason or ("" if options.verify else served.why_never_served(found))


def _why_no_product(
    name: str, model: torch.nn.Module, records: Catalog, options: PatchOptions, served: PublishedTables
) -> str:
    """Return the reason for products of linear layers to stay stock; empty if they are to ask for kernels."""
    weights = {module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    reason = _why_left_out(name, options, served)
    return reason or ("" if options.verify else served.why_no_call(records.definition(name), _placement_of(weights)))


def _why_no_write(
    name: str, model: torch.nn.Module, records: Catalog, options: PatchOptions, served: PublishedTables
) -> str:
    """Return the reason for writes into a cache of fixed size to stay stock; empty if they are to ask for kernels."""
    reason = _why_left_out(name, options, served) or (PROVED_EAGERLY if options.verify else "")
    return reason or served.why_no_call(records.definition(name), _placement_of(set(model.parameters())))


def _why_left_out(name: str, options: PatchOptions, served: PublishedTables) -> str:
    """Return the reason if the options leave out a Definition; empty if they do not."""
    if options.ops is not None and name not in options.ops:
        return "not among the ops asked for"
    if served.lock is not None and name not in served.lock.definitions:
        return f"the lock {served.lock.source} has no kernel of it"
    return "dry run" if options.dry_run else ""


@contextlib.contextmanager
def patched(model: torch.nn.Module, **options: Any) -> Iterator[Handle]:
    """Patch a model for a ``with`` block as :func:`patch` does; restore it afterwards, also after an exception.

    ``options`` are the arguments of :func:`patch`.
    """
    _check_model(model)  # an earlier patch would be gone after the block
    handle = patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()


# ---- patching during construction -----------------------------------------------------------------


@contextlib.contextmanager
def patched_init(**options: Any) -> Iterator[list[Handle]]:
    """Patch every transformers model that this thread builds inside the ``with`` block, when the block ends.

    The models are built with stock code and stay patched after the block. Yields a list that holds their handles once the
    block has ended. If one model cannot be patched, all stay as they are.
    ``options`` are the arguments of :func:`patch`.

    ``PreTrainedModel.__init__`` is wrapped while any thread is inside such a block. Models of other threads do not change.
    """
    chosen = PatchOptions(**options)
    handles: list[Handle] = []
    with _constructed_models() as built:
        yield handles
    models = [model for model in (reference() for reference in built) if model is not None]
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    try:
        for model in models:
            if id(model) not in inner:
                handles.append(patch_what_fits(model, chosen))
    except BaseException:
        while handles:
            handles.pop().unpatch()
        raise


Built = list["weakref.ref[torch.nn.Module]"]


class _Watch:
    """The wrapper around ``PreTrainedModel.__init__``, installed while needed; each thread has a stack of listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., None] | None = None
        self._here = threading.local()

    @property
    def listeners(self) -> list[Built]:
        """The listeners of this thread, the innermost block last."""
        found: list[Built] = self._here.__dict__.setdefault("listeners", [])
        return found

    def begin(self) -> None:
        """Wrap the constructor if this is the first block."""
        from transformers import PreTrainedModel

        with self._lock:
            if self._users == 0:
                self._original = PreTrainedModel.__init__
                PreTrainedModel.__init__ = self._wrapper(self._original)
            self._users += 1

    def end(self) -> None:
        """Restore the constructor if this is the last block."""
        from transformers import PreTrainedModel

        with self._lock:
            self._users -= 1
            if self._users == 0 and self._original is not None:
                PreTrainedModel.__init__ = self._original

    def _wrapper(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def remember(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            if self.listeners:
                self.listeners[-1].append(weakref.ref(model))

        return remember


_watch = _Watch()


@contextlib.contextmanager
def _constructed_models() -> Iterator[Built]:
    """Yield weak references to the models that this thread constructs inside the block, including parts of other models."""
    built: Built = []
    _watch.begin()
    _watch.listeners.append(built)
    try:
        yield built
    finally:
        _watch.listeners.pop()
        _watch.end()


# ---- published tables -----------------------------------------------------------------------------
# The reason if nothing published can serve a group on the devices and in the dtypes of its parameters.

COMPUTED_IN = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""The dtypes that models compute in. A weight of another dtype is quantised, and does not show the dtype of the computation."""


class PublishedTables:
    """The entries of the published tables of this machine's devices for the Definitions of one catalog.

    ``launch`` is ``replay`` if some calls of the model will be replayed.
    """

    def __init__(self, catalog: Catalog, launch: Launch = "call") -> None:
        self._catalog = catalog
        self.launch = launch
        self._held: dict[tuple[int, ...], _Placement] = {}
        self._table = functools.cache(lambda gpu: table_for(catalog, gpu))

    @functools.cached_property
    def _products(self) -> Operators:
        return Operators.of(self._catalog)

    @property
    def lock(self) -> ServingLock | None:
        """The list of the only kernels that may serve; None if the catalog has no such lock."""
        lock: ServingLock | None = self._catalog.lock
        return lock

    def why_never_served(self, found: ModuleGroup) -> str:
        """Return the reason if no call of a group can ever be served; empty if one can."""
        if found.reason or found.match is None:
            return found.reason
        own = self._why_never_served(found, found.match.definition)
        fused = self._products.gated.get(found.definition) if self.launch == "replay" else None
        if own and fused is not None:
            own = self._why_never_served(found, self._catalog.definition(fused)) and own
        return own or ("" if found.before is None else self._why_never_served(found, found.before.definition))

    def _why_never_served(self, found: ModuleGroup, definition: Definition) -> str:
        held = self._placement_of(found)
        return self.why_no_call(definition, held._replace(dtypes=None) if _are_all_stated(found) else held)

    def why_no_call(self, definition: Definition, held: _Placement) -> str:
        """Return the reason if no call of a Definition can ever be served with weights of such dtypes and devices."""
        solutions = {files.name: files for files in self._catalog.solutions_for(definition.name)}
        unavailable = unavailable_languages(solutions.values())
        reasons = {}
        for device in held.devices:
            gpu, sm = device_gpu(device)
            reasons[gpu] = why_never_served(
                definition,
                self._table(gpu),
                solutions,
                gpu=gpu,
                sm=sm,
                dtypes=held.dtypes,
                unavailable=unavailable,
                launch=self.launch,
            )
        return "" if not all(reasons.values()) else "; ".join(dict.fromkeys(reasons.values()))

    def _placement_of(self, found: ModuleGroup) -> _Placement:
        key = tuple(map(id, found.modules))
        if key not in self._held:
            self._held[key] = _placement_of(
                {parameter for module in found.modules for parameter in module.parameters()}
            )
        return self._held[key]


class _Placement(NamedTuple):
    """The devices that some modules are on or may move to, and their dtypes; None if their weights do not show it."""

    devices: tuple[torch.device, ...]
    dtypes: frozenset[str] | None


def _are_all_stated(found: ModuleGroup) -> bool:
    """Return True if the Definition states the dtypes of all parameters, for example float32 weights with any stream dtype."""
    if found.match is None:
        return False
    definition = found.match.definition
    stated = {
        found.match.attribute(name)
        for name in definition.tensor_inputs
        if definition.inputs[name].dtype not in definition.dtypes
    }
    return all(name in stated for module in found.modules for name, _ in module.named_parameters())


def _placement_of(parameters: Collection[torch.Tensor]) -> _Placement:
    # Offloaded weights are on the meta device between calls.
    devices = {parameter.device for parameter in parameters if not parameter.is_meta} or {torch.device("cpu")}
    if not any(device.type == "cuda" for device in devices) and torch.cuda.is_available():
        devices.add(torch.device("cuda", torch.cuda.current_device()))  # many models are patched on the CPU, then moved
    dtypes = {parameter.dtype for parameter in parameters}
    is_known = bool(dtypes) and dtypes <= COMPUTED_IN
    dtypes |= {torch.get_autocast_dtype(device.type) for device in devices if torch.is_autocast_enabled(device.type)}
    names = frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return _Placement(tuple(sorted(devices, key=str)), names if is_known else None)


# ---- discovery ------------------------------------------------------------------------------------
# The call sites of a model that a Definition describes. Discovery changes nothing.
#
# A module becomes a candidate by what it holds and what its code calls. The fingerprint of that code selects the variant, and
# a probe confirms it. There is no list of models or of operators. The ``serving`` of a Definition states the code that it
# computes. The module of a part in :mod:`.parts` finds and probes it.

NOT_IN_MEMORY = "its weights are not in memory"


def discover(model: torch.nn.Module, catalog: Catalog, options: PatchOptions | None = None) -> list[ModuleGroup]:
    """Return every group of modules that looks like a part that can be served, in the order of the model.

    Parts that consist of other parts come last. A part that changes what a caller sees is searched only if its option is
    given in ``options``.
    """
    known, options = KnownCode(catalog), options or PatchOptions()
    _warn_of_unknown_parts(known)
    place = {id(module): index for index, module in enumerate(model.modules())}
    found: list[ModuleGroup] = []
    for name in parts.PARTS:
        module: Part = parts.part(name)
        option = getattr(module, "OPTION", "")
        if option and not getattr(options, option):
            continue
        found += [_judge(group, module, known) for group in module.find(model, known, found)]
    return sorted(found, key=lambda group: (group.norm is not None, place[id(group.modules[0])]))


def _warn_of_unknown_parts(known: KnownCode) -> None:
    for name in known.parts:
        if name not in parts.PARTS:
            names = [definition.name for definition in known.definitions(name)]
            warnings.warn(
                f"tilegym-db: {', '.join(names)} cannot be served: serving.part is '{name}', and the parts are "
                f"{', '.join(sorted(parts.PARTS))}.{did_you_mean(name, parts.PARTS)}",
                RuntimeWarning,
                stacklevel=4,
            )


def _judge(found: ModuleGroup, module: Part, known: KnownCode) -> ModuleGroup:
    """Return the group with the Definition that it computes, or with the reason to stay stock."""
    if found.reason:
        return found
    candidates = module.candidates(found, known)
    if isinstance(candidates, str):
        return replace(found, reason=candidates)
    if not candidates.matches:
        return replace(found, reason=NO_DEFINITION)
    confirmed = {_confirm(found, module, sample, candidates, known.catalog) for sample in found.samples}
    refusals = sorted(reason for _, reason in confirmed if reason)
    names = sorted(name for name, _ in confirmed if name)
    name = names[0] if names else candidates.matches[0].definition.name
    reason = refusals[0] if refusals else ""
    if len(names) > 1:
        reason = f"its modules compute different definitions: {', '.join(names)}"
    match = next(match for match in candidates.matches if match.definition.name == name)
    return replace(found, definition=name, match=match, reason=reason)


def _confirm(
    found: ModuleGroup, module: Part, sample: torch.nn.Module, candidates: MatchCandidates, catalog: Catalog
) -> tuple[str, str]:
    """Return (Definition, reason); one of them is empty."""
    if device_of(sample).type == "meta":
        return "", NOT_IN_MEMORY
    names = [match.definition.name for match in candidates.matches]
    alternatives = {definition.name: definition for definition in candidates.alternatives}
    matched: set[str] = set()
    for match in _one_per_code(candidates.matches):
        probed = module.probe(found, sample, match)
        if isinstance(probed, str):
            return "", probed
        asked = {match.definition.name: match.definition for match in candidates.matches} | alternatives
        matched.update(matching_definitions(probed, asked.values(), catalog, getattr(module, "AGREES", None)))
    if len(matched) == 1 and matched <= set(names):
        return next(iter(matched)), ""
    expected = " or ".join(names)
    if not matched:
        return "", f"the results of its probe are not the bits of {expected}"
    return "", f"the results of its probe are the bits of {' and '.join(sorted(matched))}, not of {expected} alone"


def _one_per_code(matches: Sequence[DefinitionMatch]) -> list[DefinitionMatch]:
    """Return one match per layout of inputs in a module, because one probe decides between matches of the same layout."""
    distinct: dict[tuple[tuple[str, ...], str], DefinitionMatch] = {}
    for match in matches:
        distinct.setdefault((tuple(match.definition.inputs), str(match.code.attributes)), match)
    return list(distinct.values())


# ---- current catalog ------------------------------------------------------------------------------
# The default catalog of this process, read again only if one of its files changed.
#
# Each patch uses the same records. Sizes and times of the files and of their folders show whether they changed; reading these
# takes a hundredth of the time of reading the records.

WATCHED = ("definitions", "solutions")
"""The folders of a root with the records that a call site uses."""

State = dict[str, tuple[int, int]]
"""Path -> (time of the last change in ns, size), for every folder and file below the watched folders."""


class _KeptCatalog(NamedTuple):
    catalog: Catalog
    state: State


_kept: list[_KeptCatalog] = []
_looking = threading.Lock()


def current_catalog() -> Catalog:
    """Return the shipped catalog with the user's overlay, like :meth:`Catalog.default`; the same object until a file changes."""
    catalog = Catalog.default()
    with _looking:
        if _kept and _kept[0].catalog.roots == catalog.roots and not _has_changed(catalog.roots, _kept[0].state):
            return _kept[0].catalog
        _kept[:] = [_KeptCatalog(catalog, _state_of(catalog.roots))]
    return catalog


def _has_changed(roots: tuple[Path, ...], state: State) -> bool:
    tops = {str(root / name) for root in roots for name in WATCHED if (root / name).is_dir()}
    if not tops <= state.keys():
        return True
    try:
        return any(_mark(os.stat(path)) != mark for path, mark in state.items())
    except OSError:  # removed, or no longer readable
        return True


def _state_of(roots: tuple[Path, ...]) -> State:
    state: State = {}
    for root in roots:
        for name in WATCHED:
            for folder, _, files in os.walk(root / name):
                if folder.endswith("__pycache__"):
                    continue
                for path in (folder, *(os.path.join(folder, file) for file in files)):
                    state[path] = _mark(os.stat(path))
    return state


def _mark(found: os.stat_result) -> tuple[int, int]:
    return found.st_mtime_ns, found.st_size


# ---- a lock of served kernels ---------------------------------------------------------------------
# Refuses a lock of served kernels that cannot be kept on this machine.

MAX_SHOWN = 3


def refuse_broken_lock(lock: ServingLock, catalog: Catalog, gpus: Collection[str]) -> None:
    """Raise :class:`UsageError` unless every kernel of a lock is here as it was, and runs on one of some GPUs."""
    broken = [
        f"{kernel} for {kernel.definition}: {why}" for kernel in lock.kernels if (why := _why(kernel, catalog, gpus))
    ]
    if broken:
        more = f"; and {len(broken) - MAX_SHOWN} more" if len(broken) > MAX_SHOWN else ""
        raise UsageError(
            f"the lock {lock.source} cannot be kept: {'; '.join(broken[:MAX_SHOWN])}{more}. Restore what changed, or patch "
            "without the lock, run the model and write the lock again: handle.write_lock(path)",
            code="serving_lock_broken",
        )


def _why(kernel: LockedKernel, catalog: Catalog, gpus: Collection[str]) -> str:
    """Return why a kernel cannot serve as it did; empty if it can."""
    if kernel.gpu not in gpus:
        return f"it was locked on {kernel.gpu}, and the model is on {', '.join(sorted(gpus)) or 'no device'}"
    if kernel.definition not in catalog.definition_paths:
        return "the catalog has no such definition"
    if kernel.solution not in catalog.solution_paths:
        return "the catalog has no such solution"
    try:
        definition, files = catalog.definition(kernel.definition), catalog.solution(kernel.solution)
    except RecordError as error:
        return str(error)
    if definition.digest != kernel.definition_digest:
        return "the meaning of the definition has changed"
    if files.digest != kernel.solution_digest:
        return "the source has changed"
    unavailable = unavailable_languages([files])
    if unavailable:
        return next(iter(unavailable.values()))
    table = table_for(catalog, kernel.gpu)
    if table is None:
        return why_no_table(kernel.gpu)
    measured = list(kernel.candidates_in(table))
    if not measured:
        return f"no verified measurement of it is published for {kernel.gpu}"
    reasons = [
        _library_changed(one, files.record.spec.dependencies)
        or getattr(why_not_as_required(one, files, catalog.required, definition.batch_axis), "reason", "")
        for one in measured
    ]
    return reasons[0] if all(reasons) else ""


def _library_changed(candidate: Candidate, dependencies: tuple[str, ...]) -> str:
    """Return the reason if a declared library is another than in a measurement; else an empty text."""
    try:
        check_libraries(dependencies, candidate.libs, candidate.solution)
    except ToolchainError as error:
        return str(error)
    return ""


# ---- verification of a whole model ----------------------------------------------------------------
# Verify a patch on a model with random weights, and keep its calls as Workloads.


@dataclass(frozen=True)
class VerifiedModel:
    """The report with its proofs, and the kinds of calls that the model made."""

    report: PatchReport
    workloads: tuple[Workload, ...]


def verify_model(
    path: Path, *, device: str, dtype: str, batch: int, prompt: int, layers: int | None = None
) -> VerifiedModel:
    """Build a model from its config, patch it with ``verify=True``, and undo the patch.

    Args:
        path: config file, or folder with a ``config.json``.
        prompt: random tokens per sequence; two steps of decoding follow.
        layers: keep only this many of the first layers.
    """
    check_dtype(dtype)
    if batch < 1 or prompt < 1:
        raise UsageError(f"batch and prompt must be at least 1, not {batch} and {prompt}.", code="counts_invalid")
    config = load_config(path, layers)
    check_run_fits(config, device, dtype, batch, prompt)
    model = build_model(config, device, dtype)
    with patched(model, verify=True, inputs=random_inputs(model, batch, prompt)) as handle:
        return VerifiedModel(handle.report(), handle.workloads)


def keep_workloads(workloads: tuple[Workload, ...], model: str) -> list[tuple[Path, Workload]]:
    """Append the Workloads that no catalog has to the user's own, tagged with the model; return them with their files.

    They go into the user's catalog even if the checkout is writable, because calls of one model are no shipped records.
    """
    catalog = Catalog.default()
    return writers.add_workloads(
        catalog, new_workloads(workloads, catalog, [f"model:{model}"]), root=home() / "catalog"
    )


def model_tag(path: Path) -> str:
    """Return the name of a config: its folder's name, the file's without the ending, or that of an id, in lower case."""
    if not path.exists():  # the id of a model, or a file that is not read
        return (path.stem if path.suffix == ".json" else path.name).lower()
    named = path.resolve().parent if path.name == "config.json" else path.resolve()
    return (named.name if named.is_dir() else named.stem).lower()
