"""The tiles of a mask that a block of queries needs, cuTile."""

import cuda.tile as ct

Int = ct.Constant[int]


@ct.kernel(num_worker_warps=4)
def find_bounds(kinds: ct.Array, bounds: ct.Array, TILE_T: Int):
    """Note which tiles a block of queries needs: from `low` to `high`, those from `whole` to `edge` without a mask.

    Apart from the kernel that reads the bounds: with these sums in it, cuTile 1.7 ends with an error of its own.
    """
    plane, block = ct.bid(0) // kinds.shape[1], ct.bid(0) % kinds.shape[1]
    index = ct.arange(TILE_T, dtype=ct.int32)
    there = index < kinds.shape[2]
    found = ct.gather(kinds, (plane, block, index), mask=there, padding_value=0, check_bounds=False)
    low = ct.min(ct.where(found > 0, index, kinds.shape[2]))
    high = ct.max(ct.where(found > 0, index + 1, 0))
    whole = ct.min(ct.where(found == 2, index, high))
    edge = ct.min(ct.where((index >= whole) & (found != 2), index, high))
    ct.scatter(bounds, (plane, block, 0), low, check_bounds=False)
    ct.scatter(bounds, (plane, block, 1), high, check_bounds=False)
    ct.scatter(bounds, (plane, block, 2), whole, check_bounds=False)
    ct.scatter(bounds, (plane, block, 3), ct.maximum(edge, whole), check_bounds=False)
