"""The text of a first kernel in each tile language: one program a row, which compiles, and a place for the maths.

``<name>``, ``<arguments>``, ``<call>``, ``<x>`` and ``<out>`` are filled in. ``copy`` reads an input of the output's shape;
``clear`` is for operators that have none.
"""

from __future__ import annotations

__all__ = ["TEMPLATES"]

_RUN = '''def run(<arguments>, *, {tunable}):
    """TODO: the formula, with what is rounded where.

<call>
    """
    columns = <out>.shape[-1] if <out>.dim() else 1
    rows = <out>.numel() // max(columns, 1)
    if rows == 0 or columns == 0:  # sizes of zero are fuzzed too
        return
'''

_TRITON = (
    '''"""<name> in Triton. TODO: how it works, in one line."""

import triton
import triton.language as tl


@triton.jit
def _rows({pointers}, columns, BLOCK: tl.constexpr):
    # One program a row: every axis of <out> but the last is flattened into rows.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < columns  # BLOCK is a power of two, and rows need not be
{load}
    # TODO: the maths, in float32 where the reference computes in float32. Reductions along the row: tl.sum(value, axis=0).
    tl.store(<out>_ptr + row * columns + cols, value.to(<out>_ptr.dtype.element_ty), mask=inside)


'''
    + _RUN.replace("{tunable}", "num_warps=4")
    + """    block = 1 << (columns - 1).bit_length()
    _rows[(rows,)]({tensors}, columns, block, num_warps=num_warps)
"""
)

_TILELANG = (
    '''"""<name> in TileLang. TODO: how it works, in one line."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def _rows_kernel(columns, {dtypes}, threads):
    rows = T.dynamic("rows")  # one kernel serves every number of rows

    @T.prim_func
    def rows_kernel({parameters}):
        # One block a row: every axis of <out> but the last is flattened into rows.
        with T.Kernel(rows, threads=threads) as row:
            for column in T.Parallel(columns):
                # TODO: the maths. Reductions along the row: T.reduce_sum over a fragment of float32.
                <out>[row, column] = {value}

    return rows_kernel


'''
    + _RUN.replace("{tunable}", "threads=128")
    + """    kernel = _rows_kernel(columns, {given_dtypes}, threads)
    kernel({matrices})
"""
)

_CUTILE = (
    '''"""<name> in cuTile. TODO: how it works, in one line."""

import cuda.tile as ct
import torch


@ct.kernel
def _rows({parameters}, TILE: ct.Constant[int]):
    # One block a row: every axis of <out> but the last is flattened into rows.
    row = ct.bid(0)
    cols = ct.arange(TILE, dtype=ct.int32)
    inside = cols < <out>.shape[1]  # TILE is a power of two, and rows need not be
{load}
    # TODO: the maths, in float32 where the reference computes in float32. Reductions along the row: ct.sum(value).
    ct.scatter(<out>, (row, cols), value.astype(<out>.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


'''
    + _RUN.replace("{tunable}", "WARPS=4")
    + """    tile = 1 << (columns - 1).bit_length()
    matrices = ({matrices},)
    ct.launch(torch.cuda.current_stream(), (rows, 1, 1), _KERNELS[WARPS], (*matrices, tile))
"""
)


def _filled(template: str, **parts: str) -> str:
    for key, value in parts.items():
        template = template.replace("{" + key + "}", value)
    return template


TEMPLATES: dict[str, dict[str, str]] = {
    "triton": {
        "copy": _filled(
            _TRITON,
            pointers="<x>_ptr, <out>_ptr",
            load="    value = tl.load(<x>_ptr + row * columns + cols, mask=inside, other=0.0).to(tl.float32)",
            tensors="<x>, <out>",
        ),
        "clear": _filled(
            _TRITON,
            pointers="<out>_ptr",
            load="    value = tl.zeros([BLOCK], dtype=tl.float32)",
            tensors="<out>",
        ),
    },
    "tilelang": {
        "copy": _filled(
            _TILELANG,
            dtypes="in_dtype, out_dtype",
            parameters="<x>: T.Tensor((rows, columns), in_dtype), <out>: T.Tensor((rows, columns), out_dtype)",
            value='T.cast(T.cast(<x>[row, column], "float32"), out_dtype)',
            given_dtypes="<x>.dtype, <out>.dtype",
            matrices="<x>.view(rows, columns), <out>.view(rows, columns)",
        ),
        "clear": _filled(
            _TILELANG,
            dtypes="out_dtype",
            parameters="<out>: T.Tensor((rows, columns), out_dtype)",
            value="T.cast(0, out_dtype)",
            given_dtypes="<out>.dtype",
            matrices="<out>.view(rows, columns)",
        ),
    },
    "cutile": {
        "copy": _filled(
            _CUTILE,
            parameters="<x>, <out>",
            load="    value = ct.gather(<x>, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)",
            matrices="<x>.view(rows, columns), <out>.view(rows, columns)",
        ),
        "clear": _filled(
            _CUTILE,
            parameters="<out>",
            load="    value = ct.zeros((TILE,), dtype=ct.float32)",
            matrices="<out>.view(rows, columns)",
        ),
    },
}
