"""RMSNorm of the heads of q and k and the rotary embedding behind it, in one launch, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# Numbers of heads and the head size are compile-time constants: aligned heads are then read 16 bytes at a time. Batch and
# sequence length are dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2, 3))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@ct.function
def _weighted(values, scale, weight, T, CENTRED: Flag):
    """Normalised values [positions, heads, half] times their weights, rounded as models round."""
    if CENTRED:  # one rounding for the whole norm, with a weight that is zero-centred
        return (values * scale * (1.0 + weight.astype(ct.float32))).astype(T)
    return (values * scale).astype(T) * weight  # the product of two T is rounded to T


@ct.function
def _norm_and_rotate(
    x, weight, out, tables, batch, position, head, eps, CENTRED: Flag, TILE_S: Int, TILE_H: Int, TILE_R: Int
):
    size = x.shape[3]
    half = size // 2
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[:, None, None]
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_R, dtype=ct.int32)[None, None, :]
    inside = (positions < x.shape[1]) & (heads < x.shape[2]) & (lanes < half)
    first = (batch, positions, heads, lanes)
    second = (batch, positions, heads, lanes + half)
    # The gathers of the heads and of the weights are independent: all are in flight before the reduction waits.
    x_1 = ct.gather(x, first, mask=inside, check_bounds=False).astype(ct.float32)
    x_2 = ct.gather(x, second, mask=inside, check_bounds=False).astype(ct.float32)
    weight_1 = ct.gather(weight, lanes, mask=lanes < half, check_bounds=False)
    weight_2 = ct.gather(weight, lanes + half, mask=lanes < half, check_bounds=False)
    mean_square = ct.sum(x_1 * x_1 + x_2 * x_2, axis=2, keepdims=True) * (1.0 / size)
    scale = ct.rsqrt(mean_square + eps)
    x_1 = _weighted(x_1, scale, weight_1, x.dtype, CENTRED)
    x_2 = _weighted(x_2, scale, weight_2, x.dtype, CENTRED)
    cos_1, sin_1, cos_2, sin_2 = tables
    # A product of tiles of T is rounded to T. The sum is made in fp32: a sum in T would be fused with a product, which
    # loses the rounding of that product. (In fp32 they are fused: one rounding fewer than PyTorch.)
    y_1 = (x_1 * cos_1).astype(ct.float32) - (x_2 * sin_1).astype(ct.float32)
    y_2 = (x_2 * cos_2).astype(ct.float32) + (x_1 * sin_2).astype(ct.float32)
    ct.scatter(out, first, y_1.astype(out.dtype), mask=inside, check_bounds=False)
    ct.scatter(out, second, y_2.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel(num_worker_warps=4)
def _normed_rope(
    q: Heads,
    k: Heads,
    q_weight: Vector,
    k_weight: Vector,
    cos: ct.Array,
    sin: ct.Array,
    q_out: Heads,
    k_out: Heads,
    eps: float,
    CENTRED: Flag,
    TILE_S: Int,
    TILE_H: Int,
    TILE_R: Int,
):
    half = q.shape[3] // 2
    q_tiles = ct.cdiv(q.shape[2], TILE_H)
    tiles_h = q_tiles + ct.cdiv(k.shape[2], TILE_H)
    tiles_s = ct.cdiv(q.shape[1], TILE_S)
    # Blocks of the same positions are neighbours: they share cos and sin, and a token's heads are contiguous in memory.
    tile_h = ct.bid(0) % tiles_h
    position = ct.bid(0) // tiles_h % tiles_s * TILE_S
    batch = ct.bid(0) // tiles_h // tiles_s
    table = ct.minimum(batch, cos.shape[0] - 1)  # cos and sin have one batch entry, or as many as q
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[:, None, None]
    lanes = ct.arange(TILE_R, dtype=ct.int32)[None, None, :]
    inside = (positions < q.shape[1]) & (lanes < half)
    cos_1 = ct.gather(cos, (table, positions, lanes), mask=inside, check_bounds=False)
    sin_1 = ct.gather(sin, (table, positions, lanes), mask=inside, check_bounds=False)
    cos_2 = ct.gather(cos, (table, positions, lanes + half), mask=inside, check_bounds=False)
    sin_2 = ct.gather(sin, (table, positions, lanes + half), mask=inside, check_bounds=False)
    tables = (cos_1, sin_1, cos_2, sin_2)
    if tile_h < q_tiles:
        _norm_and_rotate(
            q, q_weight, q_out, tables, batch, position, tile_h * TILE_H, eps, CENTRED, TILE_S, TILE_H, TILE_R
        )
    else:
        head = (tile_h - q_tiles) * TILE_H
        _norm_and_rotate(k, k_weight, k_out, tables, batch, position, head, eps, CENTRED, TILE_S, TILE_H, TILE_R)


def _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, TILE_H, TILE_S, centred):
    B, S, q_heads, D = q.shape
    if q.numel() == 0:
        return
    tile_r = 1 << (D // 2 - 1).bit_length()
    if TILE_H is None:
        TILE_H = min(2 if B * S < 64 else 8, max(1, 4096 // tile_r))
    if TILE_S is None:
        TILE_S = 1 if S < 64 else max(1, 2048 // (TILE_H * tile_r))
    blocks = (-(-q_heads // TILE_H) - (-k.shape[2] // TILE_H)) * -(-S // TILE_S) * B
    args = (q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, centred, TILE_S, TILE_H, tile_r)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _normed_rope, args)


def run_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    TILE_H: int | None = None,
    TILE_S: int | None = None,
) -> None:
    """q_out and k_out = rotated RMSNorm of every head of q and k, rounded to T after each operation.

    Shapes: q, q_out [B, S, Hq, D], k, k_out [B, S, Hkv, D], q_weight, k_weight [D], cos, sin [1 or B, S, D]; D even; last strides
    1, the others free; one dtype T in bfloat16, float16, float32. A block has TILE_H heads of q or of k of TILE_S positions.

    None chooses: 8 heads, or 2 below 64 tokens (more blocks, less work in each); as many positions as make about 4096 values a
    block, or one.
    """
    _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, TILE_H, TILE_S, False)


def run_qk_norm_rope_gemma(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    TILE_H: int | None = None,
    TILE_S: int | None = None,
) -> None:
    """q_out and k_out = rotated RMSNorm of every head, with weights around zero and the norm rounded once; the rest as above."""
    _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, TILE_H, TILE_S, True)
