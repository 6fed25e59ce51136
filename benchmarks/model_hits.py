"""What patching does to a Llama with random weights: which calls run kernels, how close the logits are, how long it takes.

Builds the model from its config (no download), patches a twin that shares its weights, and runs real prefills and real
greedy generation on both, interleaved in one process. Exits with 1 where an operator ran no kernel, or where the patched
logits are further from fp32 than the stock ones by more than ``ERROR_FACTOR``.

    python benchmarks/model_hits.py --out hits.json              # Llama-3.2-1B in bf16 on the GPU
    python benchmarks/model_hits.py --tiny --device cpu --out hits.json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tilegym_db.models import Handle, patch

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TINY = {
    **LLAMA_1B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}

OPS = ("rms_norm", "swiglu", "rope_neox")
BATCHES = (1, 8)
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    # transformers compiles the decode step of a static cache by itself; model-bench --static-cache times that.
    "static": {"cache_implementation": "static", "disable_compile": True},
}
REPEATS = 5
ERROR_FACTOR = 1.25
"""How much larger than stock's the patched model's error against fp32 may be: both are rounding noise of one size."""


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def build(sizes: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights, in eval mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        return factory.from_config(LlamaConfig(**sizes), dtype=dtype).eval()


def twin_of(model: Any) -> Any:
    """Return a second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def prompts(model: Any, batch: int, length: int) -> torch.Tensor:
    """Return random token ids [batch, length] on the model's device."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved_ms(ways: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median wall time of each way in ms. Each round runs all of them; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, call in ways.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(times[1:]), 3) for name, times in taken.items()}


class Hits:
    """Kernel calls per operator since the last question."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._before = handle.report().hits()

    def take(self) -> dict[str, int]:
        """Return operator -> calls by kernel since the last call of this method."""
        now = self._handle.report().hits()
        new = {op: now.get(op, 0) - self._before.get(op, 0) for op in OPS}
        self._before = now
        return new


# -- prefill ----------------------------------------------------------------------------------------------------------


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``want``, sequence by sequence to save memory."""
    difference = total = 0.0
    for got, true in zip(found, want, strict=True):
        difference += float((got.double() - true.double()).square().sum())
        total += float(true.double().square().sum())
    return math.sqrt(difference / total)


def prefill(stock: Any, patched: Any, precise: Any, ids: torch.Tensor, hits: Hits) -> dict[str, Any]:
    """Return logits of one prompt on all three models, and the time of stock and patched."""
    with torch.inference_mode():
        want, true = stock(ids).logits, precise(ids).logits
        hits.take()
        found = patched(ids).logits
        served = hits.take()
        times = interleaved_ms({"stock": lambda: stock(ids), "patched": lambda: patched(ids)})
    same = int((found.argmax(-1) == want.argmax(-1)).sum())
    errors = {"stock": relative_error(want, true), "patched": relative_error(found, true)}
    return {
        "hits": served,
        "patched_against_stock": relative_error(found, want),
        "error_against_fp32": errors,
        "error_ratio": errors["patched"] / max(errors["stock"], torch.finfo(want.dtype).eps),
        "equal_next_tokens": f"{same} of {ids.numel()}",
        "ms": times,
        "speedup": round(times["stock"] / times["patched"], 4),
    }


# -- decode -----------------------------------------------------------------------------------------------------------


def decode(
    stock: Any, patched: Any, ids: torch.Tensor, options: dict[str, Any], tokens: int, hits: Hits
) -> dict[str, Any]:
    """Generate greedily on both models; return tokens, kernel calls of the decode steps, and time per output token."""

    def generate(model: Any, count: int) -> torch.Tensor:
        given: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **options,
        )
        return given[:, ids.shape[1] :]

    want = generate(stock, tokens)
    hits.take()
    generate(patched, 1)
    of_prefill = hits.take()
    found = generate(patched, tokens)
    served = {op: count - of_prefill[op] for op, count in hits.take().items()}
    first = interleaved_ms({"stock": lambda: generate(stock, 1), "patched": lambda: generate(patched, 1)})
    whole = interleaved_ms({"stock": lambda: generate(stock, tokens), "patched": lambda: generate(patched, tokens)})
    per_token = {name: round((whole[name] - first[name]) / (tokens - 1), 4) for name in whole}
    return {
        "hits": served,
        "equal_tokens": f"{int((found == want).sum())} of {want.numel()}",
        "ms": whole,
        "ms_to_first_token": first,
        "ms_per_output_token": per_token,
        "speedup": round(whole["stock"] / whole["patched"], 4),
    }


# -- all of it --------------------------------------------------------------------------------------------------------


def measure(sizes: Mapping[str, Any], device: str, dtype: torch.dtype, length: int, tokens: int) -> dict[str, Any]:
    """Measure every prefill and every decode; print the handle's report."""
    say(f"building {sizes['num_hidden_layers']} layers of {sizes['hidden_size']} in {dtype} on {device}")
    stock = build(sizes, device, dtype)
    patched, precise = twin_of(stock), copy.deepcopy(stock).float()
    handle = patch(patched)
    hits = Hits(handle)
    results: dict[str, Any] = {"prefill": {}, "decode": {}}
    for batch in BATCHES:
        name = f"{batch}x{length}"
        say(f"prefill {name}")
        results["prefill"][name] = prefill(stock, patched, precise, prompts(stock, batch, length), hits)
        say(json.dumps(results["prefill"][name]))
    del precise
    for cache, options in CACHES.items():
        for batch in BATCHES:
            name = f"{batch}x{length}+{tokens} {cache} cache"
            say(f"decode {name}")
            ids = prompts(stock, batch, length)
            results["decode"][name] = decode(stock, patched, ids, options, tokens, hits)
            say(json.dumps(results["decode"][name]))
    print(handle.report())
    failures = [failure.summary for site in handle.report().sites if site.counts for failure in site.counts.failures]
    return {**results, "hits": handle.report().hits(), "failures": failures, "report": handle.report().to_dict()}


def findings(results: Mapping[str, Any]) -> list[str]:
    """Return what is not as it should be; empty if all is well."""
    found = [f"a kernel failed: {failure}" for failure in results["failures"]]
    for phase in ("prefill", "decode"):
        for name, result in results[phase].items():
            found += [f"{phase} {name}: no kernel ran for {op}" for op, count in result["hits"].items() if not count]
            if not result.get("error_ratio", 1.0) <= ERROR_FACTOR:
                found.append(f"{phase} {name}: {result['error_ratio']:.2f} times the error of stock against fp32")
    return found


def environment(device: str) -> dict[str, str]:
    """Return versions, and the device's name."""
    import transformers

    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> int:
    """Measure; write JSON; 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes, to try the script itself")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate, at least 2")
    options = parser.parse_args()
    sizes = TINY if options.tiny else LLAMA_1B
    results = measure(sizes, options.device, getattr(torch, options.dtype), options.prompt, options.new)
    results["findings"] = findings(results)
    results = {"environment": environment(options.device), **results}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    brief = {key: value for key, value in results.items() if key in ("environment", "hits", "findings")}
    print(json.dumps(brief, indent=1))
    return 1 if results["findings"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
