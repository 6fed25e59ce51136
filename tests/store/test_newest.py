"""The mark on the newest passes: the views must say what they would say if every trace were read."""

from __future__ import annotations

import json
import random

import pytest

from tilegym_db.records import Trace
from tilegym_db.records.trace import new_trace_id
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.queries.measured import best_rows
from tilegym_db.store.statements import TRUST_FOREIGN

MARKED = "SELECT trace_id FROM trace_records WHERE is_newest ORDER BY timestamp"
ALL = "SELECT trace_id FROM {view} ORDER BY trace_id"
CHOICES = {
    "kind": ("stock", "triton", "tilelang"),
    "m": (1, 4096),
    "gpu": ("h200", "l4"),
    "tier": ("promotion",) * 6 + ("screen", "interpreter"),
    "status": ("PASSED",) * 8 + ("TIMEOUT", "COMPILE_ERROR", "REJECTED", "UNSUPPORTED"),
    "gate": ("wall clock",) * 30 + ("state",),  # of REJECTED
    "config": ({}, {"BLOCK_M": 4}),
    "sandbox_level": (0, 3),
}


def marked(store) -> list[str]:
    return [row["trace_id"] for row in store.rows(MARKED)]


def answers(store) -> dict[str, object]:
    """What every view that reads marked traces alone answers, and what it answers where all of them are marked."""
    views = ("best", "best_per_solution", "verified")
    found = {view: store.rows(ALL.format(view=view)) for view in views}
    with store.transaction("mark") as connection:
        before = connection.execute("SELECT rowid FROM trace_records WHERE is_newest").fetchall()
        connection.execute("UPDATE trace_records SET is_newest = true")
    wanted = {view: store.rows(ALL.format(view=view)) for view in views}
    with store.transaction("mark") as connection:
        connection.execute(
            "UPDATE trace_records SET is_newest = rowid IN (SELECT unnest($ids::BIGINT[]))",
            {"ids": [row[0] for row in before]},
        )
    return {"found": found, "wanted": wanted}


# Drawn histories; chosen ones are tested daily.
@pytest.mark.turn("tilegym_db/store/views.sql", "tilegym_db/store/filling.py")
@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(3))
def test_marked_traces_answer_as_all_of_them_would(opened, write_traces, trace, tmp_path, root, seed):
    rng = random.Random(seed)
    made: list[Trace] = []

    def some(count: int) -> list[Trace]:
        for _ in range(count):
            picked = {name: rng.choice(values) for name, values in CHOICES.items()}
            if made and rng.random() < 0.3:
                picked["timestamp"] = rng.choice(made).timestamp  # older than others, or at the same instant
            point = {"gate": picked.pop("gate"), "axes": {}, "contents": "", "seed": "", "command": ""}
            picked["failure"] = point if picked["status"] == "REJECTED" else None
            made.append(trace(**picked, latency_us=rng.uniform(1, 9)))
        return made[-count:]

    with opened() as store:
        for step in range(8):
            path = tmp_path / f"foreign-{step}.jsonl"
            path.write_text("".join(item.to_json() + "\n" for item in some(6)))
            ingest(store, [path], trust=rng.random() < 0.5)
            ingest(store, [write_traces(*some(20), *rng.sample(made, 5))])
            for statement in ("SELECT 1", TRUST_FOREIGN):
                store.connection.execute(statement)
                pair = answers(store)
                assert pair["found"] == pair["wanted"]
            store.connection.execute("RESET VARIABLE trust_foreign")
        assert 0 < len(marked(store)) < len(made)
    folder = root / "solutions" / "norm" / "scale" / "scale_triton"
    (folder / "kernel.py").write_text("def run(x, eps, out):\n    pass  # another source\n")
    with opened() as store:
        pair = answers(store)
        assert pair["found"] == pair["wanted"] != {view: [] for view in pair["found"]}


def test_later_pass_takes_the_mark_and_a_late_older_one_does_not(opened, write_traces, trace):
    late, first, second, other = trace(), trace(), trace(), trace(m=1)
    with opened() as store:
        ingest(store, [write_traces(first, other)])
        assert marked(store) == [first.trace_id, other.trace_id]
        ingest(store, [write_traces(second)])
        assert marked(store) == [second.trace_id, other.trace_id]
        ingest(store, [write_traces(late, trace(status="TIMEOUT", m=4096), trace(tier="interpreter"))])
        assert marked(store) == [second.trace_id, other.trace_id]


def test_trace_superseded_by_a_foreign_one_is_the_newest_again(opened, write_traces, trace, tmp_path):
    one, two = trace(), trace()
    forged = Trace.from_dict({**two.to_dict(), "trace_id": new_trace_id("r", "promotion", 1, "d", {}, "w")})
    path = tmp_path / "foreign.jsonl"
    path.write_text(one.to_json() + "\n" + forged.to_json() + "\n")
    with opened() as store:
        ingest(store, [path], trust=True)
        assert marked(store) == [forged.trace_id]
        own = Trace.from_dict({**one.to_dict(), "trace_id": forged.trace_id})
        ingest(store, [write_traces(own)])
        pair = answers(store)
        assert pair["found"] == pair["wanted"]
        assert {row["trace_id"] for row in store.rows("FROM verified")} <= set(marked(store))


def test_pass_doubted_later_gives_its_mark_to_the_one_before(opened, root, home, write_traces, trace):
    from tilegym_db.paths import shipped_root
    from tilegym_db.records.roofline import GpuPeaks
    from tilegym_db.store.side_files import save_peaks

    path = root / "definitions" / "norm" / "scale.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"cost": {"flops": "M*N", "bytes": "4*M*N"}}))
    sane, absurd = trace(latency_us=50.0), trace(latency_us=0.01)
    with opened() as store:
        ingest(store, [write_traces(sane, absurd)])
        assert marked(store) == [absurd.trace_id]  # there are no peaks yet, so no floor
    save_peaks(GpuPeaks.from_json((shipped_root() / "traces" / "h200" / "peaks.json").read_bytes()), home)
    with opened() as store:
        assert marked(store) == [sane.trace_id]
        assert [row["latency_us"] for row in best_rows(store)] == [50.0]


@pytest.mark.turn("tilegym_db/store/")  # fills a database
def test_a_database_that_is_made_anew_has_the_marks(opened, home, catalog, write_traces, trace, tmp_path):
    from tilegym_db.store.journal import Journal

    older, newer = trace(), trace()
    with Journal("run-1", home) as journal:
        journal.append(older)
        journal.append(newer)
    with opened() as store:
        assert marked(store) == [newer.trace_id]
    rebuild(home, catalog=catalog)
    with opened() as store:
        assert marked(store) == [newer.trace_id]
