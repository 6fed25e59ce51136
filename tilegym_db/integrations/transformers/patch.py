"""Patches one model instance, and takes the patch away again."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError, check_kind
from tilegym_db.integrations.transformers.capture import ModelInputs
from tilegym_db.integrations.transformers.discover import discover
from tilegym_db.integrations.transformers.found import Found
from tilegym_db.integrations.transformers.handle import Handle
from tilegym_db.integrations.transformers.parts import PARTS
from tilegym_db.integrations.transformers.quantised_patch import quantise_and_patch
from tilegym_db.integrations.transformers.rebind import is_patched
from tilegym_db.integrations.transformers.served_here import Served
from tilegym_db.resolver.current_catalog import current_catalog

__all__ = ["Handle", "patch", "patch_what_fits", "patched"]

MODES = ("inference",)
POLICIES = ("verified",)


def patch(
    model: torch.nn.Module,
    *,
    mode: str = "inference",
    ops: Collection[str] | None = None,
    policy: str = "verified",
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

    Args:
        model: any ``torch.nn.Module`` with a call site; they are found by structure, at whatever depth.
        mode: ``inference``, the only one. What trains (a module in training mode, a tensor that needs a gradient) is
            served where a kernel for the backward is verified as well, and runs the model's own code elsewhere.
        ops: only these Definitions; None means all that are known.
        policy: ``verified``, the only one.
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
    handle = patch_what_fits(
        model, mode=mode, ops=ops, policy=policy, dry_run=dry_run, verify=verify, inputs=inputs, quantise=quantise,
        catalog=catalog, trust=trust,
    )  # fmt: skip
    if not handle.report().sites:
        raise UsageError(
            f"nothing in this {type(model).__name__} is a part that can be served ({', '.join(sorted(PARTS))}). "
            "Pass the whole model, or a part of it that holds such modules.",
            code="nothing_to_patch",
        )
    return handle


def patch_what_fits(
    model: torch.nn.Module,
    *,
    mode: str = "inference",
    ops: Collection[str] | None = None,
    policy: str = "verified",
    dry_run: bool = False,
    verify: bool = False,
    inputs: ModelInputs | None = None,
    quantise: str | None = None,
    catalog: Catalog | None = None,
    trust: bool = False,
) -> Handle:
    """As :func:`patch`, also of a model that has nothing to patch."""
    _check_model(model)
    if mode not in MODES or policy not in POLICIES:
        raise UsageError(
            f"mode must be one of {MODES} and policy one of {POLICIES}, not {mode!r} and {policy!r}.",
            code="mode_unknown",
        )
    if dry_run and (verify or quantise):
        option = "verify" if verify else "quantise"
        raise UsageError(
            f"a dry run patches nothing that could be proved; leave out dry_run or {option}.", code="options_clash"
        )
    if inputs is not None and not (verify or quantise):
        raise UsageError("inputs are what verify=True runs; give both or none.", code="options_clash")
    check_kind(ops if ops is not None else (), Iterable, "ops are names of definitions")
    ops = (ops,) if isinstance(ops, str) else ops
    records = (catalog or current_catalog()).trusting(trust)
    unknown = sorted(set(ops or ()) - set(records.definitions))
    if unknown:
        raise UsageError(
            f"ops names {unknown[0]!r}, which is no definition. Try: tilegym-db list", code="definition_unknown"
        )
    if quantise is not None:
        return quantise_and_patch(
            model,
            quantise,
            inputs,
            lambda final: _found_and_patched(model, records, _Choice(ops, False, verify and final), inputs),
        )
    return _found_and_patched(model, records, _Choice(ops, dry_run, verify), inputs)


class _Choice:
    """Which of what was found is to be patched."""

    def __init__(self, ops: Collection[str] | None, dry_run: bool, verify: bool) -> None:
        self.ops = ops
        self.dry_run = dry_run
        self.verify = verify


def _found_and_patched(model: torch.nn.Module, records: Catalog, choice: _Choice, inputs: ModelInputs | None) -> Handle:
    found = discover(model, records)
    if choice.verify and not found:
        return Handle()  # nothing to prove
    return _patch(model, found, records, choice, inputs)


def _patch(
    model: torch.nn.Module, found: Sequence[Found], records: Catalog, choice: _Choice, inputs: ModelInputs | None
) -> Handle:
    served = Served(records)
    handle = Handle()
    try:
        for group in _sharing_a_forward(found):
            handle.add([(part, _why_not(part, choice, served)) for part in group], records)
        if choice.verify:
            # What nothing could serve was put in all the same: its calls are wanted as Workloads.
            handle.prove(model, inputs)
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


def _why_not(found: Found, choice: _Choice, served: Served) -> str:
    """Why a group stays stock; empty where it is to be patched."""
    if found.reason:
        return found.reason
    if choice.ops is not None and found.definition not in choice.ops:
        return "not among the ops asked for"
    if choice.dry_run:
        return "dry run"
    return "" if choice.verify else served.why_never(found)


@contextlib.contextmanager
def patched(model: torch.nn.Module, **options: Any) -> Iterator[Handle]:
    """:func:`patch` for the length of a ``with`` block; the model is itself again afterwards, also after an exception."""
    handle = patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()
