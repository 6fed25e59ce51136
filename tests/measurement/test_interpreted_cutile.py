"""cuTile kernels on this machine's processor, through every gate: right ones pass, and wrong ones do not."""

from __future__ import annotations

import pytest

from tilegym_db.measurement.benchmark import bench
from tilegym_db.records import Trace

pytest.importorskip("cuda.tile")

RIGHT = """
import cuda.tile as ct
import torch

@ct.kernel
def scale(x, weight, factor: float, out, TILE: ct.Constant[int]):
    row, columns = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    values = ct.gather(x, (row, columns)).astype(ct.float32) * ct.gather(weight, columns).astype(ct.float32) * factor
    ct.scatter(out, (row, columns), values.astype(out.dtype))

def run(x, weight, factor, out):
    M, N = x.shape
    tile = 1 << (N - 1).bit_length()
    if M > 0:
        ct.launch(torch.cuda.current_stream(), (M, 1, 1), scale, (x, weight, factor, out, tile))
"""
WRONG = {
    "a last column that is left out": ("1 << (N - 1).bit_length()", "max(1, 1 << (N.bit_length() - 1))"),
    "the weight of another column": ("ct.gather(weight, columns)", "ct.gather(weight, (columns + 1) % x.shape[1])"),
    "a factor that is rounded first": ("* factor\n", "* ct.astype(factor, ct.float8_e4m3fn).astype(ct.float32)\n"),
    "rows that run into each other": ("ct.scatter(out, (row, columns)", "ct.scatter(out, (row // 2, columns)"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory, make_catalog) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("session")
    language = {"language": "cutile"}
    sources = {"row_scale_right": (RIGHT, language)}
    for number, (old, new) in enumerate(WRONG.values()):
        assert old in RIGHT
        sources[f"row_scale_wrong_{number}"] = (RIGHT.replace(old, new), language)
    catalog = make_catalog(folder, sources, ({"axes": {"M": 6, "N": 20}},))
    report = bench(tuple(sources), devices="cpu", catalog=catalog, store_home=folder / "home")
    return {trace.solution: trace for trace in report.traces}


@pytest.mark.turn("tilegym_db/backends/cutile")  # interprets a kernel
def test_a_right_kernel_passes_without_a_time(verdicts):
    trace = verdicts["row_scale_right"]
    assert (trace.tier, trace.status, trace.performance) == ("interpreter", "PASSED", None), trace.reason


@pytest.mark.turn("tilegym_db/backends/cutile")  # interprets kernels; tests/backends has their operations daily
@pytest.mark.parametrize("number", range(len(WRONG)), ids=list(WRONG))
def test_a_wrong_kernel_is_found(verdicts, number):
    trace = verdicts[f"row_scale_wrong_{number}"]
    assert (trace.tier, trace.status) in {("interpreter", "INCORRECT_NUMERICAL"), ("interpreter", "RUNTIME_ERROR")}
