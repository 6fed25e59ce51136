"""Between two timed calls nothing stays in the L2, not even what a kernel asks it to keep."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
import triton
import triton.language as tl
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.sandbox.timing import BlockTimer

pytestmark = pytest.mark.gpu

MIB_READ = 16  # a quarter to a third of an H100's or H200's L2
BLOCK = 4096


@triton.jit
def _sum_blocks(x_ptr, out_ptr, POLICY: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    values = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK), eviction_policy=POLICY)
    tl.store(out_ptr + block, tl.sum(values, axis=0))


@pytest.fixture(scope="module")
def read() -> Callable[[str], None]:
    x = torch.randn(MIB_READ * 2**18, device="cuda:0")
    out = torch.empty(x.numel() // BLOCK, device="cuda:0")
    return lambda policy: _sum_blocks[(out.numel(),)](x, out, policy, BLOCK, num_warps=4)


def timed(timer: BlockTimer, call: Callable[[], object]) -> float:
    samples = timer.time([0] * 20, {0: call}, lambda index: None, lambda index, returned: None)
    return median(sample.device_us for sample in samples[2:])


def test_kernel_that_keeps_its_input_in_the_l2_is_timed_cold(read):
    timer = BlockTimer("cuda:0")
    assert timed(timer, lambda: read("evict_last")) > 0.95 * timed(timer, lambda: read(""))


def test_kernel_would_be_faster_if_other_memory_were_written(read):
    timer = BlockTimer("cuda:0")
    cold = timed(timer, lambda: read(""))
    timer._reset_persisting = lambda: 0
    assert timed(timer, lambda: read("evict_last")) < 0.9 * cold


def test_what_a_block_kept_is_not_left_to_the_next_one(read):
    timer, careless = BlockTimer("cuda:0"), BlockTimer("cuda:0")
    careless._reset_persisting = lambda: 0
    cold = timed(careless, lambda: read(""))
    timed(timer, lambda: read("evict_last"))
    assert timed(careless, lambda: read("")) > 0.95 * cold


def test_a_driver_that_refuses_to_release_them_is_an_error(read):
    timer = BlockTimer("cuda:0")
    timer._reset_persisting = lambda: 201
    with raises(HardwareError, "cuda_call_failed", "201"):
        timed(timer, lambda: read(""))
