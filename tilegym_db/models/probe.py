"""Confirm which Definition a piece of a model computes: run it on random bf16 data and compare bit for bit.

Inputs and weights are always random bf16, whatever the model holds. In fp32, or with weights of one, variants that round at
different places agree. The comparison is with the Definition's stock solution, the code that kernels are measured against, or
else with its reference. The model does not change, none of its hooks runs, and the global random state stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.errors import TilegymDBError
from tilegym_db.records import Definition
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import run_reference

ROWS, SIZE = 5, 64
SEED = 1234

Probe = tuple[dict[str, Any], tuple[torch.Tensor, ...]]
"""The inputs of a piece of a model by their names in the Definition, and its results."""


Agreement = Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], bool]
"""(results of a piece of a model, those of a Definition) -> True if they are the same."""


class Draw:
    """Random bf16 tensors on one device from a separate generator."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return the next tensor of a shape."""
        drawn = torch.randn(shape, generator=self._generator, device=self._generator.device)
        return drawn.to(torch.bfloat16)

    def mixing(self, rows: int, columns: int) -> torch.Tensor:
        """Return a matrix of -1, 0 and 1 with two entries per row or per column, whichever are more.

        Each element of a product with it is a sum of two terms and zeros, so the order of summation does not change its bits.
        """
        matrix, more = torch.zeros_like(self(rows, columns)), max(rows, columns)
        places = torch.arange(more, device=matrix.device)
        for _ in range(2):
            signs, row, column = self(more).sign(), *(self(size).float().argsort() for size in (rows, columns))
            matrix[row[places % rows], column[places % columns]] = signs
        return matrix


def drawn_inputs(definition: Definition, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Draw every tensor input of a Definition; axes that ``sizes`` does not name have :data:`SIZE`."""
    draw = Draw(device)
    axes = {
        name: axis.value if axis.value is not None else sizes.get(name, SIZE) for name, axis in definition.axes.items()
    }
    return {name: draw(*definition.shape_of(name, axes)) for name in definition.tensor_inputs}


def matching_definitions(
    probe: Probe, definitions: Iterable[Definition], catalog: Catalog, agrees: Agreement | None = None
) -> list[str]:
    """Return the names of the Definitions that compute the same bits as the probe, or results that agree with it."""
    inputs, returned = probe
    return [one.name for one in definitions if (agrees or _same)(returned, _expected(one, inputs, catalog))]


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or the CPU if it has no parameter.

    Hooks of accelerate may keep weights elsewhere between calls. Probes draw weights, so those of such modules are on the CPU.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    is_offloaded = device.type == "meta" and any("_hf_hook" in vars(one) for one in module.modules())
    return torch.device("cpu") if is_offloaded else device


def stock_function(definition: Definition, catalog: Catalog) -> Callable[..., Any] | None:
    """Return ``stock(*inputs) -> outputs`` of a Definition's stock solution; None unless that solution returns its outputs."""
    stock = stock_of(catalog.solutions_for(definition.name))
    if stock is None or stock.record.spec.destination_passing_style or definition.in_place:
        return None
    return load_verified(stock, stock.digest)


def _expected(definition: Definition, inputs: dict[str, Any], catalog: Catalog) -> tuple[torch.Tensor, ...]:
    """Return a Definition's outputs for the inputs; empty if it takes other inputs."""
    if set(inputs) != set(definition.inputs):
        return ()
    given = {name: inputs[name] for name in definition.inputs}
    stock = stock_function(definition, catalog)
    try:
        if stock is None:
            return tuple(run_reference(definition, given).values())
        with torch.no_grad():
            found = stock(*given.values())
    except (TilegymDBError, RuntimeError, IndexError, TypeError):  # the Definition takes inputs of other shapes
        return ()
    return found if isinstance(found, tuple) else (found,)


def are_close(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if results differ by roundings only: one unit in the last place of bf16, and 1e-4 of the norm in float32.

    It is for code whose order of additions is not fixed, such as sums over chunks of tokens.
    """
    return len(returned) == len(expected) and all(
        got.shape == want.shape and got.dtype == want.dtype and _is_close(got.float(), want.float(), got.dtype)
        for got, want in zip(returned, expected, strict=True)
    )


def _is_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    error = (got - want).abs()
    if dtype == torch.float32:
        return bool(error.norm() <= 1e-4 * want.norm())
    return bool((error <= torch.finfo(dtype).eps * want.abs() + 1e-4 * want.abs().mean()).all())


def _same(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return len(returned) == len(expected) and all(
        got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
        for got, want in zip(returned, expected, strict=True)
    )


# ---- drawn codes ----------------------------------------------------------------------------------
# Random values for probing code that casts to FP8 and multiplies codes.
#
# The order of additions and the way of dividing change no bit of the results, so a kernel of the hub and PyTorch operations
# agree. A kernel may divide by 448 with an error of one unit in the last place, and its scale then has that error. So each
# output is one product that bfloat16 holds exactly: with such an error it rounds to the same number.

CODES = torch.float8_e4m3fn
MANTISSA_BITS = 3
LARGEST, SMALLEST = 448.0, 16.0
"""Magnitudes of codes, which have four bits."""
ACTIVATION_SCALES = (0.5, 0.75, 1.0, 1.5)
WEIGHT_SCALES = (0.5, 0.75, 1.5, 1.0)
WEIGHTS = (1.0, 2.0, 4.0)
"""A scale has two significant bits and a weight is a power of two, so a product with a code of four bits has at most eight."""


def activation(draw: Draw, rows: int, columns: int, width: int) -> torch.Tensor:
    """Return a bf16 activation [rows, columns] whose blocks of ``width`` have scales of few bits and no value near a tie."""
    shape = (rows, columns // width, width)
    codes = (SMALLEST + (LARGEST - SMALLEST) * draw(*shape).float().abs().clamp(max=1.0)).to(CODES).float()
    between = (
        codes + torch.exp2(codes.log2().floor() - MANTISSA_BITS) / 4
    )  # far from a tie, so that any cast gives the same code
    x = torch.where(codes < LARGEST, between, codes) * draw(*shape).float().sign()
    x[..., 0] = LARGEST
    x = x * choice(draw, ACTIVATION_SCALES, *shape[:2]).float().unsqueeze(-1)
    return x.view(rows, columns).to(torch.bfloat16)


def choice(draw: Draw, values: Sequence[float], *shape: int) -> torch.Tensor:
    """Return a bf16 tensor with a random one of the values at each place."""
    order = draw(*shape).float().flatten().argsort() % len(values)
    return torch.tensor(values, dtype=torch.bfloat16, device=order.device)[order].view(shape)


def single(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix with one entry of -1 or 1 in each row."""
    matrix = torch.zeros_like(draw(rows, columns))
    places = draw(rows).float().argsort() % columns
    matrix[torch.arange(rows, device=matrix.device), places] = draw(rows).sign()
    return matrix
