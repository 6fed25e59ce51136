"""Rotary position embedding (rotate-half form) of the first R elements of each head of q and k, and its gradients, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# Numbers of heads, the head size and, where it differs, R are compile-time constants: aligned heads are then read 16 bytes at
# a time. Batch and sequence length are dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 3))]
PartTable = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
Int = ct.Constant[int]


@ct.function
def _rotate(
    x, out, tables, batch, head, position, half: Int, BACK: Int, TILE_H: Int, TILE_S: Int, TILE_R: Int, TILE_P: Int
):
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[:, None, None]
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    rows = (heads < x.shape[1]) & (positions < x.shape[2])
    if TILE_P > 0:  # what follows the rotated elements is copied
        passing = 2 * half + ct.arange(TILE_P, dtype=ct.int32)[None, None, :]
        rest = (batch, heads, positions, passing)
        inside_rest = rows & (passing < x.shape[3])
        copied = ct.gather(x, rest, mask=inside_rest, check_bounds=False)
        ct.scatter(out, rest, copied, mask=inside_rest, check_bounds=False)
    lanes = ct.arange(TILE_R, dtype=ct.int32)[None, None, :]
    inside = rows & (lanes < half)
    first = (batch, heads, positions, lanes)
    second = (batch, heads, positions, lanes + half)
    x_1 = ct.gather(x, first, mask=inside, check_bounds=False)
    x_2 = ct.gather(x, second, mask=inside, check_bounds=False)
    cos_1, sin_1, cos_2, sin_2 = tables
    # A product of tiles of T is rounded to T. The sum is made in fp32: a sum in T would be fused with a product, which
    # loses the rounding of that product. (In fp32 they are fused: one rounding fewer than PyTorch.)
    if BACK:  # what one half gives the other is scaled by the sine of the half that it comes from
        kept_1, kept_2 = (x_1 * cos_1).astype(ct.float32), (x_2 * cos_2).astype(ct.float32)
        y_1 = kept_1 + (x_2 * sin_2).astype(ct.float32)
        y_2 = kept_2 - (x_1 * sin_1).astype(ct.float32)
    else:
        y_1 = (x_1 * cos_1).astype(ct.float32) - (x_2 * sin_1).astype(ct.float32)
        y_2 = (x_2 * cos_2).astype(ct.float32) + (x_1 * sin_2).astype(ct.float32)
    ct.scatter(out, first, y_1.astype(out.dtype), mask=inside, check_bounds=False)
    ct.scatter(out, second, y_2.astype(out.dtype), mask=inside, check_bounds=False)


def _kernel(Table, back):
    """The kernel for cos and sin of the kind `Table`; with `back` it rotates back, for the gradients."""

    @ct.kernel
    def _rope_halves(
        q: Heads,
        k: Heads,
        cos: Table,
        sin: Table,
        q_out: Heads,
        k_out: Heads,
        TILE_H: Int,
        TILE_S: Int,
        TILE_R: Int,
        TILE_P: Int,
    ):
        # A constant in any case: only the tables of a part have a static R.
        half = cos.shape[2] // 2 if TILE_P > 0 else q.shape[3] // 2
        q_tiles = ct.cdiv(q.shape[1], TILE_H)
        tiles_h = q_tiles + ct.cdiv(k.shape[1], TILE_H)
        tiles_s = ct.cdiv(q.shape[2], TILE_S)
        # Blocks of the same positions are neighbours: they share cos and sin, and a token's heads are contiguous in memory.
        tile_h = ct.bid(0) % tiles_h
        position = ct.bid(0) // tiles_h % tiles_s * TILE_S
        batch = ct.bid(0) // tiles_h // tiles_s
        table = ct.minimum(batch, cos.shape[0] - 1)  # cos and sin have one batch entry, or as many as q
        positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
        lanes = ct.arange(TILE_R, dtype=ct.int32)[None, None, :]
        inside = (positions < q.shape[2]) & (lanes < half)
        cos_1 = ct.gather(cos, (table, positions, lanes), mask=inside, check_bounds=False)
        sin_1 = ct.gather(sin, (table, positions, lanes), mask=inside, check_bounds=False)
        cos_2 = ct.gather(cos, (table, positions, lanes + half), mask=inside, check_bounds=False)
        sin_2 = ct.gather(sin, (table, positions, lanes + half), mask=inside, check_bounds=False)
        tables = (cos_1, sin_1, cos_2, sin_2)
        if tile_h < q_tiles:
            _rotate(q, q_out, tables, batch, tile_h * TILE_H, position, half, back, TILE_H, TILE_S, TILE_R, TILE_P)
        else:
            head = (tile_h - q_tiles) * TILE_H
            _rotate(k, k_out, tables, batch, head, position, half, back, TILE_H, TILE_S, TILE_R, TILE_P)

    return _rope_halves


_FORWARD, _BACK, _PART = _kernel(ct.Array, False), _kernel(ct.Array, True), _kernel(PartTable, False)


def _launches(kernel, part=False):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, R]; all T = bf16, fp16 or fp32; R even, R <= D with
    `part`, else R = D. The halves of cos and sin may differ; every product and the sum are rounded to T. Any strides, the last
    being 1. A block rotates and copies TILE_H heads of q or of k at TILE_S positions. None chooses about 4096 elements a block,
    or TILE_S = 1 for a single position.
    """

    def run(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
        batch, q_heads, length, size = q.shape
        if batch == 0 or length == 0:
            return
        rotary = cos.shape[2] if part else size
        tile_r = 1 << (rotary // 2 - 1).bit_length()
        tile_p = 1 << (size - rotary - 1).bit_length() if size > rotary else 0
        if TILE_S is None:
            TILE_S = 1 if length == 1 else max(1, 4096 // (TILE_H << (size - 1).bit_length()))
        blocks = (-(-q_heads // TILE_H) - (-k.shape[1] // TILE_H)) * -(-length // TILE_S) * batch
        args = (q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, tile_r, tile_p)
        ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), kernel, args)

    return lambda declared: run


@_launches(_FORWARD)
def run_rope_neox(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """q_out = T(T(q * cos) + T(rotate_half(q) * sin)), rotate_half(x) = cat(-x[D/2:], x[:D/2]), and the same for k."""


@_launches(_PART, part=True)
def run_rope_partial(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """q_out = cat(T(T(r * cos) + T(rotate_half(r) * sin)), p) for r = q[..., :R], p = q[..., R:], and the same for k."""


@_launches(_BACK)
def run_rope_neox_backward(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, *, TILE_H=8, TILE_S=None):
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head."""
