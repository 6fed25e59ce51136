"""What routers rarely give the kernels of the experts, in Triton's interpreter, in a process of its own.

Run as a program, this file prints the relative error of every case against the reference, in fp32 or with FP8 weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

TOKENS, H, INNER, E, K = 150, 24, 16, 6, 8


def routings() -> dict[str, torch.Tensor]:
    """Ids [tokens, K] by what is special about them."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randint(0, E, (12, K), generator=generator)
    return {
        "one expert takes all": torch.full((12, K), 3),
        "no expert takes any": torch.full((12, K), -1).index_fill_(1, torch.tensor([0, 2]), E),
        "only the last expert, once": torch.full((12, K), -1).index_put_((torch.tensor(5), torch.tensor(7)), torch.tensor(E - 1)),
        "ids of 64 bits that would be experts in 32": usual + (usual % 2) * 2**32,
        MANY: torch.randint(-1, E + 1, (TOKENS, K), generator=generator),
        "one token": usual[:1],
    }  # fmt: skip


MANY = "more pairs than one launch counts"
CASES = [(name, rows) for name in routings() if name != MANY for rows in (None, 1, 16, 64)] + [(MANY, None)]
FP8_CASES = [(name, rows) for name, rows in CASES if rows != 1]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("routing", "tile_rows"), CASES)
def test_rare_routings_are_right_with_tiles_of_any_size(
    errors: dict[str, float], routing: str, tile_rows: int | None
) -> None:
    assert errors[f"{routing}, {tile_rows}"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("routing", "tile_rows"), FP8_CASES)
def test_rare_routings_of_fp8_experts_are_right_with_tiles_of_any_size(
    errors: dict[str, float], routing: str, tile_rows: int | None
) -> None:
    assert errors[f"fp8, {routing}, {tile_rows}"] < 4e-3


def error_of(ids: torch.Tensor, tile_rows: int | None) -> float:
    """Relative to the largest element that is expected, or absolute where nothing is."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verify.reference import load_function

    catalog = Catalog.default()
    generator = torch.Generator().manual_seed(1)
    shapes = ((E, 2 * INNER, H), (E, H, INNER))
    gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    x = torch.randn(ids.shape[0], H, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    out = torch.full_like(x, torch.nan)
    load_entry(catalog.solutions["moe_experts_triton"])(x, ids, weights, gate_up, down, out, BLOCK_M=tile_rows)
    reference = load_function(catalog.definition("moe_experts").reference, "moe_experts")
    expected = reference(x, ids, weights, gate_up, down)
    return float((out - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def fp8_error_of(ids: torch.Tensor, tile_rows: int | None) -> float:
    """Relative to the largest element that is expected, or absolute where nothing is."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verify.reference import load_function

    catalog = Catalog.default()
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(E, 2 * INNER, H, generator=generator).to(torch.float8_e4m3fn)
    down = torch.randn(E, H, INNER, generator=generator).to(torch.float8_e4m3fn)
    scales = [torch.rand(E, 1, 1, generator=generator) + 0.5 for _ in range(2)]
    x = torch.randn(ids.shape[0], H, generator=generator).to(torch.bfloat16)
    weights = torch.rand(ids.shape, generator=generator)
    inputs = x, ids, weights, gate_up, scales[0], down, scales[1]
    out = torch.full_like(x, torch.nan)
    load_entry(catalog.solutions["moe_experts_fp8_triton"])(*inputs, out, BLOCK_M=tile_rows)
    reference = load_function(catalog.definition("moe_experts_fp8").reference, "moe_experts_fp8")
    expected = reference(*inputs).float()
    return float((out.float() - expected).abs().max() / expected.abs().max().clamp_min(1.0))


if __name__ == "__main__":
    from tilegym_db.verify.worker.triton_interpreter import repair_interpreter

    repair_interpreter()  # as the gates do: Triton's own one rounds casts to bfloat16 and FP8 otherwise
    routing = routings()
    found = {f"{name}, {rows}": error_of(routing[name], rows) for name, rows in CASES}
    print(json.dumps(found | {f"fp8, {name}, {rows}": fp8_error_of(routing[name], rows) for name, rows in FP8_CASES}))
