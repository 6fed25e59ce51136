"""Code of any kind with tensors in and out, by the signature that ``serving.code`` states.

The inputs of a Definition are parameters of the code, or attributes of the module. Any other parameter or attribute has one value
in every call that is served: that of ``fixed``, or else its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.errors import TilegymDBError
from tilegym_db.models.call_site import AUTOCAST, CallSite
from tilegym_db.models.found import FLOATS, DefinitionMatch
from tilegym_db.models.probe import SEED, Probe
from tilegym_db.models.upstream_code import of_models
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.inputs import draw_inputs

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module
UNGIVEN = inspect.Parameter.empty
OTHER_DEFAULT = "torch's default dtype is not that of the probe"


class Signature:
    """The parameters of a piece of code, and the inputs and outputs of a Definition among them and its results."""

    def __init__(self, match: DefinitionMatch, code: FunctionType, *, is_method: bool) -> None:
        """Read the signature of ``code``; the first parameter of a method is the module."""
        parameters = list(inspect.signature(code).parameters.values())[is_method:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.match = match
        self.names = tuple(one.name for one in parameters if one.kind not in kinds)
        self.defaults = {one.name: one.default for one in parameters if one.kind not in kinds}
        self.sources = {name: match.attribute(name) for name in match.definition.inputs}
        self.fixed: dict[str, Any] = {
            **{name: self.defaults[name] for name in self.names if name not in self.sources.values()},
            **match.code.fixed,
        }
        self.tensors = frozenset(match.definition.tensor_inputs)
        self.default_dtype = torch.get_default_dtype()
        """That of the probe: code that divides integers, or makes tensors, has results of this dtype."""

    @property
    def problem(self) -> str:
        """The reason if the code lacks parameters that ``serving.code`` states; empty if it has all of them."""
        unset = next((name for name, value in self.fixed.items() if value is UNGIVEN), None)
        return "" if unset is None else f"serving.code says nothing of its parameter '{unset}'"

    def missing_attribute(self, module: Module) -> str:
        """Return an attribute that the signature names and the module has not; empty if it has all."""
        stated = (*self.sources.values(), *self.match.code.fixed)
        return next((name for name in stated if name not in self.names and not hasattr(module, name)), "")

    def inputs(self, module: Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | str:
        """Return the inputs of a call in the order of the Definition, or the reason why its kernels are not for it."""
        if len(args) > len(self.names):
            return "the call has more arguments than the code names"
        given = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        for name, expected in self.fixed.items():
            value = given.pop(name) if name in given else getattr(module, name, UNGIVEN)
            if not is_value(value, expected):
                return f"its {name} is not {expected}"
        found: list[Any] = []
        for name, source in self.sources.items():
            if name in self.match.code.constants:
                found.append(self.match.code.constants[name])
                continue
            value = given.pop(source) if source in given else getattr(module, source, None)
            if name in self.tensors:
                if not isinstance(value, torch.Tensor):
                    return f"its {source} is no tensor"
            elif type(value) is int and self.match.definition.inputs[name].dtype in FLOATS:
                value = float(value)
            found.append(value)
        other = next((name for name, value in given.items() if value is not None), None)
        return found if other is None else f"the call has {other}"

    def returned(self, outputs: Any) -> Any:
        """Return what the code returns for the outputs of the Definition."""
        order = self.match.code.returns
        if not order:
            return outputs
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        named = dict(zip(self.match.definition.outputs, values, strict=True))
        return tuple(None if name is None else named[name] for name in order)

    def outputs(self, returned: Any) -> tuple[torch.Tensor, ...] | str:
        """Return the outputs among the results of the code, or the reason if it returned something else."""
        values = returned if isinstance(returned, tuple | list) else (returned,)
        order = self.match.code.returns or tuple(self.match.definition.outputs)
        if len(values) != len(order):
            return f"it returns {len(values)} values, and serving.code states {len(order)}"
        named = dict(zip(order, values, strict=True))
        for name, value in zip(order, values, strict=True):
            if isinstance(value, torch.Tensor) != (name is not None):
                return f"it returns a {type(value).__name__} for {name or 'None'}"
        return tuple(named[name] for name in self.match.definition.outputs)


def is_value(value: Any, expected: Any) -> bool:
    """Return True if a value is the one that a record states; a dtype is stated as ``torch.float32``."""
    if isinstance(value, torch.dtype):
        return str(value) == str(expected)
    return type(value) is type(expected) and bool(value == expected)


def drawn_call(match: DefinitionMatch, device: torch.device) -> dict[str, Any]:
    """Draw the inputs of the probe that ``serving.code`` states, by the generators of the Definition."""
    definition = match.definition
    scalars = {name: match.code.probe[name] for name in definition.inputs if name not in definition.tensor_inputs}
    axes = definition.bind_axes({name: int(match.code.probe[name]) for name in definition.var_axes})
    dtypes = {name: choices[0] for name, choices in definition.dtypes.items()}
    drawn = draw_inputs(definition, Case(Call(definition.name, axes, dtypes, scalars=scalars), seed=SEED), str(device))
    return {name: drawn[name] for name in definition.inputs}


def probed(
    signature: Signature, call: Callable[[dict[str, Any], dict[str, Any]], Any], device: torch.device
) -> Probe | str:
    """Run the code on drawn inputs: ``call(arguments, attributes)``, by their names in the code."""
    if signature.problem:
        return signature.problem
    try:
        inputs = drawn_call(signature.match, device)
    except TilegymDBError as error:
        return f"its probe cannot be drawn: {error}"
    named: dict[str, Any] = dict(signature.fixed)
    for name, value in inputs.items():
        if name not in signature.match.code.constants:
            named[signature.sources[name]] = value.clone() if isinstance(value, torch.Tensor) else value
    arguments = {name: value for name, value in named.items() if name in signature.names}
    attributes = {name: value for name, value in named.items() if name not in signature.names}
    try:
        with torch.no_grad():
            returned = call({name: as_value(value) for name, value in arguments.items()}, attributes)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    outputs = signature.outputs(returned)
    return outputs if isinstance(outputs, str) else (inputs, outputs)


def as_value(value: Any) -> Any:
    """Return the value that a record states: a dtype for ``torch.float32``."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def ask(
    signature: Signature, site: CallSite, module: Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any] | None:
    """Return the results of a kernel, in a tuple of one; None, and the call is counted, if stock code must run.

    Compiled code keeps the model's own code.
    """
    if _is_compiling():
        return None
    inputs = signature.inputs(module, args, kwargs)
    training = module is not None and module.training
    if torch.get_default_dtype() != signature.default_dtype:
        inputs = OTHER_DEFAULT
    if isinstance(inputs, str):
        site.bypass(inputs)
        return None
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if site.falls_back(training, *tensors):
        return None
    if torch.is_autocast_enabled(tensors[0].device.type):
        site.bypass(AUTOCAST)
        return None
    outputs = site.ask(training, *inputs)
    return None if outputs is None else (signature.returned(outputs),)
