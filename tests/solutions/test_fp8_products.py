"""Products of FP8 codes whose groups and tiles are unusual, in Triton's interpreter, in a process of its own.

Run as a program, this file prints the relative error of every case against the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

ROWS, K, N, E = 70, 144, 136, 4
GROUPS = {
    "no rows": [0, 0, 0, 0],
    "one group takes all": [0, 70, 70, 70],
    "a tail of no group": [1, 1, 50, 57],
    "a tile and a row": [64, 65, 65, 70],
}
TILES = (16, 64, 128)
CASES = [f"{name}, {rows}" for name in GROUPS for rows in TILES]
CASES += [f"masked, {rows}" for rows in TILES] + ["aligned, many rows", "aligned, cast first", "one row, split"]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_block_is_scaled_and_added_wherever_its_tile_lies(errors: dict[str, float], case: str) -> None:
    assert errors[case] < 2.0**-8


def codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 0.02


def error_of(solution: str, *inputs: torch.Tensor, **config: int) -> float:
    """The largest element's, relative to the largest expected one, or 1 where anything was not written."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verify.reference import load_function

    catalog = Catalog.default()
    files = catalog.solutions[solution]
    definition = catalog.definition(files.record.definition)
    expected = load_function(definition.reference, definition.name)(*inputs)
    out = torch.full_like(expected, torch.nan)
    load_entry(files)(*inputs, out, **config)
    off = (out.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
    return float(off.nan_to_num(nan=1.0))


def all_errors() -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    a, b = codes(generator, ROWS, K), codes(generator, E, N, K)
    scale_a, scale_b = scales(generator, ROWS, 2), scales(generator, E, 2, 2)
    found = {}
    for rows in TILES:
        for name, ends in GROUPS.items():
            offs = torch.tensor(ends, dtype=torch.int32)
            grouped = (a, b, scale_a.T.contiguous().T, scale_b, offs)
            found[f"{name}, {rows}"] = error_of("moe_grouped_gemm_fp8_triton", *grouped, BLOCK_M=rows)
        counts = torch.tensor([0, 3, 17, 16], dtype=torch.int32)
        masked = (a[:68].view(E, 17, K), b, scale_a[:68].view(E, 17, 2), scale_b, counts)
        found[f"masked, {rows}"] = error_of("moe_grouped_gemm_fp8_masked_triton", *masked, BLOCK_M=rows)
    x = torch.randn(ROWS, K, generator=generator).to(torch.bfloat16)
    dynamic, static = "gemm_fp8_blockwise_dynamic_triton", "gemm_fp8_blockwise_triton"
    found["aligned, many rows"] = error_of(static, a, b[0], scale_a, scale_b[0])
    found["aligned, cast first"] = error_of(dynamic, x, b[0], scale_b[0])
    found["one row, split"] = error_of(dynamic, x[:1], b[0], scale_b[0], SPLIT=2)
    return found


if __name__ == "__main__":
    from tilegym_db.verify.worker.triton_interpreter import repair_interpreter

    repair_interpreter()
    print(json.dumps(all_errors()))
