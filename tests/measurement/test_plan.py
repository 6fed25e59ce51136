"""What a run selects. Pure: a catalog on disk, a machine that need not be here, options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from raising import raises

from tilegym_db.backends.toolchains import INTERPRETERS
from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.measurement.machine import Machine, Missing
from tilegym_db.measurement.plan import Options, Plan, make_plan, names_of
from tilegym_db.records.solution import config_id

HERE = Machine("cpu", "cpu", "a processor")
H200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90")
DEFAULTS = config_id({})
TRITON = "def run(x, weight, factor, out): pass\n"
SIZES = {
    "tiny": {"axes": {"M": 4, "N": 8}, "tags": ["tiny"]},
    "modest": {"axes": {"M": 100, "N": 1000}, "tags": ["cpu"]},
    "decode": {"axes": {"M": 1, "N": 4096}, "tags": ["model:llama", "stage:decode"]},
    "prefill": {"axes": {"M": 8192, "N": 4096}, "tags": ["model:llama", "stage:prefill"]},
}


@pytest.fixture
def catalog(make_catalog, tmp_path) -> Catalog:
    languages = {f"row_scale_{name}": (TRITON, {"language": name}) for name in ("triton", "tilelang", "cutile")}
    return make_catalog(tmp_path / "catalog", languages, tuple(SIZES.values()))


@pytest.fixture
def plan(catalog) -> Callable[..., Plan]:
    def make(
        *names: str,
        machine: Machine = HERE,
        done=(),
        unusable=(),
        tuned=None,
        excluded=None,
        likely_fastest=None,
        **options: object,
    ) -> Plan:
        lacks = Missing(dict(unusable), {})
        return make_plan(catalog, machine, Options(names, **options), done, lacks, excluded, tuned, likely_fastest)

    return make


def pairs(plan: Plan) -> set[str]:
    """``stock tiny``: the end of the solution's name and the kind of workload."""
    kinds = {(size["axes"]["M"], size["axes"]["N"]): kind for kind, size in SIZES.items()}
    named = set()
    for item in plan.definitions:
        workloads = {workload.uuid: kinds[workload.axes["M"], workload.axes["N"]] for workload in item.workloads}
        named |= {f"{solution.removeprefix('row_scale_')} {workloads[uuid]}" for solution, uuid in item.pairs}
    return named


def reasons(plan: Plan) -> dict[tuple[str, str], str]:
    return {(item.solution, item.workload): item.reason for item in plan.skipped}


def test_processor_times_python_and_interprets_small_calls(plan):
    made = plan()
    interpreted = {f"{language} {kind}" for language in INTERPRETERS for kind in ("tiny", "decode")}
    assert pairs(made) == {"stock tiny", "stock modest", "stock decode"} | interpreted
    item = made.definitions[0]
    assert [solution.name for solution in item.timed] == ["row_scale_stock"]
    assert {solution.name for solution in item.interpreted} == {f"row_scale_{language}" for language in INTERPRETERS}


def test_everything_left_out_has_its_reason(plan, monkeypatch):
    monkeypatch.delitem(INTERPRETERS, "cutile")
    said = reasons(plan())
    assert "too large for a CPU" in said["*", "M=8192,N=4096"]
    assert "cutile kernels run on a GPU only" in said["row_scale_cutile", "*"]
    assert said["row_scale_triton", "M=100,N=1000"] == "too large for the interpreter"


def test_a_gpu_runs_every_language_on_every_workload(plan):
    made = plan(machine=H200)
    assert made.pair_count == 16
    assert made.skipped == []


def test_one_name_may_be_given_without_a_tuple():
    assert names_of("rms_norm") == names_of(("rms_norm",)) == names_of(["rms_norm"])


def test_solution_name_brings_the_stock_code_for_its_comparison(plan):
    made = plan("row_scale_cutile", machine=H200)
    assert {name for name, _, _ in taking_part(made)} == {"cutile", "stock"}
    assert made.pair_count == 8
    assert {pair.split()[0] for pair in pairs(made)} == {"cutile"}  # stock code is measured where the kernel passes
    both = plan("row_scale_cutile", "row_scale_stock", machine=H200)
    assert {pair.split()[0] for pair in pairs(both)} == {"cutile", "stock"}


def test_stock_code_is_compared_with_new_solutions_every_time(plan, catalog):
    definition, stock = catalog.definition("row_scale"), catalog.solution("row_scale_stock")
    done = {
        (stock.digest, definition.digest, workload.uuid, DEFAULTS) for workload in catalog.workloads_for("row_scale")
    }
    made = plan(done=done)
    interpreted = {f"{language} {kind}" for language in INTERPRETERS for kind in ("tiny", "decode")}
    assert pairs(made) == interpreted
    assert made.pair_count == 2 + len(interpreted)
    assert plan("row_scale_stock", done=done).pair_count == 0


def test_a_language_brings_the_stock_code_too(plan):
    assert {pair.split()[0] for pair in pairs(plan(machine=H200, language="tilelang"))} == {"tilelang", "stock"}


@pytest.mark.parametrize(
    ("glob", "kinds"),
    [
        ("stage:decode", {"decode"}),
        ("model:*", {"decode", "prefill"}),
        ("M=1,*", {"decode"}),
        ("*", {"tiny", "modest", "decode", "prefill"}),
    ],
)
def test_a_glob_selects_workloads_by_tag_or_axes(glob, kinds, plan):
    assert {pair.split()[1] for pair in pairs(plan(machine=H200, workload=glob))} == kinds


def test_a_uuid_selects_one_workload(plan, catalog):
    uuid = catalog.workloads_for("row_scale")[3].uuid
    assert {pair.split()[1] for pair in pairs(plan(machine=H200, workload=uuid))} == {"prefill"}


def test_workload_beyond_the_memory_is_left_out_with_reason(plan):
    """Of 8192 x 4096 in float32, four contents with slots and fp64 outputs need 2.7 GB."""
    small = replace(H200, memory_bytes=2 << 30)
    made = plan(machine=small)
    assert {pair.split()[1] for pair in pairs(made)} == {"tiny", "modest", "decode"}
    assert [item for item in made.skipped if item.workload == "M=8192,N=4096" and "at least 3 GB" in item.reason]
    assert "prefill" in {pair.split()[1] for pair in pairs(plan(machine=replace(small, memory_bytes=3 << 30)))}
    assert pairs(plan(machine=H200)) == pairs(plan(machine=replace(H200, memory_bytes=140 << 30)))


def test_requested_workload_runs_on_a_processor_at_any_size(plan):
    assert pairs(plan(workload="stage:prefill")) == {"stock prefill"}


@pytest.mark.parametrize("machine", [HERE, H200])
def test_a_glob_that_selects_nothing_is_wrong_usage(machine, plan):
    with raises(UsageError, "workload_unmatched", "'stage:decoding'"):
        plan(machine=machine, workload="stage:decoding")


def test_quick_takes_a_suitable_workload_of_each_kind(plan):
    assert {pair.split()[1] for pair in pairs(plan(quick=True))} == {"tiny", "modest"}
    assert {pair.split()[1] for pair in pairs(plan(quick=True, machine=H200))} == {"decode", "prefill"}


def test_what_has_a_trace_is_not_measured_again_unless_asked(plan, catalog):
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_stock")
    tiny = catalog.workloads_for("row_scale")[0]
    done = {(solution.digest, definition.digest, tiny.uuid, DEFAULTS)}
    made = plan(done=done)
    assert "stock tiny" not in pairs(made)
    assert "triton tiny" in pairs(made)
    assert "already measured" in reasons(made)["row_scale_stock", "M=4,N=8"]
    assert "stock tiny" in pairs(plan(done=done, force=True))


def test_trace_of_another_source_or_meaning_does_not_count(plan, catalog):
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_stock")
    tiny = catalog.workloads_for("row_scale")[0]
    for done in ((solution.digest, "another", tiny.uuid), ("another", definition.digest, tiny.uuid)):
        assert "stock tiny" in pairs(plan(done={(*done, DEFAULTS)}))


@pytest.fixture
def tuned(catalog) -> dict[tuple[str, str, str], dict[str, int]]:
    """A config for the Triton kernel on the workloads ``tiny`` and ``decode``."""
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_triton")
    tiny, _, decode, _ = catalog.workloads_for("row_scale")
    return {
        (solution.digest, definition.digest, tiny.uuid): {"BLOCK": 2},
        (solution.digest, definition.digest, decode.uuid): {"BLOCK": 8},
    }


def test_what_tune_found_is_measured_beside_the_defaults(plan, catalog, tuned):
    made = plan("row_scale_triton", machine=H200, tuned=tuned)
    (item,) = made.definitions
    solution = catalog.solution("row_scale_triton")
    assert item.configs_of(solution) == [{}, {"BLOCK": 2}, {"BLOCK": 8}]
    tiny = catalog.workloads_for("row_scale")[0]
    assert [item.takes_part(solution, tiny, config) for config in item.configs_of(solution)] == [True, True, False]
    assert made.pair_count == 4 + 4 + 2  # stock and the kernel on every workload, and the kernel twice more


def test_each_config_has_a_done_and_an_excluded_of_its_own(plan, catalog, tuned):
    pairs_of = list(tuned)
    solution = catalog.solution("row_scale_triton")
    others = {
        (*pair[:2], workload.uuid, DEFAULTS) for pair in pairs_of for workload in catalog.workloads_for("row_scale")
    }
    made = plan(
        "row_scale_triton",
        machine=H200,
        tuned=tuned,
        done=others | {(*pairs_of[0], config_id({"BLOCK": 2}))},
        excluded={(*pairs_of[1], DEFAULTS): "did not pass the screen: TIMEOUT"},
    )
    (item,) = made.definitions
    assert item.tuned == {(solution.name, pairs_of[1][2]): {"BLOCK": 8}}
    said = reasons(made)
    assert "already measured" in said["row_scale_triton[BLOCK=2]", "M=4,N=8"]
    assert said["row_scale_triton", "M=1,N=4096"] == "did not pass the screen: TIMEOUT"
    assert item.takes_part(catalog.solution("row_scale_stock"), catalog.workloads_for("row_scale")[2], {})


def test_an_interpreter_runs_the_defaults_only(plan, tuned):
    assert plan("row_scale_triton", tuned=tuned).pair_count == plan("row_scale_triton").pair_count


def test_language_without_its_toolchain_is_left_out_with_the_fix(plan):
    missing = {"cutile": "cutile cannot be used here: ... Fix: pip install 'tilegym-db[cutile]'"}
    made = plan(machine=H200, unusable=missing)
    assert {pair.split()[0] for pair in pairs(made)} == {"stock", "triton", "tilelang"}
    assert "pip install 'tilegym-db[cutile]'" in reasons(made)["row_scale_cutile", "*"]


def test_an_unknown_name_suggests_the_nearest(plan):
    with raises(NotFoundError, "name_unknown", "'row_scal'", "'row_scale'"):
        plan("row_scal")
    with raises(NotFoundError, "name_unknown", "'row_scale_triton'"):
        plan("row_scale_tritom")


def test_an_unknown_language_lists_the_known_ones(plan):
    with raises(UsageError, "language_unknown", "'cuda'", "python, triton, tilelang, cutile"):
        plan(language="cuda")


def test_an_operator_without_solutions_is_nothing_to_run(make_catalog, tmp_path):
    import shutil

    made = make_catalog(tmp_path / "open")
    shutil.rmtree(tmp_path / "open" / "solutions")
    with raises(UsageError, "nothing_selected"):
        make_plan(Catalog(made.roots), HERE, Options(("row_scale",)), ())


# -- the likely fastest -----------------------------------------------------------------------------------------------


@pytest.fixture
def held_by(catalog) -> Callable[..., dict]:
    """``held_by("cutile", ("tilelang", {...}))``: the fastest so far where one token is decoded, and those that come close."""
    workload = catalog.workloads_for("row_scale")[2]

    def hold(*likely_fastest: str | tuple[str, dict]) -> dict:
        pairs = [(item, {}) if isinstance(item, str) else item for item in likely_fastest]
        found = [(f"row_scale_{language}", config) for language, config in pairs]
        return {(catalog.definition("row_scale").digest, workload.uuid): found}

    return hold


def taking_part(plan: Plan) -> set[tuple[str, str, str]]:
    """(end of the Solution's name, kind of workload, config) of everything that will be measured."""
    kinds = {(size["axes"]["M"], size["axes"]["N"]): kind for kind, size in SIZES.items()}
    return {
        (solution.name.removeprefix("row_scale_"), kinds[workload.axes["M"], workload.axes["N"]], str(config or ""))
        for item in plan.definitions
        for solution, config in item.candidates()
        for workload in item.workloads
        if item.takes_part(solution, workload, config)
    }


def test_new_solution_is_screened_beside_the_fastest_so_far(plan, held_by):
    made = plan("row_scale_triton", machine=H200, workload="model:*", likely_fastest=held_by("cutile", "tilelang"))
    assert taking_part(made) == {
        ("stock", "decode", ""),
        ("stock", "prefill", ""),
        ("triton", "decode", ""),
        ("triton", "prefill", ""),
        ("cutile", "decode", ""),
    }
    assert made.pair_count == 5


def test_it_is_promoted_beside_all_that_may_be_the_fastest(plan, held_by, catalog):
    found = held_by("cutile", ("tilelang", {"threads": 4}))
    made = plan("row_scale_triton", machine=H200, workload="M=1,*", tier="promotion", likely_fastest=found)
    assert taking_part(made) == {
        ("stock", "decode", ""),
        ("triton", "decode", ""),
        ("cutile", "decode", ""),
        ("tilelang", "decode", "{'threads': 4}"),
    }
    (item,) = made.definitions
    (workload,) = item.workloads
    assert item.configured(workload) == 1
    current_best = [s.name for s in item.timed for c in item.configs_of(s) if item.is_current_best(s, workload, c)]
    assert current_best == ["row_scale_cutile"]


def test_participants_are_not_reported_as_left_out(plan, held_by, catalog):
    (key,) = found = held_by("cutile")
    done = {(catalog.solution(f"row_scale_{name}").digest, *key, DEFAULTS) for name in ("cutile", "tilelang")}
    made = plan(machine=H200, workload="M=1,*", done=done, likely_fastest=found)
    assert {name for name, _, _ in taking_part(made)} == {"stock", "triton", "cutile"}
    assert reasons(made) == {("row_scale_tilelang", "M=1,N=4096"): "already measured (--force repeats it)"}


def test_no_solution_is_measured_again_just_to_be_compared(plan, held_by, catalog):
    mine = held_by("triton")
    made = plan("row_scale_triton", machine=H200, workload="M=1,*", likely_fastest=mine)
    assert made.definitions[0].likely_fastest == {}
    assert taking_part(plan("row_scale_stock", machine=H200, workload="M=1,*", likely_fastest=mine)) == {
        ("stock", "decode", "")
    }
    (key,) = mine
    done = {(catalog.solution("row_scale_triton").digest, *key, DEFAULTS)}
    config = {"TILE": 4}
    tuned = {(catalog.solution("row_scale_triton").digest, *key): config}
    made = plan("row_scale_triton", machine=H200, workload="M=1,*", done=done, tuned=tuned, likely_fastest=mine)
    assert taking_part(made) == {("stock", "decode", ""), ("triton", "decode", ""), ("triton", "decode", str(config))}


def test_where_stock_code_is_the_fastest_it_is_the_current_best(plan, held_by):
    made = plan("row_scale_triton", machine=H200, workload="M=1,*", likely_fastest=held_by("stock"))
    (item,) = made.definitions
    stock = next(solution for solution in item.timed if solution.name == "row_scale_stock")
    assert item.is_current_best(stock, item.workloads[0], {})


@pytest.mark.parametrize("why", ["its language is missing", "it failed the screen", "the run is quick"])
def test_one_of_the_likely_fastest_stays_away_where(why, plan, held_by, catalog):
    (key,) = found = held_by("cutile")
    options = {
        "its language is missing": {"unusable": {"cutile": "missing"}},
        "it failed the screen": {
            "excluded": {(catalog.solution("row_scale_cutile").digest, *key, DEFAULTS): "did not pass"},
            "tier": "promotion",
        },
        "the run is quick": {"quick": True},
    }[why]
    made = plan("row_scale_triton", machine=H200, workload="M=1,*", likely_fastest=found, **options)
    assert {name for name, _, _ in taking_part(made)} == {"stock", "triton"}


def test_interpreted_solution_has_no_competitor(plan, held_by):
    assert (
        plan("row_scale_triton", workload="M=1,*", likely_fastest=held_by("stock")).definitions[0].likely_fastest == {}
    )


def test_operators_are_measured_in_the_order_of_the_names():
    made = make_plan(Catalog.default(), HERE, Options(("swiglu_triton", "rms_norm_stock")), done=())
    assert [item.definition.name for item in made.definitions] == ["swiglu", "rms_norm"]
