"""The modules of a model that compute, and that no Definition describes: the rows of a report beside its call sites."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from tilegym_db.models.found import ModuleGroup, names_in_code

NO_DEFINITION = "no definition describes it"
ADDED = "added to the model after the patch (PEFT copies modules_to_save); unpatch() and patch() again to serve it"
LIBRARY = "a library call; no definition describes it"
PRODUCTS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
IDLE = (torch.nn.Identity, torch.nn.Dropout, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
COMPUTES = {
    *("baddbmm", "bmm", "conv1d", "cumsum", "einsum", "exp", "layer_norm", "matmul", "pow", "rsqrt"),
    *("scaled_dot_product_attention", "sigmoid", "silu", "softmax"),
}
"""Names in the code of a module that has submodules and also computes itself, such as a mixer or an attention."""


class Undescribed(NamedTuple):
    """All modules of one class that no call site has, and the reason."""

    module_class: str
    modules: int
    reason: str


class Newcomers:
    """The modules that a model had when it was patched, to find those that other code has added since.

    PEFT copies the modules of ``modules_to_save``, and a copy runs stock code. It keeps the model and its modules weakly.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember the modules of a model."""
        self._model = weakref.ref(model)
        self._known = weakref.WeakSet(model.modules())

    def of_classes(self, names: Collection[str]) -> tuple[Undescribed, ...]:
        """Return the modules of classes with these names that the model has now and had not when it was patched."""
        model = self._model()
        added = [] if model is None else [module for module in model.modules() if module not in self._known]
        counts = Counter(type(module).__name__ for module in added)
        return tuple(Undescribed(name, counts[name], ADDED) for name in names if counts[name])


def undescribed(model: torch.nn.Module, found: Iterable[ModuleGroup]) -> tuple[Undescribed, ...]:
    """Return the classes of modules that compute and are in no group, in the order of the model.

    Submodules without weights belong to the module that has them, for example the activation of an MLP.
    """
    known = {id(module) for group in found for module in group.modules}
    seen: set[int] = set()
    counts: dict[type[torch.nn.Module], int] = {}

    def visit(module: torch.nn.Module, *, is_described: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_known = id(module) in known
        is_part = is_described and not module._modules and not module._parameters
        if not is_known and not is_part and _computes(module):
            counts[type(module)] = counts.get(type(module), 0) + 1
        for child in module.children():
            visit(child, is_described=is_known)

    visit(model, is_described=False)
    return tuple(
        Undescribed(cls.__name__, count, LIBRARY if issubclass(cls, PRODUCTS) else NO_DEFINITION)
        for cls, count in counts.items()
    )


def _computes(module: torch.nn.Module) -> bool:
    if isinstance(module, IDLE):
        return False
    has_weights = any(value is not None for value in module._parameters.values())
    return has_weights or not module._modules or not COMPUTES.isdisjoint(names_in_code(type(module).forward))
