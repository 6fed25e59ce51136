"""Tiny random models, and kernels for the CPU, so that the patched path really runs.

The kernels are the catalog's own stock code behind a destination-passing signature, published as if they had been measured
on ``cpu`` over a range of sizes: whatever a model calls is served, and the bits must be those of the stock model.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_tables import table_files, write_files
from shipped_records import CATALOG as SHIPPED

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.catalog.record_files import name_at, record_paths
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import is_code_selecting

TOGETHER = ("normed_rope",)
"""Parts that take the place of others: only their own tests publish them, and all others see each part served."""
SERVED = [
    record
    for record in SHIPPED.definitions.values()
    if record.serving is not None and record.serving.part not in (None, *TOGETHER)
]
OPS = tuple(sorted({record.name for record in SERVED} | {one.serving.after for one in SERVED if one.serving.after}))  # type: ignore[union-attr]
"""What models are served with, as the Definitions say, and what comes before them."""
IN_TRAINING = tuple(sorted(one.serving.in_training for one in SERVED if one.serving.in_training))  # type: ignore[union-attr]
"""What training asks for in place of an operator that overwrites an input."""
SUMS = (*IN_TRAINING, *(name for name, record in SHIPPED.definitions.items() if record.backward_of in IN_TRAINING))
BACKWARDS = tuple(name for name, record in SHIPPED.definitions.items() if record.backward_of in OPS)
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
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
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
HYPER = {
    "hc_mult": 4,
    "hc_sinkhorn_iters": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK_V4 = {
    **HYPER,
    **WINDOW,
    "num_key_value_heads": 1,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}
GLM5_NEXT = {
    **HYPER,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 0,
    "layer_types": ["linear_attention", "full_attention"],  # every version has its own name of the last one
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_kpool": 2,
}
KIMI_LINEAR = {
    **MLA,
    "head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
LOCAL_AND_GLOBAL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN4_EXP = {
    **MOE,
    **LINEAR,
    "eos_token_id": 2,
    "shared_expert_intermediate_size": 32,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
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
    "gemma2": ("Gemma2", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16}),
    "vaultgemma": ("VaultGemma", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16}),
    "qwen2_moe": ("Qwen2Moe", MOE),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "olmoe": ("Olmoe", MOE),
    "mixtral": ("Mixtral", MOE),
    "deepseek_v2": ("DeepseekV2", {**MLA, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v32": ("DeepseekV32", {**MLA, **INDEXER}),
    "glm_moe_dsa": ("GlmMoeDsa", {**MLA, **INDEXER}),
    "gpt_oss": ("GptOss", {**MOE, **LOCAL_AND_GLOBAL}),
    "qwen3_next": ("Qwen3Next", {**MOE, **LINEAR, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5}),
    "qwen3_5": ("Qwen3_5", LINEAR),
    "deepseek_v4": ("DeepseekV4", DEEPSEEK_V4),
    "glm5_next": ("Glm5Next", GLM5_NEXT),
    "qwen4_exp": ("Qwen4Exp", QWEN4_EXP),
    "kimi_linear": ("KimiLinear", KIMI_LINEAR),
}
NAN = "    for value in {outputs}:\n        value.fill_(float('nan'))\n"


def _build(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Build a tiny model in eval mode with the same weights at every call. Norm weights are random, not ones."""
    prefix, own = MODELS[name]
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **own, **changes})
    model_class = getattr(transformers, f"{prefix}ForCausalLM", None) or getattr(transformers, f"{prefix}TextModel")
    model = model_class(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype).eval()


def _prompt(batch: int = 1, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Return random token ids [batch, length] without the padding token."""
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def _layouts(definition: Definition) -> list[dict[str, str]]:
    """Return the layouts in which models pass these tensors, in any combination; all others are contiguous.

    Heads and tokens may change places; the rows of a norm may be padded.
    """
    tensors = {**{name: definition.inputs[name] for name in definition.tensor_inputs}, **definition.outputs}
    varying = tuple(name for name, spec in tensors.items() if len(spec.shape or ()) == 4)
    if definition.serving is not None and definition.serving.part == "causal_conv":  # transposed views of projections
        return [{}, {"x": "strided"}, {"out": "strided"}, {"x": "strided", "out": "strided"}]
    if definition.serving is not None and definition.serving.part == "delta_rule":  # columns of one tensor
        return [{}, *(dict.fromkeys(("q", "k", "v"), layout) for layout in ("row_contiguous", "strided"))]
    if definition.serving is not None and definition.serving.part == "distance_bias":  # heads last in memory
        return [{}, {"values": "strided", "out": "strided"}]
    if definition.serving is not None and definition.serving.part == "state_space":
        columns = [name for name in ("x", "Bmat", "Cmat") if name in tensors]
        return [
            {},
            *({**dict.fromkeys(columns, layout), "dt": "row_contiguous"} for layout in ("row_contiguous", "strided")),
        ]
    if definition.serving is not None and definition.serving.part == "norm":
        varying = definition.tensor_inputs[:1]
    if definition.backward_of == "attention_prefill":  # gradients lie in memory as their tensors do
        of_keys = {"k", "v", "grad_k", "grad_v"}
        whole = [dict.fromkeys(names, "row_contiguous") for names in (set(varying) - of_keys, of_keys)]
        return [{}, whole[0], whole[1], whole[0] | whole[1]]
    if definition.backward_of == "attention_sink_prefill":
        pairs = [dict.fromkeys((name, f"grad_{name}"), "row_contiguous") for name in ("q", "k", "v", "out")]
        chosen = itertools.product((False, True), repeat=len(pairs))
        return [
            {name: way for is_in, pair in zip(one, pairs, strict=True) if is_in for name, way in pair.items()}
            for one in chosen
        ]
    ways: dict[str, Sequence[str]] = dict.fromkeys(varying, ("", "row_contiguous"))
    if definition.serving is not None and definition.serving.part == "biased_attention":  # heads may be last in memory
        ways["bias"] = ("", "row_contiguous", "strided")
    return [{name: way for name, way in chosen.items() if way} for chosen in _products(ways)]


def _size(definition: Definition, axis: str, size: int) -> int:
    """Return a size as large as everything else, within the limits: heads are limited or hold pairs, groups hold two experts."""
    if f"{axis} <= 256" in definition.constraints:
        return min(size, LARGEST_HEAD)
    if "2 * P <= D" in definition.constraints and axis == "D":
        return 2 * size
    return 2 * size if "E >= 2 * G" in definition.constraints and axis == "E" else size


def _products(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every choice of a value for each name."""
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]


@functools.cache
def _selecting(op: str) -> dict[str, Sequence[Any]]:
    """Return the inputs that select what code runs: flags, and whole numbers that are no sizes, as Workloads have them."""
    definition, found = SHIPPED.definition(op), dict[str, Sequence[Any]]()
    for name, spec in definition.inputs.items():
        if spec.is_scalar and is_code_selecting(definition, name):
            stated = {load.scalars().get(name, 0) for load in SHIPPED.workloads_for(definition.name)}
            found[name] = (False, True) if spec.dtype == "bool" else sorted(stated)
    return found


def _source(solution: SolutionFiles) -> bytes:
    """Return the source of a Solution, whose entry function is ``run`` in it: a family shares one, with an entry of each.

    What it imports from a library of sources stands in place of the import.
    """
    file, _, entry = solution.record.spec.entry_point.partition("::")

    def of_library(found: re.Match[bytes]) -> bytes:
        return solution.sources[f"_lib/{found[1].decode().replace('.', '/')}.py"]

    source = re.sub(
        rb"^from _lib\.(\S+) import (?:\([^)]*\)|[^\n(]*)\n", of_library, solution.sources[file], flags=re.M
    )
    if entry == "run":
        return source
    # The entry may call the function that the file names "run", or be one that a decorator returns: all get another name.
    return re.sub(rb"(?<!\.)\brun\b", b"run_of_family", source) + f"\n\nrun = {entry}\n".encode()


@dataclass(frozen=True)
class Offer:
    """The kernels that a test is offered: the files of the overlay, and the entries published of them."""

    files: dict[str, bytes]
    entries: list[dict[str, Any]]

    @functools.cached_property
    def published(self) -> dict[str, bytes]:
        return table_files(self.entries)


def beside_the_shipped(root: Path) -> Catalog:
    """Return a catalog of the shipped records and those of a folder. Tests share what was read of the shipped ones."""
    catalog = Catalog((shipped_root(), root))
    if SHIPPED.roots == catalog.roots[:1]:
        vars(catalog)["solution_paths"] = SHIPPED.solution_paths | {name_at(path): path for path in record_paths(root)}
        catalog._cache.update(SHIPPED._cache)
    return catalog


OFFERED: dict[tuple[Any, ...], Offer] = {}
"""What was offered before, by what was asked for: hundreds of tests ask for the same."""


@dataclass
class Shop:
    """The user's catalog overlay beside the shipped catalog, and the table published for the CPU."""

    root: Path
    home: Path
    gpu: str = "cpu"
    sm: str = "cpu"
    offered: Offer | None = None
    """What is published, until a test asks for the entries."""

    @functools.cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The entries that are published; a test may change them and call :meth:`republish`."""
        return copy.deepcopy(self.offered.entries) if self.offered else []

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
        smallest_of: tuple[tuple[str, int], ...] = (),
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
            smallest_of: the same for some operators alone.
        """
        asked = (body, rounding, without, ops, returning, device, smallest, smallest_of)
        is_first = not self.root.exists()
        if is_first and asked in OFFERED:
            offered = OFFERED[asked]
            for place, content in offered.files.items():
                (self.root / place).parent.mkdir(parents=True, exist_ok=True)
                (self.root / place).write_bytes(content)
        else:
            for op in (op for op in ops if op not in without):
                self._write(op, body, rounding, returns=op in returning)
            written = [file for file in self.root.rglob("*") if file.is_file()]
            files = {str(file.relative_to(self.root)): file.read_bytes() for file in written}
            offered = Offer(files, self._table(without, device, smallest, dict(smallest_of)))
            if is_first:
                OFFERED[asked] = offered
        self.gpu, self.sm, self.offered = *device, offered
        vars(self).pop("entries", None)
        self.republish()
        return beside_the_shipped(self.root)

    def _table(
        self, without: tuple[str, ...], device: tuple[str, str], smallest: int, smallest_of: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """Return what is published of every kernel that was written: the entries of a table."""
        entries: list[dict[str, Any]] = []
        catalog = beside_the_shipped(self.root)
        for op in (op for op in (*OPS, *BACKWARDS, *SUMS) if op not in without and self._folder(op).is_dir()):
            entries += self._entries(catalog, op, smallest_of.get(op, smallest))
        return entries

    def republish(self) -> None:
        """Publish the entries as they are now."""
        is_changed = "entries" in vars(self) or self.offered is None
        files = table_files(self.entries) if is_changed else self.offered.published
        write_files(self.home / "published" / self.gpu, files, self.home, sm=self.sm)

    def _folder(self, op: str) -> Path:
        return self.root / "solutions" / SHIPPED.definition(op).op_type / op / f"{op}_cpu"

    def _write(self, op: str, body: str | None, rounding: str, *, returns: bool) -> None:
        definition, stock = SHIPPED.definition(op), SHIPPED.solution(f"{op}_stock")
        inputs, outputs = ", ".join(definition.inputs), ", ".join(definition.written_outputs)
        code = definition.reference.encode() if rounding == "reference" else _source(stock)
        if rounding == "triton":
            code = _source(SHIPPED.solution(f"{op}_triton"))
            body = "    stock.run({inputs}, *{outputs})\n"
        if body is None:
            # What is written in place: stock has done that, a reference returns it.
            targets = ", ".join((outputs, *definition.in_place))
            body = (
                f"    computed = stock.run({inputs})\n"
                "    values = computed if isinstance(computed, tuple) else (computed,)\n"
                f"    for out, value in zip(({targets},), values, strict=False):\n        out.copy_(value)\n"
            )
        folder = self._folder(op)
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
        """Return the smallest and the largest call of each dtype and layout: all others are nearest to one of the two."""
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
                "dtypes": dtypes,
                "axes": {
                    **{name: axis.value for name, axis in definition.axes.items() if axis.value is not None},
                    **{axis: _size(definition, axis, size) for axis in definition.var_axes},
                },
                "layouts": layouts,
                "scalars": flags,
                "candidates": [candidate],
            }
            for dtypes, size, layouts, flags in itertools.product(
                _products(definition.dtypes), (smallest, LARGEST), _layouts(definition), _products(_selecting(op))
            )
        ]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen the terminal: reports are read here as whole sentences, which 80 columns would break."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def shop(home: Path) -> Shop:
    """Return the user's overlay; nothing is offered and nothing published yet."""
    return Shop(home / "catalog", home)


@pytest.fixture
def restated(tmp_path: Path) -> Callable[..., Catalog]:
    """Return the shipped catalog with other rules of serving a Definition: ``restated("rms_norm", code=[...])``."""

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
    """Return a catalog with a stock-backed kernel for each operator, published for the CPU."""
    return shop.offer()


@pytest.fixture
def training_kernels(shop: Shop) -> Catalog:
    """Return the catalog of ``kernels`` with kernels for the gradients."""
    return shop.offer(ops=(*OPS, *BACKWARDS))


@pytest.fixture
def sum_kernels(shop: Shop) -> Callable[..., Catalog]:
    """Return the function that offers kernels for training and those of its sums, without some operators."""
    return functools.partial(shop.offer, ops=(*OPS, *BACKWARDS, *SUMS))


@pytest.fixture
def poison(shop: Shop) -> Catalog:
    """Return kernels that write NaN, so that every use of one shows."""
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
def gradients() -> Callable[..., list[torch.Tensor]]:
    """Return the gradients of a language model's loss on its own prompt, without those that it does not get."""

    def run(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    return run


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """Return the logits of one forward pass without grad."""

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
