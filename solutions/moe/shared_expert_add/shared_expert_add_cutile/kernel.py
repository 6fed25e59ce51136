"""The sum of two tensors, rounded once."""

import cuda.tile as ct
import torch

Int = ct.Constant[int]


@ct.kernel
def _add(routed: ct.Array, shared: ct.Array, out: ct.Array, TILE: Int):
    places = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = places < out.shape[0]
    a = ct.gather(routed, places, mask=inside, check_bounds=False).astype(ct.float32)
    b = ct.gather(shared, places, mask=inside, check_bounds=False).astype(ct.float32)
    ct.scatter(out, places, (a + b).astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _add.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    routed: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, N] = T(routed + shared), T = bf16, fp16 or fp32, added in fp32 and rounded once; contiguous, fewer than 2**31
    values.

    A block adds TILE values; None chooses 2048 (1024 in fp32), or half of it while that would leave multiprocessors idle.
    """
    count = out.numel()
    if count == 0:
        return
    if TILE is None:
        TILE = 4096 // out.element_size()
        if count < 256 * TILE:
            TILE //= 2
    args = (routed.view(-1), shared.view(-1), out.view(-1), TILE)
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), _KERNELS[WARPS], args)
