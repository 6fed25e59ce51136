"""Names of TileKernels: ``show`` says what each is here, and a command that cannot take one says it too."""

from __future__ import annotations

import importlib

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.other_names import OTHER_NAMES


def test_every_other_name_stands_for_what_there_is() -> None:
    catalog = Catalog.default()
    for name, other in OTHER_NAMES.items():
        assert name not in catalog.definitions
        assert bool(other.definitions) != bool(other.python)
        assert set(other.definitions) <= catalog.definitions.keys()
        if other.python:
            module, _, attribute = other.python.rpartition(".")
            assert callable(getattr(importlib.import_module(module), attribute))


def test_show_answers_a_name_that_is_one_definition(cli) -> None:
    shown = cli("show", "topk_gating")
    assert shown.code == 0
    assert "topk_softmax" in shown.err
    assert shown.out == cli("show", "topk_softmax").out
    assert cli("show", "topk_gating", "--json").json()["definition"]["name"] == "topk_softmax"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("fused_expand_reduce", ["tilegym-db show expand_to_fused", "tilegym-db show reduce_fused"]),
        ("MHCPipeline", ["help(tilegym_db.layers.MHCPipeline)"]),
    ],
)
def test_show_says_if_a_name_is_more_than_one_definition(cli, name: str, lines: list[str]) -> None:
    shown = cli("show", name)
    assert shown.code == 0
    assert all(line in shown.out for line in lines)
    refused = cli("show", name, "--json")
    assert (refused.code, refused.cause) == (2, "name_of_others")


def test_a_command_that_takes_names_says_what_the_name_is_here(cli) -> None:
    refused = cli("bench", "weight_normalize", "--gpu", "cpu")
    assert (refused.code, refused.cause) == (2, "name_of_others")
    assert "normalize_weight" in refused.err
    assert "Try: tilegym-db show weight_normalize" in refused.err
