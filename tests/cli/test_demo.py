from __future__ import annotations

import time

import pytest

from tilegym_db.cli import demo


def test_progress_is_said_every_few_seconds_until_the_end(capsys):
    with demo.heartbeat("working", every_s=0.05):
        time.sleep(0.4)
    said = capsys.readouterr().out.splitlines()
    assert len(said) >= 3
    assert all(line.strip().startswith("... working") for line in said)
    time.sleep(0.15)
    assert capsys.readouterr().out == ""


def test_shipped_table_has_each_operator_once_and_sound_columns(home):
    from tilegym_db.store.opening import run_user_query

    answer = run_user_query(demo.SHIPPED, {"gpu": demo.REFERENCE_GPU, "names": list(demo.OPERATORS)})
    assert [row[0] for row in answer.rows] == sorted(demo.OPERATORS)
    for *_, us, stock_us, speedup in answer.rows:
        assert stock_us / us == pytest.approx(speedup, rel=0.02)
        assert speedup > 1


def test_the_kernel_for_a_cpu_is_admitted_and_right():
    import torch

    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Solution
    from tilegym_db.records.solution import signature_problem
    from tilegym_db.sandbox.scan import hard_findings, scan_sources

    definition = Catalog.default().definition("rms_norm")
    record = Solution.from_dict(demo.KERNEL_RECORD)
    record.check_against(definition)
    assert signature_problem(record, demo.KERNEL, definition) is None
    assert not hard_findings(scan_sources(record, {"kernel.py": demo.KERNEL.encode()}))
    scope: dict[str, object] = {}
    exec(demo.KERNEL, scope)
    x, weight = torch.randn(4, 64), torch.randn(64)
    out = torch.empty_like(x)
    scope["run"](x, weight, 1e-6, out)  # type: ignore[operator]
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_the_demo_writes_into_its_own_home_only(home, monkeypatch):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(home))  # own_home changes it for the rest of the process
    folder = demo.own_home()
    assert folder == home / "demo"
    demo.add_demo_kernel(folder / "catalog", tokens=16)
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default()
    assert catalog.solution("rms_norm_demo").folder.is_relative_to(folder)
    assert any("stage:demo" in workload.tags for workload in catalog.workloads_for("rms_norm"))


def test_every_call_of_the_model_has_a_kernel_on_its_gpu(home):
    from tilegym_db.catalog import Catalog

    rows = demo.explain_sites(demo.build_config(), Catalog.default(), tokens=4096)
    assert [row[0] for row in rows] == list(demo.OPERATORS) * 2
    assert all(row[2] != "stock" for row in rows)
