"""The order in which ways of generating take their turns, and a way that a model does not have."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tilegym_db import patched
from tilegym_db.models.bench.model_bench import Entries, balanced_orders


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


def test_model_without_a_static_cache_has_no_compiled_steps(build: Any, prompt: Any):
    model = build("deepseek_v4")
    with patched(model) as handle:
        entries = Entries(model, model, handle, prompt(), 3, "eager")
        entries.add_static_cache(True)
    assert not entries.ways
    assert set(entries.absent) == {"stock_static_cache", "patched_static_cache"}
    assert "heavily_compressed_attention" in entries.absent["patched_static_cache"]
