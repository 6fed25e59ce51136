"""Gradients of a tiny Llama in two processes that share a batch, patched and stock: ``torchrun THIS ddp|fsdp2 OUT``.

The first process writes, by variant, the largest relative error of a gradient against stock code in the same processes, against
stock code in one process with the whole batch, and the calls of backward kernels.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lora import adapted
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tilegym_db import patch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, TOKENS = 4, 9
Gradients = dict[str, torch.Tensor]


class Variant(NamedTuple):
    """A way to train: ``order`` says if the patch comes before the adapters, before the processes' wrapper, or last."""

    order: str = "before"
    adapters: bool = False
    checkpointed: bool = False
    autocast: bool = False


VARIANTS = {
    "plain": Variant(),
    "patched last": Variant(order="last"),
    "checkpointed": Variant(checkpointed=True),
    "autocast": Variant(autocast=True),
    "adapters last": Variant(adapters=True),
    "adapters first": Variant(order="after", adapters=True),
    "adapters, checkpointed": Variant(order="after", adapters=True, checkpointed=True),
}


def built() -> Any:
    """Return the model in training mode; weights of norms are no ones."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.2)
    return model


def ddp(model: Any) -> Any:
    """Replicate a model."""
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any) -> Any:
    """Shard a model, each layer alone."""
    holder = model if isinstance(model, LlamaForCausalLM) else model.base_model.model
    for layer in holder.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def gradients(variant: Variant, wrap: Callable[[Any], Any] | None, ids: torch.Tensor, *, patched: bool) -> Any:
    """Return the gradients by name, and the handle of the patch."""
    model, handle = built(), None
    if variant.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if patched and variant.order == "before":
        handle = patch(model)
    own = adapted(model) if variant.adapters else model
    if patched and variant.order == "after":
        handle = patch(own)
    trained = own if wrap is None else wrap(own)
    if patched and variant.order == "last":
        handle = patch(trained)
    with torch.autocast("cpu", torch.bfloat16) if variant.autocast else contextlib.nullcontext():
        trained(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found: Gradients = {}
    for name, weight in own.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    return found, handle


def error(found: Gradients, want: Gradients) -> float:
    """Return the largest relative error; infinite if other weights have gradients."""
    if found.keys() != want.keys():
        return float("inf")
    return max(float((found[name] - one).norm() / one.norm().clamp_min(1e-30)) for name, one in want.items())


def main(way: str, out: Path) -> None:
    """Run all variants."""
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    ids = torch.randint(1, 96, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    wrap = {"ddp": ddp, "fsdp2": fsdp2}[way]
    for name, variant in VARIANTS.items():
        part = ids[rank::2]
        stock, _ = gradients(variant, wrap, part, patched=False)
        found, handle = gradients(variant, wrap, part, patched=True)
        alone, _ = gradients(variant, None, ids, patched=False)
        hits = {op: calls for op, calls in handle.report().hits().items() if calls and "_backward" in op}
        failures = [str(failure) for failure in handle.report().failures]
        results[name] = {"stock": error(found, stock), "alone": error(found, alone), "hits": hits, "failures": failures}
    if rank == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
