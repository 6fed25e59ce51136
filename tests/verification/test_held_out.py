"""Contents of one promotion expose members of a class of mistakes that no list names; Hypothesis draws the members."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tilegym_db.catalog import Catalog
from tilegym_db.records import Solution
from tilegym_db.verification.cases import fuzz_cases, sibling_of
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.oracle import run_reference
from tilegym_db.verification.verifier import Failure, judge

CATALOG = Catalog.default()
PROMOTIONS, MEMBERS, GOAL = 3, 200, 0.95
ROWS = {"moe_experts": 1024, "swiglu": 256, "softmax": 256}
FEW_ROWS = 48
RECORD = Solution.from_dict(
    {
        "name": "held_out",
        "definition": "held_out",
        "author": "tests",
        "sources": [{"path": "kernel.py"}],
        "spec": {"language": "python", "entry_point": "kernel.py::run"},
    }
)
Outputs = dict[str, torch.Tensor]
Member = Callable[[OracleCase, Outputs], Outputs | None]
"""Takes a case and the right outputs; returns wrong ones, or None if the mistake has no effect on this case."""


@functools.cache
def promotion(name: str, dtype: str, number: int) -> list[tuple[OracleCase, Outputs]]:
    """Return the fuzz cases and siblings of one promotion that the reference passes, with its outputs."""
    definition, workloads = CATALOG.definition(name), CATALOG.workloads_for(name)
    dtypes = {variable: dtype if dtype in choices else choices[0] for variable, choices in definition.dtypes.items()}
    anchors = sorted((workload.axes for workload in workloads), key=lambda axes: math.prod(axes.values()))[:3]
    scalars = workloads[0].scalars()
    cases = fuzz_cases(
        definition, RECORD, anchors, dtypes, scalars, count=24, seed=7919 * number, max_rows=ROWS.get(name, FEW_ROWS)
    )
    pairs = [(case, sibling_of(definition, case, place, scalars)) for place, case in enumerate(cases)]
    known = [make_oracle_case(definition, case, "cpu") for pair in pairs for case in pair]
    return [(case, dict(run_reference(definition, case.inputs))) for case in known if case is not None]


def exposed(name: str, dtype: str, number: int, member: Member) -> bool:
    for case, right in promotion(name, dtype, number):
        wrong = member(case, right)
        if wrong is not None and isinstance(judge(CATALOG.definition(name), RECORD, case, wrong), Failure):
            return True
    return False


def padded_tile(case: OracleCase, right: Outputs, *, width: int, place: str) -> Outputs | None:
    """Give NaN for a row in which one tile has only -inf and another value is finite."""
    x = case.inputs["x"]
    if x.shape[-1] <= width or not x.numel():
        return None
    excluded = (x == -torch.inf).flatten(0, -2)
    tiles = {"first": excluded[:, :width], "last": excluded[:, -width:]}
    hit = tiles[place].all(dim=1) & ~excluded.all(dim=1)
    return spoiled(right, "out", hit)


def spoiled(right: Outputs, name: str, rows: torch.Tensor, value: float = torch.nan) -> Outputs | None:
    if not bool(rows.any()):
        return None
    out = right[name].clone()
    out.view(-1, out.shape[-1])[rows] = value
    return right | {name: out}


def massive_value(case: OracleCase, right: Outputs, *, limit: float, rows: str) -> Outputs | None:
    """Give zeros for a row with one large element, if all rows or only some have one."""
    x = case.inputs["x"]
    if not x.numel():
        return None
    hit = (x.abs() > limit).flatten(0, -2).any(dim=1)
    if bool(hit.all()) != (rows == "all"):
        return None
    return spoiled(right, "out", hit, 0.0)


def equal_block(case: OracleCase, right: Outputs, *, rows: int, but: int) -> Outputs | None:
    """Give NaN for a block of rows that are all equal, but for some."""
    x = case.inputs["x"].flatten(0, -2).double()
    whole = len(x) // rows * rows
    if not x.numel() or not whole or bool(torch.isnan(x).any()):
        return None
    blocks = x[:whole].unflatten(0, (-1, rows))
    differing = (blocks != blocks.mode(dim=1, keepdim=True).values).any(dim=2).sum(dim=1)
    hit = torch.zeros(len(x), dtype=torch.bool)
    hit[:whole] = (differing == but).repeat_interleave(rows)
    return spoiled(right, "out", hit)


def crowded(case: OracleCase, right: Outputs, *, width: int, strided: bool, room: int) -> Outputs | None:
    """Lose winners of a row beyond the room of one partition."""
    ids = right["ids"]
    columns = case.inputs["logits"].shape[-1]
    if ids.shape[-1] <= room or columns < 2 * width or not ids.numel():
        return None
    partition = ids % width if strided else ids // width
    alike = (partition[..., None] == partition[..., None, :]).sum(dim=-1)
    return spoiled(right, "ids", (alike > room).any(dim=-1).flatten(), 0)


def undefined_choice(case: OracleCase, right: Outputs, *, index: int, all_nan: bool) -> Outputs | None:
    """Give one index that does not exist, or the same twice, in a row with NaN."""
    logits, ids = case.inputs["logits"], right["ids"]
    nan = torch.isnan(logits)
    hit = nan.all(dim=-1) if all_nan else nan.any(dim=-1) & ~nan.all(dim=-1)
    if not bool(hit.any()) or ids.shape[-1] < 2:
        return None
    out = ids.clone()
    out[hit, -1] = {0: ids[hit, 0], -1: -torch.ones_like(ids[hit, 0])}.get(index, ids[hit, 0] * 0 + logits.shape[-1])
    return right | {"ids": out}


def ragged_group(case: OracleCase, right: Outputs, *, tile: int, step: int, empty: str) -> Outputs | None:
    """Give zeros for all tokens if a group has a number of tokens at the edge of a tile, or the first or last has none."""
    ids, experts = case.inputs["ids"], case.inputs["gate_up"].shape[0]
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=experts)[:experts]
    if not ids.numel() or experts < 2:
        return None
    ends = {"first": counts[0] == 0, "last": counts[-1] == 0, "both": (counts[0] == 0) & (counts[-1] == 0)}
    hit = bool(ends[empty]) if empty else bool((counts == tile + step).any())
    return spoiled(right, "out", torch.full((right["out"].shape[0],), hit), 0.0)


def directed(value: torch.Tensor, dtype: torch.dtype, mode: str) -> torch.Tensor:
    """Return values rounded to a dtype in one direction: to zero, away from it, down or up."""
    near = value.to(dtype)
    low = torch.where(near.double() > value, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)
    high = torch.where(near.double() < value, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
    inwards = torch.where(value > 0, low, high)
    return {"zero": inwards, "away": torch.where(value > 0, high, low), "down": low, "up": high}[mode]


def rounded(case: OracleCase, right: Outputs, *, mode: str) -> Outputs | None:
    """Round to the output dtype in another direction than to nearest."""
    name = next(iter(right))
    out = right[name]
    return right | {name: directed(case.outputs[name], out.dtype, mode)} if out.numel() else None


WIDTHS = st.sampled_from((8, 16, 32, 64))
CLASSES = {
    "padding": ("softmax", "float32", padded_tile, {"width": WIDTHS, "place": st.sampled_from(("first", "last"))}),
    "massive": (
        "rms_norm",
        "bfloat16",
        massive_value,
        {"limit": st.floats(4, 5.5).map(lambda x: 10.0**x), "rows": st.sampled_from(("all", "some"))},
    ),
    "equal rows": ("rms_norm", "float32", equal_block, {"rows": st.integers(3, 13), "but": st.sampled_from((0, 1))}),
    "winners": (
        "topk_softmax",
        "float32",
        crowded,
        {"width": st.sampled_from((4, 8, 16, 32)), "strided": st.booleans(), "room": st.integers(1, 3)},
    ),
    "choices among NaN": (
        "topk_softmax",
        "bfloat16",
        undefined_choice,
        {"index": st.sampled_from((0, -1, 1)), "all_nan": st.booleans()},
    ),
    "routing": (
        "moe_experts",
        "float32",
        ragged_group,
        {
            "tile": st.sampled_from((16, 32, 64)),
            "step": st.integers(-1, 1),
            "empty": st.sampled_from(("", "", "", "first", "last", "both")),
        },
    ),
    "rounding": ("swiglu", "bfloat16", rounded, {"mode": st.sampled_from(("zero", "away", "down", "up"))}),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_promotion_exposes_members_that_no_list_names(kind: str) -> None:
    name, dtype, mistake, members = CLASSES[kind]
    found: list[tuple[bool, dict[str, object]]] = []

    @seed(20_261_128)
    @settings(max_examples=MEMBERS, database=None, deadline=None, phases=[Phase.generate])
    @given(number=st.integers(0, PROMOTIONS - 1), member=st.fixed_dictionaries(members))
    def judge_member(number: int, member: dict[str, object]) -> None:
        found.append((exposed(name, dtype, number, functools.partial(mistake, **member)), member))

    judge_member()
    missed = [member for right, member in found if not right]
    share = 1 - len(missed) / len(found)
    print(f"{kind}: {share:.1%} of {len(found)} members are exposed")
    assert share >= GOAL, missed
