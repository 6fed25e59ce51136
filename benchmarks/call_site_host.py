"""Host time of call sites and of a patched forward, on the CPU, in microseconds: what a patch costs where the host is the limit.

The kernels do nothing. So a call site is left with what the patch adds: checks of the call, the lookup of its kernel, and the
memory of its outputs. A kernel's own launch comes on top. The model is a tiny Llama with many layers. Its tensors are so small
that stock code, too, is mostly launches.

* Each Definition: one call as the model makes it, by stock code and patched, and the Python functions that it enters. That of a
  gate includes the three products of its MLP, which are the same in both.
* ``forward``: one forward, stock and patched. All of its calls, and the code between them, are in it.

Times are CPU times of the thread, since other processes add to wall time. Stock and patched code run in turns. The median over
the rounds is printed, with the least and the most. The number of functions does not depend on the load of the machine.

    python benchmarks/call_site_host.py [--layers 32] [--tokens 8] [--rounds 15] [--functions] [--out host.json]
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.llama import modeling_llama

from tilegym_db import patch
from tilegym_db.models.rewrite import called_for

TESTS = Path(__file__).resolve().parents[1] / "tests"
NOTHING = "    pass\n"
"""The body of a kernel."""
PARTS = ("rms_norm", "fused_add_rms_norm", "rope_neox", "attention_prefill", "attention_decode", "swiglu")
REPEATS = 200
"""Calls of a call site in one round."""

Call = Callable[[], Any]


class Pair(NamedTuple):
    """The same call by stock code and patched."""

    stock: Call
    patched: Call


def tiny(layers: int) -> Any:
    """Return a Llama of many layers, each with next to no work."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


def replaced(module: Any, copied: str, name: str) -> Any:
    """Return a global that the copied code of a patched module has in place of the model's own.

    ``copied`` is the variable of the patched forward that has that copy.
    """
    forward, cells = type(module).forward, dict[str, Any]()
    while copied not in cells:  # transformers may have put a wrapper around the patched forward
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
        forward = cells["forward"].cell_contents if copied not in cells else forward
    return inspect.unwrap(cells[copied].cell_contents).__globals__[name]


def pairs_of(stock: Any, model: Any, tokens: int) -> dict[str, Pair]:
    """Return Definition -> a call of it, as the layers of both models make it."""
    before, after = stock.model.layers[0], model.model.layers[0]
    hidden, shape = torch.randn(1, tokens, 64), (1, tokens, -1, 16)
    q, k = (
        torch.randn(1, tokens, 64).view(shape).transpose(1, 2),
        torch.randn(1, tokens, 32).view(shape).transpose(1, 2),
    )
    cos, sin = stock.model.rotary_emb(hidden, torch.arange(tokens)[None])
    rotary = replaced(after.self_attn, "shadow", "apply_rotary_pos_emb")
    attend = replaced(after.self_attn, "shadow", "ALL_ATTENTION_FUNCTIONS")
    add_norm = replaced(after, "fused", called_for("post_attention_layernorm"))

    def stock_add_norm() -> Any:
        x = torch.empty_like(hidden)
        total = hidden + x
        return before.post_attention_layernorm(total), total

    def patched_add_norm() -> Any:
        x = torch.empty_like(hidden)
        return add_norm(after, after.post_attention_layernorm, hidden, (x,))

    def attention(registry: Any, module: Any) -> Any:
        function = registry.get_interface("sdpa", None)
        return function(module, q, k, k, None, dropout=0.0, scaling=module.scaling)

    name = "attention_decode" if tokens == 1 else "attention_prefill"
    return {
        "rms_norm": Pair(lambda: before.input_layernorm(hidden), lambda: after.input_layernorm(hidden)),
        "fused_add_rms_norm": Pair(stock_add_norm, patched_add_norm),
        "rope_neox": Pair(lambda: modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), lambda: rotary(q, k, cos, sin)),
        name: Pair(
            lambda: attention(modeling_llama.ALL_ATTENTION_FUNCTIONS, before.self_attn),
            lambda: attention(attend, after.self_attn),
        ),
        "swiglu": Pair(lambda: before.mlp(hidden), lambda: after.mlp(hidden)),
    }


def thread_us(call: Call, repeats: int) -> float:
    """Return the CPU time of this thread for one of some calls."""
    began = time.thread_time_ns()
    for _ in range(repeats):
        call()
    return (time.thread_time_ns() - began) / 1e3 / repeats


def entered(call: Call) -> int:
    """Return the number of Python functions that a call enters."""
    count = -1  # the call itself

    def count_calls(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_calls)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def spread(rounds: list[float]) -> str:
    """Return the median with the least and the most."""
    return f"{statistics.median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def measured(pair: Pair, repeats: int, rounds: int) -> dict[str, Any]:
    """Return the times of each round, and the functions entered, of both."""
    for call in pair:
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    for _ in range(rounds):
        for way, call in zip(times, pair, strict=True):
            times[way].append(thread_us(call, repeats))
    return {way: {"us": times[way], "entered": entered(call)} for way, call in zip(times, pair, strict=True)}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--functions", action="store_true", help="profile the functions of a patched forward")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.layers} layers", end="")
    print(f", {options.tokens} tokens, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["TILEGYM_DB_HOME"] = folder
        sys.path[:0] = [str(TESTS / "models"), str(TESTS)]
        from conftest import Shop

        stock, model = tiny(options.layers), tiny(options.layers)
        handle = patch(model, catalog=Shop(Path(folder) / "catalog", Path(folder)).offer(NOTHING, ops=PARTS))
        ids = torch.randint(1, 96, (1, options.tokens))
        forward = Pair(lambda: stock(ids, use_cache=False), lambda: model(ids, use_cache=False))
        forward.patched()
        before = handle.report().hits()
        forward.patched()
        served = {name: count - before[name] for name, count in handle.report().hits().items()}
        found = {"forward": measured(forward, 1, options.rounds)}
        for name, pair in pairs_of(stock, model, options.tokens).items():
            found[name] = measured(pair, REPEATS, options.rounds)
        for name, ways in found.items():
            print(f"{name}" + (f", {served[name]} calls a forward" if name in served else ""))
            for way, figures in ways.items():
                print(f"  {way:8}{spread(figures['us']):>36} us, enters {figures['entered']} Python functions")
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
        if options.functions:
            profile = cProfile.Profile()
            profile.runcall(lambda: [forward.patched() for _ in range(10)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
