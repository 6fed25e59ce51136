"""Dropout with the mask of a seed and an offset, cuTile: one read and one write, and no mask in memory."""

import cuda.tile as ct
import torch

Int = ct.Constant[int]

LOW = 0xFFFFFFFF


@ct.function
def _low(value):
    return (value & LOW).astype(ct.uint32)


@ct.function
def _high(value):
    return ((value >> 32) & LOW).astype(ct.uint32)


@ct.kernel
def _dropout(x, state, out, least: ct.ScalarInt64, scale: float, TILE: Int):
    """Scale or drop four elements for each of TILE blocks of Philox: the key is the seed, the counter is block and offset."""
    seed = ct.gather(state, 0)
    offset = ct.gather(state, 1)
    block = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    a = block.astype(ct.uint32)
    b = ct.zeros((TILE,), dtype=ct.uint32)
    c = b + _low(offset)
    d = b + _high(offset)
    first = b + _low(seed)
    second = b + _high(seed)
    for _ in ct.static_iter(range(10)):
        product = a.astype(ct.uint64) * 0xD2511F53
        other = c.astype(ct.uint64) * 0xCD9E8D57
        a = (other >> 32).astype(ct.uint32) ^ b ^ first
        b = other.astype(ct.uint32)
        c = (product >> 32).astype(ct.uint32) ^ d ^ second
        d = product.astype(ct.uint32)
        first = first + 0x9E3779B9
        second = second + 0xBB67AE85
    lane = ct.arange(4, dtype=ct.int32)[None, :]
    left = ct.where(lane == 0, a[:, None], b[:, None])
    right = ct.where(lane == 2, c[:, None], d[:, None])
    bits = ct.where(lane < 2, left, right).astype(ct.int64)
    elements = block[:, None] * 4 + lane
    inside = elements < x.shape[0]
    values = ct.gather(x, elements, mask=inside, check_bounds=False).astype(ct.float32)
    kept = ct.where(bits >= least, values * scale, 0.0)
    ct.scatter(out, elements, kept.astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _dropout.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(x: torch.Tensor, state: torch.Tensor, p: float, out: torch.Tensor, *, TILE: int = 512, WARPS: int = 4) -> None:
    """Write out [N] = T(x / (1 - p)), or 0 for an element whose random bits are less than p * 2**32.

    x in bfloat16, float16 or float32, of at most 2**31 - 4 * TILE elements; state [2] int64, the seed and the offset. The bits
    of element i are number i % 4 of block i // 4 of Philox 4x32-10. A block has 4 * TILE elements.
    """
    n = x.shape[0]
    if n == 0:
        return
    arguments = (x, state, out, int(p * 2**32), 1 / (1 - p), TILE)
    ct.launch(torch.cuda.current_stream(), (-(-n // (4 * TILE)), 1, 1), _KERNELS[WARPS], arguments)
