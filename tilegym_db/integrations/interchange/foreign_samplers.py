"""Foreign samplers that our judge of distributions fits, recognised by what they take and give; as Definitions that it judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition

__all__ = ["KnownSampler", "draws_itself", "known_sampler", "sampler_record"]

PROBABILITIES, UNIFORM = "probs", "uniform"


@dataclass(frozen=True)
class KnownSampler:
    """A foreign sampler: ours that has its law, and what the axes of its rows and of its vocabulary are called."""

    ours: Definition
    rows: str
    columns: str
    output: str
    takes_uniform: bool


def known_sampler(definition: Definition, catalog: Catalog) -> KnownSampler | str:
    """The sampler that an adapted Definition is, or why it is none whose law is known here.

    Args:
        definition: with the inputs and outputs of the foreign record.
        catalog: has the samplers of ours, whose law says how often each draws what.
    """
    given = tuple(name for name in definition.inputs if name not in (PROBABILITIES, UNIFORM))
    laws = _samplers(catalog)
    ours = laws.get(given)
    takes_uniform = UNIFORM in definition.inputs
    if ours is None or tuple(definition.inputs) != (PROBABILITIES, *given, *([UNIFORM] * takes_uniform)):
        known = "; ".join(", ".join((PROBABILITIES, *names)) for names in laws)
        return f"its inputs ({', '.join(definition.inputs)}) are those of no sampler with a known law ({known})"
    if len(definition.outputs) != 1:
        return f"it has {len(definition.outputs)} outputs, and a sampler has one"
    shape = definition.inputs[PROBABILITIES].shape or ()
    if len(shape) != 2 or not all(isinstance(entry, str) and entry in definition.axes for entry in shape):
        return f"{PROBABILITIES} has the shape {list(shape)}, not rows by vocabulary"
    rows, columns = map(str, shape)
    ((output, drawn),) = definition.outputs.items()
    if drawn.shape != (rows,) or drawn.dtype not in ("int32", "int64"):
        return f"{output} is {drawn.dtype} {list(drawn.shape or ())}, not an index for each of {rows}"
    for key in (PROBABILITIES, *given, *([UNIFORM] * takes_uniform)):
        found, wanted = definition.inputs[key], ours.inputs[key]
        stated = found.shape or ()
        if (found.dtype, len(stated), stated[:1]) != (wanted.dtype, len(wanted.shape or ()), (rows,)):
            return f"{key} is {found.dtype} {list(stated)}, and a law is known for {wanted.dtype}, one for each row"
    return KnownSampler(ours, rows, columns, output, takes_uniform)


def _samplers(catalog: Catalog) -> dict[tuple[str, ...], Definition]:
    """What a sampler takes beside probabilities and random numbers -> the one of ours that takes just this."""
    found = {}
    for definition in catalog.definitions.values():
        first, *given, last = definition.inputs if len(definition.inputs) > 1 else ("", "")
        if definition.sampled and (first, last) == (PROBABILITIES, UNIFORM):
            found[tuple(given)] = definition
    return found


def sampler_record(content: dict[str, Any], sampler: KnownSampler) -> dict[str, Any]:
    """The content of a Definition that is judged by the law of ours, and takes a random number for each row as ours does.

    Args:
        content: of the adapted Definition; its own reference is not used, since it draws by itself.
        sampler: what it is.
    """
    ours = sampler.ours.to_dict()
    (law,) = sampler.ours.sampled.values()
    source = ours["joint_inputs"]["source"]
    for axis, name in (("B", sampler.rows), ("V", sampler.columns)):
        source = source.replace(f'axes["{axis}"]', f'axes["{name}"]')
    arguments = ", ".join((*(name for name in content["inputs"] if name != UNIFORM), UNIFORM))
    narrower = (
        ""
        if content["outputs"][sampler.output]["dtype"] == "int64"
        else f"\n\n_in_64_bits = run\n\n\ndef run({arguments}):\n    return _in_64_bits({arguments}).to(torch.int32)\n"
    )
    first = content["reference"].partition("\n")[0]
    return {
        **content,
        "inputs": content["inputs"] | {UNIFORM: {"shape": [sampler.rows], "dtype": "float32"}},
        "reference": f"{first}\n{ours['reference'].rstrip()}\n{narrower}",
        "sampled": {sampler.output: {"law": law.law, "uniforms": UNIFORM}},
        "joint_inputs": {**ours["joint_inputs"], "source": source},
        "input_generators": {UNIFORM: {"kind": "uniform"}},
        "independent_axes": [sampler.rows],
        "special_values": [],
    }


def draws_itself(sampler: KnownSampler) -> str | None:
    """Why the data set's own Solutions are not called here; None where they are."""
    if sampler.takes_uniform:
        return None
    return (
        "it makes its own random numbers, and a sampler is given one for each row here, so that a call repeats: "
        f"add the argument '{UNIFORM}' behind the inputs"
    )
