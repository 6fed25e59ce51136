"""A lock of what a deployment serves: written from calls, kept exactly, refused if it cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db import Catalog, patch, patched, resolve
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.published.table import ServingLock, table_for


def hits(handle: Any) -> dict[str, int]:
    return {name: count for name, count in handle.report().hits().items() if count}


@pytest.fixture
def lock(tmp_path: Path, kernels: Catalog, build: Any, prompt: Any, logits: Any) -> Path:
    """The lock of one prefill of a llama."""
    model = build()
    with patched(model, catalog=kernels) as handle:
        logits(model, prompt(), use_cache=False)
        return handle.write_lock(tmp_path / "serving.lock.json")


def changed(lock: Path, definition: str, **values: Any) -> Path:
    content = json.loads(lock.read_text())
    for kernel in content["kernels"]:
        if kernel["definition"] == definition:
            kernel.update(values)
    lock.write_text(json.dumps(content))
    return lock


def test_lock_names_what_served_by_digests(lock: Path, kernels: Catalog) -> None:
    content = json.loads(lock.read_text())
    assert {one["definition"] for one in content["kernels"]} == {
        *("attention_prefill", "fused_add_rms_norm", "rms_norm", "rope_neox", "swiglu"),
    }
    for one in content["kernels"]:
        assert one["definition_digest"] == kernels.definition(one["definition"]).digest
        assert one["solution_digest"] == kernels.solution(one["solution"]).digest
        assert one["gpu"] == "cpu"


def test_locked_model_serves_the_same_and_writes_the_same_lock(
    lock: Path, tmp_path: Path, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    model = build()
    stock = logits(model, prompt(), use_cache=False)
    with patched(model, catalog=kernels, lock=lock) as handle:
        assert torch.equal(logits(model, prompt(), use_cache=False), stock)
        assert set(hits(handle)) == {"attention_prefill", "fused_add_rms_norm", "rms_norm", "rope_neox", "swiglu"}
        again = handle.write_lock(tmp_path / "again.json")
    assert again.read_bytes() == lock.read_bytes()


def test_operator_that_is_not_in_the_lock_runs_stock_code(
    lock: Path, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    content = json.loads(lock.read_text())
    content["kernels"] = [one for one in content["kernels"] if one["definition"] != "swiglu"]
    lock.write_text(json.dumps(content))
    model = build()
    with patched(model, catalog=kernels, lock=lock) as handle:
        logits(model, prompt(), use_cache=False)
        assert "swiglu" not in hits(handle)
        assert "rms_norm" in hits(handle)
        reasons = {site.reason for site in handle.report().sites if site.definition == "swiglu"}
        assert reasons == {f"the lock {lock} has no kernel of it"}


BROKEN = {
    "source": ({"solution_digest": "0" * 64}, "the source has changed"),
    "meaning": ({"definition_digest": "0" * 64}, "the meaning of the definition has changed"),
    "solution": ({"solution": "swiglu_gone"}, "the catalog has no such solution"),
    "config": ({"config": {"BLOCK": 3}}, "no verified measurement of it is published for cpu"),
    "device": ({"gpu": "h200"}, "it was locked on h200, and the model is on cpu"),
}


@pytest.mark.parametrize(("values", "reason"), BROKEN.values(), ids=BROKEN)
def test_lock_that_cannot_be_kept_is_refused(
    values: dict[str, Any], reason: str, lock: Path, kernels: Catalog, build: Any
) -> None:
    with raises(UsageError, "serving_lock_broken", "for swiglu", reason, "handle.write_lock(path)"):
        patch(build(), catalog=kernels, lock=changed(lock, "swiglu", **values))


def test_lock_is_refused_if_its_kernels_are_unpublished(lock: Path, shop: Any, build: Any) -> None:
    shop.entries = []
    shop.republish()
    with raises(UsageError, "serving_lock_broken", "for cpu"):
        patch(build(), lock=lock)


def test_kernel_outside_of_the_lock_is_no_candidate(lock: Path, kernels: Catalog) -> None:
    locked = kernels.locked(ServingLock.read(lock))
    other = kernels.locked(ServingLock.read(changed(lock, "swiglu", solution_digest="0" * 64)))
    found = []
    for catalog in (kernels, locked, other):
        table = table_for(catalog, "cpu")
        assert table is not None
        entries = table.entries("swiglu", {"T": "float32"})
        found.append({one.solution for entry in entries for one in entry.candidates if one.role == "kernel"})
    assert found == [{"swiglu_cpu"}, {"swiglu_cpu"}, set()]
    assert resolve("swiglu", axes={"M": 4, "I": 8}, dtypes={"T": "float32"}, gpu="cpu", catalog=other).is_stock


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"serving_lock": 2, "kernels": []}',
        '{"serving_lock": 3, "kernels": []}',
        '{"serving_lock": 1, "kernels": [{}]}',
    ],
)
def test_file_that_is_no_lock_is_refused(text: str, tmp_path: Path, build: Any) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with (
        raises(RecordError, "" if not text else "serving_lock_invalid", str(path))
        if text
        else pytest.raises(RecordError)
    ):
        patch(build(), lock=path)


def test_lock_needs_a_call_that_was_served(tmp_path: Path, kernels: Catalog, build: Any) -> None:
    handle = patch(build(), catalog=kernels)
    with raises(UsageError, "nothing_to_lock"):
        handle.write_lock(tmp_path / "lock.json")
    assert not list(tmp_path.glob("*.json"))
