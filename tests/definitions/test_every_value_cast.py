"""Every bfloat16, every exponent of float32 and every code, put to each cast and to formats written down from their definitions.

The formats here share no line with the records: a code is the nearest of all values that the format has, found in a sorted table
in float64, and a scale is the smallest power of two that keeps the largest value of a block inside the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.oracle import run_reference

E4M3_FLOOR = float(np.float32(1e-4))
FP4_FLOOR = 6 * 2.0**-126


def values_of(exponent_bits: int, mantissa_bits: int, most: float) -> np.ndarray:
    """What the codes 0, 1, ... without a sign stand for, up to the largest finite value."""
    bias = (1 << (exponent_bits - 1)) - 1
    found = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        size = mantissa + (1 << mantissa_bits) * (exponent > 0)
        found.append(math.ldexp(size, max(exponent, 1) - bias - mantissa_bits))
    return np.array([value for value in found if value <= most])


E4M3 = values_of(4, 3, 448.0)
FP4 = values_of(2, 1, 6.0)
E5M6 = values_of(5, 6, 65024.0)


def nearest(size: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the value that is nearest to each size, of two equally near ones the even code."""
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    return np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)


def every_bfloat16() -> torch.Tensor:
    """Each finite bfloat16, in rows of 128 neighbours and again in rows that have all exponents [1024, 128]."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    every = torch.where(torch.isfinite(every), every, 0)
    return torch.cat([every.view(512, 128), every.view(128, 512).t().contiguous().view(512, 128)])


def every_exponent() -> torch.Tensor:
    """float32 numbers of each exponent, at ties of every format and a last bit beside them, under a larger one [rows, 128]."""
    ties = np.arange(16) << 19  # of three bits of mantissa; the other formats' are among these and those below
    mantissas = np.concatenate([ties + offset for offset in (0, 1, -1, 1 << 16, (1 << 16) + 1, 1 << 22, 5 << 20)])
    mantissas = np.resize(mantissas & 0x7FFFFF, 127)
    below = np.array([0, 1, 2, 5, 7, 9, 12, 16])[None, :, None]  # powers of two under the largest of the row
    exponents = np.arange(0, 255)[:, None, None]
    bits = (np.maximum(exponents - below, 0) << 23) | mantissas
    bits |= (np.arange(127) % 2 << 31)[None, None, :]
    largest = np.broadcast_to((exponents << 23) | 0x600000, (255, 8, 1))  # 1.75 times a power of two: 448 is one
    rows = np.concatenate([bits, largest], axis=2).reshape(-1, 128).astype(np.uint32)
    return torch.from_numpy(rows.view(np.float32).copy())


def scaled_by_groups(x: torch.Tensor, group: int, most: float, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """(x divided by the scale of its group, exponent of each scale), in float64."""
    wide = x.double().numpy().reshape(x.shape[0], -1, group)
    largest = np.maximum(np.abs(wide).max(axis=2, keepdims=True), floor)
    mantissa, exponent = np.frexp(largest / most)
    exponent = exponent - (mantissa == 0.5)
    # float32 keeps no more than this of a number that is next to nothing beside its scale; no code depends on it.
    return np.ldexp(wide, -exponent).reshape(x.shape), exponent[..., 0]


def signed(code: np.ndarray, x: torch.Tensor, sign: int) -> np.ndarray:
    return code + sign * torch.signbit(x).numpy()


def e4m3(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    scaled, exponent = scaled_by_groups(x, group, 448.0, E4M3_FLOOR)
    return signed(nearest(np.abs(scaled), E4M3), x, 128).astype(np.uint8), exponent


def fp4(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    scaled, exponent = scaled_by_groups(x, group, 6.0, FP4_FLOOR)
    code = signed(nearest(np.abs(scaled), FP4), x, 8)
    return (code[:, 0::2] + 16 * code[:, 1::2]).astype(np.uint8), exponent


def e5m6(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    """To nearest even from 2^-14 up. Below, the last 17 bits of the mantissa decide, whatever they are worth."""
    scaled, exponent = scaled_by_groups(x, group, 65024.0, E4M3_FLOOR)
    size = np.abs(scaled)
    code = nearest(size, E5M6)
    steps = np.floor(size * 2.0**20).astype(np.int64)
    mantissa = (
        size.astype(np.float32).view(np.uint32).astype(np.int64)
    )  # also where float32 has no leading one any more
    up = (steps % 2) + (mantissa & 0x1FFFF) > 1 << 16
    code = np.where(size < 2.0**-14, np.where(size < 2.0**-24, 0, steps) + up, code)
    code = signed(code, x, 2048).astype(np.int64)
    return code, exponent


def codes_of_twelve_bits(packed: torch.Tensor) -> np.ndarray:
    words = packed.numpy().view("<u4").astype(np.uint64).reshape(packed.shape[0], -1, 3)
    first = (words[..., 0] << np.uint64(16)) | (words[..., 1] >> np.uint64(16))
    second = ((words[..., 1] & np.uint64(0xFFFF)) << np.uint64(32)) | words[..., 2]
    four = [(half >> np.uint64(place)) & np.uint64(0xFFF) for half in (first, second) for place in (36, 24, 12, 0)]
    return np.stack(four, axis=-1).reshape(packed.shape[0], -1).astype(np.int64)


def exponents(scale: torch.Tensor) -> np.ndarray:
    if scale.dtype == torch.int32:
        return scale.contiguous().view(torch.uint8).numpy().astype(np.int64) - 127
    mantissa, exponent = np.frexp(scale.double().numpy())
    assert (mantissa == 0.5).all()  # a power of two
    return exponent - 1


# cast -> (format, channels that share a scale); None is the row
CASTS: dict[str, tuple[Callable[[torch.Tensor, int], tuple[np.ndarray, np.ndarray]], int | None]] = {
    "per_token_cast": (e4m3, 128),
    "per_token_cast_ue8m0": (e4m3, 128),
    "per_token_cast_mxfp8": (e4m3, 32),
    "per_row_cast": (e4m3, None),
    "per_token_cast_fp4": (fp4, 32),
    "per_token_cast_e5m6": (e5m6, None),
}


@pytest.mark.parametrize("values", [every_bfloat16, every_exponent])
@pytest.mark.parametrize("name", CASTS)
def test_every_value_gets_the_nearest_code_at_the_smallest_scale(name: str, values, catalog: Catalog) -> None:
    definition = catalog.definition(name)
    x = values()
    inputs = {"x": x, "round_scale": True} if "round_scale" in definition.inputs else {"x": x}
    format_, group = CASTS[name]
    want_codes, want_exponents = format_(x, group or x.shape[1])
    stock = load_entry(catalog.solution(f"{name}_stock"))(*inputs.values())
    for out, scale in (tuple(run_reference(definition, inputs).values()), stock):
        codes = codes_of_twelve_bits(out) if format_ is e5m6 else out.contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(codes, want_codes)
        count = want_exponents.shape[1]
        np.testing.assert_array_equal(exponents(scale)[:, :count], want_exponents)
        assert (exponents(scale)[:, count:] == -127).all()  # bytes of no block are zero


def test_blocks_and_channels_get_the_codes_of_equal_rows(catalog: Catalog) -> None:
    x = every_bfloat16()
    for name, block in (("per_block_cast", 128), ("per_block_cast_32", 32)):
        out, scale = run_reference(catalog.definition(name), {"x": x, "round_scale": True}).values()
        tiles = x.view(-1, block, 128 // block, block).transpose(1, 2).reshape(-1, block * block)
        codes, found = e4m3(tiles, block * block)
        got = out.view(torch.uint8).view(-1, block, 128 // block, block).transpose(1, 2).reshape(-1, block * block)
        np.testing.assert_array_equal(got.numpy(), codes)
        np.testing.assert_array_equal(exponents(scale).reshape(-1, 1), found)
    columns = x.view(-1, 128, 128).transpose(1, 2).reshape(-1, 128)  # a row for each channel of each 128 tokens
    codes, found = e4m3(columns, 128)
    out, scale = run_reference(catalog.definition("per_channel_cast"), {"x": x, "round_scale": True}).values()
    got = out.view(torch.uint8).view(-1, 128, 128).transpose(1, 2).reshape(-1, 128)
    np.testing.assert_array_equal(got.numpy(), codes)
    np.testing.assert_array_equal(exponents(scale).reshape(-1, 1), found)
    turned = catalog.definition("per_channel_cast_and_transpose")
    back, same = run_reference(turned, {"x": x, "group": 128, "round_scale": True}).values()
    assert torch.equal(back.view(torch.uint8), out.view(torch.uint8).T)
    assert torch.equal(same, scale)


def test_every_code_comes_back_under_every_scale(catalog: Catalog) -> None:
    definition = catalog.definition("cast_back")
    codes = torch.arange(256).to(torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN
    scale = torch.arange(1, 255).to(torch.int32).repeat(5, 1).t().contiguous() << 23
    scale = (scale | torch.tensor([0, 1, 0x2AAAAA, 0x7FFFFF, 0x400000])).view(torch.float32).reshape(-1, 1)
    x = codes.expand(scale.shape[0], 256).contiguous().view(torch.float8_e4m3fn)
    (out,) = run_reference(definition, {"x": x, "scale": scale, "block_rows": 1, "block_columns": 256}).values()
    size = np.where(codes.numpy() >= 128, -1.0, 1.0) * E4M3[codes.numpy() % 128]
    with np.errstate(over="ignore"):
        bits = (size[None, :] * scale.double().numpy()).astype(np.float32).view(np.uint32).astype(np.int64)
    want = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    np.testing.assert_array_equal(out.view(torch.int16).numpy().astype(np.int64) & 0xFFFF, want)


ROUND = "(scaled.view(torch.int32) {} -0x100000).view(torch.float32)"
HALF_AWAY, TRUNCATED = ROUND.format("+ 0x80000 &"), ROUND.format("&")


@pytest.mark.parametrize("mistake", ["half away from zero", "truncated", "scale no power of two", "scale rounded down"])
@pytest.mark.parametrize(
    "name",
    ["per_token_cast", "per_row_cast", "per_block_cast", "per_block_cast_32", "per_channel_cast",
     "per_channel_cast_and_transpose"],
)  # fmt: skip
def test_every_mistake_of_rounding_is_refused(name: str, mistake: str, catalog: Catalog) -> None:
    definition = catalog.definition(name)
    ties = torch.arange(256 * 128).view(256, 128).remainder(511).sub(255).to(torch.bfloat16)
    given = {"x": ties, "group": 128, "round_scale": True}
    inputs = {key: given[key] for key in definition.inputs}
    clamped = "scaled = (blocks * inverse).clamp(-448.0, 448.0)\n"
    find, replace = {
        "half away from zero": (clamped, f"{clamped}    scaled = {HALF_AWAY}\n"),
        "truncated": (clamped, f"{clamped}    scaled = {TRUNCATED}\n"),
        "scale no power of two": ("scale = round_up_to_power_of_two(scale)", "pass"),
        "scale rounded down": ("bits + 0x007FFFFF", "bits"),
    }[mistake]
    source = definition.reference.replace(find, replace)
    assert source != definition.reference
    truth = run_reference(definition, inputs)
    found = run_reference(definition, inputs, source=source)
    verdicts = check_outputs(definition, {"T": "bfloat16"}, inputs, truth, found, dict.fromkeys(truth, EXACTLY))
    assert not all(verdict.passed for verdict in verdicts.values())
