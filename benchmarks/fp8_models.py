"""FP8 in models with random weights: a bf16 model that was quantised against itself in bf16, and an FP8 model of transformers.

Nothing is downloaded. All ways share one process and take turns; ratios are of times in the same round, with 99% intervals.

    python benchmarks/fp8_models.py CONFIG --batch 8 --prompt 2048 --new 0                # prefill: patched bf16 against fp8
    python benchmarks/fp8_models.py CONFIG --prompt 512 --new 64 --static-cache           # decode, compiled steps in CUDA graphs
    python benchmarks/fp8_models.py CONFIG --fp8-model                                    # FP8 layers, stock and patched
    python benchmarks/fp8_models.py CONFIG --device cpu --way fp8-reference --layers 1    # the numbers alone

``--fp8-model`` needs what transformers needs for FP8: a GPU and the kernels of its hub. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilegym_db.bench.timing import paired_ratio
from tilegym_db.models import Handle, patch
from tilegym_db.models.bench.generation import Generate, dynamic_cache, prefill, static_cache
from tilegym_db.models.bench.model_bench import compare
from tilegym_db.models.capture import random_prompt
from tilegym_db.models.quantise import BLOCK, choose, quantised
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.models.upstream_code import wrapper_of


def twin_of(model: Any) -> Any:
    """A second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def as_fp8_model(model: Any) -> Any:
    """The model with transformers' FP8 layers in place of what its quantiser would take, holding codes of the same weights."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for name, own in choose(model)[0].items():
        with torch.device("meta"):
            layer = FP8Linear(own.in_features, own.out_features, (BLOCK, BLOCK), has_bias=own.bias is not None)
        layer.bias = own.bias
        for parameter, value in zip(("weight", "weight_scale_inv"), quantised(own.weight), strict=True):
            setattr(layer, parameter, torch.nn.Parameter(value, requires_grad=False))
        model.set_submodule(name, layer)
    for name, experts in [(name, one) for name, one in model.named_modules() if wrapper_of(type(one).forward)]:
        model.set_submodule(name, as_fp8_experts(experts))
    return model.eval()


def as_fp8_experts(own: Any) -> Any:
    """transformers' FP8Experts with codes of the weights of a module of experts, gate rows first and without biases."""
    from transformers.integrations import finegrained_fp8 as fp8
    from transformers.integrations.moe import use_experts_implementation

    made: Any = use_experts_implementation(
        experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    with torch.device("meta"):
        layer = made(own.config, (BLOCK, BLOCK))
    for key in ("gate_up_proj", "down_proj"):
        pairs = [quantised(weight) for weight in getattr(own, key)]
        for parameter, values in zip((key, f"{key}_scale_inv"), zip(*pairs, strict=True), strict=True):
            setattr(layer, parameter, torch.nn.Parameter(torch.stack(values), requires_grad=False))
    return layer


def way_of(model: Any, ids: torch.Tensor, options: argparse.Namespace) -> Generate:
    """What is timed: the prefill alone, or a generation."""
    if options.new == 0:
        return prefill(model, ids)
    if options.static_cache:
        return static_cache(model, ids, options.new)
    return dynamic_cache(model, ids, options.new)


def built(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Handle], torch.Tensor]:
    """The models by way, the handles of those that are patched, and the prompt."""
    stock = build_model(load_config(options.config, options.layers), options.device, "bfloat16")
    ids = random_prompt(stock, options.batch, options.prompt)
    if options.fp8_model:
        stock = as_fp8_model(stock)
    models = {"stock": stock, "patched": twin_of(stock)}
    handles = {"patched": patch(models["patched"])}
    if not options.fp8_model:
        models["fp8"] = twin_of(stock)
        handles["fp8"] = patch(models["fp8"], quantise=options.way, inputs=ids)
    return models, handles, ids


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Times, ratios, calls by kernel and what became of the numbers."""
    models, handles, ids = built(options)
    race = compare({name: way_of(model, ids, options) for name, model in models.items()}, options.rounds)
    what = "tpot_ms" if options.new > 1 else "total_ms"
    times = {name: [getattr(one, what) for one in found] for name, found in race.found.items()}
    ratios = {}
    for name, other in (("patched", "stock"), ("fp8", "stock"), ("fp8", "patched")):
        if name in times:
            ratio = paired_ratio(times[name], times[other])
            ratios[f"{name} over {other}"] = [ratio.median, ratio.low, ratio.high]
    shown = handles["fp8"].report().quantised if "fp8" in handles else None
    return {
        "config": str(options.config),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "tokens": [options.batch, options.prompt, options.new],
        "what": what,
        "median": {name: sorted(values)[len(values) // 2] for name, values in times.items()},
        "speedup, low, high": ratios,
        "absent": race.absent,
        "hits": {name: handle.report().hits() for name, handle in handles.items()},
        "why stock": {
            name: {site.definition: site.reason for site in handle.report().sites if site.reason}
            for name, handle in handles.items()
        },
        "quantised": None if shown is None else asdict(shown),
    }


def main() -> int:
    """Read the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device", default="cuda")
    for name, default in (("batch", 1), ("prompt", 512), ("new", 64), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--way", default="fp8")
    parser.add_argument("--static-cache", action="store_true")
    parser.add_argument("--fp8-model", action="store_true")
    print(json.dumps(measured(parser.parse_args()), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
