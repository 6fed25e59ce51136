"""Whether anything could serve a Definition on a GPU at all: asked once, before a call site is put into a model.

What no published point could ever give a kernel for is no reason to stand before the model's own code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.records import Definition
from tilegym_db.resolver.decide import judge
from tilegym_db.resolver.measured_points import MeasuredPoint, find_point
from tilegym_db.resolver.request import make_request
from tilegym_db.resolver.table import Entry, ResolverTable

__all__ = ["why_never_served"]


def why_never_served(
    definition: Definition,
    table: ResolverTable | None,
    solutions: Mapping[str, SolutionFiles],
    *,
    gpu: str,
    sm: str,
    dtypes: Collection[str] | None = None,
    unavailable: Mapping[str, str] | None = None,
) -> str:
    """Why no call of a Definition can be given a kernel, whatever its sizes; empty where some call can.

    Args:
        definition: the operator.
        table: the published measurements of the GPU; None where there are none.
        solutions: the catalog's Solutions of the Definition, by name.
        gpu: the GPU's slug, for the reason.
        sm: its ``sm_XX``, or ``cpu``.
        dtypes: those that the model's tensors have; None where that is not known.
        unavailable: language -> why it cannot run in this process.
    """
    if table is None:
        return f"nothing is published for {gpu}"
    measured = table.dtypes_of(definition.name)
    usable = [one for one in measured if dtypes is None or not one or set(dtypes) & set(one.values())]
    if measured and not usable:
        known = "; ".join(", ".join(f"{name}={dtype}" for name, dtype in one.items()) for one in measured)
        return f"{definition.name} was not measured on {table.gpu} with {' or '.join(sorted(dtypes or ()))} (measured: {known})"
    key = "servable", definition.digest, frozenset((name, files.digest) for name, files in solutions.items()), sm
    asked = (*key, frozenset((unavailable or {}).items()), tuple(str(one) for one in usable))
    if asked not in table.indexes:
        table.indexes[asked] = _asked(definition, table, solutions, usable, sm, unavailable or {})
    found: str = table.indexes[asked]
    return found


def _asked(
    definition: Definition,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    dtypes: Collection[Mapping[str, str]],
    sm: str,
    unavailable: Mapping[str, str],
) -> str:
    reason = f"{definition.name} was not measured on {table.gpu}"
    for binding in dtypes:
        for entry in table.entries(definition.name, binding):
            found = _at(definition, entry, table, solutions, sm, unavailable)
            if not found:
                return ""
            reason = found
    return reason


def _at(
    definition: Definition,
    entry: Entry,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    sm: str,
    unavailable: Mapping[str, str],
) -> str:
    """Why even a call that is exactly a measured point gets no kernel; empty where it does."""
    try:
        request = make_request(
            definition,
            axes={name: entry.axes[name] for name in definition.var_axes if name in entry.axes},
            dtypes=entry.dtypes,
            layouts={name: layout for name, layout in entry.layouts.items() if name in definition.tensor_inputs},
            scalars={name: value for name, value in entry.scalars.items() if name in definition.inputs},
            gpu=table.gpu,
            sm=sm,
            unavailable=unavailable,
        )
    except UsageError as error:
        return str(error)
    if entry.definition_digest != definition.digest:
        why = find_point(request, table)
        return why if isinstance(why, str) else f"{definition.name} was measured under another meaning"
    decision = judge(MeasuredPoint(entry, exact=True), request, table, solutions)
    if decision.solution is not None:
        return ""
    kernels = [
        lost for lost in decision.rejected if lost.candidate.role == "kernel" and lost.candidate.latency_us is not None
    ]
    told = f": {kernels[0].candidate}: {kernels[0].reason}" if kernels else ""
    return f"no verified solution of {definition.name} is faster than stock anywhere on {table.gpu}{told}"
