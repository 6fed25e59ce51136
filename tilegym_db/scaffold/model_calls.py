"""The calls that models make: a list of models with their sizes, stages, and the operators of each model. Pure but for the list.

A question is one kind of call of one model at one stage, such as the attention of Llama-3.1-70B on one of eight GPUs. It has no
Definition if the catalog does not describe the operator. Products are left out, as models call cuBLAS for them.

The second part chooses a small set of points to measure, so that questions are answered by the rule of neighbours. A question
is answered exactly, or between two points of the same widths. The first points are the least and the most work of each kind of
call, and a chain of lengths between them. Questions that are left become points. Points that others replace are left out, except
the last of their widths.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, TilegymDBError, UsageError
from tilegym_db.files import read_bytes
from tilegym_db.published.input_files import read_lines, trace_files
from tilegym_db.published.neighbours import (
    MAX_LENGTH_GAP,
    Neighbours,
    independent_axes,
    lengths_of,
    neighbours,
    widths_of,
)
from tilegym_db.published.table import load_table, table_folder
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import GRAPHED_TOKENS, Launch, is_code_selecting
from tilegym_db.records.definition_parts import layout_class, layout_strides
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.roofline import GpuPeaks, speed_of_light
from tilegym_db.scaffold.model_config import located_config

Sizes = Mapping[str, Any]

HEADS_AFTER_TOKENS = "strided(S*{heads}*D, D, {heads}*D, 1)"


class Stage(NamedTuple):
    """One forward over several sequences. Each has ``tokens`` new tokens and ``context`` tokens in the cache before them."""

    sequences: int
    tokens: int
    context: int

    @property
    def is_decode(self) -> bool:
        """True if each sequence gets one token."""
        return self.tokens == 1

    @property
    def launch(self) -> Launch:
        """The way in which a patched model launches its calls: decoding steps and short prompts are replays of CUDA graphs."""
        return "replay" if self.is_decode or self.sequences * self.tokens <= GRAPHED_TOKENS else "call"

    def __str__(self) -> str:
        return (
            f"decode {self.sequences}x{self.context}" if self.is_decode else f"prefill {self.sequences}x{self.tokens}"
        )


STAGES: tuple[Stage, ...] = (
    *(
        Stage(count, 1, length)
        for count, length in ((1, 2048), (8, 2048), (32, 4096), (64, 4096), (256, 2048), (1, 131072))
    ),
    *(
        Stage(count, length, length)
        for count, length in ((1, 128), (1, 512), (1, 2048), (8, 2048), (8, 4096), (1, 8192), (1, 32768), (1, 131072))
    ),
)
"""From 1 to 256 sequences, and from 128 to 131,072 tokens."""
ASKED_STAGES: tuple[Stage, ...] = (
    *(Stage(count, 1, length) for count, length in ((1, 2048), (8, 2048), (32, 4096), (256, 2048))),
    *(Stage(count, length, length) for count, length in ((1, 128), (1, 2048), (8, 2048), (1, 32768))),
)
"""The stages of the hit rate that is compared between releases."""
PARALLEL: tuple[int, ...] = (1, 2, 4, 8)
"""Numbers of GPUs that share a model (tensor parallelism)."""


@dataclass(frozen=True)
class Question:
    """One kind of call of a model. ``definition`` is empty if no Definition describes it."""

    model: str
    parallel: int
    stage: Stage
    group: str
    definition: str
    axes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def classes(self, definition: Definition) -> dict[str, str]:
        """Return the layout class of each input that is not contiguous, as the resolver compares them."""
        axes, found = definition.bind_axes(self.axes), {}
        for name, text in self.layouts.items():
            shape = definition.shape_of(name, axes)
            kind = layout_class(shape, layout_strides(text, shape, axes))
            if name in definition.inputs and kind != "contiguous":
                found[name] = kind
        return found

    def workload(self) -> Workload:
        """Return the call as a Workload, tagged with the stage and the model; on 8 GPUs ``model:NAME-tp8``."""
        shared = f"-tp{self.parallel}" if self.parallel > 1 else ""
        content = {
            "definition": self.definition,
            "axes": dict(self.axes),
            "dtypes": dict(self.dtypes),
            "layouts": dict(self.layouts),
            "inputs": {name: {"type": "scalar", "value": value} for name, value in self.scalars.items()},
            "tags": [f"model:{self.model}{shared}", f"stage:{'decode' if self.stage.is_decode else 'prefill'}"],
        }
        return Workload.from_dict(content, f"{self.definition} of {self.model}")


MODELS = "models"
"""The name of the checked-in list, where a config file may be given."""


def models_of(config: str) -> list[dict[str, Any]]:
    """Return the models of a config: the checked-in list by its name, a file with a list, or the config of one model."""
    if config == MODELS:
        return list(known_models())
    path = located_config(Path(config))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot read this config: {error}.", code="config_unreadable") from None
    found = []
    for number, sizes in enumerate(content if isinstance(content, list) else [content]):
        known = {**_DEFAULTS, **sizes, **(sizes.get("text_config") or {})} if isinstance(sizes, dict) else {}
        missing = [name for name in _NEEDED if not known.get(name)]
        if missing:
            raise UsageError(
                f"{path}: model {number} has no {missing[0]}. Give it, or name one operator: tilegym-db new workload NAME "
                f"--from-config {shlex.quote(str(path))}",
                code="config_size_missing",
            )
        known.setdefault("name", str(known.get("_name_or_path") or known["model_type"]).rpartition("/")[2].lower())
        known.setdefault("num_key_value_heads", known["num_attention_heads"])
        known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
        for name, other in (("num_experts", "num_local_experts"), ("num_experts", "n_routed_experts")):
            if known.get(other) and not known.get(name):
                known[name] = known[other]
        found.append(known)
    return found


_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "norm_topk_prob": True, "intermediate_size": 0}
_NEEDED = ("model_type", "hidden_size", "num_attention_heads", "rms_norm_eps")


@cache
def known_models() -> tuple[dict[str, Any], ...]:
    """Return the checked-in list of models: dense, mixtures of experts, latent attention, hybrids and vision."""
    found: list[dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
    return tuple(found)


def questions(
    models: Iterable[Sizes], stages: Sequence[Stage] = STAGES, parallel: Sequence[int] = PARALLEL
) -> list[Question]:
    """Return the questions of models at stages, on numbers of GPUs that divide their heads."""
    return [
        question
        for sizes in models
        for count in parallel
        if sizes["num_attention_heads"] % count == 0
        for stage in stages
        for question in _of_stage(sizes, count, stage)
    ]


# ---- families -------------------------------------------------------------------------------------
# The operators of each type of model, as the Definitions name them. None where no Definition describes the model's code.


class Family(NamedTuple):
    """The Definitions that a type of model calls."""

    norm: str | None = "rms_norm"
    add_norm: str | None = "fused_add_rms_norm"
    qk_norm: str | None = None
    rope: str | None = "rope_neox"
    mlp: str | None = "swiglu"
    attention: str | None = "attention"
    router: str | None = None
    first_router: str | None = None
    """The router of the first layers, if it is another one, which looks experts up by token."""
    experts: str | None = None
    norm_of_all_heads: bool = False
    """True if the norm of queries and keys is over all heads together."""
    wide_scores: bool = False
    """True if the router widens its scores to float32 first, so that routing weights are float32 as well."""
    hyper: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "granite": Family(),
    "smollm3": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm="rms_norm"),
    "phi3": Family(rope="rope_partial", mlp="silu_and_mul"),
    "gemma3_text": Family("rms_norm_gemma", None, "rms_norm_gemma", mlp="gelu_tanh_and_mul"),
    "olmo2": Family("rms_norm_fp32", None, "rms_norm_fp32", norm_of_all_heads=True),
    "olmo3": Family("rms_norm_fp32", None, "rms_norm_fp32", norm_of_all_heads=True),
    "glm4": Family(add_norm=None, rope="rope_pairs", mlp="silu_and_mul"),
    "qwen3_moe": Family(qk_norm="rms_norm", mlp=None, router="topk_softmax", experts="moe_experts"),
    "qwen2_moe": Family(router="topk_softmax", experts="moe_experts"),
    "olmoe": Family(
        qk_norm="rms_norm", mlp=None, router="topk_softmax", experts="moe_experts", norm_of_all_heads=True
    ),
    "mixtral": Family(mlp=None, router="topk_softmax", experts="moe_experts", wide_scores=True),
    "gpt_oss": Family(
        "rms_norm_fp32", "fused_add_rms_norm_fp32", rope="rope_half_tables", mlp=None, attention="attention_sink",
        router="topk_then_softmax", experts="moe_experts_oai",
    ),
    "glm4_moe": Family(rope="rope_partial", router="topk_sigmoid_bias_groups", experts="moe_experts"),
    "deepseek_v2": Family(
        rope="rope_complex_pairs", attention="mla", router="topk_softmax_groups", experts="moe_experts"
    ),
    "deepseek_v3": Family(
        rope="rope_pairs_to_halves", attention="mla", router="topk_sigmoid_bias_groups", experts="moe_experts"
    ),
    "qwen3_next": Family(
        "rms_norm_gemma", "fused_add_rms_norm_gemma", "rms_norm_gemma", "rope_partial", router="topk_softmax",
        experts="moe_experts",
    ),
    "qwen3_5_text": Family("rms_norm_gemma", "fused_add_rms_norm_gemma", "rms_norm_gemma", "rope_partial"),
    "deepseek_v4": Family(
        add_norm=None, rope="rope_tail_pairs", attention=None, router="topk_sqrtsoftplus_bias",
        first_router="table_router", experts="moe_experts_clamp", mlp=None, hyper=True,
    ),
    "qwen2_vision": Family(rope=None, attention=None),
    "pixtral_vision": Family(rope=None, attention=None),
}  # fmt: skip
BFLOAT16 = {"T": "bfloat16"}
Part = tuple[str, str | None, dict[str, int], dict[str, Any]]
"""(group, Definition, axes, dtypes, layouts and scalars that are not the usual ones)."""


def _of_stage(sizes: Sizes, parallel: int, stage: Stage) -> Iterator[Question]:
    family = FAMILIES.get(str(sizes["model_type"]))
    if family is None:
        raise UsageError(
            f"the operators of models of type {sizes['model_type']!r} are not known; known: {', '.join(FAMILIES)}. Name one "
            "operator instead: tilegym-db new workload NAME --from-config FILE",
            code="model_type_unknown",
        )
    for group, definition, axes, more in _parts(family, sizes, parallel, stage):
        about = {"dtypes": BFLOAT16, **more} if definition else {}
        yield Question(
            str(sizes["name"]), parallel, stage, group, definition or "", axes if definition else {}, **about
        )


def _parts(family: Family, sizes: Sizes, parallel: int, stage: Stage) -> Iterator[Part]:
    rows, width = stage.sequences * stage.tokens, sizes["hidden_size"]
    eps = {"scalars": {"eps": sizes["rms_norm_eps"]}}
    yield "norm", family.norm, {"M": rows, "N": width}, eps
    if family.add_norm is not None or family.norm is None:
        yield "add + norm", family.add_norm, {"M": rows, "N": width}, eps
    heads = sizes["num_attention_heads"] // parallel
    pairs = max(1, sizes["num_key_value_heads"] // parallel)
    if family.qk_norm is not None:
        yield from _head_norms(family, sizes, rows, heads, pairs, eps)
    if "kv_lora_rank" in sizes:
        yield from _latent_norms(sizes, rows, eps)
    yield from _ropes(family, sizes, stage, heads, pairs)
    yield from _attention(family, sizes, stage, heads, pairs)
    if family.mlp is not None and sizes["intermediate_size"]:
        yield "mlp", family.mlp, {"M": rows, "I": sizes["intermediate_size"] // parallel}, {}
    shared = sizes.get("shared_expert_intermediate_size") or (
        sizes.get("n_shared_experts", 0) * sizes.get("moe_intermediate_size", 0)
    )
    if shared:
        yield (
            "mlp",
            "swiglu_clamp" if family.hyper else "swiglu",
            {"M": rows, "I": shared // parallel},
            ({"scalars": {"limit": sizes["swiglu_limit"]}} if family.hyper else {}),
        )
    if family.experts is not None:
        yield from _experts(family, sizes, rows, parallel)
    if family.hyper:
        streams = {"M": rows, "C": sizes["hc_mult"], "H": width}
        yield (
            "hyper connections",
            "mhc_pre_fused",
            streams,
            {
                "scalars": {
                    "rms_eps": 1e-6,
                    "pre_eps": 1e-6,
                    "sinkhorn_eps": 1e-6,
                    "post_mult": 2.0,
                    "repeat": sizes["hc_sinkhorn_iters"],
                }
            },
        )
        yield "hyper connections", "mhc_post_hf", streams, {}


def _head_norms(family: Family, sizes: Sizes, rows: int, heads: int, pairs: int, eps: dict[str, Any]) -> Iterator[Part]:
    size = sizes["head_dim"]
    for count in (heads, pairs):
        axes = {"M": rows, "N": count * size} if family.norm_of_all_heads else {"M": rows * count, "N": size}
        gated = (
            sizes["model_type"] in ("qwen3_next", "qwen3_5_text") and count == heads
        )  # a gate lies between the heads
        yield "q/k norm", family.qk_norm, axes, {**eps, **({"layouts": {"x": "strided(2 * N, 1)"}} if gated else {})}


def _latent_norms(sizes: Sizes, rows: int, eps: dict[str, Any]) -> Iterator[Part]:
    if sizes.get("q_lora_rank"):
        yield "latent norm", "rms_norm", {"M": rows, "N": sizes["q_lora_rank"]}, eps
    tail = {"layouts": {"x": f"strided(N + {sizes['qk_rope_head_dim']}, 1)"}}
    yield "latent norm", "rms_norm", {"M": rows, "N": sizes["kv_lora_rank"]}, {**eps, **tail}


def _ropes(family: Family, sizes: Sizes, stage: Stage, heads: int, pairs: int) -> Iterator[Part]:
    if family.rope is None:
        yield "rope", None, {}, {}
        return
    axes = {"B": stage.sequences, "Hq": heads, "Hkv": pairs, "S": stage.tokens, "D": sizes["head_dim"], "Bc": 1}
    layouts = {name: HEADS_AFTER_TOKENS.format(heads=of) for name, of in (("q", "Hq"), ("k", "Hkv"))}
    if family.rope in ("rope_partial", "rope_pairs"):
        axes["R"] = int(sizes["head_dim"] * sizes.get("partial_rotary_factor", 1.0))
        if sizes["model_type"] == "phi3":
            layouts = dict.fromkeys(("q", "k"), "strided(S*(Hq + 2*Hkv)*D, D, (Hq + 2*Hkv)*D, 1)")
    elif family.rope in ("rope_complex_pairs", "rope_pairs_to_halves"):
        axes |= {"Hkv": 1, "D": sizes["qk_rope_head_dim"]}
        layouts = {
            "q": "strided(S*Hq*3*D, 3*D, Hq*3*D, 1)",
            "k": "strided(S*Hkv*9*D, 9*D, Hkv*9*D, 1)",
        }
    elif family.rope == "rope_tail_pairs":
        for count in (heads, 1):
            tail = {"B": stage.sequences, "H": count, "S": stage.tokens, "D": sizes["head_dim"], "Bc": 1}
            tail["P"] = sizes["qk_rope_head_dim"] // 2
            yield (
                "rope",
                family.rope,
                tail,
                {"layouts": dict.fromkeys(("x", "out"), HEADS_AFTER_TOKENS.format(heads="H"))},
            )
        return
    outputs = {name: HEADS_AFTER_TOKENS.format(heads=of) for name, of in (("q_out", "Hq"), ("k_out", "Hkv"))}
    yield "rope", family.rope, axes, {"layouts": {**layouts, **outputs}}


def _attention(family: Family, sizes: Sizes, stage: Stage, heads: int, pairs: int) -> Iterator[Part]:
    size = sizes["head_dim"]
    if family.attention is None:
        yield "attention", None, {}, {}
        return
    if family.attention == "mla":
        yield _latent_attention(sizes, stage, heads)
        return
    group = "sinks" if family.attention == "attention_sink" else "attention"
    axes = {"B": stage.sequences, "Hq": heads, "Hkv": pairs, "D": size}
    scale = {"scale": size**-0.5}
    windows = (stage.context, min(sizes["sliding_window"], stage.context)) if group == "sinks" else (stage.context,)
    for window in windows:
        if stage.is_decode:
            yield group, f"{family.attention}_decode", {**axes, "L": window}, {"scalars": scale}
            continue
        layouts = {name: HEADS_AFTER_TOKENS.format(heads="Hq") for name in ("q", "out")}
        scalars: dict[str, Scalar] = dict(scale)
        prefill = {**axes, "S": stage.tokens}
        if group == "sinks":
            scalars["window"], prefill["W"] = window, window
        yield group, f"{family.attention}_prefill", prefill, {"layouts": layouts, "scalars": scalars}


def _latent_attention(sizes: Sizes, stage: Stage, heads: int) -> Part:
    """Return attention to keys and values that were expanded from latents: keys are wider than values."""
    size, wide = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    axes = {"B": stage.sequences, "H": heads, "D": size, "Dv": wide}
    about: dict[str, Any] = {"scalars": {"scale": size**-0.5}}
    if stage.is_decode:
        return "attention", "mla_expanded_decode", {**axes, "L": stage.context}, about
    about["layouts"] = {"out": "strided(S*H*Dv, Dv, H*Dv, 1)"}
    return "attention", "mla_prefill", {**axes, "S": stage.tokens}, about


def _experts(family: Family, sizes: Sizes, rows: int, parallel: int) -> Iterator[Part]:
    count, chosen = sizes["num_experts"], sizes["num_experts_per_tok"]
    axes = {"M": rows, "E": count, "K": chosen}
    scalars: dict[str, Scalar] = {"top_k": chosen}
    more: dict[str, Any] = {"scalars": scalars}
    if family.router == "topk_softmax":
        scalars["renormalise"] = bool(sizes.get("norm_topk_prob", True))
    elif family.router in ("topk_sigmoid_bias_groups", "topk_softmax_groups"):
        axes |= {"G": sizes["n_group"], "GK": sizes["topk_group"]}
        scalars |= {"groups": axes["G"], "kept_groups": axes["GK"], "scale": sizes["routed_scaling_factor"]}
        more["dtypes"] = {}
        if family.router == "topk_sigmoid_bias_groups":
            scalars["renormalise"] = True
    elif family.router == "topk_sqrtsoftplus_bias":
        scalars["scale"] = sizes["routed_scaling_factor"]
    has_wide_weights = family.wide_scores or "groups" in scalars
    if family.wide_scores:
        more["dtypes"] = {"T": "float32"}
    yield "router", family.router, axes, more
    if family.first_router is not None:
        factor: dict[str, Any] = {"scalars": {"scale": sizes["routed_scaling_factor"]}}
        yield "router", family.first_router, {**axes, "V": sizes["vocab_size"]}, factor
    weights = "float32" if has_wide_weights else "bfloat16"
    experts = {
        "M": rows,
        "H": sizes["hidden_size"],
        "I": sizes["moe_intermediate_size"] // parallel,
        "E": count,
        "K": chosen,
    }
    limits = {"moe_experts_oai": {"alpha": 1.702, "limit": 7.0}, "moe_experts_clamp": {"limit": 10.0}}
    about = {"dtypes": {"T": "bfloat16", "W": weights}, "scalars": limits.get(str(family.experts), {})}
    yield "experts", family.experts, experts, about


# ---- Points to measure -----------------------------------------------------------------------------------

MAX_POINT_BYTES = 30e9
"""Compulsory bytes of the largest call that is measured; inputs, outputs and their copies must lie in the memory of one GPU."""
SLOWDOWN = 3.0
"""A typical call over the speed of light; baselines are slower than kernels."""

Axes = Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """A call to measure, and the number of questions of its kind that rest on it or its neighbours."""

    question: Question
    answers: int

    @property
    def workload(self) -> Workload:
        """The call as a Workload."""
        return self.question.workload()


@dataclass(frozen=True)
class Cover:
    """The points to measure, and what they answer."""

    points: tuple[Point, ...]
    questions: int
    known: int
    """Questions that the points of the catalog answer already."""
    undescribed: int
    """Questions of operators that no Definition describes; no point answers them."""
    refused: tuple[str, ...]
    """Calls that a Definition excludes, with the reason."""

    def seconds(
        self,
        definitions: Mapping[str, Definition],
        solutions: Mapping[str, int],
        peaks: GpuPeaks | None,
        costs: Costs,
    ) -> float:
        """Return the seconds of one GPU that measuring costs; ``solutions`` counts those of each Definition."""
        begun = {point.question.definition for point in self.points}
        points = [self._seconds_of(point, definitions, solutions, peaks, costs) for point in self.points]
        return costs.setup_s * len(begun) + sum(points)

    def _seconds_of(
        self,
        point: Point,
        definitions: Mapping[str, Definition],
        solutions: Mapping[str, int],
        peaks: GpuPeaks | None,
        costs: Costs,
    ) -> float:
        question = point.question
        definition = definitions[question.definition]
        axes, dtypes = definition.bind_axes(question.axes), definition.bind_dtypes(question.dtypes)
        light = None if peaks is None else speed_of_light(definition, axes, dtypes, peaks)
        call_us = 0.0 if light is None else light.us * SLOWDOWN
        pairs = [call_us] * solutions.get(definition.name, 0)
        return costs.of_point(pairs, definition.cost_of(axes, dtypes)[0])


def cover_models(
    catalog: Catalog, models: Sequence[Sizes], gpu: str, *, parallel: Sequence[int]
) -> tuple[Cover, float]:
    """Return the points that models need in addition to the catalog's Workloads, and the seconds of one GPU that they cost.

    Args:
        gpu: slug or family whose published traces give the costs; without any, those of an H200.
    """
    definitions = dict(catalog.definitions)
    known = [workload for name in definitions for workload in catalog.workloads_for(name)]
    found = cover(questions(models, STAGES, parallel), definitions, known)
    table = load_table(gpu)
    counts = {name: len(catalog.solutions_for(name)) for name in {point.question.definition for point in found.points}}
    costs = published_costs(gpu, catalog) or published_costs(USUAL_GPU, catalog)
    if costs is None:
        raise RecordError(f"no traces of {USUAL_GPU} are published, so costs are not known.", code="costs_unknown")
    return found, found.seconds(definitions, counts, None if table is None else table.load_peaks(), costs)


USUAL_GPU = "h200"
"""The GPU whose costs stand for those of a GPU without published traces."""


def cover(asked: Iterable[Question], definitions: Mapping[str, Definition], known: Iterable[Workload] = ()) -> Cover:
    """Return the points that answer questions in addition to known points. Each point is needed by a question.

    Args:
        known: points that are measured anyway, such as the catalog's Workloads.
    """
    kinds: dict[tuple[Any, ...], list[tuple[Question, dict[str, int]]]] = {}
    undescribed, refused, total, answered = 0, list[str](), 0, 0
    for question in asked:
        total += 1
        definition = definitions.get(question.definition)
        if definition is None:
            undescribed += 1
            continue
        try:
            axes = definition.bind_axes(question.axes)
            key = kind_of(definition, question.dtypes, question.scalars, question.classes(definition))
        except RecordError as error:
            refused.append(str(error))
            continue
        size = definition.cost_of(axes, definition.bind_dtypes(question.dtypes))[1]
        if size > MAX_POINT_BYTES:
            refused.append(
                f"{definition.name} of {question.model} at {question.stage} moves {size / 1e9:.0f} GB, too much"
            )
            continue
        kinds.setdefault(key, []).append((question, axes))
    measured: dict[tuple[Any, ...], list[dict[str, int]]] = {}
    for workload in known:
        definition = definitions.get(workload.definition)
        if definition is not None:
            call = Question("", 1, _NO_STAGE, "", workload.definition, workload.axes, workload.dtypes, workload.layouts)
            key = kind_of(definition, workload.dtypes, workload.scalars(), call.classes(definition))
            measured.setdefault(key, []).append(definition.bind_axes(workload.axes))
    points: list[Point] = []
    for key, asked_here in kinds.items():
        definition = definitions[key[0]]
        free = measured.get(key, [])
        dtypes = definition.bind_dtypes(asked_here[0][0].dtypes)
        missing = [one for one in asked_here if not _is_answered(definition, one[1], dtypes, free)]
        answered += len(asked_here) - len(missing)
        for group in same_widths(definition, missing):
            points += _points(definition, dtypes, group, free)
    return Cover(tuple(points), total, answered, undescribed, tuple(dict.fromkeys(refused)))


_NO_STAGE = Stage(0, 0, 0)


def kind_of(
    definition: Definition, dtypes: Mapping[str, str], scalars: Mapping[str, Any], classes: Mapping[str, str]
) -> tuple[Any, ...]:
    """Return what a point and a call must share: the Definition, dtypes, scalars that select code, and layout classes."""
    selecting = {
        name: value
        for name, value in scalars.items()
        if name not in definition.size_scalars and is_code_selecting(definition, name)
    }
    parts = (definition.bind_dtypes(dtypes), selecting, classes)
    return definition.name, *(tuple(sorted(part.items())) for part in parts)


def _is_answered(definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]) -> bool:
    """Return True if points answer a call exactly or from both sides. An answer beyond the measured work does not count."""
    if any(all(point[name] == asked[name] for name in definition.var_axes) for point in points):
        return True
    found = neighbours(definition, asked, dtypes, points) if points else ""
    return isinstance(found, Neighbours) and not found.halves


def same_widths(
    definition: Definition, asked: Sequence[tuple[Question, dict[str, int]]]
) -> list[list[tuple[Question, dict[str, int]]]]:
    """Return the questions in groups of equal widths and ratios, smallest work first."""
    groups: dict[tuple[Any, ...], list[tuple[Question, dict[str, int]]]] = {}
    serving = definition.serving
    follows = {} if serving is None else serving.follows
    for question, axes in asked:
        widths = tuple(
            follows[name] if name in follows and 1 < axes[name] == axes[follows[name]] else axes[name]
            for name in widths_of(definition)
        )
        ratios = tuple(
            axes[group[0]] / max(axes[other], 1)
            for group in (() if serving is None else serving.independent)
            for other in group[1:]
        )
        groups.setdefault((widths, ratios), []).append((question, axes))
    return [groups[key] for key in groups]


def _points(
    definition: Definition,
    dtypes: Mapping[str, str],
    asked: list[tuple[Question, dict[str, int]]],
    free: Sequence[Axes],
) -> list[Point]:
    """Return the points that answer questions of equal widths, in addition to the free ones."""
    distinct: dict[tuple[int, ...], tuple[Question, dict[str, int]]] = {}
    for question, axes in asked:
        distinct.setdefault(tuple(axes.values()), (question, axes))
    work = {key: definition.cost_of(axes, dtypes)[1] for key, (_, axes) in distinct.items()}
    ordered = sorted(distinct, key=lambda key: (work[key], key))
    chosen = [distinct[key] for key in _chain(definition, distinct, ordered)]
    for key in ordered:  # whatever the chain does not answer is measured itself
        if not _is_answered(definition, distinct[key][1], dtypes, [*free, *(axes for _, axes in chosen)]):
            chosen.append(distinct[key])
    for candidate in sorted(chosen, key=lambda one: -definition.cost_of(one[1], dtypes)[1]):  # the dearest first
        rest = [*free, *(axes for question, axes in chosen if axes is not candidate[1])]
        if all(_is_answered(definition, distinct[key][1], dtypes, rest) for key in ordered):
            chosen = [one for one in chosen if one[1] is not candidate[1]]
    return [Point(question, len(asked)) for question, _ in chosen]


def _chain(
    definition: Definition,
    distinct: Mapping[tuple[int, ...], tuple[Question, dict[str, int]]],
    ordered: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """Return the questions of least and most work; with lengths, those of a chain in which neighbours are near."""
    lengths = lengths_of(definition)
    if not lengths:
        return list(dict.fromkeys((ordered[0], ordered[-1])))
    name = lengths[0]
    sizes = sorted({axes[name] for _, axes in distinct.values()})
    links, index = [sizes[0]], 0
    while index < len(sizes) - 1:
        near = [other for other in range(index + 1, len(sizes)) if sizes[other] <= MAX_LENGTH_GAP * sizes[index]]
        index = near[-1] if near else index + 1
        links.append(sizes[index])
    repeated = independent_axes(definition)
    chosen: list[tuple[int, ...]] = []
    for link in links:
        here = [key for key in ordered if distinct[key][1][name] == link]
        rows = sorted(here, key=lambda key: _product(distinct[key][1], repeated))
        chosen += [rows[0], rows[-1]]
    return list(dict.fromkeys(chosen))


def _product(axes: Axes, names: Sequence[str]) -> int:
    found = 1
    for name in names:
        found *= axes[name]
    return found


# ---- costs ----------------------------------------------------------------------------------------
# Seconds of a GPU, from the times at which published traces were written.


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a verification take on one GPU, as medians over published runs.

    ``setup_s`` is the time of an operator until its first trace, with workers, compilation and fuzz cases. ``point_s`` is the
    time of a point until its first trace, and ``pair_s`` that of one Solution at a point. ``calls`` is the number of calls that
    a Solution makes at a point. ``oracle_s`` is the time of an oracle per 1e12 floating-point operations of a call.
    """

    gpu: str
    setup_s: float
    point_s: float
    pair_s: float
    calls: float
    oracle_s: float
    runs: int

    def of_point(self, latencies_us: Iterable[float], flops: float) -> float:
        """Return the seconds of a point of an operator that is measured already."""
        pairs = [self.pair_s + self.calls * latency * 1e-6 for latency in latencies_us]
        return self.point_s + sum(pairs) + self.oracle_s * flops / 1e12


class Written(NamedTuple):
    """A published trace: when it was written, and what decides how long it took."""

    seconds: float
    definition: str
    workload: str
    latency_us: float
    flops: float


def published_costs(gpu: str, catalog: Catalog) -> Costs | None:
    """Return what measuring costs on a GPU according to its published traces; None if it has too few of them."""
    folder = table_folder(gpu)
    if folder is None:
        return None
    runs: dict[tuple[str, str], list[Written]] = {}
    for path in trace_files(folder):
        for trace in read_lines(read_bytes(path, "trace file"), path):
            written = _written(trace, catalog)
            if written is not None:
                runs.setdefault((trace["run_id"], trace.get("gpu_uuid", "")), []).append(written)
    return costs_of(gpu, runs)


def _written(trace: Mapping[str, Any], catalog: Catalog) -> Written | None:
    definition = catalog.definitions.get(trace["definition"])
    performance = trace.get("performance")
    if definition is None or performance is None or trace.get("tier") != "promotion":
        return None
    try:
        flops = definition.cost_of(trace["axes"], trace.get("dtypes", {}))[0]
        seconds = datetime.fromisoformat(trace["timestamp"]).timestamp() - _start_of(trace["run_id"])
        return Written(seconds, definition.name, trace["workload_uuid"], performance["latency_us"], flops)
    except (TilegymDBError, LookupError, ValueError):  # of an earlier version, or without its time
        return None


def _start_of(run_id: str) -> float:
    """Return the time that begins the id of a run, in seconds since the epoch."""
    return datetime.strptime(run_id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()


MIN_GAPS = 8
"""Times between traces from which a cost is derived."""
LONG_CALL_US, LONG_ORACLE_FLOPS = 5_000.0, 1e12
"""Calls above these sizes show what their length costs; below, constant costs decide."""


def costs_of(gpu: str, runs: Mapping[Any, Sequence[Written]]) -> Costs | None:
    """Return the costs by the traces of each run on one GPU; None if there are too few."""
    inside: list[tuple[float, Written]] = []
    between: list[tuple[float, Written]] = []
    begun: list[tuple[float, int]] = []
    for traces in runs.values():
        ordered = sorted(traces)
        begun.append((ordered[0].seconds, len({one.definition for one in ordered})))
        for one, after in pairwise(ordered):
            same = (one.definition, one.workload) == (after.definition, after.workload)
            (inside if same else between).append((after.seconds - one.seconds, after))
    if len(inside) < MIN_GAPS or len(between) < MIN_GAPS:
        return None
    pair_s, point_s = (statistics.median(gap for gap, _ in found) for found in (inside, between))
    # A batch of points is verified before the first of them is timed, so long times between points are of operators that begin.
    waited = sum(first for first, _ in begun) + sum(gap - point_s for gap, _ in between if gap > point_s)
    long = [(gap - pair_s) / (one.latency_us * 1e-6) for gap, one in inside if one.latency_us > LONG_CALL_US]
    oracle = [(gap - point_s) / one.flops * 1e12 for gap, one in between if one.flops > LONG_ORACLE_FLOPS]
    return Costs(
        gpu,
        setup_s=waited / sum(count for _, count in begun),
        point_s=max(point_s - pair_s, 0.0),
        pair_s=pair_s,
        calls=max(statistics.median(long), 0.0) if long else 0.0,
        oracle_s=max(statistics.median(oracle), 0.0) if oracle else 0.0,
        runs=len(begun),
    )
