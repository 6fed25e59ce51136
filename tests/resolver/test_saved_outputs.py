"""In training, what a forward kernel gave and its backward names as saved reaches the backward kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.ops.function import operator_function
from tilegym_db.resolver.training import training_of

ROWS, FACTORS = {"shape": ["M", "N"], "dtype": "float32"}, {"shape": ["M"], "dtype": "float32"}
AXES = {"M": {"type": "var"}, "N": {"type": "var"}}
FORWARD = "import torch\n\n\ndef run(x):\n    size = x.abs().sum(-1)\n    return x * size[:, None], size\n"
# Not the derivative: it shows what it was given.
BACKWARD = "def run(x, size, grad_out):\n    return grad_out * size[:, None]\n"
MARKED = (
    "def run(x, out, size):\n    size.copy_(x.abs().sum(-1) + 1000)\n    out.copy_(x)\n",
    "def run(x, size, grad_out, grad_x):\n    grad_x.copy_(grad_out * size[:, None])\n",
)


@pytest.fixture
def training(shop: Any) -> Any:
    """The ways of an operator with a saved output, each with a kernel that marks what it writes."""
    shop.define("sized", axes=AXES, inputs={"x": ROWS}, outputs={"out": ROWS, "size": FACTORS}, reference=FORWARD)
    inputs, saved = {"x": ROWS, "size": FACTORS, "grad_out": ROWS}, ["size"]
    shop.define(
        "sized_backward",
        axes=AXES,
        inputs=inputs,
        outputs={"grad_x": ROWS},
        saved=saved,
        backward_of="sized",
        reference=BACKWARD,
    )
    entries = []
    for name, stock, kernel in (("sized", FORWARD, MARKED[0]), ("sized_backward", BACKWARD, MARKED[1])):
        shop.add(name, f"{name}_stock", stock, role="baseline", provides="stock", destination_passing_style=False)
        candidate = shop.candidate(shop.add(name, f"{name}_kernel", kernel))
        entries += [shop.entry(name, {"M": m, "N": 8}, [candidate]) for m in (1, 64)]
    shop.publish(entries)
    return training_of(shop.definition("sized"), shop.catalog)


def test_saved_output_of_the_kernel_reaches_the_backward(training: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out, size = training.ask((x,), training=True)
    assert float(size.detach().min()) >= 1000  # the kernel's own, not the reference's
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad, size[:, None].expand(4, 8))


def stated(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sum of both outputs: size is the sum of magnitudes, which the backward saves."""
    size = x.detach().abs().sum(-1)
    return size[:, None] + (x.detach().sum(-1) + 1)[:, None] * x.detach().sign()


def test_gradient_of_a_saved_output_is_not_lost(shop: Any, training: Any) -> None:
    function = operator_function(shop.definition("sized"), shop.catalog)
    x = torch.randn(4, 8, requires_grad=True)
    out, size = function(x)
    assert float(size.detach().min()) >= 1000  # the kernel's own
    (grad,) = torch.autograd.grad(out.sum() + size.sum(), x, retain_graph=True)
    torch.testing.assert_close(grad, stated(x))
    (alone,) = torch.autograd.grad(size.sum(), x)
    torch.testing.assert_close(alone, x.detach().sign())


def test_second_derivative_passes_through_a_saved_output(training: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out, _ = training.ask((x,), training=True)
    (first,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 8 * x.detach().sign())


def test_saved_output_overwritten_before_backward_raises(training: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out, size = training.ask((x,), training=True)
    size.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_operator_function_has_the_gradients_of_kernels(shop: Any, training: Any) -> None:
    function = operator_function(shop.definition("sized"), shop.catalog)
    x = torch.randn(4, 8, requires_grad=True)
    out, size = function(x)
    assert float(size.detach().min()) >= 1000
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad, size[:, None].expand(4, 8))


def test_operator_without_a_kernel_has_those_of_autograd(shop: Any, training: Any) -> None:
    function = operator_function(shop.definition("sized"), shop.catalog)
    x = torch.randn(4, 9, requires_grad=True)  # nothing is published for nine columns
    out, size = function(x)
    (grad,) = torch.autograd.grad(out.sum() + size.sum(), x)
    torch.testing.assert_close(grad, stated(x))


def test_kernel_serves_the_gradient_of_a_sum_of_losses(shop: Any) -> None:
    """Autograd hands on one number, expanded over the rows, and no kernel is measured with that."""
    grad_loss = {"x": ROWS, "grad_loss": FACTORS}
    sources = {
        "squares": (
            "def run(x):\n    return (x * x).sum(-1)\n",
            "def run(x, loss):\n    loss.copy_((x * x).sum(-1))\n",
        ),
        "squares_backward": (
            "def run(x, grad_loss):\n    return 2 * x * grad_loss[:, None]\n",
            "def run(x, grad_loss, grad_x):\n    grad_x.fill_(7)\n",
        ),
    }
    shop.define("squares", axes=AXES, inputs={"x": ROWS}, outputs={"loss": FACTORS}, reference=sources["squares"][0])
    shop.define(
        "squares_backward",
        axes=AXES,
        inputs=grad_loss,
        outputs={"grad_x": ROWS},
        backward_of="squares",
        reference=sources["squares_backward"][0],
    )
    entries = []
    for name, (stock, kernel) in sources.items():
        shop.add(name, f"{name}_stock", stock, role="baseline", provides="stock", destination_passing_style=False)
        candidate = shop.candidate(shop.add(name, f"{name}_kernel", kernel))
        entries += [shop.entry(name, {"M": m, "N": 8}, [candidate]) for m in (1, 64)]
    shop.publish(entries)
    x = torch.randn(4, 8, requires_grad=True)
    operator_function(shop.definition("squares"), shop.catalog)(x).sum().backward()
    assert x.grad.eq(7).all()
