"""Twenty steps of training, patched against stock: in a plain loop, by transformers' Trainer, and with LoRA adapters.

accelerate and peft are no dependencies: without them their tests are left out, and a loop of the same steps remains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from lora import adapted

from tilegym_db import Catalog, patch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.sweep]

STEPS = 20
ROWS, PARTS = 4, 2
NORMS, LAYERS = 5, 2
"""Of the tiny Llama."""

Losses = list[float]
# name -> (gradient checkpointing, parts of a step, autocast, how close the losses are)
WAYS: dict[str, tuple[bool, int, bool, float]] = {
    "plain": (False, 1, False, 1e-5),
    "checkpointed in parts": (True, PARTS, False, 1e-5),
    "autocast": (False, 1, True, 5e-3),
}


def rows_of(prompt: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and labels of a step; some tokens are ignored."""
    ids = prompt(ROWS, seed=step % 4)
    return ids, torch.where(ids % 5 == 0, -100, ids)


def loop(model: Any, prompt: Any, way: str) -> Losses:
    """Take the steps of the Trainer: mean over the learned tokens of all parts, clipped gradients, AdamW."""
    is_checkpointed, parts, is_cast, _ = WAYS[way]
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for step in range(STEPS):
        ids, labels = rows_of(prompt, step)
        learned, total = (labels[:, 1:] != -100).sum(), 0.0
        for part, wanted in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext():
                loss = model(part, labels=wanted, num_items_in_batch=learned, use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_close(found: Losses, stock: Losses, rel: float) -> None:
    assert len(found) == len(stock) == STEPS
    assert found == pytest.approx(stock, rel=rel)
    assert stock[-1] < stock[0]


def gradient_calls(handle: Any) -> dict[str, int]:
    return {name: calls for name, calls in handle.report().hits().items() if calls and "_backward" in name}


@pytest.mark.parametrize("way", WAYS)
def test_loop_has_the_losses_of_stock(way: str, training_kernels: Catalog, build: Any, prompt: Any) -> None:
    _, parts, is_cast, rel = WAYS[way]
    stock = loop(build().train(), prompt, way)
    model = build().train()
    handle = patch(model, catalog=training_kernels)
    assert_close(loop(model, prompt, way), stock, rel)
    calls = STEPS * parts
    assert gradient_calls(handle) == {
        # Attention is served in training where nothing casts its inputs.
        **({} if is_cast else {"attention_prefill_backward": LAYERS * calls}),
        "cross_entropy_backward": calls,
        "rms_norm_backward": NORMS * calls,
        "swiglu_backward": LAYERS * calls,
        # Autocast gives heads in half precision and tables in float32, which no definition describes.
        **({} if is_cast else {"rope_neox_backward": LAYERS * calls}),
    }


@pytest.mark.turn("tilegym_db/resolver/training.py")  # runs of several steps; one step is compared daily
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", ["plain", "checkpointed in parts"])
def test_adapters_have_the_losses_of_stock(
    way: str, order: str, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    def trained(insert: Callable[[Any], Any], catalog: Catalog | None) -> tuple[Losses, Any]:
        model, handle = build().train(), None
        if catalog is not None and order == "before":
            handle = patch(model, catalog=catalog)
        wrapper = insert(model)
        if catalog is not None and order == "after":
            handle = patch(wrapper, catalog=catalog)
        return loop(wrapper, prompt, way), handle

    stock, _ = trained(adapted, None)
    found, handle = trained(adapted, training_kernels)
    assert_close(found, stock, WAYS[way][3])
    calls = STEPS * WAYS[way][1]
    hits = gradient_calls(handle)
    assert hits["cross_entropy_backward"] == calls
    assert hits["swiglu_backward"] == LAYERS * calls
    # Frozen norms pass a gradient on. The first one has nothing to pass it to, unless checkpointing lets the ids' rows need one.
    assert hits["rms_norm_backward_x"] == (NORMS - (way == "plain")) * calls


# -- transformers' Trainer --------------------------------------------------------------------------------------------


@pytest.fixture
def trainer_losses(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> Callable[[Any, str], Losses]:
    """Train a model by the Trainer: ``trainer_losses(model, way)``; left out without accelerate."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")

    def train(model: Any, way: str) -> Losses:
        is_checkpointed, parts, is_cast, _ = WAYS[way]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=ROWS // parts,
            gradient_accumulation_steps=parts, gradient_checkpointing=is_checkpointed, bf16=is_cast,
            learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, seed=1,
        )  # fmt: skip
        data = []
        for step in range(4):
            ids, labels = rows_of(prompt, step)
            data += [{"input_ids": one, "labels": wanted} for one, wanted in zip(ids, labels, strict=True)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return train


@pytest.mark.parametrize("way", WAYS)
def test_trainer_has_the_losses_of_stock(
    way: str, training_kernels: Catalog, build: Any, trainer_losses: Callable[[Any, str], Losses]
) -> None:
    stock = trainer_losses(build().train(), way)
    model = build().train()
    handle = patch(model, catalog=training_kernels)
    assert_close(trainer_losses(model, way), stock, max(1e-4, WAYS[way][3]))  # the Trainer rounds what it logs
    hits = gradient_calls(handle)
    assert hits["cross_entropy_backward"] == STEPS * WAYS[way][1]
    assert hits["rms_norm_backward"] == NORMS * STEPS * WAYS[way][1]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", ["plain", "checkpointed in parts"])
def test_trainer_of_a_peft_model_has_the_losses_of_stock(
    way: str, order: str, training_kernels: Catalog, build: Any, trainer_losses: Callable[[Any, str], Losses]
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM"
    )

    def wrapped(model: Any) -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(model, config)

    stock = trainer_losses(wrapped(build().train()), way)
    model = build().train()
    if order == "before":
        handle = patch(model, catalog=training_kernels)
        model = wrapped(model)
    else:
        model = wrapped(model)
        handle = patch(model, catalog=training_kernels)
    assert_close(trainer_losses(model, way), stock, 1e-4)
    hits = gradient_calls(handle)
    assert hits["cross_entropy_backward"] == STEPS * WAYS[way][1]
    assert hits["swiglu_backward"] == LAYERS * STEPS * WAYS[way][1]
