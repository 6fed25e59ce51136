"""No warp waits at a barrier of a TileLang pipeline while nothing waits for that warp.

Such a warp can miss two turns of the barrier, which looks like none, and then waits for ever.
"""

from __future__ import annotations

import ast
import functools
import re

import pytest
import tilelang
import tilelang.language as T
import torch
from shipped_records import CATALOG
from tilelang_sources import generated

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog

# Of kernels that seldom change, lowered by TileLang.
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.turn("solutions/gemm/", "solutions/attention/", "solutions/loss/", "constraints.txt"),
]

CHOSEN = re.compile(r"^( *)if \(tl::tl_shuffle_elect<(\d+)>\(\)\) \{\n(.*?)^\1\}", re.MULTILINE | re.DOTALL)
"""What one thread of so many does."""
BF16, F16 = torch.bfloat16, torch.float16
KERNELS = {
    "gemm, a row, many columns": ("gemm_tilelang", "gemm_skinny_kernel", (128256, 4096, BF16, 16, 64, 128, 4)),
    "gemm, a row, few columns": ("gemm_tilelang", "gemm_skinny_kernel", (1000, 1000, F16, 16, 16, 256, 6)),
    "gemm, large tiles": ("gemm_tilelang", "gemm_dense_kernel", (4096, 4096, BF16, 128, 256, 64, 4, 8, 1, True, 132)),
    "gemm, parts of K": ("gemm_tilelang", "gemm_dense_kernel", (512, 512, F16, 64, 128, 128, 4, 8, 4, False, 132)),
    "fp8, a row": ("gemm_fp8_blockwise_tilelang", "gemm_fp8_skinny_kernel", (7168, 16384, 16, 64, 7, 3)),
    "fp8, pairs": ("gemm_fp8_blockwise_tilelang", "gemm_fp8_pairs_kernel", (7168, 16384, True, 4, 8, 132)),
    "fp8, tiles": ("gemm_fp8_blockwise_tilelang", "gemm_fp8_dense_kernel", (512, 7168, 128, 128, 4, 8, 1, True, 132)),
    "fp8, parts of K": (
        "gemm_fp8_blockwise_tilelang",
        "gemm_fp8_dense_kernel",
        (512, 7168, 64, 128, 4, 8, 4, False, 132),
    ),
    "fp8 groups": ("moe_grouped_gemm_fp8_tilelang", "grouped_fp8_kernel", (128, 1536, 2048, 128, 128, 4, False, True)),
    "fp8 groups of few rows": (
        "moe_grouped_gemm_fp8_tilelang",
        "grouped_fp8_kernel",
        (128, 1536, 2048, 16, 64, 8, True, True),
    ),
    "fp8 groups, pairs": ("moe_grouped_gemm_fp8_tilelang", "grouped_fp8_pairs_kernel", (128, 1536, 2048, 4, 132)),
    "experts, up": ("moe_experts_tilelang", "first_product_kernel", (BF16, "silu", False, 128, 128, 64, 4, 8, 132)),
    "experts, up, few": (
        "moe_experts_tilelang",
        "first_product_few_kernel",
        (BF16, "silu", False, 16, 64, 128, 6, 132),
    ),
    "experts, up, by column": (
        "moe_experts_oai_tilelang",
        "first_product_kernel",
        (BF16, "oai", True, 64, 128, 64, 5, 8, 132),
    ),
    "experts, up, few, by column": (
        "moe_experts_oai_tilelang",
        "first_product_few_kernel",
        (BF16, "oai", True, 32, 64, 128, 5, 132),
    ),
    "experts, down": (
        "moe_experts_tilelang",
        "second_product_kernel",
        (BF16, False, False, False, 128, 256, 64, 4, 8, 132),
    ),
    "experts, down, few, by column": (
        "moe_experts_oai_tilelang",
        "second_product_kernel",
        (BF16, True, True, True, 16, 128, 128, 6, 8, 132),
    ),
    "attention": ("attention_prefill_tilelang", "prefill_kernel", (128, BF16, 128, 128, 128, 2, 2, 132)),
    "attention, large heads": (
        "attention_prefill_tilelang",
        "prefill_kernel",
        (256, BF16, 128, 64, 256, 1, 2, 132),
    ),
    "attention to all keys": (
        "attention_bidirectional_tilelang",
        "attention_kernel",
        (64, BF16, False, 192, 128, 64, 2, 2, True, 132),
    ),
    "attention to all keys, large heads": (
        "attention_bidirectional_tilelang",
        "attention_kernel",
        (128, BF16, False, 128, 128, 128, 2, 2, False, 132),
    ),
    "attention in turns": (
        "attention_prefill_tilelang_overlapped",
        "attention_kernel",
        (128, BF16, True, 128, 128, 128, 2, 2, True, 132),
    ),
    "attention with sinks": (
        "attention_sink_prefill_tilelang",
        "sink_prefill_kernel",
        (64, BF16, 192, 128, 64, 3, 1, 132),
    ),
    "attention, a step": ("attention_decode_tilelang", "decode_kernel", (128, BF16, 16, 64, 128, 3, False)),
    "latent attention": ("mla_prefill_tilelang", "prefill_kernel", (192, 128, BF16, 128, 64, 192, 128, 2, 2, 132)),
    "latent attention, a step": (
        "mla_expanded_decode_tilelang",
        "decode_kernel",
        (192, 128, BF16, 64, 192, 128, 2, False),
    ),
    "attention with sinks, a step": (
        "attention_sink_decode_tilelang",
        "sink_decode_kernel",
        (64, BF16, 16, 128, 64, 3, True),
    ),
    "paged attention, a step": (
        "attention_paged_decode_tilelang",
        "decode_kernel",
        (128, 16, BF16, 16, 64, 128, 3, False),
    ),
    "attention to latents, a step": ("mla_decode_tilelang", "latent_kernel", (512, 64, BF16, 64, 64, 512, 2, False)),
    "masked attention": ("attention_masked_prefill_tilelang", "prefill_kernel", (128, BF16, 128, 64, 128, 4)),
    "masked latent attention": ("mla_masked_tilelang", "prefill_kernel", (192, 128, BF16, 128, 64, 192, 128, 4)),
    "masked attention with sinks": (
        "attention_sink_masked_prefill_tilelang",
        "prefill_kernel",
        (64, BF16, 128, 64, 64, 4),
    ),
    "masked decode with sinks": (
        "attention_sink_masked_decode_tilelang",
        "decode_kernel",
        (64, BF16, 16, 128, 64, 3, False),
    ),
    "soft-capped attention": ("attention_softcap_tilelang", "attention_kernel", (256, BF16, 128, 64, 256, 2)),
    "packed attention": ("attention_varlen_tilelang", "packed_kernel", (128, BF16, True, 128, 64, 128, 4)),
    "masked attention, a step": (
        "attention_masked_decode_tilelang",
        "decode_kernel",
        (128, BF16, 16, 64, 128, 3, False),
    ),
    "loss, logits": (
        "fused_linear_cross_entropy_tilelang",
        "product_kernel",
        (None, 128256, 4096, BF16, True, True, False, False, 256, 4, 132),
    ),
    "loss, gradient of hidden states": (
        "fused_linear_cross_entropy_tilelang",
        "product_kernel",
        (None, 4096, 128256, BF16, True, False, False, False, 256, 4, 132),
    ),
    "loss, gradient of the weight": (
        "fused_linear_cross_entropy_tilelang",
        "product_kernel",
        (128256, 4096, 2048, BF16, False, False, True, True, 256, 4, 132),
    ),
}
"""Every kernel with a pipeline: the Solution, the factory and its arguments at a size of production."""
UNDIVIDED = {
    "a few rows of a linear layer": ("gemm_qkv_tilelang", "linear_rows_kernel", (4096, "bfloat16", 64, 128, 3)),
    "a few rows of q, k and v": ("gemm_qkv_tilelang", "qkv_rows_kernel", (4096, "bfloat16", 64, 128, 3)),
    "a few rows of swiglu": ("gemm_swiglu_tilelang", "swiglu_rows_kernel", (4096, "bfloat16", 32, 128, 3)),
}
"""Kernels with a pipeline in which every thread fetches its own share, so that no warp waits for another one's."""
TILELANG = [files for files in CATALOG.solutions.values() if files.record.spec.language == "tilelang"]


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
def test_one_warp_waits_for_room_and_fetches(form: str) -> None:
    solution, factory, arguments = KERNELS[form]
    module = load_entry(Catalog.default().solution(solution)).__globals__
    assert set(fetchers(generated(module[factory], arguments))) == {32}


@pytest.mark.parametrize("form", UNDIVIDED)
def test_no_warp_waits_where_every_thread_fetches(form: str) -> None:
    solution, factory, arguments = UNDIVIDED[form]
    module = load_entry(Catalog.default().solution(solution)).__globals__
    source = generated(module[factory], arguments)
    assert ("mbarrier" in source, "cp_async" in source) == (False, True)


def names_in(tree: ast.AST) -> set[str]:
    """The names and attributes that a part of a source uses."""
    nodes = list(ast.walk(tree))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}


def test_every_pipeline_has_a_schedule_and_is_tried_above() -> None:
    """A loop of ``T.Pipelined`` that TileLang divides among warps by itself has the fault that the next test shows."""
    tried = {factory for _, factory, _ in KERNELS.values()}
    undivided = {factory for _, factory, _ in UNDIVIDED.values()}
    for files in TILELANG:
        for path, source in files.sources.items():
            functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
            used = {function.name: names_in(function) for function in functions}
            macros = {
                function.name
                for function in functions
                if "macro" in set().union(*map(names_in, function.decorator_list), ())
            }
            assert "Pipelined" not in names_in(ast.parse(source)) - set().union(*used.values(), ())
            for name, uses in used.items():
                pipelined = {macro for macro in macros & uses if "Pipelined" in used[macro]}
                if name in macros or not ("Pipelined" in uses or pipelined) or name in undivided:
                    continue
                assert "annotate_ws_schedule" in uses, f"{files.name}: {path}: {name} has a pipeline without a schedule"
                assert name in tried, f"{files.name}: add {name} to KERNELS"


def test_tilelang_without_a_schedule_lets_four_warps_wait() -> None:
    """Where this fails, TileLang has mended it, and the schedules can go."""
    source = generated(unscheduled, ())
    assert fetchers(source) == [128]
