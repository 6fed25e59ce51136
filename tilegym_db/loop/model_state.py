"""A model on this machine as the loop measures it: what share of its time verified kernels have, and how fast it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers.capture import random_prompt
from tilegym_db.integrations.transformers.model_bench import ModelBenchOptions, model_bench
from tilegym_db.integrations.transformers.patch import patch_what_fits
from tilegym_db.integrations.transformers.piece_time import time_of
from tilegym_db.integrations.transformers.random_model import build_model, load_config
from tilegym_db.integrations.transformers.verify_model import model_tag
from tilegym_db.loop.from_model import ModelPieces, StockTimes, pieces_of, stock_times
from tilegym_db.loop.rules import coverage_of
from tilegym_db.records.base import canonical_json
from tilegym_db.records.loop import Coverage
from tilegym_db.records.model_run import ModelRun

__all__ = ["PROFILES", "ModelState"]

PROFILES = 5


@dataclass(frozen=True)
class ModelState:
    """A model of random weights from a config, and how it is called."""

    path: Path
    machine: Machine
    dtype: str = "bfloat16"
    prompt: int = 128
    rounds: int = 10
    layers: int | None = None

    @property
    def tag(self) -> str:
        """What the model is called by."""
        return model_tag(self.path)

    @cached_property
    def digest(self) -> str:
        """sha256 of the config as it is built, and of how it is called."""
        content = {key: value for key, value in load_config(self.path, self.layers).to_dict().items()}
        content.pop("transformers_version", None)
        return hashlib.sha256(canonical_json([content, self.dtype, self.prompt]).encode()).hexdigest()

    @cached_property
    def model(self) -> Any:
        """Built once: the same weights at every call."""
        return build_model(load_config(self.path, self.layers), self.machine.device, self.dtype)

    @cached_property
    def inputs(self) -> torch.Tensor:
        """Token ids [1, prompt]."""
        return random_prompt(self.model, 1, self.prompt)

    @cached_property
    def stock_times(self) -> StockTimes:
        """Profiled once: whatever serves the model, its own code costs what it costs."""
        return stock_times(self.model, self.inputs)

    def pieces(self) -> ModelPieces:
        """What its own code costs, and which Definitions describe it."""
        return pieces_of(self.model, self.inputs, self.tag, self.stock_times)

    def coverage(self) -> Coverage:
        """Share of one call's time in verified kernels, over :data:`PROFILES` profiles, by the profiler's launch numbers."""
        handle = patch_what_fits(self.model, catalog=Catalog.default())
        try:
            with timing_lock(self.machine.device):
                shares = [self._share(handle, self._call) for _ in range(PROFILES)]
        finally:
            handle.unpatch()
        return coverage_of(shares, time_of(self.model))

    def _call(self) -> Any:
        with torch.no_grad():
            return self.model(self.inputs)

    def _share(self, handle: Any, call: Callable[[], Any]) -> float:
        share = handle.profile(call).share if self.machine.is_gpu else handle.cpu_share(call)
        return float(share or 0.0)

    def run(self) -> tuple[ModelRun, list[str]]:
        """Time it patched against stock in turns, after a proof on its own calls; and what that proof found wrong."""
        options = ModelBenchOptions(
            dtype=self.dtype, prompt=self.prompt, new=0, rounds=self.rounds, layers=self.layers, verify=True
        )
        run, handle = model_bench(self.path, self.machine, options)
        report = handle.report()
        failed = [f"{proof.kernel}: {proof.reason}" for proof in report.failed_proofs]
        return run, failed + [f"{failure}" for failure in report.failures]
