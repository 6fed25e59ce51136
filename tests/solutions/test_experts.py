"""Rare inputs from routers to the kernels of the experts, in Triton's interpreter, in a separate process.

Run as a program with the name of a kernel, this file prints the relative error of its every case against the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch

# Interpreted, of two kernels that seldom change.
pytestmark = [pytest.mark.sweep, pytest.mark.turn("solutions/moe/", "solutions/_lib/triton/")]

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


KERNEL, FP8_KERNEL = "moe_experts_triton", "moe_experts_fp8_triton"


@pytest.fixture(scope="module")
def errors_of() -> Callable[[str], dict[str, float]]:
    """The errors of a kernel; its cases run in one process when the first of them is asked for."""

    @cache
    def ask(kernel: str) -> dict[str, float]:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, __file__, kernel]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    return ask


@pytest.mark.slow
@pytest.mark.records(of=KERNEL)
@pytest.mark.parametrize(("routing", "tile_rows"), CASES)
def test_rare_routings_are_right_with_tiles_of_any_size(
    errors_of: Callable[[str], dict[str, float]], routing: str, tile_rows: int | None
) -> None:
    assert errors_of(KERNEL)[f"{routing}, {tile_rows}"] < 1e-5


@pytest.mark.slow
@pytest.mark.records(of=FP8_KERNEL)
@pytest.mark.parametrize(("routing", "tile_rows"), FP8_CASES)
def test_rare_routings_of_fp8_experts_are_right_at_any_tile_size(
    errors_of: Callable[[str], dict[str, float]], routing: str, tile_rows: int | None
) -> None:
    assert errors_of(FP8_KERNEL)[f"{routing}, {tile_rows}"] < 4e-3


def error_of(ids: torch.Tensor, tile_rows: int | None) -> float:
    """Relative to the largest element that is expected, or absolute where nothing is."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verification.oracle import load_function

    catalog = Catalog.default()
    generator = torch.Generator().manual_seed(1)
    shapes = ((E, 2 * INNER, H), (E, H, INNER))
    gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    x = torch.randn(ids.shape[0], H, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    out = torch.full_like(x, torch.nan)
    load_entry(catalog.solutions[KERNEL])(x, ids, weights, gate_up, down, out, BLOCK_M=tile_rows)
    reference = load_function(catalog.definition("moe_experts").reference, "moe_experts")
    expected = reference(x, ids, weights, gate_up, down)
    return float((out - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def fp8_error_of(ids: torch.Tensor, tile_rows: int | None) -> float:
    """Relative to the largest element that is expected, or absolute where nothing is."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verification.oracle import load_function

    catalog = Catalog.default()
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(E, 2 * INNER, H, generator=generator).to(torch.float8_e4m3fn)
    down = torch.randn(E, H, INNER, generator=generator).to(torch.float8_e4m3fn)
    scales = [torch.rand(E, 1, 1, generator=generator) + 0.5 for _ in range(2)]
    x = torch.randn(ids.shape[0], H, generator=generator).to(torch.bfloat16)
    weights = torch.rand(ids.shape, generator=generator)
    inputs = x, ids, weights, gate_up, scales[0], down, scales[1]
    out = torch.full_like(x, torch.nan)
    load_entry(catalog.solutions[FP8_KERNEL])(*inputs, out, BLOCK_M=tile_rows)
    reference = load_function(catalog.definition("moe_experts_fp8").reference, "moe_experts_fp8")
    expected = reference(*inputs).float()
    return float((out.float() - expected).abs().max() / expected.abs().max().clamp_min(1.0))


if __name__ == "__main__":
    from tilegym_db.backends.toolchains import repair_interpreter

    repair_interpreter()  # as the gates do: Triton's own one rounds casts to bfloat16 and FP8 otherwise
    routing, is_fp8 = routings(), sys.argv[1] == FP8_KERNEL
    of_case = fp8_error_of if is_fp8 else error_of
    print(
        json.dumps({f"{name}, {rows}": of_case(routing[name], rows) for name, rows in (FP8_CASES if is_fp8 else CASES)})
    )
