"""One timed call of a model: greedy generation, or the prefill alone. Each way of running a model is a function of these.

Clocks are read once per token, where the logits are there and before they become a token.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.errors import UsageError


@dataclass(frozen=True)
class Generation:
    """One call: times in ms, the new tokens [batch, new or 1] and, on a GPU, the most bytes in use.

    ``tpot_ms`` is None if fewer than two tokens are generated. The bytes are those of the weights, of the cache if it
    was there before, and of what was allocated in the call: what else lives in the process does not count.
    """

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    tokens: torch.Tensor
    peak_memory_bytes: int | None = None


Generate = Callable[[], Generation]


def dynamic_cache(model: Any, ids: torch.Tensor, new: int) -> Generate:
    """``generate`` as it is by default, run eagerly.

    Greedy, and exactly ``new`` tokens, at least 1, after ``ids`` [batch, prompt].
    """
    return _generator(model, ids, new, {"disable_compile": True})


def static_cache(model: Any, ids: torch.Tensor, new: int, backend: str = "inductor") -> Generate:
    """As :func:`dynamic_cache` with a cache of fixed size, the steps of decoding compiled as transformers does it.

    The cache is made once and emptied before each call: a new one has other addresses, for which CUDA graphs are recorded
    anew, and that would be timed with every generation.

    Args:
        model: a causal language model.
        ids: token ids [batch, prompt].
        new: tokens to generate, at least 2: the prefill runs eagerly.
        backend: of torch.compile; ``inductor`` on a GPU uses CUDA graphs, as is the default of transformers.

    Raises:
        UsageError: the model has layers whose cache transformers has in no fixed size.
    """
    from transformers import CompileConfig, StaticCache

    in_graphs = backend == "inductor" and ids.device.type == "cuda"
    config: Any = CompileConfig(backend=backend, mode="reduce-overhead" if in_graphs else "default")
    config._compile_all_devices = True  # transformers would leave a CPU uncompiled
    try:
        cache: Any = StaticCache(config=model.config.get_text_config(), max_cache_len=ids.shape[1] + new)
    except (KeyError, NotImplementedError) as error:  # a mapping of transformers that lacks the kind of a layer
        raise UsageError(
            f"transformers has no cache of fixed size for this model: {error}.", code="static_cache_absent"
        ) from None
    generate = _generator(
        model, ids, new, {_name_of_cache(model): cache, "compile_config": config}, lambda: _held_by(cache)
    )

    def generate_from_nothing() -> Generation:
        cache.reset()
        return generate()

    return generate_from_nothing


def prefill(model: Any, ids: torch.Tensor, backend: str | None = None) -> Generate:
    """Return the forward over the prompt alone, with the logits of the last token, as the first step of ``generate``
    asks for it.

    Args:
        model: a causal language model.
        ids: token ids [batch, prompt].
        backend: of torch.compile; None runs the model as it is.
    """
    forward: Callable[..., Any] = model if backend is None else torch.compile(model, backend=backend, dynamic=False)
    takes = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    marks = _marks_on(ids.device)
    weights = _bytes_of([*model.parameters(), *model.buffers()])

    def run() -> Generation:
        marks.begin()
        with torch.no_grad():
            logits = forward(ids, use_cache=True, **options).logits
        marks.mark()
        (end,) = marks.read_ms()
        return Generation(end, None, end, logits[:, -1:].argmax(-1).cpu(), marks.peak_bytes(weights))

    return run


def _generator(
    model: Any, ids: torch.Tensor, new: int, options: dict[str, Any], held: Callable[[], int] = lambda: 0
) -> Generate:
    mask = torch.ones_like(ids)
    marks = _marks_on(ids.device)
    weights = _bytes_of([*model.parameters(), *model.buffers()])
    greedy = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": 1, "pad_token_id": 0}

    def at_each_token(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        marks.mark()
        return scores

    def generate() -> Generation:
        before = held()
        marks.begin()
        tokens = model.generate(ids, attention_mask=mask, logits_processor=[at_each_token], **greedy, **options)
        marks.mark()
        at = marks.read_ms()
        first, last, end = at[0], at[-2], at[-1]
        tpot = (last - first) / (new - 1) if new > 1 else None
        return Generation(first, tpot, end, tokens[:, ids.shape[1] :].cpu(), marks.peak_bytes(weights + before))

    return generate


def _name_of_cache(model: Any) -> str:
    """What a model's forward, and so ``generate``, calls its cache: ``past_key_values`` up to transformers 5.23."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """What tensors take, each once: embeddings are often tied to the last projection."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _held_by(cache: Any) -> int:
    """What a static cache takes; 0 before its first use."""
    found = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return _bytes_of([tensor for tensor in found if isinstance(tensor, torch.Tensor)])


# -- clocks -----------------------------------------------------------------------------------------------------------


class _WallMarks:
    """Moments since the beginning, by this process's clock: on a CPU, an operation is done when its call returns."""

    def begin(self) -> None:
        self._moments: list[float] = []
        self._start = time.perf_counter()

    def mark(self) -> None:
        self._moments.append(time.perf_counter())

    def read_ms(self) -> list[float]:
        return [(moment - self._start) * 1e3 for moment in self._moments]

    def peak_bytes(self, _held: int) -> int | None:
        return None


class _EventMarks:
    """As :class:`_WallMarks`, by CUDA events: recording one does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        self._moments: list[Any] = []
        self._start = self._now()

    def mark(self) -> None:
        self._moments.append(self._now())

    def read_ms(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [self._start.elapsed_time(moment) for moment in self._moments]

    def peak_bytes(self, held: int) -> int | None:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before + held

    def _now(self) -> Any:
        new_event: Any = torch.cuda.Event
        event = new_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _marks_on(device: torch.device) -> _EventMarks | _WallMarks:
    return _EventMarks(device) if device.type == "cuda" else _WallMarks()
