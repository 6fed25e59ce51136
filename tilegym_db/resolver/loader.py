"""Load exactly the source that was verified, and give every solution one signature.

The digest is computed from the files on disk now, and a private copy of the same bytes is loaded. Compilers read the text of a
kernel again long after its import, when they first compile a size or dtype. So an edit of the catalog must not reach a running
model.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.record_files import write_sources
from tilegym_db.errors import SolutionError
from tilegym_db.records import Definition
from tilegym_db.records.solution import Config

if TYPE_CHECKING:
    import torch

Launcher = Callable[..., Any]
"""``launch(*inputs, *written_outputs)`` runs one call and writes the outputs; its result is ignored."""

_LOADED: dict[str, Callable[..., Any]] = {}
_LOADING = threading.Lock()


def load_verified(solution: SolutionFiles, verified_digest: str) -> Callable[..., Any]:
    """Return the entry point of a solution, if its source is the verified one. Loaded once per digest and process.

    Raises:
        SolutionError: the source on disk is another one, or does not import.
        ToolchainError: the language is not installed.
    """
    with _LOADING:
        entry = _LOADED.get(verified_digest)
        if entry is None:
            current = SolutionFiles.read(solution.path)
            if current.digest != verified_digest:
                raise SolutionError(
                    f"{solution.path}: the source differs from the verified one ({current.digest[:12]}, verified "
                    f"{verified_digest[:12]}). Restore it, or bench and publish it again.",
                    code="source_differs",
                )
            entry = _LOADED[verified_digest] = load_entry(_private_copy(current))
    return entry


def load_launcher(definition: Definition, solution: SolutionFiles, config: Config, verified_digest: str) -> Launcher:
    """Return a destination-passing callable with the config bound; raises the errors of :func:`load_verified`."""
    entry = load_verified(solution, verified_digest)
    bound = partial(entry, **config) if config else entry
    if solution.record.spec.destination_passing_style:
        return bound
    return partial(_write_returned, bound, len(definition.inputs))


def load_computer(
    solution: SolutionFiles, config: Config, verified_digest: str, promised: Sequence[torch.Tensor]
) -> Launcher:
    """Return ``compute(*inputs) -> outputs`` of a value-returning solution, without a copy of its outputs.

    Args:
        promised: tensors (on ``meta``) with the shapes, strides and dtypes that callers rely on. An output with another
            layout, or in memory of an input, is copied into this layout.
    """
    entry = load_verified(solution, verified_digest)
    bound = partial(entry, **config) if config else entry
    if len(promised) == 1:
        only = _PromisedLayout(promised[0])

        def compute_one(*inputs: Any) -> Any:
            returned = bound(*inputs)
            return only.keep(returned[0] if isinstance(returned, tuple) else returned, inputs)

        return compute_one
    promises = tuple(map(_PromisedLayout, promised))

    def compute(*inputs: Any) -> tuple[Any, ...]:
        return tuple(promise.keep(value, inputs) for promise, value in zip(promises, bound(*inputs), strict=True))

    return compute


class _PromisedLayout:
    """The layout that callers of a call site rely on."""

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype = like.shape, like.stride(), like.dtype

    def keep(self, value: Any, inputs: tuple[Any, ...]) -> Any:
        """Return the value, or a copy if its layout is not the promised one; refuse another shape or dtype."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise SolutionError(
                f"it returned {value.dtype} {list(value.shape)}, not {self.dtype} {list(self.shape)}",
                code="output_differs",
            )
        if self._is_laid_out(value.stride()) and not _shares_memory(value, inputs):
            return value
        return value.new_empty_strided(self.shape, self.strides).copy_(value)

    def _is_laid_out(self, strides: tuple[int, ...]) -> bool:
        """Return True if strides are the promised ones; dimensions of one element do not count."""
        if strides == self.strides:
            return True
        found = zip(self.shape, strides, self.strides, strict=True)
        return all(stride == promised for size, stride, promised in found if size != 1)


def _shares_memory(value: Any, inputs: tuple[Any, ...]) -> bool:
    start = value.untyped_storage().data_ptr()
    return any(start == given.untyped_storage().data_ptr() for given in inputs if hasattr(given, "untyped_storage"))


def _write_returned(entry: Callable[..., Any], inputs: int, *args: Any) -> None:
    """Call a value-returning solution and copy its results into the outputs that were passed."""
    returned = entry(*args[:inputs])
    outputs = args[inputs:]
    values = returned if isinstance(returned, tuple) else (returned,) if outputs else ()
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


def _private_copy(solution: SolutionFiles) -> SolutionFiles:
    folder = _session_folder() / solution.digest / solution.folder.name
    write_sources(folder, solution.sources)
    return replace(solution, path=folder / solution.path.name)


@cache
def _session_folder() -> Path:
    """Return a folder that only this user can enter, for the life of the process: compilers read sources long after import."""
    folder = Path(tempfile.mkdtemp(prefix="tilegym-db-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
