"""What each kind of generator draws, and what is refused of a function that draws several inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.distributions import CONTENTS
from tilegym_db.verification.inputs import ID_CONTENTS, contents_among, draw_inputs, draws_noise

# Distribution of a case -> contents of ids in it.
BY_CONTENTS = {contents_among(ID_CONTENTS, name): name for name in reversed(CONTENTS)}


@pytest.fixture
def draw(operator):
    """Draw ``x [M, N]`` of a dtype by a generator."""

    def drawn(
        generator: dict[str, Any], dtype: str = "float32", contents: str = "normal", rows: int = 400, columns: int = 16
    ) -> torch.Tensor:
        tensor = {"shape": ["M", "N"], "dtype": dtype}
        axes = {"M": {"type": "var"}, "N": {"type": "var"}, "E": {"type": "var"}}
        definition = operator(
            "return x", inputs={"x": tensor}, outputs={"out": tensor}, axes=axes, input_generators={"x": generator},
            dtypes={}, constraints=[], cost=None, self_test=None,
        )  # fmt: skip
        case = Case(Call(definition.name, {"M": rows, "N": columns, "E": 64}), distribution=contents, seed=11)
        value = draw_inputs(definition, case, "cpu")["x"]
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value.view(torch.uint8), draw_inputs(definition, case, "cpu")["x"].view(torch.uint8))
        return value

    return drawn


IDS = {"kind": "distinct_ids", "high": "E", "none": True}


def are_distinct(ids: torch.Tensor) -> bool:
    ordered = ids.sort(dim=-1).values
    return not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def test_ids_come_in_all_kinds_of_contents_and_differ_in_a_row(draw):
    found = {name: draw(IDS, "int64", distribution) for name, distribution in BY_CONTENTS.items()}
    assert set(found) == set(ID_CONTENTS)
    for name, ids in found.items():
        assert are_distinct(ids), name
        assert -1 <= int(ids.min()) <= int(ids.max()) < 64
    counts = {name: ids[ids >= 0].bincount(minlength=64) for name, ids in found.items()}
    assert counts["uniform"].min() > 50
    assert counts["zipf"].max() > 5 * counts["zipf"].min()
    assert int(counts["one_row"].count_nonzero()) == 16
    assert 0.25 < float((found["some_none"] < 0).float().mean()) < 0.35
    assert bool((found["all_none"] == -1).all())


def test_ids_are_minus_one_only_where_the_record_says_so(draw):
    for contents in CONTENTS:
        assert int(draw({"kind": "distinct_ids", "high": "E"}, "int32", contents).min()) >= 0


def test_a_row_of_more_ids_than_there_are_is_refused(draw):
    with raises(RecordError, "ids_too_many", "65", "E = 64"):
        draw(IDS, "int64", columns=65)


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("leading", [False, True])
def test_offsets_rise_from_low_to_high(draw, leading, contents):
    offsets = draw({"kind": "offsets", "high": "M * N", "leading": leading}, "int32", contents)
    assert bool((offsets.diff(dim=-1) >= 0).all())
    assert bool((offsets[:, -1] == 400 * 16).all())
    assert bool((offsets[:, 0] == 0).all()) or not leading
    assert int(offsets.min()) >= 0


def test_offsets_have_even_and_empty_and_whole_parts(draw):
    spec = {"kind": "offsets", "high": "M * N"}
    empty = {name: float((draw(spec, "int64", name).diff(dim=-1) == 0).double().mean()) for name in CONTENTS}
    assert min(empty.values()) < 0.05
    assert max(empty.values()) > 0.9


def test_powers_of_two_have_no_mantissa(draw):
    scale = draw({"kind": "powers_of_two", "low": -4.0, "high": 3.0})
    assert sorted(scale.unique().tolist()) == [2.0**k for k in range(-4, 4)]
    assert draw({"kind": "powers_of_two"}, "float8_e8m0fnu").float().min() > 0


def test_positive_numbers_are_positive_and_of_the_scale(draw):
    value = draw({"kind": "positive", "scale": 0.01}, "bfloat16").float()
    assert value.min() > 0
    assert 0.008 < value.median() < 0.0125


def test_uniform_numbers_from_zero_are_often_zero(draw):
    zeros = {
        name: float((draw({"kind": "uniform", "high": 2}, contents=name) == 0).float().mean()) for name in CONTENTS
    }
    assert all(0.45 < zeros.pop(name) < 0.55 for name in ("sparse", "ties"))
    assert max(zeros.values()) < 0.001
    assert float(draw({"kind": "uniform", "low": 0.25, "high": 2}, contents="sparse").min()) >= 0.25


def test_probabilities_sum_to_one_and_are_sharper_with_the_scale(draw):
    flat, sharp = (draw({"kind": "probabilities", "scale": scale}) for scale in (1.0, 8.0))
    for value in (flat, sharp):
        torch.testing.assert_close(value.sum(dim=-1), torch.ones(400))
        assert value.min() >= 0
    assert sharp.amax(dim=-1).mean() > flat.amax(dim=-1).mean() + 0.3


def test_log_decay_is_never_positive_and_reaches_both_ends(draw):
    decay = draw({"kind": "log_decay"})
    assert (decay.max(), decay.min()) == (0.0, -80.0)
    assert all(0.05 < float((decay == end).float().mean()) < 0.15 for end in (0.0, -80.0))
    assert draw({"kind": "log_decay", "low": -5.0, "scale": 3.0}).min() == -5.0


@pytest.mark.parametrize(
    ("dtype", "nan", "codes", "not_finite"),
    [
        ("float8_e4m3fn", False, 254, 0),
        ("float8_e4m3fn", True, 256, 2),
        ("float8_e5m2", False, 248, 0),
        ("float8_e5m2", True, 256, 8),
        ("float8_e8m0fnu", False, 255, 0),
        ("float4_e2m1", False, 256, 0),
        ("uint8", False, 256, 0),
        ("int8", False, 256, 0),
    ],
)
def test_codes_are_all_that_the_dtype_has(draw, dtype, nan, codes, not_finite):
    value = draw({"kind": "codes", "nan": nan}, dtype)
    assert int(value.view(torch.uint8).unique().numel()) == codes
    if value.dtype.is_floating_point:
        found = value.view(torch.uint8)[~torch.isfinite(value.float())]
        assert int(found.unique().numel()) == not_finite


def test_unit_rows_have_norm_one(draw):
    norms = torch.linalg.vector_norm(draw({"kind": "unit_rows"}, "bfloat16").double(), dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=4e-3, atol=0)


def test_an_axis_of_size_zero_gives_empty_tensors(draw):
    for generator, dtype in (
        (IDS, "int64"),
        ({"kind": "offsets", "high": "E"}, "int64"),
        ({"kind": "unit_rows"}, "float32"),
    ):
        assert draw(generator, dtype, rows=0).shape == (0, 16)


# -- several inputs --------------------------------------------------------------------------------------------------------

DRAW = """import torch
def draw(axes, scalars, dtypes, generator, contents):
    lengths = torch.randint(0, 9, (axes["M"],), generator=generator, device=generator.device)
    if contents == "empty":
        lengths = lengths * 0
    return {"lengths": lengths, "ends": lengths.cumsum(0).to(dtypes["ends"])}
"""


@pytest.fixture
def together(operator):
    def definition(source: str = DRAW) -> Definition:
        tensor = {"shape": ["M"], "dtype": "int64"}
        return operator(
            "return ends * lengths", inputs={"lengths": tensor, "ends": {**tensor, "dtype": "int32"}}, dtypes={},
            outputs={"out": tensor}, axes={"M": {"type": "var"}}, constraints=[], cost=None, self_test=None,
            joint_inputs={"inputs": ["lengths", "ends"], "contents": ["any", "empty"], "source": source},
        )  # fmt: skip

    return definition


def test_related_inputs_are_drawn_together_by_seed_and_contents(together):
    definition = together()
    one, same, other = (
        draw_inputs(definition, Case(Call(definition.name, {"M": 50}), seed=seed), "cpu") for seed in (1, 1, 2)
    )
    assert torch.equal(one["lengths"].cumsum(0), one["ends"].long())
    assert one["ends"].dtype == torch.int32
    assert torch.equal(one["ends"], same["ends"])
    assert not torch.equal(one["ends"], other["ends"])
    assert draws_noise(definition)
    totals = {
        int(draw_inputs(definition, Case(Call(definition.name, {"M": 50}), distribution=name), "cpu")["ends"][-1])
        for name in CONTENTS
    }
    assert min(totals) == 0 < max(totals)


@pytest.mark.parametrize(
    ("find", "replace", "code", "fact"),
    [
        ('"ends": ', '"end": ', "draw_names_differ", "lengths, end;"),
        (".to(dtypes", "[:-1].to(dtypes", "draw_differs", "(49,)"),
        ('.to(dtypes["ends"])', "", "draw_differs", "int64"),
        ('"lengths": lengths,', '"lengths": 3,', "draw_not_tensor", "'lengths'"),
        ("return {", "return None and {", "draw_names_differ", "NoneType"),
        ('axes["M"]', 'axes["N"]', "draw_raises", "KeyError"),
    ],
)
def test_what_such_a_function_returns_is_checked(together, find, replace, code, fact):
    definition = together(DRAW.replace(find, replace))
    with raises(RecordError, code, "row_scale: joint_inputs", fact):
        draw_inputs(definition, Case(Call(definition.name, {"M": 50})), "cpu")
