"""``TILEGYM_DB_DISABLE=1`` leaves every model and every call to stock code, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises

import tilegym_db
from tilegym_db import Catalog, patch, patched_init
from tilegym_db.errors import UsageError
from tilegym_db.loop.fit import fit
from tilegym_db.models.call_site import is_patched

ANYTHING = {"dry_run": True}, {"verify": True}, {"quantise": "fp8-reference"}, {}


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_DB_DISABLE", "1")


@pytest.mark.parametrize("options", ANYTHING, ids=str)
def test_model_is_left_as_it_is(
    options: dict[str, Any], switched_off: None, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    model = build()
    stock = logits(model, prompt())
    handle = patch(model, catalog=kernels, **options)
    assert not any(is_patched(module) for module in model.modules())
    assert torch.equal(logits(model, prompt()), stock)
    assert handle.report().sites == ()
    assert "TILEGYM_DB_DISABLE is set" in str(handle.report())
    handle.unpatch()


def test_models_that_are_built_are_left_as_they_are(switched_off: None, kernels: Catalog, build: Any) -> None:
    with patched_init(catalog=kernels) as handles:
        model = build()
    assert not any(is_patched(module) for module in model.modules())
    assert [handle.report().sites for handle in handles] == [()]


def test_resolver_answers_with_stock_code_and_the_reason(switched_off: None, kernels: Catalog) -> None:
    found = tilegym_db.resolve("swiglu", axes={"M": 4, "I": 8}, dtypes={"T": "float32"}, gpu="cpu", catalog=kernels)
    assert found.is_stock
    assert found.evidence.reason == "TILEGYM_DB_DISABLE is set, so stock code runs"


def test_fit_is_refused_before_it_measures(switched_off: None, build: Any, prompt: Any) -> None:
    with raises(UsageError, "serving_disabled", "TILEGYM_DB_DISABLE"):
        fit(build(), prompt())


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_values_that_mean_no_change_nothing(
    value: str, monkeypatch: pytest.MonkeyPatch, kernels: Catalog, build: Any
) -> None:
    monkeypatch.setenv("TILEGYM_DB_DISABLE", value)
    model = build()
    patch(model, catalog=kernels)
    assert any(is_patched(module) for module in model.modules())


def test_report_has_the_reason_and_no_empty_table(switched_off: None, kernels: Catalog, build: Any) -> None:
    shown = str(patch(build(), catalog=kernels).report())
    assert shown.strip().splitlines() == ["TILEGYM_DB_DISABLE is set, so stock code runs; nothing was patched"]
