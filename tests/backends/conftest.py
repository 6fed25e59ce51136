"""A tiny Definition (scale a matrix) with one kernel in each language, written out as Solutions into a folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload

DEFINITION = {
    "schema_version": 1,
    "name": "scale",
    "version": "1.0.0",
    "op_type": "test",
    "dtypes": {"T": ["bfloat16", "float16", "float32"]},
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "T"}, "factor": {"shape": None, "dtype": "float32"}},
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
    "reference": "# Source: https://example.org/scale\ndef run(x, factor):\n    return x * factor\n",
}

KERNELS = {
    "triton": """
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def scale_rows(x_ptr, factor, out_ptr, stride, M, N: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * stride + lanes, mask=lanes < N).to(tl.float32)
    tl.store(out_ptr + row * N + lanes, (x * factor).to(out_ptr.dtype.element_ty), mask=lanes < N)


def run(x, factor, out, *, num_warps=4):
    M, N = x.shape
    if M == 0:
        return
    scale_rows[(M,)](x, factor, out, x.stride(0), M, N, triton.next_power_of_2(N), num_warps=num_warps)
""",
    "tilelang": """
import functools

import tilelang
import tilelang.language as T


@functools.lru_cache(maxsize=None)
@tilelang.jit
def scale_rows(N, dtype, threads):
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")

    @T.prim_func
    def scale(x: T.StridedTensor((M, N), (stride, 1), dtype), factor: T.float32, out: T.Tensor((M, N), dtype)):
        with T.Kernel(M, threads=threads) as row:
            for column in T.Parallel(N):
                out[row, column] = T.cast(T.cast(x[row, column], "float32") * factor, dtype)

    return scale


def run(x, factor, out, *, threads=128):
    M, N = x.shape
    if M == 0:
        return
    scale_rows(N, x.dtype, threads)(x, factor, out)
""",
    "cutile": """
import cuda.tile as ct
import torch


@ct.kernel
def scale_rows(x, factor: float, out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    tile = ct.load(x, index=(row, 0), shape=(1, TILE)).astype(ct.float32)
    ct.store(out, index=(row, 0), tile=(tile * factor).astype(out.dtype))


def run(x, factor, out):
    M, N = x.shape
    if M == 0:
        return
    tile = 1 << (N - 1).bit_length()
    ct.launch(torch.cuda.current_stream(), (M, 1, 1), scale_rows, (x, factor, out, tile))
""",
    "python": """
def run(x, factor, out):
    out.copy_(x * factor)
""",
}


@pytest.fixture(scope="session")
def kernels() -> dict[str, str]:
    """Language -> source of its scale kernel."""
    return dict(KERNELS)


@pytest.fixture(scope="session")
def definition() -> Definition:
    return Definition.from_dict(DEFINITION)


def write_solution_to(
    root: Path,
    language: str,
    source: str | None = None,
    *,
    name: str = "",
    files: dict[str, str] | None = None,
    **spec: object,
) -> SolutionFiles:
    folder = root / (name or f"scale_{language}")
    sources = {"kernel.py": KERNELS[language] if source is None else source, **(files or {})}
    record = {
        "schema_version": 1,
        "name": folder.name,
        "definition": "scale",
        "author": "tests",
        "spec": {"language": language, "entry_point": "kernel.py::run", **spec},
        "sources": [{"path": path} for path in sources],
    }
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "solution.json").write_text(json.dumps(record))
    return SolutionFiles.read(folder)


@pytest.fixture
def write_solution(tmp_path: Path) -> Callable[..., SolutionFiles]:
    """Write a Solution: the language's scale kernel, or the given source, with spec keys replaced and files added."""
    return functools.partial(write_solution_to, tmp_path)


@pytest.fixture(scope="module")
def write_shared_solution(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SolutionFiles]:
    """Return ``write_solution`` for files that several tests of a module use."""
    return functools.partial(write_solution_to, tmp_path_factory.mktemp("solutions"))


@pytest.fixture(scope="session")
def workload() -> Callable[..., Workload]:
    """Make a Workload of the tiny Definition: ``workload(M=8, x="strided(N + 8, 1)")``."""

    def make(M: int = 3, N: int = 256, dtype: str = "bfloat16", **layouts: str) -> Workload:
        return Workload.from_dict(
            {
                "definition": "scale",
                "axes": {"M": M, "N": N},
                "dtypes": {"T": dtype},
                "inputs": {"factor": {"type": "scalar", "value": 0.5}},
                "layouts": layouts,
            }
        )

    return make
