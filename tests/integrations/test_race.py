"""The order in which ways of generating take their turns. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tilegym_db.integrations.transformers.race import balanced_orders


@pytest.mark.parametrize("count", range(2, 8))
def test_every_way_follows_every_other_equally_often(count):
    names = [f"way {number}" for number in range(count)]
    orders = balanced_orders(names)
    assert all(sorted(order) == names for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) == 1


def test_one_way_alone_takes_every_turn():
    assert set(map(tuple, balanced_orders(["stock"]))) == {("stock",)}
