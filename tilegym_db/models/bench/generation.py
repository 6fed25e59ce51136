"""One timed call of a model: greedy generation, or the prefill alone. Each execution mode of a model is one such function.

Clocks are read once per token, after the logits and before the choice of the token.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tilegym_db.errors import ToolchainError, UsageError
from tilegym_db.models.capture import ModelInputs, forward_arguments, random_prompt
from tilegym_db.models.random_model import load_config, unchecked_model


@dataclass(frozen=True)
class Generation:
    """One call: times in ms, the new tokens [batch, new or 1] and, on a GPU, the peak of the bytes in use.

    ``tpot_ms`` is None if fewer than two tokens are generated. The bytes are those of the weights, of a cache that existed
    before, and of memory allocated in the call. Other memory of the process does not count.
    """

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    tokens: torch.Tensor
    peak_memory_bytes: int | None = None


Generate = Callable[[], Generation]


def dynamic_cache(model: Any, ids: torch.Tensor, new: int) -> Generate:
    """Run ``generate`` with its defaults, eagerly.

    It is greedy and makes exactly ``new`` tokens, at least 1, after ``ids`` [batch, prompt].
    """
    return _generator(model, ids, new, {"disable_compile": True})


def static_cache(model: Any, ids: torch.Tensor, new: int, backend: str = "inductor") -> Generate:
    """Run ``generate`` with a cache of fixed size; decoding is compiled as in transformers.

    The cache is made once and emptied before each call. A new cache would have other addresses, so CUDA graphs would be captured
    again and their time would count in every generation.

    Args:
        new: tokens to generate, at least 2: the prefill runs eagerly.
        backend: the backend of torch.compile; on a GPU ``inductor`` uses CUDA graphs, the default of transformers.
    """
    from transformers import CompileConfig, StaticCache

    in_graphs = backend == "inductor" and ids.device.type == "cuda"
    config: Any = CompileConfig(backend=backend, mode="reduce-overhead" if in_graphs else "default")
    config._compile_all_devices = True  # by default transformers does not compile on a CPU
    try:
        cache: Any = StaticCache(config=model.config.get_text_config(), max_cache_len=ids.shape[1] + new)
    except (KeyError, NotImplementedError) as error:  # a mapping in transformers lacks the kind of a layer
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


def prefill(model: Any, ids: ModelInputs, backend: str | None = None) -> Generate:
    """Return the forward over the prompt alone, with the logits of the last token, like the first step of ``generate``.

    Args:
        backend: the backend of torch.compile; None runs the model eagerly.
    """
    forward: Callable[..., Any] = model if backend is None else torch.compile(model, backend=backend, dynamic=False)
    takes = inspect.signature(model.forward).parameters
    options = {**forward_arguments(model, ids)}
    options |= {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    options |= {"use_cache": True} if "use_cache" in takes else {}  # encoders have no cache
    marks = _marks_on(next(model.parameters()).device)
    weights = _bytes_of([*model.parameters(), *model.buffers()])

    def run() -> Generation:
        marks.begin()
        with torch.no_grad():
            logits = forward(**options)[0]
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
    """Return the name of the cache argument of a model's forward: ``past_key_values`` up to transformers 5.23."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors, each counted once, because embeddings are often tied to the last projection."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _held_by(cache: Any) -> int:
    """Return the bytes of a static cache; 0 before its first use."""
    found = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return _bytes_of([tensor for tensor in found if isinstance(tensor, torch.Tensor)])


# -- clocks -----------------------------------------------------------------------------------------------------------


class _WallMarks:
    """Times since the start by this process's clock. On a CPU, an operation is done when its call returns."""

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
    """Times since the start by CUDA events; recording one does not wait for the device."""

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


# ---- stock code in other processes ----------------------------------------------------------------
# Other libraries that patch transformers, each in a separate process, because they patch a whole process.
#
# Each process builds the same model with the same weights, and makes one generation per request. So the caller decides which
# process computes at any time. A library that is unavailable reports the reason.

START_TIMEOUT_S = 900.0
"""Time for imports from a cold file system, and for building a large model twice."""
CALL_TIMEOUT_S = 900.0
"""Time for one generation; the first one compiles."""


@dataclass(frozen=True)
class Library:
    """A library with one function per kind of model: ``<module>.<prefix><model type>(**options)``."""

    distribution: str
    package: str
    module: str
    prefix: str
    options: dict[str, Any]


LIBRARIES = {
    "liger": Library("liger-kernel", "liger_kernel", "liger_kernel.transformers", "apply_liger_kernel_to_", {}),
    "tilegym": Library("tilegym", "tilegym", "tilegym.transformers", "apply_tilegym_kernel_to_", {"use_cutile": True}),
}


@dataclass(frozen=True)
class Job:
    """The task of a library: one generation as :class:`~tilegym_db.models.bench.model_bench.ModelBenchOptions` describes it."""

    peer: str
    path: Path
    device: str
    dtype: str
    batch: int
    prompt: int
    new: int
    layers: int | None = None


class LibraryProcess:
    """A process that generates with a library's kernels. Use it as a context manager; each call is one generation."""

    def __init__(self, job: Job) -> None:
        """Start the process; it prepares while the caller goes on."""
        context = multiprocessing.get_context("spawn")  # a fork would share a CUDA context that it cannot use
        self.job = job
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job), name=f"peer-{job.peer}", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # the process ends when it reads the closed connection
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ready(self) -> str:
        """Wait until the process is ready; return the library's name and version, or raise with the reason."""
        return str(self._answer(START_TIMEOUT_S))

    def __call__(self) -> Generation:
        """Return one generation, timed inside the process."""
        try:
            self._connection.send("generate")
        except OSError:
            raise ToolchainError(self._how_it_ended(), code="peer_ended") from None
        ttft_ms, tpot_ms, total_ms, tokens, peak_bytes = self._answer(CALL_TIMEOUT_S)
        return Generation(ttft_ms, tpot_ms, total_ms, torch.tensor(tokens), peak_bytes)

    def _answer(self, limit_s: float) -> Any:
        if not wait([self._connection, self._process.sentinel], limit_s):
            raise ToolchainError(
                f"the process of {self.job.peer} did not answer within {limit_s:g} s.", code="peer_timeout"
            )
        try:
            failed, content = self._connection.recv()
        except (EOFError, OSError):
            raise ToolchainError(self._how_it_ended(), code="peer_ended") from None
        if failed:
            raise ToolchainError(content, code="peer_failed")
        return content

    def _how_it_ended(self) -> str:
        self._process.join(10)
        return f"the process of {self.job.peer} ended (exit code {self._process.exitcode})."


# -- inside the process -----------------------------------------------------------------------------------------------


def _serve(connection: Connection, job: Job) -> None:
    os.dup2(2, 1)  # output of libraries must not mix with the caller's results
    try:
        generate, library = _prepare(job)
    except Exception as error:  # a library may raise anything: the caller gets the reason and goes on without it
        connection.send((True, _reason(error)))
        return
    connection.send((False, library))
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        try:
            one = generate()
        except Exception as error:
            connection.send((True, _reason(error)))
            return
        figures = (one.ttft_ms, one.tpot_ms, one.total_ms, one.tokens.tolist(), one.peak_memory_bytes)
        connection.send((False, figures))


def _reason(error: Exception) -> str:
    if isinstance(error, ToolchainError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(":. ") + "."


def _prepare(job: Job) -> tuple[Callable[[], Generation], str]:
    library = LIBRARIES[job.peer]
    if importlib.util.find_spec(library.package) is None:
        raise ToolchainError(
            f"it is not installed. Try: pip install --no-deps {library.distribution}", code="peer_absent"
        )
    config = load_config(job.path, job.layers)
    weights = unchecked_model(config, job.device, job.dtype).state_dict()
    _patching(library, config.model_type)(**library.options)
    # Unchecked: a model that does not run now fails because of the library, not the config.
    model = unchecked_model(config, job.device, job.dtype)
    if not any(type(module).__module__.partition(".")[0] == library.package for module in model.modules()):
        raise ToolchainError(
            f"{library.distribution} changed no module of {type(model).__name__}.", code="peer_changed_nothing"
        )
    model.load_state_dict(weights)  # the same bits, whatever the modules draw at construction
    del weights
    if job.device.startswith("cuda"):
        torch.cuda.empty_cache()
    ids = random_prompt(model, job.batch, job.prompt)
    generate = dynamic_cache(model, ids, job.new) if job.new else prefill(model, ids)
    return generate, f"{library.distribution} {importlib.metadata.version(library.distribution)}"


def _patching(library: Library, model_type: str) -> Callable[..., Any]:
    """Return the function of a library for a kind of model."""
    module = importlib.import_module(library.module)
    for name in (model_type, model_type.removesuffix("_text")):
        found: Callable[..., Any] | None = getattr(module, library.prefix + name, None)
        if found is not None:
            return found
    raise ToolchainError(
        f"{library.distribution} has no kernels for the model type {model_type!r}.", code="peer_without_model"
    )
