"""The parts of a profiled model: every module class has its time once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.loop.fit import FitReport
from tilegym_db.loop.from_model import Piece, parts_of
from tilegym_db.records import Workload


def piece(part: str, share: float, definition: str = "", *, served: bool = False, called: bool = True) -> Piece:
    call: Any = Workload.model_construct(definition=definition)
    cls = {"Attention": torch.nn.MultiheadAttention, "Norm": torch.nn.LayerNorm}.get(part)
    return Piece(part, share, 1, definition, workloads=(call,) if called else (), served=served, module_class=cls)


def report(*pieces: Piece) -> FitReport:
    machine: Any = None
    return FitReport("model", machine, [], pieces=list(pieces))


def test_module_with_several_operators_counts_its_time_once() -> None:
    pieces = [piece("Attention", 0.4, name) for name in ("rope", "prefill", "decode")]
    parts = parts_of([*pieces, piece("Norm", 0.6, "rms_norm")])
    assert [(part.part, len(part.pieces)) for part in parts] == [("Attention", 3), ("Norm", 1)]
    assert sum(part.share for part in parts) == pytest.approx(1.0)


def test_module_is_served_if_each_called_operator_is() -> None:
    rope, prefill = piece("Attention", 0.4, "rope", served=True), piece("Attention", 0.4, "prefill")
    norm = piece("Norm", 0.6, "rms_norm", served=True)
    assert report(rope, prefill, norm).served_share == pytest.approx(0.6)
    uncalled = piece("Attention", 0.4, "decode", called=False)
    assert report(rope, uncalled, norm).served_share == pytest.approx(1.0)
    assert report(piece("Other", 0.5), norm).served_share == pytest.approx(0.6 / 1.1)
