"""Run commands on a machine that is lent for a limited time: the first line of a plan first, each GPU its own line.

A plan has one command per line: ``tilegym-db`` or ``python`` with its words; ``#`` starts a comment. A GPU that is free takes the
next line. It has a home, ``OUT/home-0`` and so on, a share of the host's processors, and is the only GPU that its commands see.
Each line's output is in ``OUT/line-N.txt`` and ``OUT/line-N.log`` (stderr). Results are kept in the homes as they come, so the
time may end in the middle of a line. ``OUT/left.txt`` is the plan of what was not done; run it with the same OUT to continue.

    python tools/run_in_order.py plan.txt --out /tmp/homes --seconds 540 --gpus 2
    TILEGYM_DB_HOME=/tmp/homes/home-0 tilegym-db publish --gpu h200
    python tools/run_in_order.py plan.txt --out /tmp/homes --seconds 60     # on the CPU too: what the commands need

A plan of three lines:

    tilegym-db verify attention_decode_triton_persistent --gpu h200 --json
    tilegym-db model bench benchmarks/configs/qwen3-8b.json --gpu h200
    python benchmarks/token_timeline.py llama-3.1-8b --out token.svg

Prints a line when a line of the plan ends. Exit status 1 if the time ended before the plan did.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tilegym_db.measurement.machine import share_processors

END_S = 10.0
"""Left for a command to end its workers once the time is over."""
PROGRAMS = {"tilegym-db": [sys.executable, "-m", "tilegym_db"], "python": [sys.executable]}
SHOWN = 100
"""Characters of a command's last line that are printed."""


def lines_of(text: str) -> list[list[str]]:
    """Return the words of each line of a plan.

    Raises:
        ValueError: a line does not begin with one of the programs.
    """
    words = (shlex.split(line, comments=True) for line in text.splitlines())
    lines = [line for line in words if line]
    for line in lines:
        if line[0] not in PROGRAMS:
            raise ValueError(f"{shlex.join(line)!r} does not begin with {' or '.join(PROGRAMS)}")
    return lines


def summary(output: str) -> str:
    """Return how many traces have each status, most first (``12 PASSED, 1 TIMEOUT``), or without traces the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        try:
            counts[json.loads(line)["status"]] += 1
        except (ValueError, KeyError, TypeError):
            continue
    if counts:
        return ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return lines[-1][:SHOWN] if lines else "no output"


def run_line(words: list[str], out: Path, number: int, index: int, processors: tuple[int, ...], until: float) -> str:
    """Run one line on a GPU until ``until`` (of ``time.monotonic``), and return what came of it."""
    home = out / f"home-{index}"
    home.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home), "CUDA_VISIBLE_DEVICES": str(index)}
    command = ["taskset", "-c", ",".join(map(str, processors)), *PROGRAMS[words[0]], *words[1:]]
    kept = out / f"line-{number}.txt"
    with kept.open("w") as output, kept.with_suffix(".log").open("w") as log:
        print("$", shlex.join(words), file=log, flush=True)
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=log)
        ended = ""
        try:
            process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = "time ended; "
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return f"{ended}{summary(kept.read_text(errors='replace'))} (exit {process.returncode})"


def main() -> int:
    """Work through the plan, one thread per GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder of homes and outputs")
    parser.add_argument("--seconds", type=float, required=True, help="of this run, all lines together")
    parser.add_argument("--gpus", type=int, default=1, help="how many of this host")
    given = parser.parse_args()
    begun = time.monotonic()
    until = begun + given.seconds - END_S
    try:
        begins = 1 + len(list(given.out.glob("line-*.txt")))
        waiting = collections.deque(enumerate(lines_of(given.plan.read_text()), start=begins))
    except ValueError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    unfinished: list[list[str]] = []
    shares = share_processors(sorted(os.sched_getaffinity(0)), given.gpus)

    def work(index: int) -> None:
        while time.monotonic() < until:
            try:
                number, words = waiting.popleft()
            except IndexError:
                return
            started = time.monotonic()
            found = run_line(words, given.out, number, index, shares[index], until)
            if found.startswith("time ended"):
                unfinished.append(words)
            now = time.monotonic()
            print(
                f"{now - begun:6.0f} s  GPU {index}  {now - started:5.0f} s  {shlex.join(words)}: {found}", flush=True
            )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(given.gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [shlex.join(words) for words in (*unfinished, *(words for _, words in waiting))]
    (given.out / "left.txt").write_text("".join(f"{line}\n" for line in left))
    for line in left:
        print("left:", line)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
