"""Fits a model to this machine: see its calls, measure what could serve them, publish it for this user, prove it, time the model.

Every step keeps what it finds where other commands keep it (workloads, traces, the published table, model runs), so that a run
that was cut off goes on where it was, and a second one finds nothing left to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tilegym_db.bench.benchmark import benchmark
from tilegym_db.bench.machine import Machine, select_machine
from tilegym_db.bench.plan import BenchReport
from tilegym_db.bench.run_setup import Observer
from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError, check_kind
from tilegym_db.loop.from_model import Piece, kept_calls, pieces_of
from tilegym_db.models.bench.model_bench import ModelBenchOptions, config_digest, model_bench, time_instance
from tilegym_db.models.capture import random_prompt
from tilegym_db.models.patch import patch_what_fits
from tilegym_db.models.random_model import build_model, check_run_fits, load_config
from tilegym_db.models.verify_model import model_tag
from tilegym_db.paths import home
from tilegym_db.published.table import load_table
from tilegym_db.records import Workload
from tilegym_db.records.model_run import ModelRun, Speedups
from tilegym_db.store.connection import ingest, open_store
from tilegym_db.store.model_runs import save_model_run, stored_model_runs
from tilegym_db.store.publish import publish


@dataclass(frozen=True)
class FitOptions:
    """How the model is called: every batch with every prompt, ``new`` tokens each. ``gpus`` is as for ``bench``."""

    batches: tuple[int, ...] = (1,)
    prompts: tuple[int, ...] = (512,)
    new: int = 64
    dtype: str = "bfloat16"
    layers: int | None = None
    rounds: int = 10
    gpus: str | None = None

    @property
    def runs(self) -> list[ModelBenchOptions]:
        """What is timed of the model, one for each batch and prompt."""
        return [
            ModelBenchOptions(self.dtype, batch, prompt, self.new, self.rounds, self.layers, verify=True)
            for batch, prompt in itertools.product(self.batches, self.prompts)
        ]


@dataclass
class FitReport:
    """What came of it.

    ``calls`` are the kinds of calls that the model makes, ``measured`` what was measured of them now (None if nothing was
    left to measure), ``runs`` the model before and after and ``new_runs`` how many of them were timed now, ``speedup`` the same
    of a model in memory. ``pieces`` say what share of the time each part of the model's own code takes, and what serves it.
    """

    model: str
    machine: Machine
    calls: list[Workload]
    measured: BenchReport | None = None
    published: str = ""
    pieces: list[Piece] = field(default_factory=list)
    runs: list[ModelRun] = field(default_factory=list)
    new_runs: int = 0
    speedup: Speedups | None = None
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def served_share(self) -> float:
        """Of the time of the model's own code: that of the pieces which verified kernels serve."""
        whole = sum(piece.share for piece in self.pieces)
        return sum(piece.share for piece in self.pieces if piece.served) / whole if whole else 0.0

    @property
    def interrupted(self) -> bool:
        """After Ctrl-C; what was measured before it is kept."""
        return self.measured is not None and self.measured.interrupted


def fit_config(
    path: Path,
    gpu: str = "auto",
    options: FitOptions | None = None,
    observer: Observer | None = None,
    round_done: Callable[[int, int], None] | None = None,
) -> FitReport:
    """Fit the model of a config, with random weights: nothing is downloaded.

    Args:
        path: config file, or folder with a ``config.json``.
        gpu: as for :func:`~tilegym_db.benchmark`.
        options: how the model is called.
        observer: callbacks for the measurements of kernels.
        round_done: told of every round of timing the model.

    Raises:
        UsageError: the config or an option is none that can be run, or the model does not fit into memory.
        HardwareError: the GPU asked for is not here, or workers cannot be confined and the package ships none of the kernels:
            nothing could be published.
    """
    options, machine = options or FitOptions(), select_machine(gpu)
    for run in options.runs:
        run.check()
    config = load_config(path, options.layers)
    for run in options.runs:
        check_run_fits(config, machine.device, run.dtype, run.batch, run.prompt, run.new)
    model = build_model(config, machine.device, options.dtype)
    prompts = [random_prompt(model, run.batch, run.prompt) for run in options.runs]
    report = _fit(model, prompts, model_tag(path), machine, options.gpus, observer)
    del model  # the runs build it anew, and on a GPU both may not have room
    if not report.interrupted:
        for run in options.runs:
            _time(path, config, run, report, round_done)
    return report


def fit(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    name: str = "",
    gpus: str | None = None,
    rounds: int = 10,
    observer: Observer | None = None,
) -> FitReport:
    """Fit a model in memory; it is left as it was, and ``patch(model)`` serves it from then on.

    Args:
        model: a causal language model of transformers in eval mode, all on one device.
        inputs: token ids [batch, tokens], as the model is called.
        name: what its calls are tagged with; by default the name of its class.
        gpus: measure on several GPUs; as for :func:`~tilegym_db.benchmark`.
        rounds: calls of the model that are timed, stock and patched in turns.
        observer: callbacks for the measurements of kernels.

    Raises:
        UsageError: the model cannot be run like that, or has nothing that a Definition describes.
        HardwareError: workers cannot be confined here and the package ships none of the kernels: nothing could be published.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"fit takes a model, a torch.nn.Module, not {type(model).__name__}.", code="argument_type")
    check_kind(inputs, torch.Tensor, "fit takes token ids, a torch.Tensor")
    if inputs.dim() != 2 or inputs.numel() == 0 or inputs.dtype not in (torch.int64, torch.int32) or rounds < 1:
        shape, dtype = list(inputs.shape), str(inputs.dtype).removeprefix("torch.")
        raise UsageError(
            f"fit takes token ids [batch, tokens] and at least 1 round, not {shape} of {dtype} and {rounds}.",
            code="tokens_invalid",
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) != 1:
        raise UsageError(
            f"fit takes a model on one device, not on {', '.join(sorted(devices)) or 'none'}.", code="devices_mixed"
        )
    machine = select_machine("auto" if devices == {"cuda"} else "cpu")
    report = _fit(model, [inputs], name or type(model).__name__.lower(), machine, gpus, observer)
    if not report.interrupted:
        report.speedup, handle = time_instance(model, inputs, machine, rounds)
        report.failed += _failed(handle)
    return report


def _fit(
    model: Any,
    prompts: Sequence[torch.Tensor],
    tag: str,
    machine: Machine,
    gpus: str | None,
    observer: Observer | None,
) -> FitReport:
    """Everything but timing the model."""
    captured: list[Workload] = []
    for ids in prompts:
        handle = patch_what_fits(model, verify=True, inputs=ids)
        handle.unpatch()
        captured += handle.workloads
    report = FitReport(tag, machine, kept_calls(captured, tag))
    if not report.calls:
        raise UsageError(
            f"{tag} makes no call that a definition describes; nothing can be measured for it.",
            code="calls_undescribed",
        )
    kernels = runnable_kernels(Catalog.default(), {call.definition for call in report.calls}, machine)
    if kernels:
        _measure(report, kernels, gpus, observer)
    else:
        report.notes.append(
            f"no kernel of {', '.join(sorted({c.definition for c in report.calls}))} runs on {machine.gpu}"
        )
    if not report.interrupted:
        _publish(report)
        report.pieces = pieces_of(model, prompts[0], tag).pieces
    return report


def runnable_kernels(catalog: Catalog, definitions: Iterable[str], machine: Machine) -> list[str]:
    """Return the Solutions that could serve calls of some Definitions here: a CPU runs no tile language but in an
    interpreter.
    """
    return [
        files.name
        for name in sorted(definitions)
        for files in catalog.solutions_for(name)
        if files.record.spec.role == "kernel" and (machine.is_gpu or files.record.spec.language == "python")
    ]


def _measure(report: FitReport, kernels: Sequence[str], gpus: str | None, observer: Observer | None) -> None:
    uuids = tuple(dict.fromkeys(call.uuid for call in report.calls))
    measured = benchmark(
        tuple(kernels), gpu=report.machine.gpu, workload=uuids, promote=True, gpus=gpus, observer=observer
    )
    report.notes += [*measured.notes, *measured.unfinished]
    report.measured = measured if measured.traces or measured.interrupted else None


def _publish(report: FitReport) -> None:
    """For this user alone; where nothing is new, no byte changes."""
    with open_store(catalog=Catalog.default()) as store:
        ingest(store)
        try:
            report.published = str(publish(store, report.machine.gpu, own=True).folder)
        except NotFoundError as error:
            report.notes.append(str(error))


def _time(
    path: Path, config: Any, run: ModelBenchOptions, report: FitReport, round_done: Callable[[int, int], None] | None
) -> None:
    """Stock against patched: as timed before, where nothing was published since."""
    table = load_table(report.machine.gpu)
    known = [
        one
        for one in stored_model_runs(home())
        if _is_of(one, run, config, report.machine)
        and (table is None or one.timestamp >= datetime.fromisoformat(table.published))
    ]
    if known:
        report.runs.append(max(known, key=lambda one: one.timestamp))
        return
    found, handle = model_bench(path, report.machine, run, round_done)
    save_model_run(found)
    with open_store() as store:
        ingest(store)
    report.runs.append(found)
    report.new_runs += 1
    report.failed += _failed(handle)


def _is_of(one: ModelRun, run: ModelBenchOptions, config: Any, machine: Machine) -> bool:
    found = (one.config_digest, one.gpu_name, one.dtype, one.batch, one.prompt_tokens, one.new_tokens, one.rounds)
    asked = (config_digest(config), machine.gpu_name, run.dtype, run.batch, run.prompt, run.new, run.rounds)
    return found == asked and one.proved and dict(one.libs) == machine.libs


def _failed(handle: Any) -> list[str]:
    """Kernels that the proof on the model's own calls left out, or that raised."""
    report = handle.report()
    return [f"{proof.kernel}: {proof.reason}" for proof in report.failed_proofs] + [str(one) for one in report.failures]
