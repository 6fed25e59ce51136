"""Does a patched model stay right and small? Thousands of decode steps beside its stock twin, with all shapes mixed.

Episodes of random batch, lengths (padded on the left) and number of steps: a prompt, then steps of decoding on tokens drawn in
advance. Three models on the same weights read the same: patched, stock, and stock in fp32 (fp64 for a model of fp32). A
step is one new position of every sequence. What must hold:

* The next token is stock's, except where stock could not tell either: where the margin between its two best logits is within
  ``MARGIN_FACTOR`` times its own largest error against fp32 in that row.
* Over all rows, the patched error against fp32 is at most ``ERROR_FACTOR`` times that of stock.
* After the warm-up, memory does not grow: the slope over the rest of the run, times its length, stays below a limit. PyTorch
  itself keeps some of the host's memory for every new shape (plans of cuDNN's attention on a GPU; some of its bf16 code on a CPU,
  which is why a CPU runs fp32 by default). A control run, in which nothing is patched, says how much: ``--against`` allows that.
* Kernels run, and none fails.

    python benchmarks/soak.py --steps 10000                     # Llama-3.2-1B's sizes, few layers, bf16, on the GPU
    python benchmarks/soak.py --gpu cpu --steps 200             # a model of a few kilobytes, to try the script itself
    python benchmarks/soak.py --control --out control.json; python benchmarks/soak.py --against control.json

Exits with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from model_hits import LLAMA_1B, TINY, build, say, twin_of

from tilegym_db.bench.machine import select_machine
from tilegym_db.integrations.transformers import Handle, patch

MARGIN_FACTOR = 4.0
ERROR_FACTOR = 1.25
"""Both errors are rounding noise of one size."""
WARM_UP_SHARE = 0.25
"""Of the steps: caches of kernels and of allocators fill up there."""
MAX_GROWTH_BYTES = {"gpu": 8 << 20, "host": 64 << 20}
"""Of the rest of the run. A call site remembers up to 4096 kinds of calls, a few KB each, so the host gets more."""
BATCHES = (1, 2, 3, 4, 8)
SHOWN = 5
"""Violations that are printed in full."""


# -- what is run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """Prompts of these lengths, padded on the left to the longest, and so many steps after them."""

    lengths: tuple[int, ...]
    steps: int

    def __str__(self) -> str:
        return f"lengths {','.join(map(str, self.lengths))}, {self.steps} steps"


def episodes(steps: int, longest: int, most_steps: int, seed: int) -> Iterator[Episode]:
    """Random episodes that have ``steps`` steps in all; half of them without padding."""
    draw = random.Random(seed)
    left = steps
    while left:
        batch = draw.choice(BATCHES)
        lengths = [draw.randint(1, longest) for _ in range(batch)]
        if draw.random() < 0.5:
            lengths = [max(lengths)] * batch
        count = min(left, draw.randint(1, most_steps))
        left -= count
        yield Episode(tuple(lengths), count)


def tokens_of(episode: Episode, vocabulary: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids [batch, longest + steps] and their mask: 0 where a prompt is padded."""
    longest = max(episode.lengths)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(episode.lengths), longest + episode.steps)
    ids = torch.randint(1, vocabulary, shape, generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(episode.lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return ids.to(device), mask.to(device)


class Reader:
    """One model on its way through one episode; each call gives the logits [batch, vocabulary] after one more position."""

    def __init__(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, prompt: int) -> None:
        self._model = model
        self._ids, self._mask = ids, mask
        self._positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._next = prompt
        self._cache: Any = None

    def __call__(self) -> torch.Tensor:
        """The whole prompt at the first call, and one position at each of the others."""
        begin, end = (0 if self._cache is None else self._next - 1), self._next
        found = self._model(
            input_ids=self._ids[:, begin:end],
            attention_mask=self._mask[:, :end],
            position_ids=self._positions[:, begin:end],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = found.past_key_values
        self._next += 1
        logits: torch.Tensor = found.logits[:, -1]
        return logits


# -- what must hold ---------------------------------------------------------------------------------------------------

DIFFERS, MARGIN, STOCK_WORST, STOCK_SQUARES, PATCHED_SQUARES, SQUARES = range(6)


def compared(patched: torch.Tensor, stock: torch.Tensor, precise: torch.Tensor) -> torch.Tensor:
    """One row of figures per sequence [batch, 6], on the device: nothing waits for it.

    Whether the tokens differ, stock's margin between its two best, stock's largest error, and the sums of squares of stock's
    error, of the patched error and of the precise logits.
    """
    patched, stock, precise = patched.double(), stock.double(), precise.double()
    best = stock.topk(2, dim=-1).values
    error = stock - precise
    figures = (
        (patched.argmax(-1) != stock.argmax(-1)).double(),
        best[:, 0] - best[:, 1],
        error.abs().amax(-1),
        error.square().sum(-1),
        (patched - precise).square().sum(-1),
        precise.square().sum(-1),
    )
    return torch.stack(figures, dim=-1)


def wrong_rows(figures: torch.Tensor, factor: float = MARGIN_FACTOR) -> torch.Tensor:
    """Which rows have another token than stock although stock could tell [rows]; NaN never can."""
    within_noise = figures[:, MARGIN] <= factor * figures[:, STOCK_WORST]
    return figures[:, DIFFERS].bool() & ~within_noise


@dataclass(frozen=True)
class Sample:
    """Memory after an episode; ``gpu`` is None on a CPU."""

    steps: int
    host: int
    gpu: int | None


def growth_bytes(samples: Sequence[tuple[int, int]]) -> float:
    """What (steps, bytes) grew by from the first sample to the last, along the line of least squares.

    Raises:
        ValueError: less than three samples, through which no line says anything.
    """
    if len(samples) < 3:
        raise ValueError(f"a slope needs three samples, not {len(samples)}: run more steps, or shorter episodes")
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)
    return slope * (samples[-1][0] - samples[0][0])


def memory_growth(
    samples: Sequence[Sample], steps: int, control: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, dict[str, float]]:
    """Per kind of memory: growth after the warm-up in bytes, and the same per 1000 steps.

    ``control`` is that of a run in which nothing was patched; as much for as many steps is allowed on the host beyond the limit.
    """
    settled = [sample for sample in samples if sample.steps >= WARM_UP_SHARE * steps]
    series = {"host": [(sample.steps, sample.host) for sample in settled]}
    on_gpu = [(sample.steps, sample.gpu) for sample in settled if sample.gpu is not None]
    if on_gpu:
        series["gpu"] = on_gpu
    found = {}
    for kind, points in series.items():
        grown = growth_bytes(points)
        per_1000 = grown / (points[-1][0] - points[0][0]) * 1000
        limit = MAX_GROWTH_BYTES[kind]
        if control is not None and kind == "host":
            limit += max(0, round(control[kind]["bytes_per_1000_steps"] * (points[-1][0] - points[0][0]) / 1000))
        found[kind] = {"bytes": round(grown), "bytes_per_1000_steps": round(per_1000), "limit": limit}
    return found


def violations(results: dict[str, Any]) -> list[str]:
    """What does not hold; empty where all is well."""
    found = [f"another token than stock, which could tell: {row}" for row in results["wrong_tokens"][:SHOWN]]
    if len(results["wrong_tokens"]) > SHOWN:
        found.append(f"and {len(results['wrong_tokens']) - SHOWN} tokens more")
    errors = results["error_against_precise"]
    if not errors["patched"] <= ERROR_FACTOR * errors["stock"]:
        found.append(f"error against the precise model: {errors['patched']:.3g} patched, {errors['stock']:.3g} stock")
    for kind, growth in results["memory_growth"].items():
        if not growth["bytes"] <= growth["limit"]:
            found.append(
                f"{kind} memory grew by {growth['bytes']:,} bytes after the warm-up; {growth['limit']:,} are allowed"
            )
    if not any(results["hits"].values()):
        found.append("no kernel ran: the report says why")
    return found + [f"a kernel failed: {failure}" for failure in results["failures"]]


# -- all of it --------------------------------------------------------------------------------------------------------


def host_bytes() -> int:
    """Resident memory of this process, as Linux says."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def sampled(steps: int, device: str) -> Sample:
    """Memory in use now, with all that nobody refers to any more gone."""
    gc.collect()
    return Sample(steps, host_bytes(), torch.cuda.memory_allocated(device) if device != "cpu" else None)


def run_episode(models: Sequence[Any], episode: Episode, seed: int, device: str) -> torch.Tensor:
    """The prompt and every step on all three models; the figures [rows, 6] on the CPU."""
    ids, mask = tokens_of(episode, models[0].config.vocab_size, seed, device)
    readers = [Reader(model, ids, mask, max(episode.lengths)) for model in models]
    figures = [compared(*(reader() for reader in readers)) for _ in range(episode.steps + 1)]
    return torch.cat(figures).cpu()


def soak(
    model: Any,
    device: str,
    steps: int,
    longest: int,
    most_steps: int,
    seed: int,
    control: Mapping[str, Mapping[str, float]] | None = None,
    *,
    patches: bool = True,
) -> tuple[dict[str, Any], Handle | None]:
    """Run all episodes on a patched twin, the model and a precise copy; what came of it, and the handle of the patch.

    ``control`` is the growth of a run without ``patches``, in which the twin stays stock and there is no handle.
    """
    patched, precise = twin_of(model), copy.deepcopy(model)
    precise.to(torch.float64 if model.dtype == torch.float32 else torch.float32)
    handle = patch(patched) if patches else None
    totals = torch.zeros(6, dtype=torch.float64)
    wrong: list[str] = []
    samples: list[Sample] = []
    done = rows = 0
    begin = time.perf_counter()
    with torch.inference_mode():
        for index, episode in enumerate(episodes(steps, longest, most_steps, seed)):
            figures = run_episode((patched, model, precise), episode, seed + index, device)
            done, rows, totals = done + episode.steps, rows + len(figures), totals + figures.sum(0)
            for row in wrong_rows(figures).nonzero().flatten().tolist():
                step, sequence = divmod(row, len(episode.lengths))
                margin, worst = figures[row, MARGIN].item(), figures[row, STOCK_WORST].item()
                wrong.append(
                    f"episode {index} ({episode}), step {step}, row {sequence}: margin {margin:.3g}, error {worst:.3g}"
                )
            samples.append(sampled(done, device))
            if index % 50 == 0:
                say(f"{done} of {steps} steps, {int(totals[DIFFERS])} of {rows} tokens differ, {len(wrong)} wrongly")
    sums = totals.tolist()
    report = handle.report() if handle is not None else None
    results = {
        "steps": done,
        "episodes": len(samples),
        "seconds": round(time.perf_counter() - begin, 1),
        "tokens": rows,
        "differing_tokens": int(sums[DIFFERS]),
        "wrong_tokens": wrong,
        "error_against_precise": {
            "stock": math.sqrt(sums[STOCK_SQUARES] / sums[SQUARES]),
            "patched": math.sqrt(sums[PATCHED_SQUARES] / sums[SQUARES]),
        },
        "memory_growth": memory_growth(samples, steps, control),
        "memory": [asdict(sample) for sample in samples[:: max(1, len(samples) // 50)]],
        "hits": report.hits() if report is not None else {},
        "failures": [failure.summary for failure in report.failures] if report is not None else [],
    }
    return results, handle


def main() -> int:
    """Soak; print what came of it; 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="auto", help="auto, cpu, or the GPU in this machine")
    parser.add_argument("--steps", type=int, default=10000, help="steps of decoding in all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16; float32 on a CPU")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--episode", type=int, default=64, help="most steps after one prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--control", action="store_true", help="patch nothing: how much does PyTorch itself keep?")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what a control run wrote")
    options = parser.parse_args()
    if min(options.steps, options.layers, options.longest, options.episode) < 1:
        parser.error("--steps, --layers, --longest and --episode are at least 1")
    machine = select_machine(options.gpu)
    sizes = {**(LLAMA_1B if machine.is_gpu else TINY), "num_hidden_layers": options.layers}
    dtype = options.dtype or ("bfloat16" if machine.is_gpu else "float32")
    say(f"building {options.layers} layers of {sizes['hidden_size']} in {dtype} on {machine.gpu_name}")
    model = build(sizes, machine.device, getattr(torch, dtype))
    control = json.loads(options.against.read_text())["memory_growth"] if options.against else None
    sizes_of_run = (options.steps, options.longest, options.episode, options.seed)
    results, handle = soak(model, machine.device, *sizes_of_run, control, patches=not options.control)
    found = violations(results) if handle is not None else []
    results = {"gpu": machine.gpu, "libs": machine.libs, "dtype": dtype, **results, "violations": found}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if handle is not None:
        print(handle.report())
    print(json.dumps({key: value for key, value in results.items() if key not in ("memory", "libs")}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
