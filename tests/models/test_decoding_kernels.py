"""Kernels of decoding steps in graphs: chosen by device time, and for products that eager code leaves to PyTorch.

All kernels are stock code, so tokens must be those of the stock model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_graphs import eager

from tilegym_db import patch
from tilegym_db.models.decoding import Decoding
from tilegym_db.resolver.replay import threads

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``patch`` run decoding steps in graphs on the CPU."""
    monkeypatch.setattr(Decoding, "fits", staticmethod(lambda model: True))
    monkeypatch.setattr("tilegym_db.models.decoding.captured", eager)


def make_launches_slow(shop: Any, *ops: str) -> None:
    """Publish kernels whose calls take the host longer than stock code takes at all."""
    for entry in shop.entries:
        if entry["definition"] in ops:
            (kernel,) = entry["candidates"]
            kernel["host_us"] = 800.0
            stock = {
                **kernel, "solution": f"{entry['definition']}_stock", "role": "baseline", "provides": "stock",
                "latency_us": 100.0, "host_us": 20.0,
            }  # fmt: skip
            entry["candidates"].append(stock)
    shop.republish()


def reasons(handle: Any, definition: str) -> list[str]:
    return [key.reason for site in handle.report().sites for one in site.all_counts for key in one.keys
            if one.definition == definition]  # fmt: skip


@pytest.mark.usefixtures("in_graphs")
def test_a_kernel_with_a_slow_launch_serves_replays_alone(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    catalog = shop.offer(ops=("rms_norm",))
    make_launches_slow(shop, "rms_norm")
    stock, model = build(), build()
    handle = patch(model, catalog=catalog)
    assert torch.equal(model.generate(prompt(), **OPTIONS), stock.generate(prompt(), **OPTIONS))
    served = handle.report().hits()["rms_norm"]
    assert served > 0
    with torch.no_grad():
        model(prompt(1, 1))
    assert handle.report().hits()["rms_norm"] == served
    assert any("only the device time counts" in reason for reason in reasons(handle, "rms_norm"))
    assert any("no verified solution is faster" in reason for reason in reasons(handle, "rms_norm"))
    assert not threads


@pytest.mark.usefixtures("in_graphs")
def test_an_interrupted_step_ends_the_answers_for_replays(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = build(), []
    patch(model, catalog=shop.offer(ops=("rms_norm",)))
    norm = model.model.norm

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if threads:
            found.append(dict(threads))
            raise KeyboardInterrupt
        return type(norm).forward(norm, x)

    monkeypatch.setattr("tilegym_db.models.decoding.has_hooks", lambda module: False)
    monkeypatch.setattr(norm, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), **OPTIONS)
    assert found == [{threading.get_ident(): 1}]
    assert not threads
