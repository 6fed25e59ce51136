"""FlashInfer-Bench's own code reads our export. Collected where its package is installed (see conftest.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilegym_db.catalog import Catalog
from tilegym_db.interchange.flashinfer_export import BlobFolder, Export, blob_of, build_export, drawn_together
from tilegym_db.interchange.importing import folder_beside, write_tree
from tilegym_db.paths import shipped_root
from tilegym_db.records import Trace, Workload

HAS_VALIDATE = importlib.util.find_spec("flashinfer_bench.data.validate") is not None
"""Release 0.1.2 has none; later sources do."""
SMALL = 16 << 10
"""Bytes of a blob that is drawn again to compare."""


@pytest.fixture(scope="module")
def on_disk(traces: list[Trace], shipped: Catalog, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Export]:
    """The whole shipped catalog, with its traces and with blobs as by default."""
    root = tmp_path_factory.mktemp("flashinfer") / "out"
    with folder_beside(root) as folder:
        whole = build_export(shipped, traces, blobs=BlobFolder(folder))
        write_tree(root, whole.files, whole.blobs | whole.drawn)
    return root, whole


def test_its_loader_takes_the_whole_export(on_disk: tuple[Path, Export]) -> None:
    from flashinfer_bench.data import TraceSet

    root, export = on_disk
    loaded = TraceSet.from_path(str(root))
    groups = (loaded.solutions, loaded.workloads, loaded.traces)
    counts = [len(loaded.definitions), *(sum(map(len, group.values())) for group in groups)]
    assert counts == [export.counts[kind] for kind in ("definition", "solution", "workload", "trace")]


def test_its_loader_reads_every_blob_as_it_was_drawn(on_disk: tuple[Path, Export], shipped: Catalog) -> None:
    from flashinfer_bench.bench.utils import load_safetensors
    from flashinfer_bench.data import TraceSet

    root, export = on_disk
    loaded = TraceSet.from_path(str(root))
    ours = {item.uuid: item for item in shipped.all_workloads()}
    read = 0
    for name, lines in loaded.workloads.items():
        for line in lines:
            held = [given for given in line.workload.inputs.values() if given.type == "safetensors"]
            if held:
                tensors = load_safetensors(loaded.definitions[name], line.workload, root)  # checks shapes and dtypes
                assert {key: tensor.dtype for key, tensor in tensors.items()} == {
                    key: tensor.dtype for key, tensor in load_file(root / held[0].path).items()
                }
                read += 1
                if (root / held[0].path).stat().st_size < SMALL:
                    assert_drawn(shipped, ours[line.workload.uuid], tensors)
    assert read == export.counts["blob"] > 500


def assert_drawn(shipped: Catalog, item: Workload, tensors: dict[str, torch.Tensor]) -> None:
    source = shipped.definition(item.definition)
    blob = blob_of(source, item, source.bind_dtypes(item.dtypes), "", "")
    assert blob is not None
    drawn = drawn_together(blob, shipped.roots)
    assert set(drawn) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), drawn[name].view(torch.uint8)), (source.name, name)


def test_its_apply_runs_the_export_on_the_inputs_of_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(shipped_root()))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    from benchmarks.against_flashinfer_bench import runner

    names = ["aux_fi", "engram_gate_fwd_save"]  # ids from a blob; published errors above a thousand
    trace_set = runner.exported(tmp_path / "export", "h200", names)
    runner.narrowed(trace_set, names, definitions=2, workloads=1)
    for name, lines in trace_set.traces.items():  # of stock code alone, which a CPU can run
        trace_set.traces[name] = [line for line in lines if "_stock_" in line.solution]
    found = list(runner.applied(trace_set, "cpu"))
    assert [good for good, _ in found] == [True, True], found


if HAS_VALIDATE:

    def test_its_validate_finds_no_error_in_the_whole_export(on_disk: tuple[Path, Export], tmp_path: Path) -> None:
        from flashinfer_bench.data.validate import validate_dataset

        reports = str(tmp_path / "reports")
        report = validate_dataset(dataset=str(on_disk[0]), disable_gpu=True, output_folder=reports, outputs=["json"])
        assert {name for name, item in report.definitions.items() if item.status == "error"} == set()
