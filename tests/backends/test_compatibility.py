from __future__ import annotations

import pytest

from tilegym_db.backends.toolchains import installed_versions, misfits, torch_requirements

TOGETHER = {
    "nvidia-cuda-tileiras": "13.4.92",
    "nvidia-nvvm": "13.4.92",
    "nvidia-cuda-nvcc": "13.4.59",
    "nvidia-cuda-crt": "13.4.92",
    "torch": "2.15.0+cu132",
    "triton": "3.9.0",
}
PINNED = ('triton==3.9.0; platform_system == "Linux"', "filelock", 'cuda-toolkit[nvcc]; extra == "nvcc"')


def test_packages_of_one_release_fit_together() -> None:
    assert misfits(TOGETHER, PINNED) == []


def test_what_is_installed_here_fits_together() -> None:
    assert misfits(installed_versions(), torch_requirements()) == []


def test_tileiras_without_hopper_support_is_named_with_its_fix() -> None:
    (misfit,) = misfits(TOGETHER | dict.fromkeys(tuple(TOGETHER)[:4], "13.2.86"))
    assert all(fact in misfit.detail for fact in ("13.2.86", "sm_90", "13.3"))
    assert misfit.fix == "pip install -U nvidia-cuda-tileiras nvidia-nvvm nvidia-cuda-nvcc nvidia-cuda-crt"


@pytest.mark.parametrize("part", ["nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt"])
def test_part_of_another_release_is_named_and_pinned_to_tileiras(part: str) -> None:
    (misfit,) = misfits(TOGETHER | {part: "13.2.51"})
    assert misfit.packages == ("nvidia-cuda-tileiras", part)
    assert f"{part} 13.2.51" in misfit.detail
    assert f"'{part}==13.4.*'" in misfit.fix


def test_without_cutile_the_parts_of_nvcc_are_held_against_nvcc() -> None:
    (misfit,) = misfits({"nvidia-cuda-nvcc": "13.4.92", "nvidia-cuda-crt": "13.5.1"})
    assert misfit.packages == ("nvidia-cuda-nvcc", "nvidia-cuda-crt")


def test_a_triton_that_this_pytorch_was_not_built_for_is_named() -> None:
    (misfit,) = misfits(TOGETHER | {"triton": "3.6.0"}, PINNED)
    assert all(fact in misfit.detail for fact in ("torch 2.15.0+cu132", "triton==3.9.0", "3.6.0"))
    assert misfit.fix == "pip install 'triton==3.9.0'"


@pytest.mark.parametrize("versions", [{}, {"torch": "2.15.0"}, {"nvidia-nvvm": "unknown"}, {"triton": "3.9.0"}])
def test_nothing_is_said_of_what_is_not_installed(versions: dict[str, str]) -> None:
    assert misfits(versions, PINNED) == []
