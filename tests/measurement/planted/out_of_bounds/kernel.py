"""A planted mistake: the store has no mask, so the last row's tail is written beyond the end of the output."""

import triton
import triton.language as tl


@triton.jit
def unmasked_gate(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < columns
    gate = tl.load(x_ptr + row * 2 * columns + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * columns + columns + cols, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * columns + cols, value.to(out_ptr.dtype.element_ty))


def run(x, out):
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    unmasked_gate[(rows, triton.cdiv(columns, 1024))](x, out, columns, 1024)
