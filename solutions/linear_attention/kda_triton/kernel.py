"""Kimi Delta Attention, Triton: one token after the other, with the state in registers.

Every row of the state has its own decay, which therefore does not factor out of the products of keys. The recurrence needs no
such products: a token reads and writes a block of columns of the state, and columns do not depend on each other.
"""

import torch
import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)


@triton.jit
def _unit(x):
    """x [K] float32 -> x / |x|."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) + EPSILON)


@triton.jit
def _scan_tokens(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v, g_b, g_t, g_h, beta_b, beta_t,
    initial_b, initial_h, initial_k, out_b, out_t, out_h, final_b, final_h, final_k,
    T, H, V, scale, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = rows < K, cols < V
    inside = in_k[:, None] & in_v[None, :]
    far_rows, far_cols = rows.to(tl.int64), cols.to(tl.int64)  # their strides may be those of a whole tensor
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + far_rows[:, None] * initial_k + cols[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0)
    q_ptr += batch * q_b + head * q_h
    k_ptr += batch * k_b + head * k_h
    v_ptr += batch * v_b + head * v_h
    g_ptr += batch * g_b + head * g_h
    beta_ptr += batch * beta_b + head
    out_ptr += batch * out_b + head * out_h
    for _ in tl.range(0, T, num_stages=STAGES):
        q = _unit(tl.load(q_ptr + far_rows * q_k, mask=in_k, other=0.0).to(tl.float32)) * scale
        k = _unit(tl.load(k_ptr + far_rows * k_k, mask=in_k, other=0.0).to(tl.float32))
        v = tl.load(v_ptr + far_cols * v_v, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g_ptr + rows, mask=in_k, other=0.0))
        beta = tl.load(beta_ptr).to(tl.float32)
        # Both sums over the state at once: the query reads the state before the write, and its product with the key the write.
        state = state * decay[:, None]
        delta = beta * (v - tl.sum(state * k[:, None], axis=0))
        out = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k, axis=0) * delta
        state = state + k[:, None] * delta[None, :]
        tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=in_v)
        q_ptr += q_t
        k_ptr += k_t
        v_ptr += v_t
        g_ptr += g_t
        beta_ptr += beta_t
        out_ptr += out_t
    final_ptrs = final_ptr + batch * final_b + head * final_h + far_rows[:, None] * final_k + cols[None, :]
    tl.store(final_ptrs, state, mask=inside)


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
    BLOCK_V=None,
    num_warps=2,
    num_stages=2,
):
    """Compute S = diag(e^g) S, delta = beta (v - k S), S = S + k^T delta and out = q S for T tokens one after the other.

    Shapes: q, k [B, T, H, K] and v [B, T, H, V] of any strides; g [B, T, H, K], beta [B, T, H], out [B, T, H, V] and states
    [B, H, K, V] with unit last strides.
    Mapping: a program owns BLOCK_V columns of the state of one head and goes through the tokens.
    BLOCK_V = None: 32 columns, or 8 if there would be fewer programs than an H200 has places for.
    """
    B, T, H, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    block_v = BLOCK_V or (8 if B * H * V <= 132 * 64 else 32)
    _scan_tokens[(B * H, triton.cdiv(V, block_v))](
        q, k, v, g, beta, initial_state, out, final_state,
        *q.stride(), *k.stride(), *v.stride(), *g.stride()[:3], *beta.stride()[:2],
        *initial_state.stride()[:3], *out.stride()[:3], *final_state.stride()[:3],
        T, H, V, K**-0.5, K, triton.next_power_of_2(K), block_v, num_stages,
        num_warps=num_warps,
    )  # fmt: skip
