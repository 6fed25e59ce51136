from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.scaffold.model_config import read_model_config, typed_config, workloads_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
WANTED = {
    "rms_norm": {"M": 512, "N": 2048},
    "swiglu": {"M": 512, "I": 8192},
    "rope_neox": {"B": 1, "Hq": 32, "Hkv": 8, "S": 512, "D": 64, "Bc": 1},
    "qk_rms_norm": {"M": 512, "Hq": 32, "Hkv": 8, "D": 64},
    "attention_prefill": {"B": 1, "Hq": 32, "Hkv": 8, "S": 512, "D": 64},
    "attention_decode": {"B": 1, "Hq": 32, "Hkv": 8, "L": 512, "D": 64},
}


def mapped(name, config, **options):
    definition = Catalog.default().definition(name)
    return workloads_from_config(definition, config, model="m", **{"tokens": [512], **options})


@pytest.mark.parametrize("name", WANTED)
def test_sizes_of_a_llama_become_the_axes_of_the_definition(name):
    (workload,) = mapped(name, LLAMA).workloads
    assert workload.axes == WANTED[name]
    assert workload.dtypes == {"T": "bfloat16"}
    assert "model:m" in workload.tags


def test_every_scalar_has_the_value_of_the_config():
    assert mapped("rms_norm", LLAMA).workloads[0].scalars() == {"eps": 1e-5}
    assert mapped("attention_prefill", LLAMA).workloads[0].scalars() == {"scale": 0.125}


def test_missing_value_of_a_config_is_named_and_nothing_is_made():
    found = mapped("gemm", LLAMA)
    assert found.workloads == ()
    assert set(found.unmapped) == {"N", "K"}
    assert "output features" in found.unmapped["N"]
    assert set(mapped("rms_norm", {}).unmapped) == {"N", "eps"}


def test_given_sizes_and_scalars_win_over_the_config():
    found = mapped("gemm", LLAMA, axes={"N": 4096, "K": 2048}, tokens=[1, 64])
    assert [workload.axes for workload in found.workloads] == [
        {"M": 1, "N": 4096, "K": 2048},
        {"M": 64, "N": 4096, "K": 2048},
    ]
    assert [workload.tags[-1] for workload in found.workloads] == ["stage:decode", "stage:prefill"]
    assert mapped("rms_norm", LLAMA, scalars={"eps": 1e-6}).workloads[0].scalars() == {"eps": 1e-6}
    with raises(UsageError, "name_unknown", "'Q'"):
        mapped("gemm", LLAMA, axes={"Q": 1})


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        ({"n_embd": 768, "n_head": 12, "layer_norm_epsilon": 1e-5}, {"Hq": 12, "Hkv": 12, "D": 64, "M": 512}),
        (
            {"hidden_size": 1024, "num_attention_heads": 8, "rms_norm_eps": 1e-6},
            {"Hq": 8, "Hkv": 8, "D": 128, "M": 512},
        ),
    ],
)
def test_unstated_head_sizes_follow_from_the_hidden_size(config, axes):
    assert mapped("qk_rms_norm", config).workloads[0].axes == axes


def test_the_rotated_part_of_a_head_follows_from_its_factor():
    (workload,) = mapped("rope_partial", {**LLAMA, "head_dim": 128, "partial_rotary_factor": 0.75}).workloads
    assert workload.axes["R"] == 96


def test_text_model_of_a_config_with_several_models_counts(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "both", "text_config": LLAMA, "vision_config": {"hidden_size": 1}}))
    assert read_model_config(path)["hidden_size"] == 2048
    path.write_text("[]")
    with raises(RecordError, "object_expected", str(path), "list"):
        read_model_config(path)


def test_excluded_sizes_are_left_out_with_their_constraint():
    found = mapped("attention_prefill", {**LLAMA, "head_dim": 512})
    assert found.workloads == ()
    assert "D <= 256" in found.refused[0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('"rms_norm_eps": NaN', "config_number_invalid"),
        ('"rope_theta": Infinity', "config_number_invalid"),
        ('"text_config": {"eps": -Infinity}', "config_number_invalid"),
        ('"limits": [0.0, NaN]', "config_number_invalid"),
        ('"note": "\\ud800"', "config_text_invalid"),
        ('"\\udfff": 1', "config_text_invalid"),
        ('"names": ["\\ud800"]', "config_text_invalid"),
    ],
)
def test_config_that_no_record_can_keep_is_refused_at_once(text: str, code: str, tmp_path: Path) -> None:
    from tilegym_db.models.random_model import load_config

    file = tmp_path / "config.json"
    file.write_text(f'{{"model_type": "llama", {text}}}')
    for read in (read_model_config, load_config):
        with raises(UsageError, code, str(file)):
            read(file)


def test_infinite_limit_in_a_list_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert read_model_config(file)["time_step_limit"][1] == float("inf")


def test_id_of_a_model_names_a_config_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "models--Some--Model" / "snapshots" / "abc"
    kept.mkdir(parents=True)
    (tmp_path / "models--Some--Model" / "refs").mkdir()
    (tmp_path / "models--Some--Model" / "refs" / "main").write_text("abc")
    (kept / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file, content = typed_config(Path("Some/Model"))
    assert (file.name, content) == ("config.json", {"model_type": "llama"})
    with pytest.raises(UsageError, match=r"Try: hf download Other/Model config\.json") as error:
        typed_config(Path("Other/Model"))
    assert error.value.code == "config_missing"
    with pytest.raises(UsageError, match=r"does not exist"):
        typed_config(Path("absent.json"))
