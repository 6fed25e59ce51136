"""Count the call sites that are recognised in a small random model of every architecture of transformers.

``python benchmarks/recognised_parts.py found.jsonl`` writes one line for each architecture. With two such files,
``--compare before.jsonl after.jsonl`` prints the parts gained as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 60
"""Limit for building and searching one model."""
ATTRIBUTES = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 2,
    "n_layer": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
FEW_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


class Late(Exception):
    """The limit of one architecture has passed."""


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a config and the configs in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_json_string"):
            yield from parts_of(value)


def reduced(config: Any, *, widths: bool) -> Any:
    """Return the config with few layers, and with small widths if asked."""
    for part in parts_of(config):
        for name, value in ATTRIBUTES.items():
            if not widths and name not in FEW_LAYERS:
                continue
            try:
                own = getattr(part, name, None)
                if type(own) is int and (name in vars(part) or name in type(part).attribute_map):
                    setattr(part, name, min(own, value))
            except Exception:
                continue
        if widths:
            _complete(part)
        words = getattr(part, "vocab_size", None)
        for name in TOKENS if type(words) is int else ():
            token = getattr(part, name, None)
            if type(token) is int and token >= words:
                setattr(part, name, 0)
        for name, value in list(vars(part).items()):
            layers = getattr(part, "num_hidden_layers", None)
            if isinstance(value, list) and name.endswith(("layer_types", "_types")) and type(layers) is int:
                kinds = list(dict.fromkeys(value))
                setattr(part, name, ([*kinds, *value])[:layers])
    return config


def _complete(part: Any) -> None:
    """Set what follows from other sizes: latent attention has as many keys as queries, and a head has a width."""
    own = vars(part)
    if type(own.get("kv_lora_rank")) is int and "num_key_value_heads" in own:
        part.num_key_value_heads = part.num_attention_heads
    if "head_dim" in own and own["head_dim"] is None:
        part.head_dim = part.hidden_size // part.num_attention_heads


def models(kind: str) -> Iterator[Any]:
    """Yield small models of an architecture, the smallest first, until one can be built."""
    import torch
    from transformers import CONFIG_MAPPING

    from tilegym_db.models.random_model import model_class

    for widths in (True, False):
        torch.manual_seed(0)
        try:
            config = reduced(CONFIG_MAPPING[kind](), widths=widths)
            factory = model_class(config)
            make = factory.from_config if hasattr(factory, "_model_mapping") else factory._from_config
            with torch.device("meta"):
                model = make(config)
            if sum(one.numel() for one in model.parameters()) > 400e6:
                raise MemoryError("more than 400 million parameters")
            yield make(config).eval()
            return
        except Late:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:150]}"
    raise RuntimeError(problem)


def row(kind: str) -> dict[str, Any]:
    """Return what is recognised in a model of an architecture, and why the rest is not."""
    import tilegym_db

    model = next(models(kind))
    report = tilegym_db.patch(model, dry_run=True).report()
    sites: Counter[str] = Counter()
    stock = []
    for site in report.sites:
        if site.reason == "dry run":
            sites[f"{site.kind}:{site.definition}"] += site.modules
        else:
            stock.append((site.module_class, site.kind, site.modules, site.reason))
    return {
        "architecture": kind,
        "model": type(model).__name__,
        "sites": dict(sites),
        "stock": stock,
        "undescribed": [tuple(one) for one in report.undescribed],
    }


def survey(kinds: Iterable[str], target: Path) -> None:
    """Write one line for each architecture."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    with target.open("w", encoding="utf-8") as lines:
        for kind in kinds:
            signal.alarm(SECONDS)
            try:
                found = row(kind)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                found = {"architecture": kind, "problem": f"{type(error).__name__}: {str(error)[:200]}"}
            finally:
                signal.alarm(0)
            lines.write(json.dumps(found) + "\n")
            lines.flush()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return architecture -> its line, for those that could be built."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["architecture"]: line for line in lines if "problem" not in line}


def compared(before: Path, after: Path) -> str:
    """Return the parts gained as a Markdown table."""
    old, new = read(before), read(after)
    common = sorted(old.keys() & new.keys())
    total = Counter[str](), Counter[str]()
    reached = Counter[str](), Counter[str]()
    for kind in common:
        for index, line in enumerate((old[kind], new[kind])):
            total[index].update(line["sites"])
            reached[index].update(line["sites"].keys())
    names = sorted(total[0].keys() | total[1].keys(), key=lambda name: total[0][name] - total[1][name])
    rows = [
        f"| {name} | {total[0][name]} | {total[1][name]} | {reached[0][name]} | {reached[1][name]} |" for name in names
    ]
    counts = [sum(one.values()) for one in total]
    return "\n".join(
        [
            f"{len(common)} architectures; {counts[0]} modules in recognised call sites before, {counts[1]} after.",
            "",
            "| part:definition | modules before | after | architectures before | after |",
            "|---|---:|---:|---:|---:|",
            *rows,
        ]
    )


def main() -> None:
    """Survey, or compare two surveys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true", help="print the difference of two files")
    parser.add_argument("--only", nargs="*", help="architectures; all by default")
    options = parser.parse_args()
    if options.compare:
        print(compared(*options.files))
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import CONFIG_MAPPING

    survey(options.only or sorted(CONFIG_MAPPING), options.files[0])


if __name__ == "__main__":
    main()
