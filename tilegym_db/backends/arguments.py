"""The arguments of one call, as CPU tensors that nobody reads: right sizes, dtypes and strides, no contents."""

from __future__ import annotations

from typing import Any

import torch

from tilegym_db.records import Definition, Workload

__all__ = ["call_arguments"]


def call_arguments(definition: Definition, workload: Workload) -> list[Any]:
    """Inputs in order, scalars included, then the outputs that are written through arguments.

    Memory is reserved but never touched, so a tensor of many gigabytes costs nothing.

    Raises:
        RecordError: the Workload does not bind every axis and dtype of the Definition.
    """
    axes = definition.bind_axes(workload.axes)
    dtypes = definition.bind_dtypes(workload.dtypes)
    scalars = workload.scalars()
    arguments: list[Any] = []
    for name in (*definition.inputs, *definition.written_outputs):
        if name in definition.inputs and definition.inputs[name].is_scalar:
            arguments.append(scalars[name])
            continue
        shape = definition.shape_of(name, axes)
        strides = definition.strides_of(name, axes, workload.layouts.get(name))
        arguments.append(torch.empty_strided(shape, strides, dtype=_storage_dtype(definition.dtype_of(name, dtypes))))
    return arguments


def _storage_dtype(name: str) -> torch.dtype:
    # Two packed 4-bit codes are stored in a byte.
    found = torch.uint8 if name == "float4_e2m1" else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
