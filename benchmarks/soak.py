"""Does a patched model stay right and small? Thousands of decode steps beside its stock twin, with all shapes mixed.

Episodes of random batch, lengths (padded on the left) and number of steps: a prompt, then steps of decoding on tokens drawn in
advance. Three models on the same weights read the same: patched, stock, and stock in fp32 (fp64 for a model of fp32). A
step is one new position of every sequence. What must hold:

* The next token is stock's, except where stock could not tell either: where the margin between its two best logits is within
  ``MARGIN_FACTOR`` times its own largest error against fp32 in that row.
* Over all rows, the patched error against fp32 is at most ``ERROR_FACTOR`` times that of stock.
* After the warm-up, memory does not grow: the slope over the rest of the run, times its length, stays below a limit.
* Kernels run, and none fails.

PyTorch itself keeps some of the host's memory for every new shape: plans of cuDNN's attention on a GPU, and some of its bf16 code
on a CPU, which is why a CPU runs fp32 by default. On a GPU the host's memory is therefore judged only where there is one model,
as in a real process: ``--alone`` runs the patched one through the same episodes, with no stock to compare it with. With
``--control`` nothing is patched, which says how much PyTorch keeps; ``--against`` allows as much to the same run, patched.

    python benchmarks/soak.py --steps 10000                     # Llama-3.2-1B's sizes, few layers, bf16, on the GPU
    python benchmarks/soak.py --gpu cpu --steps 200             # a model of a few kilobytes, to try the script itself
    python benchmarks/soak.py --alone --control --out control.json; python benchmarks/soak.py --alone --against control.json

Exits with 1 where one of these does not hold; a control is not judged.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym_db.measurement.machine import select_machine
from tilegym_db.models import Handle, patch

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TINY = {
    **LLAMA_1B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}

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
class Run:
    """Common ground of a run and its control: the machine, the model, the episodes, and whether the model is alone."""

    gpu: str
    dtype: str
    layers: int
    steps: int
    longest: int
    most_steps: int
    seed: int
    alone: bool


@dataclass(frozen=True)
class Episode:
    """Prompts of these lengths, padded on the left to the longest, and so many steps after them."""

    lengths: tuple[int, ...]
    steps: int

    def __str__(self) -> str:
        return f"lengths {','.join(map(str, self.lengths))}, {self.steps} steps"


def episodes(steps: int, longest: int, most_steps: int, seed: int) -> Iterator[Episode]:
    """Return random episodes with ``steps`` steps in all; half of them have no padding."""
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
    """Return random token ids [batch, longest + steps] and their mask, which is 0 in the padding of a prompt."""
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
        """Read the whole prompt at the first call, and one position at each of the others."""
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
    """Return one row of figures per sequence [batch, 6], on the device: nothing waits for it.

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
    """Return the rows with another token than stock although stock could tell [rows]; NaN never can."""
    within_noise = figures[:, MARGIN] <= factor * figures[:, STOCK_WORST]
    return figures[:, DIFFERS].bool() & ~within_noise


@dataclass(frozen=True)
class Sample:
    """Memory after an episode; ``gpu`` is None on a CPU."""

    steps: int
    host: int
    gpu: int | None


def growth_bytes(samples: Sequence[tuple[int, int]]) -> float:
    """Return the growth of (steps, bytes) from the first sample to the last, along the line of least squares.

    Raises:
        ValueError: less than three samples, through which no line says anything.
    """
    if len(samples) < 3:
        raise ValueError(f"a slope needs three samples, not {len(samples)}: run more steps, or shorter episodes")
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)
    return slope * (samples[-1][0] - samples[0][0])


def growth_of_control(control: Mapping[str, Any], run: Run) -> float:
    """Return the growth of the host's memory in a control of this run, in bytes per 1000 steps.

    Args:
        control: what a run with ``--control`` wrote.
        run: the one that is to be allowed as much.

    Raises:
        ValueError: it is no control, or one of another run.
    """
    if not control.get("control"):
        raise ValueError("it is of no control: write one with --control --out")
    there, here = control["run"], asdict(run)
    other = [f"{name} {there[name]} there and {here[name]} here" for name in here if there[name] != here[name]]
    if other:
        raise ValueError(f"it is the control of another run ({'; '.join(other)}): give both the same options")
    growth: float = control["memory_growth"]["host"]["bytes_per_1000_steps"]
    return growth


def why_not_judged(kind: str, run: Run) -> str:
    """Return why the growth of one kind of memory says nothing about a patch in this run; empty if it is judged."""
    if kind == "host" and run.gpu != "cpu" and not run.alone:
        return (
            "PyTorch keeps attention's plans of the patched model and of stock here; --alone judges the host's memory"
        )
    return ""


def memory_growth(samples: Sequence[Sample], run: Run, control: float = 0) -> dict[str, dict[str, Any]]:
    """Return, per kind of memory, the growth after the warm-up in bytes and per 1000 steps, the limit, and why it is not judged.

    ``control`` is :func:`growth_of_control`. The host may grow beyond the limit by as much for as many steps.
    """
    settled = [sample for sample in samples if sample.steps >= WARM_UP_SHARE * run.steps]
    series = {"host": [(sample.steps, sample.host) for sample in settled]}
    on_gpu = [(sample.steps, sample.gpu) for sample in settled if sample.gpu is not None]
    if on_gpu:
        series["gpu"] = on_gpu
    found = {}
    for kind, points in series.items():
        grown = growth_bytes(points)
        thousands = (points[-1][0] - points[0][0]) / 1000
        allowed = max(0, round(control * thousands)) if kind == "host" else 0
        found[kind] = {
            "bytes": round(grown),
            "bytes_per_1000_steps": round(grown / thousands),
            "limit": MAX_GROWTH_BYTES[kind] + allowed,
            "not_judged": why_not_judged(kind, run),
        }
    return found


class Comparison:
    """The twin's logits beside those of stock and of the precise model, over all episodes."""

    def __init__(self) -> None:
        self.rows = 0
        self.wrong: list[str] = []
        self._totals = torch.zeros(SQUARES + 1, dtype=torch.float64)

    def add(self, index: int, episode: Episode, figures: torch.Tensor) -> None:
        """Count the figures [rows, 6] of the episode with this number."""
        self.rows, self._totals = self.rows + len(figures), self._totals + figures.sum(0)
        for row in wrong_rows(figures).nonzero().flatten().tolist():
            step, sequence = divmod(row, len(episode.lengths))
            margin, worst = figures[row, MARGIN].item(), figures[row, STOCK_WORST].item()
            self.wrong.append(
                f"episode {index} ({episode}), step {step}, row {sequence}: margin {margin:.3g}, error {worst:.3g}"
            )

    def results(self) -> dict[str, Any]:
        """Return the results of the run."""
        sums = self._totals.tolist()
        return {
            "tokens": self.rows,
            "differing_tokens": int(sums[DIFFERS]),
            "wrong_tokens": self.wrong,
            "error_against_precise": {
                "stock": math.sqrt(sums[STOCK_SQUARES] / sums[SQUARES]),
                "patched": math.sqrt(sums[PATCHED_SQUARES] / sums[SQUARES]),
            },
        }


def violations(results: Mapping[str, Any]) -> list[str]:
    """Return what does not hold; empty if all is well."""
    found = [] if results["comparison"] is None else _unlike_stock(results["comparison"])
    for kind, growth in results["memory_growth"].items():
        if not growth["not_judged"] and not growth["bytes"] <= growth["limit"]:
            found.append(
                f"{kind} memory grew by {growth['bytes']:,} bytes after the warm-up; {growth['limit']:,} are allowed"
            )
    if not any(results["hits"].values()):
        found.append("no kernel ran: the report says why")
    return found + [f"a kernel failed: {failure}" for failure in results["failures"]]


def _unlike_stock(comparison: Mapping[str, Any]) -> list[str]:
    wrong, errors = comparison["wrong_tokens"], comparison["error_against_precise"]
    found = [f"another token than stock, which could tell: {row}" for row in wrong[:SHOWN]]
    if len(wrong) > SHOWN:
        found.append(f"and {len(wrong) - SHOWN} tokens more")
    if not errors["patched"] <= ERROR_FACTOR * errors["stock"]:
        found.append(f"error against the precise model: {errors['patched']:.3g} patched, {errors['stock']:.3g} stock")
    return found


# -- all of it --------------------------------------------------------------------------------------------------------


def host_bytes() -> int:
    """Return the resident memory of this process, as Linux states it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def sampled(steps: int, device: str) -> Sample:
    """Return the memory in use now, after unreferenced objects are gone."""
    gc.collect()
    return Sample(steps, host_bytes(), torch.cuda.memory_allocated(device) if device != "cpu" else None)


def run_episode(models: Sequence[Any], episode: Episode, seed: int, device: str) -> torch.Tensor | None:
    """Run the prompt and every step on each model; return the figures [rows, 6] of three on the CPU, or None for one alone."""
    ids, mask = tokens_of(episode, models[0].config.vocab_size, seed, device)
    readers = [Reader(model, ids, mask, max(episode.lengths)) for model in models]
    figures = []
    for _ in range(episode.steps + 1):
        logits = [reader() for reader in readers]
        if len(logits) > 1:
            figures.append(compared(*logits))
    return torch.cat(figures).cpu() if figures else None


def soak(
    model: Any, device: str, run: Run, control: float = 0, *, patches: bool = True
) -> tuple[dict[str, Any], Handle | None]:
    """Run all episodes on a patched twin, the model and a precise copy, or on the patched model alone.

    Args:
        model: is stock; patched from then on where it runs alone.
        device: where it lies.
        run: what to run.
        control: what :func:`growth_of_control` says.
        patches: False for a control, in which the twin stays stock.

    Returns:
        What came of it, and the handle of the patch; None for a control.
    """
    patched = model if run.alone else twin_of(model)
    models, comparison = [patched], None
    if not run.alone:
        precise = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)
        models, comparison = [patched, model, precise], Comparison()
    handle = patch(patched) if patches else None
    samples: list[Sample] = []
    done = 0
    begin = time.perf_counter()
    with torch.inference_mode():
        for index, episode in enumerate(episodes(run.steps, run.longest, run.most_steps, run.seed)):
            figures = run_episode(models, episode, run.seed + index, device)
            if comparison is not None and figures is not None:
                comparison.add(index, episode, figures)
            done += episode.steps
            samples.append(sampled(done, device))
            if index % 50 == 0:
                said = "" if comparison is None else f", {len(comparison.wrong)} of {comparison.rows} tokens are wrong"
                say(f"{done} of {run.steps} steps{said}")
    report = handle.report() if handle is not None else None
    results = {
        "run": asdict(run),
        "control": handle is None,
        "episodes": len(samples),
        "seconds": round(time.perf_counter() - begin, 1),
        "comparison": None if comparison is None else comparison.results(),
        "memory_growth": memory_growth(samples, run, control),
        "memory": [asdict(sample) for sample in samples[:: max(1, len(samples) // 50)]],
        "hits": report.hits() if report is not None else {},
        "failures": [failure.summary for failure in report.failures] if report is not None else [],
    }
    return results, handle


def main() -> int:
    """Soak, print the result, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="auto", help="auto, cpu, or the GPU in this machine")
    parser.add_argument("--steps", type=int, default=10000, help="steps of decoding in all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16; float32 on a CPU")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--episode", type=int, default=64, help="most steps after one prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--alone", action="store_true", help="the patched model only, to judge the host's memory")
    parser.add_argument("--control", action="store_true", help="patch nothing: how much does PyTorch itself keep?")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what a control of the same run wrote")
    options = parser.parse_args()
    if min(options.steps, options.layers, options.longest, options.episode) < 1:
        parser.error("--steps, --layers, --longest and --episode are at least 1")
    machine = select_machine(options.gpu)
    dtype = options.dtype or ("bfloat16" if machine.is_gpu else "float32")
    sizes = (options.layers, options.steps, options.longest, options.episode, options.seed)
    run = Run(machine.gpu, dtype, *sizes, alone=options.alone)
    control = 0.0
    if options.against is not None:
        try:
            control = growth_of_control(json.loads(options.against.read_text()), run)
        except (OSError, ValueError) as error:
            parser.error(f"--against {options.against}: {error}")
    shape = {**(LLAMA_1B if machine.is_gpu else TINY), "num_hidden_layers": run.layers}
    say(f"building {run.layers} layers of {shape['hidden_size']} in {dtype} on {machine.gpu_name}")
    model = build(shape, machine.device, getattr(torch, dtype))
    results, handle = soak(model, machine.device, run, control, patches=not options.control)
    found = violations(results) if handle is not None else []
    results = {"libs": machine.libs, **results, "violations": found}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if handle is not None:
        print(handle.report())
    print(json.dumps({key: value for key, value in results.items() if key not in ("memory", "libs")}, indent=1))
    return 1 if found else 0


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def build(sizes: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights, in eval mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        return factory.from_config(LlamaConfig(**sizes), dtype=dtype).eval()


def twin_of(model: Any) -> Any:
    """Return a second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


if __name__ == "__main__":
    raise SystemExit(main())
