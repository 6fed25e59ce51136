"""Rotary position embedding (rotate-half form) of q and k in one launch, and its gradients."""

from typing import Annotated

import cuda.tile as ct
import torch

# Numbers of heads and the head size are compile-time constants: aligned heads are then read 16 bytes at a time.
# Batch and sequence length are dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 3))]
Int = ct.Constant[int]


@ct.function
def _rotate(
    x, out, cos_1, sin_1, cos_2, sin_2, batch, head, position, BACK: Int, TILE_H: Int, TILE_S: Int, TILE_D: Int
):
    half = x.shape[3] // 2
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[:, None, None]
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_D, dtype=ct.int32)[None, None, :]
    inside = (heads < x.shape[1]) & (positions < x.shape[2]) & (lanes < half)
    first = (batch, heads, positions, lanes)
    second = (batch, heads, positions, lanes + half)
    x_1 = ct.gather(x, first, mask=inside, check_bounds=False)
    x_2 = ct.gather(x, second, mask=inside, check_bounds=False)
    # A product of tiles of T is rounded to T. The sum is made in fp32: a sum in T would be fused with a product, which
    # loses the rounding of that product. (In fp32 they are fused: one rounding fewer than PyTorch.)
    kept_1, kept_2 = (x_1 * cos_1).astype(ct.float32), (x_2 * cos_2).astype(ct.float32)
    if BACK:  # what one half gives the other is scaled by the sine of the half that it comes from
        y_1 = kept_1 + (x_2 * sin_2).astype(ct.float32)
        y_2 = kept_2 - (x_1 * sin_1).astype(ct.float32)
    else:
        y_1 = kept_1 - (x_2 * sin_1).astype(ct.float32)
        y_2 = kept_2 + (x_1 * sin_2).astype(ct.float32)
    ct.scatter(out, first, y_1.astype(out.dtype), mask=inside, check_bounds=False)
    ct.scatter(out, second, y_2.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _rope_halves(
    q: Heads, k: Heads, cos, sin, q_out: Heads, k_out: Heads, BACK: Int, TILE_H: Int, TILE_S: Int, TILE_D: Int
):
    half = q.shape[3] // 2
    q_tiles = ct.cdiv(q.shape[1], TILE_H)
    tiles_h = q_tiles + ct.cdiv(k.shape[1], TILE_H)
    tiles_s = ct.cdiv(q.shape[2], TILE_S)
    # Blocks of the same positions are neighbours: they share cos and sin, and a token's heads are contiguous in memory.
    tile_h = ct.bid(0) % tiles_h
    position = ct.bid(0) // tiles_h % tiles_s * TILE_S
    batch = ct.bid(0) // tiles_h // tiles_s
    table = ct.minimum(batch, cos.shape[0] - 1)  # cos and sin have one batch entry, or as many as q
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_D, dtype=ct.int32)[None, None, :]
    inside = (positions < q.shape[2]) & (lanes < half)
    cos_1 = ct.gather(cos, (table, positions, lanes), mask=inside, check_bounds=False)
    sin_1 = ct.gather(sin, (table, positions, lanes), mask=inside, check_bounds=False)
    cos_2 = ct.gather(cos, (table, positions, lanes + half), mask=inside, check_bounds=False)
    sin_2 = ct.gather(sin, (table, positions, lanes + half), mask=inside, check_bounds=False)
    if tile_h < q_tiles:
        head = tile_h * TILE_H
        _rotate(q, q_out, cos_1, sin_1, cos_2, sin_2, batch, head, position, BACK, TILE_H, TILE_S, TILE_D)
    else:
        head = (tile_h - q_tiles) * TILE_H
        _rotate(k, k_out, cos_1, sin_1, cos_2, sin_2, batch, head, position, BACK, TILE_H, TILE_S, TILE_D)


def run_rope_neox_backward(
    grad_q_out: torch.Tensor,
    grad_k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    *,
    TILE_H: int = 8,
    TILE_S: int | None = None,
) -> None:
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head.

    Shapes and tiles as in _run.
    """
    _run(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, TILE_H, TILE_S, back=True)


def _run(q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, *, back):
    """Rotate q and k in one launch.

    q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, D]; all T = bf16, fp16 or fp32, D even. The
    halves of cos and sin may differ. Any strides, the last being 1. A block rotates TILE_H heads of q or of k at TILE_S
    positions. None chooses about 2048 pairs a block, or TILE_S = 1 for a single position.
    """
    batch, q_heads, length, size = q.shape
    if q.numel() == 0:
        return
    tile_d = 1 << (size // 2 - 1).bit_length()
    if TILE_S is None:
        TILE_S = 1 if length == 1 else max(1, 2048 // (TILE_H * tile_d))
    blocks = (-(-q_heads // TILE_H) - (-k.shape[1] // TILE_H)) * -(-length // TILE_S) * batch
    args = (q, k, cos, sin, q_out, k_out, int(back), TILE_H, TILE_S, tile_d)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _rope_halves, args)
