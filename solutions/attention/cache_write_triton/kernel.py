"""New keys and values written into a cache of fixed size, Triton: both tensors in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["L", "S"])
def _write(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, start_ptr,
    k_cache_b, k_cache_h, k_cache_s, v_cache_b, v_cache_h, v_cache_s, k_b, k_h, k_s, v_b, v_h, v_s, L, S,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]).to(tl.int64)
    cols, cols_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    is_new = rows < S
    # All three loads first: they wait for memory at the same time.
    start = tl.load(start_ptr)
    new_k = tl.load(k_ptr + batch * k_b + head * k_h + rows * k_s + cols, mask=is_new & (cols < D), other=0.0)
    new_v = tl.load(v_ptr + batch * v_b + head * v_h + rows * v_s + cols_v, mask=is_new & (cols_v < DV), other=0.0)
    places = rows + start
    inside = is_new & (places >= 0) & (places < L)  # a wrong start writes to no other memory
    k_out = k_cache_ptr + batch * k_cache_b + head * k_cache_h + places * k_cache_s + cols
    v_out = v_cache_ptr + batch * v_cache_b + head * v_cache_h + places * v_cache_s + cols_v
    tl.store(k_out, new_k, mask=inside & (cols < D))
    tl.store(v_out, new_v, mask=inside & (cols_v < DV))


def run(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    *,
    BLOCK=16,
    num_warps=1,
):
    """Position start + s of k_cache and v_cache becomes position s of k and v, in place.

    Shapes: k_cache [B, H, L, D], v_cache [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], start [1] in int64;
    rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: at most BLOCK positions of one head of k and of v a program.
    """
    B, H, S, D = k.shape
    if B == 0:
        return
    DV = v.shape[3]
    block = min(BLOCK, triton.next_power_of_2(S))
    _write[(triton.cdiv(S, block), H, B)](
        k_cache, v_cache, k, v, start,
        *k_cache.stride()[:3], *v_cache.stride()[:3], *k.stride()[:3], *v.stride()[:3], k_cache.shape[2], S,
        D, DV, block, triton.next_power_of_2(D), triton.next_power_of_2(DV), num_warps=num_warps,
    )  # fmt: skip
