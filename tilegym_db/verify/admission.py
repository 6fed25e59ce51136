"""What a Definition must pass before it is admitted, with every line of its own code run in a child process.

A reference is code that somebody wrote: it may end the process, wait forever, or fill the memory. Here that is a finding about
the record that did it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import platformdirs

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.locked import read_lock
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Workload
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.sizes import scalars_with_axes
from tilegym_db.verify.apart import run_apart
from tilegym_db.verify.expected import broken_constraint
from tilegym_db.verify.inputs import draw_inputs
from tilegym_db.verify.reference import run_reference
from tilegym_db.verify.self_test import DRAW_SO, self_test
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["require_returning_reference", "run_reference_once", "run_self_test", "smallest_axes", "trial_scalars"]

TRIAL_SIZES = (2, 4, 8, 16, 64, 128, 1)
MAX_TRIALS = 150_000
TRIAL_LIMIT_S = 30.0
SELF_TEST_LIMIT_S = 120.0
"""For all dtypes of one Definition; the longest that ships takes 4 s on an idle core."""


def run_self_test(
    definition: Definition, workloads: list[Workload], *, limit_s: float = SELF_TEST_LIMIT_S
) -> list[str]:
    """The findings of :func:`~tilegym_db.verify.self_test.self_test` as text; so is a reference that never returns."""
    what = f"{definition.name}: the reference, or a formulation of its self_test,"
    try:
        found = run_apart(_self_test, (definition, workloads), what, limit_s)
    except RecordError as error:
        return [str(error)]
    return [str(finding) for finding in found]


def _self_test(definition: Definition, workloads: list[Workload]) -> list[str]:
    return [str(finding) for finding in self_test(definition, workloads)]


def run_reference_once(record: Definition, file: Path, *, limit_s: float | None = None) -> None:
    """Run the reference on the smallest inputs that the Definition allows, in its first dtypes, for 30 s at most.

    Raises:
        RecordError: it raises, ends its process or does not finish, or returns something other than the outputs declared.
    """
    run_apart(_run_reference_once, (record, file), f"{file}: reference: it", limit_s or TRIAL_LIMIT_S)


def require_returning_reference(
    catalog: Catalog, record: Definition, *, run: Callable[[Definition, Path], None] = run_reference_once
) -> None:
    """Before this process computes with a reference that did not come with the package: run it apart, once per digest.

    Nobody has to add a Definition through ``add-definition``: its file may have been written or changed by hand. Of a checkout,
    those came with it whose digest its lock states. That a reference returned is remembered in the user's cache folder, since a
    process with PyTorch takes seconds to start.

    Args:
        catalog: has the file of the Definition.
        record: the Definition.
        run: runs the reference apart.

    Raises:
        RecordError: as :func:`run_reference_once`.
    """
    path = catalog.definition_paths.get(record.name)
    packaged = shipped_root()
    if path is None:
        return
    if path.is_relative_to(packaged) and (catalog.write_root != packaged or _is_locked(packaged, record)):
        return
    known = Path(platformdirs.user_cache_dir("tilegym-db")) / "references" / f"{record.digest}-{version('torch')}"
    if record.digest in _RETURNED or os.path.exists(known):
        return
    run(record, path)
    _RETURNED.add(record.digest)
    with contextlib.suppress(OSError):  # a cache folder that cannot be written to costs the next command a few seconds
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()


def _is_locked(root: Path, record: Definition) -> bool:
    with contextlib.suppress(RecordError):  # a damaged lock vouches for nothing
        return read_lock(root).get(record.name, {}).get(record.version) == record.digest
    return False


_RETURNED: set[str] = set()
"""Digests of the Definitions whose references returned in a child of this process."""


def _run_reference_once(record: Definition, file: Path) -> None:
    axes = smallest_axes(record)
    if axes is None:
        raise RecordError(
            f"{file}: constraints: no sizes among {TRIAL_SIZES} satisfy all of them. Relax them.",
            code="constraints_unsatisfiable",
        )
    dtypes = {name: choices[0] for name, choices in record.dtypes.items()}
    case = Case(axes, dtypes, scalars_with_axes(record, trial_scalars(record), axes))
    try:
        work = record.cost_of(axes, dtypes)
    except RecordError as error:
        raise RecordError(f"{file}: cost: at {case}: {error}", code="cost_failed") from None
    if min(work) < 0:
        raise RecordError(
            f"{file}: cost: at {case}: {min(work):g} is no amount of work; flops and bytes are not negative.",
            code="cost_negative",
        )
    try:
        inputs = draw_inputs(record, case, "cpu")
        broken = broken_constraint(record, axes, inputs)
        outputs = run_reference(record, inputs) if broken is None else {}
    except RecordError as error:
        raise RecordError(f"{file}: reference: at {case}: {error}", code=error.code) from None
    if broken is not None:
        raise RecordError(
            f"{file}: content_constraints: drawn inputs break {broken} at {case}; {DRAW_SO}.",
            code="content_constraint_broken",
        )
    for name, value in outputs.items():
        found = (tuple(value.shape), value.dtype)
        declared = (record.shape_of(name, axes), storage_dtype(record.dtype_of(name, dtypes)))
        if found != declared:
            raise RecordError(
                f"{file}: reference: at {case}: '{name}' has shape {found[0]} and dtype {found[1]}, "
                f"but outputs.{name} declares {declared[0]} and {declared[1]}.",
                code="output_differs",
            )


def smallest_axes(record: Definition) -> dict[str, int] | None:
    """Small axis sizes that satisfy the constraints, or None where none do.

    They differ from each other where they may, so that a transposed result has the wrong shape, and are 1 only where
    they must, so that nothing is broadcast by accident.
    """
    names = record.var_axes
    bindings = itertools.islice(itertools.product(TRIAL_SIZES, repeat=len(names)), MAX_TRIALS)
    for sizes in sorted(bindings, key=lambda sizes: (sizes.count(1), -len(set(sizes)), math.prod(sizes))):
        try:
            return record.bind_axes(dict(zip(names, sizes, strict=True)))
        except RecordError:
            continue
    return None


def trial_scalars(record: Definition) -> dict[str, Scalar]:
    """A harmless value for every scalar input: small for a float, 1 for an integer, False for a flag."""
    scalars: dict[str, Scalar] = {}
    for name, spec in record.inputs.items():
        if spec.is_scalar:
            dtype = record.dtypes.get(spec.dtype, (spec.dtype,))[0]
            scalars[name] = False if dtype == "bool" else 1 if dtype.startswith(("int", "uint")) else 1e-3
    return scalars
