"""What a Solution leaves behind in its process is found, and what it keeps to itself is not held against it."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tilegym_db.sandbox.program import StateWatch
from tilegym_db.sandbox.scan.tables import reviewed_libraries


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Everything as it was, whatever a test leaves."""
    dtype, gradients, threads, limit = (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), sys.getrecursionlimit(),
    )  # fmt: skip
    searches, states = torch.backends.cudnn.benchmark, (torch.get_rng_state(), random.getstate())
    with warnings.catch_warnings():
        yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)
    torch.set_num_threads(threads)
    sys.setrecursionlimit(limit)
    torch.backends.cudnn.benchmark = searches
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    os.environ.pop("LEFT_BEHIND", None)


def watch(*, compiles: bool = False) -> StateWatch:
    found = StateWatch()
    found.begin(["torch"], compiles=compiles)
    return found


def search_for_algorithms() -> None:
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "a draw": (lambda: torch.rand(1), "torch's random state"),
    "a seed": (lambda: torch.manual_seed(7), "torch's random state"),
    "a draw of Python's": (random.random, "Python's random state"),
    "a variable": (lambda: os.environ.__setitem__("LEFT_BEHIND", "1"), "the environment"),
    "a filter": (lambda: warnings.simplefilter("error"), "warnings.filters"),
    "a default dtype": (lambda: torch.set_default_dtype(torch.float64), "torch.get_default_dtype"),
    "no gradients": (lambda: torch.set_grad_enabled(False), "torch.is_grad_enabled"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch.get_num_threads"),
    "a switch of a backend": (search_for_algorithms, "torch.backends.cudnn.benchmark"),
    "a recursion limit": (lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 7), "recursion limit"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_behind_is_named_however_often_one_asks(what: str) -> None:
    leave, name = LEFT[what]
    watched = watch()
    assert watched.changes() == []
    leave()
    for _ in range(2):
        assert [sentence.partition(" is ")[0] for sentence in watched.changes()] == [name]


def test_changes_before_a_solution_is_loaded_are_not_its_fault() -> None:
    torch.rand(1)
    os.environ["LEFT_BEHIND"] = "1"
    assert watch().changes() == []


def test_own_generator_and_restored_state_are_no_change() -> None:
    watched = watch()
    torch.rand(3, generator=torch.Generator())
    random.Random(1).random()
    with torch.no_grad(), torch.inference_mode(), contextlib.suppress(RuntimeError):
        torch.ones(1).add_(1)
    assert watched.changes() == []


def test_a_filter_of_a_library_for_its_own_warnings_is_no_change() -> None:
    class OfALibrary(UserWarning):
        pass

    watched = watch()
    warnings.simplefilter("once", OfALibrary)
    assert watched.changes() == []


def test_torch_compile_may_only_change_its_lasting_settings() -> None:
    watched = watch(compiles=True)
    sys.setrecursionlimit(sys.getrecursionlimit() + 7)
    os.environ["LEFT_BEHIND"] = "1"
    assert watched.changes() == []
    torch.rand(1)
    assert len(watched.changes()) == 1


def test_missing_language_is_left_to_the_loader_to_name() -> None:
    found = StateWatch()
    found.begin(["no_such_language"], compiles=False)
    assert found.changes() == []


def test_import_effects_of_reviewed_libraries_are_not_blamed(tmp_path: Path, monkeypatch) -> None:
    """As Liger-Kernel does, which every baseline that calls it was refused for."""
    (tmp_path / "sets_up.py").write_text("import random, warnings\nrandom.random()\nwarnings.simplefilter('error')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = StateWatch()
    found.begin(["torch", "sets_up"], compiles=False)
    assert found.changes() == []
    random.random()
    assert len(found.changes()) == 1


def test_only_libraries_that_were_read_are_imported_ahead() -> None:
    assert reviewed_libraries(("torch>=2.6", "liger-kernel>=0.8.5", "some-kernels")) == ["liger_kernel"]
