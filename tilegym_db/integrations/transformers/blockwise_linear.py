"""A linear layer whose weight is FP8 codes with a scale for each block, in PyTorch operations.

Weights have a float32 scale for each 128 x 128 values, activations one for each token and 128 channels, as DeepSeek-V3 quantises
and as transformers' fine-grained FP8 models are stored.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tilegym_db.errors import UsageError

__all__ = ["BLOCK", "CODES", "BlockwiseLinear", "blockwise_product", "dequantised", "quantised"]

BLOCK = 128
CODES = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_AMAX = 1e-4


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and float32 scales [N / 128, K / 128] of a weight [N, K]; a block of zeros has the scale 1 / 448.

    Args:
        weight: of any floating dtype; N and K are multiples of 128.
    """
    rows, columns = weight.shape
    blocks = weight.detach().float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / LARGEST
    codes = (blocks / scale).clamp(-LARGEST, LARGEST).to(CODES)
    return codes.view(rows, columns), scale.view(rows // BLOCK, columns // BLOCK)


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes [N, K] with scales of blocks stand for, float32."""
    rows, columns = codes.shape
    spread = scale.float().repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return codes.float() * spread


def blockwise_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., K] cast to codes of its own, times codes [N, K]: [..., N] in the dtype of x, summed in float32.

    Takes a float32 copy of the weight for the length of the call. K is a multiple of 128.
    """
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    limit = torch.full_like(amax, LARGEST)
    of_x = (blocks * (limit / amax)).clamp(-LARGEST, LARGEST).to(CODES).float() * (amax / limit)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(of_x.flatten(-2), dequantised(codes, scale)).to(x.dtype)


class _Product(torch.autograd.Function):
    """:func:`blockwise_product` with a gradient for the activation, as if casting it had changed nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return blockwise_product(x, codes, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return (gradient.float() @ dequantised(*ctx.saved_tensors)).to(gradient.dtype), None, None


class BlockwiseLinear(torch.nn.Linear):
    """A linear layer whose ``weight`` [N, K] is codes, with ``weight_scale_inv`` [N / 128, K / 128] to multiply them with.

    It stands for a layer that has a weight, so that nothing may take its codes for that: saving, loading, pickling and copying it
    raise :class:`UsageError`.
    """

    block_size = (BLOCK, BLOCK)
    weight_scale_inv: torch.nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in the dtype of x.

        Raises:
            UsageError: the codes were cast to another dtype, as ``model.to(dtype)`` does, or x has values of one byte.
        """
        refuse_casts(self.weight.dtype, input.dtype)
        if torch.is_grad_enabled() and input.requires_grad:
            out: torch.Tensor = _Product.apply(input, self.weight, self.weight_scale_inv)
        else:
            out = blockwise_product(input, self.weight, self.weight_scale_inv)
        return out if self.bias is None else out + self.bias

    def __copy__(self) -> BlockwiseLinear:
        """A layer of the same parameters; what :mod:`.parts.fp8_linear` probes."""
        twin = BlockwiseLinear.__new__(BlockwiseLinear)
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise _held("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise _held("pickled")

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _held("saved (state_dict)")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _held("loaded into (load_state_dict, which may have changed modules before this one)")


def refuse_casts(weight: torch.dtype, activation: torch.dtype) -> None:
    """Raise :class:`UsageError` if the codes were cast, or if an activation has values of one byte.

    It is apart from the forward, whose fingerprint the catalog has: a message may change without it.
    """
    if weight != CODES:
        raise UsageError(
            f"the codes of a quantised layer were cast to {weight}. Call unpatch() on the handle, then cast the model, then "
            "patch it again.",
            code="quantised_cast",
        )
    if activation.itemsize == 1:
        raise UsageError(
            f"a quantised layer was given {activation}, which is no activation: the model's code casts to the dtype of a "
            "weight that is codes now. Call unpatch() on the handle, and run this model without quantise.",
            code="quantised_input_dtype",
        )


def _held(what: str) -> UsageError:
    return UsageError(
        f"a layer of codes, made by patch(quantise=...), cannot be {what}: unpatch() the model first.",
        code="quantised_held",
    )
