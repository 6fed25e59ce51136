"""What ``--gpus`` means, how work is divided among devices, and what becomes of work that was lost."""

from __future__ import annotations

from collections import Counter

import pytest
from raising import raises

from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.measurement.devices.messages import MAX_LOSSES, WorkQueue, divide
from tilegym_db.measurement.machine import (
    Devices,
    GpuChoice,
    MeasuringDevice,
    choose_gpus,
    devices_of_options,
    parse_devices,
    parse_gpus,
    share_processors,
)
from tilegym_db.measurement.plan import DefinitionPlan

FOUR = [MeasuringDevice(f"GPU {index}", index, "h200", "NVIDIA H200") for index in range(4)]
MIXED = [*FOUR[:2], MeasuringDevice("GPU 2", 2, "l4", "NVIDIA L4")]


@pytest.mark.parametrize(
    ("text", "indices"), [("all", [0, 1, 2, 3]), ("2", [0, 1]), ("0,2", [0, 2]), ("2,", [2]), (" 3 , 1 ", [1, 3])]
)
def test_all_a_number_and_indices_choose_gpus(text, indices):
    assert [device.index for device in choose_gpus(parse_gpus(text), FOUR)] == indices


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x", "gpus_invalid"),
        ("", "gpus_invalid"),
        ("-1", "gpus_invalid"),
        ("1.5", "gpus_invalid"),
        ("0,,2", "gpus_invalid"),
        ("0,0", "gpus_repeated"),
        ("0", "gpus_zero"),
    ],
)
def test_what_names_no_gpus_is_wrong_usage(text, code):
    with raises(UsageError, code, text):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("text", "found", "gpu", "code", "facts"),
    [
        ("9", FOUR, "auto", "gpus_too_few", ("4", "9", "0: NVIDIA H200")),
        ("0,7", FOUR, "auto", "gpu_index_unknown", ("GPU 7",)),
        ("all", MIXED, "auto", "gpu_kinds_mixed", ("h200 or l4",)),
        ("3", MIXED, "h200", "gpus_too_few", ("2 of kind h200", "3")),
        ("1,2", MIXED, "h200", "gpus_too_few", ("2",)),
        ("all", [], "auto", "gpus_without_gpu", ("--gpus all",)),
        ("all", FOUR, "cpu", "gpus_without_gpu", ("--gpu cpu",)),
    ],
)
def test_gpus_that_are_not_here_are_refused_with_what_is(text, found, gpu, code, facts):
    with raises(HardwareError, code, *facts):
        choose_gpus(parse_gpus(text), found, gpu)


def test_one_kind_of_several_is_chosen_by_name():
    assert choose_gpus(parse_gpus("all"), MIXED, "l4") == MIXED[2:]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("auto", Devices()),
        ("cpu", Devices("cpu")),
        (" H200 ", Devices("h200")),
        ("h100", Devices("h100")),
        ("all", Devices(gpus=GpuChoice("devices='all'"))),
        (0, Devices(gpus=GpuChoice("devices=0", indices=(0,)))),
        ([0, 2], Devices(gpus=GpuChoice("devices=[0, 2]", indices=(0, 2)))),
        ("ray", Devices(executor="ray")),
        ("ray:head:6379", Devices(executor="ray:head:6379")),
        (Devices("cpu", executor="ray"), Devices("cpu", executor="ray")),
        (FOUR[:2], Devices("h200", tuple(FOUR[:2]))),
    ],
)
def test_an_argument_names_devices_in_one_way(argument, expected):
    assert parse_devices(argument) == expected


@pytest.mark.parametrize(
    ("argument", "error", "code"),
    [
        ("2", UsageError, "devices_invalid"),
        ("0,2", UsageError, "devices_invalid"),
        ("", UsageError, "devices_invalid"),
        ([], UsageError, "devices_invalid"),
        (-1, UsageError, "devices_invalid"),
        (True, UsageError, "devices_invalid"),
        (1.5, UsageError, "devices_invalid"),
        (None, UsageError, "devices_invalid"),
        (["h200"], UsageError, "devices_invalid"),
        ([0, 0], UsageError, "gpus_repeated"),
        ("h2000", HardwareError, "gpu_unknown"),
    ],
)
def test_an_argument_that_names_no_devices_is_refused(argument, error, code):
    with raises(error, code, str(argument)):
        parse_devices(argument)


def test_a_missing_index_is_named_as_it_was_written():
    choice = parse_devices([0, 7]).gpus
    assert isinstance(choice, GpuChoice)
    with raises(HardwareError, "gpu_index_unknown", "devices=[0, 7]: there is no GPU 7"):
        choose_gpus(choice, FOUR)


def test_a_cpu_is_refused_before_anything_is_loaded():
    with raises(HardwareError, "gpus_without_gpu", "--gpus"):
        devices_of_options("cpu", "2")


def test_processors_are_shared_in_blocks_and_none_is_left_over():
    assert share_processors(range(7), 3) == [(0, 1), (2, 3, 4), (5, 6)]
    assert share_processors((4, 9), 3) == [(4,), (9,), (4,)]


@pytest.fixture
def plans(make_catalog, tmp_path):
    """Make plans of so many workloads each, every one with stock code and a kernel."""

    def make(*counts: int) -> list[DefinitionPlan]:
        made = []
        for number, count in enumerate(counts):
            name = f"scale_{number}"
            catalog = make_catalog(
                tmp_path / name,
                {f"{name}_fast": "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"},
                tuple({"definition": name, "axes": {"M": size, "N": 8}} for size in range(1, count + 1)),
                {"name": name},
            )
            workloads = catalog.workloads_for(name)
            solutions = catalog.solutions_for(name)
            pairs = {(solution.name, workload.uuid) for solution in solutions for workload in workloads}
            made.append(DefinitionPlan(catalog.definition(name), workloads, solutions, pairs=pairs))
        return made

    return make


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("counts", [(24,), (1,), (3, 24, 5), (6,) * 12])
def test_every_workload_is_in_one_piece_with_all_its_candidates(plans, devices, counts):
    given = plans(*counts)
    items = divide(given, devices)
    found = Counter(uuid for item in items for uuid in item.uuids)
    assert found == Counter(workload.uuid for plan in given for workload in plan.workloads)
    for item in items:
        for plan in item.plans:
            for workload in filter(plan.is_wanted, plan.workloads):
                names = [
                    solution.name
                    for solution, config in plan.candidates()
                    if plan.takes_part(solution, workload, config)
                ]
                assert len(names) == 2


def test_one_operator_is_divided_evenly_and_many_are_kept_whole(plans):
    assert [len(item.uuids) for item in divide(plans(24), 4)] == [6, 6, 6, 6]
    whole = divide(plans(*(6,) * 24), 2)
    assert sum(len(item.plans) for item in whole) == 24
    assert len(whole[0].uuids) > len(whole[-1].uuids)  # the largest first
    assert len(divide(plans(24, 24), 1)) == 1


def test_operator_is_divided_only_if_all_devices_end_earlier(plans):
    """Starting its candidates once more costs twelve pairs here: too much for operators of three workloads."""
    few = divide(plans(*(3,) * 6), 4)
    assert sum(len(item.plans) for item in few) == 6
    uneven = divide(plans(40, 6, 6, 6, 6), 4)
    parts = Counter(plan.definition.name for item in uneven for plan in item.plans)
    assert parts.pop("scale_0") > 1
    assert set(parts.values()) == {1}


def test_lost_work_is_repeated_then_done_singly_then_given_up(plans):
    queue = WorkQueue.of(divide(plans(3), 1))
    item = queue.take()
    done = {item.uuids[0]}
    queue.lose(item, done, "killed")
    again = queue.take()
    assert again.uuids == item.uuids[1:]
    queue.lose(again, set(), "killed again")
    singles = [queue.take(), queue.take()]
    assert [single.uuids for single in singles] == [[uuid] for uuid in again.uuids]
    assert queue.take() is None
    queue.lose(singles[0], set(), "and again")
    assert queue.take() is None
    assert [given_up.losses for given_up in queue.given_up] == [("killed", "killed again", "and again")]
    assert len(queue.given_up[0].losses) == MAX_LOSSES


def test_concluded_work_of_a_dead_supervisor_is_not_repeated(plans):
    queue = WorkQueue.of(divide(plans(2), 1))
    item = queue.take()
    queue.lose(item, set(item.uuids), "killed")
    assert queue.take() is None
    assert queue.given_up == []
