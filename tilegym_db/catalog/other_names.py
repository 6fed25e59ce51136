"""Names of TileKernels that have another name here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherName:
    """The Definitions or the name of the Python API that a name stands for, and what differs."""

    definitions: tuple[str, ...] = ()
    python: str = ""
    differs: str = ""

    @property
    def here(self) -> str:
        """The names to use instead."""
        return " + ".join(self.definitions) or self.python

    def said(self, name: str) -> str:
        """Return a sentence without full stop that explains ``name``."""
        return f"{name} of TileKernels is {self.here} here" + (f": {self.differs}" if self.differs else "")


OTHER_NAMES: dict[str, OtherName] = {
    "topk_gating": OtherName(("topk_softmax",)),
    "token_to_expert_map": OtherName(("get_fused_mapping",)),
    "fused_expand_reduce": OtherName(
        ("expand_to_fused", "reduce_fused"), differs="two operators, before and after the experts"
    ),
    "weight_normalize": OtherName(("normalize_weight",)),
    "per_token_cast_fp8": OtherName(
        ("per_row_cast",), differs="one scale a row; per_token_cast has one for each group of 128"
    ),
    "per_block_cast_fp8": OtherName(("per_block_cast",)),
    "per_channel_cast_fp8": OtherName(("per_channel_cast",)),
    "fused_swiglu_quant_fp8": OtherName(("swiglu_and_per_token_cast",), differs="gate and up lie in one tensor"),
    "swiglu_forward_and_per_token_cast": OtherName(("swiglu_and_per_token_cast",)),
    "swiglu_forward_and_per_channel_cast_and_transpose": OtherName(
        ("swiglu_and_per_channel_cast_transpose",), differs="without a transpose it is swiglu_and_per_channel_cast"
    ),
    "engram_gate_forward": OtherName(("engram_gate_fwd",), differs="takes keys and values too"),
    "engram_weight_grad": OtherName(("engram_grad_w_reduce",)),
    "sinkhorn_normalize": OtherName(("mhc_sinkhorn",), differs="of many square matrices"),
    "mhc_mix_split": OtherName(("mhc_pre_split_mixes",)),
    "mhc_mix_apply": OtherName(("mhc_pre_apply_mix",)),
    "EngramGateLayer": OtherName(python="tilegym_db.layers.EngramGateLayer"),
    "MHCPipeline": OtherName(python="tilegym_db.layers.MHCPipeline"),
    "benchmark_kernel": OtherName(python="tilegym_db.bench"),
}
