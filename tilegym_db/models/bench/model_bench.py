"""Time a patched model against the stock model: interleaved, in one process, on the same weights.

Two instances share every weight, and one of them is patched. Each round generates with both, in alternating order. Options add
more execution modes: compiled ones in this process, and other libraries in separate processes. A mode that is unavailable is
left out, and the record has the reason.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import ToolchainError, UsageError
from tilegym_db.measurement.machine import Machine, timing_lock
from tilegym_db.measurement.timing import ClockWatch, Interval, median_interval, paired_ratio
from tilegym_db.models.bench.generation import (
    LIBRARIES,
    Generate,
    Generation,
    Job,
    LibraryProcess,
    dynamic_cache,
    prefill,
    static_cache,
)
from tilegym_db.models.capture import ModelInputs, text_configs, typical_inputs
from tilegym_db.models.gpu_time import GpuTime
from tilegym_db.models.handle import Handle
from tilegym_db.models.patch import model_tag, patched
from tilegym_db.models.random_model import build_model, check_dtype, check_run_fits, config_content, load_config
from tilegym_db.models.upstream_code import KNOWN, counted_ways, wrapper_of
from tilegym_db.published.entries import Requirement
from tilegym_db.records.loop import CONTROL, MIN_ROUNDS, Estimate, ExecutionMode, ModelRun, ModelTiming, Speedups
from tilegym_db.records.text import canonical_json
from tilegym_db.records.trace import new_run_id


@dataclass(frozen=True)
class ModelBenchOptions:
    """The generation to time, and the execution modes in addition to stock and patched."""

    dtype: str = "bfloat16"
    """One of :data:`~tilegym_db.models.random_model.DTYPES`."""
    batch: int = 1
    """Number of sequences."""
    prompt: int = 512
    """Random tokens per sequence."""
    new: int = 64
    """Greedy tokens per sequence; 0 times the prefill alone, without ``generate``."""
    rounds: int = 10
    """Counted generations per mode."""
    layers: int | None = None
    """Keep only this many of the first layers."""
    verify: bool = False
    """Verify the patch first; see :func:`~tilegym_db.models.patch.patch`."""
    require: tuple[Requirement, ...] = ()
    """What must be verified of the bits of the kernels; see :func:`~tilegym_db.models.patch.patch`."""
    with_static_cache: bool = False
    """Add stock and patched with a static cache and decoding compiled as in transformers."""
    with_compiled_prefill: bool = False
    """Add the forward of stock and patched under torch.compile, if ``new`` is 0."""
    beside: Collection[str] = ()
    """Add these libraries, names of :data:`~tilegym_db.models.bench.generation.LIBRARIES`."""
    experts: Collection[str] = ()
    """Add stock with these implementations of its experts, names of :data:`~tilegym_db.models.upstream_code.KNOWN`."""
    profile: bool = False
    """Profile one more generation of the patched model, for the handle's report."""
    backend: str = "inductor"
    """Backend of torch.compile."""

    def check(self) -> None:
        """Raise :class:`UsageError` if an option has no valid value."""
        check_dtype(self.dtype)
        if min(self.batch, self.prompt, self.rounds) < 1 or self.new < 0:
            given = f"{self.batch}, {self.prompt}, {self.rounds}, {self.new}"
            raise UsageError(
                f"batch, prompt and rounds must be at least 1 and new at least 0, not {given}.", code="counts_invalid"
            )
        unknown = sorted(set(self.beside) - set(LIBRARIES))
        if unknown:
            raise UsageError(f"beside must be one of {', '.join(LIBRARIES)}, not {unknown[0]!r}.", code="peer_unknown")
        unknown = sorted(set(self.experts) - set(KNOWN))
        if unknown:
            raise UsageError(f"experts must be one of {', '.join(KNOWN)}, not {unknown[0]!r}.", code="experts_unknown")


def model_bench(
    path: Path, machine: Machine, options: ModelBenchOptions, observer: Observer | None = None
) -> tuple[ModelRun, Handle]:
    """Build a model from its config with random weights and time it, stock against patched.

    Args:
        path: config file, or folder with a ``config.json``.

    Returns:
        The record, which is not stored yet, and the handle of the patch (undone already) for its report.
    """
    options.check()
    config = load_config(path, options.layers)
    check_run_fits(config, machine.device, options.dtype, options.batch, options.prompt, options.new)
    stock = build_model(config, machine.device, options.dtype)
    ids = typical_inputs(stock, options.batch, options.prompt)
    if not stock.can_generate() or not isinstance(ids, torch.Tensor):
        options = replace(options, new=0)  # an encoder is timed on its forward, and so is a model of pixels or sound
    twin = _twin_of(stock)
    with (
        patched(
            twin, verify=options.verify, require=options.require, **({"inputs": ids} if options.verify else {})
        ) as handle,
        timing_lock(machine.device),
        contextlib.ExitStack() as processes,
        ClockWatch(machine.device) as clocks,
    ):
        libraries = [processes.enter_context(LibraryProcess(job)) for job in _jobs(path, machine, options)]
        entries = _entries(Entries(stock, twin, handle, ids, options.new, options.backend), options)
        entries.add_libraries(libraries)
        comparison = compare(entries.ways, options.rounds, observer)
        kernels = kernels_of(handle, entries.ways["patched"])
        experts = _experts_of(stock, entries.ways["stock"])
        gpu_time = handle.profile(entries.ways["patched"]) if options.profile else GpuTime()
        throttled = clocks.reading().throttled
    record = {
        "run_id": new_run_id(machine.gpu),
        "timestamp": datetime.now(UTC),
        "model": model_tag(path),
        **_described(config, stock, options),
        **_described_machine(machine),
        **{"throttled": throttled, "kernels": kernels, "gpu_shares": _gpu_shares(gpu_time), "experts": experts},
        "absent": entries.absent | comparison.absent,
        **_figures(comparison, entries, options.batch * options.new, served=bool(kernels)),
    }
    return ModelRun.from_dict(record, f"run of {type(stock).__name__}"), handle


def time_instance(
    model: Any, ids: Any, machine: Machine, rounds: int, require: Collection[str] = ()
) -> tuple[Speedups, Handle]:
    """Time the prefill of a model in memory, stock against a patched twin with the same weights; store nothing.

    Returns:
        The speedup of the patched model, and the handle of the patch (undone already) for its report.
    """
    twin = _twin_of(model)
    with patched(twin, verify=True, inputs=ids, require=require) as handle, timing_lock(machine.device):
        entries = Entries(model, twin, handle, ids, 0, "inductor")
        entries.add_eager()
        comparison = compare(entries.ways, rounds, None)
        return _speedups(
            comparison, "patched", "stock", stated=bool(kernels_of(handle, entries.ways["patched"]))
        ), handle


def _jobs(path: Path, machine: Machine, options: ModelBenchOptions) -> list[Job]:
    what = (options.dtype, options.batch, options.prompt, options.new, options.layers)
    return [Job(peer, path, machine.device, *what) for peer in dict.fromkeys(options.beside)]


def _entries(entries: Entries, options: ModelBenchOptions) -> Entries:
    """Add all modes that run in this process."""
    entries.add_eager()
    entries.add_static_cache(options.with_static_cache)
    entries.add_compiled_prefill(options.with_compiled_prefill)
    entries.add_experts(options.experts)
    return entries


def _twin_of(model: Any) -> Any:
    """Return a second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _described(config: Any, model: Any, options: ModelBenchOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "batch": options.batch,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "rounds": options.rounds,
        "proved": options.verify,
        "required": list(options.require),
        "model_class": type(model).__name__,
        "config_digest": config_digest(config),
        "layers": text_configs(config)[0].num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _described_machine(machine: Machine) -> dict[str, Any]:
    return {
        **{name: getattr(machine, name) for name in ("gpu", "gpu_name", "sm", "driver", "cuda", "libs")},
        "timer": "events" if machine.is_gpu else "wall",
    }


def config_digest(config: Any) -> str:
    """Return the sha256 of a config's content; its formatting does not count."""
    return hashlib.sha256(canonical_json(config_content(config)).encode()).hexdigest()


def kernels_of(handle: Handle, generate: Generate) -> dict[str, int]:
    """Return Definition -> calls by kernel in one more generation. If that is a replay, which counts none, in one without."""
    before = handle.report().hits()
    generate()
    if not (kernels := new_hits(handle, before)):
        with handle.as_in_graphs():
            generate()
        kernels = new_hits(handle, before)
    return kernels


def _experts_of(stock: Any, generate: Generate) -> dict[str, int]:
    """Return implementation of experts -> its calls in one more generation by stock."""
    with counted_ways(stock) as ways:
        generate()
    return dict(ways)


# -- figures ----------------------------------------------------------------------------------------------------------


def _figures(comparison: Comparison, entries: Entries, tokens: int, *, served: bool) -> dict[str, Any]:
    """Return timings and speedups. If no kernel ran, the patched model has no interval, because it claims nothing."""
    timings = {name: _timing(generations, tokens) for name, generations in comparison.found.items()}
    speedups = _speedups(comparison, "patched", "stock", stated=served)
    ways = {}
    for name in timings.keys() - set(ALWAYS):
        alternatives = [alternative for alternative in ALTERNATIVES.get(name, ALWAYS) if alternative in timings]
        ways[name] = ExecutionMode(
            timing=timings[name],
            against={alternative: _speedups(comparison, name, alternative) for alternative in alternatives},
            equal_tokens=_equal_tokens(comparison, name),
            kernels=entries.kernels.get(name, {}),
            library=entries.libraries.get(name, ""),
        )
    return {
        "equal_tokens": _equal_tokens(comparison, "patched"),
        "stock": timings["stock"].model_dump(),
        "patched": timings["patched"].model_dump(),
        **{f"{what}_speedup": value for what, value in speedups.model_dump().items()},
        "ways": {name: ways[name].model_dump() for name in comparison.found if name in ways},
    }


def _gpu_shares(gpu_time: GpuTime) -> dict[str, float] | None:
    if gpu_time.share is None:
        return None
    return {definition: _rounded(part) for definition, part in gpu_time.shares.items()}


def _equal_tokens(comparison: Comparison, name: str) -> int:
    return int((comparison.found["stock"][0].tokens == comparison.found[name][0].tokens).sum())


def _speedups(comparison: Comparison, name: str, alternative: str, *, stated: bool = True) -> Speedups:
    """Return the times of the alternative over those of a mode, round by round; without intervals unless ``stated``."""
    this, other = comparison.found[name], comparison.found[alternative]
    has_steps = this[0].tpot_ms is not None
    ratios = {
        what: _estimate(
            paired_ratio(*([getattr(one, f"{what}_ms") for one in side] for side in (this, other))),
            len(this) if stated else 0,
        )
        for what in (("ttft", "tpot", "total") if has_steps else ("ttft", "total"))
    }
    return Speedups(**ratios)


def _timing(generations: Sequence[Generation], tokens: int) -> ModelTiming:
    total, rounds = median_interval([generation.total_ms for generation in generations]), len(generations)
    steps = [generation.tpot_ms for generation in generations if generation.tpot_ms is not None]
    peaks = [one.peak_memory_bytes for one in generations if one.peak_memory_bytes is not None]
    return ModelTiming(
        ttft_ms=_estimate(median_interval([generation.ttft_ms for generation in generations]), rounds),
        tpot_ms=_estimate(median_interval(steps), rounds) if steps else None,
        total_ms=_estimate(total, rounds),
        tokens_per_s=_rounded(tokens / total.median * 1e3) if tokens else None,
        peak_memory_bytes=max(peaks) if peaks else None,
    )


def _estimate(interval: Interval, rounds: int) -> Estimate:
    """Return the estimate; without an interval if the rounds are too few."""
    if rounds < MIN_ROUNDS:
        return Estimate(median=_rounded(interval.median))
    return Estimate(median=_rounded(interval.median), ci_low=_rounded(interval.low), ci_high=_rounded(interval.high))


def _rounded(value: float) -> float:
    """Round to six digits: more have no meaning and make a record hard to read."""
    return float(f"{value:.6g}")


# ---- comparison -----------------------------------------------------------------------------------------
# The execution modes of a comparison, and the rounds in which they alternate.
#
# Stock and patched always take part; options add compiled modes and other libraries. A mode that is unavailable, or that
# fails later, is left out with its reason.

WARM_UP_ROUNDS = 4
"""Rounds that do not count: kernels are chosen, loaded and compiled in them, allocators find their size, and the graph of a
prompt is captured."""

ALWAYS = ("stock", "patched")
ALTERNATIVES = {
    CONTROL: ("stock",),
    "stock_static_cache": ("stock", "patched"),
    "patched_static_cache": ("stock", "stock_static_cache"),
    "stock_compiled": ("stock", "patched"),
    "patched_compiled": ("stock", "stock_compiled"),
}
"""Mode in this process -> the mode that it is compared with. A library is compared with stock and patched."""

Observer = Callable[[int, int], None]
"""Called with (rounds done, rounds to do), warm-up included."""


class Entries:
    """The execution modes that take part, and the reasons for those that do not."""

    def __init__(self, stock: Any, twin: Any, handle: Handle, ids: ModelInputs, new: int, backend: str) -> None:
        """Start without modes; ``twin`` is the patched model, and :func:`model_bench` describes the other arguments."""
        self._models = {"stock": stock, "patched": twin}
        self._handle = handle
        self._ids = ids
        self._new = new
        self._backend = backend
        self.ways: dict[str, Generate] = {}
        self.absent: dict[str, str] = {}
        self.kernels: dict[str, dict[str, int]] = {}
        """Execution mode -> Definition -> calls by kernel in its first generation."""
        self.libraries: dict[str, str] = {}

    def add_eager(self) -> None:
        """Add stock, patched and the control, which always take part."""
        for name, model in {**self._models, CONTROL: self._models["stock"]}.items():
            self.ways[name] = (
                dynamic_cache(model, self._prompt(), self._new) if self._new else prefill(model, self._ids)
            )

    def _prompt(self) -> torch.Tensor:
        """Return the token ids that a generation begins with."""
        assert isinstance(self._ids, torch.Tensor), "models of other inputs are timed on their forward alone"
        return self._ids

    def add_static_cache(self, asked: bool) -> None:
        """Add stock and patched with a static cache and compiled decoding, if there is decoding."""
        for name, model in self._models.items() if asked else ():
            if self._new < 2:
                self.absent[f"{name}_static_cache"] = (
                    "it compiles decoding, and --max-new-tokens 0 or 1 has no decoding step."
                )
                continue
            try:
                self._add_compiled(
                    f"{name}_static_cache", static_cache(model, self._prompt(), self._new, self._backend)
                )
            except UsageError as error:
                self.absent[f"{name}_static_cache"] = str(error)

    def add_compiled_prefill(self, asked: bool) -> None:
        """Add stock and patched with their forward under torch.compile, if only the prefill is timed."""
        for name, model in self._models.items() if asked else ():
            if self._new:
                self.absent[f"{name}_compiled"] = (
                    "it compiles the forward for the prefill alone: --max-new-tokens 0. For decoding: --static-cache."
                )
            else:
                self._add_compiled(f"{name}_compiled", prefill(model, self._ids, self._backend))

    def add_experts(self, asked: Collection[str]) -> None:
        """Add stock with other implementations of its experts than the current one."""
        has_experts = any(wrapper_of(type(module).forward) is not None for module in self._models["stock"].modules())
        for implementation in dict.fromkeys(asked):
            if has_experts:
                self.ways[f"stock_{implementation}"] = _with_experts(
                    self._models["stock"], implementation, self.ways["stock"]
                )
            else:
                self.absent[f"stock_{implementation}"] = (
                    "the model has no experts whose implementation transformers chooses."
                )

    def add_libraries(self, libraries: Sequence[LibraryProcess]) -> None:
        """Add the libraries whose processes are ready."""
        for process in libraries:
            name = process.job.peer
            try:
                self.libraries[name] = process.ready()
                self.ways[name] = process
            except ToolchainError as error:
                self.absent[name] = str(error)

    def _add_compiled(self, name: str, generate: Generate) -> None:
        def counted() -> Generation:
            if name in self.kernels:
                return generate()
            before = self._handle.report().hits()
            generation = generate()
            self.kernels[name] = new_hits(self._handle, before)
            return generation

        self.ways[name] = counted


def _with_experts(model: Any, implementation: str, generate: Generate) -> Generate:
    """Return the same call with the model's experts set to another implementation."""

    def run() -> Generation:
        own = model.config._experts_implementation
        model.set_experts_implementation(implementation)
        try:
            return generate()
        finally:
            model.set_experts_implementation(own)

    return run


@dataclass(frozen=True)
class Comparison:
    """The counted generations of each mode, and the reasons for modes that failed."""

    found: dict[str, list[Generation]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def compare(ways: Mapping[str, Generate], rounds: int, observer: Observer | None = None) -> Comparison:
    """Generate with each mode in each round and return what was counted, in the order of :func:`balanced_orders`.

    A mode that fails takes no further part, for example if a library raises or the model cannot be compiled. The modes ``stock``
    and ``patched`` must not fail. Libraries, compilers and a GPU without free memory all raise RuntimeError.
    """
    comparison = Comparison({name: [] for name in ways})
    total = WARM_UP_ROUNDS + rounds
    for index in range(total):
        orders = balanced_orders(list(comparison.found))
        for name in orders[index % len(orders)]:
            try:
                generation = ways[name]()
            except (ToolchainError, RuntimeError) as error:
                if name in ALWAYS:
                    raise
                comparison.absent[name] = f"it failed in round {index + 1}: {_first_line(error)}"
                del comparison.found[name]
                continue
            if index >= WARM_UP_ROUNDS:
                comparison.found[name].append(generation)
        if observer is not None:
            observer(index + 1, total)
    return comparison


def balanced_orders(names: Sequence[str]) -> list[list[str]]:
    """Return orders that together let every mode follow every other equally often (Williams, 1949).

    The previous mode affects the next one through the GPU's temperature and through caches.
    """
    count = len(names)
    zigzag = [(number + 1) // 2 if number % 2 else (count - number // 2) % count for number in range(count)]
    rows = [[names[(place + shift) % count] for place in zigzag] for shift in range(count)]
    return rows if count % 2 == 0 else rows + [row[::-1] for row in rows]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if isinstance(error, ToolchainError) else f"{type(error).__name__}: {text}"


def new_hits(handle: Handle, before: Mapping[str, int]) -> dict[str, int]:
    """Return Definition -> calls by kernel since :meth:`Report.hits` was ``before``; those without calls are left out."""
    new = {name: calls - before.get(name, 0) for name, calls in handle.report().hits().items()}
    return {name: calls for name, calls in sorted(new.items()) if calls}
