"""What ``recommend`` says of a model's calls, and that it applies nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.loop.from_model import match, recommend
from tilegym_db.models.random_model import build_model, load_config
from tilegym_db.paths import shipped_root
from tilegym_db.records import Workload
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import award_rows

CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.turn("tilegym_db/measurement/awards.py", "traces/")  # of all shipped awards, three times
@pytest.mark.slow
def test_every_call_has_an_award_of_its_operator_or_a_reason(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    found = recommend(config, gpu="h200", prompt=16)
    with open_store(read_only=True) as store:
        standing = {row["id"]: row for row in award_rows(store, gpus=("h200",)) if row["status"] == "standing"}
    assert {"rms_norm", "rope_neox", "swiglu"} <= {call.definition for call in found.calls}
    assert any(call.available for call in found.calls)
    for call in found.calls:
        assert not call.applied
        assert call.available or call.explain.startswith(f"tilegym-db explain {call.definition}")
        if call.available:
            row = standing[call.award]
            assert (row["definition"], row["ratio"], row["ci_low"]) == (call.definition, call.op_ratio, call.op_ci_low)
            assert row["ci_low"] >= 1.10
    # The only figures about the model are of runs of the model, and none was made of this one.
    assert found.to_dict()["model_runs"] == []
    assert "tokens" not in json.dumps(found.to_dict())
    assert not (home / "loop").exists()
    required = recommend(config, gpu="h200", prompt=16, require="batch-invariant")
    assert [call.axes for call in required.calls] == [call.axes for call in found.calls]
    assert not any(call.available for call in required.calls)  # no shipped kernel promises it
    assert all(call.explain.endswith("--require batch-invariant") for call in required.calls)
    assert {
        call.reason.partition(",")[2] for call, free in zip(required.calls, found.calls, strict=True) if free.available
    } == {" none verified as batch-invariant"}
    kept = recommend(config, gpu="h200", prompt=16, require="deterministic")
    assert [call.award for call in kept.calls] == [call.award for call in found.calls]


HYBRID = {
    "model_type": "qwen3_5_text", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.slow
def test_advice_of_transformers_is_silent_only_in_recommend(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its optional packages, transformers warns when the layers of this model run."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HYBRID))
    load_config(config)  # transformers sets its level when it is imported
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(caplog.handler)  # it does not propagate
    try:
        assert recommend(config, gpu="h200", prompt=16).calls
        assert caplog.records == []
        assert logger.level == level
        build_model(load_config(config), "cpu", "float32")  # the same warnings, for a caller that runs the model
        assert any(record.name.startswith("transformers") for record in caplog.records)
    finally:
        logger.removeHandler(caplog.handler)


def award(number: int, axes: dict[str, int], ratio: float) -> dict[str, Any]:
    return {
        "id": f"p{number}", "definition": "rms_norm", "dtypes": {"T": "bfloat16"}, "axes": axes, "ratio": ratio,
        "ci_low": ratio - 0.1, "baseline": "rms_norm_stock",
    }  # fmt: skip


def test_award_of_the_same_size_goes_before_a_faster_other_size() -> None:
    catalog = Catalog((shipped_root(),))
    call = Workload.from_dict(
        {
            "definition": "rms_norm", "axes": {"M": 8, "N": 128}, "dtypes": {"T": "bfloat16"},
            "inputs": {"eps": {"type": "scalar", "value": 1e-5}}, "tags": ["stage:decode"],
        }
    )  # fmt: skip
    near, same = award(1, {"M": 16, "N": 128}, 9.0), award(2, {"M": 8, "N": 128}, 1.3)
    far = award(3, {"M": 4096, "N": 128}, 20.0)
    found = match(call, [near, far, same], catalog, "h200")
    assert (found.award, found.exact, found.op_ratio, found.stage) == ("p2", True, 1.3, "decode")
    found = match(call, [far, near], catalog, "h200")
    assert (found.award, found.exact, found.reason) == ("p1", False, "measured at M=16,N=128")
    found = match(call, [], catalog, "h200")
    assert (found.available, found.award, found.op_ratio) == (False, "", None)
    assert found.explain == "tilegym-db explain rms_norm --axes M=8,N=128 --dtype T=bfloat16 --gpu h200"
