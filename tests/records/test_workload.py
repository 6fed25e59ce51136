from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from tilegym_db.errors import HardwareError, RecordError
from tilegym_db.records import Definition, Workload, axes_key
from tilegym_db.records.definition_parts import accepts, contiguous_strides, layout_class, layout_strides
from tilegym_db.records.hardware import (
    GPU_SLUGS,
    gpu_base,
    gpu_family,
    gpu_slug,
    gpus_meant,
    normalise_target,
    parse_gpu,
    same_gpu,
)


@pytest.fixture
def make(workload_record):
    return lambda **changes: Workload.from_dict(workload_record(**changes), "w.jsonl:1")


def test_the_uuid_is_that_of_the_content_whatever_the_tags(make):
    workload = make()
    assert make(tags=["other"]).uuid == workload.uuid
    assert make(uuid=workload.uuid) == workload
    assert make(axes={"N": 8, "M": 4}).uuid == workload.uuid
    assert make(axes={"M": 4, "N": 9}).uuid != workload.uuid
    assert make(layouts={"x": "strided(2 * N, 1)"}).uuid != workload.uuid


def test_layout_classes_are_those_of_the_strides(make, definition_record):
    definition = Definition.from_dict(definition_record())
    assert make().layout_classes(definition) == {}
    assert make(layouts={"x": "strided(N, 1)"}).layout_classes(definition) == {}
    assert make(layouts={"x": "strided(2 * N, 1)"}).layout_classes(definition) == {"x": "row_contiguous"}
    assert make(layouts={"x": "strided(1, M)"}).layout_classes(definition) == {"x": "strided"}
    with raises(RecordError, "stride_negative"):
        make(layouts={"x": "strided(N - 100, 1)"}).check_against(definition)


def test_axes_are_spelled_in_one_way():
    assert axes_key({"N": 4096, "M": 1}) == "M=1,N=4096"


@given(st.lists(st.integers(0, 6), max_size=4))
def test_contiguous_strides_are_contiguous(shape):
    assert layout_class(shape, contiguous_strides(shape)) == "contiguous"


def test_strides_may_hold_commas_inside_calls():
    assert layout_strides("strided(max(M, N), 1)", (4, 8), {"M": 4, "N": 8}) == (8, 1)


def test_a_wider_class_accepts_a_narrower_one():
    assert accepts("strided", "contiguous")
    assert not accepts("contiguous", "row_contiguous")


@pytest.mark.parametrize(
    ("driver", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce GTX 1080 Ti", "geforce-gtx-1080-ti"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA GB10", "gb10"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-sxm-mig-1g-10gb"),
        ("NVIDIA H200 MIG 1c.3g.71gb", "h200-mig-1c-3g-71gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090-d"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090-ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
        ("GRID A100-10C", "grid-a100-10c"),
    ],
)
def test_the_drivers_name_decides_the_slug(driver, slug):
    assert gpu_slug(driver) == slug


def test_a_family_covers_its_members_and_a_slug_only_itself():
    assert same_gpu("h100", "h100-sxm")
    assert not same_gpu("h100-sxm", "h100-pcie")
    assert not same_gpu("h200", "h200-nvl")
    assert all(same_gpu(slug, slug) for slug in GPU_SLUGS)
    assert gpu_family("rtx-pro-6000") == "rtx-pro-6000"


def test_part_or_variant_of_a_gpu_is_another_gpu():
    for driver in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL"):
        slug = gpu_slug(driver)
        assert not same_gpu(gpu_base(slug), slug) or gpu_base(slug) == slug
        assert not same_gpu(slug, gpu_base(slug)) or gpu_base(slug) == slug
    assert not same_gpu("h100", "h100-sxm-mig-1g-10gb")
    assert gpu_base("h100-sxm-mig-1g-10gb") == "h100-sxm"
    assert not same_gpu("a100-sxm", "a100-sxm-40gb")
    assert same_gpu("a100", "a100-sxm-40gb")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h20", "h20"),
        ("NVIDIA H20", "h20"),
        ("nvidia h100 80gb hbm3", "h100-sxm"),
        ("H100 80GB HBM3 MIG 1g.10gb", "h100-sxm-mig-1g-10gb"),
        ("h100-sxm-mig-1g-10gb", "h100-sxm-mig-1g-10gb"),
        ("a100-sxm-40gb", "a100-sxm-40gb"),
        ("NVIDIA GeForce RTX 6090", "geforce-rtx-6090"),
        ("v100", "v100"),
    ],
)
def test_gpu_is_named_by_slug_family_or_driver(text, name):
    assert parse_gpu(text) == name


def test_gpu_that_has_traces_is_known():
    assert parse_gpu("b9000", ["b9000"]) == "b9000"
    with raises(HardwareError, "gpu_unknown", "'b9000'"):
        parse_gpu("b9000")


def test_an_unknown_gpu_or_target_lists_the_known_ones():
    assert parse_gpu(" H100 ") == "h100"
    with raises(HardwareError, "gpu_unknown", "'h1000'", "'h100'"):
        parse_gpu("h1000")
    assert [normalise_target(text) for text in ("sm_90", "sm_90a", "90", "SM_120f")] == [
        "sm_90",
        "sm_90",
        "sm_90",
        "sm_120",
    ]
    with raises(HardwareError, "target_unknown", "'sm_70'", "sm_80"):
        normalise_target("sm_70")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "GPU:1"])
def test_device_of_pytorch_is_refused_with_what_to_ask_for(name):
    with raises(HardwareError, "gpu_unknown", "is auto", repr(name)):
        parse_gpu(name)


@pytest.mark.parametrize("name", ["gfx942", "MI300X", "Radeon RX 7900"])
def test_gpu_of_amd_is_refused_with_what_works_there(name):
    with raises(HardwareError, "gpu_unknown", "--gpu cpu", repr(name)):
        parse_gpu(name)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("h100", ["h100-pcie", "h100-sxm"]),
        ("h100-sxm", ["h100-sxm"]),
        ("h100-nvl", []),
        ("h200", ["h200"]),  # the slug of one GPU before the family of several
        ("a100", []),
    ],
)
def test_name_means_the_gpu_called_so_or_all_of_that_family(asked, meant):
    assert gpus_meant(asked, ["h200", "h200-nvl", "h100-sxm", "cpu", "h100-pcie", "h100-sxm"]) == meant
