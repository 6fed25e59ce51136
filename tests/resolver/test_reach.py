"""How far measured points reach: in the range of every axis, and a little beyond it along work that is only repeated."""

from __future__ import annotations

from typing import Any

import pytest
from shipped_records import CATALOG as SHIPPED

from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.resolver import Decision, decide, load_table, make_request
from tilegym_db.resolver.decide import axes_beyond

HEADS: dict[str, Any] = {
    "axes": {name: {"type": "var"} for name in ("B", "Hq", "Hkv", "D")},
    "inputs": {
        "q": {"shape": ["B", "Hq", "D"], "dtype": "float32"},
        "k": {"shape": ["B", "Hkv", "D"], "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["B", "Hq", "D"], "dtype": "float32"}},
    "cost": {"flops": "B * Hq * D", "bytes": "4 * B * (Hq + Hkv) * D"},
    "reference": "def run(q, k):\n    return q * k.mean(1, keepdim=True)\n",
    "serving": {"independent": [["B"], ["Hq", "Hkv"]]},
}
POINTS = (
    {"B": 1, "Hq": 8, "Hkv": 2, "D": 64},
    {"B": 8, "Hq": 8, "Hkv": 4, "D": 64},
    {"B": 8, "Hq": 32, "Hkv": 8, "D": 128},
)


@pytest.fixture
def decide_heads(shop: Any) -> Any:
    """Decide about sizes of ``heads``, published at :data:`POINTS`; changes are of its one candidate."""
    shop.define("heads", **HEADS)
    kernel = shop.add("heads", "heads_kernel", "def run(q, k, out):\n    out.copy_(q * k.mean(1, keepdim=True))\n")

    def ask(axes: dict[str, int], **changes: Any) -> Decision:
        entries = [shop.entry("heads", point, [shop.candidate(kernel, **changes)]) for point in POINTS]
        shop.publish(entries, gpu="h200")
        request = make_request(shop.definition("heads"), Call("heads", axes), gpu="h200")
        return decide(request, load_table("h200"), {kernel.name: kernel})

    return ask


@pytest.mark.parametrize(
    ("axes", "beyond"),
    [
        ({"B": 4, "Hq": 16, "Hkv": 4, "D": 64}, ()),
        ({"B": 2, "Hq": 64, "Hkv": 16, "D": 64}, ("Hq", "Hkv")),
        ({"B": 32, "Hq": 8, "Hkv": 2, "D": 64}, ("B",)),
        ({"B": 8, "Hq": 4, "Hkv": 1, "D": 128}, ("Hq", "Hkv")),
    ],
)
def test_more_or_less_of_independent_work_is_served_and_said(decide_heads: Any, axes: Any, beyond: Any) -> None:
    decision = decide_heads(axes)
    assert decision.solution is not None
    assert decision.evidence.source == "nearest"
    said = f"beyond the measured range of {' and '.join(beyond)}, more or less of which is only repeated"
    assert (said in decision.evidence.reason) == bool(beyond)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"B": 8, "Hq": 16, "Hkv": 4, "D": 256}, "D=256 is outside the measured range 64..128"),
        (
            {"B": 8, "Hq": 16, "Hkv": 16, "D": 64},
            "Hkv=16 is outside the measured range 2..8, and so is Hkv/Hq=1 (measured: 0.25..0.5)",
        ),
        (
            {"B": 33, "Hq": 8, "Hkv": 2, "D": 64},
            "B=33 is outside the measured range 1..8, and further from it than a factor of 4",
        ),
        ({"B": 32, "Hq": 32, "Hkv": 8, "D": 128}, "B=32 was not measured, and its 0.655 MB are outside the measured"),
        ({"B": 1, "Hq": 4, "Hkv": 1, "D": 64}, "Hq=4 was not measured, and its 0.00128 MB are outside the measured"),
        ({"B": 0, "Hq": 8, "Hkv": 2, "D": 64}, "B=0 is outside the measured range 1..8, and further from it"),
    ],
)
def test_other_work_than_measured_stays_stock_with_a_reason(decide_heads: Any, axes: Any, reason: str) -> None:
    decision = decide_heads(axes)
    assert decision.solution is None
    assert decision.evidence.reason.startswith(reason)


def test_kernel_beyond_the_range_needs_fuzz_cases(decide_heads: Any) -> None:
    decision = decide_heads({"B": 32, "Hq": 8, "Hkv": 2, "D": 64}, envelope_cases=0)
    assert decision.solution is None
    assert "without fuzz cases" in decision.rejected[0].reason


def test_one_measured_size_does_not_extend_the_range() -> None:
    definition = Definition.from_dict(
        {
            "name": "heads",
            "version": "1.0.0",
            "op_type": "toy",
            **HEADS,
            "reference": f"# Source: x\n{HEADS['reference']}",
        }
    )
    asked = {"B": 2, "Hq": 8, "Hkv": 2, "D": 64}
    points = [POINTS[0], {**POINTS[0], "Hq": 16, "Hkv": 4, "D": 128}]
    found = axes_beyond(definition, asked, {}, points)
    assert found == (
        "B=2 is outside the measured range 1..1, and 1 measured size does not show that more of it is only more work"
    )


@pytest.mark.parametrize(
    "name",
    [
        "rope_neox",
        "rope_partial",
        "rope_neox_backward",
        "rope_half_tables",
        "rope_pairs",
        "rope_pairs_to_halves",
        "rope_complex_pairs",
        "rope_tail_pairs",
        "attention_prefill",
        "attention_decode",
        "attention_masked_prefill",
        "attention_masked_decode",
    ],
)
def test_independent_axes_of_shipped_operators_multiply_cost(name: str) -> None:
    """Twice a whole group is twice the flops; by itself, the group of one operand adds to the others'."""
    definition = SHIPPED.definition(name)
    workload = max(SHIPPED.workloads_for(name), key=lambda item: sum(item.axes.values()))
    axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
    assert definition.serving is not None
    groups = definition.serving.independent
    assert groups
    flops = definition.cost_of(axes, dtypes)[0]
    heads = {axis: 2 * axes[axis] for group in groups for axis in group if axis not in ("B", "S")}
    for doubled in ({"B": 2 * axes["B"]}, heads):
        assert definition.cost_of({**axes, **doubled}, dtypes)[0] == 2 * flops


def test_rope_with_equal_head_counts_is_served() -> None:
    """OLMoE has 16 of each; 4 to 8 key heads were measured when this was refused."""
    definition = SHIPPED.definition("rope_neox")
    request = make_request(
        definition,
        Call(
            "rope_neox",
            axes={"B": 1, "Hq": 16, "Hkv": 16, "S": 2048, "D": 128, "Bc": 1},
            dtypes={"T": "bfloat16"},
            layouts={"q": "row_contiguous", "k": "row_contiguous"},
        ),
        gpu="h200",
    )
    solutions = {files.name: files for files in SHIPPED.solutions_for("rope_neox")}
    assert decide(request, load_table("h200"), solutions).solution is not None
