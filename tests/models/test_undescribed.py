"""A report has a row for every module that computes: a call site, or the reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.found import GLUE, LIBRARY, LOOKUP, NO_DEFINITION, undescribed


def reasons(model: Any, catalog: Catalog) -> dict[str, tuple[int, str]]:
    report = patch(model, catalog=catalog, dry_run=True).report()
    return {name: (count, reason) for name, count, reason in report.undescribed}


def test_other_modules_that_compute_have_rows(kernels: Catalog, build: Any) -> None:
    assert reasons(build(), kernels) == {
        "Embedding": (1, LOOKUP),
        "LlamaRotaryEmbedding": (1, NO_DEFINITION),
        "Linear": (15, LIBRARY),  # seven per layer, and the head
    }


def test_a_part_of_a_mixer_without_a_definition_has_a_row(kernels: Catalog, build: Any) -> None:
    found = reasons(build("glm5_next"), kernels)
    assert found["Glm5NextTextForgetGate"] == (1, NO_DEFINITION)
    assert not any(name in found for name in ("Glm5NextTextRMSNorm", "Glm5NextTextMLP", "SiLU", "ModuleList"))


def test_a_mixer_that_is_served_has_no_such_row(kernels: Catalog, build: Any) -> None:
    found = reasons(build("qwen3_5"), kernels)
    assert not any(name in found for name in ("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNormGated", "Qwen3_5MLP"))


def test_shown_in_the_table_and_in_the_data(kernels: Catalog, build: Any) -> None:
    with patched(build(), catalog=kernels) as handle:
        report = handle.report()
    assert "Linear x15" in str(report)
    assert {"module_class": "Linear", "modules": 15, "reason": LIBRARY} in report.to_dict()["undescribed"]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.inner(x), -1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._added(x, self.inner(x))

    def _added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Indexing(Residual):
    def _added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y[:2]


def test_a_module_that_combines_what_others_return_has_a_row() -> None:
    found = {one.module_class: one.reason for one in undescribed(nn.Sequential(Residual(), Indexing(), Mixer()), [])}
    assert found == {"Linear": LIBRARY, "Residual": GLUE, "Mixer": NO_DEFINITION}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.idle, self.twin = Mixer(), nn.Dropout(0.1), nn.LayerNorm(4)
        self.again = self.twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twin(self.idle(self.mixer(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["Mixer", "Linear", "LayerNorm"])
def test_modules_count_by_what_they_compute(name: str) -> None:
    found = undescribed(Chain(), [])
    assert sorted(one.module_class for one in found) == ["LayerNorm", "Linear", "Mixer"]
    assert {one.module_class: one.modules for one in found}[name] == 1


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(super().forward(x), -1)


def test_a_router_that_is_a_linear_layer_is_no_library_call() -> None:
    found = {one.module_class: one.reason for one in undescribed(nn.Sequential(Router(4, 4), nn.Linear(4, 4)), [])}
    assert found == {"Router": NO_DEFINITION, "Linear": LIBRARY}
