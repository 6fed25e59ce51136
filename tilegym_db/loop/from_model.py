"""Profile a model by module class, and create tasks for the classes that a Definition describes but no verified kernel serves.

The second part measures a model for the loop and decides which kernels to keep.

The third part finds awarded kernels that could serve a model's calls. Their ratios are per operator, and nothing is
applied.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.loop.cut import cut, why_not_cut
from tilegym_db.loop.tasks import check_language, create_task
from tilegym_db.measurement.machine import Machine, select_machine, timing_lock
from tilegym_db.models.bench.model_bench import ModelBenchOptions, model_bench
from tilegym_db.models.called_functions import Seam, function_seams
from tilegym_db.models.capture import (
    ModelInputs,
    forward_arguments,
    of_one_gpu,
    random_inputs,
    typical_inputs,
    unreached_parts,
)
from tilegym_db.models.found import GLUE, LIBRARY, NO_DEFINITION, ModuleGroup, undescribed
from tilegym_db.models.gpu_time import ModuleTime, module_times, time_of
from tilegym_db.models.handle import IN_GRAPHS
from tilegym_db.models.patch import PatchOptions, discover, keep_workloads, model_tag, patch_what_fits
from tilegym_db.models.products import LINEAR, Operators
from tilegym_db.models.random_model import build_model, config_content, load_config
from tilegym_db.published.entries import spelled_bits, why_not_as_required
from tilegym_db.published.table import table_for
from tilegym_db.records import Workload, axes_key
from tilegym_db.records.hardware import GPU_SLUGS, gpus_meant, parse_gpu
from tilegym_db.records.loop import Coverage, Estimate, Experiment, ModelRun, Task
from tilegym_db.records.text import binding_key, canonical_json, explain_command
from tilegym_db.resolver.resolve import requirements
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import award_rows, model_run_rows

MIN_SHARE = 0.01
"""Minimum share of the model's time for which a kernel is worthwhile."""
WITH_ACTIVATION = ("mlp", "experts")
"""The kinds of parts whose kernels compute the activations in them."""
Match = Literal["exact", "by layout adapter", "none"]
StockTimes = tuple[list[ModuleTime], float]


@dataclass(frozen=True)
class Piece:
    """A module class, or a function that it calls, with its share of the model's time and the Definition that describes it.

    The time is without that of submodules, and of functions that are pieces. A module that calls several operators has one piece
    per operator. Each has the module's whole time, because the profile does not split it by operator.
    """

    part: str
    share: float
    calls: int
    definition: str = ""
    match: Match = "none"
    workloads: tuple[Workload, ...] = ()
    served: bool = False
    reason: str = ""
    outcome: str = ""
    module_class: type[torch.nn.Module] | None = None
    function: str = ""
    """The function, as a :class:`Seam` names it; empty for the modules."""
    inside: str = ""
    """The Definitions whose kernels compute this too, such as the activation of an MLP. A kernel for it alone serves no call."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content, one row of a table."""
        return {
            "part": self.part,
            "share": round(self.share, 4),
            "calls": self.calls,
            "definition": self.definition,
            "match": self.match,
            "workloads": [workload.uuid for workload in self.workloads],
            "served": self.served,
            "outcome": self.outcome or self.reason,
        }


@dataclass(frozen=True)
class ModelPart:
    """A module class with all of its pieces, so that its time counts once."""

    pieces: tuple[Piece, ...]

    @property
    def part(self) -> str:
        """The name of the module class."""
        return self.pieces[0].part

    @property
    def share(self) -> float:
        """The share of the model's time without its submodules."""
        return self.pieces[0].share

    @property
    def served(self) -> bool:
        """True if verified kernels serve every operator of it that the model calls."""
        called = [piece for piece in self.pieces if piece.workloads or piece.served] or self.pieces
        return all(piece.served for piece in called)


def parts_of(pieces: Iterable[Piece]) -> list[ModelPart]:
    """Return the module classes of a model, in the order of their first pieces."""
    grouped: dict[object, list[Piece]] = {}
    for piece in pieces:
        grouped.setdefault((piece.module_class or piece.part, piece.function), []).append(piece)
    return [ModelPart(tuple(group)) for group in grouped.values()]


@dataclass
class ModelPieces:
    """A profiled model. Shares are of GPU time or, on a CPU, of process CPU time; ``time_of`` says which."""

    model: str
    time_of: str
    total_us: float
    pieces: list[Piece] = field(default_factory=list)
    unreached: tuple[str, ...] = ()
    """The parts that the profiled call did not run."""


def tasks_from_model(
    path: Path,
    *,
    language: str,
    gpu: str = "auto",
    prompt: int = 128,
    dtype: str = "bfloat16",
    layers: int | None = None,
    drafts: Path | None = None,
) -> ModelPieces:
    """Profile a model with random weights, and create a task for each piece that is worth one.

    Args:
        path: config file, or folder with a ``config.json``.
        gpu: ``auto``, ``cpu``, or a GPU of this machine, because the profile is taken here.
        drafts: folder for drafts of missing Definitions; without it none are written.

    Raises:
        UsageError: the config or an option is invalid.
        HardwareError: the requested GPU is not in this machine.
    """
    check_language(language)
    machine = select_machine(gpu)
    config = load_config(path, layers)
    model = build_model(config, machine.device, dtype)
    inputs = typical_inputs(model, 1, prompt)
    found = pieces_of(model, inputs, model_tag(path))
    found.unreached = unreached_parts(model, inputs)
    outcomes = []
    for piece in found.pieces:
        try:
            outcome = _outcome(piece, model, inputs, machine, language, drafts, found.model)
        except TilegymDBError as error:
            outcome = str(error)
        outcomes.append(replace(piece, outcome=outcome))
    found.pieces = outcomes
    return found


def _outcome(
    piece: Piece, model: Any, inputs: ModelInputs, machine: Machine, language: str, drafts: Path | None, tag: str
) -> str:
    if piece.share < MIN_SHARE:
        return f"below {MIN_SHARE:.0%} of the time"
    if piece.served:
        return f"served by a verified kernel of {piece.definition}"
    if piece.definition and piece.workloads:
        return f"task {_task(piece, machine, language).id}"
    if drafts is None or piece.definition or piece.inside or _is_of_torch(piece):
        return why_no_task(model, piece)
    assert piece.module_class is not None, "only PyTorch calls have none"
    found = cut(model, Seam(piece.module_class, piece.function), inputs, tag)
    if isinstance(found, str):
        return f"{piece.reason or NO_DEFINITION}; it cannot be cut out: {found}"
    left = f"; its reference is to be written anew: {found.left}" if found.left else ""
    return f"draft {found.write(drafts)}{left}"


def why_no_task(model: Any, piece: Piece) -> str:
    """Return the reason why no task can be made for a piece that no kernel serves, and what to do about it."""
    if piece.definition and not piece.workloads:
        return f"no task: the profiled call does not call {piece.definition}"
    if piece.inside:
        return f"no task: kernels of {piece.inside} compute it too"
    reason = piece.reason or NO_DEFINITION
    if _is_of_torch(piece):
        return piece.reason or f"a PyTorch call; {NO_DEFINITION}"
    assert piece.module_class is not None, "only PyTorch calls have none"
    refused = why_not_cut(model, Seam(piece.module_class, piece.function))
    if refused:
        return f"{reason}; it cannot be cut out: {refused}"
    return f"{reason}; --drafts DIR of task from-model writes a draft of one"


def _is_of_torch(piece: Piece) -> bool:
    return piece.module_class is None or piece.module_class.__module__.startswith("torch.")


def _task(piece: Piece, machine: Machine, language: str) -> Task:
    return create_task(
        piece.definition,
        language=language,
        gpu=machine.gpu,
        workload=tuple(workload.uuid for workload in piece.workloads),
        objective="coverage",
    )


def stock_times(model: Any, inputs: ModelInputs) -> StockTimes:
    """Return the time of each module class in one call of the unpatched model, and the total, in microseconds.

    Functions are timed apart from the modules that call them.
    """

    def call() -> Any:
        with torch.no_grad():
            return model(**forward_arguments(model, inputs))

    return module_times(model, call, function_seams(model))


def pieces_of(
    model: Any, inputs: ModelInputs, tag: str, times: StockTimes | None = None, required: Collection[str] = ()
) -> ModelPieces:
    """Match each module class of a model with the Definitions of the catalog, costliest first.

    The model's calls are added to the user's workloads, tagged with the model. ``times`` are earlier :func:`stock_times`; they
    stay valid when the published kernels change. ``required`` is what must be verified of the bits of a kernel that serves.
    """
    catalog = Catalog.default().requiring(required)
    measured, total_us = times or stock_times(model, inputs)
    described = discover(model, catalog)
    others, inside = _undescribed(model, described, catalog), _inside(model, described)
    served, captured = _calls(model, inputs, catalog)
    kept = {(item.definition, item.uuid): item for item in kept_calls(captured, tag)}
    pieces: list[Piece] = []
    functions = {item.function for item in measured if item.function}
    for item in measured:
        share = item.time_us / total_us if total_us else 0.0
        name = Seam(item.module_class, item.function).name
        groups = [group for group in described if _is_about(group, item, functions)]
        matched = sorted({group.definition for group in groups if group.definition and not group.reason})
        reasons = sorted({group.reason for group in groups if group.reason})
        for definition in matched:
            # The profiled call is a prefill.
            workloads = tuple(
                work
                for (owner, _), work in sorted(kept.items(), key=lambda item: item[0])
                if owner == definition and "stage:decode" not in work.tags
            )
            match: Match = "by layout adapter" if any(work.layouts for work in workloads) else "exact"
            pieces.append(
                Piece(
                    name,
                    share,
                    item.calls,
                    definition,
                    match,
                    workloads,
                    definition in served,
                    module_class=item.module_class,
                    function=item.function,
                )
            )
        if not matched:
            reason = "; ".join(reasons) or ("" if item.function else others.get(item.module_class.__name__, ""))
            piece = Piece(name, share, item.calls, reason=reason, module_class=item.module_class)
            within = "" if item.function else inside.get(item.module_class, "")
            pieces.append(replace(piece, function=item.function, inside=within))
    return ModelPieces(tag, time_of(model), total_us, pieces)


def _undescribed(model: Any, described: Sequence[ModuleGroup], catalog: Catalog) -> dict[str, str]:
    """Return the reason for each class of modules that no Definition describes, as in the report of a patch.

    Classes without a row there only pass tensors on, and that takes time too.
    """
    found = {type(module).__name__: GLUE for module in model.modules() if module._modules}
    found |= {one.module_class: one.reason for one in undescribed(model, described)}
    if found.get(LINEAR) == LIBRARY and Operators.of(catalog).one:
        found[LINEAR] = IN_GRAPHS
    return found


def _inside(model: Any, described: Sequence[ModuleGroup]) -> dict[type[torch.nn.Module], str]:
    """Return the Definitions of the MLPs or experts that have all modules of a class without weights as their submodules."""
    owners = {
        id(module): group.definition
        for group in described
        if group.kind in WITH_ACTIVATION and group.definition and not group.reason
        for module in group.modules
    }
    found: dict[type[torch.nn.Module], list[str]] = {}
    for module in model.modules():
        for child in module.children():
            if not child._modules and not child._parameters:
                found.setdefault(type(child), []).append(owners.get(id(module), ""))
    return {cls: ", ".join(sorted(set(names))) for cls, names in found.items() if all(names)}


def _is_about(group: ModuleGroup, item: ModuleTime, functions: Collection[str]) -> bool:
    """Return True if a group is a timed function, or for a module, any part of it that is no timed function."""
    if not issubclass(item.module_class, group.module_class):
        return False
    return group.function == item.function if item.function else group.function not in functions


def _calls(model: Any, inputs: ModelInputs, catalog: Catalog) -> tuple[set[str], tuple[Workload, ...]]:
    """Return the Definitions that verified kernels serve in this model, and every kind of call that it makes."""
    handle = patch_what_fits(model, PatchOptions(verify=True, inputs=inputs, catalog=catalog))
    try:
        with torch.no_grad():
            model(**forward_arguments(model, inputs))
        hits = handle.report().hits()
    finally:
        handle.unpatch()
    return {name for name, count in hits.items() if count}, handle.workloads


def kept_calls(captured: Sequence[Workload], tag: str) -> list[Workload]:
    """Return the catalog's Workload for each captured call, and add missing ones to the user's catalog."""
    keep_workloads(tuple(captured), tag)
    fresh = Catalog.default()
    known = {name: fresh.workloads_for(name) for name in {item.definition for item in captured}}
    found = []
    for item in captured:
        same = [other for other in known[item.definition] if _call(other) == _call(item)]
        found += same[:1]
    return found


def _call(workload: Workload) -> Any:
    return (
        sorted(workload.axes.items()),
        sorted(workload.dtypes.items()),
        sorted(workload.scalars().items()),
        sorted(workload.layouts.items()),
    )


# ---- Decisions of the loop about a model -----------------------------------------------------------------

PROFILES = 5


@dataclass(frozen=True)
class ModelState:
    """A model with random weights from a config, and the shape of its call."""

    path: Path
    machine: Machine
    dtype: str = "bfloat16"
    prompt: int = 128
    rounds: int = 10
    layers: int | None = None

    @property
    def tag(self) -> str:
        """The model's tag in workloads and runs."""
        return model_tag(self.path)

    @cached_property
    def digest(self) -> str:
        """sha256 of the config as built and of the call's dtype and prompt length."""
        content = config_content(load_config(self.path, self.layers))
        return hashlib.sha256(canonical_json([content, self.dtype, self.prompt]).encode()).hexdigest()

    @cached_property
    def model(self) -> Any:
        """The model, built once so that every call uses the same weights."""
        return build_model(load_config(self.path, self.layers), self.machine.device, self.dtype)

    @cached_property
    def inputs(self) -> ModelInputs:
        """Token ids [1, prompt], or the arguments of a model that takes no tokens."""
        return typical_inputs(self.model, 1, self.prompt)

    @cached_property
    def stock_times(self) -> StockTimes:
        """The stock profile, taken once because published kernels do not change it."""
        return stock_times(self.model, self.inputs)

    def pieces(self) -> ModelPieces:
        """Return the time of each piece of the model and the Definitions that describe it."""
        return pieces_of(self.model, self.inputs, self.tag, self.stock_times)

    def coverage(self) -> Coverage:
        """Return the time share of verified kernels in one call, from :data:`PROFILES` profiles.

        On a GPU the profiler's launch numbers attribute the time.
        """
        handle = patch_what_fits(self.model, PatchOptions(catalog=Catalog.default()))
        try:
            with timing_lock(self.machine.device):
                shares = [self._share(handle, self._call) for _ in range(PROFILES)]
        finally:
            handle.unpatch()
        return coverage_of(shares, time_of(self.model))

    def _call(self) -> Any:
        with torch.no_grad():
            return self.model(**forward_arguments(self.model, self.inputs))

    def _share(self, handle: Any, call: Callable[[], Any]) -> float:
        share = handle.profile(call).share if self.machine.is_gpu else handle.cpu_share(call)
        return float(share or 0.0)

    def run(self) -> tuple[ModelRun, list[str]]:
        """Prove the kernels on the model's own calls and time patched against stock; return the run and the failures."""
        options = ModelBenchOptions(
            dtype=self.dtype, prompt=self.prompt, new=0, rounds=self.rounds, layers=self.layers, verify=True
        )
        run, handle = model_bench(self.path, self.machine, options)
        return run, handle.report().problems


# ---- Decisions ----------------------------------------------------------------------------------------
# Pure functions that decide the loop's next step and whether to keep a change.

MIN_TOTAL_SPEEDUP = 0.995
"""Minimum lower end of the confidence interval of the whole call's speedup. Below it, the model may be slower."""
DISCARDS_IN_A_ROW = 5


@dataclass(frozen=True)
class KeepDecision:
    """The decision to keep or discard a change, with its reason."""

    decision: Literal["keep", "discard"]
    reason: str


def decide(before: Coverage, after: Coverage, total: Estimate, failed_proofs: Sequence[str]) -> KeepDecision:
    """Decide whether to keep a change of the kernels that serve a model.

    Args:
        total: stock time over patched time of the whole call, from interleaved rounds.
        failed_proofs: kernels that failed on the model's own calls, each with the reason.
    """
    if failed_proofs:
        return KeepDecision("discard", f"a proof on the model's own calls failed: {'; '.join(failed_proofs)}")
    if before.time_of != after.time_of:
        return KeepDecision(
            "discard", f"coverage of {before.time_of} time and of {after.time_of} time cannot be compared"
        )
    gained, spread = after.median - before.median, max(before.high - before.low, after.high - after.low)
    shares = f"coverage of {after.time_of} time {before.median:.1%} -> {after.median:.1%}, spread {spread:.1%}"
    if gained <= spread:
        return KeepDecision("discard", f"{shares}: it rose by no more than its spread over {after.profiles} profiles")
    if total.ci_low is None or total.ci_high is None:
        return KeepDecision("discard", f"{shares}; too few rounds to decide whether the model became slower")
    speedup = f"the whole call {total.median:.3f}x (99% interval {total.ci_low:.3f} to {total.ci_high:.3f})"
    if total.ci_low < MIN_TOTAL_SPEEDUP:
        return KeepDecision("discard", f"{shares}; {speedup}: the lower end must be at least {MIN_TOTAL_SPEEDUP}")
    return KeepDecision("keep", f"{shares}; {speedup}")


def coverage_of(shares: Sequence[float], time_of: Literal["gpu", "cpu"]) -> Coverage:
    """Return the median, minimum and maximum of several profiles."""
    ordered = sorted(min(max(share, 0.0), 1.0) for share in shares)
    return Coverage(
        median=ordered[len(ordered) // 2], low=ordered[0], high=ordered[-1], profiles=len(ordered), time_of=time_of
    )


def next_piece(pieces: Sequence[Piece], tried: Collection[str]) -> Piece | None:
    """Return the costliest piece of stock code that a task can be made for; None if there is none left."""
    open_ = [
        piece
        for piece in pieces
        if piece.definition and piece.workloads and not piece.served and piece.definition not in tried
    ]
    worth = [piece for piece in open_ if piece.share >= MIN_SHARE]
    return min(worth, key=lambda piece: (-piece.share, piece.definition), default=None)


def why_stop(experiments: Sequence[Experiment], seconds_left: float) -> str | None:
    """Return the reason to stop early, by the experiments of this run in their order; None to continue."""
    if seconds_left <= 0:
        return "the budget is spent"
    quickest = min((one.seconds for one in experiments), default=0.0)
    if seconds_left < quickest:
        return f"{seconds_left:.0f} s of the budget are left, and the quickest experiment of this run took {quickest:.0f} s"
    last = [one.decision for one in experiments[-DISCARDS_IN_A_ROW:]]
    if len(last) == DISCARDS_IN_A_ROW and "keep" not in last:
        return f"{DISCARDS_IN_A_ROW} experiments in a row were not kept"
    return None


# ---- Recommended kernels ---------------------------------------------------------------------------------


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
    explain: str = ""
    """Without an award, the command that tells which kernel serves the call, and why."""


@dataclass(frozen=True)
class Recommendation:
    """The calls of a model, and the runs of the model itself. Only the runs measure the whole model."""

    model: str
    gpu: str
    calls: tuple[Recommended, ...]
    model_runs: tuple[dict[str, Any], ...]
    unreached: tuple[str, ...] = ()
    """The parts that the captured calls did not run."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        calls = [asdict(call) for call in self.calls]
        found = {"model": self.model, "gpu": self.gpu, "calls": calls, "model_runs": list(self.model_runs)}
        return {**found, "unreached": list(self.unreached)}


def recommend(
    path: Path,
    *,
    gpu: str,
    prompt: int = 128,
    dtype: str = "bfloat16",
    layers: int | None = 1,
    parallel: int = 1,
    require: str | Collection[str] = (),
) -> Recommendation:
    """Capture the calls of a model with random weights on the CPU, and find the nearest standing award for each.

    Args:
        path: config file, or folder with a ``config.json``.
        layers: maximum number of layers to keep, because calls repeat per layer.
        parallel: number of GPUs that share the model; the calls are those of one of them.
    """
    required = requirements(require)
    config = of_one_gpu(load_config(path, layers), parallel)
    with _without_advice():
        model = build_model(config, "cpu", dtype)
        inputs = random_inputs(model, 1, prompt)
        handle = patch_what_fits(model, PatchOptions(verify=True, inputs=inputs))
        handle.unpatch()
        unreached = unreached_parts(model, inputs)
    slugs = gpus_meant(parse_gpu(gpu), GPU_SLUGS) or [parse_gpu(gpu)]
    with open_store(read_only=True) as store:
        awards = [row for row in award_rows(store, gpus=slugs) if row["status"] == "standing"]
        runs = model_run_rows(store, model_tag(path), slugs)
    called = {call.definition for call in handle.workloads}
    awards = [row for row in awards if row["definition"] in called]
    catalog = Catalog.default()
    verified = [row for row in awards if _is_as_required(row, required, catalog)] if required else awards
    return Recommendation(
        model_tag(path),
        gpu,
        tuple(match(call, verified, catalog, gpu, required, awards) for call in handle.workloads),
        tuple(runs),
        unreached,
    )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hold back the warnings of transformers.

    It advises packages that make a model faster here, but this machine only captures the calls.
    """
    from transformers.utils.logging import warning_once

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        warning_once.cache_clear()  # else a held back warning would count as printed


def _is_as_required(award: dict[str, Any], required: Collection[str], catalog: Catalog) -> bool:
    """Return True if the kernel of an award promises what is required of its bits, and its published trace has it verified."""
    name, table = award["definition"], table_for(catalog, award["gpu"])
    if table is None or award["solution"] not in catalog.solution_paths:
        return False
    files, axis = catalog.solution(award["solution"]), catalog.definition(name).batch_axis
    return any(
        candidate.trace_id == award["trace_id"] and why_not_as_required(candidate, files, required, axis) is None
        for entry in table.entries(name, dict(award["dtypes"]))
        for candidate in entry.candidates
    )


def match(
    call: Workload,
    awards: list[dict[str, Any]],
    catalog: Catalog,
    gpu: str,
    required: Collection[str] = (),
    standing: Sequence[dict[str, Any]] = (),
) -> Recommended:
    """Return the award for a call: of the same sizes, else of the nearest ones. Reads only the catalog.

    ``required`` is what each of the awards has verified of its bits. ``standing`` also has the awards without that.
    """
    stage = next((tag.removeprefix("stage:") for tag in call.tags if tag.startswith("stage:")), "")
    dtypes = ", ".join(call.dtypes.values())
    axes = dict(catalog.definition(call.definition).bind_axes(call.axes))
    fitting = _awards_of(call, awards)
    place = (call.definition, stage, axes_key(call.axes), dtypes)
    if not fitting:
        others = len(_awards_of(call, standing))
        reason = (
            f"{others} award{'' if others == 1 else 's'}, none verified as {spelled_bits(required)}"
            if others
            else "no award of this operator and dtype on this GPU"
        )
        return Recommended(*place, available=False, reason=reason, explain=_explained(call, gpu, required))
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


def _awards_of(call: Workload, awards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in awards if row["definition"] == call.definition and dict(row["dtypes"]) == call.dtypes]


def _explained(call: Workload, gpu: str, required: Collection[str]) -> str:
    command = explain_command(call.definition, axes_key(call.axes), binding_key(call.dtypes), gpu)
    asked = [name.replace("_", "-") for name in sorted(required)[:1]]  # the first includes the second
    return " ".join([command, *(f"--require {name}" for name in asked)])


def _distance(one: dict[str, int], other: dict[str, int]) -> float:
    """Return the distance between two sizes: the sum of the axes' ratios in powers of two."""
    return sum(abs(math.log2(max(one.get(name, 1), 1) / max(size, 1))) for name, size in other.items())
