"""The public way in: ``resolve``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from raising import raises

from tilegym_db.errors import HardwareError, NoSolutionError, NotFoundError, UsageError
from tilegym_db.resolver.resolve import call_site, resolve

FLOAT32 = {"dtypes": {"T": "float32"}}


def test_real_arguments_resolve_and_run(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel(config={"BIAS": 1})
    x, weight, out = torch.ones(4, 8), torch.ones(8), torch.zeros(4, 8)
    resolved = resolve("scale_rows", like=(x, weight, 0.5), catalog=shop.catalog)
    assert (resolved.solution.name, resolved.config, resolved.is_stock) == ("scale_rows_kernel", {"BIAS": 1}, False)
    assert resolved.evidence.candidate is not None
    assert resolved.evidence.candidate.latency_us == 50.0
    assert [str(candidate) for candidate, _ in resolved.rejected] == ["scale_rows_stock"]
    resolved(x, weight, 0.5, out)
    assert out.eq(2.5).all()
    assert resolved.report().kernel_calls == 1


def test_axes_and_dtypes_resolve_to_the_same(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    resolved = resolve("scale_rows", axes={"M": 4, "N": 8}, gpu="cpu", catalog=shop.catalog, **FLOAT32)
    assert resolved.solution.name == "scale_rows_kernel"


def test_dtypes_of_torch_are_taken_and_short_names_explained(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    asked = {"axes": {"M": 4, "N": 8}, "gpu": "cpu", "catalog": shop.catalog}
    assert resolve("scale_rows", dtypes={"T": torch.float32}, **asked).solution.name == "scale_rows_kernel"
    with raises(UsageError, "dtype_not_allowed", "Did you mean 'float32'?"):
        resolve("scale_rows", dtypes={"T": "fp32"}, **asked)


def test_sizes_of_numpy_are_taken(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    sizes = {"M": numpy.int64(4), "N": numpy.uint8(8)}
    resolved = resolve("scale_rows", axes=sizes, gpu="cpu", catalog=shop.catalog, **FLOAT32)
    assert resolved.solution.name == "scale_rows_kernel"
    for wrong in (numpy.float32(4), True, "4"):
        with raises(UsageError, "axis_size_invalid"):
            resolve("scale_rows", axes={"M": wrong, "N": 8}, gpu="cpu", catalog=shop.catalog, **FLOAT32)


def test_numbers_of_numpy_are_held_to_the_verified_range() -> None:
    call: dict[str, Any] = {"axes": {"M": 4, "N": 4096}, "dtypes": {"T": "bfloat16"}, "gpu": "h200"}
    assert not resolve("rms_norm", **call, scalars={"eps": numpy.float64(1e-5)}).is_stock
    for outside in (1, 1.0, numpy.int64(1), numpy.float32(1.0)):
        assert resolve("rms_norm", **call, scalars={"eps": outside}).is_stock
    for wrong in (numpy.True_, [1e-5], torch.tensor(1e-5)):
        with raises(UsageError, "scalar_expected"):
            resolve("rms_norm", **call, scalars={"eps": wrong})


def test_number_of_a_device_is_no_kind_of_gpu(shop: Any) -> None:
    with raises(UsageError, "argument_type", "'h200'"):
        resolve("scale_rows", axes={"M": 4, "N": 8}, gpu=0, catalog=shop.catalog, **FLOAT32)  # type: ignore[arg-type]


def test_where_nothing_is_verified_the_stock_solution_runs(shop: Any, stock: Any) -> None:
    x, weight, out = torch.ones(4, 8), torch.ones(8), torch.zeros(4, 8)
    resolved = resolve("scale_rows", like=(x, weight, 0.5), catalog=shop.catalog)
    assert (resolved.solution.name, resolved.is_stock) == ("scale_rows_stock", True)
    resolved(x, weight, 0.5, out)
    assert out.eq(1.5).all()


def test_the_answer_for_another_gpu_never_runs_here(shop: Any, publish_kernel: Any, kernel: Any) -> None:
    candidates = [shop.candidate(kernel, config={"BIAS": 1})]
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, candidates, **FLOAT32)], gpu="h200")
    publish_kernel(speedup_ci_low=1.0)
    resolved = resolve("scale_rows", axes={"M": 4, "N": 8}, gpu="h200", catalog=shop.catalog, **FLOAT32)
    assert resolved.solution.name == "scale_rows_kernel"
    out = torch.zeros(4, 8)
    resolved(torch.ones(4, 8), torch.ones(8), 0.5, out)
    assert out.eq(1.5).all()


def test_without_kernel_and_stock_the_reasons_are_given(shop: Any, kernel: Any) -> None:
    with raises(NoSolutionError, "no_solution", "b200", "scale_rows_kernel") as caught:
        resolve("scale_rows", axes={"M": 4, "N": 8}, gpu="b200", catalog=shop.catalog, **FLOAT32)
    assert caught.value.exit_code == 3


def test_training_resolves_to_stock(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    resolved = resolve("scale_rows", axes={"M": 4, "N": 8}, gpu="cpu", mode="training", catalog=shop.catalog, **FLOAT32)
    assert resolved.is_stock


@pytest.mark.parametrize(
    ("name", "request_changes", "error", "fact"),
    [
        ("scale_row", {}, NotFoundError, "'scale_rows'"),
        ("scale_rows", {"gpu": "h2000"}, HardwareError, "'h2000'"),
        ("scale_rows", {"like": (torch.ones(1),)}, UsageError, "like="),
        ("scale_rows", {"axes": None, "dtypes": None, "like": (1, 2, 3)}, UsageError, "'x' of scale_rows"),
        ("scale_rows", {"axes": None, "dtypes": None, "like": {"x": 1}}, UsageError, "(x, weight, eps), not dict"),
        (None, {}, UsageError, "NoneType"),
    ],
)
def test_a_wrong_request_is_refused(
    shop: Any, stock: Any, name: str, request_changes: dict[str, Any], error: type[Exception], fact: str
) -> None:
    request = {"axes": {"M": 4, "N": 8}, **FLOAT32, **request_changes}
    with pytest.raises(error, match=re.escape(fact)):
        resolve(name, catalog=shop.catalog, **request)


def test_a_language_that_is_not_installed_is_left_to_stock(
    shop: Any, publish_kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegym_db.backends import toolchains

    publish_kernel()
    call = (torch.ones(4, 8), torch.ones(8), 0.5, torch.zeros(4, 8))
    assert call_site(shop.definition("scale_rows"), shop.catalog).attempt(*call)
    absent = toolchains.ToolchainStatus(False, detail="no package", fix="pip install it")
    monkeypatch.setattr(toolchains, "toolchain_status", lambda language: absent)
    assert not call_site(shop.definition("scale_rows"), shop.catalog).attempt(*call)
    resolved = resolve("scale_rows", like=call, catalog=shop.catalog)
    reasons = {candidate.solution: reason for candidate, reason in resolved.rejected}
    assert reasons["scale_rows_kernel"] == "python cannot run here: no package. Try: pip install it"


def test_asking_needs_no_torch(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel()
    program = f"""
import sys
from pathlib import Path
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.resolve import call_site, resolve
answer = resolve("scale_rows", axes={{"M": 4, "N": 8}}, dtypes={{"T": "float32"}}, gpu="cpu",
                 catalog=Catalog((Path({str(shop.root)!r}),)))
print(answer.solution.name, sorted({{"torch", "duckdb"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "scale_rows_kernel []\n"
