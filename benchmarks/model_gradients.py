"""Gradients of every weight of whole models: patched and stock, both against fp64.

Each model has two layers of a width at which kernels are measured, random weights, and one step of random tokens. The gradients
in fp64 are those of a copy in which every cast to a narrower dtype is a cast to fp64. The error of a gradient is its relative
Frobenius norm. Patched may have at most twice the error of stock code, or of one rounding of the exact gradient. That is the rule
of ``tilegym-db model verify`` for the outputs of a single kernel (``tilegym_db.models.proof.allowed_error``).

Some gradients are noise in stock code: they are off by half of their size or more, for example those of experts where a router
decides otherwise after rounding. The rule is the same for them, and the table says how many there are.

    python benchmarks/model_gradients.py --out gradients.json                       # seven models on one GPU, below a minute
    python benchmarks/model_gradients.py --models llama gpt_oss --skip-logits --out gradients.json
    python benchmarks/model_gradients.py --tiny --device cpu --dtype float32 --out gradients.json

Exits with 1 if an error is too large, a gradient is absent or not finite, a kernel failed, or no kernel ran in training on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # the other scripts, however this file is loaded
from loss_curves import calls_of
from training_step import free_memory, save, say

from tilegym_db.models import patch
from tilegym_db.models.capture import random_prompt
from tilegym_db.models.proof import allowed_error
from tilegym_db.models.random_model import unchecked_model
from tilegym_db.models.upstream_code import EAGER
from tilegym_db.verification.gates import relative_error
from tilegym_db.verification.oracle import Lifted

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY = {
    **SIZES,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
LOCAL_AND_GLOBAL = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
# name -> (prefix of the classes in transformers, what its config adds)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 64}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi": ("Phi", {"num_key_value_heads": 16}),
    "gpt_oss": ("GptOss", {**MOE, **LOCAL_AND_GLOBAL, "max_position_embeddings": 131072}),
    "qwen3_moe": ("Qwen3Moe", MOE),
}
TINY_MODELS = {"phi": {"num_key_value_heads": 4}, "gemma3": {"query_pre_attn_scalar": 16}}
NOISE = 0.5
"""Relative error from which on a gradient of stock code says little."""

Gradients = dict[str, torch.Tensor]


def built(name: str, options: argparse.Namespace) -> Any:
    """Return a model in training mode with random weights, the same at every call."""
    import transformers

    prefix, own = MODELS[name]
    sizes = {**SIZES, **own} if not options.tiny else {**TINY, **own, **TINY_MODELS.get(name, {})}
    factory = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    return unchecked_model(factory(**sizes), options.device, options.dtype).train()


def gradients(model: Any, ids: torch.Tensor) -> Gradients:
    """Return the gradient of every weight that gets one, for the loss of the next tokens."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def exact_gradients(model: Any, ids: torch.Tensor) -> Gradients:
    """Return the gradients of a copy of the model in fp64."""
    exact: Any = copy.deepcopy(model).double()
    if hasattr(exact.config, "_experts_implementation"):
        exact.set_experts_implementation(EAGER)  # grouped products take no fp64
    lifted: Any = Lifted()
    with lifted:
        return gradients(exact, ids)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the errors of every gradient of one model, and the calls of kernels."""
    begun = time.perf_counter()
    model = built(name, options)
    ids = random_prompt(model, options.rows, options.tokens)
    exact = exact_gradients(model, ids)
    stock = gradients(model, ids)
    handle = patch(model, skip_logits=options.skip_logits)
    with contextlib.ExitStack() as undo:
        undo.callback(handle.unpatch)
        patched = gradients(model, ids)
        calls = calls_of(handle)
    weights = {key: errors_of(patched.get(key), stock.get(key), want) for key, want in exact.items()}
    absent = sorted({*exact} ^ {*stock} | {*exact} ^ {*patched})
    del model, handle, exact, stock, patched
    free_memory(options.device)
    return {
        "model": name,
        "weights": weights,
        "absent": absent,
        "seconds": round(time.perf_counter() - begun, 2),
        **calls,
    }


def errors_of(patched: torch.Tensor | None, stock: torch.Tensor | None, exact: torch.Tensor) -> dict[str, float]:
    """Return the errors of one gradient against fp64, and the largest that patched may have; an absent one is all error."""
    if patched is None or stock is None:
        return {"patched": float("inf"), "stock": float("inf"), "allowed": 0.0}
    off = {name: error_of(value, exact) for name, value in (("patched", patched), ("stock", stock))}
    rounding = error_of(exact.to(stock.dtype), exact)
    return {**off, "allowed": allowed_error(off["stock"], rounding, stock.dtype)}


def error_of(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error; infinite if a value is NaN or infinite."""
    return relative_error(value, exact) if bool(value.isfinite().all()) else float("inf")


def findings_of(result: Mapping[str, Any], *, is_gpu: bool) -> list[str]:
    """Return what is wrong with the gradients of one model."""
    found = [*result["failures"], *(f"{name} has a gradient in some ways only" for name in result["absent"])]
    for name, one in result["weights"].items():
        if name not in result["absent"] and not one["patched"] <= one["allowed"]:
            found.append(
                f"{name} is {one['patched']:.3g} off in patched and {one['stock']:.3g} in stock; "
                f"at most {one['allowed']:.3g} is allowed"
            )
    if is_gpu and not (result["forward"] and result["backward"]):
        found.append("no kernel ran in training, so this run proves nothing")
    return [f"{result['model']}: {text}" for text in found]


def ratio_of(one: Mapping[str, float]) -> float:
    """Return the error of patched in parts of the error of stock; 1 where both are exact."""
    return one["patched"] / one["stock"] if one["stock"] else 1.0 if not one["patched"] else float("inf")


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each model, and the calls of kernels below it."""
    print(
        f"\n{'model':<10} {'weights':>7} {'noise':>5} {'stock error':>12} {'patched':>9} {'median ratio':>12} {'worst':>6}  "
        f"{'worst weight':<44} {'forward':>7} {'backward':>8} {'s':>5}"
    )
    for result in results:
        errors = result["weights"]
        worst = max(errors, key=lambda name: ratio_of(errors[name]))
        medians = [statistics.median(one[way] for one in errors.values()) for way in ("stock", "patched")]
        print(
            f"{result['model']:<10} {len(errors):>7} {sum(one['stock'] > NOISE for one in errors.values()):>5} "
            f"{medians[0]:>12.3g} {medians[1]:>9.3g} {statistics.median(map(ratio_of, errors.values())):>12.3f} "
            f"{ratio_of(errors[worst]):>6.2f}  {worst[-44:]:<44} {sum(result['forward'].values()):>7} "
            f"{sum(result['backward'].values()):>8} {result['seconds']:>5.1f}"
        )
        for way in ("forward", "backward"):
            if result[way]:
                print(f"    {way}: " + ", ".join(f"{name} {calls}" for name, calls in result[way].items()))
        for text, calls in result["stock"].items():
            print(f"    stock: {text} ({calls})")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--skip-logits", action="store_true", help="serve the head with its loss")
    parser.add_argument("--tiny", action="store_true", help="models of some kilobytes, to try the script itself")
    parser.add_argument("--out", type=Path, help="file for all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the gradients of all models and return 1 if there is a finding."""
    options = parsed(arguments)
    is_gpu = options.device.startswith("cuda")
    results: list[dict[str, Any]] = []
    findings: list[str] = []
    for name in options.models:
        say(name)
        results.append(measure(name, options))
        findings += findings_of(results[-1], is_gpu=is_gpu)
    print_table(results)
    for text in findings:
        say(f"finding: {text}")
    save(options, results, findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
