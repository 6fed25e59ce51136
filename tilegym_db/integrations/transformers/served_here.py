"""Whether a group of modules could be served at all, on the devices and in the dtypes of its parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers.found import Found
from tilegym_db.records import Definition
from tilegym_db.resolver.device import device_gpu
from tilegym_db.resolver.resolve import unavailable_languages
from tilegym_db.resolver.servable import why_never_served
from tilegym_db.resolver.table import load_table

__all__ = ["Served"]

COMPUTED_IN = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What models compute in. Weights of another dtype are quantised, and say nothing about it."""


class Served:
    """What the published tables of this machine's devices have for the Definitions of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._held: dict[tuple[int, ...], _Held] = {}

    def why_never(self, found: Found) -> str:
        """Why no call of a group could ever be served; empty where one could."""
        if found.reason or found.nominee is None:
            return found.reason
        own = self._why_never(found, found.nominee.definition)
        return own or ("" if found.before is None else self._why_never(found, found.before.definition))

    def _why_never(self, found: Found, definition: Definition) -> str:
        solutions = {files.name: files for files in self._catalog.solutions_for(definition.name)}
        unavailable = unavailable_languages(solutions.values())
        held = self._held_by(found)
        dtypes = None if _are_all_stated(found) else held.dtypes
        reasons = {}
        for device in held.devices:
            gpu, sm = device_gpu(device)
            reasons[gpu] = why_never_served(
                definition, load_table(gpu), solutions, gpu=gpu, sm=sm, dtypes=dtypes, unavailable=unavailable
            )
        return "" if not all(reasons.values()) else "; ".join(dict.fromkeys(reasons.values()))

    def _held_by(self, found: Found) -> _Held:
        key = tuple(map(id, found.modules))
        if key not in self._held:
            self._held[key] = _held_by({parameter for module in found.modules for parameter in module.parameters()})
        return self._held[key]


class _Held(NamedTuple):
    """Where some modules are or may be moved to, and what they compute in; None where their weights do not say."""

    devices: tuple[torch.device, ...]
    dtypes: frozenset[str] | None


def _are_all_stated(found: Found) -> bool:
    """Whether all that the modules keep has a dtype that the Definition states: float32 weights beside streams of any dtype."""
    if found.nominee is None:
        return False
    definition = found.nominee.definition
    stated = {
        found.nominee.attribute(name)
        for name in definition.tensor_inputs
        if definition.inputs[name].dtype not in definition.dtypes
    }
    return all(name in stated for module in found.modules for name, _ in module.named_parameters())


def _held_by(parameters: Collection[torch.Tensor]) -> _Held:
    devices = {parameter.device for parameter in parameters} or {torch.device("cpu")}
    if not any(device.type == "cuda" for device in devices) and torch.cuda.is_available():
        devices.add(torch.device("cuda", torch.cuda.current_device()))  # many models are patched on the CPU, and moved
    dtypes = {parameter.dtype for parameter in parameters}
    is_known = bool(dtypes) and dtypes <= COMPUTED_IN
    dtypes |= {torch.get_autocast_dtype(device.type) for device in devices if torch.is_autocast_enabled(device.type)}
    names = frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return _Held(tuple(sorted(devices, key=str)), names if is_known else None)
