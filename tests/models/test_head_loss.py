"""The head and the loss of a language model as one kernel, in training without logits: the steps of stock, and its refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from raising import raises

from tilegym_db import Catalog, patch, patched
from tilegym_db.errors import UsageError
from tilegym_db.models.parts.head_loss import (
    CHANGED,
    EVALUATION,
    FROZEN_SINCE,
    HAS_BIAS,
    NO_GRADIENT,
    NO_PLAIN_HEAD,
    NOTHING_TRAINED,
    OTHER_HEAD,
    SCALED_LATER,
    TRAINED_SINCE,
)
from tilegym_db.models.parts.loss import OTHER_LABELS, OTHER_LOSS
from tilegym_db.models.report import CallSiteReport

pytestmark = pytest.mark.sweep

OP = "fused_linear_cross_entropy"
OF_FROZEN = "fused_linear_cross_entropy_x"
OPTIONS: dict[str, Any] = {"ops": (OP,), "skip_logits": True}
MODELS = ["llama", "qwen3", "gemma3", "mistral", "phi3", "qwen3_moe", "gpt_oss"]
BF16 = torch.bfloat16
CHUNKED = """
    import torch

    total = torch.zeros(weight.shape, dtype=torch.float32)
    for rows in torch.arange(len(labels)).split(8):
        learned = labels[rows] != ignore_index
        logits = (hidden[rows] @ weight.T).float()
        label = torch.where(learned, labels[rows], 0)
        scores = torch.log_softmax(logits, dim=-1)
        loss[rows] = torch.where(learned, -scores.gather(-1, label[:, None])[:, 0], 0.0)
        grad = torch.exp(scores)
        grad[torch.arange(len(rows)), label] -= 1
        grad = (grad * torch.where(learned, grad_loss[rows], 0.0)[:, None]).to(hidden.dtype)
        grad_hidden[rows] = grad @ weight
        total += grad.float().T @ hidden[rows].float()
    grad_weight.copy_(total)
"""
"""A kernel that never holds all logits: it takes eight tokens at a time."""


@pytest.fixture
def chunked(shop: Any) -> Catalog:
    """Return a catalog with that kernel, published for the CPU."""
    catalog: Catalog = shop.offer(CHUNKED, ops=(OP,))
    return catalog


def step(model: Any, ids: torch.Tensor, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step, and forget the gradients."""
    model.zero_grad()
    loss = model(ids, **{"labels": ids, **given}).loss
    loss.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def error(found: Any, exact: Any) -> float:
    """Return the largest relative error of the loss and the gradients against those of a step in float32."""
    (loss, gradients), (want, wanted) = found, exact
    assert gradients.keys() == wanted.keys()
    errors = [abs(float(loss) - float(want)) / max(1e-9, abs(float(want)))]
    for name, value in wanted.items():
        errors.append(float((gradients[name].double() - value).norm() / value.norm().clamp_min(1e-30)))
    return max(errors)


def assert_as_good_as_stock(found: Any, stock: Any, exact: Any) -> None:
    assert all(found[1][name].dtype == value.dtype for name, value in stock[1].items())
    assert error(found, exact) <= 1.1 * error(stock, exact) + 1e-3


def site_of(handle: Any) -> CallSiteReport:
    (site,) = (site for site in handle.report().sites if site.kind == "head_loss")
    return site


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    labels[:, :4] = -100
    return labels


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_logits_is_that_of_stock(
    name: str, tied: bool, chunked: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, BF16, tie_word_embeddings=tied).train(), prompt(3)
    labels = labels_of(ids)
    stock, exact = step(model, ids, labels=labels), step(copy.deepcopy(model).float(), ids, labels=labels)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        found = step(model, ids, labels=labels)
        assert model(ids, labels=labels).logits is None
    assert handle.report().hits()[OP] == 2
    assert_as_good_as_stock(found, stock, exact)
    assert step(model, ids, labels=labels)[0] == stock[0]


@pytest.fixture
def llama(build: Any, prompt: Any) -> tuple[Any, torch.Tensor]:
    """Return a model in training, and prompts for it."""
    return build("llama", BF16).train(), prompt(2)


@pytest.mark.parametrize(
    "given",
    [{"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}, {"unknown_option": 3}, {"use_cache": False}],
    ids=["items", "items as a tensor", "options", "no cache"],
)
def test_arguments_mean_what_they_mean_in_stock(given: Any, chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    stock, exact = step(model, ids, **given), step(copy.deepcopy(model).float(), ids, **given)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        found = step(model, ids, **given)
    assert_as_good_as_stock(found, stock, exact)
    assert handle.report().hits()[OP] == 1


def test_shifted_labels_are_not_shifted_again(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    given = {"shift_labels": ids.roll(-1, dims=1)}
    stock, exact = step(model, ids, **given), step(copy.deepcopy(model).float(), ids, **given)
    with patched(model, catalog=chunked, **OPTIONS):
        assert_as_good_as_stock(step(model, ids, **given), stock, exact)


def test_nothing_learned_is_nan_without_gradients(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    labels = torch.full_like(ids, -100)
    stock = step(model, ids, labels=labels)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        loss, gradients = step(model, ids, labels=labels)
    assert handle.report().hits()[OP] == 1
    assert stock[0].isnan()
    assert loss.isnan()
    for name, value in stock[1].items():
        torch.testing.assert_close(gradients[name], value, equal_nan=True)


def test_one_token_is_learned_as_by_stock(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    labels = torch.full_like(ids, -100)
    labels[1, -1] = 5
    stock, exact = step(model, ids, labels=labels), step(copy.deepcopy(model).float(), ids, labels=labels)
    with patched(model, catalog=chunked, **OPTIONS):
        assert_as_good_as_stock(step(model, ids, labels=labels), stock, exact)


def test_accumulated_gradients_are_those_of_the_batch(chunked: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("llama", BF16).train(), prompt(4)

    def accumulated(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        for part in ids.split(2):
            loss = model(part, labels=part, num_items_in_batch=4 * 8).loss
            (loss / 3).backward()  # a scale that is no power of two
        return loss.detach(), {name: value.grad.clone() for name, value in model.named_parameters()}

    stock, exact = accumulated(model), accumulated(copy.deepcopy(model).float())
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        assert_as_good_as_stock(accumulated(model), stock, exact)
    assert handle.report().hits()[OP] == 2


def test_autocast_trains_float32_weights_as_stock(chunked: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    exact = step(model, ids)
    with torch.autocast("cpu", BF16):
        stock = step(model, ids)
        with patched(model, catalog=chunked, **OPTIONS) as handle:
            found = step(model, ids)
    assert found[0].dtype == torch.float32
    assert_as_good_as_stock(found, stock, exact)
    assert handle.report().hits()[OP] == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_train_as_stock(reentrant: bool, chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    given = {"use_cache": False}
    stock, exact = step(model, ids, **given), step(copy.deepcopy(model).float(), ids, **given)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        assert_as_good_as_stock(step(model, ids, **given), stock, exact)
    assert handle.report().hits()[OP] == 1


def same_step(model: Any, stock: Any, ids: torch.Tensor, **given: Any) -> bool:
    loss, gradients = step(model, ids, **given)
    return bool(torch.equal(loss, stock[0])) and all(torch.equal(gradients[k], v) for k, v in stock[1].items())


def test_without_the_option_the_output_is_that_of_stock(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    stock = model(ids, labels=ids)
    with patched(model, catalog=chunked, ops=(OP,)) as handle:
        assert torch.equal(model(ids, labels=ids).logits, stock.logits)
    assert "head_loss" not in {site.kind for site in handle.report().sites}  # only then is it a part of the report


def test_a_patch_in_inference_mode_serves_steps_after_it(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    with torch.inference_mode():
        handle = patch(model, catalog=chunked, **OPTIONS)
    step(model, ids)
    assert handle.report().hits()[OP] == 1
    handle.unpatch()


@pytest.mark.parametrize(("reason", "labelled"), [(EVALUATION, True), (NO_GRADIENT, True), ("", False)])
def test_outputs_that_need_logits_have_them(reason: str, labelled: bool, chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    model.train(reason != EVALUATION)
    given = {"labels": ids} if labelled else {}
    with torch.set_grad_enabled(reason != NO_GRADIENT):
        want = model(ids, **given).logits
        with patched(model, catalog=chunked, **OPTIONS) as handle:
            found = model(ids, **given).logits
    assert type(found) is torch.Tensor
    assert torch.equal(found, want)
    assert site_of(handle).bypassed == ({reason: 1} if reason else {})


def test_a_tuple_keeps_its_logits(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    want = model(ids, labels=ids, return_dict=False)
    with patched(model, catalog=chunked, **OPTIONS):
        found = model(ids, labels=ids, return_dict=False)
    assert len(found) == len(want)
    torch.testing.assert_close(found[0], want[0], rtol=1e-2, atol=0)


def test_positional_labels_are_seen(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        model(ids, None, None, None, None, ids)
    assert handle.report().hits()[OP] == 1


def frozen(model: Any) -> None:
    model.lm_head.requires_grad_(False)


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def resized(model: Any) -> None:
    model.lm_head = torch.nn.Linear(64, 96, bias=True, dtype=BF16)


def with_other_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().square().mean()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(frozen, FROZEN_SINCE), (hooked, OTHER_HEAD), (resized, OTHER_HEAD), (with_other_loss, OTHER_LOSS)],
)
def test_what_changes_after_the_patch_trains_as_stock(
    change: Any, reason: str, chunked: Catalog, build: Any, prompt: Any
) -> None:
    ids, model = prompt(2), build("llama", BF16).train()
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        torch.manual_seed(0)
        change(model)
        found = step(model, ids)
    assert site_of(handle).bypassed == {reason: 1}
    assert handle.report().hits()[OP] == 0
    assert same_step(model, found, ids)


def test_float16_is_left_to_stock(chunked: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("llama", torch.float16).train(), prompt(2)
    stock = step(model, ids)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        assert same_step(model, stock, ids)
    assert site_of(handle).bypassed == {SCALED_LATER: 1}


def test_fewer_logits_than_labels_raise_as_stock(chunked: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("llama", BF16).train(), prompt(1)
    with pytest.raises(ValueError, match="batch_size") as stock:
        step(model, ids, logits_to_keep=3)
    with patched(model, catalog=chunked, **OPTIONS) as handle, pytest.raises(ValueError, match="batch_size") as found:
        step(model, ids, logits_to_keep=3)
    assert str(found.value) == str(stock.value)
    assert site_of(handle).bypassed == {OTHER_LABELS: 1}


@pytest.mark.parametrize("prefix", ["Gemma2", "Cohere", "Granite"])
def test_changed_logits_train_as_stock(prefix: str, chunked: Catalog, prompt: Any) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    config = getattr(transformers, f"{prefix}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model, ids = getattr(transformers, f"{prefix}ForCausalLM")(config).to(BF16).train(), prompt(2)
    stock, logits = step(model, ids), model(ids).logits
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        assert same_step(model, stock, ids)
        assert torch.equal(model(ids, labels=ids).logits, logits)
    assert site_of(handle).bypassed == {CHANGED: 2}


def test_a_head_with_a_bias_stays_stock(chunked: Catalog, prompt: Any) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1}
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**sizes, num_attention_heads=4)).to(BF16).train()
    with patched(model, catalog=chunked, skip_logits=True) as handle:
        assert model(prompt(1), labels=prompt(1)).logits is not None
    assert site_of(handle).reason == HAS_BIAS


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank update beside it, as PEFT makes one."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = base.requires_grad_(False), base.weight
        self.lora_A = torch.nn.Linear(base.in_features, 4, bias=False, dtype=BF16)
        self.lora_B = torch.nn.Linear(4, base.out_features, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return found


@pytest.mark.parametrize("before", [True, False], ids=["before the patch", "after it"])
def test_an_adapter_on_the_head_trains_as_stock(before: bool, chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    if before:
        model.lm_head = Adapted(model.lm_head)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        if not before:
            model.lm_head = Adapted(model.lm_head)
        found = step(model, ids)
    assert same_step(model, found, ids)
    assert "lm_head.lora_A.weight" in found[1]
    site = site_of(handle)
    assert (site.reason, site.bypassed) == ((NO_PLAIN_HEAD.format("Adapted"), {}) if before else ("", {OTHER_HEAD: 1}))


@pytest.fixture
def frozen_kernels(shop: Any) -> Catalog:
    """Return a catalog with a kernel for frozen heads, published for the CPU."""
    catalog: Catalog = shop.offer(ops=(OF_FROZEN,))
    return catalog


FROZEN_OPTIONS: dict[str, Any] = {"ops": (OF_FROZEN,), "skip_logits": True}


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_head_trains_what_is_before_it_without_logits(
    name: str, frozen_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, BF16, tie_word_embeddings=False).train(), prompt(3)
    model.lm_head.requires_grad_(False)
    labels = labels_of(ids)
    stock, exact = step(model, ids, labels=labels), step(copy.deepcopy(model).float(), ids, labels=labels)
    with patched(model, catalog=frozen_kernels, **FROZEN_OPTIONS) as handle:
        found = step(model, ids, labels=labels)
        assert model(ids, labels=labels).logits is None
    assert handle.report().hits()[OF_FROZEN] == 2
    assert_as_good_as_stock(found, stock, exact)


def with_adapters(model: Any) -> None:
    model.requires_grad_(False)
    layer = model.model.layers[0].self_attn
    layer.q_proj = Adapted(layer.q_proj)


def test_adapters_elsewhere_train_without_logits(frozen_kernels: Catalog, llama: Any) -> None:
    model, ids = llama
    with_adapters(model)
    stock, exact = step(model, ids), step(copy.deepcopy(model).float(), ids)
    with patched(model, catalog=frozen_kernels, **FROZEN_OPTIONS) as handle:
        found = step(model, ids)
    assert set(found[1]) == {f"model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"}
    assert_as_good_as_stock(found, stock, exact)
    assert handle.report().hits()[OF_FROZEN] == 1


def test_a_head_that_trains_after_the_patch_is_left_to_stock(frozen_kernels: Catalog, llama: Any) -> None:
    model, ids = llama
    with_adapters(model)
    with patched(model, catalog=frozen_kernels, **FROZEN_OPTIONS) as handle:
        model.lm_head.requires_grad_(True)
        found = step(model, ids)
    assert same_step(model, found, ids)
    assert site_of(handle).bypassed == {TRAINED_SINCE: 1}


def test_a_model_that_trains_nothing_is_left_to_stock(frozen_kernels: Catalog, llama: Any) -> None:
    model, ids = llama
    model.requires_grad_(False)
    stock = model(ids, labels=ids).loss
    with patched(model, catalog=frozen_kernels, **FROZEN_OPTIONS) as handle:
        assert torch.equal(model(ids, labels=ids).loss, stock)
    assert site_of(handle).bypassed == {NOTHING_TRAINED: 1}


def test_a_call_without_a_kernel_is_that_of_stock(shop: Any, llama: Any) -> None:
    model, ids = llama
    stock = model(ids, labels=ids)
    with patched(model, catalog=shop.offer(CHUNKED, ops=(OP,), smallest=4000), **OPTIONS) as handle:
        found = model(ids, labels=ids)
    assert torch.equal(found.loss, stock.loss)
    assert torch.equal(found.logits, stock.logits)
    assert handle.report().hits()[OP] == 0


def test_without_its_kernel_the_loss_keeps_its_own(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("llama", BF16).train(), prompt(2)
    both = ("cross_entropy", "cross_entropy_backward", OP)
    catalog = shop.offer(ops=both, smallest_of=((OP, 4000),))
    with patched(model, catalog=catalog, skip_logits=True) as handle:
        step(model, ids)
    hits = handle.report().hits()
    assert (hits["cross_entropy"], hits["cross_entropy_backward"], hits[OP]) == (1, 1, 0)


def test_both_losses_are_patched_and_the_head_comes_first(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("llama", BF16).train(), prompt(2)
    cls, function = type(model), model.loss_function
    catalog = shop.offer(ops=("cross_entropy", "cross_entropy_backward", OP))
    with patched(model, catalog=catalog, skip_logits=True) as handle:
        step(model, ids)
        assert type(copy.deepcopy(model)) is cls
        assert type(model.lm_head) is torch.nn.Linear
    hits = handle.report().hits()
    assert (hits["cross_entropy"], hits[OP]) == (0, 1)
    assert type(model) is cls
    assert model.loss_function is function


def test_a_second_derivative_is_refused(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    with patched(model, catalog=chunked, **OPTIONS):
        loss = model(ids, labels=ids).loss
        with raises(UsageError, "second_derivative_absent", "skip_logits"):
            torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


def test_a_backward_may_run_twice(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    with patched(model, catalog=chunked, **OPTIONS):
        loss = model(ids, labels=ids).loss
        first, second = (torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_forward_that_raises_leaves_nothing_behind(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    with patched(model, catalog=chunked, **OPTIONS):
        with pytest.raises(ValueError, match="batch_size"):
            step(model, ids, logits_to_keep=3)
        assert type(model.lm_head) is torch.nn.Linear
        assert type(model(ids).logits) is torch.Tensor


@pytest.mark.turn("tilegym_db/models/parts/")  # compilation; eager code is compared daily
def test_compiled_training_is_stock(chunked: Catalog, llama: Any) -> None:
    model, ids = llama
    stock = model(ids, labels=ids)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(ids, labels=ids)
    assert torch.equal(found.loss, stock.loss)
    assert torch.equal(found.logits, stock.logits)
    assert handle.report().hits()[OP] == 0
    torch.compiler.reset()


def test_a_read_of_the_logits_inside_the_forward_is_right(chunked: Catalog, llama: Any) -> None:
    model, ids = llama

    class Clamping(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
            logits.clamp_(max=0.1)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model.__class__ = Clamping
    stock = step(model, ids)
    with patched(model, catalog=chunked, **OPTIONS) as handle:
        assert same_step(model, stock, ids)
    assert site_of(handle).bypassed == {CHANGED: 1}
