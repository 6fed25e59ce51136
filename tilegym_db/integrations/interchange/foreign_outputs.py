"""What foreign outputs are: drawn at random, or such that a Solution need not give them. Read off records and sources alone."""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.records import Definition
from tilegym_db.records.signature import called_with, find_function
from tilegym_db.store.imported import StoredRecord

__all__ = ["is_drawn", "optional_outputs", "without_argument"]

SPARSE_ATTENTION = "dsa_sparse_attention"
"""How FlashInfer-Bench names the Definitions whose second output, the log-sum-exp, a Solution need not give."""


def is_drawn(definition: StoredRecord) -> bool:
    """Whether it gives indices of the family of samplers, which are mostly drawn; what masks or scales gives numbers."""
    if definition.record.get("op_type") != "sampling":
        return False
    return any(spec["dtype"].startswith("int") for spec in definition.record["outputs"].values())


def optional_outputs(item: StoredRecord, outputs: list[str], in_place: Mapping[str, str]) -> list[str]:
    """The last outputs, where the record marks them or its own evaluator lets a Solution leave them out."""
    specs = dict(zip(outputs, item.record["outputs"].values(), strict=True))
    marked = [name for name in outputs if specs[name].get("optional") is True]
    if not marked and item.name.startswith(SPARSE_ATTENTION) and len(outputs) == 2:
        marked = outputs[1:]
    last = outputs[-len(marked) :] if marked else []
    return marked if marked == last and len(marked) < len(outputs) and not set(marked) & set(in_place.values()) else []


def without_argument(definition: Definition, source: bytes, function: str) -> tuple[str, ...]:
    """The optional outputs for which a function that is given its outputs has no parameter."""
    found = find_function(source, function)
    if found is None or found.args.vararg is not None or not definition.optional_outputs:
        return ()
    given = len(called_with(definition, destination_passing_style=True))
    lacking = given - len(found.args.posonlyargs) - len(found.args.args)
    return definition.optional_outputs[-lacking:] if 0 < lacking <= len(definition.optional_outputs) else ()
