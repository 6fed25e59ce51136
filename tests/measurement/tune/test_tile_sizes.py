"""Tile sizes of vLLM's fused_moe name the nearest configs of our Triton experts, or the reason that they say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.measurement.tune.search import ConfigCandidate, candidate_order, history_of
from tilegym_db.measurement.tune.tile_sizes import Start, read_tile_sizes, starts
from tilegym_db.measurement.tune.tune import tune
from tilegym_db.paths import shipped_root

NAME = "E=128,N=768,device_name=NVIDIA_H200.json"
FEW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 4}
MANY = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 16,
    "num_warps": 8,
    "num_stages": 4,
}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


def table(folder: Path, name: str = NAME, content: object = None) -> Path:
    (folder / name).write_text(json.dumps({"1": FEW, "4096": {**MANY, "SPLIT_K": 1}} if content is None else content))
    return folder / name


def found(catalog: Catalog, path: Path, definition: str, tokens: int, experts: int = 128) -> list[Start] | str:
    record = catalog.definition(definition)
    axes = {"M": tokens, "E": experts}
    workload = next(row for row in catalog.workloads_for(definition) if axes.items() <= row.axes.items())
    return starts(read_tile_sizes(path), catalog.solution(f"{definition}_triton"), record, workload)


def test_nearest_configs_have_the_sizes_of_the_table(catalog: Catalog, tmp_path: Path) -> None:
    many = found(catalog, table(tmp_path), "moe_experts", 4096)
    assert not isinstance(many, str)
    assert many[0].config == {"BLOCK_M": 128, "UP": 0, "DOWN": 0, "GROUP_M": 8}  # (128, 64, 8, 4) and (256, 64, 8, 4)
    assert many[0].reason == "nearest to vLLM's tile sizes at M=4096 on NVIDIA_H200"
    few = found(catalog, table(tmp_path), "moe_experts", 4)
    assert not isinstance(few, str)
    assert few[0].config == {"BLOCK_M": 16, "UP": 1, "DOWN": 0, "GROUP_M": 1}  # (32, 128, 4, 4) and (64, 128, 4, 4)


@pytest.mark.parametrize(
    ("definition", "tokens", "experts", "name", "reason"),
    [
        ("moe_experts", 1, 64, NAME, "the tile sizes are for E=128 and I=768"),
        ("moe_experts_fp8", 16, 128, NAME, "takes float8_e4m3fn"),
        ("moe_experts", 16, 128, NAME.replace(".json", ",dtype=fp8_w8a8,block_shape=[128,128].json"), "takes bfloat16"),
    ],
)
def test_sizes_of_another_layer_are_not_used(
    definition: str, tokens: int, experts: int, name: str, reason: str, catalog: Catalog, tmp_path: Path
) -> None:
    answer = found(catalog, table(tmp_path, name), definition, tokens, experts)
    assert isinstance(answer, str)
    assert reason in answer


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("config.json", None, "tile_sizes_name"),
        (NAME.replace(".json", ",dtype=int4_w4a16.json"), None, "tile_sizes_dtype"),
        (NAME, {"1": {"BLOCK_SIZE_M": 16}}, "tile_sizes_content"),
        (NAME, {"1": {**FEW, "num_warps": 0}}, "tile_sizes_content"),
        (NAME, {"1": {**FEW, "BLOCK_SIZE_M": 10**400}}, "tile_sizes_content"),
        (NAME, {"0": FEW}, "tile_sizes_content"),
        (NAME, {"-4": FEW}, "tile_sizes_content"),
        (NAME, {"many": FEW}, "tile_sizes_content"),
        (NAME, {"1_0": FEW}, "tile_sizes_content"),
        (NAME, {"1": FEW, "01": MANY}, "tile_sizes_content"),
        (NAME, {"\u0663": FEW}, "tile_sizes_content"),
        (NAME, {"1": None}, "tile_sizes_content"),
        (NAME.replace("128", "\u0661"), None, "tile_sizes_name"),
        (NAME, {}, "tile_sizes_content"),
        (NAME, [FEW], "tile_sizes_content"),
    ],
)
def test_other_files_are_refused_before_anything_runs(name: str, content: object, code: str, tmp_path: Path) -> None:
    with raises(UsageError, code):
        read_tile_sizes(table(tmp_path, name, content))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (f'{{"1": {json.dumps(FEW)}, "1": {json.dumps(MANY)}}}', "key_repeated"),
        (f'\ufeff{{"1": {json.dumps(FEW)}}}', "text_encoding"),
        (f'{{"1": {json.dumps(FEW)}}} and more', "json_syntax"),
        ("[" * 100_000, "json_syntax"),
    ],
)
def test_text_that_says_two_things_is_refused(content: str, code: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(content)
    with raises(RecordError, code, NAME):
        read_tile_sizes(tmp_path / NAME)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raises(RecordError, "file_unreadable", NAME):
        read_tile_sizes(tmp_path / NAME)


def test_starting_points_are_tried_after_the_defaults(catalog: Catalog, tmp_path: Path) -> None:
    record = catalog.solution("moe_experts_triton").record
    near = found(catalog, table(tmp_path), "moe_experts", 4096)
    assert not isinstance(near, str)
    first = [ConfigCandidate(one.config, one.reason) for one in near]
    order = candidate_order(record, [], history_of([]), "seed", first)
    assert [item.config for item in order[:3]] == [{}, *(one.config for one in near)]
    assert len(order) == len(list(record.configs())) + 1


def test_operator_without_experts_is_refused_at_once(tmp_path: Path) -> None:
    with raises(UsageError, "tile_sizes_unused", "rms_norm"):
        tune("rms_norm", devices="cpu", start=table(tmp_path), store_home=tmp_path / "home")
    assert not (tmp_path / "home" / "tuning").exists()
