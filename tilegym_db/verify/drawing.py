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
) -> Failure | None:
    """Why the draws of several calls are not those of an honest sampler, or None; at once where nothing is drawn.

    One call more is given 0 and the largest number below 1 in turn: what it draws must be allowed, and is not counted.

    Args:
        definition: says what is drawn, from which law and which random numbers.
        expected: the case, with which the first call was made.
        first: what it gave.
        call: makes a call with the inputs of a case.
        draws: how many are wanted; 0 for none but those of the first call.
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
    return at_the_ends if isinstance(at_the_ends, Failure) else _judge(definition, expected, [at_the_ends], "support")


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
