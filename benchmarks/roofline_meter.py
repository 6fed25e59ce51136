"""Time of PyTorch operations on an H200 by a roofline, without a GPU: they run on the meta device, and a meter adds their times.

Each operation takes the longest of ``flops / rate``, ``bytes / bandwidth`` and a launch. Experts and scaled dot product
attention count as one operation, as if fused.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FLOPS_PER_S = {torch.bfloat16: 0.7 * 989e12, torch.float16: 0.7 * 989e12}
FLOPS_PER_S_OF_OTHERS = 67e12
BYTES_PER_S = 0.8 * 4.8e12
LAUNCH_S = 2e-6

aten = torch.ops.aten
LIBRARY = {aten.mm, aten.addmm, aten.convolution}
"""Products with weights. Batched products belong to the code of a model."""
SELECTIONS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operations that read only the selected elements of their first input."""
UNKNOWN = {aten._local_scalar_dense.default: 1, aten.equal.default: False}
"""Results that depend on values, which tensors of the meta device have not."""
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}


class Row(NamedTuple):
    """The code that an operation belongs to: ``definition`` of the recognised part, or ``library``, or neither."""

    module_class: str
    definition: str = ""
    library: bool = False


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the different elements of a tensor; expanded axes count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def seconds(flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
    """Return the time of one kernel by the roofline."""
    return max(flops / FLOPS_PER_S.get(dtype, FLOPS_PER_S_OF_OTHERS), moved_bytes / BYTES_PER_S, LAUNCH_S)


class Meter(TorchDispatchMode):
    """The time of every operation in a ``with`` block, by :class:`Row`."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.taken: Counter[Row] = Counter()
        self.modules: list[str] = []
        self._definitions: list[str] = []
        self._is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on tensors without memory, and add its time."""
        kwargs = kwargs or {}
        if func in UNKNOWN:
            return UNKNOWN[func]
        out = func(*args, **kwargs)
        results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        is_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        packet = func.overloadpacket
        if not self._is_counting or is_view or not results or packet in FREE:
            return out
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        moved = sum(map(bytes_of, given)) + sum(map(bytes_of, results))
        if packet in SELECTIONS:
            moved = 2 * sum(map(bytes_of, results))
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        self.add(seconds(flops, moved, results[0].dtype), library=packet in LIBRARY)
        return out

    def add(self, taken: float, *, library: bool = False) -> None:
        """Add the time of an operation to the current part or module."""
        module = self.modules[-1] if self.modules else ""
        definition = self._definitions[-1] if self._definitions else ""
        self.taken[Row(module, definition, library and not definition)] += taken

    @property
    def is_in_part(self) -> bool:
        """True if operations count as those of a recognised part."""
        return bool(self._definitions)

    @contextlib.contextmanager
    def recognised(self, definition: str) -> Iterator[None]:
        """Count operations in the block as those of a recognised part."""
        self._definitions.append(definition)
        try:
            yield
        finally:
            self._definitions.pop()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Count no operations in the block; its code adds one time for all of them."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before


def attention(meter: Meter, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
    """Count scaled dot product attention [B, H, L, D] as one operation.

    Its output has positions before heads in memory, as that of the fused kernels of PyTorch.
    """
    (length, width), keys = query.shape[-2:], key.shape[-2]
    pairs = length * keys / (2 if mask is None and length == keys else 1)
    flops = 2 * pairs * (width + value.shape[-1]) * query.shape[:-2].numel()
    *batch, heads, _, _ = query.shape
    out = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-3, -2)
    masks = [mask] if isinstance(mask, torch.Tensor) else []
    meter.add(seconds(flops, sum(map(bytes_of, (query, key, value, out, *masks))), query.dtype))
    return out


class FusedAttention(TorchFunctionMode):
    """Calls of ``scaled_dot_product_attention`` in a ``with`` block as one operation each."""

    def __init__(self, meter: Meter) -> None:
        """Count at a meter."""
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one function; run every other as it is."""
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        with self._meter.alone():
            return attention(self._meter, *(named.get(name) for name in ("query", "key", "value", "attn_mask")))


class Products(TorchFunctionMode):
    """Products of linear layers in a ``with`` block as a recognised part, as a graph of a decoding step has them."""

    def __init__(
        self, meter: Meter, weights: Iterable[torch.Tensor], definition: str, biased: str | None, rows: int
    ) -> None:
        """Count at a meter.

        Args:
            weights: the parameters of the model.
            definition: the Definition of a product.
            biased: that of a product with a bias.
            rows: the most rows of an input that is not left to the library.
        """
        super().__init__()
        self._meter, self._definition, self._biased, self._rows = meter, definition, biased, rows
        self._weights = {id(weight) for weight in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a product of few rows as the part; run every function as it is."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, weight, bias = given["input"], given["weight"], given.get("bias")
        elif func is torch.Tensor.matmul:
            x, weight, bias = args[0], args[1]._base, None
        else:
            return func(*args, **kwargs)
        name = self._definition if bias is None else self._biased
        is_few = x.numel() // max(1, x.shape[-1]) <= self._rows
        is_part = is_few and name and id(weight) in self._weights and not self._meter.is_in_part
        with self._meter.recognised(name) if is_part else contextlib.nullcontext():
            return func(*args, **kwargs)


def experts(meter: Meter, weights: Sequence[torch.Tensor], definition: str, states: Any, ids: Any) -> torch.Tensor:
    """Count experts on states [M, H] and ids [M, K] as one operation: each chosen expert is read once."""
    choices = ids.numel()
    of_one = [weight[0].numel() for weight in weights]
    read = min(choices, weights[0].shape[0]) * sum(of_one) * weights[0].element_size()
    moved = read + (choices + 1) * bytes_of(states) // max(1, states.shape[0]) * 2
    with meter.alone(), meter.recognised(definition) if definition else contextlib.nullcontext():
        meter.add(seconds(2 * choices * sum(of_one), moved, states.dtype))
        return torch.empty_like(states)
