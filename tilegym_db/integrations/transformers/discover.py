"""Finds the call sites of a model that a Definition describes. Looks, never touches.

What a module may be is judged by what it holds and what its code calls; which variant it is, by the fingerprint of that code;
whether that is so, by a probe. No list of models is consulted, and none of operators: what code a Definition computes is said
by its ``serving``, and how a kind of part is found and probed by its module in :mod:`.parts`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import did_you_mean
from tilegym_db.integrations.transformers import parts
from tilegym_db.integrations.transformers.found import Found, KnownCode, Nominee, Part, Variants
from tilegym_db.integrations.transformers.probe import device_of, matches

__all__ = ["discover"]

NOT_IN_MEMORY = "its weights are not in memory"


def discover(model: torch.nn.Module, catalog: Catalog) -> list[Found]:
    """Every group of modules that looks like a part that can be served, in the order in which the model has them.

    Parts that are made of others come last.
    """
    known = KnownCode(catalog)
    _warn_of_unknown_parts(known)
    place = {id(module): index for index, module in enumerate(model.modules())}
    found: list[Found] = []
    for name in parts.PARTS:
        module: Part = parts.part(name)
        found += [_judge(group, module, known) for group in module.find(model, known, found)]
    return sorted(found, key=lambda group: (group.norm is not None, place[id(group.modules[0])]))


def _warn_of_unknown_parts(known: KnownCode) -> None:
    for name in known.parts:
        if name not in parts.PARTS:
            who = [definition.name for definition in known.definitions(name)]
            warnings.warn(
                f"tilegym-db: {', '.join(who)} cannot be served: serving.part is '{name}', and the parts are "
                f"{', '.join(sorted(parts.PARTS))}.{did_you_mean(name, parts.PARTS)}",
                RuntimeWarning,
                stacklevel=4,
            )


def _judge(found: Found, module: Part, known: KnownCode) -> Found:
    """What a group computes, or why it stays stock."""
    if found.reason:
        return found
    variants = module.variants(found, known)
    if isinstance(variants, str):
        return replace(found, reason=variants)
    confirmed = {_confirm(found, module, sample, variants, known.catalog) for sample in found.samples}
    refusals = sorted(reason for _, reason in confirmed if reason)
    names = sorted(name for name, _ in confirmed if name)
    name = names[0] if names else variants.nominees[0].definition.name
    reason = refusals[0] if refusals else ""
    if len(names) > 1:
        reason = f"its modules compute different definitions: {', '.join(names)}"
    nominee = next(nominee for nominee in variants.nominees if nominee.definition.name == name)
    return replace(found, definition=name, nominee=nominee, reason=reason)


def _confirm(
    found: Found, module: Part, sample: torch.nn.Module, variants: Variants, catalog: Catalog
) -> tuple[str, str]:
    """(Definition, reason): one of them is empty."""
    if device_of(sample).type == "meta":
        return "", NOT_IN_MEMORY
    names = [nominee.definition.name for nominee in variants.nominees]
    alternatives = {definition.name: definition for definition in variants.alternatives}
    matched: set[str] = set()
    for nominee in _one_per_code(variants.nominees):
        probed = module.probe(found, sample, nominee)
        if isinstance(probed, str):
            return "", probed
        asked = {nominee.definition.name: nominee.definition for nominee in variants.nominees} | alternatives
        matched.update(matches(probed, asked.values(), catalog))
    if len(matched) == 1 and matched <= set(names):
        return next(iter(matched)), ""
    expected = " or ".join(names)
    if not matched:
        return "", f"probed, it does not give the bits of {expected}"
    return "", f"probed, it gives the bits of {' and '.join(sorted(matched))}; expected were those of {expected} alone"


def _one_per_code(nominees: Sequence[Nominee]) -> list[Nominee]:
    """One nominee for each way in which inputs lie in a module: those that share it are told apart by one probe."""
    distinct: dict[tuple[tuple[str, ...], str], Nominee] = {}
    for nominee in nominees:
        distinct.setdefault((tuple(nominee.definition.inputs), str(nominee.code.attributes)), nominee)
    return list(distinct.values())
