"""What is said of a Solution whose worker cannot be set up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tilegym_db.bench.tier_policy import SCREEN
from tilegym_db.bench.worker_handle import RunnerLimits, WorkerHandle
from tilegym_db.catalog import Catalog

RAISES = "raise ValueError(7)\n\n\ndef run(x, weight, factor, out):\n    pass\n"


def test_a_source_that_did_not_load_gets_another_process(tmp_path: Path, make_catalog: Callable[..., Catalog]) -> None:
    catalog = make_catalog(tmp_path / "catalog", {"raises": RAISES})
    (files,) = (one for one in catalog.solutions_for("row_scale") if one.name == "raises")
    with closing(WorkerHandle(catalog.definitions["row_scale"], files, "cpu", tmp_path / "workers")) as handle:
        first, worker = handle.load(), handle.worker
        again = handle.load()
        assert first is not None
        assert again is not None
        assert again.status == first.status
        assert worker is not None
        assert not worker.alive
        assert handle.worker is not worker


@pytest.mark.parametrize(
    ("limit_s", "status", "says"),
    [
        (1e-4, "UNSUPPORTED", "this machine could not set up a worker: 'prepare' did not finish"),
        (60.0, "RUNTIME_ERROR", "the source does not load"),
    ],
)
def test_only_what_its_own_source_does_is_held_against_a_solution(
    limit_s: float, status: str, says: str, tmp_path: Path, make_catalog: Callable[..., Catalog]
) -> None:
    catalog = make_catalog(tmp_path / "catalog", {"raises": RAISES})
    (files,) = (one for one in catalog.solutions_for("row_scale") if one.name == "raises")
    definition = catalog.definitions["row_scale"]
    limits = RunnerLimits(first_call_s=limit_s)
    with closing(WorkerHandle(definition, files, "cpu", tmp_path / "workers", policy=SCREEN, limits=limits)) as handle:
        failure = handle.load()
    assert failure is not None
    assert (failure.status, failure.reason) == (status, says)
