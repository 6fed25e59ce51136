"""The gated delta rule for one token in cuTile: a block holds some columns of one head's state in registers."""

from typing import Annotated

import cuda.tile as ct
import torch

# Sizes of keys and values are compile-time constants: tiles that hold whole rows then need no mask.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
States = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2, 3))]
Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO

EPSILON = 1e-6


@ct.function
def _inverse_norm(x):
    """Return the factor that makes the norm of x [K, 1] one."""
    return ct.rsqrt(ct.sum(x * x, axis=0, keepdims=True) + EPSILON)


@ct.kernel
def _one_token(
    q: Heads, k: Heads, v: Heads, g: ct.Array, beta: ct.Array, initial: States, out: Heads, final: States,
    scale: float, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    heads = v.shape[2]
    batch, head, block = ct.bid(0) // heads, ct.bid(0) % heads, ct.bid(1)
    key_head = head // (heads // k.shape[2])
    state = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
    state = state.reshape((TILE_K, TILE_V))
    shape = (1, 1, 1, TILE_K)
    query = ct.load(q, (batch, 0, key_head, 0), shape, padding_mode=ZERO).reshape((TILE_K, 1)).astype(ct.float32)
    key = ct.load(k, (batch, 0, key_head, 0), shape, padding_mode=ZERO).reshape((TILE_K, 1)).astype(ct.float32)
    value = ct.load(v, (batch, 0, head, block), (1, 1, 1, TILE_V), padding_mode=ZERO).reshape((1, TILE_V))
    decay = ct.exp(ct.load(g, (batch, 0, head), (1, 1, 1)).reshape((1, 1)))
    rate = ct.load(beta, (batch, 0, head), (1, 1, 1)).reshape((1, 1)).astype(ct.float32)
    query = query * (_inverse_norm(query) * scale)
    key = key * _inverse_norm(key)
    # Both sums over the old state; what the query reads of the new one follows from its product with the key.
    state = state * decay
    found = ct.sum(state * key, axis=0, keepdims=True)
    read = ct.sum(state * query, axis=0, keepdims=True)
    delta = rate * (value.astype(ct.float32) - found)
    read = read + ct.sum(query * key, axis=0, keepdims=True) * delta
    state = state + key * delta
    ct.store(final, (batch, head, 0, block), state.reshape((1, 1, TILE_K, TILE_V)))
    ct.store(out, (batch, 0, head, block), read.astype(out.dtype).reshape((1, 1, 1, TILE_V)))


_ONE_TOKEN = {warps: _one_token.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    TILE_V=None,
    WARPS=4,
):
    """Compute S = e^g S, delta = beta (v - k S), final_state = S + k^T delta and out = q final_state for one token.

    Shapes: q, k [B, 1, Hk, K], v and out [B, 1, Hv, V], g and beta [B, 1, Hv], states [B, Hv, K, V]; unit last strides.
    Mapping: a block owns TILE_V columns of the state of one head, which it reads and writes once.
    TILE_V = None: 32, or 16 if there would be fewer blocks than an H200 has places for.
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    tile_v = TILE_V or (16 if B * Hv * V <= 132 * 64 else 32)
    args = (
        q, k, v, g, beta, initial_state, out, final_state,
        K**-0.5, 1 << (K - 1).bit_length(), tile_v,
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (B * Hv, -(-V // tile_v), 1), _ONE_TOKEN[WARPS], args)
