"""The layers: gradients in float64, agreement with plain PyTorch and transformers, and what a training run does to a module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilegym_db.layers import EngramGateLayer, HyperConnection, HyperHead, MHCPipeline

TOKENS, STREAMS, SIZE = 5, 4, 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def varied(layer: nn.Module, seed: int = 1) -> Any:
    """The layer with parameters that are neither ones nor zeros."""
    source = generator(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=source))
    return layer


def gradients(layer: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tracked = [value.clone().requires_grad_() for value in inputs]
    out = layer(*tracked)
    found = torch.autograd.grad(
        (out.float() * torch.arange(out.numel()).view(out.shape)).sum(), [*tracked, *layer.parameters()]
    )
    return out.detach(), list(found)


class Mixed(nn.Module):
    """One sublayer with everything around it, so that all coefficients have gradients."""

    def __init__(self, streams: int, size: int) -> None:
        super().__init__()
        self.connection = HyperConnection(streams, size, sinkhorn_steps=3, eps=1e-3)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        post, comb, entering = self.connection(streams)
        return self.connection.write_back(torch.tanh(entering), streams, (post, comb))


LAYERS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int, int], tuple[tuple[int, ...], ...]]]] = {
    "hyper-connection": (Mixed, lambda tokens, streams, size: ((tokens, streams, size),)),
    "head": (HyperHead, lambda tokens, streams, size: ((2, tokens, streams, size),)),
    "pipeline": (
        lambda streams, size: MHCPipeline(streams, size, [nn.Linear(size, size), nn.Tanh()], sinkhorn_steps=2),
        lambda tokens, streams, size: ((2, tokens, size),),
    ),
    "engram gate": (
        lambda streams, size: EngramGateLayer(size, streams),
        lambda tokens, streams, size: ((tokens, streams, size), (tokens, streams, size), (tokens, size)),
    ),
}
"""How a layer is built from streams and size, and the shapes of its inputs from tokens, streams and size."""


def make(
    name: str, tokens: int, streams: int, size: int
) -> tuple[Any, Callable[[torch.dtype], tuple[torch.Tensor, ...]]]:
    build, shapes = LAYERS[name]
    torch.manual_seed(0)

    def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        found = enumerate(shapes(tokens, streams, size))
        return tuple(random(*shape, dtype=dtype, seed=number + 1 if number else 0) for number, shape in found)

    return varied(build(streams, size)), inputs


@pytest.fixture(params=sorted(LAYERS))
def made(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return make(request.param, TOKENS, STREAMS, SIZE)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_gradients_are_right_in_float64(name: str) -> None:
    layer, inputs = make(name, tokens=2, streams=2, size=3)  # every element of every parameter is moved on its own
    layer = layer.double()
    names = [name for name, _ in layer.named_parameters()]

    def run(*values: torch.Tensor) -> torch.Tensor:
        given, parameters = values[: -len(names)], dict(zip(names, values[-len(names) :], strict=True))
        return torch.func.functional_call(layer, parameters, given)

    values = [*inputs(torch.float64), *layer.parameters()]
    values = [value.detach().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values, atol=1e-4)


def test_float32_agrees_with_float64_forward_and_back(made: tuple[Any, Any]) -> None:
    layer, inputs = made
    found = gradients(layer, *inputs(torch.float32))
    want = gradients(copy.deepcopy(layer).double(), *inputs(torch.float64))
    for value, expected in zip([found[0], *found[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 1e-6)


def test_without_gradients_it_computes_the_same(made: tuple[Any, Any]) -> None:
    layer, inputs = made
    given = inputs(torch.bfloat16)
    layer = layer if isinstance(layer, Mixed | HyperHead) else layer.to(torch.bfloat16)
    with torch.no_grad():
        alone = layer(*given)
    assert alone.dtype == torch.bfloat16
    torch.testing.assert_close(alone, layer(*given).detach(), rtol=2e-2, atol=2e-2)


def test_state_is_saved_and_loaded_and_a_module_copied(made: tuple[Any, Any]) -> None:
    layer, inputs = made
    given = inputs(torch.float32)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again, fresh = torch.load(file, weights_only=False), varied(copy.deepcopy(layer), seed=9)
    assert not torch.equal(fresh(*given), layer(*given))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(*given), layer(*given))
    assert torch.equal(again(*given), layer(*given))


def test_checkpointing_gives_the_same_gradients(made: tuple[Any, Any]) -> None:
    layer, inputs = made

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, *values, use_reentrant=False)

    given = inputs(torch.float32)
    for value, expected in zip(gradients(Checkpointed(), *given)[1], gradients(layer, *given)[1], strict=True):
        assert torch.equal(value, expected)


def test_autocast_leaves_the_coefficients_in_float32(made: tuple[Any, Any]) -> None:
    layer, inputs = made
    given = inputs(torch.float32)
    if isinstance(layer, MHCPipeline):
        layer.sublayers[0] = nn.Tanh()  # a linear layer computes in half precision under autocast, as it should
    plain = gradients(layer, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(layer, *given)
    for value, expected in zip([found[0], *found[1]], [plain[0], *plain[1]], strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.turn("tilegym_db/layers.py", "tilegym_db/ops/")  # compilation; eager code is compared daily
@pytest.mark.slow
def test_it_compiles_whole_with_its_gradients(made: tuple[Any, Any]) -> None:
    layer, inputs = made
    given = inputs(torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want = gradients(layer, *given)
    tracked = [value.clone().requires_grad_() for value in given]
    out = compiled(*tracked)
    weights = torch.arange(out.numel()).view(out.shape)
    found = torch.autograd.grad((out.float() * weights).sum(), [*tracked, *layer.parameters()])
    for value, expected in zip([out.detach(), *found], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_compiled_reference_returns_separate_tensors() -> None:
    """A last cast that changes nothing returns its input; PyTorch 2.11 then hands the gradient of the output to that step."""
    bodies: dict[str, int] = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        for name, body in graph.named_modules():
            bodies[name] = sum(node.target == "clone" for node in body.graph.nodes)
        return graph

    torch.compiler.reset()
    layer = torch.compile(EngramGateLayer(SIZE), backend=backend, fullgraph=True)
    states = torch.randn(3, 4, SIZE)  # in float32, which its Definition does not list
    layer(states, states.clone(), torch.randn(3, SIZE))
    assert bodies == {"": 0, "fwd_body_0": 5, "bwd_body_0": 5}  # all outputs of either reference


def test_one_sublayer_is_deepseek_v4s_hyper_connection() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=SIZE, hc_mult=STREAMS, num_hidden_layers=1)
    theirs = modeling.DeepseekV4HyperConnection(config)
    head = modeling.DeepseekV4HyperHead(config)
    for parameter in (*theirs.parameters(), *head.parameters()):
        nn.init.normal_(parameter, std=0.3)
    ours = HyperConnection(
        STREAMS, SIZE, sinkhorn_steps=config.hc_sinkhorn_iters, norm_eps=config.rms_norm_eps, eps=config.hc_eps
    )
    our_head = HyperHead(STREAMS, SIZE, norm_eps=config.rms_norm_eps, eps=config.hc_eps)
    ours.load_state_dict(theirs.state_dict())
    our_head.load_state_dict(head.state_dict())
    streams = random(2, TOKENS, STREAMS, SIZE)
    for found, expected in zip(ours(streams), theirs(streams), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_head(streams), head(streams), rtol=1e-5, atol=1e-6)


def test_pipeline_without_sublayers_keeps_the_shape() -> None:
    x = random(3, SIZE)
    out = MHCPipeline(2, SIZE)(x)
    assert out.shape == x.shape
    assert MHCPipeline(2, SIZE)(x[:0]).shape == (0, SIZE)


def test_training_moves_every_parameter() -> None:
    torch.manual_seed(0)
    layer = varied(MHCPipeline(STREAMS, SIZE, [nn.Linear(SIZE, SIZE)]))
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = random(16, SIZE)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (layer(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in layer.state_dict().items())
