"""Makes Workloads from a Hugging Face config. The Definition's axis descriptions say which number is which axis."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.catalog.writers import check_call
from tilegym_db.errors import MissingPackageError, RecordError, UsageError
from tilegym_db.files import decode, read_bytes
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import scalars_with_axes
from tilegym_db.records.dtypes import Scalar

Config = Mapping[str, Any]
Rule = Callable[[Config], int | None]


@dataclass(frozen=True)
class MappedWorkloads:
    """The Workloads of a config for one Definition. ``unmapped`` names each axis or scalar without a value, with the
    reason.
    """

    workloads: tuple[Workload, ...]
    mapped: dict[str, str] = field(default_factory=dict)
    """Axis or scalar -> the source of its value, such as ``hidden_size = 2048``."""
    unmapped: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Sizes that the Definition's constraints exclude, with the constraint."""


def typed_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and content of a model's config, from a file, a folder with a ``config.json`` or a model's id.

    An id such as ``Qwen/Qwen3.5-0.8B`` names a config in the local cache of the hub. Only JSON is read, so that an invalid file
    is refused before any large import.
    """
    file = path / "config.json" if path.is_dir() else located_config(path)
    try:
        content = json.loads(decode(read_bytes(file, "config"), file))
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: cannot read this config: {error}.", code="config_unreadable") from None
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if not model_type:
        raise UsageError(f"{file} is no config of a model: it states no model_type.", code="model_type_missing")
    if not isinstance(model_type, str):
        raise UsageError(
            f"{file} is no config of a model: its model_type is no text, but {json.dumps(model_type)[:40]}.",
            code="model_type_missing",
        )
    return file, content


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def located_config(name: Path) -> Path:
    """Return a path that exists, or else the config of that model's id in the local cache of the hub. Nothing is downloaded."""
    if name.exists():
        return name
    spelled = name.as_posix()
    if HUB_ID.fullmatch(spelled) is None or spelled.endswith(".json"):
        raise UsageError(
            f"'{name}' does not exist. Give a config.json, a folder with one, or the id of a model in the local hub cache.",
            code="config_missing",
        )
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise MissingPackageError(
            f"'{name}' does not exist here, and ids of models need huggingface_hub. "
            "Try: pip install 'tilegym-db[transformers]'",
            code="package_missing",
        ) from None
    found = try_to_load_from_cache(spelled, "config.json")
    if not isinstance(found, str):
        raise UsageError(
            f"'{name}' does not exist here, and the local hub cache has no config of that id. "
            f"Try: hf download {spelled} config.json",
            code="config_missing",
        )
    return Path(found)


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a model's ``config.json``, with the entries of its text model if it has several parts."""
    content = read_bytes(located_config(path), "config")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise RecordError(f"{path}: not valid JSON: {error}.", code="json_syntax") from None
    if not isinstance(config, dict):
        raise RecordError(
            f"{path}: a model's config is a JSON object, not {type(config).__name__}.", code="object_expected"
        )
    check_config_sizes(config, path)
    nested = config.get("text_config") or config.get("llm_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _key(*names: str) -> Rule:
    def find(config: Config) -> int | None:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    find.__name__ = names[0]
    return find


hidden_size = _key("hidden_size", "n_embd", "d_model", "dim")
attention_heads = _key("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
intermediate_size = _key("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim")


def key_value_heads(config: Config) -> int | None:
    """Return the number of key and value heads; the number of query heads if the config does not separate them."""
    return _key("num_key_value_heads", "n_head_kv", "num_kv_heads")(config) or attention_heads(config)


def head_size(config: Config) -> int | None:
    """Return ``head_dim``, else the hidden size divided by the number of heads."""
    stated = _key("head_dim", "d_kv", "v_head_dim")(config)
    hidden, heads = hidden_size(config), attention_heads(config)
    return stated or (hidden // heads if hidden and heads else None)


def rotated_size(config: Config) -> int | None:
    """Return the part of a head that rotates: ``partial_rotary_factor`` of it."""
    nested = config.get("rope_parameters") or {}
    factor = config.get("partial_rotary_factor", nested.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    size = head_size(config)
    return None if size is None else int(size * factor)


# Words in an axis description -> config keys. The match that starts first in the description counts.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"experts? per token|chosen experts|top.?k", _key("num_experts_per_tok", "moe_top_k", "num_experts_per_token")),
    (r"(expert|moe).*intermediate", _key("moe_intermediate_size", "intermediate_size")),
    (r"intermediate|feed.?forward", intermediate_size),
    (r"head (size|dim)", lambda config: head_size(config)),
    (r"rotat|rotary", rotated_size),
    (r"(query|attention) heads", attention_heads),
    (r"key.*heads|value heads", key_value_heads),
    (r"^hidden size|model width|^channels", hidden_size),
    (r"vocabulary$|^vocab", _key("vocab_size")),
    (r"^experts|number of experts", _key("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")),
)
TOKENS = r"^tokens|^positions|^rows: tokens|^rows$"
CACHE = r"cache"
SEQUENCES = r"^sequences|^batch"
SHARED_TABLES = r"sequences in the tables"

SCALARS: tuple[tuple[str, Callable[[Config], float | int | bool | None]], ...] = (
    (
        r"^eps",
        lambda config: next(
            (
                config[key]
                for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
                if key in config
            ),
            None,
        ),
    ),
    (r"^(scale|sm_scale|softmax_scale)$", lambda config: 1 / math.sqrt(size) if (size := head_size(config)) else None),
    (r"causal", lambda config: True),
    (r"window", lambda config: config.get("sliding_window")),
    (r"^(softcap|logit)", lambda config: config.get("attn_logit_softcapping")),
)


def workloads_from_config(
    definition: Definition,
    config: Config,
    *,
    model: str,
    tokens: Sequence[int],
    batch: int = 1,
    axes: Mapping[str, int] | None = None,
    scalars: Mapping[str, Scalar] | None = None,
) -> MappedWorkloads:
    """Return Workloads of one operator at a model's sizes: one per token count, in the config's dtype.

    Args:
        tokens: sizes of the axis that counts tokens; 1 is tagged ``stage:decode``, others ``stage:prefill``.
        batch: size of an axis that counts sequences.
        axes, scalars: values that win over the config's, and give what it does not have.
    """
    _check_known("axes", axes or {}, definition.axes)
    _check_known("scalars", scalars or {}, definition.inputs)
    found: _Found = ({}, [], {}, {})
    sizes, counting, mapped, unmapped = found
    for name in definition.var_axes:
        if axes and name in axes:
            sizes[name], mapped[name] = axes[name], "given"
        else:
            _map_axis(definition, name, config, batch, found)
    values = _map_scalars(definition, config, scalars_with_axes(definition, scalars or {}, sizes), mapped, unmapped)
    if unmapped:
        return MappedWorkloads((), mapped, unmapped)
    dtypes = _dtypes(definition, config, mapped)
    cached = any(re.search(CACHE, definition.axes[name].description) for name in counting)
    made: list[Workload] = []
    refused: list[str] = []
    for count in tokens if counting else (0,):
        step = (f"stage:{'decode' if cached or count == 1 else 'prefill'}",) if counting else ()
        content = {
            "definition": definition.name,
            "axes": {name: sizes.get(name, count) for name in definition.var_axes},
            "dtypes": dtypes,
            "inputs": {name: {"type": "scalar", "value": value} for name, value in values.items()},
            "tags": [f"model:{model}", *step],
        }
        _make(definition, content, f"{definition.name} from {model}", (made, refused))
    return MappedWorkloads(tuple(made), mapped, unmapped, tuple(refused))


def _make(definition: Definition, content: dict[str, Any], where: str, found: tuple[list[Workload], list[str]]) -> None:
    """Add one Workload to ``found``, or the reason why its Definition excludes it."""
    made, refused = found
    workload = Workload.from_dict(content, where)
    try:
        check_call(definition, workload)
    except RecordError as error:
        refused.append(str(error))
    else:
        made.append(workload)


def _check_known(option: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{option}: '{name}' is unknown; known: {', '.join(known)}.", code="name_unknown")


_Found = tuple[dict[str, int], list[str], dict[str, str], dict[str, str]]


def _map_axis(definition: Definition, name: str, config: Config, batch: int, found: _Found) -> None:
    """Add one axis to ``found``: a config size, the token axis, or an axis without a value."""
    sizes, counting, mapped, unmapped = found
    words = definition.axes[name].description.lower()
    if re.search(SHARED_TABLES, words):
        sizes[name], mapped[name] = 1, "1: every sequence has the same positions"
    elif re.search(SEQUENCES, words):
        sizes[name], mapped[name] = batch, "--batch"
    elif re.search(TOKENS, words):
        counting.append(name)
        mapped[name] = "--tokens"
    else:
        matches = [
            (match.start(), index) for index, (pattern, _) in enumerate(RULES) if (match := re.search(pattern, words))
        ]
        rule = RULES[min(matches)[1]][1] if matches else None
        size = rule(config) if rule is not None else None
        if size is not None:
            sizes[name], mapped[name] = size, f"the config ({re.split('[,:]', words)[0]})"
        elif not words or words.startswith("todo"):
            unmapped[name] = "its description does not say what it counts"
        elif rule is None:
            unmapped[name] = f"nothing in a config is known to be '{definition.axes[name].description}'"
        else:
            unmapped[name] = f"the config does not have '{definition.axes[name].description}'"


def _map_scalars(
    definition: Definition,
    config: Config,
    given: Mapping[str, Scalar],
    mapped: dict[str, str],
    unmapped: dict[str, str],
) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {}
    for name, spec in definition.inputs.items():
        if not spec.is_scalar:
            continue
        if name in given:
            values[name], mapped[name] = given[name], "given"
            continue
        rule = next((rule for pattern, rule in SCALARS if re.search(pattern, name)), None)
        value = rule(config) if rule is not None else None
        if value is None:
            unmapped[name] = f"the config has no value for this scalar ({spec.description or spec.dtype})"
        elif not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(
                f"the config says {json.dumps(value)[:40]} where '{name}' needs a finite number. "
                f"Mend it, or give one with --scalar {name}=NUMBER.",
                code="config_scalar_invalid",
            )
        else:
            values[name], mapped[name] = value, "the config"
    return values


def _dtypes(definition: Definition, config: Config, mapped: dict[str, str]) -> dict[str, str]:
    """Return the config's dtype for every dtype variable, or the variable's first choice if the Definition lacks it."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    chosen = {name: stated if stated in choices else choices[0] for name, choices in definition.dtypes.items()}
    mapped.update({name: f"dtype of the config ({dtype})" for name, dtype in chosen.items()})
    return chosen


# ---- config sizes ---------------------------------------------------------------------------------
# Refuses wrong sizes in a config (zero, text, petabytes) before any large import.

# Config keys that count something -> a maximum far above any real model.
MAX_SIZES: dict[str, int] = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 26,
    "type_vocab_size": 1 << 26,
    "num_labels": 1 << 20,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "moe_intermediate_size": 1 << 22,
    "kv_lora_rank": 1 << 20,
    "q_lora_rank": 1 << 20,
    "max_position_embeddings": 1 << 32,
}
MAY_BE_ZERO = ("head_dim", "type_vocab_size")
"""Sizes that are zero in the configs of some models, which do not use them."""


def check_config_sizes(content: Mapping[str, Any], file: Path) -> None:
    """Raise :class:`UsageError` for a size that is no whole number up to :data:`MAX_SIZES`; null is left alone.

    Values that no record can keep are refused too, before anything is measured.
    """
    _check_values(content, file, "")
    for key, value in _entries(content):
        most = MAX_SIZES.get(key)
        if most is None or value is None:
            continue
        least = 0 if key in MAY_BE_ZERO else 1
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole or not least <= value <= most:
            raise UsageError(
                f"{file}: {key} must be a whole number from {least} to {most}, not {json.dumps(value)[:40]}.",
                code="config_size_invalid",
            )


def _check_values(value: Any, file: Path, where: str, *, in_list: bool = False) -> None:
    """Raise :class:`UsageError` for NaN, for an infinite number outside a list of limits, and for text outside of Unicode."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(key, file, where or "a key")
            _check_values(inner, file, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, file, where, in_list=True)
    elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not in_list)):
        raise UsageError(f"{file}: {where} must be a finite number, not {value}.", code="config_number_invalid")
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(
            f"{file}: {where!a} has half of a surrogate pair, which no file can keep: {ascii(value)[:80]}.",
            code="config_text_invalid",
        )


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config and of the configs inside it (``text_config``)."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        elif key in ("hidden_size", "vocab_size", "num_hidden_layers") or not isinstance(value, list):
            yield key, value
