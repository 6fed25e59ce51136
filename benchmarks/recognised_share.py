"""Share of a model's GPU time in parts that ``patch`` recognises, by a roofline, for architectures of transformers. Needs no GPU.

Each architecture is built at the default sizes of its config, without memory, in bf16. Its parts are found and probed as in
:func:`tilegym_db.patch`. Then one prompt and one decode step run on the meta device, and ``roofline_meter.py`` adds the times of
their operations. An operation of a recognised part is one that a kernel of the catalog may replace, measured or not. Products
of linear layers are library code. In a decode step that ``generate`` runs in a graph, those that ask for a kernel are parts, and
the share without them is printed too. No other product asks for a kernel: a prompt has too many rows for those that there are.
What a submodule without weights and without a row in the report does, such as an
activation, counts as work of the module around it. Means are weighted by ``popularity.json``, which also has sizes for some
architectures.

    python benchmarks/recognised_share.py                                   # every architecture of the list, some minutes
    python benchmarks/recognised_share.py --architectures llama qwen3_moe --json share.json
    python benchmarks/recognised_share.py --all                             # every architecture of transformers that builds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from unittest import mock

import torch
from roofline_meter import FusedAttention, Meter, Products, Row, attention, experts

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.models.call_site import CallSite, unpatched_class
from tilegym_db.models.decoding import why_stock
from tilegym_db.models.found import ModuleGroup, undescribed
from tilegym_db.models.handle import Handle
from tilegym_db.models.next_inputs import CACHES
from tilegym_db.models.patch import discover
from tilegym_db.models.products import MAX_ROWS, Operators
from tilegym_db.models.random_model import model_class
from tilegym_db.models.upstream_code import wrapper_of
from tilegym_db.records import Definition
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import load_function

POPULARITY = Path(__file__).with_name("popularity.json")
PROMPT, IMAGES, FRAMES = 2048, 8, 3000
STAGES = ("prefill", "decode")
LARGE = 0.01
"""Share of the time from which a class of modules needs a row in the report of a patch."""
REST = 20
"""Number of printed classes of modules whose own code takes the most time, in the weighted mean of a stage."""
MANY = "a prompt has more rows than kernels of products were made for"
NO_GRAPH = "the decode step runs in no graph: {}"
OTHERS = "copies of weights in float32, convolutions, and weights that a module computes"

Module = torch.nn.Module
Taken = Mapping[Row, float]
"""Seconds of one stage by row."""


# ---- recognised parts -------------------------------------------------------------------------------


class Counted(CallSite):
    """A call site that asks for a kernel on the meta device too."""

    __slots__ = ()

    def falls_back(self, training: bool, *tensors: Any) -> bool:
        """Return False: a kernel may serve every call that the part itself accepts."""
        return False


def serving(meter: Meter, definition: Definition, site: CallSite, catalog: Catalog) -> Callable[..., Any]:
    """Return ``serve(*inputs) -> outputs``, which counts the Definition's stock code as a recognised part."""
    part = definition.serving.part if definition.serving else ""
    reference = load_function(definition.reference, definition.name)
    stock = stock_of(catalog.solutions_for(definition.name))
    own: Callable[..., Any] | None = None
    if stock is not None and not stock.record.spec.destination_passing_style:
        own = load_verified(stock, stock.digest)

    def serve(*inputs: Any) -> Any:
        with meter.recognised(definition.name):
            if part == "attention":
                with meter.alone():
                    query, key, value, *others = inputs
                    mask = next((one for one in others if isinstance(one, torch.Tensor)), None)
                    return attention(meter, query, key, value, mask)
            if site.stock is not None:
                return site.stock(*inputs)
            if own is not None:
                return own(*inputs)  # also if it overwrites an input, which the reference does not
            outputs = reference(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            written = outputs[: len(definition.written_outputs)]
            return written[0] if len(written) == 1 else written

    return serve


def install(model: Module, catalog: Catalog, meter: Meter) -> set[str]:
    """Patch a model whose call sites count at a meter; return the classes of modules with a row in the report.

    Probes need weights on the CPU. They get tensors of one repeated element, which take no memory.
    """
    kept = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    kept.append((tensors, name, tensor))
    copies: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in kept:
        if id(tensor) not in copies:
            flat = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            is_weight = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(flat, requires_grad=False) if is_weight else flat
        tensors[name] = copies[id(tensor)]
    found, handle = discover(model, catalog), Handle()
    by_forward: dict[tuple[int, ...], list[ModuleGroup]] = {}
    for group in found:
        by_forward.setdefault(tuple(map(id, group.modules)), []).append(group)
    for groups in by_forward.values():
        handle.add([(group, group.reason) for group in groups], catalog)
    others = undescribed(model, found)
    for tensors, name, tensor in kept:
        tensors[name] = tensor
    for name, site in handle.sites:
        site.__class__ = Counted
        site.serve = serving(meter, catalog.definition(name), site, catalog)
    fuse_experts(model, found, meter)
    return {group.module_class.__name__ for group in found} | {one.module_class for one in others}


def fuse_experts(model: Module, found: Iterable[ModuleGroup], meter: Meter) -> None:
    """Count each call of experts with states and ids as one operation; their loops read values, and meta tensors have none."""
    definitions = {
        id(module): group.definition
        for group in found
        if group.kind == "experts" and not group.reason
        for module in group.modules
    }
    for module in model.modules():
        weights = [one for one in module._parameters.values() if one is not None and one.dim() == 3]
        cls = unpatched_class(module)
        if len(weights) < 2 or not (wrapper_of(cls.forward) or "Experts" in cls.__name__):
            continue

        def forward(self: Any, *args: Any, weights: Any = weights, **kwargs: Any) -> Any:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            if len(tensors) < 3:
                return type(self).forward(self, *args, **kwargs)
            ids = next(one for one in tensors if not one.is_floating_point())
            return experts(meter, weights, definitions.get(id(self), ""), tensors[0], ids)

        vars(module)["forward"] = MethodType(forward, module)


# ---- architectures ----------------------------------------------------------------------------------


def built(kind: str, entry: Mapping[str, Any]) -> Any:
    """Return the model of an architecture without memory, at the default sizes of its config.

    Args:
        kind: the model type.
        entry: may state another ``type``, values of the ``config``, and the ``class`` of the model.
    """
    import transformers

    config = transformers.CONFIG_MAPPING[entry.get("type", kind)](**entry.get("config", {}))
    factory = getattr(transformers, entry["class"]) if "class" in entry else model_class(config)
    make = factory.from_config if hasattr(factory, "_model_mapping") else factory._from_config
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a prompt on the meta device, or images or sound for models that take them."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    text = config.get_text_config(decoder=True)
    positions = [getattr(text, one, None) for one in ("max_position_embeddings", "n_positions", "max_target_positions")]
    length = min([PROMPT, *(one - 1 for one in positions if isinstance(one, int) and one > 0)])
    ids = torch.empty(1, length, dtype=torch.long, device="meta")
    decoded = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    if name == "input_ids":
        return {name: ids, **decoded}
    size = getattr(config, "image_size", 224)
    sides = list(size) if isinstance(size, list | tuple) else [size, size]
    shape = [IMAGES, getattr(config, "num_channels", 3), *sides]
    if name == "input_features":
        shape = [1, config.num_mel_bins, FRAMES]
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta"), **decoded}


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which no device has autocast: the meta device has none, and asking for it raises."""
    return mock.patch.object(torch, "is_autocast_enabled", return_value=False)


@contextlib.contextmanager
def running(meter: Meter, rows: set[str]) -> Iterator[None]:
    """Count at a meter what models do in the block, by the innermost module that has weights, submodules or a row."""
    original = torch.nn.Module.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = unpatched_class(self).__name__
        is_part = bool(meter.modules) and not (self._modules or self._parameters or name in rows)
        meter.modules.append(meter.modules[-1] if is_part else name)
        try:
            return original(self, *args, **kwargs)
        finally:
            meter.modules.pop()

    with (
        mock.patch.object(torch.nn.Module, "__call__", called), without_autocast(),
        torch.no_grad(), torch.device("meta"), meter, FusedAttention(meter),
    ):  # fmt: skip
        yield


def products(model: Any, cache: Any, catalog: Catalog, meter: Meter) -> tuple[AbstractContextManager[Any], str]:
    """Return a context that counts the products of a decode step as parts, and why the others ask for no kernel.

    They are parts if ``generate`` runs that step in a graph.
    """
    operators = Operators.of(catalog)
    name = operators.one
    config = getattr(model, "generation_config", None)
    if name is None or config is None:
        return contextlib.nullcontext(), NO_GRAPH.format("the model has no generate")
    with without_autocast():
        reason = why_stock(model, config, {CACHES[0]: cache}, "greedy_search")
    if reason:
        return contextlib.nullcontext(), NO_GRAPH.format(reason)
    return Products(meter, model.parameters(), name, operators.biased, MAX_ROWS), OTHERS


class Run(NamedTuple):
    """The times of the stages of one architecture, the classes of modules with a row, and why products ask for no kernel."""

    taken: dict[str, Taken]
    rows: set[str]
    unasked: dict[str, str]


def stages(kind: str, entry: Mapping[str, Any], catalog: Catalog) -> Run:
    """Run a prefill and one decode step."""
    model, meter = built(kind, entry), Meter()
    rows, given = install(model, catalog, meter), inputs_of(model)
    with running(meter, rows):
        out = model(**given)
    taken: dict[str, Taken] = {"prefill": dict(meter.taken)}
    unasked = {"prefill": MANY}
    name = "past_key_values" if getattr(out, "past_key_values", None) is not None else "cache_params"
    cache = getattr(out, name, None)
    if cache is not None:
        last = {key: value[:, -1:] for key, value in given.items() if key.endswith("input_ids")}
        if "decoder_input_ids" in last:
            encoded = (out.encoder_last_hidden_state,)
            last = {"encoder_outputs": encoded, "decoder_input_ids": last["decoder_input_ids"]}
        meter.taken.clear()
        in_graph, unasked["decode"] = products(model, cache, catalog, meter)
        with running(meter, rows), in_graph:
            model(**last, **{name: cache})
        taken["decode"] = dict(meter.taken)
    return Run(taken, rows, unasked)


def summary(run: Run, products: tuple[str | None, ...]) -> dict[str, Any]:
    """Return the shares of each stage, and the classes of modules that take much time and have no row.

    ``products`` are the Definitions of a product of a linear layer, whose share is also given alone.
    """
    found: dict[str, Any] = {}
    missing: dict[str, float] = {}
    for stage, of_stage in run.taken.items():
        total = sum(of_stage.values())
        parts, others, library = Counter[str](), Counter[str](), 0.0
        for row, value in of_stage.items():
            share = value / total
            if row.definition:
                parts[row.definition] += share
            elif row.library:
                library += share
            else:
                others[row.module_class] += share
        found[stage] = {
            "us": round(1e6 * total, 1),
            "recognised": round(sum(parts.values()), 4),
            "products": round(sum(parts[one] for one in products if one), 4),
            "library": round(library, 4),
            "unasked": run.unasked[stage],
            "parts": {name: round(share, 4) for name, share in parts.most_common()},
            "others": {name: round(share, 4) for name, share in others.most_common() if share >= 1e-4},
        }
        for name, share in found[stage]["others"].items():
            if share >= LARGE and name not in run.rows:
                missing[name] = max(share, missing.get(name, 0.0))
    return {**found, "without_row": missing}


# ---- all of it --------------------------------------------------------------------------------------


def mean(found: Mapping[str, Any], weights: Mapping[str, int], stage: str, share: str) -> float:
    """Return the weighted mean of a share over the architectures with a stage."""
    pairs = [(weights[kind], one[stage][share]) for kind, one in found.items() if stage in one]
    return sum(weight * value for weight, value in pairs) / max(1, sum(weight for weight, _ in pairs))


def rest_of(found: Mapping[str, Any], weights: Mapping[str, int], stage: str) -> tuple[Counter[str], Counter[str]]:
    """Return the shares of a stage that no kernel is asked for, in the weighted mean: of modules, and of products by reason.

    A key of the first is an architecture and a class of its modules.
    """
    total = sum(weights[kind] for kind, one in found.items() if stage in one)
    others, unasked = Counter[str](), Counter[str]()
    for kind, one in found.items():
        for name, share in one.get(stage, {}).get("others", {}).items():
            others[f"{kind} {name}"] += weights[kind] * share / total
        if stage in one:
            unasked[one[stage]["unasked"]] += weights[kind] * one[stage]["library"] / total
    return others, +unasked


def line(kind: str, one: Mapping[str, Any]) -> str:
    """Return one line of the table, and one per class of modules without a row."""
    columns = [
        f"{one[stage][share]:7.1%}" if stage in one else f"{'-':>7}" for stage in STAGES for share in ("recognised", "library")
    ]  # fmt: skip
    rest = one["decode" if "decode" in one else "prefill"]["others"]
    largest = ", ".join(f"{name} {share:.0%}" for name, share in list(rest.items())[:3] if share >= LARGE)
    missing = [f"{'':24} no row: {name} {share:.0%}" for name, share in one["without_row"].items()]
    return "\n".join([f"{kind:24} {' '.join(columns)}  {largest}", *missing])


def main() -> None:
    """Estimate, print one line per architecture, and the means."""
    from transformers import CONFIG_MAPPING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", help="model types; by default those of popularity.json")
    parser.add_argument("--all", action="store_true", help="every model type of transformers")
    parser.add_argument("--json", type=Path, help="file for the shares of every architecture")
    options = parser.parse_args()
    entries = json.loads(POPULARITY.read_text(encoding="utf-8"))
    catalog, found, failed = Catalog.default(), dict[str, Any](), dict[str, str]()
    operators = Operators.of(catalog)
    linear = (operators.one, operators.biased)
    warnings.simplefilter("ignore")
    print(f"{'architecture':24} prefill library  decode library  largest parts of the rest")
    for kind in options.architectures or (sorted({*entries, *CONFIG_MAPPING}) if options.all else entries):
        try:
            found[kind] = summary(stages(kind, entries.get(kind, {}), catalog), linear)
        except Exception as error:  # code of models refuses its own defaults, or the meta device, in many ways
            failed[kind] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"{kind}: {failed[kind]}", file=sys.stderr)
            continue
        print(line(kind, found[kind]), flush=True)
    weights = {kind: entries.get(kind, {}).get("weight", 1) for kind in found}
    means = {
        stage: {share: round(mean(found, weights, stage, share), 4) for share in ("recognised", "products", "library")}
        for stage in STAGES
    }
    for stage, got in means.items():
        count = sum(stage in one for one in found.values())
        asked, unasked = got["products"], got["library"]
        parts = f"{got['recognised']:.1%} recognised, {got['recognised'] - asked:.1%} without products"
        print(f"\n{stage}, weighted mean of {count}: {parts}")
        print(f"  products {asked + unasked:.1%}: {asked:.1%} ask for a kernel, {unasked:.1%} do not")
        others, reasons = rest_of(found, weights, stage)
        for reason, share in reasons.most_common():
            print(f"  {share:7.2%}  products: {reason}")
        print(f"  other code {sum(others.values()):.1%}; the largest parts of it:")
        for name, share in others.most_common(REST):
            print(f"  {share:7.2%}  {name}")
    if options.json:
        content = {"mean": means, "architectures": found, "failed": failed}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
