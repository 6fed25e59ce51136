"""Kernels of masked attention are launched for more sequences than CUDA has blocks along the second and third axis of a grid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.tile")
pytest.importorskip("tilelang")

import cuda.tile as ct
import torch
from shipped_records import CATALOG
from tilelang_sources import generated

from tilegym_db.backends.load import load_entry

pytestmark = pytest.mark.sweep

SEQUENCES, MOST_BLOCKS = 70_000, 65_535
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "name", ["attention_masked_prefill_cutile", "attention_sink_masked_prefill_cutile", "mla_masked_cutile"]
)
def test_grid_has_room_for_many_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a grid may have more than 65,535 blocks."""
    grids = []

    def launch(stream: object, grid: tuple[int, ...], kernel: object, arguments: tuple[Any, ...]) -> None:
        grids.append(grid)

    monkeypatch.setattr(ct, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace())
    q = torch.zeros(SEQUENCES, 1, 2, 8, dtype=BF16)
    sinks = [torch.zeros(1, dtype=BF16)] if "sink" in name else []
    mask = torch.zeros(SEQUENCES, 1, 2, 2, dtype=BF16 if sinks else torch.bool)
    load_entry(CATALOG.solution(name))(q, q, q, *sinks, mask, 1.0, torch.empty_like(q))
    assert max(grid[0] for grid in grids) >= SEQUENCES
    assert all(size <= MOST_BLOCKS for grid in grids for size in grid[1:])


@pytest.mark.parametrize(
    ("name", "factory", "arguments"),
    [
        ("mla_decode_tilelang", "latent_kernel", (512, 64, BF16, 64, 64, 512, 2, False)),  # parts along the second axis
        ("attention_masked_prefill_tilelang", "sort_kernel", (64, 64)),
        ("attention_masked_prefill_tilelang", "plain_kernel", (16, BF16)),
        ("attention_sink_masked_prefill_tilelang", "sort_kernel", (BF16, 64, 64)),
        ("attention_sink_masked_prefill_tilelang", "plain_kernel", (16, BF16)),
        ("attention_softcap_tilelang", "plain_kernel", (16, BF16)),
        ("mla_masked_tilelang", "sort_kernel", (64, 64)),
        ("mla_masked_tilelang", "plain_kernel", (24, 16, BF16)),
    ],
)
def test_sequences_lie_along_the_first_axis_of_a_grid(name: str, factory: str, arguments: tuple[Any, ...]) -> None:
    source = generated(load_entry(CATALOG.solution(name)).__globals__[factory], arguments)
    used = {axis for axis in "xyz" if f"blockIdx.{axis}" in source}
    assert used == ({"x", "y"} if factory == "latent_kernel" else {"x"})
