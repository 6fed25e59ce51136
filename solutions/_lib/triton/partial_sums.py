"""Partial sums over rows, which a second kernel adds up in a fixed order: without atomics, equal calls have equal bits."""

import triton
import triton.language as tl

# Of the partial sums that are added up at once, and of the columns that a program does that for.
SUM_PARTS = 64
SUM_COLUMNS = 32


@triton.jit(do_not_specialize=["parts"])
def sum_parts(partial_ptr, out_ptr, parts, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add up float32 sums [parts, N] to out [N]; zeros if there are no parts."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    sums = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)[:, None]
        sums += tl.load(partial_ptr + part.to(tl.int64) * N + cols, mask=(part < parts) & in_row, other=0.0)
    totals = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(out_ptr + cols, totals.to(out_ptr.dtype.element_ty), mask=in_row)


def cdiv(value: int, divisor: int) -> int:
    """Return the quotient, rounded up; triton.cdiv costs microseconds a call."""
    return -(-value // divisor)
