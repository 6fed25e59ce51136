"""Measure a model on this machine for the loop: the time share of verified kernels and the speedup. Decide what to keep."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.loop.from_model import MIN_SHARE, ModelPieces, Piece, StockTimes, pieces_of, stock_times
from tilegym_db.measurement.machine import Machine, timing_lock
from tilegym_db.models.bench.model_bench import ModelBenchOptions, model_bench
from tilegym_db.models.capture import ModelInputs, forward_arguments, typical_inputs
from tilegym_db.models.gpu_time import time_of
from tilegym_db.models.patch import PatchOptions, patch_what_fits
from tilegym_db.models.random_model import build_model, config_content, load_config
from tilegym_db.models.verify_model import model_tag
from tilegym_db.records.base import canonical_json
from tilegym_db.records.loop import Coverage, Experiment
from tilegym_db.records.model_run import Estimate, ModelRun

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
        before, after: time shares of verified kernels, each from several profiles.
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
    """Return the costliest piece of stock code that a task can be made for; None if there is none left.

    Args:
        pieces: pieces of the model as it is served now.
        tried: Definitions that an experiment on this model already decided.
    """
    open_ = [
        piece
        for piece in pieces
        if piece.definition and piece.workloads and not piece.served and piece.definition not in tried
    ]
    worth = [piece for piece in open_ if piece.share >= MIN_SHARE]
    return min(worth, key=lambda piece: (-piece.share, piece.definition), default=None)


def why_stop(experiments: Sequence[Experiment], seconds_left: float) -> str | None:
    """Return the reason to stop early; None to continue.

    Args:
        experiments: the experiments of this run, in order.
        seconds_left: remaining seconds of the budget.
    """
    if seconds_left <= 0:
        return "the budget is spent"
    quickest = min((one.seconds for one in experiments), default=0.0)
    if seconds_left < quickest:
        return f"{seconds_left:.0f} s of the budget are left, and the quickest experiment of this run took {quickest:.0f} s"
    last = [one.decision for one in experiments[-DISCARDS_IN_A_ROW:]]
    if len(last) == DISCARDS_IN_A_ROW and "keep" not in last:
        return f"{DISCARDS_IN_A_ROW} experiments in a row were not kept"
    return None
