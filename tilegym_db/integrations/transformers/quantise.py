"""Turns linear layers of a bf16 model into FP8 codes with scales of blocks, and back bit for bit.

Their values are kept in the memory of the CPU and put back: nothing is computed to undo it. A parameter that somebody else has
too, such as a twin of the model, is not touched, and is put back itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.blockwise_linear import BLOCK, BlockwiseLinear, quantised

__all__ = ["FP8", "FP8_REFERENCE", "WAYS", "Quantisation", "choose", "refuse", "why_no_products"]

FP8, FP8_REFERENCE = "fp8", "fp8-reference"
WAYS = (FP8, FP8_REFERENCE)
"""``fp8-reference`` takes PyTorch operations wherever no kernel serves, on any device: slow, to look at the numbers."""
CAPABILITY = (8, 9)
"""Of the first GPUs with products of FP8 codes: Ada. Hopper has 9.0."""
ROUTERS = ("gate", "router")
"""Last names of what chooses or weighs experts, and endings after ``_``."""
SCALES = "weight_scale_inv"
TELLS_DTYPE = "its weight comes first in a model whose dtype is that of its first parameter"

Module = torch.nn.Module


def why_no_products(device: str, capability: tuple[int, int] | None) -> str:
    """Why a device cannot multiply FP8 codes; empty where it can.

    Args:
        device: its type, ``cuda`` or another.
        capability: of a CUDA device.
    """
    if device != "cuda" or capability is None:
        return (
            f"the model is on {device}, which has no FP8 products: move it to a GPU of compute capability 8.9 or newer"
        )
    if capability < CAPABILITY:
        shown = ".".join(map(str, capability))
        return f"this GPU has compute capability {shown}, and FP8 products need 8.9 or newer (RTX 40, L40S, H100, B200)"
    return ""


def refuse(model: Module, way: str) -> None:
    """Raise :class:`UsageError` where a model must not be quantised in a way.

    Raises:
        UsageError: the device has no FP8 products and the way is not :data:`FP8_REFERENCE`, the way is none of :data:`WAYS`,
            or the model is in training mode.
    """
    if way not in WAYS:
        raise UsageError(f"quantise must be one of {WAYS} or None, not {way!r}.", code="quantise_unknown")
    if model.training:
        raise UsageError(
            "a quantised model gives no gradients to its weights: call model.eval() first.", code="model_in_training"
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
                f"quantise={way!r} is refused: {reason}. {FP8_REFERENCE!r} computes the same slowly anywhere.",
                code="fp8_unsupported",
            )


def choose(model: Module) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """The layers to quantise by name, and why each other linear layer, and experts, are not."""
    patterns, places = _default_skips(model), Counter(_places(model))
    chosen, skipped = {}, {}
    for name, module in model.named_modules():
        if any(value is not None and value.dim() > 2 for value in module._parameters.values()):
            skipped[name] = "its weights are no matrices, as those of experts and convolutions"
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
    """The identity of each parameter whose dtype transformers gives as that of a model or of a model in it."""
    models = [module for module in model.modules() if isinstance(getattr(type(module), "dtype", None), property)]
    firsts = [next((value for value in one.parameters() if value.is_floating_point()), None) for one in models]
    return {id(first) for first in firsts if first is not None}


def _places(model: Module) -> Iterable[int]:
    """The identity of every parameter, once for each module that holds it."""
    return (id(value) for module in model.modules() for value in module._parameters.values() if value is not None)


def _default_skips(model: Module) -> list[str]:
    """What transformers' own FP8 quantiser leaves as it is: the output layer, tied weights and what is to stay float32."""
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
        return "it has a forward of its own, as accelerate's hooks give a layer"
    if type(module) is not torch.nn.Linear:
        return f"it is a {type(module).__name__}, no plain linear layer"
    if _is_named(name, patterns):
        return "transformers' FP8 quantiser leaves it as it is by default"
    if name.rsplit(".", 1)[-1].rsplit("_", 1)[-1] in ROUTERS:
        return "it is a router"
    if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor:
        return "its weight is no plain parameter"
    if weight.grad is not None:
        return "its weight has a gradient; set it to None first"
    if places[id(weight)] > 1:
        return "its weight belongs to another module too"
    if weight.dtype != torch.bfloat16:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % BLOCK or not size for size in weight.shape):
        return f"its weight is {weight.shape[0]} x {weight.shape[1]}, no multiple of {BLOCK} both ways"
    return "" if bool(torch.isfinite(weight).all()) else "its weight has values that are not finite"


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    if not patterns:
        return False
    from transformers.quantizers.quantizers_utils import should_convert_module

    return not should_convert_module(name, list(patterns))


class Kept(NamedTuple):
    """A parameter that was taken out of a model: its values in the memory of the CPU, and itself while anybody else has it."""

    values: torch.Tensor
    requires_grad: bool
    attributes: dict[str, Any]
    itself: weakref.ref[torch.nn.Parameter]

    def back(self, device: torch.device) -> torch.nn.Parameter:
        """The parameter itself where it is still there (a twin of the model may share it), else one of the same bits.

        Also one of the same bits where somebody moved or cast the parameter, which is no part of this model any more then.
        """
        parameter = self.itself()
        if parameter is None or (parameter.device, parameter.dtype) != (device, self.values.dtype):
            parameter = torch.nn.Parameter(self.values.to(device), requires_grad=self.requires_grad)
            vars(parameter).update(self.attributes)
        return parameter


@dataclass
class Quantisation:
    """Layers that are codes now, and what they were, by name of the layer."""

    layers: Mapping[str, torch.nn.Linear]
    kept: dict[str, Kept] = field(default_factory=dict)

    def convert(self) -> None:
        """Make codes of all of them, one after the other: at most one weight is there twice."""
        for name, module in self.layers.items():
            own: Any = module.weight
            codes, scale = quantised(own)
            # First, so that an interrupt in between is undone too.
            self.kept[name] = Kept(own.detach().to("cpu"), own.requires_grad, dict(vars(own)), weakref.ref(own))
            module._parameters["weight"] = torch.nn.Parameter(codes, requires_grad=False)
            module._parameters[SCALES] = torch.nn.Parameter(scale, requires_grad=False)
            module.__class__ = BlockwiseLinear

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Put the parameters of some layers back, by default of all, where the codes are now. Safe to call twice.

        Raises:
            UsageError: something else changed the class of a layer; all others are restored.
        """
        left = []
        for name in list(self.kept if names is None else names):
            module = self.layers[name]
            if type(module) not in (BlockwiseLinear, torch.nn.Linear):  # the latter where converting was interrupted
                left.append(name)
                continue
            module._parameters["weight"] = self.kept.pop(name).back(module.weight.device)
            module._parameters.pop(SCALES, None)
            module.__class__ = torch.nn.Linear
        if left:
            raise UsageError(
                f"{len(left)} quantised layers were given another class ({left[0]}, ...): a wrapper such as a parametrization. "
                "Remove it and call unpatch() once more.",
                code="modules_wrapped",
            )

    @property
    def held_bytes(self) -> int:
        """What the kept values take."""
        return sum(kept.values.nbytes for kept in self.kept.values())
