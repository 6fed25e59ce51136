"""The calls that a GPU's peaks are reached with: copies, reads, matrix products of the library, and a kernel that is empty."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "GIB",
    "PeakCall",
    "copy_candidates",
    "empty_kernel",
    "float32_precision",
    "product_candidates",
    "read_candidates",
]

GIB = 1 << 30


@dataclass(frozen=True)
class PeakCall:
    """One way to reach a peak: a call that does ``amount`` (bytes or flops) each time."""

    how: str
    amount: float
    call: Callable[[], Any]
    warm: bool = False


def empty_kernel() -> None:
    """Launch a kernel of one thread that finds its time is up."""
    import torch

    busy_wait: Any = torch.cuda._sleep
    busy_wait(0)


def copy_candidates(source: torch.Tensor, target: torch.Tensor, size: int) -> Iterator[PeakCall]:
    """Two kernels that read ``size`` bytes of one float32 tensor and write them to another."""
    import torch

    one, other = source[: size // 4], target[: size // 4]
    spelled = f"of {size / GIB:.3g} GiB, cold L2"
    yield PeakCall(f"copy_ {spelled}", 2.0 * size, lambda: other.copy_(one))
    yield PeakCall(f"neg {spelled}", 2.0 * size, lambda: torch.neg(one, out=other))


def read_candidates(source: torch.Tensor) -> Iterator[PeakCall]:
    """Two kernels that read the whole of a float32 tensor and write next to nothing."""
    size = source.numel() * 4
    columns = 4096
    matrix = source[: source.numel() // columns * columns].view(-1, columns)
    vector = matrix[0].clone()
    yield PeakCall(f"sum of {size / GIB:.3g} GiB, cold L2", float(size), source.sum)
    yield PeakCall(f"mv of {size / GIB:.3g} GiB, cold L2", 4.0 * matrix.numel(), lambda: matrix.mv(vector))


def product_candidates(dtype: str, shape: tuple[int, int, int], device: str) -> Iterator[PeakCall]:
    """One library product ``[M, K] x [N, K]^T`` on random data (zeros draw less power and run faster), cold and warm."""
    import torch

    m, n, k = shape
    left, right = (torch.randn(rows, k, device=device) for rows in (m, n))
    call: Callable[[], Any]
    if dtype == "float8_e4m3fn":
        scale = torch.ones((), device=device)
        one, other = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()

        def call() -> Any:
            return torch._scaled_mm(one, other, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        storage = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        one, other = left.to(storage), right.to(storage).t()
        out = torch.empty(m, n, dtype=storage, device=device)

        def call() -> Any:
            return torch.mm(one, other, out=out)

    plain = PeakCall(f"{dtype} product {m}x{n}x{k}, cold L2", 2.0 * m * n * k, call)
    yield plain
    yield dataclasses.replace(plain, how=plain.how.replace("cold L2", "back to back"), warm=True)


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Set PyTorch's process-wide choice between TF32 and full float32 products, and put it back afterwards."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
