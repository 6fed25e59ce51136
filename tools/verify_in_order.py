"""Verify Solutions on a machine that is lent for a limited time: the first line of a plan first, each GPU its own line.

A plan has one line per ``tilegym-db verify``: names and options of that command; ``#`` starts a comment. A GPU that is free takes
the next line. It has a home, ``OUT/home-0`` and so on, and a share of the host's processors. Traces are kept in the homes as they
come, so the time may end in the middle of a line; the same command continues there.

    python tools/verify_in_order.py plan.txt --out /tmp/homes --seconds 540 --gpus 2
    TILEGYM_DB_HOME=/tmp/homes/home-0 tilegym-db publish --gpu h200
    python tools/verify_in_order.py plan.txt --out /tmp/homes --seconds 60 --gpus 1 --gpu cpu    # the script itself

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

from tilegym_db.measurement.devices.devices import share_processors

END_S = 10.0
"""Left for a command to end its workers once the time is over."""


def lines_of(text: str) -> list[list[str]]:
    """Return the words of each line of a plan."""
    words = (shlex.split(line, comments=True) for line in text.splitlines())
    return [line for line in words if line]


def statuses(output: str) -> str:
    """Return how many traces of a ``verify --json`` have each status, most first: ``12 PASSED, 1 TIMEOUT``."""
    records = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    counts = collections.Counter(record["status"] for record in records)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no new trace"


def verify_line(words: list[str], home: Path, gpu: str, index: int, processors: tuple[int, ...], until: float) -> str:
    """Run one line until ``until`` (of ``time.monotonic``), and return what came of it."""
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    if gpu != "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = str(index)
    command = ["taskset", "-c", ",".join(map(str, processors)), sys.executable, "-m", "tilegym_db", "verify"]
    with (home / "log.txt").open("a") as log:
        print("$ verify", shlex.join(words), file=log, flush=True)
        process = subprocess.Popen(
            [*command, *words, "--gpu", gpu, "--json"], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            output, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return f"time ended; {statuses(output)}"
        return f"{statuses(output)} (exit {process.returncode})"


def main() -> int:
    """Work through the plan, one thread per GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the homes")
    parser.add_argument("--seconds", type=float, required=True, help="of this run, all lines together")
    parser.add_argument("--gpus", type=int, default=1, help="how many of this host")
    parser.add_argument("--gpu", default="auto", help="as for tilegym-db verify")
    given = parser.parse_args()
    begun = time.monotonic()
    until = begun + given.seconds - END_S
    waiting = collections.deque(lines_of(given.plan.read_text()))
    unfinished: list[list[str]] = []
    shares = share_processors(sorted(os.sched_getaffinity(0)), given.gpus)

    def work(index: int) -> None:
        home = given.out / f"home-{index}"
        home.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < until:
            try:
                words = waiting.popleft()
            except IndexError:
                return
            started = time.monotonic()
            found = verify_line(words, home, given.gpu, index, shares[index], until)
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
    for words in (*unfinished, *waiting):
        print("left:", shlex.join(words))
    return 1 if unfinished or waiting else 0


if __name__ == "__main__":
    sys.exit(main())
