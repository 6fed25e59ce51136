"""What the function of an operator says of itself, out of the Definition and of what is published."""

from __future__ import annotations

from collections import Counter

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import TensorSpec
from tilegym_db.resolver.table import load_table
from tilegym_db.store.input_files import published_folders

__all__ = ["arguments", "described", "kernels_of", "results"]


def described(definition: Definition, catalog: Catalog) -> str:
    """The docstring of a function: arguments, results, sizes, and the kernels that are verified for it."""
    lines = [definition.description or definition.name, "", "Args:"]
    lines += [f"    {name}: {text}" for name, text in arguments(definition).items()]
    lines += ["    backend: 'auto', 'reference', or the name of a verified solution.", "", "Returns:"]
    lines += [f"    {name}: {text}" for name, text in results(definition).items()]
    if definition.constraints:
        lines += ["", "Sizes:", *(f"    {text}" for text in definition.constraints)]
    kernels = kernels_of(definition, catalog)
    found = [f"    {gpu}: {', '.join(names)}" for gpu, names in kernels.items()]
    return "\n".join([*lines, "", "Fastest verified kernels:", *(found or ["    none yet; the reference runs"])])


def arguments(definition: Definition) -> dict[str, str]:
    """Each input with its shape, dtype and description."""
    return {name: _spelled(definition, name, spec) for name, spec in definition.inputs.items()}


def results(definition: Definition) -> dict[str, str]:
    """As :func:`arguments`, each output."""
    overwritten = {target: f" ({source}, overwritten)" for source, target in definition.in_place.items()}
    return {
        name: _spelled(definition, name, spec) + overwritten.get(name, "") for name, spec in definition.outputs.items()
    }


def _spelled(definition: Definition, name: str, spec: TensorSpec) -> str:
    dtypes = " or ".join(definition.dtypes.get(spec.dtype, (spec.dtype,)))
    axis = definition.size_scalars.get(name)
    if spec.is_scalar:
        what = f"a number, {dtypes}" if axis is None else f"a number, the size of {axis}"
    else:
        shape = f"[{', '.join(map(str, spec.shape or ()))}]"
        layout = f", {definition.layouts[name]}" if name in definition.layouts else ""
        variable = f"{spec.dtype} = " if spec.dtype in definition.dtypes else ""
        what = f"{shape} of {variable}{dtypes}{layout}"
    return f"{what}; {spec.description}" if spec.description else what


def kernels_of(definition: Definition, catalog: Catalog) -> dict[str, list[str]]:
    """GPU -> the kernels that are the fastest at some published point of it, those of most points first."""
    digests = {files.name: files.digest for files in catalog.solutions_for(definition.name)}
    found = {}
    for folder in published_folders(catalog):
        table = load_table(folder.name, trust=catalog.trust_foreign)
        if table is None or definition.name not in table.definitions:
            continue
        wins: Counter[str] = Counter()
        for dtypes in table.dtypes_of(definition.name):
            for entry in table.believed_entries(definition, dtypes):
                serving = [
                    candidate
                    for candidate in entry.candidates
                    if entry.definition_digest == definition.digest
                    and candidate.role == "kernel"
                    and candidate.latency_us is not None
                    and (candidate.speedup_ci_low or 0) > 1
                    and digests.get(candidate.solution) == candidate.solution_digest
                ]
                if serving:
                    wins[min(serving, key=lambda candidate: candidate.latency_us or 0).solution] += 1
        if wins:
            found[folder.name] = [name for name, _ in wins.most_common()]
    return found
