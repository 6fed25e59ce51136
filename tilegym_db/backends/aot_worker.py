"""The process that compiles: ``python -m tilegym_db.backends.aot_worker LANGUAGE``.

Jobs arrive on stdin and results leave on stdout, one JSON object per line. The first line of stdout says if the language
can be imported. The stdin of Solutions is empty, and their output goes to stderr, which the parent keeps for logs. No GPU
is visible here, and nothing is launched. A job that hangs ends the process with a traceback of its place.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch

from tilegym_db.backends.aot import CompileJob, CompileResult, CompileStatus
from tilegym_db.backends.load import clipped_traceback, load_entry, unload_entry
from tilegym_db.backends.toolchains import prepare_environment
from tilegym_db.errors import SolutionError, ToolchainError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.solution import narrowed
from tilegym_db.records.trace import clip_log


class Interception(Protocol):
    """The interface of a language's module."""

    recording: Callable[[str, str], AbstractContextManager[Any]]
    compile_probe: Callable[[str], None]


def main(language: str) -> None:
    """Serve jobs of one language until stdin closes."""
    jobs, results = _take_channels()
    prepare_environment(language)
    logging.disable(logging.CRITICAL)  # compilers log, at length, what they then raise
    try:
        interception = _import_language(language)
    except Exception as error:  # a process boundary: the parent reports it
        print(json.dumps({"ready": False, "log": clipped_traceback(error, Path())}), file=results, flush=True)
        return
    print(json.dumps({"ready": True, "log": ""}), file=results, flush=True)
    for line in jobs:
        fields = json.loads(line)
        faulthandler.dump_traceback_later(fields["timeout_s"], exit=True)
        result = _run(line, Path(fields["record"]).parent, fields["target"], interception)
        faulthandler.cancel_dump_traceback_later()
        print(result.to_json(), file=results, flush=True)


def compile_job(job: CompileJob, interception: Interception) -> CompileResult:
    """Call the Solution's ``run`` on arguments without contents, with the language intercepted."""
    from tilegym_db.backends.stand_ins import pretend_device

    arguments = call_arguments(narrowed(job.definition, job.solution.record.spec.omits), job.workload)
    start = time.perf_counter()
    try:
        with interception.recording(job.target, job.solution.digest) as recorder, pretend_device(job.target):
            load_entry(job.solution)(*arguments, **job.config)
    finally:
        unload_entry(job.solution)  # another target must not meet kernels that the source caches by itself
    seconds = time.perf_counter() - start
    if not recorder.launches and _writes_something(job):
        language = job.solution.record.spec.language
        raise SolutionError(
            f"{job.solution.name}: run returned without launching a {language} kernel.", code="kernel_not_launched"
        )
    return CompileResult("compiled", seconds, recorder.artifacts)


def _run(line: str, folder: Path, target: str, interception: Interception) -> CompileResult:
    start = time.perf_counter()
    status: CompileStatus = "failed"
    try:
        return compile_job(CompileJob.from_json(line), interception)
    except ToolchainError as error:
        status, log = "toolchain-missing", str(error)
    except SolutionError as error:
        log = str(error)
    except (Exception, SystemExit) as error:  # a process boundary: it is the job's result
        log = _explain(error, folder)
    seconds = time.perf_counter() - start
    if status == "failed":
        refusal = _refusal(interception.compile_probe, target)
        if refusal:
            status, log = "refused", refusal
    return CompileResult(status, seconds, log=clip_log(log))


@functools.cache
def _refusal(compile_probe: Callable[[str], None], target: str) -> str:
    """Return the reason that the toolchain cannot compile its smallest kernel for a target, or an empty text."""
    try:
        compile_probe(target)
    except (Exception, SystemExit) as error:  # the same boundary
        return _explain(error, Path())
    return ""


def _explain(error: BaseException, folder: Path) -> str:
    """Return the text of an error for a log; for nvcc only its errors, which follow the CUDA source."""
    source, marker, messages = str(error).partition("Compilation error:\n")
    if not marker or "__global__" not in source:
        return clipped_traceback(error, folder)
    errors = re.findall(r"^[^\n]*\berror\b.*?(?=^[^\n]*\bwarning\b|^Command:|\Z)", messages, re.MULTILINE | re.DOTALL)
    return clip_log("nvcc:\n" + ("".join(errors) or messages).strip())


def _writes_something(job: CompileJob) -> bool:
    axes = job.definition.bind_axes(job.workload.axes)
    return any(0 not in job.definition.shape_of(name, axes) for name in job.definition.outputs)


def _import_language(language: str) -> Interception:
    return cast(Interception, importlib.import_module(f"tilegym_db.backends.{language}"))


def _take_channels() -> tuple[TextIO, TextIO]:
    """Return the real stdin and stdout for this module alone, and replace them."""
    jobs = os.fdopen(os.dup(0), "r", encoding="utf-8")
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return jobs, results


# ---- arguments ------------------------------------------------------------------------------------
# CPU tensors with the right sizes, dtypes and strides but without contents stand for the arguments of a call.


def call_arguments(definition: Definition, workload: Workload) -> list[Any]:
    """Return the inputs in order, scalars included, then the outputs that are written through arguments.

    Memory is reserved but never touched, so a tensor of many gigabytes costs nothing.
    """
    axes = definition.bind_axes(workload.axes)
    dtypes = definition.bind_dtypes(workload.dtypes)
    scalars = workload.scalars()
    arguments: list[Any] = []
    for name in (*definition.inputs, *definition.written_outputs):
        if name in definition.inputs and definition.inputs[name].is_scalar:
            arguments.append(scalars[name])
            continue
        shape = definition.shape_of(name, axes)
        strides = definition.strides_of(name, axes, workload.layouts.get(name))
        arguments.append(torch.empty_strided(shape, strides, dtype=_storage_dtype(definition.dtype_of(name, dtypes))))
    return arguments


def _storage_dtype(name: str) -> torch.dtype:
    # Two packed 4-bit codes are stored in a byte.
    found = torch.uint8 if name == "float4_e2m1" else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
