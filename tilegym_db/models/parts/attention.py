"""The attention call of a model: its own function, or a kernel if the call is exactly one that a Definition describes.

An attention forward asks the registry of transformers for a function, by a name in its config. A patched forward reads the
registry through :class:`Interfaces`, which returns the same functions and wraps only the one that was probed. So config, registry
and masks stay as they are: a mask is built for ``sdpa``, and a missing mask means that the call needs none.

A mask of flags is an input of the Definitions that take one. It is never read on the host, so no call waits for the GPU, and a
step over a cache of fixed size can be captured.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, CallSite, is_autocast
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    names_in_code,
    of_class,
)
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of, drawn_inputs
from tilegym_db.models.rewrite import parsed
from tilegym_db.models.upstream_code import fingerprint, once_per_function, undecorated
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("rope",)
"""A forward calls its rotary function first."""
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
SDPA, EAGER = "sdpa", "eager"
EAGER_FUNCTION = "eager_attention_forward"
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "H": 4, "S": ROWS, "L": ROWS, "Dv": 32}
SCALE = 0.3
"""Scale of the probe, which runs a few last positions with two query heads per key head."""

MASKED = "it has a mask: padding, a window within the sequence, a static cache, or a prompt in chunks"
NO_FLAGS = "its mask is no tensor of flags, but numbers that are added to scores"
OTHER_MASK = "its mask is not one for all heads, [batch, 1, positions, keys]"
DROPOUT = "it drops weights at random"
WEIGHTS = "the caller wants attention weights"
NOT_CAUSAL = "its positions may see later ones"
CAUSAL = "its positions see no later ones, but no module of its class is causal"
FEWER_KEYS = "it has fewer keys than queries"
NO_HEADS = "its inputs are not batch, heads, positions and head size"
OTHER_HEADS = "the ratio of its query heads to its key heads is not the one that the module states"
OTHER_VALUES = "it has another number of values than of keys"
SCALE_IS_NO_NUMBER = "its scale is no number"
NARROW_VALUES = "its values are narrower than its keys (latent attention), but its module does not state both widths"
SAME_WIDTH = "its values are as wide as its keys, but its module states other widths"
KEY_WIDTH, VALUE_WIDTH = "qk_head_dim", "v_head_dim"
"""Attributes of a module of latent attention."""
MASK = "mask"
"""The input of a Definition that takes flags, True at what a position sees."""
SOFTCAP = "softcap"
"""An argument of eager attention that bounds its scores."""
BIAS = "position_bias"
"""An argument of attention that is added to its scores."""
SINKS = "s_aux"
"""An argument of eager attention; stock code may ignore it, but no Definition with it is served here."""

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward asks the registry of attention functions, once per Definition of some of its calls."""
    return attention_modules("attention", model, known, _is_plain)


def _is_plain(module: Module) -> bool:
    """Return True if a module has usual attention: no sinks, no soft cap and no bias."""
    forward: Any = type(module).forward
    return not has_sinks(forward) and softcap_of(module) is None and not passes_bias(forward)


def attention_modules(
    part: str, model: Module, known: KnownCode, is_of_part: Callable[[Module], bool]
) -> Iterable[ModuleGroup]:
    """Return the modules of a part whose forward asks the registry, once per Definition of the part.

    Definitions without a mask come first, and among those the ones of whole prompts. Modules of latent attention whose
    values have another width than their keys have Definitions with two widths, and all other modules have the others. A
    class with causal modules has the causal Definition of whole prompts, and one with others has the bidirectional one.
    """
    asks = of_class(lambda cls: REGISTRY in names_in_code(cls.forward))
    definitions = sorted(known.definitions(part), key=lambda one: (has_mask(one), is_decode(one), one.name))
    modules = [module for module in model.modules() if asks(module) and is_of_part(module)]
    causalities: dict[type[Module], set[bool]] = {}
    for module in modules:
        causalities.setdefault(type(module), set()).add(states_causal(module))
    return grouped(
        part,
        [
            ModuleOfPart(module, definition.name, detail=next((one.device for one in module.parameters()), None))
            for module in modules
            for definition in definitions
            if has_two_widths(definition) == states_two_widths(module)
            and not causality_of(definition).isdisjoint(causalities[type(module)])
        ],
    )


def has_sinks(forward: Any) -> bool:
    """Return True if the eager function that an attention forward names reads sinks; such a model has no other attention."""
    return "sinks" in names_in_code(eager_function(undecorated(forward)))


def softcap_of(module: Module) -> Any:
    """Return the soft cap of scores that a module passes on to its attention; None without one.

    Most forwards with such an argument pass None. They can also run ``sdpa`` attention.
    """
    forward: Any = undecorated(type(module).forward)
    name = _softcap_attribute(forward) if isinstance(forward, FunctionType) else ""
    return getattr(module, name, None) if name else None


@once_per_function
def _softcap_attribute(forward: FunctionType) -> str:
    """Return the attribute of the module that a forward passes by the name of a soft cap; empty if it passes none."""
    function = parsed(forward) if any(SOFTCAP in _texts(one) for one in forward.__code__.co_consts) else None
    for node in ast.walk(function) if function is not None else ():
        match node:
            case ast.keyword(arg=name, value=ast.Attribute(value=ast.Name(id="self"), attr=attribute)) if (
                name == SOFTCAP
            ):
                return attribute
    return ""


def passes_bias(forward: Any) -> bool:
    """Return True if an attention forward that asks the registry passes a bias of positions by its name."""
    code = getattr(undecorated(forward), "__code__", None)
    return (
        code is not None and REGISTRY in names_in_code(forward) and any(BIAS in _texts(one) for one in code.co_consts)
    )


def _texts(constant: Any) -> tuple[Any, ...]:
    """Return the elements of a constant that is a tuple, such as the names of arguments in a call."""
    return constant if isinstance(constant, tuple) else ()


def eager_function(forward: Any) -> Any:
    """Return the eager attention function that an attention forward names; None if it names none."""
    if EAGER_FUNCTION not in names_in_code(forward):
        return None
    return getattr(forward, "__globals__", {}).get(EAGER_FUNCTION)


def is_decode(definition: Definition) -> bool:
    """Return True if a Definition is of single positions, by the shape of its queries, [B, Hq, 1, D]."""
    return (next(iter(definition.inputs.values())).shape or ())[-2:-1] == (1,)


def has_mask(definition: Definition) -> bool:
    """Return True if a Definition takes a mask of flags."""
    return MASK in definition.inputs


def is_bidirectional(definition: Definition) -> bool:
    """Return True if a Definition is of whole prompts whose positions see all keys: queries and keys have separate axes."""
    q, k = definition.inputs["q"].shape, definition.inputs["k"].shape
    return not has_mask(definition) and not is_decode(definition) and q is not None and k is not None and q[-2] != k[-2]


def causality_of(definition: Definition) -> frozenset[bool]:
    """Return the answers of :func:`states_causal` of the modules that may call a Definition."""
    if has_mask(definition) or is_decode(definition):
        return frozenset((True, False))
    return frozenset((not is_bidirectional(definition),))


def states_causal(module: Module) -> bool:
    """Return False if a module states that it is not causal, as stock code reads it."""
    return getattr(module, "is_causal", True) is not False


def has_two_widths(definition: Definition) -> bool:
    """Return True if the values of a Definition have another width than its keys."""
    k, v = definition.inputs["k"].shape, definition.inputs["v"].shape
    return k is not None and v is not None and k[-1] != v[-1]


def states_two_widths(module: Module) -> bool:
    """Return True if a module states that its values have another width than its keys."""
    widths = [getattr(module, name, None) for name in (KEY_WIDTH, VALUE_WIDTH)]
    return None not in widths and widths[0] != widths[1]


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Judge the function that the forward's registry has for ``sdpa`` by its structure and by its bits."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    function, device = sdpa_function(forward), device_of(found.modules[0])
    (definition,) = (one for one in known.definitions(found.kind) if one.name == found.function)
    options = other_options(function)
    reason = options if isinstance(options, str) else ""
    if not reason and device.type != "meta":  # a module without memory is left alone anyway
        reason = why_other_bits(
            function, device, with_mask=has_mask(definition), is_causal=not is_bidirectional(definition)
        )
    if reason:
        return f"the sdpa attention in its registry is not known: {reason}"
    return MatchCandidates([DefinitionMatch(definition, ModelCode(fingerprint=fingerprint(function) or ""))])


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the attention function on some of the last positions, with two query heads per key head.

    For one position with a mask, each key head has one query head. Releases of transformers differ in how they share a key head
    there, which may change bits. :func:`candidates` accepts the bits of each way.
    """
    definition, device = match.definition, device_of(module)
    sdpa = sdpa_function(undecorated(type(module).forward))
    is_alone = "Hkv" not in definition.axes or (has_mask(definition) and is_decode(definition))
    groups = 1 if is_alone else SIZES["Hq"] // SIZES["Hkv"]
    inputs: dict[str, Any] = {**drawn_inputs(definition, {**SIZES, "Hkv": SIZES["Hq"] // groups}, device)}
    if has_mask(definition):
        inputs[MASK] = drawn_mask(inputs["q"], inputs["k"])
    scalars = {name: SCALE for name, spec in definition.inputs.items() if spec.is_scalar}
    is_causal = not is_bidirectional(definition)
    asking = types.SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal, training=False)
    with torch.no_grad():
        out, _ = sdpa(asking, *(inputs[name] for name in ("q", "k", "v")), inputs.get(MASK), dropout=0.0, scaling=SCALE)
    return {**inputs, **scalars}, (out.transpose(1, 2),)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the registry of attention functions for an attention forward, in place of the registry of transformers."""
    return seen_registry(stock, calls, SDPA, sdpa_function(undecorated(stock)), attention_function)


class Sites(NamedTuple):
    """The call sites of one attention function: of whole prompts and of single positions, without and with a mask.

    Whole prompts without a mask have one site for causal calls, ``prefill``, and one for calls that see all keys.

    None leaves these calls to stock code.
    """

    prefill: CallSite | None = None
    decode: CallSite | None = None
    masked_prefill: CallSite | None = None
    masked_decode: CallSite | None = None
    bidirectional: CallSite | None = None
    two_widths: bool = False
    """True if values have another width than keys."""

    def site_of(self, *, is_one: bool, is_masked: bool, is_causal: bool = True) -> CallSite | None:
        """Return the site of a call. A call with a mask, or of another causality, without a site, is counted at another site."""
        plain, masked = (self.decode, self.masked_decode) if is_one else (self._whole(is_causal), self.masked_prefill)
        if is_one and masked is None and self.two_widths:  # one Definition has masks of one and more positions
            masked = self.masked_prefill
        return masked if is_masked and masked is not None else plain

    def _whole(self, is_causal: bool) -> CallSite | None:
        first, second = (self.prefill, self.bidirectional) if is_causal else (self.bidirectional, self.prefill)
        return second if first is None else first


def seen_registry(
    stock: Any, calls: Sequence[PartCall], name: str, function: Function, serving: Callable[[Function, Sites], Function]
) -> FunctionOverrides:
    """Return a registry with ``serving(function, sites)`` in place of the function that a config calls ``name``."""
    by_kind = {_kind(_definition(found)): site for found, site in calls}
    sites = Sites(
        by_kind.get((False, False, False)),
        by_kind.get((False, True, False)),
        by_kind.get((True, False, False)),
        by_kind.get((True, True, False)),
        by_kind.get((False, False, True)),
        two_widths=any(has_two_widths(_definition(found)) for found, _ in calls),
    )
    registry = undecorated(stock).__globals__[REGISTRY]
    interfaces = Interfaces(registry, name, function, serving(function, sites), next(iter(by_kind.values())).bypass)
    # Training runs whole sequences, so only their sites count, each call once.
    counting = [site for site in (sites.prefill, sites.bidirectional, sites.masked_prefill) if site is not None]
    trains = any(site.training is not None for site in counting)
    return FunctionOverrides(
        {REGISTRY: interfaces}, {REGISTRY: interfaces} if trains else {}, [] if trains else counting[:1]
    )


def _kind(definition: Definition) -> tuple[bool, bool, bool]:
    return has_mask(definition), is_decode(definition), is_bidirectional(definition)


def _definition(found: ModuleGroup) -> Definition:
    assert found.match is not None, "only confirmed groups are patched"
    return found.match.definition


def sdpa_function(forward: Any) -> Any:
    """Return the function that an attention forward finds for ``sdpa`` in its registry; None if there is none."""
    registry = forward.__globals__.get(REGISTRY)
    if not hasattr(registry, "get_interface") or "get_interface" not in forward.__code__.co_names:
        return None
    return registry.get(SDPA)


class Interfaces:
    """A stand-in for the registry in a patched forward: the same functions, with ``served`` in place of ``stock``.

    It passes everything on to the registry while code is compiled, and for all other attention functions.
    """

    def __init__(
        self, registry: Any, name: str, stock: Function, served: Function, bypass: Callable[[str], None]
    ) -> None:
        """Wrap a registry.

        Args:
            registry: the registry that the forward names.
            name: the name of the function in a config.
            stock: the function that was probed.
            served: the function in its place.
            bypass: called with the reason when another function runs.
        """
        self._registry = registry
        self._name = name
        self._stock = stock
        self._served = served
        self._bypass = bypass

    def get_interface(self, attn_implementation: str, default: Function) -> Function:
        """Return the registry's function, or ``served`` in place of ``stock``."""
        found: Function = self._registry.get_interface(attn_implementation, default)
        if _is_compiling():
            return found
        if found is self._stock:
            return self._served
        self._bypass(
            f"the model's attention is {attn_implementation!r}; only {self._name!r} is known to compute a definition"
        )
        return found

    def __getitem__(self, name: str) -> Function:
        """Return the registry's function: other kinds of access get stock code."""
        function: Function = self._registry[name]
        return function

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the registry."""
        return getattr(self._registry, name)


def attention_function(stock: Function, sites: Sites) -> Function:
    """Return ``sdpa_attention_forward``: query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] -> ([B, Sq, Hq, D], None)."""

    read = other_options(stock)
    others = (*sorted(read), SINKS) if isinstance(read, frozenset) else (SINKS,)

    flags = itertools.product((False, True), repeat=3)
    by_flags = {
        (one, masked, causal): sites.site_of(is_one=one, is_masked=masked, is_causal=causal)
        for one, masked, causal in flags
    }

    def serve(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> Any:
        shape, mask, is_causal = query.shape, options.get("attention_mask"), options.get("is_causal")
        is_one = len(shape) == 4 and shape[2] == 1
        sees_no_later = states_causal(module) if is_causal is None else is_causal is not False
        site = by_flags[is_one, mask is not None, sees_no_later]
        if site is None or site.falls_back(module.training, query, key, value):
            return None
        takes_mask = site is sites.masked_prefill or site is sites.masked_decode
        sees_all = site is sites.bidirectional
        why = why_stock_with_mask if takes_mask else why_stock_bidirectional if sees_all else why_stock
        reason = why_other_values(key, value, two_widths=sites.two_widths) or why(module, query, key, options, others)
        if reason:
            site.bypass(reason)
            return None
        scaling = options.get("scaling")
        scale = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
        if takes_mask:
            return answer(site, module.training, query, key, value, whole_mask(mask, query, key), scale)
        if not is_one and not sees_all and key.shape[2] > query.shape[2]:
            # A static cache that is still empty: attention is causal from its start, so stock drops the other keys as well.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        return answer(site, module.training, query, key, value, scale)

    return served_or_stock(stock, serve)


def answer(site: CallSite, training: bool, *inputs: Any) -> torch.Tensor | None:
    """Return a kernel's outputs in the model's layout [B, Sq, Hq, D]; None if no kernel serves the call."""
    out = site.ask(training, *inputs)
    if out is None:
        return None
    laid_out: torch.Tensor = out.transpose(1, 2).contiguous()
    return laid_out


def served_or_stock(stock: Function, serve: Function) -> Function:
    """Return an attention function that runs ``serve(module, query, key, value, options)``, or ``stock`` if that returns None."""

    @functools.wraps(stock)
    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        # The mask comes fourth or by name; a caller with more positional arguments means another function.
        if len(args) <= 1:
            options = {"attention_mask": args[0], **kwargs} if args else kwargs
            out = serve(module, query, key, value, options)
            if out is not None:
                return out, None
        return stock(module, query, key, value, *args, **kwargs)

    return attention


def why_other_values(key: torch.Tensor, value: torch.Tensor, *, two_widths: bool = False) -> str:
    """Return the reason if values are not as many as keys, or as wide without ``two_widths``; empty if they are as expected."""
    if value.shape == key.shape:
        return SAME_WIDTH if two_widths else ""
    if value.shape[:-1] != key.shape[:-1]:
        return OTHER_VALUES
    if (value.shape[-1] != key.shape[-1]) == two_widths:
        return ""
    return SAME_WIDTH if two_widths else NARROW_VALUES


def why_stock(
    module: Any, query: torch.Tensor, key: torch.Tensor, options: Mapping[str, Any], others: Sequence[str] = ()
) -> str:
    """Return the reason if no Definition describes a call of ``sdpa_attention_forward`` without a mask; empty if one does.

    Stock code ignores all options that are not checked here. A window or a cache shows only in the mask. transformers omits the
    mask only if every query sees all keys, or all keys up to its own.

    Args:
        module: the attention module, which states how many query heads share a key head and if it is causal.
        others: the options that stock code reads and that no Definition knows.
    """
    if options.get("attention_mask") is not None:
        return MASKED
    reason = why_other_call(module, query, key, options, others)
    return reason or _why_not_causal(module, query.shape[2], key.shape[2], options.get("is_causal"))


def why_stock_bidirectional(
    module: Any, query: torch.Tensor, key: torch.Tensor, options: Mapping[str, Any], others: Sequence[str] = ()
) -> str:
    """Return the reason if no Definition describes a call whose positions see all keys; empty if one does.

    For arguments, see :func:`why_stock`.
    """
    if options.get("attention_mask") is not None:
        return MASKED
    is_causal = options.get("is_causal")
    if (states_causal(module) if is_causal is None else is_causal) is not False:
        return CAUSAL
    return why_other_call(module, query, key, options, others)


def why_stock_with_mask(
    module: Any, query: torch.Tensor, key: torch.Tensor, options: Mapping[str, Any], others: Sequence[str] = ()
) -> str:
    """Return the reason if no Definition describes a call with a mask; empty if one does. For arguments, see :func:`why_stock`.

    With a mask, stock code ignores causality.
    """
    reason = why_other_call(module, query, key, options, others)
    return reason or _why_other_mask(options["attention_mask"], query, key)


def _why_other_mask(mask: Any, query: torch.Tensor, key: torch.Tensor) -> str:
    if type(mask) is not torch.Tensor or mask.dtype != torch.bool:
        return NO_FLAGS
    wanted = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask.dim() != 4 or any(size not in (1, want) for size, want in zip(mask.shape[:3], wanted[:3], strict=True)):
        return OTHER_MASK
    if mask.shape[3] != wanted[3]:
        return OTHER_MASK
    return FEWER_KEYS if key.shape[2] < query.shape[2] else ""


def whole_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask [B or 1, 1, Sq or 1, Skv] as [B, 1, Sq, Skv], contiguous as it was measured."""
    return mask.expand(query.shape[0], 1, query.shape[2], key.shape[2]).contiguous()


def why_other_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, options: Mapping[str, Any], others: Sequence[str]
) -> str:
    """Return the reason if a call has options, heads or a scale of no Definition, whatever its mask is; empty if not.

    For arguments, see :func:`why_stock`.
    """
    if is_autocast(query):
        return AUTOCAST
    if options.get("dropout"):
        return DROPOUT
    if options.get("output_attentions"):
        return WEIGHTS
    for name in others:
        if options.get(name) is not None:
            return f"it has the argument {name}"
    if type(options.get("scaling")) not in (float, type(None)):
        return SCALE_IS_NO_NUMBER
    if query.dim() != 4 or key.dim() != 4:
        return NO_HEADS
    if query.shape[1] != key.shape[1] * getattr(module, "num_key_value_groups", 1):
        return OTHER_HEADS
    return ""


def _why_not_causal(module: Any, queries: int, keys: int, is_causal: Any) -> str:
    if queries == 1:  # a single query sees every key, so causality does not matter
        return ""
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is not True:
        return NOT_CAUSAL
    return FEWER_KEYS if keys < queries else ""


# ---- the function for scaled_dot_product_attention ------------------------------------------------
# Recognise the attention function of transformers that calls ``scaled_dot_product_attention``, in any release.
#
# Its structure shows the arguments and attributes that it reads. Calls of it on random tensors show that it computes the bits
# of PyTorch's own function for every kind of call that a kernel may serve.

Sdpa = torch.nn.functional.scaled_dot_product_attention

POSITIONAL = 5
"""The parameters of an attention function: module, query, key, value and mask."""
READ_OF_MODULE = {"num_key_value_groups", "is_causal", "layer_idx", "training"}
CHECKED = {"dropout", "scaling", "is_causal", "output_attentions"}
"""The options that a call site checks itself."""
HEAD_SIZE = 64
NO_SOURCE = "it is no plain function with a source"


def other_options(function: Any) -> frozenset[str] | str:
    """Return the further options that an attention function reads, or the reason if its structure is not the known one.

    A call with such an option is one that no Definition describes. All other options have no effect.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return NO_SOURCE
    return _options_in(function)


@once_per_function
def _options_in(function: FunctionType) -> frozenset[str] | str:
    found = read_options(function, READ_OF_MODULE)
    if isinstance(found, frozenset) and Sdpa.__name__ not in function.__code__.co_names:
        return f"it does not call {Sdpa.__name__}"
    return found


def read_options(function: Any, of_module: Collection[str]) -> frozenset[str] | str:
    """Return the further options that an attention function reads, or the reason if its structure hides what it reads.

    Args:
        of_module: the attributes of the module that it may read.
    """
    tree = parsed(function)
    if tree is None:
        return NO_SOURCE
    module, *others = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    rest = tree.args.kwarg.arg if tree.args.kwarg else ""
    if len(others) < POSITIONAL - 1 or tree.args.vararg:
        return "its parameters are not module, query, key, value and mask"
    options = {*others[POSITIONAL - 1 :]}
    for use in _uses(tree, module, rest):
        if use is None:
            return "it passes its module or its options on to other code"
        name, is_of_module = use
        if is_of_module and name not in of_module:
            return f"it reads {name} of its module"
        if not is_of_module:
            options.add(name)
    return frozenset(options - CHECKED)


def _uses(tree: ast.FunctionDef, module: str, rest: str) -> Iterator[tuple[str, bool] | None]:
    """Yield (name, True) for each attribute of the module that is read and (name, False) for each further option.

    Yields None for another use of the module or of the dictionary of further options.
    """
    explained: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name) as owner, attr=attribute) if name == module:
                explained.add(owner)
                yield attribute, True
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=name) as owner, ast.Constant(value=str(attribute)), *_],
            ) if name == module:
                explained.add(owner)
                yield attribute, True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name) as owner, attr="get" | "pop"),
                args=[ast.Constant(value=str(option)), *_],
            ) if name == rest:
                explained.add(owner)
                yield option, False
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="update"), keywords=keywords) if (
                owner != rest
            ):
                # A cache that is an option: a call with one is not served, whatever it reads.
                explained |= {keyword.value for keyword in keywords if isinstance(keyword.value, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in (module, rest) and node not in explained:
            yield None


def why_other_bits(
    function: Callable[..., Any], device: torch.device, *, with_mask: bool = False, is_causal: bool = True
) -> str:
    """Return the reason if an attention function computes other bits than PyTorch's; empty if it computes the same.

    The calls have one or two query heads per key head, one or more positions, more keys than queries, and a scale or none.
    ``with_mask`` gives all of them a mask of flags. ``is_causal`` is what the module states.
    """
    draw = Draw(device)
    for groups, queries, keys, scale in itertools.product((1, 2), (1, ROWS), (ROWS, 2 * ROWS), (None, SCALE)):
        query = draw(2, 2 * groups, queries, HEAD_SIZE)
        key, value = draw(2, 2, keys, HEAD_SIZE), draw(2, 2, keys, HEAD_SIZE)
        asking = types.SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal, training=False, layer_idx=0)
        with torch.no_grad():
            mask = drawn_mask(query, key) if with_mask else None
            try:
                found, _ = function(asking, query, key, value, mask, dropout=0.0, scaling=scale)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                return f"it raises {type(error).__name__} in a probe"
            want = _bits_of_pytorch(query, key, value, mask, scale, is_causal=is_causal)
        if not any(found.shape == one.shape and torch.equal(found, one) for one in want):
            called = f"{queries} queries, {keys} keys and {groups} query heads per key head"
            called += ", with a mask," if with_mask else ""
            return f"its bits for {called} are not those of {Sdpa.__name__}"
    return ""


def drawn_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return random flags [B, 1, Sq, Skv], True at what a position sees. Each position sees the first key at least."""
    flags = Draw(query.device)(query.shape[0], 1, query.shape[2], key.shape[2]) > 0
    flags[..., 0] = True
    return flags


def _bits_of_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    is_causal: bool,
) -> Iterator[Any]:
    """Yield the results of the ways in which PyTorch can share key heads."""
    groups, is_causal = query.shape[1] // key.shape[1], is_causal and query.shape[2] > 1 and mask is None
    if is_causal:  # from the first key on: a cache of fixed size that is still empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    yield Sdpa(query, key, value, **options, enable_gqa=groups > 1).transpose(1, 2)
    repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    yield Sdpa(query, *repeated, **options).transpose(1, 2)
    if mask is not None and query.shape[2] == 1:  # the query heads of a key head as rows of one product
        rows = query.reshape(query.shape[0], key.shape[1], groups, -1)
        yield Sdpa(rows, key, value, **options).reshape(query.shape).transpose(1, 2)
