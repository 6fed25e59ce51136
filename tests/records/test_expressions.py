from __future__ import annotations

import ast
import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records.expressions import evaluate, evaluate_bool, evaluate_int, names_in, parse_expression

AXES = {"M": 7, "N": 4096, "K": 3}

names = st.sampled_from(list(AXES))
terms = st.one_of(st.integers(0, 1000).map(str), names)


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(
        inner, st.sampled_from(["+", "-", "*", "//", "%", "<", "<=", "==", "!=", ">", ">=", "and", "or"]), inner
    )
    return st.one_of(
        binary.map(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"),
        inner.map(lambda part: f"(-{part})"),
        inner.map(lambda part: f"(not {part})"),
        st.tuples(inner, inner).map(lambda pair: f"min({pair[0]}, {pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
    )


expressions = st.recursive(terms, grow, max_leaves=8).filter(lambda text: len(text) <= 400)


class TruthValues(ast.NodeTransformer):
    """'and' and 'or' give a truth value in expressions, and one of the operands in Python."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        self.generic_visit(node)
        return ast.Call(ast.Name("bool", ast.Load()), [node], [])


def pythons_answer(text: str) -> object:
    """The value that Python gives; the texts are made above, of nothing but arithmetic."""
    tree = ast.fix_missing_locations(TruthValues().visit(ast.parse(text, mode="eval")))
    return eval(compile(tree, text, "eval"), {"__builtins__": {}, "min": min, "max": max, "bool": bool}, dict(AXES))


@given(expressions)
@example("(-(-(1 - (0 or M))))")
def test_arithmetic_means_what_it_means_in_python(text):
    try:
        expected = pythons_answer(text)
    except ZeroDivisionError:
        with raises(RecordError, "division_by_zero"):
            evaluate(text, AXES)
    else:
        assert evaluate(text, AXES) == expected


@given(st.text(max_size=60))
def test_any_text_is_either_arithmetic_or_refused(text):
    try:
        parse_expression(text)
    except RecordError:
        return
    for call in (lambda: evaluate(text, AXES), lambda: names_in(text)):
        with contextlib.suppress(RecordError):
            call()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "M.real",
        "M[0]",
        "[M]",
        "lambda: 1",
        "M if N else K",
        "f'{M}'",
        "'text'",
        "None",
        "1j",
        "M := 3",
        "min(M)",
        "ceil_div(M)",
        "ceil_div(M, N, K)",
        "abs(M)",
        "min(*M, N)",
        "min(M, N, key=K)",
        "sizeof(M + 1)",
        "M in N",
        "M is N",
        "M @ N",
        "M << 60",
        "~M",
        "",
        "M +",
        "M; N",
        "(" * 300,
    ],
)
def test_whatever_is_not_arithmetic_is_refused(text):
    with raises(RecordError, "expression_syntax"):
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_div(N, 128)", 32),
        ("ceil_div(M, 2)", 4),
        ("2 * M * N * sizeof(T)", 2 * 7 * 4096 * 2),
        ("N * sizeof(float4_e2m1)", 2048),
        ("2 <= K < 4", True),
        ("2 <= K < 3", False),
        ("K % 2 == 0 or K == 3", True),
        ("N / 8192", 0.5),
        ("M ** 2", 49),
    ],
)
def test_the_forms_that_records_use(text, value):
    assert evaluate(text, AXES, {"T": "bfloat16"}) == value


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("10 ** 10 ** 10", "number_out_of_range", "10 ** 10 ** 10"),
        ("(" + " * ".join(["N"] * 40) + ")", "number_out_of_range", "K=3, M=7, N=4096"),
        ("1e999", "number_out_of_range", "1e999"),
        ("1e999 - 1e999", "number_out_of_range", "1e999"),
        ("M // (K - 3)", "division_by_zero", "K=3, M=7, N=4096"),
        ("H", "name_without_value", "'H'"),
        ("sizeof(U)", "name_without_value", "sizeof(U)"),
        ("M " + "+ M " * 200, "expression_too_long", "400"),
    ],
)
def test_what_has_no_value_names_the_text_and_the_sizes(text, code, name):
    with raises(RecordError, code, name):
        evaluate(text, AXES)


def test_a_shape_must_be_a_whole_number():
    assert evaluate_int("N // 128", AXES) == 32
    assert evaluate_int(5, AXES) == 5
    with raises(RecordError, "number_not_whole", "3.5"):
        evaluate_int("M / 2", AXES)


def test_names_are_split_into_axes_and_dtype_variables():
    assert names_in("ceil_div(M, N) * sizeof(T) + sizeof(float32)") == ({"M", "N"}, {"T"})
    assert evaluate_bool("M", AXES) is True
