"""Orders on their way to another host: what arrives is what was sent, or nothing is measured."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.measurement.devices.messages import Order, Session, divide
from tilegym_db.measurement.devices.ray_parcels import ParcelStore, pack
from tilegym_db.measurement.machine import Machine
from tilegym_db.measurement.plan import Options, make_plan
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.verification.worker_handle import SCREEN

OTHER = "def run(x, weight, factor, out):\n    out.copy_(x * (weight * factor))\n"
BLOB = b"bytes of a file that holds an input"


@pytest.fixture
def catalog(tmp_path, make_catalog) -> Catalog:
    spec = {"path": "blob/x.safetensors", "tensor_key": "x", "type": "safetensors"}
    spec["sha256"] = hashlib.sha256(BLOB).hexdigest()
    (tmp_path / "driver" / "blob").mkdir(parents=True)
    (tmp_path / "driver" / "blob" / "x.safetensors").write_bytes(BLOB)
    inputs = {"x": spec, "weight": {"type": "random"}, "factor": {"type": "scalar", "value": 0.5}}
    sizes = ({"axes": {"M": 3, "N": 8}}, {"axes": {"M": 4, "N": 8}, "inputs": inputs})
    return make_catalog(tmp_path / "driver", {"row_scale_other": OTHER}, sizes)


@pytest.fixture
def order(catalog, tmp_path) -> Order:
    plan = make_plan(catalog, Machine("cpu", "cpu", "a processor"), Options(), ())
    session = Session("measure", "run", "cpu", 7, tmp_path / "home", TimingBudget(), SCREEN)
    return Order(session, divide(plan.definitions, 1)[0])


def arrived(order: Order, folder: Path) -> tuple[ParcelStore, Order]:
    body, parcels = pack(order)
    store = ParcelStore(folder)
    assert store.lacks(parcels) == list(parcels)
    for key, parcel in parcels.items():
        store.add(key, parcel)
    assert store.lacks(parcels) == []
    return store, store.unpack(body)


def test_order_arrives_with_the_same_digests_and_its_own_files(order, tmp_path):
    node = tmp_path / "node"
    _, found = arrived(order, node)
    [plan], [sent] = found.item.plans, order.item.plans
    assert (plan.definition, plan.workloads, plan.pairs) == (sent.definition, sent.workloads, sent.pairs)
    assert [solution.digest for solution in plan.timed] == [solution.digest for solution in sent.timed]
    for solution in plan.timed:
        assert solution.path.is_relative_to(node)
        assert (solution.folder / "kernel.py").read_bytes() == solution.sources["kernel.py"]
    assert set(plan.roots) == {found.session.home} == {node}
    assert (node / "blob" / "x.safetensors").read_bytes() == BLOB
    assert found.session == replace(order.session, home=node)


def test_order_contains_no_path_and_no_source_of_the_driver(order, tmp_path):
    body, _ = pack(order)
    assert str(tmp_path).encode() not in body
    assert b"def run" not in body


def test_two_versions_of_one_name_lie_apart(order, tmp_path):
    [plan] = order.item.plans
    other = replace(plan.timed[0], sources={"kernel.py": OTHER.encode() + b"\n"})
    both = replace(order, extra=(plan.timed[0], other))
    _, found = arrived(both, tmp_path / "node")
    one, two = found.extra
    assert one.name == two.name
    assert (one.digest, two.digest) == (plan.timed[0].digest, other.digest)
    assert one.folder != two.folder


@pytest.mark.parametrize("kind", ["definition", "workload", "solution", "blob"])
def test_what_is_not_what_was_sent_is_refused(order, tmp_path, kind):
    _, parcels = pack(order)
    key, parcel = next((key, parcel) for key, parcel in parcels.items() if parcel.kind == kind)
    store = ParcelStore(tmp_path / "node")
    changed = replace(parcel, text=f"{parcel.text} ", files={path: b"x" for path in parcel.files})
    with raises(RecordError, "parcel_key_differs"):
        store.add(key, changed)
    wrong = replace(parcel, digest="0" * 64)
    with raises(RecordError, "parcel_digest_differs"):
        store.add(wrong.key, wrong)
    assert store.lacks({key: None}) == [key]


def test_a_file_that_leads_out_of_its_folder_is_refused(order, tmp_path):
    _, parcels = pack(order)
    parcel = next(parcel for parcel in parcels.values() if parcel.kind == "solution")
    outside = replace(parcel, files={"../../../../outside.py": b""})
    with raises(RecordError, "path_outside", "outside.py"):
        ParcelStore(tmp_path / "node").add(outside.key, outside)
    assert not (tmp_path / "outside.py").exists()


def test_missing_input_file_is_named_before_anything_is_sent(order, catalog):
    (catalog.roots[0] / "blob" / "x.safetensors").unlink()
    with pytest.raises(RecordError, match=r"x\.safetensors"):
        pack(order)
