"""Curves of the loss of a small model on real text: stock code with three orders of the data, and patched with the first of them.

A Qwen3 of 4 layers learns Python's standard library for 500 steps. Its text is cut into tokens by a BPE that is trained here, so
nothing is downloaded. Weights are bfloat16 with float32 masters in the optimizer. Four variants: all weights; LoRA adapters
before the patch and after it, which PEFT inserts if it is installed; and all weights in two parts per step with checkpointed
layers.

    python benchmarks/loss_curves.py --out curves.json                                  # one GPU, about a minute
    python benchmarks/loss_curves.py --variants lora "lora last" --steps 200 --out curves.json
    python benchmarks/loss_curves.py --tiny --device cpu --steps 12 --out curves.json   # tries the script itself

The statistic. After every tenth of the steps, stock code computes the loss of every curve on one held-out text. The distance
of two curves is the root mean square of their differences there. The spread is the largest distance of two stock curves, which
differ in the order of the data alone. The patched curve is within the spread if its distance from the stock curve of the same
order is at most the spread. The order of the data is the variation that one accepts between two runs of one recipe, so a
difference below it changes no conclusion (Bouthillier et al., "Accounting for Variance in Machine Learning Benchmarks", MLSys
2021). A smaller bound would be wrong in the long run: a change of one bit in the weights grows until the runs differ as much as
those of other seeds (Summers and Dinneen, "Nondeterminism and Instability in Neural Network Optimization", ICML 2021). It has not
grown yet in the first twentieth of the steps, so there the losses of the batches must agree to 0.2%.

Splitting a step into parts and checkpointing change no sum of a step, so that variant is compared with the spread of all weights.
Stock code knows no order of patch and adapters, so adapters after the patch are compared with the spread of those before it.

The report counts the calls of kernels in training, forward and backward, by operator. Exits with 1 if a patched curve leaves the
spread, a loss is not finite, a kernel failed, or if no kernel ran on a GPU: such a run proves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # the other script, however this file is loaded
from training_step import LORA_ALPHA, LORA_RANK, LORA_TARGETS, add_adapters, free_memory, save, say

from tilegym_db.models import patch

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY = {
    **SIZES,
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TEXT_BYTES = {False: 12_000_000, True: 60_000}
"""Bytes of text that are read, by ``--tiny``."""
ORDERS = (0, 1, 2)
"""Seeds of the order of the data."""
LEARNING_RATE = 1e-3
WARM_UP, FLOOR = 0.05, 0.1
"""Share of the steps in which the learning rate grows, and its share at the end of the cosine."""
LARGEST_NORM = 1.0
CHECKS = 10
HELD_OUT_BATCHES = 4
EARLY_SHARE, EARLY_LIMIT = 0.05, 0.002
"""The share of first steps in which stock and patched have almost the same weights, and how far their losses may be apart."""


# -- text -------------------------------------------------------------------------------------------------------------


def library_text(limit: int) -> list[str]:
    """Return the sources of Python's standard library in a fixed random order, without its tests, up to so many bytes."""
    root, left, found = Path(os.__file__).parent, limit, []
    files = sorted(
        file for file in root.rglob("*.py") if not {"site-packages", "dist-packages", "test", "tests"} & {*file.parts}
    )
    random.Random(0).shuffle(files)
    for file in files:
        text = file.read_bytes()[: max(0, left)].decode("utf-8", errors="replace")
        left -= len(text)
        found += [text] if text else []
    return found


def tokens_of(texts: Sequence[str], vocabulary: int) -> torch.Tensor:
    """Train a byte-level BPE on texts, and return the ids of all of them in one row."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id("<end>")
    rows = (encoded.ids for encoded in tokenizer.encode_batch(texts))
    return torch.tensor([token for row in rows for token in (*row, end)])


@dataclass(frozen=True)
class Data:
    """Rows of text: those to learn and those held out, [rows, tokens] on the device."""

    learned: torch.Tensor
    held_out: torch.Tensor
    bytes: int

    def batches(self, rows: int, order: int) -> Iterator[torch.Tensor]:
        """Yield batches without end; every pass over the rows has a new order, all of them decided by one seed."""
        generator = torch.Generator().manual_seed(1000 + order)
        while True:
            for part in torch.randperm(len(self.learned), generator=generator).split(rows):
                if len(part) == rows:
                    yield self.learned[part.to(self.learned.device)]


def data_of(options: argparse.Namespace, vocabulary: int) -> Data:
    """Return the text as rows of tokens."""
    texts = library_text(TEXT_BYTES[options.tiny])
    ids = tokens_of(texts, vocabulary)
    rows = ids[: len(ids) // options.tokens * options.tokens].view(-1, options.tokens)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].to(options.device)
    held = HELD_OUT_BATCHES * options.rows
    if len(rows) < held + options.rows:
        raise SystemExit(f"the text has {len(rows)} rows of {options.tokens} tokens; {held + options.rows} are needed.")
    return Data(rows[held:], rows[:held], sum(len(text.encode()) for text in texts))


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to train: adapters alone, parts of a step, and checkpointed layers."""

    name: str
    lora: bool = False
    lora_last: bool = False
    """Adapters come after the patch, not before it."""
    parts: int = 1
    checkpoint: bool = False
    spread_of: str = ""
    """The variant whose spread it has: if that ran before, stock code trains with the first order of the data alone."""


VARIANTS = (
    Variant("all weights"),
    Variant("lora", lora=True),
    Variant("lora last", lora=True, lora_last=True, spread_of="lora"),
    Variant("parts", parts=2, checkpoint=True, spread_of="all weights"),
)


def built(options: argparse.Namespace, variant: Variant) -> Any:
    """Return a model in training mode with the same random weights at every call, without adapters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if options.tiny else SIZES))
    model: Any = Qwen3ForCausalLM(config).to(options.device, getattr(torch, options.dtype))
    if variant.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def adapted(model: Any) -> Any:
    """Return a model with trained adapters, by PEFT if it is installed."""
    if importlib.util.find_spec("peft") is None:
        add_adapters(model)
        return model
    import peft

    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def judge_of(model: Any, options: argparse.Namespace, variant: Variant) -> Any:
    """Return a model that shares the weights of another and is never patched, so all curves are judged by the same code."""
    judge = built(options, variant)
    judge = (adapted(judge) if variant.lora else judge).eval()
    judge.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return judge


class MasterAdamW:
    """AdamW on float32 copies of the trained weights, which are rounded to the dtype of the model after each step."""

    def __init__(self, model: Any, rate: float, steps: int, device: str) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._masters = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
        is_gpu = device.startswith("cuda")
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=is_gpu)
        self._rates = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: rate_at(step, steps))

    def step(self) -> None:
        """Take a step with clipped gradients, and remove them."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None, "every trained weight is part of the loss"
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, LARGEST_NORM)
        self._optimizer.step()
        self._rates.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)


def rate_at(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: it grows, and falls along a cosine."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def curve(options: argparse.Namespace, variant: Variant, data: Data, order: int, *, is_patched: bool) -> dict[str, Any]:
    """Train a model and return its losses: of every batch, and on the held-out text after every tenth of the steps."""
    model = built(options, variant)
    handle = patch(model) if is_patched and variant.lora_last else None
    if variant.lora:
        model = adapted(model).train()
    judge = judge_of(model, options, variant)
    handle = patch(model) if is_patched and handle is None else handle
    optimizer = MasterAdamW(model, LEARNING_RATE, options.steps, options.device)
    begun, learned, held_out = time.perf_counter(), [], []
    checks = {round(options.steps * (check + 1) / CHECKS) for check in range(CHECKS)}
    for step, ids in enumerate(itertools.islice(data.batches(options.rows, order), options.steps), start=1):
        total = torch.zeros((), device=options.device)
        for part in ids.chunk(variant.parts):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / variant.parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        learned.append(total)
        if step in checks:
            held_out.append(judged(judge, data, options.rows))
    losses = torch.stack(learned).tolist()
    found = {
        "order": order,
        "losses": [round(value, 6) for value in losses],
        "held_out": [round(value, 6) for value in torch.stack(held_out).tolist()],
        "seconds": round(time.perf_counter() - begun, 2),
        "trained": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        **({} if handle is None else calls_of(handle)),
    }
    if handle is not None:
        handle.unpatch()
    del model, judge, optimizer
    free_memory(options.device)
    return found


@torch.no_grad()
def judged(model: Any, data: Data, rows: int) -> torch.Tensor:
    """Return the mean loss on the held-out text."""
    parts = data.held_out.split(rows)
    losses = [model(input_ids=part, labels=part, use_cache=False).loss.float() for part in parts]
    return torch.stack(losses).mean()


def calls_of(handle: Any) -> dict[str, Any]:
    """Return the calls of kernels in training by Definition, the reasons of stock code, and the failures."""
    calls: dict[str, int] = {}
    reasons: dict[str, int] = {}
    report = handle.report()
    for site in report.sites:
        texts = {} if site.counts is None else dict(site.bypassed)
        if site.reason:
            texts[site.reason] = texts.get(site.reason, 0) + 1
        for counts in site.training:
            calls[counts.definition] = calls.get(counts.definition, 0) + counts.kernel_calls
            for key in counts.keys:
                if not key.solution:
                    texts[f"{counts.definition}: {key.reason}"] = key.calls
        for text, number in texts.items():
            place = f"{site.kind} {site.definition}: {text}"
            reasons[place] = reasons.get(place, 0) + number
    calls = {name: number for name, number in sorted(calls.items()) if number}
    return {
        "forward": {name: number for name, number in calls.items() if "_backward" not in name},
        "backward": {name: number for name, number in calls.items() if "_backward" in name},
        "stock": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        "failures": [str(failure) for failure in report.failures],
    }


# -- judgement --------------------------------------------------------------------------------------------------------


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the root mean square of the differences of two curves."""
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def spread_of(curves: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest distance of two curves; 0 for one."""
    pairs = itertools.combinations((one["held_out"] for one in curves), 2)
    return max((distance(one, other) for one, other in pairs), default=0.0)


def early_difference(patched: Sequence[float], stock: Sequence[float]) -> float:
    """Return the largest relative difference of the losses of the first batches."""
    first = max(1, round(EARLY_SHARE * len(stock)))
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(patched[:first], stock[:first], strict=True))


def compared(stock: Sequence[Mapping[str, Any]], patched: Mapping[str, Any], spread: float) -> dict[str, float]:
    """Return the figures that decide: the patched curve beside the stock curve of the same order."""
    (twin,) = [one for one in stock if one["order"] == patched["order"]]
    return {
        "distance": distance(patched["held_out"], twin["held_out"]),
        "spread": spread,
        "early": early_difference(patched["losses"], twin["losses"]),
    }


def findings_of(result: Mapping[str, Any], *, is_gpu: bool) -> list[str]:
    """Return what is wrong with the curves of one variant."""
    patched, figures = result["patched"], result["figures"]
    found = [*patched["failures"]]
    for one in (*result["stock"], patched):
        if not all(map(math.isfinite, (*one["losses"], *one["held_out"]))):
            found.append(f"a loss of order {one['order']} is not finite")
    if not figures["distance"] <= figures["spread"]:
        found.append(
            f"patched is {figures['distance']:.5f} from stock, and orders of the data differ by at most {figures['spread']:.5f}"
        )
    if not figures["early"] <= EARLY_LIMIT:
        found.append(f"a loss of the first steps is {figures['early']:.2%} off; at most {EARLY_LIMIT:.2%} is rounding")
    if is_gpu and not (patched["forward"] and patched["backward"]):
        found.append("no kernel ran in training, so this run proves nothing")
    return [f"{result['variant']}: {text}" for text in found]


def print_result(result: Mapping[str, Any]) -> None:
    """Print the table of one variant, and what decides."""
    figures, patched = result["figures"], result["patched"]
    print(f"\n{result['variant']}: {result['trained'] / 1e6:,.2f}M trained weights, {len(patched['losses'])} steps")
    print(f"  {'curve':<16} {'first':>8} {'held out':>9} {'distance':>9} {'seconds':>8}")
    twin = next(one for one in result["stock"] if one["order"] == patched["order"])
    rows = [(f"stock, order {one['order']}", one) for one in result["stock"]]
    for name, one in [*rows, (f"patched, order {patched['order']}", patched)]:
        away = "" if one is twin else f"{distance(one['held_out'], twin['held_out']):9.5f}"
        print(f"  {name:<16} {one['losses'][0]:>8.4f} {one['held_out'][-1]:>9.4f} {away:>9} {one['seconds']:>8.1f}")
    verdict = "within" if figures["distance"] <= figures["spread"] else "NOT within"
    print(
        f"  patched is {verdict} the spread: {figures['distance']:.5f} of {figures['spread']:.5f}; "
        f"the first losses differ by at most {figures['early']:.3%}"
    )
    for way in ("forward", "backward"):
        total = sum(patched[way].values())
        print(f"    {way}: {total} kernel calls  " + ", ".join(f"{name} {n}" for name, n in patched[way].items()))
    for text, calls in patched["stock"].items():
        print(f"    stock: {text} ({calls})")
    if not (patched["forward"] and patched["backward"]):
        print("    no kernel ran in training: this run proves nothing about kernels")


# -- command line -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, data: Data, variant: Variant, known: float | None) -> dict[str, Any]:
    """Return the curves of one variant and the figures that decide.

    Args:
        known: the spread of the variant that this one names; None if it names none, or that did not run before.
    """
    orders = ORDERS if known is None else ORDERS[:1]
    stock = []
    for order in orders:
        say(f"{variant.name}: stock, order {order}")
        stock.append(curve(options, variant, data, order, is_patched=False))
    say(f"{variant.name}: patched")
    patched = curve(options, variant, data, orders[0], is_patched=True)
    spread = spread_of(stock) if known is None else known
    return {
        "variant": variant.name,
        "trained": patched["trained"],
        "stock": stock,
        "patched": patched,
        "figures": compared(stock, patched, spread),
    }


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--tiny", action="store_true", help="a model of some kilobytes, to try the script itself")
    parser.add_argument("--out", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    if options.steps < CHECKS:
        parser.error(f"--steps: at least {CHECKS}, as the loss is judged so often")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all variants and return 1 if there is a finding."""
    options = parsed(arguments)
    is_gpu = options.device.startswith("cuda")
    begun = time.perf_counter()
    say("cutting the standard library into tokens")
    data = data_of(options, (TINY if options.tiny else SIZES)["vocab_size"])
    say(
        f"{data.bytes / 1e6:.1f} MB of text, {data.learned.numel():,} tokens to learn, {data.held_out.numel():,} held out"
    )
    peft = importlib.metadata.version("peft") if importlib.util.find_spec("peft") is not None else ""
    results: list[dict[str, Any]] = []
    findings: list[str] = []
    for variant in (one for one in VARIANTS if one.name in options.variants):
        known = next((one["figures"]["spread"] for one in results if one["variant"] == variant.spread_of), None)
        results.append(measure(options, data, variant, known))
        findings += findings_of(results[-1], is_gpu=is_gpu)
        print_result(results[-1])
        more = {"peft": peft, "text_bytes": data.bytes, "learned_tokens": data.learned.numel()}
        save(
            options, results, findings, **more, seconds=round(time.perf_counter() - begun, 1)
        )  # a later one may be cut off
    for text in findings:
        say(f"finding: {text}")
    say(f"{time.perf_counter() - begun:.1f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
