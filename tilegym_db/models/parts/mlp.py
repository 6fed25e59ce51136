"""Gated MLPs: the projections stay, and the code between the first ones and the last becomes one call.

The inputs of a Definition are the results of the projections, [M, I] each or packed in one. ``serving.code`` maps them to
attributes: ``{"a": "gate_proj", "b": "up_proj", "output": "down_proj", "activation": "act_fn"}``. The activation is listed if the
module keeps one; the probe determines which activation it is.

Of a forward that does more, such as a clamp before the product or a norm after it, only the product is replaced
(:mod:`tilegym_db.models.gate_product`).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import NOT_ROWS, OTHER_ACTIVATION, CallSite, are_rows, has_hooks, rows, shadow_function
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
from tilegym_db.models.gate_product import (
    CALL,
    GatedCode,
    GateProduct,
    activations_of,
    gate_product,
    gated_code,
    multiplies,
    with_call,
)
from tilegym_db.models.probe import ROWS, Probe, device_of, drawn_inputs, stock_function
from tilegym_db.models.products import forwards, gated_products
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("experts",)
"""Experts have a ``down_proj`` too."""
OUTPUT, ACTIVATION = "output", "activation"
ACTIVATIONS = ("act_fn", "activation_fn")

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with a ``down_proj`` and a product that are no experts, and those with the code of a gated MLP."""
    is_stated = of_class(lambda cls: known.is_stated("mlp", cls.forward) or gated_code(cls.forward) is not None)
    is_possible = of_class(multiplies)
    experts = {id(module) for group in others if group.kind == "experts" for module in group.modules}
    return grouped(
        "mlp",
        [
            ModuleOfPart(module, key=id(probed_activation(module)), detail=likeness(module))
            for module in model.modules()
            if id(module) not in experts
            and (is_stated(module) or (is_possible(module) and (has_down_projection(module) or gate_product(module))))
        ],
    )


def has_down_projection(module: Module) -> bool:
    """Return True if a module has a submodule or a weight of the usual name."""
    return "down_proj" in module._modules or "down_proj" in module._parameters


def probed_activation(module: Module, names: Sequence[str] = ACTIVATIONS) -> Any:
    """Return the identity of a gated MLP's activation: the class of a module, or the function itself."""
    activation: Any = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    return type(activation) if isinstance(activation, Module) else activation


def likeness(module: Module) -> Hashable:
    """Return the properties by which one probed module represents others: settings, and the settings of its activation."""
    activation: Any = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
    alike: Hashable = id(activation)
    if isinstance(activation, Module) and not (activation._modules or activation._parameters or activation._buffers):
        alike = (type(activation), _settings(activation))
    return alike, _settings(module), device_of(module)


def _settings(module: Module) -> Hashable:
    """Return the public attributes of an instance; a value of another kind than a plain one counts by its identity."""
    own = [(name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training"]
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, value if isinstance(value, plain) else id(value))
        for name, value in sorted(own, key=lambda item: item[0])
    )


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward; the probe determines the activation."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up("mlp", cls.forward, methods(cls), "its mlp forward", {})
    if isinstance(matches, str):
        code = gated_code(cls.forward)
        product = gate_product(found.modules[0]) if code is None else None
        if code is not None:
            matches = _of_structure(code, cls, known)
        elif product is not None:
            matches = _of_product(product, cls, known)
        else:
            return matches
    for match in matches:
        if stock_function(match.definition, known.catalog) is None:
            return f"{match.definition.name} has no stock solution that returns its outputs, for calls that no kernel serves"
    return MatchCandidates(matches)


def _of_product(product: GateProduct, cls: type[Module], known: KnownCode) -> list[DefinitionMatch]:
    """Return the Definitions of two operands; the probe decides between them."""
    roles = {ACTIVATION: product.attribute} if product.attribute else {}
    code = ModelCode(fingerprint=fingerprint(cls.forward) or NO_FINGERPRINT, attributes=roles)
    return [DefinitionMatch(one, code, product) for one in known.definitions("mlp") if len(one.inputs) == 2]


def _of_structure(code: GatedCode, cls: type[Module], known: KnownCode) -> list[DefinitionMatch]:
    """Return the Definitions of two projections with the attributes that a forward uses; the probe decides between them."""
    roles = {OUTPUT: code.output} | ({ACTIVATION: code.activation} if code.activation else {})
    mark = fingerprint(cls.forward) or ""
    return [
        DefinitionMatch(
            definition,
            ModelCode(fingerprint=mark, attributes={**roles, **dict(zip(definition.inputs, code[:2], strict=True))}),
        )
        for definition in known.definitions("mlp")
        if len(definition.inputs) == 2
    ]


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the module's code between random projections and a last projection that returns its input."""
    definition = match.definition
    if match.details is not None:
        inputs = drawn_inputs(definition, {"M": ROWS}, device_of(module))
        with torch.no_grad():
            return dict(inputs), (
                _product_of(type(module), match.details)(_without_hooks(module, match), *inputs.values()),
            )
    projections = [match.attribute(name) for name in definition.inputs]
    missing = [name for name in (*projections, match.attribute(OUTPUT)) if not hasattr(module, name)]
    if missing:
        return f"it has no {missing[0]}, which serving.code of {definition.name} names"
    inputs = drawn_inputs(definition, {"M": ROWS}, device_of(module))
    with torch.no_grad():
        return dict(inputs), (_between(module, match, inputs),)


def _without_hooks(module: Module, match: DefinitionMatch) -> Any:
    """Return an object whose activation is that of the module, called without its hooks."""
    name = match.attribute(ACTIVATION)
    activation = getattr(module, name, None)
    return types.SimpleNamespace(**{name: activation.forward if isinstance(activation, Module) else activation})


def _product_of(cls: type[Module], product: GateProduct) -> Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return ``own(module, gate, other)``, the model's own product."""
    if product.attribute:
        return lambda self, gate, other: getattr(self, product.attribute)(gate) * other
    scope = dict(cls.forward.__globals__)
    exec(f"def activate(gate):\n    return {product.call}\n", scope)
    activate = scope["activate"]
    return lambda self, gate, other: activate(gate) * other


def _between(module: Module, match: DefinitionMatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the input of the last projection if the others return ``inputs``; no submodule is called."""
    twin = copy.copy(module)
    given: dict[str, Any] = {match.attribute(name): _giving(value) for name, value in inputs.items()}
    given[match.attribute(OUTPUT)] = lambda value: value
    activation = getattr(module, match.attribute(ACTIVATION), None)
    if isinstance(activation, Module):
        given[match.attribute(ACTIVATION)] = activation.forward  # without its hooks
    vars(twin)["_modules"] = {**module._modules, **given}
    out: torch.Tensor = type(module).forward(twin, next(iter(inputs.values())))
    return out


def _giving(value: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda _: value


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a gated MLP: x [..., H] -> [..., H]."""
    ((found, site),) = calls
    match, module = found.match, found.modules[0]
    assert match is not None, "only confirmed groups are patched"
    if match.details is not None:
        return _forward_with_product(stock, site, module, match)
    names = [match.attribute(name) for name in match.definition.inputs]
    kept = match.attribute(ACTIVATION) if hasattr(module, match.attribute(ACTIVATION)) else None
    probed = None if kept is None else probed_activation(module, [kept])
    inputs = drawn_inputs(match.definition, {"M": ROWS}, device_of(module))
    with torch.no_grad():
        is_product = kept is not None and _is_product(
            module, kept, list(inputs.values()), _between(module, match, inputs)
        )
    return mlp_forward(
        stock, site, match.definition.name, names, match.attribute(OUTPUT), kept, probed, is_product=is_product
    )


def _forward_with_product(stock: Any, site: CallSite, module: Module, match: DefinitionMatch) -> Callable[..., Any]:
    """Return the forward of a class with its product as a call that asks for a kernel first."""
    product: GateProduct = match.details
    activation = product.attribute or None
    probed = None if activation is None else probed_activation(module, [activation])
    function = gate_function(site, _product_of(type(module), product), product, probed)
    rewrote, forget = shadow_function(with_call(stock, product, activations_of(module)), {CALL: function})
    site.shadows.append(forget)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rewrote(self, *args, **kwargs)

    return forward


def gate_function(
    site: CallSite, own: Callable[..., Any], product: GateProduct, probed: Any
) -> Callable[[Any, Any, Any], Any]:
    """Return ``gate(module, left, right)``, which runs a kernel, or the model's own product.

    Args:
        own: ``own(module, gate, other)``, the model's own product.
        product: the activation, and the side that it is on.
        probed: the activation at the time of the probe; see :func:`probed_activation`.
    """

    def serve(self: Any, gate: Any, other: Any) -> torch.Tensor | None:
        function = getattr(self, product.attribute) if product.attribute else None
        if not isinstance(gate, torch.Tensor) or not isinstance(other, torch.Tensor) or gate.shape != other.shape:
            return None
        if product.attribute and not is_as_probed(function, probed):
            if not _is_compiling():
                site.bypass(OTHER_ACTIVATION)
            return None
        return _activate(site, self.training, (gate, other))

    def gate(self: Any, left: Any, right: Any) -> Any:
        given = (left, right) if product.gate_is_left else (right, left)
        out = serve(self, *given)
        return own(self, *given) if out is None else out

    return gate


def _is_product(module: Module, activation: str, given: Sequence[torch.Tensor], found: torch.Tensor) -> bool:
    """Return True if the code computes ``activation(gate) * up``."""
    gate, up = given if len(given) == 2 else given[0].chunk(2, dim=-1)
    function = getattr(module, activation)
    function = function.forward if isinstance(function, Module) else function
    return len(given) <= 2 and torch.equal(function(gate) * up, found)


def mlp_forward(
    stock: Callable[..., Any],
    site: CallSite,
    definition: str,
    projections: Sequence[str],
    output: str,
    activation: str | None,
    probed: Any,
    *,
    is_product: bool,
) -> Callable[..., Any]:
    """Return the forward of a gated MLP, as :func:`forward` describes it.

    Args:
        projections: the attributes whose results are the Definition's inputs, in order.
        activation: the attribute of the activation; None if the activation is part of the code.
        probed: the activation at the time of the probe: the class of a module, or the function itself.
        is_product: True if a call without a kernel is ``activation(gate) * up``; else the Definition's stock solution runs,
            and compiled code runs stock from the start.
    """
    names, product = tuple(projections), activation if is_product else None

    def falls_back(self: Any, x: torch.Tensor, *, is_compiling: bool) -> bool:
        function = None if activation is None else getattr(self, activation)
        if is_compiling:
            return not is_product or site.traced(self.training, x) is None or not is_as_probed(function, probed)
        if site.falls_back(self.training, x):
            return True
        if not is_as_probed(function, probed):
            site.bypass(OTHER_ACTIVATION)
            return True
        return False

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call MLPs by position. Parameter names differ between models, so a call by keyword goes to stock.
        is_compiling = _is_compiling()
        if kwargs or len(args) != 1 or falls_back(self, args[0], is_compiling=is_compiling):
            return stock(self, *args, **kwargs)
        (x,) = args
        if forwards and not is_compiling:
            out = gated_products(definition, x, [getattr(self, name) for name in names])
            if out is not None:
                site.patience = 0  # it is of use in graphs
                return getattr(self, output)(out)
        given = [getattr(self, name)(x) for name in names]
        # From here on the stock code is repeated instead of called, because the projections must not run twice.
        out = _activate(site, self.training, given)
        return getattr(self, output)(_unserved(self, site, product, given) if out is None else out)

    return forward


def _unserved(self: Any, site: CallSite, activation: str | None, given: list[torch.Tensor]) -> Any:
    """Run ``activation(gate) * up`` if that is the model's code, or else the stock solution, for a call without a kernel."""
    if activation is None:
        assert site.stock is not None, "the part is only patched if it has a stock solution"
        return site.stock(*given)
    gate, up = given if len(given) == 2 else given[0].chunk(2, dim=-1)
    return getattr(self, activation)(gate) * up


def _activate(site: CallSite, training: bool, projections: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the input of the last projection from projections [..., I]; None if stock code must compute it."""
    if _is_compiling():
        operator = site.traced(training, *projections)
        if operator is None or not all([are_rows(projection) for projection in projections]):
            return None
        traced: torch.Tensor = operator.call(*projections, operator.name)
        return traced
    if site.falls_back(training, *projections):
        return None
    matrices = [rows(projection) for projection in projections]
    if any([matrix is None for matrix in matrices]):
        site.bypass(NOT_ROWS)
        return None
    out: torch.Tensor | None = site.ask(training, *matrices)
    if out is None:
        return None
    first = projections[0]
    width = out.shape[-1]
    return out.view_as(first) if width == first.shape[-1] else out.view(*first.shape[:-1], width)


def is_as_probed(function: Any, probed: Any) -> bool:
    """Return True if an activation equals the :func:`probed_activation`, and calling it runs nothing else."""
    if not isinstance(function, Module):
        return function is probed
    return type(function) is probed and not has_hooks(function)
