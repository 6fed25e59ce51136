"""Contents for a foreign Workload: drawn as its own project draws them, or read from its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.integrations.interchange.foreign_blobs import blob_of
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import Scalar
from tilegym_db.store.imported import DataSet
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["draw_contents"]

_WIDE_INTEGERS = frozenset({"int16", "int32", "int64", "uint32"})


def draw_contents(
    found: DataSet, definition: Definition, workload: Mapping[str, Any], seed: int, device: str, base: str = ""
) -> dict[str, torch.Tensor | Scalar]:
    """Input name -> contiguous tensor or number, in the Definition's order.

    Args:
        found: the data set that tensors are read from.
        definition: the adapted Definition.
        workload: its axes and inputs, as imported.
        seed: the data set stores none; the same one draws the same contents on one kind of device.
        device: ``cpu`` or ``cuda:<n>``.
        base: the folder that paths of tensors are relative to.

    Raises:
        RecordError: an input cannot be had: a missing tensor or one that does not fit, a scalar without a value.
    """
    axes = definition.bind_axes({name: size for name, size in workload["axes"].items() if name in definition.axes})
    values: dict[str, torch.Tensor | Scalar] = {}
    for name, spec in definition.inputs.items():
        given = workload["inputs"].get(name, {"type": "random"})
        shape, dtype = definition.shape_of(name, axes), storage_dtype(spec.dtype)
        if given["type"] == "custom":
            raise RecordError(
                f"inputs.{name}: comes from a function of the reference, which is not asked for inputs here."
            )
        if given["type"] == "scalar":
            values[name] = given["value"]
        elif spec.is_scalar:
            raise RecordError(f"inputs.{name}: is a Python scalar, and the workload gives no value.")
        elif given["type"] == "safetensors":
            values[name] = _read(found, name, given, shape, dtype, base).to(device)
        else:
            try:
                drawn = _random(spec.dtype, dtype, shape, _seed(seed, name), device)
            except RuntimeError as error:  # what torch raises for a size that it cannot allocate
                first = str(error).partition("\n")[0]
                raise RecordError(f"inputs.{name}: {list(shape)} {spec.dtype} cannot be drawn: {first}") from None
            is_probability = name == "probs" and definition.op_type == "sampling"
            values[name] = torch.softmax(drawn.float(), -1).to(dtype) if is_probability else drawn
    return values


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _random(name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if name == "bool":
        return torch.randint(0, 2, shape, generator=generator, device=device).to(torch.bool)
    if name in _WIDE_INTEGERS:
        low = 0 if name == "uint32" else -1024
        return torch.randint(low, 1024, shape, generator=generator, device=device).to(dtype)
    if not dtype.is_floating_point:
        low, high = (-128, 128) if dtype.is_signed else (0, 256)
        return torch.randint(low, high, shape, generator=generator, device=device).to(dtype)
    drawn = torch.randn(shape, generator=generator, device=device)
    return drawn.clamp(-2, 2).to(dtype) if name.startswith("float8") else drawn.to(dtype)


def _read(
    found: DataSet, name: str, given: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, base: str
) -> torch.Tensor:
    path = blob_of(found, name, given["path"], base).path
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError:
        raise RecordError(f"inputs.{name}: reading {path} needs safetensors: pip install safetensors.") from None
    try:
        tensor: torch.Tensor = load(found.content(path))[given["tensor_key"]]
    except (SafetensorError, KeyError) as error:
        raise RecordError(f"inputs.{name}: {path} cannot be read: {error}.") from None
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise RecordError(
            f"inputs.{name}: {path} holds {list(tensor.shape)} {tensor.dtype}, the definition says {list(shape)} {dtype}."
        )
    return tensor.contiguous()
