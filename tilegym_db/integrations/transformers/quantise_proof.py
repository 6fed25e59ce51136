"""What FP8 does to a model's numbers, measured on a run of its own: each layer and the logits against fp64, beside bf16."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilegym_db.errors import UsageError
from tilegym_db.integrations.transformers.capture import PROMPT_TOKENS, ModelInputs, own_inputs, random_prompt
from tilegym_db.integrations.transformers.experts_wrapper import EAGER
from tilegym_db.integrations.transformers.foreign_errors import of_models
from tilegym_db.integrations.transformers.model_sizes import available_bytes
from tilegym_db.integrations.transformers.weight_reads import noticed_reads
from tilegym_db.verify.lifting import Lifted

__all__ = [
    "LARGEST_ERROR",
    "LARGEST_LOGITS_ERROR",
    "LayerInput",
    "LayerProof",
    "LogitsProof",
    "Recorded",
    "prove_layer",
    "prove_logits",
    "record",
]

LARGEST_ERROR = 0.1
"""Relative, of a layer's output. A value of normal size is off by 1/16 at most; what is further off is not described by codes."""
LARGEST_LOGITS_ERROR = 0.5
"""Relative, of the logits: half of their size. The codes of each layer alone put it off by hundredths; what is off by so much has
taken codes for numbers somewhere, or enlarges small errors so far that its answers are mostly error."""
NOT_CALLED = "the run did not call it, so that nothing is known of its error"
BYTES_OF_A_COPY = 10
"""A number of the fp64 copy takes eight, and two while it is copied."""

Module = torch.nn.Module


@dataclass(frozen=True)
class LayerProof:
    """Relative Frobenius errors of one layer's output against fp64, on what the model's own run gave it.

    ``fp8_error`` is that of the layer as it is served, ``bf16_error`` that of the layer as it was. ``reason`` says why the layer
    was given its own weight back; empty where it stays quantised.
    """

    name: str
    shape: tuple[int, int]
    tokens: int
    fp8_error: float | None
    bf16_error: float | None
    reason: str = ""


@dataclass(frozen=True)
class LogitsProof:
    """Relative Frobenius errors of the logits against a copy of the model in fp64.

    In that copy every cast of the model's code to a narrower dtype is one to fp64, and experts run one after the other.
    ``same_choice`` is the share of positions at which fp8 and bf16 have the same largest logit, ``difference`` how far the one is
    from the other. ``reason`` says why there is no copy; the errors are None then.
    """

    tokens: int
    difference: float
    same_choice: float
    fp8_error: float | None = None
    bf16_error: float | None = None
    reason: str = ""

    @property
    def why_refused(self) -> str:
        """Why a model that gives these logits must not be served; empty where it may."""
        against, off = ("bf16", self.difference) if self.fp8_error is None else ("fp64", self.fp8_error)
        if off <= LARGEST_LOGITS_ERROR:
            return ""
        return f"the logits are off by {off:.3g} against {against}; at most {LARGEST_LOGITS_ERROR:g} is taken"


class LayerInput(NamedTuple):
    """What a model gave a layer at its first call: some of the rows, [at most 128, K], and how many there were."""

    x: torch.Tensor
    rows: int


@dataclass(frozen=True)
class Recorded:
    """A run of a model as it is.

    What was given to it and to each layer by name, which layers' weights were read outside of the layers, its logits, and those
    in fp64 or why there are none.
    """

    given: Mapping[str, Any]
    of_layers: Mapping[str, LayerInput]
    read: frozenset[str]
    logits: torch.Tensor
    exact: torch.Tensor | str


def record(model: Module, layers: Mapping[str, Module], inputs: ModelInputs | None) -> Recorded:
    """Run a model as it is, and a copy of it in fp64 where one fits into memory.

    Args:
        model: in eval mode.
        layers: whose inputs to keep, 128 rows of each at most.
        inputs: what to run; random token ids by default.

    Raises:
        UsageError: there are no inputs, and the model states no vocabulary to draw random token ids from; an input cannot be
            copied for each run; the model returns no tensor.
    """
    first = random_prompt(model, 1, PROMPT_TOKENS) if inputs is None else inputs
    given = {"input_ids": first} if isinstance(first, torch.Tensor) else dict(first)
    kept: dict[str, LayerInput] = {}
    with _keeping(layers, kept), noticed_reads(layers) as read:
        logits = _logits(model, given)
    return Recorded(given, kept, frozenset(read), logits, _exact_logits(model, given))


@contextlib.contextmanager
def _keeping(layers: Mapping[str, Module], kept: dict[str, LayerInput]) -> Iterator[None]:
    def keep(name: str, module: Module, args: tuple[Any, ...]) -> None:
        if name not in kept and args and isinstance(args[0], torch.Tensor) and args[0].numel():
            rows = args[0].detach().reshape(-1, args[0].shape[-1])
            kept[name] = LayerInput(rows[:PROMPT_TOKENS].clone(), rows.shape[0])

    with contextlib.ExitStack() as undo:
        for name, module in layers.items():
            hook = module.register_forward_pre_hook(lambda module, args, name=name: keep(name, module, args))
            undo.callback(hook.remove)
        yield


def _logits(model: Module, given: Mapping[str, Any]) -> torch.Tensor:
    """What a model returns first, or as its logits.

    Raises:
        UsageError: that is no tensor of numbers.
    """
    with torch.no_grad():
        out = model(**own_inputs(given))
    found = getattr(out, "logits", None)
    if found is None:
        ordered = list(out.values()) if isinstance(out, Mapping) else out
        found = ordered[0] if isinstance(ordered, (list, tuple)) and ordered else ordered
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.dim():
        raise UsageError(
            f"{type(model).__name__} returns a {type(out).__name__} without logits, whose first value is no tensor of numbers: "
            "there is nothing to hold FP8 against. Pass a model that returns a tensor first.",
            code="logits_absent",
        )
    return found.detach().clone()


def _exact_logits(model: Module, given: Mapping[str, Any]) -> torch.Tensor | str:
    numbers = sum(parameter.numel() for parameter in model.parameters())
    device = str(next(model.parameters()).device)
    free = available_bytes(device)
    if BYTES_OF_A_COPY * numbers > free:
        return f"a copy in fp64 takes {BYTES_OF_A_COPY * numbers / 1e9:,.1f} GB, and {device} has {free / 1e9:,.1f} GB free"
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    lifted: Any = Lifted
    try:
        exact: Any = copy.deepcopy(model).double()
        if hasattr(getattr(exact, "config", None), "_experts_implementation"):
            exact.set_experts_implementation(EAGER)  # grouped products take no fp64
        with lifted():
            return _logits(exact, wide)
    except of_models() as error:  # anyone's code, in a dtype it may not take
        return f"it does not run in fp64: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def prove_layer(name: str, module: Module, original: torch.Tensor, given: LayerInput | None) -> LayerProof:
    """The errors of a quantised layer as it is served, and of the layer as it was.

    The layer runs on as many rows as the model gave it, since how many there are decides what serves it: those that were kept,
    over and over. Of the errors of each repetition the largest counts.

    Args:
        name: of the layer.
        module: quantised, and patched as it will be.
        original: the weight [N, K] that it had.
        given: what the model gave it; None where the run did not call it.
    """
    shape = (original.shape[0], original.shape[1])
    if given is None:
        return LayerProof(name, shape, 0, None, None, NOT_CALLED)
    x = given.x
    weight, bias = original.detach().to(x.device), module._parameters.get("bias")
    with torch.no_grad():
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = module(x.repeat(-(-given.rows // len(x)), 1)[: given.rows])
        starts = [*range(0, given.rows - len(x), len(x)), given.rows - len(x)]
        fp8 = max(_error(found[start:][: len(x)], exact.roll(-start, 0)) for start in starts)
        bf16 = _error(torch.nn.functional.linear(x, weight, bias), exact)
    reason = "" if fp8 <= LARGEST_ERROR else f"its output is off by {fp8:.3g}; at most {LARGEST_ERROR:g} is taken"
    return LayerProof(name, shape, x.shape[0], fp8, bf16, reason)


def prove_logits(model: Module, recorded: Recorded) -> LogitsProof:
    """The errors of the logits of a quantised model, on the run that was recorded before."""
    found, stock, exact = _logits(model, recorded.given), recorded.logits, recorded.exact
    tokens = stock.numel() // max(1, stock.shape[-1])
    same = (found.argmax(dim=-1) == stock.argmax(dim=-1)).double().mean()
    difference = _error(found, stock.double())
    if isinstance(exact, str):
        return LogitsProof(tokens, difference, float(same), reason=exact)
    return LogitsProof(tokens, difference, float(same), _error(found, exact), _error(stock, exact))


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative; NaN or infinite values are infinitely far off."""
    size = float(torch.linalg.vector_norm(exact))
    off = float(torch.linalg.vector_norm(found.double() - exact))
    if off != off or off == float("inf"):
        return float("inf")
    return off / size if size else off
