"""Weights of experts are widened to fp64 one expert at a time: the same result, and memory that is bounded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import ORACLE_BYTES, oracle

EXPERTS = Catalog((shipped_root(),)).definition("moe_experts")
WHOLE = EXPERTS.model_copy(update={"sliced_inputs": {}})
SMALL = {"M": 37, "H": 48, "I": 20, "E": 7, "K": 3}
MEBIBYTE = 1 << 20


def inputs(axes: dict[str, int], dtype: str = "bfloat16") -> dict[str, Any]:
    return draw_inputs(
        EXPERTS, Case(Call(EXPERTS.name, EXPERTS.bind_axes(axes), {"T": dtype, "W": "float32"}), seed=9), "cpu"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("budget_bytes", [ORACLE_BYTES, 20_000])
def test_expert_by_expert_is_the_whole_oracle(dtype, budget_bytes):
    given = inputs(SMALL, dtype)
    found = oracle(EXPERTS, given, budget_bytes=budget_bytes)["out"]
    want = oracle(WHOLE, given)["out"]
    assert found.dtype == torch.float64
    # Products of fewer rows may be summed in another order, here in fp64.
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)


def peak_bytes(definition: Definition, given: dict[str, Any]) -> int:
    """By how much the memory of this process grows while the oracle is evaluated, at most; as Linux counts it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    oracle(definition, given)
    return resident("VmHWM") - before


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


@pytest.mark.turn("tilegym_db/verification/")  # an oracle of many experts
def test_the_oracle_of_many_experts_takes_memory_for_one():
    # 24 experts of 12 MiB of weights in fp64 each: 288 MiB as a whole.
    given = inputs({"M": 4, "H": 1024, "I": 512, "E": 24, "K": 2})
    whole = 24 * 3 * 1024 * 512 * 8
    assert peak_bytes(EXPERTS, given) < 100 * MEBIBYTE
    assert peak_bytes(WHOLE, given) > 0.5 * whole  # memory that was freed before counts for nothing


def test_budget_counts_one_slice_so_that_tokens_stay_together():
    from tilegym_db.verification.oracle import sliced

    given, evaluations = inputs({"M": 64, "H": 64, "I": 32, "E": 64, "K": 2}), []

    def run(definition: Definition, part: Any) -> dict[str, torch.Tensor]:
        evaluations.append(part["x"].shape[0])
        return {"out": part["x"]}

    sliced(EXPERTS, given, run, budget_bytes=1 * MEBIBYTE)
    assert evaluations == [64]
    sliced(WHOLE, given, run, budget_bytes=1 * MEBIBYTE)
    assert evaluations == [64, *[1] * 64]


TAKE_ALL = "return torch.einsum('mn,en->m', x.float(), w.float())[:, None].to(x.dtype)"
WEIGHTS = {"shape": ["E", "N"], "dtype": "T"}


def of_experts(definition_record: Any, body: str, **changes: Any) -> Definition:
    return Definition.from_dict(
        definition_record(
            axes={"M": {"type": "var"}, "N": {"type": "var"}, "E": {"type": "var"}},
            inputs={"x": {"shape": ["M", "N"], "dtype": "T"}, "w": WEIGHTS},
            outputs={"out": {"shape": ["M", 1], "dtype": "T"}},
            sliced_inputs={"w": "E"},
            cost=None,
            reference=f"# Source: https://example.org\nimport torch\n\n\ndef run(x, w):\n    {body}\n",
            **changes,
        )
    )


def test_reference_that_takes_the_whole_is_named_with_a_remedy(definition_record):
    given = {"x": torch.randn(3, 8), "w": torch.randn(5, 8)}
    with raises(RecordError, "reference_raises", "sliced_inputs", "w[e]", "dimension 0"):
        oracle(of_experts(definition_record, TAKE_ALL), given)
    one_by_one = of_experts(definition_record, "return sum((x * w[e]).sum(-1, keepdim=True) for e in range(len(w)))")
    want = (given["x"].double() @ given["w"].double().T).sum(1, keepdim=True)
    torch.testing.assert_close(oracle(one_by_one, given)["out"], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliced_inputs": {"other": "E"}}, "sliced_inputs.other: no such tensor among the inputs"),
        ({"sliced_inputs": {"x": "E"}}, "sliced_inputs.x: its shape must have the axis 'E' once"),
    ],
)
def test_a_sliced_input_has_its_axis(changes, message, definition_record):
    record = of_experts(definition_record, TAKE_ALL).model_dump(mode="json", exclude_defaults=True)
    with pytest.raises(RecordError, match="sliced_inputs") as error:
        Definition.from_dict({**record, **changes})
    assert message in str(error.value)
