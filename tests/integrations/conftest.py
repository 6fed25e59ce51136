"""Tiny random models, and kernels for the CPU, so that the patched path really runs.

The kernels are the catalog's own stock code behind a destination-passing signature, published as if they had been measured
on ``cpu`` over a range of sizes: whatever a model calls is served, and the bits must be those of the stock model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root

OPS = ("rms_norm", "swiglu", "rope_neox")
LARGEST = 4096
TENSORS = {"rms_norm": ("x", "out"), "swiglu": ("a", "b", "out"), "rope_neox": ("q", "k", "q_out", "k_out")}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 6}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
NAN = "    for value in {outputs}:\n        value.fill_(float('nan'))\n"


def _build(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model in eval mode; the same weights at every call. Norm weights are random, not ones."""
    config_class, model_class, own = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own, **changes}))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype).eval()


def _prompt(batch: int = 1, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length], none of them the padding token."""
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Shop:
    """The user's catalog overlay beside the shipped catalog, and the table published for the CPU."""

    root: Path
    home: Path

    def offer(self, body: str | None = None) -> Catalog:
        """Publish one kernel per operator; a body replaces the stock computation. Returns the catalog with them."""
        shipped = Catalog((shipped_root(),))
        entries = []
        for op in OPS:
            self._write(shipped, op, body)
            entries += self._entries(Catalog((shipped_root(), self.root)), op)
        table = {
            "schema_version": 1,
            "gpu": "cpu",
            "sm": "cpu",
            "published": "2026-11-20T10:00:00Z",
            "entries": entries,
        }
        path = self.home / "published" / "cpu" / "resolver.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table))
        return Catalog((shipped_root(), self.root))

    def _write(self, shipped: Catalog, op: str, body: str | None) -> None:
        definition, stock = shipped.definition(op), shipped.solution(f"{op}_stock")
        inputs, outputs = ", ".join(definition.inputs), ", ".join(definition.written_outputs)
        if body is None:
            body = (
                f"    computed = stock.run({inputs})\n"
                "    values = computed if isinstance(computed, tuple) else (computed,)\n"
                f"    for out, value in zip(({outputs},), values, strict=True):\n        out.copy_(value)\n"
            )
        folder = self.root / "solutions" / definition.op_type / op / f"{op}_cpu"
        folder.mkdir(parents=True, exist_ok=True)
        source = f"import stock\n\n\ndef run({inputs}, {outputs}):\n{body.replace('{outputs}', f'({outputs},)')}"
        (folder / "stock.py").write_bytes(stock.sources["kernel.py"])
        (folder / "kernel.py").write_text(source)
        record = {
            "name": f"{op}_cpu",
            "definition": op,
            "author": "tests",
            "spec": {
                "language": "python",
                "entry_point": "kernel.py::run",
                "layouts": dict.fromkeys(TENSORS[op], "strided"),
            },
            "sources": [{"path": "kernel.py"}, {"path": "stock.py"}],
        }
        (folder / "solution.json").write_text(json.dumps(record))

    def _entries(self, catalog: Catalog, op: str) -> list[dict[str, Any]]:
        """The smallest and the largest call of each dtype and layout: everything between is the nearest of the two."""
        definition, solution = catalog.definition(op), catalog.solution(f"{op}_cpu")
        candidate = {
            "solution": solution.name,
            "solution_digest": solution.digest,
            "language": "python",
            "role": "kernel",
            "latency_us": 5.0,
            "speedup": 2.0,
            "speedup_ci_low": 1.9,
            "tier": "screen",
            "trace_id": "t",
            "envelope_cases": 9,
        }
        transposed = dict.fromkeys(TENSORS[op], "row_contiguous")
        return [
            {
                "definition": op,
                "definition_version": definition.version,
                "definition_digest": definition.digest,
                "op_type": definition.op_type,
                "dtypes": {"T": dtype},
                "axes": dict.fromkeys(definition.var_axes, size),
                "layouts": layouts,
                "candidates": [candidate],
            }
            for dtype, size, layouts in itertools.product(
                definition.dtypes["T"], (1, LARGEST), ({}, transposed) if op == "rope_neox" else ({},)
            )
        ]


@pytest.fixture
def shop(home: Path) -> Shop:
    """The user's overlay; nothing is offered and nothing published yet."""
    return Shop(home / "catalog", home)


@pytest.fixture
def kernels(shop: Shop) -> Catalog:
    """A catalog with a stock-backed kernel for each operator, published for the CPU."""
    return shop.offer()


@pytest.fixture
def poison(shop: Shop) -> Catalog:
    """Kernels that write NaN: whoever runs one is found out."""
    return shop.offer(NAN)


@pytest.fixture
def build() -> Callable[..., Any]:
    """Make a tiny model: ``build("qwen3", torch.bfloat16, **config_changes)``."""
    return _build


@pytest.fixture
def sizes() -> dict[str, Any]:
    """The config of every tiny model."""
    return SIZES


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """Make token ids: ``prompt(batch, length, seed)``."""
    return _prompt


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """The logits of one forward pass without grad."""

    def run(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(ids, **options).logits
        return found

    return run
