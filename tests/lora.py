"""LoRA adapters as PEFT inserts them: ``Linear`` and ``adapted`` do what ``lora.Linear`` and ``get_peft_model`` do."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Linear", "adapted"]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Linear(torch.nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 4, alpha: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.active_adapters, self.disable_adapters = ["default"], False
        self.scaling = {"default": alpha / rank}
        self.lora_dropout = torch.nn.ModuleDict({"default": torch.nn.Identity()})
        down, up = (
            torch.nn.Linear(base_layer.in_features, rank, bias=False),
            torch.nn.Linear(rank, base_layer.out_features, bias=False),
        )
        torch.nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        torch.nn.init.normal_(up.weight, std=0.1)
        self.lora_A, self.lora_B = torch.nn.ModuleDict({"default": down}), torch.nn.ModuleDict({"default": up})
        self.train(base_layer.training)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        for name in self.active_adapters:
            x = x.to(self.lora_A[name].weight.dtype)  # adapters are kept in float32
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        return result.to(dtype)


class LoraModel(torch.nn.Module):
    """The holder of the model; calls and attributes go through."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class PeftModel(torch.nn.Module):
    """The wrapper that ``get_peft_model`` returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def adapted(model: Any, targets: tuple[str, ...] = TARGETS) -> Any:
    """Insert adapters into a model and wrap it."""
    torch.manual_seed(7)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, torch.nn.Linear):
                setattr(parent, name, Linear(child))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return PeftModel(model)
