"""Reduce a config to few layers of which every kind of the model's layers is one.

A kind is seen in the model itself, built on the meta device: the classes of a layer's modules and their settings. Lists of the
config with one entry per layer count too. Each reduced config is built and compared, so no rule of a config class is repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tilegym_db.errors import UsageError

COUNTS = ("layer", "layers", "blocks", "depth")
"""Ends of the names of config entries that count layers."""
LISTS = ("layer", "type", "block", "pattern", "idx")
"""Parts of the names of lists with one entry per layer. Other lists count only if they are long."""
LONG = 4

Build = Callable[[Any], "torch.nn.Module | None"]
Kinds = dict[str, list[Any]]
"""Name of a stack of layers -> the kind of each layer."""


def with_few_layers(config: Any, layers: int, build: Build) -> Any:
    """Return a config with ``layers`` layers, or with more if the model has more kinds of layers.

    The first layers remain if they are of every kind. Otherwise one layer of each kind remains, or all layers up to the last
    new kind if the config class allows nothing else.

    Args:
        config: a config of transformers; it does not change.
        layers: number of layers to keep in each stack of layers.
        build: returns the model of a config without memory, or None if it cannot be built.

    Raises:
        UsageError: the model has fewer layers.
    """
    model = build(config)
    if model is None:
        return config  # building it in earnest says why
    names = {
        name for part in text_configs(config) for name, value in vars(part).items() if isinstance(value, list | tuple)
    }
    kinds = _kinds(config, model, names)
    names = {name for of_stack in kinds.values() for name, _ in _listed(config, len(of_stack), names)}
    counts = {count for part in text_configs(config) for count in _counts(part, kinds).values()}
    if not counts:
        return config
    if not 1 <= layers <= max(counts):
        raise UsageError(
            f"the model has {max(counts)} layers; keep 1 to {max(counts)} of them, not {layers}.",
            code="layers_out_of_range",
        )
    stacks = [of_stack for of_stack in kinds.values() if len(of_stack) in counts]
    firsts = sorted({of_stack.index(kind) for of_stack in stacks for kind in of_stack})
    prefix = range(max(layers, firsts[-1] + 1))
    others = [index for index in range(max(counts)) if index not in firsts]
    picked = sorted([*firsts, *others[: max(0, layers - len(firsts))]])
    for kept in (picked, prefix) if len(prefix) > layers else (prefix,):
        reduced = _reduced(config, kept, kinds)
        found = build(reduced)
        if found is not None and _sets(_kinds(reduced, found, names)) == _sets(kinds):
            return reduced
    return config


SHARED_SIZES = (
    *("num_attention_heads", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"),
)
"""Entries of a config that the GPUs of a tensor-parallel model share."""
KEYS = "num_key_value_heads"
"""Heads that are repeated if there are fewer than GPUs."""


def of_one_gpu(config: Any, parallel: int) -> Any:
    """Return the config of the part of a tensor-parallel model that one of ``parallel`` GPUs computes.

    Heads and intermediate sizes are shared. The hidden size, the vocabulary and the experts are whole.

    Raises:
        UsageError: a shared size is no multiple of ``parallel``.
    """
    if parallel == 1:
        return config
    part = copy.deepcopy(config)
    for text in text_configs(part):
        heads = getattr(text, "num_attention_heads", None)
        if type(heads) is int and type(getattr(text, "head_dim", None)) is not int:
            text.head_dim = text.hidden_size // heads
        for name in SHARED_SIZES:
            size = getattr(text, name, None)
            if type(size) is int and size:
                if size % parallel:
                    raise UsageError(
                        f"--tp {parallel}: the model's {name} of {size} is no multiple of it. Give a number that divides it.",
                        code="parallel_indivisible",
                    )
                setattr(text, name, size // parallel)
        pairs = getattr(text, KEYS, None)
        if type(pairs) is int:
            setattr(text, KEYS, max(1, pairs // parallel))
    return part


def _sets(kinds: Kinds) -> dict[str, frozenset[Any]]:
    return {name: frozenset(of_stack) for name, of_stack in kinds.items()}


def _reduced(config: Any, kept: Iterable[int], kinds: Kinds) -> Any:
    reduced = copy.deepcopy(config)
    for part in text_configs(reduced):
        counts = _counts(part, kinds)
        for name, count in counts.items():
            setattr(part, name, sum(index < count for index in kept))
        for count in set(counts.values()):
            for name, values in _lists(part, count):
                setattr(part, name, type(values)(values[index] for index in kept if index < count))
    return reduced


def text_configs(config: Any) -> list[Any]:
    """Return the configs of text models inside a config, or the config itself if it has none."""
    found = [one for one in _nested(config) if "vocab_size" in vars(one)]
    return found or [config]


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _nested(value)


def _counts(part: Any, kinds: Kinds) -> dict[str, int]:
    """Return the entries of a config that count the layers of a stack."""
    lengths = {len(of_stack) for of_stack in kinds.values()}
    return {
        name: value
        for name, value in vars(part).items()
        if name.endswith(COUNTS) and type(value) is int and value in lengths and not name.startswith("max_")
    }


def _lists(part: Any, count: int) -> list[tuple[str, list[Any] | tuple[Any, ...]]]:
    return [
        (name, values)
        for name, values in vars(part).items()
        if isinstance(values, list | tuple)
        and len(values) == count
        and (count > LONG or any(word in name for word in LISTS))
    ]


def _kinds(config: Any, model: torch.nn.Module, names: set[str]) -> Kinds:
    """Return the kinds of the layers of each outermost list of modules.

    ``names`` are the lists of the config that may state the kinds. A list with another meaning may have the same length.
    """
    found: Kinds = {}
    for name, stack in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(stack, torch.nn.ModuleList) and len(stack) and not inside:
            listed = [values for _, values in _listed(config, len(stack), names)]
            found[name] = [
                (_structure(layer), tuple(values[index] for values in listed)) for index, layer in enumerate(stack)
            ]
    return found


def _listed(config: Any, count: int, names: set[str]) -> list[tuple[str, Sequence[Any]]]:
    return [
        (name, values)
        for part in text_configs(config)
        for name, values in _lists(part, count)
        if name in names and all(isinstance(value, str | bool) for value in values)
    ]


def _structure(layer: torch.nn.Module) -> Any:
    """Return the classes of a layer's modules and their settings; of numbers only if they are given at all."""
    return tuple(
        (name, type(module), tuple(sorted(filter(None, (_setting(*item) for item in vars(module).items())))))
        for name, module in layer.named_modules()
    )


def _setting(name: str, value: Any) -> tuple[str, str] | None:
    if name.startswith("_") or name == "training" or not isinstance(value, bool | str | int | float | None):
        return None
    return name, str(value) if isinstance(value, bool | str) else str(value is None)
