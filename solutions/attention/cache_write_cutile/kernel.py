"""New keys and values written into a cache of fixed size, cuTile: both tensors in one launch."""

from typing import Annotated

import cuda.tile as ct
import torch

# The head size is a compile-time constant: aligned rows are then copied 16 bytes at a time. All other sizes are dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]


@ct.kernel
def _write(k_cache: Heads, v_cache: Heads, k: Heads, v: Heads, start, TILE_S: Int, TILE_D: Int, TILE_DV: Int):
    head, batch = ct.bid(1), ct.bid(2)
    rows = ct.bid(0) * TILE_S + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    lanes = ct.arange(TILE_D, dtype=ct.int32)[None, :]
    lanes_v = ct.arange(TILE_DV, dtype=ct.int32)[None, :]
    is_new = rows < k.shape[2]
    first = ct.gather(start, 0, check_bounds=False)
    new_k = ct.gather(k, (batch, head, rows, lanes), mask=is_new & (lanes < k.shape[3]), check_bounds=False)
    new_v = ct.gather(v, (batch, head, rows, lanes_v), mask=is_new & (lanes_v < v.shape[3]), check_bounds=False)
    places = rows + ct.astype(first, ct.int32)
    inside = is_new & (places >= 0) & (places < k_cache.shape[2])  # a wrong start writes to no other memory
    k_mask, v_mask = inside & (lanes < k.shape[3]), inside & (lanes_v < v.shape[3])
    ct.scatter(k_cache, (batch, head, places, lanes), new_k, mask=k_mask, check_bounds=False)
    ct.scatter(v_cache, (batch, head, places, lanes_v), new_v, mask=v_mask, check_bounds=False)


def run(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    *,
    TILE_S=16,
):
    """Position start + s of k_cache and v_cache becomes position s of k and v, in place.

    Shapes: k_cache [B, H, L, D], v_cache [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], start [1] in int64;
    rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: at most TILE_S positions of one head of k and of v a block.
    """
    batch, heads, count, size = k.shape
    if batch == 0:
        return
    rows = min(TILE_S, 1 << (count - 1).bit_length())
    tiles = (rows, 1 << (size - 1).bit_length(), 1 << (v.shape[3] - 1).bit_length())
    blocks = (-(-count // rows), heads, batch)
    ct.launch(torch.cuda.current_stream(), blocks, _write, (k_cache, v_cache, k, v, start, *tiles))
