"""CUDA sources of TileLang kernels, made without a GPU."""

from __future__ import annotations

from typing import Any

import tilelang
from tvm.ir.transform import PassContext
from tvm.target import Target


def generated(factory: Any, arguments: tuple[Any, ...]) -> str:
    """Return the CUDA source that TileLang makes of a kernel for an H100."""
    jit = factory.__wrapped__
    function, target = jit.get_tir(*arguments), Target({"kind": "cuda", "arch": "sm_90"})
    with PassContext(opt_level=3, config=jit.pass_configs or {}), target:
        return str(tilelang.lower(function, target=target, enable_device_compile=False).kernel_source)
