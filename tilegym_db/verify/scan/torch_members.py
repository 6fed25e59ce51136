"""What a tile language may use of torch, which methods of tensors compute, and what makes a function a kernel."""

from __future__ import annotations

from tilegym_db.verify.scan.modules import words

__all__ = [
    "COMPUTE_METHODS",
    "COPY_METHODS",
    "DEVICE_DECORATORS",
    "KERNEL_MAKERS",
    "TENSOR_MARKS",
    "is_torch_compute",
]

KERNEL_MAKERS = words(
    "triton.jit triton.runtime.jit triton.runtime.jit.jit triton.experimental.gluon.jit tilelang.jit tilelang.lazy_jit "
    "tilelang.compile tilelang.language.prim_func cuda.tile.kernel"
)

DEVICE_DECORATORS = words(
    "triton.jit triton.runtime.jit triton.runtime.jit.jit triton.experimental.gluon.jit triton.constexpr_function "
    "tilelang.language.prim_func tilelang.language.macro tilelang.macro cuda.tile.kernel cuda.tile.function "
    "triton.language.core._aggregate"
)

_DTYPES = (
    "bfloat16 float16 half float32 float float64 double float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 int8 int16 short int32 int int64 long uint8 uint16 uint32 uint64 bool complex64 "
    "complex128"
)

_ALLOWED = frozenset(
    f"torch.{name}"
    for name in (
        f"{_DTYPES} dtype device Tensor Size memory_format layout strided contiguous_format channels_last "
        "preserve_format iinfo finfo is_tensor is_floating_point is_complex is_grad_enabled numel result_type "
        "promote_types version __version__ empty empty_like empty_strided zeros zeros_like ones ones_like full "
        "full_like tensor arange as_tensor as_strided reshape transpose permute squeeze unsqueeze flatten narrow "
        "select split chunk unbind broadcast_to broadcast_tensors movedim view_as_real view_as_complex "
        "broadcast_shapes no_grad enable_grad inference_mode set_grad_enabled Generator _check _assert "
        "autograd.Function autograd.function cuda.current_stream cuda.current_device cuda.device cuda.device_of "
        "cuda.device_count cuda.get_device_properties cuda.get_device_capability cuda.get_device_name "
        "cuda.is_available cuda.synchronize cuda.is_current_stream_capturing cuda.OutOfMemoryError "
        "compiler.disable compiler.is_compiling _dynamo.disable _dynamo.is_compiling _dynamo.reset "
        "library.custom_op library.triton_op library.wrap_triton library.register_fake library.register_autograd "
        "library.infer_schema amp.custom_fwd amp.custom_bwd cuda.amp.custom_fwd cuda.amp.custom_bwd "
        "OutOfMemoryError AcceleratorError "
        "cuda.nvtx is_autocast_enabled get_autocast_dtype get_autocast_gpu_dtype get_device SymInt SymFloat "
        "types.Device types.Number jit.ignore jit.unused jit.is_scripting cpu.current_device manual_seed seed"
    ).split()
)
"""What a tile language may use of torch: dtypes, allocation and memsets, views, metadata, decorators without effect."""

_JUDGED_BY_MEMBER = words("torch.Tensor torch.autograd torch.cuda torch.library torch.amp")
"""Allowed themselves, but what lies under them (``torch.Tensor.matmul``) is judged on its own."""


def is_torch_compute(path: str) -> bool:
    """True for a member of torch that a tile language may not use."""
    if not path.startswith("torch.") or path in _JUDGED_BY_MEMBER:
        return False
    prefix = path
    while prefix and prefix not in _ALLOWED:
        prefix = prefix.rpartition(".")[0]
    return not prefix or (prefix in _JUDGED_BY_MEMBER)


COMPUTE_METHODS = words(
    "matmul mm bmm addmm addmm_ addbmm addbmm_ baddbmm baddbmm_ addmv addmv_ mv dot vdot inner outer einsum softmax "
    "log_softmax logsumexp logcumsumexp cumsum cumsum_ cumprod cummax cummin sum nansum mean nanmean var std norm "
    "prod amax amin aminmax argmax argmin topk kthvalue median exp exp_ exp2 exp2_ expm1 expm1_ log log_ log2 log2_ "
    "log1p sigmoid sigmoid_ tanh tanh_ relu relu_ gelu silu rsqrt rsqrt_ sqrt sqrt_ pow pow_ square square_ sub_ add_ "
    "mul mul_ div div_ true_divide floor_divide addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ clamp clamp_ clamp_min "
    "clamp_max clip_ masked_fill masked_fill_ masked_select gather scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ index_add index_add_ index_select index_copy_ index_put_ where repeat_interleave "
    "neg neg_ abs_ reciprocal reciprocal_ sin sin_ cos cos_ erf erf_ roll flip argsort msort unique bincount histc "
    "nan_to_num nan_to_num_ round_ floor_ ceil_ trunc_ remainder fmod tril tril_ triu triu_ diff logaddexp"
)
"""Methods of tensors that compute. Not followed by type: a method of this name is refused wherever the scan cannot tell
that it is another function. Methods that Python's containers also have (``sort``, ``add``) are left out."""

COPY_METHODS = words("copy_ contiguous clone")

TENSOR_MARKS = words("data_ptr stride element_size is_contiguous new_empty storage_offset")
"""Attributes that only tensors have: a name that one is taken from is a tensor."""
