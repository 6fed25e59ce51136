"""Lifts the reference of an operator to fp64: what it is given, every cast it makes, and of weights of experts one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LIFTED_DTYPES", "Lifted", "SlicedInput"]

LIFTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class SlicedInput:
    """An input that is left as it is until the reference takes a slice of it, ``value[index]`` along ``dimension``."""

    name: str
    value: torch.Tensor
    dimension: int


class Lifted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns every floating-point dtype that the code inside asks for into float64.

    A reference restates a model's own code, which casts down and up between steps; lifted, those casts round nothing, so
    the result differs from the mathematical one by fp64 rounding only.

    The weights of all experts in fp64 are four times as large as the layer itself. Of a sliced input only what is selected is
    lifted, and anything else that is done with it is an error, as it would take the whole.
    """

    def __init__(self, slices: Sequence[SlicedInput] = ()) -> None:
        """Prepare.

        Args:
            slices: inputs that the reference takes one slice at a time.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._slices = tuple(slices)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator with any floating ``dtype`` argument replaced.

        Raises:
            TypeError: the operator takes a sliced input as a whole.
        """
        kwargs = dict(kwargs or {})
        if self._slices and (taken := self._sliced_among((*args, *kwargs.values()))) is not None:
            return self._slice(taken, func, args)
        if kwargs.get("dtype") in LIFTED_DTYPES:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if _is_float_dtype(value) else value for value in args), **kwargs)

    def _sliced_among(self, values: Sequence[Any]) -> SlicedInput | None:
        for value in values:
            parts = value if isinstance(value, list | tuple) else (value,)
            for part in parts:
                for item in self._slices:
                    if part is item.value:
                        return item
        return None

    def _slice(self, taken: SlicedInput, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        dimension = args[1] if len(args) > 1 else None
        if func is not torch.ops.aten.select.int or dimension not in (
            taken.dimension,
            taken.dimension - taken.value.dim(),
        ):
            raise TypeError(
                f"'{taken.name}' is one of sliced_inputs: take one slice at a time ({taken.name}[e], of dimension "
                f"{taken.dimension}), as {func} needs the whole in fp64"
            )
        slice_: torch.Tensor = func(*args)
        return slice_.double()


def _is_float_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in LIFTED_DTYPES
