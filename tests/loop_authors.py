"""What scripted authors of kernels for ``row_scale`` write."""

WRONG = "import torch\n\n\ndef run(x, weight, factor, out):\n    torch.mul(x, weight, out=out)\n"
SLOW = (
    "def run(x, weight, factor, out):\n"
    "    wide = x.double() * weight.double() * factor\n"
    "    out.copy_((wide + 0.0).to(x.dtype))\n"
)
GOOD = "import torch\n\n\ndef run(x, weight, factor, out):\n    torch.mul(x, weight, out=out)\n    out.mul_(factor)\n"
