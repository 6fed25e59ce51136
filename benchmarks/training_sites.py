"""Call sites of models in one step of training: which a published kernel serves, and the reasons of stock code. Needs no GPU.

Each model has its real sizes and no memory: forward and backward of one step run on the meta device in bf16. Every call that asks
for a kernel is decided by the published table of ``--gpu``, in training: forward and backward must be verified and faster. The
time beside it is that of stock code by a roofline of an H200 (``roofline_meter.py``), so shares of a step are estimates. A call
that the patched model does not even ask for, such as one that only inference rewrites, has a reason and no time.

    python benchmarks/training_sites.py                                # all models
    python benchmarks/training_sites.py --models gpt-oss-20b t5-base --json sites.json
    python benchmarks/training_sites.py --workloads missing.jsonl      # the backward calls that lack a measurement, as Workloads

The last table adds up all models: the operators that stock code runs, by their share of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))  # the other scripts, however this file is loaded
import recognised_share
import roofline_meter
from recognised_share import install
from roofline_meter import FusedAttention, Meter, Row

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.models.capture import CapturedCall, new_workloads, workload_of
from tilegym_db.models.parts import attention_sink
from tilegym_db.models.random_model import load_config, model_class
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import bind_call, differentiated
from tilegym_db.resolver.dispatch import with_outputs
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.resolver.resolve import decide_request, make_request

CONFIGS = Path(__file__).parent / "configs"
# name -> config of benchmarks/configs, or (model type, what its config changes); rows and tokens of a step
LANGUAGE, SENTENCES = (4, 2048), (32, 512)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "llama-3.1-8b": ("llama-3.1-8b.json", {}, LANGUAGE),
    "qwen3-8b": ("qwen3-8b.json", {}, LANGUAGE),
    "gemma-3-4b": (
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        LANGUAGE,
    ),
    "mistral-7b": ("mistral", {"sliding_window": None}, LANGUAGE),
    "phi-2": (
        "phi",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32},
        LANGUAGE,
    ),
    "gpt-oss-20b": ("gpt-oss-20b.json", {}, LANGUAGE),
    "qwen3-30b-a3b": ("qwen3-30b-a3b.json", {}, LANGUAGE),
    "bert-base": ("bert", {}, SENTENCES),
    "modernbert-base": ("modernbert", {}, SENTENCES),
    "vit-base": ("vit", {}, (64, 0)),
    "whisper-small": (
        "whisper",
        {
            **{f"{part}_{name}": 12 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
            **{"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
        },
        (16, 440),
    ),
    "t5-base": (
        "t5",
        {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12, "decoder_start_token_id": 0},
        SENTENCES,
    ),
}  # fmt: skip
BACKWARD_OF_ATTENTION, BACKWARD_OF_EXPERTS = 2.5, 2.0
"""Work of a fused backward in parts of that of its forward: five products for two, and two for each."""
NO_DEFINITION = "no Definition of its gradients"
SERVED = "served"
UNDECIDED = "training asks for a kernel, but this script counts the call whole and does not decide it"


@dataclass
class Step:
    """The calls of one step of a model, and its time.

    ``asked`` has the calls by Definition and answer, ``bypassed`` those that asked for nothing by Definition and reason, and
    ``missing`` the backward calls that stock code runs although a Definition computes their gradients.
    """

    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    bypassed: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: list[Workload] = field(default_factory=list)
    taken: Counter[Row] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.taken.values())

    def share(self, definition: str) -> float:
        """Return the share of the step in an operator, forward and backward."""
        return sum(value for row, value in self.taken.items() if row.definition == definition) / self.seconds


# ---- decisions --------------------------------------------------------------------------------------


def answer(definition: Definition, inputs: tuple[Any, ...], wanted: frozenset[str], gpu: str, catalog: Catalog) -> str:
    """Return ``served``, or the reason why stock code runs a call in training.

    Args:
        wanted: the names of the inputs that need a gradient.
    """
    ways = {frozenset(differentiated(one)) for one in catalog.backwards_of(definition.name)}
    if not ways:
        return NO_DEFINITION
    if wanted not in ways:
        return f"no Definition of the gradient of {', '.join(sorted(wanted)) or 'nothing'} alone"
    try:
        call = bind_call(definition, with_outputs(inputs, allocate_of(definition)))
        decision, _ = decide_request(make_request(definition, call, gpu=gpu, mode="training"), catalog)
    except TilegymDBError as error:
        return str(error)
    return SERVED if decision.solution is not None else decision.evidence.reason


class InTraining:
    """Stands in for the training side of a call site: notes each call's answer and runs stock code, forward and backward.

    With ``in_parts``, a call that no kernel serves is left to the model's code, whose parts ask for themselves.
    """

    def __init__(
        self,
        definition: Definition,
        serve: Callable[..., Any],
        step: Step,
        meter: Meter,
        gpu: str,
        catalog: Catalog,
        *,
        in_parts: bool = False,
    ) -> None:
        self._in_parts = in_parts
        self._definition, self._serve, self._meter = definition, serve, meter
        self._step, self._gpu, self._catalog = step, gpu, catalog
        self._known: dict[Any, str] = {}

    def ask(self, inputs: tuple[Any, ...], *, training: bool) -> Any:
        """Return the outputs of stock code; None if the parts of the call ask for themselves."""
        names = tuple(self._definition.inputs)
        wanted = frozenset(
            name for name, one in zip(names, inputs, strict=True) if isinstance(one, torch.Tensor) and one.requires_grad
        )
        kind = (
            wanted,
            *(
                (one.shape, one.stride(), one.dtype) if isinstance(one, torch.Tensor) else (type(one), str(one))
                for one in inputs
            ),
        )
        if kind not in self._known:
            with self._meter.alone():
                self._known[kind] = answer(self._definition, inputs, wanted, self._gpu, self._catalog)
                if self._known[kind] != SERVED:
                    self._step.missing += self._backward_calls(inputs, wanted)
        self._step.asked[self._definition.name, self._known[kind]] += 1
        if self._in_parts and self._known[kind] != SERVED:
            return None
        return Stock.apply(self._meter, self._definition.name, self._serve, *inputs)

    def _backward_calls(self, inputs: tuple[Any, ...], wanted: frozenset[str]) -> list[Workload]:
        """Return the backward call as a Workload, if a Definition describes it."""
        for backward in self._catalog.backwards_of(self._definition.name):
            if frozenset(differentiated(backward)) == wanted:
                outputs = with_outputs(inputs, allocate_of(self._definition))[len(inputs) :]
                given = dict(
                    zip((*self._definition.inputs, *self._definition.outputs), (*inputs, *outputs), strict=False)
                )
                values = tuple(given[name.removeprefix("grad_")] for name in backward.inputs)
                found = workload_of(backward, CapturedCall("training", values), allocate_of(backward))
                return [] if found is None else [found]
        return []


class Stock(torch.autograd.Function):
    """Stock code of one call, whose operations in forward and backward count as those of its Definition."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, definition: str, serve: Callable[..., Any], *inputs: Any) -> Any:
        """Run the code, whose operations ``serve`` counts."""
        ctx.meter, ctx.definition, ctx.serve, ctx.inputs = meter, definition, serve, inputs
        found = serve(*inputs)
        made = found if isinstance(found, tuple) else (found,)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the code again with gradients, uncounted, and count what autograd does then."""
        inputs = [
            one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
            for one in ctx.inputs
        ]
        with torch.enable_grad(), ctx.meter.alone():
            found = ctx.serve(*inputs)
        made = found if isinstance(found, tuple) else (found,)
        pairs = [(out, grad) for out, grad in zip(made, grads, strict=True) if out.requires_grad]
        wanted = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        with ctx.meter.recognised(ctx.definition):
            gradients = iter(
                torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
            )
        return None, None, None, *(next(gradients) if one in map(id, wanted) else None for one in map(id, inputs))


class Fused(torch.autograd.Function):
    """An operation that counts as one kernel, with a backward of a multiple of its work."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, count: Callable[..., Any], factor: float, *tensors: Any) -> Any:
        """Count the forward and return its output."""
        before = Counter(meter.taken)
        out = count(meter, *tensors)
        ctx.meter, ctx.tensors, ctx.factor = meter, tensors, factor
        ctx.spent = [(row, value - before[row]) for row, value in meter.taken.items() if value > before[row]]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Count the backward, and return gradients in the layouts of the inputs."""
        for row, value in ctx.spent:
            ctx.meter.taken[row] += ctx.factor * value
        with ctx.meter.alone():
            return (
                None,
                None,
                None,
                *(
                    torch.empty_like(one) if isinstance(one, torch.Tensor) and one.requires_grad else None
                    for one in ctx.tensors
                ),
            )


def fused_attention(meter: Meter, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Count attention and its backward."""
    return Fused.apply(meter, roofline_attention, BACKWARD_OF_ATTENTION, query, key, value, mask)


def fused_experts(meter: Meter, weights: Sequence[Any], definition: str, states: Any, ids: Any) -> Any:
    """Count experts and their backward; the gradients of their weights are part of its work."""

    def count(meter: Meter, states: Any, ids: Any) -> Any:
        return roofline_experts(meter, weights, definition, states, ids)

    return Fused.apply(meter, count, BACKWARD_OF_EXPERTS, states, ids)


roofline_attention, roofline_experts = roofline_meter.attention, roofline_meter.experts


# ---- models -----------------------------------------------------------------------------------------


def built(name: str) -> Any:
    """Return a model in training mode without memory."""
    from transformers import CONFIG_MAPPING

    source, changes, _ = MODELS[name]
    config = load_config(CONFIGS / source) if source.endswith(".json") else CONFIG_MAPPING[source](**changes)
    factory = model_class(config)
    make = factory.from_config if hasattr(factory, "_model_mapping") else factory._from_config
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16).train()


def inputs_of(model: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Return a batch with labels on the meta device."""
    name, config = model.main_input_name, model.config
    if name == "pixel_values":
        return {name: torch.empty(rows, 3, config.image_size, config.image_size, dtype=torch.bfloat16, device="meta")}
    ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
    plain = {} if config.is_encoder_decoder or not hasattr(config, "use_cache") else {"use_cache": False}
    if name == "input_features":
        sound = torch.empty(
            rows, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.bfloat16, device="meta"
        )
        return {name: sound, "labels": ids}
    return {name: ids, "labels": ids, **plain}


@contextlib.contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Count in the block what models do, by the innermost module of the forward."""
    original = torch.nn.Module.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter.modules.append(recognised_share.unpatched_class(self).__name__)
        try:
            return original(self, *args, **kwargs)
        finally:
            meter.modules.pop()

    with (
        mock.patch.object(torch.nn.Module, "__call__", called), recognised_share.without_autocast(),
        mock.patch.object(recognised_share, "attention", fused_attention),
        mock.patch.object(roofline_meter, "attention", fused_attention),
        mock.patch.object(recognised_share, "experts", fused_experts),
        mock.patch.object(attention_sink, "is_plain", return_value=True),  # no row is padded
        torch.device("meta"), meter, FusedAttention(meter),
    ):  # fmt: skip
        yield


def step_of(name: str, gpu: str, catalog: Catalog) -> Step:
    """Run one step of a model, and return what it asked for."""
    model, meter, step = built(name), Meter(), Step()
    sites = []

    def collected(handle: Any, *_: Any) -> None:
        sites.append(handle)

    with mock.patch.object(recognised_share, "Handle", _keeping(collected)):
        install(model, catalog, meter)
    (handle,) = sites
    for definition, site in handle.sites:
        serving = catalog.definition(definition).serving
        instead = None if serving is None else serving.in_training
        if instead is None:
            site.training = InTraining(catalog.definition(definition), site.serve, step, meter, gpu, catalog)
        else:
            asked = catalog.definition(instead)
            serve = recognised_share.serving(meter, asked, SimpleNamespace(stock=None), catalog)
            site.training = InTraining(asked, serve, step, meter, gpu, catalog, in_parts=True)
    with metered(meter):
        out = model(**inputs_of(model, *MODELS[name][2]))
        loss = out.loss if getattr(out, "loss", None) is not None else out[0].float().mean()
        loss.backward()
    step.taken = meter.taken
    asked = {definition for definition, _ in step.asked}
    for definition, site in handle.sites:
        for reason, calls in site.bypassed.items():
            step.bypassed[definition, reason] += calls
    known = asked | {definition for definition, _ in step.bypassed}
    for definition in {row.definition for row in step.taken} - known - {""}:
        is_trained = bool(catalog.backwards_of(definition))
        step.bypassed[definition, UNDECIDED if is_trained else "only inference asks for a kernel"] += 0
    return step


def _keeping(collect: Callable[..., None]) -> Callable[[], Any]:
    from tilegym_db.models.handle import Handle

    def make() -> Any:
        handle = Handle()
        collect(handle)
        return handle

    return make


# ---- tables -----------------------------------------------------------------------------------------


def short(text: str, size: int = 150) -> str:
    """Return a text in one line."""
    line = " ".join(text.removeprefix("mode training: ").split())
    return line if len(line) <= size else f"{line[: size - 3]}..."


def print_step(name: str, step: Step) -> None:
    """Print a row for each operator and answer."""
    library = sum(value for row, value in step.taken.items() if row.library) / step.seconds
    served = sum(step.share(one) for one in {definition for definition, text in step.asked if text == SERVED})
    print(f"\n{name}: {1e3 * step.seconds:.1f} ms by the roofline; {library:.0%} library products, {served:.1%} served")
    for (definition, text), calls in sorted(step.asked.items(), key=lambda item: -step.share(item[0][0])):
        print(f"  {definition:<24} {step.share(definition):>6.1%} {calls:>5}  {short(text)}")
    for (definition, text), calls in sorted(step.bypassed.items(), key=lambda item: -step.share(item[0][0])):
        share = f"{step.share(definition):.1%}" if step.share(definition) else ""
        print(f"  {definition:<24} {share:>6} {calls:>5}  not asked: {short(text)}")
    others = Counter[str]()
    for row, value in step.taken.items():
        if not row.library and not row.definition:
            others[row.module_class or "(backward)"] += value / step.seconds
    print("  others: " + ", ".join(f"{one} {share:.1%}" for one, share in others.most_common(6)))


def missing_shares(steps: Mapping[str, Step]) -> list[tuple[str, float, list[str]]]:
    """Return the operators that stock code runs: their share of a step, added over the models, and the models."""
    shares: Counter[str] = Counter()
    places: dict[str, list[str]] = {}
    for name, step in steps.items():
        for definition in {one for one, text in step.asked if text != SERVED}:
            unserved = sum(calls for (one, text), calls in step.asked.items() if one == definition and text != SERVED)
            total = sum(calls for (one, _), calls in step.asked.items() if one == definition)
            shares[definition] += step.share(definition) * unserved / total
            places.setdefault(definition, []).append(name)
    return [(definition, share, places[definition]) for definition, share in shares.most_common()]


def main() -> None:
    """Print a table for each model, and one of what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--json", type=Path, help="file for the calls of every model")
    parser.add_argument("--workloads", type=Path, help="file for the backward calls that stock code runs")
    options = parser.parse_args()
    catalog = Catalog.default()
    warnings.simplefilter("ignore")
    steps: dict[str, Step] = {}
    for name in options.models:
        steps[name] = step_of(name, options.gpu, catalog)
        print_step(name, steps[name])
    print(f"\nstock code in training, by the share of a step, added over {len(steps)} models")
    for definition, share, places in missing_shares(steps):
        print(f"  {definition:<24} {share:>6.1%}  {', '.join(places)}")
    if options.json is not None:
        content = {
            name: [
                {"definition": definition, "calls": calls, "answer": text, "share": round(step.share(definition), 4)}
                for (definition, text), calls in step.asked.items()
            ]
            for name, step in steps.items()
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.workloads is not None:
        found = new_workloads([one for step in steps.values() for one in step.missing], catalog)
        options.workloads.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in found))


if __name__ == "__main__":
    main()
