"""Stand-ins for libraries that need a GPU: modules with the signatures, and what is asked of arguments, of the releases that
``libraries.toml`` names, which compute with PyTorch.

Signatures are those of the releases: ``python tools/library_signatures.py FOLDER`` compares them with the sources in a folder.
What is asked is what their bindings check before a launch (``csrc/norm.cu``, ``sampling.cu``, ``rope.cu``, ``single_decode.cu``)
and the alignment that their loads take for granted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor
LOAD_BYTES = 16


def asks(holds: bool, what: str) -> None:
    """Refuse as a binding does."""
    if not holds:
        raise RuntimeError(f"check failed: {what}")


def aligned(*tensors: Tensor) -> None:
    """Ask for rows that begin where a vector of 16 bytes may be loaded."""
    for x in tensors:
        asks(x.storage_offset() * x.element_size() % LOAD_BYTES == 0, "storage is aligned to 16 bytes")
        asks(all(s * x.element_size() % LOAD_BYTES == 0 for s in x.stride()[:-1]), "rows are aligned to 16 bytes")
        asks(x.stride(-1) == 1, "the last dimension is contiguous")


def half(*tensors: Tensor) -> None:
    """Ask for the dtypes that the CUDA kernels are built for."""
    asks(all(x.dtype in (torch.float16, torch.bfloat16) for x in tensors), "dtype is float16 or bfloat16")


def normalised(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * factor).to(x.dtype)


# -- flashinfer 0.7.2 -------------------------------------------------------------------------------------------------


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Tensor:
    half(input, weight)
    aligned(input, weight)
    return normalised(input, weight.float(), eps)


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Tensor:
    half(input, weight)
    aligned(input, weight)
    return normalised(input, 1 + weight.float(), eps)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    half(input, residual, weight)
    aligned(input, residual, weight)
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def silu_and_mul(input: Tensor, out: Any = None, enable_pdl: Any = None) -> Tensor:
    half(input)
    aligned(input)
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    half(query, key)
    asks(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous(), "the table is float32 and contiguous")
    asks(positions.is_contiguous() and positions.shape == query.shape[:1], "there is a position for each row")
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].chunk(2, dim=-1))
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """q [S, Hq, D], k and v [Hkv, L, D] -> [S, Hq, D]."""
    group = q.shape[1] // k.shape[0]
    keys, values = (x.float().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("shd,hld->hsl", q.float(), keys) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("hsl,hld->shd", scores.softmax(-1), values).to(q.dtype)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: Any = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Tensor:
    half(q, k, v)
    aligned(q, k, v)
    keys, values = (k, v) if kv_layout == "HND" else (k.transpose(0, 1), v.transpose(0, 1))
    return attended(q, keys, values, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, causal)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: Any = None,
    sm_scale: Any = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    return_lse: bool = False,
) -> Tensor:
    half(q, k, v)
    aligned(q, k, v)
    asks(use_tensor_cores or all(x.is_contiguous() for x in (q, k, v)), "q, k and v are contiguous")
    keys, values = (k, v) if kv_layout == "HND" else (k.transpose(0, 1), v.transpose(0, 1))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return attended(q[None], keys, values, scale, causal=False)[0]


def softmax(logits: Tensor, temperature: Any = None, enable_pdl: Any = None) -> Tensor:
    asks(logits.is_contiguous() and logits.ndim == 2, "logits are contiguous rows")
    aligned(logits)
    return logits.float().softmax(-1)


def drawn(kept: Tensor, seed: Any, offset: Any) -> Tensor:
    """Draw an index of each row, by a number that its seed gives."""
    asks(seed.dtype == offset.dtype == torch.int64 and len(seed) == len(offset) == len(kept), "a seed for each row")
    asks(seed.is_contiguous(), "seeds are contiguous")
    generators = [torch.Generator().manual_seed(int(value) % 2**63) for value in seed]
    number = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    mass = kept.double().cumsum(-1)
    return (mass <= number[:, None] * mass[:, -1:]).sum(-1).clamp_max(kept.shape[-1] - 1).int()


def rows_of(probs: Tensor, parameter: Tensor, dtype: torch.dtype) -> None:
    asks(probs.dtype == torch.float32 and probs.is_contiguous(), "probs are float32 and contiguous")
    asks(parameter.dtype == dtype and parameter.shape == probs.shape[:1], "there is a parameter for each row")
    aligned(probs)


def above(probs: Tensor, values: Tensor) -> Tensor:
    """Return, for each element, the sum of ``values`` over those that are larger."""
    return ((probs[:, None, :] > probs[:, :, None]) * values[:, None, :]).sum(-1)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor:
    rows_of(probs, top_k, torch.int32)
    return drawn(probs * (above(probs, torch.ones_like(probs)) < top_k[:, None]), seed, offset)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor:
    rows_of(probs, top_p, torch.float32)
    return drawn(probs * (above(probs, probs) < top_p[:, None]), seed, offset)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
) -> Tensor:
    rows_of(probs, min_p, torch.float32)
    return drawn(probs * (probs >= min_p[:, None] * probs.amax(-1, keepdim=True)), seed, offset)


def top_k_renorm_probs(probs: Tensor, top_k: Any, is_deterministic: bool = False) -> Tensor:
    rows_of(probs, top_k, torch.int32)
    kept = probs * (above(probs, torch.ones_like(probs)) < top_k[:, None])
    return kept / kept.sum(-1, keepdim=True)


def fused_topk_deepseek(
    scores: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: Tensor,
    topk_indices: Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: Any = None,
    *,
    backend: str = "default",
) -> None:
    asks(all(x.is_contiguous() for x in (scores, bias, topk_values, topk_indices)), "all tensors are contiguous")
    asks(topk <= 8 and n_group <= 32 and topk_group * n_group >= topk, "sizes are supported")
    size = scores.shape[-1] // n_group
    asks(scores.shape[-1] <= 384 if n_group == 1 else size <= 32 and size * topk_group <= 128, "groups are supported")
    asks(topk_indices.dtype == torch.int32 and topk_values.dtype == scores.dtype, "outputs have their dtypes")
    gates = scores.sigmoid()
    choice = (gates + bias).unflatten(-1, (n_group, -1))
    best = choice.topk(min(2, choice.shape[-1]), dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
    kept = torch.zeros(choice.shape[:2], dtype=torch.bool).scatter(-1, best, True)
    ids = choice.masked_fill(~kept[:, :, None], -torch.inf).flatten(1).topk(topk, dim=-1).indices
    weights = gates.gather(-1, ids)
    topk_values.copy_(weights / (weights.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor)
    topk_indices.copy_(ids)


# -- flash-linear-attention 0.5.2 -------------------------------------------------------------------------------------


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple:
    asks(q.dtype == k.dtype == v.dtype != torch.float32, "one dtype of 16 bits")
    asks(g.dtype == initial_state.dtype == torch.float32, "decays and states are in float32")
    query, key = (x.double().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, rows = initial_state.double(), []
    for t in range(q.shape[1]):
        state = state * g[:, t].double().exp()[..., None, None]
        error = beta[:, t, :, None].double() * (v[:, t].double() - torch.einsum("bhi,bhij->bhj", key[:, t], state))
        state = state + key[:, t, :, :, None] * error[:, :, None]
        rows.append(torch.einsum("bhi,bhij->bhj", query[:, t], state))
    out = torch.stack(rows, dim=1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return out.to(v.dtype), state.float() if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, **kwargs: Any
) -> tuple:
    return chunk_gated_delta_rule(q, k, v, g, beta, **kwargs)


# -- liger-kernel 0.8.5 -----------------------------------------------------------------------------------------------


def rms_norm_forward(X: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str, row_mode: Any) -> tuple:
    rows = X.view(-1, X.shape[-1])
    if casting_mode == "gemma":
        return normalised(rows, offset + W.float(), eps).view(X.shape), X, None, 0, 0, 0
    return (offset + W) * normalised(rows, torch.ones(()), eps).view(X.shape), X, None, 0, 0, 0


def fused_add_rms_norm_forward(X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str) -> tuple:
    total = X.view(-1, X.shape[-1]) + R.view(-1, X.shape[-1])
    return rms_norm_forward(total, W, eps, offset, casting_mode, None)[0], total, None, 0, 0, 0, 0


def layer_norm_forward(X: Tensor, W: Tensor, B: Tensor, eps: float) -> tuple:
    rows = X.view(-1, X.shape[-1]).float()
    out = torch.nn.functional.layer_norm(rows, rows.shape[-1:], W.float(), B.float(), eps)
    return out.to(X.dtype).view(X.shape), X, None, None, 0, 0


def gated(activated: Tensor, b: Tensor) -> Tensor:
    return activated.to(b.dtype) * b


def swiglu_forward(a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> tuple:
    asks(a.is_contiguous() and b.is_contiguous(), "one stride serves a, b and the result")
    return a, b, gated(torch.nn.functional.silu(a.float() * gate_multiplier), b)


def swiglu_fused_gate_up_forward(y: Tensor) -> tuple:
    gate, up = y.view(-1, y.shape[-1]).chunk(2, dim=-1)
    return y, gated(torch.nn.functional.silu(gate.float()), up)


def geglu_forward(a: Tensor, b: Tensor) -> tuple:
    asks(a.is_contiguous() and b.is_contiguous(), "one stride serves a, b and the result")
    return a, b, gated(torch.nn.functional.gelu(a.float(), approximate="tanh"), b)


def rope_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Any = None,
    unsqueeze_dim: int = 1,
    rotary_dim: Any = None,
) -> tuple:
    half_size = q.shape[-1] // 2
    cosines, sines = (x[..., :half_size].contiguous()[:, :, None] for x in (cos, sin))
    found = []
    for x in (q, k):
        heads = x.transpose(1, 2).contiguous()  # what is contiguous already is written over
        first, second = heads[..., :half_size].clone(), heads[..., half_size:].clone()
        heads[..., :half_size] = first * cosines - second * sines
        heads[..., half_size:] = second * cosines + first * sines
        found.append(heads.transpose(1, 2))
    return *found, cos, sin


class LigerSoftmaxFunction(torch.autograd.Function):
    """As the library's, which is called by ``apply``."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        return input_.float().softmax(-1).to(input_.dtype)


MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "flashinfer": (),
    "flashinfer.activation": (silu_and_mul,),
    "flashinfer.decode": (single_decode_with_kv_cache,),
    "flashinfer.fused_moe": (fused_topk_deepseek,),
    "flashinfer.norm": (fused_add_rmsnorm, gemma_rmsnorm, rmsnorm),
    "flashinfer.prefill": (single_prefill_with_kv_cache,),
    "flashinfer.rope": (apply_rope_with_cos_sin_cache_inplace,),
    "flashinfer.sampling": (
        min_p_sampling_from_probs,
        softmax,
        top_k_renorm_probs,
        top_k_sampling_from_probs,
        top_p_sampling_from_probs,
    ),
    "fla": (),
    "fla.ops": (),
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    "liger_kernel": (),
    "liger_kernel.ops": (),
    "liger_kernel.ops.fused_add_rms_norm": (fused_add_rms_norm_forward,),
    "liger_kernel.ops.geglu": (geglu_forward,),
    "liger_kernel.ops.layer_norm": (layer_norm_forward,),
    "liger_kernel.ops.rms_norm": (rms_norm_forward,),
    "liger_kernel.ops.rope": (rope_forward,),
    "liger_kernel.ops.softmax": (LigerSoftmaxFunction,),
    "liger_kernel.ops.swiglu": (swiglu_forward, swiglu_fused_gate_up_forward),
}
"""Module -> what stands in it."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of these libraries find the stand-ins for the length of a test."""
    for name, functions in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
