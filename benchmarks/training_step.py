"""Steps of training: stock, Liger-Kernel, torch.compile and patched in turns; and curves of the loss, stock against patched.

A step is the forward and backward of ``--rows`` x ``--tokens`` random tokens in parts of ``--micro`` rows, and one of AdamW.
Models are built from their configs with random weights. All ways but Liger's train the same weights. Liger-Kernel patches a whole
process, so it has one, and waits there while the others compute. Every turn is one step that is not timed, and then ``--steps``
timed ones. The order of the turns changes with each round. A way that cannot run is absent, with its reason.

    python benchmarks/training_step.py --out steps.json                # Llama-3.2-1B, slices of Qwen3-8B and Qwen3-30B-A3B
    python benchmarks/training_step.py --models llama-3.2-1b:4 --checkpoint --lora --out steps.json
    python benchmarks/training_step.py --models llama-3.2-1b:4 --ways stock,liger,patched --seconds 90 --out steps.json
    python benchmarks/training_step.py --tiny --device cpu --out steps.json

``--loss-curve N`` trains a small model for N steps: stock and patched from the weights of one seed, and stock from those of other
seeds. The data are sentences of a seeded generator, the same for all. It is a finding if the patched curve is further from that
of stock than the curves of other seeds are. With ``--gpus 2`` the script starts itself in two processes, which
share each batch through DDP, or through FSDP2 with ``--shard``.

    python benchmarks/training_step.py --loss-curve 500 --out curve.json
    python benchmarks/training_step.py --loss-curve 500 --lora --gpus 2 --out curve-ddp.json
    python benchmarks/training_step.py --loss-curve 20 --tiny --device cpu --gpus 2 --out curve.json

Exits with 1 if there is a finding: a kernel that failed, a loss that is not finite, or such a curve.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilegym_db.models import patch
from tilegym_db.models.bench.generation import LIBRARIES
from tilegym_db.models.random_model import load_config, unchecked_model

CONFIGS = Path(__file__).parent / "configs"
MODELS = ("llama-3.2-1b", "qwen3-8b:4", "qwen3-30b-a3b:2")
"""Names of configs, each with a number of layers if not all."""
CURVE_MODEL = "llama-3.2-1b:2"
WAYS = ("stock", "liger", "patched", "compile")
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
TINY_LAYERS = 2
FIRST_ROUNDS = 2
"""The times that are always spent: to build the models, and the round in which kernels are compiled."""
LEARNING_RATE = {"steps": 1e-5, "curve": 3e-4}
LORA_RANK, LORA_ALPHA = 16, 32
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORDS, BRANCHES = 512, 4
"""The language of the curves: so many tokens, each with so many that may follow it."""
WINDOW_SHARE = 0.04
"""Share of the steps over which curves are smoothed before they are compared."""
ROUNDING_SHARE = 0.002
"""Difference of two curves, as a share of the loss, that is rounding in any case."""


def say(text: str) -> None:
    """Print progress on stderr, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def clipped(error: BaseException) -> str:
    """Return the kind of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# -- models and data --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options that every process needs."""

    model: str
    device: str
    dtype: str
    rows: int
    tokens: int
    micro: int
    steps: int
    lora: bool
    checkpoint: bool
    tiny: bool
    learning_rate: float
    seed: int = 0


def config_of(settings: Settings) -> Any:
    """Return the config of a model: ``NAME`` or ``NAME:LAYERS`` of ``benchmarks/configs``, or the path of one."""
    name, _, layers = settings.model.partition(":")
    path = CONFIGS / f"{name}.json"
    kept = TINY_LAYERS if settings.tiny else int(layers) if layers else None
    config = load_config(path if path.is_file() else Path(name), kept)
    if settings.tiny:
        for attribute, value in TINY.items():
            if hasattr(config, attribute):
                setattr(config, attribute, value)
    return config


def built(settings: Settings) -> Any:
    """Return a model in training mode with the random weights of a seed."""
    model = unchecked_model(config_of(settings), settings.device, settings.dtype)
    if settings.seed:
        # The noise depends on the seed; norms and other vectors keep what the config made of them.
        generator = torch.Generator(settings.device).manual_seed(settings.seed)
        std = getattr(model.config, "initializer_range", 0.02)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, std, generator=generator)
    if settings.lora:
        add_adapters(model)
    if settings.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with a low-rank update beside it, computed as PEFT does."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, LORA_RANK, **options)
        self.lora_B = torch.nn.Linear(LORA_RANK, base.out_features, **options)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the layer and of the update, [..., out]."""
        found: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * (LORA_ALPHA / LORA_RANK)
        return found


def add_adapters(model: Any) -> None:
    """Freeze a model and insert adapters with the same random weights at every call."""
    model.requires_grad_(False)
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(7)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if name in LORA_TARGETS and isinstance(child, torch.nn.Linear):
                    setattr(parent, name, LoraLinear(child))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SystemExit(f"--lora: {type(model).__name__} has none of {', '.join(LORA_TARGETS)}")
    model.enable_input_require_grads()


def twin_of(model: Any) -> Any:
    """Return a second instance that shares every weight and buffer with the first."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def optimizer_of(model: Any, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW over the weights that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=settings.learning_rate, fused=settings.device.startswith("cuda"))


def random_tokens(config: Any, settings: Settings) -> torch.Tensor:
    """Return random token ids [rows, tokens] on the device."""
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(1, config.vocab_size, (settings.rows, settings.tokens), generator=generator)
    return ids.to(settings.device)


class Language:
    """Sentences of a seeded generator: each token has a few that may follow it, the first of them most often."""

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._words = min(WORDS, vocabulary - 1)
        self._names = torch.randperm(vocabulary - 1, generator=generator)[: self._words] + 1
        self._next = torch.randint(self._words, (self._words, BRANCHES), generator=generator)
        self._share = torch.tensor([0.5**branch for branch in range(1, BRANCHES + 1)])

    def batch(self, rows: int, tokens: int, seed: int) -> torch.Tensor:
        """Return token ids [rows, tokens]."""
        generator = torch.Generator().manual_seed(seed)
        word = torch.randint(self._words, (rows,), generator=generator)
        chosen = torch.multinomial(self._share, rows * tokens, True, generator=generator).view(tokens, rows)
        sentence = []
        for branch in chosen:
            sentence.append(word)
            word = self._next[word, branch]
        return self._names[torch.stack(sentence, dim=1)]


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, micro: int) -> torch.Tensor:
    """Take one step on ids [rows, tokens] and return the mean loss of its parts."""
    parts = ids.split(micro)
    total = torch.zeros((), device=ids.device)
    for index, part in enumerate(parts):
        with _without_exchange(model, is_last=index == len(parts) - 1):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / len(parts)
            loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@contextlib.contextmanager
def _without_exchange(model: Any, *, is_last: bool) -> Iterator[None]:
    """Let processes exchange gradients only in the last part of a step."""
    waits = getattr(model, "no_sync", None)
    with contextlib.nullcontext() if is_last or waits is None else waits():
        yield


# -- steps in turns ---------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """The timed steps of one way in one round."""

    seconds: list[float]
    peak_bytes: int
    loss: float


def turn(take: Callable[[], torch.Tensor], steps: int, device: str) -> Turn:
    """Take one step that is not timed, and time the others; free the memory that PyTorch keeps."""
    is_gpu = device.startswith("cuda")
    wait: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    loss, seconds = float(take()), []
    for _ in range(steps):
        wait()
        begun = time.perf_counter()
        loss = float(take())
        wait()
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    free_memory(device)
    return Turn(seconds, peak, loss)


def free_memory(device: str) -> None:
    """Give memory that no tensor needs back to the driver, so that another process can have it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class LigerProcess:
    """A process with the same model whose classes Liger-Kernel has replaced."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a CUDA context that it cannot use
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_liger, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.library = self._answer()

    def turn(self) -> Turn:
        """Return a turn that the process took."""
        self._connection.send("turn")
        return Turn(**self._answer())

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            kind, content = self._connection.recv()
        except EOFError:
            raise RuntimeError("its process ended") from None
        if kind == "error":
            raise RuntimeError(content)
        return content


def serve_liger(connection: Connection, settings: Settings) -> None:
    """Answer requests for turns until the connection is closed."""
    os.dup2(2, 1)  # output of the library must not mix with the results
    try:
        library = LIBRARIES["liger"]
        if importlib.util.find_spec(library.package) is None:
            raise RuntimeError("it is not installed. Try: pip install --no-deps liger-kernel")
        config = config_of(settings)
        apply = getattr(importlib.import_module(library.module), library.prefix + config.model_type)
        apply(**library.options)
        model = built(settings)
        optimizer, ids = optimizer_of(model, settings), random_tokens(config, settings)
        free_memory(settings.device)
        connection.send(("ready", f"{library.distribution} {importlib.metadata.version(library.distribution)}"))
        while True:
            connection.recv()
            found = turn(lambda: step(model, optimizer, ids, settings.micro), settings.steps, settings.device)
            connection.send(("turn", vars(found)))
    except EOFError:
        return
    except Exception as error:  # a library may raise anything: the caller gets the reason and goes on without it
        connection.send(("error", clipped(error)))


@dataclass
class Race:
    """The turns of every way, and the reasons of those that are absent."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, call: Callable[[], Turn], device: str) -> None:
        """Take a turn; a way that raises is absent from then on."""
        if name in self.absent:
            return
        try:
            self.turns.setdefault(name, []).append(call())
        except Exception as error:  # compilers and libraries may raise anything
            self.absent[name] = clipped(error)
            say(f"  {name}: {self.absent[name]}")
        if name in self.absent:
            self.turns.pop(name, None)
            free_memory(device)


def is_time_for_another(spent: Sequence[float], seconds: float) -> bool:
    """Return True if a round that takes as long as the last one ends within the limit; one round is counted in any case.

    ``spent`` has the time to the first round, and then that of each round; the first round is not counted.
    """
    return len(spent) <= FIRST_ROUNDS or sum(spent) + spent[-1] <= seconds


def race(settings: Settings, ways: Sequence[str], rounds: int, seconds: float = math.inf) -> dict[str, Any]:
    """Train one model in all ways in turns, and return the figures of each; start no round that would end after ``seconds``."""
    begun = time.perf_counter()
    say(f"{settings.model}: building")
    model = built(settings)
    optimizer, ids = optimizer_of(model, settings), random_tokens(model.config, settings)
    models: dict[str, Any] = {"stock": model}
    found, handle, liger = Race(), None, None
    if "patched" in ways:
        models["patched"] = twin_of(model)
        handle = patch(models["patched"], skip_logits=True)
    if "compile" in ways:
        models["compile"] = torch.compile(twin_of(model))

    def calls(name: str) -> Callable[[], Turn]:
        def take() -> torch.Tensor:
            try:
                return step(models[name], optimizer, ids, settings.micro)
            except BaseException:
                optimizer.zero_grad(set_to_none=True)
                raise

        return lambda: turn(take, settings.steps, settings.device)

    turns = {name: calls(name) for name in ways if name in models}
    if "liger" in ways:
        try:
            liger = LigerProcess(settings)
            turns["liger"] = liger.turn
        except RuntimeError as error:
            found.absent["liger"] = str(error)
    order = [name for name in ways if name in turns]
    spent = [time.perf_counter() - begun]
    try:
        for index in range(rounds + 1):
            if not is_time_for_another(spent, seconds):
                say(f"  {index - 1} of {rounds} rounds fit in {seconds:.0f} s")
                break
            for name in order[index % len(order) :] + order[: index % len(order)]:
                say(f"  round {index} of {rounds}: {name}" + (" (not counted)" if index == 0 else ""))
                found.take(name, turns[name], settings.device)
            if index == 0:
                found.turns.clear()
            spent.append(time.perf_counter() - begun - sum(spent))
    finally:
        if liger is not None:
            liger.close()
    return {
        "model": settings.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "rows": settings.rows,
        "tokens": settings.tokens,
        "micro": settings.micro,
        "lora": settings.lora,
        "checkpoint": settings.checkpoint,
        "liger": "" if liger is None else liger.library,
        "absent": found.absent,
        "seconds": [round(part, 2) for part in spent],
        "ways": {name: figures(turns, settings) for name, turns in found.turns.items()},
        "against": against(found.turns),
        **({} if handle is None else served(handle)),
    }


def figures(turns: Sequence[Turn], settings: Settings) -> dict[str, Any]:
    """Return tokens a second by the median step, the peak of the memory, and the last loss."""
    seconds = statistics.median(value for one in turns for value in one.seconds)
    return {
        "tokens_per_s": round(settings.rows * settings.tokens / seconds, 1),
        "step_ms": round(1e3 * seconds, 2),
        "steps_ms": [[round(1e3 * value, 2) for value in one.seconds] for one in turns],
        "peak_gb": round(max(one.peak_bytes for one in turns) / 1e9, 3),
        "loss": turns[-1].loss,
    }


def against(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, float]]:
    """Return by other way: its time over that of patched in each round, the median and the extremes; and its peak over it."""
    ours = turns.get("patched", ())
    result = {}
    for name, theirs in turns.items():
        if name == "patched" or not ours:
            continue
        ratios = [
            statistics.median(b.seconds) / statistics.median(a.seconds) for a, b in zip(ours, theirs, strict=True)
        ]
        peaks = [max(one.peak_bytes for one in both) for both in (ours, theirs)]
        result[name] = {
            "speedup": round(statistics.median(ratios), 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
            "memory": round(peaks[0] / peaks[1], 4) if peaks[1] else 0.0,
        }
    return result


def served(handle: Any) -> dict[str, Any]:
    """Return the calls by kernels, the reasons of the others, and the failures of a patched model."""
    report = handle.report()
    reasons: dict[str, int] = {}
    for site in report.sites:
        texts = dict(site.bypassed)
        if site.reason:
            texts[site.reason] = texts.get(site.reason, 0) + 1
        for counts in site.all_counts:
            for key in counts.keys:
                if not key.solution:
                    texts[key.reason] = texts.get(key.reason, 0) + key.calls
        for text, calls in texts.items():
            place = f"{site.kind} {site.module_class} {site.definition}: {text}"
            reasons[place] = reasons.get(place, 0) + calls
    return {
        "hits": {name: calls for name, calls in report.hits().items() if calls},
        "stock": reasons,
        "failures": [str(failure) for failure in report.failures],
    }


def race_findings(result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in the figures of one model."""
    found = [f"{result['model']}: {text}" for text in result.get("failures", ())]
    found += [
        f"{result['model']}: the loss of {name} is {figures['loss']}"
        for name, figures in result["ways"].items()
        if not math.isfinite(figures["loss"])
    ]
    if "patched" in result["absent"]:
        found.append(f"{result['model']}: patched: {result['absent']['patched']}")
    return found


def print_race(result: Mapping[str, Any]) -> None:
    """Print a table of one model."""
    print(
        f"\n{result['model']}: {result['rows']} x {result['tokens']} tokens, {result['parameters'] / 1e6:,.0f}M parameters"
    )
    print(f"  {'way':<10} {'tokens/s':>12} {'step ms':>10} {'peak GB':>9} {'patched is':>11} {'its memory':>11}")
    for name, way in result["ways"].items():
        other = result["against"].get(name)
        ratio = f"{other['speedup']:>10.3f}x {other['memory']:>10.3f}x" if other else ""
        print(f"  {name:<10} {way['tokens_per_s']:>12,.0f} {way['step_ms']:>10,.1f} {way['peak_gb']:>9.2f} {ratio}")
    for name, reason in result["absent"].items():
        print(f"  {name:<10} absent: {reason}")
    for label in ("hits", "stock"):
        for text, calls in result.get(label, {}).items():
            print(f"    {label}: {text} ({calls})")


# -- curves of the loss -----------------------------------------------------------------------------------------------


def curve(settings: Settings, steps: int, *, is_patched: bool, is_sharded: bool) -> dict[str, Any]:
    """Train a model and return the loss of each step; several processes share every batch."""
    model = built(settings)
    handle = patch(model, skip_logits=True) if is_patched else None
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trained = model if world == 1 else _sharded(model) if is_sharded else _replicated(model, settings)
    optimizer, language = optimizer_of(trained, settings), Language(model.config.vocab_size)
    losses, begun = [], time.perf_counter()
    for index in range(steps):
        # The data do not depend on the seed: their noise would hide what a wrong gradient does to a curve.
        ids = language.batch(settings.rows, settings.tokens, seed=index)
        part = ids[rank::world].to(settings.device)
        loss = step(trained, optimizer, part, settings.micro)
        if world > 1:
            dist.all_reduce(loss)
            loss /= world
        losses.append(loss)
        if index % max(1, steps // 10) == 0:
            say(f"  step {index}: {float(loss):.4f}")
    found = {
        "seed": settings.seed,
        "losses": [float(loss) for loss in losses],
        "seconds": round(time.perf_counter() - begun, 2),
        **({} if handle is None else served(handle)),
    }
    if handle is not None and not is_sharded:
        handle.unpatch()
    del model, trained, optimizer
    free_memory(settings.device)
    return found


def _replicated(model: Any, settings: Settings) -> Any:
    device = torch.device(settings.device)
    return torch.nn.parallel.DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)


def _sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return the means of all windows of so many steps."""
    return [statistics.fmean(losses[at : at + window]) for at in range(len(losses) - window + 1)]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two smoothed curves."""
    window = max(1, int(WINDOW_SHARE * len(one)))
    return max(abs(a - b) for a, b in zip(smoothed(one, window), smoothed(other, window), strict=True))


def curves(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Return the curves of stock, of patched and of other seeds, and how far they are from the first one."""
    found = {}
    for name, seed, is_patched in [
        ("stock", 0, False),
        ("patched", 0, True),
        *((f"seed {seed}", seed, False) for seed in range(1, options.seeds + 1)),
    ]:
        say(f"{settings.model}: {name}, {options.loss_curve} steps")
        one = Settings(**{**vars(settings), "seed": seed})
        found[name] = curve(one, options.loss_curve, is_patched=is_patched, is_sharded=options.shard)
    first = found["stock"]["losses"]
    return {
        "model": settings.model,
        "rows": settings.rows,
        "tokens": settings.tokens,
        "lora": settings.lora,
        "checkpoint": settings.checkpoint,
        "processes": options.gpus,
        "parallel": "" if options.gpus == 1 else "fsdp2" if options.shard else "ddp",
        "curves": found,
        "distances": {name: distance(first, one["losses"]) for name, one in found.items() if name != "stock"},
        "last": {name: smoothed(one["losses"], max(1, len(first) // 10))[-1] for name, one in found.items()},
    }


def curve_findings(result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in the curves."""
    found = [*result["curves"]["patched"]["failures"]]
    for name, one in result["curves"].items():
        found += [f"{name}: a loss is not finite"] if not all(map(math.isfinite, one["losses"])) else []
    ours, rounding = result["distances"]["patched"], ROUNDING_SHARE * result["curves"]["stock"]["losses"][0]
    spread = max((value for name, value in result["distances"].items() if name != "patched"), default=0.0)
    if not ours <= max(spread, rounding):
        found.append(f"patched is {ours:.4f} from stock, and other seeds are at most {spread:.4f}")
    return found


def print_curves(result: Mapping[str, Any]) -> None:
    """Print a table of the curves."""
    print(f"\n{result['model']}: {result['rows']} x {result['tokens']} tokens, {result['processes']} processes")
    print(f"  {'curve':<10} {'first':>9} {'last':>9} {'distance':>9} {'seconds':>9}")
    for name, one in result["curves"].items():
        away = f"{result['distances'][name]:>9.4f}" if name in result["distances"] else " " * 9
        print(f"  {name:<10} {one['losses'][0]:>9.4f} {result['last'][name]:>9.4f} {away} {one['seconds']:>9.1f}")
    for label in ("hits", "stock"):
        for text, calls in result["curves"]["patched"][label].items():
            print(f"    {label}: {text} ({calls})")


# -- command line -----------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help=f"NAME[:LAYERS] or paths of configs; {', '.join(MODELS)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"with commas, of {', '.join(WAYS)}")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="of a row: 4096, or 512 for curves")
    parser.add_argument("--micro", type=int, help="rows of a forward: 2, or all for curves")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit for a model: no later round is started")
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--checkpoint", action="store_true", help="keep no activations of layers for the backward")
    parser.add_argument("--loss-curve", type=int, metavar="N", help="train N steps in place of timing")
    parser.add_argument("--seeds", type=int, default=1, help="other seeds of a curve")
    parser.add_argument("--gpus", type=int, default=1, help="processes that share each batch of a curve")
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes, to try the script itself")
    parser.add_argument("--out", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    options.ways = options.ways.split(",")
    unknown = sorted(set(options.ways) - set(WAYS))
    if unknown:
        parser.error(f"--ways: unknown: {', '.join(unknown)}. Known: {', '.join(WAYS)}")
    if (options.gpus > 1 or options.shard) and not options.loss_curve:
        parser.error("--gpus and --shard are for --loss-curve")
    if options.shard and options.gpus == 1:
        parser.error("--shard needs --gpus 2 or more")
    options.tokens = options.tokens or (512 if options.loss_curve else 4096)
    options.micro = options.micro or (options.rows if options.loss_curve else 2)
    options.models = options.models or ([CURVE_MODEL] if options.loss_curve else list(MODELS))
    return options


def settings_of(options: argparse.Namespace, model: str) -> Settings:
    """Return the options for one model."""
    shared = {name: getattr(options, name) for name in Settings.__annotations__ if hasattr(options, name)}
    rate = LEARNING_RATE["curve" if options.loss_curve else "steps"]
    return Settings(**shared, model=model, learning_rate=rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 1 if there is a finding."""
    options = parsed(arguments)
    if options.gpus > 1 and "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        return subprocess.run(
            [*launcher, __file__, *(sys.argv[1:] if arguments is None else arguments)], check=False
        ).returncode
    if options.gpus > 1:
        join_processes(options)
    findings: list[str] = []
    results: list[dict[str, Any]] = []
    for name in options.models:
        settings = settings_of(options, name)
        if options.loss_curve:
            results.append(curves(settings, options))
            found = curve_findings(results[-1])
        else:
            results.append(race(settings, options.ways, options.rounds, options.seconds))
            found = race_findings(results[-1])
        findings += found
        if os.environ.get("RANK", "0") == "0":
            (print_curves if options.loss_curve else print_race)(results[-1])
            save(options, results, findings)  # a later model may be cut off
    for text in findings:
        say(f"finding: {text}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if findings else 0


def join_processes(options: argparse.Namespace) -> None:
    """Join the process group; each process has one device."""
    if options.device.startswith("cuda"):
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(options.device)
    dist.init_process_group("nccl" if options.device.startswith("cuda") else "gloo")


def save(options: argparse.Namespace, results: Sequence[Any], findings: Sequence[str], **more: Any) -> None:
    """Write the results so far, if ``--out`` names a file; ``more`` are further entries."""
    if options.out is None:
        return
    is_gpu = options.device.startswith("cuda")
    content = {
        "gpu": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "command": sys.argv[1:],
        **more,
        "results": results,
        "findings": findings,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
