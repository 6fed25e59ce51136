"""How a Definition says that it is served: what is refused and by which name, and that no digest depends on it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition

CATALOG = Catalog((shipped_root(),))
SERVED = [record for record in CATALOG.definitions.values() if record.serving is not None]


def restated(name: str, **changes: Any) -> Definition:
    content = CATALOG.definition(name).to_dict()
    serving = {key: value for key, value in {**content["serving"], **changes}.items() if value is not None}
    return Definition.from_dict({**content, "serving": serving}, "d.json")


@pytest.mark.parametrize("record", SERVED, ids=lambda record: record.name)
def test_what_is_said_of_serving_changes_no_digest(record: Definition) -> None:
    without = Definition.from_dict({key: value for key, value in record.to_dict().items() if key != "serving"})
    assert without.digest == record.digest
    lock = json.loads((shipped_root() / "definitions" / "definitions.lock.json").read_text())
    assert lock[record.name][record.version] == record.digest


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("rms_norm", {"parts": "norm"}, "unknown key 'serving.parts'"),
        ("rms_norm", {"part": "two words"}, "serving.part: String should match"),
        ("rms_norm", {"part": None}, "serving.code is about a part of a model; name it in 'serving.part'"),
        ("rms_norm", {"code": [{"fingerprint": "a7df"}]}, "serving.code.0.fingerprint: String should match"),
        (
            "rms_norm",
            {"code": [{"fingerprint": "a" * 16}] * 2},
            "serving.code.1.fingerprint aaaaaaaaaaaaaaaa is stated twice",
        ),
        (
            "rms_norm",
            {"code": [{"fingerprint": "a" * 16, "attributes": {"eps": "a.b"}}]},
            "serving.code.0.attributes.eps",
        ),
        ("rms_norm", {"rows": "K"}, "serving.rows names 'K', which is no var axis"),
        ("rms_norm", {"rows": "N"}, "serving.rows: 'x' must have two dimensions, and 'N' as the first"),
        ("rope_neox", {"rows": "B"}, "serving.rows: 'q' must have two dimensions, and 'B' as the first"),
        ("rms_norm", {"outputs": {"y": {"like": "x"}}}, "serving.outputs.y: no such output that is written"),
        (
            "fused_add_rms_norm",
            {"outputs": {"residual_out": {"like": "x"}}},
            "serving.outputs.residual_out: no such output",
        ),
        (
            "rms_norm",
            {"outputs": {"out": {"like": "weight"}}},
            "serving.outputs.out: 'weight' must be an input of the same",
        ),
        ("rms_norm", {"outputs": {"out": {}}}, "an output layout states either 'like' or 'order'"),
        ("rms_norm", {"outputs": {"out": {"order": [0, 0]}}}, "'order' must name every dimension once"),
        ("rms_norm", {"outputs": {"out": {"order": [0, 2, 1]}}}, "'order' has 3 dimensions, the output 2"),
        ("attention_decode", {"growing": "B"}, "serving.growing: 'B' is an axis of an output too"),
        ("rope_neox", {"independent": [["K"]]}, "serving.independent.0 names 'K', which is no var axis"),
        ("rope_neox", {"independent": [["B"], ["Hq", "B"]]}, "serving.independent.1 names 'B', which is stated twice"),
        ("attention_decode", {"independent": [["B"], ["L"]]}, "serving.independent.1: no output has one of these axes"),
        ("rms_norm", {"includes": "rms_norm"}, "serving.includes names the definition itself, 'rms_norm'"),
        ("rms_norm", {"after": "rms_norm"}, "serving.after names the definition itself, 'rms_norm'"),
        ("rms_norm", {"part": None, "code": [], "after": "swiglu"}, "serving.after is about a part of a model"),
        ("rms_norm_backward", {"part": "norm"}, "serving.part: a backward is served with 'rms_norm'"),
    ],
)
def test_what_does_not_fit_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as raised:
        restated(name, **changes)
    assert message in str(raised.value)
