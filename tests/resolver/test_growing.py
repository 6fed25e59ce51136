"""A call site whose calls grow: one decision for a span of sizes, and never a kernel if a separate decision gave none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tilegym_db.records.call import bind_call
from tilegym_db.resolver.dispatch import octave, span_around
from tilegym_db.resolver.hot_path import size_of
from tilegym_db.resolver.resolve import call_site

KERNEL = "def run(q, k, out):\n    out.copy_({sign}q * k.sum(1))\n"
SIGNS = {"first": "", "second": "-"}


@pytest.fixture
def attend(shop: Any) -> Any:
    """``out = q * sum of k`` over the positions L of a cache; two kernels, which differ in the sign."""
    shop.define(
        "attend",
        axes={"B": {"type": "var"}, "L": {"type": "var"}, "D": {"type": "var"}},
        inputs={"q": {"shape": ["B", "D"], "dtype": "float32"}, "k": {"shape": ["B", "L", "D"], "dtype": "float32"}},
        outputs={"out": {"shape": ["B", "D"], "dtype": "float32"}},
        constraints=["L >= 1"],
        reference="def run(q, k):\n    return q * k.sum(1)\n",
        serving={"growing": "L"},
    )
    return shop


def add(shop: Any, name: str, constraints: tuple[str, ...] = ()) -> Any:
    source = KERNEL.replace("{sign}", SIGNS[name])
    return shop.add("attend", name, source, constraints=list(constraints), layouts={"k": "row_contiguous"})


def publish(shop: Any, *points: tuple[int, Any, dict[str, Any]]) -> None:
    """(L, kernel, changes of its candidate) of each measured point; B = 1, D = 4."""
    shop.publish(
        [
            shop.entry("attend", {"B": 1, "L": size, "D": 4}, [shop.candidate(kernel, 5.0, **changes)])
            for size, kernel, changes in points
        ]
    )


def inputs(length: int, batch: int = 1, capacity: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, 4), torch.ones(batch, max(length, capacity), 4)[:, :length]


def like_q(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


def who(out: torch.Tensor | None) -> str | None:
    return None if out is None else "first" if out.flatten()[0] > 0 else "second"


def decided(site: Any, *args: torch.Tensor) -> str | None:
    """What a decision about this very call says."""
    binding = bind_call(site.definition, (*args, torch.empty_like(args[0])))
    decision = site.choose(binding, torch.device("cpu"), None, "call")
    return None if decision.solution is None else decision.solution.name


def test_steps_of_a_span_run_the_kernel_of_their_decision(attend: Any) -> None:
    first, second = add(attend, "first"), add(attend, "second")
    publish(attend, (8, first, {}), (100, second, {}), (300, first, {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    for length in range(1, 320):
        assert who(serve(*inputs(length))) == decided(site, *inputs(length)), length
    assert site.report().calls == 319
    # The octaves, the ends of the measured range at 8 and 300, and where the nearest point changes: at 29, and at 174.
    assert site.report().misses == 12


def test_shrinking_and_alternating_caches_cost_no_decision(attend: Any) -> None:
    first, second = add(attend, "first"), add(attend, "second")
    publish(attend, (8, first, {}), (1000, second, {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    lengths = [600, 20, 601, 21, 602, 22, 599, 19]
    assert [who(serve(*inputs(length))) for length in lengths] == ["second", "first"] * 4
    assert (site.report().misses, site.report().kernel_calls) == (2, 8)


@pytest.mark.parametrize(
    ("constraint", "served"),
    [
        ("L >= 20", lambda length: length >= 20),
        ("20 <= L", lambda length: length >= 20),
        ("L < B * 40", lambda length: length < 40),
        ("L * L >= 400", lambda length: length >= 20),
        ("min(L, 30) >= 20", lambda length: length >= 20),
        ("D >= 4", lambda length: True),
    ],
)
def test_constraints_hold_inside_of_a_span(constraint: str, served: Any, attend: Any) -> None:
    kernel = add(attend, "first", (constraint,))
    publish(attend, (8, kernel, {}), (100, kernel, {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    for length in random.Random(1).sample(range(8, 101), 93):
        assert (serve(*inputs(length)) is not None) == served(length), length


@pytest.mark.parametrize("constraint", ["L % 2 == 0", "L >= 20 and L % 2 == 0", "L != 21", "L * 3 // 3 * 2 % 4 == 0"])
def test_a_kernel_for_scattered_sizes_never_serves_those_between(constraint: str, attend: Any) -> None:
    kernel = add(attend, "first", (constraint,))
    publish(attend, (8, kernel, {}), (100, kernel, {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    found = [length for length in [40, 64, *range(8, 101)] if serve(*inputs(length)) is not None]
    assert {40, 64} <= set(found)
    assert all(decided(site, *inputs(length)) for length in found)


def test_kernel_without_fuzz_cases_serves_its_measured_size(attend: Any) -> None:
    kernel = add(attend, "first")
    publish(attend, (40, kernel, {"envelope_cases": 0}), (60, kernel, {"envelope_cases": 0}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    found = [length for length in [40, 60, *range(32, 64)] if serve(*inputs(length)) is not None]
    assert found[:2] == [40, 60]
    assert set(found) == {40, 60}


@pytest.mark.parametrize("seed", range(8))
def test_kernel_runs_only_if_the_exact_decision_has_one(seed: int, attend: Any) -> None:
    draw = random.Random(seed)
    kernels = [
        add(attend, name, tuple(draw.sample([f"L >= {draw.randint(1, 80)}", "L % 3 != 0", "L < 200", "D == 4"], 2)))
        for name in SIGNS
    ]
    points = [
        (
            size,
            draw.choice(kernels),
            {"envelope_cases": draw.choice((0, 5, 5)), "speedup_ci_low": draw.choice((0.9, 1.3, 1.3))},
        )
        for size in draw.sample(range(1, 260), 6)
    ]
    publish(attend, *points)
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    for length in [draw.randint(1, 280) for _ in range(150)]:
        found = who(serve(*inputs(length)))
        assert found is None or found == decided(site, *inputs(length)), length


def test_layouts_and_other_sizes_are_decided_for_themselves(attend: Any) -> None:
    publish(attend, (8, add(attend, "first"), {}), (100, add(attend, "first"), {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    assert serve(*inputs(20)) is not None
    assert serve(*inputs(20, batch=2)) is None  # outside of the measured range
    assert serve(torch.ones(1, 4), torch.ones(1, 4, 20).transpose(1, 2)) is None
    assert serve(*inputs(20, batch=1, capacity=64)) is not None  # a view of one sequence's larger cache is contiguous
    assert serve(torch.ones(1, 4), torch.ones(1, 20, 5)) is None  # no call of the definition
    assert serve(*inputs(21)) is not None
    assert serve(*inputs(0)) is None


def test_raising_kernel_is_not_tried_at_the_next_size(attend: Any) -> None:
    kernel = attend.add("attend", "first", "def run(q, k, out):\n    raise ValueError('no')\n")
    publish(attend, (8, kernel, {}), (100, kernel, {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    serve = site.serving(like_q, growing="L")
    with pytest.warns(RuntimeWarning, match="quarantine"):
        assert serve(*inputs(20)) is None
    assert [serve(*inputs(length)) for length in (20, 21, 40, 70)] == [None] * 4
    assert len(site.report().failures) == 1


def test_forgotten_span_is_decided_again_and_counted(attend: Any) -> None:
    publish(attend, (8, add(attend, "first"), {}), (1000, add(attend, "first"), {}))
    site = call_site(attend.definition("attend"), attend.catalog)
    site.max_keys = 2
    serve = site.serving(like_q, growing="L")
    for length in (10, 20, 40, 10, 11):
        assert serve(*inputs(length)) is not None
    report = site.report()
    assert (report.calls, report.kernel_calls, report.misses, len(report.keys)) == (5, 5, 4, 2)


def test_span_ends_at_another_answer_or_its_octave() -> None:
    for size in range(1, 200):
        assert span_around(size, lambda _: True) == octave(size)
        assert span_around(size, lambda _: False) == (size, size)
        low, high = octave(size)
        inside = range(max(low, size - 7), min(high, size + 5) + 1)
        assert span_around(size, inside.__contains__) == (inside[0], inside[-1])


def test_an_axis_of_an_output_cannot_be_left_out_of_the_key(attend: Any) -> None:
    assert size_of(attend.definition("attend"), "L") == ("k", 1)
    for axis in ("B", "Z"):
        with pytest.raises(ValueError, match="no axis of inputs alone"):
            size_of(attend.definition("attend"), axis)


def test_a_size_that_comes_up_during_a_capture_runs_stock(attend: Any) -> None:
    publish(attend, (8, add(attend, "first"), {}), (100, add(attend, "first"), {}))
    site, capturing = call_site(attend.definition("attend"), attend.catalog), [False]
    site.is_capturing = lambda: capturing[0]
    serve = site.serving(like_q, growing="L")
    assert serve(*inputs(20)) is not None
    capturing[0] = True
    assert serve(*inputs(20)) is not None
    assert serve(*inputs(21)) is None  # in the same span, but its kernel may have to be compiled for it
    assert serve(*inputs(40)) is None
    capturing[0] = False
    assert all(serve(*inputs(length)) is not None for length in (20, 21, 40))
    assert site.report().capture_misses == 2
