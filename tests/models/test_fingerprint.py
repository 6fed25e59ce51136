"""Equal code has one fingerprint; code that differs in anything it does has another."""

from __future__ import annotations

import functools

import pytest

from tilegym_db.models.upstream_code import fingerprint, source_fingerprint

CODE = """\
def forward(self, x, scale=2):
    given = x.dtype
    wide = x.float() * scale
    return self.weight * wide.to(given)
"""


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("given", "kind").replace("wide", "given"),
        CODE.replace("x, scale", "x: Tensor, scale: int").replace("):", ") -> Tensor:"),
        CODE.replace("    given", '    """What it does."""\n    # how\n    given'),
        CODE.replace("wide = ", "wide: Tensor = "),
        "    " + CODE.replace("\n", "\n    "),
    ],
)
def test_names_annotations_and_comments_do_not_count(same: str) -> None:
    assert source_fingerprint(same) == source_fingerprint(CODE) is not None


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("scale=2", "scale=3"),
        CODE.replace("* scale", "+ scale"),
        CODE.replace("self.weight", "self.bias"),
        CODE.replace("x.float()", "x.double()"),
        CODE.replace("self.weight * wide.to(given)", "(self.weight * wide).to(given)"),
        CODE.replace("x", "hidden"),
        CODE.replace("(given)", "(other)"),
    ],
)
def test_operations_attributes_constants_and_parameters_count(other: str) -> None:
    assert source_fingerprint(other) != source_fingerprint(CODE)


@pytest.mark.parametrize("text", ["", "x = 1", "class Forward: pass", "lambda x: x", "def broken(:"])
def test_what_is_no_function_has_none(text: str) -> None:
    assert source_fingerprint(text) is None


def test_code_that_cannot_be_read_has_none() -> None:
    @functools.wraps(source_fingerprint)
    def wrapper(source: str) -> str | None:
        return source_fingerprint(source)

    scope: dict[str, object] = {}
    exec("def generated(x): return x", scope)
    assert [fingerprint(function) for function in (len, scope["generated"], wrapper, None)] == [None] * 4
