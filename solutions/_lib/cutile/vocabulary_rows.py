"""Rows of a vocabulary that are read once: whole, in pieces if rows are few, or in blocks of columns; and numbers near 0."""

from typing import Annotated

import cuda.tile as ct
import torch

# The vocabulary is a compile-time constant, so that aligned rows are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
LOWEST = -float("inf")

FEW_ROWS = 512  # below about four a multiprocessor, rows are cut into pieces that several blocks read
MIN_PIECE = 4096  # columns


def row_step(x: torch.Tensor, repeat: int, warps: int) -> tuple[int, int]:
    """Return what a block reads of rows [M, V] at once: vectors of 16 bytes a thread, and lanes of a vector of each thread."""
    lanes = 32 * warps * (16 // x.element_size())
    while lanes > 64 and repeat * lanes > 2 * x.shape[1]:
        repeat, lanes = (repeat // 2, lanes) if repeat > 1 else (1, lanes // 2)
    return repeat, lanes


def row_steps(x: torch.Tensor, repeat: int, warps: int) -> tuple[int, int, int, int]:
    """Return the pieces of each row of x [M, V], the steps of a piece, and what a step reads."""
    m, n = x.shape
    repeat, lanes = row_step(x, repeat, warps)
    pieces = 1 if m >= FEW_ROWS else max(1, min(FEW_ROWS // m, n // MIN_PIECE))
    steps = -(-n // (pieces * repeat * lanes))
    return -(-n // (steps * repeat * lanes)), steps, repeat, lanes


def row_blocks(x: torch.Tensor, tile: int) -> tuple[int, int]:
    """Return the blocks of a row of x [M, V], and the columns of each, at most ``tile``."""
    n = x.shape[1]
    tile = min(tile, max(32, 1 << (n - 1).bit_length()))
    return -(-n // tile), tile


def hinted(kernel):
    """Return the kernel for each number of warps that a Solution may choose."""
    return {warps: kernel.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


@ct.function
def step_columns(REPEAT, LANES):
    """Return the columns of a step. Lanes share nothing until the end of the row, so that warps do not wait for each other."""
    return ct.arange(REPEAT, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]


@ct.function
def load_columns(rows, row, cols, padding):
    """Load columns of a row in float32, ``padding`` behind its end."""
    values = ct.gather(rows, (row, cols), mask=cols < rows.shape[1], check_bounds=False, padding_value=padding)
    return values.astype(ct.float32)


@ct.function
def store_columns(rows, row, cols, values):
    """Store columns of a row, and nothing behind its end."""
    ct.scatter(rows, (row, cols), values.astype(rows.dtype), mask=cols < rows.shape[1], check_bounds=False)


@ct.kernel
def add_pieces(sums, loss, PIECES: Int, TILE_PIECES: Int):
    """Add up the pieces of a row."""
    row = ct.bid(0)
    pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
    parts = ct.gather(sums, (row, pieces), mask=pieces < PIECES, check_bounds=False, padding_value=0.0)
    ct.scatter(loss, row, ct.sum(parts))


@ct.function
def base_of(top):
    """Return what to subtract: 0 while all is -inf, as -inf - -inf would make a sum NaN before the row is known."""
    return ct.where(top == LOWEST, 0.0, top)


@ct.function
def grow(top, total, x, per_temperature):
    """Return the maximum of each lane, and its sum of exp((x - maximum) / temperature), with the columns of x [REPEAT, LANES]."""
    new_top = ct.maximum(top, ct.max(x, axis=0))
    base = base_of(new_top)
    added = ct.sum(ct.exp((x - base[None, :]) * per_temperature), axis=0)
    return new_top, total * ct.exp((top - base) * per_temperature) + added


@ct.function
def join(tops, totals, per_temperature):
    """Return the maximum of all lanes or pieces of a row, and their sum."""
    top = ct.max(tops)
    return top, ct.sum(totals * ct.exp((tops - base_of(top)) * per_temperature))


@ct.function
def _series(x):
    """Return (exp(x) - 1 - x) / x^2 near 0."""
    series = x * (1 / 40320) + 1 / 5040
    series = x * series + 1 / 720
    series = x * series + 1 / 120
    series = x * series + 1 / 24
    series = x * series + 1 / 6
    return x * series + 1 / 2


@ct.function
def expm1(x):
    """Return exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    return ct.where((x < 0.4) & (x > -0.4), x * (x * _series(x) + 1.0), ct.exp(x) - 1.0)


@ct.function
def exp_over_line(x):
    """Return exp(x) - x - 1, near 0 by its series."""
    return ct.where((x < 0.4) & (x > -0.4), x * x * _series(x), ct.exp(x) - x - 1.0)


@ct.function
def log1p(x):
    """Return log(1 + x), with the rounding of the sum put back."""
    total = x + 1.0
    return ct.log(total) + (x - (total - 1.0)) / total
