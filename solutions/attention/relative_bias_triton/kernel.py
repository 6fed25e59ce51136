"""The bias of each position and key from that of each distance, Triton: a row of keys is a run of distances, which is copied."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S", "L"])
def _expand(
    values_ptr, out_ptr, values_h, values_p, out_h, out_s, out_l, S, L, H, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    keys = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[None, :]
    mask = (keys < L) & (heads < H)
    values = tl.load(values_ptr + heads * values_h + (keys - row + S - 1) * values_p, mask=mask, other=0.0)
    tl.store(out_ptr + heads * out_h + row * out_s + keys * out_l, values, mask=mask)


def run(values: torch.Tensor, positions: int, out: torch.Tensor, *, BLOCK=128, num_warps=4):
    """out[0, h, i, j] = values[h, j - i + positions - 1].

    Shapes: values [H, P], out [1, H, S, P - S + 1], any strides; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK keys of all heads of one position a program.
    """
    _, H, S, L = out.shape
    if out.numel() == 0:
        return
    _expand[(S, triton.cdiv(L, BLOCK))](
        values, out, *values.stride(), *out.stride()[1:], S, L, H, BLOCK, triton.next_power_of_2(H), num_warps=num_warps
    )
