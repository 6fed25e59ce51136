"""Tokens a second of decoding by model, batch and way: stock, stock compiled, other libraries, and patched, in turns.

The models have the sizes of ``benchmarks/configs`` and random weights. Every way has a process with its own model. After all
have generated a few times at each batch, they take turns, so that only one of them computes at a time. The time of a token is the
difference between a long and a short generation, over the tokens between them: what the prompt costs is in both.

    python benchmarks/decode_ways.py llama-3.2-1b olmoe-1b-7b --time-limit 200 --out ways.jsonl
    python benchmarks/decode_ways.py qwen3-30b-a3b:8 --batches 1 8                 # with 8 of its layers
    python benchmarks/decode_ways.py llama-3.2-1b --tiny --device cpu              # to try the script itself

A model takes no longer than its share of the limit: a way that is not ready after ``PREPARE_SHARE`` of it is left out with that
reason, and rounds end when the rest is over. Exits with 1 if a way fails, not if it is late or not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import tilegym_db
from tilegym_db.measurement.machine import select_machine
from tilegym_db.models import patch
from tilegym_db.models.bench.generation import LIBRARIES
from tilegym_db.models.capture import random_prompt
from tilegym_db.models.random_model import load_config, unchecked_model

CONFIGS = Path(__file__).parent / "configs"
STOCK, COMPILED, PATCHED = "stock", "stock static + compiled", "patched"
WAYS = (STOCK, COMPILED, *LIBRARIES, PATCHED)
PREPARATIONS = 2
"""Pairs of generations before the turns: graphs of a prompt are proved and captured in the third and fourth call."""
PREPARE_SHARE = 0.7
"""Of a model's time: for imports, weights, compilation and captures of all ways, which prepare at the same time."""
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ABSENT, LATE, FAILED = "absent", "late", "failed"


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Job:
    """A model and what is generated: ``batches`` of ``prompt`` tokens, and ``short`` or ``long`` new ones."""

    model: str
    layers: int | None
    device: str
    dtype: str
    batches: tuple[int, ...]
    prompt: int
    short: int
    long: int
    tiny: bool

    def config(self) -> Any:
        """Return the config: of ``benchmarks/configs``, or of a path."""
        path = CONFIGS / f"{self.model}.json"
        config = load_config(path if path.is_file() else Path(self.model), 2 if self.tiny else self.layers)
        for name, value in TINY.items() if self.tiny else ():
            if hasattr(config, name):
                setattr(config, name, value)
        return config


# -- inside the process of a way --------------------------------------------------------------------------------------


class Absent(Exception):
    """A way that does not exist here; not a failure."""


def serve(connection: Connection, way: str, job: Job, last_start: float) -> None:
    """Prepare, answer with the batches that are ready, and then answer each request with the seconds of a pair."""
    os.dup2(2, 1)  # what libraries print must not mix with the results
    try:
        generator = Generator(way, job)
        ready: list[int] = []
        for batch in job.batches:
            if ready and time.time() > last_start:
                break
            for _ in range(PREPARATIONS):
                generator.pair(batch)
            ready.append(batch)
        connection.send(("ready", (ready, generator.version)))
        while (batch := connection.recv()) is not None:
            connection.send(("pair", generator.pair(batch)))
        connection.send(("said", generator.said()))
    except EOFError:
        return
    except Absent as error:
        connection.send((ABSENT, str(error)))
    except Exception as error:  # the parent goes on without this way, and reports the reason
        lines = str(error).strip().splitlines() or [""]
        connection.send((FAILED, f"{type(error).__name__}: {lines[0]}"))


class Generator:
    """Greedy generations of a model in one way."""

    def __init__(self, way: str, job: Job) -> None:
        """Build the model.

        Raises:
            Absent: the library of this way has no kernels for the model.
        """
        self._way, self._job = way, job
        self._handle: Any = None
        self._caches: dict[int, Any] = {}
        self.version = f"transformers {importlib.metadata.version('transformers')}"
        config = job.config()
        if way in LIBRARIES:
            self._apply(way, config.model_type)
        self._model: Any = unchecked_model(config, job.device, job.dtype)
        if way == PATCHED:
            self._handle = patch(self._model)
            self.version = f"tilegym-db {tilegym_db.__version__}"
        self._prompts = {batch: random_prompt(self._model, batch, job.prompt) for batch in job.batches}

    def _apply(self, way: str, model_type: str) -> None:
        library = LIBRARIES[way]
        module = importlib.import_module(library.module)
        apply: Callable[..., Any] | None = getattr(module, library.prefix + model_type, None)
        if apply is None:
            raise Absent(f"it has no kernels for {model_type}")
        apply(**library.options)
        self.version = f"{library.distribution} {importlib.metadata.version(library.distribution)}"

    def pair(self, batch: int) -> tuple[float, float, list[int]]:
        """Return the seconds of a short and of a long generation, and the tokens of the long one's first row."""
        seconds, tokens = [], []
        for new in (self._job.short, self._job.long):
            self._wait()
            start = time.perf_counter()
            found = self._generate(batch, new)
            self._wait()
            seconds.append(time.perf_counter() - start)
            tokens = found[0, self._job.prompt :].tolist()
        return seconds[0], seconds[1], tokens

    def _generate(self, batch: int, new: int) -> torch.Tensor:
        ids = self._prompts[batch]
        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": 1}
        options |= self._static(batch) if self._way == COMPILED else {"disable_compile": True}
        mask = torch.ones_like(ids)
        found: torch.Tensor = self._model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        return found

    def _static(self, batch: int) -> dict[str, Any]:
        """Return a cache of fixed size, which is made once for a batch: another one would be captured again."""
        from transformers import CompileConfig, StaticCache

        on_gpu = self._job.device != "cpu"
        backend, mode = ("inductor", "reduce-overhead") if on_gpu else ("eager", "default")
        compiled: Any = CompileConfig(backend=backend, mode=mode)
        compiled._compile_all_devices = True
        if batch not in self._caches:
            length = self._job.prompt + self._job.long
            self._caches[batch] = StaticCache(config=self._model.config.get_text_config(), max_cache_len=length)
        self._caches[batch].reset()
        return {"past_key_values": self._caches[batch], "compile_config": compiled}

    def _wait(self) -> None:
        if self._job.device != "cpu":
            torch.cuda.synchronize()

    def said(self) -> dict[str, Any]:
        """Return the peak of the memory and what the graphs of the patch did."""
        peak = torch.cuda.max_memory_allocated() if self._job.device != "cpu" else None
        graphs = None if self._handle is None else self._handle.report().decoding
        return {"peak_bytes": peak, "graphs": None if graphs is None else graphs.summary()}


# -- the turns --------------------------------------------------------------------------------------------------------


class Way:
    """The process of a way, and what came of it: pairs of seconds by batch, or why there are none."""

    def __init__(self, name: str, job: Job, prepared_at: float) -> None:
        """Start the process."""
        context = multiprocessing.get_context("spawn")  # a fork would share a CUDA context that it cannot use
        self.name = name
        self.status, self.reason, self.version = "", "", ""
        self.pairs: dict[int, list[tuple[float, float]]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.said: dict[str, Any] = {}
        if name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name].package) is None:
            self.status, self.reason = ABSENT, "it is not installed"
            return
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, job, prepared_at), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: Any, seconds: float) -> None:
        """Send a request, and take the answer to it."""
        try:
            self._connection.send(request)
        except OSError:
            self.end(FAILED, f"its process ended (exit code {self._process.exitcode})")
            return
        self.answer(seconds, request)

    def answer(self, seconds: float, request: Any = None) -> None:
        """Take one answer; end the process if there is none in time."""
        if not wait([self._connection, self._process.sentinel], max(0.0, seconds)):
            self.end(LATE, f"no answer within {seconds:.0f} s {'in its turn' if self.pairs else 'of preparation'}")
            return
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            self.end(FAILED, f"its process ended (exit code {self._process.exitcode})")
            return
        if kind == "ready":
            ready, self.version = content
            self.pairs = {batch: [] for batch in ready}
        elif kind == "pair":
            short, long, tokens = content
            self.pairs[request].append((short, long))
            self.tokens[request] = tokens
        elif kind == "said":
            self.said = content
        else:
            self.end(kind, content)

    def end(self, status: str = "", reason: str = "") -> None:
        """End the process."""
        if status:
            self.status, self.reason = status, reason
            say(f"{self.name}: {status}: {reason}")
        self._connection.close()
        self._process.join(0 if status == LATE else 5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def measure(job: Job, names: Sequence[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all ways of a model within so many seconds; return one record for each batch and way."""
    begin = time.time()
    prepared_at, over_at = begin + PREPARE_SHARE * seconds, begin + seconds
    ways = [Way(name, job, begin + PREPARE_SHARE / 2 * seconds) for name in names]
    for way in ways:
        if not way.status:
            way.answer(prepared_at - time.time())
    say(f"{job.model}: prepared in {time.time() - begin:.0f} s")
    turn = 0.0
    for done in range(rounds):
        for batch in job.batches:
            for way in ways if done % 2 == 0 else ways[::-1]:
                if way.status or batch not in way.pairs:
                    continue
                if time.time() + turn > over_at:
                    break
                start = time.time()
                way.ask(batch, over_at - start)
                turn = max(turn, time.time() - start)
    for way in ways:
        if not way.status:
            way.ask(None, 5.0)
            way.end()
    return [record(job, batch, way, ways) for batch in job.batches for way in ways]


def record(job: Job, batch: int, way: Way, ways: Sequence[Way]) -> dict[str, Any]:
    """Return what is known of one way at one batch; ``ms`` has the median and the range over the rounds."""
    found: dict[str, Any] = {**asdict(job), "batch": batch, "way": way.name, "version": way.version}
    del found["batches"]
    times = [1e3 * (long - short) / (job.long - job.short) for short, long in way.pairs.get(batch, ())]
    if not times:
        reason = way.reason or ("no time left for its turn" if batch in way.pairs else "no time to prepare this batch")
        return {**found, "status": way.status or LATE, "reason": reason}
    median = statistics.median(times)
    stock = next((other.tokens.get(batch) for other in ways if other.name == STOCK), None)
    mine = way.tokens[batch]
    same = None if not stock else sum(a == b for a, b in zip(mine, stock, strict=True)) / len(mine)
    return {
        **found,
        "status": way.status or "measured",
        "reason": way.reason,
        "ms": {"median": median, "least": min(times), "most": max(times), "rounds": len(times)},
        # A difference of two noisy times may be 0 or less, which is no rate.
        "tokens_per_second": 1e3 * batch / median if median > 0 else None,
        "same_tokens_as_stock": same,
        **way.said,
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as lines of columns."""
    head = ("model", "layers", "batch", "way", "tokens/s", "ms a token", "range", "rounds", "same tokens")
    rows = [head]
    for one in records:
        row = [one["model"], str(one["layers"] or "all"), str(one["batch"]), one["way"]]
        if "ms" in one:
            ms, rate, same = one["ms"], one["tokens_per_second"], one["same_tokens_as_stock"]
            row += [f"{rate:.1f}" if rate else "-", f"{ms['median']:.3f}", f"{ms['least']:.3f} to {ms['most']:.3f}"]
            row += [str(ms["rounds"]), "-" if same is None else f"{100 * same:.0f}%"]
        else:
            row += [f"{one['status']}: {one['reason']}", "", "", "", ""]
        rows.append(tuple(row))
    full = [row for row in rows if row[5]]
    widths = [max(len(row[column]) for row in full) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model, write a record a line, print the table, and return 1 if a way failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:LAYERS]", help="of benchmarks/configs, or a path")
    parser.add_argument("--layers", type=int, help="keep so many layers of each model that states no number")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--short", type=int, default=32, help="new tokens of the short generation")
    parser.add_argument("--long", type=int, default=160, help="new tokens of the long generation")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for all models")
    parser.add_argument("--device", default="auto", help="auto, cpu, or the GPU in this machine")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to try the script")
    parser.add_argument("--out", type=Path, help="file to which a record a line is added")
    options = parser.parse_args(arguments)
    if not 1 <= options.short < options.long or min(*options.batches, options.prompt, options.rounds) < 1:
        parser.error("--short is less than --long, and all numbers are at least 1")
    machine = select_machine(options.device)
    end = time.time() + options.time_limit
    records: list[dict[str, Any]] = []
    for index, model in enumerate(options.models):
        name, _, layers = model.partition(":")
        kept = int(layers) if layers else options.layers
        sizes = (options.prompt, options.short, options.long)
        job = Job(name, kept, machine.device, options.dtype, tuple(options.batches), *sizes, tiny=options.tiny)
        seconds = (end - time.time()) / (len(options.models) - index)
        found = measure(job, options.ways, options.rounds, seconds)
        found = [{**one, "gpu": machine.gpu_name, "libs": machine.libs} for one in found]
        records += found
        if options.out is not None:  # after each model: an interruption keeps what is measured
            with options.out.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in found)
    print(table(records))
    return 1 if any(one["status"] == FAILED for one in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
