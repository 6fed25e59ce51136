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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.statistics import Interval, median_interval, paired_ratio
from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.capture import random_prompt
from tilegym_db.integrations.transformers.claims import MIN_ROUNDS
from tilegym_db.integrations.transformers.generation import Generate, Generation
from tilegym_db.integrations.transformers.gpu_time import GpuTime
from tilegym_db.integrations.transformers.patch import Handle, patched
from tilegym_db.integrations.transformers.peers import PEERS, Job, Peer
from tilegym_db.integrations.transformers.race import ALTERNATIVES, ALWAYS, Entries, Observer, Race, compare, new_hits
from tilegym_db.integrations.transformers.random_model import DTYPES, build_model, load_config
from tilegym_db.integrations.transformers.sizes import check_run_fits
from tilegym_db.integrations.transformers.verify_model import model_tag
from tilegym_db.records.base import canonical_json
from tilegym_db.records.model_run import Estimate, ModelRun, ModelTiming, Speedups, Way
from tilegym_db.records.trace import new_run_id

__all__ = ["model_bench"]


def model_bench(
    path: Path,
    machine: Machine,
    *,
    dtype: str = "bfloat16",
    batch: int = 1,
    prompt: int = 512,
    new: int = 64,
    rounds: int = 10,
    layers: int | None = None,
    verify: bool = False,
    with_static_cache: bool = False,
    with_compiled_prefill: bool = False,
    beside: Collection[str] = (),
    profile: bool = False,
    backend: str = "inductor",
    observer: Observer | None = None,
) -> tuple[ModelRun, Handle]:
    """Build a model from its config with random weights and time it, stock against patched.

    Args:
        path: config file, or folder with a ``config.json``.
        machine: what to run on.
        dtype: one of :data:`DTYPES`.
        batch: sequences.
        prompt: random tokens of each.
        new: greedy tokens generated for each; 0 times the prefill alone, without ``generate``.
        rounds: generations by each way that count.
        layers: keep only the first so many.
        verify: prove the patch first; see :func:`~tilegym_db.integrations.transformers.patch.patch`.
        with_static_cache: also both with a static cache and compiled decoding, as transformers compiles it.
        with_compiled_prefill: also the forward of both under torch.compile, where ``new`` is 0.
        beside: also these libraries, names of :data:`~tilegym_db.integrations.transformers.peers.PEERS`.
        profile: profile one more generation of the patched model, for the handle's report.
        backend: of torch.compile.
        observer: told of every round.

    Returns:
        The record, which is not stored yet, and the handle of the patch (undone already) for its report.

    Raises:
        UsageError: the config, the dtype, a library's name or a number is none that can be run.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    if min(batch, prompt, rounds) < 1 or new < 0:
        raise UsageError(
            f"batch, prompt and rounds are at least 1 and new at least 0, not {batch}, {prompt}, {rounds}, {new}."
        )
    unknown = sorted(set(beside) - set(PEERS))
    if unknown:
        raise UsageError(f"beside must be one of {', '.join(PEERS)}, not {unknown[0]!r}.")
    config = load_config(path, layers)
    check_run_fits(config, machine.device, dtype, batch, prompt, new)
    stock = build_model(config, machine.device, dtype)
    ids = random_prompt(stock, batch, prompt)
    twin = _twin_of(stock)
    with (
        patched(twin, verify=verify, **({"inputs": ids} if verify else {})) as handle,
        timing_lock(machine.device),
        contextlib.ExitStack() as processes,
        ClockWatch(machine.device) as clocks,
    ):
        jobs = [Job(peer, path, machine.device, dtype, batch, prompt, new, layers) for peer in dict.fromkeys(beside)]
        peers = [processes.enter_context(Peer(job)) for job in jobs]
        entries = Entries(stock, twin, handle, ids, new, backend)
        entries.add_eager()
        entries.add_static_cache(with_static_cache)
        entries.add_compiled_prefill(with_compiled_prefill)
        entries.add_peers(peers)
        race = compare(entries.ways, rounds, observer)
        kernels = _kernels_of(handle, entries.ways["patched"])
        gpu_time = handle.profile(entries.ways["patched"]) if profile else GpuTime()
        throttled = clocks.reading().throttled
    record = {
        "run_id": new_run_id(machine.gpu),
        "timestamp": datetime.now(UTC),
        "model": model_tag(path),
        **_described(config, stock),
        "dtype": dtype,
        "batch": batch,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "rounds": rounds,
        **_described_machine(machine),
        "throttled": throttled,
        "proved": verify,
        "kernels": kernels,
        "gpu_shares": _gpu_shares(gpu_time),
        "equal_tokens": _equal_tokens(race, "patched"),
        "absent": entries.absent | race.absent,
        **_figures(race, entries, batch * new, served=bool(kernels)),
    }
    return ModelRun.from_dict(record, f"run of {type(stock).__name__}"), handle


def _twin_of(model: Any) -> Any:
    """A second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _described(config: Any, model: Any) -> dict[str, Any]:
    return {
        "model_class": type(model).__name__,
        "config_digest": _digest(config),
        "layers": config.get_text_config().num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _described_machine(machine: Machine) -> dict[str, Any]:
    return {
        **{name: getattr(machine, name) for name in ("gpu", "gpu_name", "sm", "driver", "cuda", "libs")},
        "timer": "events" if machine.is_gpu else "wall",
    }


def _digest(config: Any) -> str:
    content = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _kernels_of(handle: Handle, generate: Generate) -> dict[str, int]:
    """Definition -> calls by kernel in one more generation."""
    before = handle.report().hits()
    generate()
    return new_hits(handle, before)


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
