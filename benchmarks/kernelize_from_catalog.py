"""``auto-kernelize`` on a small model with an author that hands in the shipped kernels, one after the other.

The loop starts from nothing: an installation beside the checkout whose catalog has every Definition, Workload and baseline,
and no kernel and no measurement, with a home folder of its own. The author is this file again: at attempt N of a task
it copies the N-th kernel that the checkout has for that operator and language. Printed are minutes, the share of the
model's time in verified kernels before and after, and a row for each experiment.

    python -m benchmarks.kernelize_from_catalog --gpu auto --max-attempts 1 --budget 6m --limit 480
    python -m benchmarks.kernelize_from_catalog --gpu cpu --tiny --dtype float32 --prompt 64 --rounds 3 --budget 60s

Without ``--config`` the model is Qwen3-30B-A3B cut to 4 layers, with random weights. No experiment begins where less of the
budget is left than the quickest one took; ``--limit`` interrupts the one in progress, as Ctrl-C would, and what its journals hold
by then is printed. With the same ``--home`` another run goes on: nothing that is journaled is written or measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.paths import shipped_root
from tilegym_db.records.loop import Attempt, Experiment
from tilegym_db.store.loop import journaled, latest

QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1000000.0,
}  # fmt: skip
TINY = QWEN3_MOE | {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LINKED = ("definitions", "workloads", "schema")
ASKED = re.compile(r"Write a (\w+) kernel for `(\w+)`")


# -- the author --------------------------------------------------------------------------------------------------------


def hand_in(prompt: str, folder: Path, catalog: Catalog) -> str:
    """Copy the kernel that is next into the folder of an attempt, whose name is the attempt's number; its name.

    Raises:
        SystemExit: the catalog has no further kernel of this operator and language.
    """
    asked = ASKED.search(prompt)
    if asked is None:
        raise SystemExit("the prompt does not say which kernel to write")
    language, definition = asked.groups()
    kernels = kernels_for(catalog, definition, language)
    number = int(folder.name)
    if number > len(kernels):
        raise SystemExit(f"the catalog has {len(kernels)} {language} kernels for {definition}, and all were handed in")
    chosen = kernels[number - 1]
    for name, content in chosen.sources.items():
        (folder / name).write_bytes(content)
    (folder / "solution.json").write_text(chosen.record.to_json(indent=2))
    return chosen.name


def kernels_for(catalog: Catalog, definition: str, language: str) -> list[SolutionFiles]:
    """The kernels of an operator in a language, by name."""
    found = [one for one in catalog.solutions_for(definition) if one.record.spec.role == "kernel"]
    return sorted((one for one in found if one.record.spec.language == language), key=lambda one: one.name)


# -- the installation --------------------------------------------------------------------------------------------------


def install_without_kernels(folder: Path, catalog: Catalog) -> Path:
    """Lay the package out as installed, with a catalog of definitions, workloads and baselines; what to put on the path."""
    package = Path(sys.modules["tilegym_db"].__path__[0])
    site = folder / "site"
    shutil.copytree(package, site / "tilegym_db", ignore=shutil.ignore_patterns("_data", "__pycache__"))
    data = site / "tilegym_db" / "_data"
    data.mkdir()
    for name in LINKED:
        (data / name).symlink_to(shipped_root() / name)
    (data / "traces").mkdir()
    for solution in catalog.solutions.values():
        if solution.record.spec.role == "baseline":
            for path in (solution.path, *(solution.folder / name for name in solution.sources)):
                target = data / path.resolve().relative_to(solution.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return site


# -- the loop ----------------------------------------------------------------------------------------------------------


def run_loop(options: argparse.Namespace, folder: Path) -> tuple[str, float]:
    """Why ``auto-kernelize`` ended, and the seconds it took; what it says goes to standard error, its records to the home.

    Raises:
        SystemExit: it failed.
    """
    site = install_without_kernels(folder, Catalog((shipped_root(),)))
    config = options.config
    if config is None:
        config = folder / ("Tiny-Qwen3-MoE" if options.tiny else "Qwen3-30B-A3B-4-layers")
        config.mkdir()
        (config / "config.json").write_text(json.dumps(TINY if options.tiny else QWEN3_MOE))
    checkout = Path(__file__).resolve().parents[1]
    author = [sys.executable, "-m", "benchmarks.kernelize_from_catalog", "--author"]
    author = ["env", f"PYTHONPATH={search_path(checkout)}", f"TILEGYM_DB_HOME={folder / 'author'}", *author]
    command = [
        sys.executable, "-m", "tilegym_db", "auto-kernelize", str(config), "--json", "--author", shlex.join(author),
        "--budget", options.budget, "--language", options.language, "--gpu", options.gpu, "--prompt", str(options.prompt),
        "--rounds", str(options.rounds), "--max-attempts", str(options.max_attempts), "--dtype", options.dtype,
    ]  # fmt: skip
    environment = {**os.environ, "TILEGYM_DB_HOME": str(options.home), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = search_path(site)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # every worker would compile the copied package anew
    began = time.monotonic()
    status = interrupted_after(command, options.limit, cwd=folder, env=environment)
    seconds = time.monotonic() - began
    if status is not None and status != 0:
        raise SystemExit(f"auto-kernelize ended with status {status} after {seconds:.0f} s")
    return "it ended by itself" if status == 0 else f"interrupted after {options.limit:g} s", seconds


def search_path(first: Path) -> str:
    """A folder before those that this process finds packages in."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def interrupted_after(command: Sequence[str], limit_s: float | None, **options: Any) -> int | None:
    """Run a command, which gets a Ctrl-C when its time is up, and is killed 15 s later; its status, None where it was stopped."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def recorded(home: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Experiments and attempts in the journals of a home, the newest line of each."""
    experiments = [one.model_dump(mode="json") for one in journaled(Experiment, home)]
    attempts = [one.model_dump(mode="json") for one in latest(journaled(Attempt, home)).values()]
    return experiments, attempts


def summary(experiments: Sequence[dict[str, Any]], attempts: Sequence[dict[str, Any]], seconds: float) -> str:
    """Minutes, coverage before the first and after the last experiment that was kept, a row for each, and for each attempt."""
    lines = [f"{seconds / 60:.1f} minutes, {len(experiments)} experiments"]
    if experiments:
        kept = [one for one in experiments if one["decision"] == "keep"]
        first = experiments[0]["before"]
        last = kept[-1]["after"] if kept else first
        lines.append(f"coverage of {first['time_of']} time: {first['median']:.1%} before, {last['median']:.1%} after")
    for one in experiments:
        after = "" if one["after"] is None else f" -> {one['after']['median']:.1%}"
        shares = f"{one['before']['median']:.1%}{after}"
        lines.append(f"{one['definition']:24} {one['decision']:8} {shares:16} {one['seconds']:6.1f} s  {one['reason']}")
    for one in attempts:
        times = f"{one['wall_s']:.1f} s, {one['device_s']:.1f} s of them measuring"
        ended = f"{one['verdict']} after '{one['stage']}' {one['gate']} {one['reason']}".rstrip()
        lines.append(f"attempt {one['solution']}: {ended} ({times})")
    return "\n".join(lines)


def main() -> int:
    """Be the author, or run the loop and print what came of it; exits with 1 where no experiment was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--author", action="store_true", help="be the author: prompt on stdin, a kernel into this folder"
    )
    parser.add_argument("--config", type=Path, help="another model's config")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can run")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--language", default="triton")
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--max-attempts", type=int, default=2)
    parser.add_argument("--limit", type=float, help="seconds after which the experiment in progress is interrupted")
    parser.add_argument("--home", type=Path, help="keep the journals here; by default they are thrown away")
    parser.add_argument("--out", type=Path, help="write experiments and attempts here as JSON")
    options = parser.parse_args()
    if options.author:
        print(hand_in(sys.stdin.read(), Path.cwd(), Catalog((shipped_root(),))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.home = (options.home or Path(folder) / "home").resolve()
        options.home.mkdir(parents=True, exist_ok=True)
        why, seconds = run_loop(options, Path(folder))
        experiments, attempts = recorded(options.home)
    content = {"ended": why, "seconds": round(seconds, 1), "experiments": experiments, "attempts": attempts}
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1))
    print(why, summary(experiments, attempts, seconds), sep="\n")
    return 0 if experiments else 1


if __name__ == "__main__":
    sys.exit(main())
