"""A new operator in a model, from records alone: no line of the package, and no list kept by hand.

No operator here ships with the package. It lives in the user's catalog, as ``docs/how-to/add-an-operator.md`` says; a new
kind of part is one more file beside those of the package.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from user_catalog import DTYPES, Desk

import tilegym_db
from tilegym_db import Catalog, patch, patched
from tilegym_db.models import parts
from tilegym_db.models.upstream_code import fingerprint
from tilegym_db.paths import shipped_root
from tilegym_db.resolver.resolve import resolve


class MeanAbsNorm(torch.nn.Module):
    """A norm by the mean magnitude, with a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(size)
        self.weight = torch.nn.Parameter(torch.randn(size, generator=generator))
        self.shift = torch.nn.Parameter(torch.randn(size, generator=generator))
        self.floor = 1e-3

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        wide = activation.float()
        scaled = wide / (wide.abs().mean(-1, keepdim=True) + self.floor)
        return self.weight * scaled.to(activation.dtype) + self.shift


class Softcap(torch.nn.Module):
    """What no part of the package knows: a bound on magnitudes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cap = 3.0

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return self.cap * torch.tanh(scores / self.cap)


class Block(torch.nn.Module):
    """A tiny model: projections around the new module."""

    def __init__(self, made: Callable[[int], torch.nn.Module], size: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = torch.nn.Linear(size, size), made(size), torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.inner(self.first(x)))
        return out


NORM = {
    "name": "mean_abs_norm",
    "version": "1.0.0",
    "op_type": "norm",
    "dtypes": DTYPES,
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["M", "N"], "dtype": "T"},
        "weight": {"shape": ["N"], "dtype": "T"},
        "bias": {"shape": ["N"], "dtype": "T"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
    "serving": {
        "part": "norm",
        "code": [
            {"fingerprint": fingerprint(MeanAbsNorm.forward), "attributes": {"bias": "shift", "eps": "floor"}},
        ],
        "rows": "M",
    },
}
NORM_BODY = """\
    wide = x.float()
    scaled = wide / (wide.abs().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype) + bias
"""
CAP = {
    "name": "tanh_cap",
    "version": "1.0.0",
    "op_type": "activation",
    "dtypes": DTYPES,
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "T"}, "cap": {"shape": None, "dtype": "float32"}},
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
}
CAP_SERVING = {"part": "softcap", "code": [{"fingerprint": fingerprint(Softcap.forward)}], "rows": "M"}
CAP_BODY = "    return cap * torch.tanh(x / cap)\n"
# The one file of a new kind of part.
CAP_PART = '''
"""Bounds on magnitudes: modules with a ``cap``."""

import functools

import torch

from tilegym_db.models.found import ModuleOfPart, MatchCandidates, grouped, methods
from tilegym_db.models.call_site import are_rows, rows


def find(model, known, others):
    return grouped("softcap", [ModuleOfPart(module) for module in model.modules() if hasattr(module, "cap")])


def candidates(found, known):
    cls = found.module_class
    matches = known.look_up("softcap", cls.forward, methods(cls), "its forward", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found, module, match):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return {"x": x, "cap": module.cap}, (type(module).forward(module, x),)


def forward(stock, calls):
    ((_, site),) = calls

    @functools.wraps(stock)
    def forward(self, x):
        if torch.compiler.is_compiling() or not are_rows(x) or site.falls_back(self.training, x):
            return stock(self, x)
        out = site.ask(self.training, rows(x), self.cap)
        return stock(self, x) if out is None else out.view(x.shape)

    return forward
'''


@pytest.fixture
def desk(home: Path) -> Desk:
    return Desk(home)


def served(model: torch.nn.Module, x: torch.Tensor, catalog: Catalog) -> dict[str, int]:
    """Calls by a kernel in one patched forward, whose bits must be those of stock."""
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=catalog) as handle:
            assert torch.equal(model(x), stock)
        assert torch.equal(model(x), stock)
    return handle.report().hits()


# -- a Definition of a known kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_of_the_users_own_is_served_by_its_records_alone(dtype: torch.dtype, desk: Desk) -> None:
    desk.add(NORM, NORM_BODY)
    model, x = Block(MeanAbsNorm).to(dtype).eval(), torch.randn(2, 3, 64).to(dtype)
    assert served(model, x, desk.catalog) == {"mean_abs_norm": 1}


def test_it_is_served_in_compiled_code_too(desk: Desk) -> None:
    desk.add(NORM, NORM_BODY)
    model, x = Block(MeanAbsNorm).eval(), torch.randn(2, 3, 64)
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=desk.catalog) as handle:
            assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), stock)
    torch.compiler.reset()
    assert handle.report().hits() == {"mean_abs_norm": 1}


def test_its_code_must_compute_what_it_says(desk: Desk) -> None:
    desk.add(NORM, NORM_BODY.replace("+ eps", "+ 2 * eps"))
    (site,) = patch(Block(MeanAbsNorm), catalog=desk.catalog, dry_run=True).report().sites
    assert site.reason == "the results of its probe are not the bits of mean_abs_norm"


def test_an_attribute_that_the_module_does_not_have_is_named(desk: Desk) -> None:
    code = [{"fingerprint": fingerprint(MeanAbsNorm.forward), "attributes": {"bias": "offset", "eps": "floor"}}]
    desk.add(NORM, NORM_BODY, {**NORM["serving"], "code": code})  # type: ignore[dict-item]
    (site,) = patch(Block(MeanAbsNorm), catalog=desk.catalog, dry_run=True).report().sites
    assert site.reason == "it has no offset, which serving.code of mean_abs_norm names"


class Summed(Block):
    """A residual sum before the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = x + y
        x = y
        y = self.inner(y)
        return self.last(y) + x


def test_sum_before_an_undescribed_norm_stays_stock(desk: Desk) -> None:
    desk.add(NORM, NORM_BODY)
    model = Summed(MeanAbsNorm).eval()
    reasons = {site.kind: site.reason for site in patch(model, catalog=desk.catalog, dry_run=True).report().sites}
    assert reasons == {
        "norm": "dry run",
        "add_norm": "no definition describes a residual sum and mean_abs_norm of it",
    }
    assert served(model, torch.randn(2, 3, 64), desk.catalog) == {"mean_abs_norm": 1}


def test_report_prints_the_fingerprint_for_a_new_definition(build: Any, desk: Desk) -> None:
    model = build()
    model.model.norm.__class__ = type("OwnNorm", (type(model.model.norm),), {"forward": own_norm})
    sites = patch(model, catalog=desk.catalog, dry_run=True).report().sites
    (reason,) = [site.reason for site in sites if site.module_class == "OwnNorm"]
    assert reason.startswith(f"its norm forward is no variant that is known (fingerprint {fingerprint(own_norm)}): ")


def own_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True))
    return out


# -- an operator that is only in the catalog --------------------------------------------------------------------------


def test_operator_of_no_model_resolves_from_the_catalog(desk: Desk) -> None:
    desk.add(CAP, CAP_BODY)
    x, out = torch.randn(5, 64), torch.empty(5, 64)
    found = resolve("tanh_cap", like=(x, 3.0), catalog=desk.catalog)
    found(x, 3.0, out)
    assert found.solution.name == "tanh_cap_cpu"
    assert torch.equal(out, 3.0 * torch.tanh(x / 3.0))


# -- a new kind of part -----------------------------------------------------------------------------------------------


def test_a_new_kind_of_part_is_one_file(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.add(CAP, CAP_BODY, CAP_SERVING)
    model, x = Block(Softcap).eval(), torch.randn(2, 3, 64)
    with pytest.warns(RuntimeWarning, match=r"tanh_cap.*serving\.part.*'softcap'"):
        before = patch(torch.nn.Sequential(model, MeanAbsNormed()), catalog=desk.catalog, dry_run=True).report()
    assert "softcap" not in {site.kind for site in before.sites}
    (tmp_path / "softcap.py").write_text(CAP_PART)
    monkeypatch.setattr(parts, "__path__", [*parts.__path__, str(tmp_path)])
    monkeypatch.setattr(parts, "PARTS", parts.listed())
    assert served(model, x, desk.catalog) == {"tanh_cap": 1}


class MeanAbsNormed(torch.nn.Module):
    """Something that looks like a norm, so that there is a call site to report on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean())


def test_the_parts_are_the_files_of_their_package() -> None:
    folder = Path(parts.__path__[0])
    assert set(parts.PARTS) == {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_no_operator_is_named_in_the_code_that_serves_them() -> None:
    names, found = set(Catalog((shipped_root(),)).definitions), {}
    package = Path(tilegym_db.__file__).parent
    for path in sorted([*(package / "models").rglob("*.py"), *(package / "resolver").rglob("*.py")]):
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        named = {value for value in constants if isinstance(value, str)} - {
            "softmax",
            "layer_norm",
            "mamba2_chunk_scan",
            "dropout",
            "embedding",
        }  # functions and arguments of PyTorch and transformers
        if names & named:
            found[path.name] = sorted(names & named)
    assert found == {}
