"""Imports a Solution's entry point from its folder without a change to ``sys.path``.

The module runs exactly the bytes that the Solution's digest covers. Its name is derived from that digest, so two loads
of one source share their compiled kernels, and an edited source is another module. Source files beside the entry file
can be imported as ``from .other import x``, or as ``import other`` while it is being imported. Shared code that is declared as
the source ``_lib/triton/scale.py`` is imported as ``from _lib.triton.scale import x``. Files that are not declared as sources
cannot be imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from tilegym_db.backends.toolchains import TOOLCHAINS, check_dependencies, require_toolchain
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import SolutionError, ToolchainError
from tilegym_db.records.trace import clip_log

PACKAGE_PREFIX = "_tilegym_db_solution_"

_lock = threading.RLock()  # the import of one Solution must not see the siblings of another


def load_entry(solution: SolutionFiles) -> Callable[..., Any]:
    """Return the entry function of a Solution; one digest gives the same function in one process.

    Raises:
        ToolchainError: the language or a declared dependency is missing or too old.
        SolutionError: the source on disk has changed, does not import, or has no such function.
    """
    with _lock:
        name = f"{_package_name(solution)}.{_module_name(solution.record.spec.entry_path)}"
        module = sys.modules.get(name) or _import(solution, name)
        function = getattr(module, solution.record.spec.entry_function, None)
        if not callable(function):
            where = solution.record.spec.entry_point
            raise SolutionError(
                f"{solution.name}: entry_point {where} names no function of that file.", code="entry_point_absent"
            )
        return function  # type: ignore[no-any-return]


def unload_entry(solution: SolutionFiles) -> None:
    """Forget a loaded Solution, so that the next load starts with empty caches."""
    with _lock:
        package = _package_name(solution)
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
        finders: list[Any] = sys.meta_path
        finders[:] = [finder for finder in finders if getattr(finder, "package", None) != package]


def clipped_traceback(error: BaseException, *folders: Path) -> str:
    """Return the message of an error with the frames in a Solution's folders, and the type of its cause if any."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if any(Path(frame.filename).is_relative_to(folder) for folder in folders)]
    if isinstance(error, SyntaxError) or not frames:
        lines = traceback.format_exception_only(error)
    else:
        lines = ["Traceback (frames of the solution only):\n", *traceback.format_list(frames)]
        lines += traceback.format_exception_only(error)
    if error.__cause__ is not None:
        lines += ["caused by: ", *traceback.format_exception_only(error.__cause__)]
    return clip_log("".join(lines).strip())


def _keep_tilelang_off_stdout() -> None:
    """Stop the line that TileLang prints about each kernel, because a program may print JSON to the same output.

    A program that imported TileLang before, or that sets the variable, keeps these lines.
    """
    if "tilelang" not in sys.modules:
        os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")


def _import(solution: SolutionFiles, name: str) -> ModuleType:
    spec = solution.record.spec
    require_toolchain(spec.language)
    check_dependencies(spec.dependencies, solution.name)
    _check_unchanged(solution)
    if spec.language == "tilelang":
        _keep_tilelang_off_stdout()
    package = ModuleType(_package_name(solution))
    package.__path__ = []  # only the finder resolves modules: the folder may hold files that the digest does not cover
    sys.modules[package.__name__] = package
    try:
        with _siblings(solution):
            return importlib.import_module(name)
    except BaseException as error:
        unload_entry(solution)
        if not isinstance(error, Exception | SystemExit):
            raise
        if isinstance(error, ImportError) and _is_the_language(error.name, spec.language):
            toolchain = TOOLCHAINS[spec.language]
            raise ToolchainError(
                f"{spec.language} is installed but does not import: {error}. "
                f"Fix: pip install --force-reinstall 'tilegym-db[{toolchain.extra}]'",
                code="language_broken",
            ) from error
        trace = clipped_traceback(error, *solution.folders)
        raise SolutionError(
            f"{solution.name}: {spec.entry_path} failed to import.\n{trace}", code="import_failed"
        ) from error


def _is_the_language(module: str | None, language: str) -> bool:
    package = TOOLCHAINS[language].package
    return module is not None and f"{module}.".startswith(f"{package}.")


def _check_unchanged(solution: SolutionFiles) -> None:
    # Triton and TileLang read a kernel's text from the file again: the digest must cover that text.
    for path, content in solution.sources.items():
        try:
            same = solution.source_file(path).read_bytes() == content
        except OSError as error:
            raise SolutionError(
                f"{solution.name}: cannot read {solution.source_file(path)}: {error.strerror}.",
                code="source_unreadable",
            ) from error
        if not same:
            raise SolutionError(
                f"{solution.source_file(path)} changed after it was read. Run the command again.", code="source_changed"
            )


def _package_name(solution: SolutionFiles) -> str:
    return f"{PACKAGE_PREFIX}{solution.digest[:32]}"


def _module_name(path: str) -> str:
    """Return ``kernel`` for ``kernel.py``, ``parts.tile`` for ``parts/tile.py``, ``parts`` for ``parts/__init__.py``."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


class _ExactSource(importlib.machinery.SourceFileLoader):
    """A loader that runs bytes that are already read, and leaves no ``__pycache__`` in the catalog."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._content, self.path, "exec", dont_inherit=True)


class _SiblingFinder:
    """A finder of a Solution's own files by their names inside its package and, while ``plain``, by their plain names."""

    def __init__(self, solution: SolutionFiles) -> None:
        self.package = _package_name(solution)
        self.plain = True
        self.modules = {
            _module_name(path): (solution.source_file(path), content)
            for path, content in solution.sources.items()
            if path.endswith(".py")
        }
        nested = {parent for name in self.modules for parent in _parents(name)} - set(self.modules)
        self.folders = nested

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{self.package}.")
        if name == fullname and not self.plain:
            return None
        if name in self.folders:
            return ModuleSpec(fullname, None, is_package=True)
        if name not in self.modules:
            return None
        file, content = self.modules[name]
        locations: list[str] | None = [] if file.name == "__init__.py" else None
        loader = _ExactSource(fullname, str(file), content)
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=locations
        )


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def _siblings(solution: SolutionFiles) -> Iterator[None]:
    """Let a Solution import its own files; by plain names only as long as it is being imported."""
    finder = _SiblingFinder(solution)
    plain = {*finder.modules, *finder.folders}
    hidden = {name: sys.modules.pop(name) for name in plain & set(sys.modules)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.plain = False
        for name in plain & set(sys.modules):
            del sys.modules[name]
        sys.modules.update(hidden)
