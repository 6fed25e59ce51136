from __future__ import annotations

import pytest
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.devices.places import Node, chosen_kind, differs, label_of, nodes_of, refusal, slots_of
from tilegym_db.measurement.machine import Machine

OWN = {"version": "0.2.0", "digest": "d"}
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def facts(**changes):
    return {**OWN, "host": "node1", "executable": "/usr/bin/python3", "gpu_names": (H100, H100), **changes}


def test_only_live_nodes_count_with_only_what_ray_lists_for_them():
    rows = [
        {"Alive": True, "NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 2.0, "CPU": 16.0}},
        {"Alive": False, "NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Resources": {}},
        {"Alive": True, "NodeID": "c", "NodeManagerAddress": "10.0.0.3", "Resources": {"memory": 1.0}},
    ]
    assert nodes_of(rows) == [Node("a", "10.0.0.1", 2, 16), Node("c", "10.0.0.3", 0, 0)]


@pytest.mark.parametrize(
    ("said", "gpu", "reason"),
    [
        (facts(), "h100", None),
        (facts(), "auto", None),
        (facts(), "cpu", None),
        (facts(gpu_names=()), "h100", None),  # a container that hides the driver's files: the supervisor finds out
        (facts(), "h200", H100),
        (facts(version="0.1.0"), "auto", "0.1.0"),
        (facts(digest="e"), "auto", "other source files"),
        (
            {"host": "node1", "executable": "/usr/bin/python3", "missing": "No module", "gpu_names": ()},
            "auto",
            "Install it",
        ),
    ],
)
def test_node_with_the_same_package_and_the_gpu_takes_part(said, gpu, reason):
    found = refusal(said, OWN, gpu)
    assert found is None if reason is None else reason in str(found)


def test_without_a_gpu_named_all_have_to_be_of_one_kind():
    assert chosen_kind("auto", {H100}) == "h100-sxm"
    assert chosen_kind("auto", ()) == "auto"
    assert chosen_kind("h200", {H100, H200}) == "h200"
    with raises(HardwareError, "gpu_kinds_mixed", "h100-sxm or h200"):
        chosen_kind("auto", {H100, H200})


def test_node_has_a_slot_per_gpu_and_one_for_its_processors():
    node = Node("abc", "10.0.0.1", 2, 16)
    [processors] = slots_of(node, "node1", "cpu")
    assert (processors.device.label, processors.gpus, processors.processors) == ("node1 CPU", 0, 16)
    slots = slots_of(node, "node1", "h100-sxm")
    assert [(slot.device.label, slot.number, slot.of, slot.gpus, slot.processors) for slot in slots] == [
        ("node1 GPU 0", 0, 2, 1, 1),
        ("node1 GPU 1", 1, 2, 1, 1),
    ]
    assert [slot.processors for slot in slots_of(Node("abc", "10.0.0.1", 2, 1), "node1", "h100-sxm")] == [0, 0]
    assert slots_of(Node("abc", "10.0.0.1", 0, 0), "node1", "cpu") == []


def test_two_nodes_of_one_host_have_names_of_their_own():
    assert label_of("node1", "0123456789", ()) == "node1"
    assert label_of("node1", "0123456789", {"node1"}) == "node1 (012345)"


def test_device_of_another_kind_is_named_with_the_differences():
    planned = Machine("cuda:0", "h100-sxm", H100, libs={"torch": "2.15.0", "triton": "3.9.0"}, host="node1")
    other = Machine("cuda:0", "h100-sxm", H100, libs={"torch": "2.15.0"}, host="node2")
    assert differs(planned, planned) is None
    assert differs(other, planned) == "it has triton none, and node1, for which this run was planned, has 3.9.0"
    assert "this run is for h100-sxm" in str(differs(Machine("cuda:0", "h200", H200), planned))
