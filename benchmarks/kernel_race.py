"""Our kernels against torch.compile, ATen, Liger and TileGym: one process, one GPU, the same memory, rounds in random order.

Per operator and shape every racer is first held against fp64 on the same inputs; what is further off than the operator allows
does not start. In each round every racer then plays one block of calls, in random order, timed by the harness's own clock:
CUDA events, L2 flushed before each call, another set of contents and addresses at each call. Medians are over all
calls, ratios over the rounds, with 99% intervals.

* ours: per language the fastest verified kernel of the published table at exactly this shape, with its config; where the
  table has none for today's source, the first kernel under its defaults, marked with ``*``;
* stock, library: the baselines of the catalog (transformers' own code, ATen, cuBLAS);
* compile: torch.compile of the stock code, one static graph a shape;
* liger, tilegym: their public functions, where installed (``pip install --no-deps liger-kernel tilegym``; TileGym tunes itself at
  its first call, which is not timed). They allocate their outputs, which costs no device time.

    python -m benchmarks.kernel_race --gpu auto --out race.json
    python -m benchmarks.kernel_race --gpu cpu --tiny rms_norm
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.race_candidates import (
    LIBRARIES,
    Absent,
    Arguments,
    Racer,
    compiled_racer,
    interprets,
    library_racer,
    our_racers,
)
from tilegym_db.backends.toolchains import repair_interpreter
from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.measurement.machine import Machine, select_machine, timing_lock
from tilegym_db.measurement.timing import median, median_interval, paired_ratio
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.call import Call
from tilegym_db.records.definition import limits_for
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import TILE_LANGUAGES
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.sandbox.timing import BlockTimer
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import name_outputs, oracle

SLOTS = 4
"""Sets of contents and addresses."""
WARM_UP_BLOCKS = 3

COLUMNS = (*TILE_LANGUAGES, "stock", "library", "compile", "liger", "tilegym")

QUERIES, KEYS = "strided(S*Hq*D, D, Hq*D, 1)", "strided(S*Hkv*D, D, Hkv*D, 1)"
LAYOUTS = {"rope_neox": {"q": QUERIES, "q_out": QUERIES, "k": KEYS, "k_out": KEYS}}
"""As a model has them: q and k are views of [B, S, H, D]."""


def rope(batch: int, positions: int, heads: int = 32) -> dict[str, int]:
    """Return sizes of a rotation of Llama-3.1-8B's heads, or of fewer."""
    return {"B": batch, "Hq": heads, "Hkv": heads // 4, "S": positions, "D": 4 * heads, "Bc": 1}


SHAPES: dict[str, list[dict[str, int]]] = {
    "rms_norm": [{"M": m, "N": 4096} for m in (4096, 8, 1)],
    "fused_add_rms_norm": [{"M": m, "N": 4096} for m in (4096, 8, 1)],
    "silu_and_mul": [{"M": m, "I": 14336} for m in (4096, 8, 1)],
    "swiglu": [{"M": m, "I": 14336} for m in (4096, 8, 1)],
    "rope_neox": [rope(1, 4096), rope(8, 1), rope(1, 1)],
    "softmax": [{"M": 4096, "N": 4096}, {"M": 8, "N": 128256}, {"M": 1, "N": 128256}],
    "gemm": [{"M": size, "N": size, "K": size} for size in (4096, 8192)],
}
TINY: dict[str, list[dict[str, int]]] = {
    **{name: [{"M": 4, next(axis for axis in sizes[0] if axis != "M"): 64}] for name, sizes in SHAPES.items()},
    "rope_neox": [rope(1, 3, heads=4)],
    "gemm": [{"M": 16, "N": 32, "K": 48}],
}


# -- the race ----------------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """One set of contents at separate addresses. ``pristine`` has what a call overwrites, as it was drawn."""

    given: Arguments
    pristine: dict[str, torch.Tensor]

    def restore(self, names: Sequence[str]) -> None:
        """Bring back what a call before has overwritten."""
        for name in names:
            self.given[name].copy_(self.pristine[name])


def make_slot(definition: Definition, case: Case, device: str, overwritten: Sequence[str]) -> Slot:
    """Draw the inputs, lay them out as the case says, and allocate the outputs."""
    given: Arguments = {}
    for name, value in draw_inputs(definition, case, device).items():
        if isinstance(value, torch.Tensor):
            laid = torch.empty_strided(value.shape, case.strides(definition, name), dtype=value.dtype, device=device)
            value = laid.copy_(value)
        given[name] = value
    for name in definition.written_outputs:
        dtype = storage_dtype(definition.dtype_of(name, case.call.dtypes))
        shape = definition.shape_of(name, case.call.axes)
        given[name] = torch.empty_strided(shape, case.strides(definition, name), dtype=dtype, device=device)
    return Slot(given, {name: given[name].clone() for name in overwritten})


def outputs_of(definition: Definition, given: Arguments, returned: Any) -> dict[str, torch.Tensor]:
    """Return every output by name, both written and returned ones."""
    if returned is None:
        returned = tuple(given[name] for name in definition.written_outputs)
    return name_outputs(definition, returned, given, definition.name)


def error_of(definition: Definition, case: Case, racer: Racer, slot: Slot) -> tuple[float, float]:
    """Return the relative Frobenius error of the worst output against fp64, and the allowed error."""
    slot.restore(tuple(slot.pristine))
    truth = oracle(definition, {name: slot.given[name] for name in definition.inputs})
    for name in definition.written_outputs:
        slot.given[name].fill_(float("nan"))
    found = outputs_of(definition, slot.given, racer.call(slot.given))
    worst = (0.0, 1.0)
    for name, expected in truth.items():
        limits = limits_for(definition, definition.dtype_of(name, case.call.dtypes))
        error = float((found[name].double() - expected.double()).norm() / expected.double().norm())
        allowed = limits.tau if limits is not None else 0.0
        if not error / max(allowed, 1e-300) <= worst[0] / worst[1]:  # also where it is NaN
            worst = error, allowed
    return worst


def admit(definition: Definition, case: Case, racers: Sequence[Racer], slot: Slot, absent: Absent) -> list[Racer]:
    """Return the racers that run and are right."""
    started = []
    for racer in racers:
        try:
            racer.error, allowed = error_of(definition, case, racer, slot)
        except Exception as error:  # a racer may raise anything; it is reported, and the others go on
            absent[racer.column] = f"raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if racer.error <= allowed:
            started.append(racer)
        else:
            absent[racer.column] = f"wrong: relative error {racer.error:.2g} > {allowed:.2g}"
    return started


def race(
    racers: Sequence[Racer], slots: Sequence[Slot], device: str, *, rounds: int, calls: int, seed: int = 0
) -> None:
    """Play the rounds; fills ``samples`` and ``rounds`` of every racer."""
    generator = random.Random(seed)
    # One each: a timer keeps the device busy for as long as its racer's calls take to launch.
    timers = {racer.name: BlockTimer(device) for racer in racers}

    def block(racer: Racer) -> list[float]:
        order = [generator.randrange(len(slots)) for _ in range(calls)]
        bound = {index: (lambda index=index: racer.call(slots[index].given)) for index in range(len(slots))}
        timed = timers[racer.name].time(
            order, bound, lambda index: slots[index].restore(racer.overwrites), lambda index, returned: None
        )
        return [sample.device_us for sample in timed]

    for racer in racers:
        for _ in range(WARM_UP_BLOCKS):
            block(racer)
    for _ in range(rounds):
        for racer in generator.sample(list(racers), len(racers)):
            times = block(racer)
            racer.samples += times
            racer.rounds.append(median(times))


def run_shape(
    catalog: Catalog, machine: Machine, definition: Definition, axes: dict[str, int], options: Any
) -> Arguments:
    """Admit and race the solutions of one operator at one shape; return what came out, ready for JSON."""
    dtypes = definition.bind_dtypes({name: options.dtype for name in definition.dtypes})
    scalars: dict[str, Scalar] = {name: 1e-5 for name, spec in definition.inputs.items() if spec.is_scalar}
    case = Case(
        Call(definition.name, definition.bind_axes(axes), dtypes, LAYOUTS.get(definition.name, {}), scalars),
        seed=options.seed,
    )
    racers, absent = our_racers(catalog, definition, case, machine)
    others: dict[str, Racer | str] = {column: library_racer(column, definition, machine) for column in LIBRARIES}
    others["compile"] = "left out (--no-compile)" if options.no_compile else compiled_racer(catalog, definition)
    racers += [racer for racer in others.values() if isinstance(racer, Racer)]
    absent |= {column: reason for column, reason in others.items() if isinstance(reason, str)}
    overwritten = sorted({name for racer in racers for name in racer.overwrites})
    with torch.no_grad():
        slots = [
            make_slot(definition, replace(case, seed=options.seed + number), machine.device, overwritten)
            for number in range(SLOTS)
        ]
        started = admit(definition, case, racers, slots[0], absent)
        race(started, slots, machine.device, rounds=options.rounds, calls=options.calls, seed=options.seed)
    found = summary(started)
    missing = {column: reason for column, reason in absent.items() if column not in found["times"]}
    return {"definition": definition.name, "axes": axes, "dtypes": dtypes, **found, "absent": missing}


def summary(racers: Sequence[Racer]) -> Arguments:
    """Return times per racer, and the best of ours against the best of the others if both started."""
    times: dict[str, Arguments] = {}
    for racer in racers:
        interval = median_interval(racer.rounds)
        times[racer.column] = {
            "name": racer.name,
            "verified": racer.verified,
            "rel_error": racer.error,
            "latency_us": median(racer.samples),
            "ci_low_us": interval.low,
            "ci_high_us": interval.high,
            "rounds_us": racer.rounds,
        }
    ranked = sorted(racers, key=lambda racer: median(racer.samples))
    ours = next((racer for racer in ranked if racer.column in TILE_LANGUAGES), None)
    others = next((racer for racer in ranked if racer.column not in TILE_LANGUAGES), None)
    ratio = paired_ratio(ours.rounds, others.rounds) if ours and others else None
    return {
        "times": times,
        "best": ours.column if ours else None,
        "best_other": others.column if others else None,
        "ratio": None if ratio is None else {"ratio": ratio.median, "ci_low": ratio.low, "ci_high": ratio.high},
    }


def line(result: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    cells = []
    for column in COLUMNS:
        found = result["times"].get(column)
        cells.append(f"{found['latency_us']:.1f}{'' if found['verified'] else '*'}" if found else "-")
    ratio = result["ratio"]
    against = (
        f"{ratio['ratio']:.3f} ({ratio['ci_low']:.3f} to {ratio['ci_high']:.3f}) {result['best_other']}"
        if ratio
        else "-"
    )
    what = f"{result['definition']} {axes_key(result['axes'])}"
    return f"{what:<52}{''.join(f'{cell:>10}' for cell in cells)}  {against}"


def main() -> int:
    """Race every operator asked for, print a row each, and keep everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}; all by default")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=8, help="in a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything as JSON")
    options = parser.parse_args()
    shapes = TINY if options.tiny else SHAPES
    if interprets():
        repair_interpreter()
    unknown = [name for name in options.names if name not in shapes]
    if unknown:
        parser.error(f"no race for {', '.join(unknown)}; there are {', '.join(shapes)}")
    try:
        machine, catalog = select_machine(options.gpu), Catalog.default()
    except TilegymDBError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"microseconds on {machine.gpu_name}, {options.dtype}; * not verified as published")
    print(f"{'':<52}{''.join(f'{column:>10}' for column in COLUMNS)}  best other / best of ours (99%)")
    results = []
    with timing_lock(machine.device):
        for name in options.names or shapes:
            for axes in shapes[name]:
                results.append(run_shape(catalog, machine, catalog.definition(name), axes, options))
                print(line(results[-1]), flush=True)
                for column, reason in sorted(results[-1]["absent"].items()):
                    print(f"    {column}: {reason}", file=sys.stderr)
                if machine.is_gpu:
                    torch.cuda.empty_cache()
    if options.out is not None:
        found = {"gpu": machine.gpu, "gpu_name": machine.gpu_name, "libs": machine.libs, "results": results}
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
