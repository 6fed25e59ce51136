"""The check of the language of code and pages."""

from __future__ import annotations

import check_language
import pytest


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('def size():\n    """The size."""\n', "1"),
        ('def size():\n    """Returns the size."""\n', "1"),
        ('class Size:\n    """What a size is."""\n', "1"),
        ("# a kernel that nobody calls\n", "2"),
        ("# a kernel who returns\n", "2"),
        ('TEXT = "a folder of its own"\n', "5"),
    ],
)
def test_source_that_breaks_a_rule_is_found(source: str, rule: str):
    assert [found for _, found, _ in check_language.check_source(source)] == [rule]


@pytest.mark.parametrize(
    "source",
    [
        'def size():\n    """Return the size."""\n',
        'class Size:\n    """A size in bytes."""\n',
        '@property\ndef size(self):\n    """The size in bytes."""\n',
        "# for people who write kernels\n",
        "# `whoever` is a name here\n",
        'ROWS = {"told": 1}\n',
        'TEXT = f"{who}: {reason}"\n',
    ],
)
def test_source_in_plain_words_passes(source: str):
    assert check_language.check_source(source) == []


def test_strings_of_a_test_are_data_but_docstrings_are_not():
    source = '"""A page that nobody reads."""\nTEXT = "nobody reads it"\n# nobody reads it\n'
    found = check_language.check_source(source, is_test=True, has_data=True)
    assert sorted(line for line, _, _ in found) == [1, 3]


def test_code_in_a_page_is_not_checked():
    assert check_language.check_page("```\nnobody\n```\n`whom`\n") == []
    assert [line for line, _, _ in check_language.check_page("fine\nnobody calls it\n")] == [2]


def test_long_test_name_is_found():
    source = f"def test_{'x' * 60}():\n    pass\n"
    assert [rule for _, rule, _ in check_language.check_source(source, is_test=True)] == ["8"]


@pytest.mark.parametrize(
    ("subject", "findings"), [("store: read once", 0), ("Read once", 1), (f"store: {'x' * 60}", 1)]
)
def test_subject_of_a_commit_has_an_area_and_a_limit(subject: str, findings: int):
    assert len(check_language.check_subjects([subject])) == findings
