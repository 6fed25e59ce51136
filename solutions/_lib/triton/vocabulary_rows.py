"""Rows of a vocabulary that are read once: whole, in pieces if rows are few, or in blocks of columns; and numbers near 0."""

import torch
import triton
import triton.language as tl

FEW_ROWS = 512  # below about four a multiprocessor, rows are cut into pieces that several programs read
MIN_PIECE = 4096  # columns


def row_steps(x: torch.Tensor, repeat: int, warps: int) -> tuple[int, int]:
    """Return what a program reads of rows [M, V] at once: vectors of 16 bytes a thread, and lanes of a vector of each thread."""
    lanes = 32 * warps * (16 // x.element_size())
    while lanes > 64 and repeat * lanes > 2 * x.shape[1]:
        repeat, lanes = (repeat // 2, lanes) if repeat > 1 else (1, lanes // 2)
    return repeat, lanes


def row_pieces(x: torch.Tensor, step: int) -> tuple[int, int]:
    """Return the pieces of each row of x [M, V], and the columns of a piece, which are a multiple of ``step``."""
    M, V = x.shape
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    columns = -(-V // (pieces * step)) * step
    return -(-V // columns), columns


def row_blocks(x: torch.Tensor, block: int) -> tuple[int, int]:
    """Return the columns of a block of a row of x [M, V], at most ``block`` of them, and the blocks of a row."""
    V = x.shape[1]
    block = min(block, max(32, 1 << (V - 1).bit_length()))
    return block, -(-V // block)


@triton.jit
def own_piece(pieces, piece_columns, V):
    """Return the row of a program, the first column of its piece, and where the piece ends."""
    row = (tl.program_id(0) // pieces).to(tl.int64)  # rows * vocabulary may not fit into 32 bits
    first = tl.program_id(0) % pieces * piece_columns
    return row, first, tl.minimum(first + piece_columns, V)


@triton.jit
def own_block(blocks, BLOCK: tl.constexpr):
    """Return the row of a program, and the columns of its block."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    return row, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def step_columns(REPEAT: tl.constexpr, LANES: tl.constexpr):
    """Return the columns of a step. A lane has its own sums until the end of a row, so warps do not wait for each other."""
    return tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def load_once(ptrs, inside, other):
    """Load numbers that are not read again, in float32."""
    return tl.load(ptrs, mask=inside, other=other, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_zeros(ptrs, inside):
    """Store zeros, the gradients of a row that is not learned."""
    tl.store(ptrs, tl.zeros(ptrs.shape, dtype=ptrs.dtype.element_ty), mask=inside)


@triton.jit
def add_pieces(sums_ptr, loss_ptr, pieces, BLOCK: tl.constexpr):
    """Add up the pieces of a row."""
    row = tl.program_id(0)
    which = tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * pieces + which, mask=which < pieces, other=0.0)
    tl.store(loss_ptr + row, tl.sum(sums, axis=0))


@triton.jit
def base_of(top):
    """Return what to subtract: 0 while all is -inf, as -inf - -inf would make a sum NaN before the row is known."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def grow(top, total, x, per_temperature):
    """Return the maximum of each lane, and its sum of exp((x - maximum) / temperature), with the columns of x [REPEAT, LANES]."""
    new_top = tl.maximum(top, tl.max(x, axis=0))
    base = base_of(new_top)
    added = tl.sum(tl.exp((x - base[None, :]) * per_temperature), axis=0)
    return new_top, total * tl.exp((top - base) * per_temperature) + added


@triton.jit
def join(tops, totals, per_temperature):
    """Return the maximum of lanes, or of pieces of rows along the last axis, and their sum."""
    axis: tl.constexpr = len(tops.shape) - 1
    top = tl.max(tops, axis=axis, keep_dims=True)
    total = tl.sum(totals * tl.exp((tops - base_of(top)) * per_temperature), axis=axis)
    return tl.max(tops, axis=axis), total


@triton.jit
def _series(x):
    """Return (exp(x) - 1 - x) / x^2 near 0."""
    series = x * (1 / 40320) + 1 / 5040
    series = x * series + 1 / 720
    series = x * series + 1 / 120
    series = x * series + 1 / 24
    series = x * series + 1 / 6
    return x * series + 1 / 2


@triton.jit
def expm1(x):
    """Return exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    return tl.where(tl.abs(x) < 0.4, x * (x * _series(x) + 1), tl.exp(x) - 1)


@triton.jit
def exp_over_line(x):
    """Return exp(x) - x - 1, near 0 by its series."""
    return tl.where(tl.abs(x) < 0.4, x * x * _series(x), tl.exp(x) - x - 1)


@triton.jit
def log1p(x):
    """Return log(1 + x), with the rounding of the sum put back."""
    total = 1 + x
    return tl.log(total) + (x - (total - 1)) / total
