"""Rows that the tensor memory accelerator can address."""

import torch
import triton
import triton.language as tl

UNIT = 16
"""Bytes that addresses and strides are multiples of."""


def is_addressable(x: torch.Tensor) -> bool:
    """Return True if rows lie apart, of whole 16 bytes and aligned to them."""
    sizes = [x.shape[-1], *(stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)]
    return x.data_ptr() % UNIT == 0 and all(size > 0 and size * x.element_size() % UNIT == 0 for size in sizes)


@triton.jit(do_not_specialize=["b_stride", "h_stride", "row_stride", "rows", "H", "L", "D", "width"])
def _copy_rows(x, to, b_stride, h_stride, row_stride, rows, H, L, D, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Copy rows of D elements, each with zeros up to ``width``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLUMNS)
    here = (row < rows)[:, None]
    starts = row // L // H * b_stride + row // L % H * h_stride + row % L * row_stride
    values = tl.load(x + starts[:, None] + cols[None, :], mask=here & (cols < D)[None, :], other=0.0)
    tl.store(to + row[:, None] * width + cols[None, :], values, mask=here & (cols < width)[None, :])


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, H, L, D], or a copy whose rows end with zeros. Caches of models need none."""
    if is_addressable(x):
        return x
    B, H, L, D = x.shape
    unit = UNIT // x.element_size()
    width = triton.cdiv(D, unit) * unit
    copy = torch.empty(B, H, L, width, dtype=x.dtype, device=x.device)
    rows = B * H * L
    columns = triton.next_power_of_2(width)
    _copy_rows[(triton.cdiv(rows, 32),)](x, copy, *x.stride()[:3], rows, H, L, D, width, columns, 32, num_warps=4)
    return copy
