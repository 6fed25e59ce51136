"""Other libraries that patch transformers, each in a separate process, because they patch a whole process.

Each process builds the same model with the same weights, and makes one generation per request. So the caller decides which
process computes at any time. A library that is unavailable reports the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tilegym_db.errors import ToolchainError
from tilegym_db.models.bench.generation import Generation, dynamic_cache, prefill
from tilegym_db.models.capture import random_prompt
from tilegym_db.models.random_model import load_config, unchecked_model

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
        """Wait until the process is ready; return the library's name and version.

        Raises:
            ToolchainError: the library is unavailable; the message has the reason.
        """
        return str(self._answer(START_TIMEOUT_S))

    def __call__(self) -> Generation:
        """Return one generation, timed inside the process.

        Raises:
            ToolchainError: the library failed; the message has the reason.
        """
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
