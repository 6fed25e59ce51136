"""The head of a language model and its loss as one call, in training, for callers that do not read the logits.

The patched class runs the forward of stock. While it trains with labels, the attribute of the head gives an object whose call
makes no logits: it returns a tensor that stands for them. The loss function asks for a kernel with the hidden states and the
weight. It gets the loss and both gradients, and the backward scales them. Any other use of that tensor computes the logits by
the head itself, and the loss is then that of stock. So a soft cap, a scale or another loss function gives the results of stock.

A frozen head, as with LoRA, has another Definition, because the gradient of the weight is a third of the work. Which of the
two a model asks for is decided at patch time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tilegym_db.errors import UsageError
from tilegym_db.models.call_site import NOT_PLAIN, NOT_ROWS, CallSite, has_hooks, is_autocast, rows
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    MemberOverrides,
    ModuleGroup,
    PartCall,
    names_in_code,
)
from tilegym_db.models.parts import loss as loss_part
from tilegym_db.models.parts.loss import IGNORED, ITEMS, OTHER_ARGUMENTS, OTHER_LOSS, PROPERTY, SHIFTED, loss_of
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of

KIND = "head_loss"
AFTER = ("loss",)
OPTION = "skip_logits"
"""The option of a patch that states that the outputs of training need no logits."""
LABELS = "labels"
CLOSE = 2.0**-7
"""Relative error of the probe's gradients, which are rounded to bf16 in another order."""

NO_DEFINITION = "no definition computes the loss of a {} head"
NO_PLAIN_HEAD = "its head is a {}, no plain linear layer"
HAS_BIAS = "its head has a bias"
EVALUATION = "the model is in evaluation, where its output has logits"
NO_GRADIENT = "no gradient is recorded"
NOTHING_TRAINED = "the hidden states need no gradient, and kernels compute it"
FROZEN_SINCE = "the weight of the head needs no gradient, unlike at patch time: unpatch() and patch() again"
TRAINED_SINCE = "the weight of the head needs a gradient, unlike at patch time: unpatch() and patch() again"
OF_WEIGHT = "grad_weight"
"""The output that the Definition for a frozen head lacks."""
OTHER_HEAD = "its head has hooks, was replaced, or has no plain weight"
SCALED_LATER = "gradients in float16 are scaled after a kernel would have rounded them"
OTHER_DTYPES = "the hidden states and the weight have different dtypes"
CHANGED = "the forward reads or changes the logits before the loss"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the groups of the loss whose modules also call the head, by the attribute that they call it by."""
    for group in others:
        name = _name_of_head(group.modules[0]) if group.kind == loss_part.KIND and not group.reason else ""
        if name:
            yield ModuleGroup(KIND, group.module_class, group.modules, name, group.samples)


def _name_of_head(module: Any) -> str:
    """Return the attribute of a module that is the head of the model; empty if its forward does not call one."""
    ask = getattr(module, "get_output_embeddings", None)
    head = None if ask is None else ask()
    names = names_in_code(type(module).forward)
    return next((name for name, child in module.named_children() if child is head and name in names), "")


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the loss function for a head that is trained or frozen; it must be a linear layer without a bias."""
    head = found.modules[0]._modules[found.function]
    if type(head) is not torch.nn.Linear:
        return NO_PLAIN_HEAD.format(type(head).__name__)
    if head.bias is not None:
        return HAS_BIAS
    known_ones = loss_part.known_loss(KIND, loss_of(found.modules[0]), known)
    if isinstance(known_ones, str):
        return known_ones
    is_trained = head.weight.requires_grad
    fitting = [match for match in known_ones.matches if (OF_WEIGHT in match.definition.outputs) == is_trained]
    return MatchCandidates(fitting) if fitting else NO_DEFINITION.format("trained" if is_trained else "frozen")


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a product and the loss function on a few random tokens, with the gradients of both factors."""
    function = loss_of(module)
    # A caller may patch in inference mode, whose tensors have no gradients.
    with torch.inference_mode(False), torch.enable_grad():
        draw = Draw(device_of(module))
        hidden, weight = draw(1, ROWS, SIZE), draw(SIZE, SIZE) / SIZE**0.5
        labels = draw(SIZE).float().argsort()[None, :ROWS]
        labels[0, 1] = IGNORED
        given = [value.clone().requires_grad_() for value in (hidden, weight)]
        logits = torch.nn.functional.linear(*given)
        total = function(logits=logits, labels=labels, vocab_size=SIZE, num_items_in_batch=ITEMS)
        of_hidden, of_weight = torch.autograd.grad(total, given)
    is_next = SHIFTED in inspect.signature(function).parameters
    targets = loss_part.targets_of(labels, IGNORED) if is_next else labels.reshape(-1)
    factors = torch.full((ROWS,), 1 / ITEMS, device=hidden.device)
    inputs = {"hidden": hidden[0], "weight": weight, "labels": targets, "grad_loss": factors, "ignore_index": IGNORED}
    found_by_both = (total.detach(), of_hidden[0], of_weight)
    return inputs, found_by_both[: len(match.definition.outputs)]


def AGREES(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the losses of tokens add up to that of the probe, and the gradients differ by roundings only."""
    if len(expected) != len(returned):
        return False
    wanted = (expected[0].sum() / ITEMS, *expected[1:])
    return all(
        found.shape == want.shape
        and found.dtype == want.dtype
        and bool((found.double() - want.double()).norm() <= CLOSE * want.double().norm())
        for found, want in zip(returned, wanted, strict=True)
    )


def forward(stock: Any, calls: Sequence[PartCall]) -> MemberOverrides:
    """Return a forward that drops the logits of training, and the two attributes through which it finds head and loss."""
    ((found, site),) = calls
    base: Any = found.module_class
    name, own = found.function, getattr(base, PROPERTY)
    function, stated = loss_of(found.modules[0]), getattr(type(found.modules[0]), PROPERTY)
    is_frozen = found.match is not None and OF_WEIGHT not in found.match.definition.outputs
    signature, places = inspect.signature(function), list(inspect.signature(stock).parameters)[1:]
    labels_at = places.index(LABELS) if LABELS in places else len(places)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[labels_at] if len(args) > labels_at else kwargs.get(LABELS)
        if _is_compiling() or labels is None or not _may_skip(site, self):
            return stock(self, *args, **kwargs)
        with _opened(_Scope(self, site, is_frozen)) as scope:
            output = stock(self, *args, **kwargs)
        return scope.without_logits(output)

    def attribute(self: Any, asked: str) -> Any:
        value = base.__getattr__(self, asked)
        if asked != name or _is_compiling():
            return value
        scope = _scope_of(self)
        return value if scope is None else _Head(value, scope)

    def get(self: Any) -> Callable[..., Any]:
        inner: Callable[..., Any] = own.__get__(self)
        scope = None if _is_compiling() else _scope_of(self)
        if scope is None:
            return inner
        if stated.__get__(self) is not function:
            site.bypass(OTHER_LOSS)
            return inner
        return functools.partial(_loss, scope, inner, signature)

    members = {"forward": forward, "__getattr__": attribute, PROPERTY: property(get, own.fset, own.fdel, own.__doc__)}
    return MemberOverrides(members)


def _may_skip(site: CallSite, module: Module) -> bool:
    """Return True if a call with labels trains the model, so that its output needs no logits."""
    if not module.training:
        site.bypass(EVALUATION)
    elif not torch.is_grad_enabled():
        site.bypass(NO_GRADIENT)
    else:
        return True
    return False


# ---- one forward ----------------------------------------------------------------------------------


class _Scope:
    """One forward of a model in training: it has made logits that nothing has computed yet."""

    def __init__(self, module: Module, site: CallSite, is_frozen: bool) -> None:
        self.module, self.site, self.is_frozen = module, site, is_frozen
        self.is_served = self.is_deferred = False

    def head(self, head: Any, hidden: Any) -> Any:
        """Return a tensor that stands for the logits, or the logits themselves if no kernel can serve their loss."""
        reason = _why_not(head, hidden, self.is_frozen)
        if reason:
            self.site.bypass(reason)
            return head(hidden)
        if self.site.falls_back(False, hidden.detach()):
            return head(hidden)
        self.is_deferred = True
        return Deferred(head, hidden)

    def loss(self, logits: Deferred, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the loss by a kernel, or None if stock code must compute it."""
        hidden, weight = rows(logits.hidden), logits.head.weight
        assert hidden is not None, "the head has looked at it"
        if logits.was_read:
            self.site.bypass(CHANGED)
            return None
        targets = loss_part.targets_given(self.site, given, len(hidden), len(weight), hidden.device)
        if targets is None:
            return None
        if is_autocast(hidden):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        learned = targets != given["ignore_index"]
        count = loss_part.count_of(learned, given["num_items_in_batch"])
        with torch.no_grad():
            # If no token is learned, the count is 0: no factor that a kernel reads may be infinite.
            factors = torch.where(learned, torch.ones((), device=hidden.device) / count, 0.0)
            made = self.site.ask(False, hidden.detach(), weight.detach(), targets, factors, given["ignore_index"])
            if made is None:
                return None
            losses, of_hidden, of_weight = (*made, None) if self.is_frozen else made
            total = (losses * learned).sum() / count
        self.is_served = True
        found: torch.Tensor = _Loss.apply(hidden, weight, total, of_hidden, of_weight)
        return found

    def without_logits(self, output: Any) -> Any:
        """Return an output without the logits that nothing has computed; a tuple keeps them, because places count there."""
        if isinstance(output, dict) and dataclasses.is_dataclass(output):
            fields: Any = dict(output)
            if not any(isinstance(value, Deferred) for value in fields.values()):
                return output
            kept = {key: self._field(value) for key, value in fields.items()}
            return type(output)(**kept)
        return tuple(map(_made, output)) if type(output) is tuple else output

    def _field(self, value: Any) -> Any:
        return None if self.is_served and isinstance(value, Deferred) else _made(value)


def _why_not(head: Any, hidden: Any, is_frozen: bool) -> str:
    """Return the reason for a head to compute its logits; empty if a kernel may compute the loss in place of them."""
    if type(head) is not torch.nn.Linear or head.bias is not None or has_hooks(head):
        return OTHER_HEAD
    if type(hidden) is not torch.Tensor:
        return NOT_PLAIN
    if type(head.weight) is not torch.nn.Parameter or head.weight.device != hidden.device:
        return OTHER_HEAD
    if not hidden.requires_grad:
        return NOTHING_TRAINED
    if head.weight.requires_grad == is_frozen:
        return TRAINED_SINCE if is_frozen else FROZEN_SINCE
    computed_in = torch.get_autocast_dtype(hidden.device.type) if is_autocast(hidden) else hidden.dtype
    if computed_in == torch.float16:
        return SCALED_LATER
    if not is_autocast(hidden) and head.weight.dtype != hidden.dtype:
        return OTHER_DTYPES
    return "" if rows(hidden) is not None else NOT_ROWS


def _loss(
    scope: _Scope, inner: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return the loss of a model for the arguments of its loss function ``inner``, by a kernel if one serves it."""
    logits = next((value for value in (*args, *kwargs.values()) if isinstance(value, Deferred)), None)
    if logits is None:
        if scope.is_deferred:
            scope.site.bypass(CHANGED)
        found: torch.Tensor = inner(*args, **kwargs)
        return found
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        scope.site.bypass(OTHER_ARGUMENTS)
    else:
        given.apply_defaults()
        served = scope.loss(logits, given.arguments)
        if served is not None:
            return served
    stock: torch.Tensor = inner(*map(_made, args), **{name: _made(value) for name, value in kwargs.items()})
    return stock


_current = threading.local()


@contextlib.contextmanager
def _opened(scope: _Scope) -> Iterator[_Scope]:
    """Let head and loss of one module find the scope inside a ``with`` block, in this thread alone."""
    outer = getattr(_current, "scope", None)
    _current.scope = scope
    try:
        yield scope
    finally:
        _current.scope = outer


def _scope_of(module: Module) -> _Scope | None:
    scope: _Scope | None = getattr(_current, "scope", None)
    return scope if scope is not None and scope.module is module else None


class _Head:
    """An object that a forward finds in place of its head: a call may return a :class:`Deferred`; all else is the head's."""

    def __init__(self, head: Module, scope: _Scope) -> None:
        self._head, self._scope = head, scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._scope.head(self._head, *args) if len(args) == 1 and not kwargs else self._head(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class Deferred(torch.Tensor):
    """A tensor that stands for the logits of a head: any use of it computes them, once, and counts as a read.

    Attributes:
        head: the linear layer.
        hidden: its argument [..., H].
        was_read: True once code has used the logits, and may have changed them in place.
    """

    head: Any
    hidden: torch.Tensor
    was_read: bool
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, head: Any, hidden: torch.Tensor) -> Deferred:
        """Keep the head and its argument; nothing is computed."""
        made: Deferred = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.head, made.hidden, made.was_read, made._value = head, hidden, False, None
        return made

    def made(self) -> torch.Tensor:
        """Return the logits, as the head computes them."""
        self.was_read = True
        if self._value is not None:
            return self._value
        value: torch.Tensor = self.head(self.hidden)
        if torch.is_grad_enabled():  # without, a later use would lack its gradient
            self._value = value
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any operation of PyTorch on the logits themselves."""
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


def _made(value: Any) -> Any:
    return value.made() if isinstance(value, Deferred) else value


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known: ``apply(hidden, weight, loss, gradient of hidden, gradient of weight)``.

    The last one is None for a frozen weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, total: Any, of_hidden: Any, of_weight: Any) -> Any:
        """Return the loss, and keep the gradients for a loss whose own gradient is 1."""
        ctx.save_for_backward(*(one for one in (of_hidden, of_weight) if one is not None))
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients, scaled by that of the loss; they cannot be differentiated again."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a loss that was computed without logits has no second derivative. Leave out create_graph, or patch without "
                "skip_logits.",
                code="second_derivative_absent",
            )
        scaled = [_scaled(one, grads[0]) for one in ctx.saved_tensors]
        return (*scaled, *[None] * (5 - len(scaled)))


def _scaled(gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return a gradient times a float32 number, rounded once; a factor of one changes no bit."""
    # A tensor of no dimension would be rounded to the dtype of the gradient first.
    return torch.mul(gradient, by.reshape(1), out=torch.empty_like(gradient))
