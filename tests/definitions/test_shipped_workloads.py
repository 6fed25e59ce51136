"""The shipped Workloads fit their Definitions and cover what is promised: models, stages, odd, large, tiny and CPU sizes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.plan import INTERPRETER_MAX_ELEMENTS, elements_of
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Workload, axes_key

LARGE_BYTES = 0.3e9
TINY_BYTES = 1e5
MODELS = {
    "moe_experts_clamp": 1,
    "moe_experts_oai_halves": 1,
    "topk_softmax_rounded": 1,
    "topk_sqrtsoftplus_bias": 1,
    "table_router": 1,
    "engram_gate_hf": 1,
    "kda_chunk": 1,
    "kda_gates": 1,
    "kda_recurrent": 1,
}
"""What one model alone does so, or one alone of published sizes."""
STAGES = {"prefill", "decode"}
STAGES_OF = {
    "attention_bidirectional": {"prefill"},
    "layer_norm_no_bias": {"prefill"},
    "quick_gelu": {"prefill"},
    "relative_bias": {"prefill"},
    "cross_entropy": {"training"},
    "fused_linear_cross_entropy": {"training"},
    "fused_linear_cross_entropy_x": {"training"},
    "causal_conv1d": {"prefill"},
    "causal_conv1d_bias": {"prefill"},
    "causal_conv1d_update": {"decode"},
    "causal_conv1d_update_bias": {"decode"},
    "gated_delta_rule_chunk": {"prefill"},
    "gated_delta_rule_recurrent": {"decode"},
    "kda_chunk": {"prefill"},
    "kda_recurrent": {"decode"},
    "mamba2_chunk_scan": {"prefill"},
    "mamba2_state_update": {"decode"},
}
"""What models call at one stage, although its name does not say so."""
SMALL = {"causal_conv1d_update", "causal_conv1d_update_bias", "gdn_gates", "position_scale", "sparsemixer_top2"}
"""What has a few numbers a token in any model."""


# These rules cost milliseconds an operator, so each test reads all of them every day and lists those that break it.


def test_no_workload_is_listed_twice(catalog: Catalog) -> None:
    twice = {}
    for definition in catalog.definitions.values():
        path = shipped_root() / "workloads" / definition.op_type / f"{definition.name}.jsonl"
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        # Reading drops repeats, and refuses a misfit.
        if len(catalog.workloads_for(definition.name)) != len(lines):
            twice[definition.name] = len(lines)
    assert twice == {}


def test_three_tiny_workloads_reach_every_dtype(catalog: Catalog) -> None:
    faults = {}
    for name, definition in catalog.definitions.items():
        tiny = [workload for workload in catalog.workloads_for(name) if "tiny" in workload.tags]
        small = all(_bytes(definition, workload) < TINY_BYTES for workload in tiny)
        if len(tiny) != 3 or not small or _missing_dtypes(definition, tiny):
            faults[name] = (len(tiny), small, _missing_dtypes(definition, tiny))
    assert faults == {}


def test_odd_and_cpu_sizes_are_there(catalog: Catalog) -> None:
    missing = {name: {"odd", "cpu", "tiny"} - _tags(name, catalog) for name in catalog.definitions}
    assert {name: tags for name, tags in missing.items() if tags} == {}


def test_core_operators_have_two_models_stages_and_a_large_case(catalog: Catalog) -> None:
    faults: dict[str, object] = {}
    for name, core in catalog.definitions.items():
        if core.is_open:
            continue
        workloads, tags = catalog.workloads_for(name), _tags(name, catalog)
        if missing := _missing_dtypes(core, workloads):
            faults[name] = missing
        # What serves calls is measured at both stages of two models.
        if core.serving and core.serving.part and not core.backward_of:
            # Most operators of one stage say so in their names.
            stages = STAGES_OF.get(name) or STAGES & set(name.split("_")) or STAGES
            models = sum(tag.startswith("model:") for tag in tags)
            # A router gives some numbers a token.
            small = core.serving.part == "router" or name in SMALL
            largest = max(_bytes(core, workload) for workload in workloads)
            if missing := {f"stage:{stage}" for stage in stages} - tags:
                faults[name] = missing
            elif models < MODELS.get(name, 2) or not (small or largest >= LARGE_BYTES):
                faults[name] = (models, largest)
    assert faults == {}


def test_tiny_workloads_are_small_enough_for_the_interpreters(catalog: Catalog) -> None:
    large = {
        (definition.name, axes_key(workload.axes))
        for definition in catalog.definitions.values()
        for workload in catalog.workloads_for(definition.name)
        if "tiny" in workload.tags and elements_of(definition, workload) > INTERPRETER_MAX_ELEMENTS
    }
    assert large == set()


@pytest.mark.parametrize("size", [(32, 128), (8, 128), (131072, 128), (32768, 128), (1, 4096), (4096, 4096), (1, 2048)])
def test_rms_norm_covers_the_norms_of_a_patched_model(size: tuple[int, int], catalog: Catalog) -> None:
    sizes = {(workload.axes["M"], workload.axes["N"]) for workload in catalog.workloads_for("rms_norm")}
    assert size in sizes


def test_rope_takes_q_and_k_as_models_pass_them(rope: Definition, catalog: Catalog) -> None:
    for workload in catalog.workloads_for(rope.name):
        axes = workload.axes
        if axes["S"] > 1 and min(axes.get(heads, 2) for heads in ("Hq", "Hkv", "H")) > 1:
            classes = workload.layout_classes(rope)
            heads = [name for name in rope.inputs if name in ("q", "k", "x")]
            assert classes == dict.fromkeys((*heads, *rope.outputs), "row_contiguous")


def test_gradients_of_rope_come_as_attention_gives_them_back(catalog: Catalog) -> None:
    definition = catalog.definition("rope_neox_backward")
    found = {
        tuple(
            workload.layout_classes(definition).get(name) == "row_contiguous" for name in ("grad_q_out", "grad_k_out")
        )
        for workload in catalog.workloads_for("rope_neox_backward")
        if "stage:training" in workload.tags
    }
    # Both as q and k were given, both contiguous, and a sum over the queries' heads that is contiguous for k alone.
    assert found == {(True, True), (False, False), (True, False)}


def test_a_norm_has_a_padded_row(norm: Definition, catalog: Catalog) -> None:
    classes = [workload.layout_classes(norm) for workload in catalog.workloads_for(norm.name)]
    assert {"x": "row_contiguous"} in classes


def _tags(name: str, catalog: Catalog) -> set[str]:
    return {tag for workload in catalog.workloads_for(name) for tag in workload.tags}


def _missing_dtypes(definition: Definition, workloads: Iterable[Workload]) -> set[tuple[str, str]]:
    there = {(variable, workload.dtypes[variable]) for workload in workloads for variable in definition.dtypes}
    return {(variable, name) for variable, names in definition.dtypes.items() for name in names} - there


def _bytes(definition: Definition, workload: Workload) -> float:
    return definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))[1]
