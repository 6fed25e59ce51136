"""The rules of the static scan: what each one catches, why it exists, and what to write instead."""

from __future__ import annotations

from tilegym_db.verify.scan.findings import Rule, Severity

__all__ = ["RULES"]


def _hard(name: str, catches: str, why: str, instead: str) -> Rule:
    return Rule(name, Severity.HARD, catches, why, instead)


def _soft(name: str, catches: str, why: str, instead: str) -> Rule:
    return Rule(name, Severity.SOFT, catches, why, instead)


_TABLE = (
    # -- files --------------------------------------------------------------------------------------------------------
    _hard(
        "unparsable-source",
        "a source that is not UTF-8, does not parse, is larger than 1 MiB, or is nested too deeply to walk",
        "what cannot be read cannot be judged",
        "write plain UTF-8 Python",
    ),
    _hard(
        "unscanned-source",
        "a source that is neither .py nor inert text (.md, .txt, .json)",
        "a binary or another language would run without having been read",
        "ship .py sources only",
    ),
    _hard(
        "unlisted-source",
        "a relative import of a file that solution.json does not list",
        "it would run without having been read, and the digest would not cover it",
        "list the file under 'sources'",
    ),
    _hard(
        "shadowed-module",
        "a source named like a module of Python or of a toolchain",
        "the same import means this file while loading and the real module later",
        "rename the file",
    ),
    _hard(
        "hidden-text",
        "bidirectional control characters",
        "they show a reader other code than the one that runs",
        "remove the control characters",
    ),
    # -- imports ------------------------------------------------------------------------------------------------------
    _hard(
        "imports-introspection",
        "gc, inspect, sys, ast, dis, code, traceback, weakref, linecache, pdb, ...",
        "they reach the caller's frames, objects and modules, and with them the oracle or the verdict",
        "take everything from the arguments of run()",
    ),
    _hard(
        "imports-native-code",
        "ctypes, cffi, mmap, cupy, pycuda, numba, cuda.bindings, cuda.core, tvm, ...",
        "they call or load code that is neither scanned nor built by the Solution's language",
        "write the kernel in the Solution's language",
    ),
    _hard(
        "imports-concurrency",
        "threading, multiprocessing, asyncio, concurrent, subprocess, signal, ...",
        "work in the background or in another process escapes the clock and the checks",
        "do all work inside run(), on the current stream",
    ),
    _hard(
        "imports-network",
        "socket, http, urllib, requests, ...",
        "a kernel has nobody to talk to",
        "remove it",
    ),
    _hard(
        "imports-files",
        "io, pathlib, tempfile, shutil, glob, sqlite3, fcntl, ...",
        "files carry answers from one call to the next, or out of the sandbox",
        "keep everything in the source and the arguments",
    ),
    _hard(
        "imports-loader",
        "importlib, runpy, pkgutil, zipimport, site, ... (builtins may be imported: its members are judged)",
        "they run or replace code that the scan has not seen",
        "use import statements",
    ),
    _hard(
        "imports-serialisation",
        "pickle, marshal, shelve, base64, zlib, codecs, ...",
        "they turn data into code or objects that the scan has not seen",
        "write the data as plain Python",
    ),
    _hard(
        "imports-clock",
        "time, datetime, timeit, sched",
        "a kernel that knows the time can tell warm-up from timing, or sleep",
        "remove it; the harness does the timing",
    ),
    _hard(
        "imports-unknown",
        "a module that is neither on the list for kernels nor declared under spec.dependencies",
        "what is not known to be harmless is refused",
        "do without it, or declare its distribution under spec.dependencies",
    ),
    _hard("star-import", "from x import *", "its names cannot be followed", "import the names that are used"),
    _hard(
        "smuggled-module",
        "a module reached as an attribute of another (torch.os, typing.sys, self.ctypes)",
        "it is an import that does not look like one",
        "do without that module",
    ),
    # -- dynamic Python -----------------------------------------------------------------------------------------------
    _hard(
        "dynamic-code",
        "exec, eval, compile, __import__, typing.get_type_hints, dataclasses.make_dataclass",
        "code made at run time cannot be scanned (torch.compile and tilelang.compile are fine)",
        "write the code out",
    ),
    _hard(
        "dynamic-attribute",
        "setattr, delattr, operator.attrgetter, getattr whose name is no literal, getattr passed around",
        "the attribute that it reaches cannot be known",
        "write x.name; choose between names with a dict of values",
    ),
    _hard(
        "namespace-access",
        "globals, locals, vars, __builtins__",
        "they expose every name of a module to reading and writing",
        "use the names themselves",
    ),
    _hard(
        "dunder-access",
        "__globals__, __code__, __dict__, __class__, __subclasses__, ... (not __name__, __doc__, __init__, ...)",
        "they lead from any object to the interpreter's internals",
        "do without it",
    ),
    _hard(
        "frame-access",
        "f_back, f_globals, tb_frame, gi_frame, co_code, ...",
        "frames hold the caller's variables",
        "do without it",
    ),
    _hard(
        "module-as-value",
        "a module, or a class of torch, that is passed, returned or stored instead of used as module.name",
        "from there on nothing that is done to it can be followed",
        "pass the function or value that is needed",
    ),
    _hard(
        "foreign-assignment",
        "assigning, deleting or updating an attribute or item of a module, or an attribute of an object made elsewhere",
        "this is how torch, timers and comparisons are patched",
        "keep state in objects of your own classes",
    ),
    _hard(
        "private-member",
        "a name with a leading underscore in another package (python code may call ATen's attention operators, written out)",
        "private members are undocumented doors (torch._C, triton._C, functools._os)",
        "use the public interface",
    ),
    _hard(
        "class-factory",
        "type() with three arguments, types.new_class, the class that type(x) returns used as a value",
        "it builds or reaches classes that the scan cannot see",
        "write a class statement",
    ),
    _hard(
        "object-hooks",
        "defining __del__, __class__, __torch_function__, __reduce__, __getattribute__, ...",
        "they run code at moments, or in places, that nobody calls",
        "use ordinary methods",
    ),
    # -- process ------------------------------------------------------------------------------------------------------
    _hard("reads-files", "open, input, torch.load, torch.save, torch.hub, ...", "a kernel reads tensors", "remove it"),
    _hard(
        "ends-process",
        "exit, quit, breakpoint, SystemExit",
        "it ends or stops the worker",
        "raise ValueError where a call cannot be served",
    ),
    _hard(
        "os-call",
        "anything of os but reading an environment variable, os.path joins and os.cpu_count",
        "it acts on processes, files or the environment",
        "remove it",
    ),
    _hard(
        "environment",
        "reading any variable but TRITON_INTERPRET, or handing on the whole environment",
        "a worker's environment is scrubbed, so that any variable tells a kernel whether it is being judged",
        "read no environment; make it a tunable",
    ),
    # -- GPU ----------------------------------------------------------------------------------------------------------
    _hard(
        "stream-or-graph",
        "creating or switching CUDA streams, graphs, events and memory pools",
        "work elsewhere than on the current stream escapes the clock; a graph replays old pointers",
        "launch on torch.cuda.current_stream()",
    ),
    _hard(
        "native-extension",
        "cpp_extension, load_library, raw CUDA, external device libraries, compiler and launcher internals",
        "it runs code that the Solution's language did not build from this source",
        "write the kernel in the Solution's language",
    ),
    _hard(
        "compiler-flags",
        "flags for nvcc other than optimisation, line information and register limits",
        "they include files and load plugins",
        "use the flags on the list, or pass_configs",
    ),
    _hard(
        "dispatch-override",
        "torch.library.Library/impl/register_*, torch.overrides, modes, operators in a namespace of torch",
        "it replaces what torch's own operators do, for the harness as well",
        "call your function directly",
    ),
    _hard(
        "tensor-subclass",
        "a class derived from torch.Tensor or Parameter, _make_subclass, as_subclass",
        "it can delay or fake its contents",
        "return plain tensors",
    ),
    _hard(
        "process-state",
        "torch.set_*, profilers, hooks of the compilers, torch.manual_seed",
        "it changes how everything else in the process runs",
        "pass it as an argument of the call it is meant for",
    ),
    _hard(
        "persists-l2",
        "T.annotate_l2_hit_ratio, access policy windows, device limits",
        "lines kept in L2 make the next call look faster than it is",
        "use eviction hints of single loads",
    ),
    # -- results ------------------------------------------------------------------------------------------------------
    _hard(
        "except-fallback",
        "an except handler that computes with torch, itself or through a function of the Solution",
        "a failing kernel would pass as a working one",
        "let the error out; decide by shape before the call",
    ),
    _hard(
        "no-kernel",
        "a Solution in a tile language without a kernel in it",
        "it would measure something else under the language's name",
        "write the kernel, or set language to 'python'",
    ),
    _hard(
        "torch-compute",
        "in a tile language: any function of torch but allocation, views, metadata; compute methods of tensors",
        "the work must be done by kernels that the language built",
        "move it into the kernel, or set language to 'python'",
    ),
    _hard(
        "tensor-arithmetic",
        "in a tile language: @, and arithmetic on tensors outside kernels",
        "each such operator is a kernel of torch",
        "move it into the kernel",
    ),
    # -- notes --------------------------------------------------------------------------------------------------------
    _soft("try", "try, contextlib.suppress", "an error that is caught can hide a path", "decide before the call"),
    _soft(
        "cached-function",
        "functools.cache, lru_cache, cached_property",
        "right for compiled kernels; wrong where it keeps outputs",
        "cache by sizes and dtypes only",
    ),
    _soft(
        "keeps-state",
        "global, nonlocal, a module-level container, mutable default or attribute changed by a function",
        "what one call leaves behind can answer the next",
        "compute every result from the arguments",
    ),
    _soft(
        "address",
        "data_ptr, id, untyped_storage, as_strided, set_",
        "right for alignment; an address also identifies an input, or reaches beside it",
        "use it for alignment only",
    ),
    _soft("imports-os", "import os", "see os-call and environment", "do without it"),
    _soft("imports-random", "random, numpy.random, torch's random state", "results may differ", "take no random numbers"),
    _soft(
        "imports-library",
        "a library declared under spec.dependencies",
        "its code is not scanned",
        "expect the ownership audit to reject what it computes",
    ),
    _soft(
        "copies-with-torch",
        "in a tile language: copy_, contiguous, clone",
        "it is time in kernels of torch",
        "declare the layout, or copy in the kernel",
    ),
    _soft(
        "long-constant",
        "a text or bytes constant beyond 2,000 characters that is no docstring",
        "it may be code in disguise",
        "compute tables instead",
    ),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in _TABLE}
"""Name -> rule, in the order in which documentation prints them."""
