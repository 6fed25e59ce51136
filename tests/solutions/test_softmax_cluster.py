"""The Triton softmax over long rows compiles to the exchange that its PTX is written for."""

from __future__ import annotations

import re

import pytest
import triton
from shipped_records import CATALOG
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilegym_db.resolver.loader import load_verified

pytestmark = pytest.mark.sweep

SOLUTION = CATALOG.solution("softmax_triton")
BLOCKS = 8


@pytest.mark.slow
@pytest.mark.parametrize(("warps", "columns"), [(4, 49160), (4, 128256), (8, 49160), (8, 128256), (8, 131072)])
def test_every_thread_of_a_cluster_has_one_part_of_the_row(warps: int, columns: int) -> None:
    names = load_verified(SOLUTION, SOLUTION.digest).__globals__
    repeat = 1 << (-(-columns // (BLOCKS * warps * 32 * 8)) - 1).bit_length()
    constants = {"N": columns, "BLOCKS": BLOCKS, "WARPS": warps, "REPEAT": repeat}
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_stride": "i32", "out_stride": "i32"}
    source = ASTSource(
        fn=names["_softmax_cluster"],
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs={(len(pointers) + i,): value for i, value in enumerate(constants.values())},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": warps, "num_ctas": BLOCKS, "maxnreg": names["CLUSTER_REGISTERS"][warps]}

    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    loaded = re.search(r"tt\.load .*, #(\w+)>", kernel.asm["ttgir"])
    assert loaded is not None
    layout = re.search(rf"#{loaded[1]} = (.*)", kernel.asm["ttgir"])
    assert layout is not None
    for part in ("sizePerThread = [1, 1, 8]", "threadsPerWarp = [1, 1, 32]", f"warpsPerCTA = [1, 1, {warps}]"):
        assert part in layout[1]
    ptx = kernel.asm["ptx"]
    assert ptx.count("st.async") == ptx.count("mbarrier.try_wait") == 1  # a thread takes part once
    began = ptx.index("barrier.cluster.arrive.relaxed") + 1
    assert ptx.index("barrier.cluster", began) == ptx.index("barrier.cluster.wait.acquire")  # nothing of the compiler's
    assert "bar.sync" not in ptx  # the compiler exchanges nothing itself
    assert kernel.metadata.shared == 0
