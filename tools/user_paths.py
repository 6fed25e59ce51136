"""Walk the paths of four users on an empty home, and print every command with its output: a transcript to read as that user.

    python tools/user_paths.py [engineer|inference|analyst|agent ...] [--transcript FILE]

Every command that an output names as the next one is run too, as it is printed. Needs no GPU and no network. Exits with 1 if a
command ends with another status than expected, with an error that is not expected, or with a traceback.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from run_docs import Installation

LIMIT_S = 900
CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
WRONG = "def run(x, weight, eps, out):\n    out.copy_(x * weight)\n"
RIGHT = """def run(x, weight, eps, out):
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    out.copy_(weight * (wide * scale).to(x.dtype))
"""
RETURNS = RIGHT.replace("eps, out)", "eps)").replace(
    "out.copy_(weight * (wide * scale).to(x.dtype))", "return weight * (wide * scale).to(x.dtype)"
)
RECORD = {
    "name": "mine", "definition": "rms_norm", "author": "a user",
    "spec": {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["bfloat16", "float32"]}},
    "sources": [{"path": "kernel.py"}],
}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIG, indent=1),
    "wrong/kernel.py": WRONG,
    "wrong/solution.json": json.dumps(RECORD, indent=1),
    "right/kernel.py": RIGHT,
    "right/solution.json": json.dumps({**RECORD, "name": "rms_norm_mine"}, indent=1),
}


@dataclass(frozen=True)
class Step:
    """A command, or a Python text, with the status that it ends with."""

    command: str
    status: int = 0
    is_python: bool = False
    edit: tuple[str, str] | None = None
    """A file that the user writes before, and its text."""


MEANT = {"FOLDER": "right", "DEFINITION": "rms_norm", "NAME": "rms_norm"}
"""What the user puts in the place of a word in capital letters."""
ENDS = (
    ("dev rms_norm_triton_2", 1),  # the draft still has its TODO
    ("add-solution rms_norm_triton_2", 1),
    ("add-solution rms_norm_python", 1),  # its solution.json has a TODO until the user replaces it
    ("task submit", 1),  # a judged source keeps its verdict
    ("debug reproduce", 1),  # the failure is there again
    ("explain kv_cache_concat", 3),  # stock code serves
    ("explain kv_cache_prefill", 3),  # it is not measured on that GPU
    ("explain rope_neox", 3),  # no kernel is batch-invariant
)
"""How next commands begin that do not end with 0, and their status."""
LEFT_OUT = ("model bench", "bench softmax_triton", "verify softmax_triton", "compile")
"""How next commands begin that take minutes, or are for a machine with a GPU; a test runs each elsewhere."""
NAMED = re.compile(
    r"(?:Next|[Tt]hen|Try|Why the first|would pick|reproduce it|award|one|with [^:]*)[^:\n]*: (tilegym-db [^\n]*)"
)
AFTER = re.compile(r", (?:then|so that|which)|; |\. |\)(?=[\s.,;]|$)| has this|`")
"""What ends a command in a sentence; the parenthesis of a quoted layout does not."""


def next_commands(text: str) -> Iterator[str]:
    """Yield every command that a text names as a next one, as it is printed."""
    for found in NAMED.finditer(text):
        rest = found[1]
        while rest:
            command, _, after = rest.partition(": tilegym-db ")
            yield AFTER.split(command)[0].strip().rstrip(".,")
            rest = f"tilegym-db {after}" if after else ""


SIZE = "M=256,N=2048"
WHOLE_BENCH = re.compile("^tilegym-db bench rms_norm_python$")
"""A command that takes minutes, and is run at one size."""
RESOLVE = """import tilegym_db
print(tilegym_db.resolve("swiglu", axes={"M": 8, "I": 64}, dtypes={"T": "float32"}, gpu="cpu"))"""
DESCRIBED = """import pathlib
record = pathlib.Path("rms_norm_python/solution.json")
record.write_text(record.read_text().replace("TODO: how it works, in one line.", "Statistics in float32."))"""
PATHS: dict[str, tuple[Step, ...]] = {
    "engineer": (
        Step("tilegym-db show rms_norm"),
        Step("tilegym-db new solution rms_norm --language triton"),
        Step("tilegym-db dev rms_norm_triton_2", 1),  # a draft with its TODO
        Step("tilegym-db dev wrong --gpu cpu", 1),
        Step("tilegym-db new solution rms_norm --language python"),
        Step("tilegym-db dev rms_norm_python/ --gpu cpu", edit=("rms_norm_python/kernel.py", RETURNS)),
        Step(DESCRIBED, 0, True),
        Step("tilegym-db add-solution rms_norm_python"),
        Step(f"tilegym-db bench rms_norm_python --gpu cpu --workload {SIZE}"),
        Step("tilegym-db remove rms_norm_python"),
    ),
    "inference": (
        Step("tilegym-db best swiglu --gpu h200 --limit 3"),
        Step("tilegym-db explain swiglu --axes M=4096,I=14336 --dtype T=bfloat16 --gpu h200"),
        Step("tilegym-db task recommend config.json --gpu h200"),
        Step("tilegym-db task recommend config.json --gpu h200 --require batch-invariant"),
        Step(RESOLVE, 0, True),
    ),
    "analyst": (
        Step('tilegym-db sql "SHOW TABLES"'),
        Step('tilegym-db sql "DESCRIBE history"'),
        Step('tilegym-db sql "SELECT solution, count(*) AS cases FROM best GROUP BY ALL ORDER BY cases DESC LIMIT 5"'),
        Step("tilegym-db best --parquet -o best.parquet"),
        Step("import pandas; print(pandas.read_parquet('best.parquet').groupby('gpu').speedup.median())", 0, True),
        Step("tilegym-db best --rank softmax"),
        Step("tilegym-db report -o report.html"),
        Step("tilegym-db show softmax_triton --history"),
        Step('tilegym-db sql "SELECT solutoin FROM best"', 2),
    ),
    "agent": (
        Step(f"tilegym-db task create rms_norm --language python --gpu cpu --workload {SIZE}"),
        Step("tilegym-db task status"),
        Step("tilegym-db task prompt TASK"),
        Step("tilegym-db task submit TASK wrong", 1),
        Step("tilegym-db task status TASK"),
        Step("tilegym-db task submit TASK right", 1),  # right, but no faster than 1.10x the best baseline
        Step("tilegym-db task status TASK"),
        Step("tilegym-db task from-model config.json --gpu cpu --dtype float32 --prompt-tokens 16"),
    ),
}  # fmt: skip


@cache
def installed(folder: Path) -> Installation:
    """Return a copy of the package as from a wheel, so that kernels are added to the home and not to this checkout."""
    return Installation.make(folder)


def walk(user: str, folder: Path) -> tuple[list[str], int]:
    """Run a user's steps in an empty folder with an empty home; return the transcript and the number of surprises."""
    work = folder / user
    for name, text in FILES.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    installation = installed(folder / "installed")
    environment = {
        **installation.environment(folder / f"{user} home"), "TILEGYM_DB_HOME": str(folder / f"{user} home"),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    lines, surprises, task, ran = [f"== {user} =="], 0, "", set[str]()
    print(lines[0])
    waiting = list(PATHS[user])
    while waiting:
        step = waiting.pop(0)
        if step.edit is not None:
            (work / step.edit[0]).write_text(step.edit[1])
        text = step.command.replace("TASK", task[:8])
        shown = f"python -c {shlex.quote(text)}" if step.is_python else text
        ran.add(shown)
        begun = time.monotonic()
        answer = subprocess.run(
            shown, shell=True, cwd=work, env=environment, text=True, check=False, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if " task create " in text:
            task = answer.stdout.split()[0]
        is_refused = step.status == 0 and re.search(r"^error:", answer.stdout, re.MULTILINE) is not None
        wrong = answer.returncode != step.status or "Traceback" in answer.stdout or is_refused
        surprises += wrong
        end = f"exit {answer.returncode}{f', not {step.status}' if answer.returncode != step.status else ''}"
        new = [f"$ {shown}", answer.stdout.rstrip(), f"# {end}, {time.monotonic() - begun:.1f} s", ""]
        offered: list[Step] = []
        for command in next_commands(answer.stdout):
            named = re.sub(r"\b[A-Z]{4,}\b", lambda word: MEANT.get(word[0], word[0]), command).replace(" --watch", "")
            named = WHOLE_BENCH.sub(rf"\g<0> --workload {SIZE}", named)
            words = named.removeprefix("tilegym-db ")
            if words.startswith(LEFT_OUT):
                new.insert(-1, f"# not run here: {named}")
            elif named not in ran and not any(named == one.command for one in (*offered, *waiting)):
                status = next((status for begin, status in ENDS if words.startswith(begin)), 0)
                offered.append(Step(named, status))
        waiting = offered + waiting
        lines += new
        print("\n".join(new), flush=True)
    return lines, surprises


def main() -> int:
    """Walk the paths; write the transcript if a file is given for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("users", nargs="*", choices=[*PATHS, []], help="all by default")
    parser.add_argument("--transcript", type=Path)
    options = parser.parse_args()
    transcript, surprises = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for user in options.users or PATHS:
            lines, wrong = walk(user, Path(folder))
            transcript += lines
            surprises += wrong
    if options.transcript is not None:
        options.transcript.write_text("\n".join(transcript))
    print(f"{surprises} steps ended otherwise than expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
