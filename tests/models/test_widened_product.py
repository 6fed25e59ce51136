"""Products in float32 of half precision operands: kernels read both as they are, and other code runs as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tilegym_db import patched
from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD
from tilegym_db.models.parts import widened_product

OP = "gemm_widened"
ROUTER = "topk_sigmoid_bias_groups"
TOKENS = {"max_new_tokens": 4, "do_sample": False}


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == widened_product.KIND)
    return found


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_scores_of_a_router_give_the_bits_of_stock(name: str, shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(name, torch.bfloat16), prompt(2, 12)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits()[OP] == row(handle).modules > 0
    assert not row(handle).bypassed
    assert torch.equal(logits(model, ids), stock)


def router_of(model: Any) -> Any:
    return next(module for module in model.modules() if type(module).__name__ == "DeepseekV3TopkRouter")


def test_a_product_and_the_choice_after_it_are_both_served(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2, 12)
    router = router_of(model)
    router.e_score_correction_bias = router.e_score_correction_bias.float()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP, ROUTER)), ops=[OP, ROUTER]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits() == {OP: 1, ROUTER: 1}


def test_operands_of_two_dtypes_keep_the_product_of_stock(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2, 12)
    router_of(model).float()
    stock = logits(model, ids)
    router_of(model).to(torch.bfloat16)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        router_of(model).float()
        assert torch.equal(logits(model, ids), stock)
    assert row(handle).bypassed == {widened_product.OTHER_DTYPES: 1}


def test_gradients_of_a_router_are_those_of_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
    assert row(handle).bypassed.keys() <= {NEEDS_GRAD, IN_TRAINING}
    assert not handle.report().hits()[OP]


def test_autocast_chooses_the_dtype_of_a_product(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
        with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
            assert torch.equal(model(ids).logits, stock)
    assert row(handle).bypassed.keys() == {AUTOCAST}


def test_tokens_of_a_patched_mixture_are_those_of_stock(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt()
    stock = model.generate(ids, **TOKENS)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(ids, **TOKENS), stock)
    assert handle.report().hits()[OP] == TOKENS["max_new_tokens"] * row(handle).modules


def other_products(self: Any, x: torch.Tensor) -> torch.Tensor:
    wide = torch.nn.functional.linear(x.float(), self.weight.float())
    return wide + torch.nn.functional.linear(x.float(), self.other.float())


def product_of_a_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(self.norm(x).float(), self.weight.float())


def product_of_doubles(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.to(torch.float64), self.weight.to(torch.float64))


@pytest.mark.parametrize("forward", [other_products, product_of_a_call, product_of_doubles])
def test_other_products_are_no_part(forward: Any) -> None:
    assert widened_product.product_of(forward) is None


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight.float())


class Doubled:
    @staticmethod
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.linear(x, weight)


class OfLocalName(Scores):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functional = Doubled
        return functional.linear(x.float(), self.weight.float())


class OfParameter(Scores):
    def forward(self, x: torch.Tensor, functional: Any = Doubled) -> torch.Tensor:
        return functional.linear(x.float(), self.weight.float())


class OfReboundModule(Scores):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        self = x
        return functional.linear(self.float(), weight.float())


class OfPositionalModule(Scores):
    def forward(self, /, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight.float())


class OfUnnamedModule(Scores):
    def forward(*given: Any) -> torch.Tensor:
        return functional.linear(given[1].float(), given[0].weight.float())


class OfInnerFunction(Scores):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = lambda x: functional.linear(x.float(), self.weight.float())  # noqa: E731
        return scores(x)


def hits_of(cls: type[Scores], shop: Any) -> int:
    """Check that a patched module computes as before, and return its hits. The model has a usual one, too."""
    model, x = torch.nn.ModuleList([Scores(), cls()]).eval(), torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        stock = model[1](x)
        with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
            assert torch.equal(model[1](x), stock)
    return int(handle.report().hits()[OP])


@pytest.mark.parametrize("cls", [OfLocalName, OfParameter, OfReboundModule, OfPositionalModule, OfUnnamedModule])
def test_other_names_in_a_forward_keep_its_product(cls: type[Scores], shop: Any) -> None:
    assert hits_of(cls, shop) == 0


@pytest.mark.parametrize("cls", [Scores, OfInnerFunction])
def test_product_of_any_module_is_served(cls: type[Scores], shop: Any) -> None:
    assert hits_of(cls, shop) == 1


OTHER_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda weight: weight.t().contiguous().t(),
    "float16": torch.Tensor.half,
    "float32": torch.Tensor.float,
    "float64": torch.Tensor.double,
    "vector": lambda weight: weight[0],
    "sparse": lambda weight: weight.masked_fill(weight < 1, 0).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weight_of_another_kind_keeps_the_product(name: str, shop: Any) -> None:
    model, x = torch.nn.Sequential(Scores()).eval(), torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        model[0].weight = torch.nn.Parameter(OTHER_WEIGHTS[name](model[0].weight.detach()))
        assert torch.equal(model(x), functional.linear(x.float(), model[0].weight.float()))
    assert {*row(handle).bypassed} <= {widened_product.OTHER_DTYPES, widened_product.OTHER_WEIGHT}
    assert not handle.report().hits()[OP]


def test_weight_set_after_the_patch_is_read(shop: Any) -> None:
    model, x = torch.nn.Sequential(Scores()).eval(), torch.randn(2, 5, 64, dtype=torch.bfloat16)
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        for experts in (16, 4):
            model[0].weight = torch.nn.Parameter(torch.randn(experts, 64, dtype=torch.bfloat16))
            assert torch.equal(model(x), functional.linear(x.float(), model[0].weight.float()))
        weights_of_call = {"0.weight": torch.ones(3, 64, dtype=torch.bfloat16)}
        assert torch.func.functional_call(model, weights_of_call, (x,)).shape == (2, 5, 3)
    assert handle.report().hits() == {OP: 3}


def test_compiled_and_exported_products_are_those_of_pytorch(shop: Any) -> None:
    model, x = torch.nn.Sequential(Scores()).eval(), torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        stock = functional.linear(x.float(), model[0].weight.float())
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), stock)
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), stock)
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert all(name.startswith("aten.") for name in called)
    assert not handle.report().hits()[OP]


def test_model_in_float32_gets_no_wrapper(shop: Any) -> None:
    model = torch.nn.Sequential(Scores()).float().eval()
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]):
        assert type(model[0]) is Scores
