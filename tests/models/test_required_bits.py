"""``patch(model, require=...)`` serves kernels whose bits are verified as asked, and gives the reason for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db import Catalog, patch, patched
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.published.table import ServingLock


def hits(handle: Any) -> set[str]:
    return {name for name, count in handle.report().hits().items() if count}


def test_kernel_without_verified_bits_leaves_the_model_as_it_is(
    kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    model = build()
    with patched(model, catalog=kernels) as handle:
        logits(model, prompt())
        assert hits(handle)
    with patched(model, catalog=kernels, require="deterministic") as handle:
        logits(model, prompt())
        assert not hits(handle)
        reasons = {site.reason for site in handle.report().sites if site.definition == "swiglu"}
    assert len(reasons) == 1
    assert "deterministic kernels are required" in reasons.pop()


def test_verified_kernels_serve_as_without_the_requirement(shop: Any, build: Any, prompt: Any, logits: Any) -> None:
    catalog = shop.offer()
    for entry in shop.entries:
        for candidate in entry["candidates"]:
            candidate["deterministic"] = candidate["solution"] != "swiglu_cpu"
    shop.republish()
    model = build()
    with patched(model, catalog=catalog) as handle:
        logits(model, prompt())
        every = hits(handle)
    with patched(model, catalog=catalog, require=["deterministic"]) as handle:
        logits(model, prompt())
        assert hits(handle) == every - {"swiglu"}
    with patched(model, catalog=catalog, require="batch_invariant") as handle:
        logits(model, prompt())
        assert not hits(handle)
        reasons = {site.reason for site in handle.report().sites if site.definition == "rms_norm"}
    assert "does not promise" in reasons.pop()


def test_lock_states_what_is_required_and_requires_it_again(
    shop: Any, build: Any, prompt: Any, logits: Any, tmp_path: Path
) -> None:
    catalog = shop.offer()
    for entry in shop.entries:
        for candidate in entry["candidates"]:
            candidate["deterministic"] = True
    shop.republish()
    model = build()
    with patched(model, catalog=catalog, require="deterministic") as handle:
        logits(model, prompt(), use_cache=False)
        lock = handle.write_lock(tmp_path / "serving.lock.json")
    kept = ServingLock.read(lock)
    assert kept.required == {"deterministic"}
    with patched(model, catalog=catalog, lock=lock) as handle:
        logits(model, prompt(), use_cache=False)
        assert hits(handle) == kept.definitions
        assert handle.write_lock(tmp_path / "again.json").read_bytes() == lock.read_bytes()
    with raises(UsageError, "serving_lock_broken", "batch-invariant kernels are required"):
        patch(model, catalog=catalog, lock=lock, require="batch_invariant")
    for entry in shop.entries:
        for candidate in entry["candidates"]:
            candidate["deterministic"] = False
    shop.republish()
    with raises(UsageError, "serving_lock_broken", "deterministic kernels are required"):
        patch(model, catalog=catalog, lock=lock)


@pytest.mark.parametrize("stated", ["deterministic", ["fast"], [3], [], {"deterministic": True}])
def test_lock_with_an_unknown_requirement_is_refused(stated: Any, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"serving_lock": 2, "require": stated, "kernels": []}))
    with raises(RecordError, "serving_lock_invalid"):
        ServingLock.read(path)


def test_requirement_that_is_unknown_is_refused(kernels: Catalog, build: Any) -> None:
    with raises(UsageError, "requirement_unknown", "deterministic or batch_invariant"):
        patch(build(), catalog=kernels, require="fast")


@pytest.mark.parametrize("require", [3, 0.5])
def test_requirement_that_is_no_name_is_refused(require: Any, kernels: Catalog, build: Any) -> None:
    with raises(UsageError, "argument_type"):
        patch(build(), catalog=kernels, require=require)
