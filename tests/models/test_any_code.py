"""Functions and modules of any code: what is served from a Definition alone, and what stays stock with its reason."""

from __future__ import annotations

import functools
import json
from typing import Any

import cut_models
import pytest
import torch
from cut_models import Hybrid, Mixer, Ramp
from user_catalog import Desk

from tilegym_db import patch, patched
from tilegym_db.errors import RecordError
from tilegym_db.loop.cut import Cut, cut
from tilegym_db.models.called_functions import Seam
from tilegym_db.records import Definition

SCAN, RAMP = Seam(Mixer, "decayed_scan"), Seam(Ramp)
IDS = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Hybrid:
    model: Hybrid = Hybrid().eval()
    return model


@pytest.fixture
def desk(home: Any) -> Desk:
    return Desk(home)


@functools.cache
def draft_of(seam: Seam) -> Cut:
    """Return the draft of a part, which takes seconds to make and depends on no weights."""
    found = cut(Hybrid().eval(), seam, IDS)
    assert not isinstance(found, str), found
    return found


def drafted(seam: Seam, **serving: Any) -> Definition:
    """Return the Definition of a part as it is drafted, with changes of its signature."""
    files = draft_of(seam).files
    content = json.loads(files["definition.json"])
    content["serving"]["code"][0] |= serving
    return Definition.from_dict({**content, "reference": files["reference.py"]})


def offered(desk: Desk, definition: Definition) -> None:
    """Let a kernel serve a Definition, with the reference as its code."""
    desk.put(definition, definition.reference, [dict.fromkeys(("q", "k", "v"), "row_contiguous")])


def reasons(model: torch.nn.Module, desk: Desk, ids: torch.Tensor = IDS) -> dict[str, int]:
    """Run a patched model, and return the reasons of calls that stay stock."""
    with patched(model, catalog=desk.catalog) as handle:
        model(ids)
        (site,) = [site for site in handle.report().sites if site.kind in ("function", "module")]
        assert sum(site.bypassed.values()) > 0
        return dict(site.bypassed)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seam", [SCAN, RAMP], ids=lambda seam: seam.name)
def test_drafted_part_is_served_bit_for_bit(model: Hybrid, seam: Seam, desk: Desk) -> None:
    definition = drafted(seam)
    offered(desk, definition)
    with torch.no_grad():
        stock = model(IDS)
        with patched(model, catalog=desk.catalog) as handle:
            assert torch.equal(model(IDS), stock)
        assert torch.equal(model(IDS), stock)
    assert handle.report().hits() == {definition.name: 1}


def test_call_that_needs_a_gradient_runs_stock_code(model: Hybrid, desk: Desk) -> None:
    offered(desk, drafted(SCAN))
    assert any("gradient" in reason for reason in reasons(model, desk))


def test_call_under_autocast_runs_stock_code(model: Hybrid, desk: Desk) -> None:
    offered(desk, drafted(RAMP))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert any("autocast" in reason for reason in reasons(model, desk))


def test_other_value_of_a_fixed_attribute_runs_stock_code(model: Hybrid, desk: Desk) -> None:
    offered(desk, drafted(RAMP))
    with torch.no_grad(), patched(model, catalog=desk.catalog) as handle:
        model.ramp.is_centred = False
        model(IDS)
        assert handle.report().hits() == {"ramp": 0}
        (site,) = [site for site in handle.report().sites if site.kind == "module"]
        assert site.bypassed == {"its is_centred is not True": 1}


def test_other_dtype_runs_stock_code(model: Hybrid, desk: Desk) -> None:
    offered(desk, drafted(SCAN))
    half = model.to(torch.bfloat16)
    with torch.no_grad():
        stock = half(IDS)
        with patched(half, catalog=desk.catalog) as handle:
            assert torch.equal(half(IDS), stock)
    assert handle.report().hits() == {}


def test_probe_refuses_a_definition_of_other_maths(model: Hybrid, desk: Desk) -> None:
    definition = drafted(SCAN)
    other = definition.reference.replace(".sum(-2) * scale", ".sum(-2)")
    desk.put(definition.model_copy(update={"reference": other}), other)
    (site,) = [site for site in patch(model, catalog=desk.catalog, dry_run=True).report().sites if site.definition]
    assert site.reason == "the results of its probe are not the bits of decayed_scan"


def test_function_that_the_code_calls_must_be_the_known_one(
    model: Hybrid, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(desk, drafted(SCAN))
    monkeypatch.setattr(cut_models, "unit", cut_models.noisy)
    (site,) = [one for one in patch(model, catalog=desk.catalog, dry_run=True).report().sites if one.kind == "function"]
    assert site.reason == "its decayed_scan relies on a unit that is not the one known with it"


def test_parameter_without_a_stated_value_is_named(model: Hybrid, desk: Desk) -> None:
    definition = drafted(SCAN, attributes={"g": "decay"})
    offered(desk, definition)
    (site,) = [one for one in patch(model, catalog=desk.catalog, dry_run=True).report().sites if one.kind == "function"]
    assert site.reason == "it has no parameter decay, which serving.code of decayed_scan names"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"probe": {}}, "serving_probe"),
        ({"returns": ["out", None]}, "serving_returns"),
        ({"fixed": {"q": None}}, "serving_fixed_input"),
    ],
)
def test_incomplete_signature_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RecordError) as error:
        drafted(SCAN, **changes)
    assert error.value.code == code
