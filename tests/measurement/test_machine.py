from __future__ import annotations

import pytest
import torch
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.measurement import machine
from tilegym_db.measurement.machine import Machine, select_machine

H200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90")


def NO_GPU(index: int) -> None:
    """Find no GPU."""


@pytest.mark.parametrize("asked", ["cpu", "auto"])
def test_without_a_gpu_the_processor_is_measured(asked):
    found = select_machine(asked, find=NO_GPU)
    assert (found.device, found.gpu, found.is_gpu) == ("cpu", "cpu", False)
    assert found.gpu_name
    assert found.libs["torch"].startswith(torch.__version__.partition("+")[0])


def test_versions_include_all_that_selects_a_baselines_kernels(monkeypatch):
    installed = {
        "torch": "2.11.0",
        "flashinfer-python": "0.7.2.post1",
        "nvidia-cutlass-dsl": "4.8.1",
        "pytest": "9.0.0",
    }

    def version(name: str) -> str:
        if name not in installed:
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    assert machine.library_versions() == {name: text for name, text in installed.items() if name != "pytest"}


def test_a_gpu_that_is_not_here_is_refused_with_what_to_do():
    with raises(HardwareError, "gpu_absent", "--gpu h100", "--gpu cpu", "--gpu auto"):
        select_machine("h100", find=NO_GPU)


def test_a_gpu_is_never_taken_for_another():
    def find(index: int) -> machine.Machine:
        return H200

    assert select_machine("auto", find=find) == select_machine("H200", find=find) == H200
    assert select_machine("cpu", find=find).device == "cpu"
    with raises(HardwareError, "gpu_other", "NVIDIA H200", "--gpu h200"):
        select_machine("h100", find=find)


def test_an_unknown_gpu_is_refused_with_a_suggestion():
    with pytest.raises(HardwareError, match=r"'h2000'.*'h200'"):
        select_machine("h2000")
