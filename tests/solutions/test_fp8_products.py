"""Products of FP8 codes whose groups and tiles are unusual, in Triton's interpreter, in a separate process.

Run as a program with names of kernels, this file prints the relative error of their every case against the reference.
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
GROUPED, MASKED = "moe_grouped_gemm_fp8_triton", "moe_grouped_gemm_fp8_masked_triton"
STATIC, DYNAMIC = "gemm_fp8_blockwise_triton", "gemm_fp8_blockwise_dynamic_triton"
CASES = [(GROUPED, f"{name}, {rows}") for name in GROUPS for rows in TILES]
CASES += [(MASKED, f"masked, {rows}") for rows in TILES]
CASES += [(STATIC, "aligned, many rows"), (DYNAMIC, "aligned, cast first"), (DYNAMIC, "one row, split")]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float]:
    """Of the kernels that this run tries."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    kernels = {given["kernel"] for given in parameters if (given.get("kernel"), given.get("case")) in CASES}
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, *sorted(kernels)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Interpreted, of kernels that seldom change.
@pytest.mark.turn("solutions/gemm/", "solutions/moe/", "solutions/_lib/triton/")
@pytest.mark.slow
@pytest.mark.records("kernel")
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_a_block_is_scaled_and_added_wherever_its_tile_lies(errors: dict[str, float], kernel: str, case: str) -> None:
    assert errors[case] < 2.0**-8


def codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 0.02


def error_of(solution: str, *inputs: torch.Tensor, **config: int) -> float:
    """The largest element's, relative to the largest expected one, or 1 where anything was not written."""
    from tilegym_db.backends.load import load_entry
    from tilegym_db.catalog import Catalog
    from tilegym_db.verification.oracle import load_function

    catalog = Catalog.default()
    files = catalog.solutions[solution]
    definition = catalog.definition(files.record.definition)
    expected = load_function(definition.reference, definition.name)(*inputs)
    out = torch.full_like(expected, torch.nan)
    load_entry(files)(*inputs, out, **config)
    off = (out.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
    return float(off.nan_to_num(nan=1.0))


def errors_of(kernel: str) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    a, b = codes(generator, ROWS, K), codes(generator, E, N, K)
    scale_a, scale_b = scales(generator, ROWS, 2), scales(generator, E, 2, 2)
    found = {}
    if kernel == GROUPED:
        for rows in TILES:
            for name, ends in GROUPS.items():
                offs = torch.tensor(ends, dtype=torch.int32)
                grouped = (a, b, scale_a.T.contiguous().T, scale_b, offs)
                found[f"{name}, {rows}"] = error_of(GROUPED, *grouped, BLOCK_M=rows)
    elif kernel == MASKED:
        counts = torch.tensor([0, 3, 17, 16], dtype=torch.int32)
        masked = (a[:68].view(E, 17, K), b, scale_a[:68].view(E, 17, 2), scale_b, counts)
        found = {f"masked, {rows}": error_of(MASKED, *masked, BLOCK_M=rows) for rows in TILES}
    elif kernel == STATIC:
        found["aligned, many rows"] = error_of(STATIC, a, b[0], scale_a, scale_b[0])
    else:
        x = torch.randn(ROWS, K, generator=generator).to(torch.bfloat16)
        found["aligned, cast first"] = error_of(DYNAMIC, x, b[0], scale_b[0])
        found["one row, split"] = error_of(DYNAMIC, x[:1], b[0], scale_b[0], SPLIT=2)
    return found


if __name__ == "__main__":
    from tilegym_db.backends.toolchains import repair_interpreter

    repair_interpreter()
    print(json.dumps({case: error for kernel in sys.argv[1:] for case, error in errors_of(kernel).items()}))
