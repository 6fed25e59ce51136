"""The factor of queries by their position, Triton: one launch in place of six."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "S", "beta", "original"])
def _scales(positions_ptr, out_ptr, stride, beta, original, N, S, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    positions = tl.load(positions_ptr + (at // S).to(tl.int64) * stride + at % S, mask=inside, other=0)
    # A quotient that is rounded once: one just below a whole number must not become that number otherwise than in PyTorch.
    divisor = tl.full([BLOCK], 0, tl.float32) + original
    lengths = tl.floor(tl.div_rn(positions.to(tl.float32), divisor))
    tl.store(out_ptr + at, 1.0 + beta * tl.log(1.0 + lengths), mask=inside)


def run(positions: torch.Tensor, beta: float, original: int, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = 1 + beta * log(1 + floor(positions / original)).

    Shapes: positions [B, S] int64 with unit last stride and any row stride, out [B, 1, S, 1] float32 contiguous; B * S < 2^31.
    BLOCK positions a program; None: 256.
    """
    B, S = positions.shape
    N = B * S
    if N == 0:
        return
    block = BLOCK or 256
    _scales[((N + block - 1) // block,)](
        positions, out, positions.stride(0), float(beta), float(original), N, S, block, num_warps=num_warps or 2
    )
