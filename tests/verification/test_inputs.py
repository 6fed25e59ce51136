from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tilegym_db.records import Workload
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.distributions import (
    BLANK,
    CONTENTS,
    DISTRIBUTIONS,
    MODIFIERS,
    PLANTED,
    STEPS,
    are_contents,
    modified,
    ragged_lengths,
    styles_of,
    vary_scalars,
)
from tilegym_db.verification.inputs import draw_inputs, nearly_same


def without_dtypes(case: Case) -> Case:
    return replace(case, call=replace(case.call, dtypes={}))


def case(distribution: str = "normal", seed: int = 1, dtype: str = "float32", **axes: int) -> Case:
    return Case(
        Call("row_scale", axes or {"M": 64, "N": 128}, {"T": dtype}, scalars={"factor": 2.0}),
        distribution=distribution,
        seed=seed,
    )


@pytest.mark.parametrize("distribution", CONTENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_seed_draws_equal_contents_and_another_does_not(distribution, dtype, operator):
    definition = operator()
    one, same, other = (draw_inputs(definition, case(distribution, seed, dtype), "cpu") for seed in (1, 1, 2))
    assert list(one) == ["x", "weight", "factor"]
    assert one["factor"] == 2.0
    assert torch.equal(one["x"].view(torch.uint8), same["x"].view(torch.uint8))
    assert not torch.equal(one["x"], other["x"])
    assert (tuple(one["x"].shape), str(one["x"].dtype)) == ((64, 128), f"torch.{dtype}")


def test_two_inputs_of_one_shape_get_different_contents(operator):
    tensor = {"shape": ["M", "N"], "dtype": "T"}
    definition = operator("return x + y", inputs={"x": tensor, "y": tensor}, self_test=None)
    drawn = draw_inputs(definition, case(), "cpu")
    assert not torch.equal(drawn["x"], drawn["y"])


def test_small_integers_are_integers_that_sum_exactly(operator):
    x = draw_inputs(operator(), case("small_integers"), "cpu")["x"]
    assert torch.equal(x, x.round())
    assert x.abs().max() <= 4


def test_constant_rows_are_constant_along_the_last_axis_only(operator):
    x = draw_inputs(operator(), case("constant_rows"), "cpu")["x"]
    assert torch.equal(x, x[:, :1].expand_as(x))
    assert len(x[:, 0].unique()) == 64


def test_outliers_are_rare_and_large(operator):
    x = draw_inputs(operator(), case("outliers", M=256, N=256), "cpu")["x"]
    assert 20 < int((x.abs() > 8).sum()) < 200


def test_one_hot_rows_have_a_single_one_or_nothing_at_all(operator):
    x = draw_inputs(operator(), case("one_hot", M=256, N=32), "cpu")["x"]
    assert set(x.unique().tolist()) == {0.0, 1.0}
    assert set(x.sum(dim=1).tolist()) == {0.0, 1.0}
    assert len(x.argmax(dim=1).unique()) > 16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_quarter_of_the_largest_number_comes_in_both_signs(dtype, operator):
    definition = operator(dtypes={"T": [dtype]})
    x = draw_inputs(definition, case("max_quarter", dtype=dtype), "cpu")["x"]
    quarter = torch.finfo(x.dtype).max / 4
    assert set((x.double() / quarter).round(decimals=2).unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.5), ("bfloat16", 0.5), ("float16", 1.0)])
def test_subnormals_are_not_zero(dtype, share, operator):
    definition = operator(dtypes={"T": [dtype]})
    x = draw_inputs(definition, case("subnormals", dtype=dtype), "cpu")["x"]
    subnormal = (x != 0) & (x.abs().double() < torch.finfo(x.dtype).tiny)
    assert float(subnormal.double().mean()) == pytest.approx(share, abs=0.05)


def test_ties_are_everywhere(operator):
    x = draw_inputs(operator(), case("ties"), "cpu")["x"]
    assert len(x.unique()) == 3
    assert all(len(row.unique()) == 3 for row in x)


def test_row_scales_stay_finite_in_half_precision(operator):
    definition = operator(dtypes={"T": ["float16"]})
    x = draw_inputs(definition, case("row_scale", dtype="float16"), "cpu")["x"].float()
    assert torch.isfinite(x).all()
    assert x.norm(dim=1).max() / x.norm(dim=1).min() > 16


@pytest.mark.parametrize(
    ("special_values", "found"),
    [(["nan", "inf"], {"nan", "inf", "-inf"}), (["nan"], {"nan"}), ([], set())],
)
def test_only_special_values_allowed_by_the_operator_are_planted(special_values, found, operator):
    definition = operator(special_values=special_values)
    planted: set[str] = set()
    for seed in range(3):  # two may fall on one place
        x = draw_inputs(definition, case(PLANTED, seed), "cpu")["x"]
        planted |= {str(float(value)) for value in x[~torch.isfinite(x)]}
    assert planted == found


def test_vector_kind_varies_by_seed_unless_rows_would_drown(operator):
    def weight(distribution: str, seed: int) -> torch.Tensor:
        return draw_inputs(operator(), case(distribution, seed), "cpu")["weight"]

    assert all(0.5 < weight("normal", seed).std() < 1.5 for seed in range(20))
    spread = [float(weight("row_scale", seed).abs().max()) for seed in range(40)]
    assert min(spread) < 0.1
    assert max(spread) > 50
    integers = weight("small_integers", 1)
    assert torch.equal(integers, integers.round())


@pytest.mark.parametrize(
    ("contents", "holds"),
    [
        ("tiny", lambda x: x.abs().max() < 0.2),
        ("large", lambda x: x.abs().max() > 20),
        ("shifted", lambda x: (x.mean(1).abs() > 2.5 * x.std(1)).all()),
        ("channels", lambda x: x.abs().amax(0).max() > 2.5 * x.abs().amax(0).median()),
        ("sparse", lambda x: (x == 0).float().mean() > 0.8 and (x == 0).all(dim=1).any()),
        ("sorted_rows", lambda x: (x.diff(dim=1) >= 0).all() or (x.diff(dim=1) <= 0).all()),
    ],
)
def test_ranges_are_what_their_names_say(contents, holds, operator):
    for seed in range(10):
        assert holds(draw_inputs(operator(), case(contents, seed), "cpu")["x"])


def test_at_most_one_input_is_loud_and_noise_takes_part(operator):
    tensor = {"shape": ["M", "N"], "dtype": "T"}
    generators = {"y": {"kind": "normal"}}
    definition = operator(
        "return x + y", inputs={"x": tensor, "y": tensor}, input_generators=generators, self_test=None
    )
    loud: set[str] = set()
    for seed in range(20):
        styles = styles_of(definition, "large", seed)
        assert sorted(styles.values()) == ["large", "normal"]
        loud |= {name for name, style in styles.items() if style == "large"}
    assert loud == {"x", "y"}
    assert styles_of(definition, "row_scale", 1)["y"] == "normal"
    assert {styles_of(definition, "tiny", seed)["y"] for seed in range(5)} == {"tiny"}


def test_scalars_vary_over_decades_and_grow_for_easy_contents(operator):
    def factors(distribution: str) -> list[float]:
        return [vary_scalars(operator(), {"factor": 2.0}, distribution, seed)["factor"] for seed in range(200)]

    assert min(factors("normal")) < 0.01
    assert max(factors("normal")) > 100
    assert max(factors("row_scale")) == 2.0
    assert set(factors("small_integers")) == {2.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_codes_end_groups_at_or_beside_a_code(dtype, operator):
    step, found = torch.finfo(getattr(torch, dtype)).eps, set()
    for seed in range(20):
        drawn = replace(case(STEPS, dtype=dtype, M=8, N=1024), seed=seed)
        x = draw_inputs(operator(), drawn, "cpu")["x"].double()
        mantissa, exponent = torch.frexp(x.abs())
        others = torch.arange(1024) % 32 != 0
        between = mantissa[1:, others] * 32  # four bits behind the point: odd ones lie between two codes
        assert torch.equal(between, between.round())
        assert bool((between % 2 == 1).any())
        assert int(exponent.max() - exponent.min()) > 15
        largest = torch.frexp(x[:, ~others].abs()).mantissa
        beside = (largest[..., None] - torch.tensor([0.5, 0.75, 0.875, 1.0])).abs().amin(dim=-1)
        assert float(beside.max()) <= 2 * step
        found |= set((beside > 0).flatten().tolist())
    assert found == {True, False}


def test_only_the_case_of_small_integers_is_exact():
    assert {name for name in DISTRIBUTIONS if case(name).exact} == {"small_integers"}


def test_one_row_is_masked_if_infinities_are_defined(operator):
    def masked(rows: int, **changes: object) -> int:
        x = draw_inputs(operator(**changes), case(PLANTED, M=rows, N=64), "cpu")["x"]
        return int((x == -math.inf).sum(dim=1).ge(62).sum())  # two specials may lie in the masked row

    assert masked(4) == masked(100) == 1
    assert masked(3) == 0
    assert masked(100, special_values=["nan"]) == 0


def test_generated_inputs_stay_in_bounds_and_follow_the_axes(operator):
    tensor = {"shape": ["M", "N"], "dtype": "float32"}
    definition = operator(
        "return x * 0",
        inputs={"x": tensor, "p": tensor, "index": {"shape": ["M"], "dtype": "int64"}},
        input_generators={
            "p": {"kind": "uniform", "low": 0.25, "high": 0.5},
            "index": {"kind": "integers", "low": 0, "high": "N"},
        },
        outputs={"out": tensor},
        dtypes={},
        cost=None,
        self_test=None,
    )
    drawn = draw_inputs(definition, without_dtypes(case(M=4000, N=7)), "cpu")
    assert 0.25 <= drawn["p"].min() <= drawn["p"].max() < 0.5
    assert sorted(drawn["index"].unique().tolist()) == list(range(7))


def test_rotary_tables_are_of_one_angle_each(operator):
    tensor = {"shape": ["M", "N"], "dtype": "float32"}
    definition = operator(
        "return cos * 0",
        inputs={"cos": tensor, "sin": tensor},
        input_generators={"cos": {"kind": "rotary_cos"}, "sin": {"kind": "rotary_sin"}},
        outputs={"out": tensor},
        dtypes={},
        cost=None,
        self_test=None,
    )
    starts, bases, squares = set(), set(), set()
    for seed in range(40):
        drawn = draw_inputs(definition, without_dtypes(case(seed=seed, M=5, N=8)), "cpu")
        square = drawn["cos"].double() ** 2 + drawn["sin"].double() ** 2
        assert torch.allclose(square, square[0, 0].expand(5, 8))
        assert torch.equal(drawn["cos"][:, :4], drawn["cos"][:, 4:])
        angles = torch.atan2(drawn["sin"], drawn["cos"])
        starts.add(round(float(angles[0, 0]), 4))
        bases.add(round(float(angles[:, 1].diff()[-1] % math.tau), 4))
        squares.add(round(float(square[0, 0]), 3))
    assert len(starts) > 15, "positions are the same from call to call"
    assert len(bases) > 2
    assert {1.0, 1.96} <= squares, "cos**2 + sin**2 is no 1 in every model"


def test_an_axis_of_size_zero_gives_empty_tensors(operator):
    assert draw_inputs(operator(), case(PLANTED, M=0, N=4), "cpu")["x"].shape == (0, 4)


def test_a_workload_fixes_sizes_scalars_scales_and_strides(operator, workload_record):
    definition = operator()
    inputs = {"factor": {"type": "scalar", "value": 3.0}, "x": {"type": "random", "scale": 100.0}}
    record = workload_record(inputs=inputs, layouts={"x": "strided(N + 8, 1)"})
    drawn_case = Case.of_workload(definition, Workload.from_dict(record), distribution="normal", seed=1)
    plain = replace(drawn_case, scales={})
    assert drawn_case.strides(definition, "x") == (16, 1)
    assert drawn_case.strides(definition, "out") == (8, 1)
    assert drawn_case.call.scalars == {"factor": 3.0}
    x, unscaled = (draw_inputs(definition, item, "cpu")["x"] for item in (drawn_case, plain))
    assert torch.allclose(x, unscaled * 100)


def changed(modifier: str, seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (64, 128)):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    return value, modified(value.clone(), (modifier,), generator, dtype)


def test_padding_covers_whole_leading_tiles_and_other_lengths():
    lengths = [(changed("padded", seed)[1] == -torch.inf).int().cummin(dim=-1).values.sum(dim=-1) for seed in range(40)]
    found = torch.cat(lengths)
    assert {0, 16, 32, 64, 128} <= {*found.tolist()}
    assert bool((found % 16 != 0).any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_massive_channels_reach_the_end_of_short_dtypes(dtype):
    largest = torch.tensor([float(changed("massive", seed, dtype)[1].abs().max()) for seed in range(200)])
    assert largest.to(dtype).isfinite().all()
    assert largest.max() > (5e4 if dtype == torch.float16 else 1e9)
    assert largest.min() < 2e4


def test_clustered_winners_lie_in_blocks_strides_and_near_ties():
    shares = set()
    for seed in range(60):
        value, lifted = changed("clustered", seed)
        places = lifted[0].topk(int((lifted[0] != value[0]).sum())).indices.sort().values
        shares.add(tuple(places.diff().unique().tolist()[:1]))
    assert {(1,), (2,), (4,)} <= shares


def test_equal_rows_are_equal_but_for_at_most_one():
    differing = {
        int((rows != rows.mode(dim=0).values).any(dim=1).sum())
        for seed in range(20)
        for _, rows in [changed("equal_rows", seed)]
    }
    assert differing == {0, 1}


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (2, 3, 7)])
def test_modifiers_keep_shape_and_dtype_of_small_tensors(modifier, shape):
    for seed in range(8):
        value, found = changed(modifier, seed, torch.bfloat16, shape)
        assert (found.shape, found.dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("groups", [1, 2, 9, 300])
@pytest.mark.parametrize("total", [0, 1, 50, 5000])
def test_ragged_lengths_add_up_with_empty_ends(groups, total):
    found = [ragged_lengths(total, groups, torch.Generator().manual_seed(seed)) for seed in range(12)]
    assert {int(lengths.sum()) for lengths in found} == {total}
    assert min(int(lengths.min()) for lengths in found) >= 0
    if groups == 9 and total == 5000:
        assert {bool(lengths[0] == 0) for lengths in found} == {True, False}


def test_contents_are_a_distribution_and_known_modifiers():
    assert are_contents("normal")
    assert are_contents("tiny+clustered+ragged")
    assert not are_contents("clustered")
    assert not are_contents("normal+unheard_of")


@pytest.mark.parametrize("seed", range(20))
def test_nearly_the_same_inputs_differ_in_one_or_two_places(seed, operator):
    inputs = {"x": torch.randn(9, 17), "weight": torch.randn(17), "factor": 2.0}
    found = nearly_same(operator(), inputs, seed)
    assert found is not None
    changed = [name for name in ("x", "weight") if not torch.equal(found[name], inputs[name])]
    assert len(changed) == 1
    alike = changed == ["weight"] and len(found["weight"].unique()) == 2
    if not alike:
        assert 1 <= int((found[changed[0]] != inputs[changed[0]]).sum()) <= 2


def test_a_weight_is_at_times_alike_except_in_one_place(operator):
    inputs = {"x": torch.randn(9, 17), "weight": torch.randn(17), "factor": 2.0}
    found = [nearly_same(operator(), inputs, seed) for seed in range(100)]
    alike = [one["weight"] for one in found if one is not None and len(one["weight"].unique()) == 2]
    assert len(alike) >= 20
    assert all(int((one != one.mode().values).sum()) == 1 for one in alike)
    assert all(one is None or len(one["x"].unique()) > 2 for one in found)


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 1), (100, 130), (3, 5)])
def test_blank_contents_keep_some_element(shape):
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        assert modified(torch.ones(shape), (BLANK,), generator, torch.float32).any()


def test_scalars_of_one_and_powers_come_up_within_the_range(operator):
    found = [vary_scalars(operator(), {"factor": 0.5}, "normal", seed)["factor"] for seed in range(200)]
    assert {1.0, 2.0, 0.1} <= {*found}
    assert all(0.5e-3 * 0.999 <= one <= 50.001 for one in found)
