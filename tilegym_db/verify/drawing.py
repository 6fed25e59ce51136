"""More draws of one case: what draws at random is called again with other random numbers, and all draws are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tilegym_db.records import Definition
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.laws import check_sampled_outputs
from tilegym_db.verify.outcome import Failure, incorrect

__all__ = ["DRAWS_A_CALL", "SMALL_ELEMENTS", "calls_for", "judge_draws"]

DRAWS_A_CALL = 64
"""No more calls are made than one for so many of the draws that are wanted, and no fewer than one."""
SMALL_ELEMENTS = 1 << 14
"""Where the inputs have no more elements than that, a call is cheap, and more of them are made of few rows."""
_SHARE_OF_SMALL = 16
"""Of few rows, calls are made until there is at least this fraction (1 / 16) of the draws that are wanted."""
PROBED_ROWS = 8
"""Rows whose random number is changed alone, each in a call of its own: no other row may draw otherwise for that."""
LARGEST = 1 - 2.0**-24
"""The last float32 below 1; sums that it is multiplied with may round up to all of it."""

Outputs = Mapping[str, torch.Tensor]


def calls_for(rows: int, draws: int, elements: int) -> int:
    """How many more calls of so many rows, with inputs of so many elements, give about so many draws."""
    rows = max(rows, 1)
    calls = min(-(-draws // rows), draws // DRAWS_A_CALL)
    if elements <= SMALL_ELEMENTS:
        calls = max(calls, -(-draws // (rows * _SHARE_OF_SMALL)))
    return max(1, calls)


def judge_draws(
    definition: Definition,
    expected: Expected,
    first: Outputs,
    call: Callable[[Expected], dict[str, torch.Tensor] | Failure],
    draws: int,
    *,
    deterministic: bool = True,
) -> Failure | None:
    """Why the draws of several calls are not those of an honest sampler, or None; at once where nothing is drawn.

    One call more is given 0 and the largest number below 1 in turn: what it draws must be allowed, and is not counted. In some
    calls the number of a single row is another one; what is not deterministic may draw otherwise without that.

    Args:
        definition: says what is drawn, from which law and which random numbers.
        expected: the case, with which the first call was made.
        first: what it gave.
        call: makes a call with the inputs of a case.
        draws: how many are wanted; 0 for none but those of the first call.
        deterministic: the same numbers give the same draws.
    """
    if not definition.sampled or not draws:
        return None
    rows = min(first[name].numel() for name in definition.sampled)
    if not rows:
        return None
    elements = sum(value.numel() for value in expected.inputs.values() if isinstance(value, torch.Tensor))
    outputs: list[Outputs] = [first]
    for number in range(calls_for(rows, draws, elements)):
        found = call(_with_numbers(definition, expected, number))
        if isinstance(found, Failure):
            return found
        outputs.append(found)
    failure = _judge(definition, expected, outputs)
    if failure is not None:
        return failure
    at_the_ends = call(_with_numbers(definition, expected, None))
    if isinstance(at_the_ends, Failure):
        return at_the_ends
    failure = _judge(definition, expected, [at_the_ends], "support")
    return failure or (_row_by_row(definition, expected, first, call) if deterministic else None)


def _row_by_row(
    definition: Definition,
    expected: Expected,
    first: Outputs,
    call: Callable[[Expected], dict[str, torch.Tensor] | Failure],
) -> Failure | None:
    """Whether another number for one row changes what a second row draws: rows of a call must not depend on one another.

    Which row a number belongs to is free, and so is how an index is found from it.
    """
    for name, sampled in definition.sampled.items():
        given = expected.inputs[sampled.uniforms]
        rows = given.numel()
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(expected.case.seed))[:PROBED_ROWS]
        for row in chosen.tolist() if rows > 1 else ():
            other = given.clone()
            other.view(-1)[row] = (other.view(-1)[row] + 0.5) % 1
            found = call(replace(expected, inputs={**expected.inputs, sampled.uniforms: other}))
            if isinstance(found, Failure):
                return found
            changed = int((found[name] != first[name]).sum())
            if changed > 1:
                what = f"{name}: another random number for row {row} alone changes what {changed} rows draw"
                return incorrect("distribution", f"{what} at {expected.case}", expected.case)
    return None


def _judge(
    definition: Definition, expected: Expected, outputs: list[Outputs], gate: str | None = None
) -> Failure | None:
    verdicts = check_sampled_outputs(definition, expected.inputs, expected.outputs, outputs)
    for name, verdict in verdicts.items():
        if verdict.gate is not None and gate in (None, verdict.gate):
            return incorrect(verdict.gate, f"{verdict.reason} at {expected.case}", expected.case, name, verdicts)
    return None


def _with_numbers(definition: Definition, expected: Expected, number: int | None) -> Expected:
    """The case with other random numbers, which are a function of its seed; None for the ends of their range."""
    inputs = dict(expected.inputs)
    for name in {sampled.uniforms for sampled in definition.sampled.values()}:
        given = inputs[name]
        if number is None:
            inputs[name] = torch.arange(given.numel(), device=given.device).remainder(2).to(given.dtype) * LARGEST
        else:
            generator = torch.Generator(given.device).manual_seed((expected.case.seed * 1009 + number + 1) % (1 << 62))
            inputs[name] = torch.rand(given.shape, generator=generator, dtype=given.dtype, device=given.device)
    return replace(expected, inputs=inputs)
