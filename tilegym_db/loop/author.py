"""Runs an author: a command that reads a prompt on stdin and leaves a kernel in the folder that it is started in."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import ConflictError, UsageError
from tilegym_db.files import regular_files
from tilegym_db.records.base import length_prefixed_digest

__all__ = ["author_command", "judge_digest", "run_author", "wait_for_author"]

MOST_SAID = 2000


def judge_digest(catalog: Catalog) -> str:
    """Digest of everything that decides about a submission: this package, and the operators and workloads of the catalog."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for root in catalog.roots:
        files += regular_files(root, "definitions/**/*.json") + regular_files(root, "workloads/*/*.jsonl")
    return length_prefixed_digest(part for path in files for part in (str(path).encode(), path.read_bytes()))


def author_command(command: str) -> list[str]:
    """The words of a command, with the program by its whole path: it is started in another folder than this one.

    Raises:
        UsageError: it is no command, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:  # a quotation that nothing ends
        raise UsageError(f"--author {command!r} is no command: {error}.") from None
    if not words or not words[0]:
        raise UsageError(f"--author {command!r} is no command. Give a program that reads the prompt on stdin.")
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(
            f"--author {command!r}: there is no program {words[0]!r}, or it may not be run. "
            "Give its path, and make it executable."
        )
    return [os.path.abspath(program), *words[1:]]


def run_author(command: str, prompt: str, folder: Path, catalog: Catalog, limit_s: float) -> str | None:
    """Start the command in a fresh folder with the prompt on stdin, and wait for it.

    Returns:
        None where it left something to hand in, else what went wrong: ``timeout``, or how it ended.

    Raises:
        UsageError: it is no command, or cannot be started.
        ConflictError: what judges was changed meanwhile; nothing is judged by it.
    """
    words, before = author_command(command), judge_digest(catalog)
    shutil.rmtree(folder, ignore_errors=True)  # of an author that was killed
    folder.mkdir(parents=True)
    try:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"--author {command}: cannot be started: {error.strerror or error}.") from None
    try:
        said, _ = process.communicate(prompt.encode(), timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if judge_digest(catalog) != before:
        raise ConflictError(
            "files that judge kernels (the package, definitions or workloads) changed while the author ran, so nothing "
            "it left is judged. Restore them, and start again."
        )
    if process.returncode != 0:
        return (
            f"the author ended with status {process.returncode}: {said.decode(errors='replace')[-MOST_SAID:].strip()}"
        )
    return None if any(folder.iterdir()) else "the author left nothing"


def wait_for_author(
    prompt: str,
    folder: Path,
    catalog: Catalog,
    limit_s: float,
    is_submitted: Callable[[], bool] = lambda: False,
    every_s: float = 2.0,
) -> str | None:
    """As :func:`run_author`, for a person: says where the prompt lies, and waits for a kernel.

    Args:
        prompt: written beside the folder.
        folder: in which a ``solution.json`` is awaited.
        catalog: what judges, beside the package.
        limit_s: how long.
        is_submitted: asked now and then whether a kernel was handed in, and judged, in another way.
        every_s: so often.

    Raises:
        ConflictError: what judges was changed meanwhile; nothing is judged by it.
    """
    before = judge_digest(catalog)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder.with_suffix(".md")
    page.write_text(prompt)
    print(f"prompt: {page}\nPut kernel.py and then solution.json into {folder}", file=sys.stderr, flush=True)
    until = time.monotonic() + limit_s
    while not (folder / "solution.json").is_file() and not is_submitted():
        if time.monotonic() > until:
            return "timeout"
        time.sleep(every_s)
    if judge_digest(catalog) != before:
        raise ConflictError(
            "files that judge kernels changed meanwhile, so nothing is judged. Restore them, and start again."
        )
    return None
