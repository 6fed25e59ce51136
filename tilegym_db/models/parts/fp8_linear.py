"""Linear layers of FP8 codes: the activation is cast and multiplied by the codes that a module keeps, then the bias is added.

``serving.code`` of a Definition names the attributes of the weight's codes and of their scales. The other inputs are the
activation, or the outputs of a cast in their order if the Definition comes ``after`` it. Other arguments of the cast are in
the code's ``constants``. A Definition without a cast before it is asked first, because it needs one call less.

The code of transformers has two versions. One limits scales to at least 1e-12, the other limits those of blocks up to 1e-4. They
agree if every block has a value above 1e-4, and the probe has such values.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, are_rows, rows, unpatched_class
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    OwnCode,
    PartCall,
    UpstreamOp,
    grouped,
    is_plain,
    methods,
)
from tilegym_db.models.probe import (
    CODES,
    ROWS,
    WEIGHT_SCALES,
    WEIGHTS,
    Draw,
    Probe,
    activation,
    choice,
    device_of,
    single,
    stock_function,
)
from tilegym_db.models.upstream_code import of_models
from tilegym_db.records import Definition

SIZE = 256
"""Size of the probe: two blocks of scales in each direction."""
WITHOUT = {"bias": None, "activation_scale": None}
STATIC = "its activations have one scale that was measured beforehand, and no definition takes such a scale"
OTHER_DTYPE = "its input and the product's output have different dtypes"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the linear layers with a matrix of FP8 codes, once per Definition that such a layer may call."""
    definitions = known.definitions("fp8_linear")
    modules = [
        ModuleOfPart(module, definition.name, key=_setting(module), detail=device_of(module))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and any(map(_are_codes, module._parameters.values()))
        for definition in definitions
    ]
    of_name = {definition.name: definition for definition in definitions}
    return [replace(group, before=_before(of_name[group.function], known)) for group in grouped("fp8_linear", modules)]


def _are_codes(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.dim() == 2 and parameter.dtype == CODES


def _setting(module: Module) -> Hashable:
    """Return the properties in which layers of one class may differ: the size of blocks, and the form of scales."""
    block = getattr(module, "block_size", None)
    kept = [(name, value) for name, value in module._parameters.items() if value is not None and name != "bias"]
    looks = tuple((name, value.dtype, value.dim(), type(value.data)) for name, value in kept)
    return tuple(block) if isinstance(block, (list, tuple)) else block, looks


def _before(definition: Definition, known: KnownCode) -> UpstreamOp | None:
    name = None if definition.serving is None else definition.serving.after
    if name is None or name not in known.catalog.definitions:
        return None
    first = known.catalog.definition(name)
    return UpstreamOp(first, stock_function(first, known.catalog))


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward and its functions; keep the group's Definition, because each has its own group."""
    forward: Any = found.module_class.forward
    callees = {**(forward.__globals__ if is_plain(forward) else {}), **methods(found.module_class)}
    matches = known.look_up("fp8_linear", forward, callees, "its FP8 forward", {})
    if isinstance(matches, str):
        return matches
    own = [match for match in matches if match.definition.name == found.function]
    if not own:
        return f"{found.function} does not state this forward among its serving.code"
    after = own[0].definition.serving.after if own[0].definition.serving is not None else None
    if after is not None and (found.before is None or found.before.stock is None):
        return f"{found.function} comes after {after}, which has no stock solution that returns its outputs"
    return MatchCandidates(own)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the module's code on values whose products do not depend on the order of additions or the way of dividing."""
    reason = _why_not(module, match)
    if reason:
        return reason
    layer, draw, twin = _layer(found, match), Draw(device_of(module)), copy.copy(module)
    x, kept = _drawn(match, layer, draw)
    vars(twin)["_parameters"] = {**module._parameters, **kept, **WITHOUT}
    try:
        with torch.no_grad():
            out = type(module).forward(twin, x)
    except of_models() as error:  # the model's code may have no kernel here, or none that loads
        return f"it cannot be probed: {type(error).__name__}: {' '.join(str(error).split())}"
    given = (x, *layer.numbers)
    if found.before is not None and found.before.stock is not None:
        with torch.no_grad():
            given = found.before.stock(*given)
    inputs = layer.arranged(given, [kept[name] for name in layer.attributes])
    return dict(zip(match.definition.inputs, inputs, strict=True)), (out,)


def _why_not(module: Module, match: DefinitionMatch) -> str:
    """Return the reason if a module cannot be served, whatever its code computes; empty if it can."""
    if getattr(module, "activation_scale", None) is not None:
        return STATIC
    for name in match.definition.inputs:
        attribute = match.code.attributes.get(name)
        if attribute is None:
            continue
        value, dtype = module._parameters.get(attribute), match.definition.inputs[name].dtype
        if value is None:
            return f"it has no {attribute}, which serving.code of {match.definition.name} names"
        if type(value.data) is not torch.Tensor or value.dtype != getattr(torch, dtype):
            return f"its {attribute} is a {type(value.data).__name__} of {value.dtype}; {match.definition.name} takes {dtype}"
    return ""


class Layer(NamedTuple):
    """The sources of a Definition's inputs at a call.

    ``attributes`` are those of the module, and ``kept`` tells for each input if it is one of them. ``numbers`` are constants of
    the code. ``dtype`` is the dtype of the output, None for that of the activation.
    """

    attributes: tuple[str, ...]
    kept: tuple[bool, ...]
    numbers: tuple[Any, ...]
    dtype: torch.dtype | None

    def arranged(self, given: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
        """Return the inputs of the Definition in its order."""
        of_call, of_module = iter(given), iter(parameters)
        return [next(of_module) if is_kept else next(of_call) for is_kept in self.kept]


def _layer(found: ModuleGroup, match: DefinitionMatch) -> Layer:
    definition, code = match.definition, match.code
    called = definition if found.before is None else found.before.definition
    (dtype,) = {spec.dtype for spec in definition.outputs.values()}
    return Layer(
        attributes=tuple(code.attributes[name] for name in definition.inputs if name in code.attributes),
        kept=tuple(name in code.attributes for name in definition.inputs),
        numbers=tuple(code.constants[name] for name in called.inputs if name in code.constants),
        dtype=None if dtype in definition.dtypes else getattr(torch, dtype),
    )


def _drawn(match: DefinitionMatch, layer: Layer, draw: Draw) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a bf16 activation [ROWS, SIZE], and codes [SIZE, SIZE] with scales by attribute."""
    definition = match.definition
    sizes = {name: SIZE if axis.value is None else axis.value for name, axis in definition.axes.items()}
    kept: dict[str, torch.Tensor] = {}
    for name, attribute in match.code.attributes.items():
        shape = definition.shape_of(name, sizes)
        if definition.inputs[name].dtype == str(CODES).removeprefix("torch."):
            kept[attribute] = (single(draw, *shape) * choice(draw, WEIGHTS, *shape)).to(CODES)
        else:
            kept[attribute] = choice(draw, WEIGHT_SCALES, *shape).float()
            blocks = shape[-1]
    return activation(draw, ROWS, SIZE, SIZE // blocks), kept


def own_code(found: ModuleGroup) -> OwnCode:
    """Return the module's own code on the inputs of a Definition that takes the activation; None for one that takes codes."""
    match, cls = found.match, unpatched_class(found.modules[0])
    if match is None or found.before is not None:
        return OwnCode(cls.__name__, None)
    layer, bare = _layer(found, match), copy.copy(found.modules[0])
    vars(bare)["_parameters"] = {}  # without weights: the call passes them

    def call(*inputs: Any) -> Any:
        twin, parameters = copy.copy(bare), [value for value, kept in zip(inputs, layer.kept, strict=True) if kept]
        vars(twin)["_parameters"] = {**dict(zip(layer.attributes, parameters, strict=True)), **WITHOUT}
        return cls.forward(twin, next(value for value, kept in zip(inputs, layer.kept, strict=True) if not kept))

    return OwnCode(cls.__name__, call)


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a linear layer: x [..., K] -> [..., N].

    Compiled code has the Definitions that take the activation itself; their stock code is the module's own code.
    """
    ways, compiled = [], []
    for found, site in sorted(calls, key=lambda call: call.found.before is not None):
        assert found.match is not None, "only confirmed groups are patched"
        ways.append(_way(site, _layer(found, found.match)))
        if found.before is None:
            compiled.append(_compiled_way(site, _layer(found, found.match)))

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            for way in compiled if _is_compiling() else ways:
                out = way(self, args[0])
                if out is not None:
                    return out if self.bias is None else out.add_(self.bias)  # like the model's code
        return stock(self, *args, **kwargs)

    return forward


def _way(site: CallSite, layer: Layer) -> Callable[[Any, Any], torch.Tensor | None]:
    """Return ``way(module, x [..., K]) -> [..., N]`` without bias, by kernels of one Definition, or None if none runs."""

    def way(self: Any, x: Any) -> torch.Tensor | None:
        if site.falls_back(self.training, x):
            return None
        matrix = rows(x)
        reason = NOT_ROWS if matrix is None else _why_stock(self, x, layer)
        if reason:
            site.bypass(reason)
            return None
        given = (matrix, *layer.numbers) if site.before is None else _cast(site.before, self.training, matrix, layer)
        if given is None:
            site.unserved()
            return None
        parameters = [self._parameters[name] for name in layer.attributes]
        if torch.is_grad_enabled():  # the model's code gives codes and scales no gradient either
            parameters = [parameter.detach() for parameter in parameters]
        out = site.ask(self.training, *layer.arranged(given, parameters))
        return None if out is None else out.view(*x.shape[:-1], out.shape[-1])

    return way


def _compiled_way(site: CallSite, layer: Layer) -> Callable[[Any, Any], torch.Tensor | None]:
    """Return the function of :func:`_way` for code that is being compiled."""

    def way(self: Any, x: Any) -> torch.Tensor | None:
        operator = site.traced(self.training, x)
        if operator is None or not are_rows(x) or _why_stock(self, x, layer):
            return None
        inputs = layer.arranged(
            (x.view(-1, x.shape[-1]), *layer.numbers), [getattr(self, name) for name in layer.attributes]
        )
        out: torch.Tensor = operator.call(*inputs, operator.name)
        return out.view(*x.shape[:-1], out.shape[-1])

    return way


def _cast(before: CallSite, training: bool, matrix: torch.Tensor | None, layer: Layer) -> Any:
    """Return the product's inputs from the activation by a verified kernel; None if stock code must run everything."""
    given = before.ask(training, matrix, *layer.numbers)
    if given is None and before.is_recorded and before.stock is not None:
        return before.stock(matrix, *layer.numbers)
    return given


def _why_stock(module: Any, x: torch.Tensor, layer: Layer) -> str:
    """Return the reason if no kernel may be asked for a call; empty if one may."""
    if layer.dtype is not None and x.dtype != layer.dtype:
        return OTHER_DTYPE
    if getattr(module, "activation_scale", None) is not None:
        return STATIC
    if any(module._parameters.get(name) is None for name in layer.attributes):
        return "its codes or scales are no longer parameters"
    return AUTOCAST if torch.is_autocast_enabled(x.device.type) else ""
