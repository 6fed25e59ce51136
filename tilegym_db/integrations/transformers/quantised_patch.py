"""``patch(model, quantise="fp8")``: codes in place of weights, a proof of every layer, then the patch that serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.capture import ModelInputs
from tilegym_db.integrations.transformers.handle import Handle
from tilegym_db.integrations.transformers.quantise import FP8, FP8_REFERENCE, Quantisation, choose, refuse
from tilegym_db.integrations.transformers.quantise_proof import LayerProof, Recorded, prove_layer, prove_logits, record
from tilegym_db.integrations.transformers.quantise_report import QuantisationReport

__all__ = ["quantise_and_patch"]

PART = "fp8_linear"
UNSERVED = "no kernel serves it at the sizes of the run, and PyTorch operations are slower than its own weight"
REASONS = 3
READ = "the model's code reads its weight outside of the layer, and would take codes for numbers"

Module = torch.nn.Module
Patch = Callable[[bool], Handle]
"""``patch(final)`` patches the model as it is; ``final`` is False for a patch that is only there to prove layers with."""


def quantise_and_patch(model: Module, way: str, inputs: ModelInputs | None, patch: Patch) -> Handle:
    """Quantise a model, prove each layer as it will be served, and patch it; the handle's ``unpatch`` undoes all of it.

    Raises:
        UsageError: the way is refused on this device, nothing can be quantised or proved, or no published kernel serves the
            products, so that the model would be slower; the model is as it was.
    """
    refuse(model, way)
    layers, skipped = choose(model)
    _check_any(model, layers, skipped)
    before, recorded = _bytes(model), record(model, layers, inputs)
    skipped |= dict.fromkeys(sorted(recorded.read), READ)
    quantisation = Quantisation({name: module for name, module in layers.items() if name not in recorded.read})
    _check_any(model, quantisation.layers, skipped)
    handle: Handle | None = None
    try:
        quantisation.convert()
        handle = patch(False)
        _check_served(handle, way)
        proofs = _proved(quantisation, recorded, handle, way)
        _check_left(proofs, way, handle)
        handle.unpatch()
        quantisation.undo([proof.name for proof in proofs if proof.reason])
        handle = patch(False)
        logits = prove_logits(model, recorded)
        if logits.why_refused:
            raise UsageError(
                f"quantise={way!r} is refused: {logits.why_refused}. The model is as it was.",
                code="quantise_too_inexact",
            )
        handle.unpatch()  # with what it counted: reports are about the model's own calls
        handle = patch(True)
        report = QuantisationReport(way, proofs, skipped, logits, before, _bytes(model), quantisation.held_bytes)
        handle.quantised(report, quantisation.undo)
    except BaseException:
        if handle is not None:
            handle.unpatch()
        quantisation.undo()
        raise
    return handle


def _check_any(model: Module, layers: Mapping[str, Module], skipped: Mapping[str, str]) -> None:
    if not layers:
        told = "; ".join(dict.fromkeys(skipped.values())) or "it has none"
        raise UsageError(
            f"no linear layer of this {type(model).__name__} can be quantised: {told}.", code="nothing_to_quantise"
        )


def _check_served(handle: Handle, way: str) -> None:
    reasons = [site.reason for site in handle.report().sites if site.kind == PART]
    if way == FP8 and all(reasons):
        told = "; ".join(dict.fromkeys(reasons)) or "no definition describes them"
        raise UsageError(
            f"quantise={way!r} is refused: no kernel would serve the products, and PyTorch operations are slower than the model "
            f"as it is ({told}). Try: tilegym-db fit, which measures and publishes for this GPU; or {FP8_REFERENCE!r}, to look "
            "at the numbers alone.",
            code="quantise_unserved",
        )


def _proved(quantisation: Quantisation, recorded: Recorded, handle: Handle, way: str) -> tuple[LayerProof, ...]:
    """A proof of each layer; where speed is asked for, one that no kernel served has a reason."""
    proofs = []
    for name, module in quantisation.layers.items():
        served = handle.kernel_calls(PART)
        proof = prove_layer(name, module, quantisation.kept[name].values, recorded.of_layers.get(name))
        if way == FP8 and not proof.reason and handle.kernel_calls(PART) == served:
            proof = replace(proof, reason=UNSERVED)
        proofs.append(proof)
    return tuple(proofs)


def _check_left(proofs: Sequence[LayerProof], way: str, handle: Handle) -> None:
    if all(proof.reason for proof in proofs):
        unserved = any(proof.reason == UNSERVED for proof in proofs)
        reasons, step = [proof.reason for proof in proofs], ""
        if unserved:
            reasons += _why_stock(handle)
            step = (
                " Try: inputs= with as many tokens as your calls have; tilegym-db fit; or "
                f"{FP8_REFERENCE!r}, to look at the numbers alone."
            )
        told = "; ".join(dict.fromkeys(reasons))
        raise UsageError(
            f"quantise={way!r} is refused: it would leave no layer quantised ({told}).{step}",
            code="quantise_leaves_nothing",
        )


def _why_stock(handle: Handle) -> tuple[str, ...]:
    """What the calls of quantised layers were told that ran without a kernel, a few of them: all sizes would fill a page."""
    sites = [site for site in handle.report().sites if site.kind == PART]
    told = [key.reason for site in sites for counts in site.all_counts for key in counts.keys if key.solution is None]
    bypassed = [reason for site in sites for reason in site.bypassed]
    return tuple(dict.fromkeys((*bypassed, *told)))[:REASONS]


def _bytes(model: Module) -> int:
    """Of its parameters and buffers, each once, as torch lists them."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
