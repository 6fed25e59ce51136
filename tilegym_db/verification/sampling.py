"""Gates for randomly drawn indices: only indices that their distribution (law) allows, as often as it says.

Many rows with different laws are checked together. For a correct sampler, the position of an index in the cumulative
distribution of its row is uniform from 0 to 1, whatever the law. The distance between the positions of two rows of a call
is uniform too, because each row has an independent random number. All bounds hold for any number of draws, and for
independent draws from slightly different laws, so they cover rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.definition import LIMITS
from tilegym_db.records.definition_rules import ROUNDING
from tilegym_db.verification.gates import PASSED, OutputComparison, failed, row_of_most
from tilegym_db.verification.oracle import Lifted, evaluate_function, lift

FALSE_ALARM = 1e-7
"""Probability that one check rejects a correct sampler; the promotion tier makes some hundreds of checks."""
UNDETERMINED = 1e-4
"""Share of a row's mass that rounding may move into or out of the law; above it, only membership of the row is checked."""
ROUNDING_OF_SUMS = 1e-5
"""Additional error of sums in float32."""
EXPECTED_IN_A_CELL = 5.0
"""Minimum expected draws of an index for its own cell; all other indices share a cell."""
_STATISTICS = 11
"""Two orders of the positions, the same two for each of three pairings of rows, repeats, and two for draws of one law."""
_HALVINGS = 60
_RANDOM = 0x5EED


@dataclass(frozen=True)
class Draws:
    """The positions of draws in the laws of their rows; every tensor has the shape of the draws, ``[calls, rows]``.

    ``allowed``: the law includes the index. ``judged``: rounding leaves the law of the row certain. ``by_rank``: the mass of
    more probable indices in the row. ``by_index``: the mass of earlier indices. ``mass``: the mass of the index itself.
    ``agreement``: the probability that two draws of the row are equal.
    """

    allowed: torch.Tensor
    judged: torch.Tensor
    by_rank: torch.Tensor
    by_index: torch.Tensor
    mass: torch.Tensor
    agreement: torch.Tensor

    @classmethod
    def together(cls, parts: Sequence[Draws]) -> Draws:
        """Return the draws of several groups of rows, side by side."""
        fields = ("allowed", "judged", "by_rank", "by_index", "mass", "agreement")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in fields))


def place(index: torch.Tensor, law: torch.Tensor, widest: torch.Tensor, narrowest: torch.Tensor) -> Draws:
    """Return the positions of drawn indices in the laws of their rows.

    Args:
        index: ``[calls, rows]``.
        law: the probability of each index of a row, ``[rows, columns]`` in fp64, up to a factor per row.
        widest: the law with all that rounding may add to it.
        narrowest: the law without what rounding may remove from it.
    """
    columns = law.shape[-1]
    inside = (index >= 0) & (index < columns)
    chosen = torch.where(inside, index, 0).long().T
    total = law.sum(dim=-1, keepdim=True)
    mass = law / total
    before = mass.cumsum(dim=-1) - mass
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    above = torch.empty_like(mass).scatter_(-1, order, ordered.cumsum(dim=-1) - ordered)
    doubt = 1 - narrowest.sum(dim=-1) / widest.sum(dim=-1)
    judged = ((doubt <= UNDETERMINED) & (total[:, 0] > 0) & torch.isfinite(total[:, 0])).expand(index.shape)
    allowed, by_rank, by_index, own = [value.gather(-1, chosen).T for value in (widest, above, before, mass)]
    agreement = mass.square().sum(dim=-1).expand(index.shape)
    return Draws(inside & (allowed > 0), judged, by_rank, by_index, own, agreement)


def distance_bound(draws: int, chance: float) -> float:
    """Return the maximum distance between an empirical distribution and the mean of its draws' distributions.

    It is exceeded with at most this chance. This is Bretagnolle's inequality, which extends that of Dvoretzky, Kiefer and
    Wolfowitz to independent draws that are not identically distributed: P(sup |F_n - F| > d) <= 2 e exp(-2 n d**2).
    """
    return math.sqrt((1 + math.log(2 / chance)) / (2 * draws))


def share_bound(shares: torch.Tensor, draws: int, chance: float) -> float:
    """Return the maximum total variation between the counts in some cells and these shares of all draws.

    It is exceeded with at most this chance. The expectation is at most half the sum of the standard deviations. By McDiarmid's
    inequality the distance exceeds it by t with probability exp(-2 n t**2), because one draw moves it by 1 / n.
    """
    variance = (shares * (1 - shares)).clamp_min(0)  # rounding may raise a share above 1
    expected = torch.minimum((variance / draws).sqrt(), 2 * variance).sum() / 2
    return float(expected) + math.sqrt(math.log(1 / chance) / (2 * draws))


def agreement_bound(expected: float, pairs: int, chance: float) -> float:
    """Return the maximum share of pairs that agree, exceeded with at most this chance: Chernoff's bound by relative entropy.

    It is far narrower than Hoeffding's for rare agreement. It also holds for pairs of different laws with this mean.
    """
    if expected <= 0:
        return 0.0
    low, high, most = expected, 1.0, math.log(1 / chance) / pairs
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _relative_entropy(middle, expected) > most:
            high = middle
        else:
            low = middle
    return high


def _relative_entropy(found: float, expected: float) -> float:
    """Return the relative entropy of two coins; the second must not always give heads."""
    heads = found * math.log(found / expected) if found else 0.0
    return heads + ((1 - found) * math.log((1 - found) / (1 - expected)) if found < 1 else 0.0)


def expected_distinct(law: torch.Tensor, draws: int) -> float:
    """Return the mean number of different indices among that many draws of a law."""
    return float(-torch.expm1(draws * torch.log1p(-law.clamp(0, 1))).sum())


def distinct_bound(draws: int, chance: float) -> float:
    """Return the maximum deviation of that number from its mean, by McDiarmid's inequality: one draw changes it by one."""
    return math.sqrt(draws * math.log(2 / chance) / 2)


def check_drawn(
    name: str,
    index: torch.Tensor,
    draws: Draws,
    reference: torch.Tensor,
    same: torch.Tensor | None = None,
    law: torch.Tensor | None = None,
) -> OutputComparison:
    """Return the result of checking the draws of one output.

    Args:
        name: the output's name, for the reason.
        index: the drawn indices, ``[calls, rows]``.
        draws: their positions (:func:`place`).
        reference: the reference's draws in the first call, ``[rows]``, shown next to a wrong draw.
        same: rows that have the same law, if there are several; their draws are also counted per index.
        law: of these rows, ``[columns]``, with sum one.
    """
    if index.numel() == 0:
        return PASSED
    wrong = ~draws.allowed
    if bool(wrong.any()):
        call = int(wrong.any(dim=1).nonzero()[0])
        count = int(wrong.sum())
        figures = (math.inf, math.inf, math.inf, 1.0 - count / index.numel())
        what = f"{name}: {count} of {index.numel()} draws are of indices that their row's law excludes"
        return failed("support", what, figures, wrong[call], index[call], reference, row_of_most(wrong[call]))
    unlike = _unlike(draws, index, same, law)
    if unlike is None:
        return PASSED
    return OutputComparison("distribution", f"{name}: {unlike}", math.inf, math.inf, math.inf, 0.0)


def _unlike(draws: Draws, index: torch.Tensor, same: torch.Tensor | None, law: torch.Tensor | None) -> str | None:
    """Return the way in which the draws differ from their laws beyond chance, or None."""
    chance, margin = FALSE_ALARM / _STATISTICS, UNDETERMINED + ROUNDING_OF_SUMS
    count = int(draws.judged.sum())
    if count == 0:
        return None
    places = {
        order: start + _fractions(start) * draws.mass
        for order, start in (("descending probability", draws.by_rank), ("their index", draws.by_index))
    }
    bound = distance_bound(count, chance) + margin
    for order, places_in in places.items():
        found = _distance_from_uniform(places_in[draws.judged])
        if found > bound:
            return (
                f"{count} draws are not distributed as their rows' laws: with indices in the order of {order}, the cumulative "
                f"distribution is off by {found:.3g}, an honest sampler's by at most {bound:.3g} (false alarm {FALSE_ALARM:g})"
            )
    return (
        _dependence(places, draws.judged, chance, 2 * margin)
        or _repeats(draws, index, chance, 2 * margin)
        or _of_one_law(index, same, law, chance, margin)
    )


def _dependence(places: Mapping[str, torch.Tensor], judged: torch.Tensor, chance: float, margin: float) -> str | None:
    """Return a problem if two rows of one call lie closer together or further apart than independent draws do; else None.

    A pairing has each row in at most one pair, so the distances of its pairs are independent of each other.
    """
    for which, (one, other) in _pairings(judged.shape[1]).items():
        both = judged[:, one] & judged[:, other]
        count = int(both.sum())
        if count == 0:
            continue
        bound = distance_bound(count, chance) + margin
        for order, places_in in places.items():
            apart = (places_in[:, one] - places_in[:, other])[both].remainder(1)
            found = _distance_from_uniform(2 * torch.minimum(apart, 1 - apart))
            if found > bound:
                return (
                    f"{which} of one call do not have independent random numbers: with indices in the order of {order}, the "
                    f"distances of {count} pairs in their cumulative distributions are off by {found:.3g}, an honest sampler's "
                    f"by at most {bound:.3g} (false alarm {FALSE_ALARM:g})"
                )
    return None


def _pairings(rows: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of different rows, in three ways; the last row of an odd number is left over."""
    half, mixed = rows // 2, torch.randperm(rows, generator=torch.Generator().manual_seed(_RANDOM))
    in_order = torch.arange(2 * half)
    return {
        "neighbouring rows": (in_order[0::2], in_order[1::2]),
        "rows of the two halves": (in_order[:half], in_order[half:]),
        "rows paired at random": (mixed[:half], mixed[half : 2 * half]),
    }


def _repeats(draws: Draws, index: torch.Tensor, chance: float, margin: float) -> str | None:
    """Return a problem if calls with different random numbers agree more or less often than the law allows, or None."""
    calls = len(index) // 2
    judged = draws.judged[:calls]
    pairs = int(judged.sum())
    if pairs == 0:
        return None
    agree = float((index[:calls] == index[calls : 2 * calls])[judged].double().mean())
    expected = float(draws.agreement[:calls][judged].mean())
    most = agreement_bound(min(expected + margin, 1.0), pairs, chance / 2)
    least = 1 - agreement_bound(min(1 - expected + margin, 1.0), pairs, chance / 2)
    if least <= agree <= most:
        return None
    return (
        f"rows called twice with other random numbers draw the same in a share of {agree:.3g} of {pairs}, where their laws say "
        f"{expected:.3g}; an honest sampler's lies from {max(least, 0.0):.3g} to {most:.3g} (false alarm {FALSE_ALARM:g})"
    )


def _of_one_law(
    index: torch.Tensor, same: torch.Tensor | None, law: torch.Tensor | None, chance: float, margin: float
) -> str | None:
    """Return a problem if the counts of draws of one law differ from that law; else None."""
    if same is None or law is None:
        return None
    drawn = index[:, same].reshape(-1).long()
    count = drawn.numel()
    cells = _cells(law, count)
    shares = torch.zeros(int(cells.max()) + 1, dtype=law.dtype, device=law.device).index_add_(0, cells, law)
    found = float((torch.bincount(cells[drawn], minlength=len(shares)) / count - shares).abs().sum()) / 2
    bound = share_bound(shares, count, chance) + margin
    if found > bound:
        return (
            f"{count} draws of one law have a total variation of {found:.3g} from it, an honest sampler's at most {bound:.3g} "
            f"(false alarm {FALSE_ALARM:g})"
        )
    different, mean = int((torch.bincount(drawn, minlength=len(law)) > 0).sum()), expected_distinct(law, count)
    bound = distinct_bound(count, chance) + margin * count
    if abs(different - mean) <= bound:
        return None
    return (
        f"{count} draws of one law are of {different} different indices, where the law says {mean:.1f}; an honest sampler's "
        f"number lies at most {bound:.1f} from that (false alarm {FALSE_ALARM:g}): random numbers of too few bits have fewer"
    )


def _fractions(like: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 1 that spread an index over its mass; a Solution cannot predict or use them."""
    generator = torch.Generator(like.device).manual_seed(_RANDOM)
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)


def _distance_from_uniform(values: torch.Tensor) -> float:
    ordered = values.clamp(0, 1).sort().values
    steps = torch.arange(len(ordered) + 1, dtype=ordered.dtype, device=ordered.device) / len(ordered)
    return float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def _cells(law: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the cell of each index: a separate one if it is expected often, the first one for all others."""
    often = law * draws >= EXPECTED_IN_A_CELL
    return torch.where(often, often.cumsum(dim=0), 0)


# ---- laws -----------------------------------------------------------------------------------------
# The law of an output is a function of the reference. It runs in fp64 as the oracle does, on the inputs of the call, for
# a part of the rows at a time.

ELEMENTS_AT_ONCE = 1 << 24
"""Maximum input elements of rows that are checked together; in fp64, with sorted copies and sums, about 2 GB."""
_WORD = 0x9E3779B97F4A7C15 - (1 << 64)

Inputs = Mapping[str, Any]
Outputs = Mapping[str, torch.Tensor]


def check_sampled_outputs(
    definition: Definition,
    inputs: Inputs,
    truth: Outputs,
    calls: Sequence[Outputs],
    *,
    elements_at_once: int = ELEMENTS_AT_ONCE,
) -> dict[str, OutputComparison]:
    """Return a comparison for each output that is drawn at random.

    Args:
        definition: names these outputs and their laws.
        inputs: of the calls, except for their random numbers.
        truth: the reference's outputs for the first call.
        calls: the outputs of calls that differ only in their random numbers.
        elements_at_once: maximum input elements of rows that are checked together.

    Raises:
        RecordError: a law raises, or does not return a row of weights for each draw.
    """
    return {
        name: _check(
            definition, name, inputs, truth[name], torch.stack([call[name] for call in calls]), elements_at_once
        )
        for name in definition.sampled
        if name in calls[0]
    }


def _check(
    definition: Definition, name: str, inputs: Inputs, truth: torch.Tensor, drawn: torch.Tensor, at_once: int
) -> OutputComparison:
    if drawn.numel() == 0:
        return PASSED
    parts, keys, start = [], [], 0
    for given in _parts(definition, name, inputs, at_once):
        law, widest, narrowest = _laws(definition, name, given)
        parts.append(place(drawn[:, start : start + len(law)], law, widest, narrowest))
        keys.append(_keys(law))
        start += len(law)
    draws = Draws.together(parts)
    same, law_of_same = _most_alike(definition, name, inputs, torch.cat(keys), draws.judged[0], at_once)
    return check_drawn(name, drawn, draws, truth, same, law_of_same)


def _parts(definition: Definition, name: str, inputs: Inputs, at_once: int) -> Iterator[Inputs]:
    """Yield the inputs in groups of rows; all at once if the rows are not the first axis of some input."""
    axis, shapes = definition.outputs[name].shape, {key: spec.shape or () for key, spec in definition.inputs.items()}
    rows = len(inputs[definition.sampled[name].uniforms])
    of_rows = {key: inputs[key] for key, shape in shapes.items() if shape[:1] == axis}
    step = max(1, at_once // max(value[:1].numel() for value in of_rows.values()))
    if any(entry == axis for shape in shapes.values() for entry in (shape[i : i + 1] for i in range(1, len(shape)))):
        step = rows
    for start in range(0, rows, step):
        yield {**inputs, **{key: value[start : start + step] for key, value in of_rows.items()}}


def _laws(definition: Definition, name: str, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the law of each row, and the widest and narrowest law after rounding; each ``[rows, columns]``."""
    function, rounding = definition.sampled[name].law, LIMITS["float32"].rtol
    found = []
    for moved in (0.0, rounding, -rounding):
        mode: Any = Lifted
        with mode():
            value = evaluate_function(definition, function, lift(inputs), {ROUNDING: moved})
        shape = inputs[definition.sampled[name].uniforms].shape
        if not isinstance(value, torch.Tensor) or value.shape[:-1] != shape or not value.dtype.is_floating_point:
            what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise RecordError(
                f"{definition.name}: {function} gives {what}, not a row of weights for each of {list(shape)}.",
                code="law_shape_differs",
            )
        found.append(value.double())
    return found[0], found[1], found[2]


def _keys(law: torch.Tensor) -> torch.Tensor:
    """Return a number for each row; rows with equal laws have equal numbers."""
    bits = law.contiguous().view(torch.int64)
    places = torch.arange(1, law.shape[-1] + 1, dtype=torch.int64, device=law.device) * _WORD
    return ((bits ^ (bits >> 29)) * (places | 1)).sum(dim=-1)


def _most_alike(
    definition: Definition, name: str, inputs: Inputs, keys: torch.Tensor, judged: torch.Tensor, at_once: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows of the most frequent law, and this law; a single row if no two are alike."""
    if not bool(judged.any()):
        return None, None
    values, counts = torch.unique(keys[judged], return_counts=True)
    same = (keys == values[counts.argmax()]) & judged
    row = int(same.nonzero()[0])
    for given in _parts(definition, name, inputs, at_once):
        rows = len(given[definition.sampled[name].uniforms])
        if row < rows:
            law = _laws(definition, name, given)[0][row]
            return same, law / law.sum()
        row -= rows
    return None, None
