"""Reads tensors of Workloads from safetensors files, each file once, and only where its bytes are those that were stated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tilegym_db.catalog.blob_files import find_blob
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import SafetensorsInput
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["BlobReader", "blob_problems"]


class BlobReader:
    """The tensors of files below the roots of a catalog. Keeps what it read until it is cleared; one thread at a time."""

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        """Nothing is read yet. Without a root there are no files."""
        self.roots = tuple(roots)
        self._files: dict[str | None, dict[str, torch.Tensor]] = {}

    def tensor(self, name: str, spec: SafetensorsInput, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The tensor of an input, on the CPU, contiguous; nobody may write to it.

        Raises:
            RecordError: the file is missing or not what it was, or has no such tensor of this shape and dtype.
        """
        if spec.sha256 is None or spec.sha256 not in self._files:
            self._files[spec.sha256] = _tensors(find_blob(self.roots, name, spec)[1], name, spec.path)
        held = self._files[spec.sha256]
        if spec.tensor_key not in held:
            raise RecordError(f"inputs.{name}: {spec.path} has no tensor '{spec.tensor_key}'.", code="tensor_absent")
        found = held[spec.tensor_key]
        if tuple(found.shape) != shape:
            raise RecordError(
                f"inputs.{name}: {spec.path} holds shape {tuple(found.shape)}, the workload says {shape}.",
                code="tensor_shape_differs",
            )
        if found.dtype != storage_dtype(dtype):
            raise RecordError(
                f"inputs.{name}: {spec.path} holds {found.dtype}, the workload says {storage_dtype(dtype)}.",
                code="tensor_dtype_differs",
            )
        return found

    def clear(self) -> None:
        """Forget what was read."""
        self._files.clear()


def _tensors(content: bytes, name: str, path: str) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError:
        raise RecordError(
            f"inputs.{name}: reading {path} needs safetensors: pip install safetensors.", code="package_missing"
        ) from None
    try:
        return {key: value.contiguous() for key, value in load(content).items()}
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors has no tensor for
        raise RecordError(f"inputs.{name}: {path} cannot be read: {error}.", code="blob_unreadable") from None


def blob_problems(definition: Definition, workloads: Sequence[Workload], roots: Sequence[Path]) -> list[str]:
    """Why inputs of Workloads cannot be had from their files; empty where all of them can."""
    problems = []
    for workload in workloads:
        blobs = BlobReader(roots)
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        for name, spec in workload.files().items():
            try:
                blobs.tensor(name, spec, definition.shape_of(name, axes), definition.dtype_of(name, dtypes))
            except RecordError as error:
                problems.append(f"{definition.name}: workload {workload.uuid}: {error}")
    return problems
