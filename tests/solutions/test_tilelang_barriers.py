"""No warp waits at a barrier of a TileLang pipeline while nothing waits for that warp.

Such a warp can miss two turns of the barrier, which looks like none, and then waits for ever.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import tilelang
import tilelang.language as T
import torch
from tvm.target import Target

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog

CHOSEN = re.compile(r"^( *)if \(tl::tl_shuffle_elect<(\d+)>\(\)\) \{\n(.*?)^\1\}", re.MULTILINE | re.DOTALL)
"""What one thread of so many does."""
KERNELS = {
    "a row, many columns": ("gemm_skinny_kernel", (128256, 4096, torch.bfloat16, 16, 64, 128, 4)),
    "a row, few columns": ("gemm_skinny_kernel", (1000, 1000, torch.float16, 16, 16, 256, 6)),
    "large tiles": ("gemm_dense_kernel", (4096, 4096, torch.bfloat16, 128, 256, 64, 4, 8, 1, True, 132)),
    "parts of K": ("gemm_dense_kernel", (512, 512, torch.float16, 64, 128, 128, 4, 8, 4, False, 132)),
}


def generated(factory: Any, arguments: tuple[Any, ...]) -> str:
    """The CUDA source that TileLang makes of a kernel for an H100."""
    function, target = factory.__wrapped__.get_tir(*arguments), Target({"kind": "cuda", "arch": "sm_90"})
    with target:
        return str(tilelang.lower(function, target=target, enable_device_compile=False).kernel_source)


def fetchers(source: str) -> list[int]:
    """Of how many threads each one is that fetches. All of them waited for room before."""
    return [int(threads) for _, threads, does in CHOSEN.findall(source) if "tma_load" in does]


@functools.cache
@tilelang.jit
def unscheduled():
    @T.prim_func
    def unscheduled(
        a: T.Tensor((64, 512), "bfloat16"), b: T.Tensor((64, 512), "bfloat16"), out: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128) as _:
            a_tile, b_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            sums = T.alloc_fragment((64, 64), "float32")
            T.clear(sums)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(a[0, k * 64], a_tile)
                T.copy(b[0, k * 64], b_tile)
                T.gemm(a_tile, b_tile, sums, transpose_B=True)
            T.copy(sums, out)

    return unscheduled


@pytest.mark.parametrize("form", KERNELS)
def test_one_warp_of_gemm_waits_for_room_and_fetches(form: str) -> None:
    factory, arguments = KERNELS[form]
    module = load_entry(Catalog.default().solution("gemm_tilelang")).__globals__
    assert fetchers(generated(module[factory], arguments)) == [32]


def test_what_tilelang_makes_without_a_schedule_lets_four_warps_wait() -> None:
    """Where this fails, TileLang has mended it, and the schedule in gemm_tilelang can go."""
    source = generated(unscheduled, ())
    assert fetchers(source) == [128]
