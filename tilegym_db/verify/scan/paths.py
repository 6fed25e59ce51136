"""What a Solution may not name inside the modules that it may import.

A path is spelt as it resolves, whatever it is called in the source: ``t.cuda.Stream`` after ``import torch as t`` is
``torch.cuda.Stream``. The longest entry that is a prefix of a path decides.
"""

from __future__ import annotations

import re

from tilegym_db.verify.scan.modules import words

__all__ = [
    "ATTENTION_OPERATORS",
    "CONTAINERS",
    "FORBIDDEN_ATTRIBUTES",
    "HOOKS",
    "MODULES",
    "MUTATORS",
    "OS_ALLOWED",
    "is_public_dunder",
    "path_rule",
]

# Rule -> prefix -> the names under it that the rule refuses (or notes).
_REFUSED: dict[str, dict[str, str]] = {
    "dynamic-code": {
        "builtins": "exec eval compile __import__ __build_class__ __loader__ __spec__",
        "typing": "get_type_hints ForwardRef evaluate_forward_ref",
        "typing_extensions": "get_type_hints ForwardRef evaluate_forward_ref",
        "dataclasses": "make_dataclass",
    },
    "dynamic-attribute": {
        "builtins": "setattr delattr",
        "operator": "attrgetter methodcaller setitem delitem",
        "functools": "update_wrapper",
    },
    "namespace-access": {
        "builtins": "globals locals vars __builtins__",
        "contextlib": "redirect_stdout redirect_stderr chdir",
        "enum": "global_enum",
    },
    "frame-access": {"types": "CodeType FunctionType LambdaType MethodType FrameType TracebackType CellType"},
    "class-factory": {"types": "new_class prepare_class resolve_bases ModuleType DynamicClassAttribute"},
    "reads-files": {
        "builtins": "open input",
        "json": "load dump",
        "logging": "FileHandler handlers config basicConfig",
        "torch": "load save hub package serialization from_file PyTorchFileReader PyTorchFileWriter",
        "torch.compiler": "load_cache_artifacts save_cache_artifacts load_compiled_function",
    },
    "ends-process": {"builtins": "exit quit breakpoint help SystemExit"},
    "imports-concurrency": {
        "torch": "multiprocessing distributed futures Future fork wait monitor",
        "torch.jit": "fork wait",
        "torch.nn": "parallel",
        "torch.utils": "data",
    },
    "native-extension": {
        "torch": "_C classes cpp export from_dlpack to_dlpack fx CompilationUnit StaticModule import_ir_module "
        "import_ir_module_from_buffer",
        "torch.utils": "cpp_extension dlpack backend_registration rename_privateuse1_backend "
        "generate_methods_for_privateuse1_backend",
        "torch.ops": "load_library import_module",
        "torch.jit": "load CompilationUnit",
        "torch.cuda": "cudart jiterator gds",
        "triton": "_C compile compiler backends tools plugins instrumentation",
        "triton.runtime": "build cache interpreter",
        "triton.runtime.jit": "JITFunction",
        "triton.language": "extern_elementwise semantic",
        "triton.language.core": "extern_elementwise dispatch builtin extern",
        "tilelang": "CUDASourceCodeKernel register_c_postproc register_cuda_postproc register_hip_postproc engine "
        "backend contrib tvm env libinfo cache ir transform instrumentation tools",
        "tilelang.jit": "adapter env kernel execution_backend",
        "tilelang.language": "call_packed call_packed_lowered call_cpacked call_cpacked_lowered tvm_call_packed "
        "tvm_call_packed_lowered tvm_call_cpacked tvm_call_cpacked_lowered call_llvm_intrin call_llvm_pure_intrin "
        "import_source CUDASourceCodeKernel make_tensor_from_addr tir parser ast",
        "cuda.tile": "compilation foreign_pointer_dtype jax",
    },
    "stream-or-graph": {
        "torch": "Stream Event StreamObjType mps mtia",
        "torch.cuda": "CUDAGraph graph graphs make_graphed_callables graph_pool_handle Stream stream ExternalStream "
        "StreamContext set_stream get_stream_from_external default_stream streams Event MemPool use_mem_pool "
        "CUDAPluggableAllocator change_current_allocator caching_allocator_alloc caching_allocator_delete "
        "caching_allocator_enable GreenContext green_contexts memory empty_cache current_blas_handle ipc_collect tunable",
        "torch.accelerator": "set_stream Graph",
        "torch.xpu": "Stream stream set_stream StreamContext Event XPUGraph graph",
        "torch.compiler": "cudagraph_mark_step_begin",
    },
    "dispatch-override": {
        "torch": "overrides DispatchKey DispatchKeySet ExcludeDispatchKeyGuard",
        "torch.library": "Library impl impl_abstract register_kernel register_autocast register_torch_dispatch "
        "register_vmap fallthrough_kernel get_kernel define",
        "torch.autograd": "graph",
        "torch.compiler": "substitute_in_graph",
        "torch.nn.modules": "module",
    },
    "tensor-subclass": {"torch": "masked nested DisableTorchFunction DisableTorchFunctionSubclass"},
    "process-state": {
        "logging": "setLoggerClass setLogRecordFactory captureWarnings addLevelName",
        "torch": "set_default_device set_default_dtype set_default_tensor_type set_float32_matmul_precision "
        "set_num_threads set_num_interop_threads set_flush_denormal set_printoptions set_warn_always "
        "set_deterministic_debug_mode use_deterministic_algorithms set_anomaly_enabled set_autocast_enabled "
        "set_autocast_dtype set_autocast_cache_enabled profiler testing get_device_module",
        "torch.autograd": "profiler",
        "torch.compiler": "set_stance set_default_backend allow_in_graph assume_constant_result config",
        "torch.cuda": "profiler set_device set_per_process_memory_fraction set_sync_debug_mode init",
        "torch.utils": "swap_tensors set_module benchmark collect_env",
        "triton": "profiler",
        "triton.knobs": "runtime",
        "triton.testing": "set_gpu_clock nvsmi",
        "triton.runtime.driver": "set_active reset_active",
        "tilelang": "set_log_level profiler disable_cache enable_cache",
    },
    "persists-l2": {"tilelang.language": "annotate_l2_hit_ratio"},
    # Notes.
    "cached-function": {"functools": "cache lru_cache cached_property"},
    "try": {"contextlib": "suppress"},
    "address": {"builtins": "id"},
    "imports-random": {
        "torch": "manual_seed seed random set_rng_state default_generator",
        "torch.cuda": "manual_seed manual_seed_all seed seed_all set_rng_state random",
    },
}

# Allowed although a shorter entry refuses them, or although a name in them is private.
_ALLOWED: dict[str, str] = {
    "torch": "_check _assert _assert_async _scaled_mm _int_mm _grouped_mm",
    "torch._dynamo": "reset disable is_compiling mark_static",
    "torch.nn.modules": "utils",
    "triton.tools": "tensor_descriptor experimental_descriptor ragged_tma mxfp",
    "tilelang.env": "is_cache_enabled",
}

ATTENTION_OPERATORS = words(
    " ".join(
        f"torch.ops.aten.{name} torch.ops.aten.{name}.default"
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
        )
    )
)
"""What python code may call although it is private: the kernels beneath ``scaled_dot_product_attention``, each by itself.

PyTorch's public way to one of them sets flags of the whole process, for every thread; these operators set nothing. They are
allowed as they stand here, overload included, where they are written out and called on the spot, and nothing beneath them is: an
operator that is handed on, or reached through a name, could be given another implementation.
"""

_PATHS: dict[str, str | None] = {
    **{f"{root}.{name}": rule for rule, of in _REFUSED.items() for root, names in of.items() for name in names.split()},
    **{f"{root}.{name}": None for root, names in _ALLOWED.items() for name in names.split()},
}


def path_rule(path: str) -> tuple[bool, str | None]:
    """Whether the tables name a path or a prefix of it, and the rule that refuses it if so (None: it is allowed)."""
    prefix = path
    while prefix:
        if prefix in _PATHS:
            return True, _PATHS[prefix]
        prefix = prefix.rpartition(".")[0]
    return False, None


OS_ALLOWED = re.compile(
    r"os(\.(environ(\.get)?|getenv|cpu_count|name|sep|path(\.(join|basename|dirname|splitext|sep))?))?"
)
"""What may be used of ``os``; names of variables are judged where they are read."""

_ATTRIBUTES: dict[str, str] = {
    "frame-access": "f_back f_globals f_locals f_builtins f_code f_trace tb_frame tb_next tb_lasti gi_frame gi_code "
    "gi_yieldfrom cr_frame cr_code cr_await ag_frame ag_code co_code co_consts co_names func_globals func_code "
    "func_closure cell_contents with_traceback mro",
    "tensor-subclass": "_make_subclass _make_wrapper_subclass as_subclass",
    "native-extension": "load_inline load_library cpp_extension load_binary launcher_cls cudart _C from_blob asm "
    "_init_handles _unsafe_update_src raw_src",
    "stream-or-graph": "CUDAGraph ExternalStream set_stream record_stream replay wait_stream",
    "process-state": "launch_enter_hook launch_exit_hook jit_post_compile_hook jit_cache_hook "
    "add_stages_inspection_hook add_pre_run_hook pre_run_hooks set_active register_hook",
    "namespace-access": "_convert_",
    "smuggled-module": "ctypes subprocess importlib builtins threading multiprocessing inspect gc socket os sys "
    "_os _sys _thread get_device_interface",
    "persists-l2": "annotate_l2_hit_ratio cudaDeviceSetLimit cudaStreamSetAttribute",
    "address": "data_ptr const_data_ptr untyped_storage storage _typed_storage as_strided as_strided_ set_ _cdata "
    "share_memory_",
}

FORBIDDEN_ATTRIBUTES: dict[str, str] = {name: rule for rule, names in _ATTRIBUTES.items() for name in names.split()}
"""Attributes refused (or noted) whatever they are taken from: distinctive names that plain tensors and kernels lack."""

_PUBLIC_DUNDERS = words(
    "__name__ __qualname__ __doc__ __version__ __init__ __post_init__ __enter__ __exit__ __len__ __iter__ __call__ "
    "__getitem__ __setitem__ __contains__ __all__ __file__ __add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ "
    "__pow__ __neg__ __and__ __or__ __xor__ __lshift__ __rshift__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__matmul__ __radd__ __rsub__ __rmul__ __int__ __float__ __bool__ __hash__ __repr__ __str__"
)


def is_public_dunder(name: str) -> bool:
    """True for the few ``__names__`` that lead nowhere."""
    return name in _PUBLIC_DUNDERS


HOOKS = words(
    "__del__ __class__ __torch_function__ __torch_dispatch__ __reduce__ __reduce_ex__ __getattribute__ __setattr__ "
    "__delattr__ __cuda_array_interface__ __array_interface__ __array__ __dlpack__ __dlpack_device__ __mro_entries__ "
    "__instancecheck__ __subclasscheck__ __subclasshook__ __getstate__ __setstate__ __dir__ __path__ __builtins__ "
    "__loader__ __spec__ __prepare__ __module__ __match_args__"
)
"""Names whose definition makes code run, or an object pass for another, where nobody calls it."""

MUTATORS = words(
    "add append appendleft clear discard extend insert pop popitem remove setdefault update __setitem__ __delitem__ "
    "__setattr__ __ior__"
)

CONTAINERS = words(
    "builtins.dict builtins.list builtins.set builtins.bytearray collections.defaultdict collections.OrderedDict "
    "collections.deque collections.Counter"
)

MODULES = words(
    "torch torch.cuda torch.nn torch.nn.functional torch.nn.init torch.autograd torch.backends torch.backends.cuda "
    "torch.backends.cudnn torch.compiler torch.utils torch.library torch.linalg torch.special torch.fft torch.jit "
    "torch.ops torch.ops.aten torch.amp torch.random torch.sparse torch.func torch.accelerator torch.version torch.cpu "
    "torch._dynamo torch._inductor torch.optim torch.distributions torch.functional torch.types torch.storage "
    "triton triton.language triton.runtime triton.testing triton.language.extra triton.experimental triton.knobs "
    "triton.experimental.gluon triton.experimental.gluon.language triton.language.math triton.language.core "
    "triton.language.extra.cuda triton.language.extra.libdevice triton.language.standard "
    "tilelang tilelang.language tilelang.autotuner tilelang.utils tilelang.math tilelang.layout "
    "cuda cuda.tile cuda.tile.tune os os.path"
)
"""Paths that are modules, beside every path that an import statement of the source names."""
