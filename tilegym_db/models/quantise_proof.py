"""What FP8 does to a model's numbers, measured on a run of its own: each layer and the logits against fp64, beside bf16."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilegym_db.errors import UsageError
from tilegym_db.models.capture import PROMPT_TOKENS, ModelInputs, own_inputs, random_prompt
from tilegym_db.models.random_model import available_bytes
from tilegym_db.models.upstream_code import EAGER, of_models
from tilegym_db.verification.oracle import Lifted

if TYPE_CHECKING:
    from rich.table import Table


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
    was given its own weight back; empty if it stays quantised.
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
        """Why a model that gives these logits must not be served; empty if it may."""
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
    """Return the errors of a quantised layer as it is served, and of the layer as it was.

    The layer runs on as many rows as the model gave it, since how many there are decides what serves it: those that were kept,
    over and over. Of the errors of each repetition the largest counts.

    Args:
        name: of the layer.
        module: quantised, and patched as it will be.
        original: the weight [N, K] that it had.
        given: what the model gave it; None if the run did not call it.
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
    """Return the errors of the logits of a quantised model, on the run that was recorded before."""
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


# ---- quantise report ------------------------------------------------------------------------------
# What quantising a model did to its numbers and to its memory, as data and as text.

MIB = 2**20


@dataclass(frozen=True)
class QuantisationReport:
    """What ``patch(model, quantise="fp8")`` did.

    ``layers`` has a proof for each layer that was tried, those with a ``reason`` among them, which have their own weight again.
    ``skipped`` says of every other linear layer, and of experts, why they are not. Bytes are those of the model's parameters and
    buffers: ``bytes_held`` are kept in the memory of the CPU, so that unpatch() can put the parameters back.
    """

    way: str
    layers: tuple[LayerProof, ...]
    skipped: Mapping[str, str]
    logits: LogitsProof
    bytes_before: int
    bytes_after: int
    bytes_held: int

    @property
    def quantised(self) -> tuple[str, ...]:
        """The layers that compute with codes now."""
        return tuple(proof.name for proof in self.layers if not proof.reason)

    def summary(self) -> str:
        """In sentences."""
        proof, count = self.logits, len(self.quantised)
        told = f" ({proof.reason})" if proof.reason else ""
        lines = [
            f"quantise={self.way!r} changes this model's numbers: {count} linear layers compute with FP8 codes, activations with "
            "a scale for 128 channels and weights with one for 128 x 128 values.",
            f"Logits of {proof.tokens} positions against fp64: off by {_shown(proof.fp8_error)} in fp8, by "
            f"{_shown(proof.bf16_error)} in bf16{told}. The two differ by {_shown(proof.difference)} and choose the same token "
            f"at {proof.same_choice:.1%} of the positions.",
            f"Parameters and buffers take {self.bytes_after / MIB:,.1f} MiB, before {self.bytes_before / MIB:,.1f} MiB. "
            f"To undo it, {self.bytes_held / MIB:,.1f} MiB are held in the memory of the CPU.",
        ]
        kept = Counter([reason for _, reason in sorted(self.skipped.items())])
        kept.update(proof.reason for proof in self.layers if proof.reason)
        lines += [f"Left as they are ({number}): {reason}." for reason, number in kept.items()]
        return "\n".join(lines)

    def table(self) -> Table:
        """For a terminal: one row for each kind of layer, with the largest errors of its layers."""
        from rich.table import Table

        table = Table(title="quantised layers: largest relative error of their outputs against fp64")
        for heading in ("layer", "weight", "layers", "fp8", "bf16"):
            table.add_column(heading, justify="left" if heading == "layer" else "right")
        kinds: dict[tuple[str, tuple[int, int]], list[LayerProof]] = {}
        for proof in self.layers:
            if not proof.reason:
                kinds.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", proof.name), proof.shape), []).append(proof)
        for (name, (rows, columns)), proofs in kinds.items():
            errors = [max(value or 0.0 for value in one) for one in zip(*map(_errors, proofs), strict=True)]
            table.add_row(name, f"{rows} x {columns}", str(len(proofs)), *map(_shown, errors))
        return table


def _errors(proof: LayerProof) -> tuple[float | None, float | None]:
    return proof.fp8_error, proof.bf16_error


def _shown(error: float | None) -> str:
    return "an unknown amount" if error is None else f"{error:.3g}"


# ---- weight reads ---------------------------------------------------------------------------------
# Notices which linear layers' weights a model's code reads outside of the layers' own forward.
#
# Such code (``x.to(self.fc.weight.dtype)``, ``x @ fc.weight``, ``next(self.parameters())``) would take codes for
# numbers.

WEIGHT = "weight"


class _Noticing(dict[str, Any]):
    """The parameters of a module, telling of every way to get at the weight; attributes and ``parameters()`` come by here."""

    def __init__(self, own: Mapping[str, Any], tell: Callable[[], None]) -> None:
        super().__init__(own)
        self._tell = tell

    def __getitem__(self, name: str) -> Any:
        if name == WEIGHT:
            self._tell()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name == WEIGHT:
            self._tell()
        return super().get(name, default)

    def items(self) -> Any:
        self._tell()
        return super().items()

    def values(self) -> Any:
        self._tell()
        return super().values()


@contextlib.contextmanager
def noticed_reads(layers: Mapping[str, Module]) -> Iterator[set[str]]:
    """While it lasts, gather the names of those layers whose weight is read while their own forward does not run.

    Args:
        layers: by name; hooks that they have count as the model's code. Afterwards they are as they were.
    """
    read: set[str] = set()
    with contextlib.ExitStack() as undo:
        for name, module in layers.items():
            _notice(name, module, read, undo)
        yield read


def _notice(name: str, module: Module, read: set[str], undo: contextlib.ExitStack) -> None:
    own: dict[str, Any] = module._parameters
    running: list[bool] = []
    watched = _Noticing(own, lambda: None if running else read.add(name))

    def restore() -> None:
        own.clear()
        own.update(dict.items(watched))  # what the model's code assigned meanwhile stays
        vars(module)["_parameters"] = own

    # The last to run before the forward, and the first after it.
    begin = module.register_forward_pre_hook(lambda *_: running.append(True))
    undo.callback(begin.remove)
    end = module.register_forward_hook(lambda *_: running.clear(), prepend=True, always_call=True)
    undo.callback(end.remove)
    vars(module)["_parameters"] = watched
    undo.callback(restore)
