"""Which elements of a low-precision product may lie beyond the elementwise bound: few, spread out, and none of them far.

A sum that ends on the other side of a border between two codes moves what is computed from that code, and nothing near it. What a
kernel leaves out lies side by side instead: a row, a column, a tile, a head.
"""

from __future__ import annotations

import torch

__all__ = ["CAP", "WINDOWS", "share_problem"]

CAP = 8.0
"""Bounds that no element may exceed. Codes one step off moved elements of honest products by up to 4 (decision 0036)."""
_OF_ITSELF, _OF_ROW = 0.25, 0.5
"""However wide the bound is: what is missing altogether is off by all of itself."""
WINDOWS = ((16, 16), (64, 1))
"""Rows and columns of which at most half may lie beyond the bound: the smallest tile of a kernel, a piece of a column."""
_HALF = 0.5
_FEWEST = 64
"""A window of fewer elements may be full of strays by chance; of few rows it is so much wider."""


def share_problem(
    error: torch.Tensor, bound: torch.Tensor, size: torch.Tensor, rms: torch.Tensor, share: float
) -> tuple[str, str, torch.Tensor] | None:
    """The gate, a sentence and the elements to show where too many lie beyond the bound, or too close together, or one too far.

    Args:
        error: absolute error, ``[rows, columns]``.
        bound: of each element.
        size: absolute value of the oracle.
        rms: of each row, ``[rows, 1]``.
        share: of the elements that must lie within the bound.
    """
    beyond = error > bound
    count, total = int(beyond.sum()), beyond.numel()
    if not count:
        return None
    within = 1.0 - count / total
    reached = f"{within:.3%} of {total} elements are within the bound"
    if within < share:
        return "share", f"{reached}; at least {share:.4g} of them must be", beyond
    far = error > torch.maximum(bound, torch.minimum(CAP * bound, _OF_ITSELF * size + _OF_ROW * rms))
    if bool(far.any()):
        return (
            "elementwise",
            f"{reached}, but {int(far.sum())} are off by more than {CAP:g} times that, or missing",
            far,
        )
    for height, width in WINDOWS:
        crowded = _crowded(beyond, height, width)
        if crowded is not None:
            (row, column), piece = crowded
            flagged = torch.zeros_like(beyond)
            flagged[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
            what = f"{int(piece.sum())} of the {piece.numel()} from row {row} and column {column} on are not"
            return "share", f"{reached}, but {what}: strays must lie apart", flagged
    return None


def _crowded(beyond: torch.Tensor, height: int, width: int) -> tuple[tuple[int, int], torch.Tensor] | None:
    """(first row and column, contents) of the window with most strays, where they are more than half of it."""
    rows, columns = beyond.shape
    height = min(height, rows)
    width = min(max(width, _FEWEST // height), columns)
    if height * width < min(_FEWEST, beyond.numel()):
        return None
    # Windows that reach over an edge are moved back inside, as a smaller one may be full by chance.
    tops, lefts = (_starts(size, step) for size, step in ((rows, height), (columns, width)))
    down = (tops[:, None] + torch.arange(height)).reshape(-1).to(beyond.device)
    along = (lefts[:, None] + torch.arange(width)).reshape(-1).to(beyond.device)
    inside = beyond[down][:, along].reshape(len(tops), height, len(lefts), width)
    shares = inside.sum(dim=(1, 3)) / (height * width)
    worst = int(shares.argmax())
    top, left = divmod(worst, len(lefts))
    if float(shares[top, left]) <= _HALF:
        return None
    return (int(tops[top]), int(lefts[left])), inside[top, :, left, :]


def _starts(size: int, step: int) -> torch.Tensor:
    return torch.cat([torch.arange(0, size - step, step), torch.tensor([size - step])])
