"""``patch(model, quantise="fp8")``: replace weights by codes, verify every layer, then patch the model with kernels for them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch

from tilegym_db.errors import UsageError
from tilegym_db.models.capture import ModelInputs
from tilegym_db.models.handle import Handle
from tilegym_db.models.proof import LayerProof, QuantisationReport, Recorded, prove_layer, prove_logits, record

PART = "fp8_linear"
UNSERVED = "no kernel serves it at the sizes of the run, and PyTorch operations on codes are slower than its weight"
REASONS = 3
READ = "the model's code reads its weight outside of the layer, and would take codes for numbers"

Module = torch.nn.Module
Patch = Callable[[bool], Handle]
"""``patch(final)`` patches the model as it is; ``final`` is False for a patch that only verifies layers."""


def quantise_and_patch(model: Module, way: str, inputs: ModelInputs | None, patch: Patch) -> Handle:
    """Quantise a model, verify each layer as it will be served, and patch it; the handle's ``unpatch`` undoes everything."""
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
        handle.unpatch()  # together with its counters: reports are about the model's own calls
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
        why = "; ".join(dict.fromkeys(skipped.values())) or "it has none"
        raise UsageError(
            f"no linear layer of this {type(model).__name__} can be quantised: {why}.", code="nothing_to_quantise"
        )


def _check_served(handle: Handle, way: str) -> None:
    reasons = [site.reason for site in handle.report().sites if site.kind == PART]
    if way == FP8 and all(reasons):
        why = "; ".join(dict.fromkeys(reasons)) or "no definition describes them"
        raise UsageError(
            f"quantise={way!r} is refused: no kernel would serve the products, and PyTorch operations are slower than the model "
            f"as it is ({why}). Try: tilegym-db fit CONFIG, which measures and publishes for this GPU; or {FP8_REFERENCE!r}, "
            "to see the numbers alone.",
            code="quantise_unserved",
        )


def _proved(quantisation: Quantisation, recorded: Recorded, handle: Handle, way: str) -> tuple[LayerProof, ...]:
    """Return a proof of each layer; if speed is wanted, the proof of a layer without a kernel has a reason."""
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
                " Try: inputs= with as many tokens as your calls have; tilegym-db fit CONFIG; or "
                f"{FP8_REFERENCE!r}, to see the numbers alone."
            )
        why = "; ".join(dict.fromkeys(reasons))
        raise UsageError(
            f"quantise={way!r} is refused: it would leave no layer quantised ({why}).{step}",
            code="quantise_leaves_nothing",
        )


def _why_stock(handle: Handle) -> tuple[str, ...]:
    """Return a few reasons for calls of quantised layers that ran without a kernel; all sizes would fill a page."""
    sites = [site for site in handle.report().sites if site.kind == PART]
    reasons = [
        key.reason for site in sites for counts in site.all_counts for key in counts.keys if key.solution is None
    ]
    bypassed = [reason for site in sites for reason in site.bypassed]
    return tuple(dict.fromkeys((*bypassed, *reasons)))[:REASONS]


def _bytes(model: Module) -> int:
    """Return the bytes of a model's parameters and buffers, each counted once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# ---- conversion -----------------------------------------------------------------------------------
# Linear layers of a bf16 model become FP8 codes with scales of blocks, and become weights again bit for bit.
#
# The weights are kept in CPU memory and put back, so nothing is computed to undo it. A parameter that something else also
# holds, such as a twin of the model, is not changed, and the same object is put back.

FP8, FP8_REFERENCE = "fp8", "fp8-reference"
WAYS = (FP8, FP8_REFERENCE)
"""``fp8-reference`` runs PyTorch operations if no kernel serves, on any device. It is slow, and is for looking at the numbers."""
CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with products of FP8 codes (Ada); Hopper has 9.0."""
ROUTERS = ("gate", "router")
"""Last names, or their endings after ``_``, of layers that choose or weigh experts."""
SCALES = "weight_scale_inv"
TELLS_DTYPE = "it is the first parameter of a model, which gives the model its dtype"


def why_no_products(device: str, capability: tuple[int, int] | None) -> str:
    """Return the reason if a device of a type such as ``cuda`` cannot multiply FP8 codes; empty if it can."""
    if device != "cuda" or capability is None:
        return (
            f"the model is on {device}, which has no FP8 products: move it to a GPU of compute capability 8.9 or newer"
        )
    if capability < CAPABILITY:
        shown = ".".join(map(str, capability))
        return f"this GPU has compute capability {shown}, and FP8 products need 8.9 or newer (RTX 40, L40S, H100, B200)"
    return ""


def refuse(model: Module, way: str) -> None:
    """Raise :class:`UsageError` if a model must not be quantised in a way."""
    if way not in WAYS:
        raise UsageError(f"quantise must be one of {WAYS} or None, not {way!r}.", code="quantise_unknown")
    if model.training:
        raise UsageError(
            "the weights of a quantised model get no gradients: call model.eval() first.", code="model_in_training"
        )
    for device in {parameter.device for parameter in model.parameters()}:
        is_cuda = device.type == "cuda"
        reason = why_no_products(device.type, torch.cuda.get_device_capability(device) if is_cuda else None)
        if device.type == "meta":
            raise UsageError(
                f"quantise={way!r} is refused: the weights of the model are not in memory.", code="weights_absent"
            )
        if reason and way == FP8:
            raise UsageError(
                f"quantise={way!r} is refused: {reason}. {FP8_REFERENCE!r} computes the same on any device, slowly.",
                code="fp8_unsupported",
            )


def choose(model: Module) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """Return the layers to quantise, by name, and for each other linear layer and for experts the reason why not."""
    patterns, places = _default_skips(model), Counter(_places(model))
    chosen, skipped = {}, {}
    for name, module in model.named_modules():
        if any(value is not None and value.dim() > 2 for value in module._parameters.values()):
            skipped[name] = "its weights are no matrices, like those of experts and convolutions"
        elif isinstance(module, torch.nn.Linear):
            reason = _why_not(name, module, patterns, places)
            if reason:
                skipped[name] = reason
            else:
                chosen[name] = module
    telling = _telling_dtypes(model)
    for name in [name for name, module in chosen.items() if id(module.weight) in telling]:
        skipped[name] = TELLS_DTYPE
        del chosen[name]
    return chosen, skipped


def _telling_dtypes(model: Module) -> set[int]:
    """Return the ids of the parameters from which transformers takes the dtype of a model or of an inner model."""
    models = [module for module in model.modules() if isinstance(getattr(type(module), "dtype", None), property)]
    firsts = [next((value for value in one.parameters() if value.is_floating_point()), None) for one in models]
    return {id(first) for first in firsts if first is not None}


def _places(model: Module) -> Iterable[int]:
    """Return the id of every parameter, once per module that holds it."""
    return (id(value) for module in model.modules() for value in module._parameters.values() if value is not None)


def _default_skips(model: Module) -> list[str]:
    """Return what transformers' FP8 quantiser skips by default: the output layer, tied weights and modules kept in float32."""
    try:
        from transformers import PreTrainedModel
        from transformers.quantizers.base import get_keys_to_not_convert
    except ImportError:
        return []
    if not isinstance(model, PreTrainedModel):
        return []
    return [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]


def _why_not(name: str, module: torch.nn.Linear, patterns: Sequence[str], places: Mapping[int, int]) -> str:
    weight: Any = module.weight
    if "forward" in vars(module):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if type(module) is not torch.nn.Linear:
        return f"it is a {type(module).__name__}, no plain linear layer"
    if _is_named(name, patterns):
        return "transformers' FP8 quantiser skips it by default"
    if name.rsplit(".", 1)[-1].rsplit("_", 1)[-1] in ROUTERS:
        return "it is a router"
    if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor:
        return "its weight is no plain parameter"
    if weight.grad is not None:
        return "its weight has a gradient; set it to None first"
    if places[id(weight)] > 1:
        return "another module has the same weight"
    if weight.dtype != torch.bfloat16:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % BLOCK or not size for size in weight.shape):
        return f"its weight is {weight.shape[0]} x {weight.shape[1]}, which are not both multiples of {BLOCK}"
    return "" if bool(torch.isfinite(weight).all()) else "its weight has values that are not finite"


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    if not patterns:
        return False
    from transformers.quantizers.quantizers_utils import should_convert_module

    return not should_convert_module(name, list(patterns))


class KeptParameter(NamedTuple):
    """A parameter that was taken out of a model: its values in CPU memory, and a weak reference to the parameter."""

    values: torch.Tensor
    requires_grad: bool
    attributes: dict[str, Any]
    itself: weakref.ref[torch.nn.Parameter]

    def back(self, device: torch.device) -> torch.nn.Parameter:
        """Return the same parameter if it still exists, for example in a twin of the model, else a new one of the same bits.

        The parameter may also have been moved or cast since, and then no longer belongs to this model. A new one is made.
        """
        parameter = self.itself()
        if parameter is None or (parameter.device, parameter.dtype) != (device, self.values.dtype):
            parameter = torch.nn.Parameter(self.values.to(device), requires_grad=self.requires_grad)
            vars(parameter).update(self.attributes)
        return parameter


@dataclass
class Quantisation:
    """Layers that hold codes now, and their original parameters, by name of the layer."""

    layers: Mapping[str, torch.nn.Linear]
    kept: dict[str, KeptParameter] = field(default_factory=dict)

    def convert(self) -> None:
        """Turn the weights into codes, one layer after the other, so that at most one weight exists twice."""
        for name, module in self.layers.items():
            own: Any = module.weight
            codes, scale = quantised(own)
            # Keep the weight first, so that an interrupt on the next lines is undone too.
            self.kept[name] = KeptParameter(
                own.detach().to("cpu"), own.requires_grad, dict(vars(own)), weakref.ref(own)
            )
            module._parameters["weight"] = torch.nn.Parameter(codes, requires_grad=False)
            module._parameters[SCALES] = torch.nn.Parameter(scale, requires_grad=False)
            module.__class__ = BlockwiseLinear

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Put back the parameters of some layers, by default of all, on the device of the codes. Calling it twice is safe."""
        left = []
        for name in list(self.kept if names is None else names):
            module = self.layers[name]
            if type(module) not in (BlockwiseLinear, torch.nn.Linear):  # the latter if the conversion was interrupted
                left.append(name)
                continue
            module._parameters["weight"] = self.kept.pop(name).back(module.weight.device)
            module._parameters.pop(SCALES, None)
            module.__class__ = torch.nn.Linear
        if left:
            raise UsageError(
                f"{len(left)} quantised layers got another class ({left[0]}, ...), for example by a parametrization. Remove "
                "the wrapper and call unpatch() again.",
                code="modules_wrapped",
            )

    @property
    def held_bytes(self) -> int:
        """The bytes of the kept values."""
        return sum(kept.values.nbytes for kept in self.kept.values())


# ---- blockwise linear -----------------------------------------------------------------------------
# A linear layer in PyTorch operations whose weight is FP8 codes with a scale per block.
#
# Weights have one float32 scale per 128 x 128 values, activations one per token and 128 channels. DeepSeek-V3 quantises like
# this, and transformers stores fine-grained FP8 models like this.

BLOCK = 128
CODES = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_AMAX = 1e-4


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, K] and float32 scales [N / 128, K / 128] of a weight [N, K]; a block of zeros has the scale 1 / 448."""
    rows, columns = weight.shape
    blocks = weight.detach().float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / LARGEST
    codes = (blocks / scale).clamp(-LARGEST, LARGEST).to(CODES)
    return codes.view(rows, columns), scale.view(rows // BLOCK, columns // BLOCK)


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of codes [N, K] with scales of blocks."""
    rows, columns = codes.shape
    spread = scale.float().repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return codes.float() * spread


def blockwise_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Cast x [..., K] to codes and multiply it by codes [N, K]; return [..., N] in the dtype of x, summed in float32.

    The call holds a float32 copy of the weight while it runs. K is a multiple of 128.
    """
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    limit = torch.full_like(amax, LARGEST)
    of_x = (blocks * (limit / amax)).clamp(-LARGEST, LARGEST).to(CODES).float() * (amax / limit)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(of_x.flatten(-2), dequantised(codes, scale)).to(x.dtype)


class _Product(torch.autograd.Function):
    """:func:`blockwise_product` with a gradient for the activation that ignores the rounding of its cast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return blockwise_product(x, codes, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return (gradient.float() @ dequantised(*ctx.saved_tensors)).to(gradient.dtype), None, None


class BlockwiseLinear(torch.nn.Linear):
    """A linear layer whose ``weight`` [N, K] is codes, with scales ``weight_scale_inv`` [N / 128, K / 128].

    Other code would take the codes for a weight. So saving, loading, pickling and copying the layer raise :class:`UsageError`.
    """

    block_size = (BLOCK, BLOCK)
    weight_scale_inv: torch.nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        refuse_casts(self.weight.dtype, input.dtype)
        if torch.is_grad_enabled() and input.requires_grad:
            out: torch.Tensor = _Product.apply(input, self.weight, self.weight_scale_inv)
        else:
            out = blockwise_product(input, self.weight, self.weight_scale_inv)
        return out if self.bias is None else out + self.bias

    def __copy__(self) -> BlockwiseLinear:
        """Return a layer with the same parameters, which :mod:`.parts.fp8_linear` probes."""
        twin = BlockwiseLinear.__new__(BlockwiseLinear)
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise _held("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise _held("pickled")

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _held("saved (state_dict)")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _held("loaded into (load_state_dict, which may have changed modules before this one)")


def refuse_casts(weight: torch.dtype, activation: torch.dtype) -> None:
    """Raise :class:`UsageError` if the codes were cast, or if an activation has values of one byte.

    It is separate from the forward because the catalog has the fingerprint of the forward; messages may change without it.
    """
    if weight != CODES:
        raise UsageError(
            f"the codes of a quantised layer were cast to {weight}. Call unpatch() on the handle, then cast the model, then "
            "patch it again.",
            code="quantised_cast",
        )
    if activation.itemsize == 1:
        raise UsageError(
            f"a quantised layer got {activation}, which is no activation: the model's code casts to the dtype of a weight, and "
            "the weight is codes now. Call unpatch() on the handle, and run this model without quantise.",
            code="quantised_input_dtype",
        )


def _held(what: str) -> UsageError:
    return UsageError(
        f"a layer of codes, made by patch(quantise=...), cannot be {what}: call unpatch() on the handle first.",
        code="quantised_held",
    )
