"""Writes the names that a Solution may use: ``tilegym_db/sandbox/scan/allowed/*.txt``, from the modules installed here.

Run it as ``python tools/scan_names.py`` in each environment whose names count: it adds to the files what this one has, and
drops what ``refused.txt`` names. ``--fresh`` forgets the names of other environments. Review the difference before you commit it.

Modules of ``SHORT`` give the names listed here. Those of ``OPEN`` give every public name but a module, a name of another
package, and a function or class that opens files, starts programs, imports, or compiles text, as far as its code shows.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import importlib
import inspect
import logging
import textwrap
import types
from pathlib import Path
from typing import Any

from tilegym_db.sandbox.scan.tables import SCAN_DATA, WORDS, read_sections, refusal, words

SHORT: dict[str, str] = {
    "builtins": "ArithmeticError AssertionError Ellipsis Exception False IndexError KeyError None NotImplemented "
    "NotImplementedError OverflowError RuntimeError True TypeError ValueError ZeroDivisionError abs all any "
    "bin bool bytes chr classmethod complex dict divmod enumerate filter float format frozenset getattr "
    "hasattr hex int isinstance iter len list map max min next oct ord pow property range "
    "reversed round set slice sorted staticmethod str sum tuple zip",
    "functools": "cache lru_cache partial reduce wraps",
    "collections": "defaultdict",
    "torch.nn": "",
    "torch.cuda": "OutOfMemoryError current_device current_stream device device_count device_of get_device_capability "
    "get_device_name get_device_properties is_available is_bf16_supported synchronize",
    "torch.autograd": "grad",
    "torch.compiler": "compile disable reset",
    "typing": "Annotated Any Callable ClassVar Final Iterable Iterator Literal Mapping NamedTuple NoReturn Optional Self "
    "Sequence TYPE_CHECKING TypeAlias TypeVar Union cast Dict List Set Tuple",
    "__future__": "annotations division generator_stop",
    "collections.abc": "Callable Collection Iterable Iterator Mapping Sequence",
    "contextlib": "contextmanager nullcontext",
    "dataclasses": "dataclass field replace KW_ONLY",
    "itertools": "accumulate batched chain combinations count cycle islice pairwise permutations product repeat "
    "starmap zip_longest",
    "operator": "abs add and_ eq floordiv ge gt inv invert itemgetter le lshift lt matmul mod mul ne neg or_ pow "
    "rshift sub truediv xor",
    "os": "environ getenv cpu_count",
    "warnings": "warn",
    "numpy": "errstate array asarray arange zeros ones empty full zeros_like ones_like empty_like full_like linspace eye "
    "identity ndarray dtype generic float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ "
    "intp complex64 complex128 floating integer signedinteger unsignedinteger number finfo iinfo inf nan pi e newaxis "
    "abs add subtract multiply divide floor_divide power mod sqrt exp exp2 log log2 log10 sin cos tan tanh ceil floor "
    "rint round sign square minimum maximum clip where prod sum mean var std median max min amax amin argmax argmin "
    "argsort sort cumsum cumprod dot matmul einsum outer tensordot concatenate stack vstack hstack split reshape "
    "ravel transpose swapaxes moveaxis expand_dims squeeze broadcast_to tile repeat pad roll flip unique nonzero any "
    "all isnan isinf isfinite isclose allclose array_equal ascontiguousarray ceil bitwise_and bitwise_or bitwise_xor "
    "left_shift right_shift logical_and logical_or logical_not diag triu tril meshgrid log1p expm1 gcd lcm ndim shape "
    "size isscalar issubdtype result_type promote_types can_cast",
    "numpy.linalg": "norm",
    "torch.ops.aten": "silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm embedding_dense_backward",
    "torch.version": "cuda hip xpu",
    "torch.library": "custom_op triton_op wrap_triton register_fake register_autograd infer_schema CustomOpDef",
    "torch.types": "Device Number",
    "torch.utils": "",
    "torch.nn.attention": "SDPBackend sdpa_kernel",
    "torch.nn.attention.flex_attention": "flex_attention create_block_mask BlockMask and_masks or_masks",
    "triton": "jit cdiv next_power_of_2 autotune heuristics Config set_allocator constexpr_function aggregate must_use_result "
    "reinterpret TensorWrapper OutOfResources CompilationError TritonError __version__ KernelInterface MockTensor",
    "triton.runtime": "driver Autotuner Config Heuristics OutOfResources autotune heuristics reinterpret",
    "triton.runtime.driver": "active",
    "triton.runtime.driver.active": "get_current_device get_current_target get_current_stream "
    "get_active_torch_device get_device_properties",
    "triton.runtime.driver.active.utils": "get_device_properties",
    "triton.runtime.jit": "jit constexpr_function KernelInterface MockTensor TensorWrapper reinterpret",
    "triton.runtime.autotuner": "Autotuner Config Heuristics OutOfResources autotune heuristics",
    "triton.knobs": "",
    "triton.language.extra": "",
    "triton.language.target_info": "",
    "triton.experimental": "",
    "triton.experimental.gluon": "jit constexpr_function aggregate must_use_result",
    "triton.experimental.gluon.nvidia": "",
    "triton.experimental.gluon.nvidia.hopper": "TensorDescriptor",
    "triton.tools": "",
    "triton.tools.tensor_descriptor": "TensorDescriptor",
    "triton.tools.experimental_descriptor": "create_1d_tma_descriptor create_2d_tma_descriptor TmaDescKernelParam",
    "tilelang": "jit lazy_jit compile par_compile autotune cdiv next_power_of_2 language JITKernel PassConfigKey Layout "
    "Fragment TensorSupplyType DataType is_cache_enabled __version__ macro",
    "tilelang.layout": "Layout Fragment make_swizzled_layout make_linear_layout make_wgmma_swizzled_layout "
    "make_volta_swizzled_layout make_tcgen05mma_swizzled_layout make_full_bank_swizzled_layout "
    "make_half_bank_swizzled_layout make_quarter_bank_swizzled_layout",
    "tilelang.math": "cdiv next_power_of_2",
    "tilelang.intrinsics": "make_mma_swizzle_layout get_swizzle_layout",
    "tilelang.transform": "PassConfigKey",
    "cuda": "",
    "cuda.tile.tune": "Measurement TuningResult exhaustive_search",
}  # fmt: skip

OPEN: dict[str, str] = {
    "math": "math",
    "torch": "torch",
    "torch.linalg": "torch",
    "torch.special": "torch",
    "torch.fft": "torch",
    "torch.nn.functional": "torch",
    "triton.language": "triton",
    "triton.language.math": "triton",
    "triton.language.core": "triton",
    "triton.language.standard": "triton",
    "triton.language.random": "triton",
    "triton.language.extra.libdevice": "triton",
    "triton.language.extra.cuda": "triton",
    "triton.language.extra.cuda.libdevice": "triton",
    "triton.experimental.gluon.language": "triton",
    "triton.experimental.gluon.language.nvidia": "triton",
    "triton.experimental.gluon.language.nvidia.ampere": "triton",
    "triton.experimental.gluon.language.nvidia.ampere.async_copy": "triton",
    "triton.experimental.gluon.language.nvidia.hopper": "triton",
    "triton.experimental.gluon.language.nvidia.hopper.tma": "triton",
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier": "triton",
    "triton.experimental.gluon.language.nvidia.blackwell": "triton",
    "triton.experimental.gluon.language.nvidia.blackwell.tma": "triton",
    "tilelang.language": "tilelang tvm tvm_ffi types",
    "cuda.tile": "cuda types",
}
"""Module -> the packages whose functions and classes count as its own."""

PRIVATE = words(
    "triton.language.core._aggregate triton.language.core._unwrap_if_constexpr triton.language.core._unwrap_shape "
    "torch._check torch._assert torch._assert_async torch._scaled_mm torch._int_mm torch._grouped_mm torch.__version__ "
    "triton.__version__ tilelang.__version__"
)
"""Private names that kernels need."""

TORCH = (
    words(
        "AcceleratorError Generator OutOfMemoryError Size Tensor SymBool SymFloat SymInt BFloat16Tensor BoolTensor FloatTensor "
        "HalfTensor IntTensor LongTensor ByteTensor broadcast_shapes channels_last channels_last_3d compile cond "
        "contiguous_format device dtype e enable_grad finfo iinfo inf inference_mode is_tensor layout memory_format nan "
        "newaxis no_grad pi preserve_format set_grad_enabled strided sparse_coo sparse_csr sparse_csc svd_lowrank "
        "sym_float sym_int sym_max sym_min sym_not sym_sqrt sym_ite unique unravel_index vmap"
    )
    | PRIVATE
)
"""What may be used of torch itself beside its operators and dtypes."""

ADDED = {
    "triton.language.math": "tanh",
    "torch": "float4_e2m1fn_x2 float8_e8m0fnu cholesky qr align_tensors",
    "cuda.tile": "sigmoid",
    "torch.nn.functional": "max_pool3d_with_indices",
    "triton.language": "advance",
    "triton.experimental.gluon.language": "thread_barrier",
    "triton.experimental.gluon.language.nvidia.blackwell": "SharedLinearLayout get_tmem_reg_layout",
}
"""Names of open modules in versions that kernels are still written for."""

DEVICE = ("tilelang.language",)
"""Their names with leading underscores are operations too, such as ``T.__exp``."""

GATEWAYS = words(
    "exec eval compile open fdopen Popen check_call check_output system spawn import_module __import__ CDLL dlopen "
    "load_library LoadLibrary exec_module run_module _jit_compile load_inline memmap fromfile _getframe currentframe stack "
    "get_type_hints eval_type_backport"
)
"""Names whose use in the code of a function keeps it off the list."""

OVERLOOKED = words(
    "torch.nn.functional.pad torch.nn.functional.interpolate "
    "torch.compile torch.vmap torch.nn.Module torch.nn.Transformer torch.nn.Sequential tilelang.language.prim_func "
    "tilelang.language.macro triton.language.core.constexpr triton.language.constexpr triton.language.core.dtype "
    "triton.language.dtype"
)
"""Reviewed: what their code opens, imports or compiles is their own, and nothing that a caller names."""

VALUES = {
    "torch.Tensor": "torch.Tensor",
    "torch.dtype": "torch.dtype",
    "torch.device": "torch.device",
    "torch.Size": "torch.Size",
    "torch.finfo": "torch.finfo",
    "torch.iinfo": "torch.iinfo",
    "triton.language.tensor": "triton.language.core.tensor",
    "triton.language.dtype": "triton.language.core.dtype",
    "triton.language.tuple": "triton.language.core.tuple",
    "triton.language.block_type": "triton.language.core.block_type",
    "triton.language.pointer_type": "triton.language.core.pointer_type",
    "triton.language.tensor_descriptor": "triton.language.core.tensor_descriptor",
    "triton.language.constexpr": "triton.language.core.constexpr",
    "triton.Config": "triton.Config",
    "cuda.tile.Tile": "cuda.tile.Tile",
    "cuda.tile.Array": "cuda.tile.Array",
    "cuda.tile.TiledView": "cuda.tile.TiledView",
    "cuda.tile.DType": "cuda.tile.DType",
    "torch.nn.attention.SDPBackend": "torch.nn.attention.SDPBackend",
    "tilelang.PassConfigKey": "tilelang.PassConfigKey",
    "tilelang.layout.Layout": "tilelang.layout.Layout",
    "tilelang.layout.Fragment": "tilelang.layout.Fragment",
    "cuda.tile.PaddingMode": "cuda.tile.PaddingMode",
    "cuda.tile.RoundingMode": "cuda.tile.RoundingMode",
    "cuda.tile.MemoryOrder": "cuda.tile.MemoryOrder",
    "cuda.tile.MemoryScope": "cuda.tile.MemoryScope",
}
"""Classes whose public attributes may be taken from anything."""

PLAIN = (str, int, float, list, tuple, dict, set, frozenset, range, slice)

FIELDS: dict[str, str] = {
    "results of torch": "exponent mantissa",
    "functools": "args keywords func cache_clear register",
    "tilelang schedules of warps": "ROOT consumer_release consumer_wait producer_acquire producer_commit",
    "device properties": "name major minor total_memory multi_processor_count warp_size max_threads_per_multi_processor "
    "max_threads_per_block regs_per_multiprocessor shared_memory_per_block shared_memory_per_block_optin "
    "shared_memory_per_multiprocessor L2_cache_size gcnArchName arch backend gpu_subslice_count gpu_eu_count max_compute_units "
    "cuda_stream stream synchronize query device_type idx",
    "triton kernels": "warmup run fn arg_names configs best_config kwargs num_warps num_stages num_ctas maxnreg pre_hook "
    "n_regs n_spills n_max_threads metadata shared base_name all_kwargs T handle dtype ty primitive_bitwidth is_ptr "
    "is_block to_reg_dtype advance block_shape from_tensor layout padding strides shape scalar element_ty value gather "
    "scatter load store atomic_add atomic_max atomic_min",
    "gluon": "index subslice reinterpret permute reshape parent block_type",
    "tilelang kernels": "get_kernel_source latency config tune get_tuner scope access_ptr vload vstore region extent "
    "min buffer indices body name_hint data elem_offset replicate repeat bits lanes",
    "cuda tile kernels": "replace_hints tiled_view best compile_for timings num_ctas occupancy opt_level mean_us _pyfunc",
    "library operators": "register_fake register_autograd register_kernel default out Tensor Scalar int self Scalar_Tensor "
    "Tensor_Scalar Tensor_out Scalar_out overloadpacket",
}


def usable(path: str, value: object, homes: list[str]) -> bool:
    """Return whether a member of an open module may be listed."""
    name = path.rpartition(".")[2]
    private = name.startswith("_") and not (path.startswith(DEVICE) and callable(value) and not name.endswith("__"))
    if (private and path not in PRIVATE) or isinstance(value, types.ModuleType) or refusal(path):
        return False
    if path in OVERLOOKED | PRIVATE:
        return True
    if isinstance(value, types.CodeType | types.FrameType):
        return False
    home = (getattr(value, "__module__", None) or "builtins").partition(".")[0]
    if inspect.isroutine(value) or inspect.isclass(value):
        return home in {*homes, "builtins", "_operator", "math"} and not (gateways(value) & GATEWAYS)
    kind = type(value).__module__.partition(".")[0]
    return kind in {*homes, "builtins", "enum", "typing"} and not gateways(getattr(value, "fn", None)) & GATEWAYS


def code_of(value: Any) -> object:
    """Return the code of a function, beneath its decorators, or None for anything else."""
    return getattr(inspect.unwrap(value), "__code__", None)


def gateways(value: object) -> set[str]:
    """Return every name that the code of a function, or of the functions of a class, uses."""
    functions = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    found: set[str] = set()
    pending = [code for one in functions if isinstance(code := code_of(one), types.CodeType)]
    while pending:
        code = pending.pop()
        found |= set(code.co_names)
        pending += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return found


def open_members(module: str, homes: str) -> list[str]:
    """Return the names of an open module that may be listed."""
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        return []
    if module == "torch":
        of_torch = {
            *dir(loaded._C._VariableFunctions),
            *TORCH,
            *(path.removeprefix("torch.") for path in PRIVATE if path.startswith("torch.")),
            *(name for name, value in vars(loaded).items() if isinstance(value, loaded.dtype)),
        }
        return [
            name
            for name, value in vars(loaded).items()
            if name in of_torch and usable(f"torch.{name}", value, ["torch"])
        ]
    return [name for name, value in vars(loaded).items() if usable(f"{module}.{name}", value, homes.split())]


def attributes(path: str) -> list[str]:
    """Return the public attributes of a class."""
    module, _, name = path.rpartition(".")
    try:
        members = dir(functools.reduce(getattr, name.split("."), importlib.import_module(module)))
    except (ImportError, AttributeError):
        return []
    kept = (member for member in members if not member.startswith("_") and not refusal(f"*.{member}"))
    return [member for member in kept if member not in WORDS["reference-values"]]


def class_attributes() -> set[str]:
    """Return the public attributes of the enumerations that open modules of the tile languages list."""
    found: set[str] = set()
    for module, homes in OPEN.items():
        if module.startswith(("triton.", "tilelang.", "cuda.")):
            for name in open_members(module, homes):
                value = getattr(importlib.import_module(module), name)
                if inspect.isclass(value) and issubclass(value, enum.Enum):
                    found |= set(value.__members__)
                elif module.startswith("triton.experimental") and inspect.isclass(value):
                    found |= {member for member in dir(value) if not member.startswith("_")}
    return {name for name in found if not refusal(f"*.{name}")}


def main() -> int:
    """Collect and write."""
    logging.disable()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true")
    fresh = parser.parse_args().fresh
    found = {module: set(names.split()) for module, names in SHORT.items()}
    found |= {module: set(open_members(module, homes)) for module, homes in OPEN.items()}
    for module, added in ADDED.items():
        found[module] |= words(added)
    found["torch.ops"] = {"aten"}
    values = {f"*{name}": set(attributes(path)) for name, path in VALUES.items()}
    values["*classes of the tile languages"] = class_attributes()
    values |= {f"*builtins.{kind.__name__}": {n for n in dir(kind) if not n.startswith("_")} for kind in PLAIN}
    values |= {f"*{name}": set(names.split()) for name, names in FIELDS.items()}
    found |= values
    files: dict[str, dict[str, set[str]]] = collections.defaultdict(dict)
    for section, names in found.items():
        root = "values" if section.startswith("*") else section.partition(".")[0]
        files[root if root in ("values", "torch", "triton", "tilelang", "cuda", "numpy") else "python"][section] = names
    for root, sections in files.items():
        write(SCAN_DATA / "allowed" / f"{root}.txt", sections, fresh=fresh)
    return 0


def write(path: Path, sections: dict[str, set[str]], *, fresh: bool) -> None:
    """Write one file, with the names that it holds already unless ``fresh``."""
    before = {} if fresh or not path.exists() else read_sections(path.read_text())
    lines = []
    for section, names in sorted(sections.items()):
        kept = before.get(section, frozenset()) if section in OPEN or section.startswith("*") else ()
        every = sorted(
            name for name in {*names, *kept} if not refusal(f"{section}.{name}") and not refusal(f"*.{name}")
        )
        lines += [f"[{section}]", *textwrap.wrap(" ".join(every), 120, break_on_hyphens=False), ""]
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main())
