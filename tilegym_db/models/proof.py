"""Verify a patch on the model's own numbers: the error of a kernel may exceed that of stock code only by a factor.

Kernel and stock code run on the same captured inputs, and both are compared with the Definition's reference in fp64. The
verification of a Solution does the same on drawn contents; here the contents, sizes and strides are those of this model.
"""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilegym_db.errors import TilegymDBError, UsageError
from tilegym_db.models.capture import PROMPT_TOKENS, CapturedCall, ModelInputs, copied, own_inputs, random_prompt
from tilegym_db.models.random_model import available_bytes
from tilegym_db.models.upstream_code import EAGER, of_models
from tilegym_db.records import Definition
from tilegym_db.records.call import Call, bind_call
from tilegym_db.records.definition import LIMITS
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import Allocate
from tilegym_db.verification.comparison import check_outputs, followed
from tilegym_db.verification.gates import ReferenceDeviation, relative_error
from tilegym_db.verification.oracle import Lifted, oracle

if TYPE_CHECKING:
    from rich.table import Table

ALLOWED_FACTOR = 2.0
"""Largest ratio of a kernel's error to that of stock code. Honest kernels round no more often than stock and stay near 1."""

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Proof:
    """The result of one captured call. Errors are relative Frobenius norms against fp64, of the worst output.

    ``kernel`` is None if stock code serves such a call anyway. ``reason`` gives the reason if no kernel may serve the call;
    it is empty if the proof holds.
    """

    stage: str
    axes: Mapping[str, int]
    kernel: str | None
    reason: str
    kernel_error: float | None = None
    stock_error: float | None = None
    allowed: float | None = None

    @property
    def holds(self) -> bool:
        """True if a kernel was tried and may be used."""
        return self.kernel is not None and not self.reason

    @property
    def failed(self) -> bool:
        """True if a kernel was tried and must not be used."""
        return self.kernel is not None and bool(self.reason)


def allowed_error(stock_error: float, rounding_error: float, dtype: torch.dtype) -> float:
    """Return the largest relative error that a kernel may have.

    Args:
        rounding_error: the error of the exact result after rounding once to the output's dtype; no code does better.
        dtype: the dtype of the output. For float32, the bound of verification applies if it is larger: the approximate
            exponentials of a GPU are many times worse than those of a CPU.
    """
    allowed = ALLOWED_FACTOR * max(stock_error, rounding_error)
    return max(allowed, LIMITS["float32"].tau) if dtype == torch.float32 else allowed


def prove(dispatcher: Dispatcher, allocate: Allocate, call: CapturedCall) -> Proof:
    """Try the kernel that would serve the captured calls of one kind.

    The kernel runs twice, without gradients and in inference mode, on outputs full of NaN. It must give the same bits both
    times and leave its inputs unchanged. The result is that of the call with the kernel's largest error.

    Args:
        call: the captured inputs, at several positions and for several tokens.
    """
    definition = dispatcher.definition
    preview = dispatcher.preview(call.inputs, allocate)
    if preview.launch is None:
        return Proof(call.stage, _axes(definition, call), None, preview.reason)
    binding = bind_call(definition, call.inputs)
    try:
        runs, again, changed = _in_both_modes(preview.launch, definition, call, allocate)
    except Exception as error:  # a kernel may raise anything: the error is reported, and stock code runs
        what = traceback.format_exception_only(error)[-1].strip()
        return Proof(call.stage, binding.axes, preview.kernel, f"verification on this model failed: it raises {what}")
    if changed:
        reason = f"it changes its input '{changed}'"
    elif not all(map(_same_outputs, runs, again)):
        reason = "two runs on the same inputs differ; the second is in inference mode and after other calls"
    else:
        kernel = str(preview.kernel)
        proofs = []
        with torch.no_grad():  # the codes of a quantised weight may require gradients
            for inputs, outputs in zip(call.all_inputs, runs, strict=True):
                stock, _ = _run(dispatcher.run_stock, definition, inputs, allocate)
                proofs.append(_compared(definition, CapturedCall(call.stage, inputs), binding, kernel, outputs, stock))
        return max(proofs, key=lambda proof: (bool(proof.reason), proof.kernel_error or 0.0))
    return Proof(call.stage, binding.axes, preview.kernel, f"verification on this model failed: {reason}")


def _in_both_modes(
    launch: Callable[..., Any], definition: Definition, call: CapturedCall, allocate: Allocate
) -> tuple[list[Outputs], list[Outputs], str]:
    """Return the outputs of each captured call from two runs, and the name of an input that was changed.

    The first run is without gradients, the second in inference mode. The second has the opposite order, so each call but the
    last comes after others of its kind.
    """
    with torch.no_grad():
        runs = [_run(launch, definition, inputs, allocate) for inputs in call.all_inputs]
    with torch.inference_mode():
        again = [_run(launch, definition, inputs, allocate) for inputs in reversed(call.all_inputs)]
    changed = next((name for _, name in (*runs, *again) if name), "")
    return [outputs for outputs, _ in runs], [outputs for outputs, _ in reversed(again)], changed


def _same_outputs(outputs: Outputs, others: Outputs) -> bool:
    return all(_same_bits(value, others[name]) for name, value in outputs.items())


def _axes(definition: Definition, call: CapturedCall) -> Mapping[str, int]:
    try:
        return bind_call(definition, call.inputs).axes
    except TilegymDBError:  # no call of the Definition; the preview's reason says so
        return {}


def _compared(
    definition: Definition, call: CapturedCall, binding: Call, kernel: str, outputs: Outputs, stock: Outputs
) -> Proof:
    inputs = dict(zip(definition.inputs, call.inputs, strict=True))
    truth = oracle(definition, inputs)
    # A choice is right or wrong and has no error. What follows from a choice is compared given the choice that was made.
    own = followed(definition, inputs, truth, stock, ())
    errors = {name: _error(value, own[name]) for name, value in stock.items()}
    of_stock = {name: ReferenceDeviation(error) for name, error in errors.items()}
    verdicts = check_outputs(definition, binding.dtypes, inputs, truth, outputs, of_stock)
    wrong = [name for name, verdict in verdicts.items() if not verdict.passed and not outputs[name].is_floating_point()]
    exact = followed(definition, inputs, truth, outputs, wrong)
    reason, worst = "", (0.0, 0.0, 0.0)
    for name, value in outputs.items():
        if not _is_measured(value):
            continue
        found = _error(value, exact[name])
        allowed = allowed_error(errors[name], _error(exact[name].to(value.dtype), exact[name]), value.dtype)
        if found > allowed and not reason:
            reason = (
                f"the error of {name} against fp64 is {found:.3g}, which is {found / max(errors[name], 1e-300):.3g} times that "
                f"of stock; at most {allowed:.3g} is allowed"
            )
        worst = max(worst, (found, errors[name], allowed), key=lambda figures: figures[0])
    reason = reason or next((verdict.reason for verdict in verdicts.values() if not verdict.passed), "")
    if reason:
        reason = f"verification on this model failed: {reason}"
    return Proof(call.stage, binding.axes, kernel, reason, *worst)


def _error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative error; 0 for outputs of 8 bits and of indices, whose codes the gates compare."""
    return relative_error(value, truth) if _is_measured(value) else 0.0


def _is_measured(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.element_size() > 1


def _run(
    launch: Callable[..., Any], definition: Definition, inputs: tuple[Any, ...], allocate: Allocate
) -> tuple[Outputs, str]:
    """Return every output by name, and the name of an input that the call must not change but did."""
    given = {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in zip(definition.inputs, inputs, strict=True)
    }
    made = allocate(*given.values())
    outputs: Outputs = dict(zip(definition.written_outputs, made if isinstance(made, tuple) else (made,), strict=True))
    for value in outputs.values():
        value.fill_(float("nan") if value.is_floating_point() else 1)  # the memory may hold the result of another run
    launch(*given.values(), *outputs.values())
    changed = [
        name
        for name, before in zip(definition.inputs, inputs, strict=True)
        if isinstance(before, torch.Tensor) and name not in definition.in_place and not _same_bits(given[name], before)
    ]
    outputs |= {target: given[source] for source, target in definition.in_place.items()}
    return outputs, changed[0] if changed else ""


def _same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (value, other)))


# ---- FP8 ------------------------------------------------------------------------------------------
# The effect of FP8 on a model's numbers: each layer and the logits of one run against fp64, beside those of bf16.

LARGEST_ERROR = 0.1
"""Largest relative error of a layer's output. Codes are off by at most 1/16 at values of normal size; more is another fault."""
LARGEST_LOGITS_ERROR = 0.5
"""Largest relative error of the logits. The codes of all layers cause hundredths. An error of half the size means that codes were
taken for numbers somewhere, or that the model enlarges small errors until its answers are mostly error."""
NOT_CALLED = "the run did not call it, so its error is unknown"
BYTES_OF_A_COPY = 10
"""Bytes per number for the fp64 copy: eight, and two more while it is copied."""

Module = torch.nn.Module


@dataclass(frozen=True)
class LayerProof:
    """Relative Frobenius errors of one layer's output against fp64, on inputs from a run of the model.

    ``fp8_error`` is the error of the layer as it is served, ``bf16_error`` that of the original layer. ``reason`` is the reason
    if the layer got its weight back; it is empty if the layer stays quantised.
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

    In that copy every cast to a narrower dtype is a cast to fp64, and experts run one after the other. ``same_choice`` is the
    share of positions at which fp8 and bf16 have the same largest logit. ``difference`` is the relative difference of the two.
    ``reason`` is the reason if there is no copy; the errors are None then.
    """

    tokens: int
    difference: float
    same_choice: float
    fp8_error: float | None = None
    bf16_error: float | None = None
    reason: str = ""

    @property
    def why_refused(self) -> str:
        """The reason if a model with these logits must not be served; empty if it may."""
        against, off = ("bf16", self.difference) if self.fp8_error is None else ("fp64", self.fp8_error)
        if off <= LARGEST_LOGITS_ERROR:
            return ""
        return f"the relative error of the logits is {off:.3g} against {against}; at most {LARGEST_LOGITS_ERROR:g} is allowed"


class LayerInput(NamedTuple):
    """The input of a layer at its first call: some of its rows, [at most 128, K], and their number."""

    x: torch.Tensor
    rows: int


@dataclass(frozen=True)
class Recorded:
    """A run of the unchanged model.

    It has the inputs of the model and of each layer by name, and the layers whose weights other code read. It also has the
    logits, and the logits in fp64 or the reason if there are none.
    """

    given: Mapping[str, Any]
    of_layers: Mapping[str, LayerInput]
    read: frozenset[str]
    logits: torch.Tensor
    exact: torch.Tensor | str


def record(model: Module, layers: Mapping[str, Module], inputs: ModelInputs | None) -> Recorded:
    """Run the unchanged model, and a copy of it in fp64 if memory allows.

    Args:
        layers: name -> layer whose inputs to keep, at most 128 rows of each.

    Raises:
        UsageError: there are no inputs and the model states no vocabulary to draw random token ids from; an input cannot be
            copied for each run; or the model returns no tensor.
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
    """Return a model's first output, or its logits."""
    with torch.no_grad():
        out = model(**own_inputs(given))
    found = getattr(out, "logits", None)
    if found is None:
        ordered = list(out.values()) if isinstance(out, Mapping) else out
        found = ordered[0] if isinstance(ordered, (list, tuple)) and ordered else ordered
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.dim():
        raise UsageError(
            f"{type(model).__name__} returns a {type(out).__name__} without logits, whose first value is no floating tensor, so "
            "FP8 cannot be compared with anything. Pass a model that returns a tensor first.",
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
    except of_models() as error:  # a model's code may raise anything in a dtype that it was not written for
        return f"it does not run in fp64: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def prove_layer(name: str, module: Module, original: torch.Tensor, given: LayerInput | None) -> LayerProof:
    """Return the errors of a quantised layer as it is served, and of the original layer.

    The layer runs on as many rows as in the model, because the number of rows decides which kernel serves it. The kept rows are
    repeated to that number. The largest error of all repetitions counts.

    Args:
        given: the kept input of the layer; None if the run did not call it.
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
        fp8 = max(_layer_error(found[start:][: len(x)], exact.roll(-start, 0)) for start in starts)
        bf16 = _layer_error(torch.nn.functional.linear(x, weight, bias), exact)
    reason = "" if fp8 <= LARGEST_ERROR else f"its relative error is {fp8:.3g}; at most {LARGEST_ERROR:g} is allowed"
    return LayerProof(name, shape, x.shape[0], fp8, bf16, reason)


def prove_logits(model: Module, recorded: Recorded) -> LogitsProof:
    """Return the errors of the logits of a quantised model on a recorded run."""
    found, stock, exact = _logits(model, recorded.given), recorded.logits, recorded.exact
    tokens = stock.numel() // max(1, stock.shape[-1])
    same = (found.argmax(dim=-1) == stock.argmax(dim=-1)).double().mean()
    difference = _layer_error(found, stock.double())
    if isinstance(exact, str):
        return LogitsProof(tokens, difference, float(same), reason=exact)
    return LogitsProof(tokens, difference, float(same), _layer_error(found, exact), _layer_error(stock, exact))


def _layer_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error; infinite if a value is NaN or infinite."""
    size = float(torch.linalg.vector_norm(exact))
    off = float(torch.linalg.vector_norm(found.double() - exact))
    if off != off or off == float("inf"):
        return float("inf")
    return off / size if size else off


# ---- report ---------------------------------------------------------------------------------------
# The effect of quantising a model on its numbers and its memory, as data and as text.

MIB = 2**20


@dataclass(frozen=True)
class QuantisationReport:
    """The result of ``patch(model, quantise="fp8")``.

    ``layers`` has a proof of each layer that was tried. A layer whose proof has a ``reason`` has its original weight again.
    ``skipped`` has the reason for every other linear layer and for experts. Bytes are those of the model's parameters and
    buffers; ``bytes_held`` are kept in CPU memory, so that unpatch() can restore the parameters.
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
        """The names of the layers that compute with codes now."""
        return tuple(proof.name for proof in self.layers if not proof.reason)

    def summary(self) -> str:
        """Return the result in sentences."""
        proof, count = self.logits, len(self.quantised)
        reason = f" ({proof.reason})" if proof.reason else ""
        lines = [
            f"quantise={self.way!r} changes this model's numbers: {count} linear layers compute with FP8 codes, activations with "
            "one scale per 128 channels and weights with one per 128 x 128 values.",
            f"Relative error of the logits of {proof.tokens} positions against fp64: {_shown(proof.fp8_error)} in fp8, "
            f"{_shown(proof.bf16_error)} in bf16{reason}. The two differ by {_shown(proof.difference)} and choose the same token "
            f"at {proof.same_choice:.1%} of the positions.",
            f"Parameters and buffers take {self.bytes_after / MIB:,.1f} MiB, before {self.bytes_before / MIB:,.1f} MiB. "
            f"For unpatch(), {self.bytes_held / MIB:,.1f} MiB are held in CPU memory.",
        ]
        kept = Counter([reason for _, reason in sorted(self.skipped.items())])
        kept.update(proof.reason for proof in self.layers if proof.reason)
        lines += [f"Not quantised ({number}): {reason}." for reason, number in kept.items()]
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table for a terminal: one row per kind of layer, with the largest errors of its layers."""
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
# Detection of layers whose weight the model's code reads outside of the layer's forward.
#
# Such code (``x.to(self.fc.weight.dtype)``, ``x @ fc.weight``, ``next(self.parameters())``) would take codes for numbers.

WEIGHT = "weight"


class _WatchedParameters(dict[str, Any]):
    """The parameters of a module. It reports every access to the weight, by attribute or by ``parameters()``."""

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
    """Yield the set of layers whose weight was read while their forward did not run; it fills inside the ``with`` block."""
    read: set[str] = set()
    with contextlib.ExitStack() as undo:
        for name, module in layers.items():
            _notice(name, module, read, undo)
        yield read


def _notice(name: str, module: Module, read: set[str], undo: contextlib.ExitStack) -> None:
    own: dict[str, Any] = module._parameters
    running: list[bool] = []
    watched = _WatchedParameters(own, lambda: None if running else read.add(name))

    def restore() -> None:
        own.clear()
        own.update(dict.items(watched))  # keeps what the model's code assigned in between
        vars(module)["_parameters"] = own

    # These hooks run last before the forward, and first after it.
    begin = module.register_forward_pre_hook(lambda *_: running.append(True))
    undo.callback(begin.remove)
    end = module.register_forward_hook(lambda *_: running.clear(), prepend=True, always_call=True)
    undo.callback(end.remove)
    vars(module)["_parameters"] = watched
    undo.callback(restore)
