"""Rows of one head each, in one size and layout, to and from any tensors: cuTile compiles for what divides sizes and addresses.

A kernel that takes seconds to compile thus has one variant for all sizes and layouts that are moved. The kernel that moves them
takes all dtypes, as numbers of 16 bits.
"""

from typing import Annotated

import cuda.tile as ct
import torch

Flag = ct.Constant[bool]
Memory = Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64)]
Long = ct.ScalarInt64[int]
TILE_T, TILE_C = 32, 64


@ct.kernel(num_worker_warps=4)
def _move(
    given: Memory, rows: Memory, given_b: Long, given_t: Long, given_h: Long, first: Long, H: Long, share: Long, blocks: Long,
    skip_t: Long, skip_c: Long, tokens: Long, width: Long, rows_r: Long, rows_t: Long, tall: Long, columns: Long, INTO: Flag,
):  # fmt: skip
    """Copy between [B, tokens, heads, width] of any strides and rows [.., tall, columns], both as numbers of 16 bits.

    A row is of one sequence, one of H heads and one of ``blocks`` blocks, each ``skip_t`` and ``skip_c`` further in ``given``;
    ``share`` heads in a row have the same head of ``given``. INTO: into the rows, with zeros behind tokens and width, else out.
    """
    tiles_t, tiles_c = ct.cdiv(tall, TILE_T), ct.cdiv(columns, TILE_C)
    place = ct.bid(0).astype(ct.int64)
    row, tile_t, tile_c = place // tiles_c // tiles_t, place // tiles_c % tiles_t, place % tiles_c
    number = first + row
    block, head, batch = number % blocks, number // blocks % H, number // blocks // H
    t = tile_t * TILE_T + ct.arange(TILE_T, dtype=ct.int64)[:, None]
    c = tile_c * TILE_C + ct.arange(TILE_C, dtype=ct.int64)[None, :]
    there = (t < tall) & (c < columns)
    here = there & (block * skip_t + t < tokens) & (block * skip_c + c < width)
    of_rows = row * rows_r + t * rows_t + c
    of_given = batch * given_b + (block * skip_t + t) * given_t + head // share * given_h + block * skip_c + c
    if INTO:
        ct.scatter(
            rows, of_rows, ct.gather(given, of_given, mask=here, check_bounds=False), mask=there, check_bounds=False
        )
    else:
        ct.scatter(
            given, of_given, ct.gather(rows, of_rows, mask=here, check_bounds=False), mask=here, check_bounds=False
        )


def move_rows(x, rows, count, first, H, blocks, skip_t=0, skip_c=0, into=True):
    """Copy ``count`` rows from number ``first`` on between x [B, T, H, C] and ``rows`` [.., T, C], whose last stride is 1."""
    unit = x.element_size() // 2
    reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    given = x.as_strided((reach,), (1,), x.storage_offset()).view(torch.int16)
    whole = rows.as_strided((rows.numel(),), (1,), rows.storage_offset()).view(torch.int16)
    _, tall, wide = rows.shape
    columns = wide * unit
    args = (
        given, whole, *(step * unit for step in x.stride()[:3]), first, H, H // x.shape[2], blocks,
        skip_t, skip_c * unit, x.shape[1], x.shape[3] * unit, rows.stride(0) * unit, rows.stride(1) * unit, tall, columns, into,
    )  # fmt: skip
    tiles = -(-tall // TILE_T) * -(-columns // TILE_C)
    ct.launch(torch.cuda.current_stream(), (count * tiles, 1, 1), _move, args)


def is_aligned(x):
    """Return True if rows of x are side by side, apart and at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    return x.storage_offset() % unit == 0 and all(step % unit == 0 for step in x.stride()[:-1])


def rounded(count):
    """Round a number of rows up, so that workspaces of all sizes are divisible alike: cuTile compiles for what divides a size."""
    return -(-count // 16) * 16
