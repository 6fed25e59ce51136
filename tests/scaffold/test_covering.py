"""The calls of models, and the points that answer them by the rule of neighbours."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from shipped_records import CATALOG

from tilegym_db.catalog.writers import check_call
from tilegym_db.errors import UsageError
from tilegym_db.published.neighbours import Neighbours, neighbours
from tilegym_db.scaffold.model_calls import FAMILIES, PARALLEL, STAGES, Stage, cover, known_models, models_of, questions

DEFINITIONS = dict(CATALOG.definitions)
BY_NAME = {one["name"]: one for one in known_models()}


def test_list_has_models_of_every_kind() -> None:
    models = known_models()
    assert len(models) >= 60
    assert len(BY_NAME) == len(models)
    assert {one["kind"] for one in models} == {"dense", "moe", "mla", "hybrid", "vision"}
    assert {one["model_type"] for one in models} <= FAMILIES.keys()
    assert PARALLEL == (1, 2, 4, 8)


def test_stages_reach_from_one_sequence_to_long_prompts() -> None:
    assert {min(stage.sequences for stage in STAGES), max(stage.sequences for stage in STAGES)} == {1, 256}
    tokens = [stage.sequences * stage.tokens for stage in STAGES if not stage.is_decode]
    assert (min(tokens), max(tokens)) == (128, 131_072)


def test_calls_of_all_models_fit_their_definitions() -> None:
    stages = (Stage(8, 1, 2048), Stage(1, 2048, 2048))
    for question in questions(known_models(), stages, (1,)):
        if question.definition:
            check_call(DEFINITIONS[question.definition], question.workload())


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gemma-3-4b"])
@pytest.mark.parametrize("known", [False, True])
def test_points_answer_every_question_and_few_are_superfluous(name: str, known: bool) -> None:
    asked = questions([BY_NAME[name]], STAGES, (1, 4))
    workloads = [load for definition in DEFINITIONS for load in CATALOG.workloads_for(definition)] if known else []
    found = cover(asked, DEFINITIONS, workloads)
    again = cover(asked, DEFINITIONS, [*workloads, *(point.workload for point in found.points)])
    assert again.points == ()
    assert again.known + again.undescribed + len(again.refused) >= found.questions - len(found.refused)
    if known:
        assert 0 < len(found.points) < len(cover(asked, DEFINITIONS).points)
    tried, superfluous = found.points[::5], 0
    for left_out in tried:
        others = [point.workload for point in found.points if point is not left_out]
        superfluous += not cover(asked, DEFINITIONS, [*workloads, *others]).points
    assert superfluous <= len(tried) // 10 + 1


def test_rows_need_two_points_and_lengths_a_chain() -> None:
    found = cover(questions([BY_NAME["qwen3-30b-a3b"]], STAGES, (1,)), DEFINITIONS)
    sizes: dict[str, list[int]] = {}
    for point in found.points:
        sizes.setdefault(point.question.definition, []).append(point.question.axes.get("M", 0))
    assert sorted(sizes["topk_softmax"]) == [1, 131_072]
    chain = sorted(sizes["moe_experts"])
    assert (chain[0], chain[-1]) == (1, 131_072)
    assert all(high <= 8 * low for low, high in itertools.pairwise(chain))


def test_every_answer_is_one_of_the_rule() -> None:
    asked = [one for one in questions([BY_NAME["llama-3.1-8b"]], STAGES, (1, 8)) if one.definition == "rms_norm"]
    definition = DEFINITIONS["rms_norm"]
    points = [definition.bind_axes(point.question.axes) for point in cover(asked, DEFINITIONS).points]
    for question in asked:
        axes = definition.bind_axes(question.axes)
        found = neighbours(definition, axes, {"T": "bfloat16"}, points)
        assert axes in points or (isinstance(found, Neighbours) and not found.halves)


def test_unknown_and_incomplete_models_are_refused(tmp_path: Path) -> None:
    with raises(UsageError, "model_type_unknown", "'mystery'"):
        questions([{**BY_NAME["llama-3.1-8b"], "model_type": "mystery"}])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    with raises(UsageError, "config_size_missing", "hidden_size"):
        models_of(str(path))
    with raises(UsageError, "config_missing", "nowhere.json"):
        models_of(str(tmp_path / "nowhere.json"))


def test_config_of_transformers_is_read_as_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
    }
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    (model,) = models_of(str(path))
    assert (model["name"], model["head_dim"], model["num_key_value_heads"]) == ("llama", 16, 4)
