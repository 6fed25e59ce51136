"""New keys and values behind those of earlier positions, cuTile: both tensors are copied in one launch."""

from typing import Annotated

import cuda.tile as ct
import torch

# The head size is a compile-time constant: aligned rows are then copied 16 bytes at a time. All other sizes are dynamic, because
# the number of positions changes with each call.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]


@ct.function
def _copy(past, new, out, batch, head, TILE_S: Int, TILE_D: Int):
    rows = ct.bid(0) * TILE_S + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    lanes = ct.arange(TILE_D, dtype=ct.int32)[None, :]
    length = past.shape[2]
    inside = (rows < out.shape[2]) & (lanes < out.shape[3])
    is_new = rows >= length
    # Most blocks have no new position: their second load has no lane and reads nothing.
    earlier = ct.gather(past, (batch, head, rows, lanes), mask=inside & (rows < length), check_bounds=False)
    added = ct.gather(new, (batch, head, rows - length, lanes), mask=inside & is_new, check_bounds=False)
    ct.scatter(out, (batch, head, rows, lanes), ct.where(is_new, added, earlier), mask=inside, check_bounds=False)


@ct.kernel
def _concat(
    past_k: Heads,
    past_v: Heads,
    k: Heads,
    v: Heads,
    k_out: Heads,
    v_out: Heads,
    TILE_S: Int,
    TILE_D: Int,
    TILE_DV: Int,
):
    batch, head = ct.bid(1) // k.shape[1], ct.bid(1) % k.shape[1]
    if ct.bid(2) == 0:
        _copy(past_k, k, k_out, batch, head, TILE_S, TILE_D)
    else:
        _copy(past_v, v, v_out, batch, head, TILE_S, TILE_DV)


def run(
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    TILE_S=32,
):
    """k_out = past_k and then k; v_out = past_v and then v, along the positions.

    Shapes: past_k [B, H, L, D], past_v [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], k_out [B, H, L + S, D],
    v_out [B, H, L + S, Dv]; rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: TILE_S positions of one head of k or of v a block.
    """
    batch, heads, total, size = k_out.shape
    if batch == 0:
        return
    tiles = (1 << (size - 1).bit_length(), 1 << (v_out.shape[3] - 1).bit_length())
    blocks = (-(-total // TILE_S), batch * heads, 2)
    ct.launch(torch.cuda.current_stream(), blocks, _concat, (past_k, past_v, k, v, k_out, v_out, TILE_S, *tiles))
