"""How a Definition says that it is served: what is refused and by which name, and that no digest depends on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from raising import raises
from shipped_records import CATALOG

from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition

SERVED = [record for record in CATALOG.definitions.values() if record.serving is not None]


def restated(name: str, **changes: Any) -> Definition:
    content = CATALOG.definition(name).to_dict()
    serving = {key: value for key, value in {**content["serving"], **changes}.items() if value is not None}
    return Definition.from_dict({**content, "serving": serving}, "d.json")


@pytest.mark.records("record")
@pytest.mark.parametrize("record", SERVED, ids=lambda record: record.name)
def test_what_is_said_of_serving_changes_no_digest(record: Definition) -> None:
    without = Definition.from_dict({key: value for key, value in record.to_dict().items() if key != "serving"})
    assert without.digest == record.digest
    lock = json.loads((shipped_root() / "definitions" / "definitions.lock.json").read_text())
    assert lock[record.name][record.version] == record.digest


@pytest.mark.parametrize(
    ("name", "changes", "code", "fact"),
    [
        ("rms_norm", {"parts": "norm"}, "key_unknown", "'serving.parts'"),
        ("rms_norm", {"part": "two words"}, "text_pattern", "serving.part: "),
        ("rms_norm", {"part": None}, "serving_without_part", "'serving.part'"),
        ("rms_norm", {"code": [{"fingerprint": "a7df"}]}, "text_pattern", "serving.code.0.fingerprint: "),
        (
            "rms_norm",
            {"code": [{"fingerprint": "a" * 16}] * 2},
            "serving_code_repeated",
            "serving.code.1.fingerprint",
        ),
        (
            "rms_norm",
            {"code": [{"fingerprint": "a" * 16, "attributes": {"eps": "a.b"}}]},
            "text_pattern",
            "serving.code.0.attributes.eps",
        ),
        ("rms_norm", {"rows": "K"}, "serving_axis_unknown", "'K'"),
        ("rms_norm", {"rows": "N"}, "serving_rows", "serving.rows: 'x'"),
        ("rope_neox", {"rows": "B"}, "serving_rows", "serving.rows: 'q'"),
        ("rms_norm", {"outputs": {"y": {"like": "x"}}}, "output_unknown", "serving.outputs.y: "),
        (
            "fused_add_rms_norm",
            {"outputs": {"residual_out": {"like": "x"}}},
            "output_unknown",
            "serving.outputs.residual_out: ",
        ),
        (
            "rms_norm",
            {"outputs": {"out": {"like": "weight"}}},
            "output_layout_like",
            "serving.outputs.out: 'weight'",
        ),
        ("rms_norm", {"outputs": {"out": {}}}, "output_layout_ambiguous", "serving.outputs.out: "),
        ("rms_norm", {"outputs": {"out": {"order": [0, 0]}}}, "output_layout_order", "serving.outputs.out: "),
        ("rms_norm", {"outputs": {"out": {"order": [0, 2, 1]}}}, "output_layout_rank", "serving.outputs.out: "),
        ("attention_decode", {"growing": "B"}, "growing_in_output", "serving.growing: 'B'"),
        ("rope_neox", {"independent": [["K"]]}, "serving_axis_unknown", "serving.independent.0"),
        ("rope_neox", {"independent": [["B"], ["Hq", "B"]]}, "serving_axis_repeated", "serving.independent.1"),
        ("attention_decode", {"independent": [["B"], ["L"]]}, "serving_axis_in_no_output", "serving.independent.1: "),
        ("rms_norm", {"includes": "rms_norm"}, "serving_of_itself", "serving.includes"),
        ("rms_norm", {"after": "rms_norm"}, "serving_of_itself", "serving.after"),
        ("rms_norm", {"part": None, "code": [], "after": "swiglu"}, "serving_without_part", "serving.after"),
        ("rms_norm_backward", {"part": "norm"}, "serving_of_backward", "'rms_norm'"),
    ],
)
def test_what_does_not_fit_is_named(name: str, changes: dict[str, Any], code: str, fact: str) -> None:
    with raises(RecordError, code, fact):
        restated(name, **changes)
