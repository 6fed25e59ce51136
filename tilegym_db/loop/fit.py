"""Fit a model to this machine: capture its calls, measure candidate kernels, publish them, verify the model and time it.

Each step stores its results where other commands store them: workloads, traces, the published table, model runs. A run that
was cut off therefore continues, and a repeated run has nothing left to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, NotFoundError, UsageError, check_kind
from tilegym_db.files import refuse_unwritable
from tilegym_db.loop.from_model import ModelPart, Piece, kept_calls, parts_of, pieces_of
from tilegym_db.measurement.benchmark import bench
from tilegym_db.measurement.machine import Devices, DevicesLike, Machine, parse_devices, select_machine
from tilegym_db.measurement.plan import BenchReport
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.models.bench.model_bench import ModelBenchOptions, config_digest, model_bench, time_instance
from tilegym_db.models.capture import ModelInputs, of_unreached, run_model, typical_inputs, unreached_parts
from tilegym_db.models.patch import PatchOptions, model_tag, patch_what_fits
from tilegym_db.models.random_model import build_model, check_run_fits, load_config
from tilegym_db.paths import DISABLE_VARIABLE, home, is_disabled
from tilegym_db.published.entries import REQUIREMENTS, Requirement, spelled_requirements
from tilegym_db.published.table import LockedKernel, load_table, write_lock_file
from tilegym_db.records import Workload
from tilegym_db.records.hardware import same_gpu
from tilegym_db.records.loop import ModelRun, Speedups
from tilegym_db.resolver.resolve import requirements
from tilegym_db.store.answer import html_table
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish
from tilegym_db.store.side_files import save_model_run, stored_model_runs


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit: the model runs every batch size with every prompt length and generates ``new`` tokens.

    ``lock`` is a file to write, of the kernels that then serve the model. ``require`` is what must be verified of their bits, as
    for :func:`~tilegym_db.patch`.
    """

    batches: tuple[int, ...] = (1,)
    prompts: tuple[int, ...] = (512,)
    new: int = 64
    dtype: str = "bfloat16"
    layers: int | None = None
    rounds: int = 10
    lock: Path | None = None
    require: str | Collection[str] = ()

    @property
    def required(self) -> tuple[Requirement, ...]:
        """The names in ``require``, in one order."""
        return _ordered(self.require)

    @property
    def runs(self) -> list[ModelBenchOptions]:
        """The timed runs of the model, one per batch size and prompt length."""
        return [
            ModelBenchOptions(
                self.dtype, batch, prompt, self.new, self.rounds, self.layers, verify=True, require=self.required
            )
            for batch, prompt in itertools.product(self.batches, self.prompts)
        ]


@dataclass(repr=False)
class FitReport:
    """The result of a fit.

    ``calls`` are the kinds of calls that the model makes. ``measured`` reports the measurements of this fit; None if nothing
    was left to measure. ``runs`` are the model's timings, stock against patched, and ``new_runs`` counts those of this fit.
    ``speedup`` is the timing of a model in memory. ``pieces`` give the share of the model's time per module class and the
    kernels that serve it. ``kernels`` names those that served the prompts or the generation after them.
    """

    model: str
    machine: Machine
    calls: list[Workload]
    measured: BenchReport | None = None
    published: str = ""
    pieces: list[Piece] = field(default_factory=list)
    runs: list[ModelRun] = field(default_factory=list)
    new_runs: int = 0
    kernels: list[str] = field(default_factory=list)
    speedup: Speedups | None = None
    lock: str = ""
    """The file that names the kernels that served; empty if none was asked for, or no kernel served."""
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the model, the device, and the share of its time in classes that kernels serve."""
        said = f"{len(self.calls)} kinds of calls, {self.served_share:.0%} of the time in classes that kernels serve"
        return f"<FitReport {self.model} on {self.machine.gpu}: {said}>"

    def _repr_html_(self) -> str:
        """Return a table of the module classes, with their shares of the model's time and what serves them."""
        rows = [(one.part, f"{one.share:.1%}", "yes" if one.served else "no") for one in self.parts]
        return html_table(("part", "share of time", "served by kernels"), rows, repr(self))

    @property
    def parts(self) -> list[ModelPart]:
        """The pieces of each module class. Their shares add up to the model's time."""
        return parts_of(self.pieces)

    @property
    def served_share(self) -> float:
        """The share of the model's own time in module classes that verified kernels serve."""
        whole = sum(part.share for part in self.parts)
        return sum(part.share for part in self.parts if part.served) / whole if whole else 0.0

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C. Earlier measurements are kept."""
        return self.measured is not None and self.measured.interrupted


def fit_config(
    path: Path,
    devices: DevicesLike = "auto",
    options: FitOptions | None = None,
    observer: Observer | None = None,
    round_done: Callable[[int, int], None] | None = None,
) -> FitReport:
    """Fit the model of a config, with random weights. Nothing is downloaded.

    Args:
        path: config file, or folder with a ``config.json``.
        devices: as for :func:`~tilegym_db.bench`, but no cluster; the model runs on the first of them.

    Raises:
        UsageError: the config or an option is invalid, or the model does not fit into memory.
        HardwareError: the requested GPU is not in this machine. Or workers cannot be confined, and the package ships none of
            the kernels, so that nothing could be published.
    """
    _refuse_if_disabled()
    options, asked = options or FitOptions(), _of_this_host(devices)
    required = options.required
    machine = select_machine(asked.gpu)
    for run in options.runs:
        run.check()
    if options.lock is not None:
        refuse_unwritable(options.lock, "a lock")
    config = load_config(path, options.layers)
    for run in options.runs:
        check_run_fits(config, machine.device, run.dtype, run.batch, run.prompt, run.new)
    model = build_model(config, machine.device, options.dtype)
    prompts = [typical_inputs(model, run.batch, run.prompt) for run in options.runs]
    report = _fit(model, prompts, model_tag(path), machine, asked, observer, options.lock, required)
    del model  # the runs build it again, and a GPU may not have room for both
    if not report.interrupted:
        for run in options.runs:
            _time(path, config, run, report, round_done)
    return report


def _ordered(require: str | Collection[str]) -> tuple[Requirement, ...]:
    names = requirements(require)
    return tuple(name for name in REQUIREMENTS if name in names)


def _refuse_if_disabled() -> None:
    if is_disabled():
        raise UsageError(
            f"{DISABLE_VARIABLE} is set, so no kernel that is measured here could be served. Unset it, and fit again.",
            code="serving_disabled",
        )


def fit(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    name: str = "",
    devices: DevicesLike = "auto",
    rounds: int = 10,
    lock: str | Path | None = None,
    require: str | Collection[str] = (),
    observer: Observer | None = None,
) -> FitReport:
    """Fit a model in memory without changing it. ``patch(model)`` then uses the published kernels.

    Args:
        model: a causal language model of transformers in eval mode, all on one device.
        inputs: token ids [batch, tokens] of a typical call.
        name: tag of its calls; by default the name of its class.
        devices: what to measure on, as for :func:`~tilegym_db.bench`, but no cluster. ``auto`` is the device of the model, and
            all others are of its kind.
        rounds: timed calls of the model; stock and patched calls alternate.
        lock: a file to write for ``patch(model, lock=...)``: the kernels that serve the model on these inputs.
        require: what must be verified of the bits of a kernel that serves: ``deterministic``, ``batch_invariant`` or both, as for
            :func:`~tilegym_db.patch`. The lock states it.
        observer: callbacks for the kernel measurements.

    Raises:
        UsageError: the model or an argument is invalid, or no Definition describes any of its calls.
        HardwareError: the devices are not those of the model, or workers cannot be confined, and the package ships none of the
            kernels, so that nothing could be published.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"fit takes a model, a torch.nn.Module, not {type(model).__name__}.", code="argument_type")
    check_kind(inputs, torch.Tensor, "fit takes token ids, a torch.Tensor")
    if inputs.dim() != 2 or inputs.numel() == 0 or inputs.dtype not in (torch.int64, torch.int32) or rounds < 1:
        shape, dtype = list(inputs.shape), str(inputs.dtype).removeprefix("torch.")
        raise UsageError(
            f"fit takes whole token ids [batch, tokens] and at least 1 round, not {dtype} {shape} and {rounds} rounds.",
            code="tokens_invalid",
        )
    _refuse_if_disabled()
    required = _ordered(require)
    if lock is not None:
        check_kind(lock, (str, Path), "lock is the path of a file")
        lock = Path(lock)
        refuse_unwritable(lock, "a lock")
    asked = _of_this_host(devices)
    kinds = {parameter.device.type for parameter in model.parameters()}
    if len(kinds) != 1:
        raise UsageError(
            f"fit takes a model on one device, not on {', '.join(sorted(kinds)) or 'none'}.", code="devices_mixed"
        )
    machine = select_machine("auto" if kinds == {"cuda"} else "cpu")
    if asked.gpu != "auto" and not same_gpu(asked.gpu, machine.gpu):
        raise HardwareError(
            f"the model is on {machine.gpu}, and devices={devices!r} was asked for. Move the model or leave devices out.",
            code="gpu_other",
        )
    report = _fit(model, [inputs], name or type(model).__name__.lower(), machine, asked, observer, lock, required)
    if not report.interrupted:
        report.speedup, handle = time_instance(model, inputs, machine, rounds, required)
        report.failed += handle.report().problems
    return report


def _of_this_host(devices: DevicesLike) -> Devices:
    """Return the requested devices; raise :class:`UsageError` for a cluster."""
    asked = parse_devices(devices)
    if asked.executor is not None:
        raise UsageError(
            f"fit measures on this host, not on devices={asked.executor!r}. Name its GPUs, or 'all'.",
            code="fit_on_cluster",
        )
    return asked


def _fit(
    model: Any,
    prompts: Sequence[ModelInputs],
    tag: str,
    machine: Machine,
    devices: Devices,
    observer: Observer | None,
    lock: Path | None,
    required: tuple[Requirement, ...],
) -> FitReport:
    """Run every step except timing the model."""
    captured: list[Workload] = []
    for ids in prompts:
        handle = patch_what_fits(model, PatchOptions(verify=True, inputs=ids))
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
        _measure(report, kernels, devices, observer)
    else:
        report.notes.append(
            f"no kernel of {', '.join(sorted({c.definition for c in report.calls}))} runs on {machine.gpu}"
        )
    if not report.interrupted:
        _publish(report)
        report.pieces = pieces_of(model, prompts[0], tag, required=required).pieces
        report.notes += filter(None, [of_unreached(unreached_parts(model, prompts[0]))])
        served = _kernels_that_serve(model, prompts, required)
        report.kernels = sorted({kernel.solution for kernel in served})
        if lock is not None and not served:
            report.notes.append(f"no kernel{spelled_requirements(required)} served a call, so {lock} was not written")
        elif lock is not None:
            write_lock_file(lock, served, required)
            report.lock = str(lock)
    return report


def _kernels_that_serve(
    model: Any, prompts: Sequence[ModelInputs], required: tuple[Requirement, ...]
) -> set[LockedKernel]:
    """Return the kernels that serve the model on its prompts, and while it generates."""
    served: set[LockedKernel] = set()
    for ids in prompts:
        handle = patch_what_fits(model, PatchOptions(graphs=False, require=required))
        try:
            run_model(model, {"input_ids": ids} if isinstance(ids, torch.Tensor) else ids)
            served |= handle.kernels_that_served()
        finally:
            handle.unpatch()
    return served


def runnable_kernels(catalog: Catalog, definitions: Iterable[str], machine: Machine) -> list[str]:
    """Return the kernels of some Definitions that can be measured here. On a CPU only Python kernels can."""
    return [
        files.name
        for name in sorted(definitions)
        for files in catalog.solutions_for(name)
        if files.record.spec.role == "kernel" and (machine.is_gpu or files.record.spec.language == "python")
    ]


def _measure(report: FitReport, kernels: Sequence[str], devices: Devices, observer: Observer | None) -> None:
    uuids = tuple(dict.fromkeys(call.uuid for call in report.calls))
    of_kind = replace(devices, gpu=report.machine.gpu)
    measured = bench(tuple(kernels), devices=of_kind, workload=uuids, verify=True, observer=observer)
    report.notes += [*measured.notes, *measured.unfinished]
    report.measured = measured if measured.traces or measured.interrupted else None


def _publish(report: FitReport) -> None:
    """Publish for this user only. If nothing is new, no file changes."""
    with open_store(catalog=Catalog.default()) as store:
        ingest(store)
        try:
            report.published = str(publish(store, report.machine.gpu, own=True).folder)
        except NotFoundError as error:
            absent = f"nothing is published: no kernel was verified at these sizes on {report.machine.gpu}"
            report.notes.append(absent if error.code == "traces_missing" else str(error))


def _time(
    path: Path, config: Any, run: ModelBenchOptions, report: FitReport, round_done: Callable[[int, int], None] | None
) -> None:
    """Time stock against patched, or reuse the newest run if nothing was published since."""
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
    report.failed += handle.report().problems


def _is_of(one: ModelRun, run: ModelBenchOptions, config: Any, machine: Machine) -> bool:
    found = (one.config_digest, one.gpu_name, one.dtype, one.batch, one.prompt_tokens, one.new_tokens, one.rounds)
    asked = (config_digest(config), machine.gpu_name, run.dtype, run.batch, run.prompt, run.new, run.rounds)
    return found == asked and one.proved and dict(one.libs) == machine.libs and one.required == run.require
