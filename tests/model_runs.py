"""Runs of whole models, as ``model-bench`` stores them."""

from __future__ import annotations

from typing import Any

from tilegym_db.records.loop import ModelRun

__all__ = ["LIGER", "estimate", "model_run", "speedups", "timing", "without_steps"]


def estimate(value: float) -> dict[str, float]:
    return {"median": value, "ci_low": value * 0.9, "ci_high": value * 1.1}


def timing(factor: float) -> dict[str, Any]:
    return {
        "ttft_ms": estimate(10 * factor),
        "tpot_ms": estimate(2 * factor),
        "total_ms": estimate(30 * factor),
        "tokens_per_s": 400 / factor,
        "peak_memory_bytes": 1 << 30,
    }


def model_run(**changes: Any) -> ModelRun:
    record = {
        "run_id": "one",
        "timestamp": "2026-11-21T10:00:00Z",
        "model": "tiny",
        "model_class": "LlamaForCausalLM",
        "config_digest": "0" * 64,
        "layers": 2,
        "parameters": 100,
        "dtype": "bfloat16",
        "batch": 1,
        "prompt_tokens": 8,
        "new_tokens": 12,
        "rounds": 10,
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "timer": "events",
        "stock": timing(1.0),
        "patched": timing(0.5),
        "ttft_speedup": estimate(2.0),
        "tpot_speedup": estimate(2.0),
        "total_speedup": estimate(2.0),
        "equal_tokens": 12,
    }
    return ModelRun.from_dict({**record, **changes})


def without_steps(factor: float) -> dict[str, Any]:
    """Return the record of a prefill alone."""
    return {**timing(factor), "tpot_ms": None, "tokens_per_s": None}


def speedups(value: float) -> dict[str, Any]:
    return {name: estimate(value) for name in ("ttft", "tpot", "total")}


LIGER = {
    "timing": timing(0.8),
    "against": {"stock": speedups(1.25), "patched": speedups(0.625)},
    "equal_tokens": 11,
    "library": "liger-kernel 1.0",
}
