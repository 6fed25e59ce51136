"""Experts of a mixture at the sizes of models: every Solution and baseline, the speed of light, and a search of configs.

Each Solution is first held against the reference in fp32 on the same inputs, then timed by the harness's own clock: CUDA events,
L2 flushed before each call, launches queued ahead. Ids are those of a router: K different experts for each token, all equally
likely; ``--routing`` takes others: all to one expert, to as few as there may be, one of each token twice, or a third to no expert
at all. The speed of light is the larger of what the touched experts and the activations take at 4.3 TB/s and the products at
790 TFLOP/s.

    python -m benchmarks.experts --out experts.jsonl
    python -m benchmarks.experts --shapes qwen3-30b --tokens 4096 --search --kernels --out search.jsonl
    python -m benchmarks.experts --shapes qwen3-30b --tokens 64,4096 --routing one
    python -m benchmarks.experts --device cpu --shapes tiny --tokens 3,20

``--search`` tries for each size every value of every tunable, one tunable after the other, from the best so far; kernels are
compiled ahead by ``--jobs`` processes. ``--kernels`` says what each kernel of a call takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.race_candidates import Arguments, Call, catalog_call, interprets
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.records import Definition
from tilegym_db.records.solution import TILE_LANGUAGES, Config, name_with_config
from tilegym_db.sandbox.interpreters import repair_interpreter
from tilegym_db.sandbox.timing import BlockTimer
from tilegym_db.verify.oracle import load_function

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-30b": ("moe_experts", {"H": 2048, "I": 768, "E": 128, "K": 8}),
    "olmoe": ("moe_experts", {"H": 2048, "I": 1024, "E": 64, "K": 8}),
    "qwen3-next": ("moe_experts", {"H": 2048, "I": 512, "E": 512, "K": 10}),
    "deepseek-v2-lite": ("moe_experts", {"H": 2048, "I": 1408, "E": 64, "K": 6}),
    "deepseek-v3-slice": ("moe_experts", {"H": 7168, "I": 2048, "E": 8, "K": 8}),
    "gpt-oss-20b": ("moe_experts_oai", {"H": 2880, "I": 2880, "E": 32, "K": 4}),
    "deepseek-v4-slice": ("moe_experts_clamp", {"H": 4096, "I": 2048, "E": 32, "K": 6}),
    "tiny": ("moe_experts", {"H": 64, "I": 32, "E": 8, "K": 2}),
    "tiny-oai": ("moe_experts_oai", {"H": 64, "I": 32, "E": 8, "K": 2}),
    "tiny-clamp": ("moe_experts_clamp", {"H": 64, "I": 32, "E": 8, "K": 2}),
}
USUAL = "qwen3-30b,olmoe,gpt-oss-20b"
SCALARS = {"alpha": 1.702, "limit": 7.0}
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6  # measured on an H200: a large copy, a bf16 product of 8192^3
SLOTS = 2
ROUTINGS = ("usual", "one", "few", "twice", "outside")


OF_TOKENS = ("x", "ids", "weights", "out")


def routed(axes: dict[str, int], routing: str, generator: torch.Generator) -> torch.Tensor:
    """Ids [M, K] of experts."""
    m, e, k = (axes[name] for name in "MEK")
    draws = {"generator": generator, "device": generator.device}
    ids = torch.rand((m, k if routing == "few" else e), **draws).topk(k, dim=-1).indices  # type: ignore[call-overload]
    if routing == "one":
        return torch.zeros_like(ids)
    if routing == "twice":
        return ids[:, :1].expand_as(ids).where(torch.arange(k, device=ids.device) < 2, ids)
    if routing == "outside":
        return ids.where(torch.rand((m, k), **draws) > 0.3, e)  # type: ignore[call-overload]
    return ids


def draw(
    definition: Definition, axes: dict[str, int], device: str, seed: int, names: Container[str], routing: str = "usual"
) -> Arguments:
    """These inputs and outputs in bf16: ids of a router, weights of the products such that every step keeps its scale."""
    generator = torch.Generator(device).manual_seed(seed)
    fan_in = {"gate_up": axes["H"], "down": axes["I"]}
    given: Arguments = {}
    for name, spec in definition.inputs.items():
        if name not in names:
            continue
        if spec.is_scalar:
            given[name] = SCALARS[name]
            continue
        shape = definition.shape_of(name, axes)
        if name == "ids":
            given[name] = routed(axes, routing, generator)
            continue
        value = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        if name == "weights":
            value = torch.softmax(value.float(), dim=-1).bfloat16()
        given[name] = value.mul_(fan_in[name] ** -0.5) if name in fan_in else value
    given["out"] = torch.empty_like(given["x"])
    return given


def light_us(definition: Definition, axes: dict[str, int], ids: torch.Tensor) -> float:
    """What no kernel can be faster than, with the experts that these ids touch."""
    m, h, i, k = (axes[name] for name in "MHIK")
    served = ids[ids < axes["E"]]
    moved = len(served.unique()) * 3 * i * h * 2 + 2 * m * h * 2 + m * k * 10
    return max(moved / BYTES_PER_US, 6 * len(served) * i * h / FLOPS_PER_US)


def truth(definition: Definition, given: Arguments) -> torch.Tensor:
    """The reference on the same inputs in fp32."""
    wide = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    return load_function(definition.reference, definition.name)(*(wide[name] for name in definition.inputs))


def errors(call: Call, given: Arguments, expected: torch.Tensor) -> tuple[float, float]:
    """(relative Frobenius, largest absolute) error of one call against fp32; NaN where an element was not written."""
    given["out"].fill_(float("nan"))
    returned = call(given)
    found = (given["out"] if returned is None else returned).float()
    return float((found - expected).norm() / expected.norm()), float((found - expected).abs().max())


def timed_us(call: Call, slots: list[Arguments], timer: BlockTimer, calls: int) -> float:
    """Median device time of a call, L2 cold."""
    bound = {index: (lambda given=given: call(given)) for index, given in enumerate(slots)}
    order = [number % len(slots) for number in range(calls)]
    for _ in range(2):  # the first fills caches and tells the timer how long a launch takes
        samples = timer.time(order, bound, lambda index: None, lambda index, returned: None)
    return statistics.median(sample.device_us for sample in samples)


def kernel_times(call: Call, given: Arguments, calls: int = 10) -> dict[str, float]:
    """Mean device time of each kernel of a call, L2 warm, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call(given)
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total / calls, 2) for event in profile.key_averages()}


def configs_to_try(files: SolutionFiles, best: Config, name: str) -> Iterator[Config]:
    """The best config so far with every value of one tunable."""
    for value in files.record.spec.tunables[name]:
        config = {**best, name: value}
        if config != best:
            yield config


class Bench:
    """One size: its inputs, what is expected of them, and what was found so far."""

    def __init__(self, shape: str, tokens: int, options: argparse.Namespace) -> None:
        """Draw the inputs and evaluate the reference on them."""
        name, axes = SHAPES[shape]
        catalog = Catalog.default()
        self.shape, self.options = shape, options
        self.definition = catalog.definition(name)
        self.solutions = [files for files in catalog.solutions_for(name) if self.wanted(files)]
        self.axes = {"M": tokens, **axes}
        routing = options.routing
        shared = draw(self.definition, self.axes, options.device, 0, self.definition.inputs, routing)
        # Other tokens with other experts. Weights of the experts are larger than L2: one copy is enough.
        others = [draw(self.definition, self.axes, options.device, s, OF_TOKENS, routing) for s in range(1, SLOTS)]
        self.slots = [shared] + [{**shared, **other} for other in others]
        self.light = light_us(self.definition, self.axes, shared["ids"])
        self.expected = truth(self.definition, shared)
        self.timer = BlockTimer(options.device)
        self.rows: list[dict[str, Any]] = []

    def wanted(self, files: SolutionFiles) -> bool:
        """Whether this run measures the Solution."""
        return self.options.only is None or files.name in self.options.only.split(",")

    def measure(self, files: SolutionFiles, config: Config) -> float | None:
        """Microseconds, or None where it does not run or is wrong; the row says why."""
        call = catalog_call(self.definition, files, config)
        row: dict[str, Any] = {
            "shape": self.shape, "tokens": self.axes["M"], "routing": self.options.routing, "solution": files.name,
            "config": config, "light_us": round(self.light, 2),
        }  # fmt: skip
        self.rows.append(row)
        try:
            row["rel_error"], row["max_error"] = errors(call, self.slots[0], self.expected)
            if not row["rel_error"] < 2e-2:
                row["wrong"] = True
                return None
            row["us"] = round(timed_us(call, self.slots, self.timer, self.options.calls), 2)
        except Exception as error:  # a Solution may raise anything; it is reported, and the others go on
            row["raises"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return None
        row["of_light"] = round(self.light / row["us"], 3)
        if self.options.kernels:
            row["kernels"] = kernel_times(call, self.slots[0])
        return float(row["us"])

    def search(self, files: SolutionFiles) -> None:
        """Every value of every tunable, one after the other, from the best so far."""
        best: Config = {}
        fastest = self.measure(files, best)
        for name in files.record.spec.tunables:
            for config in configs_to_try(files, best, name):
                latency = self.measure(files, config)
                if latency is not None and (fastest is None or latency < fastest):
                    best, fastest = config, latency

    def run(self) -> list[dict[str, Any]]:
        """Measure every Solution that supports the size; one row for each measurement."""
        for files in self.solutions:
            if files.record.unsupported(self.axes, dict.fromkeys(self.definition.dtypes, "bfloat16"), {}, target=None):
                continue
            if self.options.search and files.record.spec.language in TILE_LANGUAGES:
                self.search(files)
            else:
                self.measure(files, {})
        return self.rows


def compile_ahead(options: argparse.Namespace) -> None:
    """Each process runs the configs of a part of the sizes once, so that the compile cache has their kernels."""
    sizes = [(shape, tokens) for shape in options.shapes.split(",") for tokens in options.tokens.split(",")]
    command = [sys.executable, "-m", "benchmarks.experts", "--calls", "1", "--jobs", "0", "--search", "--quiet"]
    if options.only:
        command += ["--only", options.only]
    running = [
        subprocess.Popen([*command, "--device", options.device, "--shapes", shape, "--tokens", tokens])
        for shape, tokens in sizes[: options.jobs]
    ]
    for process in running:
        process.wait()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'size':28} {'solution and config':64} {'us':>10} {'of light':>9} {'error':>9} {'largest':>9}"]
    for row in rows:
        name = name_with_config(row["solution"], row["config"])
        size = f"{row['shape']} T={row['tokens']}"
        said = "wrong" if row.get("wrong") else row.get("raises", "")[:60]
        numbers = f"{row['us']:10.1f} {row['of_light']:9.3f}" if "us" in row else f"{said:>20}"
        lines.append(f"{size:28} {name:64} {numbers} {row.get('rel_error', 0):9.1e} {row.get('max_error', 0):9.1e}")
        lines += [f"{'':32}{time:8.1f} us {kernel[:80]}" for kernel, time in row.get("kernels", {}).items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write a line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=USUAL, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="1,8,32,512,4096")
    parser.add_argument("--only", help="names of Solutions, separated by commas")
    parser.add_argument("--search", action="store_true", help="try the tunables")
    parser.add_argument("--kernels", action="store_true", help="what each kernel of a call takes")
    parser.add_argument("--routing", choices=ROUTINGS, default="usual")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile ahead of a search; 0: none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and interprets():
        repair_interpreter()
    if options.search and options.jobs:
        compile_ahead(options)
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            for tokens in map(int, options.tokens.split(",")):
                rows = Bench(shape, tokens, options).run()
                if not options.quiet:
                    print(table(rows), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
