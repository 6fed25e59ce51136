"""The colours of languages differ for people who see fewer of them, too; marks also differ in shape."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from tilegym_db.report import page

LANGUAGES = {"triton", "tilelang", "cutile", "python"}
# Linear RGB as it is seen without one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1.0.
SEEN = {
    "by most people": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "without red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "without green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "without blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)
APART = 15.0
"""Smallest CIE 1976 difference; 2.3 is visible side by side, and marks are small and scattered."""


def product(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """Return CIE L*a*b* of ``#rrggbb`` as a person sees it."""
    rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    linear = [min(1.0, max(0.0, part)) for part in product(seen, linear)]
    shares = [value / white for value, white in zip(product(XYZ, linear), WHITE, strict=True)]
    x, y, z = [share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares]
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("person", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_any_two_languages_are_distinguishable(scheme: str, person: str):
    style = Path(page.__file__).with_name("page.css").read_text()
    part = style.split("@media (prefers-color-scheme: dark)")[scheme == "dark"]
    colours = {name: colour for name, colour in re.findall(r"--(\w+): (#\w{6})", part) if name in LANGUAGES}
    assert colours.keys() == LANGUAGES
    for one, other in combinations(sorted(colours), 2):
        points = [lab(colours[name], SEEN[person]) for name in (one, other)]
        difference = sum((a - b) ** 2 for a, b in zip(*points, strict=True)) ** 0.5
        assert difference > APART, (one, other, difference)
