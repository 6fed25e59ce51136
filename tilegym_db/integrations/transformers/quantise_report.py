"""What quantising a model did to its numbers and to its memory, as data and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilegym_db.integrations.transformers.quantise_proof import LayerProof, LogitsProof

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["QuantisationReport"]

MIB = 2**20


@dataclass(frozen=True)
class QuantisationReport:
    """What ``patch(model, quantise="fp8")`` did.

    ``layers`` has a proof for each layer that was tried, those with a ``reason`` among them, which have their own weight again.
    ``skipped`` says of every other linear layer, and of experts, why they are not. Bytes are those of the model's parameters and
    buffers: ``bytes_held`` are kept in the memory of the CPU, so that unpatch() can put the parameters back.
    """

    way: str
    layers: tuple[LayerProof, ...]
    skipped: Mapping[str, str]
    logits: LogitsProof
    bytes_before: int
    bytes_after: int
    bytes_held: int

    @property
    def quantised(self) -> tuple[str, ...]:
        """The layers that compute with codes now."""
        return tuple(proof.name for proof in self.layers if not proof.reason)

    def summary(self) -> str:
        """In sentences."""
        proof, count = self.logits, len(self.quantised)
        told = f" ({proof.reason})" if proof.reason else ""
        lines = [
            f"quantise={self.way!r} changes this model's numbers: {count} linear layers compute with FP8 codes, activations with "
            "a scale for 128 channels and weights with one for 128 x 128 values.",
            f"Logits of {proof.tokens} positions against fp64: off by {_shown(proof.fp8_error)} in fp8, by "
            f"{_shown(proof.bf16_error)} in bf16{told}. The two differ by {_shown(proof.difference)} and choose the same token "
            f"at {proof.same_choice:.1%} of the positions.",
            f"Parameters and buffers take {self.bytes_after / MIB:,.1f} MiB, before {self.bytes_before / MIB:,.1f} MiB. "
            f"To undo it, {self.bytes_held / MIB:,.1f} MiB are held in the memory of the CPU.",
        ]
        kept = Counter([reason for _, reason in sorted(self.skipped.items())])
        kept.update(proof.reason for proof in self.layers if proof.reason)
        lines += [f"Left as they are ({number}): {reason}." for reason, number in kept.items()]
        return "\n".join(lines)

    def table(self) -> Table:
        """For a terminal: one row for each kind of layer, with the largest errors of its layers."""
        from rich.table import Table

        table = Table(title="quantised layers: largest relative error of their outputs against fp64")
        for heading in ("layer", "weight", "layers", "fp8", "bf16"):
            table.add_column(heading, justify="left" if heading == "layer" else "right")
        kinds: dict[tuple[str, tuple[int, int]], list[LayerProof]] = {}
        for proof in self.layers:
            if not proof.reason:
                kinds.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", proof.name), proof.shape), []).append(proof)
        for (name, (rows, columns)), proofs in kinds.items():
            errors = [max(value or 0.0 for value in one) for one in zip(*map(_errors, proofs), strict=True)]
            table.add_row(name, f"{rows} x {columns}", str(len(proofs)), *map(_shown, errors))
        return table


def _errors(proof: LayerProof) -> tuple[float | None, float | None]:
    return proof.fp8_error, proof.bf16_error


def _shown(error: float | None) -> str:
    return "an unknown amount" if error is None else f"{error:.3g}"
