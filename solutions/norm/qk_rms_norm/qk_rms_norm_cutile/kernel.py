"""Per-head RMSNorm of q and k in one launch: one pass over memory, a head is kept in registers."""

from typing import Annotated

import cuda.tile as ct
import torch

# Numbers of heads and the head size are compile-time constants: aligned heads are then read 16 bytes at a time.
# The number of tokens is dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]


@ct.function
def _normalise(x, weight, out, eps, token, head, TILE_M: Int, TILE_H: Int, TILE_D: Int):
    size = x.shape[2]
    tokens = token + ct.arange(TILE_M, dtype=ct.int32)[:, None, None]
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_D, dtype=ct.int32)[None, None, :]
    inside = (tokens < x.shape[0]) & (heads < x.shape[1]) & (lanes < size)
    # The gathers of the heads and of the weight are independent: both are in flight before the reduction waits.
    values = ct.gather(x, (tokens, heads, lanes), mask=inside, check_bounds=False).astype(ct.float32)
    scale = ct.gather(weight, lanes, mask=lanes < size, check_bounds=False)
    mean_square = ct.sum(values * values, axis=2, keepdims=True) * (1.0 / size)
    normalised = (values * ct.rsqrt(mean_square + eps)).astype(x.dtype)
    ct.scatter(out, (tokens, heads, lanes), normalised * scale, mask=inside, check_bounds=False)


@ct.kernel
def _qk_rms_norm(
    q: Heads,
    k: Heads,
    q_weight: Vector,
    k_weight: Vector,
    q_out: Heads,
    k_out: Heads,
    eps: float,
    TILE_M: Int,
    TILE_H: Int,
    TILE_D: Int,
):
    q_tiles = ct.cdiv(q.shape[1], TILE_H)
    tiles = q_tiles + ct.cdiv(k.shape[1], TILE_H)
    tile = ct.bid(0) % tiles  # blocks of the same tokens are neighbours: a token's heads are contiguous in memory
    token = ct.bid(0) // tiles * TILE_M
    if tile < q_tiles:
        _normalise(q, q_weight, q_out, eps, token, tile * TILE_H, TILE_M, TILE_H, TILE_D)
    else:
        _normalise(k, k_weight, k_out, eps, token, (tile - q_tiles) * TILE_H, TILE_M, TILE_H, TILE_D)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    TILE_H: int | None = None,
    TILE_M: int | None = None,
) -> None:
    """y = T(T(x * rsqrt(mean(x^2) + eps)) * weight) over every head x of q (q_weight) and of k (k_weight).

    q, q_out: [M, Hq, D]; k, k_out: [M, Hkv, D]; weights [D]; all T = bf16, fp16 or fp32. Any strides, the last being 1.
    The mean and the reciprocal root are fp32; the normalised value and the product with the weight are each rounded to
    T. A block normalises TILE_H heads of q or of k of TILE_M tokens.

    None chooses: 8 heads, or 2 below 64 tokens (more blocks, less work in each); as many tokens as make about 4096
    values a block, or one token.
    """
    tokens, q_heads, size = q.shape
    if q.numel() == 0:
        return
    tile_d = 1 << (size - 1).bit_length()
    if TILE_H is None:
        TILE_H = min(2 if tokens < 64 else 8, max(1, 8192 // tile_d))
    if TILE_M is None:
        TILE_M = 1 if tokens < 64 else max(1, 4096 // (TILE_H * tile_d))
    blocks = (-(-q_heads // TILE_H) - (-k.shape[1] // TILE_H)) * -(-tokens // TILE_M)
    args = (q, k, q_weight, k_weight, q_out, k_out, eps, TILE_M, TILE_H, tile_d)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _qk_rms_norm, args)
