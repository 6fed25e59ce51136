"""What scripted authors of kernels for ``row_scale`` write."""

WRONG = "import torch\n\n\ndef run(x, weight, factor, out):\n    torch.mul(x, weight, out=out)\n"
SLOW = (
    "def run(x, weight, factor, out):\n"
    "    wide = x.double() * weight.double() * factor\n"
    "    out.copy_((wide + 0.0).to(x.dtype))\n"
)
GOOD = "import torch\n\n\ndef run(x, weight, factor, out):\n    torch.mul(x, weight, out=out)\n    out.mul_(factor)\n"

TRITON = """import triton
import triton.language as tl


@triton.jit
def rows(x, weight, out, factor, x_row, out_row, N, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < N
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_row + column, mask=inside).to(tl.float32) * tl.load(weight + column, mask=inside).to(tl.float32)
    tl.store(out + row * out_row + column, value * factor, mask=inside)


def run(x, weight, factor, out):
    M, N = x.shape
    if M and N:
        rows[(M,)](x, weight, out, factor, x.stride(0), out.stride(0), N, BLOCK=triton.next_power_of_2(N))
"""
