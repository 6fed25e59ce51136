"""The time line of one decoded token on a GPU as a picture: each kernel, and each gap in which the GPU waits.

The model generates under PyTorch's profiler. A logits processor marks the host time between two forwards, so a token is the GPU
work launched from one mark to the next: the choice of a token, and the forward that reads it. Of the tokens in the middle of
the generation, the one of median length is drawn. The profiler makes the host slower, so gaps of eager code are upper bounds.

    python benchmarks/token_timeline.py llama-3.1-8b --out docs/pictures/token-llama.svg          # on the GPU
    python benchmarks/token_timeline.py qwen3-30b-a3b:8 --way stock --out token.svg               # eight layers, stock code
    python benchmarks/token_timeline.py llama-3.1-8b --events profile.json.gz --out token.svg     # draws what was kept by --keep
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

MARK = "tilegym_db::token"
"""Name of the marks."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MIN_TOKENS = 4
"""Tokens in a profile: those at its ends are left out."""
KINDS = {
    "product": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "splitk", "linear", "expert"),
    "attention": ("attention", "fmha", "flash", "softmax", "mla"),
    "norm": ("norm",),
    "rotation, cache": ("rope", "rotary", "index_copy", "scatter", "index_put", "cat"),
    "gate": ("swiglu", "silu", "gelu", "act_and_mul"),
    "choice of a token": ("argmax", "reduce", "topk", "sort", "multinomial", "cumsum"),
}
"""Kind -> parts of the names of kernels; the first kind that fits counts."""
OTHER = "other"
COLOURS = ("#0969da", "#8250df", "#1a7f37", "#bf8700", "#bc4c00", "#cf222e", "#6e7781")
PAGE, MARGIN, LINE, BAR, TOP = 960, 12, 30, 18, 64
US_PER_LINE = 400.0
"""Time that one line of the picture shows at the least; a long token has up to :data:`MAX_LINES` lines."""
MAX_LINES = 24
SHOWN = 12
"""Kernels in the table below the lines."""
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.title { font-size: 14px; font-weight: 600 } .gap { fill: #eaeef2 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } .gap { fill: #2d333b } }
"""


class Work(NamedTuple):
    """Work of the GPU: a kernel, a copy or a fill, in microseconds."""

    begin: float
    end: float
    name: str

    @property
    def kind(self) -> str:
        """The kind of the kernel, by its name."""
        lower = self.name.lower()
        return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), OTHER)


class Token(NamedTuple):
    """One token: the work of the GPU in order, from its begin to the begin of the next token's."""

    work: tuple[Work, ...]
    end: float

    @property
    def begin(self) -> float:
        """The time of the first kernel."""
        return self.work[0].begin

    @property
    def us(self) -> float:
        """The time of the token."""
        return self.end - self.begin

    @property
    def busy(self) -> list[tuple[float, float]]:
        """The stretches in which the GPU works; kernels that overlap are one."""
        merged: list[tuple[float, float]] = []
        for begin, end, _ in self.work:
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((begin, end))
        return [(begin, min(end, self.end)) for begin, end in merged]

    @property
    def busy_us(self) -> float:
        """The time in which the GPU works."""
        return sum(end - begin for begin, end in self.busy)

    @property
    def gaps(self) -> int:
        """The number of gaps, the one before the next token included."""
        stretches = self.busy
        return len(stretches) - 1 + (stretches[-1][1] < self.end)


def tokens_of(events: Iterable[Mapping[str, Any]]) -> list[Token]:
    """Return the tokens of a profile as the profiler exports it, without the first and the last one.

    Raises:
        ValueError: it has too few marks, or no GPU work between them.
    """
    marks, launched, work = list[float](), dict[Any, float](), list[tuple[Any, Work]]()
    for event in events:
        kind, number = event.get("cat"), event.get("args", {}).get("correlation")
        if kind == "user_annotation" and event["name"] == MARK:
            marks.append(float(event["ts"]))
        elif kind in LAUNCHES and number is not None:
            launched[number] = float(event["ts"])
        elif kind in WORK:
            begin = float(event["ts"])
            work.append((number, Work(begin, begin + float(event["dur"]), str(event["name"]))))
    marks.sort()
    if len(marks) < MIN_TOKENS:
        raise ValueError(f"the profile has {len(marks)} marks of tokens; at least {MIN_TOKENS} are needed")
    by_token: dict[int, list[Work]] = defaultdict(list)
    for number, one in work:
        at = launched.get(number)
        if at is not None and at >= marks[0]:
            by_token[bisect.bisect_right(marks, at) - 1].append(one)
    ordered = [tuple(sorted(by_token[index])) for index in range(len(marks))]
    if not all(ordered[:-1]):
        raise ValueError("between two marks the GPU had no work: the model is not on a GPU, or CUPTI may not profile")
    return [Token(ordered[index], ordered[index + 1][0].begin) for index in range(1, len(marks) - 2)]


def typical(tokens: Sequence[Token]) -> Token:
    """Return the token of median time."""
    middle = statistics.median_low([token.us for token in tokens])
    return next(token for token in tokens if token.us == middle)


def picture(token: Token, title: str) -> str:
    """Return the picture of a token as SVG: lines of kernels by kind, gaps in grey, and the kernels that take longest."""
    lines = min(MAX_LINES, max(1, math.ceil(token.us / US_PER_LINE)))
    per_line = token.us / lines
    scale = (PAGE - 2 * MARGIN) / per_line
    kinds = [*KINDS, OTHER]
    by_kind, by_name = defaultdict[str, float](float), defaultdict[str, list[float]](list)
    for one in token.work:
        by_kind[one.kind] += one.end - one.begin
        by_name[one.name].append(one.end - one.begin)
    longest = sorted(by_name.items(), key=lambda item: (-sum(item[1]), item[0]))[:SHOWN]
    used = [kind for kind in kinds if by_kind[kind]]
    below = TOP + 20 + LINE * lines
    height = below + 20 * len(used) + 18 * len(longest) + 56
    idle = token.us - token.busy_us
    figures = (
        f"{token.us:.0f} us: {len(token.work)} kernels {token.busy_us:.0f} us, {token.gaps} gaps {idle:.0f} us "
        f"({idle / token.us:.0%}); a line is {per_line:.0f} us"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE}" height="{height}" viewBox="0 0 {PAGE} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text x="{MARGIN}" y="22" class="title">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="42" class="small">{figures}</text>',
    ]
    for line in range(lines):
        y = TOP + LINE * line
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="{PAGE - 2 * MARGIN}" height="{BAR}" class="gap"/>')
    for one in token.work:
        colour = COLOURS[kinds.index(one.kind)]
        for line, begin, end in _on_lines(one, token, per_line, lines):
            x, width = MARGIN + begin * scale, max((end - begin) * scale, 0.2)
            label = f"{escape(one.name)}: {one.end - one.begin:.2f} us"
            parts.append(
                f'<rect x="{x:.2f}" y="{TOP + LINE * line}" width="{width:.2f}" height="{BAR}" fill="{colour}">'
                f"<title>{label}</title></rect>"
            )
    y = below
    for kind in used:
        share = by_kind[kind] / token.us
        parts.append(f'<rect x="{MARGIN}" y="{y - 11}" width="12" height="12" fill="{COLOURS[kinds.index(kind)]}"/>')
        parts.append(f'<text x="{MARGIN + 20}" y="{y}">{kind}: {by_kind[kind]:.0f} us, {share:.0%}</text>')
        y += 20
    y += 14
    for name, times in longest:
        shown = escape(name if len(name) <= 110 else name[:109] + "…")
        parts.append(
            f'<text x="{MARGIN}" y="{y}" class="small">{sum(times):.1f} us in {len(times)} calls: {shown}</text>'
        )
        y += 18
    return "\n".join([*parts, "</svg>"]) + "\n"


def _on_lines(one: Work, token: Token, per_line: float, lines: int) -> Iterable[tuple[int, float, float]]:
    """Yield (line, begin, end) of each part of a kernel, from the begin of the line in microseconds."""
    begin, end = one.begin - token.begin, min(one.end, token.end) - token.begin
    for line in range(int(begin / per_line), min(int(end / per_line), lines - 1) + 1):
        first = line * per_line
        yield line, max(begin - first, 0.0), min(end - first, per_line)


def profiled(options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Return the events of a generation by a model with random weights."""
    import torch
    import transformers
    from decode_ways import CONFIGS

    from tilegym_db.models import patch
    from tilegym_db.models.capture import random_prompt
    from tilegym_db.models.gpu_time import exported
    from tilegym_db.models.random_model import load_config, unchecked_model

    if not torch.cuda.is_available():
        raise SystemExit("a profile needs a GPU; --events draws one that was kept")
    name, _, layers = options.model.partition(":")
    config = load_config(CONFIGS / f"{name}.json", int(layers) if layers else None)
    model = unchecked_model(config, "cuda", "bfloat16")
    handle = patch(model) if options.way == "patched" else None
    ids = random_prompt(model, options.batch, options.prompt)

    class Marks(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, _: Any, scores: Any) -> Any:
            with torch.profiler.record_function(MARK):
                return scores

    def generate() -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, min_new_tokens=options.tokens,
            do_sample=False, logits_processor=transformers.LogitsProcessorList([Marks()]),
        )  # fmt: skip
        torch.cuda.synchronize()

    generate()
    generate()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        generate()
    if handle is not None and (decoding := handle.report().decoding) is not None:
        print(decoding.summary(), file=sys.stderr)
    return exported(profiler)


def kept(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that a picture needs, which are a small part of a profile."""
    return [
        {key: event[key] for key in ("cat", "name", "ts", "dur", "args") if key in event}
        for event in events
        if event.get("cat") in (*LAUNCHES, *WORK) or event.get("name") == MARK
    ]


def main() -> None:
    """Profile or read events, draw a token, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a config in benchmarks/configs; ':8' keeps eight layers")
    parser.add_argument("--way", choices=("patched", "stock"), default="patched")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--events", type=Path, help="draw the events of this file, and run no model")
    parser.add_argument("--keep", type=Path, help="write the events of the profile that a picture needs, compressed")
    parser.add_argument("--out", type=Path, required=True, help="the picture, SVG")
    options = parser.parse_args()
    events = json.loads(gzip.decompress(options.events.read_bytes())) if options.events else profiled(options)
    if options.keep:
        options.keep.write_bytes(gzip.compress(json.dumps(kept(events)).encode(), mtime=0))
    try:
        token = typical(tokens_of(events))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    title = f"One token of {options.model}, {options.way}, batch {options.batch} after {options.prompt} tokens"
    options.out.write_text(picture(token, title))
    print(
        f"{options.out}: {token.us:.0f} us, busy {token.busy_us:.0f} us, {token.gaps} gaps, {len(token.work)} kernels"
    )


if __name__ == "__main__":
    main()
