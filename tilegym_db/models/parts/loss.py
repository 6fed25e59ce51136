"""The loss of a language model: cross entropy over its vocabulary, of the next token or of masked ones.

The forward of such a model takes its loss function from a property of its class. The patched class has another property of this
name. Its function asks for the loss of each token, and adds up as stock code does. So the backward of a kernel writes the
gradient of the logits, and no logits are kept in float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import NOT_PLAIN, NOT_ROWS, CallSite, rows
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    MemberOverrides,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    names_in_code,
    of_class,
)
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of

KIND = "loss"
PROPERTY = "loss_function"
SHIFTED = "shift_labels"
"""The argument of a loss of the next token for labels that are already shifted; a loss without it does not shift."""
IGNORED = -100
ITEMS = 3
"""Number of tokens that the probe divides by in place of the learned ones."""
CLOSE = 1e-5

OTHER_LOSS = "the model has another loss function than at patch time"
OTHER_ARGUMENTS = "the loss is called with other arguments than those of transformers"
OTHER_VOCABULARY = "its vocabulary is not the last axis of the logits"
OTHER_LABELS = "its labels are not one whole number of 64 bits for each token"

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward takes its loss from the property of transformers and that state which loss it is."""
    asks = of_class(lambda cls: isinstance(getattr(cls, PROPERTY, None), property) and _names_it(cls))
    modules = []
    for module in model.modules():
        if asks(module) and (hasattr(module, f"_{PROPERTY}") or getattr(module, "loss_type", None)):
            function = loss_of(module)
            name = getattr(function, "__name__", type(function).__name__)
            modules.append(ModuleOfPart(module, key=function, function=name))
    return grouped(KIND, modules)


def _names_it(cls: type[Module]) -> bool:
    return PROPERTY in names_in_code(cls.forward)


def loss_of(module: Module) -> Function:
    """Return the loss function of a model."""
    function: Function = getattr(module, PROPERTY)
    return function


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the loss function."""
    return known_loss(KIND, loss_of(found.modules[0]), known)


def known_loss(part: str, function: Any, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions of a part that state a loss function, or the reason if there is no such Definition."""
    named = f"its loss {getattr(function, '__name__', type(function).__name__)}"
    matches = known.look_up(part, function, getattr(function, "__globals__", {}), named, {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the loss function on a few random tokens, once over the learned tokens and once over a given number of them."""
    function, draw = loss_of(module), Draw(device_of(module))
    logits = draw(1, ROWS, SIZE)
    labels = draw(SIZE).float().argsort()[None, :ROWS]
    labels[0, 1] = IGNORED
    with torch.no_grad():
        mean = function(logits=logits, labels=labels, vocab_size=SIZE)
        total = function(logits=logits, labels=labels, vocab_size=SIZE, num_items_in_batch=ITEMS)
    targets = targets_of(labels, IGNORED) if SHIFTED in inspect.signature(function).parameters else labels.reshape(-1)
    return {"logits": logits[0], "labels": targets, "ignore_index": IGNORED}, (mean, total)


def AGREES(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the losses of tokens add up to the two results of the probe; the order of additions is not fixed."""
    if not expected:
        return False
    losses = expected[0].double()
    wanted = (losses.sum() / (losses != 0).sum(), losses.sum() / ITEMS)
    return all(
        found.dim() == 0 and found.dtype == torch.float32 and abs(float(found) - float(want)) <= CLOSE * float(want)
        for found, want in zip(returned, wanted, strict=True)
    )


def targets_of(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the label of the next token for each token [M]; the last token of a sequence has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index).reshape(-1)


def forward(stock: Any, calls: Sequence[PartCall]) -> MemberOverrides:
    """Return the property from which a forward takes its loss function."""
    ((found, site),) = calls
    function, own = loss_of(found.modules[0]), getattr(found.module_class, PROPERTY)
    served = loss_function(function, site)

    def get(self: Any) -> Function:
        now: Function = own.__get__(self)
        if _is_compiling():
            return now
        if now is not function:
            site.bypass(OTHER_LOSS)
            return now
        return functools.partial(served, self)

    return MemberOverrides({PROPERTY: property(get, own.fset, own.fdel, own.__doc__)})


def loss_function(stock: Function, site: CallSite) -> Function:
    """Return ``loss(module, *args, **kwargs)`` with the arguments of ``stock``: logits [..., V] and labels [...] -> a number."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def loss(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = None
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            site.bypass(OTHER_ARGUMENTS)
        if given is not None:
            given.apply_defaults()
            found = _served(site, module, given.arguments)
            if found is not None:
                return found
        return stock(*args, **kwargs)

    return loss


def _served(site: CallSite, module: Any, given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the loss by a kernel, or None if stock code must compute it."""
    logits, ignore_index = given["logits"], given["ignore_index"]
    if not isinstance(logits, torch.Tensor):
        site.bypass(NOT_PLAIN)
        return None
    if site.falls_back(module.training, logits):
        return None
    matrix = rows(logits)
    if matrix is None:
        site.bypass(NOT_ROWS)
        return None
    targets = targets_given(site, given, len(matrix), matrix.shape[1], logits.device)
    found = None if targets is None else site.ask(module.training, matrix, targets, ignore_index)
    if targets is None or found is None:
        return None
    learned = targets != ignore_index
    # The product makes the gradient of the losses a whole tensor: that of a sum alone is one number, expanded.
    mean: torch.Tensor = (found[0] * learned).sum() / count_of(learned, given["num_items_in_batch"])
    return mean


def targets_given(
    site: CallSite, given: Mapping[str, Any], tokens: int, vocabulary: int, device: torch.device
) -> torch.Tensor | None:
    """Return the label of each token [tokens] from the arguments of a loss, or None, counted, if stock code must take them."""
    shifted, ignore_index = given.get(SHIFTED), given["ignore_index"]
    labels = given["labels"] if shifted is None else shifted
    if vocabulary != given["vocab_size"]:
        site.bypass(OTHER_VOCABULARY)
        return None
    is_plain = type(labels) is torch.Tensor and labels.dtype == torch.int64 and type(ignore_index) is int
    if not is_plain or labels.numel() != tokens:
        site.bypass(OTHER_LABELS)
        return None
    is_next = SHIFTED in given and shifted is None
    return (targets_of(labels, ignore_index) if is_next else labels.reshape(-1)).to(device)


def count_of(learned: torch.Tensor, items: Any) -> Any:
    """Return what a sum of losses is divided by: the given number of items, or that of the learned tokens [M]."""
    if items is None:
        return learned.sum()
    return items.to(learned.device) if isinstance(items, torch.Tensor) else items
