"""Profile a model by module class, and create tasks for the classes that a Definition describes but no verified kernel serves."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.files import write_folder, writing
from tilegym_db.loop.tasks import check_language, create_task
from tilegym_db.measurement.machine import Machine, select_machine
from tilegym_db.models.capture import forward_arguments, random_prompt
from tilegym_db.models.gpu_time import ModuleTime, module_times, time_of
from tilegym_db.models.patch import PatchOptions, discover, patch_what_fits
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.models.verify_model import keep_workloads, model_tag
from tilegym_db.records import Workload
from tilegym_db.records.loop import Task
from tilegym_db.scaffold import draft_definition
from tilegym_db.scaffold.definition_draft import parse_tensors

MIN_SHARE = 0.01
"""Minimum share of the model's time for which a kernel is worthwhile."""
Match = Literal["exact", "by layout adapter", "none"]
StockTimes = tuple[list[ModuleTime], float]


@dataclass(frozen=True)
class Piece:
    """A module class, its share of the model's time without its submodules, and the Definition that describes it.

    A module that calls several operators has one piece per operator. Each piece has the module's whole time, because the
    profile does not split it by operator.
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
        grouped.setdefault(piece.module_class or piece.part, []).append(piece)
    return [ModelPart(tuple(group)) for group in grouped.values()]


@dataclass
class ModelPieces:
    """A profiled model. Shares are of GPU time or, on a CPU, of process CPU time; ``time_of`` says which."""

    model: str
    time_of: str
    total_us: float
    pieces: list[Piece] = field(default_factory=list)


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
        language: language of the requested kernels.
        gpu: ``auto``, ``cpu``, or a GPU of this machine, because the profile is taken here.
        prompt: number of random tokens in the profiled call.
        dtype: bfloat16, float16 or float32.
        layers: maximum number of layers to keep.
        drafts: folder for drafts of missing Definitions; without it none are written.

    Raises:
        UsageError: the config or an option is invalid.
        HardwareError: the requested GPU is not in this machine.
    """
    check_language(language)
    machine = select_machine(gpu)
    config = load_config(path, layers)
    model = build_model(config, machine.device, dtype)
    inputs = random_prompt(model, 1, prompt)
    found = pieces_of(model, inputs, model_tag(path))
    outcomes = []
    for piece in found.pieces:
        try:
            outcome = _outcome(piece, model, inputs, machine, language, drafts)
        except TilegymDBError as error:
            outcome = str(error)
        outcomes.append(Piece(**{**vars(piece), "outcome": outcome}))
    found.pieces = outcomes
    return found


def _outcome(
    piece: Piece, model: Any, inputs: torch.Tensor, machine: Machine, language: str, drafts: Path | None
) -> str:
    if piece.share < MIN_SHARE:
        return f"below {MIN_SHARE:.0%} of the time"
    if piece.served:
        return f"served by a verified kernel of {piece.definition}"
    if piece.definition and not piece.workloads:
        return f"no task: the profiled call does not call {piece.definition}"
    if piece.definition:
        return f"task {_task(piece, machine, language).id}"
    if piece.module_class is None or piece.module_class.__module__.startswith("torch."):
        return f"a PyTorch call; {piece.reason or 'no definition describes it'}"
    if drafts is None:
        why = f" ({piece.reason})" if piece.reason else ""
        return f"no definition describes it{why}; --drafts DIR writes a draft of one"
    return f"draft {draft_of(model, piece.module_class, inputs, drafts)}"


def _task(piece: Piece, machine: Machine, language: str) -> Task:
    return create_task(
        piece.definition,
        language=language,
        gpu=machine.gpu,
        workload=tuple(workload.uuid for workload in piece.workloads),
        objective="coverage",
    )


def stock_times(model: Any, inputs: torch.Tensor) -> StockTimes:
    """Return the time of each module class in one call of the unpatched model, and the total, in microseconds."""

    def call() -> Any:
        with torch.no_grad():
            return model(**forward_arguments(model, inputs))

    return module_times(model, call)


def pieces_of(model: Any, inputs: torch.Tensor, tag: str, times: StockTimes | None = None) -> ModelPieces:
    """Match each module class of a model with the Definitions of the catalog, costliest first.

    The model's calls are added to the user's workloads, tagged with the model. ``times`` are earlier :func:`stock_times`; they
    stay valid when the published kernels change.
    """
    catalog = Catalog.default()
    measured, total_us = times or stock_times(model, inputs)
    described = discover(model, catalog)
    served, captured = _calls(model, inputs, catalog)
    kept = {(item.definition, item.uuid): item for item in kept_calls(captured, tag)}
    pieces: list[Piece] = []
    for item in measured:
        share = item.time_us / total_us if total_us else 0.0
        name = item.module_class.__name__
        groups = [group for group in described if issubclass(item.module_class, group.module_class)]
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
                    "",
                    "",
                    item.module_class,
                )
            )
        if not matched:
            reason = "; ".join(reasons)
            pieces.append(Piece(name, share, item.calls, reason=reason, module_class=item.module_class))
    return ModelPieces(tag, time_of(model), total_us, pieces)


def _calls(model: Any, inputs: torch.Tensor, catalog: Catalog) -> tuple[set[str], tuple[Workload, ...]]:
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


# ---- Definition drafts --------------------------------------------------------------------------------

AXES = "MNKHDSBEFGIJLPQRTUVW"


def draft_of(model: Any, cls: type[torch.nn.Module], inputs: torch.Tensor, folder: Path) -> Path:
    """Write the draft of a Definition for a module class, unless it exists.

    Returns:
        The draft's folder. It has ``definition.json``, a reference to complete, and ``captured.json`` with the source location
        and the shapes, dtypes and strides of the first call.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    target = folder / name
    if target.exists():
        return target
    captured = _captured(model, cls, inputs)
    letters: dict[int, str] = {}
    files = draft_definition(
        name,
        "model",
        parse_tensors("inputs", _spelled(captured["inputs"], letters) or "x[M, N]"),
        parse_tensors("outputs", _spelled(captured["outputs"], letters) or "out[M, N]"),
        f"The computation of {cls.__name__} without its submodules.",
    )
    source = source_of(cls)
    files["reference.py"] = f"# Source: {source}\n" + re.sub(r"(?m)^# Source:.*\n", "", files["reference.py"])
    files["captured.json"] = json.dumps({"source": source, **captured}, indent=2) + "\n"
    with writing(folder):
        write_folder(target, {path: text.encode() for path, text in files.items()})
    return target


def _captured(model: Any, cls: type[torch.nn.Module], inputs: torch.Tensor) -> dict[str, Any]:
    """Return the tensors of the class's first call: its inputs, its weights and its outputs."""
    module = next(item for item in model.modules() if type(item) is cls)
    kept: dict[str, Any] = {}

    def keep(owner: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not kept:
            names = list(inspect.signature(type(owner).forward).parameters)[1:]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            own = {key: value for key, value in owner.named_parameters(recurse=False)}
            outputs = output if isinstance(output, tuple) else (output,)
            kept["inputs"] = _described({**given, **own})
            kept["outputs"] = _described({f"out{index or ''}": value for index, value in enumerate(outputs)})

    hook = module.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**forward_arguments(model, inputs))
    finally:
        hook.remove()
    return kept or {"inputs": {}, "outputs": {}}


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": list(value.stride()),
        }
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _spelled(tensors: Mapping[str, Mapping[str, Any]], letters: dict[int, str]) -> str:
    """Format tensors as ``x[M, N], index[M]:int64``, with one letter per size."""
    parts = []
    for name, tensor in tensors.items():
        axes = [letters.setdefault(size, AXES[len(letters) % len(AXES)]) for size in tensor["shape"]]
        floating = tensor["dtype"] in ("float32", "bfloat16", "float16")
        if axes:
            parts.append(f"{name}[{', '.join(axes)}]" + ("" if floating else f":{tensor['dtype']}"))
    return ", ".join(parts)


def source_of(cls: type[torch.nn.Module]) -> str:
    """Return the location of a class: a permalink into the release of transformers, or the file."""
    import transformers

    file = inspect.getsourcefile(cls) or ""
    lines, first = inspect.getsourcelines(cls)
    package = Path(transformers.__file__).parent
    place = f"#L{first}-L{first + len(lines) - 1}"
    if not Path(file).is_relative_to(package):
        return f"{file}{place}"
    inner = Path(file).relative_to(package).as_posix()
    return (
        f"https://github.com/huggingface/transformers/blob/v{transformers.__version__}/src/transformers/{inner}{place}"
    )
