"""Activations without weights that a model calls as modules, between two projections without a gate.

The input of a Definition is the activation [M, I]. The settings of a module decide which function it computes, such as
``approximate`` of torch.nn.GELU, so modules with other settings are other groups. If a Definition describes a gated MLP or
experts as a whole, it covers their activation too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, OTHER_ACTIVATION, CallSite, are_rows, rows
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    methods,
    of_class,
)
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of
from tilegym_db.models.upstream_code import of_models

KIND = "activation"
AFTER = ("experts", "mlp")
"""Their kernels compute the activation too, and look at the class of its module."""
HIDDEN_FROM_SETTINGS = "_"
PLAIN = (bool, int, float, str, type(None))

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules without weights and submodules whose code a Definition states, unless a larger part has them."""
    is_stated = of_class(lambda cls: known.is_stated(KIND, cls.forward))
    taken = {
        id(child)
        for group in others
        if group.kind in AFTER and not group.reason
        for module in group.modules
        for child in module._modules.values()
    }
    modules = []
    for module in model.modules():
        has_state = module._modules or module._parameters or module._buffers
        if not has_state and id(module) not in taken and is_stated(module):
            modules.append(ModuleOfPart(module, key=settings(module)))
    return grouped(KIND, modules)


def settings(module: Module) -> tuple[tuple[str, Hashable], ...]:
    """Return the public attributes of an instance except for its mode, sorted by name."""
    own = [(name, value) for name, value in vars(module).items() if not name.startswith(HIDDEN_FROM_SETTINGS)]
    return tuple((name, _setting(value, module)) for name, value in sorted(own, key=_name) if name != "training")


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def _setting(value: Any, module: Module) -> Hashable:
    """Return a plain value itself, a partial function by its parts, a method of the module by its function, others by identity.

    The method of another object has the settings of that object.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, functools.partial):
        named = tuple((name, _setting(value.keywords[name], module)) for name in sorted(value.keywords))
        return id(value.func), tuple(_setting(one, module) for one in value.args), named
    if isinstance(value, MethodType):
        return id(value.__func__), None if value.__self__ is module else id(value.__self__)
    return id(value)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward; the probe decides between functions that share it."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up(KIND, cls.forward, methods(cls), "its activation forward", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches, known.definitions(KIND))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the module's code on random rows."""
    x = Draw(device_of(module))(ROWS, 16 * SIZE)
    try:
        with torch.no_grad():
            out = type(module).forward(module, x)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {next(iter(match.definition.inputs)): x}, (out,)


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of an activation: x [..., I] -> [..., I]."""
    ((found, site),) = calls
    probed = vars(found.modules[0])
    values = {name: probed[name] for name, _ in settings(found.modules[0])}
    return activation_forward(stock, site, values, found.modules[0])


def is_same(value: Any, probed: Any, module: Module, of: Module) -> bool:
    """Return True for the same setting of a module and of a probed one, as :func:`_setting` tells them apart.

    torch.compile can trace it.
    """
    if isinstance(probed, PLAIN):
        return isinstance(value, PLAIN) and value == probed
    if isinstance(probed, functools.partial):
        return (
            isinstance(value, functools.partial)
            and value.func is probed.func
            and len(value.args) == len(probed.args)
            and value.keywords.keys() == probed.keywords.keys()
            and all([is_same(one, other, module, of) for one, other in zip(value.args, probed.args, strict=True)])
            and all([is_same(value.keywords[name], other, module, of) for name, other in probed.keywords.items()])
        )
    if isinstance(probed, MethodType):
        if not isinstance(value, MethodType) or value.__func__ is not probed.__func__:
            return False
        return value.__self__ is module if probed.__self__ is of else value.__self__ is probed.__self__
    return value is probed


def activation_forward(
    stock: Callable[..., Any], site: CallSite, probed: Mapping[str, Any], of: Module
) -> Callable[..., Any]:
    """Return the forward; ``probed`` are the settings by name at the time of the probe, ``of`` the module with these."""

    def is_as_probed(self: Any) -> bool:
        return all([is_same(getattr(self, name, None), value, self, of) for name, value in probed.items()])

    def serve(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        if _is_compiling():
            operator = site.traced(self.training, x)
            if (
                operator is None
                or not are_rows(x)
                or torch.is_autocast_enabled(x.device.type)
                or not is_as_probed(self)
            ):
                return None
            traced: torch.Tensor = operator.call(x, operator.name)
            return traced
        if site.falls_back(self.training, x):
            return None
        matrix = rows(x)
        # Autocast computes some of the operations of stock code in float32, and returns that.
        is_cast = torch.is_autocast_enabled(x.device.type)
        if matrix is None or is_cast or not is_as_probed(self):
            site.bypass(NOT_ROWS if matrix is None else AUTOCAST if is_cast else OTHER_ACTIVATION)
            return None
        out: torch.Tensor | None = site.ask(self.training, matrix)
        return out if out is None or matrix is x else out.view(x.shape)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call activations by position. Parameter names differ between classes, so a call by keyword goes to stock.
        out = serve(self, args[0]) if len(args) == 1 and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward
