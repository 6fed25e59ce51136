"""``tilegym-db add-definition``: a new operator, or a new version of one, into the catalog."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.output import note

if TYPE_CHECKING:
    from tilegym_db.records import Definition
    from tilegym_db.records.dtypes import Scalar

TRIAL_SIZES = (2, 4, 8, 16, 64, 128, 1)
MAX_TRIALS = 150_000


def command(
    file: Annotated[Path, typer.Argument(help="A definition as JSON.", exists=True, dir_okay=False, readable=True)],
) -> None:
    """Validate a definition, run its reference once on small inputs, and copy it into the catalog."""
    import importlib.util

    from tilegym_db.catalog import Catalog, read_bytes
    from tilegym_db.records import Definition

    record = Definition.from_json(read_bytes(file, "definition"), file)
    if importlib.util.find_spec("torch") is None:
        note("the reference was not run: torch is missing here (pip install 'tilegym-db[torch]').")
    else:
        run_reference_once(record, file)
    path = Catalog.default().add_definition(record)
    typer.echo(str(path))
    note(
        f"added definition '{record.name}' {record.version}. Next: give it sizes, at least one tagged 'tiny' "
        f"(tilegym-db add-workload FILE.jsonl), then: tilegym-db check {record.name}"
    )


def run_reference_once(record: Definition, file: Path) -> None:
    """Run the reference on the smallest inputs that the Definition allows, in its first dtypes.

    Raises:
        RecordError: it raises, or returns something other than the outputs declared.
    """
    from tilegym_db.errors import RecordError
    from tilegym_db.verify.inputs import Case, draw_inputs
    from tilegym_db.verify.reference import run_reference
    from tilegym_db.verify.torch_dtypes import storage_dtype

    axes = smallest_axes(record)
    if axes is None:
        raise RecordError(f"{file}: constraints: no sizes among {TRIAL_SIZES} satisfy all of them. Relax them.")
    dtypes = {name: choices[0] for name, choices in record.dtypes.items()}
    case = Case(axes, dtypes, trial_scalars(record))
    try:
        outputs = run_reference(record, draw_inputs(record, case, "cpu"))
    except RecordError as error:
        raise RecordError(f"{file}: reference: at {case}: {error}") from None
    for name, value in outputs.items():
        found = (tuple(value.shape), value.dtype)
        declared = (record.shape_of(name, axes), storage_dtype(record.dtype_of(name, dtypes)))
        if found != declared:
            raise RecordError(
                f"{file}: reference: at {case}: '{name}' has shape {found[0]} and dtype {found[1]}, "
                f"but outputs.{name} declares {declared[0]} and {declared[1]}."
            )


def smallest_axes(record: Definition) -> dict[str, int] | None:
    """Small axis sizes that satisfy the constraints, or None where none do.

    They differ from each other where they may, so that a transposed result has the wrong shape, and are 1 only where
    they must, so that nothing is broadcast by accident.
    """
    from tilegym_db.errors import RecordError

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
