"""Tiny models of many architectures that generate, their prompts, and their graphs on a machine with or without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from host_graphs import eager

from tilegym_db.models.decoding import Decoding
from tilegym_db.models.graphs import captured

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96,
}  # fmt: skip
ENDLESS = {**TINY, "eos_token_id": None}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=None),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "olmo2": lambda: transformers.Olmo2Config(**TINY),
    "olmoe": lambda: transformers.OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2),
}
WINDOW = 12
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "mistral with a window": lambda: transformers.MistralConfig(**TINY, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **TINY, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**TINY, **LINEAR),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **TINY,
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**TINY, layer_types=["conv", "full_attention"]),
    "falcon_h1": lambda: transformers.FalconH1Config(**TINY, **MAMBA, mamba_d_ssm=128),
    "bamba": lambda: transformers.BambaConfig(**TINY, **MAMBA, mamba_expand=2, attn_layer_indices=[1]),
    "mamba": lambda: transformers.MambaConfig(**ENDLESS, state_size=16),
    "mamba2": lambda: transformers.Mamba2Config(
        **ENDLESS, state_size=16, num_heads=8, head_dim=16, n_groups=1, chunk_size=8
    ),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(**ENDLESS, state_size=16),
}
CONFIGS.update(HYBRIDS)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96, "decoder_start_token_id": 1}
T5 = {
    "vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 8.0,
}  # fmt: skip
BART = {
    "vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.3,
    "forced_eos_token_id": None,
}  # fmt: skip
FRAMES = 60
BANDS = 8
ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5Config(**T5, **TOKENS),
    "umt5": lambda: transformers.UMT5Config(**T5, **TOKENS),
    "bart": lambda: transformers.BartConfig(**BART, **TOKENS),
    "mbart": lambda: transformers.MBartConfig(**BART, **TOKENS, forced_bos_token_id=None),
    "pegasus": lambda: transformers.PegasusConfig(**BART, **TOKENS),
    "marian": lambda: transformers.MarianConfig(**BART, **TOKENS, decoder_vocab_size=97),
    "whisper": lambda: transformers.WhisperConfig(
        **BART,
        **TOKENS,
        num_mel_bins=BANDS,
        max_source_positions=FRAMES // 2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "speech_to_text": lambda: transformers.Speech2TextConfig(**BART, **TOKENS, input_feat_per_channel=BANDS),
}
SPEECH = {"whisper": (BANDS, FRAMES), "speech_to_text": (FRAMES, BANDS)}


def made(name: str = "llama") -> Any:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    return model.to(DEVICE).eval()


def made_with_encoder(name: str) -> Any:
    torch.manual_seed(5)
    auto: Any = transformers.AutoModelForSpeechSeq2Seq if name in SPEECH else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(ENCODER_DECODERS[name](), dtype=torch.float32)
    return model.to(DEVICE).eval()


def encoded(name: str, batch: int = 1, length: int = 7, seed: int = 0) -> dict[str, Any]:
    """Return inputs of an encoder: a prompt, or features of speech of one length."""
    if name not in SPEECH:
        return {"input_ids": prompt(batch, length, seed)}
    features = torch.randn(batch, *SPEECH[name], generator=torch.Generator().manual_seed(seed))
    return {"input_features": features.to(DEVICE)}


def in_graphs(model: Any) -> Decoding:
    decoding = Decoding(model, captured if ON_GPU else eager)
    decoding.install()
    return decoding


def prompt(batch: int = 1, length: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padded() -> dict[str, Any]:
    ids = prompt(3, 9)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((4, 0, 7)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"inputs": ids, "attention_mask": mask, "do_sample": False}
