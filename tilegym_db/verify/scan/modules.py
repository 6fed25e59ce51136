"""Which modules a Solution may import, and which rule refuses each of the others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

__all__ = ["KNOWN_ROOTS", "SMUGGLED", "distribution_roots", "import_rule", "words"]


def words(text: str) -> frozenset[str]:
    """The words of a text: how these tables are written."""
    return frozenset(text.split())


_GROUPS = {
    "imports-introspection": (
        "gc inspect sys ast dis code codeop opcode symtable traceback tracemalloc weakref linecache pdb bdb trace "
        "profile cProfile pstats faulthandler atexit contextvars token tokenize unittest doctest pydoc rlcompleter "
        "test pytest sre_compile sre_parse string copyreg"
    ),
    "imports-native-code": (
        "ctypes cffi mmap _ctypes cupy cupyx pycuda pyopencl numba llvmlite jax jaxlib pybind11 nanobind cython Cython cppyy "
        "cuda cutlass tvm tvm_ffi pynvml pynvjitlink nvmath warp torch_c_dlpack_ext nvidia tinygrad"
    ),
    "imports-concurrency": (
        "threading _thread multiprocessing asyncio asyncore asynchat concurrent subprocess signal sched queue select "
        "selectors pty joblib ray dask mpi4py psutil anyio trio greenlet gevent"
    ),
    "imports-network": (
        "socket socketserver ssl http urllib ftplib smtplib poplib imaplib nntplib telnetlib xmlrpc email webbrowser "
        "requests httpx aiohttp urllib3 wsgiref huggingface_hub wandb"
    ),
    "imports-files": (
        "io pathlib tempfile shutil glob fileinput sqlite3 dbm csv fcntl termios tty resource posix posixpath ntpath "
        "nt genericpath pwd grp syslog zipfile tarfile gzip bz2 lzma duckdb h5py safetensors filelock fsspec"
    ),
    "imports-loader": (
        "importlib imp runpy pkgutil zipimport modulefinder __main__ site sysconfig setuptools pip "
        "pkg_resources distutils ensurepip venv compileall py_compile"
    ),
    "imports-serialisation": (
        "pickle pickletools marshal shelve cloudpickle dill base64 binascii codecs encodings zlib quopri uu"
    ),
    "imports-clock": "time datetime timeit",
    "imports-random": "random secrets uuid",
    "imports-os": "os",
}

DENIED: dict[str, str] = {name: rule for rule, names in _GROUPS.items() for name in names.split()}
"""Module -> the rule that names it. ``imports-os`` and ``imports-random`` are notes; every other rule refuses."""

ALLOWED_ROOTS = words(
    "__future__ abc bisect builtins cmath collections contextlib copy dataclasses decimal enum fractions functools heapq "
    "itertools json keyword logging math numbers operator packaging platform re statistics struct textwrap torch "
    "types typing typing_extensions warnings"
)
"""What every Solution may import. :mod:`.paths` names the members of these that are refused all the same."""

LANGUAGE_ROOTS: dict[str, frozenset[str]] = {
    "python": frozenset(),
    "triton": frozenset({"triton"}),
    "tilelang": frozenset({"tilelang"}),
    "cutile": frozenset({"cuda.tile"}),
}

KNOWN_ROOTS = frozenset(sys.stdlib_module_names) | set(DENIED) | ALLOWED_ROOTS | {"triton", "tilelang", "numpy"}
"""Names that no source file may take."""

SMUGGLED = (
    frozenset(DENIED)
    - words("code string trace test select signal queue profile random token resource cuda warp nvidia")
) | {"builtins"}
"""Module names that are refused as attributes of anything imported; those left out are also names of functions."""


def distribution_roots(dependencies: Iterable[str]) -> frozenset[str]:
    """The import names that declared distributions stand for: ``flash-attn>=2`` is ``flash_attn``."""
    names = (re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0] for text in dependencies)
    return frozenset(name.replace("-", "_").replace(".", "_").lower() for name in names)


def import_rule(module: str, language: str, declared: frozenset[str]) -> str | None:
    """The rule that an import of ``module`` breaks, or None.

    Args:
        module: dotted name, absolute, not one of the Solution's own.
        language: of the Solution.
        declared: :func:`distribution_roots` of its dependencies.
    """
    root = module.partition(".")[0]
    if any(f"{module}.".startswith(f"{allowed}.") for allowed in LANGUAGE_ROOTS[language]) or root in ALLOWED_ROOTS:
        return None
    if root == "cuda" and module.startswith("cuda.tile"):
        return "imports-library" if "cuda_tile" in declared else "imports-unknown"
    if root in DENIED:
        return DENIED[root]
    if root.lower() in declared and root not in sys.stdlib_module_names:
        return "imports-library"
    return "imports-unknown"
