"""Host time of a decoding step outside its replay, on the CPU: in microseconds of Python and of launches a token.

A tiny Llama generates in graphs that are plain forwards. Their time is left out. The rest has two parts:

* before the replay: from the read of the stopping criteria to the replay. On a GPU the device waits for all of it.
* behind the replay: processors, the new token, stopping criteria. On a GPU it runs while the device works on the replay.

``--first`` measures the first and the second token of each generation in its place: what a model of many layers takes of this
thread's CPU time until a streamer gets them, stock and in graphs, in turns. No kernel is served.

``--functions`` adds a profile of the first part's functions, whose sum is larger, because the profiler costs time too.

    python benchmarks/decoding_host.py [--tokens 200] [--rounds 7] [--batch 1] [--full] [--functions] [--first]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tilegym_db.models.decoding import Decoding
from tilegym_db.models.next_inputs import CapturedForward

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from host_graphs import eager


class Clock:
    """Times of the replays of a generation, which divide it into steps."""

    def __init__(self) -> None:
        """Start without a replay."""
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.reads: list[float] = []
        self.profile: cProfile.Profile | None = None

    def capture(self, model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        """Return a forward as a graph whose replays are timed."""
        made = eager(model, inputs)

        def replay() -> None:
            if self.profile is not None:
                self.profile.disable()
            self.starts.append(time.perf_counter())
            made.replay()
            self.ends.append(time.perf_counter())

        return CapturedForward(replay, made.inputs, made.outputs)

    def read(self, *_: Any) -> bool:
        """Take the time at the read of the stopping criteria, which is the last thing before the next step."""
        self.reads.append(time.perf_counter())
        if self.profile is not None:
            self.profile.enable()
        return False

    def microseconds(self) -> tuple[float, float]:
        """Return the medians of both parts, and forget the times."""
        before, behind = [], []
        for start, end in zip(self.starts[1:], self.ends, strict=False):
            read = next((one for one in self.reads if end < one < start), None)
            if read is not None:
                before.append(start - read)
                behind.append(read - end)
        self.starts, self.ends, self.reads = [], [], []
        return statistics.median(before) * 1e6, statistics.median(behind) * 1e6


class Arrivals:
    """A streamer that takes the CPU time of this thread at which each token arrives, after the prompt."""

    def __init__(self) -> None:
        """Start now."""
        self.began = time.thread_time_ns()
        self.us: list[float] = []

    def put(self, _: Any) -> None:
        """Take the time."""
        self.us.append((time.thread_time_ns() - self.began) / 1e3)

    def end(self) -> None:
        """Do nothing more."""


def first_tokens(layers: int, tokens: int, rounds: int) -> None:
    """Print the time until the first token, and from there to the second one."""
    from call_site_host import tiny

    stock, model = tiny(layers), tiny(layers)
    decoding = Decoding(model, eager)
    decoding.install()
    ids = torch.randint(2, 60, (1, 8))

    def arrive(one: Any) -> tuple[float, float]:
        streamer = Arrivals()
        one.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, streamer=streamer
        )
        _, first, second = streamer.us[:3]
        return first, second - first

    ways = {"stock": stock, "in graphs": model}
    for one in (*ways.values(), *ways.values()):
        arrive(one)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, one in ways.items():
            times[way].append(arrive(one))
    for way, rows in times.items():
        for name, values in zip(("first token", "second token"), zip(*rows, strict=True), strict=True):
            print(f"{name}, {way}: {statistics.median(values):.0f} us ({min(values):.0f} to {max(values):.0f})")


def main() -> None:
    """Measure, and print the two parts with their spread over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="let transformers prepare each step")
    parser.add_argument("--functions", action="store_true", help="profile the functions before the replay")
    parser.add_argument("--first", action="store_true", help="measure the first two tokens instead")
    parser.add_argument("--layers", type=int, default=32, help="of the model whose first tokens are measured")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if options.first:
        first_tokens(options.layers, min(options.tokens, 12), options.rounds)
        return
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    clock = Clock()
    decoding = Decoding(model, clock.capture)
    decoding.install()
    if options.full:
        for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
            setattr(decoding.ours, name, getattr(transformers.GenerationMixin, name))
    model._has_unfinished_sequences = lambda this_peer_finished, *_, **__: clock.read() or not this_peer_finished
    ids = torch.randint(2, 60, (options.batch, 32))
    mask = torch.ones_like(ids)

    def generate() -> None:
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=options.tokens, eos_token_id=63)

    generate()
    clock.microseconds()
    parts = []
    for _ in range(options.rounds):
        generate()
        parts.append(clock.microseconds())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, batch {options.batch}")
    for name, values in zip(("before the replay", "behind the replay"), zip(*parts, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.0f} us a token ({min(values):.0f} to {max(values):.0f})")
    print(decoding.report().summary())
    if options.functions:
        clock.profile = cProfile.Profile()
        generate()
        pstats.Stats(clock.profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
