"""A step of training, forward and backward, of the layers over the catalog's operators, beside the same layers in plain PyTorch.

The plain ones are the references of the Definitions, through which autograd goes by itself, as they are and under torch.compile.
All ways have the same parameters and inputs and take turns; ratios are of times in the same round, with 99% intervals. Each
gradient is held against that in fp64 first.

Of layers this small the host is slower than the GPU. With ``--graphs`` every way is recorded as a CUDA graph too, and timed as
one, which is what the GPU itself takes.

    python -m benchmarks.training_layers --tokens 4096 --out layers.json
    python -m benchmarks.training_layers --tokens 4096 --graphs
    python -m benchmarks.training_layers pipeline --tokens 4096 --profile     # what the GPU does in a step
    python -m benchmarks.training_layers --device cpu --tokens 8 --hidden 32 --rounds 3
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilegym_db.bench.timing import paired_ratio
from tilegym_db.catalog import Catalog
from tilegym_db.layers import engram, hyper_connections
from tilegym_db.models.bench.model_bench import balanced_orders
from tilegym_db.verify.oracle import load_function

REFERENCES = {
    hyper_connections.__name__: {
        "_expand": "mhc_expand",
        "_norm_fn": "mhc_norm_fn",
        "_split_mixes": "mhc_pre_split_mixes",
        "_sinkhorn": "mhc_sinkhorn",
        "_apply_mix": "mhc_pre_apply_mix",
        "_post": "mhc_post",
        "_head_mix": "mhc_head_compute_mix",
        "_pre_fused": "mhc_pre_fused",
    },
    engram.__name__: {"_gate": "engram_gate_fwd_save", "_gate_alone": "engram_gate_fwd"},
}
"""Module of layers -> the operators in it, by the name that it gives them."""
MODULES = {"pipeline": hyper_connections, "engram": engram}

WARM_UP_ROUNDS = 3
ERROR_TOKENS = 512
"""Tokens of the comparison with fp64, at most."""

Step = Callable[[], list[torch.Tensor]]


def plain(module: Any) -> Any:
    """A second copy of a module of layers, whose operators are the references themselves."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    catalog = Catalog.default(warns=False)
    for name, operator in REFERENCES[module.__name__].items():
        setattr(made, name, load_function(catalog.definition(operator).reference, operator))
    return made


def build(layer: str, module: Any, options: argparse.Namespace) -> torch.nn.Module:
    """One layer of a module of layers, with parameters that are neither ones nor zeros."""
    torch.manual_seed(0)
    if layer == "engram":
        made = module.EngramGateLayer(options.hidden, options.streams)
    else:
        sublayers = [torch.nn.Identity() for _ in range(options.sublayers)]
        made = module.MHCPipeline(options.streams, options.hidden, sublayers)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    found: torch.nn.Module = made.to(options.device)
    return found


def inputs(layer: str, tokens: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """What a layer is given, in bf16: an activation; or the streams, keys and values."""
    streams, hidden = options.streams, options.hidden
    shapes: list[tuple[int, ...]] = [(tokens, hidden)]
    if layer == "engram":
        shapes = [(tokens, streams, hidden), (tokens, streams, hidden), (tokens, hidden)]
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator).to(options.device, torch.bfloat16) for shape in shapes]
    return [value.requires_grad_() for value in drawn]


def step_of(layer: torch.nn.Module, call: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> Step:
    """Forward and backward; the gradients of the inputs and of the parameters."""
    over = [*given, *layer.parameters()]
    weights = torch.linspace(-1, 1, given[0].shape[-1], device=given[0].device)

    def step() -> list[torch.Tensor]:
        for value in over:
            value.grad = None
        out = call(*given)
        out.backward(weights.to(out.dtype).expand_as(out).contiguous())
        return [value.grad for value in over if value.grad is not None]

    return step


def steps(name: str, tokens: int, options: argparse.Namespace, compiles: bool = True) -> dict[str, Step]:
    """Way -> its step, each on parameters of its own and the same inputs."""
    module = MODULES[name]
    ours, theirs = build(name, module, options), build(name, plain(module), options)
    given = inputs(name, tokens, options)
    compiled = {key: copy.deepcopy(layer) for key, layer in (("ours", ours), ("reference", theirs)) if compiles}
    found = {"ours": step_of(ours, ours, given), "reference": step_of(theirs, theirs, given)}
    for key, layer in compiled.items():
        found[f"{key}_compiled"] = step_of(layer, torch.compile(layer, backend=options.backend, dynamic=False), given)
    return found


GRAPH = "_graph"
"""What the name of a way ends in where it is recorded as a CUDA graph."""


def graphed(step: Step) -> Step:
    """A step as one CUDA graph, which leaves the gradients of its last replay where they were when it was recorded."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # autograd remembers the stream of the forward, which must not be the default one
        for _ in range(WARM_UP_ROUNDS):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return held

    return replay


def errors(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Way -> the largest relative error of a gradient against fp64."""
    tokens = min(options.tokens, ERROR_TOKENS)
    exact = build(name, MODULES[name], options).double()
    wide = [value.detach().double().requires_grad_() for value in inputs(name, tokens, options)]
    wanted = step_of(exact, exact, wide)()
    found = {}
    for way, step in steps(name, tokens, options, compiles=False).items():
        pairs = zip(step(), wanted, strict=True)
        found[way] = max(float((got.double() - want).norm() / want.norm()) for got, want in pairs)
    return found


def timed_ms(step: Step, calls: int, device: str) -> float:
    """Milliseconds of one step, the mean of some in a row; on a GPU by its own clock."""
    if not device.startswith("cuda"):
        begun = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - begun) / calls * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def profiled(step: Step, device: str) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds) of one step, the longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.startswith("cuda") else activity.CPU]) as profile:
        step()
    events = [(event.key, event.count, event.device_time_total) for event in profile.key_averages()]
    return sorted(events, key=lambda row: -row[2])[:25]


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Errors, times, ratios and, where asked for, the kernels of one layer."""
    wrong = errors(name, options)
    ways = steps(name, options.tokens, options)
    profiles = {way: profiled(step, options.device) for way, step in ways.items()} if options.profile else None
    if options.graphs:
        ways |= {f"{way}{GRAPH}": graphed(step) for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    orders = balanced_orders(list(ways))
    for number in range(WARM_UP_ROUNDS + options.rounds):
        for way in orders[number % len(orders)]:
            spent = timed_ms(ways[way], options.calls, options.device)
            if number >= WARM_UP_ROUNDS:
                times[way].append(spent)
    ratios = {}
    kinds = ("", GRAPH) if options.graphs else ("",)
    for kind, ours, theirs in itertools.product(kinds, ("ours", "ours_compiled"), ("reference_compiled", "reference")):
        way, other = f"{ours}{kind}", f"{theirs}{kind}"
        ratio = paired_ratio(times[way], times[other])
        ratios[f"{way} over {other}"] = [ratio.median, ratio.low, ratio.high]
    return {
        "layer": name,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "sizes": {key: getattr(options, key) for key in ("tokens", "streams", "hidden", "sublayers")},
        "error against fp64": wrong,
        "ms": {way: sorted(values)[len(values) // 2] for way, values in times.items()},
        "speedup, low, high": ratios,
        "kernels": profiles,
    }


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=[*MODULES], help=f"{', '.join(MODULES)}; both by default")
    parser.add_argument("--device", default="cuda")
    for name, default in (("tokens", 4096), ("streams", 4), ("hidden", 4096), ("sublayers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=5, help="steps in a row that are timed together")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="each way as a CUDA graph too")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Read the options, measure each layer, print and write."""
    options = parsed(arguments)
    found = [measured(name, options) for name in options.layers]
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
