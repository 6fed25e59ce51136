"""How far measured points reach: in the range of every axis, and a little beyond it along work that is only repeated."""

from __future__ import annotations

from typing import Any

import pytest
from shipped_records import CATALOG as SHIPPED

from tilegym_db.published.neighbours import same_tiles
from tilegym_db.published.table import load_table
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.resolver.decide import Decision, axes_beyond, decide
from tilegym_db.resolver.resolve import make_request

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


# ---- padding and known cost -------------------------------------------------------------------------

ROWS: dict[str, Any] = {
    "axes": {name: {"type": "var"} for name in ("M", "N")},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "float32"}},
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "float32"}},
    "cost": {"flops": "M * N", "bytes": "8 * M * N"},
    "reference": "def run(x):\n    return x / x.norm(dim=-1, keepdim=True)\n",
    "serving": {"independent": [["M"]]},
}
PADDING_NORM = """
def run(x, out):
    width = 1 << (x.shape[1] - 1).bit_length()
    padded = x.new_zeros(x.shape[0], width)
    padded[:, : x.shape[1]] = x
    out.copy_((padded / padded.norm(dim=-1, keepdim=True))[:, : x.shape[1]])
"""


@pytest.mark.parametrize(
    ("width", "low", "reason"),
    [
        (4096, 1.03, ""),
        (3072, 1.30, "N=3072 was not measured, and padding may cost 1.33 times more than at N=4096"),
        (3072, 1.60, ""),
        (2064, 1.9, "N=2064 was not measured, and padding may cost 1.98 times more than at N=2048"),
        (4080, 1.05, ""),
    ],
)
def test_kernel_serves_other_widths_if_its_lead_outlasts_padding(
    shop: Any, width: int, low: float, reason: str
) -> None:
    shop.define("row_norm", **ROWS)
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    points = [{"M": rows, "N": size} for size in (2048, 4096) for rows in (1, 4096)]
    shop.publish(
        [shop.entry("row_norm", point, [shop.candidate(kernel, speedup_ci_low=low)]) for point in points], gpu="h200"
    )
    request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": 64, "N": width}), gpu="h200")
    decision = decide(request, load_table("h200"), {kernel.name: kernel})
    assert (decision.solution is None) == bool(reason)
    if reason:
        assert decision.rejected[0].reason.startswith(reason)
        assert decision.evidence.reason.endswith("if it pads N")
    elif width == 3072:
        assert decision.evidence.reason.endswith(
            "may cost 1.33 times more than there, which leaves at least 1.20x stock"
        )


def test_padding_counts_if_a_definition_states_no_kinds_of_axes(shop: Any) -> None:
    """Its rows are outermost in every tensor, so only their width may be padded."""
    shop.define("row_norm", **{**ROWS, "serving": None})
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    points = [{"M": rows, "N": size} for size in (2048, 4096) for rows in (1, 4096)]
    candidate = shop.candidate(kernel, speedup_ci_low=1.3)
    shop.publish([shop.entry("row_norm", point, [candidate]) for point in points], gpu="h200")

    def ask(rows: int, width: int) -> Decision:
        request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": rows, "N": width}), gpu="h200")
        return decide(request, load_table("h200"), {kernel.name: kernel})

    assert ask(3, 4096).solution is not None
    assert ask(3, 3584).solution is not None
    assert ask(3, 3072).solution is None


@pytest.mark.parametrize("width", [2049, 2056, 4095])
def test_unaligned_width_needs_a_point_as_unaligned(shop: Any, width: int) -> None:
    """Rows of such a width begin at other addresses, so that no vectors are read."""
    shop.define("row_norm", **ROWS)
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    points = [{"M": rows, "N": size} for size in (2048, 4096) for rows in (1, 4096)]
    entries = [shop.entry("row_norm", point, [shop.candidate(kernel, speedup_ci_low=9.0)]) for point in points]
    shop.publish(entries, gpu="h200")

    def ask(width: int) -> Decision:
        request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": 64, "N": width}), gpu="h200")
        return decide(request, load_table("h200"), {kernel.name: kernel})

    decision = ask(width)
    assert decision.solution is None
    assert decision.evidence.reason.startswith(f"N={width} was not measured, and it is no multiple of 16")
    assert ask(2064).solution is not None
    slow = shop.candidate(kernel, speedup_ci_low=0.9)
    shop.publish([*entries, shop.entry("row_norm", {"M": 4096, "N": 4093}, [slow])], gpu="h200")
    assert ask(width).solution is None
    assert ask(width).evidence.axes == {"M": 4096, "N": 4093}
    assert ask(2064).solution is not None


def test_norm_padding_to_a_power_of_two_serves_measured_widths(shop: Any) -> None:
    """It was measured at 2048 and 4096, which need no padding, and is slower than stock code at 3072."""
    shop.define("row_norm", **ROWS)
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    points = [{"M": rows, "N": width} for width in (2048, 4096) for rows in (1, 4096)]
    shop.publish(
        [shop.entry("row_norm", point, [shop.candidate(kernel, speedup_ci_low=9.0)]) for point in points], gpu="h200"
    )

    def ask(rows: int, width: int) -> Decision:
        request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": rows, "N": width}), gpu="h200")
        return decide(request, load_table("h200"), {kernel.name: kernel}, rule="known")

    assert ask(64, 2048).solution is not None
    assert ask(8192, 4096).solution is not None
    for width in (3072, 2049, 4095, 1024, 8192):
        decision = ask(64, width)
        assert decision.solution is None
        assert decision.evidence.reason.startswith(f"N={width} was not measured (measured: 2048, 4096)")


@pytest.mark.parametrize(
    ("stated", "rows", "reason"),
    [
        ({}, 16384, ""),
        ({}, 16385, "M=16385 is beyond 16384, up to which its indices are known to be right"),
        ({"largest": {"M": 131_072}, "largest_elements": 1 << 31}, 131_072, ""),
        ({"largest": {"M": 131_072}, "largest_elements": 1 << 31}, 131_073, "M=131073 is beyond 131072"),
        ({"largest": {"M": 131_072}, "largest_elements": 1 << 24}, 131_072, "a tensor of 268435456 elements is beyond"),
    ],
)
def test_trace_states_how_far_indices_were_verified(shop: Any, stated: Any, rows: int, reason: str) -> None:
    shop.define("row_norm", **ROWS)
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    points = [({"M": size, "N": 2048}, size / 100) for size in (1024, 4096)]
    shop.publish([shop.entry("row_norm", at, [shop.candidate(kernel, us, **stated)]) for at, us in points], gpu="h200")
    request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": rows, "N": 2048}), gpu="h200")
    decision = decide(request, load_table("h200"), {kernel.name: kernel}, rule="known")
    assert (decision.solution is None) == bool(reason)
    assert reason in ([*(why for _, why in decision.rejected), ""][0])


def test_kernel_losing_its_lead_with_work_is_not_served_beyond(shop: Any) -> None:
    """It saves launches: 10 us at any work, while its time grows as that of stock code."""
    shop.define("row_norm", **ROWS)
    kernel = shop.add("row_norm", "row_norm_kernel", PADDING_NORM)
    times = {1024: (10.0, 20.0), 4096: (40.0, 50.0)}
    entries = [
        shop.entry(
            "row_norm",
            {"M": rows, "N": 2048},
            [shop.candidate(kernel, us, speedup=stock / us, speedup_ci_low=stock / us - 0.01)],
        )
        for rows, (us, stock) in times.items()
    ]
    shop.publish(entries, gpu="h200")
    for rows, served in ((4096, True), (2048, True), (8192, False)):
        request = make_request(shop.definition("row_norm"), Call("row_norm", {"M": rows, "N": 2048}), gpu="h200")
        decision = decide(request, load_table("h200"), {kernel.name: kernel}, rule="known")
        assert (decision.solution is not None) == served
    assert decision.rejected[0].reason == "more work costs it 30.00 us and stock code 30.00 us"


@pytest.mark.parametrize(
    ("size", "measured", "same"),
    [
        (4096, 4096, True),
        (152064, 151936, True),
        (3072, 4096, False),
        (4097, 4096, False),
        (4224, 4096, False),
        (192, 256, False),
        (1, 1, True),
        (8064, 8192, True),
        (8192, 8320, False),
    ],
)
def test_widths_of_the_same_tiles_cost_the_same(size: int, measured: int, same: bool) -> None:
    assert same_tiles(size, measured) == same


LOOPED = {**ROWS, "serving": {"lengths": ["M"]}}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (100, ""),
        (512, ""),
        (
            1000,
            "M=1000 was not measured, and the measured lengths around it, 512 and 8192, are more than a factor of 8",
        ),
        (8193, "M=8193 is outside the measured range 64..8192"),
        (63, "M=63 is outside the measured range 64..8192"),
    ],
)
def test_length_is_served_between_near_measured_ones(shop: Any, rows: int, reason: str) -> None:
    shop.define("looped", **LOOPED)
    kernel = shop.add("looped", "looped_kernel", PADDING_NORM)
    points = [{"M": size, "N": 128} for size in (64, 512, 8192)]
    shop.publish([shop.entry("looped", point, [shop.candidate(kernel)]) for point in points], gpu="h200")
    request = make_request(shop.definition("looped"), Call("looped", {"M": rows, "N": 128}), gpu="h200")
    decision = decide(request, load_table("h200"), {kernel.name: kernel}, rule="known")
    assert (decision.solution is None) == bool(reason)
    assert decision.evidence.reason.startswith(reason)


def test_definition_without_kinds_is_served_where_measured(shop: Any) -> None:
    shop.define("unstated", **{name: value for name, value in ROWS.items() if name != "serving"})
    kernel = shop.add("unstated", "unstated_kernel", PADDING_NORM)
    points = [{"M": size, "N": 128} for size in (64, 512)]
    shop.publish([shop.entry("unstated", point, [shop.candidate(kernel)]) for point in points], gpu="h200")
    for rows, served in ((64, True), (128, False)):
        request = make_request(shop.definition("unstated"), Call("unstated", {"M": rows, "N": 128}), gpu="h200")
        assert (decide(request, load_table("h200"), {kernel.name: kernel}, rule="known").solution is not None) == served


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
