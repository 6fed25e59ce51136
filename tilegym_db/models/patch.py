"""Patches one model instance, and takes the patch away again."""

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

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError, check_kind, did_you_mean
from tilegym_db.models import parts
from tilegym_db.models.call_site import is_patched
from tilegym_db.models.capture import ModelInputs
from tilegym_db.models.found import Found, KnownCode, Nominee, Part, Variants
from tilegym_db.models.handle import Handle
from tilegym_db.models.parts import PARTS
from tilegym_db.models.probe import device_of, matches
from tilegym_db.models.quantise import quantise_and_patch
from tilegym_db.published.table import load_table
from tilegym_db.records import Definition
from tilegym_db.resolver.device import device_gpu
from tilegym_db.resolver.resolve import unavailable_languages, why_never_served


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
) -> Handle:
    """Let verified kernels serve the operators of one model instance wherever they are faster than its own code.

    No class, module or function of transformers changes: other models in the process are untouched. What is not recognised,
    not verified or not faster runs the model's own code; ``handle.report()`` says why. A call site that nothing published could
    serve, on the device and in the dtype that the model has, is not touched; one whose calls ask in vain leaves the model again.

    What trains (a module in training mode, a tensor that needs a gradient) is served if a kernel for the backward is verified as
    well, and otherwise runs the model's own code.

    Args:
        model: any ``torch.nn.Module`` with a call site; they are found by structure, at whatever depth.
        ops: only these Definitions; None means all that are known.
        dry_run: find and probe, but change nothing.
        verify: prove the patch on the model itself before it serves anything. The model runs two batches of prompts and
            decodes two positions of each on its own code; on what each call site was given there, the kernel is compared with
            the stock code, both against fp64, without gradients and in inference mode. A kernel that is further off than stock
            by more than a factor of two, not deterministic or failing is left out (:attr:`CallSiteReport.proofs`).
        inputs: what ``verify`` and ``quantise`` run: token ids [batch, tokens] or arguments by name; random ids by default.
        quantise: ``fp8`` makes FP8 codes of linear layers, which changes the model's numbers
            (:attr:`PatchReport.quantised`); ``fp8-reference`` does so on any device, slowly. See docs/how-to/serve-a-model.md.
        catalog: the records; the shipped ones and the user's overlay by default.
        trust: use published traces too that neither came with the package nor were published by this installation.

    Raises:
        UsageError: the model is no module, has nothing that a Definition describes or is patched already, an argument is none of
            its choices, ``verify`` cannot run the model (training mode, no vocabulary, a dry run), or ``quantise`` is refused.
    """
    options = PatchOptions(ops, dry_run, verify, inputs, quantise, catalog, trust)
    handle = patch_what_fits(model, options)
    if not handle.report().sites:
        raise UsageError(
            f"nothing in this {type(model).__name__} is a part that can be served ({', '.join(sorted(PARTS))}). "
            "Pass the whole model, or a part of it that holds such modules.",
            code="nothing_to_patch",
        )
    return handle


def patch_what_fits(model: torch.nn.Module, options: PatchOptions | None = None) -> Handle:
    """Patch as :func:`patch` does, but accept a model that has nothing to patch."""
    options = options or PatchOptions()
    _check_model(model)
    if options.dry_run and (options.verify or options.quantise):
        option = "verify" if options.verify else "quantise"
        raise UsageError(
            f"a dry run patches nothing that could be proved; leave out dry_run or {option}.", code="options_clash"
        )
    if options.inputs is not None and not (options.verify or options.quantise):
        raise UsageError("inputs are what verify=True runs; give both or none.", code="options_clash")
    check_kind(options.ops if options.ops is not None else (), Iterable, "ops are names of definitions")
    ops = (options.ops,) if isinstance(options.ops, str) else options.ops
    records = (options.catalog or current_catalog()).trusting(options.trust)
    unknown = sorted(set(ops or ()) - set(records.definitions))
    if unknown:
        raise UsageError(
            f"ops names {unknown[0]!r}, which is no definition. Try: tilegym-db list", code="definition_unknown"
        )
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
    found = discover(model, records)
    if options.verify and not found:
        return Handle()  # nothing to prove
    return _patch(model, found, records, options)


def _patch(model: torch.nn.Module, found: Sequence[Found], records: Catalog, options: PatchOptions) -> Handle:
    served = Served(records)
    handle = Handle()
    try:
        for group in _sharing_a_forward(found):
            handle.add([(part, _why_not(part, options, served)) for part in group], records)
        if options.verify:
            # What nothing could serve was put in all the same: its calls are wanted as Workloads.
            handle.prove(model, options.inputs)
            never = {(part.kind, part.module_class.__name__, part.definition): served.why_never(part) for part in found}
            handle.leave(lambda site: never.get((site.kind, site.module_class, site.definition), ""))
    except BaseException:
        handle.unpatch()
        raise
    return handle


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"patch takes a model, a torch.nn.Module, not {type(model).__name__}. "
            "Try: patch(AutoModelForCausalLM.from_pretrained(...))",
            code="model_kind",
        )
    if any(is_patched(module) for module in model.modules()):
        raise UsageError(
            "this model, or a part of it, is patched already; call unpatch() on its handle first.",
            code="model_patched_already",
        )


def _sharing_a_forward(found: Sequence[Found]) -> list[list[Found]]:
    """What is found of the same modules together, since they have one forward; in order."""
    groups: dict[tuple[int, ...], list[Found]] = {}
    for group in found:
        groups.setdefault(tuple(map(id, group.modules)), []).append(group)
    return list(groups.values())


def _why_not(found: Found, options: PatchOptions, served: Served) -> str:
    """Return why a group stays stock; empty if it is to be patched."""
    if found.reason:
        return found.reason
    if options.ops is not None and found.definition not in options.ops:
        return "not among the ops asked for"
    if options.dry_run:
        return "dry run"
    return "" if options.verify else served.why_never(found)


@contextlib.contextmanager
def patched(model: torch.nn.Module, **options: Any) -> Iterator[Handle]:
    """Patch a model for the length of a ``with`` block, and take the patch away also after an exception.

    ``options`` are the arguments of :func:`patch`.
    """
    handle = patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()


# ---- building -------------------------------------------------------------------------------------
# Patches models as they are built.


@contextlib.contextmanager
def patched_init(**options: Any) -> Iterator[list[Handle]]:
    """Patch every transformers model that this thread builds inside the ``with`` block, as the block ends.

    The models are built stock and stay patched after the block. Yields the list of their handles, which is empty until the
    block ends. If one cannot be patched, none is. ``options`` are the arguments of :func:`patch`.

    To hear of new models, ``PreTrainedModel.__init__`` is wrapped while any thread is inside such a block. Models that other
    threads build meanwhile are built as ever.
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
    """The wrapper around ``PreTrainedModel.__init__``, there while it is needed; each thread has a stack of listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., None] | None = None
        self._here = threading.local()

    @property
    def listeners(self) -> list[Built]:
        """Of this thread, the innermost block last."""
        found: list[Built] = self._here.__dict__.setdefault("listeners", [])
        return found

    def begin(self) -> None:
        """Wrap the constructor for the first user."""
        from transformers import PreTrainedModel

        with self._lock:
            if self._users == 0:
                self._original = PreTrainedModel.__init__
                PreTrainedModel.__init__ = self._wrapper(self._original)
            self._users += 1

    def end(self) -> None:
        """Put the constructor back after the last one."""
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
    """The models that this thread constructs inside the block, parts of others included, as weak references."""
    built: Built = []
    _watch.begin()
    _watch.listeners.append(built)
    try:
        yield built
    finally:
        _watch.listeners.pop()
        _watch.end()


# ---- served here ----------------------------------------------------------------------------------
# Whether a group of modules could be served at all, on the devices and in the dtypes of its parameters.

COMPUTED_IN = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What models compute in. Weights of another dtype are quantised, and say nothing about it."""


class Served:
    """What the published tables of this machine's devices have for the Definitions of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._held: dict[tuple[int, ...], _Held] = {}

    def why_never(self, found: Found) -> str:
        """Return why no call of a group could ever be served; empty if one could."""
        if found.reason or found.nominee is None:
            return found.reason
        own = self._why_never(found, found.nominee.definition)
        return own or ("" if found.before is None else self._why_never(found, found.before.definition))

    def _why_never(self, found: Found, definition: Definition) -> str:
        solutions = {files.name: files for files in self._catalog.solutions_for(definition.name)}
        unavailable = unavailable_languages(solutions.values())
        held = self._held_by(found)
        dtypes = None if _are_all_stated(found) else held.dtypes
        reasons = {}
        for device in held.devices:
            gpu, sm = device_gpu(device)
            reasons[gpu] = why_never_served(
                definition, load_table(gpu), solutions, gpu=gpu, sm=sm, dtypes=dtypes, unavailable=unavailable
            )
        return "" if not all(reasons.values()) else "; ".join(dict.fromkeys(reasons.values()))

    def _held_by(self, found: Found) -> _Held:
        key = tuple(map(id, found.modules))
        if key not in self._held:
            self._held[key] = _held_by({parameter for module in found.modules for parameter in module.parameters()})
        return self._held[key]


class _Held(NamedTuple):
    """Where some modules are or may be moved to, and what they compute in; None if their weights do not say."""

    devices: tuple[torch.device, ...]
    dtypes: frozenset[str] | None


def _are_all_stated(found: Found) -> bool:
    """Return True if all that the modules keep has a dtype that the Definition states: float32 weights beside streams
    of any dtype.
    """
    if found.nominee is None:
        return False
    definition = found.nominee.definition
    stated = {
        found.nominee.attribute(name)
        for name in definition.tensor_inputs
        if definition.inputs[name].dtype not in definition.dtypes
    }
    return all(name in stated for module in found.modules for name, _ in module.named_parameters())


def _held_by(parameters: Collection[torch.Tensor]) -> _Held:
    devices = {parameter.device for parameter in parameters} or {torch.device("cpu")}
    if not any(device.type == "cuda" for device in devices) and torch.cuda.is_available():
        devices.add(torch.device("cuda", torch.cuda.current_device()))  # many models are patched on the CPU, and moved
    dtypes = {parameter.dtype for parameter in parameters}
    is_known = bool(dtypes) and dtypes <= COMPUTED_IN
    dtypes |= {torch.get_autocast_dtype(device.type) for device in devices if torch.is_autocast_enabled(device.type)}
    names = frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return _Held(tuple(sorted(devices, key=str)), names if is_known else None)


# ---- discover -------------------------------------------------------------------------------------
# Finds the call sites of a model that a Definition describes. Looks, never touches.
#
# What a module may be is judged by what it holds and what its code calls; which variant it is, by the fingerprint of
# that code; whether that is so, by a probe. No list of models is consulted, and none of operators: what code a
# Definition computes is said by its ``serving``, and how a kind of part is found and probed by its module in
# :mod:`.parts`.

NOT_IN_MEMORY = "its weights are not in memory"


def discover(model: torch.nn.Module, catalog: Catalog) -> list[Found]:
    """Return every group of modules that looks like a part that can be served, in the order in which the model has
    them.

    Parts that are made of others come last.
    """
    known = KnownCode(catalog)
    _warn_of_unknown_parts(known)
    place = {id(module): index for index, module in enumerate(model.modules())}
    found: list[Found] = []
    for name in parts.PARTS:
        module: Part = parts.part(name)
        found += [_judge(group, module, known) for group in module.find(model, known, found)]
    return sorted(found, key=lambda group: (group.norm is not None, place[id(group.modules[0])]))


def _warn_of_unknown_parts(known: KnownCode) -> None:
    for name in known.parts:
        if name not in parts.PARTS:
            who = [definition.name for definition in known.definitions(name)]
            warnings.warn(
                f"tilegym-db: {', '.join(who)} cannot be served: serving.part is '{name}', and the parts are "
                f"{', '.join(sorted(parts.PARTS))}.{did_you_mean(name, parts.PARTS)}",
                RuntimeWarning,
                stacklevel=4,
            )


def _judge(found: Found, module: Part, known: KnownCode) -> Found:
    """What a group computes, or why it stays stock."""
    if found.reason:
        return found
    variants = module.variants(found, known)
    if isinstance(variants, str):
        return replace(found, reason=variants)
    confirmed = {_confirm(found, module, sample, variants, known.catalog) for sample in found.samples}
    refusals = sorted(reason for _, reason in confirmed if reason)
    names = sorted(name for name, _ in confirmed if name)
    name = names[0] if names else variants.nominees[0].definition.name
    reason = refusals[0] if refusals else ""
    if len(names) > 1:
        reason = f"its modules compute different definitions: {', '.join(names)}"
    nominee = next(nominee for nominee in variants.nominees if nominee.definition.name == name)
    return replace(found, definition=name, nominee=nominee, reason=reason)


def _confirm(
    found: Found, module: Part, sample: torch.nn.Module, variants: Variants, catalog: Catalog
) -> tuple[str, str]:
    """(Definition, reason): one of them is empty."""
    if device_of(sample).type == "meta":
        return "", NOT_IN_MEMORY
    names = [nominee.definition.name for nominee in variants.nominees]
    alternatives = {definition.name: definition for definition in variants.alternatives}
    matched: set[str] = set()
    for nominee in _one_per_code(variants.nominees):
        probed = module.probe(found, sample, nominee)
        if isinstance(probed, str):
            return "", probed
        asked = {nominee.definition.name: nominee.definition for nominee in variants.nominees} | alternatives
        matched.update(matches(probed, asked.values(), catalog))
    if len(matched) == 1 and matched <= set(names):
        return next(iter(matched)), ""
    expected = " or ".join(names)
    if not matched:
        return "", f"probed, it does not give the bits of {expected}"
    return "", f"probed, it gives the bits of {' and '.join(sorted(matched))}; expected were those of {expected} alone"


def _one_per_code(nominees: Sequence[Nominee]) -> list[Nominee]:
    """Return one nominee for each way in which inputs lie in a module: those that share it are told apart by one probe."""
    distinct: dict[tuple[tuple[str, ...], str], Nominee] = {}
    for nominee in nominees:
        distinct.setdefault((tuple(nominee.definition.inputs), str(nominee.code.attributes)), nominee)
    return list(distinct.values())


# ---- current catalog ------------------------------------------------------------------------------
# The default catalog of this process, read again only when a file of it changed.
#
# Patching a model asks for the same records each time. Whether they are still those on disk is answered by the sizes
# and times of the files and of the folders that hold them, which costs a hundredth of reading them.

WATCHED = ("definitions", "solutions")
"""The folders of a root whose records a call site uses."""

State = dict[str, tuple[int, int]]
"""Path -> (time of the last change in ns, size), of every folder and file below the watched ones."""


class _Kept(NamedTuple):
    catalog: Catalog
    state: State


_kept: list[_Kept] = []
_looking = threading.Lock()


def current_catalog() -> Catalog:
    """Return the shipped catalog with the user's overlay, as :meth:`Catalog.default` has it; the same object while
    nothing changed.
    """
    catalog = Catalog.default()
    with _looking:
        if _kept and _kept[0].catalog.roots == catalog.roots and not _has_changed(catalog.roots, _kept[0].state):
            return _kept[0].catalog
        _kept[:] = [_Kept(catalog, _state_of(catalog.roots))]
    return catalog


def _has_changed(roots: tuple[Path, ...], state: State) -> bool:
    tops = {str(root / name) for root in roots for name in WATCHED if (root / name).is_dir()}
    if not tops <= state.keys():
        return True
    try:
        return any(_mark(os.stat(path)) != mark for path, mark in state.items())
    except OSError:  # gone, or not to be read any more
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
