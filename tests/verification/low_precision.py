"""Two FP8 products with a cast between them, whose tolerance has a ``share``, and a kernel of them that sums with 14 bits."""

from __future__ import annotations

from typing import Any

SOURCE = "# Source: https://example.org/fp8_layer.py#L1\n"
LAYER = """import torch


def cast(x):
    amax = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-4)
    limit = torch.full_like(amax, 448.0)
    return (x * (limit / amax)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), amax / limit


def product(x, weight):
    codes, scale = cast(x)
    return codes.float() @ weight.float().T * scale


def run(x, up, down):
    hidden = torch.nn.functional.silu(product(x.float(), up)).to(torch.bfloat16)
    return product(hidden.float(), down).to(torch.bfloat16)
"""
INDEPENDENT = """import torch


def cast(x):
    scale = x.abs().max(dim=1).values.clamp(min=1e-4) / 448
    return (x / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).double() * scale[:, None]


def run(x, up, down):
    gate = torch.nn.functional.linear(cast(x.double()), up.double())
    hidden = (gate * torch.sigmoid(gate)).to(torch.bfloat16)
    return torch.nn.functional.linear(cast(hidden.double()), down.double()).to(torch.bfloat16)
"""
TENSOR_CORE = LAYER.replace(
    "    return codes.float() @ weight.float().T * scale\n",
    """    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for start in range(0, x.shape[1], 32):
        part = slice(start, start + 32)
        total = total + codes[:, part].float() @ weight[:, part].float().T
        total = total.view(torch.int32).bitwise_and(-1024).view(torch.float32)  # 13 bits after the point
    return total * scale
""",
)
"""Sums as the FP8 tensor cores of an H100 do: what no longer fits in 14 bits is cut off."""

TOLERANCE: dict[str, Any] = {
    "tau": 0.03,
    "share": 0.95,
    "reason": "of sums with 14 bits a hidden code may be a step off, and then the elements that it has most weight in are too",
}
RECORD: dict[str, Any] = {
    "name": "fp8_layer",
    "version": "1.0.0",
    "op_type": "gemm",
    "axes": {"M": {"type": "var"}, "K": {"type": "var"}, "I": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["M", "K"], "dtype": "bfloat16"},
        "up": {"shape": ["I", "K"], "dtype": "float8_e4m3fn"},
        "down": {"shape": ["N", "I"], "dtype": "float8_e4m3fn"},
    },
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "bfloat16"}},
    "constraints": ["K >= 32", "I >= 32", "N >= 1"],
    "cost": {"flops": "2 * M * I * (K + N)", "bytes": "2 * M * (K + N) + I * (K + N)"},
    "special_values": [],
    "oracle": "as_written",
    "tolerance": {"bfloat16": TOLERANCE},
    "reference": SOURCE + LAYER,
    "self_test": {
        "independent": INDEPENDENT,
        "planted_errors": [
            {
                "find": ".to(torch.float8_e4m3fn), amax",
                "replace": ".to(torch.float8_e5m2), amax",
                "why": "codes of another 8-bit format",
            },
            {"find": "x.abs().amax(", "replace": "x.amax(", "why": "negative values left out of the maximum"},
            {"find": ".to(torch.float8_e4m3fn), amax", "replace": ", amax", "why": "no cast at all"},
        ],
    },
}
