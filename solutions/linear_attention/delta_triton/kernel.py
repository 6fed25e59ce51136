"""The gated delta rule, Triton: one token with the state in registers, or chunks of tokens between which the state stays there.

Rows of queries and keys are normalised by factors on products, so that a key of 16 bits enters products as it is.
"""

import torch
import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)


@triton.jit
def _inverse_norm(x):
    """x [..., K] float32 -> [...]."""
    return tl.rsqrt(tl.sum(x * x, axis=-1) + EPSILON)


# ---- one token ------------------------------------------------------------------------------------


@triton.jit
def _one_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, beta_b, initial_b, initial_h, initial_k, out_b, out_h, final_b, final_h, final_k,
    Hv, group, V, scale, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hv).to(tl.int64)
    head = tl.program_id(0) % Hv
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows[:, None] < K) & (cols[None, :] < V)
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + rows[:, None] * initial_k + cols[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0)
    q = tl.load(q_ptr + batch * q_b + head // group * q_h + rows, mask=rows < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + batch * k_b + head // group * k_h + rows, mask=rows < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + batch * v_b + head * v_h + cols, mask=cols < V, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + batch * g_b + head))
    beta = tl.load(beta_ptr + batch * beta_b + head).to(tl.float32)
    q = q * (_inverse_norm(q) * scale)
    k = k * _inverse_norm(k)
    state = state * decay
    # Both sums over the state at once: the query reads the old state, and what is written by its product with the key.
    delta = beta * (v - tl.sum(state * k[:, None], axis=0))
    out = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k, axis=0) * delta
    state = state + k[:, None] * delta[None, :]
    tl.store(final_ptr + batch * final_b + head * final_h + rows[:, None] * final_k + cols[None, :], state, mask=inside)
    tl.store(out_ptr + batch * out_b + head * out_h + cols, out.to(out_ptr.dtype.element_ty), mask=cols < V)


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
    BLOCK_V=None,
    num_warps=1,
):
    """S = e^g S; delta = beta (v - k S); final_state = S + k^T delta; out = q final_state, for one token of each sequence.

    Shapes: q, k [B, 1, Hk, K], v and out [B, 1, Hv, V], g and beta [B, 1, Hv], states [B, Hv, K, V]; unit last strides.
    Mapping: a program owns BLOCK_V columns of the state of one head, which it reads and writes once.
    BLOCK_V = None: 32 columns, or 16 if there would be fewer programs than an H200 has places for.
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    block_v = BLOCK_V or (16 if B * Hv * V <= 132 * 64 else 32)
    _one_token[(B * Hv, triton.cdiv(V, block_v))](
        q, k, v, g, beta, initial_state, out, final_state,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), g.stride(0), beta.stride(0),
        *initial_state.stride()[:3], out.stride(0), out.stride(2), *final_state.stride()[:3],
        Hv, Hv // k.shape[2], V, K**-0.5, K, triton.next_power_of_2(K), block_v,
        num_warps=num_warps,
    )  # fmt: skip
