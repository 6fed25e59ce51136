"""Situations of calls: each kind comes up in one promotion, each is set up as it says, and none is left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegym_db.sandbox.situation import PLAIN, Situation, changed_property, described, in_threads

INPUTS = ("x", "weight", "bias")
CALLS = 24 * 4
"""Calls in situations of the fuzz cases of one promotion."""

FEATURES: dict[str, Callable[[Situation], bool]] = {
    "gradients are off": lambda found: found.gradients == "off",
    "inference mode is on": lambda found: found.gradients == "inference",
    "memory is PyTorch's": lambda found: found.own_memory,
    "memory is PyTorch's outside of inference mode": lambda found: found.own_memory and found.gradients != "inference",
    "the weight is a Parameter": lambda found: "weight" in found.parameters,
    "all inputs are Parameters": lambda found: len(found.parameters) == len(INPUTS),
    "no input is a Parameter": lambda found: not found.parameters,
    "the weight requires gradients": lambda found: "weight" in found.parameters and found.requires_grad,
    "the default dtype is bfloat16": lambda found: found.default_dtype == "bfloat16",
    "the default dtype is float16": lambda found: found.default_dtype == "float16",
    "products may use TF32": lambda found: found.precision != "highest",
    "the stack is deep": lambda found: found.depth > 100,
    "another thread calls": lambda found: found.in_thread,
    "it is called on a side stream": lambda found: found.on_stream,
}


def drawn(seed: int) -> list[Situation]:
    calls = range(CALLS)
    return [Situation.drawn(seed * 1000 + number, INPUTS, multiplies_by_torch=False, on_gpu=True) for number in calls]


@given(seed=st.integers(0, 1 << 60), wrong=st.sampled_from(sorted(FEATURES)))
@settings(max_examples=60, deadline=None)
def test_each_kind_of_situation_comes_up_in_a_promotion(seed, wrong):
    assert any(FEATURES[wrong](found) for found in drawn(seed))


def test_one_promotion_finds_each_single_and_most_pairs():
    names = sorted(FEATURES)
    pairs = [{one, other} for one in names for other in names]
    runs = [drawn(seed) for seed in range(40)]

    def is_found(wrong: set[str], run: list[Situation]) -> bool:
        return any(all(FEATURES[name](found) for name in wrong) for found in run)

    def share(wrong: set[str]) -> float:
        return sum(is_found(wrong, run) for run in runs) / len(runs)

    shares = {tuple(sorted(wrong)): share(wrong) for wrong in pairs}
    possible = {wrong: found for wrong, found in shares.items() if found > 0}
    assert all(shares[name,] >= 0.95 for name in names)
    assert sum(possible.values()) / len(possible) >= 0.95


@pytest.mark.parametrize("gradients", ["on", "off", "inference"])
@pytest.mark.parametrize("own_memory", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_situation_is_what_it_says(gradients, own_memory, in_thread):
    situation = Situation(
        gradients, own_memory, ("weight",), gradients != "on", "bfloat16", "high", depth=120, in_thread=in_thread
    )
    weight = torch.arange(6.0).reshape(3, 2).t()
    slot = {"x": torch.ones(4), "weight": weight, "again": weight, "factor": 2.0}

    def look() -> dict[str, object]:
        given = situation.arguments(slot, lambda microseconds: None)
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        assert torch.equal(given["weight"], weight)
        return {
            "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "kinds": (type(given["x"]), type(given["weight"])),
            "requires": given["weight"].requires_grad,
            "own": given["x"].data_ptr() != slot["x"].data_ptr(),
            "strides": given["weight"].stride(),
            "one": given["weight"] is given["again"],
            "settings": (torch.empty(1).dtype, torch.get_float32_matmul_precision()),
            "deep": depth > 120,
            "main": threading.current_thread() is threading.main_thread(),
        }

    found = situation.run("cpu", look)
    modes = {"on": (True, False), "off": (False, False), "inference": (False, True)}
    assert found == {
        "modes": modes[gradients],
        "kinds": (torch.Tensor, torch.nn.Parameter),
        "requires": gradients != "on",
        "own": own_memory,
        "strides": (1, 2),
        "one": True,
        "settings": (torch.bfloat16, "high"),
        "deep": True,
        "main": not in_thread,
    }
    assert torch.empty(1).dtype == torch.float32
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.is_grad_enabled()


def test_a_setting_that_the_call_changed_stays_changed():
    Situation(default_dtype="bfloat16").run("cpu", lambda: torch.set_default_dtype(torch.float64))
    after = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert after == torch.float64


def test_the_error_of_a_call_in_another_thread_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        Situation(in_thread=True).run("cpu", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        in_threads([lambda: 1, lambda: 1 // 0])
    assert in_threads([lambda: 1, lambda: 2]) == [1, 2]


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "its shape": lambda value: value.unsqueeze_(0),
    "its strides": lambda value: value.t_(),
    "its address": lambda value: value.set_(torch.ones(3, 3)),
    "its storage offset": lambda value: value.as_strided_((3, 3), (3, 1), 1),
    "requires_grad": lambda value: value.requires_grad_(),
    "its hooks": lambda value: value.requires_grad_().register_hook(print),
    "its attributes": lambda value: setattr(value, "seen", True),
    "the number of writes to it": lambda value: value.mul_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_argument_is_described(name):
    value = torch.ones(16)[:9].view(3, 3)
    before = described(value, written=False)
    assert changed_property(before, value, written=False) is None
    CHANGES[name](value)
    assert changed_property(before, value, written=False) is not None


def test_an_output_may_be_written_but_not_turned():
    value = torch.ones(3, 2)
    before = described(value, written=True)
    value.mul_(2)
    assert changed_property(before, value, written=True) is None
    value.t_()
    assert changed_property(before, value, written=True) is not None


def test_a_plain_call_has_no_words_to_explain():
    assert str(PLAIN) == "a plain call"
    assert "require gradients: weight" in str(Situation("off", parameters=("weight",), requires_grad=True))
