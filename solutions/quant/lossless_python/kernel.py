"""The cast of FP4 codes to e4m3 without loss, eager PyTorch: what a model runs that has no kernel for it."""

import torch
import torch.nn.functional as F


def run_per_block_cast_lossless(x, scale_in):
    """FP4 codes with a power of two per token and 32 channels, as e4m3 codes with one per block of 128 x 128.

    Shapes: x [M, H // 2], two codes a byte, the even channel low; scale_in [M, H // 32] float32, powers of two.
    Returns: codes [M, H] float8_e4m3fn and scales [ceil(M / 128), ceil(H / 128)] float32, powers of two; 2^-127 is written as 0.
    """
    table = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32, device=x.device
    )
    nibbles = torch.stack((x.bitwise_and(15), x.bitwise_right_shift(4)), dim=2)
    values = table[nibbles.flatten(1).long()]
    M, H = values.shape
    exponents = scale_in.contiguous().view(torch.int32).bitwise_right_shift(23)
    rows, columns = (M + 127) // 128, (H + 127) // 128
    blocks = F.pad(exponents, (0, columns * 4 - exponents.shape[1], 0, rows * 128 - M)).reshape(rows, 128, columns, 4)
    chosen = (blocks.amax(dim=3).amax(dim=1) - 6).clamp_min(0)
    raised = exponents - chosen.repeat_interleave(128, 0)[:M].repeat_interleave(4, 1)[:, : exponents.shape[1]]
    factors = (raised + 127).bitwise_left_shift(23).view(torch.float32)
    codes = (values * factors.repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
    return codes, chosen.bitwise_left_shift(23).view(torch.float32)
