"""Does ``generate`` in graphs stay right and small? Thousands of steps of two patched models beside stock, shapes mixed.

Episodes of random batch, lengths (padded on the left) and number of steps, in turn on each model; some rows end early, and some
generations are stopped from outside. A logits processor keeps the logits and forces tokens drawn in advance, so patched and
stock read the same. The precise model (fp32; fp64 for a model of fp32) reads the sequence that stock made, in one forward.
What must hold, for each model:

* Both return the same sequences: tokens are forced, so another one means another end.
* Over all rows, the patched error against the precise model is at most ``ERROR_FACTOR`` times that of stock.
* The next token is stock's, except where stock could not tell either (see soak.py). Judged for models without experts only: an
  expert whose rank two roundings change is another error than stock's, at another token.
* After the warm-up, memory does not grow; the caches that graphs keep are bounded by their number, and are subtracted.
* Most steps are replays of graphs, and no kernel fails.

    python benchmarks/soak_graphs.py --steps 10000 --time-limit 120 --out soak.json   # on the GPU
    python benchmarks/soak_graphs.py --threads --steps 2000                            # both models at the same time
    python benchmarks/soak_graphs.py --gpu cpu --steps 40                              # tiny; graphs are forwards run again

Exits with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from decode_ways import CONFIGS, TINY
from soak import (
    ERROR_FACTOR,
    SHOWN,
    WARM_UP_SHARE,
    Comparison,
    Episode,
    compared,
    growth_bytes,
    sampled,
    say,
    tokens_of,
    twin_of,
)

from tilegym_db.measurement.machine import select_machine
from tilegym_db.models import patch
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.random_model import load_config, unchecked_model

MODELS = ("llama-3.2-1b", "qwen3-30b-a3b")
VOCABULARY = 4096
"""Of the models, which are cut: the logits of all steps are kept. 0 pads and 1 ends a row; others are forced."""
PAD, END = 0, 1
BATCHES = (1, 2, 3, 4)
LEAST_STEPS = 16
"""Of an episode: with a few new tokens, generations run stock."""
MIN_REPLAYED = 0.5
"""Share of the steps after a prompt. Generations that end early have few of them."""
MAX_GROWTH_BYTES = {"gpu": 32 << 20, "host": 256 << 20}
"""Of the rest of the run. On a GPU, PyTorch keeps some of the host's memory for every new shape, of stock too."""


@dataclass(frozen=True)
class Stops:
    """The ends of an episode: of each row (None: it goes on), and of the generation from outside."""

    rows: tuple[int | None, ...]
    outside: int | None


def drawn(steps: int, longest: int, most_steps: int, seed: int) -> Iterator[tuple[Episode, Stops]]:
    """Return random episodes with at least ``steps`` steps in all if none ended early, and where they stop."""
    draw = random.Random(seed)
    left = steps
    while left > 0:
        batch = draw.choice(BATCHES)
        lengths = [draw.randint(1, longest) for _ in range(batch)]
        if draw.random() < 0.5:
            lengths = [max(lengths)] * batch
        count = draw.randint(min(LEAST_STEPS, most_steps), most_steps)
        rows = tuple(draw.randrange(count) if draw.random() < 0.3 else None for _ in range(batch))
        outside = draw.randint(1, count) if draw.random() < 0.3 else None
        left -= count
        yield Episode(tuple(lengths), count), Stops(rows, outside)


class Forced:
    """A logits processor that keeps the logits and leaves one token a row, and a criterion that stops from outside."""

    def __init__(self, tokens: torch.Tensor, stops: Stops) -> None:
        """Keep the tokens to force [batch, steps], with the ends of rows among them."""
        self._tokens = tokens.clone()
        for row, at in enumerate(stops.rows):
            if at is not None:
                self._tokens[row, at] = END
        self._outside = stops.outside
        self.logits: list[torch.Tensor] = []

    def process(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep scores [batch, vocabulary], and return those that choose the next forced token."""
        chosen = self._tokens[:, len(self.logits), None]
        self.logits.append(scores.clone())
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)

    def stop(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return True for all rows if the generation is to stop."""
        over = self._outside is not None and len(self.logits) >= self._outside
        return torch.full((ids.shape[0],), over, dtype=torch.bool, device=ids.device)


def generated(model: Any, ids: torch.Tensor, mask: torch.Tensor, prompt: int, stops: Stops) -> tuple[Any, Any]:
    """Return the sequences [batch, prompt + steps] and the logits [steps, batch, vocabulary] of a forced generation."""
    forced = Forced(ids[:, prompt:], stops)
    sequences = model.generate(
        ids[:, :prompt],
        attention_mask=mask[:, :prompt],
        max_new_tokens=ids.shape[1] - prompt,
        do_sample=False,
        num_beams=1,
        pad_token_id=PAD,
        eos_token_id=END,
        disable_compile=True,
        logits_processor=[forced.process],
        stopping_criteria=[forced.stop],
    )
    return sequences, torch.stack(forced.logits)


def read_at_once(model: Any, sequences: torch.Tensor, mask: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits [steps, batch, vocabulary] in front of each token after the prompt, by one forward."""
    steps = sequences.shape[1] - prompt
    full = torch.cat([mask[:, :prompt], torch.ones_like(sequences[:, prompt:])], dim=1)
    positions = (full.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        found = model(input_ids=sequences, attention_mask=full, position_ids=positions, use_cache=False)
    logits: torch.Tensor = found.logits[:, prompt - 1 : prompt - 1 + steps]
    return logits.transpose(0, 1)


class Subject:
    """A model in its three forms, with what came of its episodes."""

    def __init__(self, name: str, device: str, dtype: str, layers: int) -> None:
        """Build, copy and patch it; on a CPU, graphs are forwards that run again."""
        self.name, self._device = name, device
        config = load_config(CONFIGS / f"{name}.json", layers)
        sizes = TINY if device == "cpu" else {"vocab_size": VOCABULARY}
        for attribute, value in {**sizes, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}.items():
            if attribute.endswith("token_id") or hasattr(config, attribute):
                setattr(config, attribute, value)
        self.stock: Any = unchecked_model(config, device, dtype)
        self.precise = copy.deepcopy(self.stock).to(torch.float64 if dtype == "float32" else torch.float32)
        self.precise.set_experts_implementation("eager")  # grouped products take no float64
        self.patched = twin_of(self.stock)
        self.handle = patch(self.patched)
        self._decoding = None if device != "cpu" else graphs_of_the_host(self.patched)
        self.has_experts = any("experts" in part for part, _ in self.stock.named_modules())
        self.comparison = Comparison()
        self.steps = self.after_prompt = 0
        self.other_sequences: list[str] = []

    def run(self, index: int, episode: Episode, stops: Stops, seed: int) -> None:
        """Run an episode on all three, and compare."""
        ids, mask = tokens_of(episode, self.stock.config.vocab_size, seed, self._device)
        ids = torch.where((mask == 1) & (ids == END), END + 1, ids)
        prompt = max(episode.lengths)
        ours, patched = generated(self.patched, ids, mask, prompt, stops)
        theirs, stock = generated(self.stock, ids, mask, prompt, stops)
        self.steps += len(stock)
        self.after_prompt += len(stock) - 1
        if not torch.equal(ours, theirs):
            self.other_sequences.append(f"episode {index} ({episode}): {list(ours.shape)} and {list(theirs.shape)}")
            return
        precise = read_at_once(self.precise, theirs, mask, prompt)
        figures = [compared(*rows) for rows in zip(patched, stock, precise, strict=True)]
        self.comparison.add(index, episode, torch.cat(figures).cpu())

    def graphs(self) -> Any:
        """Return the report of the graphs."""
        return self.handle.report().decoding if self._decoding is None else self._decoding.report()

    def results(self) -> dict[str, Any]:
        """Return what came of the episodes."""
        report, graphs = self.handle.report(), self.graphs()
        return {
            "steps": self.steps,
            "steps_after_prompt": self.after_prompt,
            "has_experts": self.has_experts,
            "other_sequences": self.other_sequences,
            "comparison": self.comparison.results() if self.comparison.rows else None,
            "graphs": None if graphs is None else vars(graphs) | {"stock": dict(graphs.stock)},
            "hits": report.hits(),
            "failures": [failure.summary for failure in report.failures],
        }


def graphs_of_the_host(model: Any) -> Decoding:
    """Install graphs that are plain forwards, with what the host kept at capture."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from host_graphs import eager

    decoding = Decoding(model, eager)
    decoding.install()
    return decoding


def violations(results: dict[str, Any]) -> list[str]:
    """Return what does not hold; empty if all is well."""
    found = []
    for name, one in results["models"].items():
        found += [f"{name}: other sequences: {text}" for text in one["other_sequences"][:SHOWN]]
        found += [f"{name}: a kernel failed: {text}" for text in one["failures"]]
        replayed = one["graphs"]["replayed"] if one["graphs"] else 0
        if replayed < MIN_REPLAYED * one["steps_after_prompt"]:
            found.append(f"{name}: {replayed} of {one['steps_after_prompt']} steps were replayed")
        comparison = one["comparison"]
        if comparison is None:
            found.append(f"{name}: nothing was compared")
            continue
        errors = comparison["error_against_precise"]
        if not errors["patched"] <= ERROR_FACTOR * errors["stock"]:
            found.append(f"{name}: error {errors['patched']:.3g} patched, {errors['stock']:.3g} stock")
        if not one["has_experts"]:
            wrong = comparison["wrong_tokens"]
            found += [f"{name}: another token than stock, which could tell: {row}" for row in wrong[:SHOWN]]
    for kind, growth in results["memory_growth"].items():
        if growth is not None and growth["bytes"] > growth["limit"]:
            found.append(f"{kind} memory grew by {growth['bytes']:,} bytes; {growth['limit']:,} are allowed")
    return found


def growth(samples: Sequence[tuple[int, int | None]], limit: int) -> dict[str, int] | None:
    """Return the growth of (steps, bytes) after the warm-up; None for too few samples or no such memory."""
    last = samples[-1][0] if samples else 0
    settled = [(steps, size) for steps, size in samples if size is not None and steps >= WARM_UP_SHARE * last]
    if len(settled) < 3:
        return None
    return {"bytes": round(growth_bytes(settled)), "limit": limit}


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads, and raise what one raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # of the caller, which raises it
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


def soak(subjects: Sequence[Subject], options: Any, device: str) -> dict[str, Any]:
    """Run episodes until the steps are done or the time is over; return the results."""
    begin = time.perf_counter()
    samples: list[Any] = []
    held: list[int] = []
    for index, (episode, stops) in enumerate(drawn(options.steps, options.longest, options.episode, options.seed)):
        if time.perf_counter() - begin > options.time_limit:
            break
        calls = [partial(subject.run, index, episode, stops, options.seed + index) for subject in subjects]
        if options.threads:
            together(calls)
        else:
            calls[index % len(calls)]()
        samples.append(sampled(sum(subject.steps for subject in subjects), device))
        held.append(sum(report.cache_bytes for subject in subjects if (report := subject.graphs()) is not None))
        if index % 25 == 0:
            say(f"{samples[-1].steps} steps after {time.perf_counter() - begin:.0f} s")
    on_gpu = [(s.steps, None if s.gpu is None else s.gpu - cache) for s, cache in zip(samples, held, strict=True)]
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "episodes": len(samples),
        "steps": samples[-1].steps if samples else 0,
        "steps_asked": options.steps,
        "threads": options.threads,
        "models": {subject.name: subject.results() for subject in subjects},
        "memory_growth": {
            "gpu": growth(on_gpu, MAX_GROWTH_BYTES["gpu"]),
            "host": growth([(s.steps, s.host) for s in samples], MAX_GROWTH_BYTES["host"]),
        },
        "largest_caches_of_graphs": max(held, default=0),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if device != "cpu" else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print the result, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="auto", help="auto, cpu, or the GPU in this machine")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of benchmarks/configs")
    parser.add_argument("--steps", type=int, default=10000, help="steps of all episodes together")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16; float32 on a CPU")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--episode", type=int, default=96, help="most steps after one prompt")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of the episodes")
    parser.add_argument("--threads", action="store_true", help="every episode on all models at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if min(options.steps, options.layers, options.longest) < 1 or options.episode < 2:
        parser.error("--steps, --layers and --longest are at least 1, --episode 2")
    machine = select_machine(options.gpu)
    dtype = options.dtype or ("bfloat16" if machine.is_gpu else "float32")
    transformers.logging.set_verbosity_error()
    say(f"building {', '.join(options.models)} with {options.layers} layers in {dtype} on {machine.gpu_name}")
    subjects = [Subject(name, machine.device, dtype, options.layers) for name in options.models]
    results = soak(subjects, options, machine.device)
    results = {"gpu": machine.gpu_name, "dtype": dtype, "libs": machine.libs, **results}
    results["violations"] = violations(results)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    for subject in subjects:
        graphs = subject.graphs()
        print(subject.name, "without graphs" if graphs is None else graphs.summary(), sep=": ")
    print(json.dumps({key: value for key, value in results.items() if key != "libs"}, indent=1))
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
