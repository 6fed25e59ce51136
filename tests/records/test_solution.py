from __future__ import annotations

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.solution import signature_problem


@pytest.fixture
def make(solution_record):
    return lambda **changes: Solution.from_dict(solution_record(**changes), "solution.json")


@pytest.fixture
def definition(definition_record):
    return Definition.from_dict(definition_record())


AXES, BF16 = {"M": 4, "N": 8}, {"T": "bfloat16"}


@pytest.mark.parametrize(
    ("spec", "layouts", "target", "reason"),
    [
        ({}, None, None, None),
        ({"dtypes": {"T": ["float32"]}}, None, None, "dtype T=bfloat16 is not among float32"),
        ({"constraints": ["N % 16 == 0"]}, None, None, "its constraint N % 16 == 0 excludes this shape"),
        (
            {"constraints": ["N < 2**(2**(2**(2**N)))"]},
            None,
            None,
            "its constraint has no value here: 'N < 2**(2**(2**(2**N)))' is out of range at M=4, N=8",
        ),
        ({}, {"x": "row_contiguous"}, None, "it reads x as contiguous, not row_contiguous"),
        ({"layouts": {"x": "strided"}}, {"x": "row_contiguous"}, None, None),
        ({"language": "triton", "target_hardware": ["sm_90"]}, None, "sm_80", "it is not declared for sm_80"),
        ({"language": "python", "target_hardware": ["sm_90"]}, None, "sm_80", "it is not declared for sm_80"),
        ({"language": "python", "target_hardware": ["sm_90"]}, None, "cpu", "it is not declared for cpu"),
        ({"language": "python"}, None, "cpu", None),
    ],
)
def test_a_solution_says_why_it_does_not_serve_a_request(make, spec, layouts, target, reason):
    assert make(spec=spec).unsupported(AXES, BF16, layouts, target=target) == reason


def test_configs_are_the_product_of_the_tunables(make):
    assert list(make().configs()) == [{}]
    configs = list(make(spec={"tunables": {"BLOCK": [1, 2], "stages": [3]}}).configs())
    assert configs == [{"BLOCK": 1, "stages": 3}, {"BLOCK": 2, "stages": 3}]


def test_the_digest_covers_spec_and_sources_but_not_the_name(make):
    sources = {"kernel.py": b"a", "b.py": b"c"}
    digest = make().digest(sources)
    assert make(name="other", description="other").digest(sources) == digest
    assert make(spec={"deterministic": False}).digest(sources) != digest
    assert make().digest({"kernel.py": b"ab", "py": b"c"}) != digest


@pytest.mark.parametrize("path", ["", ".", "a/../b.py", "/a.py", "a//b.py", "./a.py", "a\\b.py"])
def test_a_source_path_stays_inside_the_folder(make, path):
    with raises(RecordError, "source_path_outside", repr(path)):
        make(sources=[{"path": "kernel.py"}, {"path": path}])


def test_only_a_baseline_compiles_at_run_time(make):
    with raises(RecordError, "compile_not_baseline"):
        make(spec={"provides": "compile"})
    assert make(spec={"provides": "compile", "role": "baseline"}).spec.role == "baseline"


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("def run(x, weight, factor, out): ...", True),
        ("def run(a, b, c, d, *, BLOCK=1): ...", True),
        ("def run(x, weight, factor, out, BLOCK=1): ...", True),
        ("def run(*arguments, **config): ...", True),
        ("def run(x, weight, factor): ...", False),
        ("def run(x, weight, factor, out, more): ...", False),
        ("def run(x, weight, factor, out, *, BLOCK): ...", False),
        ("def run(x, weight, factor, out): ...\ndef run(x): ...", False),
    ],
)
def test_the_entry_point_must_take_what_it_is_given(make, definition, source, fits):
    assert (signature_problem(make(), source, definition) is None) == fits


@pytest.mark.parametrize(
    ("passes_outputs", "arguments", "other"),
    [(True, "x, weight, factor", "false"), (False, "x, weight, factor, out", "true"), (True, "x", None)],
)
def test_kernel_of_the_other_style_hears_which_word_fits_it(definition, make, passes_outputs, arguments, other):
    record = make(spec={"destination_passing_style": passes_outputs})
    problem = signature_problem(record, f"def run({arguments}): ...", definition)
    assert problem is not None
    assert (f'"destination_passing_style": {other}' in problem) == (other is not None)


def test_tunables_arrive_as_keyword_arguments(make, definition):
    record = make(spec={"tunables": {"BLOCK": [1]}})
    assert signature_problem(record, "def run(x, weight, factor, out, *, BLOCK=1): ...", definition) is None
    problem = signature_problem(record, "def run(x, weight, factor, out): ...", definition)
    assert problem is not None
    assert "does not accept the tunable 'BLOCK'" in problem
