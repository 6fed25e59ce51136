"""The eager attention of models with sinks: the model's own function, or a kernel if its mask is plain.

Such models have no ``sdpa`` attention, and every call has a mask of numbers. A kernel serves a call if the mask says only what
the Definition says. Each position then sees those before it or a window of them; a decode position sees all keys. So the mask is
read, once for all layers that share it, and reading waits for the GPU. While a graph is captured, it is not read.

Definitions that have the mask among their inputs serve the other calls: padding, chunks, caches of fixed size, and graphs. They
have no gradients, so training is served with plain masks alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilegym_db.models.call_site import AUTOCAST, is_autocast
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    PartCall,
)
from tilegym_db.models.parts.attention import (
    DROPOUT,
    EAGER,
    FEWER_KEYS,
    MASK,
    MASKED,
    NO_HEADS,
    OTHER_HEADS,
    OTHER_MASK,
    OTHER_VALUES,
    SCALE,
    SCALE_IS_NO_NUMBER,
    SIZES,
    WEIGHTS,
    Sites,
    answer,
    attention_modules,
    drawn_mask,
    eager_function,
    has_mask,
    has_sinks,
    is_decode,
    read_options,
    seen_registry,
    served_or_stock,
    whole_mask,
)
from tilegym_db.models.probe import Probe, are_close, device_of, drawn_inputs
from tilegym_db.models.upstream_code import fingerprint, of_models, undecorated
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("rope",)
"""A forward calls its rotary function first."""
WINDOW = 3
"""Window of the probe, which has more positions."""

OTHER_TEXT = "another text"
"""Marks a match of which only a probe says that it is one."""
READ_OF_MODULE = {"num_key_value_groups", "sinks", "training"}
NO_SINKS = "its module has no sinks"
NO_MASK = "it has no mask, so its positions see later ones"
OTHER_NUMBERS = "its mask has no numbers of the dtype of the queries"
OTHER_LENGTHS = "its keys are not those of its queries: a static cache, or a prompt in chunks"
CAPTURED = "its mask cannot be read while a graph is captured"

Module = torch.nn.Module
Function = Callable[..., Any]


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward asks the registry and has an eager function with sinks, once per Definition."""
    return attention_modules("attention_sink", model, known, lambda module: has_sinks(type(module).forward))


def _matches(found: ModuleGroup, known: KnownCode, function: Any) -> MatchCandidates | str:
    """Return the matching Definitions of a group whose attention ``function`` computes, or the reason why none matches."""
    what = "its eager attention"
    matches = known.look_up(found.kind, function, getattr(function, "__globals__", {}), what, {})
    if isinstance(matches, str):
        return matches
    this = [match for match in matches if match.definition.name == found.function]
    return MatchCandidates(this) if this else f"{what} is not known to compute {found.function}"


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the eager function that the forward names; a probe decides about a function of another text."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    eager = eager_function(forward)
    if known.is_stated(found.kind, eager):
        return _matches(found, known, eager)
    mark = fingerprint(eager)
    if mark is None:
        return "its eager attention is no plain function with a source"
    options = read_options(eager, READ_OF_MODULE)
    if isinstance(options, str):
        return f"its eager attention is not known: {options}"
    matches = [match for match in known.nominated(found.kind) if match.definition.name == found.function]
    return MatchCandidates([DefinitionMatch(one, ModelCode(fingerprint=mark), OTHER_TEXT) for one, *_ in matches])


def AGREES(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if results have the same bits, or differ by roundings in float32, for a function of another text."""
    if returned[0].dtype == torch.float32:
        return are_close(returned, expected)
    return len(returned) == len(expected) and all(map(torch.equal, returned, expected))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the eager function on more positions than a window has, or on the last ones, with two query heads per key head.

    A function of another text runs in float32: it may round scores or weights where the known one does not.
    """
    eager = eager_function(undecorated(type(module).forward))
    definition = match.definition
    inputs: dict[str, Any] = {**drawn_inputs(definition, SIZES, device_of(module))}
    if match.details is OTHER_TEXT:
        inputs = {name: drawn.float() for name, drawn in inputs.items()}
    q, k, v, sinks = (inputs[name] for name in ("q", "k", "v", "sinks"))
    mask = torch.zeros_like(q[:, :1, :, :1])
    if has_mask(definition):
        seen = drawn_mask(q, k)
        mask = inputs[MASK] = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, torch.finfo(q.dtype).min)
    elif not is_decode(definition):
        mask = plain_mask(q.shape[2], WINDOW, q.dtype, q.device).expand(q.shape[0], 1, -1, -1)
        inputs["window"] = WINDOW
    asking = types.SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    try:
        with torch.no_grad():
            out, _ = eager(asking, q, k, v, mask, scaling=SCALE, dropout=0.0)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {**inputs, "scale": SCALE}, (out.transpose(1, 2),)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the registry of attention functions for an attention forward, in place of the registry of transformers."""
    return seen_registry(stock, calls, EAGER, eager_function(undecorated(stock)), attention_function)


def attention_function(stock: Function, sites: Sites) -> Function:
    """Return ``eager_attention_forward``: query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] -> ([B, Sq, Hq, D], None)."""
    masks, read = Masks(), read_options(stock, READ_OF_MODULE)
    others = sorted(read) if isinstance(read, frozenset) else ()  # a text that is stated reads no other

    def serve(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> Any:
        is_one = query.dim() == 4 and query.shape[2] == 1
        plain, masked = (sites.site_of(is_one=is_one, is_masked=is_masked) for is_masked in (False, True))
        masked = None if masked is plain else masked
        first = plain if plain is not None and (plain.is_open or masked is None) else masked
        tensors = (query, key, value, module.sinks)
        if module.sinks is None:
            if first is not None:
                first.bypass(NO_SINKS)
            return None
        if first is None or first.falls_back(module.training, *tensors):
            return None
        reason, window = why_stock(module, query, key, value, options, others), _window(query, options)
        mask, scale = options.get("attention_mask"), options.get("scaling")
        if not reason and first is plain:
            reason = masks.why_other(mask, query, key, window)
            if not reason:
                return answer(plain, module.training, *tensors, *((scale,) if is_one else (window, scale)))
            if masked is not None and masked.is_open:
                first, reason = masked, ""
        reason = reason or why_other_numbers(mask, query, key)
        if reason:
            first.bypass(reason)
            return None
        return answer(first, module.training, *tensors, whole_mask(mask, query, key), scale)

    return served_or_stock(stock, serve)


def why_other_numbers(mask: Any, query: torch.Tensor, key: torch.Tensor) -> str:
    """Return the reason if a mask is not one of numbers for all heads, [B or 1, 1, Sq or 1, Skv]; empty if it is one."""
    if mask is None:
        return NO_MASK
    if type(mask) is not torch.Tensor or mask.dtype != query.dtype:
        return OTHER_NUMBERS
    wanted = (query.shape[0], 1, query.shape[2])
    is_known = mask.dim() == 4 and all(size in (1, want) for size, want in zip(mask.shape[:3], wanted, strict=True))
    if not is_known or mask.shape[3] != key.shape[2]:
        return OTHER_MASK
    return FEWER_KEYS if key.shape[2] < query.shape[2] else ""


def _window(query: torch.Tensor, options: Mapping[str, Any]) -> int:
    """Return how many positions one position sees: all of them if the module states no window or a larger one."""
    window = options.get("sliding_window")
    return query.shape[-2] if window is None else min(window, query.shape[-2])


def why_stock(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Mapping[str, Any],
    others: Sequence[str] = (),
) -> str:
    """Return the reason if no Definition describes a call of ``eager_attention_forward`` with any mask; empty if one does.

    Args:
        module: the attention module, with its sinks, which states how many query heads share a key head.
        others: those that stock code reads and that no Definition knows. No probe has them.
    """
    for name in others:
        if options.get(name) is not None:
            return f"it has the argument {name}"
    if is_autocast(query):
        return AUTOCAST
    if options.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return WEIGHTS
    if options.get("dropout"):
        return DROPOUT
    if type(options.get("scaling")) is not float:
        return SCALE_IS_NO_NUMBER
    if query.dim() != 4 or key.dim() != 4:
        return NO_HEADS
    if query.shape[1] != key.shape[1] * module.num_key_value_groups:
        return OTHER_HEADS
    return "" if value.shape == key.shape else OTHER_VALUES


class Masks:
    """The meaning of a model's masks. Each mask is read once for all layers that get it."""

    def __init__(self) -> None:
        """Start without known masks."""
        self._known: Any = WeakTensorKeyDictionary()

    def why_other(self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int) -> str:
        """Return the reason if a mask differs from "sees all keys" and from "sees the ``window`` last keys"; empty if not.

        Args:
            mask: [B, 1, Sq, Skv], added to the scores.
            window: Sq if there is none.
        """
        length = query.shape[2]
        if mask is None:  # every query sees all keys
            return "" if length == 1 else NO_MASK
        if length not in (1, key.shape[2]):
            return OTHER_LENGTHS
        if mask.shape != (query.shape[0], 1, length, key.shape[2]) or mask.dtype != query.dtype:
            return MASKED
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return CAPTURED
        return "" if self._is_plain(mask, window) else MASKED

    def _is_plain(self, mask: torch.Tensor, window: int) -> bool:
        if mask.is_inference():  # an inference tensor does not count its writes
            return is_plain(mask, window)
        version, known = self._known.get(mask, (None, {}))
        if version != mask._version:
            known = {}
            self._known[mask] = mask._version, known
        if window not in known:
            known[window] = is_plain(mask, window)
        return bool(known[window])


def is_plain(mask: torch.Tensor, window: int) -> bool:
    """Return True if a mask [B, 1, S, S] equals :func:`plain_mask`, or if a mask [B, 1, 1, L] is all zeros. Waits for a GPU."""
    if mask.shape[2] == 1:
        return not mask.any()
    return torch.equal(mask, plain_mask(mask.shape[2], window, mask.dtype, mask.device).expand_as(mask))


def plain_mask(length: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [S, S]: 0 at the ``window`` last positions up to the row's own, and the dtype's least number elsewhere."""
    positions = torch.arange(length, dtype=torch.int32, device=device)
    behind = positions[:, None] - positions
    unseen = torch.full(behind.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return unseen.masked_fill_((behind >= 0) & (behind < window), 0.0)
