"""Time forwards that a caller makes: stock, compiled, patched, and patched with graphs, in turns.

    python benchmarks/forwards.py                                # all models, on the GPU
    python benchmarks/forwards.py bert-large vit-l --json out.json
    python benchmarks/forwards.py --tiny --device cpu            # small models, to try the script

Each model has random weights and the sizes of its published config. Times are from the call to the end of the work on the device,
medians over rounds in which each way runs once. Errors are relative, against stock in float32 on the same weights: a way that is
faster and further away is no gain.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import tilegym_db

WARM = 20
"""Forwards before the timed ones: call sites that no kernel serves leave a model after 16."""
ROUNDS = 15
TEXT_SHAPES = ((1, 32), (1, 128), (1, 512), (8, 128), (8, 512), (1, 4096))
IMAGE_BATCHES = (1, 8, 32)
SMALL = {"num_hidden_layers": 2, "vocab_size": 512}


def _text(kind: str, config: type[Any], **sizes: Any) -> Callable[[bool], Any]:
    def make(tiny: bool) -> Any:
        made = config(**{**sizes, **(SMALL if tiny else {})})
        return getattr(transformers, kind)(made)

    return make


def _image(kind: str, config: type[Any], **sizes: Any) -> Callable[[bool], Any]:
    return lambda tiny: getattr(transformers, kind)(config(**{**sizes, **({"num_hidden_layers": 2} if tiny else {})}))


BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, Callable[[bool], Any]] = {
    "bert-base": _text("BertModel", transformers.BertConfig),
    "bert-large": _text("BertModel", transformers.BertConfig, **BERT),
    "roberta-large": _text("RobertaModel", transformers.RobertaConfig, **BERT, vocab_size=50265),
    "modernbert-large": _text(
        "ModernBertModel", transformers.ModernBertConfig, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
        intermediate_size=2624, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "vit-l": _image("ViTModel", transformers.ViTConfig, **BERT),
    "siglip-l": _image("SiglipVisionModel", transformers.SiglipVisionConfig, **BERT, image_size=256),
    "llama-3.2-1b": _text(
        "LlamaForCausalLM", transformers.LlamaConfig, vocab_size=128256, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
    ),
    "qwen3-0.6b": _text(
        "Qwen3ForCausalLM", transformers.Qwen3Config, vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
    "qwen3.5-0.8b": lambda tiny: transformers.AutoModelForCausalLM.from_config(_config("qwen3.5-0.8b", tiny)),
}  # fmt: skip


def _config(name: str, tiny: bool) -> Any:
    from tilegym_db.models.random_model import load_config

    return load_config(Path(__file__).parent / "configs" / f"{name}.json", 1 if tiny else None)


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; by default all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers, few sizes and rounds")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes a minute a shape"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    unknown = set(args.models) - set(MODELS)
    if unknown:
        parser.error(f"no model {sorted(unknown)[0]}; there are {', '.join(MODELS)}")
    rows = []
    for name in args.models or MODELS:
        for row in measured(name, args):
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measured(name: str, args: argparse.Namespace) -> Any:
    """Yield a row for each shape of a model."""
    torch.manual_seed(0)
    exact = MODELS[name](args.tiny).eval()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    stock = copy.deepcopy(exact).to(args.device, dtype)
    exact = copy.deepcopy(stock).float()
    ways: dict[str, Any] = {"stock": stock}
    if not args.no_compile:
        ways["compile"] = torch.compile(copy.deepcopy(stock))
    handles = {}
    for way, graphs in (("patched", False), ("graphs", True)):
        ways[way] = copy.deepcopy(stock)
        handles[way] = tilegym_db.patch(ways[way], graph_forwards=graphs)
    is_image = hasattr(stock.config, "image_size")
    shapes: Any = [(batch,) for batch in IMAGE_BATCHES] if is_image else TEXT_SHAPES
    longest = getattr(stock.config.get_text_config(), "max_position_embeddings", None) or 4096
    for shape in shapes[:1] if args.tiny else [one for one in shapes if is_image or one[-1] <= longest]:
        yield {"model": name, "shape": shape, **_timed(ways, exact, shape, args)}
    report = handles["graphs"].report().forwards
    if report is not None:
        print(report.summary())


def _timed(ways: dict[str, Any], exact: Any, shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    warm, rounds = (6, 2) if args.tiny else (WARM, ROUNDS)
    inputs = [_inputs(exact.config, shape, args.device, seed) for seed in range(3)]
    out: dict[str, Any] = {"ms": {}, "error": {}}
    with torch.inference_mode():
        for model in ways.values():
            for turn in range(warm):
                model(**inputs[turn % 3])
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            for way, model in ways.items():
                _wait(args.device)
                begin = time.perf_counter()
                model(**inputs[turn % 3])
                _wait(args.device)
                times[way].append(1e3 * (time.perf_counter() - begin))
        truth = _first(exact(**_as_float(inputs[0])))
        for way, model in ways.items():
            found = _first(model(**inputs[0])).float()
            out["error"][way] = float((found - truth).norm() / truth.norm())
            out["ms"][way] = statistics.median(times[way])
    return out


def _inputs(config: Any, shape: tuple[int, ...], device: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        size = config.image_size
        pixels = torch.randn(*shape, 3, size, size, generator=generator)
        return {"pixel_values": pixels.to(device, torch.float32 if device == "cpu" else torch.bfloat16)}
    words = config.get_text_config().vocab_size
    ids = torch.randint(10, words, shape, generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _as_float(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}


def _first(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs[0]
    return found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    times = "  ".join(f"{way} {ms:8.3f}" for way, ms in row["ms"].items())
    errors = "  ".join(f"{error:.4f}" for error in row["error"].values())
    return f"{row['model']:18s} {'x'.join(map(str, row['shape'])):>8s}  {times} ms   errors {errors}"


if __name__ == "__main__":
    main()
