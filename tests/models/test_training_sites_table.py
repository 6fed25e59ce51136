"""The table of what serves a step of training: the calls of a model of real size, without memory and without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from shipped_records import CATALOG

from tilegym_db.paths import shipped_root

pytestmark = [pytest.mark.slow, pytest.mark.sweep]


@pytest.fixture
def training_sites(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import training_sites

    module: ModuleType = training_sites
    return module


def calls_of(step: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for (definition, _), calls in step.asked.items():
        found[definition] = found.get(definition, 0) + calls
    return found


@pytest.mark.turn("benchmarks/training_sites.py")  # a script
def test_each_call_of_a_step_has_an_answer_and_a_time(training_sites: ModuleType) -> None:
    step = training_sites.step_of("vit-base", "h200", CATALOG)
    assert calls_of(step) == {
        "layer_norm": 25,
        "gelu": 12,
        "add_layer_norm": 12,
        "attention_bidirectional": 12,
    }  # twelve layers, and a norm after them
    assert all(text for _, text in step.asked)
    shares = [step.share(definition) for definition in ("layer_norm", "gelu")]
    assert all(0.01 < share < 0.3 for share in shares)
    library = sum(value for row, value in step.taken.items() if row.library) / step.seconds
    assert 0.4 < library < 1 - sum(shares)


def test_a_gpu_without_a_table_serves_nothing(training_sites: ModuleType) -> None:
    step = training_sites.step_of("vit-base", "b200", CATALOG)
    assert training_sites.SERVED not in {text for _, text in step.asked}
    missing = {one.definition for one in step.missing}
    backwards = ("layer_norm", "gelu", "add_layer_norm", "attention_bidirectional")
    assert missing == {f"{name}_backward" for name in backwards}
    ((first, share, places), *_) = training_sites.missing_shares({"vit-base": step})
    assert (first, places) == ("gelu", ["vit-base"])
    assert share == pytest.approx(step.share("gelu"))
