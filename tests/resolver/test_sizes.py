"""A call whose size only a scalar states: one point of the table, however the call is spelled."""

from __future__ import annotations

import pytest
import torch

from tilegym_db.errors import UsageError
from tilegym_db.records.call import Call
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.resolver.resolve import make_request, resolve

BEST = {
    "axes": {"M": {"type": "var"}, "E": {"type": "var"}, "K": {"type": "var", "scalar": "top_k"}},
    "inputs": {"z": {"shape": ["M", "E"], "dtype": "float32"}, "top_k": {"shape": None, "dtype": "int64"}},
    "outputs": {"out": {"shape": ["M", "K"], "dtype": "float32"}},
    "constraints": ["E >= K"],
    "reference": "def run(z, top_k):\n    return z.topk(top_k).values\n",
}
STOCK = "def run(z, top_k):\n    return z.topk(top_k).values\n"
KERNEL = "def run(z, top_k, out):\n    out.copy_(z.topk(top_k).values)\n"


@pytest.fixture
def published(shop):
    """``best`` with stock code, and a kernel that is verified for 8 rows of 16 with K = 2 and K = 4."""
    shop.define("best", **BEST)
    stock = shop.add("best", "best_stock", STOCK, role="baseline", provides="stock", destination_passing_style=False)
    kernel = shop.add("best", "best_kernel", KERNEL)
    candidates = [shop.candidate(kernel), shop.candidate(stock, 15.0, speedup=1.0, speedup_ci_low=1.0)]
    points = [({"M": 8, "E": 16, "K": k}, {"top_k": k}) for k in (2, 4)]
    shop.publish([shop.entry("best", axes, candidates, scalars=scalars) for axes, scalars in points])
    return shop


def test_a_call_is_served_without_outputs_to_read_its_size_from(published):
    z, out = torch.randn(8, 16), torch.zeros(8, 4)
    resolved = resolve("best", like=(z, 4), gpu="cpu", catalog=published.catalog)
    assert (resolved.request.call.axes, resolved.solution.name) == ({"M": 8, "E": 16, "K": 4}, "best_kernel")
    resolved(z, 4, out)
    assert torch.equal(out, z.topk(4).values)
    assert resolved.report().calls == 1


@pytest.mark.parametrize(
    "call",
    [
        {"axes": {"M": 8, "E": 16, "K": 4}},
        {"axes": {"M": 8, "E": 16}, "scalars": {"top_k": 4}},
        {"axes": {"M": 8, "E": 16, "K": 4}, "scalars": {"top_k": 4}},
    ],
)
def test_axis_and_scalar_are_one_size_in_a_request(published, call):
    resolved = resolve("best", **call, gpu="cpu", catalog=published.catalog)
    assert (resolved.request.call.axes["K"], resolved.request.call.scalars["top_k"]) == (4, 4)
    assert resolved.solution.name == "best_kernel"


def test_size_is_judged_by_the_nearest_inside_the_range(published):
    def at(size):
        return resolve("best", axes={"M": 8, "E": 16, "K": size}, gpu="cpu", catalog=published.catalog)

    assert at(3).solution.name == "best_kernel"
    assert at(5).is_stock
    assert "K=5 is outside the measured range 2..4" in at(5).evidence.reason


def test_each_size_is_a_call_of_its_own_at_a_call_site(published):
    z = torch.randn(8, 16)
    resolved = resolve("best", like=(z, 4), gpu="cpu", catalog=published.catalog)
    for size in (4, 2, 5, 4):
        out = torch.zeros(8, size)
        resolved(z, size, out)
        assert torch.equal(out, z.topk(size).values)
    with pytest.raises(UsageError, match=r"'out' has size 3.*K = 4"):
        resolve("best", like=(z, 4, torch.zeros(8, 3)), gpu="cpu", catalog=published.catalog)


def test_a_request_that_contradicts_itself_is_refused(published):
    definition = published.definition("best")
    with pytest.raises(UsageError, match=r"K=4.*'top_k'"):
        make_request(definition, Call(definition.name, {"M": 8, "E": 16, "K": 4}, scalars={"top_k": 2}), gpu="cpu")


def test_outputs_are_allocated_by_the_scalar(published):
    assert allocate_of(published.definition("best"))(torch.zeros(8, 16), 3).shape == (8, 3)
