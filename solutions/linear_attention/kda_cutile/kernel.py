"""Kimi Delta Attention in cuTile: one token after the other, with the state in registers.

Every row of the state has its own decay, which therefore does not factor out of the products of keys. The recurrence needs no
such products: a token reads and writes a block of columns of the state, and columns do not depend on each other.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# Sizes of keys and values are compile-time constants: tiles that hold whole rows then need no mask.
States = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2, 3))]
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO

EPSILON = 1e-6


@ct.function
def _row(x, batch, token, head, block, SIZE: Int):
    """Numbers of a token and a head, float32; zeros past the last one."""
    return (
        ct.load(x, (batch, token, head, block), (1, 1, 1, SIZE), padding_mode=ZERO).reshape((SIZE,)).astype(ct.float32)
    )


@ct.function
def _inverse_norm(x):
    """Return the factor that makes the norm of x [K] one."""
    return ct.rsqrt(ct.sum(x * x) + EPSILON)


@ct.kernel
def _scan_tokens(
    q: Heads, k: Heads, v: Heads, g: Heads, beta: ct.Array, initial: States, out: Heads, final: States,
    scale: float, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    heads = v.shape[2]
    batch, head, block = ct.bid(0) // heads, ct.bid(0) % heads, ct.bid(1)
    state = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
    state = state.reshape((TILE_K, TILE_V))
    for token in range(v.shape[1]):
        query = _row(q, batch, token, head, 0, TILE_K)
        key = _row(k, batch, token, head, 0, TILE_K)
        value = _row(v, batch, token, head, block, TILE_V)
        decay = ct.exp(_row(g, batch, token, head, 0, TILE_K))
        rate = ct.gather(beta, (batch, token, head), check_bounds=False).astype(ct.float32)
        query = query * (_inverse_norm(query) * scale)
        key = key * _inverse_norm(key)
        # Both sums over the state before the write: what the query reads of it follows from its product with the key.
        state = state * decay[:, None]
        delta = rate * (value - ct.sum(state * key[:, None], axis=0))
        read = ct.sum(state * query[:, None], axis=0) + ct.sum(query * key) * delta
        state = state + key[:, None] * delta[None, :]
        ct.store(out, (batch, token, head, block), read.astype(out.dtype).reshape((1, 1, 1, TILE_V)))
    ct.store(final, (batch, head, 0, block), state.reshape((1, 1, TILE_K, TILE_V)))


_SCAN = {warps: _scan_tokens.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    TILE_V: int | None = None,
    WARPS: int = 4,
) -> None:
    """Compute S = diag(e^g) S, delta = beta (v - k S), S = S + k^T delta and out = q S for tokens one after the other.

    Shapes: q, k, g [B, T, H, K], v and out [B, T, H, V], beta [B, T, H], states [B, H, K, V]; unit last strides.
    Mapping: a block owns TILE_V columns of the state of one head and goes through the tokens.
    TILE_V = None: 32, or 16 if there would be fewer blocks than an H200 has places for.
    """
    B, _, H, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    tile_v = TILE_V or (16 if B * H * V <= 132 * 64 else 32)
    args = (q, k, v, g, beta, initial_state, out, final_state, K**-0.5, 1 << (K - 1).bit_length(), tile_v)
    ct.launch(torch.cuda.current_stream(), (B * H, -(-V // tile_v), 1), _SCAN[WARPS], args)
