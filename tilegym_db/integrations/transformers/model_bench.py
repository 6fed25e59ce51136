"""Times a patched model against itself as it is: interleaved, in one process, on the same weights.

Two instances share every weight, and one of them is patched; each round generates with both, the first of the two in turns.
Clocks are read once per token, where the logits are there and before they become a token.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.statistics import Interval, median_interval, paired_ratio
from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.capture import random_prompt
from tilegym_db.integrations.transformers.patch import Handle, patched
from tilegym_db.integrations.transformers.random_model import DTYPES, build_model, load_config
from tilegym_db.integrations.transformers.verify_model import model_tag
from tilegym_db.records.base import canonical_json
from tilegym_db.records.model_run import Estimate, ModelRun, ModelTiming
from tilegym_db.records.trace import new_run_id

__all__ = ["WARM_UP_ROUNDS", "Generation", "compare", "model_bench"]

WARM_UP_ROUNDS = 2
"""Not counted: kernels are chosen, loaded and compiled there, and allocators find their size."""

Observer = Callable[[int, int], None]
"""Called with (rounds done, rounds to do), warm-up included."""


@dataclass(frozen=True)
class Generation:
    """One call of ``generate``: times in ms, the new tokens [batch, new] and, on a GPU, the most bytes allocated."""

    ttft_ms: float
    tpot_ms: float
    total_ms: float
    tokens: torch.Tensor
    peak_memory_bytes: int | None = None


Generate = Callable[[], Generation]


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
    observer: Observer | None = None,
) -> tuple[ModelRun, Handle]:
    """Build a model from its config with random weights and time it, stock against patched.

    Args:
        path: config file, or folder with a ``config.json``.
        machine: what to run on.
        dtype: one of :data:`DTYPES`.
        batch: sequences.
        prompt: random tokens of each.
        new: greedy tokens generated for each, at least 2.
        rounds: generations by each of the two that count.
        layers: keep only the first so many.
        verify: prove the patch first; see :func:`~tilegym_db.integrations.transformers.patch.patch`.
        observer: told of every round.

    Returns:
        The record, which is not stored yet, and the handle of the patch (undone already) for its report.

    Raises:
        UsageError: the config, the dtype or a number is none that can be run.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    if min(batch, prompt, rounds) < 1 or new < 2:
        raise UsageError(
            f"batch, prompt and rounds are at least 1 and new at least 2, not {batch}, {prompt}, {rounds}, {new}."
        )
    config = load_config(path, layers)
    stock = build_model(config, machine.device, dtype)
    ids = random_prompt(stock, batch, prompt)
    twin = _twin_of(stock)
    with (
        patched(twin, verify=verify, **({"inputs": ids} if verify else {})) as handle,
        timing_lock(machine.device),
        ClockWatch(machine.device) as clocks,
    ):
        ways = {"stock": _generator(stock, ids, new), "patched": _generator(twin, ids, new)}
        found = compare(ways, rounds, observer)
        kernels = _kernels_of_one(handle, ways["patched"])
    record = {
        "run_id": new_run_id(machine.gpu),
        "timestamp": datetime.now(UTC),
        "model": model_tag(path),
        "model_class": type(stock).__name__,
        "config_digest": _digest(config),
        "layers": config.get_text_config().num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in stock.parameters()),
        "dtype": dtype,
        "batch": batch,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "rounds": rounds,
        "gpu": machine.gpu,
        "gpu_name": machine.gpu_name,
        "sm": machine.sm,
        "driver": machine.driver,
        "cuda": machine.cuda,
        "libs": machine.libs,
        "timer": "events" if machine.is_gpu else "wall",
        "throttled": clocks.reading().throttled,
        "proved": verify,
        "kernels": kernels,
        "equal_tokens": int((found["stock"][0].tokens == found["patched"][0].tokens).sum()),
        **_figures(found, batch * new),
    }
    return ModelRun.from_dict(record, f"run of {type(stock).__name__}"), handle


def compare(ways: Mapping[str, Generate], rounds: int, observer: Observer | None = None) -> dict[str, list[Generation]]:
    """Generate with each way in each round and return what was counted. Who goes first alternates."""
    found: dict[str, list[Generation]] = {name: [] for name in ways}
    total = WARM_UP_ROUNDS + rounds
    for index in range(total):
        names = list(ways) if index % 2 == 0 else list(ways)[::-1]
        for name in names:
            generation = ways[name]()
            if index >= WARM_UP_ROUNDS:
                found[name].append(generation)
        if observer is not None:
            observer(index + 1, total)
    return found


def _twin_of(model: Any) -> Any:
    """A second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _digest(config: Any) -> str:
    content = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _kernels_of_one(handle: Handle, generate: Generate) -> dict[str, int]:
    """Definition -> calls by kernel in one more generation."""
    before = handle.report().hits()
    generate()
    new = {name: calls - before.get(name, 0) for name, calls in handle.report().hits().items()}
    return {name: calls for name, calls in sorted(new.items()) if calls}


# -- the figures ------------------------------------------------------------------------------------------------------


def _figures(found: Mapping[str, Sequence[Generation]], tokens: int) -> dict[str, Any]:
    stock, patched_ = found["stock"], found["patched"]
    figures: dict[str, Any] = {"stock": _timing(stock, tokens), "patched": _timing(patched_, tokens)}
    for what in ("ttft", "tpot", "total"):
        times = [[getattr(generation, f"{what}_ms") for generation in way] for way in (patched_, stock)]
        figures[f"{what}_speedup"] = _estimate(paired_ratio(*times)).model_dump()
    return figures


def _timing(generations: Sequence[Generation], tokens: int) -> dict[str, Any]:
    total = median_interval([generation.total_ms for generation in generations])
    peaks = [one.peak_memory_bytes for one in generations if one.peak_memory_bytes is not None]
    timing = ModelTiming(
        ttft_ms=_estimate(median_interval([generation.ttft_ms for generation in generations])),
        tpot_ms=_estimate(median_interval([generation.tpot_ms for generation in generations])),
        total_ms=_estimate(total),
        tokens_per_s=_rounded(tokens / total.median * 1e3),
        peak_memory_bytes=max(peaks) if peaks else None,
    )
    return timing.model_dump()


def _estimate(interval: Interval) -> Estimate:
    return Estimate(median=_rounded(interval.median), ci_low=_rounded(interval.low), ci_high=_rounded(interval.high))


def _rounded(value: float) -> float:
    """Six digits: more say nothing, and make a record hard to read."""
    return float(f"{value:.6g}")


# -- one generation ---------------------------------------------------------------------------------------------------


def _generator(model: Any, ids: torch.Tensor, new: int) -> Generate:
    """Greedy generation of exactly ``new`` tokens after ``ids``, on CUDA with events, else with the wall clock."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": 1}
    mask = torch.ones_like(ids)
    marks = _EventMarks(ids.device) if ids.device.type == "cuda" else _WallMarks()

    def at_each_token(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        marks.mark()
        return scores

    def generate() -> Generation:
        marks.begin()
        tokens = model.generate(
            ids, attention_mask=mask, logits_processor=[at_each_token], disable_compile=True, pad_token_id=0, **options
        )
        marks.mark()
        at = marks.read_ms()
        first, last, end = at[0], at[-2], at[-1]
        return Generation(first, (last - first) / (new - 1), end, tokens[:, ids.shape[1] :].cpu(), marks.peak_bytes())

    return generate


class _WallMarks:
    """Moments since the beginning, by this process's clock: on a CPU, an operation is done when its call returns."""

    def begin(self) -> None:
        self._moments: list[float] = []
        self._start = time.perf_counter()

    def mark(self) -> None:
        self._moments.append(time.perf_counter())

    def read_ms(self) -> list[float]:
        return [(moment - self._start) * 1e3 for moment in self._moments]

    def peak_bytes(self) -> int | None:
        return None


class _EventMarks:
    """As :class:`_WallMarks`, by CUDA events: recording one does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._moments: list[Any] = []
        self._start = self._now()

    def mark(self) -> None:
        self._moments.append(self._now())

    def read_ms(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [self._start.elapsed_time(moment) for moment in self._moments]

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self._device))

    def _now(self) -> Any:
        new_event: Any = torch.cuda.Event
        event = new_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
