"""Select and draw the inputs that FlashInfer-Bench must not draw at random, and write them as safetensors files.

FlashInfer-Bench draws each input independently: integers from -1024 to 1023, and floats around zero. Offsets, ids and
permutations would then be out of range, and related inputs would not match. One file per workload has these inputs. They are
drawn on the CPU by the Definition's generators, from a seed derived from the workload's uuid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.interchange.drafts import WIDE_INTEGERS
from tilegym_db.records import Definition, Workload
from tilegym_db.records.backward import forward_of
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.workload import SafetensorsInput

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
MAX_TOTAL_MIB = 64.0
"""Default maximum size of all blobs of an export, in MiB. It is less than the size of the sources."""
MAX_BLOB_MIB = 8.0
"""Default maximum size of one blob, in MiB."""

_HEADER_BYTES = 256
"""Maximum header bytes per tensor in a file."""
_DOMAINS = frozenset({"distinct_ids", "offsets", "integers", "powers_of_two", "probabilities", "log_decay"})
"""Generators whose values cannot be replaced by values around zero, in any dtype."""


@dataclass(frozen=True)
class Blob:
    """The inputs of one Workload that a file has to hold."""

    path: str
    """Path in the data set."""
    definition: Definition
    workload: Workload
    names: tuple[str, ...]
    nbytes: int
    """Size of the file in bytes, or slightly more."""
    reason: str
    """The reason that FlashInfer-Bench cannot draw them."""


@dataclass
class BlobFolder:
    """A folder that blobs are drawn into, smallest first, up to a total size."""

    folder: Path
    total_bytes: int = int(MAX_TOTAL_MIB * MIB)
    largest_bytes: int = int(MAX_BLOB_MIB * MIB)
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for each blob path that is left out."""

    def choose(self, wanted: Iterable[Blob]) -> None:
        """Decide which blobs to include. Nothing is drawn yet."""
        left = self.total_bytes
        for blob in sorted(wanted, key=lambda blob: (blob.nbytes, blob.path)):
            if blob.nbytes > self.largest_bytes:
                self.refused[blob.path] = (
                    f"the inputs that cannot be drawn at random have more than {self.largest_bytes / MIB:g} MiB "
                    "(--largest-blob)"
                )
            elif blob.nbytes > left:
                self.refused[blob.path] = (
                    "the inputs that cannot be drawn at random do not fit into the "
                    f"{self.total_bytes / MIB:g} MiB of all blobs, smallest first (--blobs)"
                )
            else:
                left -= blob.nbytes

    def write(self, blob: Blob, roots: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
        """Draw a blob and write it; return the file and its entry in the side file.

        Raises:
            RecordError: the inputs cannot be drawn.
            StoreError: the file cannot be written.
        """
        from safetensors.torch import save

        content = save({name: tensor.clone() for name, tensor in drawn_together(blob, roots).items()})
        digest = hashlib.sha256(content).hexdigest()
        target = self.folder / f"{hashlib.sha256(blob.path.encode()).hexdigest()}.safetensors"
        try:
            target.write_bytes(content)
        except OSError as error:
            raise StoreError(
                f"cannot keep {blob.path} of {len(content)} bytes: {error.strerror or error}. Nothing was exported.",
                code="write_failed",
            ) from None
        return target, {
            "sha256": digest,
            "bytes": len(content),
            "workload": blob.workload.uuid,
            "seed": blob_seed(blob.workload),
            "inputs": [*blob.names],
        }


def why_drawn(definition: Definition, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs that FlashInfer-Bench must not draw, each with the reason."""
    reasons: dict[str, str] = {}
    for name in definition.saved:
        reasons[name] = f"'{name}' is an output of {definition.backward_of}, and FlashInfer-Bench would draw it"
    for name in definition.tensor_inputs:
        generator = definition.input_generators.get(name)
        if definition.dtype_of(name, dtypes) in WIDE_INTEGERS:
            reason = f"'{name}' holds indices or counts, and FlashInfer-Bench would draw integers from -1024 to 1023"
            reasons.setdefault(name, reason)
        elif generator is not None and generator.kind in _DOMAINS:
            reasons.setdefault(name, f"'{name}' is drawn as {generator.kind}, and FlashInfer-Bench has no such inputs")
    together = [*(definition.joint_inputs.inputs if definition.joint_inputs is not None else ())]
    if definition.saved:
        together += [name for name in forward_of(definition).inputs if name in definition.tensor_inputs]
    for name in together:
        reasons.setdefault(name, f"'{name}' belongs together with other inputs, and FlashInfer-Bench draws each alone")
    for name in (item.uniforms for item in definition.sampled.values()):
        reasons.setdefault(name, f"'{name}' holds numbers from 0 to 1, and FlashInfer-Bench draws around zero")
    return reasons


def blob_of(definition: Definition, workload: Workload, dtypes: dict[str, str], folder: str, name: str) -> Blob | None:
    """Return the blob that a Workload needs; None if FlashInfer-Bench may draw its inputs or files have them already.

    Args:
        definition: our Definition.
        workload: one of its Workloads.
        dtypes: the bound dtype variables.
        folder: folder in the data set.
        name: name of the exported Definition.

    Raises:
        RecordError: the forward Definition of a backward is not in the catalog.
    """
    reasons = {
        key: reason
        for key, reason in why_drawn(definition, dtypes).items()
        if not isinstance(workload.inputs.get(key), SafetensorsInput)
    }
    if not reasons:
        return None
    axes = definition.bind_axes(workload.axes)
    nbytes = sum(
        math.prod(definition.shape_of(key, axes)) * STORED_BYTES[definition.dtype_of(key, dtypes)] + _HEADER_BYTES
        for key in reasons
    )
    names = tuple(key for key in definition.inputs if key in reasons)
    path = f"{folder}/{name}_{workload.uuid}.safetensors"
    return Blob(path, definition, workload, names, nbytes, next(iter(reasons.values())))


def blob_seed(workload: Workload) -> int:
    """Return the seed of a Workload's blob."""
    return int.from_bytes(hashlib.sha256(f"blob of {workload.uuid}".encode()).digest()[:8], "little") >> 1


def drawn_together(blob: Blob, roots: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Draw the tensors of a blob on the CPU, equal to those of a draw of all inputs from the same seed.

    Args:
        blob: the blob to draw.
        roots: catalog roots, for input files that the tensors depend on.

    Raises:
        RecordError: a function of the Definition raises, a file is missing, or memory is short.
    """
    from tilegym_db.records.case import Case
    from tilegym_db.verification.inputs import BlobReader, draw_inputs

    source, workload = blob.definition, blob.workload
    case = Case.of_workload(source, workload, distribution="normal", seed=blob_seed(workload))
    # Draw only the needed inputs: weights may have gigabytes, and each input has its own seed.
    needed = {*blob.names, *(name for name, spec in source.inputs.items() if spec.is_scalar)}
    needed |= set(case.files) & set(why_drawn(source, case.call.dtypes))
    part = source.model_copy(update={"inputs": {name: spec for name, spec in source.inputs.items() if name in needed}})
    try:
        drawn = draw_inputs(part, case, "cpu", blobs=BlobReader(roots))
    except (RuntimeError, MemoryError) as error:  # torch raises it if it cannot allocate this size
        raise RecordError(
            f"{source.name}: its inputs cannot be drawn: {str(error).partition(chr(10))[0]}", code="inputs_not_drawable"
        ) from None
    return {name: drawn[name].contiguous() for name in blob.names}  # type: ignore[union-attr]
