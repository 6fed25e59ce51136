"""Compares every output of one call with the oracle, each by the rules of its Definition.

Randomly drawn indices are judged by their distribution (law): only indices that it allows, as often as it says.
Many rows with different laws are checked together. For a correct sampler, the position of an index in the cumulative
distribution of its row is uniform from 0 to 1, whatever the law. The distance between the positions of two rows of a call
is uniform too, because each row has an independent random number. All bounds hold for any number of draws, and for
independent draws from slightly different laws, so they cover rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.definition import LIMITS, Limits, limits_for
from tilegym_db.records.definition_rules import ROUNDING, codes_are_exact
from tilegym_db.sandbox.shared_buffers import dtype_name
from tilegym_db.verification.distributions import chosen_from, is_index
from tilegym_db.verification.gates import (
    EXACTLY,
    PASSED,
    OutputComparison,
    ReferenceDeviation,
    bias_of,
    check_output,
    compare_rows,
    failed,
    is_well_conditioned,
    must_be_exact,
    row_of_most,
)
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
        truth: the reference's outputs for the first call.
        calls: the outputs of calls that differ only in their random numbers.
        elements_at_once: maximum input elements of rows that are checked together.
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


def check_outputs(
    definition: Definition,
    dtypes: Mapping[str, str],
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    e_base: Mapping[str, ReferenceDeviation],
    *,
    math: str = "ieee",
    exact: Collection[str] = (),
    conditioned: Collection[str] = (),
) -> dict[str, OutputComparison]:
    """Return a comparison for each output.

    Args:
        inputs: of the call, before it ran.
        truth: the oracle's outputs.
        outputs: the call's, in the same shapes and the declared dtypes.
        e_base: error of the reference itself, per output.
        exact: outputs in which every element must have the oracle's value (see :func:`exact_outputs`).
        conditioned: outputs whose elements are each checked relative to their size (see :func:`reference_errors`).
    """
    if is_undefined(definition, inputs):
        return _check_valid(definition, inputs, outputs)
    verdicts = _check_indices(definition, dtypes, inputs, truth, outputs, math)
    truth = followed(definition, inputs, truth, outputs, [name for name, found in verdicts.items() if not found.passed])
    for name, value in outputs.items():
        if name not in verdicts:
            limits = limits_for(definition, definition.dtype_of(name, dtypes), math)
            if limits is not None and codes_are_exact(definition.codes, name, inputs):
                limits = replace(limits, codes_equal=1.0)
            verdicts[name] = check_output(
                name,
                value,
                truth[name],
                limits,
                e_base[name] if math == "ieee" else e_base[name].plain,
                exact=name in exact,
                conditioned=name in conditioned,
            )
    return {name: verdicts[name] for name in outputs}


def check_reference(
    definition: Definition,
    dtypes: Mapping[str, str],
    inputs: Mapping[str, Any],
    truth: Outputs,
    as_written: Outputs,
    e_base: Mapping[str, ReferenceDeviation],
) -> dict[str, OutputComparison]:
    """Check the reference as written; see :func:`check_outputs`.

    Its own worst row and element widen no bound. Its bias is what a Solution's is compared with, so it is not judged.
    """
    plain = {name: error.plain._replace(bias=math.inf) for name, error in e_base.items()}
    return check_outputs(definition, dtypes, inputs, truth, as_written, plain)


def check_lifted(
    definition: Definition, inputs: Mapping[str, Any], truth: Outputs, outputs: Outputs
) -> dict[str, OutputComparison]:
    """Check another formulation that was lifted to fp64 like the oracle; see :func:`check_outputs`."""
    # Scalars such as eps are fp32 constants in some library calls, so fp64 results may differ by fp32 rounding.
    limits = limits_for(definition, "float32")
    if limits is not None:
        limits = replace(limits, share=1.0)  # fp64 sums do not cross borders by rounding
    verdicts = _check_indices(definition, None, inputs, truth, outputs)
    truth = followed(definition, inputs, truth, outputs, [name for name, found in verdicts.items() if not found.passed])
    for name, value in outputs.items():
        if name not in verdicts:
            verdicts[name] = check_output(name, value.double(), truth[name].double(), limits)
    return {name: verdicts[name] for name in outputs}


def _check_indices(
    definition: Definition,
    dtypes: Mapping[str, str] | None,
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    math: str = "ieee",
) -> dict[str, OutputComparison]:
    """Return a comparison for each index output; ``dtypes`` None means that the values were computed in fp64."""
    verdicts = check_ranked_outputs(definition, inputs, outputs)
    verdicts |= check_sampled_outputs(definition, inputs, truth, [outputs])
    for name, source in definition.gathers.items():
        if name not in outputs or name in verdicts:
            continue
        if source in definition.inputs:
            verdicts[name] = check_gathered(name, outputs[name], truth[name], inputs[source])
        else:
            dtype = "float32" if dtypes is None else definition.dtype_of(source, dtypes)
            limits = limits_for(definition, dtype, math)
            verdicts[name] = check_gathered(name, outputs[name], truth[name], truth[source], limits)
    return verdicts


def reference_errors(
    definition: Definition, dtypes: Mapping[str, str], as_written: Outputs, truth: Outputs, *, shows_bias: bool = True
) -> tuple[dict[str, ReferenceDeviation], frozenset[str]]:
    """Return the error of the reference as written, per output; 0 if equality or codes are compared.

    If the contents say nothing about a bias, it is infinite.

    Also return the outputs of which the reference gives every element, however small, to a relative error; Solutions must
    do so too.
    """
    errors, conditioned = dict.fromkeys(as_written, EXACTLY), set()
    for name, value in as_written.items():
        limits = limits_for(definition, definition.dtype_of(name, dtypes))
        if limits is None or limits.codes or not value.numel():
            continue
        rows = compare_rows(value, truth[name], limits)
        errors[name] = rows.deviation._replace(bias=bias_of(value, rows)[0] if shows_bias else math.inf)
        if name not in definition.gathers and is_well_conditioned(value, truth[name], limits, rows):
            conditioned.add(name)
    return errors, frozenset(conditioned)


def exact_outputs(as_written: Outputs, truth: Outputs) -> frozenset[str]:
    """Return the outputs that every Solution must give exactly, for contents whose sums and products never round."""
    return frozenset(name for name, value in as_written.items() if must_be_exact(value, truth[name]))


# ---- indices --------------------------------------------------------------------------------------
# Indices are compared by the values they point at, so that any choice among equal values passes.


def check_gathered(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, source: torch.Tensor, limits: Limits | None = None
) -> OutputComparison:
    """Compare indices by the values they point at; any choice among equal values is right.

    Indices must lie in the last axis of ``source``, be distinct in a row, and each gather the value that the oracle's gathers.
    A negative index of the oracle means "none", and must be equal.

    Args:
        source: the tensor pointed into, ``[..., E]``: an input, or the oracle's value of another output.
        limits: bounds of the dtype of ``source`` if it is computed, because values within its rounding count as equal; None
            if it is an input.
    """
    if actual.numel() == 0:
        return PASSED
    got_index, want_index = actual.long(), oracle.long()
    none = want_index < 0
    outside = torch.where(none, got_index != want_index, (got_index < 0) | (got_index >= source.shape[-1]))
    repeated = _repeated(got_index) & ~none
    got, want = (source.gather(-1, index.clamp(0, source.shape[-1] - 1)) for index in (got_index, want_index))
    allowed = want.double().abs() * (limits.rtol if limits is not None else 0.0)
    both_nan = torch.isnan(got) & torch.isnan(want) if source.dtype.is_floating_point else torch.zeros_like(none)
    near = (got == want) | both_nan | ((got.double() - want.double()).abs() <= allowed)
    return _verdict(
        name,
        actual,
        oracle,
        (outside, "indices point outside the row"),
        (repeated, "indices occur twice in their row"),
        (~near & ~none, "indices point at another value than the reference's do"),
    )


def check_ranked(
    name: str, actual: torch.Tensor, ranked: torch.Tensor, limits: Limits, smallest: float, *, ordered: bool
) -> OutputComparison:
    """Check that indices are those of the largest ranked values of their row; any choice among equal values is right.

    Values count as equal if they differ by the rounding of the ranking dtype, or if both are below its normal numbers.

    Args:
        actual: indices ``[..., K]``, distinct in a row.
        ranked: the values, ``[..., E]`` with E >= K, in fp64.
        limits: bounds of the dtype in which the reference as written ranks them.
        smallest: smallest normal number of that dtype.
        ordered: True if they must come in descending order of their values.
    """
    if actual.numel() == 0:
        return PASSED
    index = actual.long()
    best = ranked.topk(index.shape[-1], dim=-1)
    outside = (index < 0) | (index >= ranked.shape[-1])
    got = ranked.gather(-1, index.clamp(0, ranked.shape[-1] - 1))
    order = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    if not ordered:
        got, order = got.sort(dim=-1, descending=True)
    both_nan = torch.isnan(got) & torch.isnan(best.values)
    allowed = (best.values.abs() * limits.rtol).clamp_min(smallest)
    near = (got == best.values) | both_nan | ((got - best.values).abs() <= allowed)
    wrong = torch.zeros_like(near).scatter_(-1, order, ~near)
    return _verdict(
        name,
        actual,
        best.indices,
        (outside, "indices point outside the row"),
        (_repeated(index), "indices occur twice in their row"),
        (wrong, "indices point at values that are not the largest of their row"),
    )


def _verdict(
    name: str, actual: torch.Tensor, wanted: torch.Tensor, *found: tuple[torch.Tensor, str], gate: str = "exact"
) -> OutputComparison:
    for wrong, what in found:
        if bool(wrong.any()):
            count = int(wrong.sum())
            figures = (math.inf, math.inf, math.inf, 1.0 - count / actual.numel())
            reason = f"{name}: {count} of {actual.numel()} {what}"
            return failed(gate, reason, figures, wrong, actual, wanted, row_of_most(wrong))
    return PASSED


def _repeated(index: torch.Tensor) -> torch.Tensor:
    ordered, order = index.sort(dim=-1, stable=True)
    again = torch.zeros_like(index, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return torch.zeros_like(again).scatter_(-1, order, again)


# ---- undefined choices ----------------------------------------------------------------------------
# A choice among NaN is undefined unless the Definition promises one. Its indices must still exist and differ within a row,
# because a model reads the weights of what they choose.


def is_undefined(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    """Return True if the Definition chooses indices among values that are NaN, for which it promises nothing."""
    source = chosen_from(definition) if "nan" not in definition.special_values else None
    return source is not None and bool(torch.isnan(inputs[source]).any())


def _check_valid(definition: Definition, inputs: Mapping[str, Any], outputs: Outputs) -> dict[str, OutputComparison]:
    """Check that indices lie in their row and that several of one row differ; other outputs pass."""
    shape = inputs[chosen_from(definition) or ""].shape
    verdicts = dict.fromkeys(outputs, PASSED)
    for name, index in outputs.items():
        if not is_index(definition, name) or not index.numel():
            continue
        several = index.shape != shape[:-1]
        columns = shape[index.dim() - 1] if several else shape[-1]
        outside = (index < 0) | (index >= columns)
        repeated = _repeated(index.long()) if several else torch.zeros_like(outside)
        verdicts[name] = _verdict(
            name,
            index,
            index.clamp(0, columns - 1),
            (outside, f"indices point outside the {columns} columns, in a call with NaN"),
            (repeated, "indices occur twice in their row, in a call with NaN"),
            gate="indices",
        )
    return verdicts


# ---- ranking --------------------------------------------------------------------------------------
# A router may rank values that are neither input nor output, such as scores with a bias. No tensor of the call can then
# confirm its indices.
#
# The Definition names a function of its reference that returns these values (``gathers``), and one for each output that
# depends on the choice among equal values (``follows``). Both run as the oracle does, in fp64 or as written, on the
# inputs of the call. From the Solution they take only the chosen indices.


def check_ranked_outputs(definition: Definition, inputs: Inputs, outputs: Outputs) -> dict[str, OutputComparison]:
    """Return a comparison for each output of indices into values that a function of the reference ranks."""
    verdicts = {}
    for name, source in definition.gathers.items():
        if name not in outputs or source in definition.inputs or source in definition.outputs:
            continue
        index, rounding = outputs[name].long(), LIMITS["float32"].rtol
        # Values count as equal if the rounding of the dtype in which the reference ranks cannot separate them.
        written = _ranked(definition, source, inputs, name, torch.zeros_like(index), rounding)
        limits, columns = LIMITS[dtype_name(written.dtype)], written.shape[-1]
        chosen = index.clamp(0, columns - 1)  # check_ranked reports indices outside the row; here they must not index
        if definition.oracle == "as_written":
            ranked = _ranked(definition, source, inputs, name, chosen, limits.rtol).double()
        else:
            with _lifted():
                ranked = _ranked(definition, source, lift(inputs), name, chosen, limits.rtol).double()
        smallest, ordered = float(torch.finfo(written.dtype).tiny), name not in definition.unordered
        verdicts[name] = check_ranked(name, outputs[name], ranked, limits, smallest, ordered=ordered)
    return verdicts


def followed(
    definition: Definition, inputs: Inputs, truth: Outputs, outputs: Outputs, wrong: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the oracle's outputs; those that follow from indices are computed for the indices that a call chose.

    For index outputs in ``wrong``, which failed already, the oracle's indices are used.
    """
    found = dict(truth)
    if not definition.follows or any(name not in outputs for name in definition.gathers):
        return found
    indices = {name: (truth if name in wrong else outputs)[name].long() for name in definition.gathers}
    rounding = LIMITS["float32"].rtol
    for name, function in definition.follows.items():
        if name not in outputs:
            continue
        if definition.oracle == "as_written":
            value = evaluate_function(definition, function, inputs, indices | {ROUNDING: rounding})
        else:
            with _lifted():
                value = evaluate_function(definition, function, lift(inputs), indices | {ROUNDING: rounding})
        if not isinstance(value, torch.Tensor) or value.shape != truth[name].shape:
            raise RecordError(
                f"{definition.name}: {function} does not give '{name}' in the shape that run gives it.",
                code="follows_shape_differs",
            )
        found[name] = value
    return found


def _lifted() -> Any:
    mode: Any = Lifted
    return mode()


def _ranked(
    definition: Definition, function: str, inputs: Inputs, name: str, index: torch.Tensor, rounding: float
) -> torch.Tensor:
    value = evaluate_function(definition, function, inputs, {name: index, ROUNDING: rounding})
    rows = index.shape[:-1]
    if not isinstance(value, torch.Tensor) or value.shape[:-1] != rows or not value.dtype.is_floating_point:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecordError(
            f"{definition.name}: {function} gives {found}, not a row of values for each of {list(rows)}.",
            code="ranking_shape_differs",
        )
    if value.shape[-1] < index.shape[-1]:
        raise RecordError(
            f"{definition.name}: {function} ranks {value.shape[-1]} values, fewer than '{name}' chooses.",
            code="ranking_too_short",
        )
    return value
