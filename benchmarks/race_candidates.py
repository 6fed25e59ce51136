"""The racers of ``benchmarks/kernel_race.py``: our kernels, the catalog's baselines, torch.compile, Liger and TileGym."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.backends.toolchains import toolchain_status
from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.measurement.machine import Machine
from tilegym_db.published.entries import Candidate
from tilegym_db.published.table import ResolverTable, load_table
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import layout_class
from tilegym_db.records.solution import TILE_LANGUAGES, Config, name_with_config
from tilegym_db.records.verdicts import VERIFIED_TIERS
from tilegym_db.records.workload import Case
from tilegym_db.resolver.decide import layouts_match

Arguments = dict[str, Any]
Call = Callable[[Arguments], Any]
"""Takes inputs and outputs by name; returns outputs as a reference does, or None where it wrote them."""


@dataclass
class Racer:
    """One implementation: what it is called, how, and what its rounds took."""

    column: str
    name: str
    call: Call
    verified: bool = True
    """False for a kernel of ours that no published measurement of its source backs."""
    overwrites: tuple[str, ...] = ()
    error: float = 0.0
    """Relative Frobenius error against fp64."""
    samples: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """Median of each block, in microseconds."""


Absent = dict[str, str]
"""Column -> why it has no racer."""

LibraryCalls = dict[str, tuple[Call, tuple[str, ...]]]
"""Definition -> (call, inputs that it overwrites)."""


def catalog_call(definition: Definition, files: SolutionFiles, config: Config) -> Call:
    """Return the entry point of a Solution on named arguments."""
    entry, writes = load_entry(files), files.record.spec.destination_passing_style
    names = [*definition.inputs, *(definition.written_outputs if writes else ())]

    def call(given: Arguments) -> Any:
        returned = entry(*(given[name] for name in names), **config)
        return None if writes else returned

    return call


def interprets() -> bool:
    """Return True if Triton runs without a GPU, in its interpreter. Its times say nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def layouts_of(definition: Definition, case: Case) -> dict[str, str]:
    """Return the layout class of every tensor."""
    names = (*definition.tensor_inputs, *definition.outputs)
    return {
        name: layout_class(definition.shape_of(name, case.call.axes), case.strides(definition, name)) for name in names
    }


def why_not(definition: Definition, files: SolutionFiles, case: Case, machine: Machine) -> str | None:
    """Return why a Solution cannot race here."""
    status = toolchain_status(files.record.spec.language)
    if not status.available:
        return f"not installed: {status.fix}"
    interpreted = not machine.is_gpu and files.record.spec.language == "triton" and interprets()
    target = None if interpreted else machine.sm or "cpu"
    return files.record.unsupported(case.call.axes, case.call.dtypes, layouts_of(definition, case), target=target)


def published(definition: Definition, case: Case, table: ResolverTable | None, files: SolutionFiles) -> list[Candidate]:
    """Return the verified measurements of exactly this source at exactly this shape, fastest first."""
    entries = () if table is None else table.entries(definition.name, case.call.dtypes)
    found = [
        candidate
        for entry in entries
        if entry.definition_digest == definition.digest
        and all(entry.call.axes[name] == case.call.axes[name] for name in definition.var_axes)
        and layouts_match(entry, layouts_of(definition, case), definition)
        for candidate in entry.candidates
        if candidate.solution_digest == files.digest and candidate.tier in VERIFIED_TIERS and candidate.latency_us
    ]
    return sorted(found, key=lambda candidate: candidate.latency_us or 0.0)


def our_racers(catalog: Catalog, definition: Definition, case: Case, machine: Machine) -> tuple[list[Racer], Absent]:
    """Return our fastest kernel per language, and the baselines of the catalog."""
    table = load_table(machine.gpu) if machine.is_gpu else None
    best: dict[str, tuple[float, Racer]] = {}
    absent: Absent = {}
    for files in catalog.solutions_for(definition.name):
        spec = files.record.spec
        column = spec.provides or ("library" if spec.language == "python" else spec.language)
        if column == "compile":
            continue  # raced below, for every operator in the same way
        reason = why_not(definition, files, case, machine)
        if reason is not None:
            absent.setdefault(column, reason)
            continue
        for candidate in published(definition, case, table, files)[:1] or [None]:
            config = dict(candidate.config) if candidate else {}
            latency = (candidate.latency_us if candidate else None) or float("inf")
            call, name = catalog_call(definition, files, config), name_with_config(files.name, config)
            verified = candidate is not None or spec.language not in TILE_LANGUAGES
            racer = Racer(column, name, call, verified, tuple(definition.in_place))
            if column not in best or latency < best[column][0]:
                best[column] = latency, racer
    return [racer for _, racer in best.values()], absent


def compiled_racer(catalog: Catalog, definition: Definition) -> Racer | str:
    """Return torch.compile of the stock code: one static graph, compiled at the first call."""
    stock = stock_of(catalog.solutions_for(definition.name))
    if stock is None or stock.record.spec.destination_passing_style:
        return "no stock code that returns its outputs"
    torch._dynamo.reset()
    function = torch.compile(load_entry(stock), dynamic=False, fullgraph=True)
    names = list(definition.inputs)
    return Racer(
        "compile",
        f"torch.compile({stock.name})",
        lambda given: function(*(given[name] for name in names)),
        overwrites=tuple(definition.in_place),
    )


def liger_calls(module: Any) -> LibraryCalls:
    """Return calls of ``liger_kernel.transformers.functional``, and one of ``liger_kernel.ops`` that it leaves out."""
    ops = importlib.import_module("liger_kernel.ops.swiglu")
    return {
        "rms_norm": (lambda given: module.liger_rms_norm(given["x"], given["weight"], given["eps"]), ()),
        "fused_add_rms_norm": (
            lambda given: module.liger_fused_add_rms_norm(given["x"], given["residual"], given["weight"], given["eps"]),
            (),
        ),
        "silu_and_mul": (lambda given: ops.LigerFusedGateUpSiLUMulFunction.apply(given["x"]), ()),
        "swiglu": (lambda given: module.liger_swiglu(given["a"], given["b"]), ()),
        "rope_neox": (
            lambda given: module.liger_rope(given["q"], given["k"], given["cos"], given["sin"]),
            ("q", "k"),
        ),
        "softmax": (lambda given: module.liger_softmax(given["x"]), ()),
    }


def tilegym_calls(module: Any) -> LibraryCalls:
    """Return the calls of ``tilegym.ops``; there is no fused residual add and norm."""
    swiglu = module.get_swiglu()
    return {
        "rms_norm": (
            lambda given: module.rms_norm(given["x"], (given["x"].shape[-1],), given["weight"], given["eps"]),
            (),
        ),
        "silu_and_mul": (lambda given: module.silu_and_mul(given["x"]), ()),
        "swiglu": (lambda given: swiglu(given["a"], given["b"]), ()),
        "rope_neox": (
            lambda given: module.apply_rope_base(given["q"], given["k"], given["cos"], given["sin"])[:2],
            ("q", "k"),
        ),
        "softmax": (lambda given: module.softmax(given["x"]), ()),
        "gemm": (lambda given: module.matmul(given["a"], given["b"], trans_a=False, trans_b=True), ()),
    }


LIBRARIES: dict[str, tuple[str, str, Callable[[Any], LibraryCalls]]] = {
    "liger": ("liger_kernel.transformers.functional", "liger-kernel", liger_calls),
    "tilegym": ("tilegym.ops", "tilegym", tilegym_calls),
}
"""Column -> (module, package, its calls)."""


def library_racer(column: str, definition: Definition, machine: Machine) -> Racer | str:
    """Return a public function of another library, or why there is none."""
    module, package, calls = LIBRARIES[column]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"not installed: pip install --no-deps {package}"
    if not (machine.is_gpu or (column == "liger" and interprets())):
        return "needs a GPU"
    try:
        found = calls(importlib.import_module(module)).get(definition.name)
    except Exception as error:  # what a library does while it is imported is its own affair; the others race on
        return f"cannot be used: {type(error).__name__}: {error}"
    return "has none" if found is None else Racer(column, f"{module}: {definition.name}", found[0], overwrites=found[1])
