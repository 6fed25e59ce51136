"""Times a patched model against itself as it is: interleaved, in one process, on the same weights.

Two instances share every weight, and one of them is patched; each round generates with both, the first of the two in turns.
More ways of running the model take part where they are asked for: compiled ones in this process, other libraries in theirs.
One that cannot be had is left out, and the record says why.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.statistics import Interval, median_interval, paired_ratio
from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.capture import random_prompt
from tilegym_db.integrations.transformers.experts_wrapper import KNOWN, counted_ways
from tilegym_db.integrations.transformers.generation import Generate, Generation
from tilegym_db.integrations.transformers.gpu_time import GpuTime
from tilegym_db.integrations.transformers.model_sizes import check_run_fits
from tilegym_db.integrations.transformers.patch import Handle, patched
from tilegym_db.integrations.transformers.peers import PEERS, Job, Peer
from tilegym_db.integrations.transformers.race import ALTERNATIVES, ALWAYS, Entries, Observer, Race, compare, new_hits
from tilegym_db.integrations.transformers.random_model import DTYPES, build_model, load_config
from tilegym_db.integrations.transformers.verify_model import model_tag
from tilegym_db.records.base import canonical_json
from tilegym_db.records.claims import MIN_ROUNDS
from tilegym_db.records.model_run import Estimate, ModelRun, ModelTiming, Speedups, Way
from tilegym_db.records.trace import new_run_id

__all__ = ["ModelBenchOptions", "config_digest", "model_bench", "time_instance"]


@dataclass(frozen=True)
class ModelBenchOptions:
    """What to generate, and which ways of running the model take part beside stock and patched."""

    dtype: str = "bfloat16"
    """One of :data:`DTYPES`."""
    batch: int = 1
    """Sequences."""
    prompt: int = 512
    """Random tokens of each."""
    new: int = 64
    """Greedy tokens generated for each; 0 times the prefill alone, without ``generate``."""
    rounds: int = 10
    """Generations by each way that count."""
    layers: int | None = None
    """Keep only the first so many."""
    verify: bool = False
    """Prove the patch first; see :func:`~tilegym_db.integrations.transformers.patch.patch`."""
    with_static_cache: bool = False
    """Also both with a static cache and compiled decoding, as transformers compiles it."""
    with_compiled_prefill: bool = False
    """Also the forward of both under torch.compile, where ``new`` is 0."""
    beside: Collection[str] = ()
    """Also these libraries, names of :data:`~tilegym_db.integrations.transformers.peers.PEERS`."""
    experts: Collection[str] = ()
    """Also stock with these implementations of its experts, names of :data:`.experts_wrapper.KNOWN`."""
    profile: bool = False
    """Profile one more generation of the patched model, for the handle's report."""
    backend: str = "inductor"
    """Of torch.compile."""

    def check(self) -> None:
        """Raise :class:`UsageError` where a value is none that can be run."""
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.", code="dtype_unknown")
        if min(self.batch, self.prompt, self.rounds) < 1 or self.new < 0:
            given = f"{self.batch}, {self.prompt}, {self.rounds}, {self.new}"
            raise UsageError(
                f"batch, prompt and rounds are at least 1 and new at least 0, not {given}.", code="counts_invalid"
            )
        unknown = sorted(set(self.beside) - set(PEERS))
        if unknown:
            raise UsageError(f"beside must be one of {', '.join(PEERS)}, not {unknown[0]!r}.", code="peer_unknown")
        unknown = sorted(set(self.experts) - set(KNOWN))
        if unknown:
            raise UsageError(f"experts must be one of {', '.join(KNOWN)}, not {unknown[0]!r}.", code="experts_unknown")


def model_bench(
    path: Path, machine: Machine, options: ModelBenchOptions, observer: Observer | None = None
) -> tuple[ModelRun, Handle]:
    """Build a model from its config with random weights and time it, stock against patched.

    Args:
        path: config file, or folder with a ``config.json``.
        machine: what to run on.
        options: what to generate, and how.
        observer: told of every round.

    Returns:
        The record, which is not stored yet, and the handle of the patch (undone already) for its report.

    Raises:
        UsageError: the config, the dtype, a library's name or a number is none that can be run.
    """
    options.check()
    config = load_config(path, options.layers)
    check_run_fits(config, machine.device, options.dtype, options.batch, options.prompt, options.new)
    stock = build_model(config, machine.device, options.dtype)
    ids = random_prompt(stock, options.batch, options.prompt)
    twin = _twin_of(stock)
    with (
        patched(twin, verify=options.verify, **({"inputs": ids} if options.verify else {})) as handle,
        timing_lock(machine.device),
        contextlib.ExitStack() as processes,
        ClockWatch(machine.device) as clocks,
    ):
        peers = [processes.enter_context(Peer(job)) for job in _jobs(path, machine, options)]
        entries = _entries(Entries(stock, twin, handle, ids, options.new, options.backend), options)
        entries.add_peers(peers)
        race = compare(entries.ways, options.rounds, observer)
        kernels = _kernels_of(handle, entries.ways["patched"])
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
        "absent": entries.absent | race.absent,
        **_figures(race, entries, options.batch * options.new, served=bool(kernels)),
    }
    return ModelRun.from_dict(record, f"run of {type(stock).__name__}"), handle


def time_instance(model: Any, ids: Any, machine: Machine, rounds: int) -> tuple[Speedups, Handle]:
    """The prefill of a model in memory, stock against a patched twin that shares its weights, in turns; nothing is stored.

    Args:
        model: a causal language model in eval mode.
        ids: token ids [batch, tokens].
        machine: what the model is on.
        rounds: calls that count, by each of the two.

    Returns:
        How many times as fast the patched one is, and the handle of the patch (undone already) for its report.
    """
    twin = _twin_of(model)
    with patched(twin, verify=True, inputs=ids) as handle, timing_lock(machine.device):
        entries = Entries(model, twin, handle, ids, 0, "inductor")
        entries.add_eager()
        race = compare(entries.ways, rounds, None)
        return _speedups(race, "patched", "stock", stated=bool(_kernels_of(handle, entries.ways["patched"]))), handle


def _jobs(path: Path, machine: Machine, options: ModelBenchOptions) -> list[Job]:
    what = (options.dtype, options.batch, options.prompt, options.new, options.layers)
    return [Job(peer, path, machine.device, *what) for peer in dict.fromkeys(options.beside)]


def _entries(entries: Entries, options: ModelBenchOptions) -> Entries:
    """With all that runs in this process."""
    entries.add_eager()
    entries.add_static_cache(options.with_static_cache)
    entries.add_compiled_prefill(options.with_compiled_prefill)
    entries.add_experts(options.experts)
    return entries


def _twin_of(model: Any) -> Any:
    """A second instance that shares every weight and buffer with the first."""
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
        "model_class": type(model).__name__,
        "config_digest": config_digest(config),
        "layers": config.get_text_config().num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _described_machine(machine: Machine) -> dict[str, Any]:
    return {
        **{name: getattr(machine, name) for name in ("gpu", "gpu_name", "sm", "driver", "cuda", "libs")},
        "timer": "events" if machine.is_gpu else "wall",
    }


def config_digest(config: Any) -> str:
    """sha256 of what a config says of a model, whoever wrote it."""
    content = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _kernels_of(handle: Handle, generate: Generate) -> dict[str, int]:
    """Definition -> calls by kernel in one more generation."""
    before = handle.report().hits()
    generate()
    return new_hits(handle, before)


def _experts_of(stock: Any, generate: Generate) -> dict[str, int]:
    """Implementation of experts -> calls of it in one more generation by stock."""
    with counted_ways(stock) as ways:
        generate()
    return dict(ways)


# -- the figures ------------------------------------------------------------------------------------------------------


def _figures(race: Race, entries: Entries, tokens: int, *, served: bool) -> dict[str, Any]:
    """Timings and speedups; where no kernel ran, that of the patched model has no interval: it claims nothing."""
    timings = {name: _timing(generations, tokens) for name, generations in race.found.items()}
    speedups = _speedups(race, "patched", "stock", stated=served)
    ways = {}
    for name in timings.keys() - set(ALWAYS):
        alternatives = [alternative for alternative in ALTERNATIVES.get(name, ALWAYS) if alternative in timings]
        ways[name] = Way(
            timing=timings[name],
            against={alternative: _speedups(race, name, alternative) for alternative in alternatives},
            equal_tokens=_equal_tokens(race, name),
            kernels=entries.kernels.get(name, {}),
            library=entries.libraries.get(name, ""),
        )
    return {
        "equal_tokens": _equal_tokens(race, "patched"),
        "stock": timings["stock"].model_dump(),
        "patched": timings["patched"].model_dump(),
        **{f"{what}_speedup": value for what, value in speedups.model_dump().items()},
        "ways": {name: ways[name].model_dump() for name in race.found if name in ways},
    }


def _gpu_shares(gpu_time: GpuTime) -> dict[str, float] | None:
    if gpu_time.share is None:
        return None
    return {definition: _rounded(part) for definition, part in gpu_time.shares.items()}


def _equal_tokens(race: Race, name: str) -> int:
    return int((race.found["stock"][0].tokens == race.found[name][0].tokens).sum())


def _speedups(race: Race, name: str, alternative: str, *, stated: bool = True) -> Speedups:
    """Times of the alternative over those of a way, round by round; without intervals where they are not ``stated``."""
    this, other = race.found[name], race.found[alternative]
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
    """Without an interval where the rounds are too few for one."""
    if rounds < MIN_ROUNDS:
        return Estimate(median=_rounded(interval.median))
    return Estimate(median=_rounded(interval.median), ci_low=_rounded(interval.low), ci_high=_rounded(interval.high))


def _rounded(value: float) -> float:
    """Six digits: more say nothing, and make a record hard to read."""
    return float(f"{value:.6g}")
