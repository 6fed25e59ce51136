"""Tiny random models, and kernels for the CPU, so that the patched path really runs.

The kernels are the catalog's own stock code behind a destination-passing signature, published as if they had been measured
on ``cpu`` over a range of sizes: whatever a model calls is served, and the bits must be those of the stock model.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.store.snapshot import lock_folder

SHIPPED = Catalog((shipped_root(),)).definitions
OPS = tuple(name for name, record in SHIPPED.items() if record.serving is not None and record.serving.part)
"""What models are served with, as the Definitions say."""
BACKWARDS = tuple(name for name, record in SHIPPED.items() if record.backward_of in OPS)
LARGEST = 4096
LARGEST_HEAD = 256
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
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 8,
}
WINDOW = {"sliding_window": 6}
LOCAL_AND_GLOBAL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# name -> (prefix of the classes in transformers, what its config changes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": (
        "Phi3",
        {**WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", LOCAL_AND_GLOBAL),
    "glm4": ("Glm4", {}),
    "gemma3": ("Gemma3", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "olmoe": ("Olmoe", MOE),
    "deepseek_v2": ("DeepseekV2", {**MLA, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "gpt_oss": ("GptOss", {**MOE, **LOCAL_AND_GLOBAL}),
    "qwen3_next": ("Qwen3Next", {**MOE, **LINEAR, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5}),
    "qwen3_5": ("Qwen3_5", LINEAR),
}
NAN = "    for value in {outputs}:\n        value.fill_(float('nan'))\n"


def _build(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model in eval mode; the same weights at every call. Norm weights are random, not ones."""
    prefix, own = MODELS[name]
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**{**SIZES, **own, **changes}))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype).eval()


def _prompt(batch: int = 1, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length], none of them the padding token."""
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def _layouts(definition: Definition) -> list[dict[str, str]]:
    """The layouts in which models pass these tensors, in any combination; all others are contiguous.

    Heads and tokens may change places; the rows of a norm may be padded.
    """
    tensors = {**{name: definition.inputs[name] for name in definition.tensor_inputs}, **definition.outputs}
    varying = tuple(name for name, spec in tensors.items() if len(spec.shape or ()) == 4)
    if definition.serving is not None and definition.serving.part == "norm":
        varying = definition.tensor_inputs[:1]
    return [
        {name: "row_contiguous" for name, strided in zip(varying, chosen, strict=True) if strided}
        for chosen in itertools.product((False, True), repeat=len(varying))
    ]


@dataclass
class Shop:
    """The user's catalog overlay beside the shipped catalog, and the table published for the CPU."""

    root: Path
    home: Path

    def offer(
        self,
        body: str | None = None,
        *,
        rounding: str = "stock",
        without: tuple[str, ...] = (),
        ops: tuple[str, ...] = OPS,
        returning: tuple[str, ...] = (),
        device: tuple[str, str] = ("cpu", "cpu"),
        smallest: int = 1,
    ) -> Catalog:
        """Publish one kernel per operator. Returns the catalog with them.

        Args:
            body: replaces what the kernels compute; ``{inputs}`` and ``{outputs}`` in it become the arguments' names.
            without: operators that get none.
            ops: the operators that get one, whatever was offered before.
            returning: those whose kernel returns what stock code computes, instead of writing it.
            rounding: ``stock`` computes as the models do, bit for bit; ``reference`` as the Definition says; ``triton``
                is the shipped Triton kernel, for a process in which the interpreter runs it.
            device: the GPU and target that they are published for.
            smallest: the smallest size of an axis that they were measured at; a call of fewer tokens is left to stock.
        """
        shipped = Catalog((shipped_root(),))
        entries = []
        for op in (op for op in ops if op not in without):
            self._write(shipped, op, body, rounding, returns=op in returning)
        for op in (op for op in (*OPS, *BACKWARDS) if op not in without and self._folder(shipped, op).is_dir()):
            entries += self._entries(Catalog((shipped_root(), self.root)), op, smallest)
        table = {
            "schema_version": 1,
            "gpu": device[0],
            "sm": device[1],
            "published": "2026-11-20T10:00:00Z",
            "entries": entries,
        }
        path = self.home / "published" / device[0] / "resolver.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.republish(path, json.dumps(table))
        return Catalog((shipped_root(), self.root))

    def republish(self, path: Path, text: str) -> None:
        """Write a table as this installation would, which vouches for it."""
        table = json.loads(text)
        path.write_text(text)
        lock_folder(path.parent, self.home, gpu=table["gpu"], sm=table["sm"], published=table["published"])

    def _folder(self, shipped: Catalog, op: str) -> Path:
        return self.root / "solutions" / shipped.definition(op).op_type / op / f"{op}_cpu"

    def _write(self, shipped: Catalog, op: str, body: str | None, rounding: str, *, returns: bool) -> None:
        definition, stock = shipped.definition(op), shipped.solution(f"{op}_stock")
        inputs, outputs = ", ".join(definition.inputs), ", ".join(definition.written_outputs)
        code = stock.sources["kernel.py"] if rounding == "stock" else definition.reference.encode()
        if rounding == "triton":
            code = shipped.solution(f"{op}_triton").sources["kernel.py"]
            body = "    stock.run({inputs}, *{outputs})\n"
        if body is None:
            # What is written in place: stock has done that, a reference returns it.
            targets = ", ".join((outputs, *definition.in_place))
            body = (
                f"    computed = stock.run({inputs})\n"
                "    values = computed if isinstance(computed, tuple) else (computed,)\n"
                f"    for out, value in zip(({targets},), values, strict=False):\n        out.copy_(value)\n"
            )
        folder = self._folder(shipped, op)
        folder.mkdir(parents=True, exist_ok=True)
        spelled = body.replace("{inputs}", inputs).replace("{outputs}", f"({outputs},)")
        source = f"import stock\n\n\ndef run({inputs}, {outputs}):\n{spelled}"
        if returns:
            source = f"import stock\n\n\ndef run({inputs}):\n    return stock.run({inputs})\n"
        (folder / "stock.py").write_bytes(code)
        (folder / "kernel.py").write_text(source)
        record = {
            "name": f"{op}_cpu",
            "definition": op,
            "author": "tests",
            "spec": {
                "language": "python",
                "entry_point": "kernel.py::run",
                "destination_passing_style": not returns,
                "layouts": dict.fromkeys([*definition.tensor_inputs, *definition.outputs], "strided"),
            },
            "sources": [{"path": "kernel.py"}, {"path": "stock.py"}],
        }
        (folder / "solution.json").write_text(json.dumps(record))

    def _entries(self, catalog: Catalog, op: str, smallest: int) -> list[dict[str, Any]]:
        """The smallest and the largest call of each dtype and layout: everything between is the nearest of the two."""
        definition, solution = catalog.definition(op), catalog.solution(f"{op}_cpu")
        candidate = {
            "solution": solution.name,
            "solution_digest": solution.digest,
            "language": "python",
            "role": "kernel",
            "latency_us": 50.0,
            "speedup": 2.0,
            "speedup_ci_low": 1.9,
            "tier": "promotion",
            "sandbox_level": 3,
            "trace_id": "t",
            "envelope_cases": 9,
        }
        return [
            {
                "definition": op,
                "definition_version": definition.version,
                "definition_digest": definition.digest,
                "op_type": definition.op_type,
                "dtypes": {"T": dtype},
                "axes": {
                    axis: min(size, LARGEST_HEAD) if "D <= 256" in definition.constraints and axis == "D" else size
                    for axis in definition.var_axes
                },
                "layouts": layouts,
                "candidates": [candidate],
            }
            for dtype, size, layouts in itertools.product(
                definition.dtypes["T"], (smallest, LARGEST), _layouts(definition)
            )
        ]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are read here as whole sentences, which 80 columns would break."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def shop(home: Path) -> Shop:
    """The user's overlay; nothing is offered and nothing published yet."""
    return Shop(home / "catalog", home)


@pytest.fixture
def restated(tmp_path: Path) -> Callable[..., Catalog]:
    """The shipped catalog, in which a Definition says otherwise how it is served: ``restated("rms_norm", code=[...])``."""

    def restate(name: str, **changes: Any) -> Catalog:
        root = tmp_path / "restated"
        if not root.exists():
            shutil.copytree(shipped_root() / "definitions", root / "definitions")
            (root / "solutions").symlink_to(shipped_root() / "solutions")
        (path,) = root.glob(f"definitions/*/{name}.json")
        content = json.loads(path.read_text())
        content["serving"] = {**content["serving"], **changes}
        path.write_text(json.dumps(content))
        return Catalog((root,))

    return restate


@pytest.fixture
def kernels(shop: Shop) -> Catalog:
    """A catalog with a stock-backed kernel for each operator, published for the CPU."""
    return shop.offer()


@pytest.fixture
def training_kernels(shop: Shop) -> Catalog:
    """As ``kernels``, and kernels for the gradients."""
    return shop.offer(ops=(*OPS, *BACKWARDS))


@pytest.fixture
def poison(shop: Shop) -> Catalog:
    """Kernels that write NaN: whoever runs one is found out."""
    return shop.offer(NAN)


@pytest.fixture
def build() -> Callable[..., Any]:
    """Make a tiny model: ``build("qwen3", torch.bfloat16, **config_changes)``."""
    return _build


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


@pytest.fixture
def left_padded() -> Callable[..., dict[str, torch.Tensor]]:
    """Make a batch of prompts of several lengths: ``left_padded((9, 4, 7))`` -> input_ids and attention_mask."""

    def make(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, -length:] = _prompt(1, length, seed=row)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    return make
