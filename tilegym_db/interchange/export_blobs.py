"""Inputs that FlashInfer-Bench must not draw at random, as safetensors files: which they are, which fit, and what is in them.

It draws whole numbers from -1024 to 1023, and floats around zero, each input by itself. Offsets, ids and permutations would then
point out of their tensors, and inputs that belong together would not. One file per workload holds those, drawn on the CPU by
the generators of the Definition from a seed that the workload's uuid gives.
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
"""Of all blobs of an export by default: less than the sources in it have."""
MAX_BLOB_MIB = 8.0
"""Of one blob by default."""

_HEADER_BYTES = 256
"""Of a file's header, at most, for each of its tensors."""
_DOMAINS = frozenset({"distinct_ids", "offsets", "integers", "powers_of_two", "probabilities", "log_decay"})
"""Generators of what nothing drawn around zero can stand for, whatever its dtype."""


@dataclass(frozen=True)
class Blob:
    """The inputs of one Workload that a file has to hold."""

    path: str
    """In the data set."""
    definition: Definition
    workload: Workload
    names: tuple[str, ...]
    nbytes: int
    """Of the file, or a little more."""
    reason: str
    """Why they cannot be drawn there."""


@dataclass
class BlobFolder:
    """Draws blobs into a folder, the smallest first, until they have so many bytes."""

    folder: Path
    total_bytes: int = int(MAX_TOTAL_MIB * MIB)
    largest_bytes: int = int(MAX_BLOB_MIB * MIB)
    refused: dict[str, str] = field(default_factory=dict)
    """Path -> why there is no such blob."""

    def choose(self, wanted: Iterable[Blob]) -> None:
        """Decide which of the blobs there will be. Nothing is drawn yet."""
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
        """Draw one and keep it; the file, and what the side file says of it.

        Raises:
            RecordError: it cannot be drawn.
            StoreError: it cannot be kept.
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
    """Input -> why FlashInfer-Bench must not draw it. The others may be drawn there."""
    reasons: dict[str, str] = {}
    for name in definition.saved:
        reasons[name] = f"'{name}' is what {definition.backward_of} gives, and FlashInfer-Trace would draw it"
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
    """Return the blob that a Workload needs; None if everything may be drawn there, or lies in files already.

    Args:
        definition: ours.
        workload: of it.
        dtypes: every dtype variable, bound.
        folder: of the data set.
        name: what the Definition is called there.

    Raises:
        RecordError: a backward's forward is in no catalog.
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
    """Return the seed that a Workload's blob is drawn from."""
    return int.from_bytes(hashlib.sha256(f"blob of {workload.uuid}".encode()).digest()[:8], "little") >> 1


def drawn_together(blob: Blob, roots: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of a blob by name, on the CPU: what a draw of all inputs from that seed has for them.

    Args:
        blob: whose.
        roots: of the catalog, for inputs that lie in files and that these depend on.

    Raises:
        RecordError: a function of the Definition raises, a file is not there, or there is no memory for it.
    """
    from tilegym_db.records.case import Case
    from tilegym_db.verify.inputs import BlobReader, draw_inputs

    source, workload = blob.definition, blob.workload
    case = Case.of_workload(source, workload, distribution="normal", seed=blob_seed(workload))
    # Weights of gigabytes stand beside ids of kilobytes: only what is asked for is drawn, and each from a seed of its name.
    needed = {*blob.names, *(name for name, spec in source.inputs.items() if spec.is_scalar)}
    needed |= set(case.files) & set(why_drawn(source, case.call.dtypes))
    part = source.model_copy(update={"inputs": {name: spec for name, spec in source.inputs.items() if name in needed}})
    try:
        drawn = draw_inputs(part, case, "cpu", blobs=BlobReader(roots))
    except (RuntimeError, MemoryError) as error:  # what torch raises for a size that it cannot allocate
        raise RecordError(
            f"{source.name}: its inputs cannot be drawn: {str(error).partition(chr(10))[0]}", code="inputs_not_drawable"
        ) from None
    return {name: drawn[name].contiguous() for name in blob.names}  # type: ignore[union-attr]
