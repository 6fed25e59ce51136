"""The loss of a language model by kernels: the numbers and gradients of stock, and stock code for every other loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from tilegym_db import Catalog, patched
from tilegym_db.models.parts.loss import OTHER_LABELS, OTHER_LOSS, OTHER_VOCABULARY
from tilegym_db.models.report import CallSiteReport

pytestmark = pytest.mark.sweep

OPS = ("cross_entropy",)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def step(model: Any, ids: torch.Tensor, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(ids, **{"labels": ids, **given}).loss
    loss.backward()
    return loss.detach(), {name: value.grad.clone() for name, value in model.named_parameters()}


def assert_same(found: Any, stock: Any, dtype: torch.dtype = torch.float32) -> None:
    (loss, gradients), (want, wanted) = found, stock
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    for name, value in wanted.items():
        assert gradients[name].dtype == value.dtype
        error = (gradients[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-30)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {float(error):.2g}"


def site_of(handle: Any) -> CallSiteReport:
    (site,) = (site for site in handle.report().sites if site.kind == "loss")
    return site


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_and_gradients_are_those_of_stock(
    dtype: torch.dtype, training: bool, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build("llama", dtype).train(training), prompt(3)
    labels = ids.clone()
    labels[:, :4] = -100
    stock = step(model, ids, labels=labels)
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        assert_same(step(model, ids, labels=labels), stock, dtype)
    hits = handle.report().hits()
    assert (hits["cross_entropy"], hits["cross_entropy_backward"]) == (1, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": 11},
        {"num_items_in_batch": torch.tensor(11)},
        {"ignore_index": -100, "unknown_option": 3},
        {"labels": torch.full((2, 9), -100)},
    ],
    ids=["items", "items as a tensor", "options", "nothing learned"],
)
def test_arguments_are_those_of_stock(given: Any, training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    want = model.loss_function(model(ids).logits, given.get("labels", ids), 96, **_others(given))
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        found = model.loss_function(model(ids).logits, given.get("labels", ids), 96, **_others(given))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0, equal_nan=True)
    assert handle.report().hits()["cross_entropy"] == 1


def _others(given: Any) -> Any:
    return {name: value for name, value in given.items() if name != "labels"}


def test_shifted_labels_are_not_shifted_again(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    shifted = ids.roll(-1, dims=1)
    want = step(model, ids, shift_labels=shifted)
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        assert_same(step(model, ids, shift_labels=shifted), want)
    assert handle.report().hits()["cross_entropy_backward"] == 1


def test_accumulated_gradients_are_those_of_the_whole_batch(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(4)
    whole = step(model, ids)[1]
    model.zero_grad()
    with patched(model, catalog=training_kernels, ops=OPS):
        for part in ids.split(2):
            model(part, labels=part, num_items_in_batch=4 * 8).loss.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, whole[name], rtol=1e-4, atol=1e-6)


def test_autocast_keeps_the_dtypes_of_stock(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    with torch.autocast("cpu", torch.bfloat16):
        stock = step(model, ids)
    with patched(model, catalog=training_kernels, ops=OPS) as handle, torch.autocast("cpu", torch.bfloat16):
        found = step(model, ids)
    assert found[0].dtype == stock[0].dtype
    assert_same(found, stock, torch.bfloat16)
    assert handle.report().hits()["cross_entropy_backward"] == 1


def test_loss_without_gradients_needs_no_backward(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt(2)
    with torch.no_grad():
        want = model(ids, labels=ids).loss
        with patched(model, catalog=kernels, ops=OPS) as handle:
            torch.testing.assert_close(model(ids, labels=ids).loss, want, rtol=1e-6, atol=0)
    assert handle.report().hits()["cross_entropy"] == 1


def test_without_a_verified_backward_training_is_stock(kernels: Catalog, shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    stock = step(model, ids)
    with patched(model, catalog=shop.offer(without=("cross_entropy_backward",)), ops=OPS) as handle:
        loss, gradients = step(model, ids)
    assert torch.equal(loss, stock[0])
    assert all(torch.equal(gradients[name], value) for name, value in stock[1].items())
    assert handle.report().hits()["cross_entropy"] == 0


def test_masked_labels_are_not_shifted(training_kernels: Catalog) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ModernBertConfig(**sizes, intermediate_size=48, pad_token_id=0)
    model = transformers.ModernBertForMaskedLM(config).eval()
    ids = torch.randint(1, 96, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.5, ids, -100)

    def losses() -> torch.Tensor:
        return model.loss_function(model(ids).logits, labels, 96)

    stock = losses()
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        torch.testing.assert_close(losses(), stock, rtol=1e-6, atol=0)
    assert handle.report().hits()["cross_entropy"] == 1


def test_another_loss_stays_stock_with_its_reason(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)

    def own(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return logits.float().square().mean()

    model.loss_function = own
    stock = step(model, ids)
    with patched(model, catalog=training_kernels) as handle:
        assert torch.equal(model(ids, labels=ids).loss, stock[0])
    assert "its loss own is no variant that is known" in site_of(handle).reason
    del model._loss_function
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        model.loss_function = own
        assert torch.equal(model(ids, labels=ids).loss, stock[0])
    assert site_of(handle).bypassed == {OTHER_LOSS: 1}


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"vocab_size": 48}, OTHER_VOCABULARY), ({"labels": torch.zeros(2, 9, dtype=torch.int32)}, OTHER_LABELS)],
)
def test_calls_of_another_form_raise_as_stock(
    given: Any, reason: str, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    logits = model(ids).logits
    given = {"labels": ids, "vocab_size": 96, **given}
    with patched(model, catalog=training_kernels, ops=OPS) as handle, pytest.raises((RuntimeError, ValueError)):
        model.loss_function(logits, **given)
    assert site_of(handle).bypassed == {reason: 1}


def test_unpatched_and_copied_models_have_the_property_of_stock(
    training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    cls, function, stock = type(model), model.loss_function, step(model, ids)
    with patched(model, catalog=training_kernels, ops=OPS):
        assert type(copy.deepcopy(model)) is cls
        assert type(model) is not cls
    assert type(model) is cls
    assert model.loss_function is function
    loss, gradients = step(model, ids)
    assert torch.equal(loss, stock[0])
    assert all(torch.equal(gradients[name], value) for name, value in stock[1].items())


def test_trainer_takes_the_steps_of_stock(
    training_kernels: Catalog, build: Any, prompt: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    ids = prompt(20)
    data = [{"input_ids": row, "labels": torch.where(row % 3 == 0, -100, row)} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, seed=1,
    )  # fmt: skip

    def losses(model: Any) -> list[float]:
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = losses(build().train())
    model = build().train()
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        assert losses(model) == pytest.approx(stock, rel=1e-4)
    assert len(stock) == 5
    assert handle.report().hits()["cross_entropy_backward"] == 10
