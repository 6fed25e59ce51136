"""bfloat16 in the repaired Triton interpreter, in a separate process: it changes Triton for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import triton
import triton.language as tl
from tilegym_db.backends.toolchains import repair_interpreter

repair_interpreter()


@triton.jit
def casts(x, wide, narrow, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i).to(tl.float32)
    tl.store(wide + i, value)
    tl.store(narrow + i, (value * 1.003).to(tl.bfloat16))


@triton.jit
def product(a, b, out):
    i = tl.arange(0, 16)
    block = i[:, None] * 16 + i[None, :]
    tl.store(out + block, tl.dot(tl.load(a + block), tl.load(b + block)))


@triton.jit
def eight_bits(x, e4, e5, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i).to(tl.float32)
    tl.store(e4 + i, value.to(tl.float8e4nv))
    tl.store(e5 + i, value.to(tl.float8e5))


every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
wide, narrow = torch.empty(1 << 16), torch.empty(1 << 16, dtype=torch.bfloat16)
casts[(1,)](every, wide, narrow, 1 << 16)
torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
torch.testing.assert_close(narrow, (every.float() * 1.003).bfloat16(), rtol=0, atol=0, equal_nan=True)

codes = [torch.empty(1 << 16, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
eight_bits[(1,)](every, *codes, 1 << 16)
for found in codes:
    most = torch.finfo(found.dtype).max
    wanted = every.float().clamp(-most, most).to(found.dtype).float()
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0, equal_nan=True)

a, b = torch.randn(2, 16, 16).bfloat16()
out = torch.empty(16, 16)
product[(1,)](a, b, out)
torch.testing.assert_close(out, a.float() @ b.float())

@triton.jit
def product_in(a, b, out, PRECISION: tl.constexpr):
    i = tl.arange(0, 16)
    block = i[:, None] * 16 + i[None, :]
    tl.store(out + block, tl.dot(tl.load(a + block), tl.load(b + block), input_precision=PRECISION))


a, b = torch.randn(2, 16, 16)
product[(1,)](a, b, out)  # in tf32, which is the default
assert 1e-4 < (out - a @ b).norm() / (a @ b).norm() < 1e-3
product_in[(1,)](a, b, out, "ieee")
torch.testing.assert_close(out, a @ b)

a.view(torch.int32)[3] = -1  # as in memory that nothing has written
product[(1,)](a, b, out)
assert torch.equal(out.isnan().all(1), torch.arange(16) == 3)
print("as hardware does")
"""


@pytest.mark.turn("tilegym_db/backends/triton.py", "tilegym_db/sandbox/")  # loads an interpreter in a worker
def test_bfloat16_casts_and_products_are_those_of_hardware(tmp_path: Path):
    script = tmp_path / "script.py"  # Triton reads the source of a kernel from its file
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "as hardware does\n", done.stderr


TURNED = """
import torch
import triton
import triton.language as tl
from tilegym_db.backends.toolchains import INTERPRETERS

INTERPRETERS["triton"].install()


@triton.jit
def order(clock, places):
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    now = tl.load(clock)
    tl.store(places + place, now)
    tl.store(clock, now + 1)


for turned in (False, True, True, False):
    clock, places = torch.zeros(1, dtype=torch.int32), torch.full((24,), -1, dtype=torch.int32)
    order[(2, 3, 4)](clock, places)
    natural = torch.arange(24, dtype=torch.int32)
    assert torch.equal(places, natural.flip(0) if turned else natural), places
print("each program once")
"""


@pytest.mark.turn("tilegym_db/backends/triton.py", "tilegym_db/sandbox/")  # loads an interpreter
def test_some_launches_run_their_programs_in_reverse(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TURNED)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "each program once", done.stderr


TUNED = """
import torch
import triton
import triton.language as tl
from tilegym_db.backends.toolchains import INTERPRETERS
from tilegym_db.errors import SolutionError

INTERPRETERS["triton"].install()


@triton.autotune(configs=[triton.Config({"N": n}) for n in (16, 32)], key=[])
@triton.jit
def half(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), 1.0)


try:
    half[(1,)](torch.zeros(32))
except SolutionError as error:
    print(error.code)
"""


@pytest.mark.turn("tilegym_db/backends/triton.py", "tilegym_db/sandbox/")  # loads an interpreter
def test_autotuned_kernel_is_refused_by_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TUNED)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "autotune_forbidden", done.stderr
