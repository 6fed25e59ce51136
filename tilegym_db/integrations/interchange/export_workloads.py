"""Workloads on their way out: what FlashInfer-Trace has no words for, and which inputs a file holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.blob_files import find_blob
from tilegym_db.errors import RecordError
from tilegym_db.integrations.interchange.export_blobs import Blob, BlobFolder, blob_of
from tilegym_db.integrations.interchange.export_files import Export
from tilegym_db.integrations.interchange.specialise import Specialised
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import RandomInput, SafetensorsInput, ScalarInput

__all__ = ["WorkloadWriter"]


class WorkloadWriter:
    """Those of one Definition of ours. Puts the files that they need into the export."""

    def __init__(self, export: Export, catalog: Catalog, source: Definition, blobs: BlobFolder | None) -> None:
        """Nothing is drawn yet; without ``blobs`` nothing is."""
        self.export, self.catalog, self.source, self.blobs = export, catalog, source, blobs

    def wanted(self, item: Specialised, workloads: Sequence[Workload]) -> Iterator[Blob]:
        """The blobs that Workloads need, whether there will be room for them or not."""
        for workload in workloads:
            blob = self._blob(item, workload)
            if isinstance(blob, Blob) and self._unsayable(workload) is None:
                yield blob

    def _unsayable(self, workload: Workload) -> str | None:
        """Why a Workload has no words there, whatever its inputs hold; None where it has."""
        strided = workload.layout_classes(self.source)
        if strided:
            return f"'{min(strided)}' is not contiguous, and FlashInfer-Trace has no layouts"
        for name, given in workload.inputs.items():
            if isinstance(given, ScalarInput) and not isinstance(given.value, bool | int | float):
                return f"the scalar '{name}' is {given.value!r}, and FlashInfer-Trace has numbers only"
            if isinstance(given, SafetensorsInput):
                try:
                    find_blob(self.catalog.roots, name, given)
                except RecordError as error:
                    return str(error)
        return None

    def _blob_folder(self, item: Specialised) -> str:
        return f"blob/workloads/{self.source.op_type}/{item.name}"

    def _blob(self, item: Specialised, workload: Workload) -> Blob | str | None:
        """The blob that a Workload needs, or why nobody can say which."""
        try:
            return blob_of(self.source, workload, dict(item.dtypes), self._blob_folder(item), item.name)
        except RecordError as error:
            return str(error)

    def written(self, item: Specialised, workload: Workload) -> dict[str, Any] | str:
        """As it is written there, or why it cannot be."""
        reason = self._unsayable(workload)
        if reason is not None:
            return reason
        blob = self._blob(item, workload)
        held: dict[str, Any] = {}
        if isinstance(blob, Blob):
            reason = self._draw(blob)
            held = {name: {"type": "safetensors", "path": blob.path, "tensor_key": name} for name in blob.names}
        elif blob is not None:
            reason = blob
        if reason is not None:
            return reason
        inputs: dict[str, Any] = {}
        for name in self.source.inputs:
            given = workload.inputs.get(name)
            match given:
                case ScalarInput():
                    inputs[name] = {"type": "scalar", "value": given.value}
                case SafetensorsInput():
                    path = f"{self._blob_folder(item)}/{given.path}"
                    self.export.blobs[path], _ = find_blob(self.catalog.roots, name, given)
                    inputs[name] = {"type": "safetensors", "path": path, "tensor_key": given.tensor_key}
                case _:
                    inputs[name] = held.get(name, {"type": "random"})
            if name not in held:
                self._note_drawing(name, given)
        return {"axes": item.var_axes(workload.axes), "inputs": inputs, "uuid": workload.uuid}

    def _draw(self, blob: Blob) -> str | None:
        """Put a blob into the export, or say why there is none."""
        if self.blobs is None:
            return blob.reason
        if blob.path in self.blobs.refused:
            return self.blobs.refused[blob.path]
        try:
            self.export.drawn[blob.path], self.export.told_blobs[blob.path] = self.blobs.write(blob, self.catalog.roots)
        except RecordError as error:
            return str(error)
        return None

    def _note_drawing(self, name: str, given: object) -> None:
        generator = self.source.input_generators.get(name)
        if isinstance(given, RandomInput) and (given.scale != 1.0 or given.seed is not None):
            self.export.notes[f"{self.source.name}.{name}"] = f"drawn here with scale {given.scale}; there at random"
        elif generator is not None and not isinstance(given, SafetensorsInput):
            self.export.notes[f"{self.source.name}.{name}"] = (
                f"drawn here by the generator {generator.kind}; there at random"
            )
