"""Find awarded kernels that could serve a model's calls. The ratios are per operator, and nothing is applied."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.models.capture import random_inputs
from tilegym_db.models.layer_kinds import of_one_gpu
from tilegym_db.models.patch import PatchOptions, patch_what_fits
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.models.verify_model import model_tag
from tilegym_db.records import Workload, axes_key
from tilegym_db.records.hardware import GPU_SLUGS, gpus_meant, parse_gpu
from tilegym_db.records.loop import MIN_SPEEDUP
from tilegym_db.store.connection import open_store
from tilegym_db.store.loop import award_rows, model_run_rows


@dataclass(frozen=True)
class Recommended:
    """One kind of call of a model, and the nearest award. ``op_ratio`` is the operator's speedup, not the model's."""

    definition: str
    stage: str
    axes: str
    dtypes: str
    available: bool
    award: str = ""
    op_ratio: float | None = None
    op_ci_low: float | None = None
    over: str = ""
    exact: bool = False
    applied: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The calls of a model, and the runs of the model itself. Only the runs measure the whole model."""

    model: str
    gpu: str
    calls: tuple[Recommended, ...]
    model_runs: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        calls = [asdict(call) for call in self.calls]
        return {"model": self.model, "gpu": self.gpu, "calls": calls, "model_runs": list(self.model_runs)}


def recommend(
    path: Path, *, gpu: str, prompt: int = 128, dtype: str = "bfloat16", layers: int | None = 1, parallel: int = 1
) -> Recommendation:
    """Capture the calls of a model with random weights on the CPU, and find the nearest standing award for each.

    Args:
        path: config file, or folder with a ``config.json``.
        gpu: slug or family; it need not be in this machine.
        prompt: number of tokens; one decoding step follows.
        dtype: dtype of the model.
        layers: maximum number of layers to keep, because calls repeat per layer.
        parallel: number of GPUs that share the model; the calls are those of one of them.

    Raises:
        UsageError: the config or an option is invalid.
    """
    model = build_model(of_one_gpu(load_config(path, layers), parallel), "cpu", dtype)
    handle = patch_what_fits(model, PatchOptions(verify=True, inputs=random_inputs(model, 1, prompt)))
    handle.unpatch()
    slugs = gpus_meant(parse_gpu(gpu), GPU_SLUGS) or [parse_gpu(gpu)]
    with open_store(read_only=True) as store:
        awards = [row for row in award_rows(store, gpus=slugs) if row["status"] == "standing"]
        runs = model_run_rows(store, model_tag(path), slugs)
    return Recommendation(
        model_tag(path),
        gpu,
        tuple(match(call, awards, Catalog.default(), gpu) for call in handle.workloads),
        tuple(runs),
    )


def match(call: Workload, awards: list[dict[str, Any]], catalog: Catalog, gpu: str) -> Recommended:
    """Return the award for a call: of the same sizes, else of the nearest ones. Reads only the catalog."""
    stage = next((tag.removeprefix("stage:") for tag in call.tags if tag.startswith("stage:")), "")
    dtypes = ", ".join(call.dtypes.values())
    axes = dict(catalog.definition(call.definition).bind_axes(call.axes))
    fitting = [row for row in awards if row["definition"] == call.definition and dict(row["dtypes"]) == call.dtypes]
    place = (call.definition, stage, axes_key(call.axes), dtypes)
    if not fitting:
        reason = (
            f"no award ({MIN_SPEEDUP:.2f}x over the best baseline) of this operator and dtype stands on this GPU. For "
            f"the kernel that serves it: tilegym-db explain {call.definition} --axes {axes_key(call.axes)} --gpu {gpu}"
        )
        return Recommended(*place, available=False, reason=reason)
    best = min(fitting, key=lambda row: (_distance(dict(row["axes"]), axes), -row["ratio"], row["id"]))
    exact = _distance(dict(best["axes"]), axes) == 0
    return Recommended(
        *place,
        available=True,
        award=best["id"],
        op_ratio=best["ratio"],
        op_ci_low=best["ci_low"],
        over=best["baseline"],
        exact=exact,
        reason="" if exact else f"measured at {axes_key(dict(best['axes']))}",
    )


def _distance(one: dict[str, int], other: dict[str, int]) -> float:
    """Return the distance between two sizes: the sum of the axes' ratios in powers of two."""
    return sum(abs(math.log2(max(one.get(name, 1), 1) / max(size, 1))) for name, size in other.items())
