"""The forget gate of Kimi Delta Attention, and the gated norm that follows: kernels compute what stock code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import patched
from tilegym_db.models.call_site import AUTOCAST, NEEDS_GRAD
from tilegym_db.models.parts import forget_gate

OP = "kda_gates"
TOKENS = {"max_new_tokens": 4, "do_sample": False}


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == forget_gate.KIND)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [OP, "rms_norm_gated_sigmoid"])
def test_gates_of_kimi_linear_give_the_bits_of_stock(
    op: str, dtype: torch.dtype, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("kimi_linear", dtype), prompt(2, 12)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(op,)), ops=[op]) as handle:
        assert torch.equal(logits(model, ids), stock)
        tokens = model.generate(ids, **TOKENS)
    assert handle.report().hits()[op] > 0
    assert torch.equal(model.generate(ids, **TOKENS), tokens)


def test_a_gate_without_a_kernel_runs_its_layers_once(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids, calls = build("kimi_linear"), prompt(2, 12), list[int]()
    stock = logits(model, ids)
    gates = [one for one in model.modules() if type(one).__name__ == "KimiLinearForgetGate"]
    with patched(model, catalog=shop.offer(ops=(OP,), smallest=64), ops=[OP]) as handle:
        for gate in gates:
            gate.f_a_proj.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(logits(model, ids), stock)
    assert (len(calls), row(handle).counts.kernel_calls) == (len(gates), 0)


def test_gradients_and_autocast_leave_gates_to_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("kimi_linear"), prompt(2, 12)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(ids)
    assert row(handle).bypassed.keys() == {NEEDS_GRAD, AUTOCAST}
    assert not row(handle).counts.kernel_calls
