"""The picture of one decoded token, from events as the profiler writes them."""

from __future__ import annotations

import gzip
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilegym_db.paths import shipped_root

NUMBERS = iter(range(1, 10**6))


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import token_timeline

    module: ModuleType = token_timeline
    return module


def mark(at: float) -> dict[str, Any]:
    name = "tilegym_db::token"
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 41, "ts": at, "dur": 1.0}


def launched(at: float, *kernels: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Return a launch and its kernels (name, begin, microseconds): several if the launch is that of a graph."""
    number = next(NUMBERS)
    name = "cudaGraphLaunch" if len(kernels) > 1 else "cudaLaunchKernel"
    launch = {
        "ph": "X", "cat": "cuda_runtime", "name": name, "pid": 7, "tid": 41, "ts": at, "dur": 3.0,
        "args": {"correlation": number},
    }  # fmt: skip
    work = [
        {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": begin, "dur": us,
         "args": {"correlation": number, "stream": 7}}
        for kernel, begin, us in kernels
    ]  # fmt: skip
    return [*work, launch]


def generation(*starts: float) -> list[dict[str, Any]]:
    """Return a profile whose tokens start on the GPU at these times: an argmax, then a graph of two products and a norm.

    The host is far ahead: it launches a token before the GPU has begun the one before.
    """
    events = launched(1.0, ("prefill_gemm", 2.0, 400.0))
    for count, start in enumerate(starts):
        host = 100.0 + 10 * count
        events += [
            mark(host),
            *launched(host + 2, ("argmax_kernel", start, 5.0)),
            *launched(
                host + 5,
                ("gemm_kernel", start + 10, 60.0),
                ("rms_norm<bfloat16>", start + 70, 4.0),
                ("gemm_kernel", start + 75, 20.0),
            ),
        ]
    return [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}, *events]


STARTS = (1000.0, 1110.0, 1230.0, 1400.0, 1500.0, 1600.0)


def test_work_belongs_to_the_token_of_its_launch(timeline: ModuleType) -> None:
    tokens = timeline.tokens_of(generation(*STARTS))
    assert [(token.begin, token.end) for token in tokens] == [(1110, 1230), (1230, 1400), (1400, 1500)]
    assert [len(token.work) for token in tokens] == [4, 4, 4]


def test_gaps_are_what_no_kernel_covers(timeline: ModuleType) -> None:
    token = timeline.tokens_of(generation(*STARTS))[0]
    assert (token.us, token.busy_us, token.gaps) == (120, 89, 3)
    assert token.busy == [(1110, 1115), (1120, 1184), (1185, 1205)]


def test_kernels_that_overlap_count_once(timeline: ModuleType) -> None:
    work = (timeline.Work(0, 10, "a"), timeline.Work(2, 5, "b"), timeline.Work(8, 12, "c"))
    assert timeline.Token(work, 12).busy_us == 12
    assert timeline.Token(work, 12).gaps == 0


def test_the_token_of_median_time_is_drawn(timeline: ModuleType) -> None:
    assert timeline.typical(timeline.tokens_of(generation(*STARTS))).us == 120


@pytest.mark.parametrize(
    "events", [generation(*STARTS[:2]), [one for one in generation(*STARTS) if one.get("cat") != "kernel"]]
)
def test_a_profile_without_tokens_is_refused(events: list[dict[str, Any]], timeline: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"marks|no work"):
        timeline.tokens_of(events)


def test_the_picture_has_each_kernel_on_its_lines(timeline: ModuleType) -> None:
    token = timeline.Token(
        (timeline.Work(0, 100, "gemm"), timeline.Work(150, 500, "fmha"), timeline.Work(700, 799, "copy")), 800
    )
    root = ElementTree.fromstring(timeline.picture(token, "a < b"))
    drawn = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    names = [one[0].text for one in drawn]
    assert names == ["gemm: 100.00 us", "fmha: 350.00 us", "fmha: 350.00 us", "copy: 99.00 us"]  # two lines of 400 us
    width = timeline.PAGE - 2 * timeline.MARGIN
    assert sum(float(one.get("width")) for one in drawn) == pytest.approx(width * 549 / 400, abs=0.1)
    assert all(
        float(one.get("x")) >= timeline.MARGIN
        and float(one.get("x")) + float(one.get("width")) <= timeline.MARGIN + width + 0.3
        for one in drawn
    )
    text = " ".join(one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "a < b" in text
    assert "800 us: 3 kernels 549 us, 3 gaps 251 us (31%)" in text


def test_kept_events_draw_the_same_picture(
    timeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events, pictures = generation(*STARTS), []
    for number, one in enumerate((events, timeline.kept(events))):
        file, out = tmp_path / f"{number}.json.gz", tmp_path / f"{number}.svg"
        file.write_bytes(gzip.compress(json.dumps(one).encode()))
        monkeypatch.setattr(sys, "argv", ["token_timeline.py", "llama", "--events", str(file), "--out", str(out)])
        timeline.main()
        pictures.append(out.read_text())
    assert pictures[0] == pictures[1]
    assert "120 us, busy 89 us, 3 gaps, 4 kernels" in capsys.readouterr().out
