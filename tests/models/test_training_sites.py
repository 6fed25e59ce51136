"""One step of training of each kind of model: the gradients of stock, and the operators that kernels serve both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tilegym_db import Catalog, patched

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IMAGES = {**SMALL, "image_size": 16, "patch_size": 8}
T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
WHISPER = {
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4))
    },
    **{"vocab_size": 96, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8},
    **{"max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None},
}
MODERNBERT = {
    **SMALL,
    **dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1),
}
ROPE = {"rope_neox": 2}
# name -> forward Definitions with the calls of one step; each has as many calls of its backward
DECODERS: dict[str, dict[str, int]] = {
    "llama": {"rms_norm": 5, "swiglu": 2, **ROPE},
    "mistral": {"rms_norm": 5, "swiglu": 2, **ROPE},
    "qwen3": {"rms_norm": 9, "swiglu": 2, **ROPE},
    "gemma3": {"rms_norm_gemma": 13, "gelu_tanh_and_mul": 2, **ROPE},
    "phi3": {"rms_norm": 5},
    "gpt_oss": {"rms_norm_fp32": 5, "attention_sink_prefill": 2},
    "qwen3_moe": {"rms_norm": 9, **ROPE},
}
# name -> (class in transformers, prefix of its config, config, calls)
OTHERS: dict[str, tuple[str, str, Any, dict[str, int]]] = {
    "phi": ("PhiForCausalLM", "Phi", SMALL, {"cross_entropy": 1, "layer_norm": 3, "gelu_new": 2, **ROPE}),
    "bert": ("BertForMaskedLM", "Bert", SMALL, {"layer_norm": 6, "gelu": 3, "attention_bidirectional": 2}),
    "roberta": ("RobertaForMaskedLM", "Roberta", {**SMALL, "pad_token_id": 1}, {"layer_norm": 6, "gelu": 2}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBert", MODERNBERT, {"cross_entropy": 1, "layer_norm_no_bias": 6}),
    "vit": ("ViTModel", "ViT", IMAGES, {"layer_norm": 5, "gelu": 2, "attention_bidirectional": 2}),
    "siglip": (
        "SiglipVisionModel",
        "SiglipVision",
        IMAGES,
        {"layer_norm": 6, "gelu_tanh": 3, "attention_bidirectional": 2},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "Whisper",
        WHISPER,
        {"layer_norm": 12, "gelu": 4, "attention_bidirectional": 4},
    ),
    "t5": ("T5ForConditionalGeneration", "T5", T5, {"rms_norm": 12}),
    "flan_t5": (
        "T5ForConditionalGeneration",
        "T5",
        {**T5, "feed_forward_proj": "gated-gelu"},
        {"rms_norm": 12, "gelu_new": 4},
    ),
}


def made(name: str) -> Any:
    """Build one of OTHERS in training mode; nothing is dropped, so that two runs agree."""
    class_name, prefix, config, _ = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, f"{prefix}Config")(**config))
    for module in model.modules():
        for rate in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model.train()


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (2, 9), generator=generator)
    drawn = {"pixel_values": (2, 3, 16, 16), "input_features": (2, 8, 32)}.get(model.main_input_name)
    main = ids if drawn is None else torch.randn(drawn, generator=generator)
    labels = {} if model.main_input_name == "pixel_values" else {"labels": ids}
    return {model.main_input_name: main, **labels}


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**inputs_of(model))
    loss = out.loss if "loss" in out else sum(value.square().mean() for value in out.values())
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_served(model: Any, kernels: Catalog, calls: dict[str, int]) -> None:
    stock = step(model)
    with patched(model, catalog=kernels) as handle:
        found = step(model)
    assert found.keys() == stock.keys()
    for name, want in stock.items():
        error = (found[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
        assert error <= 2e-5, f"{name}: relative error {float(error):.2g}"
    hits = handle.report().hits()
    assert {name: hits.get(name, 0) for name in calls} == calls
    assert {name: hits.get(f"{name}_backward", 0) for name in calls} == calls
    for counts in (counts for site in handle.report().sites for counts in site.all_counts):
        assert counts.kernel_calls == counts.calls or any(key.reason for key in counts.keys), counts.definition


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_trains_on_kernels(name: str, training_kernels: Catalog, build: Any) -> None:
    assert_served(build(name).train(), training_kernels, {"cross_entropy": 1, **DECODERS[name]})


@pytest.mark.parametrize("name", OTHERS)
def test_encoder_trains_on_kernels(name: str, training_kernels: Catalog) -> None:
    assert_served(made(name), training_kernels, OTHERS[name][3])
