"""Verify a patch on a model with random weights, and keep its calls as Workloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.models.capture import new_workloads, random_inputs
from tilegym_db.models.patch import patched
from tilegym_db.models.random_model import DTYPES, build_model, check_run_fits, load_config
from tilegym_db.models.report import PatchReport
from tilegym_db.paths import home
from tilegym_db.records import Workload


@dataclass(frozen=True)
class VerifiedModel:
    """The report with its proofs, and the kinds of calls that the model made."""

    report: PatchReport
    workloads: tuple[Workload, ...]


def verify_model(
    path: Path, *, device: str, dtype: str, batch: int, prompt: int, layers: int | None = None
) -> VerifiedModel:
    """Build a model from its config, patch it with ``verify=True``, and undo the patch.

    Args:
        path: config file, or folder with a ``config.json``.
        device: the device as torch names it.
        dtype: one of :data:`DTYPES`.
        batch: number of sequences.
        prompt: random tokens per sequence; two steps of decoding follow.
        layers: keep only this many of the first layers.

    Raises:
        UsageError: the config, the dtype or a size has no valid value.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.", code="dtype_unknown")
    if batch < 1 or prompt < 1:
        raise UsageError(f"batch and prompt must be at least 1, not {batch} and {prompt}.", code="counts_invalid")
    config = load_config(path, layers)
    check_run_fits(config, device, dtype, batch, prompt)
    model = build_model(config, device, dtype)
    with patched(model, verify=True, inputs=random_inputs(model, batch, prompt)) as handle:
        return VerifiedModel(handle.report(), handle.workloads)


def keep_workloads(workloads: tuple[Workload, ...], model: str) -> list[tuple[Path, Workload]]:
    """Append the Workloads that no catalog has to the user's own, tagged with the model; return them with their files.

    They go into the user's catalog even if the checkout is writable, because calls of one model are no shipped records.
    """
    catalog = Catalog.default()
    return catalog.add_workloads(new_workloads(workloads, catalog, [f"model:{model}"]), root=home() / "catalog")


def model_tag(path: Path) -> str:
    """Return the name of a config: its folder's name, the file's without the ending, or that of an id, in lower case."""
    if not path.exists():  # the id of a model, or a file that is not read
        return (path.stem if path.suffix == ".json" else path.name).lower()
    named = path.resolve().parent if path.name == "config.json" else path.resolve()
    return (named.name if named.is_dir() else named.stem).lower()
